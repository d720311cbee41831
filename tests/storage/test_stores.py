"""What every store promises, whatever it is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.store_contract import KINDS, MARKER, OLDER, WRITABLE, Ground, content, ground, staged

from relayout.errors import FormatError, PlanError
from relayout.storage.buffers import Buffer
from relayout.storage.cloud.client import NotCompleted
from relayout.storage.cloud.output import lease
from relayout.storage.cloud.output.lease import Lease
from relayout.storage.cloud.output.prefix import OutputPrefix, bare
from relayout.storage.cloud.output.records import LEASE, Holder
from relayout.storage.cloud.store import CloudStore
from relayout.storage.protocols import LIVE, Access, Entry, Kind, Modes, Staging, Store
from relayout.storage.stores import find_store

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
    assert content(store, "weights") == BYTES[::-1]


def test_all_files_below_are_listed_but_hidden_ones(listed: Ground) -> None:
    store = listed.store("model")
    listed.write(store, a=b"1", sub__b=b"2", sub__deep__c=b"3", **{".hidden": b"4", ".cache__d": b"5", "sub__.e": b"6"})
    listed.write(listed.store("model2"), beside=b"7")
    assert names(store.walk()) == ["a", "sub/b", "sub/deep/c"]
    assert all(entry.refusal is None and entry.is_readable for entry in store.walk())
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
    assert nothing.not_found_message()
    above, name = file.parent()
    assert (str(above), name) == (str(folder), "weights")
    assert content(above, name) == BYTES
    assert (str(folder), folder.location("weights")) == (listed.url("folder"), listed.url("folder/weights"))


def test_a_store_says_what_requests_should_look_like(here: Ground) -> None:
    cost = here.store("model").cost
    assert cost.chunk_nbytes >= 4096
    assert cost.chunk_nbytes % 4096 == 0
    assert cost.max_gap_nbytes >= 0
    assert cost.concurrency is None or cost.concurrency >= 1


# Writing.


def test_nothing_is_an_output_before_the_end(there: Ground) -> None:
    store = there.store("out")
    with staged(store) as staging:
        staging.put(MARKER, [b"{}"])
        with staging.write_file("weights", NBYTES) as file:
            file.write(100, memoryview(BYTES)[100:])
        staging.write_head("weights", BYTES[:100], NBYTES)
        staging.write_head("only-a-head", b"head", 4)
        assert store.kind() is Kind.NOTHING
    assert names(store.walk()) == sorted([MARKER, "only-a-head", "weights"])
    assert content(store, "weights") == BYTES
    assert content(store, "only-a-head") == b"head"


@pytest.mark.parametrize("has_header", [False, True])
def test_of_an_output_that_fails_nothing_is_left_without_notes(there: Ground, has_header: bool) -> None:
    store = there.store("out")

    def fail() -> None:
        with staged(store) as staging:
            staging.put(MARKER, [b"{}"])
            if has_header:
                staging.open_notes("relayout.notes", b"of what\n").close()
            staging.write_head("weights", BYTES, NBYTES)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert store.kind() is Kind.NOTHING
    with staged(store) as staging:
        assert staging.names() == []
        staging.put(MARKER, [b"{}"])
    assert names(store.walk()) == [MARKER]


def test_what_was_kept_of_an_output_is_there_for_the_next_attempt_all_or_nothing(there: Ground) -> None:
    store = there.store("out")

    def fail() -> None:
        with staged(store) as staging:
            with staging.write_file("weights", NBYTES) as file:
                file.write(0, memoryview(BYTES))
            with staging.open_notes("relayout.notes", b"first\n") as notes:
                notes.append(b"second\n")
            raise OSError(5, "the drive")

    with pytest.raises(OSError, match="drive") as caught:
        fail()
    assert store.kind() is Kind.NOTHING
    with staged(store) as staging:
        if not staging.names():
            assert staging.read_notes("relayout.notes") is None
            return
        assert len(caught.value.__notes__) == 1
        assert "the same command resumes it" in caught.value.__notes__[0]
        assert staging.names() == ["weights"]
        with staging.open("weights", NBYTES) as again:
            assert again.nbytes == NBYTES
            assert read(again, 0, 6 * 4096)[:NBYTES] == BYTES
        with staging.open_notes("relayout.notes", None) as notes:
            notes.append(b"third\n")
        assert staging.read_notes("relayout.notes") == b"first\nsecond\nthird\n"
        with staging.open_notes("relayout.notes", b"new\n") as notes:
            notes.append(b"again\n")
        assert staging.read_notes("relayout.notes") == b"new\nagain\n"
        staging.clear()
        assert staging.names() == []
        assert staging.read_notes("relayout.notes") is None
        staging.put(MARKER, [b"{}"])
    assert names(store.walk()) == [MARKER]


def test_a_file_is_written_by_many_threads_in_any_order_and_read_again(there: Ground) -> None:
    store = there.store("out")
    offsets = list(range(1000, NBYTES, 1000))
    np.random.default_rng(3).shuffle(offsets)
    with staged(store) as staging:
        with staging.write_file("weights", NBYTES) as file:

            def work(first: int) -> None:
                for offset in offsets[first::4]:
                    file.write(offset, memoryview(BYTES)[offset : offset + 1000])

            with ThreadPoolExecutor(4) as threads:
                list(threads.map(work, range(4)))
        if staging.can_read:
            with staging.open("weights", NBYTES) as again:
                assert read(again, 0, 6 * 4096)[1000:NBYTES] == BYTES[1000:]
        else:
            with pytest.raises(OSError, match="cannot be read before it is published"):
                staging.open("weights", NBYTES)
        with staging.write_file("weights", NBYTES) as file:
            file.write(7, memoryview(BYTES)[7:1000])
        staging.write_head("weights", BYTES[:7], NBYTES)
        staging.put(MARKER, [])
    assert content(store, "weights") == BYTES
    assert content(store, MARKER) == b""


def test_a_file_that_is_there_is_not_written_as_a_new_one(there: Ground) -> None:
    with staged(there.store("out")) as staging:
        staging.put("small", [b"1"])
        staging.write_file("large", 10).close()
        for name in ("small", "large"):
            with pytest.raises(OSError, match="exists"):
                staging.put(name, [b"2"])
        staging.remove("small")
        staging.remove("large")
        staging.remove("was never there")
        staging.put("small", [b"3"])
        staging.put(MARKER, [b"{}"])
    assert content(there.store("out"), "small") == b"3"


def test_a_written_file_of_another_length_is_not_opened(there: Ground) -> None:
    with staged(there.store("out")) as staging:
        staging.put("small", [b"12345"])
        for name, nbytes in (("small", 4), ("missing", 5)):
            with pytest.raises((FormatError, OSError)):
                staging.open(name, nbytes)


def test_one_writes_an_output_at_a_time(there: Ground) -> None:
    store = there.store("out")
    with staged(store) as staging:
        with pytest.raises(PlanError, match="out: is being written"), staged(there.store("out")):
            pass
        with staged(there.store("other")) as other:
            other.put(MARKER, [b"{}"])
        staging.put(MARKER, [b"{}"])
    assert store.stat(MARKER) is not None
    with staged(there.store("third")):
        pass


def test_an_output_that_has_come_up_meanwhile_is_not_overwritten(there: Ground) -> None:
    store = there.store("out")

    def write() -> None:
        with staged(store) as staging:
            staging.put(MARKER, [b"ours"])
            staging.put("weights", [b"ours"])
            there.write(store, **{MARKER: b"theirs"})

    with pytest.raises(OSError, match="out"):
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
    "a marker of somebody else's": (MARKER, "out: is not empty; nothing proves that relayout wrote it"),
}


@pytest.mark.parametrize("stranger", STRANGERS)
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_force_touches_nothing_where_there_is_anything_that_the_older_outputs_records_do_not_name(
    there: Ground, stranger: str, when: str
) -> None:
    source, out = there.store("source"), there.store("out")
    name, says = STRANGERS[stranger]
    there.write(out, **{MARKER: b"ours\nweights"}, weights=b"old")
    out.check_output(source, OLDER, force=True)

    def replace() -> None:
        with staged(out, replace=True) as staging:
            staging.put("weights", [b"new"])
            staging.put(MARKER, [b"new"])
            if when == "meanwhile":
                there.write(out, **{name: b"USER"})

    if when == "before":
        there.write(out, **{name: b"USER"})
        with pytest.raises(PlanError, match=says):
            out.check_output(source, OLDER, force=True)
    with pytest.raises(PlanError, match=says):
        replace()
    assert content(out, name) == b"USER"
    assert content(out, "weights") == b"old"


def test_a_place_that_holds_something_is_no_output(there: Ground) -> None:
    source, out = there.store("source"), there.store("out")
    there.write(source, weights=BYTES)
    out.check_output(source, OLDER, force=False)
    there.write(out, mine=b"1")
    for force in (False, True):
        with pytest.raises(PlanError, match="out: is not empty"):
            out.check_output(source, OLDER, force=force)
    there.write(out, **{MARKER: b"ours\nmine"})
    with pytest.raises(PlanError, match="out: already holds 2 files; --force replaces it"):
        out.check_output(source, OLDER, force=False)
    out.check_output(source, OLDER, force=True)
    assert content(out, "mine") == b"1", "it changes nothing"


@pytest.mark.parametrize(("source", "output"), [("a", "a"), ("a", "a/b"), ("a/b", "a")])
def test_an_output_in_the_source_or_around_it_is_refused(there: Ground, source: str, output: str) -> None:
    there.write(there.store("a/b"), weights=BYTES)
    with pytest.raises(PlanError, match="the source"):
        there.store(output).check_output(there.store(source), OLDER, force=True)


def test_a_name_that_only_begins_alike_is_beside_the_source(there: Ground) -> None:
    there.write(there.store("a"), weights=BYTES)
    there.store("a-tp2").check_output(there.store("a"), OLDER, force=False)


# What the publisher needs of a client.


@pytest.fixture
def output(there: Ground) -> OutputPrefix:
    """The place of an output, in stores without rename."""
    store = there.store("out")
    if not isinstance(store, CloudStore):
        pytest.skip("a local folder is renamed")
    return store._output()


def test_a_small_object_is_created_once_and_replaced_in_the_version_that_is_known_only(output: OutputPrefix) -> None:
    client, name = output.client, output.full("small")
    first = client.put(name, b"1", None)
    with pytest.raises(FileExistsError):
        client.put(name, b"2", None)
    second = client.put(name, b"22", first)
    with pytest.raises(FileExistsError):
        client.put(name, b"3", first)
    loaded = output.load(name, 10)
    assert loaded is not None
    assert loaded[0] == b"22"
    third = client.put(name, b"333", loaded[1])
    with pytest.raises(FileExistsError):
        client.put(name, b"4", second)
    client.delete([name, output.full("was never there")])
    with pytest.raises(FileExistsError):
        client.put(name, b"4", third)
    assert output.load(name, 10) is None
    client.put(name, b"5")
    client.put(name, b"6")
    assert output.load(name, 10) is not None


def test_versions_are_those_of_listings(output: OutputPrefix) -> None:
    """Else what was created is read again before the manifest is written."""
    version, uploads = output.client.put(output.full("small"), b"1", None), output.client.uploads()
    upload = uploads.begin(output.full("large"))
    tag = uploads.send(output.full("large"), upload, 0, memoryview(b"large"))
    completed = uploads.complete(output.full("large"), upload, [tag])
    assert isinstance(completed, str)
    listed = {name: bare(found) for name, found in output.objects().items()}
    assert listed["small"] in map(bare, version.values())
    assert listed["large"] == bare(completed)


def test_an_upload_creates_no_object_in_the_place_of_another(output: OutputPrefix) -> None:
    name, uploads = output.full("large"), output.client.uploads()
    begun = [uploads.begin(name) for _ in range(3)]
    tags = [uploads.send(name, upload, 0, memoryview(b"large")) for upload in begun]
    uploads.abort(name, begun[2])
    assert isinstance(uploads.complete(name, begun[0], tags[:1]), str)
    assert uploads.complete(name, begun[1], tags[1:2]) is NotCompleted.EXISTS
    uploads.abort(name, begun[1])
    loaded = output.load(name, 10)
    assert loaded is not None
    assert loaded[0] == b"large"


def test_a_lease_is_refreshed_until_another_process_has_it(
    output: OutputPrefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "VALID_SECONDS", 0.0)
    with Lease(output, "a test") as held:
        for _ in range(3):
            held.refresh()
        with pytest.raises(PlanError, match="is being written by another conversion: a test"):
            Lease(output, "another test")._take()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lease, "_is_gone", lambda holder: True)
            other = Lease(output, "another test")
            other._take()
        with pytest.raises(PlanError, match="was taken over by another process"):
            held.refresh()
        other.refresh()
    found = output.read(LEASE, Holder)
    assert found is not None
    assert found.what == "another test", "who has lost it does not delete it"


# Parts by several processes.


def part(store: Store, shared: str, name: str) -> AbstractContextManager[Staging]:
    return store.stage_part(OLDER, shared, name, replace=False, modes=Modes())


def add(store: Store, shared: str, name: str, **files: bytes) -> None:
    """A part of these files."""
    with part(store, shared, name) as staging:
        for file, text in files.items():
            staging.put(file, [text])
        with staging.open_notes(name, b"") as notes:
            notes.append(f"of {name}".encode())


def test_parts_are_published_together(there: Ground) -> None:
    store = there.store("out")
    add(store, "one", "a", first=b"1", second=b"22")
    add(store, "one", "b", third=b"333")
    assert store.kind() is not Kind.FOLDER
    with staged(store, shared="one") as staging:
        assert sorted(staging.names()) == ["first", "second", "third"]
        assert [staging.read_notes(name) for name in "abc"] == [b"of a", b"of b", None]
        staging.put(MARKER, [b"done"])
    assert {name: content(store, name) for name in ("first", "second", "third")} == {
        "first": b"1",
        "second": b"22",
        "third": b"333",
    }
    with pytest.raises(PlanError), staged(store, shared="one"):
        pass


def test_a_part_is_there_when_its_notes_are_and_else_not_at_all(there: Ground) -> None:
    store = there.store("out")
    with part(store, "one", "a") as staging:
        staging.put("first", [b"1"])
    with suppress(ZeroDivisionError), part(store, "one", "b") as staging:
        staging.put("second", [b"2"])
        staging.open_notes("b", b"").close()
        raise ZeroDivisionError
    with pytest.raises(PlanError), staged(store, shared="one"):
        pass
    with staged(store) as staging:
        assert staging.names() == []
        staging.put(MARKER, [b"done"])


def test_a_part_done_twice_is_there_once(there: Ground) -> None:
    store = there.store("out")
    with part(store, "one", "a") as outer:
        assert outer.read_notes("a") is None
        outer.put("first", [b"1"])
        with outer.open_notes("a", b"") as notes:
            notes.append(b"of a")
        add(store, "one", "a", first=b"1")
    with part(store, "one", "a") as staging:
        assert staging.read_notes("a") == b"of a"
    with staged(store, shared="one") as staging:
        assert staging.names() == ["first"]
        staging.put(MARKER, [b"done"])


def test_parts_of_another_name_are_not_mixed_in(there: Ground) -> None:
    store = there.store("out")
    add(store, "one", "a", first=b"1")
    add(store, "two", "a", first=b"other")
    with pytest.raises(PlanError), staged(store):
        pass
    with staged(store, shared="one") as staging:
        assert staging.names() == ["first"]
        staging.put(MARKER, [b"ours\nfirst"])
    assert content(store, "first") == b"1"
    with pytest.raises(PlanError):
        add(store, "two", "b", second=b"late")
    with staged(store, replace=True) as staging:
        assert staging.names() == []
        staging.put(MARKER, [b"again"])


def beside(store: Store) -> list[str]:
    """What is hidden beside an output."""
    if isinstance(store, CloudStore):
        output = store._output()
        return [name for name, _ in output.client.list_objects(output.hidden.rstrip("/"))]
    path = store.path("")
    assert path is not None
    return [found.name for found in path.parent.glob(f".{path.name}.*")]


def test_parts_are_added_while_the_output_is_staged(there: Ground) -> None:
    store = there.store("out")
    with staged(store, shared=LIVE + "one") as staging:
        add(store, LIVE + "one", "a", first=b"1")
        add(store, LIVE + "one", "b", second=b"22")
        staging.take_parts()
        assert sorted(staging.names()) == ["first", "second"]
        staging.put(MARKER, [b"done"])
    assert (content(store, "first"), content(store, "second")) == (b"1", b"22")
    assert beside(store) == []


def test_of_parts_whose_output_fails_nothing_is_left(there: Ground) -> None:
    store = there.store("out")
    with suppress(ZeroDivisionError), staged(store, shared=LIVE + "one") as staging:
        add(store, LIVE + "one", "a", first=b"1")
        staging.take_parts()
        raise ZeroDivisionError
    assert store.kind() is not Kind.FOLDER
    assert beside(store) == []


@pytest.mark.parametrize("shared", [None, LIVE + "two"])
def test_parts_that_a_killed_process_has_left_are_deleted(there: Ground, shared: str | None) -> None:
    store = there.store("out")
    add(store, LIVE + "one", "a", first=b"1")
    with staged(store, shared=shared) as staging:
        if shared is not None:
            add(store, shared, "b", second=b"2")
        staging.take_parts()
        assert staging.names() == ([] if shared is None else ["second"])
        staging.put(MARKER, [b"done"])
    assert beside(store) == []


def test_units_of_a_conversion_are_not_deleted_for_parts(there: Ground) -> None:
    store = there.store("out")
    add(store, "one", "a", first=b"1")
    with pytest.raises(PlanError, match="force"), staged(store, shared=LIVE + "two"):
        pass
    with staged(store, shared="one") as staging:
        assert staging.names() == ["first"]
        staging.put(MARKER, [b"done"])
    assert content(store, "first") == b"1"


def test_only_one_process_has_live_parts(there: Ground) -> None:
    store = there.store("out")
    with staged(store, shared=LIVE + "one") as staging:
        add(store, LIVE + "one", "a", first=b"1")
        with pytest.raises(PlanError, match="another"), staged(store, shared=LIVE + "two"):
            pass
        staging.take_parts()
        assert staging.names() == ["first"]
        staging.put(MARKER, [b"done"])


# The registry.


def test_a_path_without_a_scheme_is_local(tmp_path: Path) -> None:
    for path in (tmp_path, str(tmp_path), "relative/folder", ".", "c:/x", "a:b"):
        store = find_store(path)
        assert store.path("x") == Path(path) / "x"


def test_an_unknown_scheme_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(PlanError, match=r"^ftp://bucket/x: no store for ftp://, expected a path, or one of https://"):
        find_store("ftp://bucket/x")
