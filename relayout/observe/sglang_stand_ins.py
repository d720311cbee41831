"""Stand-ins for kernels, devices and processes, with which SGLang's classes are built and loaded on a CPU.

SGLang makes its groups of processes itself, over torch's fake backend, so all its degrees are its own. The GPUs of the
machine are hidden (`sglang.py`): a plan is the same with and without them. Needs torch at import time.
"""

from __future__ import annotations

import concurrent.futures
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

from relayout.observe.stand_ins import AnyModule, put, to_device_unless_meta

_LANGUAGES = ("tilelang", "tilelang.language")
"""Languages of kernels that some modules of SGLang use when they are imported."""


def stand_in_packages() -> None:
    """Let SGLang be imported without kernels and without a GPU. Must be called before the import."""
    stand_in_rotary()
    _stand_in_cuda()
    try:
        importlib.import_module(_LANGUAGES[0])
    except ImportError:
        for name in _LANGUAGES:
            sys.modules[name] = AnyModule(name, MagicMock())


def stand_in_rotary() -> None:
    """Let SGLang import a kernel of vLLM, as its rotary embedding does where there is no CUDA. Nothing calls it."""
    package, operations = ModuleType("vllm"), ModuleType("vllm._custom_ops")
    operations.rotary_embedding = None  # type: ignore[attr-defined]
    package._custom_ops = operations  # type: ignore[attr-defined]
    for module in (package, operations):
        module.__spec__ = ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module


def _stand_in_cuda() -> None:
    """Let classes ask for what a GPU is, and make its streams and events."""
    properties = SimpleNamespace(name="stand-in", major=9, minor=0, multi_processor_count=132, total_memory=80 * 2**30)
    torch.cuda.Event = torch.cuda.Stream = torch.cuda.ExternalStream = MagicMock  # type: ignore[misc]
    torch.cuda.current_stream = lambda *_, **__: MagicMock()
    torch.cuda.current_device = lambda: 0
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.get_device_capability = lambda *_, **__: (properties.major, properties.minor)
    torch.cuda.get_device_name = lambda *_, **__: properties.name
    torch.cuda.get_device_properties = lambda *_, **__: properties  # type: ignore[assignment]


def stand_in_functions() -> None:
    """Let classes be built and loaded without kernels. Must be called after SGLang's classes have been imported."""
    # Rotary embeddings have no weights, and some want a kernel.
    for name in ("get_rope", "get_rope_cpu", "get_rope_wrapper"):
        _replace("sglang.srt.layers.rotary_embedding.factory", name, _Rotary)
    # Some classes load by threads, and a recorder is for one.
    concurrent.futures.ThreadPoolExecutor = AtOnce  # type: ignore[misc, assignment]
    if (hasher := getattr(_module("sglang.srt.layers.engram"), "EngramHasher", None)) is not None:
        hasher.from_config = lambda *_, **__: torch.nn.Module()  # It reads the tokenizer, and has no weights.
    if (fallback := getattr(_module("sglang.srt.models.transformers"), "TransformersBase", None)) is not None:
        # It replaces parameters that are on the meta device, as all large ones are here, and their loaders with them.
        fallback._init_parameters = lambda *_: None
    torch.nn.Module.to = to_device_unless_meta(torch.nn.Module.to)  # type: ignore[method-assign]
    _replace("sglang.srt.utils.common", "get_device", lambda *_, **__: "cpu")
    _replace("sglang.srt.arg_groups.mamba_hook", "_platform_supports_mamba_cache_extra_buffer", lambda: True)
    _replace("sglang.srt.models.dots3_common.modeling", "_require_cuda", lambda: None)
    if (quantization := _module("sglang.srt.layers.quantization")) is not None:
        quantization.QUANTIZATION_METHODS.setdefault("mxfp4", quantization.Mxfp4Config)  # It has it with CUDA.
    if (modelopt := _module("sglang.srt.layers.quantization.modelopt_quant")) is not None:
        modelopt.get_platform = partial(_Blackwell, modelopt.get_platform)


def _replace(module: str, name: str, replacement: Callable[..., Any]) -> None:
    """Replace a function wherever it has been imported to, if this version has it."""
    if (original := getattr(_module(module), name, None)) is not None:
        put(name, original, replacement)


def _module(name: str) -> Any:
    """A module of SGLang, or None: not every version has all, and some want a GPU."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


class _Blackwell:
    """SGLang's platform as one that has kernels for NVFP4. Without them its classes refuse such a checkpoint."""

    def __init__(self, platform: Callable[[], Any]) -> None:
        self._platform = platform()

    def __getattr__(self, name: str) -> Any:
        return name == "is_blackwell" or getattr(self._platform, name)


class _Rotary(torch.nn.Module):
    """A stand-in for a rotary embedding, with every attribute and without weights."""

    def __init__(self, head_size: int, rotary_dim: int, *_: Any, **__: Any) -> None:
        super().__init__()
        self.head_size, self.rotary_dim = head_size, rotary_dim

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name.startswith("_") else MagicMock()


class AtOnce:
    """An executor that runs what is submitted at once, in the thread that submits it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> AtOnce:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def shutdown(self, *_: Any, **__: Any) -> None:
        """Do nothing: all is done."""

    def submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        """Call the function, and return its result as a future."""
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()
        try:
            done.set_result(function(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done

    def map(self, function: Callable[..., Any], *iterables: Iterable[Any], **_: Any) -> Iterator[Any]:
        """Call the function for each element."""
        return iter([function(*args) for args in zip(*iterables, strict=False)])


def start_rank(arguments: Any, rank: int) -> None:
    """Let this process be a rank: SGLang makes its groups of processes, which exchange nothing."""
    from sglang.srt import runtime_context
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe.utils import initialize_moe_config

    fake = importlib.import_module("torch.testing._internal.distributed.fake_pg")  # Registers the backend.
    new_group = torch.distributed.new_group
    torch.distributed.new_group = lambda ranks=None, *_, **__: new_group(ranks, backend="fake")
    size = arguments.tp_size
    runtime_context.publish(arguments, role="scheduler", ranks=runtime_context.SpawnRanks(world_rank=rank))
    torch.distributed.init_process_group(backend="fake", store=fake.FakeStore(), rank=rank, world_size=size)
    parallel_state.init_distributed_environment(
        backend="fake", world_size=size, rank=rank, local_rank=rank, distributed_init_method="tcp://127.0.0.1:1"
    )
    parallel_state.initialize_model_parallel(backend="fake")
    initialize_dp_attention(server_args=arguments)
    initialize_moe_config()
