"""The peers on a GPU. What they deliver lies on the device; whole models are kept as they come, slices are cloned."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from bench.job import Job, Peer, get_slices

if TYPE_CHECKING:
    from bench.job import Tensors


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
                cut = job.cut(name, tuple(opened.get_slice(name).get_shape()))
                plan[name] = cut[1] if cut is not None and cut[0] == 0 else None
            loaders.append((plan, stack.enter_context(opened.prefetch(plan, device=job.device))))
        for plan, loader in loaders:
            for name, tensor in loader:
                tensors[name] = tensor if plan[name] is not None else job.owned(name, tensor)
    return tensors


def has_prefetch() -> bool:
    """Whether the installed safetensors can prefetch."""
    from safetensors import safe_open

    return hasattr(safe_open, "prefetch")


def fastsafetensors(job: Job, nogds: bool = True) -> Tensors:
    """fastsafetensors: fastsafe_open for a whole model, ParallelLoader for a rank's slices.

    A whole model all shards at once: tensors own their memory, nothing is cloned. Slices with borrowed tensors, which
    it documents for copying: shards one after the other, the next one being read meanwhile; serially where ranks share
    the memory of the host, to take less of it. Each slice is cloned once. nogds=False is GPUDirect Storage where cuFile
    is there; without, it quietly reads as with nogds=True.
    """
    from fastsafetensors import ParallelLoader, fastsafe_open

    if job.whole:
        with fastsafe_open(job.shards, nogds=nogds, device=job.device) as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    loader = ParallelLoader(
        None,
        job.shards,
        queue_size=-1 if job.device == "cpu" and job.num_processes > 1 else 0,
        use_tqdm_on_load=False,
        device=job.device,
        nogds=nogds,
        borrowed_tensors=True,
        accumulate_resident=False,
    )
    try:
        return {name: job.copy(name, tensor) for name, tensor in loader.iterate_weights()}
    finally:
        loader.close()


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


def flashpack(job: Job) -> Tensors:
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

GPU_PEERS: dict[str, Peer] = {
    "cuda_load_file": Peer(load_file, "safetensors load_file", "safetensors load_file", _STOCK, device="cuda"),
    "cuda_get_slice": Peer(get_slice, "safetensors get_slice", "safetensors get_slice", _STOCK, device="cuda"),
    "cuda_prefetch": Peer(
        prefetch, "safetensors prefetch", "safetensors prefetch", _STOCK, device="cuda", needs=has_prefetch
    ),
    "cuda_fastsafetensors": Peer(
        partial(fastsafetensors, nogds=True), "fastsafetensors, O_DIRECT", "fastsafetensors", _FAST, device="cuda"
    ),
    "cuda_fastsafetensors_buffered": Peer(
        partial(fastsafetensors, nogds=True),
        "fastsafetensors, buffered",
        "fastsafetensors",
        _FAST,
        {"FASTSAFETENSORS_ODIRECT": "0"},
        device="cuda",
    ),
    "cuda_fastsafetensors_gds": Peer(
        partial(fastsafetensors, nogds=False), "fastsafetensors, nogds=False", "fastsafetensors", _FAST, device="cuda"
    ),
    "cuda_runai": Peer(runai, "Run:ai streamer, O_DIRECT", "Run:ai streamer", _RUNAI, device="cuda"),
    "cuda_runai_buffered": Peer(
        runai,
        "Run:ai streamer, buffered",
        "Run:ai streamer",
        _RUNAI,
        {"RUNAI_STREAMER_FS_STRATEGY": "sync_buffered"},
        device="cuda",
    ),
    "cuda_instanttensor": Peer(instanttensor, "InstantTensor, O_DIRECT", "InstantTensor", _INSTANT, device="cuda"),
    "cuda_instanttensor_buffered": Peer(
        instanttensor,
        "InstantTensor, buffered",
        "InstantTensor",
        _INSTANT,
        {"INSTANTTENSOR_BACKEND": "BUFFERED"},
        device="cuda",
    ),
    "cuda_flashpack": Peer(flashpack, "FlashPack", "FlashPack", _FLASH, device="cuda"),
}
