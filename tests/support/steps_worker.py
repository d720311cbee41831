"""Processes that publish steps together: `main` with `FOLDER ROOT MEMBERS TP` in sys.argv.

Each process writes the errors that it saw, by case, to FOLDER/member-N.json.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from support.group_worker import NUM_MEMBERS, forked, join
from support.saving_worker import Seen, _failing, kill_after, model_of
from support.steps import CONFIG, weights_of


def main() -> None:
    folder, root, num_members, tp = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    codes = forked(partial(_publishes, folder, root, num_members, tp), num_members)
    assert codes == [0] * num_members, codes


def _publishes(folder: Path, root: str, num_members: int, tp: int, number: int) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    import relayout

    join(folder, number, num_members)
    mesh, seen = init_device_mesh("cpu", (num_members,)), Seen(folder, number)
    is_last = number == num_members - 1
    fails = False

    def report(done: int, total: int) -> None:
        if fails:
            raise OSError("the drive is on fire")

    publisher = relayout.Publisher(
        root, config=CONFIG, tp=tp, group=dist.group.WORLD, full_every=4, max_part_nbytes="40KB", progress=report
    )

    def publish(step: int, **others: Any) -> None:
        whole = weights_of(step) | others
        publisher.publish({name: distribute_tensor(one, mesh, [Shard(0)]) for name, one in whole.items()}, step)

    for step in (1, 2, 3):
        seen.case(f"step {step}", partial(publish, step))
    fails = True
    seen.case("progress", partial(publish, 4))
    fails = False
    seen.case("step 5", partial(publish, 5))
    seen.case("step 6", partial(publish, 6))
    with _failing("relayout.loader.held.HeldTensor.bytes_of", RuntimeError("the device is on fire"), is_last):
        seen.case("copy", partial(publish, 7))
    with _failing("relayout.train.comparing.write_pieces", RuntimeError("the device is on fire"), number == 0):
        seen.case("step 8", partial(publish, 8))  # It is a whole folder: nothing is compared.
        seen.case("compare", partial(publish, 9))
    norm = weights_of(10)["model.norm.weight"]
    seen.case("dtype", partial(publish, 10, **{"model.norm.weight": norm.float() if is_last else norm}))
    seen.case("step 11", partial(publish, 11))
    moved = relayout.Publisher._move

    def interrupted(self: relayout.Publisher, done: Any) -> Any:
        moved(self, done)
        raise KeyboardInterrupt

    with patch.object(relayout.Publisher, "_move", interrupted if is_last else moved):
        seen.case("alone", partial(publish, 12))
    seen.case("step 13", partial(publish, 13))
    seen.case("step 14", partial(publish, 14))
    dist.barrier()


def of_placements() -> None:
    """`FOLDER ROOT TP`: publishes and saves steps of which members hold parts in many ways."""
    codes = forked(partial(_publishes_placements, Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
    assert codes == [0] * NUM_MEMBERS, codes


PLACED_STEPS = range(1, 6)


def placed_weights(step: int) -> dict[str, Any]:
    """The weights of a step: some tensors change in a few elements, some in all or in most, and some do not."""
    few, most = weights_of(step), weights_of(step, share=0.3)
    all_of_one = {"model.norm.weight": few["model.norm.weight"] * step}
    frozen = {name: few[name] for name in few if "v_proj" in name or "down_proj" in name}
    first = weights_of(1)
    return (
        few
        | {name: most[name] for name in most if "up_proj" in name}
        | all_of_one
        | {name: first[name] for name in frozen}
    )


def _publishes_placements(folder: Path, root: str, tp: int, number: int) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    import relayout

    join(folder, number)
    flat, square = init_device_mesh("cpu", (NUM_MEMBERS,)), init_device_mesh("cpu", (2, NUM_MEMBERS // 2))
    ways: list[Callable[[Any], Any]] = [
        lambda one: distribute_tensor(one, flat, [Shard(0)]),
        lambda one: distribute_tensor(one, flat, [Shard(one.dim() - 1)]),
        lambda one: distribute_tensor(one, square, [Replicate(), Shard(0)]),
        lambda one: distribute_tensor(one, square, [Shard(0), Shard(one.dim() - 1)]),
        lambda one: one,
    ]
    seen = Seen(folder, number)
    options: dict[str, Any] = {"config": CONFIG, "tp": tp, "group": dist.group.WORLD, "max_part_nbytes": 2**29}
    publisher = relayout.Publisher(root, full_every=4, **options)
    for step in PLACED_STEPS:
        whole = placed_weights(step)
        held = {name: ways[place % len(ways)](one) for place, (name, one) in enumerate(whole.items())}
        seen.case(f"step {step}", partial(publisher.publish, held, step))
        seen.case(f"save {step}", partial(relayout.save, held, folder / f"saved-{step}", **options))
    dist.barrier()


def that_are_signed() -> None:
    """`FOLDER ROOT KEY`: two processes publish steps and sign them."""
    codes = forked(partial(_publishes_signed, Path(sys.argv[1]), sys.argv[2], sys.argv[3]), 2)
    assert codes == [0] * 2, codes


def _publishes_signed(folder: Path, root: str, key: str, number: int) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    import relayout

    join(folder, number, 2)
    mesh = init_device_mesh("cpu", (2,))
    publisher = relayout.Publisher(root, config=CONFIG, tp=2, group=dist.group.WORLD, full_every=2, key=key)
    for step in (1, 2, 3):
        publisher.publish(
            {name: distribute_tensor(one, mesh, [Shard(0)]) for name, one in weights_of(step).items()}, step
        )
    dist.barrier()


CALLS = ("pwrite", "fsync", "rename", "replace", "unlink", "rmdir", "mkdir", "ftruncate")
"""What changes a drive."""


def is_killed() -> None:
    """`FOLDER ROOT CALLS`: publishes step after step, and is killed after so many calls that write; -1: by others.

    FOLDER/pid is this process, FOLDER/returned the numbers of the steps of which it has heard that they are published.
    """
    import relayout

    folder, root, num_calls = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    publisher = relayout.Publisher(root, **KILLED_OPTIONS)
    weights = {step: weights_of(step) for step in KILLED_STEPS}
    (folder / "pid").write_text(str(os.getpid()))
    with open(folder / "returned", "a", buffering=1) as returned:
        if num_calls >= 0:
            kill_after(num_calls, CALLS)
        for step, tensors in weights.items():
            publisher.publish(tensors, step)
            returned.write(f"{step}\n")


KILLED_STEPS = range(1, 8)
KILLED_OPTIONS: dict[str, Any] = {
    **{"config": CONFIG, "tp": 2, "threads": 1, "full_every": 3},
    **{"keep": 2, "keep_seconds": 0, "grace_seconds": 0},
}


def of_models() -> None:
    """`FOLDER ROOT`: publishes a mixture of experts of transformers, under FSDP2, before and after a change."""
    import torch.distributed.fsdp  # noqa: F401 (once, before the members are forked)

    codes = forked(partial(_publishes_a_model, Path(sys.argv[1]), sys.argv[2]))
    assert codes == [0] * NUM_MEMBERS, codes


def changed(model: Any, step: int) -> None:
    """Change some elements of each parameter of a model."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[step::97] += 1


def _publishes_a_model(folder: Path, root: str, number: int) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import relayout

    join(folder, number)
    mesh, seen = init_device_mesh("cpu", (NUM_MEMBERS,)), Seen(folder, number)
    publisher = relayout.Publisher(root, tp=2)  # Of the default group.
    for step in (1, 2):
        model = model_of("qwen3_moe")
        changed(model, step)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        seen.case(f"step {step}", partial(publisher.publish, model, step))
    pair = dist.new_group([0, 1])
    if number < 2:
        model = model_of("llama")
        save = partial(relayout.transformers.save_pretrained, model, folder / "pair", tp=2, group=pair)
        seen.case("pair", save)
    dist.barrier()
