"""Reads what an interrupted conversion says that it has done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from relayout.conversion import journal
from relayout.conversion.journal import Fingerprint, TensorDigests
from relayout.storage.local.open_folder import OpenFolder
from relayout.storage.local.staging import LocalNotes, read_notes


def read_journal(folder: Path) -> tuple[Fingerprint, Mapping[int, TensorDigests]] | None:
    """What the journal in a folder is of, and the tensors that it claims to be done; None where there is none."""
    if not folder.is_dir():
        return None
    with OpenFolder(folder) as opened:
        text = read_notes(opened, journal.JOURNAL_NAME)
    found = None if text is None else journal.parse_journal(text)
    return None if found is None else (found[0], found[1].tensors)


@dataclass(frozen=True)
class NotesIn:
    """A folder of notes, as far as a `Staging` is that."""

    folder: OpenFolder

    def open_notes(self, name: str, header: bytes | None) -> LocalNotes:
        return LocalNotes(self.folder, name, header)
