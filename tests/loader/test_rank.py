"""relayout.loader.sources.rank: which tensors patterns choose, the files that these need, and where they are put."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.local_stores import stored_file
from support.reads import carried_out

from relayout.core.extents import Transfer
from relayout.errors import PlanError
from relayout.format.index import Read
from relayout.loader.sources.rank import TensorColumns, batches, place, place_at, select

NAMES = [
    "model.embed_tokens.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.0.mlp.up_proj.bias",
    "model.layers.1.mlp.up_proj.weight",
    "model.layers.10.mlp.up_proj.weight",
    "weird[0].weight",
    "weird0.weight",
    "Model.norm",
    "line\nbreak",
    "",
    "a{b",
]


@pytest.mark.parametrize(
    ("patterns", "rows"),
    [
        (["model.layers.1.**"], [3]),  # Not layer 10.
        (["model.layers.#.mlp.up_proj.{weight,bias}"], [1, 2, 3, 4]),
        (["model.layers.{0,10}.**.weight"], [1, 4]),
        (["**"], list(range(11))),
        (["*"], [8, 10]),
        (["weird[0].weight"], [5]),  # Brackets and question marks mean themselves.
        (["line**"], [8]),
        ([""], [9]),
        (["a{b"], [10]),  # A name in full, which is no pattern.
        (["**.bias", "model.embed*.*", "model.**.bias"], [0, 2]),  # In the order of the names, each once.
        ([], []),
        (["!model.layers.**"], [0, 5, 6, 7, 8, 9, 10]),
        (["!model.**", "!line**", "!"], [5, 6, 7, 10]),
        (["model.layers.**", "!**.bias", "!model.layers.10.**"], [1, 3]),
        (["!**.bias", "model.layers.0.**"], [1]),  # In any order.
    ],
)
def test_patterns_choose_names_as_in_plans(patterns: list[str], rows: list[int]) -> None:
    assert select(NAMES, patterns) == rows


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["**.bias", "**.nothing"], r"no tensor matches '\*\*\.nothing' \(there are 11\)$"),
        (["*.bias"], r"no tensor matches '\*\.bias' \(.*\); \* is text without a dot, \*\* any text$"),
        (["**.moe*"], r"no tensor matches '\*\*\.moe\*' \(.*\); \* is text without a dot, \*\* any text$"),
        (["model.embed_tokens.weigth"], r"no tensor matches .*; did you mean 'model\.embed_tokens\.weight'\?$"),
        (["a.{b"], r"invalid pattern '.*': braces must be paired, contain only words"),
        (["{*,b}"], r"invalid pattern '.*': braces must be paired, contain only words"),
        (["!{*,b}"], r"invalid pattern '{\*,b}': braces must be paired, contain only words"),
        (["!**.nothing"], r"no tensor matches '\*\*\.nothing' \(there are 11\)$"),
        (["**.bias", "!**"], r"\['\*\*.bias', '!\*\*'\] leaves out all of 1 tensors$"),
    ],
)
def test_a_pattern_that_chooses_nothing_is_explained(patterns: list[str], message: str) -> None:
    with pytest.raises(PlanError, match=f"^names: {message}") as caught:
        select(NAMES, patterns)
    assert caught.value.code == "option"


TEXT = st.text("ab.[]?*-\\", max_size=6)


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern without braces and numbers means a name; by trial."""
    if pattern.startswith("**"):
        return any(matches(pattern[2:], name[cut:]) for cut in range(len(name) + 1))
    if pattern.startswith("*"):
        part = name.partition(".")[0]
        return any(matches(pattern[1:], name[cut:]) for cut in range(1, len(part) + 1))
    return name == "" if pattern == "" else name[:1] == pattern[0] and matches(pattern[1:], name[1:])


@given(st.lists(TEXT, max_size=12, unique=True), st.lists(TEXT, max_size=3), st.data())
def test_a_name_in_full_always_chooses_itself_and_else_the_pattern_decides(
    names: list[str], patterns: list[str], data: st.DataObject
) -> None:
    if names:
        patterns = [*patterns, data.draw(st.sampled_from(names))]
    found = [{row for row, name in enumerate(names) if name == one or matches(one, name)} for one in patterns]
    if all(found):
        assert select(names, patterns) == sorted(set().union(*found))
    else:
        with pytest.raises(PlanError, match="no tensor matches"):
            select(names, patterns)


