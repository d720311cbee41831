"""Records of an unfinished output, below its hidden prefix.

Each is a JSON object that names its kind, which is our mark. An object that has the name of a record and is none ends
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
    """An upload that was begun. Recorded from before its first part until the output is published or given up."""

    name: str
    """Of the file, in the output."""
    upload: str

    @property
    def key(self) -> str:
        """The end of the record's name."""
        return digest_hex(f"{self.name}\0{self.upload}".encode())


@dataclass(frozen=True, slots=True)
class Proof:
    """What identifies an object as ours, or as equal to ours."""

    nbytes: int
    digest: str
    """Of its first bytes."""
    digest_nbytes: int
    """All of a small file; the first part of a larger one, which in a rank file has the digest of the rest."""


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
    """The part that one process adds to an output of several processes."""

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
    """What an attempt creates and deletes while it publishes. Recorded before it does."""

    files: dict[str, Proof]
    """The output's files."""
    older: dict[str, str]
    """Versions of the objects that make room for them."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that writes an output: the content of the lease."""

    token: str
    """Random; identifies the holder."""
    refreshes: int
    """Number of refreshes, so that the object's version changes with each."""
    host: str
    machine: str
    """Identifies a running system and its process namespace; "" if unknown."""
    pid: int
    process_start: int
    """Distinguishes the process from others with its id."""
    started: str
    """By the clock of the holder's machine, for messages."""
    what: str
    """What the holder does, for messages."""


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
    """The kind of record of a name below the hidden prefix; None: it is no name of a record."""
    for begin, kind in _KINDS.items():
        if name == begin or (begin.endswith("/") and name.startswith(begin)):
            return kind
    return None


def dump(record: object) -> bytes:
    """The content of a record."""
    return json.dumps({_MARK: type(record).__name__} | asdict(record)).encode()  # type: ignore[call-overload]


def parse(content: bytes, kind: type[Record], location: str) -> Record:
    """The record that an object holds. FormatError: it holds none of this kind."""
    try:
        value = json.loads(content.decode())
        if not isinstance(value, dict) or value.pop(_MARK, None) != kind.__name__:
            raise ValueError("no field that identifies a record")
        parsed: Record = _parsed(value, kind)
        return parsed
    except (ValueError, RecursionError) as error:
        what = (
            f"not a record of relayout, or of another version ({shown(str(error))[1:-1]}): nothing was changed; delete"
            " this object, or name another output"
        )
        raise FormatError(what, path=location, code="field") from None


def _parsed(value: object, kind: Any) -> Any:
    """A value of a type that records are made of."""
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        if not isinstance(value, dict) or value.keys() != hints.keys():
            raise ValueError(f"expected the fields {', '.join(field.name for field in fields(kind))}")
        record = kind(**{name: _parsed(value[name], hint) for name, hint in hints.items()})  # type: ignore[operator]
        _check_name(getattr(record, "name", "x"))
        return record
    if get_origin(kind) is tuple and isinstance(value, list):
        return tuple(_parsed(item, get_args(kind)[0]) for item in value)
    if get_origin(kind) is dict and isinstance(value, dict):
        for name in value:
            _check_name(name)
        return {name: _parsed(item, get_args(kind)[1]) for name, item in value.items()}
    if type(value) is kind and not (kind is int and value < 0):  # type: ignore[operator]
        return value
    raise ValueError(f"unexpected {type(value).__name__}")


def _check_name(name: str) -> None:
    """Check that a name is that of a file in the output."""
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError("expected the name of a file")
