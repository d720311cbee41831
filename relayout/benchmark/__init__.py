"""`bench`: times loads of a checkpoint on this machine, by relayout and by other loaders."""
