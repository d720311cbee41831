"""relayout rewrites safetensors checkpoints so that each tensor-parallel rank reads only its own bytes."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from relayout import transformers
    from relayout.commands.inspect import Inspection, inspect
    from relayout.commands.restore import Restored, restore
    from relayout.commands.verify import Difference, Report, verify
    from relayout.commands.warm import warm
    from relayout.conversion.preview import Preview
    from relayout.conversion.run import ConversionPlan, PlanOptions, Summary, convert, plan_conversion
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
    "ConversionPlan",
    "Difference",
    "Explanation",
    "FormatError",
    "Inspection",
    "Place",
    "PlanError",
    "PlanOptions",
    "Preview",
    "RelayoutError",
    "Report",
    "Restored",
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
    "ConversionPlan": "relayout.conversion.run",
    "Difference": "relayout.commands.verify",
    "Explanation": "relayout.loader",
    "FormatError": "relayout.errors",
    "Inspection": "relayout.commands.inspect",
    "Place": "relayout.loader",
    "PlanError": "relayout.errors",
    "PlanOptions": "relayout.conversion.run",
    "Preview": "relayout.conversion.preview",
    "RelayoutError": "relayout.errors",
    "Report": "relayout.commands.verify",
    "Restored": "relayout.commands.restore",
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
    """Import each public name on first use, so that `import relayout` is fast."""
    if name == "transformers":
        return import_module("relayout.transformers")
    if name not in _HOMES:
        raise AttributeError(f"module 'relayout' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
