"""What small checkpoints of multimodal architectures need; see `architectures.py`."""

from __future__ import annotations

from typing import Any

from architectures import Made
from small_sizes import EXPERTS, HEAD_DIM, HEADS, INNER, KV_HEADS, LAYERS, VOCABULARY, H

_MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
_PATCHES = {"spatial_merge_size": 2, "temporal_patch_size": 2}

MULTIMODAL: dict[str, Made] = {
    "CohereAsrForConditionalGeneration": Made(
        values={"num_key_value_heads": HEADS, "encoder_config": {"num_key_value_heads": HEADS}},
        said={
            "encoder": {
                **{"feat_in": 128, "feat_out": -1, "n_layers": LAYERS, "d_model": H, "n_heads": HEADS},
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
    "CohereCompassForConditionalGeneration": Made(
        values={
            "tie_word_embeddings": True,
            "text_config": {
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "rope_parameters": {"sliding_attention": _MROPE, "full_attention": _MROPE},
            },
        }
    ),
    "Cosmos3EdgeForConditionalGeneration": Made(
        values={"text_config": {"rope_parameters": _MROPE}},
        names=(
            (r"\.visual\.(.*)\.mlp\.up_proj\.", r".visual.\1.mlp.fc1."),
            (r"\.visual\.(.*)\.mlp\.down_proj\.", r".visual.\1.mlp.fc2."),
            (r"\.visual\.(.*)\.self_attn\.to_(q|k|v)\.", r".visual.\1.self_attn.\2_proj."),
        ),
    ),
    "DiffusionGemmaForBlockDiffusion": Made(
        values={
            "text_config": {"num_experts": EXPERTS, "top_k_experts": 2, "moe_intermediate_size": INNER},
            "vision_config": {"model_type": "gemma4_vision"},
        }
    ),
    "Ernie4_5_VLMoeForConditionalGeneration": Made(
        values={"text_config": {"rope_parameters": {**_MROPE, "mrope_section": [6, 6, 4]}}},
        code=True,
        flat=True,
        said={
            "vision_config": {"mlp_ratio": INNER // H, "embed_dim": H},
            **{"pixel_hidden_size": H, "spatial_conv_size": 2, "temporal_conv_size": 2, "use_temporal_conv": True},
            "moe_num_experts": [EXPERTS, EXPERTS],
            **{"moe_layer_start_index": [1, 1], "moe_layer_end_index": [3, 3], "moe_layer_interval": 1},
            "im_patch_id": 431,
        },
        names=((r"^model\.vision_model\.", "vision_model."),),
    ),
    "Gemma3nForConditionalGeneration": Made(values={"vision_config": {"model_args": {"channel_multiplier": 0.25}}}),
    "Gemma4ForConditionalGeneration": Made(values={"vision_config": {}, "audio_config": {}}),
    "Gemma4UnifiedForConditionalGeneration": Made(values={"vision_config": {}, "audio_config": {}}),
    "Glm4vMoeForConditionalGeneration": Made(said={"text_config": {"use_qk_norm": False}}),
    "Glm5NextForConditionalGeneration": Made(
        values={"text_config": {"num_key_value_heads": HEADS, "qk_rope_head_dim": 0}}
    ),
    "Granite4VisionForConditionalGeneration": Made(
        values={
            "downsample_rate": "1/2",
            "deepstack_layer_map": [[0, 0], [1, 1]],
            "spatial_target_layers": [0, 1, 2, 3],
            "qformer_config": {"intermediate_size": 3072, "num_hidden_layers": 1},
            "vision_config": {"model_type": "siglip_vision_model", "patch_size": 14},
        }
    ),
    "Lfm2VlForConditionalGeneration": Made(values={"vision_config": {"vision_use_head": False}}),
    "MiniMaxM3SparseForConditionalGeneration": Made(
        values={
            "text_config": {
                "index_n_heads": KV_HEADS,
                "layer_types": ["full_attention"] + ["minimax_m3_sparse"] * 3,
                "mlp_layer_types": ["dense"] + ["sparse"] * 3,
            }
        },
        said={
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
    "Molmo2ForConditionalGeneration": Made(
        values={
            "adapter_config": {"vision_feature_layer": [3, 1]},
            "text_config": {"additional_vocab_size": VOCABULARY},  # Saved in halves.
        },
        code=True,
        said={
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
    "MossTranscribeDiarizeForConditionalGeneration": Made(
        said={
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
    "MuseGlimmerForConditionalGeneration": Made(values={"out_hidden_size": 4 * H}),
    "MuseSparkForConditionalGeneration": Made(
        values={
            "out_hidden_size": 4 * H,
            "text_config": {"moe_hidden_size": 128, "mlp_layer_types": ["dense"] + ["sparse"] * 3},
            "audio_config": {"hidden_sizes": [32, 64, 128, 256]},
        },
        said={"text_config": {"num_shared_experts": 0}},
    ),
    "QianfanOCRForConditionalGeneration": Made(
        said={"ps_version": "v2", "select_layer": -1, "force_image_size": 56},
        names=((r"^language_model\.model\.encoder\.", "language_model.model."),),
    ),
    "Qwen3OmniMoeForConditionalGeneration": Made(
        values={"talker_config": {"spatial_merge_size": 2, "text_config": {"shared_expert_intermediate_size": INNER}}},
        said={
            "thinker_config": {
                "text_config": {"tie_word_embeddings": False},
                "vision_config": {"image_size": 128, "apply_vit_abs_pos_embed": True},
            }
        },
    ),
    "Qwen3VLMoeForConditionalGeneration": Made(
        said={"text_config": {"norm_topk_prob": True}}, transposed=r".*\.experts\.(gate_up|down)_proj"
    ),
    "Step3p7ForConditionalGeneration": Made(
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
        said={
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
}
"""In the order of their names."""
