"""relayout.plans.division: which elements of an axis each rank holds, by hand and by numpy from the engines' rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support import engine_oracle

from relayout.errors import PlanError
from relayout.plans.division import Sizes, divide, owner_ranges, ragged_ranges
from relayout.plans.family import Rule, SizeSource

Range = tuple[int, int]
Indices = npt.NDArray[np.int64]


def sizes_of(**counts: int) -> Sizes:
    """Sizes that are what they are."""
    return Sizes({name: (SizeSource(count),) for name, count in counts.items()}, {})


def elements(ranges: Sequence[Range]) -> list[int]:
    return [element for start, length in ranges for element in range(start, start + length)]


# One kind of part, against the engines' arithmetic (engine_oracle.py).


@given(
    kind=st.sampled_from(["even", "heads", "kv", "vocabulary", "ragged:1", "ragged:7"]),
    count=st.integers(1, 24),
    width=st.integers(1, 130),
    num_ranks=st.integers(1, 96),
)
@example(kind="vocabulary", count=50257, width=1, num_ranks=5)  # Padded to 50304, which is no multiple of 5: to 50560.
@example(kind="vocabulary", count=1000, width=1, num_ranks=7)  # The last rank holds nothing.
@example(kind="vocabulary", count=0, width=1, num_ranks=2)
@example(kind="kv", count=2, width=128, num_ranks=8)
@example(kind="ragged:1", count=90, width=1, num_ranks=16)
def test_an_axis_is_cut_as_engines_cut_it_or_refused_as_by_them(
    kind: str, count: int, width: int, num_ranks: int
) -> None:
    name, _, block = kind.partition(":")
    unit = {"kv": "kv_heads"}.get(name, name)
    dim = count * width * int(block or 1)
    rule = Rule("x", 0, (unit,), block=int(block) if block else None)
    sizes = sizes_of(heads=count, kv_heads=count)
    try:
        expected = engine_oracle.expected(kind, np.arange(dim), num_ranks, {"A": count, "K": count})
    except engine_oracle.IndivisibleError:
        message = f"^{dim} elements, not|^{count} groups of {width} elements, not|^{count} heads .* cannot share"
        with pytest.raises(PlanError, match=message):
            divide(rule, dim, sizes, num_ranks)
    else:
        found = divide(rule, dim, sizes, num_ranks)
        assert [elements(ranges) for ranges in found] == [part.tolist() for part in expected]
        assert {len(ranges) for ranges in found} == {1}


# Whole columns of hash tables.


@given(
    vocabulary=st.integers(1, 3000),
    orders=st.integers(1, 3),
    heads=st.integers(1, 8),
    layer=st.integers(0, 3),
    num_ranks=st.integers(1, 40),
)
@example(vocabulary=500, orders=2, heads=8, layer=1, num_ranks=3)  # The last rank has fewer columns.
@example(vocabulary=500, orders=2, heads=8, layer=0, num_ranks=32)  # vLLM refuses it.
def test_a_hash_table_is_cut_at_the_columns_of_its_layer(
    vocabulary: int, orders: int, heads: int, layer: int, num_ranks: int
) -> None:
    columns = engine_oracle.hash_columns(vocabulary, orders * heads, layer)
    sizes = sizes_of(hash_vocabulary=vocabulary, max_ngram=orders + 1, hash_heads=heads)
    kind = f"hash:{vocabulary}/{orders * heads}/{layer}"
    expected = engine_oracle.expected(kind, np.arange(sum(columns)), num_ranks, {})
    found = divide(Rule("x", 0, ("hash_columns",)), sum(columns), sizes, num_ranks)
    assert [elements(ranges) for ranges in found] == [part.tolist() for part in expected]


def test_the_hash_tables_of_a_real_model_are_cut_without_their_rows() -> None:
    """Two tables of 384 million rows, as V4.1-Flash has them: the borders are exact sums beyond 2**31 bytes."""
    columns = engine_oracle.hash_columns(24_000_000, 16, 1)
    sizes = sizes_of(hash_vocabulary=24_000_000, max_ngram=3, hash_heads=8)
    assert 24_000_000 * 16 < sum(columns) < 24_000_000 * 16 + 100_000
    ranges = divide(Rule("x", 0, ("hash_columns",)), sum(columns), sizes, 4)
    borders = np.cumsum([0, *columns])[::4].tolist()
    assert ranges == [((start, end - start),) for start, end in pairwise(borders)]


@pytest.mark.parametrize("size", [0, 8967, 8969, 2**62])
def test_rows_that_no_hash_table_has_are_refused(size: int) -> None:
    sizes = sizes_of(hash_vocabulary=500, max_ngram=3, hash_heads=8)
    with pytest.raises(PlanError, match=f"^{size} rows, which are not the sum of 16 successive primes from 500 on: "):
        divide(Rule("x", 0, ("hash_columns",)), size, sizes, 2)


def test_hash_tables_without_columns_or_with_very_many_are_refused() -> None:
    for max_ngram, heads in ((1, 8), (2, 5000)):
        sizes = sizes_of(hash_vocabulary=500, max_ngram=max_ngram, hash_heads=heads)
        with pytest.raises(PlanError, match=r"^\d+ columns of a hash table, expected 1 to 4096"):
            divide(Rule("x", 0, ("hash_columns",)), 8968, sizes, 2)


# Ragged shares of whole blocks, and owners of experts.


def test_a_ragged_axis_that_is_no_whole_number_of_blocks_is_refused() -> None:
    with pytest.raises(PlanError, match=r"^100 elements, not a multiple of the block size 64$"):
        ragged_ranges(100, 64, 2)


@given(count=st.integers(0, 300), num_ranks=st.integers(1, 64))
def test_experts_are_dealt_as_numpy_splits_them(count: int, num_ranks: int) -> None:
    """array_split: contiguous, and the first parts take the remainder."""
    ranges = owner_ranges(count, num_ranks)
    assert [elements([one]) for one in ranges] == [part.tolist() for part in np.array_split(range(count), num_ranks)]


# Fused axes.


def joined(parts: Sequence[Indices], units: Sequence[str], num_ranks: int) -> list[list[int]]:
    """Each rank's units [count, width] of all parts, one part after another."""
    kinds = {"heads": "A", "others": "A", "kv_heads": "K"}
    shares = [
        engine_oracle.expected("kv" if unit == "kv_heads" else "heads", part, num_ranks, {kinds[unit]: len(part)})
        for part, unit in zip(parts, units, strict=True)
    ]
    return [np.concatenate([part.ravel() for part in of_rank]).tolist() for of_rank in zip(*shares, strict=True)]


