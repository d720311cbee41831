"""Where an output is made: names of its objects and records, and what proves whose they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from relayout.core.digests import digest_hex
from relayout.errors import FormatError, PlanError
from relayout.storage.cloud.client import BucketClient
from relayout.storage.cloud.output import records
from relayout.storage.cloud.output.records import Proof, Publishing, Record
from relayout.storage.protocols import Replaceable, RequestError, Store

_NUM_REQUESTS = 16
"""Small requests at the same time."""

Item = TypeVar("Item")
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Place:
    """A prefix of a bucket, and the hidden prefix beside it, `.OUT.relayout-partial/`."""

    client: BucketClient
    prefix: str
    store: Store
    """The store of the output."""

    def __str__(self) -> str:
        return f"{self.client.root}/{self.prefix}"

    def full(self, name: str) -> str:
        """A file's object name in the bucket."""
        return f"{self.prefix}/{name}"

    @property
    def hidden(self) -> str:
        """The hidden prefix, with a slash at the end."""
        above, slash, name = self.prefix.rpartition("/")
        return f"{above}{slash}.{name}.relayout-partial/"

    @property
    def where_hidden(self) -> str:
        """The hidden prefix, in messages."""
        return f"{self.client.root}/{self.hidden.rstrip('/')}"

    def objects(self) -> dict[str, str]:
        """The versions of all objects below the prefix, hidden ones too."""
        return {full.removeprefix(f"{self.prefix}/"): stat.version for full, stat in self.client.stats(self.prefix)}

    def proves(self, name: str, proof: Proof) -> bool:
        """Whether an object exists that is just what was made, or is to be made."""
        client, full = self.client, self.full(name)
        status = client.stat(full)
        if status is None or status.nbytes != proof.nbytes:
            return False
        first = client.get(full, 0, proof.digest_nbytes, None).content() if proof.digest_nbytes else b""
        return digest_hex(first) == proof.digest

    def proven(self, proofs: Mapping[str, Proof], names: Iterable[str]) -> set[str]:
        """Those of the names whose objects are what was made."""
        known = [name for name in names if name in proofs]
        are_proven = in_parallel(lambda name: self.proves(name, proofs[name]), known)
        return {name for name, is_proven in zip(known, are_proven, strict=True) if is_proven}

    def published(self, record: Publishing, there: Mapping[str, str]) -> set[str]:
        """Of the objects that are there, those that an attempt has created, or had proven and was to delete."""
        older = {name for name, version in there.items() if record.older.get(name) == version}
        return older | self.proven(record.made, there.keys() - older)

    # Records.

    def record_names(self, below: str = "") -> list[str]:
        """Names of records, below the hidden prefix; objects there that have other names are not ours."""
        full = self.client.stats((self.hidden + below).rstrip("/"))
        names = sorted(name.removeprefix(self.hidden) for name, _ in full)
        return [name for name in names if records.kind_of(name) is not None]

    def read(self, name: str, kind: type[Record]) -> Record | None:
        """A record; None if there is none.

        Raises:
            FormatError: the object is no record of this kind.
        """
        found = self.client.load(self.hidden + name, records.MAX_NBYTES)
        return None if found is None else records.parse(found[0], kind, f"{self.client.root}/{self.hidden}{name}")

    def read_all(self, below: str, kind: type[Record]) -> dict[str, Record]:
        """The records whose names begin so."""
        names = self.record_names(below)
        found = zip(names, in_parallel(lambda name: self.read(name, kind), names), strict=True)
        return {name: record for name, record in found if record is not None}

    def write(self, name: str, record: object) -> None:
        """Write a record, or replace one of ours: only those have such names, as they were read before."""
        self.client.put(self.hidden + name, records.dump(record))

    def create(self, full: str, content: bytes) -> bool:
        """Create a small object. Return whether it is this call that has done so.

        Raises:
            FileExistsError: there is another one.
        """
        try:
            self.client.put(full, content, None)
        except (FileExistsError, RequestError):
            # The answer to a first request may have been lost; or somebody else has written the same.
            found = None
            with suppress(FormatError):  # It is larger.
                found = self.client.load(full, len(content))
            if found is None or found[0] != content:
                raise
            return False
        return True


def check_output(place: Place, source: Store, older: Replaceable, *, force: bool) -> None:
    """See `Store.check_output`."""
    mine, other = f"{place}/", f"{source}/"
    if mine == other:
        raise PlanError("is the source itself; choose another prefix with -o", path=str(place), code="exists")
    if mine.startswith(other) or other.startswith(mine):
        what = "is inside the source, or contains it; choose another prefix with -o"
        raise PlanError(what, path=str(place), code="exists")
    if place.client.stat(place.prefix) is not None:
        raise PlanError("exists and is not a folder", path=str(place), code="exists")
    check_vacant(place, older, force=force)


def check_vacant(place: Place, older: Replaceable, *, force: bool) -> None:
    """Check that nothing is there, or what `force` replaces; objects of an attempt that was publishing do not count."""
    there = place.objects()
    if there and older.marker not in there:
        record = place.read(records.PUBLISHING, Publishing)
        if record is not None:
            there = {name: there[name] for name in there.keys() - place.published(record, there)}
    older.check(place.store, there, force=force)


def in_parallel(call: Callable[[Item], Found], items: Iterable[Item]) -> list[Found]:
    """What the call returns for each item."""
    with ThreadPoolExecutor(_NUM_REQUESTS) as pool:
        return list(pool.map(call, items))
