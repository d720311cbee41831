"""Fixtures of the tests of observed plans."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import fake_vllm_package

import relayout


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are started find a package called vllm."""
    fake_vllm_package.write(tmp_path / "packages")
    root = Path(relayout.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'packages'}:{root}")
