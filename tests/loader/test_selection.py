"""relayout.loader.sources.columns: which tensors patterns choose, and the files that these need."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.local_stores import stored_file

from relayout.core.extents import Transfer
from relayout.core.slices import WHOLE
from relayout.errors import PlanError
from relayout.format.index import Kind, RankTable, Read
from relayout.loader.sources.checkpoint import contents_of
from relayout.loader.sources.columns import TensorColumns, select

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
        (["model.layers.1**"], [3, 4]),
        (["model.layers.*.mlp.up_proj.weight"], [1, 3, 4]),
        (["model.layers.#.mlp.up_proj.{weight,bias}"], [1, 2, 3, 4]),
        (["model.layers.{0,10}.**.weight"], [1, 4]),
        (["**.bias"], [2]),
        (["*.bias"], None),  # One part only.
        (["**"], list(range(11))),
        (["*"], [8, 10]),
        (["weird[0].weight"], [5]),  # Brackets and question marks mean themselves.
        (["weird?.weight"], None),
        (["MODEL.*"], None),
        (["Model.norm"], [7]),
        (["model.layers.1"], None),  # A pattern is of the whole name.
        (["line**"], [8]),
        ([""], [9]),
        (["a{b"], [10]),  # A name in full, which is no pattern.
        (["**.bias", "model.embed*.*", "model.**.bias"], [0, 2]),  # In the order of the names, each once.
        ([], []),
        (["**.bias", "**.nothing"], None),  # Each pattern must find something.
        (["weird[1].weight"], None),
        (["model.layers.0.mlp.up_proj.weight.*"], None),
    ],
)
def test_patterns_choose_names_as_in_plans(patterns: list[str], rows: list[int] | None) -> None:
    if rows is None:
        with pytest.raises(PlanError, match=r"^names: no tensor matches '.*' \(there are 11\)"):
            select(NAMES, patterns)
    else:
        assert select(NAMES, patterns) == rows


def test_the_pattern_that_matches_nothing_is_named() -> None:
    with pytest.raises(PlanError, match=r"^names: no tensor matches '\*\*\.nothing' \(there are 11\)$"):
        select(NAMES, ["**.bias", "**.nothing"])
    with pytest.raises(PlanError, match=r"^names: no tensor matches '\*\*' \(there are 0\)$"):
        select([], ["**"])


def test_a_star_that_was_meant_for_several_parts_is_explained() -> None:
    with pytest.raises(
        PlanError, match=r"no tensor matches '\*\.bias' \(.*\); \* is text without a dot, \*\* any text$"
    ):
        select(NAMES, ["*.bias"])
    with pytest.raises(PlanError, match=r"'\*\*\.moe\*' \(.*\); \* is text without a dot, \*\* any text$"):
        select(NAMES, ["**.moe*"])


def test_a_misspelled_name_is_corrected() -> None:
    with pytest.raises(PlanError, match=r"\(there are 11\); did you mean 'model\.embed_tokens\.weight'\?$"):
        select(NAMES, ["model.embed_tokens.weigth"])


@pytest.mark.parametrize("pattern", ["a.{b", "a}", "{a,{b,c}}", "{*,b}"])
def test_a_pattern_with_wrong_braces_is_refused(pattern: str) -> None:
    with pytest.raises(PlanError, match=r"^names: invalid pattern '.*': braces must be paired, contain only words"):
        select(NAMES, [pattern])


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


def test_rows_have_their_own_columns_and_just_the_files_they_need() -> None:
    assert CONTENTS.rows([0, 2, 3]) == TensorColumns(
        files=(FILES[2], FILES[3]),
        names=["a", "c", "d"],
        dtypes=["U8", "F32", "U8"],
        shapes=[(3,), (5,), (0, 7)],
        reads=[
            (Read(1, Transfer(10, 0, 3)),),
            (Read(1, Transfer(40, 8, 12)), Read(0, Transfer(60, 0, 8))),
            (),
        ],
        digests=["d-a", "d-c", "d-d"],
    )


def test_empty_tensors_need_no_file() -> None:
    only = CONTENTS.rows([3])
    assert (only.files, only.names, only.shapes, only.reads) == ((), ["d"], [(0, 7)], [()])
    assert CONTENTS.rows([]).files == ()


def test_what_has_no_digests_gets_none() -> None:
    plain = TensorColumns(CONTENTS.names, CONTENTS.dtypes, CONTENTS.shapes, FILES, CONTENTS.reads)
    assert plain.rows([1, 4]).digests is None


@given(st.lists(st.integers(0, 4), unique=True))
def test_each_row_still_comes_from_the_same_bytes_of_the_same_file(rows: list[int]) -> None:
    chosen = CONTENTS.rows(rows)
    assert [chosen.names[i] for i in range(len(rows))] == [CONTENTS.names[row] for row in rows]
    for row, reads in zip(rows, chosen.reads, strict=True):
        assert [(chosen.files[read.file].path.name, read.transfer) for read in reads] == [
            (f"part-{read.file}", read.transfer) for read in CONTENTS.reads[row]
        ]
    assert {read.file for reads in chosen.reads for read in reads} == set(range(len(chosen.files)))
    assert list(chosen.files) == sorted(chosen.files, key=lambda file: file.path)


def test_sizes_are_those_of_all_runs() -> None:
    assert CONTENTS.sizes() == [3, 16, 20, 0, 16]


def test_a_ranks_table_is_read_tensor_by_tensor() -> None:
    table = RankTable(
        rank=0,
        kinds=[Kind(dtype, shape, shape, WHOLE) for dtype, shape in (("BF16", (3, 5)), ("F4", (3, 2)), ("F32", (0,)))],
        kind_of=[0, 1, 2],
        names=["x", "y", "z"],
        files=[0, 1, 1],
        offsets=[4096, 8192, 8195],
        arena_offsets=[0, 4096, 4112],
        digests=["1", "2", "3"],
    )
    contents = contents_of(FILES[:2], table, [False, False])
    assert contents.reads == [(Read(0, Transfer(4096, 0, 30)),), (Read(1, Transfer(8192, 0, 3)),), ()]
    assert contents.names == ["x", "y", "z"]
    assert list(contents.dtypes) == ["BF16", "F4", "F32"]
    assert list(contents.shapes) == [(3, 5), (3, 2), (0,)]
    assert contents.digests == ["1", "2", "3"]
    assert contents.files == FILES[:2]
