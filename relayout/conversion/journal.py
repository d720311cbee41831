"""The journal of a conversion: which tensors are done, so that the same command can go on after an interruption.

A file of lines, each with a digest of itself in front, appended as tensors are completed. A line that a dying process
or machine left torn is not one. What a line claims of slices is not believed either: whoever goes on reads the
written bytes again and compares their digests (`resumption`), so that nothing need be forced to the drive before it is
claimed. The digest of the source tensor is taken from the line.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import xxhash

from relayout.errors import FormatError
from relayout.format.safetensors import json_text
from relayout.storage.files import naming
from relayout.storage.open_folder import OpenFolder

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


class Journal:
    """Appends to a journal. Lines may be added by several threads."""

    def __init__(self, folder: OpenFolder, undertaking: Undertaking, *, append: bool) -> None:
        """Go on with the journal in a folder, or begin a new one in place of what may be there."""
        self._lock = threading.Lock()
        self._path = folder.path / JOURNAL_NAME
        if append:
            self._fd = folder.open_own(JOURNAL_NAME, os.O_WRONLY | os.O_APPEND)
        else:
            folder.remove(JOURNAL_NAME)
            self._fd = folder.open(JOURNAL_NAME, os.O_WRONLY | os.O_CREAT, 0o600)
        # Behind a torn line, too, a new one starts.
        self._write(b"\n" if append else _line([undertaking.source, undertaking.options]))

    def add(self, tensor: int, digests: TensorDigests) -> None:
        """Note that a tensor (position in the catalogue) is written."""
        self._write(_line([tensor, digests.source, *digests.slices]))

    def _write(self, line: bytes) -> None:
        with self._lock, naming(self._path):
            while line:
                line = line[os.write(self._fd, line) :]

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_journal(folder: OpenFolder) -> tuple[Undertaking, Mapping[int, TensorDigests]] | None:
    """What a journal is of, and what it claims to be done; None where there is none of the folder's owner.

    Raises:
        OSError: there is one, and it cannot be read now.
    """
    try:
        fd = folder.open_own(JOURNAL_NAME, os.O_RDONLY)
    except (FileNotFoundError, FormatError):
        return None
    with naming(folder.path / JOURNAL_NAME), open(fd, "rb") as file:
        lines = file.read().split(b"\n")
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