def assert_maximal(ranges: Sequence[Range]) -> None:
    """No range is empty, and none ends where the next begins."""
    assert all(length > 0 for _, length in ranges)
    assert all(start + length != after for (start, length), (after, _) in pairwise(ranges))


PARTS = st.lists(st.tuples(st.sampled_from(["heads", "kv_heads", "others"]), st.integers(1, 4)), min_size=1, max_size=4)


@given(
    parts=PARTS, num_ranks=st.sampled_from([1, 2, 3, 4]), multiple=st.integers(1, 3), few=st.booleans(), data=st.data()
)
def test_a_fused_axis_is_cut_as_numpy_cuts_each_of_its_parts(
    parts: list[tuple[str, int]], num_ranks: int, multiple: int, few: bool, data: st.DataObject
) -> None:
    """Parts of equal width, and of widths of their own."""
    units = tuple(unit for unit, _ in parts)
    kv_heads = data.draw(st.sampled_from([n for n in range(1, 5) if num_ranks % n == 0])) if few else num_ranks
    counts = {"heads": num_ranks * multiple, "kv_heads": kv_heads, "others": num_ranks}
    widths = {f"width{n}": width for n, (_, width) in enumerate(parts)}
    sizes = sizes_of(**counts, **widths)
    for rule, width_of in (
        (Rule("x", 0, units), [parts[0][1]] * len(parts)),
        (Rule("x", 0, units, tuple(widths)), list(widths.values())),
    ):
        ends = np.cumsum([counts[unit] * width for unit, width in zip(units, width_of, strict=True)])
        split = np.split(np.arange(ends[-1]), ends[:-1])
        expected = joined(
            [part.reshape(counts[unit], -1) for part, unit in zip(split, units, strict=True)], units, num_ranks
        )
        found = divide(rule, int(ends[-1]), sizes, num_ranks)
        assert [elements(ranges) for ranges in found] == expected
        for ranges in found:
            assert_maximal(ranges)


