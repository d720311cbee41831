"""Records of an unfinished output, below its hidden prefix: what they say, and how they are read and written.

Each is a JSON object that says of which kind it is: that is our mark. What has the name of a record and is none ends
the command with an error. It is never believed, and never deleted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from relayout.core.digests import digest_hex
from relayout.errors import FormatError, shown
from relayout.storage.cloud.upload import Upload

_MARK = "relayout"
MAX_NBYTES = 2**28
"""Of a record: those of units have their small files and notes."""
LEASE, PUBLISHING = "lease", "publishing"
UPLOADS, COMPLETE, NOTES = "uploads/", "complete/", "notes/"
UNITS, UNIT_UPLOADS = "units/", "unit-uploads/"
"""Names of records below the hidden prefix, or their beginnings."""

Record = TypeVar("Record")


@dataclass(frozen=True, slots=True)
class Begun:
    """An upload that was begun. Recorded before its first part is sent, until the output is published or given up."""

    name: str
    """Of the file, in the output."""
    upload: str

    @property
    def key(self) -> str:
        """The end of the record's name."""
        return digest_hex(f"{self.name}\0{self.upload}".encode())


@dataclass(frozen=True, slots=True)
class Proof:
    """What tells that an object is one that we have made, or one that is equal to it."""

    nbytes: int
    digest: str
    """Of its first bytes."""
    digest_nbytes: int
    """How many these are. All of a small file; the first part of others, which in a rank file proves all of it."""


@dataclass(frozen=True, slots=True)
class Complete:
    """An upload of which every part was sent."""

    name: str
    upload: str
    tags: tuple[str, ...]
    proof: Proof

    @staticmethod
    def of(name: str, upload: Upload) -> Complete:
        """Of an upload whose bytes were all written."""
        tags = tuple(upload.tags())
        assert upload.nbytes is not None
        return Complete(name, upload.id, tags, Proof(upload.nbytes, upload.proof, upload.proof_nbytes))


@dataclass(frozen=True, slots=True)
class Unit:
    """What one process has added to an output that several make."""

    files: tuple[Complete, ...]
    small: dict[str, str]
    """Content of small files, as Latin-1."""
    notes: str
    """As Latin-1."""


@dataclass(frozen=True, slots=True)
class Notes:
    """A piece of notes, as Latin-1."""

    text: str


@dataclass(frozen=True, slots=True)
class Publishing:
    """What an attempt creates and deletes while it publishes. Recorded before the first of it."""

    made: dict[str, Proof]
    """The output's files."""
    older: dict[str, str]
    """Versions of the objects that make room for them."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who writes an output: the content of the lease."""

    token: str
    """A random word that only the holder knows to be its own."""
    number: int
    """Rises with each refresh, so that the object's version changes."""
    host: str
    machine: str
    """Tells a running system and its numbering of processes; "" if the system does not tell."""
    pid: int
    process_start: int
    """Tells the process from others that have had its number."""
    started: str
    """When, by the clock of the holder's machine: for people."""
    what: str
    """What the holder does, for people."""


_KINDS: Mapping[str, type] = {
    UPLOADS: Begun,
    UNIT_UPLOADS: Begun,
    COMPLETE: Complete,
    NOTES: Notes,
    UNITS: Unit,
    PUBLISHING: Publishing,
    LEASE: Holder,
}


def kind_of(name: str) -> type | None:
    """The kind of record that has such a name, below the hidden prefix; None: it is no name of a record."""
    for begin, kind in _KINDS.items():
        if name == begin or (begin.endswith("/") and name.startswith(begin)):
            return kind
    return None


def dump(record: object) -> bytes:
    """The content of a record."""
    return json.dumps({_MARK: type(record).__name__} | asdict(record)).encode()  # type: ignore[call-overload]


def parse(content: bytes, kind: type[Record], where: str) -> Record:
    """The record that an object holds.

    Raises:
        FormatError: it holds none of this kind.
    """
    try:
        found = json.loads(content.decode())
        if not isinstance(found, dict) or found.pop(_MARK, None) != kind.__name__:
            raise ValueError("it does not say that it is one")
        parsed: Record = _parsed(found, kind)
        return parsed
    except (ValueError, RecursionError) as error:
        what = (
            f"no record of relayout, or one of another version ({shown(str(error))[1:-1]}): nothing was changed; delete"
            " this object, or name another output with -o"
        )
        raise FormatError(what, path=where, code="field") from None


def _parsed(found: object, kind: Any) -> Any:
    """A value of a type that records are made of."""
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        if not isinstance(found, dict) or found.keys() != hints.keys():
            raise ValueError(f"expected the fields {', '.join(field.name for field in fields(kind))}")
        made = kind(**{name: _parsed(found[name], hint) for name, hint in hints.items()})  # type: ignore[operator]
        _check_name(getattr(made, "name", "x"))
        return made
    if get_origin(kind) is tuple and isinstance(found, list):
        return tuple(_parsed(item, get_args(kind)[0]) for item in found)
    if get_origin(kind) is dict and isinstance(found, dict):
        for name in found:
            _check_name(name)
        return {name: _parsed(item, get_args(kind)[1]) for name, item in found.items()}
    if type(found) is kind and not (kind is int and found < 0):  # type: ignore[operator]
        return found
    raise ValueError(f"unexpected {type(found).__name__}")


def _check_name(name: str) -> None:
    """A record speaks of files in the output, and of nothing else."""
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError("expected the name of a file")
