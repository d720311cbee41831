"""What weight files depend on: the weights in them and how they are cut, and nothing else of the source."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard
from blake3 import blake3
from safetensors.numpy import load_file, save_file

import relayout

RULES = '[cut]\n"**.up" = {dim = 0, by = "even"}\n"**.down" = {dim = 1, by = "even"}\n"**" = "whole"\n'


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Six layers in two shards; with parts of 20 kB, two layers are a unit."""
    folder = tmp_path / "model"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for shard in range(2):
        tensors = {
            f"layers.{layer}.{name}": rng.integers(0, 256, (64, 128), dtype=np.uint8)
            for layer in range(3 * shard, 3 * shard + 3)
            for name in ("up", "down")
        }
        save_file(tensors, folder / f"model-{shard}.safetensors", {"format": "pt"})
    (folder / "config.json").write_text("{}")
    (tmp_path / "rules.toml").write_text(RULES)
    return folder


def weights(folder: Path, plan: Path, tp: int = 2, layout: str = "ranks") -> dict[str, str]:
    """The digest of each weight file of a conversion."""
    out = folder.parent / "out"
    relayout.convert(folder, out, tp=tp, plan=plan, max_part_nbytes=20_000, layout=layout, force=True)
    assert relayout.verify(out, source=folder).ok
    paths = (path for path in sorted(out.iterdir()) if path.suffix in (".safetensors", ".slices"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def add_readme(folder: Path) -> None:
    (folder / "README.md").write_text("words")


def change_modes_and_times(folder: Path) -> None:
    for path in folder.iterdir():
        path.chmod(0o600)
        os.utime(path, (1, 1))


def add_index(folder: Path) -> None:
    names = {name: path.name for path in folder.glob("*.safetensors") for name in load_file(path)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}, indent=7))


def one_shard(folder: Path) -> None:
    paths = sorted(folder.glob("*.safetensors"))
    tensors = {name: array for path in paths for name, array in load_file(path).items()}
    for path in paths:
        path.unlink()
    save_file(dict(reversed(tensors.items())), folder / "all.safetensors", {"format": "pt"})


def another_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"chat_template": "new"}')


@pytest.mark.parametrize(
    ("change", "layout"),
    [
        (add_readme, "ranks"),
        (change_modes_and_times, "whole"),
        (add_index, "ranks"),
        (one_shard, "ranks"),
        (one_shard, "whole"),
        (another_config, "whole"),
    ],
)
def test_weight_files_do_not_change_with_what_is_no_weight(
    source: Path, tmp_path: Path, change: Callable[[Path], None], layout: str
) -> None:
    before = weights(source, tmp_path / "rules.toml", layout=layout)
    name = json.loads((tmp_path / "out" / "relayout.json").read_text())["conversion"]
    change(source)
    assert weights(source, tmp_path / "rules.toml", layout=layout) == before
    assert json.loads((tmp_path / "out" / "relayout.json").read_text())["conversion"] == name


def test_weight_files_do_not_change_with_the_name_of_the_plan(source: Path, tmp_path: Path) -> None:
    before = weights(source, tmp_path / "rules.toml")
    assert weights(source, shutil.copy(tmp_path / "rules.toml", tmp_path / "other.toml")) == before


def test_the_files_of_units_that_did_not_change_are_the_same(source: Path, tmp_path: Path) -> None:
    before = weights(source, tmp_path / "rules.toml")
    assert len(before) == 6
    shard = source / "model-1.safetensors"
    tensors = load_file(shard)
    tensors["layers.5.up"][40, 7] ^= 1  # A row of rank 1's.
    save_file(tensors, shard, {"format": "pt"})
    after = weights(source, tmp_path / "rules.toml")
    assert {name for name in before if before[name] != after[name]} == {"model-rank-1-part-2.safetensors"}


def test_files_that_hold_the_same_are_the_same(source: Path, tmp_path: Path) -> None:
    """Of ranks that hold the same, too: the name is no part of a file."""
    (tmp_path / "rules.toml").write_text('[cut]\n"**" = "whole"\n')
    found = weights(source, tmp_path / "rules.toml")
    for part in range(3):
        assert found[f"model-rank-0-part-{part}.safetensors"] == found[f"model-rank-1-part-{part}.safetensors"]


def test_all_that_is_stored_hangs_on_the_manifest(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    relayout.convert(source, out, tp=2, plan=tmp_path / "rules.toml", max_part_nbytes=20_000)
    top = json.loads((out / "relayout.json").read_text())

    def proof(blob: bytes) -> str:
        return blake3(blob).hexdigest()

    stored = {path.name: path.read_bytes() for path in out.iterdir()}
    manifest = stored["relayout.json"]
    assert top["self_digest"] == proof(manifest[: manifest.rindex(b'"self_digest"')])
    assert top["source"]["record_digest"] == proof(stored["relayout.source.json.zst"])
    assert [rank["table_digest"] for rank in top["ranks"]] == [proof(stored[rank["table"]]) for rank in top["ranks"]]
    record = json.loads(zstandard.ZstdDecompressor().decompressobj().decompress(stored["relayout.source.json.zst"]))
    sides = record["side_files"]
    assert sides["digest"] == [proof(stored[name]) for name in sides["name"]] != []
    chunks = b""
    for file in top["files"]:
        blob, start = stored[file["name"]], file["data_start"]
        pieces = [blob[at : at + top["chunk_nbytes"]] for at in range(start, len(blob), top["chunk_nbytes"])]
        chunks += (part := b"".join(blake3(piece).digest() for piece in pieces))
        assert (file["header_digest"], file["chunks_digest"]) == (proof(blob[:start]), proof(part))
    assert stored["relayout.chunks"] == chunks != b""
    assert relayout.verify(out, source=source).ok
