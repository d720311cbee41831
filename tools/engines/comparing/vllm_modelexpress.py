"""Runs in an environment that has vLLM, with modelexpress: every parameter, by vLLM's own load and by ModelExpress's.

`vllm_modelexpress JOBS.json`: ModelExpress's own chain of strategies loads a model of vLLM's by ModelExpress's adapter.
Its own loader of plugins puts relayout's strategy into the chain. As in `vllm_classes`, one process is all ranks.
ModelExpress knows CUDA only, and nobody is there to share weights with: it is given a context without both. Prints a
line of JSON for each job.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from engines.comparing.jobs import Job, Tensors, held, note_differences, run_jobs
from engines.comparing.vllm_classes import load_rank, setup
from relayout.observe.stubs import Unpinned, fake_rank


def load(config: Any, rank: int) -> tuple[torch.nn.Module, str]:
    """A rank's model that ModelExpress has loaded, before it is made ready for kernels; and by which strategy.

    Raises:
        RuntimeError: no strategy could.
    """
    from modelexpress import p2p_pb2
    from modelexpress.engines.vllm import adapter as vllm_adapter
    from modelexpress.load_strategy import LoadContext, LoadStrategyChain, base
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    backend = SimpleNamespace(name="none", empty_cache=lambda: None, supports_gds=lambda: False)
    vllm_adapter.accelerator_backend_for = lambda _device: backend
    model_config, cpu, done = config.model_config, torch.device("cpu"), []
    base.NativeLoadStrategy.post_process = lambda strategy, *_: done.append(strategy.name)
    config.compilation_config.static_forward_context.clear()
    with set_current_vllm_config(config), set_default_torch_dtype(model_config.dtype), cpu, Unpinned():
        context = LoadContext(
            **{"model_config": model_config, "load_config": config.load_config, "target_device": cpu},
            **{"global_rank": rank, "worker_rank": rank, "local_rank": rank, "device_id": rank, "worker_id": "here"},
            **{"identity": p2p_pb2.SourceIdentity(model_name="compared"), "mx_client": None, "p2p_enabled": False},
            **{"adapter": vllm_adapter.VllmAdapter(config, model_config), "accelerator_backend": backend},
        )
        model = initialize_model(vllm_config=config, model_config=model_config)
        return LoadStrategyChain.run(model, context), done[-1]


def compare(job: Job, result: dict[str, Any]) -> None:
    """Load every rank both ways, vLLM's own first; and the source by ModelExpress, which is not for the plugin."""
    chosen, own = setup(job, job.source, "auto"), list[Tensors]()
    for rank in range(job.tp):
        own.append(held(load_rank(job, rank, *chosen)[0]))
    result["own_load"] = True
    for path, expected in ((job.source, "default"), (job.converted, "relayout")):
        config, _ = setup(job, path, "modelexpress")
        for rank in range(job.tp):
            fake_rank(rank, job.tp, job.expert)
            config.parallel_config.rank = rank
            model, strategy = load(config, rank)
            assert strategy == expected, strategy
            if strategy == "relayout":
                note_differences(result, rank, own[rank], held(model))


def main() -> None:
    os.environ |= {"MX_PLUGIN_DIR": str(Path(__file__).parents[2] / "examples"), "MX_LOAD_PLUGIN": "relayout"}
    run_jobs(compare)


if __name__ == "__main__":
    main()
