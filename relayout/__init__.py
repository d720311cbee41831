"""relayout rewrites safetensors checkpoints so that each tensor-parallel rank reads only its own bytes."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from relayout import transformers
    from relayout.commands.inspect import inspect
    from relayout.commands.restore import restore
    from relayout.commands.verify import verify
    from relayout.commands.warm import warm
    from relayout.conversion.run import Summary, convert, plan_conversion
    from relayout.errors import FormatError, PlanError, RelayoutError
    from relayout.loader import (
        CheckpointView,
        Explanation,
        Place,
        TensorSlice,
        explain,
        iter_load,
        load,
        open,
        safe_open,
    )

__all__ = [
    "CheckpointView",
    "Explanation",
    "FormatError",
    "Place",
    "PlanError",
    "RelayoutError",
    "Summary",
    "TensorSlice",
    "convert",
    "explain",
    "inspect",
    "iter_load",
    "load",
    "open",
    "plan_conversion",
    "restore",
    "safe_open",
    "transformers",
    "verify",
    "warm",
]

_HOMES = {
    "CheckpointView": "relayout.loader",
    "Explanation": "relayout.loader",
    "FormatError": "relayout.errors",
    "PlanError": "relayout.errors",
    "Place": "relayout.loader",
    "RelayoutError": "relayout.errors",
    "Summary": "relayout.conversion.run",
    "TensorSlice": "relayout.loader",
    "convert": "relayout.conversion.run",
    "explain": "relayout.loader",
    "inspect": "relayout.commands.inspect",
    "iter_load": "relayout.loader",
    "load": "relayout.loader",
    "open": "relayout.loader",
    "plan_conversion": "relayout.conversion.run",
    "restore": "relayout.commands.restore",
    "safe_open": "relayout.loader",
    "verify": "relayout.commands.verify",
    "warm": "relayout.commands.warm",
}


def __getattr__(name: str) -> Any:
    """Import each public name when it is first used, so that `import relayout` costs nothing."""
    if name == "transformers":
        return import_module("relayout.transformers")
    if name not in _HOMES:
        raise AttributeError(f"module 'relayout' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
