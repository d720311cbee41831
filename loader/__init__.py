"""The run-time half: reads one rank's bytes into one arena and returns tensors that are views of it."""

from relayout.loader.api import load

__all__ = ["load"]
