"""Weights that change in a live engine on the device, step by step: the step `live`."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import relayout
from gpu.loads import converted_of, measure, prepare
from gpu.results import Arguments
from relayout.engines.load import EngineRank, Experts
from relayout.engines.rank_weights import EngineOptions
from relayout.engines.recording import Recording
from relayout.engines.staging import Content, LiveWeights, Staged

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
    engine, options = Engine(tensors, device), EngineOptions()
    nothing: Any = lambda name: False  # noqa: E731
    rank = EngineRank(
        name="gpu",
        logger=logging.getLogger("gpu"),
        rank=0,
        num_ranks=1,
        num_attention_ranks=1,
        experts=Experts(False, False, False, ""),
        is_draft=False,
        is_convertible=True,
        device=device,
        is_skipped=nothing,
        is_unused=nothing,
    )
    weights = rank.weights(folder, options)
    recording = Recording(engine)
    with recording:
        engine.load(recording.given(weights.deliver()))
    return engine, LiveWeights(recording.finish(), rank, options, Content.of(weights))


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
        results.measure(f"publish, {share} changed", partial(timed, lambda step=step: publisher.publish(tensors, step)))
    steps = relayout.Steps(root)
    entries = steps.entries()
    assert entries[0].full is not None
    full = steps.path(entries[0].full.name)
    engine, live = started(full, tensors, device)
    for step, share in enumerate(SHARES[1:], 1):
        staged: list[Staged] = []
        results.measure(f"stage, {share} changed", partial(timed, partial(stage, live, root, step, staged)))
        results.measure(f"commit, {share} changed", partial(timed, partial(commit, live, engine, staged)))
        results.measure(f"attest, {share} changed", partial(timed, partial(attest, live)))
    wrong = [name for name, tensor in tensors.items() if not same(engine.place(name), tensor)]
    results.measure("equal", lambda: {"wrong": wrong})
    name = min(tensors)
    engine.place(name).view(torch.int16)[0] ^= 1
    results.measure("attest, one bit flipped", partial(timed, partial(attest, live)))
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


def timed(what: Callable[[], Any]) -> dict[str, Any]:
    """Seconds until the device has done it too, and what it returns, if that is a dictionary."""
    cpu, started_at = time.process_time(), time.monotonic()
    result = what()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = {"seconds": round(time.monotonic() - started_at, 4), "cpu_seconds": round(time.process_time() - cpu, 4)}
    return seconds | (result if isinstance(result, dict) else {})


def stage(live: LiveWeights, root: Path, step: int, into: list[Staged]) -> dict[str, Any]:
    """Read a step of a root, and keep it."""
    staged = live.stage([str(root)], live.content, MEMORY, step=step, threads=4)
    into.append(staged)
    return {"held": staged.nbytes, "left": staged.left_nbytes}


def commit(live: LiveWeights, engine: Engine, staged: list[Staged]) -> None:
    """The pause."""
    live.check(engine)
    live.commit(staged[0], fail)


def attest(live: LiveWeights) -> dict[str, Any]:
    """What an engine is proven to have."""
    found = live.attest()
    return {"proven": found.proven, "unproven": len(found.unproven), "difference": found.difference}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit: numbers made of random bytes are often not equal to themselves."""
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


def fail(*_: object) -> None:
    """Nothing of this engine is loaded again."""
    raise AssertionError


if __name__ == "__main__":
    main()
