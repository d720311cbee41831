"""Four processes that save a checkpoint as trainers do, each its shards, by PyTorch's distributed checkpoints.

Once as DCP's own files, and twice as safetensors: the shards alone, and consolidated.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from support.group_worker import forked, join


def main() -> None:
    """Save the checkpoint of `FOLDER/plain` as `FOLDER/dcp`, `/shards` and `/consolidated`, in four processes."""
    import torch.distributed.checkpoint
    import torch.distributed.tensor  # Once, before the fork.

    assert torch.distributed.checkpoint
    assert forked(partial(_member, Path(sys.argv[1]))) == [0] * 4


def _member(folder: Path, number: int) -> None:
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

    join(folder, number)
    line, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    fsdp, columns = (line, [Shard(0)]), (line, [Shard(1)])
    hsdp, both = (grid, [Replicate(), Shard(0)]), (grid, [Shard(0), Shard(1)])

    def sharded(position: int, tensor: torch.Tensor) -> torch.Tensor:
        ways: list[tuple[object, list[Placement]]] = [fsdp, hsdp]
        if tensor.dim() > 1:
            ways += [columns, both]
        mesh, placements = ways[position % len(ways)]
        # torch scatters no tensors of FP8, whose bytes are the same as numbers.
        numbers = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
        return distribute_tensor(numbers, mesh, placements)  # type: ignore[arg-type]

    tensors = load_file(folder / "plain" / "model.safetensors")
    model = {name: sharded(at, one) if one.dim() else one for at, (name, one) in enumerate(sorted(tensors.items()))}
    state = {"model": model, "optimizer": {"exp_avg": {"x": torch.ones(3)}}, "step": 7}
    dcp.save(state, checkpoint_id=folder / "dcp")
    # PyTorch 2.13 fails to consolidate integers, and consolidates numbers without dims to others.
    floats = {name: one for name, one in model.items() if one.is_floating_point() and one.dim()}
    for name, is_consolidated in (("shards", False), ("consolidated", True)):
        writer = dcp.HuggingFaceStorageWriter(
            str(folder / name), dict.fromkeys(floats, 1), save_distributed=True, enable_consolidation=is_consolidated
        )
        dcp.save(floats, storage_writer=writer)
