"""Loads one rank: reads its bytes into memory and returns tensors."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relayout.loader.api import iter_load, load
    from relayout.loader.diagnose.explain import Explanation, explain
    from relayout.loader.in_place import apply
    from relayout.loader.view import CheckpointView, Place, TensorSlice, open, safe_open

__all__ = [
    "CheckpointView",
    "Explanation",
    "Place",
    "TensorSlice",
    "apply",
    "explain",
    "iter_load",
    "load",
    "open",
    "safe_open",
]

_HOMES = {
    "api": ("iter_load", "load"),
    "diagnose.explain": ("Explanation", "explain"),
    "in_place": ("apply",),
    "view": ("CheckpointView", "Place", "TensorSlice", "open", "safe_open"),
}


def __getattr__(name: str) -> Any:
    """Import each public name on first use: a load does not wait for what only `open` and `explain` need."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
