"""The journal: what is read back is what was added, whatever has become of other lines."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from support.journals import NotesIn, read_journal

from relayout.conversion.journal import JOURNAL_NAME, Fingerprint, Journal, TensorDigests, Written, parse_journal
from relayout.storage.local.open_folder import OpenFolder

OURS = Fingerprint("a" * 32, "b" * 32)
THEIRS = Fingerprint("c" * 32, "b" * 32)

Tensors = Mapping[int, TensorDigests]

digests = st.integers(0, 2**128 - 1).map(lambda value: f"{value:032x}")
claims = st.dictionaries(
    st.integers(0, 2**31),
    st.builds(TensorDigests, digests, st.lists(digests, min_size=1, max_size=4).map(tuple)),
    max_size=5,
)
same_folder = settings(max_examples=50)


def digests_of(tensor: int, num_slices: int = 2) -> TensorDigests:
    return TensorDigests(f"{tensor:032x}", tuple(f"{tensor + n + 1:032x}" for n in range(num_slices)))


def write(folder: Path, added: Tensors, fingerprint: Fingerprint = OURS, *, append: bool = False) -> bytes:
    with OpenFolder(folder) as opened, Journal(NotesIn(opened), fingerprint, append=append) as journal:
        for tensor, digests in added.items():
            journal.add(Written({tensor: digests}))
    return (folder / JOURNAL_NAME).read_bytes()


def read(folder: Path, blob: bytes) -> tuple[Fingerprint, Tensors] | None:
    (folder / JOURNAL_NAME).write_bytes(blob)
    return read_journal(folder)


def line(text: bytes) -> bytes:
    """A line with the right digest of whatever it holds."""
    return xxhash.xxh3_64_hexdigest(text).encode() + b" " + text + b"\n"


@same_folder
@given(added=claims)
def test_what_was_added_is_read_back(tmp_path: Path, added: Tensors) -> None:
    write(tmp_path, added)
    assert read_journal(tmp_path) == (OURS, added)


@same_folder
@given(first=claims, second=claims)
def test_a_journal_can_be_gone_on_with(tmp_path: Path, first: Tensors, second: Tensors) -> None:
    write(tmp_path, first)
    write(tmp_path, second, append=True)
    assert read_journal(tmp_path) == (OURS, {**first, **second})


def test_a_new_journal_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    write(tmp_path, {n: digests_of(n) for n in range(9)})
    write(tmp_path, {5: digests_of(7)}, THEIRS)
    assert read_journal(tmp_path) == (THEIRS, {5: digests_of(7)})


def test_what_is_added_can_be_read_at_once(tmp_path: Path) -> None:
    with OpenFolder(tmp_path) as opened, Journal(NotesIn(opened), OURS, append=False) as journal:
        assert read_journal(tmp_path) == (OURS, {})
        journal.add(Written({3: digests_of(3)}))
        assert read_journal(tmp_path) == (OURS, {3: digests_of(3)})


def test_the_chunks_of_complete_files_are_read_back(tmp_path: Path) -> None:
    with OpenFolder(tmp_path) as opened, Journal(NotesIn(opened), OURS, append=False) as journal:
        journal.add(Written({3: digests_of(3)}))
        journal.add(Written(chunks={0: b"", 7: bytes(range(32))}))
    blob = (tmp_path / JOURNAL_NAME).read_bytes()
    bad = [b'["chunks",1,"0"]', b'["chunks",true,""]', b'["chunks","1",""]', b'["chunks",1]', b'["chunks",1,"","",2]']
    found = parse_journal(blob + b"".join(map(line, bad)))
    assert found == (OURS, Written({3: digests_of(3)}, {0: b"", 7: bytes(range(32))}))


def test_the_last_word_on_a_tensor_counts(tmp_path: Path) -> None:
    with OpenFolder(tmp_path) as opened, Journal(NotesIn(opened), OURS, append=False) as journal:
        journal.add(Written({3: digests_of(3)}))
        journal.add(Written({3: digests_of(4)}))
    assert read_journal(tmp_path) == (OURS, {3: digests_of(4)})


def test_where_there_is_no_journal_nothing_is_claimed(tmp_path: Path) -> None:
    assert read_journal(tmp_path) is None
    assert read_journal(tmp_path / "nothing") is None
    (tmp_path / JOURNAL_NAME).mkdir()
    assert read_journal(tmp_path) is None


def test_a_journal_cut_at_any_byte_claims_what_is_whole_and_can_be_gone_on_with(tmp_path: Path) -> None:
    added = {n: digests_of(n, num_slices=n + 1) for n in range(4)}
    blob = write(tmp_path, added)
    # A line without its line break is whole, too.
    ends = [n for n, byte in enumerate(blob) if byte == ord("\n")]
    assert len(ends) == 5
    for length in range(len(blob) + 1):
        num_lines = sum(end <= length for end in ends)
        whole = {n: one for n, one in added.items() if n < num_lines - 1}
        assert read(tmp_path, blob[:length]) == ((OURS, whole) if num_lines else None)
        write(tmp_path, {9: digests_of(9)}, append=True)
        assert read_journal(tmp_path) == ((OURS, {**whole, 9: digests_of(9)}) if num_lines else None)


def test_a_flipped_bit_costs_its_line_only(tmp_path: Path) -> None:
    added = {n: digests_of(n) for n in range(3)}
    blob = write(tmp_path, added)
    for position in range(len(blob)):
        number = blob[:position].count(b"\n")
        flipped = blob[:position] + bytes([blob[position] ^ 1 << position % 8]) + blob[position + 1 :]
        found = read(tmp_path, flipped)
        if number == 0:
            # Its line break gone, it takes the next line along.
            assert found is None
            continue
        lost = {number - 1, number} if blob[position] == ord("\n") else {number - 1}
        assert found == (OURS, {n: one for n, one in added.items() if n not in lost})


@same_folder
@given(added=claims, rubbish=st.binary(max_size=200), position=st.integers(0, 10))
def test_rubbish_between_lines_claims_nothing(tmp_path: Path, added: Tensors, rubbish: bytes, position: int) -> None:
    lines = write(tmp_path, added).splitlines(keepends=True)
    position = max(1, min(position, len(lines)))
    blob = b"".join(lines[:position]) + rubbish + b"\n" + b"".join(lines[position:])
    assert read(tmp_path, blob) == (OURS, added)


@same_folder
@given(rubbish=st.binary(max_size=300))
def test_rubbish_alone_is_no_journal(tmp_path: Path, rubbish: bytes) -> None:
    assert read(tmp_path, rubbish) is None


def test_zeros_in_place_of_a_journals_end_claim_nothing(tmp_path: Path) -> None:
    # What a power cut makes of a file whose length reached the drive, and whose bytes did not.
    added = {n: digests_of(n) for n in range(20)}
    blob = write(tmp_path, added)
    for kept in range(0, len(blob), 7):
        num_lines = blob[:kept].count(b"\n")
        found = read(tmp_path, blob[:kept] + bytes(len(blob) - kept))
        assert found == ((OURS, {n: added[n] for n in range(num_lines - 1)}) if num_lines else None)


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
def test_a_line_that_says_something_else_claims_nothing(tmp_path: Path, text: bytes) -> None:
    blob = write(tmp_path, {1: digests_of(1)})
    assert read(tmp_path, blob + line(text)) == (OURS, {1: digests_of(1)})


@pytest.mark.parametrize(
    "text", [b"", b"nonsense", b"{}", b"[]", b'["a"]', b'["a",1]', b'["a","b","c"]', b'[1,"a","b"]']
)
def test_without_its_first_line_it_is_no_journal(tmp_path: Path, text: bytes) -> None:
    blob = write(tmp_path, {1: digests_of(1)})
    _, rest = blob.split(b"\n", 1)
    assert read(tmp_path, line(text) + rest) is None
    assert read(tmp_path, rest) is None


def test_lines_of_another_journal_count_as_their_own(tmp_path: Path) -> None:
    # Lines do not know whose they are: nobody believes them without reading the bytes again.
    ours = write(tmp_path, {1: digests_of(1)})
    _, theirs = write(tmp_path, {2: digests_of(2)}, THEIRS).split(b"\n", 1)
    assert read(tmp_path, ours + theirs) == (OURS, {1: digests_of(1), 2: digests_of(2)})


def test_threads_do_not_tear_each_others_lines(tmp_path: Path) -> None:
    def add(first: int) -> None:
        for tensor in range(first, 2000, 8):
            journal.add(Written({tensor: digests_of(tensor, num_slices=1 + tensor % 50)}))

    with (
        OpenFolder(tmp_path) as opened,
        Journal(NotesIn(opened), OURS, append=False) as journal,
        ThreadPoolExecutor(8) as threads,
    ):
        list(threads.map(add, range(8)))
    assert read_journal(tmp_path) == (OURS, {n: digests_of(n, num_slices=1 + n % 50) for n in range(2000)})
