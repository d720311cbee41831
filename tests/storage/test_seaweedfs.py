"""A smoke test on a real S3 server; tests/integration runs whole suites on it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save
from support import seaweedfs

import relayout

pytest.importorskip("obstore", reason="the client of object stores")
pytest.importorskip("boto3", reason="sends parts of uploads")


@pytest.mark.skipif(seaweedfs.absence() is not None, reason=f"{seaweedfs.absence()}")
def test_a_checkpoint_is_converted_loaded_and_restored_within_a_real_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(1)
    tensors = {f"w{n}": random.standard_normal((1500, 512), np.float32) for n in range(6)}
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "model.safetensors").write_bytes(save(tensors))
    (tmp_path / "plain" / "config.json").write_text(json.dumps({"model_type": "x"}))
    with seaweedfs.running(tmp_path / "server") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        server.make_bucket("models")
        done = relayout.convert(tmp_path / "plain", "s3://models/plain-tp1", max_part_nbytes="4MB")
        assert done.num_files > 1
        assert relayout.verify("s3://models/plain-tp1", source=tmp_path / "plain").ok
        loaded = relayout.load("s3://models/plain-tp1", 0, verify=True)
        assert {name: tensor.numpy().tobytes() for name, tensor in loaded.items()} == {
            name: array.tobytes() for name, array in tensors.items()
        }
        relayout.restore("s3://models/plain-tp1", tmp_path / "back")
        assert load_file(tmp_path / "back" / "model.safetensors").keys() == tensors.keys()
        before = server.sent_nbytes("models")
        relayout.load("s3://models/plain-tp1", 0)
        assert server.sent_nbytes("models") - before < 1.05 * sum(array.nbytes for array in tensors.values())
