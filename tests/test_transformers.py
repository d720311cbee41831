"""relayout.transformers: models are those that transformers loads; what it saves is proven from strides, or refused."""

from __future__ import annotations

import json
import shutil
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
from relayout.core.slices import NOT_HELD
from relayout.errors import PlanError
from relayout.loader.held import HeldTensor, TensorHead
from relayout.loader.models import View, _origin_of, storage_of

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
    with pytest.raises(PlanError, match=r"q_proj.weight.*is no part of one of the model's tensors"):
        relayout.transformers.save_pretrained(model, tmp_path / "out", tp=1)


def test_the_names_are_those_of_a_model_that_is_not_compiled(tmp_path: Path) -> None:
    model = new_llama()
    relayout.transformers.save_pretrained(torch.compile(model), tmp_path / "out", tp=1)
    assert names(tmp_path / "out") == set(model.state_dict())


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


def test_pipeline_stages_are_refused_as_no_whole_model(tmp_path: Path) -> None:
    done = prestarted.run(
        tmp_path, script="from support.saving_worker import of_stages; of_stages()", imports=prestarted.TRANSFORMERS
    )
    assert done.returncode == 0, done.stderr
    for number in range(NUM_MEMBERS):
        [(kind, what)] = json.loads((tmp_path / f"member-{number}.json").read_text()).values()
        assert kind == "PlanError"
        assert f"tensor 'model.layers.{1 - min(number, 1)}." in what
        assert "a pipeline stage is no whole model" in what


def test_of_what_a_process_has_nothing_of_it_gives_nothing() -> None:
    """Such as a DTensor on a mesh of other processes."""
    view = View("x", (2, 2), (0, 1), (1, 0))
    held = view.of("y", HeldTensor(TensorHead("x", "F32", (4, 2)), NOT_HELD, torch.empty(0)))
    assert (held.head, held.part) == (TensorHead("y", "F32", (2, 2)), NOT_HELD)
    assert held.data.numel() == 0
