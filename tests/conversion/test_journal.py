"""The journal: what is read back is what was added, whatever has become of other lines."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from support.local_stores import staging_folder

from relayout.conversion.resume import Fingerprint, Journal, parse_journal, read_journal
from relayout.conversion.steps import TensorDigests, Written

OURS = Fingerprint("a" * 32, "b" * 32)
THEIRS = Fingerprint("c" * 32, "b" * 32)

Tensors = Mapping[int, TensorDigests]

digests = st.integers(0, 2**128 - 1).map(lambda value: f"{value:032x}")
claims = st.dictionaries(
    st.integers(0, 9) | st.integers(0, 2**31),
    st.builds(TensorDigests, digests, st.lists(digests, min_size=1, max_size=4).map(tuple)),
    max_size=5,
)


class Notes:
    """As much of a staging, and of its notes, as a journal uses."""

    def __init__(self, text: bytes) -> None:
        self.text = text

    def open_notes(self, name: str, header: bytes | None) -> Notes:
        self.text = self.text if header is None else header
        return self

    def append(self, text: bytes) -> None:
        self.text += text

    def close(self) -> None:
        pass


def digests_of(tensor: int, num_slices: int = 2) -> TensorDigests:
    return TensorDigests(f"{tensor:032x}", tuple(f"{tensor + n + 1:032x}" for n in range(num_slices)))


def write(added: Tensors, *more: Written, to: bytes | None = None, fingerprint: Fingerprint = OURS) -> bytes:
    """A journal of these, or one that is gone on with."""
    notes: Any = Notes(b"an older one" if to is None else to)
    with Journal(notes, fingerprint, append=to is not None) as journal:
        for written in (*(Written({tensor: digests}) for tensor, digests in added.items()), *more):
            journal.add(written)
    return notes.text


def read(blob: bytes) -> tuple[Fingerprint, Tensors] | None:
    found = parse_journal(blob)
    return None if found is None else (found[0], found[1].tensors)


def line(text: bytes) -> bytes:
    """A line with the right digest of whatever it holds."""
    return xxhash.xxh3_64_hexdigest(text).encode() + b" " + text + b"\n"


@given(first=claims, second=claims)
def test_what_was_added_is_read_back_also_of_a_journal_that_is_gone_on_with(first: Tensors, second: Tensors) -> None:
    """The last word on a tensor counts."""
    blob = write(first)
    assert read(blob) == (OURS, first)
    assert read(write(second, to=blob)) == (OURS, {**first, **second})


def test_the_chunks_of_complete_files_are_read_back() -> None:
    blob = write({3: digests_of(3)}, Written(chunks={0: b"", 7: bytes(range(32))}))
    bad = [b'["chunks",1,"0"]', b'["chunks",true,""]', b'["chunks","1",""]', b'["chunks",1]', b'["chunks",1,"","",2]']
    found = parse_journal(blob + b"".join(map(line, bad)))
    assert found == (OURS, Written({3: digests_of(3)}, {0: b"", 7: bytes(range(32))}))


def test_a_journal_cut_at_any_byte_claims_what_is_whole_and_can_be_gone_on_with() -> None:
    added = {n: digests_of(n, num_slices=n + 1) for n in range(4)}
    blob = write(added)
    # A line without its line break is whole, too.
    ends = [n for n, byte in enumerate(blob) if byte == ord("\n")]
    assert len(ends) == 5
    for length in range(len(blob) + 1):
        num_lines = sum(end <= length for end in ends)
        whole = {n: one for n, one in added.items() if n < num_lines - 1}
        assert read(blob[:length]) == ((OURS, whole) if num_lines else None)
        again = write({9: digests_of(9)}, to=blob[:length])
        assert read(again) == ((OURS, {**whole, 9: digests_of(9)}) if num_lines else None)
        # What a power cut makes of a file whose length reached the drive, and whose bytes did not.
        num_broken = blob[:length].count(b"\n")
        kept = {n: one for n, one in added.items() if n < num_broken - 1}
        assert read(blob[:length].ljust(len(blob), b"\0")) == ((OURS, kept) if num_broken else None)


def test_a_flipped_bit_costs_its_line_only() -> None:
    added = {n: digests_of(n) for n in range(3)}
    blob = write(added)
    for position in range(len(blob)):
        number = blob[:position].count(b"\n")
        flipped = blob[:position] + bytes([blob[position] ^ 1 << position % 8]) + blob[position + 1 :]
        found = read(flipped)
        if number == 0:
            # Its line break gone, it takes the next line along.
            assert found is None
            continue
        lost = {number - 1, number} if blob[position] == ord("\n") else {number - 1}
        assert found == (OURS, {n: one for n, one in added.items() if n not in lost})


@given(added=claims, rubbish=st.binary(max_size=300), position=st.integers(0, 10))
def test_rubbish_claims_nothing_between_lines_and_alone(added: Tensors, rubbish: bytes, position: int) -> None:
    lines = write(added).splitlines(keepends=True)
    position = max(1, min(position, len(lines)))
    assert read(b"".join(lines[:position]) + rubbish + b"\n" + b"".join(lines[position:])) == (OURS, added)
    assert read(rubbish) is None


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"nonsense",
        b"\xff\xfe",
        b"{}",
        b"[]",
        b"3",
        b"[3]",
        b'[3,"a"]',
        b'["3","a","b"]',
        b'[true,"a","b"]',
        b'[3.0,"a","b"]',
        b'[null,"a","b"]',
        b'[3,"a",5]',
        b'[3,["a"],"b"]',
        b'["a","b"]',
    ],
)
def test_a_line_that_says_something_else_claims_nothing(text: bytes) -> None:
    assert read(write({1: digests_of(1)}) + line(text)) == (OURS, {1: digests_of(1)})


@pytest.mark.parametrize(
    "text", [b"", b"nonsense", b"{}", b"[]", b'["a"]', b'["a",1]', b'["a","b","c"]', b'[1,"a","b"]']
)
def test_without_its_first_line_it_is_no_journal(text: bytes) -> None:
    _, rest = write({1: digests_of(1)}).split(b"\n", 1)
    assert read(line(text) + rest) is None
    assert read(rest) is None


def test_threads_do_not_tear_each_others_lines_and_a_new_journal_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    def add(first: int) -> None:
        for tensor in range(first, 2000, 8):
            journal.add(Written({tensor: digests_of(tensor, num_slices=1 + tensor % 50)}))

    with staging_folder(tmp_path / "out") as staging:
        assert read_journal(staging) is None
        with Journal(staging, THEIRS, append=False) as journal, ThreadPoolExecutor(8) as threads:
            list(threads.map(add, range(8)))
        assert read_journal(staging) == (THEIRS, Written({n: digests_of(n, 1 + n % 50) for n in range(2000)}))
        with Journal(staging, OURS, append=False) as journal:
            assert read_journal(staging) == (OURS, Written())
