"""What the scripts for each engine share: they run in its environment, beside this file, and see no other module."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

POISON = 0xA5
"""In every byte of a parameter before it is loaded."""

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Job:
    """One checkpoint at one degree."""

    name: str
    source: str
    converted: str
    tp: int
    expert: bool = False
    """Experts are owned whole."""
    draft: bool = False
    """The draft model (MTP) that is in the checkpoint."""
    moe_backend: str = "auto"
    """vLLM's kernel for experts, which decides how it cuts some."""
    strict: bool = True
    """It is an error to read a whole tensor."""


def run_jobs(compare: Callable[[Job, dict[str, Any]], None]) -> None:
    """Print a line of JSON for each job of the file that the command line names.

    Args:
        compare: adds to what was found of a job.
    """
    for job in [Job(**one) for one in json.loads(Path(sys.argv[1]).read_text())]:
        found = nothing_found()
        try:
            compare(job, found)
        except Exception as error:
            found |= {
                "error": f"{type(error).__name__}: {error}".strip()[:500],
                "trace": traceback.format_exc()[-3000:],
            }
        print("RESULT", json.dumps({**asdict(job), **found}), flush=True)


def nothing_found() -> dict[str, Any]:
    """What is counted."""
    return {"parameters": 0, "elements": 0, "different": [], "never_loaded": 0, "whole_reads": 0}


def poison(model: torch.nn.Module) -> Tensors:
    """Fill the parameters of a model that is about to be loaded; all that it holds."""
    for name, parameter in model.named_parameters():
        assert not parameter.is_meta, name
        if parameter.numel() and parameter.is_contiguous():
            parameter.data.view(-1).view(torch.uint8).fill_(POISON)
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def note_differences(found: dict[str, Any], rank: int, own: Tensors, ours: Tensors) -> None:
    """Count a rank's parameters, and name those that differ."""
    assert own.keys() == ours.keys()
    for name, tensor in own.items():
        expected = _bits(tensor)
        found["parameters"] += 1
        found["elements"] += tensor.numel()
        found["never_loaded"] += bool(expected.numel()) and bool((expected == POISON).all())
        if not torch.equal(expected, _bits(ours[name])):
            found["different"].append(f"rank {rank}: {name}")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
