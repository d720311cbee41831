"""What every store promises, whatever it is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.store_contract import KINDS, MARKER, OLDER, SOME, WRITABLE, Ground, content, ground, staged

from relayout.checkpoint.folder import explain_missing
from relayout.core.digests import xxh3_hex
from relayout.errors import FormatError, PlanError
from relayout.publish.claim import Prefix, Sent, bare
from relayout.publish.output import LocalOutput, Output, OutputSpec
from relayout.publish.publishers import StoreDestination
from relayout.storage.cloud.store import CloudStore, WritableClient
from relayout.storage.local.store import LocalStore
from relayout.storage.stores import Access, Entry, Kind, Store, find_store
from relayout.storage.system import Buffer

NBYTES = 5 * 4096 + 123
BYTES = np.random.default_rng(7).integers(0, 256, NBYTES, np.uint8).tobytes()


@pytest.fixture(params=KINDS)
def here(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ground]:
    with ground(request.param, tmp_path, monkeypatch) as found:
        yield found


@pytest.fixture(params=WRITABLE)
def there(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ground]:
    with ground(request.param, tmp_path, monkeypatch) as found:
        yield found


@pytest.fixture
def listed(here: Ground) -> Ground:
    if not here.kind.is_listed:
        pytest.skip("this store tells only files whose names are known")
    return here


def names(entries: Iterator[Entry]) -> list[str]:
    return sorted(entry.name for entry in entries if not entry.is_folder)


def read(file: object, offset: int, nbytes: int) -> bytes:
    """Through memory that fits direct I/O."""
    view = Buffer().reserve(nbytes)
    file.read(offset, view)  # type: ignore[attr-defined]
    return bytes(view)


def test_what_was_written_can_be_read_whole_and_by_ranges(here: Ground) -> None:
    store = here.store("model")
    here.write(store, weights=BYTES, empty=b"")
    assert store.read("weights", NBYTES) == content(store, "weights") == BYTES
    assert store.read("empty", 0) == content(store, "empty") == b""
    with store.open("weights", NBYTES) as file:
        assert (file.nbytes, file.alignment) == (NBYTES, 1)
        for offset, nbytes in ((0, 1), (4095, 2), (NBYTES - 1, 1), (NBYTES, 0), (17, 9999)):
            assert read(file, offset, nbytes) == BYTES[offset : offset + nbytes]


@given(
    access=st.sampled_from([Access.BUFFERED, Access.AUTO, Access.ONCE]),
    block=st.integers(0, NBYTES // 4096),
    blocks=st.integers(0, 7),
)
@settings(max_examples=30)
def test_a_read_fills_memory_as_far_as_the_file_reaches(here: Ground, access: Access, block: int, blocks: int) -> None:
    store = here.store("model")
    if store.stat("weights") is None:
        here.write(store, weights=BYTES)
    view = Buffer().reserve(blocks * 4096)
    view[:] = b"\xee" * view.nbytes
    with store.open("weights", NBYTES, access=access) as file:
        assert file.alignment in (1, 4096)
        file.read(block * 4096, view)
    expected = BYTES[block * 4096 :][: view.nbytes]
    assert view[: len(expected)] == expected
    behind = set(bytes(view[len(expected) :]))
    assert behind <= {0xEE, 0}, "what is behind the end is not written, but for the rest of a direct read's block"


def test_direct_reads_are_direct_or_refused(here: Ground) -> None:
    store = here.store("model")
    here.write(store, weights=BYTES)
    with suppress(OSError), store.open("weights", NBYTES, access=Access.DIRECT) as file:
        assert file.alignment == 4096
        assert read(file, 4096, 4096) == BYTES[4096:8192]
        return
    with pytest.raises(OSError, match="direct") as caught:
        store.open("weights", NBYTES, access=Access.DIRECT)
    assert caught.value.filename == store.location("weights")


def test_a_file_with_a_descriptor_says_so_and_its_store_a_path(here: Ground) -> None:
    store = here.store("model")
    here.write(store, weights=BYTES)
    with store.open("weights") as file:
        fd, path = file.fileno(), store.path("weights")
        assert (fd is None) == (path is None)
        if fd is not None:
            assert path is not None
            assert os.path.samestat(os.fstat(fd), path.stat())


def test_any_number_of_threads_read_one_file(here: Ground) -> None:
    store = here.store("model")
    here.write(store, weights=BYTES)
    right: list[bool] = []
    with store.open("weights", NBYTES) as file:

        def work(seed: int) -> None:
            random = np.random.default_rng(seed)
            offsets = random.integers(0, NBYTES - 500, 50).tolist()
            right.extend(read(file, offset, 500) == BYTES[offset : offset + 500] for offset in offsets)

        with ThreadPoolExecutor(6) as threads:
            list(threads.map(work, range(6)))
    assert right == [True] * 300


@pytest.mark.parametrize("nbytes", [None, NBYTES])
def test_a_file_that_is_missing_is_bad_input(here: Ground, nbytes: int | None) -> None:
    store = here.store("model")
    here.write(store, other=b"1")
    with pytest.raises(FormatError, match=r"model/weights: (is missing|cannot be read: No such file)"):
        store.open("weights", nbytes)
    with pytest.raises(FormatError, match=r"model/weights: (is missing|cannot be read: No such file)"):
        store.read("weights", 10)
    assert store.stat("weights") is None


def test_a_file_of_another_length_is_refused(here: Ground) -> None:
    store = here.store("model")
    here.write(store, weights=BYTES)
    for expected in (NBYTES - 1, NBYTES + 1, 0):
        with pytest.raises(FormatError, match=rf"weights: {NBYTES} bytes long, expected {expected}$"):
            store.open("weights", expected)


def test_a_small_file_has_a_limit(here: Ground) -> None:
    store = here.store("model")
    here.write(store, weights=b"12345")
    assert store.read("weights", 5) == b"12345"
    with pytest.raises(FormatError, match=r"weights: 5 bytes, limit 4$"):
        store.read("weights", 4)


def test_another_version_of_a_file_is_refused(here: Ground) -> None:
    store = here.store("model")
    here.write(store, weights=BYTES)
    before = store.stat("weights")
    assert before is not None
    assert before.nbytes == NBYTES
    with store.open("weights", NBYTES, version=before.version) as file:
        assert file.version == before.version
    assert store.stat("weights") == before
    here.write(store, weights=BYTES[::-1])
    store = here.later(store)
    after = store.stat("weights")
    assert after is not None
    assert after.version != before.version
    with pytest.raises(FormatError, match=r"weights: has changed since it was last checked$"):
        store.open("weights", NBYTES, version=before.version)


def test_what_replaces_an_open_file_is_never_mixed_with_it(here: Ground) -> None:
    store = here.store("model")
    here.write(store, weights=BYTES)
    with store.open("weights", NBYTES) as file:
        assert read(file, 0, 100) == BYTES[:100]
        here.write(store, weights=BYTES[::-1])
        try:
            later = read(file, 100, 100)
        except FormatError as error:
            assert "weights: was replaced" in str(error)  # noqa: PT017 (both are right)
        else:
            assert later == BYTES[100:200]
    assert content(here.later(store), "weights") == BYTES[::-1]


def test_all_files_below_are_listed_but_hidden_ones(listed: Ground) -> None:
    store = listed.store("model")
    listed.write(store, a=b"1", sub__b=b"2", sub__deep__c=b"3", **{".hidden": b"4", ".cache__d": b"5", "sub__.e": b"6"})
    listed.write(listed.store("model2"), beside=b"7")
    assert names(store.walk()) == ["a", "sub/b", "sub/deep/c"]
    assert all(entry.refusal is None for entry in store.walk())
    assert content(store, "sub/deep/c") == b"3"


@pytest.mark.parametrize("name", ["with space", "grüße-模型.safetensors", "a+b%20c#d?e", "x" * 200])
def test_names_may_be_anything(there: Ground, name: str) -> None:
    store = there.store("model")
    with staged(store) as staging:
        staging.put(name, [b"12", b"34"])
        staging.put(MARKER, [b"{}"])
    assert names(store.walk()) == sorted([name, MARKER])
    assert store.read(name, 4) == b"1234"
    assert name in store.location(name)


def test_a_store_tells_what_is_at_its_place(listed: Ground) -> None:
    nothing, folder, file = listed.store("nothing"), listed.store("folder"), listed.store("folder/weights")
    listed.write(folder, weights=BYTES)
    assert [store.kind() for store in (nothing, folder, file)] == [Kind.NOTHING, Kind.FOLDER, Kind.FILE]
    assert explain_missing(nothing)
    above, name = file.parent()
    assert (str(above), name) == (str(folder), "weights")
    assert content(above, name) == BYTES
    assert (str(folder), folder.location("weights")) == (listed.url("folder"), listed.url("folder/weights"))


def test_a_store_says_what_requests_should_look_like(here: Ground) -> None:
    cost = here.store("model").cost
    assert cost.request_nbytes >= 4096
    assert cost.request_nbytes % 4096 == 0
    assert cost.max_gap_nbytes >= 0
    assert cost.concurrency is None or cost.concurrency >= 1


# Writing.


def test_nothing_is_complete_before_the_end(there: Ground) -> None:
    store = there.store("out")
    with staged(store) as output:
        output.put(MARKER, [b"{}"])
        with output.write("weights", NBYTES) as file:
            file.write(100, memoryview(BYTES)[100:])
        output.head("weights", BYTES[:100], NBYTES)
        output.head("only-a-head", b"head", 4)
        output.keep("a part", b"")
        assert store.stat(MARKER) is None
    assert names(store.walk()) == sorted([MARKER, "only-a-head", "weights"])
    assert content(store, "weights") == BYTES
    assert content(store, "only-a-head") == b"head"
    assert beside(store) == []


def test_of_an_output_that_fails_nothing_is_left_if_it_is_not_resumable(there: Ground) -> None:
    store, work = there.store("out"), replace(SOME, is_resumable=False)

    def fail() -> None:
        with staged(store, work) as output:
            output.put(MARKER, [b"{}"])
            output.head("weights", BYTES, NBYTES)
            output.keep("a part", b"")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert store.kind() is Kind.NOTHING
    with staged(store, work) as output:
        output.put(MARKER, [b"{}"])
    assert names(store.walk()) == [MARKER]
    assert beside(store) == []


def test_parts_that_were_kept_of_an_output_are_there_for_the_next_attempt(there: Ground) -> None:
    store = there.store("out")

    def fail() -> None:
        with staged(store) as output:
            write(output, weights=BYTES)
            output.keep("a part", b"of it")
            write(output, first=b"of no part")
            raise OSError(5, "the drive")

    with pytest.raises(OSError, match="drive") as caught:
        fail()
    [note] = caught.value.__notes__
    assert "the same command resumes it" in note
    refused = pytest.raises(PlanError, match=r"is claimed by|holds an interrupted attempt, with other options")
    with refused, staged(store, replace(SOME, fingerprint="another")):
        pass
    with staged(store) as output:
        assert [output.kept(name) for name in ("a part", "another")] == [b"of it", None]
        output.put(MARKER, [b"{}"])
    assert names(store.walk()) == [MARKER, "weights"]
    assert content(store, "weights") == BYTES


@pytest.mark.parametrize("how", ["was completed", "was taken over"])
def test_who_loses_an_output_to_another_process_is_not_told_that_the_same_command_resumes_it(
    there: Ground, how: str
) -> None:
    store = there.store("out")
    is_same = how == "was completed"

    def lose(others: ExitStack) -> None:
        with staged(store) as output:
            if isinstance(output, LocalOutput):
                pytest.skip("one process at a time writes there")
            write(output, weights=BYTES)
            output.keep("a part", b"of it")
            output.wait()
            other = SOME if is_same else replace(SOME, fingerprint="another")
            theirs = others.enter_context(staged(store, other, replace=not is_same))
            assert theirs.kept("a part") == (b"of it" if is_same else None)
            theirs.put(MARKER, [b"theirs"])
            if is_same:
                others.close()
            output.put(MARKER, [b"ours"])

    with ExitStack() as others:
        with pytest.raises(PlanError, match=f"out: {how} by another process") as caught:
            lose(others)
        assert not hasattr(caught.value, "__notes__")
    assert content(store, MARKER) == b"theirs"


def test_a_file_is_written_by_many_threads_in_any_order(there: Ground) -> None:
    store = there.store("out")
    offsets = list(range(1000, NBYTES, 1000))
    np.random.default_rng(3).shuffle(offsets)
    with staged(store) as output:
        with output.write("weights", NBYTES) as file:

            def work(first: int) -> None:
                for offset in offsets[first::4]:
                    file.write(offset, memoryview(BYTES)[offset : offset + 1000])

            with ThreadPoolExecutor(4) as threads:
                list(threads.map(work, range(4)))
        with output.write("weights", NBYTES) as file:
            file.write(7, memoryview(BYTES)[7:1000])
        output.head("weights", BYTES[:7], NBYTES)
        output.put(MARKER, [])
    assert content(store, "weights") == BYTES
    assert content(store, MARKER) == b""


def test_a_local_output_is_written_by_one_process_at_a_time(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "out")
    with staged(store) as output:
        with pytest.raises(PlanError, match="out: is being written"), staged(LocalStore(tmp_path / "out")):
            pass
        with staged(LocalStore(tmp_path / "other")) as other:
            other.put(MARKER, [b"{}"])
        output.put(MARKER, [b"{}"])
    assert store.stat(MARKER) is not None


def test_an_output_that_has_come_up_meanwhile_is_not_overwritten(there: Ground) -> None:
    store = there.store("out")

    def write() -> None:
        with staged(store) as output:
            output.put(MARKER, [b"ours"])
            output.put("weights", [b"ours"])
            there.write(store, **{MARKER: b"theirs"})

    with pytest.raises((OSError, PlanError), match="out"):
        write()
    assert content(store, MARKER) == b"theirs"
    assert names(store.walk()) == [MARKER]


def test_an_older_output_is_replaced_as_a_whole(there: Ground) -> None:
    store = there.store("out")
    there.write(store, **{MARKER: b"ours\nweights\nmore/old"}, weights=b"old")
    there.write(store, **{"more/old": b"old"})
    with staged(store, replace=True) as staging:
        staging.put("weights", [b"new"])
        staging.put(MARKER, [b"new"])
    assert names(store.walk()) == sorted([MARKER, "weights"])
    assert content(store, "weights") == content(store, MARKER) == b"new"


STRANGERS = {
    "a file": ("notes", "out: holds files that relayout did not write, so --force does not replace it: 'notes'"),
    "a hidden file": (".notes", "did not write, .*'.notes'"),
    "a file in a folder": ("sub/notes", "did not write, .*'sub/notes'"),
    "a marker of somebody else's": (MARKER, "out: is not empty; not an output of relayout"),
}


@pytest.mark.parametrize("stranger", STRANGERS)
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_force_touches_nothing_where_there_is_anything_that_the_older_outputs_records_do_not_name(
    there: Ground, stranger: str, when: str
) -> None:
    source, out = there.store("source"), there.store("out")
    name, says = STRANGERS[stranger]
    there.write(out, **{MARKER: b"ours\nweights"}, weights=b"old")
    StoreDestination(out, OLDER, True).check(source)

    def renew() -> None:
        with staged(out, replace=True) as staging:
            staging.put("weights", [b"new"])
            staging.put(MARKER, [b"new"])
            if when == "meanwhile":
                there.write(out, **{name: b"USER"})

    if when == "before":
        there.write(out, **{name: b"USER"})
        with pytest.raises(PlanError, match=says):
            StoreDestination(out, OLDER, True).check(source)
    if when == "meanwhile" and isinstance(out, CloudStore):
        says = r"did not write: |an object of this name exists|is not as expected|was replaced or deleted"
    with pytest.raises((PlanError, FileExistsError), match=says):
        renew()
    assert content(out, name) == b"USER"
    assert content(out, "weights") == b"old"


def test_a_place_that_holds_something_is_no_output(there: Ground) -> None:
    source, out = there.store("source"), there.store("out")
    there.write(source, weights=BYTES)
    StoreDestination(out, OLDER, False).check(source)
    there.write(out, mine=b"1")
    for force in (False, True):
        with pytest.raises(PlanError, match="out: is not empty"):
            StoreDestination(out, OLDER, force).check(source)
    there.write(out, **{MARKER: b"ours\nmine"})
    with pytest.raises(PlanError, match="out: already holds 2 files; it is unchanged; --force replaces it"):
        StoreDestination(out, OLDER, False).check(source)
    StoreDestination(out, OLDER, True).check(source)
    assert content(out, "mine") == b"1", "it changes nothing"


@pytest.mark.parametrize(("source", "output"), [("a", "a"), ("a", "a/b"), ("a/b", "a")])
def test_an_output_in_the_source_or_around_it_is_refused(there: Ground, source: str, output: str) -> None:
    there.write(there.store("a/b"), weights=BYTES)
    with pytest.raises(PlanError, match="the source"):
        StoreDestination(there.store(output), OLDER, True).check(there.store(source))


def test_a_name_that_only_begins_alike_is_beside_the_source(there: Ground) -> None:
    there.write(there.store("a"), weights=BYTES)
    StoreDestination(there.store("a-tp2"), OLDER, False).check(there.store("a"))


# What the publisher needs of a client.


@pytest.fixture
def output(there: Ground) -> Prefix:
    """The place of an output, in stores without rename."""
    store = there.store("out")
    if not isinstance(store, CloudStore):
        pytest.skip("a local folder is renamed")
    assert isinstance(store.client, WritableClient)
    return Prefix(store.client, store.prefix, store)


@pytest.mark.parametrize("nbytes", [0, 5, 10 * 2**20])
def test_a_file_is_uploaded_whole_and_its_version_is_that_of_listings(
    output: Prefix, tmp_path: Path, nbytes: int
) -> None:
    """Else what was sent is read again before the manifest is written."""
    blob = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8).tobytes()
    (tmp_path / "file").write_bytes(blob)
    checks: list[None] = []
    version = output.client.upload(output.full("large"), tmp_path / "file", 2, lambda: checks.append(None))
    listed = {name: bare(found) for name, found in output.objects().items()}
    assert listed["large"] in map(bare, version.values())
    assert content(output.store, "large") == blob
    assert output.is_stored("large", Sent(nbytes, "", xxh3_hex(blob[:3]), min(3, nbytes)))
    assert not output.is_stored("large", Sent(nbytes + 1, "", xxh3_hex(blob[:3]), min(3, nbytes)))
    assert not output.is_stored("large", Sent(nbytes, "", xxh3_hex(b"other"), min(3, nbytes)))
    assert not output.is_stored("missing", Sent(0, "", xxh3_hex(b""), 0))


# Parts by several processes.


def add(store: Store, work: OutputSpec, part: str, **files: bytes) -> None:
    """A part of these files."""
    with StoreDestination(store, OLDER).begin_part(work) as output:
        write(output, **files)
        output.keep(part, f"of {part}".encode())


def write(output: Output, **files: bytes) -> None:
    for name, blob in files.items():
        with output.write(name, len(blob)) as file:
            file.write(1, memoryview(blob)[1:])
        output.head(name, blob[:1], len(blob))


LIVE = replace(SOME, is_resumable=False)


def test_parts_are_published_together(there: Ground) -> None:
    store = there.store("out")
    add(store, SOME, "a", first=b"1", second=b"22")
    add(store, SOME, "b", third=b"333")
    assert store.stat(MARKER) is None
    with staged(store, gathers=True) as output:
        assert [output.kept(name) for name in "abc"] == [b"of a", b"of b", None]
        output.put(MARKER, [b"done"])
    assert {name: content(store, name) for name in ("first", "second", "third")} == {
        "first": b"1",
        "second": b"22",
        "third": b"333",
    }
    with pytest.raises(PlanError), staged(store, gathers=True):
        pass


def test_a_part_is_there_when_it_is_kept_and_else_not(there: Ground) -> None:
    store = there.store("out")
    with StoreDestination(store, OLDER).begin_part(SOME) as output:
        write(output, first=b"1")
    add(store, SOME, "b", second=b"2")
    with suppress(ZeroDivisionError), StoreDestination(store, OLDER).begin_part(SOME) as output:
        write(output, third=b"2")
        raise ZeroDivisionError
    with staged(store, gathers=True) as output:
        assert [output.kept(name) for name in "ab"] == [None, b"of b"]
        output.put(MARKER, [b"done"])
    assert names(store.walk()) == [MARKER, "second"]


def test_a_part_done_twice_is_there_once(there: Ground) -> None:
    store = there.store("out")
    with StoreDestination(store, OLDER).begin_part(SOME) as outer:
        assert outer.kept("a") is None
        write(outer, first=b"1")
        add(store, SOME, "a", first=b"1")
        outer.keep("a", b"of a")
    with StoreDestination(store, OLDER).begin_part(SOME) as output:
        assert output.kept("a") == b"of a"
    with staged(store, gathers=True) as output:
        assert output.kept("a") == b"of a"
        output.put(MARKER, [b"done"])
    assert content(store, "first") == b"1"


def test_parts_of_other_work_are_not_mixed_in(there: Ground) -> None:
    store, other = there.store("out"), replace(SOME, fingerprint="another")
    add(store, SOME, "a", first=b"1")
    with pytest.raises(PlanError), staged(store, other):
        pass
    with staged(store, gathers=True) as output:
        assert output.kept("a") == b"of a"
        output.put(MARKER, [b"ours\nfirst"])
    assert content(store, "first") == b"1"
    with pytest.raises(PlanError):
        add(store, other, "b", second=b"late")
    with staged(store, other, replace=True) as output:
        assert output.kept("a") is None
        output.put(MARKER, [b"again"])
    assert names(store.walk()) == [MARKER]


def beside(store: Store) -> list[str]:
    """What is hidden in an output, or beside it."""
    if isinstance(store, CloudStore):
        return [name for name, _ in store.client.list_objects(f"{store.prefix}/.relayout")]
    path = store.path("")
    assert path is not None
    return [found.name for found in path.parent.glob(f".{path.name}.*")]


def test_parts_are_added_while_the_output_is_begun(there: Ground) -> None:
    store = there.store("out")
    with staged(store, LIVE, gathers=True) as output:
        add(store, LIVE, "a", first=b"1")
        add(store, LIVE, "b", second=b"22")
        assert [output.kept(name) for name in "ab"] == [b"of a", b"of b"]
        output.put(MARKER, [b"done"])
    assert (content(store, "first"), content(store, "second")) == (b"1", b"22")
    assert beside(store) == []


def test_of_parts_whose_output_fails_nothing_is_left_to_see(there: Ground) -> None:
    store = there.store("out")
    with suppress(ZeroDivisionError), staged(store, LIVE, gathers=True):
        add(store, LIVE, "a", first=b"1")
        raise ZeroDivisionError
    assert names(store.walk()) == [] if store.kind() is Kind.FOLDER else True
    with staged(store, replace(LIVE, fingerprint="another"), gathers=True) as output:
        assert output.kept("a") is None
        output.put(MARKER, [b"done"])
    assert names(store.walk()) == [MARKER]
    assert beside(store) == []


def test_units_of_a_conversion_are_not_deleted_for_live_parts(there: Ground) -> None:
    store = there.store("out")
    add(store, SOME, "a", first=b"1")
    with pytest.raises(PlanError, match="force"), staged(store, replace(LIVE, fingerprint="two"), gathers=True):
        pass
    with staged(store, gathers=True) as output:
        assert output.kept("a") == b"of a"
        output.put(MARKER, [b"done"])
    assert content(store, "first") == b"1"


def test_only_one_work_has_live_parts(there: Ground) -> None:
    store = there.store("out")
    with staged(store, LIVE, gathers=True) as output:
        add(store, LIVE, "a", first=b"1")
        two = replace(LIVE, fingerprint="two")
        with pytest.raises(PlanError, match=r"another|claimed by"), staged(store, two, gathers=True):
            pass
        assert output.kept("a") == b"of a"
        output.put(MARKER, [b"done"])


# The registry.


def test_a_path_without_a_scheme_is_local(tmp_path: Path) -> None:
    for path in (tmp_path, str(tmp_path), "relative/folder", ".", "c:/x", "a:b"):
        store = find_store(path)
        assert store.path("x") == Path(path) / "x"


def test_an_unknown_scheme_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(PlanError, match=r"^ftp://bucket/x: no store for ftp://, expected a path, or one of https://"):
        find_store("ftp://bucket/x")
