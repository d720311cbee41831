"""Measures a published step of a sharded model, of which some elements changed, against a save and a delta of folders.

Four processes with FSDP2 on this machine, the ways in turns, both for the same changes; memory and bytes as of `saves`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import relayout

sys.path.insert(0, str(Path(__file__).parent))
from saves import NUM_PROCESSES, TP, joined, measured, sharded, show


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=16, help="of a Llama with 2048 columns, about 0.1 GB each")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--every", type=int, default=100, help="one of so many elements changes in a step")
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    options = parser.parse_args()
    import torch.multiprocessing

    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        given = (Path(folder), options.layers, options.turns, options.every)
        torch.multiprocessing.start_processes(member, given, NUM_PROCESSES, start_method="spawn")
        show([json.loads((Path(folder) / f"{number}.json").read_text()) for number in range(NUM_PROCESSES)])


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

    found: dict[str, list[dict[str, float]]] = {"publish": [], "save, delta": []}
    publisher.publish(model, 0)
    save(0)
    for step in range(1, num_turns + 1):
        change(model, step, every)
        found["publish"].append(measured(lambda _, step=step: publisher.publish(model, step), folder))  # type: ignore[misc]
        found["save, delta"].append(measured(save_and_compare, folder / str(step)))
        if number == 0:
            check(folder, step)
            shutil.rmtree(folder / f"save-{step - 1}")
        distributed.barrier()
    (folder / f"{number}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


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
