"""relayout.plans.division: which elements of an axis each rank holds, by hand and by numpy from the engines' rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relayout.errors import PlanError
from relayout.plans.division import Sizes, divide, even_ranges, owner_ranges, ragged_ranges, vocabulary_ranges
from relayout.plans.family import Rule, SizeSource

Range = tuple[int, int]
Indices = npt.NDArray[np.int64]


def sizes_of(**counts: int) -> Sizes:
    """Sizes that are what they are."""
    return Sizes({name: (SizeSource(count),) for name, count in counts.items()}, {})


def elements(ranges: Sequence[Range]) -> list[int]:
    return [element for start, length in ranges for element in range(start, start + length)]


# Equal groups, and KV heads that ranks share.


@pytest.mark.parametrize(
    ("dim", "num_ranks", "expected"),
    [
        (12, 1, [(0, 12)]),
        (12, 2, [(0, 6), (6, 6)]),
        (12, 4, [(0, 3), (3, 3), (6, 3), (9, 3)]),
        (3, 3, [(0, 1), (1, 1), (2, 1)]),
        (14336, 8, [(rank * 1792, 1792) for rank in range(8)]),
        (0, 2, [(0, 0), (0, 0)]),
    ],
)
def test_even_cuts(dim: int, num_ranks: int, expected: list[Range]) -> None:
    assert even_ranges(dim, dim, num_ranks) == expected
    assert divide(Rule("x", 0, ("even",)), dim, sizes_of(), num_ranks) == [(one,) for one in expected]


@pytest.mark.parametrize(
    ("kv_heads", "num_ranks", "heads_of_ranks"),
    [
        (8, 1, [(0, 8)]),
        (8, 2, [(0, 4), (4, 4)]),
        (8, 8, [(head, 1) for head in range(8)]),
        (2, 4, [(0, 1), (0, 1), (1, 1), (1, 1)]),
        (2, 8, [(0, 1)] * 4 + [(1, 1)] * 4),
        (1, 3, [(0, 1)] * 3),
        (4, 8, [(0, 1), (0, 1), (1, 1), (1, 1), (2, 1), (2, 1), (3, 1), (3, 1)]),
        (3, 6, [(0, 1), (0, 1), (1, 1), (1, 1), (2, 1), (2, 1)]),
    ],
)
def test_kv_heads_are_divided_or_shared_by_neighboring_ranks(
    kv_heads: int, num_ranks: int, heads_of_ranks: list[Range]
) -> None:
    expected = [(first * 128, count * 128) for first, count in heads_of_ranks]
    assert even_ranges(kv_heads * 128, kv_heads, num_ranks, share=True) == expected
    rule = Rule("x", 0, ("kv_heads",))
    found = divide(rule, kv_heads * 128, sizes_of(kv_heads=kv_heads), num_ranks)
    assert found == [(one,) for one in expected]


@pytest.mark.parametrize(
    ("count", "num_ranks", "share", "message"),
    [
        (8, 3, True, "8 groups of 128 elements, not a multiple of 3"),
        (8, 12, True, "8 heads of 128 elements, which 12 ranks cannot share evenly"),
        (8, 16, False, "8 groups of 128 elements, not a multiple of 16"),
        (28, 8, False, "28 groups of 128 elements, not a multiple of 8"),
    ],
)
def test_groups_that_do_not_divide_are_refused(count: int, num_ranks: int, share: bool, message: str) -> None:
    with pytest.raises(PlanError, match=f"^{message}$"):
        even_ranges(count * 128, count, num_ranks, share=share)


def test_single_elements_that_do_not_divide_are_refused() -> None:
    with pytest.raises(PlanError, match=r"^18944 elements, not a multiple of 3$"):
        even_ranges(18944, 18944, 3)


def test_only_kv_heads_are_shared() -> None:
    sizes = sizes_of(heads=2, linear_heads=2)
    for unit in ("heads", "linear_heads"):
        with pytest.raises(PlanError, match="2 groups of 4 elements, not a multiple of 4"):
            divide(Rule("x", 0, (unit,)), 8, sizes, 4)


@given(groups=st.integers(1, 24), share=st.integers(1, 5), group=st.integers(1, 7))
def test_even_ranges_partition_the_axis_in_whole_groups(groups: int, share: int, group: int) -> None:
    ranges = even_ranges(groups * share * group, groups * share, groups)
    assert elements(ranges) == list(range(groups * share * group))
    assert {length for _, length in ranges} == {share * group}


# The vocabulary.


@pytest.mark.parametrize(
    ("dim", "num_ranks", "expected"),
    [
        # A multiple of 64 x ranks: nothing special.
        (128256, 2, [(0, 64128), (64128, 64128)]),
        # Padded to 1024 for the split: 128 each, the last holds 104.
        (1000, 8, [(128 * rank, 128) for rank in range(7)] + [(896, 104)]),
        (1000, 4, [(0, 256), (256, 256), (512, 256), (768, 232)]),
        # GPT-2: padded to 50304.
        (50257, 4, [(0, 12576), (12576, 12576), (25152, 12576), (37728, 12529)]),
        (50257, 8, [(6288 * rank, 6288) for rank in range(7)] + [(44016, 6241)]),
        # 50304 is no multiple of 5: padded to 50560, a multiple of 64 x 5.
        (50257, 5, [(0, 10112), (10112, 10112), (20224, 10112), (30336, 10112), (40448, 9809)]),
        # 1024 is no multiple of 7: padded to 1344; the last rank holds nothing.
        (1000, 7, [(0, 192), (192, 192), (384, 192), (576, 192), (768, 192), (960, 40), (1000, 0)]),
        # Smaller than the padding: 16 each.
        (100, 8, [*((16 * rank, 16) for rank in range(6)), (96, 4), (100, 0)]),
        (10, 4, [(0, 10), (10, 0), (10, 0), (10, 0)]),
        (64, 1, [(0, 64)]),
        (63, 1, [(0, 63)]),
    ],
)
def test_vocabulary_cuts(dim: int, num_ranks: int, expected: list[Range]) -> None:
    assert vocabulary_ranges(dim, num_ranks) == expected
    found = divide(Rule("x", 0, ("vocabulary",)), dim, sizes_of(), num_ranks)
    assert found == [(one,) for one in expected]


@given(dim=st.integers(0, 5000), num_ranks=st.integers(1, 96))
def test_vocabulary_ranges_partition_the_axis_in_equal_shares_but_for_the_end(dim: int, num_ranks: int) -> None:
    ranges = vocabulary_ranges(dim, num_ranks)
    assert len(ranges) == num_ranks
    assert elements(ranges) == list(range(dim))
    share = ranges[0][1]
    num_full = dim // share if dim else 0
    assert [length for _, length in ranges] == ([share] * num_full + [dim - num_full * share] + [0] * num_ranks)[
        :num_ranks
    ]
    if dim > share:
        assert share * num_ranks % 64 == 0
        assert dim <= share * num_ranks < dim + 64 * num_ranks


# Ragged shares of whole blocks, and owners of experts.


@pytest.mark.parametrize(
    ("dim", "block", "num_ranks", "expected"),
    [
        # gpt-oss: 2880 in blocks of 32 are 90; 12 for each of 8 ranks, the last gets 6.
        (2880, 32, 8, [(384 * rank, 384) for rank in range(7)] + [(2688, 192)]),
        # 90 blocks over 16 ranks: 6 each, and the last has none.
        (90, 1, 16, [(6 * rank, 6) for rank in range(15)] + [(90, 0)]),
        (12, 4, 2, [(0, 8), (8, 4)]),
        (12, 4, 5, [(0, 4), (4, 4), (8, 4), (12, 0), (12, 0)]),
        (12, 3, 4, [(0, 3), (3, 3), (6, 3), (9, 3)]),
        (0, 4, 2, [(0, 0), (0, 0)]),
    ],
)
def test_ragged_cuts(dim: int, block: int, num_ranks: int, expected: list[Range]) -> None:
    assert ragged_ranges(dim, block, num_ranks) == expected
    found = divide(Rule("x", 0, ("ragged",), block=block), dim, sizes_of(), num_ranks)
    assert found == [(one,) for one in expected]


def test_a_ragged_axis_that_is_no_whole_number_of_blocks_is_refused() -> None:
    with pytest.raises(PlanError, match=r"^100 elements, not a multiple of the block size 64$"):
        ragged_ranges(100, 64, 2)


@given(blocks=st.integers(0, 60), block=st.integers(1, 9), num_ranks=st.integers(1, 40))
def test_ragged_ranges_partition_the_axis_at_borders_of_blocks_in_falling_shares(
    blocks: int, block: int, num_ranks: int
) -> None:
    ranges = ragged_ranges(blocks * block, block, num_ranks)
    assert len(ranges) == num_ranks
    assert elements(ranges) == list(range(blocks * block))
    assert all(number % block == 0 for one in ranges for number in one)
    lengths = [length for _, length in ranges]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == -(-blocks // num_ranks) * block


@given(count=st.integers(0, 300), num_ranks=st.integers(1, 64))
def test_experts_are_dealt_as_numpy_splits_them(count: int, num_ranks: int) -> None:
    """array_split: contiguous, and the first parts take the remainder."""
    ranges = owner_ranges(count, num_ranks)
    assert [elements([one]) for one in ranges] == [part.tolist() for part in np.array_split(range(count), num_ranks)]


# Fused axes.


def taken(part: Indices, num_ranks: int, *, shared: bool) -> list[Indices]:
    """The units [count, width] of a part that each rank holds."""
    if shared and num_ranks > len(part):
        return [part[[rank * len(part) // num_ranks]] for rank in range(num_ranks)]
    return np.split(part, num_ranks)


def joined(parts: Sequence[Indices], units: Sequence[str], num_ranks: int) -> list[list[int]]:
    """Each rank's units of all parts, one part after another."""
    shares = [taken(part, num_ranks, shared=unit == "kv_heads") for part, unit in zip(parts, units, strict=True)]
    return [np.concatenate([part.ravel() for part in of_rank]).tolist() for of_rank in zip(*shares, strict=True)]


