"""The ways in which engines load, into parameters on the device: the step `engine_ways`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import relayout
from gpu.checkpoints_of import converted_of, source_of
from gpu.measuring import measure, prepare
from gpu.results import Given
from relayout.engines.rank_weights import EngineOptions, RankWeights

TP, RANK = 8, 3


def main() -> None:
    given = Given.parse()
    results, device = given.results, given.device
    folder, source = converted_of(given.work, given.num_layers, TP), source_of(given.work, given.num_layers)
    expected = relayout.load(folder, RANK)
    nbytes = sum(one.nbytes for one in expected.values())
    parameters = {name: torch.empty_like(one, device=device) for name, one in expected.items()}

    def into() -> Any:
        return relayout.load(folder, RANK, device=device, into=parameters)

    def iterated() -> None:
        for name, tensor in relayout.iter_load(folder, RANK, device=device):
            parameters[name].copy_(tensor)

    def weights(path: Path) -> None:
        given = RankWeights(str(path), RANK, TP, EngineOptions(strict=path == folder), device=device)
        for name, tensor in given:
            place, target = tensor, parameters[name]
            for axis, (whole, part) in enumerate(zip(tensor.shape, target.shape, strict=True)):
                if whole != part:
                    place = tensor.narrow(axis, RANK * part, part)
            target.copy_(place)

    ways = {
        "into": into,
        "iter_load": iterated,
        "global tensor": lambda: weights(folder),
        "global tensor, plain checkpoint": lambda: weights(source),
    }

    def once(way: Callable[[], Any], *, cold: bool) -> dict[str, Any]:
        for one in parameters.values():
            one.zero_()
        prepare([folder, source], cold=cold)
        found = measure(way, device, nbytes)
        if "device_peak_minus_tensors" in found:
            found["device_peak_minus_tensors"] += nbytes  # The parameters are there before.
        wrong = [name for name, one in parameters.items() if not _same(one.cpu(), expected[name])]
        return found | {"wrong": wrong}

    for cold in (True, False):
        for name, way in ways.items():
            results.measure(f"{name}, {'cold' if cold else 'warm'}", partial(once, way, cold=cold))
    if any(row.get("wrong", True) for row in results.rows.values()):
        raise SystemExit("wrong bytes, or an error")


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit: numbers made of random bytes are often not equal to themselves."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


if __name__ == "__main__":
    main()
