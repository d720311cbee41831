"""What the comparisons of parameters for each engine share: jobs, and counts of what is different."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engines.observing.forks import Report, Result, in_a_fork

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Job:
    """One checkpoint at one degree."""

    name: str
    source: str
    converted: str
    """Empty: only the engine's own load."""
    tp: int
    expert: bool = False
    """Experts are owned whole."""
    draft: bool = False
    """The draft model (MTP) that is in the checkpoint."""
    moe_backend: str = "auto"
    """vLLM's kernel for experts, which decides how it cuts some."""
    strict: bool = True
    """It is an error to read a whole tensor."""
    stages: int = 1
    """Of the pipeline."""
    replicas: int = 1
    """Of attention, over all of which experts are placed."""
    keeps_kv_b: bool = False
    """MLA as on a GPU: the kernel for CPUs with AMX, which releases kv_b_proj, is left off."""
    settings: dict[str, Any] = field(default_factory=dict)
    """More of the engine's."""


class Reports(logging.Handler):
    """Counts what relayout says of its loads."""

    def __init__(self, logger: str) -> None:
        super().__init__()
        self.num_loads = self.num_whole = 0
        logging.getLogger(logger).setLevel(logging.INFO)
        logging.getLogger(logger).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        report = record.args[0] if isinstance(record.args, tuple) and record.args else None
        self.num_loads += hasattr(report, "num_whole")
        self.num_whole += getattr(report, "num_whole", 0)


def run_jobs(compare: Callable[[Job, dict[str, Any]], None]) -> None:
    """Print a line of JSON for each job of the file that the command line names.

    Args:
        compare: adds to what was found of a job.
    """
    for job in [Job(**fields) for fields in json.loads(Path(sys.argv[1]).read_text())]:
        print("RESULT", json.dumps({**asdict(job), **_outcome(compare, job)}), flush=True)


def _outcome(compare: Callable[[Job, dict[str, Any]], None], job: Job, _report: Report = lambda _: None) -> Result:
    result = nothing_found()
    try:
        compare(job, result)
    except Exception as error:
        traceback.print_exc()
        result["error"] = f"{type(error).__name__}: {error}".strip()[:500]
    return result


def in_forks(compare: Callable[[Job, dict[str, Any]], None], seconds: float) -> Callable[[Job, dict[str, Any]], None]:
    """Return a comparison that runs in a fork for each job: stubs and classes of one are not seen by the next."""

    def forked(job: Job, result: dict[str, Any]) -> None:
        found = in_a_fork(partial(_outcome, compare, job), seconds)
        # Of a process that has ended nobody knows whose load it was: it does not count as the engine's own.
        result |= found if "parameters" in found else {**found, "own_load": True}

    return forked


def nothing_found() -> dict[str, Any]:
    """What is counted."""
    return {
        "parameters": 0, "elements": 0, "different": [], "never_loaded": 0, "whole_reads": 0,
        "needed_nbytes": 0, "read_nbytes": 0,
    }  # fmt: skip


def held(model: torch.nn.Module) -> Tensors:
    """All that a model holds."""
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def note_differences(result: dict[str, Any], rank: int, own: Tensors, ours: Tensors) -> None:
    """Count a rank's parameters, and name those that differ."""
    assert own.keys() == ours.keys()
    for name, tensor in own.items():
        result["parameters"] += 1
        result["elements"] += tensor.numel()
        if not torch.equal(_bits(tensor), _bits(ours[name])):
            result["different"].append(f"rank {rank}: {name}")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
