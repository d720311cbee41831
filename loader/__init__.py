"""Loads one rank: reads its bytes into memory and returns tensors."""

from relayout.loader.api import iter_load, load
from relayout.loader.diagnose.explain import Explanation, explain
from relayout.loader.view import CheckpointView, Place, TensorSlice, safe_open
from relayout.loader.view import open_rank as open

__all__ = ["CheckpointView", "Explanation", "Place", "TensorSlice", "explain", "iter_load", "load", "open", "safe_open"]