FILES = tuple(stored_file(Path(f"part-{number}"), 1000 + number) for number in range(4))

CONTENTS = TensorColumns(
    files=FILES,
    names=["a", "b", "c", "d", "e"],
    dtypes=["U8", "BF16", "F32", "U8", "F64"],
    shapes=[(3,), (2, 4), (5,), (0, 7), (2,)],
    reads=[
        (Read(3, Transfer(10, 0, 3)),),
        (Read(1, Transfer(20, 0, 8, 2, 100, 8)),),
        (Read(3, Transfer(40, 8, 12)), Read(2, Transfer(60, 0, 8))),
        (),
        (Read(0, Transfer(80, 0, 16)),),
    ],
    digests=lambda: {name: f"d-{name}" for name in "abcde"},
)


@given(st.lists(st.integers(0, 4), unique=True))
def test_each_row_still_comes_from_the_same_bytes_of_the_same_file(rows: list[int]) -> None:
    chosen = CONTENTS.rows(rows)
    for column in ("names", "dtypes", "shapes"):
        assert list(getattr(chosen, column)) == [getattr(CONTENTS, column)[row] for row in rows]
    assert chosen.digests is not None
    assert [chosen.digests()[name] for name in chosen.names] == [f"d-{'abcde'[row]}" for row in rows]
    assert replace(CONTENTS, digests=None).rows(rows).digests is None
    for row, reads in zip(rows, chosen.reads, strict=True):
        assert [(chosen.files[read.file].path.name, read.transfer) for read in reads] == [
            (f"part-{read.file}", read.transfer) for read in CONTENTS.reads[row]
        ]
    assert {read.file for reads in chosen.reads for read in reads} == set(range(len(chosen.files)))
    assert list(chosen.files) == sorted(chosen.files, key=lambda file: file.path)


def test_sizes_are_those_of_all_runs() -> None:
    assert CONTENTS.sizes() == [3, 16, 20, 0, 16]


Tensor = tuple[Read, ...]

MIB = 2**20
STORED_BYTES = [np.random.default_rng(seed).integers(0, 256, 3 * MIB, dtype=np.uint8) for seed in range(2)]


def size_of(tensor: Tensor) -> int:
    return sum(read.transfer.nbytes * read.transfer.count for read in tensor)


def assert_brings_just(tensors: Sequence[Tensor], offsets: Sequence[int], reads: Sequence[Read], nbytes: int) -> None:
    memory, times = carried_out(reads, STORED_BYTES, nbytes)
    assert times.max(initial=0) <= 1
    assert len(offsets) == len(tensors)
    for tensor, offset in zip(tensors, offsets, strict=True):
        held, _ = carried_out(tensor, STORED_BYTES, size_of(tensor))
        np.testing.assert_array_equal(memory[offset : offset + size_of(tensor)], held)
    assert times.sum() == sum(map(size_of, tensors))


