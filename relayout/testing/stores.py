"""Conformance tests of stores for readers, and of buckets for writers that publish outputs there.

class TestMyStore(StoreConformance):  # Or BucketConformance.
    @pytest.fixture
    def place(self, tmp_path):
        return StoreLocation(f"my://{tmp_path.name}", write=lambda store, name, content: ...)
"""

from __future__ import annotations

import mmap
import os
import pickle
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from relayout.errors import FormatError
from relayout.storage.cloud.store import CloudStore, Version, WritableClient
from relayout.storage.stores import Access, Kind, ReadableFile, RequestError, Store, find_store, if_there
from relayout.testing import requirement

NBYTES = 50 * 4096 + 123
BYTES = random.Random(7).randbytes(NBYTES)
"""The content of a file. It is too large for the part that some stores fetch and keep when they open a file."""
_UNTOUCHED = 0xEE


@dataclass(frozen=True)
class StoreLocation:
    """The location in which one test creates stores."""

    url: str
    """A path or URL for this test only. It has no files yet."""
    write: Callable[[Store, str, bytes], object]
    """Creates a file of a store, or replaces one as a whole, like another process would."""
    find: Callable[[str], Store] = find_store
    """Returns the store of a path or URL; by default as relayout finds it, by the scheme."""
    is_listed: bool = True
    """True if the store lists all of its files. False: only files with known names can be found."""

    def store(self, name: str) -> Store:
        """Return the store of the subfolder `name`."""
        return self.find(f"{self.url}/{name}")

    def filled(self, name: str, **files: bytes) -> Store:
        """Return a store with files in it. In the names of arguments, "__" stands for a slash."""
        store = self.store(name)
        for file, content in files.items():
            self.write(store, file.replace("__", "/"), content)
        return store


