"""Transformers' own tensor parallelism in real processes (gloo, CPU), beside relayout's models and slices.

`compare_models` with `N FOLDER FAMILY...` in sys.argv: of each family FOLDER has FAMILY and, converted for N ranks,
FAMILY-tpN. Each process writes how the two models differ to FOLDER/found-RANK.json.

`write_shards` with `FOLDER N/FAMILY...` in sys.argv: FOLDER has checkpoints, FOLDER/source/FAMILY. For each degree N
and family it writes FOLDER/shards/tpN/FAMILY/rank-R.safetensors, rank R's part of each parameter, as transformers names
them in memory.

The processes are forked from one that has imported everything, which takes longer than all the rest.
"""

from __future__ import annotations

import faulthandler
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

TIMEOUT_S = 240
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


def compare_models() -> None:
    import torch.multiprocessing

    num_ranks, root, families = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    _prepare(root / family for family in families)
    torch.multiprocessing.start_processes(_compare, (num_ranks, root, families), nprocs=num_ranks, start_method="fork")


def write_shards() -> None:
    import torch.multiprocessing

    folder, families = Path(sys.argv[1]), defaultdict(list)
    _prepare((folder / "source").iterdir())
    for case in sys.argv[2:]:
        tp, _, family = case.partition("/")
        families[int(tp)].append(family)
    for tp, asked in families.items():
        torch.multiprocessing.start_processes(_write, (tp, folder, asked), nprocs=tp, start_method="fork")


def _prepare(sources: Iterable[Path]) -> None:
    """Import the modules of the models, once instead of in each process."""
    import transformers.distributed
    import transformers.integrations.accelerate

    # What from_pretrained needs accelerate for is more than one device in a process.
    transformers.integrations.accelerate.is_accelerate_available = lambda *_: True
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for source in sources:
        transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(source))


def _join(folder: Path, rank: int, num_ranks: int) -> None:
    import torch.distributed

    faulthandler.dump_traceback_later(TIMEOUT_S, exit=True)  # Processes that wait for each other say where.
    torch.distributed.init_process_group("gloo", f"file://{folder}/meet-{num_ranks}", rank=rank, world_size=num_ranks)


def _compare(rank: int, num_ranks: int, root: Path, families: list[str]) -> None:
    import torch
    import transformers
    from transformers.distributed import DistributedConfig

    import relayout

    _join(root, rank, num_ranks)
    found = {}
    for family in families:
        own = transformers.AutoModelForCausalLM.from_pretrained(
            root / family, dtype=torch.bfloat16, distributed_config=DistributedConfig(tp_size=num_ranks)
        )
        ours = relayout.transformers.from_pretrained(root / f"{family}-tp{num_ranks}", dtype=torch.bfloat16)
        expected, loaded = _local(own), _local(ours)
        ids = torch.arange(1, 9)[None]
        names = expected.keys() | loaded.keys()
        same = {name for name in expected.keys() & loaded.keys() if _same_bits(expected[name], loaded[name])}
        found[family] = {
            "different": sorted(names - same),
            "sharded": sum(hasattr(one, "to_local") for one in ours.state_dict().values()),
            "same_logits": torch.equal(own(ids).logits, ours(ids).logits),
            "class": type(ours).__name__,
        }
    (root / f"found-{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def _local(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: (one.to_local() if hasattr(one, "to_local") else one).detach() for name, one in model.state_dict().items()
    }


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    import torch

    return one.shape == other.shape and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _write(rank: int, tp: int, folder: Path, families: list[str]) -> None:
    import torch.distributed
    from safetensors.torch import save_file

    _join(folder, rank, tp)
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
