"""Makes checkpoints of Llama-3.1-8B's names and shapes, for benchmarks: bytes from a pool, position-dependent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path

import numpy as np

LAYER_NBYTES, EMBEDDING_NBYTES = 436_224_000, 2_101_355_000
"""Of a layer's tensors, and of the embedding's and the head's."""
POOL_NBYTES = 64 * 2**20 + 4093  # Not a multiple of a page, so that no two layers hold the same bytes.


def num_layers(nbytes: float) -> int:
    """How many layers make a checkpoint of about so many bytes."""
    return max(1, round((nbytes - EMBEDDING_NBYTES) / LAYER_NBYTES))


def llama_config(num_layers: int) -> dict[str, object]:
    """config.json of Llama-3.1-8B, with a number of layers of one's own."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def llama_tensors(num_layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of Llama-3.1-8B, all BF16."""
    yield "lm_head.weight", (128256, 4096)
    yield "model.embed_tokens.weight", (128256, 4096)
    for layer in sorted(range(num_layers), key=str):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (4096,)
        yield f"{prefix}.mlp.down_proj.weight", (4096, 14336)
        yield f"{prefix}.mlp.gate_proj.weight", (14336, 4096)
        yield f"{prefix}.mlp.up_proj.weight", (14336, 4096)
        yield f"{prefix}.post_attention_layernorm.weight", (4096,)
        yield f"{prefix}.self_attn.k_proj.weight", (1024, 4096)
        yield f"{prefix}.self_attn.o_proj.weight", (4096, 4096)
        yield f"{prefix}.self_attn.q_proj.weight", (4096, 4096)
        yield f"{prefix}.self_attn.v_proj.weight", (1024, 4096)
    yield "model.norm.weight", (4096,)


def write_llama(folder: Path, num_layers: int, shard_nbytes: int = 5 * 10**9) -> int:
    """Write a Llama-3.1-8B-shaped checkpoint; returns the bytes of its tensors (5.6 GB at 8 layers)."""
    folder.mkdir(parents=True)
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    room = shard_nbytes
    for name, shape in llama_tensors(num_layers):
        nbytes = 2 * prod(shape)
        if shards[-1] and nbytes > room:
            shards.append([])
            room = shard_nbytes
        shards[-1].append((name, shape))
        room -= nbytes
    pool = np.random.default_rng(0).bytes(POOL_NBYTES)
    weight_map = {}
    position = total = 0
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, shape in shard:
            weight_map[name] = file
            end = offset + 2 * prod(shape)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            left = offset
            while left:
                part = pool[position % POOL_NBYTES :][:left]
                stream.write(part)
                left -= len(part)
                position += len(part)
        total += offset
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (folder / "config.json").write_text(json.dumps(llama_config(num_layers), indent=2))
    return total
