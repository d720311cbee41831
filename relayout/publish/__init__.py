"""Publishing of outputs: a folder is staged next to its path and renamed; a bucket prefix is claimed and filled."""
