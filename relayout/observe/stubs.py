"""Stubs for vLLM's processes, memory and kernels, so that its classes can be built and loaded in one process.

Needs torch at import time.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from math import prod
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch.overrides import TorchFunctionMode

_OF_GPUS = (
    "vllm.third_party.deep_gemm",
    "vllm.vllm_flash_attn",
    "vllm.vllm_flash_attn.flash_attn_interface",
    "vllm.v1.attention.backends.mla.prefill.flash_attn",
)
"""Modules of vLLM that some classes import, and that can be imported only if their kernels are installed."""

_CHOOSING = ("vllm.models.deepseek_v4",)
"""Model packages that choose other classes on a CPU: without draft models, and for fewer degrees."""

_LAYERS = "vllm.model_executor.layers"
_CAPABILITY = (9, 0)
"""Compute capability that vLLM finds without a GPU: that of an H100, which all classes support."""
_LARGE = 2**14
"""Number of elements beyond which a new tensor has no memory. Smaller tensors are often used in computations."""


class StubGroup:
    """A stub for a group of processes, with the members that building and loading a model needs: rank, world size."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = self.rank_in_group = self.local_rank = rank
        self.world_size = world_size
        self.ranks = list(range(world_size))
        self.first_rank, self.last_rank = 0, world_size - 1
        self.is_first_rank, self.is_last_rank = rank == 0, rank == world_size - 1
        self.device = torch.device("cpu")
        self.device_group = self.cpu_group = SimpleNamespace(size=lambda: world_size, rank=lambda: rank)
        self.device_communicator = self.mq_broadcaster = None
        self.unique_name = f"stub:{rank}"

    def all_reduce(self, tensor: Any) -> Any:
        return tensor

    all_gather = all_reduce


class _Anything:
    """A stub for any class or function."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


class AnyModule(ModuleType):
    """A module in which every name has the same value. With the class `object`, `isinstance` is always True."""

    def __init__(self, name: str, named: Any = _Anything) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self._named = named

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._named


def stub_modules() -> None:
    """Make classes importable if their kernels are missing. Call this before vLLM looks up its classes."""
    for name in _OF_GPUS:
        try:
            importlib.import_module(name)
        except (AssertionError, ImportError):
            sys.modules[name] = AnyModule(name)


def stub_quantization(model_type: str | None) -> None:
    """Make DeepSeek V4.1 use its own FP8 configuration; without CUDA or ROCm vLLM would use that of V4.

    Call this before vLLM creates its configuration.
    """
    if model_type == "deepseek_v41":
        older, own = (_module(f"vllm.models.{package}") for package in ("deepseek_v4", "deepseek_v41"))
        older.DeepseekV4FP8Config = own.DeepseekV4FP8Config


def stub_inputs() -> None:
    """Make multimodal classes work without the processor of their inputs, and without the tokenizer that it needs.

    vLLM creates the processor only to check whether all kinds of inputs are disabled, which is never the case here.
    Call this before vLLM creates its configuration.
    """
    config: Any = getattr(_module("vllm.config.model"), "ModelConfig", None)
    if (asked := getattr(config, "_supports_multimodal_inputs", None)) is not None:
        config._supports_multimodal_inputs = _tried(asked, lambda self: self.is_multimodal_model, Exception)


def stub_devices() -> None:
    """Make GPU features available on a machine without a GPU: streams, events, sparse attention, kernels."""
    if torch.cuda.is_available():
        return
    torch.accelerator.empty_cache = lambda: None
    torch.accelerator.current_device_index = lambda: 0
    torch.cuda.Event = torch.cuda.Stream = MagicMock  # type: ignore[misc]
    # DeepSeek V4.1 counts the processors of the GPU when it builds a layer.
    torch.cuda.get_device_properties = lambda *_, **__: SimpleNamespace(multi_processor_count=132)  # type: ignore
    torch.nn.Module.to = to_device_unless_meta(torch.nn.Module.to)  # type: ignore[method-assign]
    platform = importlib.import_module("vllm.platforms").current_platform
    if capability := getattr(_module("vllm.platforms.interface"), "DeviceCapability", None):
        type(platform).get_device_capability = classmethod(lambda *_, **__: capability(*_CAPABILITY))
    sparse = "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend"
    choose = _tried(platform.get_attn_backend_cls, lambda *_, **__: sparse, NotImplementedError, ValueError)
    type(platform).get_attn_backend_cls = staticmethod(choose)
    if (vision := getattr(platform, "get_vit_attn_backend", None)) is not None:
        # Some vision parts request kernels of a GPU by name. Attention has no weights, so any backend will do.
        default = lambda head_size, dtype, *_, **__: vision(head_size, dtype)  # noqa: E731
        type(platform).get_vit_attn_backend = staticmethod(_tried(vision, default, AssertionError))
    for package in filter(sys.modules.get, _CHOOSING):
        stub_classes(package)
    if workspace := _module("vllm.v1.worker.workspace"):
        workspace.init_workspace_manager(torch.device("cpu"))
    if importlib.util.find_spec("flashinfer") is None:
        sys.modules["vllm.v1.attention.backends.flashinfer"] = AnyModule("flashinfer", object)
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.models.") and hasattr(module, "is_flash_attn_varlen_func_available"):
            vars(module)["is_flash_attn_varlen_func_available"] = lambda: True
    _stub_triton()
    _replace("vllm.utils.torch_utils", "get_accelerator_view_from_cpu_tensor", lambda tensor: tensor)
    if experts := getattr(_module(f"{_LAYERS}.fused_moe.config"), "FusedMoEConfig", None):
        # Its last check is about the processor.
        experts.__post_init__ = _tried(experts.__post_init__, lambda config: None, NotImplementedError)
    cpu_attention = _module("vllm.v1.attention.backends.cpu_attn")
    if attention := getattr(cpu_attention, "CPUAttentionBackendImpl", None):
        attention.__init__ = _with_known(attention.__init__)
    if backend := getattr(cpu_attention, "CPUAttentionBackend", None):
        backend.supports_alibi_sqrt = classmethod(lambda cls: True)  # Step 1 requires it.


def _stub_triton() -> None:
    """Add members to vLLM's placeholder for Triton that some classes use at import."""
    utilities = _module("vllm.triton_utils")
    if (triton := getattr(utilities, "triton", None)) and not hasattr(triton, "set_allocator"):
        triton.set_allocator = lambda allocate: None
    if (language := getattr(utilities, "tl", None)) and not hasattr(language, "extra"):
        language.extra = MagicMock()  # Kernels of Step 5 name functions in it.


