"""Publishes outputs: a folder is staged beside its place and renamed; a prefix of a bucket is claimed and filled."""
