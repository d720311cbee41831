"""Interrupts conversions, and reads the records of what they have finished."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest

from relayout.conversion.resume import parse_notes
from relayout.publish.output import RECORD, Record


def finished_parts(place: Path) -> list[Path]:
    """The records of finished parts in a staging folder."""
    return sorted(place.glob(f"work-*/{RECORD}*"))


def claims_in(place: Path) -> set[int]:
    """The tensors that the records in a staging folder say are written."""
    records = [Record.parse(path.read_bytes()) for path in finished_parts(place)]
    notes = [parse_notes(record.notes) for record in records if record is not None]
    return {tensor for one in notes if one is not None for tensor in one[2].tensors}


@contextmanager
def interrupted_before_the_end() -> Iterator[None]:
    """A conversion inside is stopped when all tensors are written, and the sidecar is not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("relayout.conversion.run.write_sidecar", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            yield