def stub_classes(package: str) -> None:
    """Make a package of models use its classes for NVIDIA GPUs instead of those that it has chosen for a CPU."""
    chosen = _module(package)
    for part in ("model", "mtp", "dspark"):
        classes = vars(_module(f"{package}.nvidia.{part}") or ModuleType(part))
        vars(chosen).update({name: classes[name] for name in getattr(chosen, "__all__", ()) if name in classes})
    for module, found in (
        ("model_executor.models.registry", "_try_load_model_cls"),
        ("model_executor.model_loader.utils", "_MODEL_ARCH_BY_HASH"),
    ):
        # vLLM caches the classes that it has found.
        if cached := getattr(_module(f"vllm.{module}"), found, None):
            (cached.clear if isinstance(cached, dict) else cached.cache_clear)()


def to_device_unless_meta(to: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `torch.nn.Module.to`: parameters without memory are not moved, and only their dtype changes.

    The original raises an error for such parameters. Kimi K2.5 moves its vision tower to the device after building it.
    """

    @functools.wraps(to)
    def moved(module: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            return to(module, *args, **kwargs)
        dtype = torch._C._nn._parse_to(*args, **kwargs)[1]
        return module._apply(lambda tensor: tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor)

    return moved


def _with_known(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that it ignores options that it does not have."""
    known = inspect.signature(original).parameters

    @functools.wraps(original)
    def called(*args: Any, **options: Any) -> Any:
        return original(*args, **{name: value for name, value in options.items() if name in known})

    return called


def fake_rank(process: int, tp: int, expert: bool, replicas: int = 1) -> None:
    """Patch vLLM's parallel_state: this is process `process` of `tp * replicas`; `tp` neighbors form a replica."""
    from vllm.distributed import parallel_state

    of_tp, of_dp, of_all = (process % tp, tp), (process // tp, replicas), (process, tp * replicas)
    groups = dict.fromkeys(("_TP", "_ETP"), of_tp) | dict.fromkeys(("_DP", "_INNER_DP_WORLD"), of_dp)
    groups |= dict.fromkeys(("_EP", "_EPLB") if expert else (), of_all) | {"_WORLD": of_all}
    for name in ("_TP", "_WORLD", "_PP", "_DP", "_EP", "_EPLB", "_PCP", "_DCP", "_ETP", "_INNER_DP_WORLD"):
        if hasattr(parallel_state, name):
            setattr(parallel_state, name, StubGroup(*groups.get(name, (0, 1))))


class Unpinned(TorchFunctionMode):
    """Removes `pin_memory` from calls that create tensors, because there may be no device for pinned memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **{key: value for key, value in (kwargs or {}).items() if key != "pin_memory"})


class WithoutMemory(Unpinned):
    """Creates large tensors without memory, on torch's meta device."""

    _BY_SIZE = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._BY_SIZE or func in (torch.full, torch.empty_strided):
            size = kwargs.get("size", args if func in self._BY_SIZE else args[0] if args else ())
            size = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
            if all(isinstance(length, int) for length in size) and prod(size) > _LARGE:
                kwargs = {**kwargs, "device": "meta"}
        return super().__torch_function__(func, types, args, kwargs)


def stub_kernels() -> None:
    """Replace kernels that vLLM does not have for this processor by stubs; no kernel is run here."""
    for module in ("fp8", "auto_awq", "auto_gptq", "mxfp4", "modelopt", "moe_wna16"):
        _module(f"{_LAYERS}.quantization.{module}")
    _module(f"{_LAYERS}.quantization.compressed_tensors.compressed_tensors")
    linear = "vllm.model_executor.kernels.linear"
    for kind in ("fp8", "int8", "nvfp4", "mxfp4", "mxfp8"):
        _replace(linear, f"init_{kind}_linear_kernel", _kernel)
    if choose := getattr(_module(linear), "choose_mp_linear_kernel", None):
        tried = _tried(choose, _kernel, ValueError, NotImplementedError)
        put("choose_mp_linear_kernel", choose, of_whole_groups(tried))
    experts = {name: name for name in ("fp8", "mxfp4", "int8", "nvfp4", "unquantized")} | {"int_wna16": "wna16"}
    for module, name in experts.items():
        if oracle := _module(f"{_LAYERS}.fused_moe.oracle.{module}"):
            kinds = next((value for key, value in vars(oracle).items() if key.lower() == f"{name}moebackend"), None)
            if kinds is None:
                version = sys.modules["vllm"].__version__
                raise LookupError(f"relayout does not know vLLM {version}: {oracle.__name__} has no {name}MoeBackend")
            kind = next((getattr(kinds, key) for key in ("TRITON", "MARLIN") if hasattr(kinds, key)), next(iter(kinds)))
            for function in (f"select_{name}_moe_backend", f"select_deepseek_v4_{name}_moe_backend"):
                _replace(oracle.__name__, function, lambda *_, kind=kind, **__: (kind, _kernel()))


def of_whole_groups(choose: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the choice of a kernel so that it rejects quantization groups split between ranks, as GPU kernels do.

    Kernels for CPUs accept such groups, and ranks would then use the scales of other ranks.
    """

    @functools.wraps(choose)
    def chosen(config: Any, *args: Any, **kwargs: Any) -> Any:
        columns, group = config.partition_weight_shape[0], config.group_size
        if 0 < group < config.full_weight_shape[0] and columns % group:
            raise ValueError(f"{columns} columns of a rank are not a multiple of {group}, which share a scale")
        return choose(config, *args, **kwargs)

    return chosen


@contextmanager
def stub_tokenizers() -> Iterator[None]:
    """Provide a stub tokenizer for classes that look up the numbers of special tokens while they are built.

    The classes only store these numbers. Enter the context after the class of the model has been imported. Outside of
    it, vLLM finds no tokenizer, and therefore does not look for an image processor.
    """
    # DeepSeek V4.1 hashes the words of a tokenizer, to look up n-grams. The loaded slices do not depend on them.
    if hashes := getattr(sys.modules.get("vllm.models.deepseek_v41.common.engram"), "NgramHashState", None):
        hashes.__init__ = without_tokenizer(hashes)
    name = "cached_tokenizer_from_config"
    original = getattr(_module("vllm.tokenizers.registry"), name, None)
    stub = lambda *_, **__: MagicMock()  # noqa: E731
    if original is not None:
        put(name, original, stub)
    try:
        yield
    finally:
        if original is not None:
            put(name, stub, original)


def without_tokenizer(hashes: type[torch.nn.Module]) -> Callable[..., None]:
    """Return an initializer of vLLM's `NgramHashState` that needs no tokenizer and creates none of its buffers."""

    def initialize(self: Any, _config: Any, layout: Any, swa_cache_module: Any) -> None:
        super(hashes, self).__init__()
        self.layout, self.swa_cache_module = layout, swa_cache_module

    return initialize


def _kernel(*_: Any, **__: Any) -> Any:
    return MagicMock(__name__="stub")


def _module(name: str) -> Any:
    """Return a module of vLLM, or None if this version does not have it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _replace(module: str, name: str, stub: Callable[..., Any]) -> None:
    """Wrap a function, in every module that has imported it: if it fails, the result of the stub is returned."""
    if (original := getattr(_module(module), name, None)) is not None:
        put(name, original, _tried(original, stub, ValueError, NotImplementedError))


def put(name: str, original: Any, replacement: Any) -> None:
    """Replace a function in every module of its package that has imported it."""
    packages = tuple(function.__module__.partition(".")[0] for function in (original, replacement))
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith(packages) and getattr(module, name, None) is original:
            setattr(module, name, replacement)


def _tried(original: Callable[..., Any], stub: Callable[..., Any], *errors: type[Exception]) -> Callable[..., Any]:
    """Wrap a function: if it raises one of the errors, the result of the stub is returned."""

    def tried(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except errors:
            return stub(*args, **kwargs)

    return tried
