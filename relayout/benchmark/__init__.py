"""`bench`: times loads of a checkpoint on this machine with relayout and with other loaders."""
