"""Folders that PyTorch's distributed checkpoints (DCP) wrote convert as an export by the stock safetensors does."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load, save_file
from support import prestarted
from support.checkpoints import write
from support.models import llama_files
from support.toy_store import shelf
from support.trees import content

import relayout
from relayout.checkpoint.source import read_source
from relayout.errors import FormatError, PlanError
from relayout.storage.stores import find_store

SCRIPT = "from support.dcp_worker import main; main()"
UNEVEN = {
    "model.norm.weight": torch.arange(7.0),
    "wide": torch.arange(7 * 5, dtype=torch.int64).reshape(7, 5),
    "few": torch.arange(3, dtype=torch.bfloat16).reshape(1, 3),  # Fewer rows than processes: some have none.
    "bytes": torch.arange(6 * 9, dtype=torch.uint8).reshape(6, 9),
    "cube": torch.arange(5 * 6 * 3, dtype=torch.float16).reshape(5, 6, 3),
    "scalar": torch.tensor(3.5),
    "none": torch.empty(0, 4),
}


def saved(folder: Path, state: dict[str, Any]) -> Path:
    """Save a state by DCP, in this process alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder)
    return folder


def exported(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.xdist_group("group")
def test_shards_of_four_processes_convert_as_their_export_does(tmp_path: Path) -> None:
    files = llama_files(64, 8, 96, 2, 128)
    model = {name: one for blob in files.values() if blob[:1] != b"{" for name, one in load(blob).items()} | UNEVEN
    plain = write(tmp_path / "plain", model, json.loads(files["config.json"]))
    done = prestarted.run(tmp_path, script=SCRIPT, imports=prestarted.GROUP, env=prestarted.ONE_THREAD)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 4
    shutil.copy(plain / "config.json", tmp_path / "dcp")
    for tp in (1, 4):
        options: dict[str, Any] = {"tp": tp, "unmatched": "replicate", "memory": "4MiB"}
        relayout.convert(tmp_path / "dcp", tmp_path / f"dcp-{tp}", **options)
        relayout.convert(plain, tmp_path / f"plain-{tp}", **options)
        assert content(tmp_path / f"dcp-{tp}") == content(tmp_path / f"plain-{tp}")
    assert relayout.verify(tmp_path / "dcp-4", source=tmp_path / "dcp").ok
    loaded = relayout.load(tmp_path / "dcp", 0, tp=1)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.items())
    left_out = read_source(find_store(tmp_path / "dcp")).left_out
    assert left_out == ("optimizer: 1 entries that are not of the model", "step: 1 entries that are not of the model")
    # The same processes saved the model as safetensors. A shard alone must not be taken for a model.
    for folder in (tmp_path / "shards", tmp_path / "consolidated" / "sharded"):
        shards = sorted(folder.glob("*.safetensors"))
        assert len(shards) == 4
        refused(folder, PlanError, "a part of a tensor, saved by PyTorch's HuggingFaceStorageWriter: consolidate")
        refused(shards[-1], PlanError, "consolidate the folder first")
    shutil.copy(plain / "config.json", tmp_path / "consolidated")
    whole = relayout.load(tmp_path / "consolidated", 0, tp=1)
    assert len(whole) > 9
    assert all(torch.equal(tensor, model[name]) for name, tensor in whole.items())


@pytest.mark.parametrize("keys", [(), ("model",), ("app", "model"), ("model_state_dict",)])
def test_the_model_is_found_below_the_keys_of_trainers(keys: tuple[str, ...], tmp_path: Path) -> None:
    tensors = {"x": torch.arange(5.0), "model.y": torch.arange(4).to(torch.float8_e4m3fn)}
    state: dict[str, Any] = tensors
    for key in reversed(keys):
        state = {key: state, "optim": {"x": torch.ones(2)}}
    folder = saved(tmp_path / "dcp", state)
    relayout.convert(folder, tmp_path / "a", tp=1)
    relayout.convert(exported(tmp_path / "plain", tensors), tmp_path / "b", tp=1)
    assert content(tmp_path / "a") == content(tmp_path / "b")


