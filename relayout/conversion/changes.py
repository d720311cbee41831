"""What changed between two versions of a weight file, written as a file of a delta."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from relayout.core.digests import proof_hex
from relayout.core.extents import Extent, align_down
from relayout.core.slices import BITS
from relayout.format.delta import DeltaFile, delta_name, dump_index
from relayout.format.safetensors import Header
from relayout.publish.output import Output

UNCHANGED = DeltaFile(0, proof_hex(b""))
"""What a delta has of a file that did not change."""


def write_pieces(made: Output, file: str, num_pieces: int, changes: Iterable[tuple[int, bytes]]) -> DeltaFile:
    """Write what changed in a file.

    Args:
        changes: the number of each piece that changed, rising, and what `encode` makes of the XOR of its versions.
    """
    entries, nbytes = [dump_index([b""])] * num_pieces, 0

    def stored() -> Iterator[bytes]:
        nonlocal nbytes
        for piece, encoded in changes:
            entries[piece], nbytes = dump_index([encoded]), nbytes + len(encoded)
            yield encoded
        yield b"".join(entries)

    made.put(delta_name(file), stored())
    entry = b"".join(entries)
    return DeltaFile(nbytes + len(entry), proof_hex(entry))


def widths_in(header: Header) -> ElementWidths:
    """The widths of the elements of a weight file's tensors."""
    held = (tensor for tensor in header.tensors if tensor.nbytes)
    return element_widths((header.data_start + tensor.offset, tensor.dtype) for tensor in held)


def element_widths(tensors: Iterable[tuple[int, str]]) -> ElementWidths:
    """The widths of the elements of a weight file, from offset and dtype of each tensor that has bytes."""
    starts: list[int] = []
    widths: list[int] = []
    for offset, dtype in sorted(tensors):
        width = max(1, BITS[dtype] // 8)
        if widths[-1:] != [width]:
            starts.append(offset)
            widths.append(width)
    return ElementWidths(tuple(starts), tuple(widths))


@dataclass(frozen=True, slots=True)
class ElementWidths:
    """The width of the elements that each byte of a weight file belongs to."""

    starts: tuple[int, ...]
    """Where each run of elements of one width begins: absolute file offsets, rising."""
    widths: tuple[int, ...]
    """Bytes of an element of each run."""

    def of(self, chunk: Extent) -> list[tuple[int, int]]:
        """What a chunk consists of: bytes, and bytes of an element, which divides them."""
        first, end = bisect_right(self.starts, chunk.offset) - 1, bisect_right(self.starts, chunk.end - 1)
        bounds = [chunk.offset, *self.starts[first + 1 : end], chunk.end]
        runs = []
        for (start, stop), width in zip(pairwise(bounds), self.widths[first:end], strict=True):
            runs += [(align_down(stop - start, width), width), ((stop - start) % width, 1)]
        return [run for run in runs if run[0]]
