"""A converted checkpoint in plain transformers, in one process.

    relayout convert llama-3.1-8b --tp 1
    python transformers_single.py llama-3.1-8b-tp1

A folder of one rank is a model folder like any other: `from_pretrained` loads it, and knows nothing of relayout.

    relayout convert llama-3.1-8b --tp 8
    python transformers_single.py llama-3.1-8b-tp8

A folder of several ranks is the whole model too: `relayout.safe_open` has the source's tensors, and puts each together
from the ranks' slices when it is asked for. As written here it is for models whose parameters are named as in the
checkpoint: Llama, Mistral, Qwen and their like.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import relayout


def load_stock(folder: Path) -> PreTrainedModel:
    """Load a folder by transformers alone."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def load_whole_tensors(folder: Path) -> PreTrainedModel:
    """One whole tensor after the other, into a model that is there."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    missing = model.state_dict()
    with relayout.safe_open(folder) as opened:
        for name in opened.keys():  # noqa: SIM118 (it is no mapping)
            missing.pop(name).copy_(opened.get_tensor(name))
    if missing.keys() - model.all_tied_weights_keys.keys():
        raise SystemExit(f"{folder}: has no tensors {', '.join(missing)}")
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what `relayout convert` wrote")
    parser.add_argument("--prompt", type=int, nargs="+", default=[1, 2, 3], help="token ids")
    parser.add_argument("--new-tokens", type=int, default=16)
    arguments = parser.parse_args()

    # The index of a folder of several ranks names a file that is not there, which stops stock loaders.
    index = json.loads((arguments.folder / "model.safetensors.index.json").read_text())
    is_stock = all((arguments.folder / name).exists() for name in index["weight_map"].values())
    model = load_stock(arguments.folder) if is_stock else load_whole_tensors(arguments.folder)
    prompt = torch.tensor([arguments.prompt])
    tokens = model.generate(prompt, max_new_tokens=arguments.new_tokens, do_sample=False)
    print(*tokens[0].tolist())


if __name__ == "__main__":
    main()
