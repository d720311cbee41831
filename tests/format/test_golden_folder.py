"""The golden folder, which other implementations are tested with, is what relayout writes and reads.

Until the first release it is made again when the format changes (`tools/run vectors golden`). The first release freezes
it: from then on nobody makes it again, and these tests say that folders which were written before can be read.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import zstandard
from safetensors import safe_open
from support import golden
from support.models import as_integers

import relayout
from relayout.train.listing import list_steps

MAX_NBYTES = 80_000
DTYPES = {"torch.float16": "F16", "torch.float32": "F32", "torch.int8": "I8", "torch.uint8": "U8"}


def rows(tensors: dict[str, Any]) -> dict[str, Any]:
    """Loaded tensors, as golden.json has them."""
    return {
        name: golden.row(DTYPES[str(one.dtype)], list(one.shape), as_integers(one).tobytes())
        for name, one in tensors.items()
    }


def test_the_list_is_what_numpy_cuts_of_the_source() -> None:
    listed = golden.read_list()
    assert listed == golden.listed()
    with safe_open(golden.SOURCE / "model.safetensors", framework="np") as file:
        source = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    assert {
        name: golden.row(golden.DTYPES[one.dtype.name], list(one.shape), one.tobytes()) for name, one in source.items()
    } == listed["source"]
    shapes = {tuple(one["shape"]) for rank in listed["ranks"] for one in rank.values()}
    assert {(0, 8), (), (5,), (8, 8)} <= shapes


def test_it_is_small() -> None:
    assert 0 < sum(path.stat().st_size for path in golden.FOLDER.rglob("*") if path.is_file()) < MAX_NBYTES


@pytest.mark.parametrize("layout", golden.LAYOUTS)
def test_relayout_reads_it(layout: str) -> None:
    folder, listed = golden.FOLDER / layout, golden.read_list()
    assert relayout.verify(folder, source=golden.SOURCE).differences == []
    for rank, expected in enumerate(listed["ranks"]):
        assert rows(relayout.load(folder, rank)) == expected
        assert rows(relayout.load(folder, rank, verify=True)) == expected
    assert rows(relayout.load(folder, 0, tp=1, verify=True)) == listed["source"]


@pytest.mark.parametrize("rank", range(golden.NUM_RANKS))
def test_relayout_follows_its_steps(rank: int) -> None:
    listed = golden.read_list()["steps"]
    follower, steps = relayout.Follower(golden.STEPS, rank), relayout.Steps(golden.STEPS)
    assert [(entry.full is None, entry.delta is None) for entry in steps.entries()] == [
        (False, True),
        (True, False),
        (True, False),
    ]
    for step in (1, 2, 3, 1, 3):  # By a folder, by each delta, and by all.
        assert follower.update(step) == step
        assert rows(follower.tensors) == listed[str(step)][rank]
    chain = steps.chain(step=3)
    assert chain is not None
    assert chain.full is not None
    deltas = [golden.STEPS / name for name in chain.deltas]
    loaded = relayout.load(golden.STEPS / chain.full, rank, deltas=deltas, verify=True)
    assert rows(loaded) == listed["3"][rank]


def test_its_steps_lead_where_the_index_says() -> None:
    assert list_steps(golden.STEPS, check=True).differences == ()
    listed = golden.read_list()
    assert listed["steps"]["1"] == listed["ranks"]
    assert len({one["embed.weight"]["sha256"] for one, _ in listed["steps"].values()}) == golden.NUM_STEPS


@pytest.mark.parametrize("layout", golden.LAYOUTS)
def test_its_source_converted_again_gives_the_same_bytes(layout: str, tmp_path: Path) -> None:
    """But for what depends on the zstd library, and on the version of relayout."""
    source, stored = shutil.copytree(golden.SOURCE, tmp_path / "source"), golden.FOLDER / layout
    (source / "config.json").chmod(0o644)  # A checkout may have another.
    golden.convert(source, tmp_path / "out", layout)
    written = {path.name: path for path in (tmp_path / "out").iterdir()}
    assert written.keys() == {path.name for path in stored.iterdir()}
    for name, path in written.items():
        if name != "relayout.json":
            assert text(path) == text(stored / name), name
    assert without_stored_digests(tmp_path / "out") == without_stored_digests(stored)


def text(path: Path) -> bytes:
    """A file's bytes; of a table or record, what is in the frame."""
    blob = path.read_bytes()
    return zstandard.ZstdDecompressor().decompressobj().decompress(blob) if path.suffix == ".zst" else blob


def without_stored_digests(folder: Path) -> dict[str, Any]:
    """A manifest without the digests of compressed files, and without what they and the version of relayout decide."""
    manifest: dict[str, Any] = json.loads((folder / "relayout.json").read_text())
    del manifest["self_digest"], manifest["generator"], manifest["source"]["record_digest"]
    for entry in (*manifest["ranks"], manifest["whole"]):
        if entry is not None:
            del entry["table_digest"]
    return manifest
