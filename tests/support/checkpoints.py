"""A small checkpoint of every model family, under the names and in the tensor kinds that the hub's own have.

A family is a table: the name of each tensor, its shape in sizes, and how an engine cuts it (for `engines.expected`).
Where transformers knows the family it is the author of the checkpoint, and the table is what it must have written; what
hub checkpoints have and transformers does not write (attention masks, layers for speculative decoding, other prefixes)
is added or renamed by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Sizes = dict[str, int]


@dataclass(frozen=True)
class Entry:
    """One tensor as the table has it."""

    name: str
    shape: tuple[int, ...]
    cut: str
    """`kind`, or `kind@axis`: see `engines.expected`."""
    expert: int | None
    """Which expert it is of, where each has tensors of its own."""

    @property
    def stacked(self) -> bool:
        """Whether its axis 0 counts the experts."""
        return ".experts." in self.name and self.expert is None


@dataclass(frozen=True)
class Family:
    """A checkpoint to be written."""

    table: str
    config: Callable[[Sizes], dict[str, Any]]
    """The parts of config.json that depend on the sizes."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Where they differ from `SIZES`."""
    author: str = "transformers"
    """Or "hand"."""
    rename: Mapping[str, str] = field(default_factory=dict)
    """Patterns in transformers' names, and what the hub has."""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """Patterns of tensors that are not BF16."""
    num_shards: int = 1

    def all_sizes(self, **sizes: int) -> Sizes:
        """The sizes of this family's checkpoint, or with some of them others."""
        return {**SIZES, **self.sizes, **sizes}

    def dtype(self, name: str) -> torch.dtype:
        """What the tensor is stored in."""
        named = (dtype for pattern, dtype in self.dtypes.items() if re.search(pattern, name))
        result: torch.dtype = getattr(torch, next(named, "bfloat16"))
        return result

    def entries(self, sizes: Sizes) -> list[Entry]:
        """Every tensor of the table."""
        return list(_entries(self.table, sizes))


SIZES: Sizes = {
    "H": 128,  # hidden
    "A": 8,  # attention heads
    "K": 2,  # KV heads
    "D": 16,  # elements of a head
    "I": 256,  # of an MLP
    "V": 1000,  # vocabulary: no multiple of 64
    "P": 64,  # positions
    "L": 2,  # layers
    "F": 0,  # of which the first have no experts
    "E": 8,  # experts
    "M": 64,  # of an expert's MLP
    "S": 128,  # of a shared expert's MLP
}


def _entries(table: str, sizes: Sizes) -> Iterator[Entry]:
    counts = {
        "all": range(sizes["L"]),
        "first": range(sizes["F"]),
        "rest": range(sizes["F"], sizes["L"]),
        "next": range(sizes["L"], sizes["L"] + 1),
        "expert": range(sizes["E"]),
    }
    for line in lines_of(table):
        pattern, *dims, cut = line.split()
        shape = tuple(eval(dim, {}, dict(sizes)) for dim in dims)
        names = [(pattern, -1)]
        for placeholder, numbers in counts.items():
            if f"{{{placeholder}}}" in pattern:
                names = [(name.replace(f"{{{placeholder}}}", str(n)), n) for name, _ in names for n in numbers]
        for name, number in names:
            yield Entry(name, shape, cut, number if "{expert}" in pattern else None)


def lines_of(table: str) -> list[str]:
    """The table's lines."""
    return [line.strip() for line in table.splitlines() if line.strip()]


def write_family(family: Family, folder: Path) -> Path:
    """Write the checkpoint of a family into a new folder."""
    torch.manual_seed(0)
    sizes = family.all_sizes()
    config = family.config(sizes)
    tensors: Tensors = {}
    if family.author == "transformers":
        tensors, config = _by_transformers(config, folder)
    for pattern, hub in family.rename.items():
        tensors = {re.sub(pattern, hub, name): tensor for name, tensor in tensors.items()}
    for entry in family.entries(sizes):
        if entry.name not in tensors:
            tensors[entry.name] = torch.randn(entry.shape)
    typed = {name: _typed(tensor, family.dtype(name)) for name, tensor in tensors.items()}
    return write(folder, typed, config, family.num_shards)


def _typed(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.uint8:
        return torch.randint(256, tensor.shape, dtype=dtype)
    return tensor > 0 if dtype == torch.bool else tensor.to(dtype)


def _by_transformers(config: dict[str, Any], folder: Path) -> tuple[Tensors, dict[str, Any]]:
    """What transformers writes for a model of random weights: every one of them, norms and buffers too."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    parsed = AutoConfig.for_model(**config)
    kind = AutoModelForImageTextToText if "text_config" in config else AutoModelForCausalLM
    model = kind.from_config(parsed).to(torch.bfloat16)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape) * 0.1)
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
