"""Builds SGLang's class for a rank and loads probes into it (see `ranks.py`). Needs SGLang and torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from relayout.core.slices import Slice
from relayout.observe.observation import JsonObject
from relayout.observe.ranks import ObservationJob, failure, rank_result

_ATTENTION = (None, "fa3", "triton", "flashinfer")
"""Attention backends to try; they have no weights. None: SGLang's choice for CPUs, which some classes reject."""
INSTALL = "run relayout in SGLang's environment; its kernels and a GPU are not needed"


def start() -> str:
    """Import SGLang and all its classes, with stubs for unavailable packages and devices, and return its version.

    Raises:
        ImportError: SGLang cannot be imported.
    """
    # An engine that starts at the same time needs the GPU memory, and forks cannot share a CUDA context.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ["SGLANG_USE_MESSAGE_QUEUE_BROADCASTER"] = "0"  # The broadcaster would wait for the other ranks.
    from relayout.observe.sglang_stubs import stub_functions, stub_packages

    stub_packages()
    import sglang
    import sglang.srt.model_loader.loader
    from sglang.srt.models.registry import ModelRegistry

    import relayout.observe.tracing  # noqa: F401  # Imported once here instead of in each fork.

    ModelRegistry.get_supported_archs()
    stub_functions()
    return str(sglang.__version__)


def configuration(job: ObservationJob) -> Any:
    """Return SGLang's arguments for a job."""
    from sglang.srt.server_args import ServerArgs

    errors = []
    for backend in _ATTENTION:
        arguments = ServerArgs(
            model_path=job.folder,
            tp_size=job.tp,
            ep_size=job.tp if job.expert_parallel else 1,
            trust_remote_code=job.trust_remote_code,
            device="cpu",
            attention_backend=backend,
            disable_cuda_graph=True,
            disable_custom_all_reduce=True,
            disable_radix_cache=True,
            skip_tokenizer_init=True,
        )
        try:
            arguments.resolve_once()
        except Exception as error:
            errors.append(error)
        else:
            return arguments
    raise errors[0]


def observe_rank(job: ObservationJob, config: Any, rank: int) -> JsonObject:
    """Return the slices that one rank loads, in JSON, or `error`. Turns this process into that rank."""
    from sglang.srt.configs.model_config import ModelConfig

    from relayout.observe.sglang_stubs import start_rank

    try:
        start_rank(config, rank)
        loaded, model_class = _loaded_slices(ModelConfig.from_server_args(config), job.tensors, rank)
        rest = [name for name, *_ in job.tensors if not loaded[name].is_held]
        if rest and (slices := _loaded_by_draft(config, job.tensors, rank, model_class)) is not None:
            # A draft model, which predicts several tokens, loads tensors that the model itself does not.
            loaded.update((name, slices[name]) for name in rest)
    except Exception as error:
        return failure(error, f"rank {rank} of {job.tp}", job.engine)
    return rank_result(job, loaded, model_class)


def _loaded_by_draft(
    config: Any, tensors: Sequence[tuple[str, str, Sequence[int]]], rank: int, model_class: str
) -> dict[str, Slice] | None:
    """Return the slice that the draft model in the same checkpoint loads of each tensor.

    None: the checkpoint has no draft model, or it cannot be built.
    """
    from sglang.srt.configs.model_config import ModelConfig

    try:
        draft = ModelConfig.from_server_args(config, is_draft_model=True)
        slices, draft_class = _loaded_slices(draft, tensors, rank)
    except Exception:
        return None
    return None if draft_class == model_class else slices


def _loaded_slices(
    model_config: Any, tensors: Sequence[tuple[str, str, Sequence[int]]], rank: int
) -> tuple[dict[str, Slice], str]:
    """Return the slice that SGLang's class loads of each tensor, and the name of the class."""
    from relayout.observe.tracing import LoadRecorder

    model = build(model_config, rank)
    recorder = LoadRecorder(model)
    load(model_config, model, recorder, tensors)
    recorder.finish()
    return {name: recorder.loaded(name) for name, *_ in tensors}, type(model).__qualname__


def build(model_config: Any, rank: int) -> Any:
    """Build SGLang's class for a rank. Large parameters have no memory."""
    import torch
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader import loader
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    from relayout.observe.stubs import WithoutMemory

    load_config = LoadConfig(load_format="auto", tp_rank=rank)
    quantization = loader._get_quantization_config(model_config, load_config)
    with set_default_torch_dtype(model_config.dtype), torch.device("cpu"), WithoutMemory():
        model = loader._initialize_model(model_config, load_config, quantization)
    for module in model.modules():
        if hasattr(module, "post_load_weights"):
            module.post_load_weights = lambda *_, **__: None  # The original computes with loaded values.
    return model


def load(model_config: Any, model: Any, recorder: Any, tensors: Iterable[tuple[str, str, Sequence[int]]]) -> None:
    """Load probes of a recorder into a model with SGLang's own loader.

    Args:
        model_config: SGLang's configuration of the model.
        model: the result of `build`.
        recorder: a `LoadRecorder` for the model.
        tensors: (name, dtype, shape) of each tensor.
    """
    import torch
    from sglang.srt.model_loader import loader
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    from relayout.loader.tensors import torch_dtype

    def probes() -> Iterator[tuple[str, torch.Tensor]]:
        for name, dtype, shape in tensors:
            yield name, recorder.probe(name, shape, torch_dtype(name, dtype))

    with set_default_torch_dtype(model_config.dtype), torch.device("cpu"):
        loader.DefaultModelLoader.load_weights_only(model, probes(), torch.device("cpu"))
