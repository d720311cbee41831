"""Runs where transformers is: small checkpoints of any architecture that it has a class for, with the hub's names.

A configuration's defaults are mostly those of a published model of billions of parameters. Its numbers are made small
by their names, so that they still fit each other, and so that 4 ranks can divide them.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from engines.observing.architectures import ARCHITECTURES, Recipe
from engines.observing.multimodal_architectures import MULTIMODAL
from engines.observing.small_sizes import EXPERTS, GROUPS, HEAD_DIM, HEADS, INNER, KV_HEADS, LAYERS, VOCABULARY, H

_SMALL: tuple[tuple[str, int], ...] = (
    (
        r"(swa_)?num_(key_value|kv|query|global_key_value)_(heads|groups)|multi_query_group_num|n_head_kv|kv_n_heads",
        KV_HEADS,
    ),
    (
        r"num_(hidden_|encoder_|decoder_|text_|vision_)?layers|n_layers?|(encoder|decoder)_layers|depth|num_blocks"
        r"|layer_num",
        LAYERS,
    ),
    (r"num_nextn_predict_layers|mtp_num_hidden_layers|num_mtp_layers|num_mtp_modules|num_kv_shared_layers", 0),
    (r"first_k_dense_replace|moe_layer_start_index|num_dense_layers|n_dense_layers", 1),
    (r"vocab_size_per_layer_input|(text_|audio_)?vocab_size|vocab_sizes", VOCABULARY),
    (r"hidden_size_per_layer_input", 64),
    (
        r".*(intermediate_(size|dim)|ffn_dim|ffn_hidden_size|inner_dim|n_inner|expert_hidden_dim)(_mlp)?|d_ff|ff_dim|block_ff_dim",
        INNER,
    ),
    (
        r"num_experts_per_tok(en)?|num_selected_experts|moe_top_?k|top_?k(_experts)?|moe_k|n_activated_experts"
        r"|num_experts_per_token",
        2,
    ),
    (r"n_group|topk_group|num_expert_group|moe_router_topk_group|n_expert_groups|n_limited_groups", 1),
    (r"n_shared_experts|num_shared_experts|num_shared_expert|moe_num_shared_experts", 1),
    (r"(num|n)_(local_|routed_|total_)?experts|moe_num_experts|num_moe_experts", EXPERTS),
    (r".*_lora_(rank|dim)|.*low_rank.*dim|lora_rank", 64),
    (r"qk_rope_head_dim|rotary_dim|rope_head_dim", 16),
    (r"linear_(key|value)_head_dim", HEAD_DIM),
    (r"mamba_(d_head|head_dim)", 64),
    (
        r"qk_nope_head_dim|v_head_dim|qk_head_dim|head_dim|attention_head_dim|kv_channels|swa_head_dim|head_size|d_kv"
        r"|global_head_dim|index_head_dim",
        HEAD_DIM,
    ),
    (r"linear_num_value_heads", 2 * HEADS),
    (r"linear_num_key_heads|mamba_(n|num)_heads|n_mamba_heads", HEADS),
    (
        r"(swa_)?(num_(attention_|encoder_attention_|decoder_attention_|q_|query_|linear_|index_)?heads|n_heads?"
        r"|(encoder|decoder)_attention_heads|attention_heads|index_n_heads)",
        HEADS,
    ),
    (r"mamba_d_ssm|mamba_d_inner", INNER),
    (r"mamba_n_groups|n_groups|mamba_num_groups", GROUPS),
    (r"mamba_d_state|ssm_state_size|state_size|mamba_state_dim|time_step_rank|mamba_dt_rank", 16),
    (
        r"max_(position_embeddings|source_positions|target_positions|seq_len(gth)?|sequence_length)|n_positions|n_ctx"
        r"|seq_length",
        512,
    ),
    (
        r"hidden_size|hidden_dim|d_model|n_embd|(word_)?embed(ding)?_(proj_)?(dim|size)|lru_width|dim|output_dims?"
        r"|(out|output|text|vision|projector|lm|encoder|mm|backbone|proj|projection|model|audio|qformer|block)_(hidden_)?"
        r"(size|dim)",
        H,
    ),
    (r"image_size|video_size|force_image_size|crop_size", 56),
    (r"num_position_embeddings", 64),
    (r"(sliding|attention)_window(_size)?|attention_chunk_size|window_size", 64),
)
"""Patterns of keys, and what the number is; the first that matches counts."""

_OLDER = (
    r"(^|\.)(vision_tower|vision_model)\.(embeddings|encoder|pre_layrnorm|post_layernorm|head)\.",
    r"\1\2.vision_model.\3.",
)
"""What transformers writes, and what is on the hub, where the vision part has one of these types."""
_WITH_OLDER = ("siglip_vision_model", "siglip2_vision_model", "clip_vision_model")


CODE = """
from transformers import CONFIG_MAPPING, PretrainedConfig


