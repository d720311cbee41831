"""Measures what deltas take: of BF16 elements that change anywhere, and of steps of AdamW on a small model.

Each row compares forms of the same change: relayout's (format/delta.py), planes of bytes with zstd, and zstd alone.
Speeds are of one thread, on 1 MiB chunks, in bytes of the weights. Of xdelta3, where the
machine has it, they are of the first MiB: it is slow.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import zstandard
from rich.console import Console
from rich.table import Table

from relayout.format.delta import encode, xor_into

if TYPE_CHECKING:
    import torch

CHUNK = 2**20
Words = npt.NDArray[np.uint16]


def random_changes(nbytes: int) -> Iterator[tuple[str, Words, Words]]:
    """What changed, the old elements, and the new ones."""
    random = np.random.default_rng(0)
    normal = random.standard_normal(nbytes // 2, np.float32) * 0.02
    old = (normal.view(np.uint32) >> 16).astype(np.uint16)
    for share in (0.01, 0.05, 0.5):
        chosen = random.random(old.size) < share
        new = old + chosen * random.choice(np.array([1, 0xFFFF], np.uint16), old.size)
        yield f"{share:.0%} by one unit in the last place", old, new
    chosen = random.random(old.size) < 0.05
    yield "5% to other values", old, np.where(chosen, np.roll(old, 1), old)


def optimizer_steps() -> Iterator[tuple[str, Words, Words]]:
    """BF16 copies of FP32 weights before and after some steps of AdamW."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8, vocab_size=8192
    )
    torch.manual_seed(0)
    for rate in (1e-6, 1e-5):
        model = AutoModelForCausalLM.from_config(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        copies = []
        for _ in range(17):
            copies.append(copy_of(model))
            tokens = torch.randint(config.vocab_size, (4, 64))
            optimizer.zero_grad()
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
        for num_steps in (1, 8):
            yield f"AdamW, rate {rate:g}, steps: {num_steps}", copies[8], copies[8 + num_steps]


def copy_of(model: torch.nn.Module) -> Words:
    import torch

    flat = torch.cat([parameter.detach().to(torch.bfloat16).flatten() for parameter in model.parameters()])
    words: Words = flat.view(torch.int16).numpy().view(np.uint16).copy()
    return words


def planes(change: Words) -> bytes:
    return zstandard.ZstdCompressor(level=3).compress(change.view(np.uint8).reshape(-1, 2).T.tobytes())


def plain(change: Words) -> bytes:
    return zstandard.ZstdCompressor(level=3).compress(change.tobytes())


def ours(change: Words) -> bytes:
    return encode(change.view(np.uint8), [(change.nbytes, 2)])


def timed(work: Callable[[Words], bytes], chunks: list[Words]) -> tuple[list[bytes], float]:
    started = time.perf_counter()
    encoded = list(map(work, chunks))
    return encoded, time.perf_counter() - started


def by_xdelta3(old: Words, new: Words) -> list[str]:
    """Share of the weights, and GB/s of making and applying; level 1, which is its fastest."""
    if shutil.which("xdelta3") is None:
        return ["-", "-", "-"]
    old, new = old[: CHUNK // 2], new[: CHUNK // 2]
    with TemporaryDirectory() as folder:
        before, after, delta, made = (str(Path(folder, name)) for name in ("old", "new", "delta", "made"))
        old.tofile(before)
        new.tofile(after)
        rates = []
        for command in (["-e", "-1", "-s", before, after, delta], ["-d", "-s", before, delta, made]):
            started = time.perf_counter()
            subprocess.run(["xdelta3", "-B", str(old.nbytes), *command], check=True)
            rates.append(f"{old.nbytes / (time.perf_counter() - started) / 1e9:.2f}")
        assert Path(made).read_bytes() == new.tobytes()
        return [f"{100 * Path(delta).stat().st_size / old.nbytes:.2f} %", *rates]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64, help="MiB of elements that change anywhere")
    names = "change", "elements", "delta", "planes", "zstd", "new, zstd", "encode GB/s", "decode GB/s"
    table = Table(*names, "xdelta3", "encode GB/s", "decode GB/s")
    given = parser.parse_args()
    for what, old, new in [*random_changes(given.mib * 2**20), *optimizer_steps()]:
        pairs = [(old[at : at + CHUNK // 2], new[at : at + CHUNK // 2]) for at in range(0, old.size, CHUNK // 2)]
        chunks = [before ^ after for before, after in pairs]
        encoded, seconds = timed(ours, chunks)
        memory = [bytearray(before.tobytes()) for before, _ in pairs]
        started = time.perf_counter()
        for stored, target in zip(encoded, memory, strict=True):
            xor_into(stored, memoryview(target))
        decoding = time.perf_counter() - started
        assert b"".join(memory) == new.tobytes()
        others = [timed(planes, chunks)[0], timed(plain, chunks)[0], timed(plain, [after for _, after in pairs])[0]]
        sizes = [f"{100 * sum(map(len, each)) / old.nbytes:.2f} %" for each in (encoded, *others)]
        share = f"{100 * np.count_nonzero(old ^ new) / old.size:.1f} %"
        rates = [f"{old.nbytes / each / 1e9:.2f}" for each in (seconds, decoding)]
        table.add_row(what, share, *sizes, *rates, *by_xdelta3(old, new))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
