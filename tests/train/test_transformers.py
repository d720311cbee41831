"""relayout.transformers: models are those that transformers loads; what it saves is proven from strides, or refused."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from support import prestarted
from support.checkpoints import write_family
from support.families import FAMILIES
from support.group_worker import NUM_MEMBERS

import relayout
from relayout.core.slices import NOT_HELD, TensorHead
from relayout.errors import PlanError
from relayout.loader.held import HeldTensor
from relayout.loader.models import ModelTensorView, _origin_of, storage_of

pytestmark = pytest.mark.xdist_group("transformers")

RANKS = 2
MODELS = {"qwen2": "Qwen2ForCausalLM", "moe": "Qwen3MoeForCausalLM"}
"""Dense, tied and with biases; experts."""


@pytest.fixture(scope="module")
def folders(llama: Path, qwen2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama, a qwen2 and a qwen3_moe, and each converted for 2 ranks; the last also with owned experts."""
    root = tmp_path_factory.mktemp("transformers")
    (root / "moe").mkdir()
    write_family(FAMILIES["qwen3_moe"], root / "moe")
    for name, source in (("llama", llama), ("qwen2", qwen2)):
        shutil.copytree(source, root / name)
    for name in ("llama", *MODELS):
        relayout.convert(root / name, root / f"{name}-tp{RANKS}", tp=RANKS)
    relayout.convert(root / "moe", root / "moe-ep2", tp=RANKS, expert_parallel=True)
    return root


def test_each_process_has_the_parameters_and_the_logits_of_transformers_own_load(folders: Path) -> None:
    done = prestarted.run(
        *(RANKS, folders, *MODELS),
        script="from support import transformers_worker; transformers_worker.compare_models()",
        imports=prestarted.TRANSFORMERS,
        env=prestarted.ONE_THREAD,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(RANKS):
        found = json.loads((folders / f"found-{rank}.json").read_text())
        assert found.keys() == MODELS.keys()
        for family, name in MODELS.items():
            assert found[family].pop("sharded") > 10
            assert found[family] == {"different": [], "same_logits": True, "class": name}


def test_one_process_has_the_whole_model(folders: Path) -> None:
    from transformers import AutoModelForCausalLM

    own = AutoModelForCausalLM.from_pretrained(folders / "llama", dtype=torch.bfloat16)
    ours = relayout.transformers.from_pretrained(folders / "llama-tp2", threads=1)
    assert ours.dtype == torch.bfloat16
    assert own.state_dict().keys() == ours.state_dict().keys()
    for name, tensor in own.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[name]), name


def test_without_transformers_what_to_install_is_said(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs transformers 5: pip install -U transformers$"):
        relayout.transformers.from_pretrained(folders / "llama-tp2")


def test_a_weight_that_the_checkpoint_lacks_is_an_error_where_transformers_only_warns(folders: Path) -> None:
    from transformers import LlamaForSequenceClassification

    with pytest.raises(PlanError, match=r"nothing was loaded into score\.weight: .* transformers' LlamaForSequenceCl"):
        relayout.transformers.from_pretrained(folders / "llama-tp2", model_class=LlamaForSequenceClassification)


def test_what_transformers_cannot_use_is_refused(folders: Path) -> None:
    with pytest.raises(PlanError, match="llama: was not converted; `relayout convert SRC --tp N`"):
        relayout.transformers.from_pretrained(folders / "llama")
    with pytest.raises(PlanError, match="moe-ep2: was converted with --expert-parallel"):
        relayout.transformers.from_pretrained(folders / "moe-ep2")
    with pytest.raises(PlanError, match="is not a folder"):
        relayout.transformers.from_pretrained(folders / "nothing")


def new_llama(**options: Any) -> Any:
    import transformers as hf

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_hidden_layers=1, **options))


def names(folder: Path) -> set[str]:
    return set(relayout.load(folder, 0))


def changed(tensor: torch.Tensor, kind: str, at: int, by: int) -> torch.Tensor:
    """One step of a conversion."""
    axis = at % tensor.dim()
    length = tensor.shape[axis]
    if kind == "transpose":
        return tensor.transpose(axis, by % tensor.dim())
    if kind == "narrow":
        return tensor.narrow(axis, by % length, 1 + at % (length - by % length))
    if kind == "split" and length % by == 0:
        return tensor.unflatten(axis, (by, -1)) if tensor.is_contiguous() else tensor
    return tensor.flatten() if kind == "flatten" and tensor.is_contiguous() else tensor


