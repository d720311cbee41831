"""Fixtures of the loader's tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.loader_fixtures import MIB, converted, mlp_model, model, way, wide
from support.remote import hub, server

import relayout

__all__ = ["converted", "hub", "model", "server", "way", "wide"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`source`, converted as `out`; `foreign` is a conversion of other bytes of the same shapes."""
    place = tmp_path_factory.mktemp("faulty")
    source = mlp_model(place / "source", num_layers=6)
    other = Path(shutil.copytree(source, place / "other"))
    blob = (other / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(blob[:8], "little")
    (other / "model.safetensors").write_bytes(blob[:start] + bytes(byte ^ 1 for byte in blob[start:]))
    relayout.convert(source, place / "out", tp=2, max_part_nbytes=MIB * 5 // 4)
    relayout.convert(other, place / "foreign", tp=2, max_part_nbytes=MIB * 5 // 4)
    return place
