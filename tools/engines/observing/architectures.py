"""What small checkpoints of some architectures need beside a configuration's defaults with small numbers.

Sources are vLLM's loaders and configuration classes, and what config.json has on the hub.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engines.observing.small_sizes import EXPERTS, HEAD_DIM, HEADS, INNER, KV_HEADS, H


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the checkpoint of an architecture is made."""

    values: Mapping[str, Any] = field(default_factory=dict)
    """Of the configuration, where sizes depend on each other in other ways, or defaults are of no model."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """What config.json says on the hub, and transformers does not write. None: what it writes, and the hub does not."""
    names: tuple[tuple[str, str], ...] = ()
    """Patterns of the names that transformers writes, and the names on the hub, for `re.sub`; all are applied. What
    the hub does not have gets an empty name."""
    tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of those that the hub has and transformers does not use."""
    by: str = ""
    """The class of transformers that makes it, if that has another name."""
    code: bool = False
    """Whether the hub's checkpoint has Python that reads its config.json, which vLLM's class is made for."""
    flat: bool = False
    """Whether config.json has on the hub what it says of the text part beside its parts, not in one."""
    files: Mapping[str, Any] = field(default_factory=dict)
    """JSON files beside config.json that vLLM's class reads."""
    file: str = "model.safetensors"
    """Name of the file of weights on the hub."""
    folder: str = ""
    """Where vLLM looks for the weights, if not beside config.json."""
    transposed: str = ""
    """Pattern of the tensors, by their names on the hub, whose last two axes are the other way round there."""


_INKLING: dict[str, Any] = {
    **{"use_gate_bias": True, "use_global_scale": True, "use_embed_norm": True, "use_sconv": True},
    **{"sconv_kernel_size": 4, "dense_mlp_idx": 1, "local_layer_ids": [0]},
}
_INKLING_VALUES = {"text_config": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "n_shared_experts": 2}}
_MIMO_V2: dict[str, Any] = {
    **{"hybrid_layer_pattern": [0, 1, 1, 1], "moe_layer_freq": [0, 1, 1, 1], "layernorm_epsilon": 1e-5},
    **{"swa_num_attention_heads": HEADS, "swa_num_key_value_heads": 2 * KV_HEADS, "swa_head_dim": HEAD_DIM},
    **{"swa_v_head_dim": HEAD_DIM, "sliding_window_size": 64, "add_swa_attention_sink_bias": True},
}
_NOAUX = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}

