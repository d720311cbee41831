"""The local file system store: the only code that opens, writes and renames local files. Imports `core`."""