SIZES = st.one_of(
    st.integers(1, 100),
    st.integers(1, 300).map(lambda n: 16 * n),
    st.sampled_from([4096, MIB // 2, MIB - 16, MIB, MIB + 5]),
)


@st.composite
def held_tensors(draw: st.DrawFn) -> list[Tensor]:
    """Empty ones, contiguous ones, many of them neighbors in their file, strided ones, and ones in several pieces."""
    tensors: list[Tensor] = []
    ends = [draw(st.integers(0, 5000)) for _ in STORED_BYTES]
    file = 0
    for _ in range(draw(st.integers(0, 9))):
        kind = draw(st.sampled_from(["next", "next", "next", "gap", "other file", "empty", "strided", "pieces"]))
        if kind == "other file":
            file = 1 - file
        start = ends[file] + (draw(st.integers(1, 5000)) if kind == "gap" else 0)
        nbytes = draw(SIZES)
        if start + nbytes > len(STORED_BYTES[file]) - 10_000:
            start = ends[file] = draw(st.integers(0, 5000))  # Files may be read again from the start.
        if kind == "empty":
            tensors.append(())
        elif kind == "strided":
            width, count = draw(st.integers(1, 40)), draw(st.integers(2, 9))
            stride = width + draw(st.integers(0, 50))
            tensors.append((Read(file, Transfer(start, 0, width, count, stride, width)),))
            ends[file] = start + count * stride
        elif kind == "pieces":
            cut = draw(st.integers(0, 4000)) + nbytes
            head = draw(st.sampled_from([7, 16]))
            tensors.append(
                (Read(file, Transfer(start, head, nbytes)), Read(file, Transfer(start + cut, 0, head)))  # Out of order.
            )
            ends[file] = start + cut + head
        else:
            tensors.append((Read(file, Transfer(start, 0, nbytes)),))
            ends[file] = start + nbytes
    return tensors


@given(held_tensors(), st.integers(0, 3).map(lambda n: 4096 * n))
def test_reads_bring_just_each_tensors_bytes_to_its_offset(tensors: list[Tensor], start: int) -> None:
    sizes = [size_of(tensor) for tensor in tensors]
    placement = place(tensors, sizes, start)
    assert placement.nbytes % 4096 == 0
    assert all(offset % 16 == 0 for offset in placement.offsets)
    assert all(
        start <= offset <= offset + nbytes <= start + placement.nbytes
        for offset, nbytes in zip(placement.offsets, sizes, strict=True)
    )
    assert all(a + nbytes <= b for a, b, nbytes in zip(placement.offsets, placement.offsets[1:], sizes, strict=False))
    assert_brings_just(tensors, placement.offsets, placement.reads, start + placement.nbytes)
    assert all(read.transfer.target >= start for read in placement.reads)


@given(held_tensors())
def test_neighbors_in_a_file_are_brought_by_one_read_and_memory_is_not_wasted(tensors: list[Tensor]) -> None:
    sizes = [size_of(tensor) for tensor in tensors]
    placement = place(tensors, sizes)
    neighbors = 0
    for before, after in pairwise(tensors):
        if len(before) == len(after) == 1 and before[0].file == after[0].file:
            a, b = before[0].transfer, after[0].transfer
            is_next = a.source + a.nbytes == b.source and a.nbytes % 16 == 0
            neighbors += a.count == b.count == 1 and is_next
    assert len(placement.reads) == sum(map(len, tensors)) - neighbors
    large = [read for read in placement.reads if size_of((read,)) >= MIB]
    assert placement.nbytes < sum(nbytes + 16 for nbytes in sizes) + 2 * 4096 * len(large) + 4096


@given(held_tensors())
def test_what_is_large_and_at_a_multiple_of_16_can_go_straight(tensors: list[Tensor]) -> None:
    placement = place(tensors, [size_of(tensor) for tensor in tensors])
    for read in placement.reads:
        one = read.transfer
        base = max(offset for offset in placement.offsets if offset <= one.target)
        # A tensor is at a multiple of 16: where in it the read goes decides.
        if one.count == 1 and one.nbytes >= MIB and (one.source - (one.target - base)) % 16 == 0:
            assert (one.target - one.source) % 4096 == 0


@given(held_tensors(), st.randoms(use_true_random=False))
def test_tensors_are_brought_to_offsets_that_exist_in_any_order(tensors: list[Tensor], random: object) -> None:
    order = list(range(len(tensors)))
    random.shuffle(order)  # type: ignore[attr-defined]
    offsets = [0] * len(tensors)
    end = 3
    for row in order:
        offsets[row] = end
        end += size_of(tensors[row]) + row
    assert_brings_just(tensors, offsets, place_at(tensors, offsets), end)


@given(st.lists(st.one_of(st.integers(0, 40), st.integers(0, 2000))), st.integers(1, 600))
def test_batches_have_all_rows_in_order_and_are_as_large_as_the_limit_lets_them(sizes: list[int], limit: int) -> None:
    cut = list(batches(sizes, limit))
    assert [row for part in cut for row in part] == list(range(len(sizes)))

    def padded(rows: Sequence[int]) -> int:
        return sum(-(-sizes[row] // 16) * 16 for row in rows)

    for part in cut:
        assert len(part) > 0
        assert len(part) == 1 or padded(part) <= limit
    for part, following in pairwise(cut):
        assert padded([*part, following[0]]) > limit


def test_a_name_that_begins_with_an_exclamation_mark_chooses_itself() -> None:
    assert select(["!a", "a", "b"], ["!a"]) == [0]
