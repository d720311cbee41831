"""The run-time half: reads one rank's bytes to where they belong and returns tensors."""

from relayout.loader.api import iter_load, load
from relayout.loader.diagnose.explain import explain
from relayout.loader.view import open_rank as open
from relayout.loader.view import safe_open

__all__ = ["explain", "iter_load", "load", "open", "safe_open"]
