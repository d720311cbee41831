"""Fixtures of the tests of observed plans."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.fake_engine_packages import write_package

import relayout


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are started find a package called vllm."""
    write_package("vllm", tmp_path / "packages")
    _find_packages(tmp_path / "packages", monkeypatch)


@pytest.fixture
def sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are started find a package called sglang."""
    write_package("sglang", tmp_path / "packages")
    _find_packages(tmp_path / "packages", monkeypatch)


def _find_packages(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{Path(relayout.__file__).parents[1]}")
