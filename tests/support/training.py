"""Checkpoints of the steps of a training, which are alike but for some elements anywhere, and deltas between them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relayout


def next_step(source: Path, folder: Path, step: int, share: float = 0.05) -> Path:
    """A copy of a checkpoint, of which a share of all bytes have other low bits. config.json has the step."""
    shutil.copytree(source, folder)
    random = np.random.default_rng(step)
    for path in sorted(folder.glob("*.safetensors")):
        blob = np.frombuffer(path.read_bytes(), np.uint8).copy()
        data = blob[8 + int.from_bytes(blob[:8].tobytes(), "little") :]
        chosen = random.random(data.nbytes) < share
        data[chosen] ^= random.integers(1, 4, int(chosen.sum()), np.uint8)
        path.write_bytes(blob.tobytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"step": step}))
    return folder


def tree(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Bytes and permission bits of every file below a folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    assert paths
    return {path.relative_to(folder).as_posix(): (path.read_bytes(), path.stat().st_mode & 0o777) for path in paths}


def convert(source: Path, out: Path, **options: Any) -> Path:
    relayout.convert(source, out, threads=1, **{"tp": 2, **options})
    return out


@pytest.fixture(scope="session")
def steps(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three converted steps, 0 to 2, and the deltas between them."""
    folder = tmp_path_factory.mktemp("steps")
    for step in range(3):
        source = next_step(folder / f"source-{step - 1}" if step else llama, folder / f"source-{step}", step)
        convert(source, folder / f"{step}", align=512)
    for step in range(2):
        relayout.delta(folder / f"{step}", folder / f"{step + 1}", folder / f"{step}-to-{step + 1}")
    return folder
