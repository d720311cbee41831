"""Shards that are never written: the safetensors files in which tensors would be saved, as a source to convert.

The names, headers and order are those of the files that `save_pretrained` of transformers writes, so that a conversion
of tensors in memory, or of a trainer's checkpoint, equals the conversion of these files.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from relayout.checkpoint.folder import SINGLE_NAME
from relayout.core.extents import Extent
from relayout.core.slices import BITS, TensorHead
from relayout.format.safetensors import entries_text, entry_head, join_header, json_text

DEFAULT_SHARD_NBYTES = 50 * 10**9
"""The size of shards in transformers 5 (`max_shard_size` of `save_pretrained`)."""
METADATA: Mapping[str, str] = {"format": "pt"}
"""The metadata that transformers and huggingface_hub save."""
_HEADER_ALIGNMENT = 8
"""Alignment of the data section in bytes (safetensors 0.8.0, `src/tensor.rs`, `prepare`)."""
_DECLARED = {dtype: position for position, dtype in enumerate(BITS)}
_MARKS = re.compile(r"[\x00-\x03]")
_ABOVE_MARKS = {mark: f"\3{chr(mark + 4)}" for mark in range(4)}
"""Escapes the characters that `model_order` uses as marks, and preserves their order."""
_NUMBER = re.compile(r"\x02([0-9]+)(?=\x00)")


def model_order(name: str) -> str:
    """Sort key by dotted parts: numbers compare as numbers and precede words, so layer 2 precedes layer 10."""
    # A string is smaller than a tuple of parts; there may be millions of tensors. Each part begins with a mark for
    # number (1) or word (2) and ends with 0, which is below both.
    if _MARKS.search(name):
        name = name.translate(_ABOVE_MARKS)
    words = "\2" + name.replace(".", "\0\2") + "\0"
    return _NUMBER.sub(lambda match: f"\1{len(digits := match[1].lstrip('0')):04}{digits}", words)


@dataclass(frozen=True, slots=True)
class MemoryShard:
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
        """Yield the parts of tensors in an extent of the file: (position, bytes, offset in the extent)."""
        first = max(0, bisect_right(self.starts, extent.offset) - 1)
        for t, start, end in zip(self.tensors[first:], self.starts[first:], self.starts[first + 1 :], strict=False):
            if start >= extent.end:
                return
            low, high = max(start, extent.offset), min(end, extent.end)
            if low < high:
                yield t, Extent(low - start, high - low), low - extent.offset


def in_stored_order(heads: Sequence[TensorHead], tensors: Sequence[int]) -> list[int]:
    """Sort tensors in the order in which the stock safetensors writes them: the widest dtype first, then by name.

    Among dtypes of one width, the one that is declared last comes first (safetensors 0.8.0, `src/tensor.rs`, `prepare`
    and `Dtype`; `BITS` has the order).
    """
    return sorted(tensors, key=lambda t: (-_DECLARED[heads[t].dtype], heads[t].name))


def share_out(sizes: Sequence[int], max_shard_nbytes: int) -> list[list[int]]:
    """Assign tensors, by their sizes, to shards; return the positions in each.

    As huggingface_hub 2.4 does (`serialization/_base.py`, `split_state_dict_into_shards_factory`): tensors stay in the
    given order, and one above the limit is a shard of its own.
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
) -> tuple[list[MemoryShard], bytes | None]:
    """Return the shards, and their index.json if there are several.

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


def _shard(name: str, heads: Sequence[TensorHead], tensors: Sequence[int]) -> MemoryShard:
    ends = list(accumulate((heads[t].nbytes for t in tensors), initial=0))
    entries = (
        (json_text(heads[t].name), entry_head(heads[t].dtype, heads[t].shape), start, end)
        for t, start, end in zip(tensors, ends, ends[1:], strict=False)
    )
    header = join_header(entries_text(entries), METADATA, _HEADER_ALIGNMENT)
    return MemoryShard(name, header, tuple(tensors), tuple(len(header) + end for end in ends))
