"""Checkpoints written by transformers, and what a rank should hold of them, by numpy alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

Array = npt.NDArray[Any]

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 64,
}


def save_pretrained(folder: Path, config: Any, max_shard_size: str = "300KB") -> Path:
    """A model of random BF16 weights, every one of them, as transformers writes it."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():  # Norms would be all ones, biases all zeros.
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def llama_files(hidden: int, head_dim: int, mlp: int, layers: int, vocabulary: int) -> dict[str, bytes]:
    """A Llama in two shards, with an index; all values finite, those near each other unlike."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(layers):
        part = f"model.layers.{layer}."
        shapes |= {
            part + "self_attn.q_proj.weight": (8 * head_dim, hidden),
            part + "self_attn.k_proj.weight": (4 * head_dim, hidden),
            part + "self_attn.v_proj.weight": (4 * head_dim, hidden),
            part + "self_attn.o_proj.weight": (hidden, 8 * head_dim),
            part + "mlp.gate_proj.weight": (mlp, hidden),
            part + "mlp.up_proj.weight": (mlp, hidden),
            part + "mlp.down_proj.weight": (hidden, mlp),
            part + "input_layernorm.weight": (hidden,),
        }
    random = np.random.default_rng(5)
    tensors = {
        name: random.integers(0, 0x7C00, shape, np.uint16).view(np.float16) for name, shape in sorted(shapes.items())
    }
    shards = [dict(list(tensors.items())[::2]), dict(list(tensors.items())[1::2])]
    names = [f"model-{number:05}-of-00002.safetensors" for number in (1, 2)]
    weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "head_dim": head_dim,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    return {
        **{file: save(shard, {"format": "pt"}) for file, shard in zip(names, shards, strict=True)},
        "model.safetensors.index.json": json.dumps({"metadata": {}, "weight_map": weight_map}).encode(),
        "config.json": json.dumps(config).encode(),
    }


def read_tensors(folder: Path, pattern: str = "*.safetensors") -> dict[str, Array]:
    """Every tensor of a folder's files, by the stock safetensors package, as integers of the element's size."""
    import torch
    from safetensors import safe_open

    tensors = {}
    for file in sorted(folder.glob(pattern)):
        with safe_open(file, framework="pt") as stock:
            for name in stock.keys():  # noqa: SIM118 (it is no mapping)
                tensors[name] = as_integers(stock.get_tensor(name))
    assert tensors, f"no tensors in {folder}"
    assert torch  # The stock reader needs it imported.
    return tensors


def as_integers(tensor: Any) -> Array:
    """A torch tensor's bits as a numpy array of unsigned integers of the same shape."""
    import torch

    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    result: Array = tensor.contiguous().view(kinds[tensor.element_size()]).numpy()
    return result


def expected_slice(name: str, whole: Array, rank: int, tp: int, *, heads: int = 8, kv_heads: int = 2) -> Array:
    """What `rank` of `tp` holds of a Llama-shaped model's tensor, written down from the engines' rules."""
    last = name.rsplit(".", 2)[-2]
    if tp == 1:
        return whole
    if last in ("embed_tokens", "lm_head"):
        padded = -(-whole.shape[0] // 64) * 64
        return whole[rank * padded // tp : (rank + 1) * padded // tp]
    if last in ("k_proj", "v_proj"):
        by_head = whole.reshape(kv_heads, -1, *whole.shape[1:])
        mine = by_head[[rank * kv_heads // tp]] if tp > kv_heads else np.split(by_head, tp)[rank]
        return mine.reshape(-1, *whole.shape[1:])
    if last in ("q_proj", "gate_proj", "up_proj"):
        return np.split(whole, tp, axis=0)[rank]
    if last in ("o_proj", "down_proj") and name.endswith(".weight"):
        return np.split(whole, tp, axis=1)[rank]
    assert "norm" in last or name.endswith(("o_proj.bias", "down_proj.bias")), name
    return whole
