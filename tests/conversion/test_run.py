"""Conversions of checkpoints that transformers wrote, read back by stock packages."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file
from support.conversions import reference_tensors
from support.models import as_integers, expected_slice, read_tensors
from support.profile import sample

import relayout
import relayout.publish.folder as publishing
from relayout.conversion.jobs import commit_units, run_job, unit_jobs
from relayout.errors import PlanError

MODELS = ["llama", "qwen2", "mistral"]
ONE_PART, SEVERAL_PARTS = 10**9, 50_000


@pytest.fixture(params=MODELS)
def source(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.getfixturevalue(request.param)
    return folder


@pytest.mark.parametrize(
    ("tp", "max_part_nbytes"), [(1, SEVERAL_PARTS), (2, ONE_PART), (4, SEVERAL_PARTS), (8, ONE_PART)]
)
def test_each_rank_holds_what_numpy_cuts_out_of_the_source(
    source: Path, tmp_path: Path, tp: int, max_part_nbytes: int
) -> None:
    out = tmp_path / "out"
    relayout.convert(source, out, tp=tp, max_part_nbytes=max_part_nbytes)
    whole = read_tensors(source)
    for rank in range(tp):
        parts = list(out.glob(f"model-rank-{rank}-part-*.safetensors"))
        assert (len(parts) == 1) == (max_part_nbytes == ONE_PART)
        held = read_tensors(out, f"model-rank-{rank}-part-*.safetensors")
        assert held.keys() == whole.keys()
        for name, tensor in held.items():
            np.testing.assert_array_equal(tensor, expected_slice(name, whole[name], rank, tp), err_msg=name)


def test_a_folder_of_one_rank_loads_in_stock_transformers(source: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    relayout.convert(source, out, tp=1, max_part_nbytes=SEVERAL_PARTS)
    tokens = torch.arange(1, 24).reshape(1, -1)
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (source, out)]
    with torch.no_grad():
        expected, found = (model(tokens).logits for model in models)
    assert expected.std() > 0
    assert torch.equal(expected, found)


def test_a_folder_without_what_dcp_needs_says_so_and_is_verified(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "fused.toml").write_text(
        '[cut]\n"**.q_proj.weight" = { dim = 0, by = ["even", "even"] }\n"**" = "whole"'
    )
    relayout.convert(llama, tmp_path / "out", tp=2, plan=tmp_path / "fused.toml")
    assert relayout.verify(tmp_path / "out", source=llama).ok
    assert relayout.inspect(tmp_path / "out").dcp is False
    relayout.convert(llama, tmp_path / "other", tp=2)
    assert relayout.inspect(tmp_path / "other").dcp is True
    assert relayout.inspect(llama).dcp is None


def test_side_files_go_along_with_their_modes_and_the_source_index_does_not(llama: Path, tmp_path: Path) -> None:
    source = shutil.copytree(llama, tmp_path / "source")
    (source / "run.sh").write_text("echo\n")
    (source / "run.sh").chmod(0o750)
    (source / "templates").mkdir()
    (source / "templates" / "chat.jinja").write_text("{{ x }}")
    relayout.convert(source, tmp_path / "out", tp=2)
    assert (tmp_path / "out" / "config.json").read_bytes() == (llama / "config.json").read_bytes()
    assert (tmp_path / "out" / "templates" / "chat.jinja").read_text() == "{{ x }}"
    assert stat.S_IMODE((tmp_path / "out" / "run.sh").stat().st_mode) == 0o750


@pytest.mark.parametrize("ranks", [None, "1"])
def test_the_index_of_slices_names_their_files_and_one_that_is_missing_so_that_other_loaders_stop(
    llama: Path, tmp_path: Path, ranks: str | None
) -> None:
    out, first = tmp_path / "out", 0 if ranks is None else int(ranks)
    relayout.convert(llama, out, tp=2, ranks=ranks)
    top = json.loads((out / "model.safetensors.index.json").read_text())
    *files, (_, missing) = top["weight_map"].items()
    assert missing == "this-folder-is-converted-for-2-ranks-and-needs-relayout.safetensors"
    assert not (out / missing).exists()
    whole = reference_tensors(llama)
    assert top["metadata"]["total_size"] == sum(one.nbytes for one in whole.values())
    assert {name for name, _ in files} == set(whole)
    for name, file in files:
        assert file.startswith(f"model-rank-{first}-")
        with safe_open(out / file, "pt") as opened:
            assert name in opened.keys()  # noqa: SIM118


@pytest.mark.parametrize("way", ["whole", "units"])
def test_a_source_that_is_gone_after_the_output_is_published_is_no_failure(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    source, publish = shutil.copytree(llama, tmp_path / "source"), publishing._publish
    for shard in source.glob("*.safetensors"):
        shard.chmod(0o644)
    planned = relayout.plan_conversion(source, tmp_path / "out", tp=2)

    def publish_and_delete_the_source(*args: Any) -> None:
        publish(*args)
        shutil.rmtree(source)

    monkeypatch.setattr(publishing, "_publish", publish_and_delete_the_source)
    if way == "units":
        for job in unit_jobs(planned):
            run_job(job)
        done = commit_units(planned)
    else:
        done = relayout.carry_out(planned)
    assert done.num_ranks == 2
    assert not done.is_private
    assert not source.exists()
    assert relayout.verify(tmp_path / "out").ok


@pytest.mark.parametrize(("mode", "is_private"), [(0o600, True), (0o640, False), (0o644, False)])
def test_the_summary_says_if_only_the_owner_can_read(llama: Path, tmp_path: Path, mode: int, is_private: bool) -> None:
    source = shutil.copytree(llama, tmp_path / "source")
    for shard in source.glob("*.safetensors"):
        shard.chmod(mode)
    assert relayout.convert(source, tmp_path / "out", tp=2).is_private == is_private
    assert (stat.S_IMODE((tmp_path / "out" / "relayout.json").stat().st_mode) & 0o044 == 0) == is_private
    assert not relayout.convert(source, f"toy://private-{mode}/out", tp=2).is_private  # A store has its own rights.


def test_the_source_is_not_touched(llama: Path, tmp_path: Path) -> None:
    source = shutil.copytree(llama, tmp_path / "source")
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in source.iterdir()}
    relayout.convert(source, tmp_path / "out", tp=2)
    assert before == {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in source.iterdir()}


def test_a_vocabulary_smaller_than_a_ranks_share_leaves_late_ranks_empty_tensors(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    source = tmp_path / "source"
    source.mkdir()
    table = np.arange(70 * 32, dtype=np.float32).reshape(70, 32)
    save_file({"model.embed_tokens.weight": table}, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"model_type": "llama"}))
    relayout.convert(source, tmp_path / "out", tp=8)  # Padded to 128: 16 rows each, the last three ranks hold none.
    held = []
    for rank in range(8):
        with safe_open(tmp_path / "out" / f"model-rank-{rank}-part-0.safetensors", framework="np") as stock:
            held.append(stock.get_tensor("model.embed_tokens.weight"))
        loaded = relayout.load(tmp_path / "out", rank)["model.embed_tokens.weight"]
        np.testing.assert_array_equal(loaded.numpy(), held[-1])
    assert [len(rows) for rows in held] == [16, 16, 16, 16, 6, 0, 0, 0]
    np.testing.assert_array_equal(np.concatenate(held), table)
    assert relayout.verify(tmp_path / "out", source=source).ok


@pytest.mark.parametrize(("threads", "memory"), sample([(8, 128 * 2**20), (2, 32 * 2**20)], [(2, 32 * 2**20)]))
def test_peak_memory_keeps_to_its_budget(tmp_path: Path, threads: int, memory: int) -> None:
    """A sparse 1 GB checkpoint, with tensors of 270 MB: the budget, and 100 MB for the program."""
    source = tmp_path / "source"
    source.mkdir()
    rows = {f"model.layers.0.mlp.{kind}.weight": [16384, 8192] for kind in ("up_proj", "down_proj")}
    offset, header = 0, {}
    for name, shape in (rows | {"lm_head.weight": [32768, 8192]}).items():
        end = offset + 2 * shape[0] * shape[1]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with (source / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    (source / "config.json").write_text(json.dumps({"model_type": "llama"}))
    # VmHWM, not ru_maxrss: that one is inherited from the process that ran us.
    code = (
        "import pathlib, re, sys, relayout\n"
        "relayout.convert(sys.argv[1], sys.argv[2], tp=8, threads=int(sys.argv[3]), memory=int(sys.argv[4]))\n"
        "print(re.search(r'VmHWM:\\s*(\\d+)', pathlib.Path('/proc/self/status').read_text())[1])"
    )
    if shutil.disk_usage(tmp_path).free < 2 * offset:
        pytest.skip("less than 2 GB free")
    run = subprocess.run(
        [sys.executable, "-c", code, source, tmp_path / "out", str(threads), str(memory)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(run.stdout) * 1024 < memory + 100e6
    shutil.rmtree(tmp_path / "out")


def test_a_plans_path_and_a_stale_folder_leave_no_trace(llama: Path, tmp_path: Path) -> None:
    text = '[cut]\n"**" = "whole"\n'
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.toml").write_text(text)
        relayout.convert(llama, tmp_path / f"out-{name}", tp=2, plan=tmp_path / name / "mine.toml")
    first, second = ((tmp_path / f"out-{name}" / "relayout.json").read_bytes() for name in ("one", "two"))
    assert first == second
    assert str(tmp_path).encode() not in first


@pytest.mark.parametrize("tp", [1, 2])
def test_a_single_file_is_loaded_at_other_degrees_by_the_config_that_was_beside_it(
    mistral: Path, tmp_path: Path, tp: int
) -> None:
    place = shutil.copytree(mistral, tmp_path / "model")
    file, out = place / "model.safetensors", tmp_path / "out"
    relayout.convert(file, out, tp=tp)
    whole = read_tensors(mistral)
    for rank in range(4):
        held = relayout.load(out, rank, tp=4)
        assert held.keys() == whole.keys()
        for name, tensor in held.items():
            np.testing.assert_array_equal(as_integers(tensor), expected_slice(name, whole[name], rank, 4), err_msg=name)
    relayout.restore(out, tmp_path / "back")
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == ["config.json", "model.safetensors"]
    for path in (tmp_path / "back").iterdir():
        assert path.read_bytes() == (mistral / path.name).read_bytes()
    assert relayout.verify(out, source=file).ok
    (place / "config.json").write_text("{}")
    [difference] = relayout.verify(out, source=file).differences
    assert (difference.file, difference.what) == ("config.json", "has changed in the source since the conversion")


@pytest.mark.parametrize("tp", [1, 4])
def test_an_adapter_is_left_to_the_engine(tp: int, tmp_path: Path) -> None:
    """As PEFT's `save_pretrained` writes it."""
    source = tmp_path / "adapter"
    source.mkdir()
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({name: np.arange(32, dtype=np.float32).reshape(4, 8)}, source / "adapter_model.safetensors")
    (source / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    with pytest.raises(PlanError, match=r"adapter: a LoRA adapter of PEFT .*: convert its base") as caught:
        relayout.convert(source, tp=tp)
    assert caught.value.code == "unsupported"
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    # Next to a whole model, it is named by its configuration, which would go along without it.
    save_file({"model.norm.weight": np.arange(8, dtype=np.float32)}, source / "model.safetensors")
    (source / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(PlanError, match=r"adapter_model\.safetensors: does not go along .* adapter_config\.json names"):
        relayout.convert(source, tp=tp)
    (source / "adapter_config.json").unlink()
    assert relayout.convert(source, tp=tp).num_tensors == 1
