"""The stores that all suites of stores take, and what is needed of each for that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import toy_store

from relayout.storage import in_memory, stores
from relayout.storage.protocols import Modes, Staging, Store
from relayout.storage.stores import find_store

MARKER = "marker.json"


@dataclass(frozen=True)
class Kind:
    """A kind of store."""

    place: Callable[[Path], str]
    """A path or URL, for a test's own folder, below which there is nothing yet."""
    write: Callable[[Store, str, bytes], object]
    """Makes a file, or replaces one as a whole, as somebody else would."""


def _write_local(store: Store, name: str, content: bytes) -> None:
    path = store.path(name)
    assert path is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(".beside")
    beside.write_bytes(content)
    beside.rename(path)


def _write_in_memory(store: Store, name: str, content: bytes) -> None:
    assert isinstance(store, in_memory.MemoryStore)
    store.bucket.put(store.full_name(name), content)


def _write_toy(store: Store, name: str, content: bytes) -> None:
    assert isinstance(store, toy_store.ToyStore)
    store.write(name, content)


KINDS = {
    "local": Kind(lambda folder: str(folder), _write_local),
    "memory": Kind(lambda folder: f"memory://{folder.name}", _write_in_memory),
    "toy": Kind(lambda folder: f"toy://{folder.name}", _write_toy),
}


@dataclass(frozen=True)
class Ground:
    """Where one test makes stores of one kind."""

    kind: Kind
    root: str

    def url(self, name: str) -> str:
        return f"{self.root}/{name}"

    def store(self, name: str) -> Store:
        return find_store(self.url(name))

    def write(self, store: Store, **files: bytes) -> None:
        """Files by name, in which "__" stands for a slash."""
        for name, content in files.items():
            self.kind.write(store, name.replace("__", "/"), content)


@contextmanager
def ground(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ground]:
    monkeypatch.setitem(stores.REGISTRY, "toy", toy_store.offer)
    yield Ground(KINDS[name], KINDS[name].place(folder))
    in_memory.bucket(folder.name).clear()
    toy_store.FILES.clear()
    toy_store.PARTS.clear()


@contextmanager
def staged(store: Store, *, replace: bool = False) -> Iterator[Staging]:
    with store.stage(MARKER, replace=replace, modes=Modes()) as staging:
        yield staging


def content(store: Store, name: str) -> bytes:
    """A whole file, read in one piece."""
    with store.open(name) as file:
        whole = bytearray(file.nbytes)
        file.read(0, memoryview(whole))
    return bytes(whole)
