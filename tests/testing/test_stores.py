"""The laws of stores: every store keeps them, and one that breaks a law fails with a message that names it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from examples import own_store
from examples.own_store import Shelf
from support.store_contract import KINDS, WRITABLE, ground

from relayout.errors import FormatError
from relayout.storage.cloud.store import CloudStore
from relayout.storage.stores import Store
from relayout.testing import ConformanceError
from relayout.testing.stores import BucketConformance, StoreConformance, StoreLocation


class TestStores(StoreConformance):
    """Those of the package, and the one that tests use."""

    @pytest.fixture(params=KINDS)
    def location(
        self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[StoreLocation]:
        with ground(request.param, tmp_path, monkeypatch) as found:
            yield StoreLocation(found.root, found.kind.write, is_listed=found.kind.is_listed)


class TestBuckets(BucketConformance):
    """Those to which outputs are published."""

    @pytest.fixture(params=[name for name in WRITABLE if name != "local"])
    def location(
        self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[StoreLocation]:
        with ground(request.param, tmp_path, monkeypatch) as found:
            yield StoreLocation(found.root, found.kind.write)


def write(store: Store, name: str, content: bytes) -> None:
    assert isinstance(store, CloudStore)
    assert isinstance(store.client, Shelf)
    store.client.put(store.full_name(name), content)


class TestOwnStore(BucketConformance):
    """The example."""

    @pytest.fixture
    def location(self, tmp_path: Path) -> StoreLocation:
        return StoreLocation(f"shelf://{tmp_path.name}", write, own_store.offer)


def one_byte_late(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    get = shelf.get
    monkeypatch.setattr(shelf, "get", lambda name, start, end, version: get(name, max(0, start - 1), end, version))


def any_version(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    get = shelf.get
    monkeypatch.setattr(shelf, "get", lambda name, start, end, version: get(name, start, end, None))


def one_version_for_all(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf, "_versions", iter(lambda: 1, 0))


def what_is_beside(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    names = lambda prefix: ((name, "") for name in shelf.objects if name.startswith(prefix))  # noqa: E731
    monkeypatch.setattr(shelf, "list_objects", names)


def empty_where_missing(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    get = shelf.get

    def lenient(name: str, start: int, end: int | None, version: str | None) -> Any:
        try:
            return get(name, start, end, version)
        except FormatError as error:
            raise FormatError(error.what, path=error.path, code="invalid") from None

    monkeypatch.setattr(shelf, "get", lenient)


def no_conditions(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    put = shelf.put
    monkeypatch.setattr(shelf, "put", lambda name, content, replaced=True: put(name, content))


def refused_but_written(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    put = shelf.put

    def late(name: str, content: bytes, replaced: Any = True) -> Any:
        try:
            return put(name, content, replaced)
        except FileExistsError:
            put(name, content)
            raise

    monkeypatch.setattr(shelf, "put", late)


def all_below(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    def delete(names: Sequence[str]) -> None:
        for name in [one for one in shelf.objects if one.startswith(tuple(names))]:
            del shelf.objects[name]

    monkeypatch.setattr(shelf, "delete", delete)


def never_asked(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    upload = shelf.upload
    monkeypatch.setattr(shelf, "upload", lambda name, file, streams, check: upload(name, file, streams, lambda: None))


def in_short(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf, "upload", lambda name, file, *_: shelf.put(name, file.read_bytes()[: 2**20]))


WRONG: dict[Callable[[Shelf, pytest.MonkeyPatch], None], tuple[str, str, dict[str, Any]]] = {
    one_byte_late: ("test_what_is_written_is_read", "The bytes of a file are those that were written", {}),
    any_version: ("test_a_replacement_is_never_mixed_in", "A file that is replaced while it is open", {}),
    one_version_for_all: ("test_versions_tell_contents_apart", "A file keeps its version; one of other content", {}),
    what_is_beside: ("test_all_files_are_listed_but_hidden_ones", "`walk` has every file below", {}),
    no_conditions: ("test_a_small_object_is_replaced_by_who_knows_it", "`put` writes where there is nothing", {}),
    refused_but_written: ("test_a_small_object_is_replaced_by_who_knows_it", "`put` writes where there is nothing", {}),
    all_below: ("test_deleting_leaves_what_is_not_named", "`delete` removes the objects that are named", {}),
    never_asked: ("test_an_upload_that_is_given_up_makes_no_object", "`upload` calls `check`", {"tmp_path": None}),
    in_short: ("test_a_file_is_uploaded_whole", "`upload` sends all", {"tmp_path": None, "nbytes": 10 * 2**20}),
    empty_where_missing: ("test_a_missing_file_is_bad_input", "A missing file has no `stat`", {"nbytes": None}),
}


@pytest.mark.parametrize("break_it", WRONG, ids=lambda one: one.__name__)
def test_who_breaks_a_law_is_told_which(
    break_it: Callable[[Shelf, pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requirement, words, options = WRONG[break_it]
    location = StoreLocation(f"shelf://{tmp_path.name}", write, own_store.offer)
    break_it(own_store.shelf(tmp_path.name), monkeypatch)
    with pytest.raises(ConformanceError, match=f"^this law does not hold: {words}"):
        getattr(BucketConformance(), requirement)(
            location, **options | ({"tmp_path": tmp_path} if "tmp_path" in options else {})
        )
