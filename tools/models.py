"""Models of the hub: what config.json says, and name, dtype and shape of every tensor; written as sparse checkpoints.

Shapes and counts are those of the published checkpoints; `total_size` of their index is what the tests compare with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

Tensor = tuple[str, str, tuple[int, ...]]
"""Name, dtype, shape."""

_BITS = {"BF16": 16, "F16": 16, "F32": 32, "F8_E4M3": 8, "U8": 8}


@dataclass(frozen=True)
class Model:
    """One published checkpoint."""

    name: str
    config: dict[str, Any]
    tensors: Callable[[], Iterable[Tensor]]
    tp: int = 8
    """A degree that people serve it at, and that its heads allow."""

    def write(self, folder: Path, shard_nbytes: int = 5 * 10**9) -> int:
        """Write true headers, and holes for the data; returns the bytes of the tensors."""
        folder.mkdir(parents=True)
        shards: list[list[Tensor]] = [[]]
        room = shard_nbytes
        for tensor in self.tensors():
            nbytes = tensor_nbytes(tensor)
            if shards[-1] and nbytes > room:
                shards.append([])
                room = shard_nbytes
            shards[-1].append(tensor)
            room -= nbytes
        weight_map = {}
        total = 0
        for number, shard in enumerate(shards, 1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
            end = 0
            for name, dtype, shape in shard:
                start, end = end, end + tensor_nbytes((name, dtype, shape))
                header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
                weight_map[name] = file
            text = json.dumps(header, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)
            with (folder / file).open("wb") as stream:
                stream.write(len(text).to_bytes(8, "little") + text)
                stream.truncate(8 + len(text) + end)
            total += end
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder / "config.json").write_text(json.dumps(self.config))
        return total


def tensor_nbytes(tensor: Tensor) -> int:
    """Stored bytes."""
    return prod(tensor[2]) * _BITS[tensor[1]] // 8


def _config(model_type: str, hidden: int, layers: int, heads: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocabulary,
    } | more


def _attention(c: dict[str, Any], prefix: str, bias: bool = False, norms: bool = False) -> Iterator[Tensor]:
    hidden = c["hidden_size"]
    head_dim = c.get("head_dim") or hidden // c["num_attention_heads"]
    queries, keys = c["num_attention_heads"] * head_dim, c["num_key_value_heads"] * head_dim
    for part, rows in (("q", queries), ("k", keys), ("v", keys)):
        yield f"{prefix}.self_attn.{part}_proj.weight", "BF16", (rows, hidden)
        if bias:
            yield f"{prefix}.self_attn.{part}_proj.bias", "BF16", (rows,)
    yield f"{prefix}.self_attn.o_proj.weight", "BF16", (hidden, queries)
    if norms:
        for part in "qk":
            yield f"{prefix}.self_attn.{part}_norm.weight", "BF16", (head_dim,)


def _matrices(prefix: str, names: tuple[str, str, str], hidden: int, inner: int) -> Iterator[Tensor]:
    gate, up, down = names
    for name in (gate, up):
        yield f"{prefix}.{name}.weight", "BF16", (inner, hidden)
    yield f"{prefix}.{down}.weight", "BF16", (hidden, inner)


_LLAMA_NAMES = ("gate_proj", "up_proj", "down_proj")


def _llama_like(c: dict[str, Any], bias: bool = False, norms: bool = False) -> Iterator[Tensor]:
    """Dense decoders, and those whose MLP is one of experts."""
    hidden = c["hidden_size"]
    yield "model.embed_tokens.weight", "BF16", (c["vocab_size"], hidden)
    for layer in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield from _attention(c, prefix, bias, norms)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{norm}.weight", "BF16", (hidden,)
        if c["model_type"] == "mixtral":
            yield f"{prefix}.block_sparse_moe.gate.weight", "BF16", (c["num_local_experts"], hidden)
            for expert in range(c["num_local_experts"]):
                inside = f"{prefix}.block_sparse_moe.experts.{expert}"
                yield from _matrices(inside, ("w1", "w3", "w2"), hidden, c["intermediate_size"])
        elif c["model_type"] == "qwen3_moe":
            yield f"{prefix}.mlp.gate.weight", "BF16", (c["num_experts"], hidden)
            for expert in range(c["num_experts"]):
                inside = f"{prefix}.mlp.experts.{expert}"
                yield from _matrices(inside, _LLAMA_NAMES, hidden, c["moe_intermediate_size"])
        else:
            yield from _matrices(f"{prefix}.mlp", _LLAMA_NAMES, hidden, c["intermediate_size"])
    yield "model.norm.weight", "BF16", (hidden,)
    if not c["tie_word_embeddings"]:
        yield "lm_head.weight", "BF16", (c["vocab_size"], hidden)


def _llama(name: str, model_type: str, shape: tuple[int, ...], tp: int = 8, **more: Any) -> Model:
    hidden, inner, layers, heads, kv_heads, vocabulary = shape
    sizes = {"intermediate_size": inner, "num_key_value_heads": kv_heads, "tie_word_embeddings": False}
    c = _config(model_type, hidden, layers, heads, vocabulary, **sizes | more)
    bias, norms = model_type == "qwen2", model_type in ("qwen3", "qwen3_moe")
    return Model(name, c, lambda: _llama_like(c, bias, norms), tp)


def _fp8(name: str, rows: int, columns: int) -> Iterator[Tensor]:
    yield f"{name}.weight", "F8_E4M3", (rows, columns)
    yield f"{name}.weight_scale_inv", "F32", (-(-rows // 128), -(-columns // 128))


def _fp8_matrices(prefix: str, hidden: int, inner: int) -> Iterator[Tensor]:
    yield from _fp8(f"{prefix}.gate_proj", inner, hidden)
    yield from _fp8(f"{prefix}.up_proj", inner, hidden)
    yield from _fp8(f"{prefix}.down_proj", hidden, inner)


def _deepseek(c: dict[str, Any]) -> Iterator[Tensor]:
    hidden, heads, vocabulary = c["hidden_size"], c["num_attention_heads"], c["vocab_size"]
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    queries, latent, inner = c["q_lora_rank"], c["kv_lora_rank"], c["moe_intermediate_size"]
    yield "model.embed_tokens.weight", "BF16", (vocabulary, hidden)
    for layer in range(c["num_hidden_layers"] + c["num_nextn_predict_layers"]):
        prefix = f"model.layers.{layer}"
        if layer >= c["num_hidden_layers"]:  # Multi-token prediction.
            yield f"{prefix}.embed_tokens.weight", "BF16", (vocabulary, hidden)
            yield f"{prefix}.enorm.weight", "BF16", (hidden,)
            yield f"{prefix}.hnorm.weight", "BF16", (hidden,)
            yield f"{prefix}.eh_proj.weight", "BF16", (hidden, 2 * hidden)
            yield f"{prefix}.shared_head.norm.weight", "BF16", (hidden,)
            yield f"{prefix}.shared_head.head.weight", "BF16", (vocabulary, hidden)
        yield from _fp8(f"{prefix}.self_attn.q_a_proj", queries, hidden)
        yield f"{prefix}.self_attn.q_a_layernorm.weight", "BF16", (queries,)
        yield from _fp8(f"{prefix}.self_attn.q_b_proj", heads * (nope + rope), queries)
        yield from _fp8(f"{prefix}.self_attn.kv_a_proj_with_mqa", latent + rope, hidden)
        yield f"{prefix}.self_attn.kv_a_layernorm.weight", "BF16", (latent,)
        yield from _fp8(f"{prefix}.self_attn.kv_b_proj", heads * (nope + value), latent)
        yield from _fp8(f"{prefix}.self_attn.o_proj", hidden, heads * value)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{norm}.weight", "BF16", (hidden,)
        if layer < c["first_k_dense_replace"]:
            yield from _fp8_matrices(f"{prefix}.mlp", hidden, c["intermediate_size"])
            continue
        yield f"{prefix}.mlp.gate.weight", "BF16", (c["n_routed_experts"], hidden)
        yield f"{prefix}.mlp.gate.e_score_correction_bias", "F32", (c["n_routed_experts"],)
        for expert in range(c["n_routed_experts"]):
            yield from _fp8_matrices(f"{prefix}.mlp.experts.{expert}", hidden, inner)
        yield from _fp8_matrices(f"{prefix}.mlp.shared_experts", hidden, inner * c["n_shared_experts"])
    yield "model.norm.weight", "BF16", (hidden,)
    yield "lm_head.weight", "BF16", (vocabulary, hidden)


def _deepseek_model(name: str, model_type: str, heads: int, vocabulary: int, **more: Any) -> Model:
    c = _config(
        model_type,
        7168,
        61,
        heads,
        vocabulary,
        num_key_value_heads=heads,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        n_shared_experts=1,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        tie_word_embeddings=False,
        quantization_config={
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
        **more,
    )
    return Model(name, c, lambda: _deepseek(c))


def _gpt_oss(c: dict[str, Any]) -> Iterator[Tensor]:
    hidden, inner, experts = c["hidden_size"], c["intermediate_size"], c["num_local_experts"]
    yield "model.embed_tokens.weight", "BF16", (c["vocab_size"], hidden)
    for layer in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield from _attention(c, prefix, bias=True)
        yield f"{prefix}.self_attn.o_proj.bias", "BF16", (hidden,)
        yield f"{prefix}.self_attn.sinks", "BF16", (c["num_attention_heads"],)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{norm}.weight", "BF16", (hidden,)
        yield f"{prefix}.mlp.router.weight", "BF16", (experts, hidden)
        yield f"{prefix}.mlp.router.bias", "BF16", (experts,)
        for part, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            yield f"{prefix}.mlp.experts.{part}_blocks", "U8", (experts, rows, columns // 32, 16)
            yield f"{prefix}.mlp.experts.{part}_scales", "U8", (experts, rows, columns // 32)
            yield f"{prefix}.mlp.experts.{part}_bias", "BF16", (experts, rows)
    yield "model.norm.weight", "BF16", (hidden,)
    yield "lm_head.weight", "BF16", (c["vocab_size"], hidden)


def _gpt_oss_model(name: str, layers: int, experts: int) -> Model:
    c = _config(
        "gpt_oss",
        2880,
        layers,
        64,
        201088,
        intermediate_size=2880,
        num_key_value_heads=8,
        head_dim=64,
        num_local_experts=experts,
        tie_word_embeddings=False,
        quantization_config={"quant_method": "mxfp4"},
    )
    return Model(name, c, lambda: _gpt_oss(c))


def _gpt2(c: dict[str, Any]) -> Iterator[Tensor]:
    hidden = c["n_embd"]
    yield "wte.weight", "F32", (c["vocab_size"], hidden)
    yield "wpe.weight", "F32", (c["n_positions"], hidden)
    for layer in range(c["n_layer"]):
        yield f"h.{layer}.attn.bias", "F32", (1, 1, c["n_positions"], c["n_positions"])
        for part, rows, columns in (
            ("attn.c_attn", hidden, 3 * hidden),
            ("attn.c_proj", hidden, hidden),
            ("mlp.c_fc", hidden, 4 * hidden),
            ("mlp.c_proj", 4 * hidden, hidden),
        ):
            yield f"h.{layer}.{part}.weight", "F32", (rows, columns)
            yield f"h.{layer}.{part}.bias", "F32", (columns,)
        for norm in ("ln_1", "ln_2"):
            yield f"h.{layer}.{norm}.weight", "F32", (hidden,)
            yield f"h.{layer}.{norm}.bias", "F32", (hidden,)
    yield "ln_f.weight", "F32", (hidden,)
    yield "ln_f.bias", "F32", (hidden,)


_GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}


def _bloom(c: dict[str, Any]) -> Iterator[Tensor]:
    hidden, dtype = c["n_embed"], "F16" if c["torch_dtype"] == "float16" else "BF16"
    yield "word_embeddings.weight", dtype, (c["vocab_size"], hidden)

    def pair(name: str, *shape: int) -> Iterator[Tensor]:
        yield f"{name}.weight", dtype, shape
        yield f"{name}.bias", dtype, shape[:1]

    yield from pair("word_embeddings_layernorm", hidden)
    yield from pair("ln_f", hidden)
    for layer in range(c["n_layer"]):
        yield from pair(f"h.{layer}.input_layernorm", hidden)
        yield from pair(f"h.{layer}.post_attention_layernorm", hidden)
        yield from pair(f"h.{layer}.self_attention.query_key_value", 3 * hidden, hidden)
        yield from pair(f"h.{layer}.self_attention.dense", hidden, hidden)
        yield from pair(f"h.{layer}.mlp.dense_h_to_4h", 4 * hidden, hidden)
        yield from pair(f"h.{layer}.mlp.dense_4h_to_h", hidden, 4 * hidden)


def _bloom_model(name: str, hidden: int, layers: int, heads: int, dtype: str) -> Model:
    c = {"model_type": "bloom", "n_layer": layers, "vocab_size": 250880, "torch_dtype": dtype}
    c |= {"n_embed": hidden, "num_attention_heads": heads}
    return Model(name, c, lambda: _bloom(c))


def _falcon(c: dict[str, Any]) -> Iterator[Tensor]:
    hidden, heads, kv_heads = c["hidden_size"], c["num_attention_heads"], c["num_kv_heads"]
    head_dim = hidden // heads
    yield "transformer.word_embeddings.weight", "BF16", (c["vocab_size"], hidden)
    for layer in range(c["num_hidden_layers"]):
        prefix = f"transformer.h.{layer}"
        for norm in ("ln_attn", "ln_mlp"):
            yield f"{prefix}.{norm}.weight", "BF16", (hidden,)
            yield f"{prefix}.{norm}.bias", "BF16", (hidden,)
        yield f"{prefix}.self_attention.query_key_value.weight", "BF16", ((heads + 2 * kv_heads) * head_dim, hidden)
        yield f"{prefix}.self_attention.dense.weight", "BF16", (hidden, hidden)
        yield f"{prefix}.mlp.dense_h_to_4h.weight", "BF16", (4 * hidden, hidden)
        yield f"{prefix}.mlp.dense_4h_to_h.weight", "BF16", (hidden, 4 * hidden)
    yield "transformer.ln_f.weight", "BF16", (hidden,)
    yield "transformer.ln_f.bias", "BF16", (hidden,)
    yield "lm_head.weight", "BF16", (c["vocab_size"], hidden)


def _falcon_model(name: str, hidden: int, layers: int, heads: int) -> Model:
    more = {"num_kv_heads": 8, "new_decoder_architecture": True, "multi_query": True, "bias": False}
    c = _config("falcon", hidden, layers, heads, 65024, **more)
    return Model(name, c, lambda: _falcon(c))


MODELS = (
    _llama("Llama-3.1-8B", "llama", (4096, 14336, 32, 32, 8, 128256)),
    _llama("Llama-3.1-70B", "llama", (8192, 28672, 80, 64, 8, 128256)),
    _llama("Llama-3.1-405B", "llama", (16384, 53248, 126, 128, 8, 128256)),
    _llama("Mistral-7B-v0.3", "mistral", (4096, 14336, 32, 32, 8, 32768)),
    _llama("Qwen2.5-0.5B", "qwen2", (896, 4864, 24, 14, 2, 151936), tp=2, tie_word_embeddings=True),
    _llama("Qwen2.5-7B", "qwen2", (3584, 18944, 28, 28, 4, 152064), tp=4),
    _llama("Qwen2.5-72B", "qwen2", (8192, 29568, 80, 64, 8, 152064)),
    _llama("Qwen3-8B", "qwen3", (4096, 12288, 36, 32, 8, 151936), head_dim=128),
    _llama(
        "Qwen3-30B-A3B",
        "qwen3_moe",
        (2048, 6144, 48, 32, 4, 151936),
        head_dim=128,
        num_experts=128,
        moe_intermediate_size=768,
    ),
    _llama(
        "Qwen3-235B-A22B",
        "qwen3_moe",
        (4096, 12288, 94, 64, 4, 151936),
        head_dim=128,
        num_experts=128,
        moe_intermediate_size=1536,
    ),
    _llama("Mixtral-8x7B-v0.1", "mixtral", (4096, 14336, 32, 32, 8, 32000), num_local_experts=8),
    _deepseek_model(
        "DeepSeek-V3",
        "deepseek_v3",
        128,
        129280,
        n_routed_experts=256,
        first_k_dense_replace=3,
        num_nextn_predict_layers=1,
    ),
    _deepseek_model(
        "Kimi-K2-Instruct",
        "kimi_k2",
        64,
        163840,
        n_routed_experts=384,
        first_k_dense_replace=1,
        num_nextn_predict_layers=0,
    ),
    _gpt_oss_model("gpt-oss-20b", 24, 32),
    _gpt_oss_model("gpt-oss-120b", 36, 128),
    Model("gpt2", _GPT2, lambda: _gpt2(_GPT2), tp=4),
    _bloom_model("bloom-560m", 1024, 24, 16, "float16"),
    _bloom_model("bloom", 14336, 70, 112, "bfloat16"),
    _falcon_model("falcon-40b", 8192, 60, 128),
    _falcon_model("falcon-180B", 14848, 80, 232),
)
