"""The prefix of an output: names of its objects and records, and the proof of whose they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from relayout.core.digests import digest_hex
from relayout.errors import FormatError, PlanError
from relayout.storage.cloud.client import Version, WritableClient
from relayout.storage.cloud.output import records
from relayout.storage.cloud.output.records import Proof, Publishing, Record
from relayout.storage.protocols import Replaceable, RequestError, Store, if_there

_NUM_REQUESTS = 16
"""Small requests at the same time."""

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class OutputPrefix:
    """A prefix of a bucket, and the hidden prefix beside it, `.OUT.relayout-partial/`."""

    client: WritableClient
    prefix: str
    store: Store
    """The store of the output."""

    def __str__(self) -> str:
        return f"{self.client.root}/{self.prefix}"

    def full(self, name: str) -> str:
        """The object's name of a file."""
        return f"{self.prefix}/{name}"

    def location(self, name: str) -> str:
        """A file in messages."""
        return f"{self}/{name}"

    @property
    def hidden(self) -> str:
        """The hidden prefix, with a trailing slash."""
        above, slash, name = self.prefix.rpartition("/")
        return f"{above}{slash}.{name}.relayout-partial/"

    @property
    def hidden_location(self) -> str:
        """The hidden prefix in messages."""
        return f"{self.client.root}/{self.hidden.rstrip('/')}"

    def objects(self) -> dict[str, str]:
        """The versions of all objects below the prefix, including hidden ones."""
        return {
            full.removeprefix(f"{self.prefix}/"): version for full, version in self.client.list_objects(self.prefix)
        }

    def load(self, full: str, limit: int) -> tuple[bytes, Version] | None:
        """A small object and its version; None if it does not exist. FormatError: it is larger than `limit` bytes."""
        body = if_there(lambda: self.client.get(full, 0, None, None))
        return None if body is None else (body.content(limit), body.replaces)

    def proves(self, name: str, proof: Proof) -> bool:
        """Whether a file's object exists and fits its proof."""
        full = self.full(name)
        stat = self.client.stat(full)
        if stat is None or stat.nbytes != proof.nbytes:
            return False
        start = self.client.get(full, 0, proof.digest_nbytes, None).content() if proof.digest_nbytes else b""
        return digest_hex(start) == proof.digest

    def proven(self, proofs: Mapping[str, Proof], names: Iterable[str]) -> set[str]:
        """The names whose objects fit their proofs."""
        known = [name for name in names if name in proofs]
        are_proven = in_parallel(lambda name: self.proves(name, proofs[name]), known)
        return {name for name, is_proven in zip(known, are_proven, strict=True) if is_proven}

    def published(self, record: Publishing, there: Mapping[str, str]) -> set[str]:
        """The objects that an attempt has created, or had proven and was about to delete."""
        older = {name for name, version in there.items() if record.older.get(name) == version}
        return older | self.proven(record.files, there.keys() - older)

    # Records.

    def record_names(self, below: str = "") -> list[str]:
        """Names of records, below the hidden prefix; objects there with other names are not ours."""
        objects = self.client.list_objects((self.hidden + below).rstrip("/"))
        names = sorted(full.removeprefix(self.hidden) for full, _ in objects)
        return [name for name in names if records.kind_of(name) is not None]

    def read(self, name: str, kind: type[Record]) -> Record | None:
        """A record; None if it does not exist. FormatError: the object is no record of this kind."""
        loaded = self.load(self.hidden + name, records.MAX_NBYTES)
        return None if loaded is None else records.parse(loaded[0], kind, f"{self.client.root}/{self.hidden}{name}")

    def read_all(self, below: str, kind: type[Record]) -> dict[str, Record]:
        """The records whose names begin with `below`."""
        names = self.record_names(below)
        return self.read_each(dict.fromkeys(names, kind))

    def read_each(self, kinds: Mapping[str, type[Record]]) -> dict[str, Record]:
        """Records of these names and kinds, as far as they exist."""
        loaded = in_parallel(lambda name: self.read(name, kinds[name]), kinds)
        return {name: record for name, record in zip(kinds, loaded, strict=True) if record is not None}

    def write(self, name: str, record: object) -> None:
        """Write a record, or replace one of ours: only those have such names, as they were read before."""
        self.client.put(self.hidden + name, records.dump(record))

    def put(self, full: str, content: bytes, replaced: Version | None = None) -> tuple[Version, bool]:
        """Write a small object, or replace this version of it.

        Returns:
            Its version, and whether this request has written it: else it was there with this content, as the answer to
            a first request may have been lost, or another process has written the same.

        Raises:
            FileExistsError: it exists with another content, or no longer has the version.
            RequestError: the request failed, and was not carried out until now.
        """
        try:
            return self.client.put(full, content, replaced), True
        except (FileExistsError, RequestError):
            loaded = None
            with suppress(FormatError):  # It is larger.
                loaded = self.load(full, len(content))
            if loaded is None or loaded[0] != content:
                raise
            return loaded[1], False


def bare(version: str) -> str:
    """A version without the quotes of an ETag, which some answers have and others lack."""
    return version.removeprefix("W/").strip('"')


def check_output(output: OutputPrefix, source: Store, older: Replaceable, *, force: bool) -> None:
    """Check that an output may be published here. For the rest see `Store.check_output`."""
    own, other = f"{output}/", f"{source}/"
    if own == other:
        raise PlanError("is the source itself; choose another prefix", path=str(output), code="exists")
    if own.startswith(other) or other.startswith(own):
        what = "is inside the source, or contains it; choose another prefix"
        raise PlanError(what, path=str(output), code="exists")
    if output.client.stat(output.prefix) is not None:
        raise PlanError("exists and is not a folder", path=str(output), code="exists")
    check_vacant(output, older, force=force)


def check_vacant(output: OutputPrefix, older: Replaceable, *, force: bool) -> None:
    """Check that nothing is there but what `force` replaces, and objects of an attempt that was publishing."""
    there = output.objects()
    if there and older.marker not in there:
        record = output.read(records.PUBLISHING, Publishing)
        if record is not None:
            there = {name: there[name] for name in there.keys() - output.published(record, there)}
    older.check(output.store, there, force=force)


def in_parallel(call: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """The results of a call for each item. If one fails, those that have begun end first: what they create is known."""
    with ThreadPoolExecutor(_NUM_REQUESTS) as pool:
        return list(pool.map(call, items))
