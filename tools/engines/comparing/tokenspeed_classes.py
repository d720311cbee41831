"""Runs in an environment that has TokenSpeed: every parameter of every rank, by its own loader and through relayout.

`tokenspeed_classes JOBS.json [--stub-kernels]`: one process is all ranks, one after the other. Prints a line of
JSON for each job. TokenSpeed's kernels need a GPU when they are imported, so another module stands in for each of
theirs: classes are built and loaded by TokenSpeed's own code, and nothing is computed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

from engines.comparing.jobs import Job, Reports, Tensors, held, note_differences, run_jobs
from relayout.engines.tokenspeed import IGNORED

OF_GPUS = ("nvtx", "tokenspeed_kernel", "tokenspeed_scheduler", "tokenspeed_triton", "torch_memory_saver")
"""Packages that TokenSpeed imports, and no load of weights calls."""
_PLATFORM = "tokenspeed_kernel.platform"
"""The module that TokenSpeed asks for the GPU."""


class Stubs(MetaPathFinder, Loader):
    """Finds a module without contents for every name in the packages `OF_GPUS`."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """Return where it is: here; None: it is of another package."""
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] in OF_GPUS else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module."""
        module = _Stub(spec.name)
        if spec.name == _PLATFORM:
            platform = MagicMock(arch_version=SimpleNamespace(major=10, minor=0), vendor="nvidia", is_nvidia=True)
            for name in ("amd", "npu", "hopper", "ampere", "cdna4", "cdna4_plus", "cdna5", "cdna5_plus"):
                setattr(platform, f"is_{name}", False)
            module.current_platform = lambda: platform  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: it has no code."""


class _Stub(ModuleType):
    """A module that has every name."""

    __path__: list[str] = []  # noqa: RUF012 (as import makes it)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


_YARN = {
    "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096,
    "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip


def of_the_hub(path: str) -> dict[str, Any]:
    """Return what the text model's configuration has on the hub, and a small checkpoint has otherwise."""
    config = json.loads(Path(path, "config.json").read_text())
    text = config.get("text_config", config)
    return {
        **({"num_experts": text["num_local_experts"]} if "num_local_experts" in text else {}),
        **({"rope_scaling": _YARN} if text["model_type"] in ("deepseek_v3", "kimi_k2") else {}),
    }


def load(path: str, job: Job, rank: int, options: dict[str, Any] | None) -> Tensors:
    """Return all that a model holds once its loader has been through it, before it is made ready for kernels.

    Args:
        options: relayout's; None: the environment has none.
    """
    from tokenspeed.runtime.configs.load_config import LoadConfig
    from tokenspeed.runtime.configs.model_config import ModelConfig
    from tokenspeed.runtime.distributed.mapping import Mapping
    from tokenspeed.runtime.model_loader import loader
    from tokenspeed.runtime.model_loader.utils import set_default_torch_dtype

    os.environ.pop("RELAYOUT_TOKENSPEED", None)
    if options is not None:
        os.environ["RELAYOUT_TOKENSPEED"] = json.dumps(options)
    owners = job.tp if job.expert else 1
    mapping = Mapping(
        rank, job.tp, attn_tp_size=job.tp, dense_tp_size=job.tp, moe_tp_size=job.tp // owners, moe_ep_size=owners
    )
    arguments = MagicMock(
        mapping=mapping, speculative_algorithm=None, load_format="auto", language_model_only=False,
        gpu_memory_utilization=0.9, disaggregation_mode="null",
        mm_encoder_tp_mode="weights", mm_attention_backend="triton_attn",
    )  # fmt: skip
    override = json.dumps(of_the_hub(path))
    model_config = ModelConfig(path, model_override_args=override, server_args=arguments, dtype="bfloat16")
    load_config = LoadConfig(weight_loader_prefetch_checkpoints=False)
    default = loader.get_model_loader(load_config)
    with set_default_torch_dtype(model_config.dtype):
        with torch.device("cpu"):
            model = loader._initialize_model(model_config, load_config)
        model.load_weights(default._get_all_weights(model_config, model))
    return {name: one for name, one in held(model).items() if name.rpartition(".")[2] not in IGNORED}


def compare(job: Job, result: dict[str, Any]) -> None:
    """Load every rank both ways, the engine's own first."""
    own = [load(job.source, job, rank, None) for rank in range(job.tp)]
    result["own_load"] = True
    reports = Reports("tokenspeed.relayout")
    for rank in range(job.tp):
        ours = load(job.converted, job, rank, {"strict": job.strict})
        note_differences(result, rank, own[rank], ours)
    result["whole_reads"], result["loads"] = reports.num_whole, reports.num_loads


def stub() -> None:
    """Let TokenSpeed's classes be imported and built without a GPU."""
    sys.meta_path.insert(0, Stubs())
    torch.cuda.Event = torch.cuda.Stream = MagicMock  # type: ignore[misc]
    from tokenspeed.runtime.distributed.process_group_manager import process_group_manager
    from tokenspeed.runtime.layers import rotary_embedding

    process_group_manager.get_process_group = MagicMock()
    rotary_embedding.get_rope = MagicMock()  # It has no weights, and makes tables on the GPU.


def main() -> None:
    stub()
    from tokenspeed.runtime.plugins import ensure_loaded

    ensure_loaded()
    run_jobs(compare)


if __name__ == "__main__":
    main()
