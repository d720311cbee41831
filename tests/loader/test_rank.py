"""relayout.loader.sources.rank: which tensors patterns choose, and the files that these need."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.local_stores import stored_file

from relayout.core.extents import Transfer
from relayout.errors import PlanError
from relayout.format.index import Read
from relayout.loader.sources.rank import TensorColumns, select

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
    digests=["d-a", "d-b", "d-c", "d-d", "d-e"],
)


@given(st.lists(st.integers(0, 4), unique=True))
def test_each_row_still_comes_from_the_same_bytes_of_the_same_file(rows: list[int]) -> None:
    chosen = CONTENTS.rows(rows)
    for column in ("names", "dtypes", "shapes", "digests"):
        assert list(getattr(chosen, column)) == [getattr(CONTENTS, column)[row] for row in rows]
    assert replace(CONTENTS, digests=None).rows(rows).digests is None
    for row, reads in zip(rows, chosen.reads, strict=True):
        assert [(chosen.files[read.file].path.name, read.transfer) for read in reads] == [
            (f"part-{read.file}", read.transfer) for read in CONTENTS.reads[row]
        ]
    assert {read.file for reads in chosen.reads for read in reads} == set(range(len(chosen.files)))
    assert list(chosen.files) == sorted(chosen.files, key=lambda file: file.path)


def test_sizes_are_those_of_all_runs() -> None:
    assert CONTENTS.sizes() == [3, 16, 20, 0, 16]
