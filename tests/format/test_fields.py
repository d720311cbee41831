"""relayout.format.fields: typed access to JSON and TOML of others, and the slices and names in it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relayout.core.slices import NOT_HELD, WHOLE, Slice
from relayout.errors import FormatError, PlanError
from relayout.format.fields import (
    MAX_RANGES,
    MAX_SIZE,
    Fields,
    check_apart,
    check_path,
    decode,
    dump_slice,
    parse_object,
    parse_slice,
    parse_toml,
)

GIVEN: dict[str, Any] = {
    "text": "a",
    "size": 3,
    "flag": True,
    "object": {"x": 1},
    "null": None,
    "sizes": [0, 5, MAX_SIZE],
    "mixed": ["a", None],
}


def test_a_field_of_the_right_kind_is_returned() -> None:
    fields = Fields(GIVEN)
    assert (fields.text("text"), fields.text_or_null("text"), fields.text_or_null("null")) == ("a", "a", None)
    assert (fields.size("size"), fields.size("missing", 7)) == (3, 7)
    assert (fields.flag("flag"), fields.object("object"), fields.object_or_null("null")) == (True, {"x": 1}, None)
    assert fields.column("sizes", int) == fields.column("sizes", int, 3) == [0, 5, MAX_SIZE]
    assert fields.column("mixed", (str, type(None))) == ["a", None]
    assert fields.positions("sizes", 3, MAX_SIZE + 1) == [0, 5, MAX_SIZE]


@pytest.mark.parametrize(
    ("method", "name", "more", "expected"),
    [
        ("text", "size", (), "a string"),
        ("text", "missing", (), "a string"),
        ("text_or_null", "missing", (), "a string or null"),
        ("size", "text", (), "a size"),
        ("size", "flag", (), "a size"),
        ("flag", "size", (), "true or false"),
        ("object", "null", (), "an object"),
        ("object_or_null", "text", (), "an object or null"),
        ("column", "text", (str,), "a list of strings"),
        ("column", "sizes", (int, 2), "a list of 2 sizes"),
        ("column", "mixed", (str,), "a list of strings"),
        ("column", "mixed", ((str, int),), "a list of strings or sizes"),
    ],
)
def test_a_field_of_another_kind_is_refused(method: str, name: str, more: tuple[Any, ...], expected: str) -> None:
    with pytest.raises(FormatError, match=rf"^file: '{name}' is missing or not {expected}$") as caught:
        getattr(Fields(GIVEN, "file"), method)(name, *more)
    assert caught.value.code == "field"


@pytest.mark.parametrize("value", [-1, MAX_SIZE + 1, 1.0, True, None])
def test_a_size_is_a_whole_number_that_every_reader_of_json_has(value: object) -> None:
    with pytest.raises(FormatError, match="a size"):
        Fields({"size": value}).size("size")
    with pytest.raises(FormatError, match="a list of sizes"):
        Fields({"sizes": [0, value]}).column("sizes", int)


def test_a_position_is_below_the_length_of_the_other_list() -> None:
    with pytest.raises(FormatError, match=r"^sizes 5 of 5$"):
        Fields({"sizes": [0, 5]}).positions("sizes", 2, 5)


@pytest.mark.parametrize(
    ("blob", "says"),
    [
        (b"[]", "a JSON list, expected an object"),
        (b"\xff{}", "not UTF-8 at byte 0"),
        ("{}".encode("utf-16"), "not UTF-8 at byte 0"),
        (b"{", "where: "),
    ],
)
def test_what_is_no_object_is_refused(blob: bytes, says: str) -> None:
    with pytest.raises(FormatError, match=says):
        parse_object(blob, "where")


def test_text_is_utf_8_as_it_is() -> None:
    assert decode("größe".encode()) == "größe"
    assert parse_object('{"größe": [1]}'.encode(), "where") == {"größe": [1]}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a = ", "not valid TOML"),
        (f"{'a.' * 300}b = 1", "a line with more than 256 dots"),
        (f"a = {2**63}", "an integer of more than 64 bits"),
        (f"a = [[{-(2**63) - 1}]]", "an integer of more than 64 bits"),
    ],
)
def test_toml_that_is_invalid_or_costly_is_refused(text: str, says: str) -> None:
    with pytest.raises(FormatError, match=says):
        parse_toml(text)


def test_toml_of_the_largest_integers_is_read() -> None:
    assert parse_toml(f"a = {2**63 - 1}\nb = {-(2**63)}") == {"a": 2**63 - 1, "b": -(2**63)}


RANGES = st.lists(st.tuples(st.integers(0, 99), st.integers(1, 99)), min_size=1, max_size=3).map(tuple)
SLICES = st.just(NOT_HELD) | st.dictionaries(st.integers(0, 7), RANGES, max_size=3).map(
    lambda by_axis: Slice(tuple(sorted(by_axis.items())))
)


@given(SLICES)
def test_slices_are_read_back(part: Slice) -> None:
    assert parse_slice(dump_slice(part)) == part


def test_the_whole_and_nothing_have_forms_of_their_own() -> None:
    assert (dump_slice(WHOLE), dump_slice(NOT_HELD)) == ({}, None)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([], "is not a slice"),
        ({"0": 1}, "is not a slice"),
        ({"1": [[0, 1]], "0": [[0, 1]]}, "are not dims in rising order"),
        ({"00": [[0, 1]]}, "are not dims in rising order"),
        ({"\u0660": [[0, 1]]}, "are not dims in rising order"),
        ({"x": [[0, 1]]}, "are not dims in rising order"),
        ({"99": [[0, 1]]}, "are not dims in rising order"),
        ({"0": [[0]]}, "is not a range"),
        ({"0": [[0, 0]]}, "is not a range"),
        ({"0": [[-1, 1]]}, "is not a range"),
        ({"0": [[0, True]]}, "is not a range"),
        ({"0": [[MAX_SIZE, 1]]}, "is not a range"),
        ({"0": [[0, 1]] * (MAX_RANGES + 1)}, "a slice of 65537 ranges along one dim, limit 65536"),
    ],
)
def test_what_is_no_slice_is_refused(value: object, says: str) -> None:
    with pytest.raises(FormatError, match=says):
        parse_slice(value)


def test_a_slice_that_nobody_could_read_is_not_written() -> None:
    with pytest.raises(PlanError, match="a slice of 65537 ranges along one dim, limit 65536"):
        dump_slice(Slice(((0, tuple((2 * at, 1) for at in range(MAX_RANGES + 1))),)))


@pytest.mark.parametrize("name", ["a", "a/b", "größe.txt", "a b", "a..b", "x" * 255])
def test_a_name_in_the_folder_is_accepted(name: str) -> None:
    check_path(name)


@pytest.mark.parametrize(
    "name",
    ["", "/a", "a/", "a//b", ".", "..", "a/../b", ".hidden", "a/.b", "a\nb", "a\x85b", "x" * 256, "a/" * 2048 + "a"],
)
def test_a_name_that_leads_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(FormatError, match="is not the name of a file inside the checkpoint"):
        check_path(name)


@pytest.mark.parametrize("names", [["a", "a"], ["a", "b", "a/b"], ["a/b/c", "a/b"]])
def test_two_files_of_one_place_are_refused(names: list[str]) -> None:
    with pytest.raises(FormatError, match="is used for two files or folders"):
        check_apart(names)
    check_apart(["a", "ab", "b/a", "b/ab"])
