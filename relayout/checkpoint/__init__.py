"""What lies in a folder: a source checkpoint, its config.json, a converted one. Imports `format` and `storage`."""
