"""relayout.core.arguments: integers, sizes and ranks as people write them, and patterns of tensor names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.planning import all_slices, make_source

from relayout.core.arguments import (
    check_named,
    collapse_later_numbers,
    collapse_numbers,
    compile_glob,
    depends_on_later_numbers,
    depends_on_numbers,
    folder_text,
    path_text,
    ranks_text,
    size,
    slow_because,
)
from relayout.core.arguments import ranks as parse_ranks
from relayout.errors import PlanError
from relayout.plans.family import parse_family
from relayout.plans.planner import plan_by


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4096B", 4096),
        ("64K", 65536),
        ("64k", 65536),
        ("64KiB", 65536),
        (" 64 kib ", 65536),
        ("64KB", 64000),
        ("2M", 2097152),
        ("2MiB", 2097152),
        ("2mb", 2000000),
        ("48GB", 48 * 10**9),
        ("48G", 48 * 2**30),
        ("1TiB", 2**40),
        ("1TB", 10**12),
        ("9223372036854775807", 2**63 - 1),
        ("000000000000000000000000000000001K", 1024),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert size(text, "memory") == nbytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "K",
        "-1",
        "+1",
        "1.5G",
        "4 096",
        "12XB",
        "1KiBB",
        "0x10",
        "1e9",
        "one",
        "²",
        "1i",
        "٤٠٩٦",
        "4٠96",  # noqa: RUF001
        "9" * 5000 + "X",
    ],
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match=r"^memory: .* is not a size; write bytes, or a number with K, KiB") as caught:
        size(text, "memory")
    assert repr(text) in str(caught.value) or len(text) > len(str(caught.value))


@pytest.mark.parametrize(
    "text", ["9223372036854775808", "9007199254740992K", "9223373TB", "9" * 5000, "9" * 5000 + "GB"]
)
def test_a_size_that_nothing_has_is_refused(text: str) -> None:
    with pytest.raises(
        PlanError, match=r"^memory: .* is too large, expected at most 9223372036854775807 bytes$"
    ) as caught:
        size(text, "memory")
    assert len(str(caught.value)) < 500


@given(st.sets(st.integers(0, 40), min_size=1))
def test_ranks_are_written_and_read(ranks: set[int]) -> None:
    text = ranks_text(sorted(ranks))
    assert parse_ranks(text, 41) == parse_ranks(ranks, 41) == tuple(sorted(ranks))
    for part in text.split(","):
        first, _, last = part.partition("-")
        assert set(range(int(first), int(last or first) + 1)) <= ranks
        assert int(first) - 1 not in ranks
        assert int(last or first) + 1 not in ranks


@pytest.mark.parametrize(
    "wrong", ["", ",", "0,", "3-1", "0-4", "4", "-1", "1.5", "a", "0-999999999999", [], [4], [-1], [1.5], [True]]
)
def test_what_names_no_ranks_is_refused(wrong: Any) -> None:
    with pytest.raises(PlanError, match=r"^ranks: "):
        parse_ranks(wrong, 4)


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("a.b", ["a.b"], ["a_b", "a.b.c", "x.a.b", "a.b\n", "A.b"]),
        ("a.*.c", ["a.0.c", "a.b-1.c", "a.\n.c"], ["a..c", "a.b.b.c", "a.c"]),
        ("a*c", ["abc"], ["ac", "a.c"]),
        ("a.**", ["a.", "a.b", "a.b.c", "a.b\nc"], ["a", "ab"]),
        ("**.w", [".w", "a.b.w"], ["w", "a.ww"]),
        ("**", ["", "a", "a.b\nc"], []),
        ("l.{q,k}.w", ["l.q.w", "l.k.w"], ["l.v.w", "l.q,k.w", "l.qk.w"]),
        ("{model.,}l.w", ["model.l.w", "l.w"], ["x.l.w", ".l.w", "model.model.l.w"]),
        ("l.w{_s,}", ["l.w_s", "l.w"], ["l.w_", "l.w_s,"]),
        ("l.{q}", ["l.q"], ["l.{q}"]),
        ("l.{a.b,*}", ["l.a.b", "l.*"], ["l.axb", "l.c"]),
        ("a{b", ["a{b"], ["ab"]),
        ("a+(b)[c]|d", ["a+(b)[c]|d"], ["aab", "d"]),
        ("e.#.w", ["e.0.w", "e.127.w", "e.007.w", "e.123456789.w"], ["e.a.w", "e..w", "e.1.2.w", "e.1a.w", "e.#.w"]),
        ("e.#.w", [], ["e.1234567890.w", "e.-1.w", "e.+1.w", "e.1_0.w", "e.\u0663.w", "e.\u00b2.w"]),
        ("e#", ["e0", "e12"], ["e", "e.1"]),
    ],
)
def test_patterns(pattern: str, matching: list[str], others: list[str]) -> None:
    compiled = compile_glob(pattern)
    assert [name for name in matching + others if compiled.match(name)] == matching


def test_a_number_sign_says_which_number() -> None:
    found = compile_glob("layers.*.experts.#.**").match("layers.3.experts.17.w1.4.weight")
    assert found
    assert found.groups() == ("17",)
    assert compile_glob("#.#").match("3.4").groups() == ("3", "4")  # type: ignore[union-attr]
    assert compile_glob("{a,b}.(c)").groups == 0


@given(st.text(st.characters(exclude_characters="*#{"), max_size=8), st.text(max_size=8))
def test_a_pattern_without_wildcards_means_just_itself(name: str, other: str) -> None:
    assert compile_glob(name).match(name)
    assert bool(compile_glob(name).match(other)) == (name == other)


# What takes long.

HOSTILE_NAMES = ["a" * 4096 + "!", "a" * 4000 + ".!", "a." * 2048 + "!", "7" * 4096 + "!"]


@pytest.mark.parametrize(
    "pattern",
    [
        *("**a**b", "**.a.**.w", "**.a.*.b.**.w", "**a*.x", "a*a*a", "**#.x", "*.*.*.*.x", "**a**a**", "#.#.#.#.x"),
        *("{a,aa}" * 6 + "x", "{a,b}" * 99 + "x", "{model.,}l.*.{q,k}.{weight,bias}", "a" * 512, ""),
    ],
)
def test_a_pattern_is_matched_in_time_that_does_not_explode(pattern: str) -> None:
    """Time that grows with the cube of a name's length, or doubles with each word, would be hours."""
    assert slow_because(pattern) is None
    for name in HOSTILE_NAMES:
        assert not compile_glob(pattern).match(name) or pattern == "**a**a**"


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        *(
            (pattern, "more than 2 wildcards that may end in many places")
            for pattern in (
                *("**a**a**b", "a*b*c*d", "##1#2", "**a**a*.x", "**a**a*.**", "**a**a*", "**a**#", "*" * 7),
                *("*{a,.}*{a,.}*x", "**.a.**.l.*.w"),
            )
        ),
        ("{a,aa}" * 7, "more than 64 ways to choose between words of which one begins with another"),
        ("{a,a}" * 7, "more than 64 ways to choose between words of which one begins with another"),
        ("{,a,b}" * 4, "more than 64 ways to choose between words of which one begins with another"),
        ("a" * 513, "more than 512 characters"),
    ],
)
def test_a_pattern_that_may_take_long_is_told_with_the_reason(pattern: str, why: str) -> None:
    assert slow_because(pattern) == why


