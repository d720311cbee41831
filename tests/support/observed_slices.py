"""What was observed of a small checkpoint, as a line of JSON.

Each distinct cut is there once, and of the tensors that differ only in numbers, are of the same shape and are cut alike
the first.
"""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from relayout.core.arguments import collapse_numbers
from relayout.core.slices import Slice
from relayout.format.fields import dump_slice, parse_slice


class Tensor(NamedTuple):
    """As a header has it."""

    name: str
    dtype: str
    shape: tuple[int, ...]


_MAX_LAYERS = 16
_LEFT_OUT = ("transformers_version", "dtype", "torch_dtype", "_name_or_path")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that a plan can be made for, and what ranks take of it."""

    root: str
    """Its name in errors."""
    engine: str
    """Its version, and the class that loaded."""
    config: Mapping[str, Any]
    tensors: Sequence[Tensor]
    observed: Mapping[int, Sequence[tuple[Slice, ...]]]
    """By degree: for each tensor the slice of each rank."""

    @property
    def name(self) -> str:
        """Of the architecture."""
        return self.root.partition(",")[0]

    @property
    def model_type(self) -> str | None:
        return self.config.get("model_type")

    def only(self, patterns: Collection[str]) -> Checkpoint:
        """With the tensors of these names, their numbers replaced, alone."""
        kept = [t for t, tensor in enumerate(self.tensors) if collapse_numbers(tensor.name) in patterns]
        observed = {degree: [slices[t] for t in kept] for degree, slices in self.observed.items()}
        return replace(self, tensors=[self.tensors[t] for t in kept], observed=observed)


def read(file: Path) -> list[Checkpoint]:
    """Those of a file of lines, compressed with xz; but for lines that are errors."""
    lines = map(json.loads, lzma.decompress(file.read_bytes()).splitlines())
    return [parse(line) for line in lines if "error" not in line]


def dump(checkpoint: Checkpoint) -> dict[str, Any]:
    """As JSON."""
    cuts: dict[tuple[Slice, ...], int] = {}
    tensors: dict[tuple[Any, ...], list[Any]] = {}
    for t, (name, dtype, shape) in enumerate(checkpoint.tensors):
        by_degree = [cuts.setdefault(by_rank[t], len(cuts)) for by_rank in checkpoint.observed.values()]
        tensors.setdefault((collapse_numbers(name), dtype, shape, *by_degree), [name, dtype, shape, by_degree])
    return {
        "engine": checkpoint.engine,
        "config": _sizes_of(checkpoint.config),
        "degrees": list(checkpoint.observed),
        "cuts": [list(map(dump_slice, cut)) for cut in cuts],
        "tensors": list(tensors.values()),
    }


def parse(line: Mapping[str, Any]) -> Checkpoint:
    """What `dump` made."""
    cuts = [tuple(map(parse_slice, cut)) for cut in line["cuts"]]
    return Checkpoint(
        f"{line['name']}, {line['size']}",
        line["engine"],
        line["config"],
        [Tensor(name, dtype, tuple(shape)) for name, dtype, shape, _ in line["tensors"]],
        {degree: [cuts[by_degree[d]] for *_, by_degree in line["tensors"]] for d, degree in enumerate(line["degrees"])},
    )


def _sizes_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of a configuration what a plan may ask for: its type, numbers, words, lists of layers, and the quantization."""
    kept: dict[str, Any] = {}
    for key, value in config.items():
        if key == "quantization_config":
            kept[key] = value
        elif isinstance(value, Mapping) and (key.endswith(("config", "setting")) or key.isdigit()):
            kept[key] = _sizes_of(value)
        elif isinstance(value, list):
            if re.search(r"layer|pattern", key) and len(value) <= _MAX_LAYERS:
                kept[key] = value
        elif key not in _LEFT_OUT and not key.endswith(("token_id", "token_index")) and type(value) in (int, str, bool):
            kept[key] = value
    return kept