KINDS = st.sampled_from(["transpose", "narrow", "split", "flatten", "copy", "copy"])


@given(st.lists(st.tuples(KINDS, st.integers(0, 5), st.sampled_from([1, 2, 3, 4])), max_size=12))
def test_where_elements_come_from_is_proven(steps: list[tuple[str, int, int]]) -> None:
    tensor, copies = torch.arange(4 * 6 * 12).reshape(4, 6, 12), {}
    for kind, at, by in steps:
        if kind == "copy":
            made = tensor.clone(memory_format=torch.contiguous_format)
            copies[storage_of(made)] = (tensor, made)
            tensor = made
        else:
            tensor = changed(tensor, kind, at, by)
    found = _origin_of(tensor, copies)
    if not any(kind == "copy" for kind, _, _ in steps):
        assert found is not None
    if found is not None:
        expected = torch.full(tensor.shape, found[1])
        for axis, step in enumerate(found[2]):
            steps_along = torch.arange(tensor.shape[axis]) * step
            expected += steps_along.reshape([-1 if axis == other else 1 for other in range(tensor.dim())])
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize(
    "convert",
    [
        lambda x: x.reshape(4, 2, 4, 32).transpose(0, 1).reshape(32, 32).contiguous(),
        lambda x: x[:, :2].contiguous().reshape(-1),
        lambda x: x.view(-1),
        lambda x: x[::2],
        lambda x: x.t().contiguous().diagonal(),
        lambda x: x.view(torch.float16),
        lambda x: x.to(torch.float16),
        lambda x: x.clone().mul_(2),
    ],
    ids=["permuted", "no-box", "flat", "every-other", "diagonal", "seen-as", "cast", "changed"],
)
def test_what_is_no_part_of_a_tensor_is_refused(tmp_path: Path, convert: Callable[[Any], Any]) -> None:
    from transformers.core_model_loading import ConversionOps, WeightConverter

    class Op(ConversionOps):  # type: ignore[misc]
        def convert(self, input_dict: Any, target_patterns: Any, **_: Any) -> Any:
            [tensor] = input_dict.values()
            return {target_patterns[0]: convert(tensor[0] if isinstance(tensor, list) else tensor)}

        @property
        def reverse_op(self) -> Op:
            return self

    model = new_llama().to(torch.bfloat16)
    pattern = ["self_attn.q_proj.weight"]
    model._weight_conversions = [WeightConverter(pattern, pattern, operations=[Op()])]
    with pytest.raises(PlanError, match=r"q_proj.weight.*is not part of a tensor of the model"):
        relayout.transformers.save_pretrained(model, tmp_path / "out", tp=1)


def test_the_names_are_those_of_a_model_that_is_not_compiled(tmp_path: Path) -> None:
    model = new_llama()
    relayout.transformers.save_pretrained(torch.compile(model), tmp_path / "out", tp=1)
    assert names(tmp_path / "out") == set(model.state_dict())


