"""Runs in an environment that has vLLM: every parameter of every rank, by vLLM's own loader and through relayout.

`vllm_classes.py JOBS.json [--stand-in-kernels]`: one process is all ranks, one after the other: a stand-in takes the
place of vLLM's groups of processes. Prints a line of JSON for each job.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from comparing import Job, Tensors, note_differences, nothing_found, poison, run_jobs


class Group:
    """What vLLM asks of a group of processes while it builds and loads a model: who is this one, of how many."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = self.rank_in_group = self.local_rank = rank
        self.world_size = world_size
        self.ranks = list(range(world_size))
        self.first_rank, self.last_rank = 0, world_size - 1
        self.is_first_rank, self.is_last_rank = rank == 0, rank == world_size - 1
        self.device = torch.device("cpu")
        self.device_group = self.cpu_group = SimpleNamespace(size=lambda: world_size, rank=lambda: rank)
        self.device_communicator = self.mq_broadcaster = None
        self.unique_name = f"stand-in:{rank}"

    def all_reduce(self, tensor: Any) -> Any:
        return tensor

    all_gather = all_reduce


def play(rank: int, tp: int, expert: bool) -> None:
    """Be this rank."""
    from vllm.distributed import parallel_state

    for name in ("_TP", "_WORLD", "_PP", "_DP", "_EP", "_EPLB", "_PCP", "_DCP", "_INNER_DP_WORLD"):
        if hasattr(parallel_state, name):
            many = name in ("_TP", "_WORLD") or (name == "_EP" and expert)
            setattr(parallel_state, name, Group(rank if many else 0, tp if many else 1))


def configuration(job: Job, path: str, load_format: str, **extra: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=path,
        load_format=load_format,
        model_loader_extra_config=extra,
        tensor_parallel_size=job.tp,
        enable_expert_parallel=job.expert,
        moe_backend=job.moe_backend,
        distributed_executor_backend="mp",
        dtype="bfloat16",
        max_model_len=64,
        enforce_eager=True,
        skip_tokenizer_init=True,
        limit_mm_per_prompt={},
    ).create_engine_config()


def load(config: Any, model_config: Any) -> tuple[Tensors, Any]:
    """All that a model holds once its loader has been through it, before it is made ready for kernels."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config.compilation_config.static_forward_context.clear()
    with set_current_vllm_config(config), set_default_torch_dtype(model_config.dtype), torch.device("cpu"):
        model = initialize_model(vllm_config=config, model_config=model_config)
        held = poison(model)
        loader = get_model_loader(config.load_config)
        loader.load_weights(model, model_config)
    return {name: tensor.detach() for name, tensor in held.items()}, getattr(loader, "_weights", None)


def compare(job: Job, found: dict[str, Any]) -> None:
    """Load every rank in all ways; the engine's own first."""
    chosen = setup(job, job.source, "auto")
    own = [load_rank(job, rank, *chosen)[0] for rank in range(job.tp)]
    found["own_load"] = True
    for placement in ("copy", "direct"):
        chosen = setup(job, job.converted, "relayout", strict=job.strict, placement=placement)
        seen = nothing_found()
        straight = nbytes = 0
        for rank in range(job.tp):
            ours, weights = load_rank(job, rank, *chosen)
            report = weights.report()
            seen["whole_reads"] += report.num_whole
            straight, nbytes = straight + report.placed_nbytes, nbytes + report.nbytes
            note_differences(seen, rank, own[rank], ours)
        seen["different"] = found["different"] + [f"{placement}, {one}" for one in seen["different"]]
        found |= seen
    found["straight"] = round(straight / nbytes, 4)


def setup(job: Job, path: str, load_format: str, **extra: Any) -> tuple[Any, Any]:
    """Configurations of an engine, and of the model that is loaded."""
    config = configuration(job, path, load_format, **extra)
    return config, draft_of(config) if job.draft else config.model_config


def load_rank(job: Job, rank: int, config: Any, model_config: Any) -> tuple[Tensors, Any]:
    """All that a rank's model holds."""
    play(rank, job.tp, job.expert)
    config.parallel_config.rank = rank
    return load(config, model_config)


def draft_of(config: Any) -> Any:
    from vllm.config import SpeculativeConfig

    config.speculative_config = SpeculativeConfig(
        method="mtp",
        model=config.model_config.model,
        num_speculative_tokens=1,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )
    return config.speculative_config.draft_model_config


def main() -> None:
    if "--stand-in-kernels" in sys.argv:
        stand_in_kernels()
    run_jobs(compare)


def stand_in_kernels() -> None:
    """Where vLLM has no kernel of a quantized layer for this processor, take a stand-in: nothing is run here."""
    base = "vllm.model_executor.layers"
    for module in (
        "fp8",
        "auto_awq",
        "auto_gptq",
        "mxfp4",
        "modelopt",
        "moe_wna16",
        "compressed_tensors.compressed_tensors",
    ):
        with contextlib.suppress(ImportError):
            importlib.import_module(f"{base}.quantization.{module}")
    linear = importlib.import_module("vllm.model_executor.kernels.linear")
    for kind in ("fp8", "int8", "nvfp4", "mxfp4", "mxfp8"):
        replace(linear, f"init_{kind}_linear_kernel", lambda: MagicMock(__name__="stand_in"))
    replace(linear, "choose_mp_linear_kernel", lambda: MagicMock(__name__="stand_in"))
    experts = {"fp8": "fp8", "int_wna16": "wna16", "mxfp4": "mxfp4", "int8": "int8", "nvfp4": "nvfp4"}
    for module, name in experts.items():
        oracle = importlib.import_module(f"{base}.fused_moe.oracle.{module}")
        kinds = next(value for key, value in vars(oracle).items() if key.lower() == f"{name}moebackend")
        chosen = next((getattr(kinds, one) for one in ("TRITON", "MARLIN") if hasattr(kinds, one)), next(iter(kinds)))
        replace(oracle, f"select_{name}_moe_backend", lambda chosen=chosen: (chosen, MagicMock(__name__="stand_in")))


def replace(module: Any, name: str, stand_in: Any) -> None:
    """Let a function, wherever it has been imported to, return the stand-in where it fails."""
    original = getattr(module, name)

    def tried(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except (ValueError, NotImplementedError):
            return stand_in()

    for other in list(sys.modules.values()):
        if getattr(other, "__name__", "").startswith("vllm") and getattr(other, name, None) is original:
            setattr(other, name, tried)


if __name__ == "__main__":
    main()
