"""relayout.save by one process: the files are those of `convert`, and `restore` gives what transformers saves."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import prestarted
from support.checkpoints import write_family
from support.conversions import reference_tensors
from support.families import FAMILIES
from support.group_worker import NUM_MEMBERS
from support.mounts import mounted_tmpfs
from support.patience import PATIENCE
from support.profile import sample
from support.saving_worker import SHARD, model_of, models
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.masked import masked_tensor

import relayout
from relayout.errors import FormatError, PlanError

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
CONFIG = {"model_type": "llama", **SIZES}


def llama() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {"self_attn.q_proj": (128, 128), "self_attn.k_proj": (64, 128), "self_attn.v_proj": (64, 128)}
    shapes |= {"self_attn.o_proj": (128, 128), "mlp.down_proj": (128, 256)}
    tensors = {f"model.layers.{n}.{name}.weight": torch.randn(shapes[name]) for n in range(12) for name in shapes}
    return {"model.norm.weight": torch.randn(128), **tensors}


def tied(**config: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """A model with one embedding of two names, and another tensor of its shape in the same memory."""
    embedding = torch.randn(32, 128)
    both = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.detach()}
    return {**llama(), **both}, {**CONFIG, "vocab_size": 32, **config}


def files(folder: Path, *suffixes: str) -> dict[str, bytes]:
    """All files, or those with a suffix."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.suffix in suffixes or not suffixes}