def test_a_file_with_one_tensor_each_is_read(tmp_path: Path) -> None:
    writer = dcp.FileSystemWriter(tmp_path / "dcp", single_file_per_rank=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({**UNEVEN}, storage_writer=writer)
    relayout.convert(tmp_path / "dcp", tmp_path / "a", tp=1)
    relayout.convert(exported(tmp_path / "plain", UNEVEN), tmp_path / "b", tp=1)
    assert content(tmp_path / "a") == content(tmp_path / "b")


def test_shards_above_the_usual_size_have_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relayout.checkpoint.dcp_folder.DEFAULT_SHARD_NBYTES", 100)
    folder = saved(tmp_path / "dcp", {"model": UNEVEN})
    source = read_source(find_store(folder))
    assert len(source.files) > 2
    relayout.convert(folder, tmp_path / "a", tp=1)
    stored = relayout.load(tmp_path / "a", 0)
    assert stored.keys() == UNEVEN.keys()
    assert all(torch.equal(stored[name], one) for name, one in UNEVEN.items())


def test_a_folder_that_changed_is_noticed(tmp_path: Path) -> None:
    folder = saved(tmp_path / "dcp", {"x": torch.arange(5000.0)})
    source = read_source(find_store(folder))
    [file] = source.files
    data = folder / "__0_0.distcp"
    data.write_bytes(data.read_bytes() + b"\0")
    with pytest.raises(FormatError, match="has changed"):
        source.folder.open(file.name, file.nbytes, version=file.version)


@pytest.mark.usefixtures("toy_store")
def test_a_folder_in_a_store_converts_as_a_local_one_does(tmp_path: Path) -> None:
    folder, there = saved(tmp_path / "dcp", {"model": UNEVEN}), shelf(tmp_path.name)
    there.clear()
    for path in folder.iterdir():
        there.objects[f"dcp/{path.name}"] = path.read_bytes(), "1"
    relayout.convert(f"toy://{tmp_path.name}/dcp", tmp_path / "a", tp=1)
    relayout.convert(folder, tmp_path / "b", tp=1)
    assert content(tmp_path / "a") == content(tmp_path / "b")


def test_an_interrupted_conversion_is_resumed(tmp_path: Path) -> None:
    tensors = {f"model.{number}": torch.arange(60_000.0) + number for number in range(4)}
    folder = saved(tmp_path / "dcp", tensors)
    options: dict[str, Any] = {"tp": 1, "max_part_nbytes": 250_000}

    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        relayout.convert(folder, tmp_path / "a", progress=stop, **options)
    assert relayout.convert(folder, tmp_path / "a", **options).resumed_nbytes > 0
    relayout.convert(exported(tmp_path / "plain", tensors), tmp_path / "b", **options)
    assert content(tmp_path / "a") == content(tmp_path / "b")


def refused(folder: Path, kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        relayout.convert(folder, folder.with_name("out"), tp=1)
    assert not folder.with_name("out").exists()


def test_folders_that_are_not_complete_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "dcp", {"x": torch.arange(5000.0)})
    data = folder / "__0_0.distcp"
    whole = data.read_bytes()
    data.write_bytes(whole[:-1])
    refused(folder, FormatError, "bytes long, but .metadata has .* interrupted")
    data.write_bytes(whole[:-30] + b"\0" * 30)
    refused(folder, FormatError, "not an archive of torch.save")
    data.rename(folder / "other.distcp")
    refused(folder, FormatError, "__0_0.distcp: is missing, but .metadata names it")
    (folder / ".metadata").rename(folder / "__0.metadata")
    refused(folder, FormatError, "use_collectives")
    (folder / "__0.metadata").unlink()
    refused(folder, FormatError, "is missing next to .distcp files")


def test_a_box_of_another_dtype_than_its_tensor_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "dcp", {"x": torch.arange(5.0)})
    other = saved(tmp_path / "other", {"x": torch.arange(5, dtype=torch.int32)})
    shutil.copy(other / "__0_0.distcp", folder)
    # The lengths are equal: only the storage's type is another.
    refused(folder, FormatError, r"I32 \[5\], expected F32 \[5\], as .metadata has it")


def test_what_cannot_be_converted_says_why(tmp_path: Path) -> None:
    refused(saved(tmp_path / "a", {"x": torch.arange(6.0).reshape(2, 3).t()}), PlanError, r"call .contiguous\(\)")
    refused(saved(tmp_path / "b", {"x": torch.ones(2, dtype=torch.complex128)}), PlanError, "torch.complex128")
    refused(saved(tmp_path / "c", {"optim": {"x": torch.ones(2)}}), PlanError, "only under 'optim'; expected")
    names = {"decoder.layers.self_attention.linear_qkv.weight": torch.ones(2)}
    refused(saved(tmp_path / "d", names), PlanError, "Megatron Core: missing are the hub's, such as")
    two = {"model": {"x": torch.ones(2)}, "ema": {"model": {"x": torch.ones(2)}}}
    refused(saved(tmp_path / "e", two), PlanError, r"several models \(model, ema.model\)")


def test_a_folder_above_one_names_it(tmp_path: Path) -> None:
    saved(tmp_path / "run" / "step-10", {"x": torch.ones(2)})
    refused(tmp_path / "run", PlanError, "name one of its subfolders: step-10")


def test_distributed_checkpoints_beside_a_model_do_not_go_along(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain", {"x": torch.arange(4.0)}, {})
    saved(plain / "optimizer_0", {"x": torch.ones(2)})
    relayout.convert(plain, tmp_path / "out", tp=1)
    assert not (tmp_path / "out" / "optimizer_0").exists()
