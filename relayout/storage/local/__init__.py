"""Local files: the only place that opens, writes and publishes them. Imports `core`."""
