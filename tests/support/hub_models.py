"""Models of the hub: what config.json says, and name, dtype and shape of every tensor; written as sparse checkpoints.

Names and shapes are those of `families.py`, at the sizes that config.json has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from support.families import FAMILIES, FP8_BLOCKS, Form, Stored

from relayout.benchmark.measure import write_checkpoint

_BITS = {"BF16": 16, "F16": 16, "F32": 32, "F8_E4M3": 8, "U8": 8}


@dataclass(frozen=True)
class Model:
    """One published checkpoint."""

    name: str
    family: str
    config: dict[str, Any]
    num_tensors: int
    nbytes: int
    """As published: `total_size` of the index, or parameters times item size. Not computed from the table."""
    tp: int = 8
    """A degree that people serve it at, and that its heads allow."""
    form: Form | None = None
    """Of its linear layers."""
    dtype: str = ""
    """Where it is not the family's."""

    def tensors(self) -> Iterator[Stored]:
        """Every tensor, layer by layer."""
        family = FAMILIES[self.family]
        family = replace(family, dtype=self.dtype or family.dtype)
        for entry in sorted(family.entries(family.sizes_of(self.config)), key=lambda entry: _in_order(entry.name)):
            if self.form and entry.is_linear:
                module = entry.name.removesuffix("weight")
                yield from ((module + name, *stored) for name, *stored in self.form.stored(entry.shape))
            else:
                yield entry.name, family.dtype_of(entry.name), entry.shape

    def write(self, folder: Path, shard_nbytes: int = 5 * 10**9) -> int:
        """Write true headers, and holes for the data; returns the bytes of the tensors."""
        return write_checkpoint(folder, self.tensors(), self.config, shard_nbytes)


def tensor_nbytes(tensor: Stored) -> int:
    """Stored bytes."""
    return prod(tensor[2]) * _BITS[tensor[1]] // 8


def _in_order(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _decoder(model_type: str, *sizes: int, **more: Any) -> dict[str, Any]:
    hidden, inner, num_layers, heads, kv_heads, vocab_size = sizes
    return {
        "model_type": model_type, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": num_layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab_size,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", **more,
    }  # fmt: skip


def _deepseek(model_type: str, heads: int, vocab_size: int, **more: Any) -> dict[str, Any]:
    return _decoder(
        model_type, 7168, 18432, 61, heads, heads, vocab_size,
        moe_intermediate_size=2048, n_shared_experts=1, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, quantization_config=dict(FP8_BLOCKS.config), **more,
    )  # fmt: skip


def _gpt_oss(num_layers: int, num_experts: int) -> dict[str, Any]:
    whole = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return _decoder(
        "gpt_oss", 2880, 2880, num_layers, 64, 8, 201088, architectures=["GptOssForCausalLM"], attention_bias=True,
        experts_per_token=4, head_dim=64, num_experts_per_tok=4, num_local_experts=num_experts, sliding_window=128,
        quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": whole},
    )  # fmt: skip


def _bloom(hidden: int, num_layers: int, heads: int) -> dict[str, Any]:
    return {  # As published: neither hidden_size nor n_head.
        "apply_residual_connection_post_layernorm": False, "architectures": ["BloomModel"],
        "layer_norm_epsilon": 1e-05, "model_type": "bloom", "n_embed": hidden, "n_layer": num_layers,
        "num_attention_heads": heads, "pretraining_tp": 4, "slow_but_exact": False, "vocab_size": 250880,
    }  # fmt: skip


def _falcon(hidden: int, num_layers: int, heads: int) -> dict[str, Any]:
    return {
        "alibi": False, "apply_residual_connection_post_layernorm": False, "architectures": ["FalconForCausalLM"],
        "bias": False, "hidden_size": hidden, "model_type": "falcon", "new_decoder_architecture": True,
        "num_attention_heads": heads, "num_hidden_layers": num_layers, "num_kv_heads": 8, "parallel_attn": True,
        "torch_dtype": "bfloat16", "vocab_size": 65024,
    }  # fmt: skip


_LLAMA = {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "mlp_bias": False}
_QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False}
_QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
    "mlp_only_layers": [], "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8,
}  # fmt: skip