@pytest.mark.parametrize(
    ("name", "collapsed"),
    [
        ("model.layers.12.mlp.experts.7.w1", "model.layers.*.mlp.experts.*.w1"),
        ("0.a.0", "*.a.*"),
        ("10.20.30", "*.*.*"),
        ("w1.x2.3d.d3", "w1.x2.3d.d3"),
        ("", ""),
        ("7", "*"),
    ],
)
def test_names_of_all_layers_collapse_to_one_pattern(name: str, collapsed: str) -> None:
    assert collapse_numbers(name) == collapsed
    assert compile_glob(collapsed).match(name)


# Looking up many names as one.


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("layers.*.w", False),
        ("**", False),
        ("{a,b}.w1.x2y.3d.a_1", False),
        ("layers.0.w", True),
        ("0", True),
        ("layers.{0,1}.w", True),
        ("layers.*0.w", True),
        ("layers.1*.w", True),
        ("layers.**7", True),
        ("layers.#.w", True),
    ],
)
def test_patterns_that_name_numbers(pattern: str, expected: bool) -> None:
    assert depends_on_numbers(pattern) == expected


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("layers.{1,7,11}.w", False),
        ("{model.,}layers.{0}.{k,v}.*.w", False),
        ("layers.3.experts.**", False),
        ("layers.*.w", False),
        ("layers.0.1.w", True),
        ("layers.{0,1.2}.w", True),
        ("layers.{0,1}.{a,2}", True),
        ("*.3", True),
        ("**.3", True),
        ("a.#", True),
    ],
)
def test_patterns_that_name_later_numbers(pattern: str, expected: bool) -> None:
    assert depends_on_later_numbers(pattern) == expected


