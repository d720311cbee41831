"""The stores that all suites of stores take, and what is needed of each for that."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import hub_server, oci_server, s3_server, toy_store

from relayout.errors import FormatError
from relayout.publish.output import Output, OutputKind, OutputSpec
from relayout.publish.publishers import StoreDestination
from relayout.storage.cloud.bucket import BucketClient
from relayout.storage.cloud.store import CloudStore
from relayout.storage.stores import Store, find_store
from relayout.storage.web.hub_bucket import HubBucketClient
from relayout.storage.web.oci import OciStore

MARKER = "marker.txt"


def _names_in_marker(store: Store) -> frozenset[str]:
    """The files that a marker names, each on a line of its own; the first line proves that it is ours."""
    ours, *others = store.read(MARKER, 2**20).decode().splitlines() or [""]
    if ours != "ours":
        raise FormatError("names no files", path=store.location(MARKER), code="field")
    return frozenset([MARKER, *others])


OLDER = OutputKind(MARKER, lambda store: f"{len(_names_in_marker(store))} files", _names_in_marker)


@dataclass(frozen=True)
class Kind:
    """A kind of store."""

    place: Callable[[Path], str]
    """A path or URL, for a test's own folder, below which there is nothing yet."""
    write: Callable[[Store, str, bytes], object]
    """Makes a file, or replaces one as a whole, as somebody else would."""
    clear: Callable[[Path], object] = lambda folder: None
    """Removes what a test has left in the place of its own folder, where pytest does not."""
    is_writable: bool = True
    """Whether relayout writes there, below any prefix."""
    is_listed: bool = True
    """Whether it tells all of its files, and not only those whose names are known."""
    has_plain: bool = True
    """Whether plain checkpoints are read there."""
    stays: bool = False
    """Whether a store stays at the version of all files that its first request has found."""


def _write_local(store: Store, name: str, content: bytes) -> None:
    path = store.path(name)
    assert path is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(".beside")
    beside.write_bytes(content)
    beside.rename(path)


def _write_toy(store: Store, name: str, content: bytes) -> None:
    assert isinstance(store, CloudStore)
    assert isinstance(store.client, toy_store.Shelf)
    store.client.write(store.full_name(name), content)


def _write_to_server(store: Store, name: str, content: bytes) -> None:
    """S3 and web servers are one here: its URLs name the bucket, too."""
    place = str(store).removeprefix("s3://").removeprefix(f"{s3_server.shared().url}/")
    bucket, _, prefix = place.partition("/")
    s3_server.shared().put(bucket, f"{prefix}/{name}".lstrip("/"), content)


def _clear_server(folder: Path) -> None:
    s3_server.shared().clear(folder.name)


def _web_place(folder: Path) -> str:
    return f"{s3_server.shared().url}/{folder.name}"


def _repository(folder: Path) -> str:
    return f"tests/{hashlib.sha1(str(folder).encode()).hexdigest()}"


def _oci_place(folder: Path) -> str:
    return oci_server.shared().url(_repository(folder), "a-tag")


def _clear_registry(folder: Path) -> None:
    oci_server.shared().clear(_repository(folder))


def _write_to_registry(store: Store, name: str, content: bytes) -> None:
    assert isinstance(store, OciStore)
    registry, place = oci_server.shared(), (store.client.repository, store.client.reference)
    registry.write(*place, registry.files(*place) | {store.full_name(name): content})


def _hub_place(folder: Path) -> str:
    hub_server.shared().buckets.setdefault(_repository(folder), {})
    return f"hf://buckets/{_repository(folder)}"


def _clear_hub(folder: Path) -> None:
    hub_server.shared().buckets.pop(_repository(folder), None)


def _write_to_hub(store: Store, name: str, content: bytes) -> None:
    assert isinstance(store, CloudStore)
    assert isinstance(store.client, HubBucketClient)
    hub_server.shared().buckets[store.client.bucket][store.full_name(name)] = content


