"""Runs in an environment that has vLLM: every parameter of every rank, by vLLM's own loader and through relayout.

`vllm_classes JOBS.json [--stub-kernels | --stub-devices]`: one process is all ranks, one after the other: a
stub takes the place of vLLM's groups of processes. Prints a line of JSON for each job. With --stub-devices,
each job is a fork, with the stubs of an observation.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from engines.comparing.jobs import Job, Tensors, held, in_forks, note_differences, run_jobs
from relayout.engines.unwritten import Sentinels, unwritten
from relayout.observe import vllm
from relayout.observe.ranks import ObservationJob
from relayout.observe.stubs import StubGroup, Unpinned, fake_rank, stub_kernels, stub_tokenizers
from relayout.observe.vllm import draft_config

TIMEOUT_S = 900
"""For the ranks of one job."""


def configuration(job: Job, path: str, load_format: str, **extra: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=path,
        load_format=load_format,
        config_format="mistral" if Path(path, "params.json").exists() else "auto",
        model_loader_extra_config=extra,
        tensor_parallel_size=job.tp,
        data_parallel_size=job.replicas,
        data_parallel_size_local=job.replicas,
        enable_expert_parallel=job.expert,
        moe_backend=job.moe_backend,
        distributed_executor_backend="mp",
        dtype="bfloat16",
        max_model_len=64,
        enforce_eager=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        trust_remote_code=True,
        limit_mm_per_prompt={},
        **job.settings,
    ).create_engine_config()


def load(config: Any, model_config: Any) -> tuple[Any, Any]:
    """A model that its loader has been through, before it is made ready for kernels; and relayout's delivery."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.utils.torch_utils import set_default_torch_dtype

    config.compilation_config.static_forward_context.clear()
    torch.use_deterministic_algorithms(True, warn_only=True)  # Buffers that are not written to are the same each time.
    dtype = set_default_torch_dtype(model_config.dtype)
    with set_current_vllm_config(config), dtype, torch.device("cpu"), Unpinned():
        loader = get_model_loader(config.load_config)
        with Sentinels(), stub_tokenizers():  # Around vLLM's own loads, too.
            model = loader.create_model(vllm_config=config, model_config=model_config)
        loader.load_weights(model, model_config)
    return model, getattr(getattr(loader, "load", None), "delivery", None)


def compare(job: Job, result: dict[str, Any]) -> None:
    """Load every rank both ways, the engine's own first."""
    chosen = setup(job, job.source, "auto")
    own: list[Tensors] = []
    for rank in range(job.tp * job.stages * job.replicas):
        model, _ = load_rank(job, rank, *chosen)
        own.append(held(model))
        result["never_loaded"] += len(unwritten(model))
    result["own_load"] = True
    if not job.converted:
        return
    # Without a word of its format: vLLM recognizes the folder.
    chosen = setup(job, job.converted, "auto", strict=job.strict)
    for rank in range(job.tp * job.stages * job.replicas):
        model, weights = load_rank(job, rank, *chosen)
        report = weights.report()
        result["whole_reads"] += report.num_whole
        result["read_nbytes"] += report.nbytes
        result["needed_nbytes"] += sum(parameter.nbytes for parameter in model.parameters())
        note_differences(result, rank, own[rank], held(model))


def setup(job: Job, path: str, load_format: str, **extra: Any) -> tuple[Any, Any]:
    """Configurations of an engine, and of the model that is loaded."""
    config = configuration(job, path, load_format, **extra)
    return config, draft_config(config) if job.draft else config.model_config


def load_rank(job: Job, rank: int, config: Any, model_config: Any) -> tuple[Any, Any]:
    """A rank's model, of all stages one after the other; and relayout's delivery."""
    from vllm.distributed import parallel_state

    fake_rank(rank % (job.tp * job.replicas), job.tp, job.expert, job.replicas)
    config.parallel_config.rank = rank % job.tp if job.replicas > 1 else rank
    config.parallel_config.data_parallel_rank = rank // job.tp if job.replicas > 1 else 0
    if job.stages > 1:  # There are no processes for them.
        parallel_state._PP = StubGroup(rank // job.tp, job.stages)
        config.parallel_config.pipeline_parallel_size = job.stages
    return load(config, model_config)


def compare_on_device(job: Job, result: dict[str, Any]) -> None:
    """Load every rank both ways, with the stubs for a GPU that an observation has."""
    vllm.configuration(ObservationJob("vllm", job.source, [], job.tp, job.expert, trust_remote_code=True))
    compare(job, result)


def import_classes(configs: list[dict[str, Any]]) -> None:
    """Import here, once, what each fork would import: that takes longer than to build and load a small model."""
    from engines.observing.several_sizes import warm_up  # It needs this module.

    vllm.start()
    with TemporaryDirectory() as scratch:
        warm_up("LlamaForCausalLM", Path(scratch, "warm"))
    from vllm.model_executor.models.registry import ModelRegistry

    for name in {name for config in configs for name in config["architectures"]}:
        with contextlib.suppress(Exception):  # The job says why.
            ModelRegistry.models[name].load_model_cls()


def main() -> None:
    if "--stub-devices" in sys.argv:
        torch.set_num_threads(1)  # A fork of a process with threads may wait for them forever.
        sources = {job["source"] for job in json.loads(Path(sys.argv[1]).read_text())}
        import_classes([json.loads(Path(source, "config.json").read_text()) for source in sources])
        run_jobs(in_forks(compare_on_device, TIMEOUT_S))
        return
    if "--stub-kernels" in sys.argv:
        stub_kernels()
        from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig

        AutoAWQConfig.get_min_capability = lambda: -1
    run_jobs(compare)


if __name__ == "__main__":
    main()
