"""Loads into a new arena; the views are made while bytes arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from relayout.core.arguments import integer, size
from relayout.core.workers import Stop
from relayout.errors import PlanError
from relayout.loader.backends.base import Choice, ReadJob
from relayout.loader.backends.choice import choose, resolve_device
from relayout.loader.backends.digests import checks_of
from relayout.loader.budgets import Budget, plan_budget
from relayout.loader.diagnose.hints import no_torch
from relayout.loader.pack import ArenaPlan
from relayout.loader.sources.stored import StoredFile, cost_of
from relayout.loader.tensors import make_views, to_device
from relayout.progress import Progress, reporting

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Options:
    """How to load; see `api.load`."""

    device: str | torch.device = "cpu"
    backend: str = "auto"
    verify: bool = False
    threads: int | None = None
    memory: int | None = None
    """Bytes."""
    progress: Progress = None

    @property
    def kind(self) -> str:
        """Of the device: "cpu", "cuda" or another of torch's."""
        return str(self.device).partition(":")[0]

    def choose(self, files: Sequence[StoredFile]) -> tuple[Choice, Budget]:
        """The backend for these files, and its budget.

        Raises:
            PlanError: the device is "meta"; or as `choice.choose` and `budgets.plan_budget`.
        """
        choice = choose(self.backend, self.device, files)
        if self.kind == "meta":
            raise PlanError("device 'meta': its tensors have no memory to load into", code="option")
        return choice, plan_budget(self.threads, self.memory, choice.backend.max_buffer_nbytes, cost_of(files))


def options_of(
    device: str | torch.device = "cpu",
    backend: str = "auto",
    verify: bool = False,
    threads: int | None = None,
    memory: int | str | None = None,
    progress: Progress = None,
) -> Options:
    """Check a caller's arguments.

    Raises:
        PlanError: the device cannot be used, `threads` is not an integer, or `memory` is not a size.
    """
    if find_spec("torch") is None:  # Before anything is read.
        raise no_torch()
    return Options(
        resolve_device(device),
        backend,
        verify,
        None if threads is None else integer(threads, "threads"),
        None if memory is None else size(memory, "memory"),
        progress,
    )


def load_arena(plan: ArenaPlan, options: Options) -> dict[str, torch.Tensor]:
    """Load tensors into a new arena.

    Raises:
        FormatError, PlanError, OSError, MemoryError: as `api.load`.
    """
    choice, budget = options.choose(plan.files)
    tensors = plan.tensors() if options.verify else None
    stop = Stop()
    checks = None if tensors is None else checks_of(tensors, plan.files, plan.reads, stop)
    job = ReadJob(plan.files, plan.reads, budget, checks, stop=stop)
    with reporting(options.progress, "loading", plan.nbytes) as report:
        arena = choice.backend.allocate(plan.arena_nbytes)
        try:
            running = choice.backend.start(arena, job)
            try:
                tensors = tensors or plan.tensors()
                if choice.backend.device != options.device:
                    running.join(report)
                    return make_views(to_device(arena.tensor(), options.device), tensors)
                views = make_views(arena.tensor(), tensors)
                running.join(report)
                return views
            except BaseException:
                running.cancel()
                raise
        except BaseException:
            arena.discard()
            raise
