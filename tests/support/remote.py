"""A server with a converted checkpoint, for the tests of loads from stores."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from support import hub_server, s3_server
from support.hub_server import Hub
from support.loader_fixtures import assert_equal, whole_tensors
from support.s3_server import Server

from relayout.storage.cloud import connect

URL = "s3://models/out"
HEAD = 4 * 2**10
"""The first request of a rank's file."""
HEADER = 64 * 2**10
"""That of a file whose header is needed."""


@cache
def _files(folder: Path) -> dict[str, bytes]:
    """The files of a folder that no test changes."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def server(converted: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server with a conversion for two ranks of several files each, and its source."""
    monkeypatch.setattr(connect, "RETRY_SECONDS", 1.0)
    with s3_server.running() as server:
        for name, value in s3_server.environment(server).items():
            monkeypatch.setenv(name, value)
        for folder, prefix in ((converted, "out"), (model, "model")):
            for name, content in _files(folder).items():
                server.put("models", f"{prefix}/{name}", content)
        server.checks_keys = True
        yield server


@pytest.fixture
def hub(converted: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with a converted repository, org/out, and its source, org/model; nothing of them is on this machine."""
    monkeypatch.setattr(connect, "RETRY_SECONDS", 0.0)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with hub_server.running() as hub:
        hub_server.point_to(hub.hub.url, monkeypatch, tmp_path)
        for folder, repo in ((converted, "org/out"), (model, "org/model")):
            hub.repos[repo] = dict(_files(folder))
        yield hub


def files_of_rank(folder: Path, rank: int) -> dict[str, int]:
    """Length of each file, by its name."""
    found = {file.name: file.stat().st_size for file in folder.glob(f"model-rank-{rank}-*")}
    assert len(found) > 2
    return found


def expect(found: dict[str, torch.Tensor], folder: Path, rank: int = 1) -> None:
    assert_equal(found, whole_tensors(folder, f"model-rank-{rank}-*"))
