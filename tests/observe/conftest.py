"""Fixtures of the tests of observed plans."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import fake_sglang_package, fake_vllm_package

import relayout


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are started find a package called vllm."""
    fake_vllm_package.write(tmp_path / "packages")
    _find_packages(tmp_path / "packages", monkeypatch)


@pytest.fixture
def sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are started find a package called sglang."""
    fake_sglang_package.write(tmp_path / "packages")
    _find_packages(tmp_path / "packages", monkeypatch)


def _find_packages(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{Path(relayout.__file__).parents[1]}")
