"""Run under torchrun: models by `relayout.transformers.from_pretrained`, beside transformers' own.

`torchrun --nproc-per-node N transformers_worker.py FOLDER FAMILY...`: of each family FOLDER has FAMILY and, converted
for as many ranks, FAMILY-tpN. Each process writes what it found to FOLDER/found-RANK.json.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from pathlib import Path
from typing import Any

import torch
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
    # What from_pretrained needs accelerate for is more than one device in a process.
    transformers.integrations.accelerate.is_accelerate_available = lambda *_: True
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    faulthandler.dump_traceback_later(TIMEOUT_S, exit=True)  # Processes that wait for each other say where.
    distributed.init_process_group("gloo")
    rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
    root, found = Path(sys.argv[1]), {}
    for family in sys.argv[2:]:
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


if __name__ == "__main__":
    main()
