"""`relayout doctor`: explains the load of each rank on this machine, and describes the machine."""

from __future__ import annotations

import os
from dataclasses import dataclass

from relayout.checkpoint.converted import is_converted, read_manifest
from relayout.core.arguments import integer
from relayout.loader.budgets import local_world_size, num_cpus
from relayout.loader.diagnose.explain import Explanation, explain
from relayout.results import Result
from relayout.storage.stores import find_store


@dataclass(frozen=True, slots=True)
class Diagnosis(Result):
    """What loading a checkpoint would do on this machine."""

    path: str
    is_converted: bool
    num_cpus: int
    local_world_size: int
    """Ranks of this node, which divide the budgets."""
    torch: str | None
    """Its version; None if it is not installed."""
    gpus: tuple[str, ...]
    """Name and memory of each CUDA device."""
    ranks: tuple[Explanation, ...]


def diagnose(
    path: str | os.PathLike[str], *, rank: int | None = None, device: str | None = None, tp: int | None = None
) -> Diagnosis:
    """Explain the load of one rank, or of all.

    Args:
        path: a folder that `relayout convert` wrote, or a plain checkpoint.
        rank: from 0; None: all.
        device: the torch device of the tensors; None: a CUDA device if there is one, else the CPU.
        tp: the tensor-parallel degree to load at; None: that of the conversion, 1 for a plain checkpoint.

    Raises:
        FormatError, PlanError, OSError: as `explain`.
    """
    version, gpus = _machine()
    if device is None:
        device = "cuda" if gpus else "cpu"
    store = find_store(path)
    converted = is_converted(store)
    if tp is None:
        tp = read_manifest(store).num_ranks if converted else 1
    # `explain` refuses a degree below 1.
    ranks = range(max(1, integer(tp, "tp"))) if rank is None else [rank]
    return Diagnosis(
        path=str(path),
        is_converted=converted,
        num_cpus=num_cpus(),
        local_world_size=local_world_size(),
        torch=version,
        gpus=gpus,
        ranks=tuple(explain(path, number, device, tp=tp) for number in ranks),
    )


def _machine() -> tuple[str | None, tuple[str, ...]]:
    """torch's version, and its CUDA devices."""
    try:
        import torch
    except ImportError:
        return None, ()
    gpus = []
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(number)
        gpus.append(f"{properties.name}, {properties.total_memory / 1e9:.0f} GB")
    return str(torch.__version__), tuple(gpus)
