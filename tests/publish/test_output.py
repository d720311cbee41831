"""relayout.publish.output: the records of finished parts, and the folder in which an output is assembled."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relayout.errors import FormatError
from relayout.publish.output import ATTEMPT, RECORD, FileState, LocalOutput, Record, has_parts, subfolder
from relayout.storage.local.descriptors import OpenFolder
from relayout.storage.stores import Modes


@given(
    st.dictionaries(
        st.text(min_size=1), st.builds(FileState, st.integers(0, 2**63), st.integers(0, 2**63), st.text()), max_size=4
    ),
    st.binary(max_size=100),
)
def test_a_record_is_read_back(files: dict[str, FileState], notes: bytes) -> None:
    record = Record(files, notes)
    assert Record.parse(record.dump()) == record


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"files": {}}',
        b'{"files": [], "notes": ""}',
        b'{"files": {"a": 1}, "notes": ""}',
        b'{"files": {"a": [1, 2]}, "notes": ""}',
        b'{"files": {"a": [1, "x", ""]}, "notes": ""}',
        b'{"files": {}, "notes": 1}',
        b'{"files": {}, "notes": "\\u1234"}',
        b"[" * 100_000,
        Record({"a": FileState(1, 2, "d")}, b"n").dump()[:-1],
    ],
)
def test_what_is_no_record_is_none(content: bytes) -> None:
    assert Record.parse(content) is None


@pytest.fixture
def place(tmp_path: Path) -> Iterator[OpenFolder]:
    """A private folder beside an output."""
    (tmp_path / "place").mkdir()
    with OpenFolder(tmp_path / "place") as opened:
        yield opened


def output_in(place: OpenFolder) -> LocalOutput:
    return LocalOutput(place.path.parent / "out", place, Modes())


def test_a_part_has_the_files_that_were_completed_since_the_one_before(place: OpenFolder) -> None:
    made = output_in(place)
    for part, names in (("first", ["a", "b"]), ("second", ["c"]), ("empty", [])):
        for name in names:
            made.head(name, name.encode(), 1)
        made.keep(part, part.encode())
    records = {
        name: json.loads((place.path / name).read_bytes())["files"] for name in place.names() if name != "output"
    }
    assert {name: sorted(files) for name, files in records.items()} == {
        f"{RECORD}first": ["a", "b"],
        f"{RECORD}second": ["c"],
        f"{RECORD}empty": [],
    }
    assert [made.kept(part) for part in ("first", "second", "empty", "third")] == [b"first", b"second", b"empty", None]
    made.folder.close()


CHANGES: dict[str, Callable[[Path], object]] = {
    "written to": lambda path: path.write_bytes(b"b"),
    "longer": lambda path: path.write_bytes(b"aa"),
    "deleted": lambda path: path.unlink(),
    "linked": lambda path: path.with_name("other").hardlink_to(path),
    "replaced by a link": lambda path: (path.rename(path.with_name("other")), path.symlink_to("other")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_part_whose_file_has_changed_is_not_finished_and_not_published(place: OpenFolder, change: str) -> None:
    made = output_in(place)
    for name in ("a", "b"):
        made.head(name, name.encode(), 1)
        made.keep(name, b"notes")
    made.check_parts()
    os.utime(place.path / "output" / "a", ns=(0, 0))  # So that a write within the same tick of the clock is told.
    assert made.kept("a") is None
    made.head("a", b"a", 1)
    made.keep("a", b"notes")
    os.utime(place.path / "output" / "a", ns=(0, 0))
    made.keep("again", b"")
    CHANGES[change](place.path / "output" / "a")
    assert (made.kept("a"), made.kept("b")) == (None, b"notes")
    with pytest.raises(FormatError, match=r"output/a: was written to, or deleted, before the output was complete"):
        made.check_parts()
    made.folder.close()
    again = output_in(place)
    assert [name for name in place.names() if name.startswith(RECORD)] == [f"{RECORD}again", f"{RECORD}b"]
    assert again.folder.names() == ["b"]
    again.folder.close()


def test_who_gathers_parts_does_without_times_but_not_without_heads(place: OpenFolder) -> None:
    made = output_in(place)
    for name in ("a", "b"):
        made.head(name, b"head", 4)
        made.keep(name, b"notes")
    os.utime(place.path / "output" / "a", ns=(0, 0))
    (place.path / "output" / "b").write_bytes(b"haed")
    made.folder.close()
    gathering = LocalOutput(place.path.parent / "out", place, Modes(), gathers=True)
    assert [gathering.kept(name) for name in ("a", "b")] == [b"notes", None]
    gathering.check_parts()
    gathering.folder.close()
    again = output_in(place)
    assert again.kept("a") is None
    again.folder.close()


def test_where_others_make_parts_there_is_something_to_go_on_from(place: OpenFolder) -> None:
    assert not has_parts(place)
    with subfolder(place, "output"), subfolder(place, f"{ATTEMPT}1"):
        assert has_parts(place)
    place.remove(f"{ATTEMPT}1")
    assert not has_parts(place)
    place.write(f"{RECORD}1", Record({}, b"").dump())
    assert has_parts(place)
