"""A converted checkpoint in the tensor parallelism of transformers (5.23, with accelerate), without relayout.

    relayout convert llama-3.1-8b --tp 2
    torchrun --nproc-per-node 2 transformers_tp.py llama-3.1-8b-tp2

transformers knows checkpoints whose ranks have files of their own by the names of these, and reads them with PyTorch's
distributed checkpoints, which find in rank files what they need. So links under such names are all that it takes. Each
process reads what its parameters need. For dense models whose parameters are named as in the checkpoint;
`relayout.transformers.from_pretrained` also does experts, and reads a rank in one go.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig


def link(folder: Path, links: Path) -> None:
    """Show rank files under the names that transformers looks for, and all other files under their own."""
    files = {file: re.fullmatch(r"model-rank-(\d+)-part-(\d+)\.safetensors", file.name) for file in folder.iterdir()}
    num_parts = 1 + max(int(found[2]) for found in files.values() if found)
    for file, found in files.items():
        name = file.name
        if found:
            name = f"shard-{int(found[1]) + 1:05d}-model-{int(found[2]) + 1:05d}-of-{num_parts:05d}.safetensors"
        (links / name).symlink_to(file.resolve())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what `relayout convert` wrote")
    parser.add_argument("--prompt", type=int, nargs="+", default=[1, 2, 3], help="token ids")
    parser.add_argument("--new-tokens", type=int, default=16)
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as links:
        link(arguments.folder, Path(links))
        model = AutoModelForCausalLM.from_pretrained(
            links, dtype=torch.float32, distributed_config=DistributedConfig(tp_size=dist.get_world_size())
        )
    tokens = model.eval().generate(
        torch.tensor([arguments.prompt]), max_new_tokens=arguments.new_tokens, do_sample=False
    )
    if dist.get_rank() == 0:
        print(*tokens[0].tolist())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
