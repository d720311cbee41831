"""A load that the members of a group share: each reads a part from the store, and all get all of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from relayout.core.digests import digest_hex
from relayout.core.workers import Stop
from relayout.errors import PlanError
from relayout.loader.backends.base import Arena, Backend, ReadJob, RunningJob
from relayout.loader.budgets import Budget
from relayout.loader.group.deal import Grid, Piece, deal
from relayout.loader.group.members import Members
from relayout.loader.loading import Options
from relayout.loader.placement import ArenaPlan
from relayout.loader.sources.checkpoint import RankSource
from relayout.loader.sources.contents import FileProof
from relayout.loader.sources.proven import proven
from relayout.loader.tensors import make_views, to_device
from relayout.progress import reporting

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class _Share:
    """What a member takes part in."""

    plan: ArenaPlan
    pieces: tuple[Piece, ...]
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
        share = _share(*prepare(), members.num_members)
    _check_same(members, members.exchange((share.what, share.digest)))
    arena: Arena[Any] | None = None
    running: RunningJob | None = None
    stop = Stop()
    with reporting(share.options.progress, "loading", share.plan.nbytes) as report:
        try:
            own = [piece for piece in share.pieces if piece.member == members.number]
            arrivals = _Arrivals(own, stop)
            with members.together():
                arena = share.backend.allocate(share.plan.arena_nbytes)
                reads = tuple(read for piece in own for read in piece.reads)
                job = ReadJob(share.plan.files, reads, share.budget, None, arrivals.arrived, stop)
                running = share.backend.start(arena, job)
                base = arena.tensor()
            done = 0
            for first in range(0, len(share.pieces), members.num_members):
                pieces = share.pieces[first : first + members.num_members]
                with members.together():
                    arrivals.wait(first // members.num_members, running)
                members.spread([(piece.member, base[piece.start : piece.end]) for piece in pieces])
                done += sum(piece.nbytes for piece in pieces)
                if report is not None:
                    report(done)
            with members.together():
                running.join()
                return make_views(to_device(base, share.options.device), share.plan.tensors())
        except BaseException:
            if running is not None:
                running.cancel()
            if arena is not None and not members.is_broken:
                arena.discard()
            raise


def _share(source: RankSource, plan: ArenaPlan, options: Options, num_members: int) -> _Share:
    """Deal out a load.

    Raises:
        PlanError: it cannot be shared.
    """
    proofs = [file.proof for file in plan.files if file.proof is not None]
    if len(proofs) < len(plan.files):
        raise PlanError(
            "group: nothing in a plain checkpoint shows that all members have the same one; convert it",
            path=str(source.store),
            code="unsupported",
        )
    if options.verify:  # By chunks: each member has only parts of tensors.
        plan = replace(plan, files=tuple(map(proven, plan.files)))
    choice, budget = options.choose(plan.files)
    if choice.backend.reads_when_used:
        raise PlanError(
            f"backend {choice.backend.name!r} reads when tensors are used, which a group cannot share", code="option"
        )
    pieces = deal(plan.reads, num_members, [_grid(proof, options.verify) for proof in proofs])
    kind = str(options.device).partition(":")[0]
    what = f"rank {source.rank} of {source.num_ranks} of {source.store} to {kind}{', verified' * options.verify}"
    files = [(file.name, file.nbytes, proof.content) for file, proof in zip(plan.files, proofs, strict=True)]
    digest = digest_hex(repr((files, plan.arena_nbytes, pieces, kind)).encode())
    return _Share(plan, pieces, options, choice.backend, budget, what, digest)


def _grid(proof: FileProof, verify: bool) -> Grid:
    return Grid(proof.data_start, proof.chunk_nbytes) if verify else Grid()


def _check_same(members: Members, shares: Sequence[tuple[str, str]]) -> None:
    """Refuse members that load something else.

    Raises:
        PlanError: some do.
    """
    mine = shares[members.number]
    for member, (what, digest) in enumerate(shares):
        if digest != mine[1]:
            other = what if what != mine[0] else "other tensors, or another conversion, of that"
            raise PlanError(
                f"group: member {members.number} loads {mine[0]}, member {member} {other};"
                " all members of a group load the same",
                code="option",
            )


class _Arrivals:
    """How much of each piece is still to be read."""

    def __init__(self, pieces: Sequence[Piece], stop: Stop) -> None:
        self._starts = [piece.start for piece in pieces]
        self._left = [piece.nbytes for piece in pieces]
        self._stop = stop

    def arrived(self, offset: int, nbytes: int) -> None:
        """See `ReadJob.arrived`."""
        number = bisect_right(self._starts, offset) - 1
        with self._stop.condition:
            self._left[number] -= nbytes
            if not self._left[number]:
                self._stop.condition.notify_all()

    def wait(self, number: int, running: RunningJob) -> None:
        """Wait for a piece, if there is one of this number; on a device, the current stream sees its bytes.

        Raises:
            the job's error.
        """
        if number >= len(self._left):
            return
        with self._stop.condition:
            while self._left[number] and not self._stop.requested:
                self._stop.condition.wait()
            is_here = not self._left[number]
        if not is_here:
            running.join()
        running.settle()
