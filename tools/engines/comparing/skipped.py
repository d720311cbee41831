"""Runs in an environment that has vLLM: loads without one tensor, and whether relayout's checks name what is missing.

`skipped JOBS.json [--stub-kernels]`: of each kind of tensor that a rank is given, one is skipped. First it is
skipped behind relayout's plugin, where only marks show it; where they do not, inside, where what is read and not given
is an error. Memory has as few marks as that of large models. Prints a line of JSON for each job.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from engines.comparing.jobs import Job, held, note_differences, nothing_found, run_jobs
from engines.comparing.vllm_classes import load_rank, setup
from relayout.engines import unwritten
from relayout.engines.rank_weights import Delivery
from relayout.errors import RelayoutError
from relayout.observe.stubs import stub_kernels

FULL_NBYTES = 2**10
"""Memory that is larger has few marks here."""


@contextmanager
def skipping(method: str, skipped: str, names: list[str]) -> Iterator[None]:
    """While loads are without a tensor; all names are noted.

    Args:
        method: of `Delivery`; an iterator of names and tensors.
    """
    original = getattr(Delivery, method)

    def without(delivery: Delivery, *arguments: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in original(delivery, *arguments):
            names.append(name)
            if name != skipped:
                yield name, tensor

    with patch.object(Delivery, method, without):
        yield


def skip_each(job: Job, found: dict[str, Any]) -> None:
    """For the first rank of each stage, count what became of each kind of tensor."""
    found |= {"marks": 0, "not_given": 0, "not_used": 0, "unseen": []}
    config = setup(job, job.converted, "auto")
    for rank in range(0, job.tp * job.stages, job.tp):
        names: list[str] = []
        with skipping("__iter__", "", names):
            expected = held(load_rank(job, rank, *config)[0])
        for name in {re.sub(r"\d+", "#", name): name for name in names}.values():
            error = ""
            for method, kind in (("__iter__", "marks"), ("_tensors", "not_given")):
                try:
                    with skipping(method, name, []):
                        model, _ = load_rank(job, rank, *config)
                except RelayoutError as raised:
                    error = kind
                    if raised.code != "missing" and name not in str(raised):
                        raise
                    break
                if method == "__iter__":
                    compared = nothing_found()
                    note_differences(compared, rank, expected, held(model))
                    if not compared["different"]:
                        error = "not_used"
                        break
            if error:
                found[error] += 1
            else:
                found["unseen"].append(f"rank {rank}: {name}")


def main() -> None:
    if "--stub-kernels" in sys.argv:
        stub_kernels()
    unwritten._MAX_FULL_NBYTES = FULL_NBYTES
    with patch.object(DefaultModelLoader, "track_weights_loading", lambda *_, **__: None):  # vLLM's own check.
        run_jobs(skip_each)


if __name__ == "__main__":
    main()