class Values(dict):
    def __getattr__(self, key):
        if key not in self:
            raise AttributeError(key)
        return self[key]


def with_attributes(value):
    if isinstance(value, dict):
        return Values((key, with_attributes(one)) for key, one in value.items())
    return [with_attributes(one) for one in value] if isinstance(value, list) else value


class HubConfig(PretrainedConfig):
    model_type = "{}"

    def __init__(self, **keys):
        for key, value in keys.items():
            if isinstance(value, list):
                keys[key] = with_attributes(value)
            if key.endswith("_config") and isinstance(value, dict):
                known = value.get("model_type") in CONFIG_MAPPING
                keys[key] = (CONFIG_MAPPING[value["model_type"]] if known else PretrainedConfig)(**value)
        super().__init__(**keys)
"""
"""Stands for the Python of a checkpoint: what config.json says, as it is."""


def class_of(architecture: str) -> Any:
    import transformers

    cls = getattr(transformers, _recipe(architecture).by or architecture, None)
    if cls is None or getattr(cls, "config_class", None) is None:
        raise LookupError(f"transformers has no class {architecture}")
    return cls


def write(architecture: str, folder: Path, values: Mapping[str, Any] = MappingProxyType({})) -> None:
    """A checkpoint with position-dependent values.

    Args:
        values: of config.json, in place of small numbers.

    Raises:
        LookupError: transformers has no class for it.
    """
    recipe, cls = _recipe(architecture), class_of(architecture)
    config = small(cls.config_class, {**cls.config_class().to_dict()}, merged(recipe.values, values))
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = cls(config)
    finally:
        torch.set_default_dtype(torch.float32)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data.normal_()
    model.save_pretrained(folder)
    file = folder / "config.json"
    top = {**json.loads(file.read_text()), "architectures": [architecture]}
    if recipe.flat:
        top = {**top.pop("text_config"), **top}
    if recipe.code:
        write_code(folder, top)
    given = {key: value for key, value in values.items() if key in recipe.config}
    file.write_text(json.dumps(merged(top, {**recipe.config, **given})))
    for name, content in recipe.files.items():
        (folder / name).write_text(json.dumps(content))
    is_older = (top.get("vision_config") or {}).get("model_type") in _WITH_OLDER
    _restore(folder / "model.safetensors", (*recipe.names, *[_OLDER] * is_older), recipe)
    (folder / "model.safetensors").rename(folder / recipe.file)
    if recipe.folder:
        (folder / recipe.folder).mkdir()
        (folder / recipe.folder / "model.safetensors").symlink_to(folder / "model.safetensors")


def write_code(folder: Path, config: dict[str, Any]) -> None:
    """Write the Python that a checkpoint of the hub has for its configuration, and name it there."""
    (folder / "configuration_hub.py").write_text(CODE.format(config["model_type"]))
    config["auto_map"] = {"AutoConfig": "configuration_hub.HubConfig"}


def supply(folder: Path, errors: Sequence[str]) -> bool:
    """Let config.json have the keys that vLLM lacks by these errors, if a number is known for one."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    for key in re.findall(r"Config' object has no attribute '(\w+)'", " ".join(errors)):
        number = number_of(key)
        if number is not None and key not in config:
            for part in (config, config.get("text_config"), config.get("vision_config")):
                if isinstance(part, dict):
                    part.setdefault(key, number)
            file.write_text(json.dumps(config))
            return True
    return False


