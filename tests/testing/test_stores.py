"""The laws of stores: every store keeps them, and one that breaks a law fails with a message that names it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from examples import own_store
from examples.own_store import Shelf
from support.store_contract import KINDS, ground

from relayout.errors import FormatError
from relayout.storage.cloud.store import CloudStore
from relayout.storage.stores import Store
from relayout.testing import LawBroken
from relayout.testing.stores import StoreLaws, StorePlace


class TestStores(StoreLaws):
    """Those of the package, and the one that tests use."""

    @pytest.fixture(params=KINDS)
    def place(
        self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[StorePlace]:
        with ground(request.param, tmp_path, monkeypatch) as found:
            yield StorePlace(found.root, found.kind.write, is_listed=found.kind.is_listed)


def write(store: Store, name: str, content: bytes) -> None:
    assert isinstance(store, CloudStore)
    assert isinstance(store.client, Shelf)
    store.client.put(store.full_name(name), content)


class TestOwnStore(StoreLaws):
    """The example."""

    @pytest.fixture
    def place(self, tmp_path: Path) -> StorePlace:
        return StorePlace(f"shelf://{tmp_path.name}", write, own_store.offer)


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


WRONG: dict[Callable[[Shelf, pytest.MonkeyPatch], None], tuple[str, str, dict[str, Any]]] = {
    one_byte_late: ("test_what_is_written_is_read", "The bytes of a file are those that were written", {}),
    any_version: ("test_a_replacement_is_never_mixed_in", "A file that is replaced while it is open", {}),
    one_version_for_all: ("test_versions_tell_contents_apart", "A file keeps its version; one of other content", {}),
    what_is_beside: ("test_all_files_are_listed_but_hidden_ones", "`walk` has every file below", {}),
    empty_where_missing: ("test_a_missing_file_is_bad_input", "A missing file has no `stat`", {"nbytes": None}),
}


@pytest.mark.parametrize("break_it", WRONG, ids=lambda one: one.__name__)
def test_who_breaks_a_law_is_told_which(
    break_it: Callable[[Shelf, pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    law, words, options = WRONG[break_it]
    place = StorePlace(f"shelf://{tmp_path.name}", write, own_store.offer)
    break_it(own_store.shelf(tmp_path.name), monkeypatch)
    with pytest.raises(LawBroken, match=f"^this law does not hold: {words}"):
        getattr(StoreLaws(), law)(place, **options)