class StoreConformance:
    """The conformance tests of reading. A subclass provides the fixture `location`."""

    @pytest.fixture
    def location(self) -> StoreLocation:
        """Return the location in which this test creates stores."""
        raise NotImplementedError(
            f"{type(self).__name__} has no fixture `place`, expected one that returns a StoreLocation"
        )

    @requirement
    def test_what_is_written_is_read(self, location: StoreLocation) -> None:
        """The bytes of a file are those that were written, whole and in any range, also for an empty file."""
        store = location.filled("model", weights=BYTES, empty=b"")
        assert store.read("weights", NBYTES) == BYTES
        assert store.read("empty", 0) == b""
        with store.open("weights", NBYTES) as file:
            assert (file.nbytes, file.alignment) == (NBYTES, 1)
            ranges = ((0, NBYTES), (0, 1), (4095, 2), (NBYTES - 1, 1), (NBYTES, 0), (17, 9999), (99_999, 50_000))
            for offset, nbytes in ranges:
                assert _read(file, offset, nbytes) == BYTES[offset : offset + nbytes], (offset, nbytes)

    @requirement
    @pytest.mark.parametrize("access", [Access.BUFFERED, Access.AUTO, Access.ONCE])
    def test_a_read_ends_where_the_file_ends(self, location: StoreLocation, access: Access) -> None:
        """A read fills memory up to the end of the file, and writes nothing after it except zeros of a direct read."""
        store = location.filled("model", weights=BYTES)
        with store.open("weights", NBYTES, access=access) as file:
            assert file.alignment in (1, 4096)
            for offset in (0, 4096, 15 * 4096, 16 * 4096, 30 * 4096, *range(44 * 4096, NBYTES, 4096)):
                for nbytes in range(0, 7 * 4096, 4096):
                    view = _memory(nbytes)
                    file.read(offset, view)
                    expected = BYTES[offset : offset + nbytes]
                    assert view[: len(expected)] == expected, (offset, nbytes)
                    assert set(view[len(expected) :]) <= {_UNTOUCHED, 0}, (offset, nbytes)

    @requirement
    def test_direct_reads_are_direct(self, location: StoreLocation) -> None:
        """`Access.DIRECT` opens a file of alignment 4096, or raises an OSError with "direct" and the file name."""
        store = location.filled("model", weights=BYTES)
        with suppress(OSError), store.open("weights", NBYTES, access=Access.DIRECT) as file:
            assert file.alignment == 4096
            assert _read(file, 4096, 4096) == BYTES[4096:8192]
            return
        with pytest.raises(OSError, match="direct") as caught:
            store.open("weights", NBYTES, access=Access.DIRECT)
        assert caught.value.filename == store.location("weights")

    @requirement
    def test_a_descriptor_comes_with_a_path(self, location: StoreLocation) -> None:
        """`fileno` returns a descriptor if `path` returns a path, of the same file; else both return None."""
        store = location.filled("model", weights=BYTES)
        with store.open("weights") as file:
            fd, path = file.fileno(), store.path("weights")
            assert (fd is None) == (path is None)
            if fd is not None and path is not None:
                assert os.path.samestat(os.fstat(fd), path.stat())

    @requirement
    def test_threads_read_one_file(self, location: StoreLocation) -> None:
        """Any number of threads read one open file at the same time."""
        store = location.filled("model", weights=BYTES)
        with store.open("weights", NBYTES) as file:

            def are_right(seed: int) -> bool:
                chosen = random.Random(seed)
                offsets = [chosen.randrange(NBYTES - 500) for _ in range(50)]
                return all(_read(file, offset, 500) == BYTES[offset : offset + 500] for offset in offsets)

            with ThreadPoolExecutor(6) as threads:
                assert list(threads.map(are_right, range(6))) == [True] * 6

    @requirement
    @pytest.mark.parametrize("nbytes", [None, NBYTES])
    def test_a_missing_file_is_bad_input(self, location: StoreLocation, nbytes: int | None) -> None:
        """A missing file has no `stat`; opening or reading it raises a FormatError, code "missing", that names it."""
        store = location.filled("model", other=b"1")
        assert store.stat("weights") is None
        for call in (lambda: store.open("weights", nbytes), lambda: store.read("weights", 10)):
            with pytest.raises(FormatError, match=r"model/weights: ") as caught:
                call()
            assert caught.value.code == "missing"

    @requirement
    def test_a_file_of_another_length_is_refused(self, location: StoreLocation) -> None:
        """A file that does not have the expected length is a FormatError with both lengths."""
        store = location.filled("model", weights=BYTES)
        for expected in (NBYTES - 1, NBYTES + 1, 0):
            with pytest.raises(FormatError, match=rf"weights: {NBYTES} bytes long, expected {expected}$"):
                store.open("weights", expected)

    @requirement
    def test_a_small_file_has_a_limit(self, location: StoreLocation) -> None:
        """`read` returns a file up to its limit; a longer file is a FormatError with the limit."""
        store = location.filled("model", weights=b"12345")
        assert store.read("weights", 5) == b"12345"
        with pytest.raises(FormatError, match=r"weights: 5 bytes, limit 4$"):
            store.read("weights", 4)

    @requirement
    def test_versions_tell_contents_apart(self, location: StoreLocation) -> None:
        """A file keeps its version; one of other content has another version, and cannot be opened at the old."""
        store = location.filled("model", weights=BYTES)
        before = store.stat("weights")
        assert before is not None
        assert before.nbytes == NBYTES
        assert store.stat("weights") == before
        with store.open("weights", NBYTES, version=before.version) as file:
            assert file.version == before.version
        location.write(store, "weights", BYTES[::-1])
        after = location.store("model").stat("weights")
        assert after is not None
        assert after.version != before.version
        with pytest.raises(FormatError, match=r"weights: has changed since it was last checked$"):
            location.store("model").open("weights", NBYTES, version=before.version)

    @requirement
    def test_a_replacement_is_never_mixed_in(self, location: StoreLocation) -> None:
        """A file that is replaced while it is open keeps its old bytes, or raises a FormatError that reports it."""
        store = location.filled("model", weights=BYTES)
        with store.open("weights", NBYTES) as file:
            assert _read(file, 0, 100) == BYTES[:100]
            location.write(store, "weights", BYTES[::-1])
            try:
                later = _read(file, NBYTES - 200, 100)
            except FormatError as error:
                assert "weights: was replaced" in str(error)  # noqa: PT017 (both are right)
            else:
                assert later == BYTES[-200:-100]
        with location.store("model").open("weights") as file:
            assert _read(file, 0, NBYTES) == BYTES[::-1]

    @requirement
    def test_a_snapshot_stays_at_its_versions(self, location: StoreLocation) -> None:
        """A file that a snapshot has opened has the same bytes when it is opened again, or raises a FormatError.

        New files are found as usual.
        """
        store = location.filled("model", weights=BYTES, other=b"1")
        load = store.snapshot()
        with load.open("weights", NBYTES) as file:
            assert _read(file, 0, 10) == BYTES[:10]
        with suppress(FormatError), load.open("weights", NBYTES) as file:
            assert _read(file, 0, NBYTES) == BYTES
        assert load.read("other", 1) == b"1"

    @requirement
    def test_all_files_are_listed_but_hidden_ones(self, location: StoreLocation) -> None:
        """`walk` has every file below, also in subfolders.

        It has no file of a neighboring location, and none with a name that begins with a dot.
        """
        if not location.is_listed:
            pytest.skip("this store tells only files whose names are known")
        hidden = {".hidden": b"4", ".cache__d": b"5", "sub__.e": b"6"}
        store = location.filled("model", a=b"1", sub__b=b"2", sub__deep__c=b"3", **hidden)
        location.filled("model2", beside=b"7")
        entries = [entry for entry in store.walk() if not entry.is_folder]
        assert sorted(entry.name for entry in entries) == ["a", "sub/b", "sub/deep/c"]
        assert all(entry.refusal is None for entry in entries)
        assert store.read("sub/deep/c", 1) == b"3"

    @requirement
    def test_a_walk_enters_only_the_folders_that_it_is_asked_to(self, location: StoreLocation) -> None:
        """A folder that `enter` does not select is listed as a folder, once, without its contents."""
        if not location.is_listed:
            pytest.skip("this store tells only files whose names are known")
        store = location.filled("model", a=b"1", sub__b=b"2", sub__deep__c=b"3", sub__deep__d=b"4", other__e=b"5")
        found = sorted(store.walk(lambda folder: folder == "sub"), key=lambda entry: entry.name)
        folders = [entry.name for entry in found if entry.is_folder and entry.name != "sub"]
        assert [entry.name for entry in found if not entry.is_folder] == ["a", "sub/b"]
        assert folders == ["other", "sub/deep"]

    @requirement
    @pytest.mark.parametrize("name", ["with space", "grüße-模型.safetensors", "a+b%20c#d?e", "x" * 200])
    def test_names_may_be_anything(self, location: StoreLocation, name: str) -> None:
        """Names may have spaces, any letters, and characters special in URLs; `location` shows them unchanged."""
        if not location.is_listed:
            pytest.skip("this store asks a server for names, which decides what they may be")
        store = location.filled("model", **{name: b"1234"})
        assert [entry.name for entry in store.walk()] == [name]
        assert store.read(name, 4) == b"1234"
        assert name in store.location(name)

    @requirement
    def test_a_store_tells_what_is_at_its_place(self, location: StoreLocation) -> None:
        """`kind` distinguishes a folder, a file and nothing; the store shows the URL that it was given."""
        if not location.is_listed:
            pytest.skip("this store tells only files whose names are known")
        folder = location.filled("folder", weights=BYTES)
        assert folder.kind() is Kind.FOLDER
        assert location.store("folder/weights").kind() is Kind.FILE
        assert location.store("nothing").kind() is Kind.NOTHING
        assert str(folder) == f"{location.url}/folder"
        assert folder.location("weights") == f"{location.url}/folder/weights"

    @requirement
    def test_costs_are_possible(self, location: StoreLocation) -> None:
        """`cost` has requests of a multiple of 4096 bytes, a gap of 0 or more, and at least one concurrent request."""
        cost = location.store("model").cost
        assert cost.request_nbytes >= 4096
        assert cost.request_nbytes % 4096 == 0
        assert cost.max_gap_nbytes >= 0
        assert cost.concurrency is None or cost.concurrency >= 1

    @requirement
    def test_a_store_can_be_sent_to_another_process(self, location: StoreLocation) -> None:
        """A store that was pickled reads the same files."""
        store = location.filled("model", weights=BYTES)
        again: Store = pickle.loads(pickle.dumps(store))
        assert str(again) == str(store)
        assert again.read("weights", NBYTES) == BYTES


