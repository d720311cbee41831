"""An engine of one's own: each process of torchrun reads its rank into parameters that it has made itself.

    relayout convert llama-3.1-8b --tp 8
    torchrun --nproc-per-node 8 own_engine.py llama-3.1-8b-tp8

Nothing is cut here, and nothing goes between the processes: what a rank reads is what its parameters hold.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist

import relayout


def make_parameters(folder: str, rank: int, num_ranks: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Parameters without values, as an engine makes them: here each has the shape of the rank's slice."""
    with relayout.open(folder, rank, tp=num_ranks) as checkpoint:
        names = checkpoint.keys()
        return {name: torch.empty_like(checkpoint.get_tensor(name), device=device) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="what `relayout convert` wrote")
    folder = parser.parse_args().folder

    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if has_gpu else "gloo")  # torchrun sets RANK, WORLD_SIZE, LOCAL_WORLD_SIZE ...
    rank, num_ranks = dist.get_rank(), dist.get_world_size()

    parameters = make_parameters(folder, rank, num_ranks, device)
    started = time.monotonic()
    relayout.load(folder, rank, tp=num_ranks, device=device, into=parameters)
    seconds = time.monotonic() - started
    dist.barrier()  # All ranks have their weights.

    nbytes = sum(parameter.nbytes for parameter in parameters.values())
    total = sum(parameter.double().sum().item() for parameter in parameters.values())
    print(f"rank {rank} of {num_ranks}: {len(parameters)} tensors, {nbytes} bytes in {seconds:.3f} s, sum {total:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
