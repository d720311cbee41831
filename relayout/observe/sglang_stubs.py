"""Stubs for kernels, devices and processes, so that SGLang's classes can be built and loaded on a CPU.

SGLang creates its process groups itself, over torch's fake backend, so every degree is handled by SGLang's own code.
The GPUs of the machine are hidden (`sglang.py`): a plan is the same with and without them. Needs torch at import time.
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

from relayout.observe.stubs import AnyModule, put, to_device_unless_meta

_LANGUAGES = ("tilelang", "tilelang.language")
"""Kernel languages that some modules of SGLang use at import."""


def stub_packages() -> None:
    """Make SGLang importable without kernels and without a GPU. Call this before the import."""
    stub_rotary()
    _stub_cuda()
    try:
        importlib.import_module(_LANGUAGES[0])
    except ImportError:
        for name in _LANGUAGES:
            sys.modules[name] = AnyModule(name, MagicMock())


def stub_rotary() -> None:
    """Provide a stub of the vLLM kernel that SGLang's rotary embedding imports without CUDA. It is never called."""
    package, operations = ModuleType("vllm"), ModuleType("vllm._custom_ops")
    operations.rotary_embedding = None  # type: ignore[attr-defined]
    package._custom_ops = operations  # type: ignore[attr-defined]
    for module in (package, operations):
        module.__spec__ = ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module


def _stub_cuda() -> None:
    """Make properties, streams and events of a GPU available to classes."""
    properties = SimpleNamespace(name="stub", major=9, minor=0, multi_processor_count=132, total_memory=80 * 2**30)
    torch.cuda.Event = torch.cuda.Stream = torch.cuda.ExternalStream = MagicMock  # type: ignore[misc]
    torch.cuda.current_stream = lambda *_, **__: MagicMock()
    torch.cuda.current_device = lambda: 0
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.get_device_capability = lambda *_, **__: (properties.major, properties.minor)
    torch.cuda.get_device_name = lambda *_, **__: properties.name
    torch.cuda.get_device_properties = lambda *_, **__: properties  # type: ignore[assignment]


def stub_functions() -> None:
    """Make classes work without kernels. Call this after SGLang's classes have been imported."""
    # Rotary embeddings have no weights, and some need a kernel.
    for name in ("get_rope", "get_rope_cpu", "get_rope_wrapper"):
        _replace("sglang.srt.layers.rotary_embedding.factory", name, _Rotary)
    # Some classes load with threads, but a recorder is for one thread.
    concurrent.futures.ThreadPoolExecutor = AtOnce  # type: ignore[misc, assignment]
    if (hasher := getattr(_module("sglang.srt.layers.engram"), "EngramHasher", None)) is not None:
        hasher.from_config = lambda *_, **__: torch.nn.Module()  # The original reads the tokenizer, and has no weights.
    if (fallback := getattr(_module("sglang.srt.models.transformers"), "TransformersBase", None)) is not None:
        # The original replaces parameters on the meta device (all large ones are, here), and thereby their loaders.
        fallback._init_parameters = lambda *_: None
    torch.nn.Module.to = to_device_unless_meta(torch.nn.Module.to)  # type: ignore[method-assign]
    _replace("sglang.srt.utils.common", "get_device", lambda *_, **__: "cpu")
    _replace("sglang.srt.arg_groups.mamba_hook", "_platform_supports_mamba_cache_extra_buffer", lambda: True)
    _replace("sglang.srt.models.dots3_common.modeling", "_require_cuda", lambda: None)
    if (quantization := _module("sglang.srt.layers.quantization")) is not None:
        quantization.QUANTIZATION_METHODS.setdefault("mxfp4", quantization.Mxfp4Config)  # Registered only with CUDA.
    if (modelopt := _module("sglang.srt.layers.quantization.modelopt_quant")) is not None:
        modelopt.get_platform = partial(_Blackwell, modelopt.get_platform)


def _replace(module: str, name: str, replacement: Callable[..., Any]) -> None:
    """Replace a function in every module that has imported it, if this version of SGLang has the function."""
    if (original := getattr(_module(module), name, None)) is not None:
        put(name, original, replacement)


def _module(name: str) -> Any:
    """Return a module of SGLang, or None: some versions do not have it, and some modules need a GPU."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


class _Blackwell:
    """SGLang's platform, reported as one with kernels for NVFP4. Without these, classes reject NVFP4 checkpoints."""

    def __init__(self, platform: Callable[[], Any]) -> None:
        self._platform = platform()

    def __getattr__(self, name: str) -> Any:
        return name == "is_blackwell" or getattr(self._platform, name)


class _Rotary(torch.nn.Module):
    """A stub for a rotary embedding: it has every attribute, and no weights."""

    def __init__(self, head_size: int, rotary_dim: int, *_: Any, **__: Any) -> None:
        super().__init__()
        self.head_size, self.rotary_dim = head_size, rotary_dim

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name.startswith("_") else MagicMock()


class AtOnce:
    """A stub executor that runs each submitted function immediately, in the submitting thread."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> AtOnce:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def shutdown(self, *_: Any, **__: Any) -> None:
        """Do nothing: all functions have already run."""

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
    """Make this process a rank: SGLang creates its process groups, which exchange nothing."""
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
