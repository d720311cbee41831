"""The peers on a GPU. What they deliver lies on the device; whole models are kept as they come, slices are cloned."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from bench.run import PackedJob
from relayout.benchmark.job import Job, Loader, get_slices
from relayout.benchmark.loaders import fastsafetensors

if TYPE_CHECKING:
    from relayout.benchmark.job import Tensors


def load_file(job: Job) -> Tensors:
    """safetensors.torch.load_file(device=...), shard by shard."""
    from safetensors.torch import load_file

    return {
        name: job.owned(name, tensor)
        for shard in job.shards
        for name, tensor in load_file(shard, device=job.device).items()
    }


def get_slice(job: Job) -> Tensors:
    """safe_open(device=...) and get_slice, shard by shard: only the slice travels; copied where it is not dense."""
    return {name: tensor.contiguous() for shard in job.shards for name, tensor in get_slices(job, shard, job.device)}


def prefetch(job: Job) -> Tensors:
    """safe_open.prefetch of safetensors 0.9, all shards at once, 8 threads each, rows of the rank only.

    Its plan can cut rows but no columns: row-parallel tensors come whole and are cut here, by a clone.
    """
    from safetensors import safe_open

    tensors = {}
    with ExitStack() as stack:
        loaders = []
        for shard in job.shards:
            opened = stack.enter_context(safe_open(shard, framework="pt", device=job.device))
            plan: dict[str, slice | None] = {}
            for name in opened.keys():  # noqa: SIM118
                part = job.slice(name)
                [(start, length)] = part.ranges if part.axis == 0 and part.is_box and part.ranges else [(0, 0)]
                plan[name] = slice(start, start + length) if length else None
            loaders.append((plan, stack.enter_context(opened.prefetch(plan, device=job.device))))
        for plan, loader in loaders:
            for name, tensor in loader:
                tensors[name] = tensor if plan[name] is not None else job.owned(name, tensor)
    return tensors


def has_prefetch() -> bool:
    """Whether the installed safetensors can prefetch."""
    from safetensors import safe_open

    return hasattr(safe_open, "prefetch")


def runai(job: Job) -> Tensors:
    """Run:ai Model Streamer, its tensors brought to the device by `.to`, as its documentation shows."""
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(job.shards, owned=False)
        return {name: job.owned(name, tensor.to(job.device)) for name, tensor in streamer.get_tensors()}


def instanttensor(job: Job) -> Tensors:
    """InstantTensor, all shards in one call; copy=True, the default, for a whole model; views, cloned, for slices."""
    import warnings

    from instanttensor import safe_open

    warnings.simplefilter("ignore")  # It warns of views that are kept; none is.
    with safe_open(job.shards, framework="pt", device=job.device, copy=job.whole) as opened:
        return {name: job.owned(name, tensor) for name, tensor in opened.tensors()}


def flashpack(job: PackedJob) -> Tensors:
    """FlashPack's parallel reader, of a copy of the model in its own format: always reads all of it."""
    from flashpack.deserialization import iterate_from_flash_tensor, read_flashpack_file

    storage, index = read_flashpack_file(job.packed, job.device)
    return {name: job.owned(name, tensor) for name, tensor in iterate_from_flash_tensor(storage, index)}


def pack(source: list[str], path: str) -> None:
    """Make FlashPack's copy of a model."""
    from flashpack import pack_to_file
    from safetensors.torch import load_file

    pack_to_file({name: tensor for shard in source for name, tensor in load_file(shard).items()}, path, None)


def pinned_gb_per_s(nbytes: int = 2**30, rounds: int = 8) -> float:
    """GB/s of copies from pinned host memory to the device: the limit of all that passes through host memory."""
    import time

    import torch

    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    started = time.monotonic()
    for _ in range(rounds):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return rounds * nbytes / (time.monotonic() - started) / 1e9


_STOCK, _FAST, _RUNAI = ("safetensors.torch",), ("fastsafetensors",), ("runai_model_streamer",)
_INSTANT, _FLASH = ("instanttensor",), ("flashpack", "flashpack.deserialization")

GPU_PEERS: dict[str, Loader] = {
    "cuda_load_file": Loader(load_file, "safetensors load_file", "safetensors load_file", _STOCK, device="cuda"),
    "cuda_get_slice": Loader(get_slice, "safetensors get_slice", "safetensors get_slice", _STOCK, device="cuda"),
    "cuda_prefetch": Loader(
        prefetch, "safetensors prefetch", "safetensors prefetch", _STOCK, device="cuda", needs=has_prefetch
    ),
    "cuda_fastsafetensors": Loader(
        partial(fastsafetensors, nogds=True), "fastsafetensors, O_DIRECT", "fastsafetensors", _FAST, device="cuda"
    ),
    "cuda_fastsafetensors_buffered": Loader(
        partial(fastsafetensors, nogds=True),
        "fastsafetensors, buffered",
        "fastsafetensors",
        _FAST,
        {"FASTSAFETENSORS_ODIRECT": "0"},
        device="cuda",
    ),
    "cuda_fastsafetensors_gds": Loader(
        partial(fastsafetensors, nogds=False), "fastsafetensors, nogds=False", "fastsafetensors", _FAST, device="cuda"
    ),
    "cuda_runai": Loader(runai, "Run:ai streamer, O_DIRECT", "Run:ai streamer", _RUNAI, device="cuda"),
    "cuda_runai_buffered": Loader(
        runai,
        "Run:ai streamer, buffered",
        "Run:ai streamer",
        _RUNAI,
        {"RUNAI_STREAMER_FS_STRATEGY": "sync_buffered"},
        device="cuda",
    ),
    "cuda_instanttensor": Loader(instanttensor, "InstantTensor, O_DIRECT", "InstantTensor", _INSTANT, device="cuda"),
    "cuda_instanttensor_buffered": Loader(
        instanttensor,
        "InstantTensor, buffered",
        "InstantTensor",
        _INSTANT,
        {"INSTANTTENSOR_BACKEND": "BUFFERED"},
        device="cuda",
    ),
    "cuda_flashpack": Loader(flashpack, "FlashPack", "FlashPack", _FLASH, device="cuda"),
}
