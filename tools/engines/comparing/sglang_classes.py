"""Runs in an environment that has SGLang: every parameter of every rank, by SGLang's own loader and through relayout.

`sglang_classes JOBS.json [--stub-kernels | --stub-devices]`: one process is all ranks, one after the other.
Prints a line of JSON for each job. With --stub-devices, each job is a fork, with the stubs of an observation.
Without a GPU, and with SGLANG_USE_CPU_ENGINE unset, the weight loaders take their CUDA paths.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch

from engines.comparing.jobs import Job, Reports, Tensors, held, in_forks, note_differences, run_jobs
from relayout.engines.sglang import COMPUTED
from relayout.observe import sglang
from relayout.observe.sglang_stubs import stub_rotary

TIMEOUT_S = 900
"""For the ranks of one job."""


def fake_rank(arguments: Any, rank: int) -> None:
    """Patch SGLang's groups so that this process is the rank."""
    from sglang.srt import runtime_context
    from sglang.srt.runtime_context import get_parallel, publish

    parallel = get_parallel()
    parallel.clear_stamp()
    publish(arguments, role="scheduler", ranks=runtime_context.SpawnRanks(world_rank=rank))

    def group(index: int, size: int) -> SimpleNamespace:
        return SimpleNamespace(
            rank_in_group=index, world_size=size, is_first_rank=index == 0, is_last_rank=index == size - 1,
            rank=index, ranks=list(range(size)), cpu_group=None, device_group=None, local_rank=index,
            barrier=lambda: None, ca_comm=None,
        )  # fmt: skip

    tp, ep = arguments.tp_size, arguments.ep_size
    parallel.override_permanently(
        tp_group=group(rank, tp),
        attn_tp_group=group(rank, tp),
        moe_tp_group=group(0 if ep > 1 else rank, tp // ep),
        moe_ep_group=group(rank if ep > 1 else 0, ep),
        pp_group=group(0, 1),
        world_group=group(rank, tp),
    )


def load(path: str, job: Job, rank: int, load_format: str) -> Tensors:
    """All that a model holds once its loader has been through it, before it is made ready for kernels."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model, get_model_loader
    from sglang.srt.model_loader.utils import set_default_torch_dtype
    from sglang.srt.server_args import ServerArgs

    extra = json.dumps({"relayout": {"strict": job.strict}}) if load_format == "relayout" else "{}"
    arguments = ServerArgs(
        model_path=path,
        tp_size=job.tp,
        ep_size=job.tp if job.expert else 1,
        device="cpu",
        disable_radix_cache=True,
        load_format=load_format,
        dtype="bfloat16",
        disable_cuda_graph=True,
        skip_tokenizer_init=True,
        trust_remote_code=True,
        model_loader_extra_config=extra,
    )
    fake_rank(arguments, rank)
    model_config = ModelConfig.from_server_args(arguments)
    load_config = LoadConfig(
        load_format=load_format, model_loader_extra_config=json.loads(extra), tp_rank=rank, draft_model_idx=None
    )
    loader = get_model_loader(load_config, model_config)
    quantization = _get_quantization_config(model_config, load_config)
    with set_default_torch_dtype(model_config.dtype), torch.device("cpu"):
        model = _initialize_model(model_config, load_config, quantization)
        weights = loader._get_all_weights(model_config, model)
        loader.load_weights_only(model, weights, torch.device("cpu"))
    return {name: one for name, one in held(model).items() if name.rpartition(".")[2] not in COMPUTED}


def compare(job: Job, result: dict[str, Any]) -> None:
    """Load every rank both ways, the engine's own first."""
    own = [load(job.source, job, rank, "auto") for rank in range(job.tp)]
    result["own_load"] = True
    reports = Reports("sglang.relayout")
    for rank in range(job.tp):
        note_differences(result, rank, own[rank], load(job.converted, job, rank, "relayout"))
    result["whole_reads"] = reports.num_whole


def main() -> None:
    is_on_device = "--stub-devices" in sys.argv
    if is_on_device:
        sglang.start()
        torch.set_num_threads(1)  # A fork of a process with threads may wait for them forever.
    else:
        stub_rotary()
    from sglang.srt.plugins import load_plugins

    load_plugins()
    run_jobs(in_forks(compare, TIMEOUT_S) if is_on_device else compare)


if __name__ == "__main__":
    main()
