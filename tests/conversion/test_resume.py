"""relayout.conversion.resume: the notes of finished units."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relayout.conversion.copy_plan import TensorDigests, WrittenDigests
from relayout.conversion.resume import Fingerprint, dump_notes, parse_notes

DIGESTS = st.text("0123456789abcdef", min_size=2, max_size=8)
TENSORS = st.dictionaries(
    st.integers(0, 10**6),
    st.builds(TensorDigests, st.none() | DIGESTS, st.lists(DIGESTS, min_size=1, max_size=4).map(tuple)),
    max_size=5,
)
CHUNKS = st.dictionaries(st.integers(0, 10**4), st.binary(max_size=64), max_size=5)


@given(st.builds(Fingerprint, DIGESTS, DIGESTS), DIGESTS, st.builds(WrittenDigests, TENSORS, CHUNKS))
def test_notes_are_read_back(fingerprint: Fingerprint, here: str, written: WrittenDigests) -> None:
    assert parse_notes(dump_notes(fingerprint, here, written)) == (fingerprint, here, written)


NOTES = json.loads(
    dump_notes(Fingerprint("s", "o"), "h", WrittenDigests({1: TensorDigests("aa", ("bb",))}, {0: b"\1"}))
)


@pytest.mark.parametrize(
    "notes",
    [
        b"",
        b"saved",
        b"\xff",
        b"[" * 100_000,
        *(
            json.dumps({key: value for key, value in NOTES.items() if key != missing}).encode()
            for missing in ("fingerprint", "here", "tensors", "files")
        ),
        *(
            json.dumps({**NOTES, **other}).encode()
            for other in (
                {"fingerprint": ["s"]},
                {"fingerprint": None},
                {"tensors": [[]]},
                {"tensors": [["x", "aa", "bb"]]},
                {"tensors": 5},
                {"files": [[0]]},
                {"files": [[0, "x"]]},
                {"files": [[None, "aa"]]},
            )
        ),
    ],
)
def test_what_is_no_notes_is_none(notes: bytes) -> None:
    assert parse_notes(notes) is None
