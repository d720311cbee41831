"""Checkpoints that engines load."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.checkpoints import write_family
from support.families import FAMILIES

import relayout


@pytest.fixture(scope="session")
def folders(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama as llama, and converted for 1, 2 and 4 ranks; a qwen3_moe as moe, cut and with owned experts."""
    root = tmp_path_factory.mktemp("engines")
    shutil.copytree(llama, root / "llama")
    (root / "moe").mkdir()
    write_family(FAMILIES["qwen3_moe"], root / "moe")
    for tp in (1, 2, 4):
        relayout.convert(root / "llama", root / f"llama-tp{tp}", tp=tp)
    relayout.convert(root / "moe", root / "moe-tp2", tp=2)
    relayout.convert(root / "moe", root / "moe-ep2", tp=2, expert_parallel=True)
    return root
