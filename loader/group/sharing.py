"""A load that the members of a group share: each reads a part from the store, and all get all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from relayout.checkpoint.trust import TrustedStore
from relayout.core.digests import digest_hex
from relayout.core.workers import Stop
from relayout.errors import PlanError
from relayout.format.index import Read
from relayout.loader.backends.base import Arena, ReadJob, RunningJob
from relayout.loader.diagnose.hints import error_hints
from relayout.loader.group.assign import Grid, Portion, Round, assign_reads
from relayout.loader.group.collectives import Group
from relayout.loader.group.received import prove_received
from relayout.loader.loading import Options, load_arena
from relayout.loader.pack import ArenaPlan
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
    """Assigns what is streamed."""

    group: Group
    grids: Sequence[Grid]
    """Of each file."""
    files: tuple[StoredFile, ...] = ()
    """Those that prove what others have read; none: it is believed."""

    def round(self, reads: Sequence[Read], start: int) -> Round:
        """Who reads what of the reads that fill the arena from an offset on."""
        return Round(self.group.index, assign_reads(reads, self.group.num_members, self.grids, start=start))

    def prove(self, reads: Sequence[Read], shared: Round, memory: torch.Tensor, start: int, num_threads: int) -> None:
        """Prove what others have read, where that is wanted; see `received.prove_received`."""
        if self.files:
            with self.group.collective():
                prove_received(self.files, reads, [shared], memory.numpy().data, start, num_threads)


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
            files, grids = _provable(source, contents.files, options)
            digests = None if options.verify else contents.digests  # By chunks: each member has only parts of tensors.
            contents = replace(contents, files=files, digests=digests)
            proving = files if _believes_none(source) else ()
            tensors = stream(contents, options, Sharing(group, grids, proving) if _shares(source, options) else None)
            columns = [list(column) for column in (contents.names, contents.shapes, contents.reads)]
            mine = _what(source, options), _identity(files, columns, grids, options.kind, _believes_none(source))
        _check_same(group, mine)
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
            files, grids = _provable(source, plan.files, options)
            choice, budget = options.choose(files)
            portions = assign_reads(plan.reads, group.num_members, grids)
            mine = (
                _what(source, options),
                _identity(files, plan.arena_nbytes, portions, options.kind, _believes_none(source)),
            )
    _check_same(group, mine)
    if not _shares(source, options):
        with group.collective():
            return load_arena(plan, options)
    if source.is_plain:
        return exchange.load_exchanged(source, plan, names, options, group)
    arena: Arena[Any] | None = None
    running: RunningJob | None = None
    stop = Stop()
    try:
        with reporting(options.progress, "loading", plan.nbytes) as report:
            rounds = _rounds(portions, group)
            counter = PartCounter([each.portions[0].start for each in rounds], [each.nbytes for each in rounds], stop)
            with group.collective():
                arena = choice.backend.allocate(plan.arena_nbytes)
                reads = tuple(read for each in rounds for read in each.reads)
                running = choice.backend.start(arena, ReadJob(files, reads, budget, None, counter.count, stop))
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
            with group.collective():
                running.join()
                if _believes_none(source):
                    prove_received(files, plan.reads, rounds, base.numpy().data, num_threads=budget.threads)
                return make_views(to_device(base, options.device), plan.tensors())
    except BaseException as error:
        if running is not None:
            running.cancel()
        group.fail(error)
        if arena is not None and not group.is_broken:
            arena.discard()
        raise


def _rounds(portions: Sequence[Portion], group: Group) -> list[Round]:
    """Portions that all members read at the same time, one each."""
    size = group.num_members
    return [Round(group.index, tuple(portions[first : first + size])) for first in range(0, len(portions), size)]


def _believes_none(source: RankSource) -> bool:
    """Whether each member proves what others have read."""
    return isinstance(source.store, TrustedStore)


def _shares(source: RankSource, options: Options) -> bool:
    """Whether members send each other what they read: what must be proven arrives in host memory, or is not sent."""
    return not _believes_none(source) or options.kind == "cpu"


def _provable(
    source: RankSource, files: tuple[StoredFile, ...], options: Options
) -> tuple[tuple[StoredFile, ...], Sequence[Grid]]:
    """The files, whose chunks are proven when they are read if that is asked for, and where each is best cut.

    Raises:
        PlanError: they are a plain checkpoint's.
    """
    if source.is_plain:
        raise PlanError(
            "group: iter_load shares converted checkpoints only: convert it, or use load",
            path=str(source.store),
            code="unsupported",
        )
    proofs = [file.proof for file in files if file.proof is not None]
    if not options.verify and not _believes_none(source):
        return files, [Grid()] * len(files)
    return tuple(file.proven() for file in files), [Grid(proof.data_start, proof.chunk_nbytes) for proof in proofs]


def _what(source: RankSource, options: Options) -> str:
    what = f"rank {source.rank} of {source.num_ranks} of {source.store} to {options.kind}"
    what = f"{what}, signed" if _believes_none(source) else what
    return f"{what}, verified" if options.verify else what


def _identity(files: Sequence[StoredFile], *others: object) -> str:
    """A digest of files and of all else that members must have in common."""
    named = [(file.name, file.nbytes, file.proof and file.proof.content) for file in files]
    return digest_hex(repr((named, others)).encode())


def _check_same(group: Group, mine: tuple[str, str]) -> None:
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