class BucketConformance(StoreConformance):
    """The conformance tests of reading, and those of writing for a client that has `put`, `upload` and `delete`."""

    @requirement
    def test_a_small_object_is_replaced_by_who_knows_it(self, location: StoreLocation) -> None:
        """`put` writes where there is nothing, or over the given version; else it raises FileExistsError."""
        bucket, name, read = _bucket(location)
        first = bucket.put(name, b"1", None)
        _check_refused(bucket, name, None)
        second = bucket.put(name, b"22", first)
        _check_refused(bucket, name, first)
        assert read() == b"22"
        third = bucket.put(name, b"333", second)
        _check_refused(bucket, name, second)
        assert read() == b"333"
        bucket.delete([name])
        _check_refused(bucket, name, third)
        assert read() is None
        for content in (b"4", b"5"):
            bucket.put(name, content)
        assert read() == b"5"

    @requirement
    def test_one_of_many_writers_wins(self, location: StoreLocation) -> None:
        """`put` where there is nothing succeeds for only one of several threads that call it at the same time."""
        bucket, name, read = _bucket(location)

        def is_written(content: bytes) -> bool:
            try:
                bucket.put(name, content, None)
            except FileExistsError:
                return False
            return True

        contents = [b"%d" % number for number in range(6)]
        with ThreadPoolExecutor(len(contents)) as threads:
            written = [
                content for content, done in zip(contents, threads.map(is_written, contents), strict=True) if done
            ]
        assert written == [read()]

    @requirement
    def test_deleting_leaves_what_is_not_named(self, location: StoreLocation) -> None:
        """`delete` removes the objects that are named, and no others; a name without an object is not an error."""
        location.filled("model", a=b"1", ab=b"2", a__b=b"3")
        bucket, name, _ = _bucket(location, "a")
        bucket.delete([name, f"{name}/was/never/there"])
        store = location.store("model")
        assert (store.stat("a"), store.read("ab", 1), store.read("a/b", 1)) == (None, b"2", b"3")
        bucket.delete([])

    @requirement
    @pytest.mark.parametrize("nbytes", [0, 5, 10 * 2**20])
    def test_a_file_is_uploaded_whole(self, location: StoreLocation, tmp_path: Path, nbytes: int) -> None:
        """`upload` sends all bytes of a file, replaces an existing object, and returns the version that `stat` has."""
        location.filled("model", file=b"older")
        bucket, name, read = _bucket(location)
        content = random.Random(nbytes).randbytes(nbytes)
        (tmp_path / "file").write_bytes(content)
        version = bucket.upload(name, tmp_path / "file", 2, lambda: None)
        assert read() == content
        stat = bucket.stat(name)
        assert stat is not None
        assert not version or stat.version.strip('"') in [str(one).strip('"') for one in version.values()]

    @requirement
    def test_an_upload_that_is_given_up_makes_no_object(self, location: StoreLocation, tmp_path: Path) -> None:
        """`upload` calls `check` before each part; if it raises, `upload` raises, too, and no object exists."""
        bucket, name, _ = _bucket(location)
        (tmp_path / "file").write_bytes(bytes(20 * 2**20))

        class GivenUp(Exception):
            pass

        def give_up() -> None:
            raise GivenUp

        with pytest.raises((GivenUp, RequestError)):
            bucket.upload(name, tmp_path / "file", 2, give_up)
        assert bucket.stat(name) is None