def assert_maximal(ranges: Sequence[Range]) -> None:
    """No range is empty, and none ends where the next begins."""
    assert all(length > 0 for _, length in ranges)
    assert all(start + length != after for (start, length), (after, _) in pairwise(ranges))


@pytest.mark.parametrize(
    ("rule", "dim", "sizes", "num_ranks", "expected"),
    [
        # 4 query heads and 2 KV heads of 2: q 0-7, k 8-11, v 12-15.
        (
            Rule("x", 0, ("heads", "kv_heads", "kv_heads")), 16, {"heads": 4, "kv_heads": 2}, 2,
            [((0, 4), (8, 2), (12, 2)), ((4, 4), (10, 2), (14, 2))],
        ),
        (
            Rule("x", 0, ("heads", "kv_heads", "kv_heads")), 16, {"heads": 4, "kv_heads": 2}, 4,
            [((0, 2), (8, 2), (12, 2)), ((2, 2), (8, 2), (12, 2)),
             ((4, 2), (10, 2), (14, 2)), ((6, 2), (10, 2), (14, 2))],
        ),
        # gate 0-5, up 6-11.
        (Rule("x", 0, ("even", "even")), 12, {}, 3, [((0, 2), (6, 2)), ((2, 2), (8, 2)), ((4, 2), (10, 2))]),
        # One rank: all that touches is one range.
        (Rule("x", 0, ("even", "even")), 12, {}, 1, [((0, 12),)]),
        # The same in two groups, each q q k v of one element: a rank's q are apart, its k and v touch.
        (
            Rule("x", 0, ("heads", "kv_heads", "kv_heads"), interleaved="kv_heads"), 8, {"heads": 4, "kv_heads": 2}, 2,
            [((0, 4),), ((4, 4),)],
        ),
        (
            Rule("x", 0, ("heads", "kv_heads", "kv_heads"), interleaved="kv_heads"), 8, {"heads": 4, "kv_heads": 2}, 1,
            [((0, 2), (4, 2), (2, 1), (6, 1), (3, 1), (7, 1))],
        ),
        # BLOOM, 4 heads of 1: q k v q k v q k v q k v.
        (
            Rule("x", 0, ("heads", "heads", "heads"), interleaved="heads"), 12, {"heads": 4}, 2,
            [((0, 1), (3, 1), (1, 1), (4, 1), (2, 1), (5, 1)), ((6, 1), (9, 1), (7, 1), (10, 1), (8, 1), (11, 1))],
        ),
        # Widths: 2 keys of 3, 4 values of 2; k 0-5, v 6-13.
        (
            Rule("x", 0, ("keys", "values"), ("key_dim", "value_dim")), 14,
            {"keys": 2, "values": 4, "key_dim": 3, "value_dim": 2}, 2, [((0, 3), (6, 4)), ((3, 3), (10, 4))],
        ),
        # A width alone.
        (Rule("x", 0, ("keys",), ("key_dim",)), 6, {"keys": 2, "key_dim": 3}, 2, [((0, 3),), ((3, 3),)]),
    ],
)  # fmt: skip
def test_fused_cuts(
    rule: Rule, dim: int, sizes: Mapping[str, int], num_ranks: int, expected: list[tuple[Range, ...]]
) -> None:
    assert divide(rule, dim, sizes_of(**sizes), num_ranks) == expected


PARTS = st.lists(st.tuples(st.sampled_from(["heads", "kv_heads", "others"]), st.integers(1, 4)), min_size=2, max_size=4)


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


@pytest.mark.parametrize("unit", ["heads", "kv_heads"])
@pytest.mark.parametrize(
    ("dim", "sizes", "message"),
    [
        (60, {}, "60 elements, but config.json declares 8 heads"),
        (64, {"head_dim": 16}, "64 elements, but config.json declares 8 heads of 16 elements"),
        (60, {"head_dim": 8}, "60 elements, but config.json declares 8 heads of 8 elements"),
    ],
)
def test_an_axis_that_is_not_the_heads_of_config_json_is_refused(
    unit: str, dim: int, sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(PlanError, match=f"^{message}$"):
        divide(Rule("x", 0, (unit,)), dim, sizes_of(**{unit: 8}, **sizes), 2)


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
