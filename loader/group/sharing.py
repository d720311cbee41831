"""A load that the members of a group share: each reads a part from the store, and all get all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from relayout.checkpoint.trust import TrustedStore
from relayout.core.digests import digest_hex
from relayout.core.extents import Grid
from relayout.core.workers import Stop
from relayout.errors import PlanError
from relayout.format.index import Read
from relayout.loader.backends.base import Allocation, ReadJob, RunningJob
from relayout.loader.diagnose.hints import error_hints
from relayout.loader.group.assign import Portion, Round, assign_reads
from relayout.loader.group.collectives import Group
from relayout.loader.group.received import prove_received
from relayout.loader.loading import Options, load_arena
from relayout.loader.reads import ArenaPlan
from relayout.loader.sources.base import RankSource
from relayout.loader.sources.columns import Names, TensorColumns
from relayout.loader.sources.stored import StoredFile
from relayout.loader.stream import PartCounter, stream
from relayout.loader.tensors import make_views, to_device
from relayout.progress import reporting

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class Sharing:
    """How the members of a group share the reads of a rank."""

    group: Group
    what: str
    """What is loaded, for a person."""
    files: tuple[StoredFile, ...]
    """Which prove the chunks that are read of them, if that is asked for."""
    grids: Sequence[Grid]
    """Where each file is best cut."""
    kind: str
    """Of the device."""
    believes_none: bool
    """Whether each member proves what others have read: the checkpoint is signed."""

    @staticmethod
    def of(group: Group, source: RankSource, files: tuple[StoredFile, ...], options: Options) -> Sharing:
        """Share the reads of a source's files.

        Raises:
            PlanError: they are a plain checkpoint's.
        """
        proofs = [file.proof for file in files if file.proof is not None]
        if len(proofs) < len(files):
            why = "group: iter_load shares converted checkpoints only: convert it, or use load"
            raise PlanError(why, path=str(source.store), code="unsupported")
        believes_none = isinstance(source.store, TrustedStore)
        grids = [Grid()] * len(files)
        if options.verify or believes_none:
            files = tuple(file.proven() for file in files)
            grids = [proof.grid for proof in proofs]
        what = f"rank {source.rank} of {source.num_ranks} of {source.store} to {options.kind}"
        what = f"{what}, signed" if believes_none else what
        what = f"{what}, verified" if options.verify else what
        return Sharing(group, what, files, grids, options.kind, believes_none)

    @property
    def is_sent(self) -> bool:
        """Whether members send each other what they read: what must be proven arrives in host memory, or is not."""
        return not self.believes_none or self.kind == "cpu"

    def portions(self, reads: Sequence[Read], start: int = 0) -> tuple[Portion, ...]:
        """Who reads what of the reads that fill the arena from an offset on."""
        return assign_reads(reads, self.group.num_members, self.grids, start=start)

    def round(self, portions: Sequence[Portion]) -> Round:
        """Portions that are read at the same time."""
        return Round(self.group.index, tuple(portions))

    def prove(
        self, reads: Sequence[Read], rounds: Sequence[Round], memory: torch.Tensor, start: int, num_threads: int
    ) -> None:
        """Prove what others have read, where that is wanted; see `received.prove_received`. All members call this."""
        if self.believes_none:
            with self.group.collective():
                prove_received(self.files, reads, rounds, memory.numpy().data, start, num_threads)

    def identity(self, *others: object) -> tuple[str, str]:
        """What is loaded, and a digest of the files and of all else that members must have in common."""
        named = [(file.name, file.nbytes, file.proof and file.proof.content) for file in self.files]
        return self.what, digest_hex(repr((named, self.kind, self.believes_none, others)).encode())


def stream_together(
    prepare: Callable[[], tuple[RankSource, TensorColumns, Options]], group: Group
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield one rank's tensors, while all other members of a group, who call this, too, do the same.

    The last `next`, which ends the iteration, belongs to it.

    Args:
        prepare: returns what this member loads.

    Raises:
        FormatError, PlanError, OSError, MemoryError: as `api.iter_load`, on any member.
    """
    try:
        with error_hints(), group.collective():
            source, contents, options = prepare()
            sharing = Sharing.of(group, source, contents.files, options)
            contents = replace(contents, files=sharing.files)
            tensors = stream(contents, options, sharing if sharing.is_sent else None)
            columns = [list(column) for column in (contents.names, contents.shapes, contents.reads)]
            identity = sharing.identity(columns, sharing.grids)
        check_same(group, identity)
        yield from tensors
        group.is_over = True
    except BaseException as error:
        group.fail(error)
        raise


def load_together(
    prepare: Callable[[], tuple[RankSource, ArenaPlan, Options]], process_group: ProcessGroup, names: Names
) -> dict[str, torch.Tensor]:
    """Load one rank together with all other members of a group, who call this, too.

    All load the same rank, unless the checkpoint is a plain one.

    Args:
        prepare: returns what this member loads.
        names: of the tensors in it.

    Raises:
        FormatError, PlanError, OSError, MemoryError: as `api.load`, on any member.
    """
    group = Group(process_group)
    with group.collective():
        source, plan, options = prepare()
        if source.is_plain:
            from relayout.loader.group import exchange  # Imports what plans.

            mine = exchange.identity_of(source, names, options)
        else:
            sharing = Sharing.of(group, source, plan.files, options)
            backend, budget = options.choose(sharing.files)
            portions = sharing.portions(plan.reads)
            mine = sharing.identity(plan.arena_nbytes, portions)
    check_same(group, mine)
    if source.is_plain:
        return exchange.load_exchanged(source, plan, names, options, group)
    if not sharing.is_sent:
        with group.collective():
            return load_arena(plan, options)
    arena: Allocation[Any] | None = None
    running: RunningJob | None = None
    stop = Stop()
    try:
        with reporting(options.progress, "loading", plan.nbytes) as report:
            size = group.num_members
            rounds = [sharing.round(portions[first : first + size]) for first in range(0, len(portions), size)]
            counter = PartCounter([each.portions[0].start for each in rounds], [each.nbytes for each in rounds], stop)
            with group.collective():
                arena = backend.allocate(plan.arena_nbytes)
                reads = tuple(read for each in rounds for read in each.reads)
                job = ReadJob(sharing.files, reads, budget, counter.count, stop)
                running = backend.start(arena, job)
                base = arena.tensor()
            done = 0
            for index, each in enumerate(rounds):
                with group.collective():
                    if not counter.wait(index):
                        running.join()  # Raises the job's error.
                    running.settle()
                group.broadcast(each.within(base))
                done += sum(portion.nbytes for portion in each.portions)
                report(done)
            sharing.prove(plan.reads, rounds, base, 0, budget.threads)
            with group.collective():
                running.join()
                return make_views(to_device(base, options.device), plan.tensors())
    except BaseException as error:
        if running is not None:
            running.cancel()
        group.fail(error)
        if arena is not None and not group.is_broken:
            arena.discard()
        raise


def check_same(group: Group, mine: tuple[str, str]) -> None:
    """Refuse members that load something else than this one, by what that is and a digest of it.

    Raises:
        PlanError: some do.
    """
    for member, (what, digest) in enumerate(group.all_gather(mine)):
        if digest != mine[1]:
            group.is_over = True
            other = what if what != mine[0] else "other tensors, or another version or conversion, of that"
            raise PlanError(
                f"group: member {group.index} loads {mine[0]}, member {member} {other};"
                " all members of a group must load the same",
                code="option",
            )
