"""relayout.loader.group.plan: of equal slices or of different ones, each byte is read once, and arrives once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.reads import carried_out as arrived

from relayout.core.extents import BLOCK, Grid, Transfer
from relayout.core.slices import NOT_HELD, WHOLE, Slice, slice_transfers
from relayout.format.index import Read
from relayout.loader.group.plan import (
    EXCHANGED_NBYTES,
    DividedTensor,
    Division,
    ExchangedRange,
    ExchangeRound,
    assign_reads,
    plan_exchange,
)

MIB = 2**20
DTYPES = {"U8": np.uint8, "BF16": np.uint16, "F32": np.uint32}
Array = Any


@dataclass(frozen=True)
class Case:
    """Tensors in files of random bytes, and what each member has to have of them, by numpy."""

    files: list[Array]
    tensors: list[DividedTensor]
    expected: list[list[Array]]
    """For each tensor and member: the bytes of the slice."""
    num_members: int
    max_gap: int


@st.composite
def slices(draw: st.DrawFn, shape: tuple[int, ...], num_members: int) -> list[Slice]:
    """Of each member: cut evenly, into parts that some share, anyhow, whole, or not held."""
    kind = draw(st.sampled_from(["even", "even", "shared", "any", "whole", "owned"]))
    axis = draw(st.integers(0, len(shape) - 1))
    if kind == "whole":
        return [WHOLE] * num_members
    if kind == "owned":
        owner = draw(st.integers(0, num_members))
        return [WHOLE if member == owner else NOT_HELD for member in range(num_members)]
    if kind == "any":
        places = st.integers(0, shape[axis])
        pairs = st.lists(st.tuples(places, places).map(sorted), max_size=3)
        return [Slice.along(axis, [(low, high - low) for low, high in draw(pairs)]) for _ in range(num_members)]
    degree = draw(st.integers(1, 5))
    ranks = [draw(st.integers(0, degree - 1)) for _ in range(num_members)] if kind == "shared" else range(num_members)
    ends = np.linspace(0, shape[axis], (degree if kind == "shared" else num_members) + 1).astype(int).tolist()
    return [Slice.along(axis, [(ends[rank], ends[rank + 1] - ends[rank])]) for rank in ranks]


def taken(whole: Array, part: Slice) -> Array:
    """The bytes of a slice, by numpy."""
    if not part.is_held:
        return np.zeros(0, np.uint8)
    for axis, ranges in part.by_axis or ():
        numbers = [number for start, length in ranges for number in range(start, start + length)]
        whole = whole.take(np.array(numbers, int), axis)
    return np.ascontiguousarray(whole).reshape(-1).view(np.uint8)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_members = draw(st.integers(1, 5))
    max_gap = draw(st.sampled_from([0, 64, 1000, 2**18]))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    files, tensors, expected = [], [], []
    for file in range(draw(st.integers(1, 2))):
        content = [random.integers(0, 256, draw(st.integers(0, 5000)), np.uint8)]
        for _ in range(draw(st.integers(0, 5))):
            offset = sum(map(len, content))
            dtype = draw(st.sampled_from([*DTYPES]))
            shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 8, 40, 300]), min_size=1, max_size=3)))
            while np.prod(shape) > 50_000:
                shape = shape[1:]
            whole = random.integers(0, 256, (*shape, DTYPES[dtype]().itemsize), np.uint8)
            content.append(whole.reshape(-1))
            parts = draw(slices(shape, num_members))
            transfers = tuple(slice_transfers(dtype, shape, part) for part in parts)
            tensors.append(DividedTensor(file, offset, Division.of(transfers, max_gap)))
            expected.append([taken(whole, part) for part in parts])
        files.append(np.concatenate(content))
    order = draw(st.permutations(range(len(tensors))))
    return Case(files, [tensors[row] for row in order], [expected[row] for row in order], num_members, max_gap)


def copied(source: Array, target: Array, written: Array, transfer: Transfer) -> None:
    for run in transfer.runs():
        target[run.target : run.target + run.nbytes] = source[run.source : run.source + run.nbytes]
        written[run.target : run.target + run.nbytes] += 1


def carried_out(case: Case, rounds: Sequence[ExchangeRound]) -> tuple[list[list[Array]], list[list[Array]]]:
    """What each member has of each tensor after all rounds, and how often each byte was written."""
    found = [[np.zeros_like(part) for part in parts] for parts in case.expected]
    written = [[np.zeros_like(part) for part in parts] for parts in case.expected]
    for piece in (piece for each in rounds for piece in each.ranges):
        view = case.files[piece.file][piece.extent.offset : piece.extent.end]
        for member in range(case.num_members):
            kept = [*piece.kept(case.tensors, member)]
            assert sum(part.total_nbytes for _, part in kept) == piece.sizes[member]
            for row, part in kept:
                copied(view, found[row][member], written[row][member], part)
    return found, written


@given(cases(), st.sampled_from([BLOCK, 3 * BLOCK, EXCHANGED_NBYTES]), st.sampled_from([BLOCK, 2**40]))
def test_every_byte_arrives_once_and_is_read_once(case: Case, most: int, received: int) -> None:
    rounds = plan_exchange(case.tensors, case.num_members, most_nbytes=most, most_received=received)
    found, written = carried_out(case, rounds)
    read = [np.zeros(file.size, np.uint8) for file in case.files]
    for each in rounds:
        for piece in each.ranges:
            read[piece.file][piece.extent.offset : piece.extent.end] += 1
    for row, tensor in enumerate(case.tensors):
        is_exchanged = bool(tensor.division.exchanged)
        for member, expected in enumerate(case.expected[row]):
            assert (written[row][member] == is_exchanged).all()
            if not is_exchanged:  # Each member reads its own: no other does.
                for transfer in tensor.division.slices[member]:
                    for run in transfer.runs():
                        start = tensor.offset + run.source
                        read[tensor.file][start : start + run.nbytes] += 1
                        target = slice(run.target, run.target + run.nbytes)
                        found[row][member][target] = case.files[tensor.file][start : start + run.nbytes]
            assert (found[row][member] == expected).all()
    assert all((times <= 1).all() for times in read)


@given(cases(), st.sampled_from([BLOCK, 3 * BLOCK]), st.sampled_from([BLOCK, 8 * BLOCK]))
def test_ranges_and_rounds_keep_their_limits(case: Case, most: int, received: int) -> None:
    rounds = plan_exchange(case.tensors, case.num_members, most_nbytes=most, most_received=received)
    for each in rounds:
        members = [piece.member for piece in each.ranges]
        assert len(set(members)) == len(members)
        for member in range(case.num_members):
            got = sum(piece.sizes[member] for piece in each.ranges)
            assert got <= received or len(each.ranges) == 1
            for other in range(case.num_members):
                assert each.sent(member)[other] == each.received(other)[member]
                mine = [piece.sizes[other] for piece in each.ranges if piece.member == member]
                assert each.sent(member)[other] == (sum(mine) if member != other else 0)
        for piece in each.ranges:
            assert 0 < piece.extent.nbytes <= most
            blocks = -(-piece.extent.end // BLOCK) - piece.extent.offset // BLOCK
            assert sum(piece.sizes) <= most or blocks == 1
            assert_needed(case, piece)


def assert_needed(case: Case, piece: ExchangedRange) -> None:
    """What nobody needs is in gaps that are shorter than a request is worth."""
    needed = np.zeros(piece.extent.nbytes, bool)
    for member in range(case.num_members):
        for _, part in piece.kept(case.tensors, member):
            for run in part.runs():
                needed[run.source : run.source + run.nbytes] = True
    ends = np.flatnonzero(np.diff(np.concatenate([[1], needed, [1]])))
    assert all(end - start <= case.max_gap for start, end in ends.reshape(-1, 2))


def test_long_runs_of_one_member_each_are_not_exchanged() -> None:
    halves = [slice_transfers("U8", (8, 1000), Slice.along(0, [(start, 4)])) for start in (0, 4)]
    assert not Division.of(tuple(halves), 2**18).exchanged
    columns = tuple(slice_transfers("U8", (8, 1000), Slice.along(1, [(start, 500)])) for start in (0, 500))
    assert [(one.offset, one.nbytes) for one in Division.of(columns, 2**18).exchanged] == [(0, 8000)]
    assert not Division.of(columns, 500).exchanged  # Each run is a request of its own.


def test_each_member_reads_as_much() -> None:
    columns = [slice_transfers("U8", (7168, 2048), Slice.along(1, [(start, 512)])) for start in range(0, 2048, 512)]
    division = Division.of(tuple(columns), 2**18)
    whole = 7168 * 2048  # Three ranges, and a smaller one for the fourth member.
    rounds = plan_exchange([DividedTensor(number, 100, division) for number in range(20)], 4)
    nbytes = Counter[int]()
    for piece in (piece for each in rounds for piece in each.ranges):
        nbytes[piece.member] += piece.extent.nbytes
    assert [len(each.ranges) for each in rounds] == [4] * 20
    assert sum(nbytes.values()) == 20 * whole
    assert max(nbytes.values()) - min(nbytes.values()) <= EXCHANGED_NBYTES


@st.composite
def arenas(draw: st.DrawFn) -> tuple[list[Read], int]:
    """Reads of two files that fill an arena: long runs, strided ones in between each other, and holes."""
    reads, end, sources = [], 0, [0, 0]
    for _ in range(draw(st.integers(1, 6))):
        end += draw(st.sampled_from([0, 16, 100]))
        file = draw(st.integers(0, 1))
        if draw(st.booleans()):
            nbytes = draw(st.integers(1, 60_000))
            reads.append(Read(file, Transfer(sources[file], end, nbytes)))
            sources[file] += nbytes + draw(st.integers(0, 9000))
            end += nbytes
        else:  # Two files have the halves of each row.
            row, count = draw(st.integers(1, 900)), draw(st.integers(2, 60))
            for number in range(2):
                gap = draw(st.integers(0, 50))
                stride = row + gap
                reads.append(Read(number, Transfer(sources[number], end + number * row, row, count, stride, 2 * row)))
                sources[number] += stride * count
            end += 2 * row * count
    return draw(st.permutations(reads)), end


@given(
    arenas(),
    st.integers(1, 5),
    st.sampled_from([BLOCK, 5 * BLOCK, MIB]),
    st.sampled_from([Grid(), Grid(100, 65536), Grid(0, 1)]),
)
def test_the_pieces_bring_each_byte_of_the_reads_once(
    arena: tuple[list[Read], int], num_members: int, most: int, grid: Grid
) -> None:
    reads, nbytes = arena
    files = [np.random.default_rng(seed).integers(0, 256, 10**6, dtype=np.uint8) for seed in range(2)]
    pieces = assign_reads(reads, num_members, [grid, grid], most_nbytes=most)
    assert [piece.member for piece in pieces] == [number % num_members for number in range(len(pieces))]
    ends = [0, *(piece.end for piece in pieces)]
    assert all(end <= piece.start for end, piece in zip(ends, pieces, strict=False))
    for piece in pieces:
        assert all(piece.start <= one.transfer.target and one.transfer.target_end <= piece.end for one in piece.reads)
    found = arrived([one for piece in pieces for one in piece.reads], files, nbytes)
    np.testing.assert_array_equal(found, arrived(reads, files, nbytes))  # The bytes, and how often each is written.
    assert sum(piece.nbytes for piece in pieces) == sum(one.transfer.total_nbytes for one in reads)


def test_each_member_reads_as_much_and_no_block_is_read_by_two() -> None:
    reads = [Read(0, Transfer(4096, 0, 100 * MIB)), Read(1, Transfer(8192, 100 * MIB + 4096, 60 * MIB + 5))]
    pieces = assign_reads(reads, 4, [Grid(), Grid()], most_nbytes=16 * MIB)
    of_member = [sum(one.nbytes for one in pieces if one.member == member) for member in range(4)]
    assert max(of_member) - min(of_member) < MIB / 2
    assert all(piece.end - piece.start <= 16 * MIB + BLOCK for piece in pieces)
    # Where the second file is not congruent with the wanted place, its own grid counts.
    assert all(one.transfer.source % BLOCK == 0 for piece in pieces for one in piece.reads)


def test_pieces_end_where_the_chunks_of_the_files_end() -> None:
    grid = Grid(12345, MIB)
    read = Read(0, Transfer(12345, 0, 50 * MIB))
    pieces = assign_reads([read], 3, [grid], most_nbytes=8 * MIB)
    assert len(pieces) > 6
    assert all((one.transfer.source - 12345) % MIB == 0 for piece in pieces for one in piece.reads)


def test_nothing_is_assigned_where_there_is_nothing() -> None:
    assert assign_reads([], 3, []) == ()
