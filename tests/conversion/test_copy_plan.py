"""relayout.conversion.copy_plan: steps carried out in memory by numpy give each rank what numpy slicing gives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.bits import pattern
from support.planning import all_slices, conversion_of, plan_of

from relayout.checkpoint.source import SourceCheckpoint, SourceFile, SourceTensor
from relayout.conversion.copy_plan import CopyPlan, CopyStep
from relayout.conversion.layout import Conversion, Layout
from relayout.core.extents import Extent, Transfer
from relayout.core.slices import BITS, NOT_HELD, WHOLE, Range, Slice
from relayout.plans.plan import Plan
from relayout.storage.local.store import LocalStore

Array = npt.NDArray[Any]

BLOCK = 4096


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are arrays."""

    source: SourceCheckpoint
    plan: Plan
    files: list[Array]


def checkpoint(
    tensors: Sequence[tuple[str, tuple[int, ...], tuple[Slice, ...]]],
    *,
    num_ranks: int,
    file_of: Sequence[int] = (),
    order: Sequence[int] = (),
    data_start: int = 1000,
) -> Checkpoint:
    """Tensors (dtype, shape, slice of each rank) one behind the other in their files, in `order`."""
    file_of = file_of or [0] * len(tensors)
    ends = [data_start + 8 * number for number in range(max(file_of, default=0) + 1)]
    placed: dict[int, SourceTensor] = {}
    for t in order or range(len(tensors)):
        dtype, shape, _ = tensors[t]
        nbytes = prod(shape) * BITS[dtype] // 8
        placed[t] = SourceTensor(f"t{t}", dtype, shape, file_of[t], Extent(ends[file_of[t]], nbytes))
        ends[file_of[t]] += nbytes
    files = tuple(SourceFile(f"{i}.safetensors", end, data_start, b"") for i, end in enumerate(ends))
    in_model_order = tuple(placed[t] for t in range(len(tensors)))
    source = SourceCheckpoint(LocalStore(Path("checkpoint")), files, in_model_order)
    plan = plan_of("x", num_ranks, tuple(slices for _, _, slices in tensors))
    return Checkpoint(source, plan, [pattern(end, i) for i, end in enumerate(ends)])