@pytest.mark.parametrize(
    ("depends", "collapse"),
    [(depends_on_numbers, collapse_numbers), (depends_on_later_numbers, collapse_later_numbers)],
)
def test_a_pattern_that_names_no_numbers_means_all_names_that_differ_in_numbers_or_none(
    depends: Callable[[str], bool], collapse: Callable[[str], str]
) -> None:
    """All patterns and names of up to three parts, of these."""
    tokens = [
        "*",
        "**",
        "#",
        "a",
        "w1",
        "0",
        "12",
        "{a,0}",
        "{a,w1}",
        "{a.,}a",
        "1*",
        "*1",
        "*w1",
        "a_1",
        "{1,}w",
        "{a,1.0}",
    ]
    names = defaultdict(list)
    for count in (1, 2, 3):
        for parts in product(["a", "b", "w1", "0", "1", "12", "a_1", "1a"], repeat=count):
            names[collapse(".".join(parts))].append(".".join(parts))
    assert max(map(len, names.values())) >= 9
    outcomes = set()
    for count in (1, 2, 3):
        for chosen in product(tokens, repeat=count):
            pattern = ".".join(chosen)
            if depends(pattern):
                continue
            compiled = compile_glob(pattern)
            for alike in names.values():
                matching = [bool(compiled.match(name)) for name in alike]
                assert len(set(matching)) == 1, (pattern, alike)
                outcomes.add((len(alike) > 1, matching[0]))
    assert outcomes == set(product([True, False], repeat=2))


@pytest.mark.parametrize("order", [("h.0.w", "h.1.w", "h.10.w"), ("h.10.w", "h.1.w", "h.0.w")])
@pytest.mark.parametrize("literal", ["h.0.w", "h.{0,7}.w", "h.0*.w", "h.0.*", "**.0.w"])
def test_a_plan_that_names_numbers_is_applied_by_each_name(literal: str, order: tuple[str, ...]) -> None:
    """One that does not is looked up once for all layers; h.0* is the number 0 and one digit more, so no name here."""
    family = parse_family(f'[cut]\n"{literal}" = "whole"\n"h.*.w" = {{ dim = 0, by = "even" }}', "x", "x")
    assert family.depends_on_numbers
    plan = plan_by(make_source(dict.fromkeys(order, (4,))), 2, family)
    whole = {name for name, parts in zip(order, all_slices(plan), strict=True) if parts[0].is_whole}
    assert whole == ({"h.0.w"} if literal != "h.0*.w" else set())


@pytest.mark.parametrize("order", [("m.0.w", "m.1.w"), ("m.1.w", "m.0.w")])
def test_a_prefix_that_names_numbers_is_taken_off_each_name(order: tuple[str, ...]) -> None:
    family = parse_family('language_prefixes = ["m.0."]\n[cut]\n"w" = { dim = 0, by = "even" }', "x", "x")
    assert family.depends_on_numbers
    plan = plan_by(make_source(dict.fromkeys(order, (4,))), 2, family, unmatched="replicate")
    assert plan.unmatched == ("m.1.w",)
    assert {name: parts[0].is_whole for name, parts in zip(order, all_slices(plan), strict=True)} == {
        "m.0.w": False,
        "m.1.w": True,
    }


@pytest.mark.parametrize("order", [("a.\u0663", "a.3"), ("a.3", "a.\u0663")])
def test_digits_that_are_not_ascii_are_names_and_no_numbers(order: tuple[str, ...]) -> None:
    family = parse_family('[cut]\n"a.\u0663" = "whole"\n"a.*" = { dim = 0, by = "even" }', "x", "x")
    plan = plan_by(make_source(dict.fromkeys(order, (4,))), 2, family)
    whole = {name for name, parts in zip(order, all_slices(plan), strict=True) if parts[0].is_whole}
    assert whole == {"a.\u0663"}


def test_what_is_given_by_names_has_names() -> None:
    check_named({"norm": 1}, "into")
    check_named({}, "into")
    with pytest.raises(PlanError, match=r"^into is a list, expected tensors by name$"):
        check_named([("norm", 1)], "into")
    with pytest.raises(PlanError, match=r"^into: 5, expected the name of a tensor$"):
        check_named({"norm": 1, 5: 1}, "into")


def test_a_path_is_text_as_it_was_given() -> None:
    assert path_text(Path("a", "b")) == "a/b"
    assert path_text("s3://bucket/a/") == "s3://bucket/a/"
    assert folder_text(Path("a", "b"), "scratch") == "a/b"
    assert folder_text(None, "scratch") is None


def test_a_path_that_is_none_is_refused_with_what_it_is_and_what_was_expected() -> None:
    with pytest.raises(PlanError, match=r"^path: 3, expected the path of a folder, or a URL as text$"):
        path_text(3)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"^against: None, expected a folder with a checkpoint$"):
        path_text(None, "against", "a folder with a checkpoint")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"^scratch: b'a', expected the path of a folder$"):
        folder_text(b"a", "scratch")  # type: ignore[arg-type]