ARCHITECTURES: dict[str, Recipe] = {
    "AXK1ForCausalLM": Recipe(tensors={"model.layers.0.post_mlp_layernorm.weight": (H,)}),
    "AfmoeForCausalLM": Recipe(
        config={"score_func": "sigmoid", "route_norm": True, "route_scale": 1.0, "n_group": 1, "topk_group": 1}
    ),
    "DeepseekV32ForCausalLM": Recipe(config=_NOAUX),
    "DeepseekV3ForCausalLM": Recipe(config=_NOAUX),
    "DeepseekV4ForCausalLM": Recipe(
        values={
            **{"head_dim": 512, "index_head_dim": 128, "num_key_value_heads": 1, "o_groups": 4},
            "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
            "layer_types": [
                "sliding_attention",
                "heavily_compressed_attention",
                "compressed_sparse_attention",
                "compressed_sparse_attention",
            ],
        },
        names=(
            (r"^model\.hc_head\.hc_", "hc_head_"),
            (r"^model\.embed_tokens\.", "embed."),
            (r"^model\.", ""),
            (r"\.attn\.norm\.", ".attn.kv_norm."),
        ),
        config={"topk_method": "noaux_tc"},
    ),
    "ExaoneMoEForCausalLM": Recipe(by="ExaoneMoeForCausalLM"),
    "FalconForCausalLM": Recipe(values={"ffn_hidden_size": 4 * H}),
    "GlmMoeDsaForCausalLM": Recipe(config=_NOAUX),
    "HYV3ForCausalLM": Recipe(
        config={"expert_hidden_dim": INNER, "first_k_dense_replace": 1, "qk_norm": True, "route_norm": True}
    ),
    "HYV4ForCausalLM": Recipe(
        names=(
            (r"\.hc_pre\.(hc_\w+_layer)\.", r".\1.hc_pre."),
            (r"\.hc_pre\.hc_head\.", ".hc_head."),
            (r"\.(mlp|shared_experts)\.linear_gate\.", r".\1.gate_proj."),
        )
    ),
    "IQuestCoderForCausalLM": Recipe(by="LlamaForCausalLM"),
    "InklingForCausalLM": Recipe(
        by="InklingForConditionalGeneration",
        values=_INKLING_VALUES,
        flat=True,
        config={**_INKLING, "model_type": "inkling_model", "vision_config": None, "audio_config": None},
        names=((r"model\.(audio|visual)\..*", ""),),
    ),
    "InklingForConditionalGeneration": Recipe(
        values=_INKLING_VALUES,
        config={
            "text_config": {**_INKLING, "model_type": "inkling_model"},
            "audio_config": {
                **{"decoder_dmodel": H, "dmel_min_value": -7.0, "dmel_max_value": 2.0, "use_audio_norm": True},
                "audio_mode": "dmel",
            },
            "vision_config": {
                **{"vision_encoder_type": "hmlp", "decoder_dmodel": H, "n_channels": 3},
                "use_vision_norm": True,
            },
        },
    ),
    "InternLM3ForCausalLM": Recipe(by="LlamaForCausalLM", config={"bias": False, "qkv_bias": False}),
    "KimiLinearForCausalLM": Recipe(
        values={
            **{"linear_head_dim": HEAD_DIM, "linear_num_heads": HEADS, "qk_head_dim": HEAD_DIM + 16},
            "layer_types": [*["linear_attention"] * 3, "full_attention"],
        },
        config={
            "linear_attn_config": {
                **{"kda_layers": [1, 2, 3], "full_attn_layers": [4], "head_dim": HEAD_DIM, "num_heads": HEADS},
                "short_conv_kernel_size": 4,
            },
            **{"mla_use_nope": True, "first_k_dense_replace": 1, "moe_router_activation_func": "sigmoid"},
        },
        names=((r"\.layers\.0\.block_sparse_moe\.", ".layers.0.mlp."),),
    ),
    "LLaMAForCausalLM": Recipe(by="LlamaForCausalLM"),
    "Lfm2MoeForCausalLM": Recipe(values={"layer_types": ["conv", "conv", "full_attention", "conv"]}),
    "LongcatFlashForCausalLM": Recipe(
        values={"qk_head_dim": HEAD_DIM + 16, "zero_expert_num": 4},
        config={"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity"},
        names=((rf".*\.experts\.({'|'.join(str(EXPERTS + zero) for zero in range(4))})\..*", ""),),
    ),
    "Mamba2ForCausalLM": Recipe(values={"num_heads": 8, "head_dim": 64, "n_groups": 4}),
    "MiMoForCausalLM": Recipe(by="Qwen2ForCausalLM"),
    "MiMoV2FlashForCausalLM": Recipe(config=_MIMO_V2),
    "MiMoV2ForCausalLM": Recipe(by="MiMoV2FlashForCausalLM", config=_MIMO_V2),
    "MiniCPMForCausalLM": Recipe(
        by="LlamaForCausalLM", config={"scale_depth": 1.4, "scale_emb": 12, "dim_model_base": 64, "num_experts": 0}
    ),
    "MiniMaxM2ForCausalLM": Recipe(config={"scoring_func": "sigmoid", "use_routing_bias": True, "rotary_dim": 16}),
    "NemotronForCausalLM": Recipe(values={"num_key_value_heads": KV_HEADS}),
    "OrionForCausalLM": Recipe(
        by="StableLmForCausalLM", values={"use_parallel_residual": False}, config={"rms_norm_eps": 1e-5}
    ),
    "HunYuanDenseV1ForCausalLM": Recipe(values={"head_dim": HEAD_DIM}),
    "HunYuanMoEV1ForCausalLM": Recipe(values={"head_dim": HEAD_DIM}),
    "PhiMoEForCausalLM": Recipe(by="PhimoeForCausalLM", values={"attention_bias": True, "lm_head_bias": True}),
    "Qwen4ExpForCausalLM": Recipe(
        values={
            **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": HEAD_DIM, "indexer_budget": 64},
            **{"indexer_compress_ratio": 16, "hc_lowrank": 64, "ngram_vocab_size_base": 1000, "split_ngram_parts": 4},
            **{"ple_layer_ids": [1], "eos_token_id": 2, "output_gate_type": "silu"},
        }
    ),
    "Rnj1ForCausalLM": Recipe(by="Gemma3ForCausalLM", config={"attention_bias": False}),
    "SolarForCausalLM": Recipe(
        by="LlamaForCausalLM",
        config={f"bskcn_{one}": [layer] for layer, one in enumerate(("1", "2", "3", "4"))} | {"bskcn_tv": [0.9, 0.8]},
    ),
    "TeleChat3ForCausalLM": Recipe(by="LlamaForCausalLM"),
    "TeleFLMForCausalLM": Recipe(
        by="LlamaForCausalLM", config={"use_mup": True, "mup_scale_factor": 1.0, "output_mult": 1.0, "input_mult": 1.0}
    ),
    "Zamba2ForCausalLM": Recipe(
        values={
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
            "n_mamba_heads": HEADS,
            **{"attention_hidden_size": 2 * H, "attention_head_dim": 2 * HEAD_DIM, "kv_channels": HEAD_DIM},
            **{"num_mem_blocks": 2, "adapter_rank": 16, "use_shared_attention_adapter": True, "mamba_headdim": 64},
            **{"num_query_groups": HEADS, "num_key_value_heads": HEADS, "hybrid_layer_ids": [1, 3]},
        }
    ),
}
"""In the order of their names."""