@given(
    units=st.lists(st.sampled_from(["heads", "kv_heads"]), min_size=2, max_size=4),
    groups=st.sampled_from([1, 2, 3, 4, 6]),
    per_group=st.integers(1, 3),
    width=st.integers(1, 3),
    num_ranks=st.sampled_from([1, 2, 3, 4, 6, 12]),
)
def test_an_interleaved_axis_is_cut_as_numpy_cuts_its_parts_after_transposition(
    units: list[str], groups: int, per_group: int, width: int, num_ranks: int
) -> None:
    counts = {"heads": groups * per_group, "kv_heads": groups}
    shares = [counts[unit] // groups for unit in units]
    rule = Rule("x", 0, tuple(units), interleaved="kv_heads")
    dim = sum(counts[unit] for unit in units) * width
    sizes = sizes_of(**counts)
    if any(counts[unit] % num_ranks and (unit != "kv_heads" or num_ranks % groups) for unit in units):
        with pytest.raises(PlanError, match=rf"^\d+ .*\b{num_ranks}\b"):
            divide(rule, dim, sizes, num_ranks)
        return
    by_part = np.split(np.arange(dim).reshape(groups, sum(shares), width), np.cumsum(shares)[:-1], axis=1)
    expected = joined([part.reshape(-1, width) for part in by_part], units, num_ranks)
    found = divide(rule, dim, sizes, num_ranks)
    assert [elements(ranges) for ranges in found] == expected
    for ranges in found:
        assert_maximal(ranges)
    if num_ranks <= groups:
        assert sorted(element for ranges in found for element in elements(ranges)) == list(range(dim))


@pytest.mark.parametrize(
    ("rule", "dim", "sizes", "num_ranks", "message"),
    [
        (Rule("x", 0, ("even", "even")), 13, {}, 2, "13 elements cannot be divided into 2 parts of equal size"),
        (Rule("x", 0, ("keys", "values")), 13, {"keys": 2, "values": 4}, 2, "13 elements cannot be .* 2 \\+ 4 units"),
        (
            Rule("x", 0, ("heads", "kv_heads")), 18, {"heads": 2, "kv_heads": 1, "head_dim": 4}, 1,
            "18 elements, but config.json declares 3 heads of 4 elements",
        ),
        (
            Rule("x", 0, ("keys", "values"), ("dk", "dv")), 15, {"keys": 2, "values": 4, "dk": 3, "dv": 2}, 2,
            r"15 elements, but config.json declares 2 \* 3 \+ 4 \* 2",
        ),
        (
            Rule("x", 0, ("heads", "kv_heads"), interleaved="kv_heads"), 14, {"heads": 5, "kv_heads": 2}, 2,
            r"5 \+ 2 heads cannot be divided into 2 equal groups",
        ),
        (
            Rule("x", 0, ("keys", "values"), ("dk", "dv")), 14, {"keys": 2, "values": 4, "dv": 2}, 2,
            "size 'dk' is unknown: the plan does not say where to find it$",
        ),
        # What does not divide is the heads, of which there are 12 of 15 elements, and not the elements.
        (
            Rule("x", 0, ("heads", "heads", "heads")), 540, {"heads": 12}, 5,
            "12 groups of 15 elements, not a multiple of 5",
        ),
        (
            Rule("x", 0, ("heads", "kv_heads")), 45, {"heads": 12, "kv_heads": 3}, 4,
            "3 heads of 3 elements, which 4 ranks cannot share evenly",
        ),
    ],
)  # fmt: skip
def test_a_fused_axis_that_cannot_be_divided_is_refused(
    rule: Rule, dim: int, sizes: Mapping[str, int], num_ranks: int, message: str
) -> None:
    with pytest.raises(PlanError, match=f"^{message}"):
        divide(rule, dim, sizes_of(**sizes), num_ranks)


# Heads that contradict config.json.


def test_one_number_for_each_head_is_no_contradiction() -> None:
    sizes = sizes_of(heads=8, head_dim=16)
    for dim, length in ((8, 4), (128, 64)):
        assert divide(Rule("x", 0, ("heads",)), dim, sizes, 2) == [((0, length),), ((length, length),)]


def test_the_head_dim_is_not_for_units_that_are_no_heads() -> None:
    sizes = sizes_of(key_heads=4, head_dim=16)
    assert divide(Rule("x", 0, ("key_heads",)), 12, sizes, 2) == [((0, 6),), ((6, 6),)]
    with pytest.raises(PlanError, match=r"^10 elements, but config.json declares 4 key_heads$"):
        divide(Rule("x", 0, ("key_heads",)), 10, sizes, 2)


# Sizes.


@pytest.mark.parametrize(
    ("sources", "config", "expected"),
    [
        ([SizeSource("a")], {"a": 3}, 3),
        ([SizeSource("a")], {"b": 3}, None),
        ([SizeSource(5)], {}, 5),
        ([SizeSource("a"), SizeSource("b")], {"a": 3, "b": 4}, 3),
        ([SizeSource("a"), SizeSource("b")], {"b": 4}, 4),
        ([SizeSource("a"), SizeSource(7)], {"a": None}, 7),
        # What is no positive whole number does not count.
        *(([SizeSource("a"), SizeSource("b")], {"a": bad, "b": 4}, 4) for bad in (0, -8, True, "8", 8.0, [8], {})),
        # Quotients, rounded down; one of 0 does not count either.
        ([SizeSource("a / b")], {"a": 9, "b": 4}, 2),
        ([SizeSource("a / b"), SizeSource(7)], {"a": 9}, 7),
        ([SizeSource("a / b"), SizeSource(7)], {"a": 3, "b": 4}, 7),
        # The nested text model first, and where it says nothing, or null, the whole.
        ([SizeSource("a")], {"a": 3, "text_config": {"a": 5}}, 5),
        ([SizeSource("a")], {"a": 3, "text_config": {"b": 5}}, 3),
        ([SizeSource("a")], {"a": 3, "text_config": {"a": None}}, 3),
        ([SizeSource("a"), SizeSource("b")], {"a": 3, "text_config": {"b": 5}}, 3),
        ([SizeSource("a")], {"a": 3, "text_config": None}, 3),
        ([SizeSource("a")], {"a": 3, "text_config": "a"}, 3),
        # A key of an object.
        # Conditions.
        ([SizeSource(1, "b"), SizeSource("a")], {"a": 3, "b": True}, 1),
        ([SizeSource(1, "b"), SizeSource("a")], {"a": 3, "b": False}, 3),
        ([SizeSource(1, "b"), SizeSource("a")], {"a": 3}, 3),
        ([SizeSource(1, "b"), SizeSource("a")], {"a": 3, "b": "yes"}, 3),
        ([SizeSource("c", "b"), SizeSource("a")], {"a": 3, "b": True, "c": 2}, 2),
        ([SizeSource("c", "b"), SizeSource("a")], {"a": 3, "b": True}, 3),
        ([SizeSource(8, "b", "mistral"), SizeSource("a")], {"a": 3, "b": "mistral"}, 8),
        ([SizeSource(8, "b", "mistral"), SizeSource("a")], {"a": 3, "b": "llama"}, 3),
        ([SizeSource(8, "b", False), SizeSource("a")], {"a": 3, "b": False}, 8),
        ([SizeSource(8, "b", False), SizeSource("a")], {"a": 3, "b": True}, 3),
        ([SizeSource(8, "b", 2), SizeSource("a")], {"a": 3, "b": 2}, 8),
        # Also of the nested text model first.
        ([SizeSource(8, "b", "x")], {"b": "y", "text_config": {"b": "x"}}, 8),
        ([SizeSource(8, "b", "x")], {"b": "x", "text_config": {"b": "y"}}, None),
        ([SizeSource(8, "b", "x")], {"b": "x", "text_config": {}}, 8),
    ],
)
def test_a_size_is_the_first_of_its_sources_that_is_there(
    sources: list[SizeSource], config: dict[str, Any], expected: int | None
) -> None:
    assert Sizes({"heads": sources}, config).find("heads") == expected


def test_a_size_that_config_json_does_not_have_is_named_with_its_keys() -> None:
    sizes = Sizes({"heads": (SizeSource("n_head"), SizeSource("num_heads"))}, {"n_head": 0})
    with pytest.raises(
        PlanError, match=r"^size 'heads' is unknown: config.json has no positive integer n_head or num_heads$"
    ):
        sizes.get("heads")
    with pytest.raises(PlanError, match=r"^size 'groups' is unknown: the plan does not say where to find it$"):
        sizes.get("groups")
    assert Sizes({"heads": (SizeSource("n_head"),)}, {"n_head": 2}).get("heads") == 2


def test_groups_of_a_state_space_are_shared_as_kv_heads_are() -> None:
    """vLLM 0.33 `mamba_mixer2.py`: with one group, every rank has it."""
    sizes = sizes_of(state_heads=8, state_dim=4, state_groups=1, state=16)
    units, widths = ("state_heads", "state_groups", "state_groups"), ("state_dim", "state", "state")
    ranges = divide(Rule("x", 0, units, widths), 64, sizes, 4)
    assert [elements(one) for one in ranges] == [[*range(8 * r, 8 * r + 8), *range(32, 64)] for r in range(4)]
    assert divide(Rule("x", 0, ("state_groups",)), 16, sizes, 4) == [((0, 16),)] * 4
