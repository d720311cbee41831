"""Loads into new memory: one arena, which is filled while the views of it are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from relayout.core.arguments import integer
from relayout.core.dtypes import num_bytes
from relayout.core.workers import Stop
from relayout.loader.backends.base import Choice, ReadJob, read_job
from relayout.loader.backends.choice import choose, resolve_device
from relayout.loader.budgets import Budget, plan_budget
from relayout.loader.digests import Checks
from relayout.loader.placement import place
from relayout.loader.sources.checkpoint import ConvertedRank
from relayout.loader.sources.contents import Contents, StoredFile
from relayout.loader.tensors import make_views, to_device
from relayout.progress import Progress, reporting

if TYPE_CHECKING:
    import torch


Columns: TypeAlias = tuple[Sequence[str], Sequence[str], Sequence[tuple[int, ...]], Sequence[int]]
"""Names, dtypes, shapes and arena offsets."""


@dataclass(frozen=True, slots=True)
class Options:
    """How to load; see `api.load`."""

    device: str | torch.device = "cpu"
    backend: str = "auto"
    verify: bool = False
    threads: int | None = None
    memory: int | None = None
    progress: Progress = None

    def choose(self, files: Sequence[StoredFile]) -> tuple[Choice, Budget]:
        """The backend for these files, and what it may use.

        Raises:
            PlanError: as `choice.choose` and `budgets.plan_budget`.
        """
        choice = choose(self.backend, self.device, files)
        return choice, plan_budget(self.threads, self.memory, choice.backend.max_buffer_nbytes)


def options_of(
    device: str | torch.device, backend: str, verify: bool, threads: int | None, memory: int | None, progress: Progress
) -> Options:
    """What a caller asks for.

    Raises:
        PlanError: the device cannot be used now, or a number is no integer.
    """
    return Options(
        resolve_device(device),
        backend,
        verify,
        None if threads is None else integer(threads, "threads"),
        None if memory is None else integer(memory, "memory"),
        progress,
    )


def load_rank(rank: ConvertedRank, options: Options) -> dict[str, torch.Tensor]:
    """Load all of a rank: where everything goes is in the manifest."""
    files = rank.files
    choice, budget = options.choose(files)
    entry = rank.entry
    stop = Stop()
    table = checks = None
    if options.verify:
        table = rank.table()
        sizes = [num_bytes(*one) or 0 for one in zip(table.dtypes, table.shapes, strict=True)]
        checks = Checks(table.names, table.arena_offsets, sizes, table.digests, stop)
    job = ReadJob(files, entry.reads, budget, checks, stop=stop)

    def columns() -> Columns:
        # While bytes arrive the table is parsed and torch, perhaps, imported.
        found = table or rank.table()
        return found.names, found.dtypes, found.shapes, found.arena_offsets

    return _load(choice, options, entry.arena_nbytes, entry.nbytes, job, columns)


def load_contents(contents: Contents, options: Options) -> dict[str, torch.Tensor]:
    """Load tensors into an arena that has room for just these."""
    choice, budget = options.choose(contents.files)
    sizes = contents.sizes()
    placement = place(contents.reads, sizes)
    job = read_job(contents, placement.offsets, placement.reads, budget, verify=options.verify)
    columns = (contents.names, contents.dtypes, contents.shapes, placement.offsets)
    return _load(choice, options, placement.nbytes, sum(sizes), job, lambda: columns)


def _load(
    choice: Choice, options: Options, arena_nbytes: int, nbytes: int, job: ReadJob, columns: Callable[[], Columns]
) -> dict[str, torch.Tensor]:
    """Fill a new arena, make the views of it while bytes arrive, and wait for the last of `nbytes`."""
    with reporting(options.progress, "loading", nbytes) as report:
        arena = choice.backend.allocate(arena_nbytes)
        running = choice.backend.start(arena, job)
        try:
            found = columns()
            if choice.backend.device != options.device:
                running.join(report)
                return make_views(to_device(arena.tensor(), options.device), *found)
            views = make_views(arena.tensor(), *found)
            running.join(report)
            return views
        except BaseException:
            running.cancel()
            raise
