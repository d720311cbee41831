"""A converted checkpoint in the tensor parallelism of transformers: each process reads its own rank's bytes only.

    relayout convert llama-3.1-8b --tp 2
    torchrun --nproc-per-node 2 transformers_tp.py llama-3.1-8b-tp2

A folder of another degree serves as well, if more slowly: `tp=` says how many ranks there are now.

transformers (5.23) makes DTensors of the parameters that its plan for the model cuts; each gets this rank's slice for
its local part. Where that plan differs from what inference engines do, convert with `--plan transformers`. As written
here it is for models whose parameters are named as in the checkpoint and whose embeddings are not tied, with a
vocabulary that is a multiple of 64 times the number of ranks.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

import relayout


def make_without_weights(folder: str) -> PreTrainedModel:
    """The model with parameters that have a shape and no memory."""
    hook = register_module_parameter_registration_hook(lambda _module, _name, one: torch.nn.Parameter(one.to("meta")))
    try:
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    finally:
        hook.remove()


def fill(model: PreTrainedModel, held: dict[str, torch.Tensor]) -> None:
    """Give each parameter this rank's slice."""
    filled = {}
    for name, parameter in model.named_parameters():
        local = held[name].to(parameter.dtype)
        if isinstance(parameter, DTensor):
            local = DTensor.from_local(local, parameter.device_mesh, parameter.placements)
        filled[name] = local
    model.load_state_dict(filled, assign=True)  # Refuses what has not the parameter's whole shape.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="what `relayout convert` wrote")
    parser.add_argument("--prompt", type=int, nargs="+", default=[1, 2, 3], help="token ids")
    parser.add_argument("--new-tokens", type=int, default=16)
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    config, _, mesh = PreTrainedModel.prepare_distribute_model(DistributedConfig(tp_size=num_ranks, tp_plan="auto"))
    model = PreTrainedModel.maybe_distribute_model(make_without_weights(arguments.folder), config, mesh)
    fill(model, relayout.load(arguments.folder, rank, tp=num_ranks))

    tokens = model.eval().generate(
        torch.tensor([arguments.prompt]), max_new_tokens=arguments.new_tokens, do_sample=False
    )
    if rank == 0:
        print(*tokens[0].tolist())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
