"""The `relayout` command. Imports every other package."""