def tensor_bytes(source: Checkpoint, t: int) -> Array:
    """A tensor's elements, each as a row of bytes along one more axis."""
    tensor = source.source.tensors[t]
    stored = source.files[tensor.file][tensor.extent.offset : tensor.extent.end]
    return stored.reshape(*tensor.shape, BITS[tensor.dtype] // 8)


def sliced(source: Checkpoint, t: int, part: Slice) -> Array:
    """What numpy says a rank holds, as flat bytes."""
    whole = tensor_bytes(source, t)
    if not part.is_held:
        return np.zeros(0, np.uint8)
    for axis, ranges in part.by_axis or ():
        places = [np.arange(0), *(np.arange(start, start + length) for start, length in ranges)]
        whole = np.take(whole, np.concatenate(places), axis)
    return whole.reshape(-1)


def places(transfer: Transfer) -> tuple[Array, Array]:
    """Positions of the bytes read and written, in order."""
    runs, within = np.arange(transfer.count)[:, None], np.arange(transfer.nbytes)
    source = transfer.source + runs * transfer.source_stride + within
    target = transfer.target + runs * transfer.target_stride + within
    return source.reshape(-1), target.reshape(-1)


class Execution:
    """Carries out steps, and counts what is read and written how often."""

    def __init__(self, source: Checkpoint, layout: Layout) -> None:
        self.source = source
        self.outputs = [np.zeros(file.nbytes, np.uint8) for file in layout.files]
        self.times_written = [np.zeros(file.nbytes, int) for file in layout.files]
        self.writes: list[list[int]] = [[] for _ in layout.files]
        """Offsets, in the order in which they are written."""
        self.times_read = [np.zeros(len(file), int) for file in source.files]
        self.hashed: dict[tuple[int, int], list[tuple[int, Array]]] = defaultdict(list)
        self.chunks: dict[int, list[int]] = defaultdict(list)
        """Of each tensor: where in it the steps begin, in their order."""

    def run(self, step: CopyStep) -> None:
        tensors = self.source.source.tensors
        readable = self._readable(step)
        covered = dict(step.tensors)
        assert len(covered) == len(step.tensors)
        assert step.nbytes == sum(extent.nbytes for extent in covered.values())
        for t, extent in covered.items():
            self.chunks[t].append(extent.offset - tensors[t].extent.offset)
            self.times_read[tensors[t].file][extent.offset : extent.end] += 1
            assert readable[tensors[t].file][extent.offset : extent.end].all()
        for span in step.spans:
            memory, filled = np.zeros(span.nbytes, np.uint8), np.zeros(span.nbytes, int)
            for piece in span.pieces:
                tensor = tensors[piece.tensor]
                extent = covered.get(piece.tensor, tensor.extent)
                for transfer in piece.transfers:
                    read, write = places(transfer.shifted(source=tensor.extent.offset, target=-piece.offset))
                    assert extent.offset <= read.min()
                    assert read.max() < extent.end
                    assert write.min() >= 0
                    assert write.max() < piece.nbytes
                    assert readable[tensor.file][read].all()
                    memory[piece.position + write] = self.source.files[tensor.file][read]
                    np.add.at(filled, piece.position + write, 1)
                if piece.is_hashed:
                    stored = memory[piece.position : piece.position + piece.nbytes]
                    self.hashed[piece.tensor, piece.slice].append((piece.offset, stored))
            assert (filled == 1).all()
            assert span.targets
            for target in span.targets:
                window = slice(target.offset, target.offset + span.nbytes)
                self.outputs[target.file][window] = memory
                self.times_written[target.file][window] += 1
                self.writes[target.file].append(target.offset)

    def _readable(self, step: CopyStep) -> list[Array]:
        """Which bytes of each file the step's requests bring, blocks of it that overlap nowhere."""
        readable = [np.zeros(len(file), bool) for file in self.source.files]
        for one in step.ranges:
            assert one.extent.offset % BLOCK == one.extent.nbytes % BLOCK == 0
            assert one.extent.offset < len(self.source.files[one.file]) > one.extent.end - BLOCK
            window = readable[one.file][one.extent.offset : one.extent.end]
            assert not window.any()
            window[:] = True
        return readable


def execute(
    source: Checkpoint, conversion: Conversion, chunk_nbytes: int, small_nbytes: int, by_source: bool
) -> Execution:
    execution = Execution(source, conversion.layout)
    limit = max(-(-chunk_nbytes // BLOCK) * BLOCK, small_nbytes)
    plan = CopyPlan(conversion, chunk_nbytes=chunk_nbytes, small_nbytes=small_nbytes, by_source=by_source)
    for unit, tensors in enumerate(conversion.layout.units):
        for step in plan.steps(unit):
            assert step.nbytes <= limit
            assert {t for t, _ in step.tensors} <= set(tensors)
            files = {target.file for span in step.spans for target in span.targets}
            assert files <= set(conversion.layout.files_of_unit[unit])
            execution.run(step)
    return execution


def check(
    source: Checkpoint,
    *,
    chunk_nbytes: int,
    small_nbytes: int,
    max_part_nbytes: int = 10**9,
    by_source: bool = False,
) -> Execution:
    """Carry out a whole conversion, and compare every byte of it with numpy's slices."""
    checkpoint, plan = source.source, source.plan
    conversion = conversion_of(checkpoint, plan, 512, max_part_nbytes=max_part_nbytes)
    layout = conversion.layout
    execution = execute(source, conversion, chunk_nbytes, small_nbytes, by_source)

    for number, times in enumerate(execution.times_read):
        expected = np.zeros(len(times), int)
        for tensor in checkpoint.tensors:
            if tensor.file == number:
                expected[tensor.extent.offset : tensor.extent.end] = 1
        np.testing.assert_array_equal(times, expected)

    for number, file in enumerate(layout.files):
        times = execution.times_written[number]
        assert not times[: file.data_start].any()
        assert (times[file.data_start :] == 1).all()
        for t, offset in zip(file.tensors, file.offsets, strict=True):
            expected = sliced(source, t, plan.cut(t).slices[file.holder])
            found = execution.outputs[number][offset : offset + len(expected)]
            np.testing.assert_array_equal(found, expected)
    if by_source:  # For what is put back: a step has all slices of its bytes, in any order.
        return execution
    for offsets in execution.writes:
        assert offsets == sorted(offsets)

    # Threads that hash start in this order: in another one they could wait for each other.
    for starts in execution.chunks.values():
        assert starts == sorted(set(starts))
    for t, slices in enumerate(all_slices(plan)):
        for which, part in enumerate(dict.fromkeys(slices)):
            hashed = execution.hashed.pop((t, which), [])
            pieces = [memory for _, memory in hashed]
            assert [start for start, _ in hashed] == [sum(map(len, pieces[:n])) for n in range(len(pieces))]
            expected = np.zeros(0, np.uint8) if part.is_whole else sliced(source, t, part)
            np.testing.assert_array_equal(np.concatenate([np.zeros(0, np.uint8), *pieces]), expected)
    assert not execution.hashed
    return execution


def even(axis: int, num_ranks: int, group: int) -> tuple[Slice, ...]:
    return tuple(Slice.along(axis, ((rank * group, group),)) for rank in range(num_ranks))


def replicated(axis: int, num_ranks: int, group: int) -> tuple[Slice, ...]:
    """Two ranks share each group."""
    return tuple(Slice.along(axis, ((rank // 2 * group, group),)) for rank in range(num_ranks))


@st.composite
def parts_of(draw: st.DrawFn, size: int) -> list[list[Range]]:
    """An axis in pieces, equal ones or any, that are dealt out to parts in any order: one to each, several or none."""
    pitch = draw(st.integers(-(-size // 12), size))
    borders = draw(st.sampled_from([[*range(pitch, size, pitch)]]) | st.lists(st.integers(0, size), max_size=4))
    pieces = [(start, end - start) for start, end in pairwise([0, *sorted(borders), size])]
    dealt, num_parts = draw(st.permutations(pieces)), draw(st.integers(1, 4))
    return [dealt[part::num_parts] for part in range(num_parts)]


@st.composite
def tensors_of(draw: st.DrawFn, num_ranks: int) -> tuple[str, tuple[int, ...], tuple[Slice, ...]]:
    """A tensor cut along any axes. Ranks hold any of its parts, also the same, all of it, or nothing."""
    dtype = draw(st.sampled_from(["U8", "BF16", "F32"]))
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 5, 16, 33, 200]), min_size=0, max_size=3))
    while prod(shape) > 8000:
        shape[shape.index(max(shape))] //= 4
    by_axis = {axis: draw(parts_of(size)) for axis, size in enumerate(shape) if draw(st.booleans())}
    parts = [Slice.of(dict(zip(by_axis, chosen, strict=True))) for chosen in product(*by_axis.values())]
    slices = draw(st.lists(st.sampled_from([*parts, WHOLE, NOT_HELD]), min_size=num_ranks, max_size=num_ranks))
    if not by_axis and shape and draw(st.integers(0, 9)) == 0:
        shape[0] = 0
    return dtype, tuple(shape), tuple(slices)


@st.composite
def checkpoints(draw: st.DrawFn) -> Checkpoint:
    num_ranks = draw(st.integers(1, 4))
    tensors = draw(st.lists(tensors_of(num_ranks), min_size=1, max_size=6))
    file_of = draw(st.lists(st.integers(0, 2), min_size=len(tensors), max_size=len(tensors)))
    return checkpoint(
        tensors,
        num_ranks=num_ranks,
        file_of=file_of,
        order=draw(st.permutations(range(len(tensors)))),
        data_start=draw(st.integers(9, 5000)),
    )


@given(
    source=checkpoints(),
    chunk_nbytes=st.sampled_from([1, 100, 1000, 4096, 10_000, 50_000]),
    small_nbytes=st.sampled_from([0, 1, 300, 10_000, 10**6]),
    max_part_nbytes=st.sampled_from([500, 20_000, 10**9]),
    by_source=st.booleans(),
)
def test_the_steps_put_every_byte_where_it_belongs_just_once(
    source: Checkpoint, chunk_nbytes: int, small_nbytes: int, max_part_nbytes: int, by_source: bool
) -> None:
    check(
        source,
        chunk_nbytes=chunk_nbytes,
        small_nbytes=small_nbytes,
        max_part_nbytes=max_part_nbytes,
        by_source=by_source,
    )


def steps_of(source: Checkpoint, **sizes: int) -> Iterator[CopyStep]:
    conversion = conversion_of(source.source, source.plan, 512)
    return CopyPlan(conversion, **sizes).steps(0)


def test_ranks_that_hold_the_same_slice_are_written_from_one_span() -> None:
    source = checkpoint([("BF16", (64, 130), replicated(0, 4, 32))], num_ranks=4)
    [step] = steps_of(source, small_nbytes=0)
    assert [[target.file for target in span.targets] for span in step.spans] == [[0, 1], [2, 3]]


def test_small_neighbors_share_a_step_up_to_the_size_of_a_chunk_a_request_and_a_span() -> None:
    tensors = [("U8", (100,), (WHOLE,)) for _ in range(10)]
    source = checkpoint(tensors, num_ranks=1)
    [step] = steps_of(source)
    assert len(step.tensors) == 10
    assert [one.extent for one in step.ranges] == [Extent(0, 4096)]
    assert [span.nbytes for span in step.spans] == [1000]
    # Two blocks are counted for each, since what is read is rounded out to blocks.
    assert [len(step.tensors) for step in steps_of(source, chunk_nbytes=3 * (2 * BLOCK + 100))] == [3, 3, 3, 1]


def test_batches_follow_the_order_of_the_file_so_that_each_is_written_as_one_span() -> None:
    # In the file the multiples of 512 come before the rest.
    tensors = [("U8", (512 if t % 2 else 100,), (WHOLE,)) for t in range(8)]
    source = checkpoint(tensors, num_ranks=1)
    steps = list(steps_of(source, chunk_nbytes=4 * (2 * BLOCK + 512)))
    assert [[t for t, _ in step.tensors] for step in steps] == [[1, 3, 5, 7], [0, 2, 4, 6]]
    assert [[span.nbytes for span in step.spans] for step in steps] == [[2048], [400]]


def test_a_chunk_of_a_tensor_cut_by_columns_is_whole_rows_of_whole_blocks() -> None:
    # A rank's part of a row is 1024 bytes: four rows are a block of its file.
    source = checkpoint([("U8", (64, 4096), even(1, 4, 1024))], num_ranks=4)
    assert {step.nbytes for step in steps_of(source, chunk_nbytes=40_000, small_nbytes=0)} == {32768}
    for step in steps_of(source, chunk_nbytes=40_000, small_nbytes=0):
        assert {span.nbytes for span in step.spans} == {8192}


@pytest.mark.parametrize("small_nbytes", [0, 10**6])
def test_memory_does_not_grow_with_the_tensors(small_nbytes: int) -> None:
    """Of slices that are stored in another order than the source's, too."""
    shape, chunk_nbytes = (16, 160), 16 * 1024
    # The last is held part by part, and stored group by group.
    interleaved = tuple(Slice.along(0, [(4 * rank + at, 1) for at in (0, 2, 1, 3)]) for rank in range(4))
    kinds = [even(0, 4, 4), even(1, 4, 40), replicated(0, 4, 8), (WHOLE,) * 4, interleaved]
    source = checkpoint([("BF16", shape, kinds[t % len(kinds)]) for t in range(200)], num_ranks=4)
    for step in steps_of(source, chunk_nbytes=chunk_nbytes, small_nbytes=small_nbytes):
        staged, read = sum(span.nbytes for span in step.spans), sum(one.extent.nbytes for one in step.ranges)
        assert max(staged, read) <= 4 * chunk_nbytes
