"""relayout.conversion.changes: the widths of a file's elements, and what a delta stores of a file."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relayout.conversion.changes import ElementWidths, EncodedPiece, element_widths, widths_in, write_pieces
from relayout.core.digests import blake3_hex
from relayout.core.extents import Extent
from relayout.format.delta import DeltaFile, delta_name, dump_index
from relayout.format.safetensors import Header, TensorEntry

WIDTHS = {"F4": 1, "U8": 1, "F8_E4M3": 1, "BF16": 2, "F32": 4, "I64": 8, "C64": 8}


@given(
    st.lists(st.tuples(st.sampled_from(sorted(WIDTHS)), st.integers(1, 20)), min_size=1, max_size=6),
    st.data(),
)
def test_each_byte_belongs_to_an_element_of_its_tensor(tensors: list[tuple[str, int]], data: st.DataObject) -> None:
    starts = list(accumulate((count * WIDTHS[dtype] for dtype, count in tensors), initial=8))
    widths = element_widths(reversed([(start, dtype) for start, (dtype, _) in zip(starts, tensors, strict=False)]))
    assert all(one != other for one, other in pairwise(widths.widths)), "runs of one width are one"
    of_bytes = [WIDTHS[dtype] for dtype, count in tensors for _ in range(count * WIDTHS[dtype])]
    start = data.draw(st.integers(0, len(of_bytes) - 1))
    end = data.draw(st.integers(start + 1, len(of_bytes)))
    position = start
    for nbytes, width in widths.of(Extent(8 + start, end - start)):
        assert nbytes > 0
        assert nbytes % width == 0
        # The rest of a run that ends in the middle of an element is of single bytes.
        assert set(of_bytes[position : position + nbytes]) == {width} or (width == 1 and nbytes < 8)
        position += nbytes
    assert position == end


def test_tensors_without_bytes_have_no_width() -> None:
    entries = (TensorEntry("a", "F32", (0,), 0, 0), TensorEntry("b", "BF16", (4,), 0, 8))
    assert widths_in(Header(entries, {}, 100, 8, True)) == ElementWidths((100,), (2,))


class Put:
    """An output that takes one file."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def put(self, name: str, pieces: object) -> None:
        self.files[name] = b"".join(pieces)  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", [[], [(1, b"one")], [(0, b"zero"), (2, b""), (3, b"three")]])
def test_a_file_of_a_delta_is_its_pieces_and_behind_them_its_index(changes: list[tuple[int, bytes]]) -> None:
    made, content = Put(), blake3_hex(b"as it is now")
    pieces = [EncodedPiece(number, encoded, content) for number, encoded in changes]
    found = write_pieces(made, "model.safetensors", 7, pieces)  # type: ignore[arg-type]
    rows = [(number, len(encoded), blake3_hex(encoded), content) for number, encoded in changes if encoded]
    if not rows:
        assert (made.files, found) == ({}, None)
        return
    index, stored = dump_index(rows), b"".join(encoded for _, encoded in changes)
    assert made.files == {delta_name("model.safetensors"): stored + index}
    assert found == DeltaFile(7, len(stored) + len(index), len(rows), blake3_hex(index))