def _bucket(location: StoreLocation, name: str = "file") -> tuple[WritableClient, str, Callable[[], bytes | None]]:
    """Return the client of a location, an object's name there, and a function that reads the object by a new store.

    The function returns None if the object does not exist.
    """
    store = location.store("model")
    assert isinstance(store, CloudStore), f"{type(store).__name__}, expected a CloudStore"
    assert isinstance(store.client, WritableClient), f"{type(store.client).__name__} has not all of put, upload, delete"
    return store.client, store.full_name(name), lambda: if_there(lambda: location.store("model").read(name, 2**30))


def _check_refused(bucket: WritableClient, name: str, replaced: Version | None) -> None:
    before = bucket.stat(name)
    with pytest.raises(FileExistsError):
        bucket.put(name, b"not to be written", replaced)
    assert bucket.stat(name) == before


def _memory(nbytes: int) -> memoryview:
    """Return memory that is aligned for direct I/O, filled with one byte."""
    view = memoryview(mmap.mmap(-1, max(1, nbytes)))[:nbytes]
    view[:] = bytes([_UNTOUCHED]) * nbytes
    return view


def _read(file: ReadableFile, offset: int, nbytes: int) -> bytes:
    view = _memory(nbytes)
    file.read(offset, view)
    return bytes(view)
