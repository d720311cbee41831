"""Runs beside an engine: a small config.json for architectures that transformers has no class for.

It comes from the class of the configuration, if transformers or the engine has one. For others it begins as that of a
small Llama, with what `CONFIGS` adds, and gets each key whose lack is an error. Keys that an engine's class reads with
a default of its own stay away.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from engines.observing import small_models
from engines.observing.architectures import ARCHITECTURES
from engines.observing.multimodal_architectures import MULTIMODAL
from engines.observing.small_sizes import EXPERTS, HEAD_DIM, HEADS, INNER, KV_HEADS, LAYERS, VOCABULARY, H


@dataclass(frozen=True, slots=True)
class Small:
    """How the configuration of an architecture is made."""

    model_type: str = ""
    """The type of the configuration; of a class, if a package has one."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Of the class of the configuration, in place of small numbers."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Keys to add to config.json; None removes one."""
    files: Mapping[str, Any] = field(default_factory=dict)
    """JSON files beside config.json."""
    like: str = ""
    """The type whose class has such values, where no package has a class for the type itself."""
    names: tuple[tuple[str, str], ...] = ()
    """Words of names of the hub and of the engine's parameters, where the engine's code computes one from the other."""
    is_explicit: bool = False
    """True if config.json has the keys of `config` and those of a small Llama, and none of a class."""


LLAMA: dict[str, Any] = {
    **{"hidden_size": H, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS},
    **{"intermediate_size": INNER, "vocab_size": VOCABULARY, "head_dim": HEAD_DIM, "hidden_act": "silu"},
    **{"max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_AUTO_MAP = {"AutoConfig": "configuration_hub.HubConfig"}
_QWEN2 = {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
_QWEN3 = {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
_LLAMA = {**LLAMA, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
_STEP5: dict[str, Any] = {
    **{"num_attention_heads": 4 * KV_HEADS, "num_attention_groups": KV_HEADS, "head_dim": 192},
    "use_head_wise_attn_gate": True,
    "sparse_config": {"enabled": True, "index_tp_size": KV_HEADS, "sparse_indexer_num_heads": 2 * KV_HEADS},
}
_MOE: dict[str, Any] = {
    **{"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": INNER, "first_k_dense_replace": 1},
    **{"num_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0},
    **{
        "moe_shared_expert_intermediate_size": INNER,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
}
_LATENT: dict[str, Any] = {
    **{"q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32},
    "qk_head_dim": 48,
}
_TOWER: dict[str, Any] = {
    **{"hidden_size": H, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": INNER},
    **{"image_size": 56, "patch_size": 14, "num_channels": 3, "hidden_act": "gelu", "layer_norm_eps": 1e-5},
}
_INTERN_VIT: dict[str, Any] = {
    **_TOWER,
    **{
        "model_type": "intern_vit_6b",
        "architectures": ["InternVisionModel"],
        "qkv_bias": True,
        "initializer_factor": 1.0,
    },
    **{"qk_normalization": False, "norm_type": "layer_norm", "use_flash_attn": False},
}
_INTERNVL: dict[str, Any] = {
    **{"vision_config": _INTERN_VIT, "text_config": _QWEN2, "hidden_size": H, "downsample_ratio": 0.5},
    **{"select_layer": -1, "ps_version": "v2", "force_image_size": 56, "dynamic_image_size": True, "template": "x"},
    **{"min_dynamic_patch": 1, "max_dynamic_patch": 2, "use_thumbnail": True},
}
_SIGLIP = {**_TOWER, "model_type": "siglip_vision_model"}
_QWEN3_MOE = {**LLAMA, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], **_MOE}
_NAVIT: dict[str, Any] = {
    **_TOWER,
    **{"model_type": "siglip2_navit", "hidden_stride": 2, "window_size": 112, "fullatt_block_indexes": "3"},
    **{"preserve_original_pe": True, "use_rope": True, "num_patches": -1, "temporal_patch_size": 1},
    "attention_dropout": 0.0,
}
_CONFORMER: dict[str, Any] = {
    **{"activation": "swish", "activation_checkpointing": "", "attention_dim": H, "attention_heads": HEADS},
    **{"causal": True, "chunk_size": -1, "cnn_layer_norm": True, "conv_activation": "swish", "conv_glu_type": "swish"},
    **{"depthwise_multiplier": 1, "depthwise_seperable_out_channel": H, "dropout_rate": 0.0, "ext_pw_kernel_size": 1},
    **{"ext_pw_out_channel": H, "input_layer": "nemo_conv", "input_size": 80, "kernel_size": 3, "left_chunk": 18},
    **{"linear_units": INNER, "nemo_conv_settings": {"conv_channels": H}, "num_blocks": LAYERS, "time_reduction": 8},
    "relative_attention_bias_args": {"t5_bias_max_distance": 500, "type": "t5"},
}
_JET: dict[str, Any] = {
    "layer_types": ["attn", *["jet"] * (LAYERS - 2), "attn"],
    "efficient_attention_config": {
        "jet": {
            **{"mode": "chunk", "expand_v": 2.0, "num_heads": HEADS, "head_dim": HEAD_DIM, "norm_eps": 1e-5},
            **{"conv_size": 4, "dconv_generator_reduction": 8, "dconv_implementation": "triton"},
        }
    },
}
_AIMV2: dict[str, Any] = {
    **{"model_type": "aimv2", "hidden_size": H, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS},
    **{"intermediate_size": INNER, "image_size": 56, "patch_size": 14, "num_channels": 3},
}
_QWEN2_VISION: dict[str, Any] = {
    **{"depth": LAYERS, "embed_dim": H, "hidden_size": H, "num_heads": HEADS, "mlp_ratio": 2, "in_channels": 3},
    **{"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "hidden_act": "quick_gelu"},
    "model_type": "qwen2_vl_vision",
}
_QWEN2_5_VISION: dict[str, Any] = {
    **{"depth": LAYERS, "hidden_size": H, "out_hidden_size": H, "num_heads": HEADS, "intermediate_size": INNER},
    **{"in_channels": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "hidden_act": "silu"},
    **{"window_size": 112, "fullatt_block_indexes": [3], "tokens_per_second": 2, "model_type": "qwen2_5_vl_vision"},
}
_WHISPER: dict[str, Any] = {
    **{"model_type": "whisper", "d_model": H, "encoder_layers": LAYERS, "encoder_attention_heads": HEADS},
    **{"encoder_ffn_dim": INNER, "num_mel_bins": 128, "max_source_positions": 64},
}
_LINEAR_LAYERS = {"layer_types": [*["linear_attention"] * (LAYERS - 1), "full_attention"]}
_LINEAR: dict[str, Any] = {
    **{"linear_conv_kernel_dim": 4, "linear_key_head_dim": HEAD_DIM, "linear_value_head_dim": HEAD_DIM},
    **{"linear_num_key_heads": HEADS, "linear_num_value_heads": HEADS},
}


def _hub(model_type: str, *parts: Mapping[str, Any], **keys: Any) -> Small:
    """A type that only the hub has the configuration of."""
    config: dict[str, Any] = {}
    for part in (*parts, keys):
        config.update(part)
    return Small(model_type, config=config, is_explicit=True)


_DEEPSEEK_VL: dict[str, Any] = {
    **LLAMA,
    **_MOE,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "moe_layer_freq": 1,
    "use_mla": False,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "q_lora_rank": None,
    "kv_lora_rank": None,
    "v_head_dim": 0,
    "qk_nope_head_dim": 0,
    "qk_rope_head_dim": 0,
    "architectures": ["DeepseekForCausalLM"],
    "model_type": "deepseek_v2",
}
_DEEPSEEK_OCR = {
    "tile_tag": "2D",
    "global_view_pos": "head",
    "language_config": _DEEPSEEK_VL,
    "projector_config": {"input_dim": 2048, "n_embed": H, "projector_type": "linear"},
}

_MOONDREAM3 = _hub(
    "moondream3",
    config={
        "text": {
            **{
                "dim": H,
                "ff_dim": INNER,
                "n_layers": LAYERS,
                "vocab_size": VOCABULARY,
                "n_heads": HEADS,
                "n_kv_heads": HEADS,
            },
            "moe": {"start_layer": 1, "n_experts": EXPERTS, "n_experts_per_tok": 2, "expert_inner_dim": INNER},
        },
        "vision": {
            "enc_dim": H,
            "enc_n_layers": LAYERS,
            "enc_ff_dim": INNER,
            "enc_n_heads": HEADS,
            "proj_inner_dim": INNER,
        },
    },
)
_MOONDREAM3 = replace(
    _MOONDREAM3, names=((".mlp.fc1.weight", ".mlp.fc1_weight"), (".mlp.fc2.weight", ".mlp.fc2_weight"))
)
_BAILING_MM = _hub(
    "bailingmm_moe_v2_lite",
    llm_config={**LLAMA, **_MOE, "model_type": "bailing_moe_v2", "use_qk_norm": True},
    vision_config={**_QWEN2_5_VISION, "architectures": ["Qwen2_5_VisionTransformer"]},
    mlp_depth=2,
)
_OMNI = MULTIMODAL["NemotronH_Omni_Reasoning_V3"]
_RADIO: dict[str, dict[str, Any]] = {"values": dict(_OMNI.values), "config": dict(_OMNI.config)}

CONFIGS: dict[str, Small] = {
    "DoryForCausalLM": Small("dory", {"n_recurrent_layers": LAYERS}),
    "DeepseekOCRForCausalLM": Small("deepseek_vl_v2", {"text_config": None}, _DEEPSEEK_OCR),
    "DeepseekOCR2ForCausalLM": Small(
        "deepseek_vl_v2",
        {"text_config": None},
        {**_DEEPSEEK_OCR, "projector_config": {"input_dim": 896, "n_embed": H, "projector_type": "linear"}},
    ),
    "DeepseekVLV2ForCausalLM": Small(
        "deepseek_vl_v2",
        {"text_config": None},
        {"tile_tag": "2D", "language_config": _DEEPSEEK_VL, "projector_config": {"n_embed": H}},
    ),
    "UnlimitedOCRForCausalLM": Small("unlimited-ocr", {"text_config": None}, _DEEPSEEK_OCR),
    "Step3VLForConditionalGeneration": Small(
        "step3_vl", {"text_config": {"moe_layers_enum": "1,2,3", "architectures": ["Step3TextForCausalLM"]}}
    ),
    "Step3TextForCausalLM": Small("step3_text", {"moe_layers_enum": "1,2,3"}),
    "BailingMoeV3VLForConditionalGeneration": Small(
        "bailing_moe_v3_vl",
        {
            "mrope_section": [4, 2, 2],
            "text_config": {
                **{"layer_group_size": LAYERS, "layer_types": None, "layers_block_type": None, "no_kda_lora": True},
                "rope_parameters": {"mrope_section": [4, 2, 2]},
            },
        },
    ),
    "InternS1ProForConditionalGeneration": Small(
        "interns1_pro",
        {"text_config": {"rope_parameters": {"fope_init_factor": 0.1, "fope_sep_head": True, "num_inv_freq": 16}}},
        like="qwen3_vl_moe",
    ),
    "InternS2PreviewForConditionalGeneration": Small("intern_s2_preview", like="qwen3_5_moe"),
    "InternS2MobiusForConditionalGeneration": Small(
        "interns2_mobius", {"text_config": {"num_blocks": 2}}, like="qwen3_5_moe"
    ),
    "RForConditionalGeneration": Small("r", like="llava_onevision"),
    "Ovis2_5": _hub("ovis2_5", vit_config=_NAVIT, text_config=_QWEN3, visual_vocab_size=512),
    "Ovis2_6ForCausalLM": _hub("ovis2_6", vit_config=_NAVIT, text_config=_QWEN3, visual_vocab_size=512),
    "Ovis2_6_MoeForCausalLM": _hub("ovis2_6_moe", vit_config=_NAVIT, text_config=_QWEN3_MOE, visual_vocab_size=512),
    "Phi4ForCausalLMV": _hub(
        "phi4-siglip",
        mm_hidden_size=H,
        vision_config={**_TOWER, "num_patches": 16, "model_type": "siglip2_vision_model"},
    ),
    "Qwen3ASRRealtimeGeneration": Small("qwen3_asr"),
    "FunASRForConditionalGeneration": _hub(
        "funasr",
        hidden_size=1024,
        audio_encoder_conf={
            "output_size": 512,
            "attention_heads": 4,
            "linear_units": 512,
            "num_blocks": 4,
            "tp_blocks": 2,
        },
    ),
    "FireRedASR2ForConditionalGeneration": _hub(
        "fireredasr2",
        encoder_downsample_rate=2,
        audio_encoder_conf={
            "idim": 80,
            "n_layers_enc": 4,
            "n_head": 8,
            "d_model": H,
            "kernel_size": 33,
            "pe_maxlen": 512,
        },
    ),
    "MoonshotKimiaForCausalLM": _hub("kimi_audio"),
    **dict.fromkeys(("HfMoondream", "Moondream3ForCausalLM"), _MOONDREAM3),
    "MolmoForCausalLM": _hub(
        "molmo",
        embedding_size=VOCABULARY,
        attention_layer_norm=False,
        layer_norm_type="rms",
        norm_after=False,
        qkv_bias=True,
        weight_tying=False,
        layer_norm_eps=1e-5,
    ),
    "MossAudioModel": _hub("moss_audio", audio_config=_WHISPER, language_config=_QWEN3),
    **{
        name: Small(
            name,
            _RADIO["values"] | {"text_config": {"architectures": ["NemotronHForCausalLM"]}},
            _RADIO["config"],
            like="nemotron_h_omni",
            names=((".radio_model.model.blocks.", ".model.encoder.layers."), (".radio_model.model.", ".model.")),
        )
        for name in (
            *("NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Super_Omni_Reasoning_V3", "NemotronH_Nano_VL_V2"),
        )
    },
    "NemotronHPuzzleForCausalLM": Small("nemotron_h_puzzle", {"hybrid_override_pattern": "M*-E"}, like="nemotron_h"),
    "Phi4MMForCausalLM": _hub(
        "phi4mm",
        img_processor=None,
        audio_processor={"name": "cascades", "config": _CONFORMER},
        embd_layer={
            "embedding_cls": "image_audio",
            "image_embd_layer": {"embedding_cls": "tune_image", "hd_transform_order": "sub_glb"},
            "audio_embd_layer": {"embedding_cls": "audio", "compression_rate": 8, "projection_cls": "mlp"},
        },
    ),
    "BaichuanForCausalLM": _hub("baichuan", hidden_size=4096),
    "BailingMoEForCausalLM": _hub("bailing_moe", _MOE),
    "DeepseekVL2ForCausalLM": Small(
        "deepseek_vl_v2", {}, {"tile_tag": "2D", "language_config": _DEEPSEEK_VL, "projector_config": {"n_embed": H}}
    ),
    "Ernie4_5_ForCausalLM": Small("ernie4_5"),
    "Grok1ForCausalLM": _hub(
        "grok-1", _MOE, num_local_experts=EXPERTS, embedding_multiplier_scale=1.0, output_multiplier_scale=1.0
    ),
    "Grok1ModelForCausalLM": _hub(
        "grok-1", _MOE, num_local_experts=EXPERTS, embedding_multiplier_scale=1.0, output_multiplier_scale=1.0
    ),
    "KimiK3LinearForCausalLM": Small("kimi_linear"),
    "LLaDA2MoeModelLM": _hub("llada2_moe", _MOE, partial_rotary_factor=0.5, rotary_dim=16, block_size=32),
    "MiniCPMSALAForCausalLM": Small("minicpm_sala"),
    "Phi3SmallForCausalLM": _hub(
        "phi3small",
        layer_norm_epsilon=1e-5,
        gegelu_limit=20.0,
        mup_use_scaling=True,
        mup_width_multiplier=8.0,
        mup_embedding_multiplier=10.0,
        mup_attn_multiplier=1.0,
        dense_attention_every_n_layers=1,
        dummy_token_indices=[3],
        rope_embedding_base=1e4,
        rope_position_scale=1.0,
        hidden_act="gegelu",
        blocksparse_block_size=64,
        blocksparse_homo_head_pattern=False,
        blocksparse_num_local_blocks=16,
        blocksparse_vert_stride=8,
        blocksparse_triton_kernel_block_size=64,
    ),
    "QWenLMHeadModel": _hub("qwen", layer_norm_epsilon=1e-5, kv_channels=HEAD_DIM, no_bias=True),
    "QuantMixtralForCausalLM": Small("mixtral"),
    "SDARForCausalLM": _hub("sdar"),
    "SDARMoeForCausalLM": _hub("sdar_moe", _MOE, decoder_sparse_step=1, mlp_only_layers=[]),
    "Sarashina2VisionForCausalLM": _hub("sarashina2_vision", vision_config=_QWEN2_VISION, text_config=_LLAMA),
    "TorchNativeLlamaForCausalLM": Small("llama"),
    "TorchNativePhi3ForCausalLM": Small("phi3"),
    "XverseForCausalLM": _hub("xverse", pad_token_id=1),
    "XverseMoeForCausalLM": _hub("xverse", num_experts=EXPERTS, moe_top_k=2, num_shared_experts=1, pad_token_id=1),
    "DotsOCRForCausalLM": _hub(
        "dots_ocr",
        vision_config={
            **{
                "model_type": "dots_vit",
                "embed_dim": H,
                "hidden_size": H,
                "intermediate_size": INNER,
                "num_channels": 3,
            },
            **{"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "patch_size": 14, "spatial_merge_size": 2},
            **{
                "temporal_patch_size": 1,
                "rms_norm_eps": 1e-5,
                "use_bias": False,
                "post_norm": True,
                "is_causal": False,
            },
        },
    ),
    "PixtralForConditionalGeneration": _hub(
        "pixtral",
        auto_map=_AUTO_MAP,  # transformers has a vision part of this name.
        text_config={**_LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"]},
        vision_config={
            **{"hidden_size": H, "num_channels": 3, "image_size": 56, "patch_size": 14, "intermediate_size": INNER},
            **{"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "rope_theta": 1e4, "image_token_id": 3},
        },
    ),
    "DbrxForCausalLM": _hub(
        "dbrx",
        d_model=H,
        n_heads=HEADS,
        n_layers=LAYERS,
        max_seq_len=512,
        attn_config={"kv_n_heads": KV_HEADS, "clip_qkv": 8.0, "rope_theta": 1e4},
        ffn_config={"ffn_hidden_size": INNER, "moe_num_experts": EXPERTS, "moe_top_k": 2},
    ),
    "MistralLarge3ForCausalLM": _hub(
        "mistral_large_3",
        _MOE,
        _LATENT,
        n_routed_experts=EXPERTS,
        n_shared_experts=1,
        moe_layer_freq=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
    ),
    "Step5ForCausalLM": Small("step5", config=_STEP5),
    "Step5ForConditionalGeneration": Small(
        "step5_vl",
        {
            "text_config": {**_STEP5, "architectures": ["Step5ForCausalLM"]},
            "vision_config": {"hidden_act": "gelu"},
        },
    ),
    "GLM4VForCausalLM": Small(
        "chatglm",
        config={
            "vision_config": {
                **{"dropout_prob": 0.0, "hidden_act": "gelu", "hidden_size": H, "image_size": 56, "in_channels": 3},
                **{"intermediate_size": INNER, "layer_norm_eps": 1e-6, "num_heads": HEADS, "num_positions": 17},
                **{"num_hidden_layers": LAYERS, "patch_size": 14, "scaling_factor": 8},
            }
        },
    ),
    "DeepseekV4ForConditionalGeneration": Small(
        "deepseek_v4_vl",
        {
            **ARCHITECTURES["DeepseekV4ForCausalLM"].values,
            **{"mlp_layer_types": None, "layer_types": None, "compress_ratios": [0, 128, 4, 4], "num_hash_layers": 1},
        },
        like="deepseek_v4",
    ),
    "DotsVLMForCausalLM": Small("dots_vlm", {"vision_config": {"num_dummy_heads": 0}}, {"num_nextn_predict_layers": 1}),
    "JetNemotronForCausalLM": _hub("jet_nemotron", _JET),
    "JetVLMForConditionalGeneration": _hub(
        "jet_vlm", text_config={**LLAMA, **_JET, "model_type": "jet_nemotron"}, vision_config=_SIGLIP
    ),
    "OlmoHybridForCausalLM": Small("olmo_hybrid", {"linear_num_value_heads": HEADS}),
    "FunAudioChatForConditionalGeneration": Small("funaudiochat", {"audio_config": {"pad_token_id": 0}}),
    "UltravoxModel": _hub("ultravox", audio_config=_WHISPER, text_config=_LLAMA),
    "BailingMM2NativeForConditionalGeneration": _BAILING_MM,
    "BailingMMNativeForConditionalGeneration": _BAILING_MM,
    "IQuestQ1ForCausalLM": Small(
        "iquest_q1",
        {
            "first_layers_types": ["full_attention"],
            "hybrid_layers_types_block": ["sliding_attention"],
            "num_hybrid_layers_block": LAYERS - 2,
            "last_layers_types": ["full_attention"],
            "layer_types": None,
        },
    ),
    "LlavaLlamaForCausalLM": Small(
        "llava_llama", like="llava", config={"mm_vision_tower": "openai/clip-vit-large-patch14-336"}
    ),
    "LlavaMistralForCausalLM": Small(
        "llava_mistral", like="llava", config={"mm_vision_tower": "openai/clip-vit-large-patch14-336"}
    ),
    "LlavaQwenForCausalLM": Small(
        "llava_qwen", like="llava", config={"mm_vision_tower": "openai/clip-vit-large-patch14-336"}
    ),
    "LlavaVidForCausalLM": Small(
        "llava_vid", like="llava", config={"mm_vision_tower": "openai/clip-vit-large-patch14-336"}
    ),
    "YiVLForCausalLM": Small("yi_vl", like="llava", config={"mm_vision_tower": "openai/clip-vit-large-patch14-336"}),
    "MossVLForConditionalGeneration": Small(
        "moss_vl", {"text_config": {"cross_attention_layers": [1, 3]}}, like="qwen3_vl"
    ),
    "MultiModalityCausalLM": _hub(
        "multi_modality",
        language_config=_LLAMA,
        vision_config={
            "cls": "CLIPVisionTower",
            "params": {
                **{"image_size": 384, "model_name": "siglip_large_patch16_384", "select_feature": "same"},
                "select_layer": -1,
            },
        },
        aligner_config={
            "cls": "MlpProjector",
            "params": {"depth": 2, "input_dim": 1024, "n_embed": H, "projector_type": "mlp_gelu"},
        },
        gen_vision_config={"cls": "VQ-16", "params": {"image_token_size": 512, "n_embed": 8}},
        gen_aligner_config={
            "cls": "MlpProjector",
            "params": {"depth": 2, "input_dim": 8, "n_embed": H, "projector_type": "mlp_gelu"},
        },
        gen_head_config={
            "cls": "vision_head",
            "params": {"image_token_embed": H, "image_token_size": 512, "n_embed": H},
        },
    ),
    "NVILAForConditionalGeneration": _hub("nvila", text_config=_QWEN2, vision_config=_SIGLIP),
    "NVILALiteForConditionalGeneration": _hub("nvila_lite", text_config=_QWEN2, vision_config=_SIGLIP),
    "POINTSV15ChatModel": _hub("pointsv1.5_chat", llm_config=_QWEN2, vision_config=_QWEN2_VISION),
    "MiMoV2ASRForCausalLM": Small("mimo_v2_asr", like="qwen2", config={"audio_config": _WHISPER}),
    "ZayaForCausalLM": Small(
        "zaya",
        {"num_query_groups_list": None},
        {"num_query_groups": KV_HEADS, "num_key_value_heads": KV_HEADS},
    ),
    "Ovis": _hub(
        "ovis",
        llm_config=_QWEN2,
        visual_tokenizer_config={
            **{
                "model_type": "aimv2_visual_tokenizer",
                "vocab_size": 512,
                "hidden_stride": 2,
                "backbone_config": _AIMV2,
            },
        },
    ),
    "AliceAIForCausalLM": _hub(
        "alice_ai",
        _MOE,
        _LINEAR,
        _LINEAR_LAYERS,
        shared_expert_intermediate_size=INNER,
        decoder_sparse_step=1,
        kda_allow_negative_eigenvalues=False,
        router_score_function="sigmoid",
        router_bias_correction=True,
        block_attn_res_block_size=2,
    ),
    "BailingMoeForCausalLM": _hub("bailing_moe", _MOE),
    "BailingMoeV2ForCausalLM": _hub("bailing_moe_v2", _MOE, use_qk_norm=True),
    "BailingMoeV2_5ForCausalLM": _hub(
        "bailing_moe_linear", _MOE, _LATENT, layer_group_size=LAYERS, group_norm_size=HEADS
    ),
    "BailingMoeV3ForCausalLM": _hub(
        "bailing_moe_v3",
        _MOE,
        _LATENT,
        layer_group_size=LAYERS,
        short_conv_kernel_size=4,
        rope_theta=1e4,
        no_kda_lora=True,
    ),
    "BeeForConditionalGeneration": _hub("bee", vision_config=_SIGLIP, text_config=_QWEN3),
    "DeciLMForCausalLM": _hub(
        "nemotron-nas",
        block_configs=[
            {
                "attention": {"no_op": False, "n_heads_in_group": HEADS // KV_HEADS, "replace_with_linear": False},
                "ffn": {"no_op": False, "ffn_mult": 2.0, "replace_with_linear": False},
            }
        ]
        * LAYERS,
    ),
    "DeepseekForCausalLM": _hub(
        "deepseek",
        n_routed_experts=EXPERTS,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=INNER,
        first_k_dense_replace=1,
        moe_layer_freq=1,
        norm_topk_prob=False,
    ),
    "DomynEdgeForCausalLM": _hub(
        "domyn_edge",
        position_layers=["rope"] * LAYERS,
        window_sizes=[[64, 0]] * LAYERS,
        per_layer_config={str(layer): {"head_dim": HEAD_DIM} for layer in range(LAYERS)},
    ),
    "Eagle2_5_VLForConditionalGeneration": _hub("eagle_2_5_vl", _INTERNVL, vision_config=_SIGLIP),
    "ExaoneForCausalLM": _hub("exaone", activation_function="silu", layer_norm_epsilon=1e-5, num_layers=LAYERS),
    "H2OVLChatModel": _hub("h2ovl_chat", _INTERNVL, use_msac=False),
    "HCXVisionV2ForCausalLM": _hub("vlm", vision_config=_QWEN2_5_VISION, text_config=_LLAMA),
    "IQuestLoopCoderForCausalLM": _hub("iquestloopcoder", loop_num=2, loop_window_size=64),
    "InternLM2ForCausalLM": _hub("internlm2", bias=False),
    "InternS1ForConditionalGeneration": _hub(
        "interns1",
        _INTERNVL,
        projector_hidden_act="gelu",
        vision_config={
            **_INTERN_VIT,
            "image_size": [56, 56],
            "patch_size": [14, 14],
            "attention_bias": True,
            "use_qk_norm": False,
            "use_absolute_position_embeddings": True,
            "use_mask_token": False,
            "model_type": "interns1_vision",
        },
    ),
    "InternVLChatModel": _hub("internvl_chat", _INTERNVL),
    "K2HorizonForCausalLM": _hub(
        "k2_horizon",
        _MOE,
        decoder_sparse_step=1,
        mlp_only_layers=[0],
        mova_num_experts=4,
        mova_num_experts_per_tok=2,
        layernorm_num_groups=4,
        router_scaling_factor=1.0,
        router_score_func="sigmoid",
        rope_head_dim=16,
        attention_gate_func="sigmoid",
    ),
    "KananaVForConditionalGeneration": _hub(
        "kanana-1.5-v",
        vision_config=_QWEN2_VISION,
        text_config=_LLAMA,
        projector_config={
            "encoder_hidden_size": H,
            "hidden_size": H,
            "output_hidden_size": H,
            "depth": 2,
            "mlp_depth": 2,
            "merge_size": 2,
            "pos_emb": True,
            "pos_emb_size": 16,
            "num_query_tokens": -1,
        },
    ),
    "KeyeForConditionalGeneration": _hub("Keye", vision_config={**_TOWER, "spatial_merge_size": 2}),
    "KeyeVL1_5ForConditionalGeneration": _hub("KeyeVL1_5", vision_config={**_TOWER, "spatial_merge_size": 2}),
    "Llama_Nemotron_Nano_VL": _hub("Llama_Nemotron_Nano_VL", _INTERNVL, projector_hidden_size=H, vit_hidden_size=H),
    "LlavaOnevision2ForConditionalGeneration": _hub(
        "llava_onevision2", vision_config={**_TOWER, "spatial_merge_size": 2}, text_config=_QWEN3
    ),
    "MiniCPMO": _hub(
        "minicpmo",
        vision_config={**_TOWER, "model_type": "siglip_vision_model"},
        audio_config=_WHISPER,
        version=2.6,
        query_num=16,
        audio_pool_step=2,
        audio_chunk_length=1.0,
    ),
    "MiniCPMV": _hub(
        "minicpmv", vision_config={**_TOWER, "model_type": "siglip_vision_model"}, version=2.6, query_num=16
    ),
    "MiniMaxM3SparseForCausalLM": Small("minimax_m3_vl_text"),
    "NVLM_D": _hub("NVLM_D", _INTERNVL),
    "NanbeigeForCausalLM": _hub("nanbeige"),
    "OpenCUAForConditionalGeneration": _hub("opencua", vision_config=_QWEN2_5_VISION, text_config=_QWEN2),
    "OpenPanguVLForConditionalGeneration": _hub("openpangu_vl", vision_config=_QWEN2_5_VISION),
    "PanguEmbeddedForCausalLM": _hub("PanguEmbedded", bias=True),
    "PanguProMoEV2ForCausalLM": _hub(
        "PanguProMoE",
        _MOE,
        n_routed_experts=EXPERTS,
        n_shared_experts=1,
        qk_nope_dim=32,
        qk_rope_dim=16,
        v_channels=32,
        param_sink_number=4,
        router_enable_expert_bias=True,
    ),
    "PanguUltraMoEForCausalLM": _hub(
        "pangu_ultra_moe", _MOE, _LATENT, n_routed_experts=EXPERTS, n_shared_experts=1, sandwich_norm=True
    ),
    "Param2MoEForCausalLM": _hub("param2moe", _MOE, rope_theta=1e4, rope_scaling=None),
    "Plamo3ForCausalLM": _hub(
        "plamo3",
        layer_types=["sliding_attention", *["full_attention"] * (LAYERS - 1)],
        sliding_window=64,
        interleaved_sliding_window=[64, None, None, None],
        rope_local_theta=1e4,
    ),
    "SarvamMLAForCausalLM": _hub("sarvam_mla", _MOE, _LATENT),
    "SarvamMoEForCausalLM": _hub("sarvam_moe", _MOE),
    "SkyworkR1VChatModel": _hub("skywork_chat", _INTERNVL),
    "Step1ForCausalLM": _hub("step1", num_attention_groups=KV_HEADS),
    "StepVLForConditionalGeneration": _hub(
        "step_robotics",
        vision_config={
            "width": H,
            "layers": LAYERS,
            "heads": HEADS,
            "image_size": 56,
            "patch_size": 14,
            "mlp_ratio": 2.0,
            "output_dim": None,
            "use_ln_pre": True,
            "use_ln_post": False,
            "use_abs_posemb": True,
            "use_rope2d": True,
            "use_cls_token": False,
            "ls_init_value": 0.1,
            "hidden_act": "gelu",
        },
        text_config=_QWEN3,
        projector_bias=False,
        understand_projector_stride=2,
    ),
    "TeleChat2ForCausalLM": _hub(
        "telechat",
        n_head=HEADS,
        n_layer=LAYERS,
        num_key_value_heads=KV_HEADS,
        layer_norm_epsilon=1e-5,
        ffn_hidden_size=INNER,
    ),
}
"""By architecture: types that no package has a configuration of, or names otherwise. Sources are the engines' classes,
and what config.json has on the hub."""

_GUESSED: tuple[tuple[str, Any], ...] = (
    (r".*eps(ilon)?", 1e-5),
    (r".*theta|rotary_emb_base|rope_base", 10000.0),
    (r".*(act|act_fn|activation|activation_function|act_func)", "silu"),
    (r".*(dropout|pdrop|_prob|_rate)", 0.0),
    (r".*(scale|scaling_factor|multiplier|_factor|scaling)", 1.0),
    (r"rope_(scaling|parameters)", None),
    (r"score_func(tion)?|scoring_func", "sigmoid"),
    (r"topk_method", "noaux_tc"),
    (r"layer_types", ["full_attention"] * LAYERS),
    (r".*(layers|layer_ids|layer_idx|indexes|indices)", []),
    (r"(bos|eos|pad|unk)_token_id", 1),
    (r".*(token_id|token_index|token_idx|_id|placeholder)", 3),
    (r"(use|is|has|enable|add|with|no|norm|qk|tie|apply|mlp|attention)_.*|.*(bias|norm|_prob)", False),
    (r"patch_size|.*merge_size|.*stride", 2),
    (r"(num|in)_channels|in_chans", 3),
)
"""Patterns of keys that a class reads without a default, and values that build it."""


def write(architecture: str, folder: Path, model_types: tuple[str, ...] = ()) -> str:
    """Write config.json, and return the type of the model.

    Args:
        architecture: its name.
        folder: to write to.
        model_types: the types that packages have of this architecture.

    Raises:
        LookupError: no package has a configuration, and `CONFIGS` has none.
    """
    small = CONFIGS.get(architecture)
    wanted = (small.model_type,) if small else model_types
    known = _classes()
    model_type = next((one for one in wanted if one in known), wanted[0] if small else "")
    if not model_type:
        raise LookupError(f"no package has a configuration for {architecture}")
    small = small or Small()
    if model_type in known and not small.is_explicit:
        config = {**_small_of(known[model_type](), small.values), "model_type": model_type}
    else:
        config = _small_of(known[small.like](), small.values) if small.like else LLAMA
        config = {**config, "model_type": model_type}
    if model_type not in known or "auto_map" in small.config:
        small_models.write_code(folder, config)
    config = small_models.merged({**config, "architectures": [architecture], "dtype": "bfloat16"}, small.config)
    (folder / "config.json").write_text(json.dumps(config, default=str))
    for name, content in small.files.items():
        (folder / name).write_text(json.dumps(content))
    return model_type


def names_of(architecture: str) -> tuple[tuple[str, str], ...]:
    """Return words of names of the hub, and of the engine's parameters."""
    return CONFIGS[architecture].names if architecture in CONFIGS else ()


