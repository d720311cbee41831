"""The ways in which engines load, into parameters on the device: the step `engine_ways`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import relayout
from gpu.loads import converted_of, measure, prepare, source_of
from gpu.results import Arguments
from relayout.engines.rank_weights import EngineOptions, RankWeights

TP, RANK = 8, 3


def main() -> None:
    arguments = Arguments.parse()
    results, device = arguments.results, arguments.device
    folder, source = (
        converted_of(arguments.work, arguments.num_layers, TP),
        source_of(arguments.work, arguments.num_layers),
    )
    expected = relayout.load(folder, RANK)
    nbytes = sum(tensor.nbytes for tensor in expected.values())
    parameters = {name: torch.empty_like(tensor, device=device) for name, tensor in expected.items()}

    def into() -> Any:
        return relayout.load(folder, RANK, device=device, into=parameters)

    def iterated() -> None:
        for name, tensor in relayout.iter_load(folder, RANK, device=device):
            parameters[name].copy_(tensor)

    def by_engine(path: Path) -> None:
        weights = RankWeights(str(path), RANK, TP, EngineOptions(strict=path == folder), device=device)
        for name, tensor in weights.deliver():
            place, target = tensor, parameters[name]
            for axis, (whole, part) in enumerate(zip(tensor.shape, target.shape, strict=True)):
                if whole != part:
                    place = tensor.narrow(axis, RANK * part, part)
            target.copy_(place)

    ways = {
        "into": into,
        "iter_load": iterated,
        "global tensor": lambda: by_engine(folder),
        "global tensor, plain checkpoint": lambda: by_engine(source),
    }

    def once(way: Callable[[], Any], *, cold: bool) -> dict[str, Any]:
        for parameter in parameters.values():
            parameter.zero_()
        prepare([folder, source], cold=cold)
        result = measure(way, device, nbytes)
        if "device_peak_minus_tensors" in result:
            result["device_peak_minus_tensors"] += nbytes  # The parameters are there before.
        # Bit for bit: numbers made of random bytes are often not equal to themselves.
        held = ((name, parameter.cpu().view(torch.uint8)) for name, parameter in parameters.items())
        wrong = [name for name, memory in held if not torch.equal(memory, expected[name].view(torch.uint8))]
        return result | {"wrong": wrong}

    for cold in (True, False):
        for name, way in ways.items():
            results.measure(f"{name}, {'cold' if cold else 'warm'}", partial(once, way, cold=cold))
    if any(row.get("wrong", True) for row in results.rows.values()):
        raise SystemExit("wrong bytes, or an error")


if __name__ == "__main__":
    main()
