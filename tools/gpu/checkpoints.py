"""Checkpoints that vLLM serves, with random numbers of a size at which logits are finite and differ.

The shapes are those of known models. `small` makes the same checkpoints with shapes for a rehearsal on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import relayout

Tensors = dict[str, torch.Tensor]

SHARE = 0.01
"""Of the elements, which the second step of a training changes."""
_COMMON: dict[str, Any] = {"tie_word_embeddings": False, "max_position_embeddings": 2048, "dtype": "bfloat16"}
_LAYERS_OF_A_SHARD = 8


@dataclass(frozen=True)
class Model:
    """A kind of checkpoint: its config, in both sizes, and its layers."""

    config: str
    """The name of the config class in transformers."""
    architecture: str
    sizes: dict[str, Any]
    small: dict[str, Any]
    layer: Callable[[Any, int, Random], Tensors]

    def made(self, *, small: bool) -> Any:
        """Return the config."""
        import transformers

        config = getattr(transformers, self.config)(**_COMMON | self.sizes | (self.small if small else {}))
        config.architectures = [self.architecture]
        return config


class Random:
    """Makes tensors on a device."""

    def __init__(self, device: str) -> None:
        self._options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}

    def __call__(self, *shape: int) -> torch.Tensor:
        """Return normal numbers that keep the size of what they are multiplied with."""
        return torch.randn(*shape, **self._options) * shape[-1] ** -0.5

    def ones(self, length: int) -> torch.Tensor:
        """Return the weights of a norm."""
        return torch.ones(length, **self._options)


def _attention(config: Any, prefix: str, random: Random) -> Tensors:
    hidden = config.hidden_size
    head = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    rows = {"q": config.num_attention_heads, "k": config.num_key_value_heads, "v": config.num_key_value_heads}
    layer = {f"{prefix}self_attn.{part}_proj.weight": random(count * head, hidden) for part, count in rows.items()}
    layer[f"{prefix}self_attn.o_proj.weight"] = random(hidden, config.num_attention_heads * head)
    return layer | {f"{prefix}{norm}_layernorm.weight": random.ones(hidden) for norm in ("input", "post_attention")}


def _mlp(config: Any, prefix: str, inner: int, random: Random) -> Tensors:
    hidden = config.hidden_size
    return {
        f"{prefix}gate_proj.weight": random(inner, hidden),
        f"{prefix}up_proj.weight": random(inner, hidden),
        f"{prefix}down_proj.weight": random(hidden, inner),
    }


def _llama(config: Any, number: int, random: Random) -> Tensors:
    prefix = f"model.layers.{number}."
    return _attention(config, prefix, random) | _mlp(config, f"{prefix}mlp.", config.intermediate_size, random)


def _qwen3_moe(config: Any, number: int, random: Random) -> Tensors:
    prefix = f"model.layers.{number}."
    layer = _attention(config, prefix, random)
    layer |= {f"{prefix}self_attn.{part}_norm.weight": random.ones(config.head_dim) for part in "qk"}
    layer[f"{prefix}mlp.gate.weight"] = random(config.num_experts, config.hidden_size)
    for expert in range(config.num_experts):
        layer |= _mlp(config, f"{prefix}mlp.experts.{expert}.", config.moe_intermediate_size, random)
    return layer


def _llama4(config: Any, number: int, random: Random) -> Tensors:
    """Experts as released: one tensor for all experts, gate and up together, transposed."""
    prefix = f"model.layers.{number}."
    experts, hidden, inner = config.num_local_experts, config.hidden_size, config.intermediate_size
    layer = _attention(config, prefix, random)
    layer |= _mlp(config, f"{prefix}feed_forward.shared_expert.", inner, random)
    layer[f"{prefix}feed_forward.router.weight"] = random(experts, hidden)
    layer[f"{prefix}feed_forward.experts.gate_up_proj"] = random(experts, hidden, 2 * inner)
    layer[f"{prefix}feed_forward.experts.down_proj"] = random(experts, inner, hidden)
    return layer


_MOE: dict[str, Any] = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
MODELS = {
    "llama": Model(
        "LlamaConfig",
        "LlamaForCausalLM",
        # Llama-3.1-8B's, with a vocabulary that fits into a small checkpoint: 3.1 GB.
        {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"vocab_size": 32000, "num_hidden_layers": 6},
        {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8}
        | {"vocab_size": 1024, "num_hidden_layers": 2},
        _llama,
    ),
    "moe": Model(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        _MOE
        | {"hidden_size": 1024, "moe_intermediate_size": 512, "num_experts": 16, "num_experts_per_tok": 4}
        | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 2048}
        | {"vocab_size": 32000, "num_hidden_layers": 4},
        {"hidden_size": 256, "moe_intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
        | {"vocab_size": 1024, "head_dim": 64, "num_hidden_layers": 2},
        _qwen3_moe,
    ),
    # Llama-4-Scout has 48 layers of these shapes: 5.4 GB.
    "fused experts": Model(
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {"hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_local_experts": 16}
        | {"num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "interleave_moe_layer_step": 1}
        | {"vocab_size": 32000, "num_hidden_layers": 1, "num_experts_per_tok": 1},
        {"hidden_size": 256, "intermediate_size": 128, "intermediate_size_mlp": 256, "num_local_experts": 4}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1024},
        _llama4,
    ),
    # As many tensors of experts as DeepSeek-V3 has layers for (256 experts), each small: 99,840 of them, 6.5 GB.
    "small experts": Model(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        _MOE
        | {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 256, "num_experts_per_tok": 8}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512}
        | {"vocab_size": 1024, "num_hidden_layers": 130},
        {"num_experts": 16, "num_experts_per_tok": 4, "num_hidden_layers": 2},
        _qwen3_moe,
    ),
}


def layers_of(model: Model, config: Any, device: str) -> Iterator[Tensors]:
    """Yield the tensors of one layer after the other, then the others."""
    random = Random(device)
    for number in range(config.num_hidden_layers):
        yield model.layer(config, number, random)
    size = (config.vocab_size, config.hidden_size)
    norm = random.ones(config.hidden_size)
    yield {"model.embed_tokens.weight": random(*size), "lm_head.weight": random(*size), "model.norm.weight": norm}


def source_at(work: Path, name: str, device: str) -> Path:
    """Return the plain checkpoint of a model, made if it is missing, in shards of some layers."""
    model, folder = MODELS[name], work / name.replace(" ", "-")
    if folder.exists():
        return folder
    torch.manual_seed(0)
    config, fresh = model.made(small=device == "cpu"), folder.with_suffix(".new")
    fresh.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(fresh)
    shard: Tensors = {}
    number = 0
    for count, layer in enumerate(layers_of(model, config, device), 1):
        shard |= {key: tensor.cpu() for key, tensor in layer.items()}
        if count % _LAYERS_OF_A_SHARD == 0 or count > config.num_hidden_layers:
            number += 1
            save_file(shard, fresh / f"model-{number:05}.safetensors", {"format": "pt"})
            shard = {}
    fresh.rename(folder)
    return folder


def converted_at(work: Path, name: str, device: str, tp: int) -> Path:
    """Return the converted checkpoint of a model, made if it is missing."""
    source = source_at(work, name, device)
    folder = source.with_name(f"{source.name}-tp{tp}")
    if not folder.exists():
        relayout.convert(source, folder, tp=tp)
    return folder


def steps_at(work: Path, name: str, device: str, shares: tuple[float, ...] = (SHARE,)) -> tuple[Path, list[Path]]:
    """Return a repository of steps that begins with a model, and a plain folder of each step after the first.

    Each step changes a share of the elements, by their lowest bits.
    """
    from gpu.live import change

    source = source_at(work, name, device)
    root = source.with_name(f"{source.name}-steps")
    folders = [source.with_name(f"{source.name}-step{number}") for number in range(1, len(shares) + 1)]
    if folders[-1].exists():
        return root, folders
    tensors = {key: tensor.to(device) for key, tensor in relayout.load(source).items()}
    publisher = relayout.Publisher(root, config=source, tp=1, full_every=100)
    publisher.publish(tensors, 0)
    for number, (share, folder) in enumerate(zip(shares, folders, strict=True), 1):
        change(tensors, share)
        publisher.publish(tensors, number)
        fresh = folder.with_suffix(".new")
        fresh.mkdir(exist_ok=True)
        (fresh / "config.json").write_bytes((source / "config.json").read_bytes())
        save_file({key: tensor.cpu() for key, tensor in tensors.items()}, fresh / "model.safetensors", {"format": "pt"})
        fresh.rename(folder)
    return root, folders
