"""relayout rewrites safetensors checkpoints so that each tensor-parallel rank reads only its own bytes.

Start here; each function has an example in its own help, such as `help(relayout.load)`:

    import relayout

    relayout.convert("llama-3.1-8b", tp=8)                  # writes llama-3.1-8b-tp8 beside it
    tensors = relayout.load("llama-3.1-8b-tp8", rank=3)     # dict[str, torch.Tensor]: this rank's slices

    convert, restore             a checkpoint as one folder for all ranks; the way back, byte for byte
    plan_conversion, preview,    the same in steps: plan, look, write; whether it has been done
        carry_out, is_carried_out
    inspect, verify, report      what a rank reads; every digest; a page that shows both
    verify_source                a plain checkpoint, by the digests that its folder states
    load, iter_load              a rank's tensors, all at once or one after the other in bounded memory
    open, safe_open              single tensors of a rank, or of the whole model
    rows, open_rows              rows of a table by their number, which is not loaded
    explain, plan_bench, warm    how a load would read, how fast, and the page cache filled before it
    copy, files, sign            folders to other places, some of their ranks, signatures
    save, delta, apply,          weights that a training writes, and what changed between two folders
        apply_deltas
    Publisher, Follower, Steps   weights as a sequence of steps
    transformers                 models of transformers, loaded and saved

All errors are `relayout.RelayoutError` (FormatError: a file is bad; PlanError: the request is wrong) or OSError. The
command `relayout` does the same; the modules below are not public.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relayout.benchmark.measure import Bench, BenchPlan, plan_bench
    from relayout.cache.folder import Cache
    from relayout.commands.convert import convert
    from relayout.commands.copy import CopyResult, NeededFiles, apply_deltas, copy, files
    from relayout.commands.delta import DeltaResult, delta
    from relayout.commands.inspect import Inspection, inspect
    from relayout.commands.restore import RestoreResult, restore
    from relayout.commands.sign import SignResult, sign
    from relayout.commands.verify import verify
    from relayout.commands.verify_source import SourceVerification, verify_source
    from relayout.commands.warm import warm
    from relayout.conversion.consistency import Difference, Verification
    from relayout.conversion.layout import Conversion
    from relayout.conversion.planning import Preview, plan_conversion, preview
    from relayout.conversion.run import Summary, carry_out, is_carried_out
    from relayout.errors import FormatError, PlanError, RelayoutError
    from relayout.html_report.page import ReportResult, report
    from relayout.loader.api import iter_load, load
    from relayout.loader.diagnose import Explanation, explain
    from relayout.loader.in_place import apply
    from relayout.loader.rows import RowReader, open_rows, rows
    from relayout.loader.view import CheckpointView, HeldSlice, TensorSlice, open, safe_open  # noqa: A004
    from relayout.plans.plan import Plan
    from relayout.train import transformers
    from relayout.train.follower import Follower, Steps
    from relayout.train.publisher import Publisher
    from relayout.train.save import save

__all__ = [
    "Bench",
    "BenchPlan",
    "Cache",
    "CheckpointView",
    "Conversion",
    "CopyResult",
    "DeltaResult",
    "Difference",
    "Explanation",
    "Follower",
    "FormatError",
    "HeldSlice",
    "Inspection",
    "NeededFiles",
    "Plan",
    "PlanError",
    "Preview",
    "Publisher",
    "RelayoutError",
    "ReportResult",
    "RestoreResult",
    "RowReader",
    "SignResult",
    "SourceVerification",
    "Steps",
    "Summary",
    "TensorSlice",
    "Verification",
    "apply",
    "apply_deltas",
    "carry_out",
    "convert",
    "copy",
    "delta",
    "explain",
    "files",
    "inspect",
    "is_carried_out",
    "iter_load",
    "load",
    "open",
    "open_rows",
    "plan_bench",
    "plan_conversion",
    "preview",
    "report",
    "restore",
    "rows",
    "safe_open",
    "save",
    "sign",
    "transformers",
    "verify",
    "verify_source",
    "warm",
]

_MODULES = {
    "benchmark.measure": ("Bench", "BenchPlan", "plan_bench"),
    "commands.convert": ("convert",),
    "commands.copy": ("CopyResult", "NeededFiles", "apply_deltas", "copy", "files"),
    "commands.delta": ("DeltaResult", "delta"),
    "commands.inspect": ("Inspection", "inspect"),
    "commands.restore": ("RestoreResult", "restore"),
    "conversion.consistency": ("Difference", "Verification"),
    "commands.sign": ("SignResult", "sign"),
    "commands.verify": ("verify",),
    "commands.verify_source": ("SourceVerification", "verify_source"),
    "commands.warm": ("warm",),
    "conversion.layout": ("Conversion",),
    "conversion.run": ("Summary", "carry_out", "is_carried_out"),
    "conversion.planning": ("Preview", "plan_conversion", "preview"),
    "plans.plan": ("Plan",),
    "errors": ("FormatError", "PlanError", "RelayoutError"),
    "html_report.page": ("ReportResult", "report"),
    "loader.api": ("iter_load", "load"),
    "loader.diagnose": ("Explanation", "explain"),
    "loader.in_place": ("apply",),
    "train.save": ("save",),
    "train.follower": ("Follower", "Steps"),
    "train.publisher": ("Publisher",),
    "cache.folder": ("Cache",),
    "loader.rows": ("RowReader", "open_rows", "rows"),
    "loader.view": ("CheckpointView", "HeldSlice", "TensorSlice", "open", "safe_open"),
}


def __getattr__(name: str) -> Any:
    """Import each public name on first use, so that `import relayout` is fast."""
    if name == "__version__":
        return import_module("relayout.format.index").VERSION
    home = (
        "train.transformers" if name == "transformers" else next((of for of in _MODULES if name in _MODULES[of]), None)
    )
    if home is None:
        raise AttributeError(f"module 'relayout' has no attribute {name!r}")
    if (module := import_module("relayout.extensions").find(home)) is None:
        raise AttributeError(f"relayout.{name} needs relayout.{home}, which is not installed")
    return module if name == "transformers" else getattr(module, name)


def __dir__() -> list[str]:
    return [*__all__, "__version__", "__doc__"]
