"""Measures a published step of a sharded model, of which some elements changed, against other ways to write it.

These are: a save and a delta of folders; and safetensors with what changed of each whole tensor, by zstd of level 1, as
slime 624b824a and others write it: encoded as an XOR, or as places and values. Four processes with FSDP2 on this
machine, the ways in turns, all for the same changes; memory and bytes as of `saves`. What a way keeps from step to step
is counted beside that.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import relayout
from relayout.benchmark.machine import describe
from relayout.storage.system import proc_nbytes

sys.path.insert(0, str(Path(__file__).parent))
from saves import NUM_PROCESSES, TP, joined, measured, rows, sharded, show


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=16, help="of a Llama with 2048 columns, about 0.1 GB each")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--every", type=int, default=100, help="one of so many elements changes in a step")
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    parser.add_argument("--result", type=Path, help="a file for the figures and the machine, in JSON")
    options = parser.parse_args()
    import torch.multiprocessing

    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        given = (Path(folder), options.layers, options.turns, options.every)
        torch.multiprocessing.start_processes(member, given, NUM_PROCESSES, start_method="spawn")
        members = [json.loads((Path(folder) / f"{number}.json").read_text()) for number in range(NUM_PROCESSES)]
    found = rows(members)
    show(found)
    kept = {way: max(one[way][0]["kept_nbytes"] for one in members) for way in members[0]}
    print(
        "kept by a process, MiB:", ", ".join(f"{way}: {nbytes / 2**20:.0f}" for way, nbytes in kept.items() if nbytes)
    )
    if options.result:
        made = {
            "machine": asdict(describe(options.folder or Path(tempfile.gettempdir()))),
            "rows": found,
            "kept_nbytes": kept,
        }
        options.result.write_text(json.dumps(made, indent=2) + "\n")


def member(number: int, folder: Path, num_layers: int, num_turns: int, every: int) -> None:
    from torch import distributed

    joined(number, folder)
    model = sharded(num_layers)
    publisher = relayout.Publisher(folder / "steps", tp=TP)

    def save(step: int) -> None:
        relayout.transformers.save_pretrained(model, folder / f"save-{step}", tp=TP, max_part_nbytes=2**29)

    def save_and_compare(target: Path) -> None:
        step = int(target.name)
        save(step)
        if number == 0:
            relayout.delta(folder / f"save-{step - 1}", folder / f"save-{step}", folder / f"delta-{step}")
        distributed.barrier()

    whole = {encoding: WholeTensors(folder, encoding) for encoding in ("xor", "overwrite")}
    found: dict[str, list[dict[str, float]]] = {}
    kept: dict[str, float] = {}
    kept["publish"] = growth(lambda: publisher.publish(model, 0))
    save(0)
    for encoding, way in whole.items():
        kept[f"safetensors, zstd-1, {encoding}"] = growth(partial(way.write, model, 0))
    for step in range(1, num_turns + 1):
        change(model, step, every)
        ways: dict[str, Callable[[Path], object]] = {
            "publish": lambda _, step=step: publisher.publish(model, step),  # type: ignore[misc]
            "save, delta": save_and_compare,
        }
        for encoding, way in whole.items():
            ways[f"safetensors, zstd-1, {encoding}"] = lambda _, way=way, step=step: way.write(model, step)  # type: ignore[misc]
        for name, work in ways.items():
            found.setdefault(name, []).append({**measured(work, folder / str(step)), "kept_nbytes": kept.get(name, 0)})
        if number == 0:
            check(folder, step)
            shutil.rmtree(folder / f"save-{step - 1}")
        distributed.barrier()
    (folder / f"{number}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


def growth(work: Callable[[], object]) -> float:
    """The bytes of memory that a process has afterwards, and had not before."""
    before = proc_nbytes("self/status", "VmRSS") or 0
    work()
    return float((proc_nbytes("self/status", "VmRSS") or 0) - before)


class WholeTensors:
    """Each tensor is gathered by one process, which keeps it, and writes what changed; see the head of this module."""

    def __init__(self, folder: Path, encoding: str) -> None:
        self._folder, self._encoding = folder, encoding
        self._kept: dict[str, Any] = {}

    def write(self, model: Any, step: int) -> None:
        import numpy as np
        import torch
        import xxhash
        import zstandard
        from safetensors.numpy import save_file
        from torch import distributed

        me, folder = distributed.get_rank(), self._folder / f"weight_v{step:06}-{self._encoding}"
        folder.mkdir(exist_ok=True)
        compressor, blobs, digests = zstandard.ZstdCompressor(level=1), {}, {}
        for number, (name, parameter) in enumerate(model.named_parameters()):
            local, owner = parameter.detach().to_local(), number % NUM_PROCESSES
            parts = [torch.empty_like(local) for _ in range(NUM_PROCESSES)] if me == owner else None
            distributed.gather(local, parts, owner)
            if parts is None:
                continue
            new = torch.cat(parts).view(torch.uint8).numpy().reshape(-1)
            old = self._kept.get(name)
            self._kept[name] = new
            if old is None:
                continue
            digests[name] = xxhash.xxh3_128_hexdigest(new)
            if self._encoding == "xor":
                encoded = np.bitwise_xor(old, new)
            else:
                elements = new.view(np.uint16)
                places = np.flatnonzero(old.view(np.uint16) != elements)
                head = np.array([len(places)], np.uint32)
                encoded = np.concatenate(
                    [one.view(np.uint8) for one in (head, places.astype(np.uint32), elements[places])]
                )
            blobs[name] = np.frombuffer(compressor.compress(encoded.data), np.uint8)
        if blobs:
            path = folder / f"model-{me:05}-of-{NUM_PROCESSES:05}.safetensors"
            save_file(blobs, path, digests)
            with path.open("rb") as file:
                os.fsync(file.fileno())
        distributed.barrier()


def change(model: Any, step: int, every: int) -> None:
    """Change one of so many elements of what this process holds."""
    import torch

    for parameter in model.parameters():
        held = parameter.detach().to_local().view(torch.int16).view(-1)
        held[torch.randint(held.numel(), (held.numel() // every,))] ^= 1 + step % 2


def check(folder: Path, step: int) -> None:
    """Check that both ways have published the same."""
    steps = relayout.Steps(folder / "steps")
    newest = steps.newest()
    assert newest is not None
    assert newest.step == step
    assert newest.delta is not None
    one, other = (Path(steps.path(newest.delta.name)), folder / f"delta-{step}")
    for file in other.glob("*.delta"):
        assert file.read_bytes() == (one / file.name).read_bytes(), file


if __name__ == "__main__":
    main()