def weights(folder: Path) -> dict[str, bytes]:
    found = files(folder, ".safetensors", ".slices")
    assert len(found) > 1
    return found


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models that four processes have saved, each with its shards."""
    place = tmp_path_factory.mktemp("models")
    script = "from support.saving_worker import of_models; of_models()"
    done = prestarted.run(place, script=script, imports=prestarted.TRANSFORMERS, env=prestarted.ONE_THREAD)
    assert done.returncode == 0, done.stderr
    seen = [json.loads((place / f"member-{number}.json").read_text()) for number in range(NUM_MEMBERS)]
    assert seen == [dict.fromkeys(models())] * NUM_MEMBERS
    return place


@pytest.mark.xdist_group("transformers")
@pytest.mark.parametrize("name", models())
def test_a_model_is_saved_as_transformers_saves_it(tmp_path: Path, sharded: Path, name: str) -> None:
    model = model_of(name)
    model.save_pretrained(tmp_path / "source", max_shard_size=SHARD)
    relayout.convert(tmp_path / "source", tmp_path / "converted", tp=4)
    relayout.transformers.save_pretrained(model, tmp_path / "saved", tp=4, max_shard_size=SHARD)
    assert files(tmp_path / "saved") == files(tmp_path / "converted")
    assert weights(sharded / f"{name}-saved") == weights(tmp_path / "converted")
    for number, folder in enumerate((tmp_path / "saved", sharded / f"{name}-saved")):
        relayout.restore(folder, tmp_path / f"restored-{number}")
        assert files(tmp_path / f"restored-{number}") == files(tmp_path / "source")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt_oss_mxfp4", {"tp": 2}),
        ("llama", {"tp": 2, "layout": "whole"}),
        ("llama", {"tp": 4, "ranks": "1-2", "max_part_nbytes": "100KB"}),
        ("qwen3_moe", {"tp": 2, "expert_parallel": True}),
    ],
)
def test_the_files_are_those_of_convert(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    source = write_family(FAMILIES[name], tmp_path / "source")
    relayout.convert(source, tmp_path / "converted", **options)
    relayout.save(reference_tensors(source), tmp_path / "saved", config=source, **options)
    assert weights(tmp_path / "saved") == weights(tmp_path / "converted")
    assert relayout.verify(tmp_path / "saved").ok


def test_tensors_that_are_not_contiguous(tmp_path: Path) -> None:
    tensors = llama()
    views = {name: tensor.t().contiguous().t() if tensor.dim() > 1 else tensor for name, tensor in tensors.items()}
    strided = {name: torch.stack([view, view], -1)[..., 0] for name, view in views.items()}
    assert not any(tensor.is_contiguous() for tensor in strided.values())
    relayout.save(tensors, tmp_path / "dense", config=CONFIG, tp=2)
    relayout.save(strided, tmp_path / "strided", config=CONFIG, tp=2, memory="4MiB", threads=2)
    assert weights(tmp_path / "strided") == weights(tmp_path / "dense")


def test_in_the_background_tensors_may_change_at_once(tmp_path: Path) -> None:
    tensors = llama()
    relayout.save(tensors, tmp_path / "one", config=CONFIG, tp=2)
    future = relayout.save(tensors, tmp_path / "other", config=CONFIG, tp=2, background=True)
    for tensor in tensors.values():
        tensor.zero_()
    assert future.result(PATIENCE).num_files == 2
    assert weights(tmp_path / "other") == weights(tmp_path / "one")


def test_in_the_background_parts_of_one_memory_and_two_names_of_one_part_are_saved(tmp_path: Path) -> None:
    whole = torch.arange(8.0).reshape(4, 2)
    tensors = {"a": whole[:2], "b": whole[:2], "c": whole[2:]}
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    future = relayout.save(tensors, tmp_path / "out", background=True)
    whole.zero_()
    future.result(PATIENCE)
    found = relayout.load(tmp_path / "out", 0)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def of_one_memory() -> dict[str, dict[str, torch.Tensor]]:
    """Tensors that lie in one memory, and are not the same."""
    floats, z = torch.tensor([1.5, -2.0, 3.25, 1e6]), torch.complex(torch.ones(3), torch.arange(3.0) + 1)
    numbers, halves = torch.arange(8, dtype=torch.uint8) + 48, torch.tensor([1.0, 2.0, 3.0]).bfloat16()
    return {
        "bits of FP32 as I32": {"a": floats, "b": floats.view(torch.int32)},
        "U8 and FP8": {"a": numbers, "b": numbers.view(torch.float8_e4m3fn)},
        "U8 and FP4": {"a": numbers, "b": numbers.view(torch.float4_e2m1fn_x2)},
        "BF16 and F16": {"a": halves.view(torch.float16), "b": halves},
        "a conjugate": {"a": z, "b": z.conj()},
        "a negative": {"a": z.imag, "b": torch.conj(z).imag},
        "a row and it again": {"a": floats.expand(3, 4), "b": floats.expand(4, 4).t()},
    }


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("case", of_one_memory())
def test_two_views_of_one_memory_are_two_tensors(tmp_path: Path, case: str, background: bool) -> None:
    tensors = of_one_memory()[case]
    dense = {name: tensor.resolve_conj().resolve_neg().contiguous().clone() for name, tensor in tensors.items()}
    save_file(dense, tmp_path / "stock.safetensors")
    done = relayout.save(tensors, tmp_path / "out", background=background)
    if isinstance(done, Future):
        done.result(PATIENCE)
    expected, found = load_file(tmp_path / "stock.safetensors"), relayout.load(tmp_path / "out")
    assert {name: tensor.dtype for name, tensor in found.items()} == {name: one.dtype for name, one in expected.items()}
    for name, tensor in expected.items():
        assert found[name].view(torch.uint8).tolist() == tensor.view(torch.uint8).tolist(), name


def test_saves_in_the_background_are_put_in_line(tmp_path: Path) -> None:
    steps = [{"x": torch.full((2**20,), float(step))} for step in range(3)]
    for future in [relayout.save(step, tmp_path / "latest", force=True, background=True) for step in steps]:
        future.result(PATIENCE)
    assert relayout.load(tmp_path / "latest", 0)["x"][0] == 2


def test_a_save_waits_for_those_in_the_background_but_not_for_those_of_a_parent(tmp_path: Path) -> None:
    may_end, tensors = threading.Event(), {"x": torch.ones(4)}
    first = relayout.save(tensors, tmp_path / "out", background=True, progress=lambda *_: may_end.wait(PATIENCE))
    second = threading.Thread(target=relayout.save, args=(tensors, tmp_path / "out"), kwargs={"force": True})
    second.start()
    child = os.fork()
    if child == 0:
        signal.alarm(int(PATIENCE))
        try:
            relayout.save(tensors, tmp_path / "of-child")
        finally:
            os._exit(not (tmp_path / "of-child").exists())
    assert os.waitpid(child, 0)[1] == 0
    assert second.is_alive()
    assert not (tmp_path / "out").exists()
    may_end.set()
    second.join(PATIENCE)
    assert first.done()
    assert relayout.load(tmp_path / "out", 0)["x"].sum() == 4


@pytest.mark.parametrize("background", [False, True])
def test_a_save_by_the_progress_function_of_another_is_refused(tmp_path: Path, background: bool) -> None:
    def inner(done: int, total: int) -> None:
        relayout.save({"x": torch.ones(4)}, tmp_path / "inner")

    def outer() -> None:
        saved = relayout.save({"x": torch.ones(4)}, tmp_path / "out", progress=inner, background=background)
        saved.result(PATIENCE)

    with pytest.raises(PlanError, match="would wait for itself"):
        outer()
    assert list(tmp_path.iterdir()) == []
    relayout.save({"x": torch.ones(4)}, tmp_path / "out")


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0)])
def test_a_tensor_without_elements_is_saved(tmp_path: Path, shape: tuple[int, ...]) -> None:
    relayout.save({"w": torch.ones(64), "empty": torch.empty(shape)}, tmp_path / "saved")
    loaded = relayout.load(tmp_path / "saved", 0)
    assert loaded["empty"].shape == shape
    assert torch.equal(loaded["w"], torch.ones(64))


@pytest.mark.parametrize("tensor", [torch._neg_view(torch.ones(64)), torch.full((64,), 1 + 2j).conj()])
def test_signs_that_are_not_in_memory_yet_are_saved(tmp_path: Path, tensor: torch.Tensor) -> None:
    relayout.save({"x": tensor}, tmp_path / "out")
    assert torch.equal(relayout.load(tmp_path / "out", 0)["x"], tensor)


def test_a_config_that_is_no_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="JSON"):
        relayout.save({"x": torch.ones(2)}, tmp_path / "out", config={"dtype": torch.bfloat16})


def test_an_interruption_while_tensors_are_copied_is_raised_at_once_and_nothing_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relayout.train.save.HeldTensors.on_host", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        relayout.save({"w": torch.ones(8)}, tmp_path / "out", tp=1, background=True)
    monkeypatch.undo()
    relayout.save({"w": torch.ones(8)}, tmp_path / "next", tp=1, background=True).result(timeout=PATIENCE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["next"]


def test_a_failure_in_the_background_is_raised_by_the_future(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "theirs").write_bytes(b"a stranger's")
    future = relayout.save(llama(), tmp_path / "out", config=CONFIG, tp=2, background=True)
    with pytest.raises(PlanError, match="not an output of relayout"):
        future.result(PATIENCE)
    wrong = relayout.save({"x": "no tensor"}, tmp_path / "new", background=True)  # type: ignore[dict-item]
    with pytest.raises(PlanError, match="expected a tensor"):
        wrong.result(PATIENCE)
    assert files(tmp_path / "out") == {"theirs": b"a stranger's"}


def test_an_output_is_replaced_only_by_force(tmp_path: Path) -> None:
    relayout.save({"x": torch.ones(4)}, tmp_path / "out")
    with pytest.raises(PlanError, match="force"):
        relayout.save({"x": torch.zeros(4)}, tmp_path / "out")
    assert relayout.load(tmp_path / "out", 0)["x"].sum() == 4
    relayout.save({"x": torch.zeros(4)}, tmp_path / "out", force=True)
    assert relayout.load(tmp_path / "out", 0)["x"].sum() == 0


def test_of_a_save_that_fails_on_the_way_nothing_is_left(tmp_path: Path) -> None:
    def fail(done: int, total: int) -> None:
        if done == total:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        relayout.save(llama(), tmp_path / "out", config=CONFIG, tp=2, progress=fail)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_conversion_is_not_discarded_without_force(tmp_path: Path) -> None:
    partial = tmp_path / ".out.relayout-partial"
    source = write_family(FAMILIES["llama"], tmp_path / "source")

    def fail(done: int, total: int) -> None:
        if done == total:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        relayout.convert(source, tmp_path / "out", tp=2, progress=fail, max_part_nbytes=20_000)
    kept = sorted(partial.rglob("*"))
    assert kept
    with pytest.raises(PlanError, match="holds an interrupted attempt"):
        relayout.save({"x": torch.ones(4)}, tmp_path / "out")
    assert sorted(partial.rglob("*")) == kept
    relayout.save({"x": torch.ones(4)}, tmp_path / "out", force=True)


@pytest.mark.parametrize(
    ("tensors", "what"),
    [
        ({"x": torch.ones(2, dtype=torch.complex128)}, "tensor 'x': torch.complex128, which safetensors does not have"),
        ({"x": torch.ones((), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}, "tensor 'x': F4 without a dim"),
        ({}, "no tensors"),
        ({"\ud800": torch.ones(2)}, "not valid Unicode"),
        ({1: torch.ones(2)}, "expected text"),
    ],
)
def test_what_safetensors_does_not_have_is_refused(tmp_path: Path, tensors: dict[str, Any], what: str) -> None:
    with pytest.raises(PlanError, match=what):
        relayout.save(tensors, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


class Wrapper(torch.Tensor):
    """A tensor that is made of another one, as those of torchao are."""

    _inside: torch.Tensor

    @staticmethod
    def __new__(cls, inside: torch.Tensor) -> Wrapper:
        self: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inside.shape, dtype=inside.dtype)  # type: ignore[attr-defined]
        self._inside = inside
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*[arg._inside if isinstance(arg, Wrapper) else arg for arg in args], **(kwargs or {}))


def freed(nbytes: int) -> torch.Tensor:
    """A tensor whose storage was made smaller, as FSDP does between two uses of a parameter."""
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def fake() -> torch.Tensor:
    with FakeTensorMode():  # type: ignore[no-untyped-call]
        return torch.ones(3)


NOT_PLAIN: dict[str, tuple[Callable[[], Any], str]] = {
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(1)]), r"nested.*values\(\)"),
    "jagged": (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), r"nested.*values\(\)"),
    "lazy": (torch.nn.UninitializedParameter, "has no shape yet: run the model once"),
    "lazy buffer": (torch.nn.UninitializedBuffer, "has no shape yet: run the model once"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.quint8), r"torch.quint8.*dequantize"),
    "sparse": (lambda: torch.eye(3).to_sparse(), r"torch.sparse_coo, expected torch.strided: call to_dense\(\)"),
    "sparse rows": (lambda: torch.eye(3).to_sparse_csr(), "torch.sparse_csr, expected torch.strided"),
    "mkldnn": (lambda: torch.ones(3, 3).to_mkldnn(), "torch._mkldnn, expected torch.strided"),
    "meta": (lambda: torch.ones(3, device="meta"), r"on (the device )?meta.*to_empty"),
    "fake": (fake, "a FakeTensor without memory of its own"),
    "wrapper": (lambda: Wrapper(torch.ones(3)), "a Wrapper without memory of its own"),
    "masked": (lambda: masked_tensor(torch.ones(3), torch.ones(3) > 0), "a MaskedTensor without memory of its own"),
    "freed": (lambda: freed(0), "a Tensor without memory of its own"),
    "freed in part": (lambda: freed(4), "memory was freed in part"),
    "a list": (lambda: [1.0], "a list, expected a tensor"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", NOT_PLAIN)
def test_what_has_no_plain_memory_is_neither_saved_nor_filled(tmp_path: Path, case: str) -> None:
    make, what = NOT_PLAIN[case]
    tensors = {"layer.odd": make()}
    relayout.save({"layer.odd": torch.ones(3)}, tmp_path / "in")
    for action in (
        lambda: relayout.save(tensors, tmp_path / "out"),
        lambda: relayout.load(tmp_path / "in", into=tensors),
        lambda: relayout.load(tmp_path / "in", 0, into=tensors),
    ):
        with pytest.raises(PlanError, match=what) as caught:
            action()
        assert "layer.odd" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_sharded_tensor_of_fsdp1_is_refused_by_name(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        spec = ChunkShardingSpec(0, ["rank:0/cpu"])
        tensors = {"layer.odd": sharded_tensor.ones(spec, 4, 2)}
        with pytest.raises(PlanError, match=r"'layer.odd': a ShardedTensor, as FSDP1 has.*fully_shard"):
            relayout.save(tensors, tmp_path / "out")
        with pytest.raises(PlanError, match=r"'layer.odd': a ShardedTensor, as FSDP1 has.*fully_shard"):
            relayout.load(relayout.save({"layer.odd": torch.ones(4, 2)}, tmp_path / "in").output, into=tensors)
    finally:
        torch.distributed.destroy_process_group()


def test_a_subclass_with_memory_of_its_own_is_saved(tmp_path: Path) -> None:
    class Named(torch.Tensor):
        pass

    values = torch.arange(6.0).reshape(2, 3)
    relayout.save({"x": values.t().as_subclass(Named), "y": torch.nn.Buffer(values)}, tmp_path / "out")
    found = relayout.load(tmp_path / "out")
    assert torch.equal(found["x"], values.t())
    assert torch.equal(found["y"], values)


def test_fp4_is_saved_and_filled_as_safetensors_has_it_and_never_cast(tmp_path: Path) -> None:
    numbers = torch.arange(96, dtype=torch.uint8).reshape(6, 16)
    packed = numbers.view(torch.float4_e2m1fn_x2)
    tensors = {"a": packed, "b": packed.t(), "c": packed[1:, 3:7], "empty": packed[:0]}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "stock.safetensors")
    relayout.save(tensors, tmp_path / "out")
    assert relayout.verify(tmp_path / "out").ok
    for folder in (tmp_path / "out", tmp_path / "stock.safetensors"):
        into = {name: torch.zeros_like(one.view(torch.uint8)).view(one.dtype) for name, one in tensors.items()}
        assert not into["b"].is_contiguous()
        relayout.load(folder, into=into)
        for name, tensor in load_file(tmp_path / "stock.safetensors").items():
            assert torch.equal(into[name].view(torch.uint8), tensor.view(torch.uint8)), name
    with pytest.raises(PlanError, match=r"'a': cannot be cast from torch.float4_e2m1fn_x2 to torch.bfloat16"):
        relayout.save(tensors, tmp_path / "cast", dtype=torch.bfloat16)
    with pytest.raises(PlanError, match=r"'x': cannot be cast from torch.float32 to torch.float4_e2m1fn_x2"):
        relayout.save({"x": torch.ones(2)}, tmp_path / "cast", dtype=torch.float4_e2m1fn_x2)


def test_the_config_may_be_the_file_itself(tmp_path: Path) -> None:
    (tmp_path / "my-config.json").write_text(json.dumps(CONFIG))
    relayout.save(llama(), tmp_path / "saved", config=tmp_path / "my-config.json", tp=2)
    assert (tmp_path / "saved" / "config.json").read_bytes() == (tmp_path / "my-config.json").read_bytes()


def test_a_config_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises((FormatError, PlanError, OSError)):
        relayout.save({"x": torch.ones(2)}, tmp_path / "out", config=tmp_path / "nothing")
    assert list(tmp_path.iterdir()) == []


def test_small_files_of_a_folder_go_along(tmp_path: Path) -> None:
    source = write_family(FAMILIES["llama"], tmp_path / "source")
    (source / "tokenizer.json").write_text("{}")
    (source / "code").mkdir()
    (source / "code" / "model.py").write_text("x = 1")
    relayout.save(reference_tensors(source), tmp_path / "out", config=source, tp=2)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert (tmp_path / "out" / "code" / "model.py").read_text() == "x = 1"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"


def test_of_a_save_to_a_full_drive_nothing_is_left(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "drive", "1m") as drive:
        with pytest.raises((PlanError, OSError), match=r"B too few|No space left"):
            relayout.save(llama(), drive / "out", config=CONFIG, tp=2)
        assert list(drive.iterdir()) == []


@pytest.mark.parametrize("action", ["save", "convert", "load"])
def test_where_no_thread_can_be_started_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    save_file({"x": torch.ones(4)}, tmp_path / "in.safetensors")
    actions: dict[str, Callable[[], Any]] = {
        "save": lambda: relayout.save({"x": torch.ones(4)}, tmp_path / "out"),
        "convert": lambda: relayout.convert(tmp_path / "in.safetensors", tmp_path / "out", tp=1),
        "load": lambda: relayout.load(tmp_path / "in.safetensors", 0, tp=1, backend="direct"),
    }

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(OSError, match=r"can't start new thread; a limit of .* is reached: use fewer threads") as caught:
        actions[action]()
    assert str(caught.value).count("use fewer threads") == 1
    assert not (tmp_path / "out").exists()


_SAVES = """
import sys
from train.test_save import CONFIG, llama
from support.saving_worker import kill_after
import relayout
tensors = llama()
kill_after(int(sys.argv[2]))
relayout.save(tensors, sys.argv[1], config=CONFIG, tp=2, memory="4MiB", threads=1, force=True)
"""


@pytest.mark.xdist_group("group")
@pytest.mark.parametrize("num_calls", sample([0, 1, 2, 3, 5, 8, 12, 16, 20, 24], [1, 5, 16]))
def test_of_a_save_that_is_killed_there_is_the_old_folder_or_the_new(tmp_path: Path, num_calls: int) -> None:
    tensors, output = llama(), tmp_path / "out"
    relayout.save(tensors, tmp_path / "new", config=CONFIG, tp=2)
    relayout.save({"x": torch.ones(4)}, output)
    before = files(output)
    child = prestarted.run(output, num_calls, script=_SAVES, imports=prestarted.GROUP, env=prestarted.ONE_THREAD)
    assert child.returncode in (-signal.SIGKILL, 0)
    found = files(output)
    assert found == before or found.keys() == files(tmp_path / "new").keys()
    relayout.save(tensors, output, config=CONFIG, tp=2, force=True)
    assert weights(output) == weights(tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def names_saved(tensors: dict[str, torch.Tensor], config: Any, output: Path, **options: Any) -> set[str]:
    done = relayout.save(tensors, output, config=config, tp=2, **options)
    if options:
        done.result(PATIENCE)  # type: ignore[union-attr]
    with relayout.safe_open(output) as view:
        return set(view.keys())


@pytest.mark.parametrize("options", [{}, {"background": True}])
def test_tied_embeddings_are_saved_by_their_first_name(tmp_path: Path, options: dict[str, Any]) -> None:
    tensors, config = tied(tie_word_embeddings=True)
    assert tensors.keys() - names_saved(tensors, config, tmp_path / "out", **options) == {"lm_head.weight"}
    nested = {**CONFIG, "text_config": {"vocab_size": 32, "tie_word_embeddings": True}}
    assert "lm_head.weight" not in names_saved(tensors, nested, tmp_path / "nested", **options)


def test_what_is_not_proven_to_be_tied_is_saved_by_each_name(tmp_path: Path) -> None:
    tensors, config = tied(tie_word_embeddings=False)
    assert names_saved(tensors, config, tmp_path / "untied") == tensors.keys()
    _, config = tied(tie_word_embeddings=True)
    copied = {**tensors, "lm_head.weight": tensors["lm_head.weight"].clone()}
    assert names_saved(copied, config, tmp_path / "copied") == tensors.keys()
    assert names_saved(tensors, {**config, "vocab_size": 33}, tmp_path / "other") == tensors.keys()
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (tmp_path / "base" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert names_saved(tensors, tmp_path / "base", tmp_path / "named") == tensors.keys()


@pytest.mark.parametrize("background", [False, True])
def test_floats_are_cast_while_they_are_copied_and_integers_are_not(tmp_path: Path, background: bool) -> None:
    masters = llama() | {"model.steps": torch.arange(5)}
    options: dict[str, Any] = {"config": CONFIG, "tp": 2, "unmatched": "replicate"}
    done = relayout.save(masters, tmp_path / "cast", dtype=torch.bfloat16, background=background, **options)
    if isinstance(done, Future):
        done.result()
    assert all(tensor.dtype in (torch.float32, torch.int64) for tensor in masters.values())
    cast = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in masters.items()}
    relayout.save(cast, tmp_path / "expected", **options)
    for file in sorted((tmp_path / "expected").glob("model-*")):
        assert (tmp_path / "cast" / file.name).read_bytes() == file.read_bytes()


def test_a_dtype_that_no_weights_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"dtype is torch\.int8, expected a floating-point dtype of torch"):
        relayout.save({"x": torch.ones(2)}, tmp_path / "out", dtype=torch.int8)
    assert not (tmp_path / "out").exists()
