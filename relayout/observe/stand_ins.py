"""What takes the place of vLLM's processes, memory and kernels while its classes are built and loaded in one process.

Needs torch at import time.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
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
"""Modules of vLLM that some classes import, and that can only be imported where their kernels are."""

_LARGE = 2**14
"""Elements beyond which a tensor that is made has no memory: smaller ones are often computed with."""


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


class _Anything:
    """In the place of any class or function."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


class _AnyModule(ModuleType):
    """A module that has whatever is imported from it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything


def stand_in_modules() -> None:
    """Let classes be imported whose kernels are not here. To be called before vLLM looks for its classes."""
    for name in _OF_GPUS:
        try:
            importlib.import_module(name)
        except (AssertionError, ImportError):
            sys.modules[name] = _AnyModule(name)


def stand_in_devices() -> None:
    """Let classes make what only a GPU has, where there is none: streams, events, sparse attention."""
    if torch.cuda.is_available():
        return
    torch.accelerator.empty_cache = lambda: None
    torch.cuda.Event = torch.cuda.Stream = MagicMock  # type: ignore[misc]
    platform = importlib.import_module("vllm.platforms").current_platform
    choose = platform.get_attn_backend_cls

    def chosen(*args: Any, **kwargs: Any) -> Any:
        try:
            return choose(*args, **kwargs)
        except NotImplementedError:
            return "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend"

    with contextlib.suppress(ImportError):
        importlib.import_module("vllm.v1.worker.workspace").init_workspace_manager(torch.device("cpu"))
    type(platform).get_attn_backend_cls = staticmethod(chosen)


def play(rank: int, tp: int, expert: bool) -> None:
    """Let vLLM's functions say that this process is the rank."""
    from vllm.distributed import parallel_state

    for name in ("_TP", "_WORLD", "_PP", "_DP", "_EP", "_EPLB", "_PCP", "_DCP", "_INNER_DP_WORLD"):
        if hasattr(parallel_state, name):
            many = name in ("_TP", "_WORLD") or (name == "_EP" and expert)
            setattr(parallel_state, name, Group(rank if many else 0, tp if many else 1))


class WithoutMemory(TorchFunctionMode):
    """Large tensors that are made have no memory: they are on torch's meta device."""

    _BY_SIZE = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._BY_SIZE or func in (torch.full, torch.empty_strided):
            size = kwargs.get("size", args if func in self._BY_SIZE else args[0] if args else ())
            size = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
            if all(isinstance(one, int) for one in size) and prod(size) > _LARGE:
                kwargs = {**kwargs, "device": "meta", "pin_memory": False}
        return func(*args, **kwargs)


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
        _replace(linear, f"init_{kind}_linear_kernel", lambda: MagicMock(__name__="stand_in"))
    _replace(linear, "choose_mp_linear_kernel", lambda: MagicMock(__name__="stand_in"))
    experts = {"fp8": "fp8", "int_wna16": "wna16", "mxfp4": "mxfp4", "int8": "int8", "nvfp4": "nvfp4"}
    for module, name in experts.items():
        oracle = importlib.import_module(f"{base}.fused_moe.oracle.{module}")
        kinds = next(value for key, value in vars(oracle).items() if key.lower() == f"{name}moebackend")
        chosen = next((getattr(kinds, one) for one in ("TRITON", "MARLIN") if hasattr(kinds, one)), next(iter(kinds)))
        _replace(oracle, f"select_{name}_moe_backend", lambda chosen=chosen: (chosen, MagicMock(__name__="stand_in")))


def _replace(module: Any, name: str, stand_in: Any) -> None:
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
