"""What documents take from the code is what the code says now."""

from __future__ import annotations

import documents
import pytest


@pytest.mark.parametrize("name", documents.PARTS)
def test_what_documents_take_from_the_program_is_up_to_date(name: str) -> None:
    path, make = documents.PARTS[name]
    assert make().count("\n") > 3
    is_same = documents.written(name) == path.read_text()
    assert is_same, f"{path.name} is not what the code says: run `tools/run documents`"
