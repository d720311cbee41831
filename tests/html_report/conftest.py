"""Fixtures of the report's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

import relayout


@pytest.fixture(scope="session")
def folder(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of four ranks, of several parts each."""
    out = tmp_path_factory.mktemp("report") / "llama-tp4"
    relayout.convert(llama, out, tp=4, max_part_nbytes="200KB")
    return out
