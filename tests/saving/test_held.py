"""What a process holds of a tensor: the parts of DTensors are those that PyTorch cuts, and bytes those of `tobytes`."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from relayout.core.extents import Extent
from relayout.core.slices import WHOLE
from relayout.saving.held import HeldTensor, part_of
from relayout.saving.shards import TensorHead


@given(st.integers(0, 40), st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(1, 3)), max_size=3))
def test_parts_are_those_that_torch_cuts(length: int, axes: list[tuple[int, int, int]]) -> None:
    expected, mesh, coordinate = torch.arange(length), [], []
    placements = [Shard(0) if factor == 1 else _StridedShard(0, split_factor=factor) for _, _, factor in axes]
    for (count, index, _), placement in zip(axes, placements, strict=True):
        mesh.append(count)
        coordinate.append(index % count)
        expected = placement._split_tensor(expected, count, with_padding=False)[0][index % count]
    part = part_of("x", (length,), mesh, coordinate, placements)
    ranges = part.ranges_along(0)
    found = range(length) if ranges is None else [n for start, size in ranges for n in range(start, start + size)]
    assert list(found) == expected.tolist()


@given(st.permutations(range(3)), st.integers(0, 119), st.integers(1, 120), st.sampled_from(["int32", "uint8"]))
def test_bytes_of_what_is_not_contiguous(order: list[int], offset: int, nbytes: int, dtype: str) -> None:
    tensor = torch.arange(30, dtype=getattr(torch, dtype)).reshape(2, 3, 5).permute(order)
    dense = tensor.numpy().tobytes()
    offset %= len(dense)
    extent = Extent(offset, min(nbytes, len(dense) - offset))
    held = HeldTensor(TensorHead("x", "I32", tuple(tensor.shape)), WHOLE, tensor)
    assert held.bytes_of(extent).tobytes() == dense[extent.offset : extent.end]