KINDS = {
    "local": Kind(lambda folder: str(folder), _write_local),
    "toy": Kind(lambda folder: f"toy://{folder.name}", _write_toy, lambda folder: toy_store.shelf(folder.name).clear()),
    "s3": Kind(lambda folder: f"s3://{folder.name}", _write_to_server, _clear_server),
    "web": Kind(_web_place, _write_to_server, _clear_server, is_writable=False, is_listed=False),
    "hub": Kind(_hub_place, _write_to_hub, _clear_hub, is_writable=False),
    "oci": Kind(_oci_place, _write_to_registry, _clear_registry, is_writable=False, has_plain=False, stays=True),
}
REAL_STORES = "RELAYOUT_TEST_STORES"
"""This variable names the real servers that take part, "seaweedfs" and "azurite", in place of what imitates some."""
BUCKET = "relayout-tests"
"""The bucket, or container, on real servers."""
REAL = {"seaweedfs": f"s3://{BUCKET}", "azurite": f"az://{BUCKET}"}


def _write_by_obstore(store: Store, name: str, content: bytes) -> None:
    assert isinstance(store, CloudStore)
    assert isinstance(store.client, BucketClient)
    store.client.store.put(store.full_name(name), content)


def _real(root: str) -> Kind:
    def place(folder: Path) -> str:
        return f"{root}/{folder.parent.name}-{folder.name}"

    def clear(folder: Path) -> None:
        left = find_store(place(folder))
        assert isinstance(left, CloudStore)
        assert isinstance(left.client, BucketClient)
        left.client.delete([name for name, _ in left.client.list_objects(left.prefix)])

    return Kind(place, _write_by_obstore, clear)


if REAL_STORES in os.environ:
    del KINDS["toy"], KINDS["s3"]
    KINDS |= {name: _real(REAL[name]) for name in os.environ[REAL_STORES].split(",")}
WRITABLE = [name for name, kind in KINDS.items() if kind.is_writable]


@dataclass(frozen=True)
class Ground:
    """Where one test makes stores of one kind."""

    kind: Kind
    root: str

    def url(self, name: str) -> str:
        return f"{self.root}/{name}"

    def store(self, name: str) -> Store:
        return find_store(self.url(name))

    def later(self, store: Store) -> Store:
        """The same place after a file was replaced: a new store where one stays at what it has found."""
        return find_store(str(store)) if self.kind.stays else store

    def write(self, store: Store, **files: bytes) -> None:
        """Files by name, in which "__" stands for a slash."""
        for name, content in files.items():
            self.kind.write(store, name.replace("__", "/"), content)


@contextmanager
def ground(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ground]:
    if name == "oci":
        pytest.importorskip("urllib3", reason="the client of registries")
    if name == "hub":
        pytest.importorskip("huggingface_hub", reason="the hub's own library")
        hub_server.point_to(hub_server.shared().hub.url, monkeypatch, folder / ".hub")
    if name in ("s3", "web"):
        pytest.importorskip("obstore", reason="the client of object stores")
        for variable, value in s3_server.environment(s3_server.shared()).items():
            monkeypatch.setenv(variable, value)
    yield Ground(KINDS[name], KINDS[name].place(folder))
    KINDS[name].clear(folder)


SOME = OutputSpec(
    what="a test",
    fingerprint="of-a-test",
    weights=["weights.bin"],
    others=[MARKER, "small", "first", "second", "third", "weights", "only-a-head"],
)


@contextmanager
def staged(store: Store, work: OutputSpec = SOME, *, replace: bool = False, gathers: bool = False) -> Iterator[Output]:
    with StoreDestination(store, OLDER, replace).begin(work, gathers=gathers) as output:
        yield output


def content(store: Store, name: str) -> bytes:
    """A whole file, read in one piece."""
    with store.open(name) as file:
        whole = bytearray(file.nbytes)
        file.read(0, memoryview(whole))
    return bytes(whole)
