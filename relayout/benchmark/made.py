"""Makes checkpoints of Llama-3.1-8B's names and shapes, for benchmarks: bytes from a pool, position-dependent."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from relayout.core.slices import num_bytes
from relayout.format.safetensors import TensorEntry, build_header

LAYER_NBYTES, EMBEDDING_NBYTES = 436_224_000, 2_101_355_000
"""Bytes of the tensors of a layer, and of embedding and head."""
POOL_NBYTES = 64 * 2**20 + 4093  # Not a multiple of a page, so that no two layers hold the same bytes.
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_LAYER = {
    "input_layernorm": (4096,),
    "mlp.down_proj": (4096, 14336),
    "mlp.gate_proj": (14336, 4096),
    "mlp.up_proj": (14336, 4096),
    "post_attention_layernorm": (4096,),
    "self_attn.k_proj": (1024, 4096),
    "self_attn.o_proj": (4096, 4096),
    "self_attn.q_proj": (4096, 4096),
    "self_attn.v_proj": (1024, 4096),
}

Tensor = tuple[str, str, tuple[int, ...]]
"""Name, dtype, shape."""


def layers_of(nbytes: float) -> int:
    """How many layers make a checkpoint of about so many bytes."""
    return max(1, round((nbytes - EMBEDDING_NBYTES) / LAYER_NBYTES))


def write_llama(folder: Path, num_layers: int, shard_nbytes: int = 5 * 10**9) -> int:
    """Write a Llama-3.1-8B-shaped checkpoint; returns the bytes of its tensors (5.6 GB at 8 layers)."""

    def tensors() -> Iterator[Tensor]:
        yield "lm_head.weight", "BF16", (128256, 4096)
        yield "model.embed_tokens.weight", "BF16", (128256, 4096)
        for layer in sorted(range(num_layers), key=str):
            for name, shape in _LAYER.items():
                yield f"model.layers.{layer}.{name}.weight", "BF16", shape
        yield "model.norm.weight", "BF16", (4096,)

    pool = np.random.default_rng(0).bytes(POOL_NBYTES)
    return write_checkpoint(folder, tensors(), _CONFIG | {"num_hidden_layers": num_layers}, shard_nbytes, pool)


def write_checkpoint(
    folder: Path, tensors: Iterable[Tensor], config: Mapping[str, object], shard_nbytes: int, pool: bytes = b""
) -> int:
    """Write a checkpoint of some shards; returns the bytes of its tensors.

    Args:
        pool: what the tensors' bytes are taken from, over and over. Empty: they are holes.
    """
    folder.mkdir(parents=True)
    shards: list[list[TensorEntry]] = [[]]
    offset = position = total = 0
    for name, dtype, shape in tensors:
        nbytes = num_bytes(dtype, shape)
        assert nbytes is not None
        if shards[-1] and offset + nbytes > shard_nbytes:
            shards.append([])
            offset = 0
        shards[-1].append(TensorEntry(name, dtype, shape, offset, nbytes))
        offset += nbytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= {tensor.name: file for tensor in shard}
        left = sum(tensor.nbytes for tensor in shard)
        total += left
        with (folder / file).open("wb") as stream:
            stream.write(build_header(shard, {"format": "pt"}, 8))
            stream.truncate(stream.tell() + left)
            while pool and left:
                left -= (count := stream.write(pool[position % len(pool) :][:left]))
                position += count
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return total
