"""Writes the changes between two versions of a weight file as a file of a delta."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise

from relayout.core.digests import blake3_hex
from relayout.core.extents import Extent, align_down
from relayout.core.slices import BITS
from relayout.format.delta import DeltaFile, delta_name, dump_index
from relayout.format.safetensors import Header
from relayout.publish.output import Output


@dataclass(frozen=True, slots=True)
class EncodedPiece:
    """One changed piece of a weight file."""

    number: int
    encoded: bytes
    """The XOR of the two versions, after `encode`; empty if the piece is unchanged."""
    content: str
    """BLAKE3 digest of the new version, in hex."""


def write_pieces(made: Output, file: str, number: int, changes: Iterable[EncodedPiece]) -> DeltaFile | None:
    """Write the changes of one file to a delta; return None if nothing changed.

    Args:
        number: of the file.
        changes: of pieces, by rising piece number. Pieces with empty `encoded` are unchanged and skipped.
    """
    found = (piece for piece in changes if piece.encoded)
    first = next(found, None)
    if first is None:
        return None
    rows = list[tuple[int, int, str, str]]()
    index = b""

    def stored() -> Iterator[bytes]:
        nonlocal index
        for piece in chain([first], found):
            rows.append((piece.number, len(piece.encoded), blake3_hex(piece.encoded), piece.content))
            yield piece.encoded
        index = dump_index(rows)
        yield index

    made.put(delta_name(file), stored())
    return DeltaFile(number, sum(nbytes for _, nbytes, *_ in rows) + len(index), len(rows), blake3_hex(index))


def widths_in(header: Header) -> ElementWidths:
    """Return the element widths of the tensors in a weight file."""
    held = (tensor for tensor in header.tensors if tensor.nbytes)
    return element_widths((header.data_start + tensor.offset, tensor.dtype) for tensor in held)


def element_widths(tensors: Iterable[tuple[int, str]]) -> ElementWidths:
    """Return the element widths of a weight file, from the offset and dtype of each tensor that has bytes."""
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
    """Element widths of all bytes of a weight file, as runs of equal width."""

    starts: tuple[int, ...]
    """Absolute file offset of the first byte of each run, rising."""
    widths: tuple[int, ...]
    """Bytes of one element in each run."""

    def of(self, chunk: Extent) -> list[tuple[int, int]]:
        """Split a chunk into runs: pairs of total bytes and bytes of one element, which divide the total."""
        first, end = bisect_right(self.starts, chunk.offset) - 1, bisect_right(self.starts, chunk.end - 1)
        bounds = [chunk.offset, *self.starts[first + 1 : end], chunk.end]
        runs = []
        for (start, stop), width in zip(pairwise(bounds), self.widths[first:end], strict=True):
            runs += [(align_down(stop - start, width), width), ((stop - start) % width, 1)]
        return [run for run in runs if run[0]]
