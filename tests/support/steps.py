"""Weights of a small Llama that change from step to step, and what a rank holds of them, by numpy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3

import relayout
from relayout.publish.claim import Prefix
from relayout.storage.cloud.store import CloudStore
from relayout.storage.stores import find_store

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 256,
}
LAYER = "model.layers.0"
SHAPES = {
    "model.embed_tokens.weight": (256, 64),
    f"{LAYER}.self_attn.q_proj.weight": (64, 64),
    f"{LAYER}.self_attn.k_proj.weight": (32, 64),
    f"{LAYER}.self_attn.v_proj.weight": (32, 64),
    f"{LAYER}.self_attn.o_proj.weight": (64, 64),
    f"{LAYER}.mlp.gate_proj.weight": (128, 64),
    f"{LAYER}.mlp.up_proj.weight": (128, 64),
    f"{LAYER}.mlp.down_proj.weight": (64, 128),
    f"{LAYER}.input_layernorm.weight": (64,),
    f"{LAYER}.post_attention_layernorm.weight": (64,),
    "model.norm.weight": (64,),
    "lm_head.weight": (256, 64),
}
ROWS = ("o_proj", "down_proj")

Tensors = dict[str, torch.Tensor]


def weights_of(step: int, share: float = 0.01) -> Tensors:
    """The weights of a step: those of the step before, of which some elements have changed."""
    generator = np.random.default_rng(0)
    tensors = {name: generator.integers(-(2**15), 2**15, shape, np.int16) for name, shape in SHAPES.items()}
    for number in range(step):
        generator = np.random.default_rng(1 + number)
        for values in tensors.values():
            changed = generator.random(values.shape) < share
            values[changed] += 1
    return {name: torch.from_numpy(values).view(torch.bfloat16) for name, values in tensors.items()}


def slice_of(name: str, tensor: torch.Tensor, rank: int, tp: int) -> np.ndarray[Any, np.dtype[np.int16]]:
    """What a rank holds: by vLLM's rules for a Llama, in numpy."""
    values = tensor.view(torch.int16).numpy()
    if values.ndim == 1:
        return values
    return np.split(values, tp, axis=1 if name.split(".")[-2] in ROWS else 0)[rank]


def assert_is_step(tensors: Tensors, weights: Tensors, rank: int, tp: int = 2) -> None:
    assert tensors.keys() == weights.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor.view(torch.int16).numpy(), slice_of(name, weights[name], rank, tp))


def files_of(root: str) -> dict[str, bytes]:
    """All files and objects of a root, by their path in it, but for its lock; empty folders of a local one, too."""
    path = find_store(root).path("")
    if path is not None:
        there = {one.relative_to(path).as_posix(): one for one in path.rglob("*")}
        found = {name: b"" if one.is_dir() else one.read_bytes() for name, one in there.items()}
        return {name: content for name, content in found.items() if name != ".steps.json.relayout-lock"}
    prefix = _prefix(root)
    return {name: prefix.load(name, 2**30)[0] for name in prefix.objects()}  # type: ignore[index]


def files_in(place: str) -> dict[str, bytes]:
    """The files of a folder or a delta, by their path in it, but for empty ones."""
    return {name: content for name, content in files_of(place).items() if content}


def outputs_of(root: str) -> set[str]:
    """The names of what lies directly in a root."""
    return {name.partition("/")[0] for name in files_of(root)}


def put(root: str, name: str, content: bytes) -> None:
    """Have a file of a stranger in a root, or in place of what is there."""
    path = find_store(root).path(name)
    if path is None:
        _prefix(root).put(name, content, replaced=True)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def delete(root: str, name: str) -> None:
    """Delete a file."""
    path = find_store(root).path(name)
    if path is None:
        _prefix(root).delete([name])
    else:
        path.unlink()


def _prefix(root: str) -> Prefix:
    store = find_store(root)
    assert isinstance(store, CloudStore)
    client: Any = store.client
    return Prefix(client, store.prefix, store)


def published(root: str) -> None:
    """Five steps, of which the first is retired."""
    publisher = relayout.Publisher(root, config=CONFIG, tp=2, full_every=2, keep=3, keep_seconds=0)
    for step in range(1, 6):
        publisher.publish(weights_of(step), step)


def names_of(root: str, kind: str) -> list[str]:
    """The names of the folders, or of the deltas, of a root's steps."""
    return [one[kind]["name"] for one in json.loads(files_of(root)["steps.json"])["steps"] if one[kind] is not None]


def changed(root: str, name: str, position: int) -> None:
    """Change a byte of a file."""
    content = bytearray(files_of(root)[name])
    content[position] ^= 1
    put(root, name, bytes(content))


def closed_index(top: dict[str, Any]) -> bytes:
    """An index with its proof, as FORMAT.md has it."""
    text = json.dumps({name: value for name, value in top.items() if name != "self_digest"})[:-1] + ", "
    return f'{text}"self_digest": "{blake3(text.encode()).hexdigest()}"}}'.encode()


def laid_out(root: Path, full: Path, *deltas: Path) -> None:
    """A root whose first step is a folder; each later one is what a delta makes of the one before."""
    steps: list[dict[str, object]] = []
    for step, place in enumerate((full, *deltas), 1):
        kind, blob = "full" if step == 1 else "delta", (place / "relayout.json").read_bytes()
        content = blake3(blob).hexdigest() if step == 1 else json.loads(blob)["makes"]
        copy = shutil.copytree(place, root / f"{kind}-{step:09d}-00000000")
        stored = {"name": copy.name, "nbytes": sum(map(len, files_in(str(copy)).values()))}
        steps.append({"step": step, "content": content, "full": None, "delta": None, kind: stored, "time": step})
    top = {"relayout": "steps", "version": 1, "requires": [], "grace_seconds": 3600, "steps": steps}
    (root / "steps.json").write_bytes(closed_index(top | {"pending": [], "retired": []}))
