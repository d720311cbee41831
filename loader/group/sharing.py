"""A load that the members of a group share: each reads a part from the store, and all get all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from relayout.core.digests import digest_hex
from relayout.core.workers import Stop
from relayout.errors import PlanError
from relayout.format.index import Read
from relayout.loader.backends.arrivals import Arrivals
from relayout.loader.backends.base import Arena, Backend, ReadJob, RunningJob
from relayout.loader.budgets import Budget
from relayout.loader.diagnose.hints import error_hints
from relayout.loader.group.deal import Grid, Round, deal
from relayout.loader.group.members import Members
from relayout.loader.loading import Options
from relayout.loader.placement import ArenaPlan
from relayout.loader.sources.checkpoint import RankSource
from relayout.loader.sources.contents import Contents, StoredFile, proven
from relayout.loader.stream import not_shared, stream
from relayout.loader.tensors import make_views, to_device
from relayout.progress import reporting

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class Sharing:
    """Deals out what is streamed."""

    members: Members
    grids: Sequence[Grid]
    """Of each file."""

    def round(self, reads: Sequence[Read], start: int) -> Round:
        """Who reads what of the reads that fill the arena from an offset on."""
        pieces = deal(reads, self.members.num_members, self.grids, start=start)
        return Round(self.members.number, pieces)


def stream_together(
    prepare: Callable[[], tuple[RankSource, Contents, Options]], members: Members
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield one rank's tensors, while all other members of a group, who call this, too, do the same.

    The last `next`, which ends the iteration, belongs to it.

    Args:
        prepare: says what this member loads.

    Raises:
        FormatError, PlanError, OSError, MemoryError: as `api.iter_load`, on any member.
    """
    try:
        with error_hints(), members.together():
            source, contents, options = prepare()
            files, grids = _provable(source, contents.files, options)
            digests = None if options.verify else contents.digests  # By chunks: each member has only parts of tensors.
            contents = replace(contents, files=files, digests=digests)
            tensors = stream(contents, options, Sharing(members, grids))
            columns = [list(column) for column in (contents.names, contents.shapes, contents.reads)]
            mine = _what(source, options), _identity(files, columns, grids, _kind_of(options))
        _check_same(members, members.exchange(mine))
        yield from tensors
        members.is_over = True
    except BaseException as error:
        members.fail(error)
        raise


@dataclass(frozen=True, slots=True)
class _Share:
    """What a member takes part in."""

    plan: ArenaPlan
    rounds: tuple[Round, ...]
    options: Options
    backend: Backend[Any]
    budget: Budget
    what: str
    """What is loaded, for a person."""
    digest: str
    """Of what all members must have in common: files, and who reads what."""


def load_together(
    prepare: Callable[[], tuple[RankSource, ArenaPlan, Options]], group: ProcessGroup
) -> dict[str, torch.Tensor]:
    """Load one rank together with all other members of a group, who call this, too.

    Args:
        prepare: says what this member loads.

    Raises:
        FormatError, PlanError, OSError, MemoryError: as `api.load`, on any member.
    """
    members = Members(group)
    with members.together():
        share = _share(*prepare(), members)
    _check_same(members, members.exchange((share.what, share.digest)))
    arena: Arena[Any] | None = None
    running: RunningJob | None = None
    stop = Stop()
    rounds = share.rounds
    with reporting(share.options.progress, "loading", share.plan.nbytes) as report:
        try:
            arrivals = Arrivals([one.pieces[0].start for one in rounds], [one.nbytes for one in rounds], stop)
            with members.together():
                arena = share.backend.allocate(share.plan.arena_nbytes)
                reads = tuple(read for one in rounds for read in one.reads)
                job = ReadJob(share.plan.files, reads, share.budget, None, arrivals.arrived, stop)
                running = share.backend.start(arena, job)
                base = arena.tensor()
            done = 0
            for number, one in enumerate(rounds):
                with members.together():
                    if not arrivals.wait(number):
                        running.join()  # Raises the job's error.
                    running.settle()
                members.spread(one.within(base))
                done += sum(piece.nbytes for piece in one.pieces)
                if report is not None:
                    report(done)
            with members.together():
                running.join()
                return make_views(to_device(base, share.options.device), share.plan.tensors())
        except BaseException as error:
            if running is not None:
                running.cancel()
            members.fail(error)
            if arena is not None and not members.is_broken:
                arena.discard()
            raise


def _share(source: RankSource, plan: ArenaPlan, options: Options, members: Members) -> _Share:
    """Deal out a load.

    Raises:
        PlanError: it cannot be shared.
    """
    files, grids = _provable(source, plan.files, options)
    plan = replace(plan, files=files)
    choice, budget = options.choose(files)
    if choice.backend.reads_when_used:
        raise not_shared(choice.backend)
    pieces, size = deal(plan.reads, members.num_members, grids), members.num_members
    rounds = tuple(Round(members.number, pieces[first : first + size]) for first in range(0, len(pieces), size))
    digest = _identity(files, plan.arena_nbytes, pieces, _kind_of(options))
    return _Share(plan, rounds, options, choice.backend, budget, _what(source, options), digest)


def _provable(
    source: RankSource, files: tuple[StoredFile, ...], options: Options
) -> tuple[tuple[StoredFile, ...], Sequence[Grid]]:
    """The files, whose chunks are proven when they are read if that is asked for, and where each is best cut.

    Raises:
        PlanError: they are a plain checkpoint's.
    """
    proofs = [file.proof for file in files if file.proof is not None]
    if len(proofs) < len(files):
        raise PlanError(
            "group: nothing in a plain checkpoint shows that all members have the same one; convert it",
            path=str(source.store),
            code="unsupported",
        )
    if not options.verify:
        return files, [Grid()] * len(files)
    return tuple(map(proven, files)), [Grid(proof.data_start, proof.chunk_nbytes) for proof in proofs]


def _kind_of(options: Options) -> str:
    """Of the device."""
    return str(options.device).partition(":")[0]


def _what(source: RankSource, options: Options) -> str:
    what = f"rank {source.rank} of {source.num_ranks} of {source.store} to {_kind_of(options)}"
    return f"{what}, verified" if options.verify else what


def _identity(files: Sequence[StoredFile], *others: object) -> str:
    """A digest of files and of all else that members must have in common."""
    named = [(file.name, file.nbytes, file.proof and file.proof.content) for file in files]
    return digest_hex(repr((named, others)).encode())


def _check_same(members: Members, shares: Sequence[tuple[str, str]]) -> None:
    """Refuse members that load something else.

    Raises:
        PlanError: some do.
    """
    mine = shares[members.number]
    for member, (what, digest) in enumerate(shares):
        if digest != mine[1]:
            members.is_over = True
            other = what if what != mine[0] else "other tensors, or another conversion, of that"
            raise PlanError(
                f"group: member {members.number} loads {mine[0]}, member {member} {other};"
                " all members of a group load the same",
                code="option",
            )
