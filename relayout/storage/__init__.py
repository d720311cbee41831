"""The only place with open(), fsync, O_DIRECT and calls of the C library. Imports `core`."""
