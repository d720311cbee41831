"""The journal of a conversion: which tensors and files are finished, so that a later attempt can resume.

A file of lines, each with a digest of itself in front, appended as tensors are completed; when all of a file is
written, a line has the digests of its chunks. A line that was torn by a dying process or machine is ignored. What a
line says of slices is not believed either: who resumes reads the written bytes again and compares their digests
(`resume`), so that nothing need be forced to the drive before it is noted. The digests of source tensors and of chunks
are taken from the lines. The notes of a finished part of an output are such a text, too (`part_notes`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from relayout.format.safetensors import json_text
from relayout.publish.output import LocalOutput
from relayout.storage.stores import Closable

JOURNAL_NAME = "relayout.journal"

_SEPARATOR = b" "
_HEX = re.compile("([0-9a-f]{2})*")
_CHUNKS = "chunks"
"""First item of the line of a file that is complete."""


@dataclass(frozen=True, slots=True)
class TensorDigests:
    """Digests of one tensor, in hex."""

    source: str | None
    """Digest of the whole tensor, as stored in the source. None: unknown, as not all of it was read."""
    slices: tuple[str, ...]
    """Digests of its distinct slices, in the order in which ranks hold them."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What two attempts must have in common for one to resume the other."""

    source: str
    """What `SourceIdentity` says: its `here` for attempts on one machine, its `content` for those that machines
    share."""
    options: str
    """Digest of everything else that decides which bytes are written."""


@dataclass(frozen=True, slots=True)
class Written:
    """Tensors and files that are written."""

    tensors: Mapping[int, TensorDigests] = field(default_factory=dict)
    """The digests of each tensor, by its index in the source."""
    chunks: Mapping[int, bytes] = field(default_factory=dict)
    """The digests of the chunks of each file, by its number, of which everything but the header is written."""


class Journal(Closable):
    """Appends to a journal. Thread-safe."""

    def __init__(self, folder: LocalOutput, fingerprint: Fingerprint, *, append: bool) -> None:
        """Continue the journal of an output, or begin a new one in place of what may be there."""
        header = None if append else _line([fingerprint.source, fingerprint.options])
        self._notes = folder.open_notes(JOURNAL_NAME, header)
        if append:
            self._notes.append(b"\n")  # Behind a torn line, too, a new one starts.

    def add(self, written: Written) -> None:
        """Note what is written."""
        self._notes.append(_lines(written))

    def close(self) -> None:
        self._notes.close()


def part_notes(fingerprint: Fingerprint, written: Written) -> bytes:
    """The journal of just this, as the notes of a part; `parse_journal` reads it."""
    return _line([fingerprint.source, fingerprint.options]) + _lines(written)


def _lines(written: Written) -> bytes:
    tensors: Iterable[list[object]] = (
        [tensor, digests.source, *digests.slices] for tensor, digests in written.tensors.items()
    )
    files: Iterable[list[object]] = ([_CHUNKS, file, digests.hex()] for file, digests in written.chunks.items())
    return b"".join(map(_line, [*tensors, *files]))


def read_journal(folder: LocalOutput) -> tuple[Fingerprint, Written] | None:
    """What a journal says is written, and of which conversion; None if this user has no journal there.

    Raises:
        OSError: it cannot be read now.
    """
    text = folder.read_notes(JOURNAL_NAME)
    return None if text is None else parse_journal(text)


def parse_journal(text: bytes) -> tuple[Fingerprint, Written] | None:
    """Parse the content of the notes into fingerprint and progress."""
    lines = text.split(b"\n")
    first = _parsed(lines[0])
    if not (len(first) == 2 and _are_texts(first)):
        return None
    tensors, chunks = {}, {}
    for line in lines[1:]:
        match _parsed(line):
            case [tensor, str() | None as source, *slices] if type(tensor) is int and slices and _are_texts(slices):
                tensors[tensor] = TensorDigests(source, tuple(slices))
            case [kind, file, str(digests)] if kind == _CHUNKS and type(file) is int and _HEX.fullmatch(digests):
                chunks[file] = bytes.fromhex(digests)
    return Fingerprint(*first), Written(tensors, chunks)


def _are_texts(items: Sequence[object]) -> bool:
    return all(isinstance(item, str) for item in items)


def _line(items: Sequence[object]) -> bytes:
    text = json_text(items).encode()
    return xxhash.xxh3_64_hexdigest(text).encode() + _SEPARATOR + text + b"\n"


def _parsed(line: bytes) -> list[Any]:
    digest, _, text = line.partition(_SEPARATOR)
    if xxhash.xxh3_64_hexdigest(text).encode() != digest:
        return []
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return parsed if isinstance(parsed, list) else []
