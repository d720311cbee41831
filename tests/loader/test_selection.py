"""relayout.loader.sources.contents: which tensors patterns choose, and the files that these need."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relayout.core.extents import Transfer
from relayout.core.slices import WHOLE, Slice
from relayout.errors import PlanError
from relayout.format.index import RankTable, Read
from relayout.loader.sources.contents import Contents, StoredFile, contents_of, select

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
]


@pytest.mark.parametrize(
    ("patterns", "rows"),
    [
        (["model.layers.1.*"], [3]),  # Not layer 10.
        (["model.layers.1*"], [3, 4]),
        (["*.bias"], [2]),
        (["model.layers.?.mlp.up_proj.weight"], [1, 3]),
        (["model.layers.[!0]*"], [3, 4]),
        (["*"], list(range(10))),
        (["weird[0].weight"], [5, 6]),  # A name in full, and a pattern too.
        (["weird[[]0].weight"], [5]),
        (["MODEL.*"], None),
        (["Model.norm"], [7]),
        (["model.layers.1"], None),  # A pattern is of the whole name.
        (["line?break"], [8]),
        (["line*"], [8]),
        ([""], [9]),
        (["*.bias", "model.embed*", "model.*.bias"], [0, 2]),  # In the order of the names, each once.
        ([], []),
        (["*.bias", "*.nothing"], None),  # Each pattern must find something.
        (["weird[1].weight"], None),
        (["weird[0"], None),
        (["model.layers.0.mlp.up_proj.weight.*"], None),
    ],
)
def test_patterns_choose_names_as_a_shell_does(patterns: list[str], rows: list[int] | None) -> None:
    if rows is None:
        with pytest.raises(PlanError, match=r"is none of the rank's 10 tensors, and matches none"):
            select(NAMES, patterns)
    else:
        assert select(NAMES, patterns) == rows


def test_the_pattern_that_matches_nothing_is_named() -> None:
    with pytest.raises(PlanError, match=r"^'\*\.nothing' is none of the rank's 10 tensors, and matches none$"):
        select(NAMES, ["*.bias", "*.nothing"])
    with pytest.raises(PlanError, match=r"^'\*' is none of the rank's 0 tensors"):
        select([], ["*"])


TEXT = st.text("ab.[]!?*-\\", max_size=6)


@given(st.lists(TEXT, max_size=12, unique=True), st.lists(TEXT, max_size=3), st.data())
@settings(deadline=None)
def test_a_name_in_full_always_chooses_itself_and_else_fnmatch_decides(
    names: list[str], patterns: list[str], data: st.DataObject
) -> None:
    if names:
        patterns = [*patterns, data.draw(st.sampled_from(names))]
    found = [{row for row, name in enumerate(names) if name == one or fnmatchcase(name, one)} for one in patterns]
    if all(found):
        assert select(names, patterns) == sorted(set().union(*found))
    else:
        with pytest.raises(PlanError, match="matches none"):
            select(names, patterns)


FILES = tuple(StoredFile(Path(f"part-{number}"), 1000 + number) for number in range(4))

CONTENTS = Contents(
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
    source_shapes=[(6,), (2, 8), (5,), (0, 7), (4,)],
    slices=[Slice(0, ((3, 3),)), Slice(1, ((0, 4),)), WHOLE, WHOLE, Slice(0, ((0, 1), (3, 1)))],
)


def test_rows_have_their_own_columns_and_just_the_files_they_need() -> None:
    assert CONTENTS.rows([0, 2, 3]) == Contents(
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
        source_shapes=[(6,), (5,), (0, 7)],
        slices=[Slice(0, ((3, 3),)), WHOLE, WHOLE],
    )


def test_empty_tensors_need_no_file() -> None:
    only = CONTENTS.rows([3])
    assert (only.files, only.names, only.shapes, only.reads) == ((), ["d"], [(0, 7)], [()])
    assert CONTENTS.rows([]).files == ()


def test_what_has_no_digests_gets_none() -> None:
    plain = replace(CONTENTS, digests=None)
    assert plain.rows([1, 4]).digests is None


@given(st.lists(st.integers(0, 4), unique=True))
@settings(deadline=None)
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
        names=["x", "y", "z"],
        dtypes=["BF16", "F4", "F32"],
        shapes=[(3, 5), (3, 2), (0,)],
        files=[0, 1, 1],
        offsets=[4096, 8192, 8195],
        arena_offsets=[0, 4096, 4112],
        digests=["1", "2", "3"],
        source_shapes=[(3, 5), (3, 2), (0,)],
        slices=[WHOLE] * 3,
    )
    contents = contents_of(FILES[:2], table)
    assert contents.reads == [(Read(0, Transfer(4096, 0, 30)),), (Read(1, Transfer(8192, 0, 3)),), ()]
    assert (contents.names, contents.dtypes, contents.shapes) == (table.names, table.dtypes, table.shapes)
    assert contents.digests == ["1", "2", "3"]
    assert contents.files == FILES[:2]
