"""Reads what an interrupted conversion says that it has done."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from relayout.conversion import journal
from relayout.conversion.journal import TensorDigests, Undertaking
from relayout.storage.open_folder import OpenFolder


def read_journal(folder: Path) -> tuple[Undertaking, Mapping[int, TensorDigests]] | None:
    """What the journal in a folder is of, and what it claims to be done; None where there is none."""
    if not folder.is_dir():
        return None
    with OpenFolder(folder) as opened:
        return journal.read_journal(opened)
