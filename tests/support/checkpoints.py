"""Writes the small checkpoint of a model family, in the tensor kinds that the hub's own have.

Where transformers knows the family it is the author of the checkpoint, and the table is what it must have written; what
hub checkpoints have and transformers does not write (attention masks, layers for speculative decoding, other prefixes)
is added or renamed by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.families import Family

Tensors = dict[str, torch.Tensor]

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}


def write_family(family: Family, folder: Path) -> Path:
    """Write the checkpoint of a family into a new folder."""
    torch.manual_seed(0)
    sizes = family.all_sizes()
    config = family.config(sizes)
    tensors: Tensors = {}
    if family.author == "transformers":
        tensors, config = _by_transformers(config, folder)
    for pattern, hub in family.rename.items():
        tensors = {new: tensor for name, tensor in tensors.items() if (new := re.sub(pattern, hub, name))}
    for entry in family.entries(sizes):
        if entry.name not in tensors:
            tensors[entry.name] = torch.randn(entry.shape)
    stored = {name: typed(tensor, DTYPES[family.dtype_of(name)]) for name, tensor in tensors.items()}
    return write(folder, stored, config, family.num_shards)


def typed(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of this shape, of numbers that are usual in the dtype."""
    if dtype == torch.uint8:
        return torch.randint(256, tensor.shape, dtype=dtype)
    if dtype == torch.int64:
        return torch.randint(2**15, tensor.shape, dtype=dtype)
    if dtype == torch.float8_e8m0fnu:  # Exponents.
        return torch.randint(120, 134, tensor.shape, dtype=torch.uint8).view(dtype)
    return tensor > 0 if dtype == torch.bool else tensor.to(dtype)


def _by_transformers(config: dict[str, Any], folder: Path) -> tuple[Tensors, dict[str, Any]]:
    """What transformers writes for a model of random weights: every one of them, norms and buffers too."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.initialization import no_init_weights

    parsed = AutoConfig.for_model(**config)
    kind = AutoModelForImageTextToText if "text_config" in config else AutoModelForCausalLM
    with no_init_weights():  # All are set below.
        model = kind.from_config(parsed).to(torch.bfloat16)
    model.tie_weights()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            is_float = tensor.is_floating_point()
            tensor.copy_(torch.randn(tensor.shape) * 0.1 if is_float else torch.randint(100, tensor.shape))
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    return tensors, json.loads((folder / "config.json").read_text())


def write(folder: Path, tensors: Tensors, config: Mapping[str, Any], num_shards: int = 1) -> Path:
    """Write a checkpoint folder: one file, or several and their index."""
    folder.mkdir(exist_ok=True)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    names = sorted(tensors)
    weight_map = {}
    for number in range(num_shards):
        name = f"model-{number + 1:05}-of-{num_shards:05}.safetensors" if num_shards > 1 else "model.safetensors"
        part = {key: tensors[key].contiguous() for key in names[number::num_shards]}
        save_file(part, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    if num_shards > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def add_tensor(source: Path, folder: Path, name: str, array: Any) -> Path:
    """A copy of a checkpoint in one file, with one tensor more."""
    tensors: Tensors = {}
    for file in source.glob("*.safetensors"):
        tensors |= load_file(file)
    config = json.loads((source / "config.json").read_text())
    return write(folder, {**tensors, name: torch.from_numpy(array)}, config)
