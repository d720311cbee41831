"""Processes of one machine that load to its device together, as a torch.distributed group: the step `groups`.

With one card, all have it: what is shown is that each has the right bytes, and what is read of the drive, not how cards
would exchange them. Gloo connects the members, through host memory.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from support.plain_group_worker import drive_nbytes
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import relayout
from gpu.loads import converted_of, prepare, source_of, timed
from gpu.results import Arguments

COUNTS = (2, 4)
LIMIT_S = 120


def main() -> None:
    arguments = Arguments.parse()
    results, device, work = arguments.results, arguments.device, arguments.work
    converted, source = converted_of(work, arguments.num_layers, 1), source_of(work, arguments.num_layers)
    for count in COUNTS:
        for name in WAYS:
            for cold in (True, False):
                prepare([converted, source], cold=cold)
                key = f"{name}, {count} processes, {'cold' if cold else 'warm'}"
                results.measure(key, partial(together, name, count, converted, source, device))
    if any(row.get("wrong", True) for row in results.rows.values()):
        raise SystemExit("wrong bytes, or an error")


def together(name: str, count: int, converted: Path, source: Path, device: str) -> dict[str, Any]:
    """What the members of a group say, one for all: the slowest, and what any of them has wrong."""
    meet = converted.with_name("meet")
    shutil.rmtree(meet, ignore_errors=True)
    meet.mkdir()
    start = multiprocessing.get_context("spawn").Process
    members = [start(target=member, args=(name, number, count, converted, source, device)) for number in range(count)]
    for one in members:
        one.start()
    ends = time.monotonic() + LIMIT_S
    for one in members:
        one.join(max(0, ends - time.monotonic()))
        one.kill()
        one.join()
    if any(one.exitcode for one in members):
        raise RuntimeError(f"exit codes {[one.exitcode for one in members]}")
    told = [json.loads((meet / f"{number}.json").read_text()) for number in range(count)]
    return {
        "seconds": max(one["seconds"] for one in told),
        "cpu_seconds": round(sum(one["cpu_seconds"] for one in told), 3),
        "nbytes": told[0]["nbytes"],
        "read_nbytes": sum(one["read_nbytes"] for one in told),
        "wrong": sorted({wrong for one in told for wrong in one["wrong"]}),
    }


def member(name: str, number: int, count: int, converted: Path, source: Path, device: str) -> None:
    """One process: join, load, and write down what it took and what is wrong."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "LOCAL_WORLD_SIZE": str(count)}
    meet = converted.with_name("meet")
    distributed.init_process_group("gloo", init_method=f"file://{meet}/rendezvous", rank=number, world_size=count)
    torch.zeros(1, device=device)
    load = WAYS[name](converted, source, device, count)
    distributed.barrier()
    before = drive_nbytes()
    held, spent = timed(load)
    read = drive_nbytes() - before
    whole = relayout.load(converted, 0)
    wrong = [one for one, tensor in held.items() if not is_part(tensor, whole[one], number, count)]
    found = spent | {"read_nbytes": read, "nbytes": sum(one.nbytes for one in whole.values()), "wrong": wrong}
    (meet / f"{number}.json").write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


def is_part(held: torch.Tensor, whole: torch.Tensor, number: int, count: int) -> bool:
    """Whether a tensor is what this member has of a whole one, bit for bit."""
    if hasattr(held, "to_local"):
        held, parts = held.to_local(), torch.chunk(whole, count)
        whole = parts[number] if number < len(parts) else whole[:0]
    return torch.equal(held.detach().cpu().reshape(-1).view(torch.uint8), whole.reshape(-1).view(torch.uint8))


def one_rank(converted: Path, source: Path, device: str, count: int) -> Callable[[], dict[str, torch.Tensor]]:
    """Each member gets the same rank of the converted checkpoint."""
    return partial(relayout.load, converted, 0, device=device, group=distributed.group.WORLD)


def alone(converted: Path, source: Path, device: str, count: int) -> Callable[[], dict[str, torch.Tensor]]:
    """The same, each for itself."""
    return partial(relayout.load, converted, 0, device=device)


def shards(path: Path, device: str, count: int) -> Callable[[], dict[str, torch.Tensor]]:
    """FSDP2: each member gets its part of every tensor."""
    with torch.device("meta"):
        model = Plain(relayout.load(path.parent / f"{path.name.removesuffix('-tp1')}-tp1", 0))
    fully_shard(model, mesh=init_device_mesh(torch.device(device).type, (count,)))
    model.to_empty(device=device)
    into = {model.names[name]: parameter for name, parameter in model.named_parameters()}
    return partial(relayout.load, path, into=into, group=distributed.group.WORLD)


class Plain(nn.Module):
    """Parameters of the shapes of a checkpoint's tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.names = {name.replace(".", "_"): name for name in tensors}
        for name, tensor in tensors.items():
            memory = torch.empty(tensor.shape, dtype=tensor.dtype)
            self.register_parameter(name.replace(".", "_"), nn.Parameter(memory, requires_grad=False))


WAYS: dict[str, Callable[..., Callable[[], dict[str, torch.Tensor]]]] = {
    "a rank, alone": alone,
    "a rank, group": one_rank,
    "FSDP2, converted": lambda converted, source, device, count: shards(converted, device, count),
    "FSDP2, plain": lambda converted, source, device, count: shards(source, device, count),
}


if __name__ == "__main__":
    main()
