"""Models of the hub: their numbers of heads, experts and groups, their vocabulary, as config.json says; small widths.

What a number of ranks does not divide, shares or pads depends on these numbers, which small checkpoints of round
numbers do not have: 28 heads, 10 KV heads, vocabularies of 49155, MLPs of 13696.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import lcm
from pathlib import Path
from typing import Any

from support.checkpoints import write_family
from support.families import FAMILIES
from support.quantized import QUANTIZED, Quantized, write_quantized

DEGREES = (1, 2, 4, 8, 16)
_NARROWER = 16
"""How many times the widths are divided that ranks do not divide: of the model, of a head, of low ranks."""
_LATENT = {"q_lora_rank": 256, "kv_lora_rank": 128}
"""Widths that no degree divides, where blocks of 128 share a scale."""
_WIDTHS = re.compile(
    r"hidden_size|word_embed_proj_dim|rotary_dim|n_embd|(qk_nope_|qk_rope_|v_|global_)?head_dim|(q|kv)_lora_rank"
)
_INNER = re.compile(r".*intermediate_size(_mlp)?|ffn_dim|ffn_hidden_size")


@dataclass(frozen=True)
class HubModel:
    """One model of the hub."""

    architecture: str
    config: Mapping[str, Any]
    """Of its config.json what sizes depend on, with the hub's numbers."""
    family: str = ""
    """Of `families.py`, which makes it, where transformers does not write what the hub has."""
    form: str = ""
    """Of `quantized.py`, by which its linear layers are stored: then all widths but the model's own are the hub's."""

    @property
    def is_quantized(self) -> bool:
        return bool(self.form) or "mxfp4" in self.family

    @property
    def heads(self) -> int:
        return self._count("num_attention_heads", "n_head")

    @property
    def kv_heads(self) -> int:
        """0: there are none of their own."""
        return self._count("num_key_value_heads", "num_kv_heads")

    @property
    def experts(self) -> int:
        """0: there are none."""
        return self._count("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")

    @property
    def vocabulary(self) -> int:
        return self._count("vocab_size")

    def _count(self, *keys: str) -> int:
        config = self.config.get("text_config", self.config)
        return next((int(config[key]) for key in keys if key in config), 0)

    def write(self, folder: Path) -> None:
        """Write a checkpoint with its counts and small widths."""
        from engines.observing import small_models

        if not self.family:
            small_models.write(self.architecture, folder, narrowed(self.config))
            return
        family = FAMILIES[self.family]
        if self.form:
            sizes = family.sizes_of({**self.config, "hidden_size": lcm(256, self.heads), **_LATENT})
            sizes |= {"D": self.config["head_dim"], "L": 2, "F": 1}
            write_quantized(Quantized(QUANTIZED[self.form].method, self.family, sizes), folder)
            return
        # Blocks that lie in the width of its experts are the hub's, too.
        sizes = family.sizes_of({**narrowed(self.config), "intermediate_size": self.config["intermediate_size"]})
        write_family(replace(family, sizes={**family.sizes, **sizes}), folder)


def is_equal(load: Mapping[str, Any]) -> bool:
    """Whether every parameter that was recorded of a load is the engine's own, and no whole tensor was read."""
    return bool(load.get("parameters")) and "error" not in load and not load["different"] and not load["whole_reads"]


def is_not_loaded(load: Mapping[str, Any]) -> bool:
    """Whether the engine's own load fails, too, where there is none through relayout."""
    return str(load.get("engine", load.get("error", ""))).startswith("the engine's own load: ")


def narrowed(config: Mapping[str, Any]) -> dict[str, Any]:
    """With small widths; those of vision parts are small as they are."""
    result: dict[str, Any] = {}
    for key, value in config.items():
        if key == "text_config":
            result[key] = narrowed(value)
        elif _WIDTHS.fullmatch(key):
            result[key] = value // _NARROWER
            if key == "hidden_size":  # Configurations refuse what heads do not divide.
                result[key] += -result[key] % config["num_attention_heads"]
        else:
            result[key] = _narrowed_inner(value) if _INNER.fullmatch(key) else value
    return result


