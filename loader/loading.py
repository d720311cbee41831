"""Loads into new memory: one arena, which is filled while the views of it are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relayout.dtypes import num_bytes
from relayout.loader.arena import HostArena, allocate
from relayout.loader.backends import Fill, Filling
from relayout.loader.budgets import Budget, plan_budget
from relayout.loader.checkpoint import ConvertedRank
from relayout.loader.choice import Choice, choose
from relayout.loader.contents import Contents, StoredFile
from relayout.loader.device import DeviceArena, DeviceBackend, allocate_on
from relayout.loader.digests import Checks
from relayout.loader.placement import place
from relayout.loader.progress import Progress, reporting
from relayout.loader.tensors import arena_tensor, make_views
from relayout.workers import Stop

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
    progress: Progress = None

    def choose(self, files: Sequence[StoredFile]) -> tuple[Choice, Budget]:
        """The backend for these files, and what it may use.

        Raises:
            PlanError: as `choice.choose` and `budgets.plan_budget`.
        """
        choice = choose(self.backend, self.device, files)
        return choice, plan_budget(self.threads, self.memory, choice.max_buffers)

    @property
    def on_host(self) -> bool:
        """Whether the tensors shall lie in host memory."""
        return str(self.device).partition(":")[0] == "cpu"


def load_rank(rank: ConvertedRank, options: Options) -> dict[str, torch.Tensor]:
    """Load all of a rank: where everything goes is in the manifest."""
    choice, budget = options.choose(rank.files)
    entry = rank.entry
    stop = Stop()
    table = checks = None
    if options.verify:
        table = rank.table()
        sizes = [num_bytes(*one) or 0 for one in zip(table.dtypes, table.shapes, strict=True)]
        checks = Checks(table.names, table.arena_offsets, sizes, table.digests, stop)
    fill = Fill(rank.files, entry.reads, budget, checks, stop=stop)
    with reporting(options.progress, entry.nbytes) as report:
        arena, filling = _start(choice, options.device, entry.arena_nbytes, fill)
        try:
            # While bytes arrive the table is parsed and torch, perhaps, imported.
            table = table or rank.table()
            columns = (table.names, table.dtypes, table.shapes, table.arena_offsets)
            return _finish(arena, filling, options, report, columns)
        except BaseException:
            filling.cancel()
            raise


def load_contents(contents: Contents, options: Options) -> dict[str, torch.Tensor]:
    """Load tensors into an arena that has room for just these."""
    choice, budget = options.choose(contents.files)
    sizes = contents.sizes()
    placement = place(contents.reads, sizes)
    stop = Stop()
    checks = None
    if options.verify:
        assert contents.digests is not None
        checks = Checks(contents.names, placement.offsets, sizes, contents.digests, stop)
    fill = Fill(contents.files, placement.reads, budget, checks, stop=stop)
    with reporting(options.progress, sum(sizes)) as report:
        arena, filling = _start(choice, options.device, placement.nbytes, fill)
        try:
            columns = (contents.names, contents.dtypes, contents.shapes, placement.offsets)
            return _finish(arena, filling, options, report, columns)
        except BaseException:
            filling.cancel()
            raise


def _start(
    choice: Choice, device: str | torch.device, nbytes: int, fill: Fill
) -> tuple[HostArena | DeviceArena, Filling]:
    """Begin to fill a new arena."""
    if isinstance(choice.backend, DeviceBackend):
        on_device = allocate_on(device, nbytes)
        return on_device, choice.backend.start(on_device, fill)
    on_host = allocate(nbytes)
    return on_host, choice.backend.start(on_host, fill)


def _finish(
    arena: HostArena | DeviceArena,
    filling: Filling,
    options: Options,
    report: Callable[[int], None] | None,
    columns: tuple[Sequence[str], Sequence[str], Sequence[tuple[int, ...]], Sequence[int]],
) -> dict[str, torch.Tensor]:
    """Make the views (names, dtypes, shapes, offsets) while bytes arrive, and wait for the last one."""
    if isinstance(arena, HostArena) and not options.on_host:
        filling.join(report)
        return make_views(arena_tensor(arena).to(options.device), *columns)
    views = make_views(arena.tensor if isinstance(arena, DeviceArena) else arena_tensor(arena), *columns)
    filling.join(report)
    return views
