"""What is looked at in and below a checkpoint folder, and what goes along with the weights."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.local_stores import read_source
from support.rights import drop_superuser_rights
from support.trees import tree

import relayout
from relayout.cache.conversions import find_conversion
from relayout.cache.folder import Cache
from relayout.checkpoint.folder import glance
from relayout.checkpoint.source import read_source as source_of
from relayout.conversion.planning import check_plan
from relayout.conversion.run import needed_for
from relayout.errors import FormatError, PlanError
from relayout.storage import stores
from relayout.storage.local.store import LocalStore

DENSE = {"linear.weight": np.arange(24 * 8, dtype=np.float32).reshape(24, 8)}
NUM_FOLDERS = 40


@pytest.fixture
def model(llama: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint that tests may change."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in llama.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture
def with_logs(model: Path) -> Path:
    for number in range(NUM_FOLDERS):
        (model / "logs" / f"run-{number}").mkdir(parents=True)
        (model / "logs" / f"run-{number}" / "output.log").write_text("x")
    return model


class Calls:
    """The paths of system calls about names, while a test runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.listed: list[str] = []
        self.others: list[str] = []
        for name, paths in (("scandir", self.listed), ("listdir", self.listed), *self._others()):
            monkeypatch.setattr(os, name, self._watched(getattr(os, name), paths))

    def _others(self) -> Iterator[tuple[str, list[str]]]:
        for name in ("stat", "lstat", "access", "open"):
            yield name, self.others

    def _watched(self, call: Callable[..., Any], paths: list[str]) -> Callable[..., Any]:
        def watched(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            paths.append(str(path))
            return call(path, *args, **kwargs)

        return watched


READERS: dict[str, Callable[[Path], object]] = {
    "load": relayout.load,
    "load of a rank": lambda path: relayout.load(path, 1, tp=2),
    "load of names": lambda path: relayout.load(path, names="**.norm.weight"),
    "iter_load": lambda path: dict(relayout.iter_load(path)),
    "open": lambda path: relayout.open(path).__enter__().close(),
    "safe_open": lambda path: relayout.safe_open(path).__enter__().keys(),
    "inspect": relayout.inspect,
    "explain": relayout.explain,
    "plans check": check_plan,
    "start of an engine": lambda path: find_conversion(LocalStore(path), 2, Cache(path.parent / "cache")),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_looks_at_the_files_of_the_folder_alone(
    with_logs: Path, reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        calls = Calls(patch)
        READERS[reader](with_logs)
    assert [path for path in calls.listed if path.startswith(str(with_logs))] == [str(with_logs)]
    assert not [path for path in calls.others if path.startswith(str(with_logs / "logs"))]


def test_a_conversion_lists_each_folder_once(with_logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        calls = Calls(patch)
        planned = relayout.plan_conversion(with_logs, tmp_path / "out", tp=2)
    below = [path for path in calls.listed if path.startswith(str(with_logs / "logs"))]
    assert len(below) == len(set(below)) == NUM_FOLDERS + 1
    assert sum(name.endswith("output.log") for name in planned.source.side_files) == NUM_FOLDERS


def failing(monkeypatch: pytest.MonkeyPatch, closed: Path, number: int) -> None:
    """Let the listing of a folder fail, as it does for one that this user may not enter."""
    list_folder = os.scandir

    def scandir(path: Any = ".") -> Any:
        if str(path).rstrip("/") == str(closed):
            raise OSError(number, os.strerror(number), str(path))
        return list_folder(path)

    monkeypatch.setattr(os, "scandir", scandir)


@pytest.mark.parametrize("where", ["lost+found", "logs/run-7"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOENT, errno.ENOTDIR, errno.ESTALE])
def test_a_folder_that_is_closed_or_vanishes_is_left_out_of_a_conversion(
    with_logs: Path, tmp_path: Path, where: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (with_logs / where).mkdir(exist_ok=True)
    failing(monkeypatch, with_logs / where, number)
    done = relayout.convert(with_logs, tmp_path / "out", tp=2)
    assert f"{where}: a folder that cannot be listed: {os.strerror(number)}" in done.left_out
    assert (tmp_path / "out" / "logs" / "run-8" / "output.log").read_text() == "x"


def test_a_failing_drive_is_no_folder_that_is_left_out(
    with_logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, with_logs / "logs" / "run-7", errno.EIO)
    with pytest.raises(OSError, match=r"run-7") as caught:
        relayout.convert(with_logs, tmp_path / "out", tp=2)
    assert caught.value.errno == errno.EIO
    assert not (tmp_path / "out").exists()


def test_a_file_that_vanishes_while_the_folder_is_listed_is_left_out(
    with_logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    list_folder = os.scandir

    def scandir(path: Any = ".") -> Any:
        if str(path).rstrip("/").endswith("run-9"):  # All names of run-8 are known, or not one: both are right.
            (with_logs / "logs" / "run-8" / "output.log").unlink(missing_ok=True)
        return list_folder(path)

    monkeypatch.setattr(os, "scandir", scandir)
    done = relayout.convert(with_logs, tmp_path / "out", tp=2)
    assert not (tmp_path / "out" / "logs" / "run-8" / "output.log").exists()
    assert done.left_out in ((), ("logs/run-8/output.log: vanished while the folder was listed",))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="drops the superuser's rights by Linux's prctl")
def test_a_volume_with_a_closed_folder_is_read_converted_verified_and_restored(model: Path, tmp_path: Path) -> None:
    relayout.convert(model, tmp_path / "mounted", tp=2)
    for folder in (model, tmp_path / "mounted"):
        (folder / "lost+found").mkdir(mode=0)
    (model / "private").mkdir()
    (model / "private" / "notes.txt").write_text("x")
    script = """
import os, sys, relayout
from pathlib import Path
from relayout.conversion.planning import check_plan
work = Path(sys.argv[1])
model, mounted = work / "model", work / "mounted"
relayout.load(model), relayout.inspect(model), check_plan(model)
done = relayout.convert(model, work / "out", tp=2)
print(done.left_out)
print(relayout.verify(mounted).ok, relayout.verify(work / "out", source=model).ok)
relayout.load(mounted, 0), relayout.restore(mounted, work / "back")
os.chmod(model / "private" / "notes.txt", 0)
for call in (lambda: relayout.convert(model, work / "out2", tp=2), lambda: relayout.load(model)):
    try: print(len(call()) > 0)
    except relayout.FormatError as error: print(error)
os.chmod(model, 0o100)
try: relayout.load(model)
except relayout.FormatError as error: print(error)
os.chmod(model, 0o700)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, preexec_fn=drop_superuser_rights
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "('lost+found: a folder that cannot be listed: Permission denied',)",
        "True True",
        f"{model / 'private' / 'notes.txt'}: cannot be read: Permission denied",
        "True",
        f"{model}: cannot be read: Permission denied",
    ]


@pytest.mark.parametrize(
    ("limit", "value", "says"),
    [
        ("MAX_LISTED", 20, "its listing has more than 20 names, the limit"),
        ("LISTING_SECONDS", -1.0, "its listing takes more than -1 s, the limit"),
    ],
)
def test_a_listing_without_end_ends_a_conversion_and_not_a_load(
    with_logs: Path, tmp_path: Path, limit: str, value: float, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, limit, value)
    with pytest.raises(FormatError, match=f"model: {says}") as caught:
        relayout.convert(with_logs, tmp_path / "out", tp=2)
    assert caught.value.code == "limit"
    if limit == "MAX_LISTED":
        assert len(relayout.load(with_logs)) > 0


@pytest.mark.parametrize("call", [relayout.inspect, relayout.verify, lambda path: relayout.convert(path, tp=2)])
def test_a_folder_without_a_model_is_refused_without_a_look_at_all_below(
    tmp_path: Path, call: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(NUM_FOLDERS):
        (tmp_path / "one" / f"sub-{number}" / "deep").mkdir(parents=True)
    failing(monkeypatch, tmp_path / "one", errno.EACCES)
    with monkeypatch.context() as patch:
        calls = Calls(patch)
        with pytest.raises((PlanError, FormatError), match=r"contains no safetensors file|not a converted folder"):
            call(tmp_path)
    assert len(calls.listed) <= 4


# What goes along.

GOES = (
    "2_Dense/model.safetensors",
    "2_Dense/pytorch_model.bin",
    "3_Other/pytorch_model.bin.index.json",
    "vision-lora/adapter_model.safetensors",
    "speech_tokenizer/model.safetensors",
    "speech_tokenizer/model.safetensors.index.json",
    "assets/token2wav/flow.pt",
    "voices/a.pt",
    "voices/runs/b.bin",
    "deep/original/x.pth",
    "colbert_linear.pt",
    "voices.npz",
    "mean.npy",
    "spk2info.pth",
    "campplus.onnx",
    "lora.bin",
)
STAYS = (
    "pytorch_model-00001-of-00002.bin",
    "pytorch_model.bin",
    "model.onnx",
    "model_q4.onnx",
    "model.pt",
    "consolidated.00.pth",
    "tf_model.h5",
    "flax_model.msgpack",
    "rust_model.ot",
    "llama-7b.gguf",
    "optimizer.pt",
    "rng_state_0.pth",
    "training_args.bin",
)
FOLDERS_THAT_STAY = (
    "models--a--b",
    "original",
    "onnx",
    "openvino",
    "checkpoint-500",
    "global_step12",
    "wandb",
    "runs",
    "__pycache__",
)


def test_all_that_is_not_the_model_a_second_time_goes_along(model: Path, tmp_path: Path) -> None:
    stays = [*STAYS, *(f"{folder}/deep/file.bin" for folder in FOLDERS_THAT_STAY)]
    for number, name in enumerate([*GOES, *stays]):
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_bytes(bytes(range(number, number + 100)))
    save_file(DENSE, model / "2_Dense" / "model.safetensors")
    (model / "modules.json").write_text(json.dumps([{"path": ""}, {"path": "2_Dense"}, {"path": 5}, 7]))
    source = read_source(model)
    assert set(GOES) < set(source.side_files)
    assert not set(stays) & set(source.side_files)
    left_out = dict(text.split(": ", 1) for text in source.left_out)
    assert left_out.keys() == {*STAYS, *FOLDERS_THAT_STAY}
    assert all(left_out[name].endswith(" (100 bytes)") for name in STAYS)
    planned = relayout.plan_conversion(model, tmp_path / "out", tp=2)
    assert needed_for(planned)[0] >= planned.layout.nbytes + sum((model / name).stat().st_size for name in GOES)
    relayout.carry_out(planned)
    assert relayout.verify(tmp_path / "out", source=model).ok
    relayout.restore(tmp_path / "out", tmp_path / "back")
    shards = {name for name in tree(model) if "/" not in name and name.endswith((".safetensors", ".index.json"))}
    for name in (*GOES, *shards):
        assert (tmp_path / "back" / name).read_bytes() == (model / name).read_bytes(), name
    found = load_file(tmp_path / "out" / "2_Dense" / "model.safetensors")
    assert np.array_equal(found["linear.weight"], DENSE["linear.weight"])
    assert relayout.load(tmp_path / "out", 0).keys() == relayout.load(model, 0, tp=2).keys()


def test_damage_of_weights_in_a_subfolder_is_found(model: Path, tmp_path: Path) -> None:
    (model / "2_Dense").mkdir()
    save_file(DENSE, model / "2_Dense" / "model.safetensors")
    relayout.convert(model, tmp_path / "out", tp=2)
    copied = tmp_path / "out" / "2_Dense" / "model.safetensors"
    blob = bytearray(copied.read_bytes())
    blob[-1] ^= 1
    copied.write_bytes(blob)
    [found] = relayout.verify(tmp_path / "out").differences
    assert found.file == "2_Dense/model.safetensors"


@pytest.mark.parametrize("folder", ["2_Dense", "onnx", "a/closed"])
def test_a_module_that_would_not_go_along_is_refused(
    model: Path, tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model / folder).mkdir(parents=True)
    save_file(DENSE, model / folder / "model.safetensors")
    (model / "modules.json").write_text(json.dumps([{"path": ""}, {"path": folder}]))
    failing(monkeypatch, model / folder, errno.EACCES)
    with pytest.raises(PlanError, match=rf"{folder}: does not go along \(.*\), but modules\.json names it"):
        relayout.convert(model, tmp_path / "out", tp=2)
    assert len(relayout.load(model)) > 0


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_an_adapter_that_is_a_link_elsewhere_is_refused(model: Path, tmp_path: Path, suffix: str) -> None:
    (tmp_path / "elsewhere").write_bytes(b"x")
    (model / "voice-lora").mkdir()
    (model / "voice-lora" / f"adapter_model{suffix}").symlink_to(tmp_path / "elsewhere")
    relayout.convert(model, tmp_path / "out", tp=2)
    (model / "voice-lora" / "adapter_config.json").write_text("{}")
    with pytest.raises(PlanError, match=r"voice-lora/adapter_model.*: does not go along .* voice-lora/adapter_config"):
        relayout.convert(model, tmp_path / "out2", tp=2)


def test_an_adapter_beside_the_model_is_refused(model: Path, tmp_path: Path) -> None:
    save_file(DENSE, model / "adapter_model.safetensors")
    assert "adapter_model.safetensors" not in read_source(model).side_files
    (model / "adapter_config.json").write_text("{}")
    with pytest.raises(PlanError, match=r"adapter_model\.safetensors: does not go along .* adapter_config\.json names"):
        relayout.convert(model, tmp_path / "out", tp=2)


# Which file is the model: transformers itself is the judge.


def save_model(folder: Path, seed: int, **options: Any) -> dict[str, Any]:
    """Let transformers write a small model, and return its tensors."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=80))
    model.save_pretrained(folder, **options)
    return dict(model.state_dict())


@pytest.fixture(scope="module")
def two_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """A folder with an index of shards and with model.safetensors of other values; the tensors of each."""
    folder = tmp_path_factory.mktemp("two")
    sharded = save_model(folder / "both", 1, max_shard_size="60KB")
    single = save_model(folder / "single", 2)
    (folder / "both" / "model.safetensors").write_bytes((folder / "single" / "model.safetensors").read_bytes())
    return folder / "both", sharded, single


def loaded_by_transformers(folder: Path) -> dict[str, Any]:
    from transformers import LlamaForCausalLM

    return dict(LlamaForCausalLM.from_pretrained(folder).state_dict())


def filled(folder: Path) -> dict[str, Any]:
    """What `load` fills a model of transformers with."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    relayout.load(folder, into=model)
    return dict(model.state_dict())


def are_equal(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in expected)


def test_a_model_of_transformers_is_filled_from_the_file_that_transformers_takes(
    two_models: tuple[Path, dict[str, Any], dict[str, Any]], tmp_path: Path
) -> None:
    folder, sharded, single = two_models
    assert are_equal(loaded_by_transformers(folder), single)
    assert are_equal(filled(folder), single)
    assert are_equal(relayout.load(folder), sharded), "as engines"
    state = {name: tensor.clone() for name, tensor in single.items()}
    assert are_equal(dict(relayout.load(folder, into=state)), sharded), "a state dict has no loader of its own"
    done = relayout.convert(folder, tmp_path / "out", tp=1)
    assert are_equal(relayout.load(tmp_path / "out", 0), sharded)
    says = "model.safetensors: not named by model.safetensors.index.json, which engines load; transformers loads this"
    assert done.left_out == (f"{says} file instead",)


@pytest.mark.parametrize("kind", ["file", "index"])
def test_the_weights_that_config_json_names_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "model"
    other = save_model(folder, 1)
    named = save_model(tmp_path / "named", 2, **({"max_shard_size": "60KB"} if kind == "index" else {}))
    for file in (tmp_path / "named").glob("*.safetensors*"):
        (folder / file.name.replace("model", "custom", 1)).write_bytes(file.read_bytes())
    entry = "custom.safetensors" if kind == "file" else "custom.safetensors.index.json"
    if kind == "index":
        index = (tmp_path / "named" / "model.safetensors.index.json").read_text()
        (folder / entry).write_text(index.replace('"model-', '"custom-'))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": entry}))
    assert are_equal(loaded_by_transformers(folder), named)
    assert are_equal(filled(folder), named)
    assert are_equal(relayout.load(folder), other)
    for tp in (1, 2):
        with pytest.raises(PlanError, match=rf"config\.json: transformers_weights is '{entry}', which engines do not"):
            relayout.convert(folder, tmp_path / "out", tp=tp)
    (folder / "model.safetensors").unlink()
    if kind == "file":
        for options in ({"tp": 1}, {"tp": 2, "layout": "whole"}):
            with pytest.raises(PlanError, match="which the output would have under other names: remove the entry"):
                relayout.convert(folder, tmp_path / "out", **options)
        relayout.convert(folder, tmp_path / "out", tp=2)  # Slices, which transformers opens in no case.
        assert are_equal(relayout.load(tmp_path / "out", 0, tp=1), named)
    (folder / "config.json").write_text(json.dumps(config))
    relayout.convert(folder, tmp_path / "out1", tp=1)
    assert are_equal(loaded_by_transformers(tmp_path / "out1"), named)


@pytest.mark.parametrize("entry", ["../x.safetensors", "sub/x.safetensors", "x.bin", 5, ".x.safetensors"])
def test_config_json_names_no_other_file_as_weights(model: Path, entry: object) -> None:
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "transformers_weights": entry}))
    assert len(relayout.load(model)) > 0
    with pytest.raises(
        FormatError, match=r"config\.json: transformers_weights is .*, expected a \.safetensors file of"
    ):
        source_of(LocalStore(model), by_transformers=True)


def test_weights_in_a_subfolder_that_config_json_names_go_along(model: Path, tmp_path: Path) -> None:
    (model / "hf").mkdir()
    save_file(DENSE, model / "hf" / "x.safetensors")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"transformers_weights": "hf/x.safetensors"}))
    relayout.convert(model, tmp_path / "out", tp=1)
    assert (tmp_path / "out" / "hf" / "x.safetensors").read_bytes() == (model / "hf" / "x.safetensors").read_bytes()


def test_a_glance_sees_what_is_near_and_the_snapshots_of_the_hub(tmp_path: Path) -> None:
    seen = ["near", "sub/near", "models--a/snapshots/1/near", "snapshots/2/near"]
    unseen = ["blobs/blob", "models--a/blobs/blob", "sub/sub/far", "models--a/refs/far"]
    for name in seen + unseen:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = {entry.name for entry in glance(LocalStore(tmp_path))}
    assert found >= set(seen)
    assert found.isdisjoint(unseen)
