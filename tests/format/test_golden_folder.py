"""The golden folder, which other implementations are tested with, is what relayout writes and reads.

Until the first release it is made again when the format changes (`tools/run vectors golden`). The first release freezes
it: from then on nobody makes it again, and these tests say that folders which were written before can be read.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from safetensors import safe_open
from support import golden
from support.models import as_integers

import relayout
from relayout.train.listing import list_steps

MAX_NBYTES = 80_000
DTYPES = {f"torch.{name}": dtype for name, dtype in golden.DTYPES.items()}


MAX_TRAINED_NBYTES = 5_000_000
"""Its files have more than one chunk."""


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
    sizes = {path: path.stat().st_size for path in golden.FOLDER.rglob("*") if path.is_file()}
    trained = sum(nbytes for path, nbytes in sizes.items() if path.is_relative_to(golden.TRAINED))
    assert 0 < sum(sizes.values()) - trained < MAX_NBYTES
    assert 0 < trained < MAX_TRAINED_NBYTES


@pytest.mark.parametrize("layout", golden.LAYOUTS)
def test_relayout_reads_it(layout: str) -> None:
    folder, listed = golden.FOLDER / layout, golden.read_list()
    assert relayout.verify(folder, source=golden.SOURCE).differences == []
    for rank, expected in enumerate(listed["ranks"]):
        assert rows(relayout.load(folder, rank)) == expected
        assert rows(relayout.load(folder, rank, verify=True)) == expected
    assert rows(relayout.load(folder, 0, tp=1, verify=True)) == listed["source"]


@pytest.mark.parametrize("rank", range(golden.NUM_RANKS))
def test_relayout_reads_a_delta_in_the_layout_whole(rank: int) -> None:
    loaded = relayout.load(golden.FOLDER / "whole", rank, deltas=golden.WHOLE_DELTA)
    assert rows(loaded) == golden.read_list()["steps"]["2"][rank]


@pytest.mark.parametrize("rank", range(golden.NUM_RANKS))
@pytest.mark.parametrize("is_signed", [False, True])
def test_relayout_follows_the_root_of_a_training(rank: int, is_signed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_signed:
        pytest.importorskip("model_signing", reason="model-signing is not installed")
        monkeypatch.setenv("RELAYOUT_TRUST", str(golden.POLICY))
    listed, steps = golden.read_list()["trained"], relayout.Steps(golden.TRAINED)
    entries = steps.entries()
    assert [(one.step, one.full is not None, one.delta is not None) for one in entries] == [
        (4, True, False),
        (5, False, True),
        (6, False, True),
        (7, True, True),
        (8, False, True),
    ]
    assert list_steps(golden.TRAINED, check=True).differences == ()
    follower = relayout.Follower(golden.TRAINED, rank)
    for step in (*golden.KEPT_STEPS, 4, 8):
        assert follower.update(step) == (None if step == 6 else step)  # Step 6 is as step 5.
        assert follower.step == step
        assert rows(follower.tensors) == listed[str(step)][rank]
    assert entries[0].full is not None
    way = [golden.TRAINED / one.delta.name for one in entries[1:] if one.delta is not None]
    for count in range(len(way) + 1):
        loaded = relayout.load(golden.TRAINED / entries[0].full.name, rank, deltas=way[:count])
        assert rows(loaded) == listed[str(4 + count)][rank]


def test_the_root_of_a_training_has_what_readers_may_miss() -> None:
    top = json.loads((golden.TRAINED / "steps.json").read_text())
    assert [name for name in top["pending"] if not (golden.TRAINED / name).exists()]
    assert [one["name"] for one in top["retired"] if not (golden.TRAINED / one["name"]).exists()]
    deltas = {
        one["step"]: json.loads((golden.TRAINED / one["delta"]["name"] / "relayout.json").read_text())
        for one in top["steps"]
        if one["delta"] is not None
    }
    assert set(deltas[5]["others"]) == {"config.json", "relayout.source.json.zst"}
    assert (deltas[6]["files"], [one["count"] for one in deltas[6]["digests"]]) == ([], [0, 0, 0])
    assert [one["file"] for one in deltas[7]["files"]] == [1]
    assert any(one["num_pieces"] < 3 for one in deltas[8]["files"])
    heads = [
        np.frombuffer(path.read_bytes(), "<u4", 5)
        for one in top["steps"]
        if one["delta"] is not None
        for path in (golden.TRAINED / one["delta"]["name"]).glob("*.delta")
        if path.name != "relayout.digests.delta"
    ]
    assert {int(head[2]) for head in heads} == {1}, "each begins with its header"
    assert {(int(head[3]) > 0, int(head[4]) > 0) for head in heads} == {(True, True)}


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
