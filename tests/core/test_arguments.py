"""relayout.core.arguments: sizes and ranks as people write them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relayout.core.arguments import ranks as parse_ranks
from relayout.core.arguments import ranks_text, size
from relayout.errors import PlanError


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
