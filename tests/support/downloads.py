"""A small model as the library of the hub downloads it, from an imitation of the hub, and damage to its files."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from support import hub_server
from support.models import llama_files

REPO = "org/model"
SHARD = "model-00002-of-00002.safetensors"


@dataclass(frozen=True, slots=True)
class Downloads:
    """Places of one model on this machine."""

    snapshot: Path
    """In the cache of the hub."""
    local: Path
    """By `hf download --local-dir`."""


def download(folder: Path) -> Downloads:
    """Download a model twice, by the library of the hub."""
    from huggingface_hub import hf_hub_download

    with hub_server.running() as hub, pytest.MonkeyPatch.context() as patch:
        hub_server.point_to(hub.hub.url, patch, folder)
        hub.repos[REPO] = llama_files(64, 8, 96, 2, 80)
        commit = hub.commit(REPO)
        paths = [Path(hf_hub_download(REPO, name, revision=commit)) for name in hub.repos[REPO]]
        for name in hub.repos[REPO]:
            hf_hub_download(REPO, name, revision=commit, local_dir=folder / "local")
    return Downloads(paths[0].parent, folder / "local")


@cache
def _downloaded() -> tuple[TemporaryDirectory[str], Downloads]:
    """What `download` makes, once for each process of tests."""
    folder = TemporaryDirectory(prefix="downloads-")
    return folder, download(Path(folder.name))


@pytest.fixture
def downloads(tmp_path: Path) -> Downloads:
    """A model in the cache of the hub and in a folder of its own, with the times of their files."""
    pytest.importorskip("huggingface_hub", reason="the hub's own library")
    folder, made = _downloaded()
    shutil.copytree(folder.name, tmp_path / "downloads", symlinks=True)
    return Downloads(*(tmp_path / "downloads" / path.relative_to(folder.name) for path in (made.snapshot, made.local)))


def rot(path: Path, offset: int = -1000) -> None:
    """Flip one bit of a file, as a drive does: its times stay."""
    before = path.stat()
    blob = bytearray(path.read_bytes())
    blob[offset] ^= 4
    path.write_bytes(blob)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