def _small_of(default: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The default values of a configuration with small numbers, in all its parts. No class is called with them."""
    from transformers import PretrainedConfig

    parts = {key: value for key, value in vars(default).items() if isinstance(value, PretrainedConfig)}
    own = {key: value for key, value in default.to_dict().items() if key not in parts}
    config = {key: value for key, value in own.items() if key == "model_type" or key not in small_models.OF_ALL}
    config |= small_models.small_values(type(default), own)
    config |= {key: _small_of(part, {}) for key, part in parts.items()}
    return small_models.merged(config, values)


def _classes() -> Mapping[str, Any]:
    """Classes of configurations, by the type of the model."""
    from transformers import CONFIG_MAPPING

    own = []
    for module in ("vllm.transformers_utils.config", "sglang.srt.utils.hf_transformers.common"):
        with suppress(ImportError):
            own.append(import_module(module)._CONFIG_REGISTRY)
    return _Joined(*own, CONFIG_MAPPING)


class _Joined(dict[str, Any]):
    """Mappings that import what is asked for."""

    def __init__(self, *mappings: Mapping[str, Any]) -> None:
        super().__init__()
        self._mappings = mappings

    def __contains__(self, key: object) -> bool:
        return any(key in mapping for mapping in self._mappings)

    def __missing__(self, key: str) -> Any:
        return next(mapping[key] for mapping in self._mappings if key in mapping)


def supply(folder: Path, error: str) -> bool:
    """Give config.json a key that a class lacks by this error. False: it names none, or the key is there."""
    found = re.search(r"'\w*Config' object has no attribute '(\w+)'", error)
    if not found:
        return False
    file = folder / "config.json"
    config = json.loads(file.read_text())
    key = found[1]
    value = small_models.number_of(key)
    if value is None:
        value = next((guessed for pattern, guessed in _GUESSED if re.fullmatch(pattern, key)), False)
    parts = [config, *(part for name, part in config.items() if name.endswith("_config") and isinstance(part, dict))]
    if all(key in part for part in parts):
        return False
    for part in parts:
        part.setdefault(key, value)
    file.write_text(json.dumps(config))
    return True
