"""The checkpoint folder that tensors in memory would be saved as: its shards, their headers, and its index. Pure.

A save converts this folder, which is never written.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from relayout.core.dtypes import num_bytes
from relayout.core.extents import Extent
from relayout.format.safetensors import entries_text, entry_head, join_header, json_text

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

_METADATA = {"format": "pt"}
"""As transformers and huggingface_hub save it."""
_HEADER_ALIGNMENT = 8
"""Of the data section (safetensors 0.8.0, `src/tensor.rs`, `prepare`)."""


@dataclass(frozen=True, slots=True)
class TensorHead:
    """What a header says of a tensor, but for its place."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        nbytes = num_bytes(self.dtype, self.shape)
        assert nbytes is not None
        return nbytes


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard that is never written."""

    name: str
    header: bytes
    """The bytes before the data section."""
    tensors: tuple[int, ...]
    """Positions of its tensors, in the order of the file."""
    starts: tuple[int, ...]
    """Absolute file offset of each, and of the end of the file."""

    @property
    def nbytes(self) -> int:
        """Length of the whole file."""
        return self.starts[-1]

    def parts(self, extent: Extent) -> Iterator[tuple[int, Extent, int]]:
        """What an extent of the file has of tensors: (position, bytes of the tensor, where in the extent they are)."""
        first = max(0, bisect_right(self.starts, extent.offset) - 1)
        for t, start, end in zip(self.tensors[first:], self.starts[first:], self.starts[first + 1 :], strict=False):
            if start >= extent.end:
                return
            low, high = max(start, extent.offset), min(end, extent.end)
            if low < high:
                yield t, Extent(low - start, high - low), low - extent.offset


def share_out(sizes: Sequence[int], max_shard_nbytes: int) -> list[list[int]]:
    """Which tensors each shard has, as positions, from their bytes.

    As huggingface_hub 2.4 does (`serialization/_base.py`, `split_state_dict_into_shards_factory`): in the given order;
    a tensor above the limit is a shard of its own.
    """
    shards: list[list[int]] = []
    current: list[int] = []
    filled = 0
    for index, nbytes in enumerate(sizes):
        if nbytes > max_shard_nbytes:
            shards.append([index])
            continue
        if filled + nbytes > max_shard_nbytes:
            shards.append(current)
            current, filled = [], 0
        current.append(index)
        filled += nbytes
    return [*shards, current] if current else shards


def lay_out_shards(
    heads: Sequence[TensorHead], shared_out: Sequence[Sequence[int]], totals: Mapping[str, int]
) -> tuple[list[Shard], bytes | None]:
    """The shards, and the index.json of several.

    Args:
        shared_out: positions of each shard's tensors, in the order of the file.
        totals: the `metadata` of the index.
    """
    names = [f"model-{index + 1:05}-of-{len(shared_out):05}.safetensors" for index in range(len(shared_out))]
    if len(names) == 1:
        names = [SINGLE_NAME]
    shards = [_shard(name, heads, tensors) for name, tensors in zip(names, shared_out, strict=True)]
    if len(shards) == 1:
        return shards, None
    weight_map = {heads[t].name: shard.name for shard in shards for t in shard.tensors}
    top = {"metadata": totals, "weight_map": weight_map}
    return shards, (json.dumps(top, indent=2, sort_keys=True) + "\n").encode()


def _shard(name: str, heads: Sequence[TensorHead], tensors: Sequence[int]) -> Shard:
    ends = list(accumulate((heads[t].nbytes for t in tensors), initial=0))
    entries = (
        (json_text(heads[t].name), entry_head(heads[t].dtype, heads[t].shape), start, end)
        for t, start, end in zip(tensors, ends, ends[1:], strict=False)
    )
    header = join_header(entries_text(entries), _METADATA, _HEADER_ALIGNMENT)
    return Shard(name, header, tuple(tensors), tuple(len(header) + end for end in ends))
