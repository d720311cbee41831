"""Builds the documents as a site: `tools/run docs`."""
