"""What small checkpoints of multimodal architectures need; see `architectures.py`."""

from __future__ import annotations

from typing import Any

from engines.observing.architectures import Recipe
from engines.observing.small_sizes import EXPERTS, HEAD_DIM, HEADS, INNER, KV_HEADS, LAYERS, VOCABULARY, H

_MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
_PATCHES = {"spatial_merge_size": 2, "temporal_patch_size": 2}
_SLIDING_MLA = {
    **{"swa_num_attention_heads": 2 * HEADS, "swa_num_key_value_heads": 2 * HEADS, "swa_q_lora_rank": 32},
    **{"swa_kv_lora_rank": 128, "swa_head_dim": 2 * HEAD_DIM + 16, "swa_qk_nope_head_dim": 2 * HEAD_DIM},
    **{"swa_qk_rope_head_dim": 16, "swa_v_head_dim": HEAD_DIM},
}

_FULL_GEMMA = {
    **{"attention_k_eq_v": True, "num_global_key_value_heads": KV_HEADS // 2, "global_head_dim": 2 * HEAD_DIM},
}
"""Heads of full attention, in the keys that the hub has."""

OTHER_FORMS = ("Gemma4MoeForConditionalGeneration",)
"""Recipes of other forms of an architecture, which vLLM's registry does not name."""

MULTIMODAL: dict[str, Recipe] = {
    "CohereAsrForConditionalGeneration": Recipe(
        values={
            "num_key_value_heads": HEADS,
            "encoder_config": {"hidden_size": 2 * H, "intermediate_size": 2 * INNER, "num_key_value_heads": HEADS},
        },
        config={
            "encoder": {
                **{"feat_in": 128, "feat_out": -1, "n_layers": LAYERS, "d_model": 2 * H, "n_heads": HEADS},
                **{"ff_expansion_factor": INNER // H, "subsampling": "dw_striding", "subsampling_factor": 8},
                **{"subsampling_conv_channels": H, "causal_downsampling": False, "self_attention_model": "rel_pos"},
                **{"att_context_size": [-1, -1], "xscaling": False, "untie_biases": True, "pos_emb_max_len": 512},
                **{"conv_kernel_size": 9, "conv_norm_type": "batch_norm", "conv_context_size": None},
            },
            "transf_decoder": {
                "config_dict": {
                    **{"hidden_size": H, "inner_size": INNER, "hidden_act": "relu", "num_attention_heads": HEADS},
                    **{"num_layers": LAYERS, "max_sequence_length": 512},
                }
            },
            "head": {"num_classes": VOCABULARY, "hidden_size": H, "log_softmax": True},
        },
        names=((r"^model\.", ""),),
    ),
    "CohereCompassForConditionalGeneration": Recipe(
        values={
            "tie_word_embeddings": True,
            "text_config": {
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "rope_parameters": {"sliding_attention": _MROPE, "full_attention": _MROPE},
            },
        }
    ),
    "Cosmos3EdgeForConditionalGeneration": Recipe(
        values={"text_config": {"rope_parameters": _MROPE}},
        folder="transformer",
        names=(
            (r"\.visual\.(.*)\.mlp\.up_proj\.", r".visual.\1.mlp.fc1."),
            (r"\.visual\.(.*)\.mlp\.down_proj\.", r".visual.\1.mlp.fc2."),
            (r"\.visual\.(.*)\.self_attn\.to_(q|k|v)\.", r".visual.\1.self_attn.\2_proj."),
        ),
    ),
    "DiffusionGemmaForBlockDiffusion": Recipe(
        values={
            "text_config": {"num_experts": EXPERTS, "top_k_experts": 2, "moe_intermediate_size": INNER},
            "vision_config": {"model_type": "gemma4_vision"},
        }
    ),
    "Dots3NoteForCausalLM": Recipe(
        by="Dots3NoteForConditionalGeneration",
        values={
            "text_config": {
                **_SLIDING_MLA,
                **{"num_key_value_heads": HEADS, "head_dim": HEAD_DIM + 16, "sliding_window": 64},
                "layer_types": ["indexed_attention"] + ["sliding_attention"] * 3,
            },
            "vision_config": {"adapter_in_dim": H, "adapter_out_dim": H, "pyramid_num_routed": [-1, -1, 4, 8]},
            "audio_config": {
                "adapter_input_size": H,
                "adapter_out_dim": H,
                "downsample_hidden_size": 32,
                "conv_output_size": 512,
            },
        },
        flat=True,
        files={"added_tokens.json": {"<|imgpad|>": 431}},
        config={
            **_SLIDING_MLA,
            **{"per_layer_config": None, "rope_parameters": None, "rope_theta": 8e7, "swa_rope_theta": 5e4},
            **{"attention_gate_type": "headwise", "swa_attention_gate_type": "headwise"},
            **{"apply_mla_qkv_lora_rescale": True, "first_k_dense_replace": 1, "moe_layer_freq": 1},
            **{"sliding_window_size": 64, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
            "num_nextn_predict_layers": 0,
            "vision_config": {
                **{"embed_dim": H, "pyramid_num_routed": [-1, -1, 4, 8], "adapter_type": "patch_merger"},
                **{"per_layer_config": None, "rope_parameters": None},
            },
            "audio_config": {
                "whisper_config": {
                    **{"d_model": H, "encoder_layers": LAYERS, "encoder_attention_heads": HEADS},
                    **{"encoder_ffn_dim": INNER, "num_mel_bins": 128, "max_source_positions": 512},
                    "activation_function": "swiglu",
                },
                **{"whisper_adapter_in_dim": H, "whisper_adapter_out_dim": H},
            },
        },
    ),
    "Ernie4_5_VLMoeForConditionalGeneration": Recipe(
        values={"text_config": {"rope_parameters": {**_MROPE, "mrope_section": [6, 6, 4]}}},
        code=True,
        flat=True,
        config={
            "vision_config": {"mlp_ratio": INNER // H, "embed_dim": H},
            **{"pixel_hidden_size": H, "spatial_conv_size": 2, "temporal_conv_size": 2, "use_temporal_conv": True},
            "moe_num_experts": [EXPERTS, EXPERTS],
            **{"moe_layer_start_index": [1, 1], "moe_layer_end_index": [3, 3], "moe_layer_interval": 1},
            "im_patch_id": 431,
        },
        names=((r"^model\.vision_model\.", "vision_model."),),
    ),
    "Gemma3nForConditionalGeneration": Recipe(values={"vision_config": {"model_args": {"channel_multiplier": 0.25}}}),
    "Gemma4ForConditionalGeneration": Recipe(values={"vision_config": {}, "audio_config": {}}),
    "Gemma4MoeForConditionalGeneration": Recipe(
        by="Gemma4ForConditionalGeneration",
        values={
            "vision_config": {},
            "text_config": {
                **{"enable_moe_block": True, "num_experts": EXPERTS, "top_k_experts": 2},
                **{"moe_intermediate_size": INNER, "hidden_size_per_layer_input": 0},
                **_FULL_GEMMA,
            },
        },
        config={
            "architectures": ["Gemma4ForConditionalGeneration"],
            "text_config": {"per_layer_config": None, **_FULL_GEMMA},
        },
    ),
    "Gemma4UnifiedForConditionalGeneration": Recipe(values={"vision_config": {}, "audio_config": {}}),
    "Glm4vMoeForConditionalGeneration": Recipe(config={"text_config": {"use_qk_norm": False}}),
    "Glm5NextForConditionalGeneration": Recipe(
        values={"text_config": {"num_key_value_heads": HEADS, "qk_rope_head_dim": 0}},
        config={
            "text_config": {
                **{"mhc": True, "mla_use_nope": True, "indexer_rope_interleave": True},
                **{"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
            }
        },
    ),
    "Granite4VisionForConditionalGeneration": Recipe(
        values={
            "downsample_rate": "1/2",
            "deepstack_layer_map": [[0, 0], [1, 1]],
            "spatial_target_layers": [0, 1, 2, 3],
            "qformer_config": {"intermediate_size": 3072, "num_hidden_layers": 1},
            "vision_config": {"model_type": "siglip_vision_model", "patch_size": 14},
        }
    ),
    "HunYuanVLForConditionalGeneration": Recipe(values={"text_config": {"head_dim": HEAD_DIM}}),
    "Lfm2VlForConditionalGeneration": Recipe(values={"vision_config": {"vision_use_head": False}}),
    "MiniMaxM3SparseForConditionalGeneration": Recipe(
        values={
            "text_config": {
                "index_n_heads": KV_HEADS,
                "layer_types": ["full_attention"] + ["minimax_m3_sparse"] * 3,
                "mlp_layer_types": ["dense"] + ["sparse"] * 3,
            }
        },
        config={
            "text_config": {
                "hidden_act": "swigluoai",
                "moe_layer_freq": [0, 1, 1, 1],
                "sparse_attention_config": {
                    **{"use_sparse_attention": True, "sparse_index_dim": HEAD_DIM, "sparse_topk_blocks": 16},
                    **{"sparse_num_index_heads": KV_HEADS, "sparse_block_size": 128, "sparse_score_type": "max"},
                    **{"sparse_init_block": 0, "sparse_local_block": 1, "sparse_attention_freq": [0, 1, 1, 1]},
                    "sparse_disable_index_value": [0, 1, 1, 1],
                },
            },
            "vision_config": {"img_token_compression_config": _PATCHES},
        },
    ),
    "Molmo2ForConditionalGeneration": Recipe(
        values={
            "adapter_config": {"vision_feature_layer": [3, 1]},
            "text_config": {"additional_vocab_size": VOCABULARY},  # Saved in halves.
        },
        code=True,
        config={
            "adapter_config": {"model_type": "", "vit_layers": [3, 1], "pooling_attention_mask": True},
            "vit_config": {
                **{"hidden_size": H, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "head_dim": HEAD_DIM},
                **{"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "hidden_act": "gelu_pytorch_tanh"},
                **{"layer_norm_eps": 1e-6, "image_default_input_size": [56, 56], "image_patch_size": 14},
                "image_num_pos": 64,
            },
            "text_config": {
                "qkv_bias": False,
                "use_qk_norm": True,
                "layer_norm_eps": 1e-6,
                "rope_theta": 1e4,
                "model_type": "",
            },
        },
    ),
    "MossTranscribeDiarizeForConditionalGeneration": Recipe(
        config={
            "audio_config": {
                **{"model_type": "whisper", "d_model": H, "encoder_layers": LAYERS},
                **{"encoder_attention_heads": HEADS, "encoder_ffn_dim": INNER},
            },
            "adaptor_input_dim": 4 * H,
        },
        names=(
            (r"\.audio_tower\.", ".whisper_encoder."),
            (r"\.multi_modal_projector\.linear_1\.", ".vq_adaptor.layers.0."),
            (r"\.multi_modal_projector\.linear_2\.", ".vq_adaptor.layers.2."),
            (r"\.multi_modal_projector\.norm\.", ".vq_adaptor.layers.3."),
        ),
    ),
    "MuseGlimmerForConditionalGeneration": Recipe(values={"out_hidden_size": 4 * H}),
    "MuseSparkForConditionalGeneration": Recipe(
        values={
            "out_hidden_size": 4 * H,
            "text_config": {"moe_hidden_size": 128, "mlp_layer_types": ["dense"] + ["sparse"] * 3},
            "audio_config": {"hidden_sizes": [32, 64, 128, 256]},
        },
        config={"text_config": {"num_shared_experts": 0}},
    ),
    "NemotronH_Omni_Reasoning_V3": Recipe(
        # vLLM knows the sizes of the vision part by the name of it; this is the smallest that 4 ranks can divide.
        values={
            "vision_config": {
                **{"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
                **{"image_size": 224},
            },
            **{"vision_hidden_size": 768, "force_image_size": 224},
        },
        code=True,
        config={
            **{"patch_size": 16, "template": "nemotronh", "ps_version": "v2", "image_tag_type": "internvl"},
            **{"norm_mean": [0.5, 0.5, 0.5], "norm_std": [0.5, 0.5, 0.5], "vit_hidden_size": 768},
            "text_config": {"dtype": "bfloat16"},
            "vision_config": {
                "args": {
                    **{"model": "vit_base_patch16_224", "register_multiple": 10, "cls_token_per_teacher": True},
                    "teachers": [{"name": name, "use_summary": True} for name in ("clip", "siglip", "dino")],
                },
                "preferred_resolution": [224, 224],
            },
        },
        names=((r".*\.layer_scale\d\.lambda1$", ""),),
    ),
    "QianfanOCRForConditionalGeneration": Recipe(
        config={"ps_version": "v2", "select_layer": -1, "force_image_size": 56},
        names=((r"^language_model\.model\.encoder\.", "language_model.model."),),
    ),
    "Qwen3OmniMoeForConditionalGeneration": Recipe(
        values={"talker_config": {"spatial_merge_size": 2, "text_config": {"shared_expert_intermediate_size": INNER}}},
        config={
            "thinker_config": {
                "text_config": {"tie_word_embeddings": False},
                "vision_config": {"image_size": 128, "apply_vit_abs_pos_embed": True},
            }
        },
    ),
    "Qwen4ExpForConditionalGeneration": Recipe(
        values={
            "text_config": {
                **{"indexer_n_heads": KV_HEADS, "indexer_kv_heads": 1, "indexer_head_dim": HEAD_DIM},
                **{"indexer_budget": 64, "indexer_compress_ratio": 16, "hc_lowrank": 64, "output_gate_type": "silu"},
                **{"ngram_vocab_size_base": 1000, "split_ngram_parts": 4, "ple_layer_ids": [1], "eos_token_id": 2},
            }
        },
        config={"vision_config": {"deepstack_visual_indexes": []}},
    ),
    "Qwen3VLMoeForConditionalGeneration": Recipe(
        config={"text_config": {"norm_topk_prob": True}}, transposed=r".*\.experts\.(gate_up|down)_proj"
    ),
    "Step3p7ForConditionalGeneration": Recipe(
        values={
            "vision_config": {"mlp_ratio": 2.0},
            "text_config": {
                "layer_types": ["full_attention", "sliding_attention"] * 2,
                "mlp_layer_types": ["dense"] + ["sparse"] * 3,
                "num_sliding_attention_heads": 2 * HEADS,
                "share_expert_dim": INNER,
                "sliding_window": 64,
            },
        },
        code=True,
        config={
            "text_config": {
                **{"model_type": "step3p7_text", "architectures": ["Step3p5ForCausalLM"]},
                **{"num_attention_groups": KV_HEADS, "use_head_wise_attn_gate": True, "rope_theta": 10000.0},
                **{"moe_num_experts": EXPERTS, "moe_top_k": 2, "moe_layers_enum": "1,2,3", "need_fp32_gate": True},
                **{"use_moe_router_bias": True, "norm_expert_weight": True, "per_layer_config": None},
                "attention_other_setting": {
                    **{"attention_type": "sliding_attention", "num_attention_heads": 2 * HEADS},
                    **{"num_attention_groups": KV_HEADS, "head_dim": HEAD_DIM},
                },
            },
            "vision_config": {
                **{"model_type": "perception_encoder", "width": H, "layers": LAYERS, "heads": HEADS},
                **{"output_dim": None, "ls_init_value": 0.1, "use_abs_posemb": True, "use_cls_token": False},
                **{"use_rope2d": True, "use_ln_pre": True, "use_ln_post": False},
            },
        },
    ),
    "VoxtralForConditionalGeneration": Recipe(
        # vLLM has only a loader for the format of Mistral.
        file="consolidated.safetensors",
        files={
            "params.json": {
                **{"dim": H, "n_layers": LAYERS, "head_dim": HEAD_DIM, "hidden_dim": INNER, "n_heads": HEADS},
                **{"n_kv_heads": KV_HEADS, "norm_eps": 1e-5, "rope_theta": 1e8, "vocab_size": VOCABULARY},
                **{"max_position_embeddings": 512, "tied_embeddings": False},
                "multimodal": {
                    "whisper_model_args": {
                        "encoder_args": {
                            **{"dim": H, "n_layers": LAYERS, "head_dim": HEAD_DIM, "hidden_dim": INNER},
                            **{"n_heads": HEADS, "vocab_size": VOCABULARY, "max_source_positions": 512},
                            "audio_encoding_args": {
                                **{"sampling_rate": 16000, "frame_rate": 12.5, "num_mel_bins": 128},
                                **{"hop_length": 160, "window_size": 400},
                            },
                        },
                        "downsample_args": {"downsample_factor": INNER // H},
                    }
                },
            }
        },
        names=(
            (r"^audio_tower\.embed_positions\..*", ""),
            (r"^audio_tower\.conv1\.", "mm_whisper_embeddings.whisper_encoder.conv_layers.0."),
            (r"^audio_tower\.conv2\.", "mm_whisper_embeddings.whisper_encoder.conv_layers.1."),
            (r"^audio_tower\.layer_norm\.", "mm_whisper_embeddings.whisper_encoder.transformer.norm."),
            (r"^audio_tower\.", "mm_whisper_embeddings.whisper_encoder.transformer."),
            (r"^multi_modal_projector\.linear_1\.", "mm_whisper_embeddings.audio_language_projection.0."),
            (r"^multi_modal_projector\.linear_2\.", "mm_whisper_embeddings.audio_language_projection.2."),
            (r"^language_model\.lm_head\.", "output."),
            (r"^language_model\.model\.embed_tokens\.", "mm_whisper_embeddings.tok_embeddings."),
            (r"^language_model\.model\.", ""),
            (r"\.(mlp\.gate_proj|fc1)\.", ".feed_forward.w1."),
            (r"\.(mlp\.down_proj|fc2)\.", ".feed_forward.w2."),
            (r"\.mlp\.up_proj\.", ".feed_forward.w3."),
            (r"\.(post_attention_layernorm|final_layer_norm)\.", ".ffn_norm."),
            (r"\.(input_layernorm|self_attn_layer_norm)\.", ".attention_norm."),
            (r"\.self_attn\.([qkvo])(ut)?_proj\.", r".attention.w\1."),
        ),
    ),
}
"""In the order of their names."""
