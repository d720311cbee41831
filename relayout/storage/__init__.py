"""Where files are: what a store is, and the stores there are. Imports `core`."""
