"""Runs transformers' own tensor parallelism on CPUs, and writes down what each rank's process holds.

`main` with `FOLDER N/FAMILY...` in sys.argv: FOLDER has checkpoints, FOLDER/source/FAMILY. For each degree N and family
it writes FOLDER/shards/tpN/FAMILY/rank-R.safetensors, rank R's part of each parameter, as transformers names them in
memory. The processes are forked from one that has imported everything, which takes longer than all the rest.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_EXPERT = re.compile(r"(.+)\.experts\.(\d+)\.(\w+)\.weight")
_PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}


def as_in_memory(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors as transformers has them in memory: experts stacked, each one's gate on top of its up."""
    import torch

    named: dict[str, torch.Tensor] = {}
    layers: defaultdict[str, defaultdict[int, dict[str, torch.Tensor]]] = defaultdict(lambda: defaultdict(dict))
    for name, tensor in tensors.items():
        name = name.replace(".block_sparse_moe.", ".mlp.").replace("embed_out.", "lm_head.")
        if expert := _EXPERT.fullmatch(name):
            layers[expert[1]][int(expert[2])][_PARTS[expert[3]]] = tensor
        else:
            named[name] = tensor
    for layer, numbered in layers.items():
        experts = [numbered[number] for number in range(len(numbered))]
        named[f"{layer}.experts.gate_up_proj"] = torch.stack([torch.cat([e["gate"], e["up"]]) for e in experts])
        named[f"{layer}.experts.down_proj"] = torch.stack([expert["down"] for expert in experts])
    return named


def main() -> None:
    import torch.distributed.tensor
    import torch.multiprocessing
    import transformers.distributed
    import transformers.integrations.accelerate

    # What from_pretrained needs accelerate for is more than one device in a process.
    transformers.integrations.accelerate.is_accelerate_available = lambda *_: True
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    folder = Path(sys.argv[1])
    for source in (folder / "source").iterdir():  # Imports the family's modules, once instead of in each process.
        transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(source))
    families = defaultdict(list)
    for case in sys.argv[2:]:
        tp, _, family = case.partition("/")
        families[int(tp)].append(family)
    for tp, asked in families.items():
        torch.multiprocessing.start_processes(_run_rank, (tp, folder, asked), nprocs=tp, start_method="fork")


def _run_rank(rank: int, tp: int, folder: Path, families: list[str]) -> None:
    import torch.distributed
    from safetensors.torch import save_file

    torch.distributed.init_process_group("gloo", f"file://{folder}/meet-{tp}", rank=rank, world_size=tp)
    for family in families:
        try:
            shards = _shards(folder / "source" / family, tp)
        except Exception as error:
            error.add_note(f"family {family}, rank {rank} of {tp}")
            raise
        path = folder / "shards" / f"tp{tp}" / family / f"rank-{rank}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in shards.items()}, path)
    torch.distributed.destroy_process_group()


def _shards(source: Path, tp: int) -> dict[str, torch.Tensor]:
    """This process's part of all that is saved: tied parameters once, by their first name."""
    from torch.distributed.tensor import DTensor
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_size=tp, tp_plan="auto")
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(source, dtype="auto", distributed_config=config)
    saved = model.state_dict().keys()
    return {
        name: tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for name, tensor in chain(model.named_parameters(), model.named_buffers())
        if name in saved
    }