def wrapped(model: Any) -> Any:
    """The same model with layers that are compiled, checkpointed, or both."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model.model.embed_tokens = checkpoint_wrapper(model.model.embed_tokens)
    model.lm_head = torch.compile(model.lm_head)
    for number, layer in enumerate(model.model.layers):
        layer.mlp = checkpoint_wrapper(layer.mlp)
        model.model.layers[number] = torch.compile(layer)
    return model


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_wrappers_leave_no_trace_in_names_and_files(tmp_path: Path, is_tied: bool, name: str) -> None:
    import transformers as hf
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64}
    sizes |= {"num_hidden_layers": 2, "num_key_value_heads": 4, "tie_word_embeddings": is_tied}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    model_class = getattr(hf, name)
    config = model_class.config_class(**sizes, **(experts if "Moe" in name else {}))
    model = model_class(config)
    model.save_pretrained(tmp_path / "stock")
    expected = {file.name: file.read_bytes() for file in (tmp_path / "stock").iterdir()}
    model = wrapped(model)
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        for number, given in enumerate((model, DistributedDataParallel(model), torch.compile(model))):
            relayout.transformers.save_pretrained(given, tmp_path / f"out-{number}")
            relayout.Publisher(tmp_path / f"steps-{number}").publish(given, 1)
            [step] = (tmp_path / f"steps-{number}").glob("full-*")
            for place, folder in (("a", tmp_path / f"out-{number}"), ("b", step)):
                relayout.restore(folder, tmp_path / f"restored-{number}-{place}")
                found = (tmp_path / f"restored-{number}-{place}").iterdir()
                assert {file.name: file.read_bytes() for file in found} == expected
    finally:
        torch.distributed.destroy_process_group()


def test_a_compiled_model_inside_whose_experts_transformers_no_longer_finds_is_refused(tmp_path: Path) -> None:
    import transformers as hf

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    text = hf.MixtralConfig(**sizes, num_key_value_heads=4, vocab_size=64, num_local_experts=4)
    vision = hf.CLIPVisionConfig(**sizes, image_size=28, patch_size=14)
    model = hf.LlavaForConditionalGeneration(hf.LlavaConfig(text_config=text, vision_config=vision))
    model.save_pretrained(tmp_path / "stock")
    inside = model.model.language_model
    model.model.language_model = torch.compile(inside)
    with pytest.raises(PlanError, match=r"'language_model', of which transformers loses the names: call compile\(\)"):
        relayout.transformers.save_pretrained(model, tmp_path / "out")
    model.model.language_model = inside
    inside.compile()
    relayout.transformers.save_pretrained(model, tmp_path / "out")
    assert names(tmp_path / "out") == set(load_file(tmp_path / "stock" / "model.safetensors"))


@pytest.mark.parametrize("kind", ["DataParallel", "ModuleDict", "dict", "function"])
def test_what_is_no_model_of_transformers_is_refused_by_its_type(tmp_path: Path, kind: str) -> None:
    plain = torch.nn.Linear(2, 2)
    given: dict[str, tuple[Any, str]] = {
        "DataParallel": (torch.nn.DataParallel(plain), "Linear"),
        "ModuleDict": (torch.nn.ModuleDict({"x": plain}), "ModuleDict"),
        "dict": (plain.state_dict(), "OrderedDict"),
        "function": (torch.compile(plain.forward), "function"),
    }
    model, name = given[kind]
    with pytest.raises(PlanError, match=rf"the model is a {name}, expected one of transformers: give tensors"):
        relayout.transformers.save_pretrained(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def adapted(model: Any) -> None:
    model.model.layers[0].self_attn.q_proj.base_layer = torch.nn.Linear(32, 32)  # As PEFT does.


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda model: setattr(model, "_hf_peft_config_loaded", True), "has adapters"),
        (lambda model: setattr(model, "hf_quantizer", object()), "is quantized"),
        (adapted, "has adapters: merge"),
    ],
)
def test_models_that_cannot_be_saved_are_refused(tmp_path: Path, change: Callable[[Any], None], what: str) -> None:
    model = new_llama()
    change(model)
    with pytest.raises(PlanError, match=what):
        relayout.transformers.save_pretrained(model, tmp_path / "out", tp=1)
    assert list(tmp_path.iterdir()) == []


def test_what_the_model_leaves_out_is_not_saved(tmp_path: Path) -> None:
    model = new_llama()
    model._keys_to_ignore_on_save = ["lm_head.weight"]
    model.save_pretrained(tmp_path / "stock")
    relayout.transformers.save_pretrained(model, tmp_path / "out", tp=1)
    assert names(tmp_path / "out") == set(load_file(tmp_path / "stock" / "model.safetensors"))


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("background", [False, True])
def test_weights_are_cast_as_by_the_model(tmp_path: Path, background: bool, is_tied: bool) -> None:
    model = new_llama(tie_word_embeddings=is_tied)
    options = {"tp": 2, "max_shard_size": "10KB"}
    saved = relayout.transformers.save_pretrained(
        model, tmp_path / "out", dtype=torch.bfloat16, background=background, **options
    )
    if background:
        saved.result()
    assert (model.dtype, model.config.dtype) == (torch.float32, None)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "stock", max_shard_size="10KB")
    relayout.restore(tmp_path / "out", tmp_path / "restored")
    stock = {file.name: file.read_bytes() for file in (tmp_path / "stock").iterdir()}
    assert {file.name: file.read_bytes() for file in (tmp_path / "restored").iterdir()} == stock
    assert json.loads(stock["config.json"])["dtype"] == "bfloat16"
    with pytest.raises(PlanError, match="expected a floating-point dtype"):
        relayout.transformers.save_pretrained(model, tmp_path / "int", dtype=torch.int8, tp=1)


def in_float32(name: str) -> Any:
    """A small model of a class that keeps some tensors in FP32, all of whose tensors are FP32."""
    import transformers as hf

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64}
    sizes |= {"num_hidden_layers": 2, "num_key_value_heads": 4}
    experts = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
    experts |= {"topk_group": 1, "first_k_dense_replace": 1}
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    options: dict[str, dict[str, Any]] = {
        "DeepseekV3": {**sizes, **experts, **latent},
        "Glm4Moe": {**sizes, **experts},
        "GptOss": {**sizes, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
        "T5": {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4, "num_layers": 1, "vocab_size": 64},
        "Rwkv": {"hidden_size": 32, "vocab_size": 64, "num_hidden_layers": 2},
    }
    kind = "ForConditionalGeneration" if name == "T5" else "ForCausalLM"
    config = getattr(hf, f"{name}Config")(**options[name])
    model = getattr(hf, f"{name}{kind}")(config).float()
    with torch.no_grad():
        for tensor in model.state_dict().values():  # Values that 16 bits do not hold.
            tensor.copy_(torch.rand_like(tensor) + 6) if tensor.is_floating_point() else None
    return model


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["DeepseekV3", "Glm4Moe", "GptOss", "T5", "Rwkv"])
def test_what_a_class_keeps_in_float32_is_saved_so(
    tmp_path: Path, name: str, dtype: torch.dtype, background: bool
) -> None:
    model = in_float32(name)
    model.save_pretrained(tmp_path / "masters")
    type(model).from_pretrained(tmp_path / "masters", dtype=dtype).save_pretrained(tmp_path / "stock")
    saved = relayout.transformers.save_pretrained(model, tmp_path / "out", dtype=dtype, background=background)
    if background:
        saved.result()
    relayout.restore(tmp_path / "out", tmp_path / "restored")
    stock = {file.name: file.read_bytes() for file in (tmp_path / "stock").iterdir()}
    assert {file.name: file.read_bytes() for file in (tmp_path / "restored").iterdir()} == stock
    kinds = {tensor.dtype for tensor in load_file(tmp_path / "stock" / "model.safetensors").values()}
    keeps = {
        torch.bfloat16: ("DeepseekV3", "Glm4Moe"),
        torch.float16: ("DeepseekV3", "Glm4Moe", "GptOss", "T5", "Rwkv"),
    }
    assert kinds == ({dtype, torch.float32} if name in keeps.get(dtype, ()) else {dtype})


def test_a_model_that_was_cast_and_a_step_have_float32_again_where_the_class_keeps_it(tmp_path: Path) -> None:
    model = in_float32("DeepseekV3").to(torch.bfloat16)
    router = "model.layers.1.mlp.gate.weight"
    publisher = relayout.Publisher(tmp_path / "steps", dtype=torch.bfloat16)
    publisher.publish(model, 1)
    follower = relayout.Follower(tmp_path / "steps", 0)
    follower.update()
    relayout.transformers.save_pretrained(model, tmp_path / "own")
    relayout.transformers.save_pretrained(model, tmp_path / "at", dtype=torch.bfloat16)
    assert relayout.load(tmp_path / "own", 0)[router].dtype == torch.bfloat16
    for found in (relayout.load(tmp_path / "at", 0), follower.tensors):
        assert found["model.norm.weight"].dtype == torch.bfloat16
        assert torch.equal(found[router], model.get_parameter(router).float())


def test_pipeline_stages_are_refused_as_no_whole_model(tmp_path: Path) -> None:
    done = prestarted.run(
        tmp_path, script="from support.saving_worker import of_stages; of_stages()", imports=prestarted.TRANSFORMERS
    )
    assert done.returncode == 0, done.stderr
    for number in range(NUM_MEMBERS):
        [(kind, what)] = json.loads((tmp_path / f"member-{number}.json").read_text()).values()
        assert kind == "PlanError"
        assert f"tensor 'model.layers.{1 - min(number, 1)}." in what
        assert "pass the tensors of a pipeline stage to relayout.save" in what


def test_of_what_a_process_has_nothing_of_it_gives_nothing() -> None:
    """Such as a DTensor on a mesh of other processes."""
    view = ModelTensorView("x", (2, 2), (0, 1), (1, 0))
    held = view.of("y", HeldTensor(TensorHead("x", "F32", (4, 2)), NOT_HELD, torch.empty(0)))
    assert (held.head, held.part) == (TensorHead("y", "F32", (2, 2)), NOT_HELD)
    assert held.data.numel() == 0
