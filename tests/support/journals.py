"""Interrupts conversions, and reads what they say that they have done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest

from relayout.conversion.resume import JOURNAL_NAME, parse_journal


def claims_in(folder: Path) -> set[int]:
    """The tensors that the journal in a folder says are done; none where there is no journal."""
    notes = folder / JOURNAL_NAME
    found = parse_journal(notes.read_bytes()) if notes.is_file() else None
    return set() if found is None else set(found[1].tensors)


@contextmanager
def interrupted_before_the_end() -> Iterator[None]:
    """A conversion inside is stopped when all tensors are written, and the sidecar is not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("relayout.conversion.run.write_sidecar", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            yield
