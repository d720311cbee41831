"""`load(into=model)` gives a model of transformers what its own `from_pretrained` gives it from the same folder."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import relayout
from relayout.errors import PlanError

pytestmark = pytest.mark.xdist_group("transformers")

TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
LLAMA = {**TEXT, "num_key_value_heads": 2}
MOE = {**LLAMA, "head_dim": 8, "num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
IMAGES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama": LLAMA,
    "Qwen3Moe": MOE,
    "Bert": TEXT,
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96},
    "T5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 96},
    "CLIP": {
        "text_config": {**TEXT, "num_hidden_layers": 1},
        "vision_config": {**IMAGES, "image_size": 28, "patch_size": 14},
        "projection_dim": 16,
    },
    "ResNet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
    "Wav2Vec2": {**TEXT, "conv_dim": [8, 8], "conv_stride": [2, 2], "conv_kernel": [3, 3], "num_feat_extract_layers": 2}
    | {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2},
}


def a_model(name: str, seed: int, **config: Any) -> Any:
    """A model with values of its own in each tensor, numbers of batches too."""
    import transformers

    family = next(family for family in CONFIGS if name.startswith(family))
    model = getattr(transformers, name)(getattr(transformers, f"{family}Config")(**CONFIGS[family], **config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(
                (torch.rand(tensor.shape, generator=generator) + 0.25) * (1 if tensor.dtype.is_floating_point else 9)
            )
    return model


def rewritten(folder: Path, rename: Callable[[str], str]) -> None:
    """Give the tensors of a folder other names."""
    tensors = load_file(folder / "model.safetensors")
    renamed = {rename(name): tensor for name, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})


def check_filled(model: Any, folder: Path, source: Path | None = None) -> None:
    """Fill a model, and compare each tensor with what transformers loads."""
    wanted, report = type(model).from_pretrained(
        folder, config=copy.deepcopy(model.config), dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    relayout.load(source or folder, into=model)
    filled = model.state_dict()
    assert filled.keys() == wanted.state_dict().keys()
    assert [name for name, tensor in wanted.state_dict().items() if not torch.equal(tensor, filled[name])] == []


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("LlamaForCausalLM", "LlamaModel"),
        ("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
        ("T5ForConditionalGeneration", "T5EncoderModel"),
        ("T5ForConditionalGeneration", "T5Model"),
        ("CLIPModel", "CLIPModel"),
        ("ResNetForImageClassification", "ResNetForImageClassification"),
        ("ResNetForImageClassification", "ResNetModel"),
        ("Wav2Vec2ForCTC", "Wav2Vec2Model"),
    ],
)
def test_a_model_is_filled_from_the_checkpoint_of_another_class(tmp_path: Path, source: str, target: str) -> None:
    a_model(source, 1).save_pretrained(tmp_path)
    check_filled(a_model(target, 2), tmp_path)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def test_a_tied_head_comes_with_the_checkpoint_of_its_base(tmp_path: Path, name: str) -> None:
    base = name.replace("ForCausalLM", "Model")
    a_model(base, 1).save_pretrained(tmp_path)
    check_filled(a_model(name, 2, tie_word_embeddings=True), tmp_path)
    with pytest.raises(PlanError, match=r"the checkpoint has no 'lm_head\.weight'"):
        relayout.load(tmp_path, into=a_model(name, 2, tie_word_embeddings=False))


def test_a_head_of_another_kind_is_none_of_a_models(tmp_path: Path) -> None:
    a_model("BertForPreTraining", 1).save_pretrained(tmp_path)
    with pytest.raises(PlanError, match=r"the checkpoint has .*'cls\.seq_relationship\.bias'.* which the model lacks"):
        relayout.load(tmp_path, into=a_model("BertForMaskedLM", 2))


@pytest.mark.parametrize(
    ("name", "old"),
    [
        ("BertForMaskedLM", lambda name: name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta")),
        ("GPT2LMHeadModel", lambda name: name.removeprefix("transformer.")),
        ("Wav2Vec2ForCTC", lambda name: name.replace("parametrizations.weight.original0", "weight_g")),
        ("Qwen3MoeForCausalLM", lambda name: name.removeprefix("model.")),
    ],
)
def test_names_of_older_releases_are_read_as_transformers_reads_them(
    tmp_path: Path, name: str, old: Callable[[str], str]
) -> None:
    a_model(name, 1).save_pretrained(tmp_path)
    rewritten(tmp_path, old)
    check_filled(a_model(name, 2), tmp_path)


def test_parts_are_taken_in_the_order_in_which_transformers_takes_them(tmp_path: Path) -> None:
    """As numbers, and not as text; whether these begin at 0 or not."""
    a_model("Qwen3MoeForCausalLM", 1).save_pretrained(tmp_path)
    rewritten(
        tmp_path,
        lambda name: ".".join(str(int(part) + 3) if before == "experts" else part for before, part in pairs(name)),
    )
    check_filled(a_model("Qwen3MoeForCausalLM", 2), tmp_path)


def pairs(name: str) -> list[tuple[str, str]]:
    parts = name.split(".")
    return list(zip(["", *parts], parts, strict=False))


def test_a_checkpoint_that_lacks_one_of_several_parts_names_it(tmp_path: Path) -> None:
    a_model("Qwen3MoeForCausalLM", 1).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    lacking = "model.layers.1.mlp.experts.2.gate_proj.weight"
    del tensors[lacking]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(PlanError, match=f"the checkpoint has no '{lacking}'"):
        relayout.load(tmp_path, into=a_model("Qwen3MoeForCausalLM", 2))


def test_a_model_that_transformers_loaded_is_filled_like_a_new_one(tmp_path: Path) -> None:
    """It remembers how the names were converted that it was loaded from: here of its base, with experts as they are."""
    import transformers

    a_model("Qwen3MoeForCausalLM", 1).save_pretrained(tmp_path / "plain")
    merged = a_model("Qwen3MoeModel", 2)
    merged.save_pretrained(tmp_path / "merged", save_original_format=False)
    assert any(name.endswith("experts.gate_up_proj") for name in load_file(tmp_path / "merged" / "model.safetensors"))
    model = transformers.Qwen3MoeModel.from_pretrained(tmp_path / "merged")
    check_filled(model, tmp_path / "plain")
    check_filled(a_model("Qwen3MoeModel", 3), tmp_path / "merged")


def test_names_that_the_caller_had_converted_are_read_again(tmp_path: Path) -> None:
    import transformers

    a_model("LlamaForCausalLM", 1).save_pretrained(tmp_path)
    rewritten(tmp_path, lambda name: name.replace("self_attn", "attention_of"))
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, key_mapping={"attention_of": "self_attn"})
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    relayout.load(tmp_path, into=model)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())


def test_a_parameter_without_elements_is_a_tensor_like_others(tmp_path: Path) -> None:
    def with_prompt(seed: int) -> Any:
        model = a_model("LlamaForCausalLM", seed)
        model.prompt = torch.nn.Parameter(torch.empty(0, 32))
        return model

    model = with_prompt(1)
    model.save_pretrained(tmp_path / "plain")
    relayout.transformers.save_pretrained(model, tmp_path / "saved")
    assert relayout.load(tmp_path / "saved")["prompt"].shape == (0, 32)
    for source in ("plain", "saved"):
        filled = with_prompt(2)
        relayout.load(tmp_path / source, into=filled)
        assert torch.equal(filled.get_parameter("lm_head.weight"), model.get_parameter("lm_head.weight"))


def test_tensors_without_dimensions_are_saved_as_transformers_saves_them(tmp_path: Path) -> None:
    model = a_model("CLIPModel", 1)
    relayout.transformers.save_pretrained(model, tmp_path / "saved")
    saved = relayout.load(tmp_path / "saved")
    assert saved["logit_scale"].shape == ()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())


def test_layers_that_are_compiled_have_the_names_of_the_checkpoint(tmp_path: Path) -> None:
    a_model("Qwen3MoeForCausalLM", 1).save_pretrained(tmp_path)
    model, plain = a_model("Qwen3MoeForCausalLM", 2), a_model("Qwen3MoeForCausalLM", 3)
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = torch.compile(layer)
    relayout.load(tmp_path, into=model)
    check_filled(plain, tmp_path)
    pairs_of = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs_of)
