"""A converted checkpoint of any degree in PyTorch's distributed checkpointing, without relayout.

    relayout convert llama-3.1-8b --tp 8
    python torch_dcp.py llama-3.1-8b-tp8

The rank files say which part of a whole tensor each of theirs is, in the way of `torch.distributed.checkpoint` (DCP).
Its reader takes them for one model: here into whole tensors, in one process; into DTensors of any placement likewise.
`dcp` in relayout.json says whether it can: a rank's slice of fused tensors (q|k|v) may be no single box.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoConfig, AutoModelForCausalLM


def read_whole_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the model, with the names, dtypes and shapes that DCP finds."""
    manifest = json.loads((folder / "relayout.json").read_text())
    if not manifest["dcp"] and manifest["num_ranks"] > 1 and manifest["whole"] is None:
        raise SystemExit(f"{folder}: has fused slices that DCP cannot express: relayout.safe_open reads whole tensors")
    reader = HuggingFaceStorageReader(str(folder))
    tensors = {}
    for name, found in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(found, TensorStorageMetadata)
        tensors[name] = torch.empty(found.size, dtype=found.properties.dtype)
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what `relayout convert` wrote")
    parser.add_argument("--prompt", type=int, nargs="+", default=[1, 2, 3], help="token ids")
    parser.add_argument("--new-tokens", type=int, default=16)
    arguments = parser.parse_args()

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(arguments.folder), dtype=torch.float32)
    model.load_state_dict(read_whole_tensors(arguments.folder))
    prompt = torch.tensor([arguments.prompt])
    tokens = model.eval().generate(prompt, max_new_tokens=arguments.new_tokens, do_sample=False)
    print(*tokens[0].tolist())


if __name__ == "__main__":
    main()
