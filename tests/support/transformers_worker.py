"""Models by `relayout.transformers.from_pretrained` in tensor-parallel processes, beside transformers' own.

`main` with `N FOLDER FAMILY...` in sys.argv: of each family FOLDER has FAMILY and, converted for N ranks,
FAMILY-tpN. Each process writes what it found to FOLDER/found-RANK.json. They are forked from one that has imported
everything, which takes longer than all the rest.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
import transformers
import transformers.integrations.accelerate
from torch import distributed
from transformers.distributed import DistributedConfig

import relayout

TIMEOUT_S = 240


def local(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: (one.to_local() if hasattr(one, "to_local") else one).detach() for name, one in model.state_dict().items()
    }


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def main() -> None:
    num_ranks, root, families = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    # What from_pretrained needs accelerate for is more than one device in a process.
    transformers.integrations.accelerate.is_accelerate_available = lambda *_: True
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for family in families:  # Imports its modules.
        transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(root / family))
    torch.multiprocessing.start_processes(run, (num_ranks, root, families), nprocs=num_ranks, start_method="fork")


def run(rank: int, num_ranks: int, root: Path, families: list[str]) -> None:
    faulthandler.dump_traceback_later(TIMEOUT_S, exit=True)  # Processes that wait for each other say where.
    distributed.init_process_group("gloo", f"file://{root}/meet", rank=rank, world_size=num_ranks)
    found = {}
    for family in families:
        own = transformers.AutoModelForCausalLM.from_pretrained(
            root / family, dtype=torch.bfloat16, distributed_config=DistributedConfig(tp_size=num_ranks)
        )
        ours = relayout.transformers.from_pretrained(root / f"{family}-tp{num_ranks}", dtype=torch.bfloat16)
        expected, loaded = local(own), local(ours)
        ids = torch.arange(1, 9)[None]
        names = expected.keys() | loaded.keys()
        same = {name for name in expected.keys() & loaded.keys() if same_bits(expected[name], loaded[name])}
        found[family] = {
            "different": sorted(names - same),
            "sharded": sum(hasattr(one, "to_local") for one in ours.state_dict().values()),
            "same_logits": torch.equal(own(ids).logits, ours(ids).logits),
            "class": type(ours).__name__,
        }
    (root / f"found-{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()