_TABLE = (
    Model(
        "Llama-3.1-8B", "llama", _decoder("llama", 4096, 14336, 32, 32, 8, 128256, **_LLAMA), 291, 16_060_522_496
    ),
    Model(
        "Llama-3.1-70B", "llama", _decoder("llama", 8192, 28672, 80, 64, 8, 128256, **_LLAMA), 723, 141_107_412_992
    ),
    Model(
        "Llama-3.1-405B", "llama", _decoder("llama", 16384, 53248, 126, 128, 8, 128256, **_LLAMA), 1137,
        811_706_777_600,
    ),
    Model(
        "Mistral-7B-v0.3", "mistral", _decoder("mistral", 4096, 14336, 32, 32, 8, 32768), 291, 14_496_047_104
    ),
    Model(
        "Qwen2.5-0.5B", "qwen2_tied", _decoder("qwen2", 896, 4864, 24, 14, 2, 151936, tie_word_embeddings=True), 290,
        988_065_536, tp=2,
    ),
    Model(
        "Qwen2.5-7B", "qwen2", _decoder("qwen2", 3584, 18944, 28, 28, 4, 152064, **_QWEN2), 339, 15_231_233_024, tp=4
    ),
    Model(
        "Qwen2.5-72B", "qwen2", _decoder("qwen2", 8192, 29568, 80, 64, 8, 152064, max_window_layers=80, **_QWEN2), 963,
        145_412_407_296,
    ),
    Model(
        "Qwen3-8B", "qwen3", _decoder("qwen3", 4096, 12288, 36, 32, 8, 151936, head_dim=128), 399, 16_381_470_720
    ),
    Model(
        "Qwen1.5-MoE-A2.7B", "qwen2_moe",
        _decoder(
            "qwen2_moe", 2048, 5632, 24, 16, 16, 151936, architectures=["Qwen2MoeForCausalLM"], decoder_sparse_step=1,
            moe_intermediate_size=1408, norm_topk_prob=False, num_experts=60, num_experts_per_tok=4,
            shared_expert_intermediate_size=5632,
        ),
        4659,  # 3 + 24 * (14 + 60 * 3)
        # Embedding and head 2 * 151936 * 2048 * 2 = 1_244_659_712; last norm 4_096; a layer 1_141_121_024:
        #   norms 8_192, q k v 3 * 8_388_608, their biases 3 * 4_096, o 8_388_608, router 245_760,
        #   shared expert 3 * 23_068_672, its gate 4_096, experts 60 * 3 * 5_767_168
        28_631_568_384,
    ),
    Model(
        "Qwen3-30B-A3B", "qwen3_moe",
        _decoder("qwen3_moe", 2048, 6144, 48, 32, 4, 151936, moe_intermediate_size=768, **_QWEN3_MOE), 18_867,
        61_064_245_248,
    ),
    Model(
        "Qwen3-235B-A22B", "qwen3_moe",
        _decoder("qwen3_moe", 4096, 12288, 94, 64, 4, 151936, moe_intermediate_size=1536, **_QWEN3_MOE), 36_945,
        470_187_269_120,
    ),
    Model(
        "Mixtral-8x7B-v0.1", "mixtral",
        _decoder(
            "mixtral", 4096, 14336, 32, 32, 8, 32000, architectures=["MixtralForCausalLM"], num_experts_per_tok=2,
            num_local_experts=8,
        ),
        995, 93_405_585_408,
    ),
    Model(
        "DeepSeek-V3", "deepseek_v3",
        _deepseek(
            "deepseek_v3", 128, 129280, architectures=["DeepseekV3ForCausalLM"], attention_bias=False, ep_size=1,
            first_k_dense_replace=3, moe_layer_freq=1, n_group=8, n_routed_experts=256, num_experts_per_tok=8,
            num_nextn_predict_layers=1,
        ),
        91_991, 688_574_839_360, form=FP8_BLOCKS,
    ),
    Model(
        "Kimi-K2-Instruct", "kimi_k2",
        _deepseek(
            "kimi_k2", 64, 163840, first_k_dense_replace=1, n_routed_experts=384, num_nextn_predict_layers=0
        ),
        139_583, 1_029_173_249_888, form=FP8_BLOCKS,
    ),
    Model("gpt-oss-20b", "gpt_oss_mxfp4", _gpt_oss(24, 32), 459, 13_761_264_768),
    Model("gpt-oss-120b", "gpt_oss_mxfp4", _gpt_oss(36, 128), 687, 65_248_815_744),
    Model(
        "gpt2", "gpt2_hub",
        {
            "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12,
            "n_layer": 12, "n_positions": 1024, "vocab_size": 50257,
        },
        160, 548_090_880, tp=4,
    ),
    Model("bloom-560m", "bloom_hub", _bloom(1024, 24, 16), 293, 1_118_429_184),
    Model("bloom", "bloom_hub", _bloom(14336, 70, 112), 845, 352_494_542_848, dtype="BF16"),
    Model("falcon-40b", "falcon_40b", _falcon(8192, 60, 128), 484, 83_671_941_120),
    Model("falcon-180B", "falcon_40b", _falcon(14848, 80, 232), 644, 359_045_130_240),
)  # fmt: skip
MODELS = {model.name: model for model in _TABLE}
