"""Weights that change in a live engine on the device, step by step: the step `live`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from support.live_engine import engine_rank, live_weights
from torch import nn

import relayout
from gpu.loads import converted_of, measure, prepare, timed
from gpu.results import Arguments
from relayout.live.staging import LiveWeights, StagedUpdate

SHARES = (0.0, 0.001, 0.01, 0.05, 0.2)
MEMORY = 32 * 2**30
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "up_proj": "gate_up", "gate_proj": "gate_up"}


class Engine(nn.Module):
    """Parameters as engines have them: q, k and v are one, gate and up are one."""

    def __init__(self, tensors: dict[str, torch.Tensor], device: str) -> None:
        super().__init__()
        self._places: dict[str, tuple[str, int, int]] = {}
        shapes: dict[str, list[int]] = {}
        for name, tensor in tensors.items():
            fused = self._fused(name)
            rows = shapes.setdefault(fused, [0, *tensor.shape[1:]])
            self._places[name] = (fused, rows[0], tensor.shape[0])
            rows[0] += tensor.shape[0]
        for fused, shape in shapes.items():
            memory = torch.empty(shape, dtype=torch.bfloat16, device=device)
            self.register_parameter(fused, nn.Parameter(memory, requires_grad=False))

    def place(self, name: str) -> torch.Tensor:
        """Where a tensor of the checkpoint lies."""
        fused, first, rows = self._places[name]
        return self.get_parameter(fused).data.narrow(0, first, rows)

    def load(self, tensors: Any) -> None:
        for name, tensor in tensors:
            self.place(name).copy_(tensor)

    @staticmethod
    def _fused(name: str) -> str:
        part = name.split(".")[-2]
        return name.replace(part, FUSED.get(part, part)).replace(".", "_")


def started(folder: str, tensors: dict[str, torch.Tensor], device: str) -> tuple[Engine, LiveWeights]:
    """An engine that was started on a folder."""
    engine = Engine(tensors, device)
    return engine, live_weights(engine, engine_rank(0, 1, device), folder, engine.load)


def main() -> None:
    arguments = Arguments.parse()
    results, device = arguments.results, arguments.device
    first = converted_of(arguments.work, arguments.num_layers, 1)
    root = arguments.work / "steps"
    shutil.rmtree(root, ignore_errors=True)
    tensors = relayout.load(first, 0, device=device)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    publisher = relayout.Publisher(root, config=first, tp=1, full_every=100)
    for step, share in enumerate(SHARES):
        change(tensors, share)
        results.measure(f"publish, {share} changed", partial(row, lambda step=step: publisher.publish(tensors, step)))
    steps = relayout.Steps(root)
    entries = steps.entries()
    assert entries[0].full is not None
    full = steps.path(entries[0].full.name)
    engine, live = started(full, tensors, device)
    for step, share in enumerate(SHARES[1:], 1):
        staged: list[StagedUpdate] = []
        results.measure(f"stage, {share} changed", partial(row, partial(stage, live, root, step, staged)))
        results.measure(f"commit, {share} changed", partial(row, partial(commit, live, engine, staged)))
        results.measure(f"attest, {share} changed", partial(row, partial(attest, live)))
    wrong = [name for name, tensor in tensors.items() if not same(engine.place(name), tensor)]
    results.measure("equal", lambda: {"wrong": wrong})
    name = min(tensors)
    engine.place(name).view(torch.int16)[0] ^= 1
    results.measure("attest, one bit flipped", partial(row, partial(attest, live)))
    for cold in (True, False):
        prepare([Path(full)], cold=cold)
        load = partial(relayout.load, full, 0, device=device, into={one: engine.place(one) for one in tensors})
        results.measure(f"load into, {'cold' if cold else 'warm'}", partial(measure, load, device, nbytes))
    if wrong or results.rows["attest, one bit flipped"].get("difference") != name:
        raise SystemExit("wrong bytes, or an error")


def change(tensors: dict[str, torch.Tensor], share: float) -> None:
    """Flip the lowest bit of a share of the elements."""
    for tensor in tensors.values():
        changed = torch.rand(tensor.shape, device=tensor.device) < share
        tensor.view(torch.int16).bitwise_xor_(changed.to(torch.int16))


def row(work: Callable[[], Any]) -> dict[str, Any]:
    """How long work takes, and what it returns, if that is a dictionary."""
    made, seconds = timed(work)
    return seconds | (made if isinstance(made, dict) else {})


def stage(live: LiveWeights, root: Path, step: int, into: list[StagedUpdate]) -> dict[str, Any]:
    """Read a step of a root, and keep it."""
    staged = live.stage([str(root)], live.content, MEMORY, step=step, threads=4)
    into.append(staged)
    return {"held": staged.nbytes, "left": staged.left_nbytes}


def commit(live: LiveWeights, engine: Engine, staged: list[StagedUpdate]) -> None:
    """The pause."""
    live.check(engine)
    live.commit(staged[0], fail)


def attest(live: LiveWeights) -> dict[str, Any]:
    """What an engine is proven to have."""
    found = live.attest()
    return {"verified": found.verified, "unverified": len(found.unverified), "difference": found.difference}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit: numbers made of random bytes are often not equal to themselves."""
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


def fail(*_: object) -> None:
    """Nothing of this engine is loaded again."""
    raise AssertionError


if __name__ == "__main__":
    main()
