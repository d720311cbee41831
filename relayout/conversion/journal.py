"""The journal of a conversion: which tensors are done, so that the same command can go on after an interruption.

When all of a file is written, a line has the digests of its chunks.

A file of lines, each with a digest of itself in front, appended as tensors are completed. A line that a dying process
or machine left torn is not one. What a line claims of slices is not believed either: whoever goes on reads the
written bytes again and compares their digests (`resumption`), so that nothing need be forced to the drive before it is
claimed. The digests of the source tensor and of chunks are taken from the lines. A store that cannot read what is
not published yet names the files that are complete there, and these are believed (`Staging.can_read`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from relayout.format.safetensors import json_text
from relayout.storage.protocols import Closable, Staging

JOURNAL_NAME = "relayout.journal"

_SEPARATOR = b" "
_HEX = re.compile("([0-9a-f]{2})*")
_CHUNKS = "chunks"
"""First item of the line of a file that is complete."""


@dataclass(frozen=True, slots=True)
class TensorDigests:
    """Digests of one tensor, in hex."""

    source: str
    """Of the whole tensor, as stored in the source."""
    slices: tuple[str, ...]
    """Of its distinct slices, in the order in which ranks hold them."""


@dataclass(frozen=True, slots=True)
class Undertaking:
    """What a conversion is of, and to: a journal counts for just the same."""

    source: str
    """Digest of what tells that the source is still the same: files, lengths, times, headers."""
    options: str
    """Digest of everything else that decides which bytes are written."""


@dataclass(frozen=True, slots=True)
class Claims:
    """What a journal says is done."""

    tensors: Mapping[int, TensorDigests] = field(default_factory=dict)
    """By position in the source."""
    chunks: Mapping[int, bytes] = field(default_factory=dict)
    """Of files of which everything but the header was written, by number: the digests of their chunks."""


class Journal(Closable):
    """Appends to a journal. Lines may be added by several threads."""

    def __init__(self, staging: Staging, undertaking: Undertaking, *, append: bool, name: str = JOURNAL_NAME) -> None:
        """Go on with the journal of an output, or begin a new one in place of what may be there."""
        header = None if append else _line([undertaking.source, undertaking.options])
        self._notes = staging.open_notes(name, header)
        if append:
            self._notes.append(b"\n")  # Behind a torn line, too, a new one starts.

    def add(self, written: Mapping[int, TensorDigests]) -> None:
        """Note that tensors (positions in the source) are written."""
        self._notes.append(b"".join([_line([tensor, one.source, *one.slices]) for tensor, one in written.items()]))

    def add_files(self, chunks: Mapping[int, bytes]) -> None:
        """Note the digests of the chunks of files, by number, of which everything but the header is written."""
        self._notes.append(b"".join([_line([_CHUNKS, number, one.hex()]) for number, one in chunks.items()]))

    def close(self) -> None:
        """Close the file."""
        self._notes.close()


def read_journal(staging: Staging, name: str = JOURNAL_NAME) -> tuple[Undertaking, Claims] | None:
    """What a journal is of, and what it claims to be done; None where there is none of this user's.

    Raises:
        OSError: there is one, and it cannot be read now.
    """
    text = staging.read_notes(name)
    return None if text is None else parse_journal(text)


def parse_journal(text: bytes) -> tuple[Undertaking, Claims] | None:
    """The same, of what the notes hold."""
    lines = text.split(b"\n")
    first = _parsed(lines[0])
    if not (len(first) == 2 and all(isinstance(item, str) for item in first)):
        return None
    tensors, chunks = {}, {}
    for line in lines[1:]:
        match _parsed(line):
            case [tensor, str(source), *slices] if _is_number(tensor) and slices and _are_texts(slices):
                tensors[tensor] = TensorDigests(source, tuple(slices))
            case [kind, number, str(digests)] if kind == _CHUNKS and _is_number(number) and _HEX.fullmatch(digests):
                chunks[number] = bytes.fromhex(digests)
    return Undertaking(first[0], first[1]), Claims(tensors, chunks)


def _is_number(item: object) -> bool:
    return type(item) is int


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
