"""relayout.core.tables: which tensors a table is, by a rule that says so, and how it is cut among ranks."""

from __future__ import annotations

from pathlib import Path
from time import process_time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.planning import Shapes, all_slices, make_source, slices_of

from relayout.core.slices import Slice
from relayout.core.tables import RowTable, tables_of
from relayout.errors import PlanError
from relayout.plans.family import Family, find_family, parse_family
from relayout.plans.plan import Plan, TensorInfo
from relayout.plans.planner import plan_by

SHARD = "layers.1.table.shard_{}.weight"


def family_of(pattern: str, rule: str = '{ dim = 0, by = "vocabulary", table = true }') -> Family:
    return parse_family(f'[cut]\n"{pattern}" = {rule}\n"**" = "whole"\n', "mine.toml", "mine")


def cut(shapes: Shapes, num_ranks: int, pattern: str = "layers.*.table.shard_#.weight") -> Plan:
    return plan_by(make_source(shapes, model_type="mine"), num_ranks, family_of(pattern))


def test_a_table_is_what_differs_in_the_number_only_in_the_order_of_the_numbers() -> None:
    names = ["b.shard_10", "a.shard_1", "a.shard_0", "lone", *(f"b.shard_{n}" for n in range(10)), "a.shard_2", "c"]
    tensors = [TensorInfo(name, "U8", (5 + t, 3)) for t, name in enumerate(names)]
    pattern_of = {"lone": "lone"}
    found = tables_of(tensors, lambda name: pattern_of.get(name, "*.shard_#" if "shard" in name else None))
    assert found == [
        RowTable(
            (*range(4, 14), 0),
            tuple(np.cumsum([0, *range(9, 19)]).tolist()),
            sum(range(9, 19)) + 5,
        ),
        RowTable((2, 1, 14), (0, 7, 13), 32),
        RowTable((3,), (0,), 8),
    ]


def test_a_prefix_in_front_of_what_the_pattern_matches_is_of_the_table() -> None:
    tensors = [TensorInfo(f"model.text.t_{n}", "U8", (4, 3)) for n in (1, 0)]
    assert tables_of(tensors, lambda name: "text.t_#") == [RowTable((1, 0), (0, 4), 8)]


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        ({"t_0": (4, 3), "t_2": (4, 3)}, "t_0': 2 shards of a table, numbered up to 2: expected 0 to 1"),
        ({"t_1": (4, 3)}, "t_1': 1 shards of a table, numbered up to 1: expected 0 to 0"),
        ({"t_0": (4, 3), "t_00": (4, 3)}, "t_00': the table has two shards 0"),
        ({"t_0": (4, 3), "t_1": (4, 2)}, r"t_1': BF16 \[4, 2\], but 't_0' is BF16 \[4, 3\]: rows of a table are alike"),
        ({"t_0": ()}, r"t_0': BF16 \[\], but"),
    ],
)
def test_what_is_no_whole_table_is_refused_before_it_is_cut(shapes: Shapes, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        cut(shapes, 2, "t_#")
    assert cut(shapes, 1, "t_#").tables == ()  # One rank holds what there is.


@given(
    rows=st.lists(st.integers(0, 90), min_size=1, max_size=6),
    num_ranks=st.integers(2, 9),
    unit=st.sampled_from(["vocabulary", "ragged"]),
)
def test_ranks_hold_the_rows_that_they_would_hold_of_the_table_in_one_tensor(
    rows: list[int], num_ranks: int, unit: str
) -> None:
    rule = f'{{ dim = 0, by = "{unit}", table = true }}'
    shapes = {SHARD.format(n): (count, 3) for n, count in enumerate(rows)}
    plan = plan_by(make_source(shapes, model_type="mine"), num_ranks, family_of("layers.*.table.shard_#.weight", rule))
    one = plan_by(make_source({"one": (sum(rows), 3)}, model_type="mine"), num_ranks, family_of("one", rule))
    numbered = np.split(np.arange(sum(rows)), np.cumsum(rows)[:-1])
    for rank in range(num_ranks):
        parts = [slices[rank] for slices in all_slices(plan)]
        held = [
            shard[start : start + n]
            for shard, part in zip(numbered, parts, strict=True)
            for start, n in _rows(part, len(shard))
        ]
        [(start, length)] = _rows(all_slices(one)[0][rank], sum(rows)) or [(0, 0)]
        assert np.concatenate([[], *held]).tolist() == list(range(start, start + length))


def _rows(part: Slice, num_rows: int) -> list[tuple[int, int]]:
    return (
        []
        if not part.is_held
        else list(part.ranges_along(0) or (((0, num_rows),) if part.is_whole and num_rows else ()))
    )


def test_shards_of_two_layers_are_two_tables() -> None:
    shapes = {f"layers.{layer}.table.shard_{n}.weight": (64, 8) for layer in (0, 1) for n in range(4)}
    plan = cut(shapes, 2)
    assert plan.tables == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert [slices[0].is_whole for slices in slices_of(plan, shapes).values()] == [True, True, False, False] * 2
    assert all_slices(plan)[0] == (Slice(), Slice.along(0, ()))


def test_the_table_of_qwen4_exp_is_planned_at_its_real_size_without_its_rows() -> None:
    """320 million rows in 512 shards, of which a rank of 8 has some of 65: less than a second, and no index of rows."""
    num_rows = 128 * 2_500_037  # A multiple of 128, not of 512.
    size = -(-num_rows // 512)
    name = "model.layers.1.ple.ple_embedding.ngram_embedding.shard_{}.weight"
    shapes = {name.format(n): (min(size, num_rows - n * size), 160) for n in range(512)}
    started = process_time()
    family = find_family("qwen4_exp")
    plan = plan_by(make_source(shapes, model_type="qwen4_exp", stored_as="F8_E4M3"), 8, family)
    assert process_time() - started < 10
    assert plan.tables == (tuple(range(512)),)
    held = [[slices[rank] != Slice.along(0, ()) for slices in all_slices(plan)] for rank in range(8)]
    assert {sum(of_rank) for of_rank in held} <= {64, 65}
    share = num_rows // 8
    for rank in range(8):
        first, last = held[rank].index(True), 511 - held[rank][::-1].index(True)
        assert first == rank * share // size
        part = all_slices(plan)[first][rank]
        assert (part.ranges_along(0) or ((0, size),))[0][0] == rank * share - first * size
        assert last == ((rank + 1) * share - 1) // size


def test_a_plan_in_json_keeps_its_tables(tmp_path: Path) -> None:
    plan = cut({SHARD.format(n): (64, 8) for n in range(3)}, 2)
    assert plan.tables == ((0, 1, 2),)
    assert Plan.from_json(plan.as_json()) == plan
