"""A converted checkpoint without torch, and without relayout: json, zstandard and numpy are enough.

    relayout convert llama-3.1-8b --tp 8
    python plain_numpy.py llama-3.1-8b-tp8

`read_rank` is the reader of FORMAT.md, section 12, without its checks. `join` puts the ranks' slices together, by what
the rank tables say.
`next_token` shows that it was done right: a Llama model (BF16, no biases, RoPE unscaled), as slow as it is short.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import zstandard


def read_rank(folder: Path, rank: int) -> dict[str, tuple[np.ndarray, list[int], dict[str, Any]]]:
    """A rank's tensors as BF16 bits; of each the whole tensor's shape, and which slice of it this is."""
    manifest = json.loads((folder / "relayout.json").read_text())
    entry = manifest["ranks"][rank]
    files = [folder / manifest["files"][number]["name"] for number in entry["files"]]
    arena = np.zeros(entry["arena_nbytes"], np.uint8)
    for read in entry["reads"]:
        file = np.memmap(files[read["file"]], np.uint8, "r")
        for run in range(read.get("count", 1)):
            source = read["offset"] + run * read.get("stride", 0)
            target = read["arena_offset"] + run * read.get("arena_stride", 0)
            arena[target : target + read["nbytes"]] = file[source : source + read["nbytes"]]
    table = json.loads(zstandard.ZstdDecompressor().decompressobj().decompress((folder / entry["table"]).read_bytes()))
    kinds, tensors = table["kinds"], {}
    for name, kind, offset in zip(table["name"], table["kind"], table["arena_offset"], strict=True):
        shape = kinds["shape"][kind]
        bits = arena[offset : offset + 2 * int(np.prod(shape))].view("u2").reshape(shape)
        tensors[name] = bits, kinds["source_shape"][kind] or shape, kinds["slice"][kind]
    return tensors


def join(folder: Path) -> dict[str, np.ndarray]:
    """The whole model, as numbers."""
    whole: dict[str, np.ndarray] = {}
    for rank in range(json.loads((folder / "relayout.json").read_text())["num_ranks"]):
        for name, (bits, shape, cut) in read_rank(folder, rank).items():
            ranges = [
                [(start, start + length) for start, length in cut.get(str(axis), [[0, size]])]
                for axis, size in enumerate(shape)
            ]
            places = [np.hstack([np.arange(0), *(np.arange(*pair) for pair in one)]) for one in ranges]
            whole.setdefault(name, np.zeros(shape, "f4"))[np.ix_(*places)] = (bits.astype("u4") << 16).view("f4")
    return whole


def next_token(model: dict[str, np.ndarray], config: dict[str, Any], tokens: list[int]) -> int:
    """What a Llama model takes for the likeliest."""
    num_heads, count = config["num_attention_heads"], len(tokens)
    dim = config["hidden_size"] // num_heads
    angles = np.outer(np.arange(count), config["rope_parameters"]["rope_theta"] ** -(np.arange(0, dim, 2) / dim))
    cos, sin = np.tile(np.cos(angles), 2)[:, None], np.tile(np.sin(angles), 2)[:, None]

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * model[f"{name}.weight"]

    def turned(x: np.ndarray) -> np.ndarray:
        return x * cos + np.concatenate([-x[..., dim // 2 :], x[..., : dim // 2]], -1) * sin

    x = model["model.embed_tokens.weight"][tokens]
    for layer in (f"model.layers.{number}" for number in range(config["num_hidden_layers"])):
        y = norm(f"{layer}.input_layernorm", x)
        q, k, v = ((y @ model[f"{layer}.self_attn.{one}_proj.weight"].T).reshape(count, -1, dim) for one in "qkv")
        k, v = (one.repeat(num_heads // config["num_key_value_heads"], 1) for one in (turned(k), v))
        scores = np.einsum("qhd,khd->hqk", turned(q), k) / np.sqrt(dim) + np.triu(np.full((count, count), -np.inf), 1)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        y = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v).reshape(count, -1)
        x = x + y @ model[f"{layer}.self_attn.o_proj.weight"].T
        y = norm(f"{layer}.post_attention_layernorm", x)
        gate, up = (y @ model[f"{layer}.mlp.{one}_proj.weight"].T for one in ("gate", "up"))
        x = x + gate / (1 + np.exp(-gate)) * up @ model[f"{layer}.mlp.down_proj.weight"].T
    return int((norm("model.norm", x[-1]) @ model["lm_head.weight"].T).argmax())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what `relayout convert` wrote")
    parser.add_argument("--prompt", type=int, nargs="+", default=[1, 2, 3], help="token ids")
    parser.add_argument("--new-tokens", type=int, default=16)
    arguments = parser.parse_args()

    model, config = join(arguments.folder), json.loads((arguments.folder / "config.json").read_text())
    tokens = arguments.prompt
    for _ in range(arguments.new_tokens):
        tokens = [*tokens, next_token(model, config, tokens)]
    print(*tokens)


if __name__ == "__main__":
    main()
