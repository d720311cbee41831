"""`relayout doctor`: explains the load of each rank on this machine, and describes the machine."""

from __future__ import annotations

import os
from dataclasses import dataclass

from relayout.checkpoint.converted import find_manifest
from relayout.checkpoint.source import read_source
from relayout.core.arguments import integer
from relayout.errors import PlanError
from relayout.loader.backends.cuda import is_integrated
from relayout.loader.budgets import local_world_size, num_cpus, plan_budget
from relayout.loader.diagnose.explain import Explanation, explain
from relayout.loader.diagnose.network import Network, measure
from relayout.loader.sources.checkpoint import find_rank
from relayout.loader.sources.stored import cost_of
from relayout.results import Result
from relayout.storage.stores import find_input


@dataclass(frozen=True, slots=True, repr=False)
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
    """Name and memory of each CUDA device, and whether that is the host's."""
    ranks: tuple[Explanation, ...]
    network: Network | None = None
    """How fast the store or file system answers; None for files of this machine."""


def diagnose(
    path: str | os.PathLike[str], *, rank: int | None = None, device: str | None = None, tp: int | None = None
) -> Diagnosis:
    """Explain the load of one rank, or of all.

    Args:
        path: a folder that `relayout convert` wrote, or a plain checkpoint.
        rank: from 0; None: all that are there.
        device: the torch device of the tensors; None: a CUDA device if there is one, else the CPU.
        tp: the tensor-parallel degree to load at; None: that of the conversion, 1 for a plain checkpoint.

    Raises:
        FormatError, PlanError, OSError: as `explain`.
    """
    version, gpus = _machine()
    if device is None:
        device = "cuda" if gpus else "cpu"
    store = find_input(path)
    manifest = find_manifest(store)
    if manifest is None and tp is None and rank is not None and integer(rank, "rank") > 0:
        read_source(store)  # That there is no checkpoint comes first.
        raise PlanError(f"not converted, so it has no rank {rank}: set --tp N", path=str(store), code="option")
    if tp is None:
        tp = manifest.num_ranks if manifest is not None else 1
    # `explain` refuses a degree below 1.
    ranks = range(max(1, integer(tp, "tp")))
    present = ranks if manifest is None or tp != manifest.num_ranks else manifest.present
    explained = tuple(explain(path, index, device, tp=tp) for index in (present if rank is None else [rank]))
    return Diagnosis(
        path=str(path),
        is_converted=manifest is not None,
        num_cpus=num_cpus(),
        local_world_size=local_world_size(),
        torch=version,
        gpus=gpus,
        ranks=explained,
        network=None if _is_on_drive(explained[0]) else _network(path, explained[0], tp),
    )


def _is_on_drive(explained: Explanation) -> bool:
    """Whether all files are on drives of this machine. A file system over the network has no block device."""
    return all(file.filesystem.drive_block_nbytes is not None for file in explained.files)


def _network(path: str | os.PathLike[str], explained: Explanation, tp: int) -> Network | None:
    """Measure with the files of a load."""
    files = find_rank(path, explained.rank, tp).arena().files
    return measure(files, plan_budget(explained.threads, explained.memory, explained.memory, cost_of(files)))


def _machine() -> tuple[str | None, tuple[str, ...]]:
    """torch's version, and its CUDA devices."""
    try:
        import torch
    except ImportError:
        return None, ()
    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        shared = " of the host's memory" if is_integrated(index) else ""
        gpus.append(f"{properties.name}, {properties.total_memory / 1e9:.0f} GB{shared}")
    return str(torch.__version__), tuple(gpus)
