"""A server with a converted checkpoint, for the tests of loads from stores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import s3_server
from support.loader_fixtures import assert_equal, whole_tensors
from support.s3_server import Server

from relayout.storage.cloud import connect

URL = "s3://models/out"
HEAD = 4 * 2**10
"""The first request of a rank's file."""
HEADER = 64 * 2**10
"""That of a file whose header is needed."""


@pytest.fixture
def server(converted: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server with a conversion for two ranks of several files each, and its source."""
    monkeypatch.setattr(connect, "RETRY_SECONDS", 1.0)
    with s3_server.running() as server:
        for name, value in s3_server.environment(server).items():
            monkeypatch.setenv(name, value)
        for folder, prefix in ((converted, "out"), (model, "model")):
            for file in folder.iterdir():
                server.put("models", f"{prefix}/{file.name}", file.read_bytes())
        server.checks_keys = True
        yield server


def files_of_rank(folder: Path, rank: int) -> dict[str, int]:
    """Length of each file, by its name."""
    found = {file.name: file.stat().st_size for file in folder.glob(f"model-rank-{rank}-*")}
    assert len(found) > 2
    return found


def expect(found: dict[str, torch.Tensor], folder: Path, rank: int = 1) -> None:
    assert_equal(found, whole_tensors(folder, f"model-rank-{rank}-*"))
