"""`restore` gives back every file of the source, byte for byte."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.bits import flip
from support.conversions import OF_EACH_KIND, Conversions, grouped
from support.rebuilding import rebuild
from support.training import tree
from support.trees import content
from typer.testing import CliRunner

import relayout
from relayout.cli.app import app
from relayout.conversion import run as conversion
from relayout.errors import FormatError, PlanError


@pytest.mark.parametrize("name", grouped(OF_EACH_KIND))
def test_a_checkpoint_of_each_kind_comes_back(name: str, conversions: Conversions, tmp_path: Path) -> None:
    relayout.restore(conversions.at(name, conversions.largest(name)), tmp_path / "back")
    assert content(tmp_path / "back") == content(conversions.source(name))


def write_shard(path: Path, header: str, data: bytes) -> None:
    text = header.encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """Headers that no writer of ours would make, a link, and a nested side file with its mode.

    Headers have spaces in front, keys in another order than the data, extra fields, long metadata, sizes of nothing,
    and odd offsets; a link leads to a shard elsewhere.
    """
    repository = tmp_path / "models--odd"
    folder = repository / "snapshots" / "0"
    (folder / "sub").mkdir(parents=True)
    data = np.random.default_rng(0).bytes(700_003)
    entries = {
        "z": {"dtype": "U8", "shape": [3], "data_offsets": [700_000, 700_003]},
        "nothing": {"dtype": "F32", "shape": [0, 7], "data_offsets": [0, 0]},
        "a.weight": {"extra": [1, {}], "data_offsets": [0, 400_000], "shape": [200_000], "dtype": "BF16"},
        "scalar": {"dtype": "F32", "shape": [], "data_offsets": [400_000, 400_004]},
        "b": {"dtype": "I8", "shape": [299_996], "data_offsets": [400_004, 700_000]},
        "__metadata__": {"long": "ä" * 100_000, "format": "pt"},
    }
    write_shard(folder / "first.safetensors", "   \n" + json.dumps(entries, indent=1, ensure_ascii=True) + " \t ", data)
    (repository / "blobs").mkdir()
    save_file({"c": np.arange(1, 5001, dtype=np.int64)}, repository / "blobs" / "0abc")
    (repository / "blobs" / "0abc").chmod(0o644)
    (folder / "second.safetensors").symlink_to("../../blobs/0abc")
    names = {**dict.fromkeys(set(entries) - {"__metadata__"}, "first.safetensors"), "c": "second.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}, indent=7) + "\n\n")
    (folder / "config.json").write_text("{}")
    (folder / "sub" / "run.sh").write_text("#!/bin/sh\n")
    (folder / "sub" / "run.sh").chmod(0o750)
    return folder


@pytest.mark.parametrize("memory", [2 * 2**20, 2**28])
def test_odd_headers_links_modes_and_empty_tensors_come_back(odd: Path, tmp_path: Path, memory: int) -> None:
    relayout.convert(odd, tmp_path / "out")
    restored = relayout.restore(tmp_path / "out", tmp_path / "back", memory=memory)
    assert tree(tmp_path / "back") == tree(odd)
    assert not (tmp_path / "back" / "second.safetensors").is_symlink()
    assert (restored.num_files, restored.num_tensors) == (2, 6)


def test_a_single_file_comes_back(odd: Path, tmp_path: Path) -> None:
    relayout.convert(odd / "first.safetensors", tmp_path / "out")
    relayout.restore(tmp_path / "out", tmp_path / "back")
    names = ("first.safetensors", "config.json")  # And what it was planned by.
    assert content(tmp_path / "back") == {name: (odd / name).read_bytes() for name in names}


def test_expert_parallel_folders_of_several_parts_come_back(conversions: Conversions, tmp_path: Path) -> None:
    source = conversions.source("qwen3_moe")
    relayout.convert(source, tmp_path / "out", tp=4, expert_parallel=True, align=512, max_part_nbytes=100_000)
    assert (tmp_path / "out" / "model-rank-3-part-1.safetensors").exists()
    relayout.restore(tmp_path / "out", tmp_path / "back")
    assert content(tmp_path / "back") == content(source)


def test_a_large_interleaved_tensor_comes_back(tmp_path: Path) -> None:
    heads, head_dim, hidden = 8, 64, 512
    source = tmp_path / "model"
    source.mkdir()
    values = np.arange(3 * heads * head_dim * hidden, dtype=np.uint32).astype(np.uint16).reshape(-1, hidden)
    save_file({"h.0.self_attention.query_key_value.weight": values}, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"model_type": "bloom", "n_head": heads, "hidden_size": hidden}))
    relayout.convert(source, tmp_path / "out", tp=4, memory=2 * 2**20)
    relayout.restore(tmp_path / "out", tmp_path / "back", memory=2 * 2**20)
    assert content(tmp_path / "back") == content(source)
    assert relayout.verify(tmp_path / "out", source=source).ok


def test_the_command_restores_and_says_so(odd: Path, tmp_path: Path) -> None:
    relayout.convert(odd, tmp_path / "out")
    result = CliRunner().invoke(app, ["restore", str(tmp_path / "out"), "-o", str(tmp_path / "back")])
    assert result.exit_code == 0, result.output
    assert "every digest matches" in result.output
    assert tree(tmp_path / "back") == tree(odd)
    result = CliRunner().invoke(app, ["restore", str(tmp_path / "out"), "-o", str(tmp_path / "back")])
    assert result.exit_code == 2
    assert "is not empty: holds " in result.output
    assert "choose another output" in result.output


def test_a_damaged_folder_is_not_restored(odd: Path, tmp_path: Path) -> None:
    relayout.convert(odd, tmp_path / "out")
    flip(tmp_path / "out" / "model-rank-0-part-0.safetensors", -5)
    with pytest.raises(
        FormatError, match=r"out/model-rank-0-part-0\.safetensors: tensor '.*': bytes \d+ to \d+: the stored bytes are"
    ):
        relayout.restore(tmp_path / "out", tmp_path / "back")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["models--odd", "out"]


@pytest.mark.parametrize("layout", ["ranks", "whole"])
def test_the_damaged_file_is_named_with_its_rank(llama: Path, tmp_path: Path, layout: str) -> None:
    relayout.convert(llama, tmp_path / "out", tp=2, layout=layout)
    name = "model.layers.0.self_attn.o_proj.weight"
    for path in sorted((tmp_path / "out").glob("*.safetensors")):
        blob = path.read_bytes()
        start = 8 + int.from_bytes(blob[:8], "little")
        header = json.loads(blob[8:start])
        if name in header and "rank-0" not in path.name:
            begin, end = (start + offset for offset in header[name]["data_offsets"])
            break
    flip(path, begin + 5)
    whose = "" if layout == "whole" else " of rank 1"
    with pytest.raises(FormatError, match=rf"{path.name}: tensor '{name}': bytes {begin} to {end}{whose}: ") as caught:
        relayout.restore(tmp_path / "out", tmp_path / "back")
    assert (caught.value.code, caught.value.path, caught.value.offset) == ("digest", str(path), begin)
    assert not (tmp_path / "back").exists()


def test_a_shard_whose_tensor_was_left_out_is_not_restored_in_part(odd: Path, tmp_path: Path) -> None:
    """The index names a tensor in another file: the copy in this one was not converted."""
    save_file({"c": np.arange(9), "d": np.arange(5)}, odd / "third.safetensors")
    index = json.loads((odd / "model.safetensors.index.json").read_text())
    index["weight_map"]["d"] = "third.safetensors"
    (odd / "model.safetensors.index.json").write_text(json.dumps(index))
    relayout.convert(odd, tmp_path / "out")
    with pytest.raises(
        FormatError, match=r"third.safetensors: tensor 'c': was not converted, so the file cannot be restored"
    ):
        relayout.restore(tmp_path / "out", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_fifo_in_place_of_a_side_file_is_not_waited_for(odd: Path, tmp_path: Path) -> None:
    relayout.convert(odd, tmp_path / "out")
    (tmp_path / "out" / "config.json").unlink()
    os.mkfifo(tmp_path / "out" / "config.json")
    with pytest.raises(FormatError, match=r"config.json: not a regular file"):
        relayout.restore(tmp_path / "out", tmp_path / "back")


def test_nobody_gets_rights_that_the_umask_does_not_give(odd: Path, tmp_path: Path) -> None:
    """A record from a stranger could ask for files that everybody may write, or that run with their owner's rights."""
    relayout.convert(odd, tmp_path / "out")
    for first, second, results in ((0o777, 0o666, (0o755, 0o644)), (0o000, 0o444, (0o400, 0o444))):
        rebuild(tmp_path / "out", lambda record, modes=[first, second]: record["side_files"].update(mode=modes))
        back = tmp_path / f"back-{first:o}"
        previous = os.umask(0o022)
        try:
            relayout.restore(tmp_path / "out", back)
        finally:
            os.umask(previous)
        assert tuple((back / name).stat().st_mode & 0o7777 for name in ("config.json", "sub/run.sh")) == results


def test_an_interrupted_conversion_is_not_discarded_by_a_restoration(
    odd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    relayout.convert(odd, tmp_path / "out")

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "write_sidecar", interrupted)
        with pytest.raises(KeyboardInterrupt):
            relayout.convert(odd, tmp_path / "back")
    with pytest.raises(PlanError, match="holds an interrupted attempt, with other options"):
        relayout.restore(tmp_path / "out", tmp_path / "back")
    assert relayout.convert(odd, tmp_path / "back").resumed_nbytes == 700_003 + 5000 * 8
    assert not (tmp_path / ".back.relayout-partial").exists()
