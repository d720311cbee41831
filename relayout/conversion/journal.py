"""The journal of a conversion: which tensors are done, so that the same command can go on after an interruption.

A file of lines, each with a digest of itself in front, appended as tensors are completed. A line that a dying process
or machine left torn is not one. What a line claims of slices is not believed either: whoever goes on reads the
written bytes again and compares their digests (`resumption`), so that nothing need be forced to the drive before it is
claimed. The digest of the source tensor is taken from the line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from relayout.format.safetensors import json_text
from relayout.storage.protocols import Closable, Staging

JOURNAL_NAME = "relayout.journal"

_SEPARATOR = b" "


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


class Journal(Closable):
    """Appends to a journal. Lines may be added by several threads."""

    def __init__(self, staging: Staging, undertaking: Undertaking, *, append: bool) -> None:
        """Go on with the journal of an output, or begin a new one in place of what may be there."""
        self._notes = staging.open_notes(JOURNAL_NAME, is_new=not append)
        # Behind a torn line, too, a new one starts.
        self._notes.append(b"\n" if append else _line([undertaking.source, undertaking.options]))

    def add(self, written: Mapping[int, TensorDigests]) -> None:
        """Note that tensors (positions in the source) are written."""
        self._notes.append(b"".join([_line([tensor, one.source, *one.slices]) for tensor, one in written.items()]))

    def close(self) -> None:
        """Close the file."""
        self._notes.close()


def read_journal(staging: Staging) -> tuple[Undertaking, Mapping[int, TensorDigests]] | None:
    """What a journal is of, and what it claims to be done; None where there is none of this user's.

    Raises:
        OSError: there is one, and it cannot be read now.
    """
    text = staging.read_notes(JOURNAL_NAME)
    return None if text is None else parse_journal(text)


def parse_journal(text: bytes) -> tuple[Undertaking, Mapping[int, TensorDigests]] | None:
    """The same, of what the notes hold."""
    lines = text.split(b"\n")
    first = _parsed(lines[0])
    if not (len(first) == 2 and all(isinstance(item, str) for item in first)):
        return None
    claims = {}
    for line in lines[1:]:
        tensor, *digests = _parsed(line) or [None]
        if type(tensor) is int and len(digests) >= 2 and all(isinstance(item, str) for item in digests):
            claims[tensor] = TensorDigests(digests[0], tuple(digests[1:]))
    return Undertaking(first[0], first[1]), claims


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
