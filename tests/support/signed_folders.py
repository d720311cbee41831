"""A signed folder, and changes to copies of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from support.models import llama_files
from support.signing import Keys, make_keys
from support.toy_store import shelf
from xxhash import xxh3_128

import relayout

NUM_RANKS = 2


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return make_keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "llama"
    folder.mkdir()
    for name, blob in llama_files(64, 8, 96, 2, 80).items():
        (folder / name).write_bytes(blob)
    (folder / "tokenizer.json").write_text('{"model": "words"}')
    return folder


def make_signed(source: Path, folder: Path, keys: Keys, **options: Any) -> Path:
    relayout.convert(source, folder, tp=NUM_RANKS, max_part_nbytes=60_000, **options)
    relayout.sign(folder, key=keys.key)
    return folder


@pytest.fixture(scope="session")
def signed(source: Path, keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_signed(source, tmp_path_factory.mktemp("signed") / "model", keys)


@pytest.fixture
def copy_of(signed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(signed, tmp_path / "model"))


def edit(folder: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    path = folder / name
    before = path.read_bytes()
    path.write_bytes(change(before))
    assert path.read_bytes() != before


def flip(where: float) -> Callable[[bytes], bytes]:
    def flipped(blob: bytes) -> bytes:
        at = min(int(len(blob) * where), len(blob) - 1)
        return blob[:at] + bytes([blob[at] ^ 4]) + blob[at + 1 :]

    return flipped


def sealed(top: dict[str, Any]) -> bytes:
    """A manifest whose own digest is right: somebody who forges it computes that, too."""
    text = json.dumps({**top, "self_digest": ""}).encode()
    text = text[: text.rindex(b'"self_digest"')]
    return text + b'"self_digest": "' + blake3(text).hexdigest().encode() + b'"}'


def by_other_digests(folder: Path) -> None:
    """Put digests that anybody can forge in place of all proofs: XXH3-128."""
    top, chunks = json.loads((folder / "relayout.json").read_bytes()), b""
    for file in top["files"]:
        blob, start = (folder / file["name"]).read_bytes(), file["data_start"]
        pieces = range(start, len(blob), top["chunk_nbytes"])
        part = b"".join(xxh3_128(blob[at : at + top["chunk_nbytes"]]).digest() for at in pieces)
        file |= {"header_digest": xxh3_128(blob[:start]).hexdigest(), "chunks_digest": xxh3_128(part).hexdigest()}
        chunks += part
    digests = (folder / "relayout.digests").read_bytes()
    for rank in top["ranks"]:
        count = 16 * rank["num_tensors"]
        rank["digests_digest"] = xxh3_128(digests[:count]).hexdigest()
        digests = digests[count:]
        rank["table_digest"] = xxh3_128((folder / rank["table"]).read_bytes()).hexdigest()
    top["source"]["digests_digest"] = xxh3_128(digests).hexdigest()
    top["source"]["record_digest"] = xxh3_128((folder / "relayout.source.json.zst").read_bytes()).hexdigest()
    top["hub_index_digest"] = xxh3_128((folder / "model.safetensors.index.json").read_bytes()).hexdigest()
    (folder / "relayout.chunks").write_bytes(chunks)
    (folder / "relayout.json").write_bytes(sealed({**top, "digest": "xxh3_128"}))


FILES = [
    "config.json",
    "tokenizer.json",
    "model.safetensors.index.json",
    *(f"model-rank-{rank}-part-{part}.safetensors" for rank in range(NUM_RANKS) for part in range(2)),
    "relayout.chunks",
    "relayout.digests",
    "relayout.json",
    "relayout.rank-0.json.zst",
    "relayout.rank-1.json.zst",
    "relayout.source.json.zst",
]


def in_store(folder: Path, name: str) -> str:
    objects = shelf(name)
    for path in folder.iterdir():
        objects.put(f"model/{path.name}", path.read_bytes())
    return f"toy://{name}/model"
