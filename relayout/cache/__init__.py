"""The cache: a folder on the drive that keeps copies of remote files, and conversions of plain checkpoints."""
