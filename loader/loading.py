"""Loads into a new arena; the views are made while bytes arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from relayout.core.arguments import integer, size
from relayout.errors import PlanError
from relayout.loader.backends.base import Backend, ReadJob, choose, kind_of, resolve_device
from relayout.loader.budgets import Budget, plan_budget
from relayout.loader.diagnose.hints import no_torch
from relayout.loader.reads import ArenaPlan
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
        return kind_of(self.device)

    def choose(self, files: Sequence[StoredFile]) -> tuple[Backend[Any], Budget]:
        """The backend for these files, and its budget.

        Raises:
            PlanError: the device is "meta"; or as `backends.base.choose` and `budgets.plan_budget`.
        """
        backend = choose(self.backend, self.device, self.proving(files))
        if self.kind == "meta":
            raise PlanError("device 'meta': its tensors have no memory to load into", code="option")
        return backend, plan_budget(self.threads, self.memory, backend.max_buffer_nbytes, cost_of(files))

    def proving(self, files: Sequence[StoredFile]) -> tuple[StoredFile, ...]:
        """The files as they are read: with `verify`, their bytes are proven."""
        return tuple(file.proven() for file in files) if self.verify else tuple(files)


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
    backend, budget = options.choose(plan.files)
    job = ReadJob(options.proving(plan.files), plan.reads, budget)
    with reporting(options.progress, "loading", plan.nbytes) as report:
        arena = backend.allocate(plan.arena_nbytes)
        try:
            running = backend.start(arena, job)
            try:
                tensors = plan.tensors()
                if backend.device != options.device:
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
