"""Architectures that are observed from SGLang, beside the families and forms of `cases.py`; they are made small.

SGLang's classes read more of config.json than vLLM's: what the hub's files have, and transformers does not write.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines.observing import small_models
from engines.observing.small_sizes import LAYERS

_DEEPSEEK = {"moe_layer_freq": 1}
_QWEN3_5: dict[str, dict[str, Any]] = {
    "text_config": {"full_attention_interval": LAYERS},
    "vision_config": {"deepstack_visual_indexes": []},
}

SGLANG: dict[str, Mapping[str, Mapping[str, Any]]] = {
    "BeamForCausalLM": {},
    "DeepseekV32ForCausalLM": {"": _DEEPSEEK},
    "DeepseekV4ForCausalLM": {
        "": {
            **{"compress_ratios": [0, 128, 4, 4], "num_hash_layers": 1, "qk_rope_head_dim": 64, "window_size": 64},
            "rope_scaling": {"type": "yarn", "factor": 1.0, "original_max_position_embeddings": 512},
        }
    },
    "Ernie4_5_MoeForCausalLM": {},
    "Exaone4ForCausalLM": {"": {"sliding_window_pattern": "LLLG"}},
    "FalconH1ForCausalLM": {},
    "Gemma4ForConditionalGeneration": {},
    "Glm4MoeLiteForCausalLM": {"": _DEEPSEEK | {"first_k_dense_replace": 1}},
    "Glm4vMoeForConditionalGeneration": {},
    "Glm5NextForConditionalGeneration": {
        "text_config": {"index_kpool_compress": True, "first_k_dense_replace": 1, "moe_layer_freq": 1}
    },
    "GlmMoeDsaForCausalLM": {"": _DEEPSEEK},
    "GraniteMoeHybridForCausalLM": {},
    "HYV3ForCausalLM": {},
    "HYV4ForCausalLM": {},
    "InklingForConditionalGeneration": {},
    "InternVLForConditionalGeneration": {},
    "KimiLinearForCausalLM": {},
    "Lfm2MoeForCausalLM": {},
    "MiMoV2FlashForCausalLM": {
        "": {"rope_theta": 1e4, "swa_rope_theta": 1e4, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    },
    "MiniMaxM2ForCausalLM": {"": {"use_qk_norm": True}},
    "MiniMaxM3SparseForConditionalGeneration": {
        "text_config": {
            **{"qk_norm_type": "per_head", "scoring_func": "sigmoid", "use_routing_bias": True},
            "n_shared_experts": 1,
        },
        "vision_config": {"position_embedding_type": "rope", "rope_mode": "3d", "vision_segment_max_frames": 4},
    },
    "Qwen3VLForConditionalGeneration": {},
    "Qwen3VLMoeForConditionalGeneration": {},
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5,
    "Qwen4ExpForConditionalGeneration": {
        # SGLang has indexers for 512 or 2048 of the compressed keys.
        "text_config": {"full_attention_interval": LAYERS, "indexer_budget": 512 * 16}
    },
    "Step3p7ForConditionalGeneration": {
        "text_config": {
            **{"rope_theta": [1e4] * LAYERS, "partial_rotary_factors": [0.5] * LAYERS},
            **{
                "moe_router_scaling_factor": 1.0,
                "swiglu_limits": [0.0] * LAYERS,
                "swiglu_limits_shared": [0.0] * LAYERS,
            },
        }
    },
}
"""By architecture, and by part of config.json (empty: the whole): keys to add."""

_LAYER_TYPES = [*["linear_attention"] * (LAYERS - 1), "full_attention"]
_VALUES = {
    name: {"text_config": {"layer_types": _LAYER_TYPES}}
    for name in ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
}
"""Of the configuration: SGLang's classes take every `full_attention_interval`-th layer for one of full attention."""


def write(name: str, folder: Path) -> None:
    """Write a small checkpoint.

    Raises:
        LookupError: transformers has no class for it.
    """
    small_models.write(name, folder, _VALUES.get(name, {}))
    file = folder / "config.json"
    config = json.loads(file.read_text())
    for part, keys in SGLANG[name].items():
        (config[part] if part else config).update(keys)
    file.write_text(json.dumps(config))
