"""The arena, simulated on byte arrays: reads bring each tensor to its place, and nothing else."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import numpy.typing as npt
from hypothesis import example, given
from support.sidecar import Bytes, Files, rank_files

from relayout.core.extents import Transfer
from relayout.format.index import ArenaLayout, Read, plan_arena

BLOCK = 4096


def contents(files: Files) -> list[Bytes]:
    """The files' bytes, which depend on their position."""
    return [
        (((np.arange(start + sum(sizes), dtype=np.uint64) + 1) * (2654435761 + number)) >> 9).astype(np.uint8)
        for number, (start, _, sizes) in enumerate(files)
    ]


def simulate(arena: ArenaLayout, stored: list[Bytes]) -> tuple[Bytes, npt.NDArray[np.int64]]:
    """The arena's bytes when all reads are done, and how often each was written."""
    memory, times = np.zeros(arena.nbytes, np.uint8), np.zeros(arena.nbytes, np.int64)
    for read in arena.reads:
        one = read.transfer
        for run in range(one.count):
            source, target = one.source + run * one.source_stride, one.target + run * one.target_stride
            assert source + one.nbytes <= len(stored[read.file])
            assert target + one.nbytes <= arena.nbytes
            memory[target : target + one.nbytes] = stored[read.file][source : source + one.nbytes]
            times[target : target + one.nbytes] += 1
    return memory, times


@given(files=rank_files())
@example(files=[(4096, [4096], [0])])
@example(files=[(512, [512, 528], [16, 5]), (512, [512], [5])])
def test_reads_bring_each_tensor_to_its_place_in_the_arena_and_nothing_else(files: Files) -> None:
    arena = plan_arena(files)
    stored = contents(files)
    memory, times = simulate(arena, stored)
    tensors = np.zeros(arena.nbytes, np.int64)
    for number, (_, offsets, sizes) in enumerate(files):
        for offset, nbytes, place in zip(offsets, sizes, arena.offsets[number], strict=True):
            assert place % 16 == 0
            assert place + nbytes <= arena.nbytes
            tensors[place : place + nbytes] += 1
            np.testing.assert_array_equal(memory[place : place + nbytes], stored[number][offset : offset + nbytes])
    assert tensors.max(initial=0) <= 1  # Tensors do not overlap,
    np.testing.assert_array_equal(times, tensors)  # and are what is read.


@given(files=rank_files())
def test_the_bulk_of_a_file_can_be_read_directly_in_whole_blocks(files: Files) -> None:
    arena = plan_arena(files)
    assert arena.nbytes % BLOCK == 0
    blocks = [
        set(range(read.transfer.target // BLOCK, (read.transfer.target_end - 1) // BLOCK + 1)) for read in arena.reads
    ]
    expected_reads = 0
    for number, (data_start, _, sizes) in enumerate(files):
        bulk_nbytes = sum(size for size in sizes if size % 16 == 0)
        odd = [size for size in sizes if size % 16]
        expected_reads += bool(bulk_nbytes) + len(list(groupby(odd)))
        if bulk_nbytes:
            [at] = [
                i for i, read in enumerate(arena.reads) if (read.file, read.transfer.source) == (number, data_start)
            ]
            bulk = arena.reads[at].transfer
            assert (bulk.nbytes, bulk.count) == (bulk_nbytes, 1)
            assert (bulk.target - bulk.source) % BLOCK == 0
            assert not any(blocks[at] & other for i, other in enumerate(blocks) if i != at)
    assert len(arena.reads) == expected_reads


@given(files=rank_files())
def test_the_arena_is_little_larger_than_its_tensors(files: Files) -> None:
    nbytes = sum(sum(sizes) for _, _, sizes in files)
    num_odd = sum(size % 16 != 0 for _, _, sizes in files for size in sizes)
    # For each file: a start congruent with the file's, and the end of the bulk rounded up; then whole blocks.
    assert plan_arena(files).nbytes <= nbytes + 15 * num_odd + 3 * BLOCK * len(files) + BLOCK


def test_an_arena_by_hand() -> None:
    files: Files = [(512, [512, 1024, 1040, 1045], [512, 16, 5, 5]), (4096, [4096, 8192], [4096, 3])]
    assert plan_arena(files) == ArenaLayout(
        nbytes=16384,
        reads=(
            Read(0, Transfer(512, 512, 528)),
            Read(0, Transfer(1040, 4096, 5, 2, 5, 16)),
            Read(1, Transfer(4096, 8192, 4096)),
            Read(1, Transfer(8192, 12288, 3)),
        ),
        offsets=((512, 1024, 4096, 4112), (8192, 12288)),
    )
