"""The `relayout` command."""