def _recipe(architecture: str) -> Recipe:
    return ARCHITECTURES.get(architecture) or MULTIMODAL.get(architecture, Recipe())


def merged(values: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """The values, with the others over them; objects in both are merged too, and None takes a value away."""
    both = dict(values)
    for key, value in others.items():
        if value is None and both.pop(key, None) is not None:
            continue
        are_objects = isinstance(value, dict) and isinstance(both.get(key), dict)
        both[key] = merged(both[key], value) if are_objects else value
    return both


def _restore(file: Path, names: Sequence[tuple[str, str]], recipe: Recipe) -> None:
    """Let a file have the hub's names and shapes, and what the hub has beside what transformers writes."""
    weights = load_file(file)
    for pattern, name in names:
        weights = {new: tensor for written, tensor in weights.items() if (new := re.sub(pattern, name, written))}
    turned = {
        name: written.mT.contiguous() for name, written in weights.items() if re.fullmatch(recipe.transposed, name)
    }
    more = {name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in recipe.tensors.items()}
    save_file({**weights, **turned, **more}, file, metadata={"format": "pt"})


def small(cls: Any, values: dict[str, Any], chosen_values: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """A configuration of a class with small numbers in place of these values, and chosen values over them."""
    nested = getattr(cls, "sub_configs", None) or {}
    kept = small_values(cls, values, chosen_values)
    same = {key: value for key, value in values.items() if key not in kept and key not in OF_ALL}
    return cls(**{**same, **kept, **{key: value for key, value in chosen_values.items() if key not in nested}})


def small_values(
    cls: Any, values: Mapping[str, Any], chosen_values: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """The values that become small, and what they become."""
    kept: dict[str, Any] = {}
    nested = getattr(cls, "sub_configs", None) or {}
    layers = {value for key, value in values.items() if "layer" in key and number_of(key) == LAYERS}
    for key, value in values.items():
        if key in nested and isinstance(value or chosen_values.get(key), dict) and inspect.isclass(nested[key]):
            sub, value = nested[key], value or {}
            chosen = {**chosen_values.get(key, {})}
            if sub.__name__ == "AutoConfig":
                from transformers import CONFIG_MAPPING

                sub = CONFIG_MAPPING[chosen.pop("model_type", value.get("model_type"))]
            own = {field: what for field, what in value.items() if field not in OF_ALL}
            kept[key] = small(sub, sub(**own).to_dict(), chosen).to_dict()
        elif type(value) is int:
            number = number_of(key)
            if number is not None:
                kept[key] = min(number, value) if number in (0, 1, 2) else number
            elif key.endswith(("_token_id", "_token_index")) and value >= VOCABULARY:
                kept[key] = sum(map(ord, key)) % VOCABULARY
        elif isinstance(value, list) and len(value) in layers:
            distinct = list(dict.fromkeys(map(_hashable, value)))
            first = [value[list(map(_hashable, value)).index(kind)] for kind in distinct]
            kept[key] = (first + first[-1:] * LAYERS)[:LAYERS]
        elif isinstance(value, list) and value and all(type(index) is int for index in value):
            if re.search(r"(layer|index).*(ids|idx|indexes|indices|s)$", key):
                kept[key] = sorted({min(index, LAYERS - 1) for index in value})[: len(value)]
            elif key.endswith("token_ids") or "eos" in key:
                kept[key] = [index % VOCABULARY for index in value]
    return kept


OF_ALL = {
    *("model_type", "transformers_version", "architectures", "_name_or_path", "torch_dtype", "dtype", "id2label"),
    *("output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward", "label2id"),
    *("is_encoder_decoder", "problem_type", "per_layer_config"),
}
"""What every configuration has."""


def number_of(key: str) -> int | None:
    return next((number for pattern, number in _SMALL if re.fullmatch(pattern, key)), None)


def _hashable(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