def _narrowed_inner(width: int) -> int:
    """What as many ranks divide, up to 16."""
    for _ in range(4):
        width //= 2 if width % 32 == 0 else 1
    return width


def _decoder(hidden: int, inner: int, heads: int, kv_heads: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    return {
        **{"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads},
        **{"num_key_value_heads": kv_heads, "vocab_size": vocabulary, "tie_word_embeddings": False, **more},
    }


def _llama(*sizes: int, architecture: str = "LlamaForCausalLM", **more: Any) -> HubModel:
    return HubModel(architecture, _decoder(*sizes, head_dim=sizes[0] // sizes[2], **more))


def _of(architecture: str, *sizes: int, **more: Any) -> HubModel:
    return HubModel(f"{architecture}ForCausalLM", _decoder(*sizes, **more))


def _moe(architecture: str, *sizes: int, experts: int, of_expert: int, **more: Any) -> HubModel:
    return _of(architecture, *sizes, num_experts=experts, moe_intermediate_size=of_expert, **more)


def _multimodal(architecture: str, text: HubModel, **vision: Any) -> HubModel:
    """With a vision part, which has the hub's numbers of heads and of an MLP, and heads of 8."""
    config = {"text_config": text.config, "vision_config": vision}
    ties = {"tie_word_embeddings": text.config.get("tie_word_embeddings", False)}
    return HubModel(f"{architecture}ForConditionalGeneration", config | ties)


def _stored(form: str, family: str, *sizes: int, head_dim: int = 128, **more: Any) -> HubModel:
    """One whose linear layers a quantization tool has stored."""
    return HubModel("", _decoder(*sizes, head_dim=head_dim, **more), family, form)


def _deepseek(version: str, *sizes: int, experts: int, of_expert: int, shared: int) -> HubModel:
    latent = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    of_experts = {"n_routed_experts": experts, "n_shared_experts": shared, "moe_intermediate_size": of_expert}
    return _of(f"Deepseek{version}", *sizes, v_head_dim=128, **latent, **of_experts)


_SIGLIP = {"hidden_size": 128, "intermediate_size": 4304, "num_attention_heads": 16, "vision_use_head": False}
_PIXTRAL = {"hidden_size": 128, "head_dim": 8, "intermediate_size": 4096, "num_attention_heads": 16}
_QWEN2_5_VISION = {"hidden_size": 128, "num_heads": 16, "depth": 2}

HUB: dict[str, HubModel] = {
    "Llama-2-13B": _llama(5120, 13824, 40, 40, 32000),
    "Llama-3.1-8B": _llama(4096, 14336, 32, 8, 128256),
    "Llama-3.1-70B": _llama(8192, 28672, 64, 8, 128256),
    "Llama-3.1-405B": _llama(16384, 53248, 128, 8, 128256),
    "CodeLlama-7B": _llama(4096, 11008, 32, 32, 32016),
    "DeepSeek-Coder-33B": _llama(7168, 19200, 56, 8, 32256),
    "Yi-34B": _llama(7168, 20480, 56, 8, 64000),
    "Mistral-Large-2407": _llama(12288, 28672, 96, 8, 32768, architecture="MistralForCausalLM"),
    "Mistral-Small-24B": _of("Mistral", 5120, 32768, 32, 8, 131072, head_dim=128),
    "Mistral-Small-3.1-24B": _multimodal(
        "Mistral3", _of("", 5120, 32768, 32, 8, 131072, head_dim=128, model_type="mistral"), **_PIXTRAL
    ),
    "Granite-3.1-8B": _of("Granite", 4096, 12800, 32, 8, 49155),
    "Seed-OSS-36B": _of("SeedOss", 5120, 27648, 80, 8, 155136, head_dim=128),
    "Qwen2.5-0.5B": _of("Qwen2", 896, 4864, 14, 2, 151936),
    "Qwen2.5-7B": _of("Qwen2", 3584, 18944, 28, 4, 152064),
    "Qwen2.5-14B": _of("Qwen2", 5120, 13824, 40, 8, 152064),
    "Qwen2.5-72B": _of("Qwen2", 8192, 29568, 64, 8, 152064),
    "Qwen3-0.6B": _of("Qwen3", 1024, 3072, 16, 8, 151936, head_dim=128, tie_word_embeddings=True),
    "Qwen3-32B": _of("Qwen3", 5120, 25600, 64, 8, 151936, head_dim=128),
    "Phi-3-medium": _of("Phi3", 5120, 17920, 40, 10, 32064),
    "Phi-4": _of("Phi3", 5120, 17920, 40, 10, 100352),
    "Phi-3-mini": _of("Phi3", 3072, 8192, 32, 32, 32064),
    "Gemma-2B": _of("Gemma", 2048, 16384, 8, 1, 256000, head_dim=256, tie_word_embeddings=True),
    "Gemma-2-27B": _of(
        "Gemma2", 4608, 36864, 32, 16, 256000, head_dim=128, tie_word_embeddings=True, hidden_act="gelu_pytorch_tanh"
    ),
    "Gemma-3-1B": _of("Gemma3", 1152, 6912, 4, 1, 262144, head_dim=256, tie_word_embeddings=True),
    "Gemma-3-27B": _multimodal(
        "Gemma3", _of("", 5376, 21504, 32, 16, 262208, head_dim=128, tie_word_embeddings=True), **_SIGLIP
    ),
    "GLM-4-9B-0414": _of("Glm4", 4096, 13696, 32, 2, 151552, head_dim=128, attention_bias=True),
    "GLM-4-32B-0414": _of("Glm4", 6144, 23040, 48, 2, 151552, head_dim=128),
    "StarCoder2-3B": _of("Starcoder2", 3072, 12288, 24, 2, 49152, tie_word_embeddings=True),
    "StarCoder2-7B": _of("Starcoder2", 4608, 18432, 36, 4, 49152, tie_word_embeddings=True),
    "OLMo-2-32B": _of("Olmo2", 5120, 27648, 40, 8, 100352),
    "EXAONE-4.0-32B": _of("Exaone4", 5120, 27392, 40, 8, 102400),
    "Command-R": _of("Cohere", 8192, 22528, 64, 64, 256000, tie_word_embeddings=True),
    "Command-R+": _of("Cohere", 12288, 33792, 96, 8, 256000, tie_word_embeddings=True, use_qk_norm=True),
    "Command-R7B": _of("Cohere2", 4096, 14336, 32, 8, 256000, head_dim=128, tie_word_embeddings=True),
    "GPT-2": HubModel("GPT2LMHeadModel", {"n_embd": 768, "n_head": 12, "vocab_size": 50257}),
    "GPT-2-XL": HubModel("GPT2LMHeadModel", {"n_embd": 1600, "n_head": 25, "vocab_size": 50257}),
    "OPT-30B": HubModel(
        "OPTForCausalLM",
        {"hidden_size": 7168, "word_embed_proj_dim": 7168, "ffn_dim": 28672, "num_attention_heads": 56}
        | {"vocab_size": 50272},
    ),
    "Falcon-7B": HubModel(
        "FalconForCausalLM",
        {"hidden_size": 4544, "num_attention_heads": 71, "vocab_size": 65024, "ffn_hidden_size": 18176}
        | {"multi_query": True, "new_decoder_architecture": False},
    ),
    "Falcon-40B": HubModel(
        "FalconForCausalLM",
        {"hidden_size": 8192, "num_attention_heads": 128, "num_kv_heads": 8, "vocab_size": 65024}
        | {"ffn_hidden_size": 32768, "new_decoder_architecture": True},
    ),
    "Falcon-180B": HubModel(
        "FalconForCausalLM",
        {"hidden_size": 14848, "num_attention_heads": 232, "num_kv_heads": 8, "vocab_size": 65024}
        | {"ffn_hidden_size": 59392, "new_decoder_architecture": True},
    ),
    "Mixtral-8x7B": _of("Mixtral", 4096, 14336, 32, 8, 32000, num_local_experts=8, head_dim=128),
    "Mixtral-8x22B": _of("Mixtral", 6144, 16384, 48, 8, 32768, num_local_experts=8, head_dim=128),
    "Phi-3.5-MoE": _of("PhiMoE", 4096, 6400, 32, 8, 32064, num_local_experts=16),
    "Qwen1.5-MoE-A2.7B": _moe(
        "Qwen2Moe", 2048, 5632, 16, 16, 151936, experts=60, of_expert=1408, shared_expert_intermediate_size=5632
    ),
    "Qwen2-57B-A14B": _moe(
        "Qwen2Moe", 3584, 18944, 28, 4, 151936, experts=64, of_expert=2560, shared_expert_intermediate_size=20480
    ),
    "Qwen3-30B-A3B": _of(
        "Qwen3Moe", 2048, 6144, 32, 4, 151936, num_local_experts=128, moe_intermediate_size=768, head_dim=128
    ),
    "Qwen3-235B-A22B": _of(
        "Qwen3Moe", 4096, 12288, 64, 4, 151936, num_local_experts=128, moe_intermediate_size=1536, head_dim=128
    ),
    "OLMoE-1B-7B": _of("Olmoe", 2048, 1024, 16, 16, 50304, num_experts=64),
    "GLM-4.5": _of(
        "Glm4Moe", 5120, 12288, 96, 8, 151552, head_dim=128, n_routed_experts=160, moe_intermediate_size=1536,
        use_qk_norm=True, attention_bias=True, n_shared_experts=1,
    ),
    "GLM-4.5-Air": _of(
        "Glm4Moe", 4096, 10944, 96, 8, 151552, head_dim=128, n_routed_experts=128, moe_intermediate_size=1408,
        use_qk_norm=False, attention_bias=True, n_shared_experts=1,
    ),
    "DeepSeek-V2": _deepseek("V2", 5120, 12288, 128, 128, 102400, experts=160, of_expert=1536, shared=2),
    "DeepSeek-V3": _deepseek("V3", 7168, 18432, 128, 128, 129280, experts=256, of_expert=2048, shared=1),
    "MiniMax-M2": _of("MiniMaxM2", 3072, 1536, 48, 8, 200064, head_dim=128, rotary_dim=64, num_local_experts=256),
    "gpt-oss-120b": HubModel(
        "GptOssForCausalLM", _decoder(2880, 2880, 64, 8, 201088, head_dim=64, num_local_experts=128), "gpt_oss_mxfp4"
    ),
    "Hunyuan-A13B": _of(
        "HunYuanMoEV1", 4096, 3072, 32, 8, 128167, head_dim=128, num_experts=64, tie_word_embeddings=True
    ),
    "ERNIE-4.5-21B-A3B": _of(
        "Ernie4_5_Moe", 2560, 12288, 20, 4, 103424, moe_num_experts=64, moe_num_shared_experts=2,
        moe_intermediate_size=1536,
    ),
    "Llama-4-Scout": _multimodal(
        "Llama4", _of("", 5120, 8192, 40, 8, 202048, head_dim=128, intermediate_size_mlp=16384, num_local_experts=16),
        num_attention_heads=16, hidden_size=128, intermediate_size=512,
    ),
    "Granite-3.1-3B-A800M": _of("GraniteMoe", 1536, 512, 24, 8, 49155, num_local_experts=40, tie_word_embeddings=True),
    "Granite-4.0-H-Small": _of(
        "GraniteMoeHybrid", 4096, 768, 32, 8, 100352, num_local_experts=72, shared_intermediate_size=1536,
        mamba_n_heads=128, mamba_n_groups=1, mamba_expand=32, tie_word_embeddings=True,
    ),
    "Falcon-H1-7B": _of(
        "FalconH1", 3072, 12288, 12, 2, 130048, head_dim=128, mamba_n_heads=24, mamba_n_groups=1, mamba_d_ssm=24 * 64
    ),
    "Falcon-H1-34B": _of(
        "FalconH1", 5120, 21504, 20, 4, 261120, head_dim=128, mamba_n_heads=32, mamba_n_groups=2, mamba_d_ssm=32 * 64
    ),
    "Nemotron-Nano-9B-v2": _of(
        "NemotronH", 4480, 15680, 40, 8, 131072, head_dim=128, mamba_num_heads=128, n_groups=8,
        layers_block_type=["linear_attention", "full_attention", "linear_attention", "mlp"],
    ),
    "Jamba-v0.1": _of("Jamba", 4096, 14336, 32, 8, 65536, num_experts=16, attn_layer_period=4, attn_layer_offset=2),
    "Hunyuan-7B": _of("HunYuanDenseV1", 4096, 14336, 32, 8, 128167, head_dim=128, tie_word_embeddings=True),
    "AFM-4.5B": _of("Arcee", 2560, 18432, 20, 4, 128004, head_dim=128),
    "Apertus-70B": _of("Apertus", 8192, 43008, 64, 8, 131072, head_dim=128),
    "SmolLM3-3B": _of("SmolLM3", 2048, 11008, 16, 4, 128256, tie_word_embeddings=True),
    "Qwen3-Next-80B-A3B": _moe(
        "Qwen3Next", 2048, 5120, 16, 2, 151936, experts=512, of_expert=512, head_dim=256,
        shared_expert_intermediate_size=512, linear_num_key_heads=16, linear_num_value_heads=32,
    ),
    "Qwen3-8B-FP8": _stored("fp8_blocks", "qwen3", 4096, 12288, 32, 8, 151936),
    "Qwen3-32B-FP8": _stored("fp8_blocks", "qwen3", 5120, 25600, 64, 8, 151936),
    "Qwen3-30B-A3B-FP8": _stored(
        "fp8_blocks_moe", "qwen3_moe", 2048, 6144, 32, 4, 151936, num_experts=128, moe_intermediate_size=768
    ),
    "Qwen3-235B-A22B-FP8": _stored(
        "fp8_blocks_moe", "qwen3_moe", 4096, 12288, 64, 4, 151936, num_experts=128, moe_intermediate_size=1536
    ),
    "DeepSeek-V3-FP8": _stored(
        "fp8_blocks_deepseek", "deepseek_v3", 7168, 18432, 128, 128, 129280, n_routed_experts=256, n_shared_experts=1,
        moe_intermediate_size=2048, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128,
    ),
    "Llama-3.1-8B-AWQ": _stored("awq", "llama", 4096, 14336, 32, 8, 128256),
    "Llama-3.1-70B-AWQ": _stored("awq", "llama", 8192, 28672, 64, 8, 128256),
    "Llama-2-13B-AWQ": _stored("awq", "llama", 5120, 13824, 40, 40, 32000),
    "Qwen3-14B-AWQ": _stored("awq", "qwen3", 5120, 17408, 40, 8, 151936),
    "Qwen3-32B-AWQ": _stored("awq", "qwen3", 5120, 25600, 64, 8, 151936),
    "Qwen2.5-VL-3B": _multimodal(
        "Qwen2_5_VL", _of("", 2048, 11008, 16, 2, 151936), **_QWEN2_5_VISION, intermediate_size=3420,
        out_hidden_size=128,
    ),
    "Qwen2.5-VL-72B": _multimodal(
        "Qwen2_5_VL", _of("", 8192, 29568, 64, 8, 152064), **_QWEN2_5_VISION, intermediate_size=3456,
        out_hidden_size=512,
    ),
}  # fmt: skip
