"""A save by all processes of a group: each writes the files of some ranks, and one publishes the folder."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial

import xxhash

from relayout.checkpoint.converted import CONVERTED
from relayout.checkpoint.identity import identity_of
from relayout.conversion.copy import run_unit
from relayout.conversion.jobs import complete_parts
from relayout.conversion.journal import Journal, TensorDigests, Written, read_journal
from relayout.conversion.layout import Conversion
from relayout.conversion.resume import fingerprint_of
from relayout.conversion.run import ConversionPlan, Summary, needed_nbytes, summary_of
from relayout.conversion.side_files import output_modes
from relayout.conversion.sidecar import HeaderWriter, digests_of_all
from relayout.conversion.steps import CopyPlan, Step
from relayout.core.digests import EMPTY_DIGEST
from relayout.core.extents import Extent, Transfer, split
from relayout.core.slices import CutTensor
from relayout.errors import FormatError, PlanError
from relayout.loader.group.collectives import Group
from relayout.progress import Progress, reporting
from relayout.saving.exchange import Exchange, Range, Wanted
from relayout.storage.protocols import LIVE, Staging


def save_together(
    planned: ConversionPlan,
    exchange: Exchange,
    group: Group,
    *,
    token: str,
    force: bool,
    threads: int,
    chunk_nbytes: int,
    progress: Progress,
) -> Summary:
    """Carry out a save, planned alike by all members; the first publishes.

    Args:
        token: random, the same for all members.
        threads, chunk_nbytes: as for `CopyPlan` and `run_unit`.

    Raises:
        FormatError, PlanError, OSError, MemoryError: as `relayout.save`, on any member. The output is as it was.
    """
    started = time.monotonic()
    if planned.has_whole or not planned.has_all:
        raise PlanError("a group writes all ranks, and layout='ranks': choose these", code="unsupported")
    shared, part, num_members = f"{LIVE}{token}", _part_name(group.index), group.num_members
    shares = [planned.only(ranks) if ranks else None for ranks in shares_of(planned.plan.num_ranks, num_members)]
    modes = output_modes(planned.source)
    fingerprint = fingerprint_of(planned, identity_of(planned.source).content)
    try:
        with ExitStack() as stack:
            staging: Staging | None = None
            with group.collective():
                if group.index == 0:
                    planned.output.check_output(planned.source.root, CONVERTED, force=force)
                    whole = planned.output.stage(CONVERTED, replace=force, modes=modes, shared=shared)
                    staging = stack.enter_context(whole)
                    staging.check_space(needed_nbytes(planned))
            with ExitStack() as adding:
                staged = planned.output.stage_part(CONVERTED, shared, part, replace=True, modes=modes)
                own = adding.enter_context(staged)
                with reporting(progress if group.index == 0 else None, "saving", planned.layout.nbytes) as report:
                    written = _write(planned, shares, exchange, group, own, threads, chunk_nbytes, report)
                # If this fails, the first member deletes all parts: when all have been added.
                with (
                    group.collective(),
                    adding.pop_all(),
                    Journal(own, fingerprint, append=False, name=part) as journal,
                ):
                    journal.add(written)
            sources = _hash_sources(planned, exchange, group, chunk_nbytes)
            hashed = group.all_gather(sources)
            with group.collective():
                if staging is not None:
                    staging.take_parts()
                    parts = [_noted(staging, member) for member in range(num_members)]
                    complete_parts(staging, planned, _merged(planned, shares, parts, hashed))
                    stack.close()  # Publishes.
            return summary_of(planned, 0, time.monotonic() - started)
    except BaseException as error:
        group.fail(error)
        raise


def _part_name(member: int) -> str:
    return f"member-{member}"


def _noted(staging: Staging, member: int) -> Written:
    """What a member has written, by the notes of its part.

    Raises:
        FormatError: there are none.
    """
    journal = read_journal(staging, _part_name(member))
    if journal is None:
        raise FormatError("a part was deleted while it was saved", path=staging.location, code="missing")
    return journal[1]


def shares_of(num_ranks: int, num_members: int) -> list[list[int]]:
    """The ranks whose files each member writes: of few ranks, members that are far apart."""
    shares: list[list[int]] = [[] for _ in range(num_members)]
    for rank in range(num_ranks):
        shares[rank * num_members // num_ranks if num_ranks < num_members else rank % num_members].append(rank)
    return shares


def _write(
    planned: ConversionPlan,
    shares: Sequence[Conversion | None],
    exchange: Exchange,
    group: Group,
    staging: Staging,
    threads: int,
    chunk_nbytes: int,
    report: Callable[[int], None],
) -> Written:
    """Write this member's files, and serve the others."""
    own = shares[group.index]
    headers = None if own is None else HeaderWriter(staging, own)
    plan = None if own is None else CopyPlan(own, chunk_nbytes=chunk_nbytes)
    written = Written()
    num_units, files = len(planned.layout.units), planned.source.files

    def ranges_of(step: Step) -> list[Range]:
        return [(files[one.file].name, one.extent) for one in step.ranges]

    deliver = partial(exchange.deliver, ranges_of=ranges_of, wanted=_slices_wanted(planned, shares))
    for unit in range(num_units):
        if plan is None or headers is None:
            deque(deliver(()), 0)
        else:
            done = run_unit(plan, unit, staging, threads=threads, deliver=deliver)
            headers.write(unit, done)
            written = Written({**written.tensors, **done.tensors}, {**written.chunks, **done.chunks})
        report(planned.layout.nbytes * (unit + 1) // num_units)
    return written


def _slices_wanted(planned: ConversionPlan, shares: Sequence[Conversion | None]) -> Wanted:
    """What each member wants of a tensor: the slices of the ranks whose files it writes."""

    @cache
    def wanted(member: int, tensor: CutTensor) -> list[Transfer]:
        share = shares[member]
        which = dict.fromkeys(tensor.cut.which[rank] for rank in (() if share is None else share.ranks))
        whole = [one for one in which if tensor.cut.distinct[one].is_whole]
        return [part for one in whole[:1] or which for part in tensor.transfers[one]]

    return lambda member, t: wanted(member, planned.cut[t])


def _hash_sources(planned: ConversionPlan, exchange: Exchange, group: Group, chunk_nbytes: int) -> dict[int, str]:
    """Digests of whole tensors, of which no member has all bytes to write: each hashes some."""
    tensors, files = planned.source.tensors, planned.source.files
    unknown = [t for t, cut in enumerate(planned.cut) if tensors[t].extent.nbytes and _holder_of_whole(cut) is None]
    loads = [0] * group.num_members
    mine = []
    for t in sorted(unknown, key=lambda t: -tensors[t].extent.nbytes):
        member = loads.index(min(loads))
        loads[member] += tensors[t].extent.nbytes
        if member == group.index:
            mine.append(t)

    def wanted(_: int, t: int) -> Sequence[Transfer]:
        return [Transfer(0, 0, tensors[t].extent.nbytes)]

    def range_of(piece: tuple[int, Extent]) -> list[Range]:
        return [(files[tensors[piece[0]].file].name, piece[1])]

    running: dict[int, xxhash.xxh3_128] = {}
    pieces = ((t, piece) for t in sorted(mine) for piece in split(tensors[t].extent, chunk_nbytes))
    for t, piece in exchange.deliver(pieces, range_of, wanted):
        view = memoryview(bytearray(piece.nbytes))
        exchange.fill(files[tensors[t].file].name, piece, view)
        running.setdefault(t, xxhash.xxh3_128()).update(view)
    return {t: digest.hexdigest() for t, digest in running.items()}


def _holder_of_whole(tensor: CutTensor) -> int | None:
    """A rank that holds a tensor whole; None if none does."""
    holders = (tensor.cut.holders[which] for which, part in enumerate(tensor.cut.distinct) if part.is_whole)
    return next((ranks[0] for ranks in holders), None)


def _merged(
    planned: ConversionPlan,
    shares: Sequence[Conversion | None],
    parts: Sequence[Written],
    hashed: Sequence[Mapping[int, str]],
) -> Written:
    """What all members have written, as one conversion has it."""
    sources = {t: digest for digests in hashed for t, digest in digests.items()}
    number_of = {file.name: number for number, file in enumerate(planned.layout.files)}
    by_rank: dict[int, tuple[Conversion, Sequence[TensorDigests]]] = {}
    chunks: dict[int, bytes] = {}
    for share, written in zip(shares, parts, strict=True):
        if share is not None:
            by_rank |= dict.fromkeys(share.ranks, (share, digests_of_all(share, written.tensors)))
            names = [file.name for file in share.layout.files]
            chunks |= {number_of[names[number]]: digests for number, digests in written.chunks.items()}

    def slice_digest(t: int, rank: int) -> str:
        share, digests = by_rank[rank]
        return digests[t].slices[share.cut[t].cut.which[rank]]

    tensors = {}
    for t, tensor in enumerate(planned.cut):
        slices = tuple(slice_digest(t, ranks[0]) for ranks in tensor.cut.holders)
        whole = _holder_of_whole(tensor)
        has_bytes = planned.source.tensors[t].extent.nbytes > 0
        source = slice_digest(t, whole) if whole is not None else sources[t] if has_bytes else EMPTY_DIGEST
        tensors[t] = TensorDigests(source, slices)
    return Written(tensors, chunks)
