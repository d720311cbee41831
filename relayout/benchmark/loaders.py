"""The loaders, each with the best settings that its documentation names.

Each returns what an engine needs: the rank's slices (or the whole model) on the job's device, contiguous, every byte in
memory that stays the rank's own. Where a loader returns mapped files, or memory that it uses again, that needs a clone,
which is timed. A view of a mapped file is no load: its bytes are read when they are used.
"""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

from relayout.benchmark.job import Job, Loader

if TYPE_CHECKING:
    from relayout.benchmark.job import Tensors


def relayout(job: Job, backend: str = "auto") -> Tensors:
    """relayout.load of the converted folder. Tensors are views of one allocation, which the caller keeps: no clone."""
    from relayout.loader.api import load

    return load(job.converted, job.rank, tp=job.tp, device=job.device, backend=backend)


def relayout_plain(job: Job) -> Tensors:
    """relayout.load of the plain checkpoint, which slices it while it loads."""
    from relayout.loader.api import load

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It warns that a converted folder is faster.
        return load(job.source, job.rank, tp=job.tp, device=job.device)


def load_file(job: Job) -> Tensors:
    """safetensors.torch.load_file, shard by shard. On the CPU it maps the file, so every tensor is cloned."""
    from safetensors.torch import load_file

    take = job.copy if job.device == "cpu" else job.owned
    files = (load_file(shard, device=job.device) for shard in job.shards)
    return {name: take(name, tensor) for file in files for name, tensor in file.items()}


def get_slice(job: Job) -> Tensors:
    """safe_open and get_slice, shard by shard. On the CPU slices are views of the mapped file, so each is cloned."""
    return {name: tensor for shard in job.shards for name, tensor in job.slices(shard)}


def fastsafetensors(job: Job, nogds: bool = True) -> Tensors:
    """fastsafetensors: fastsafe_open for a whole model, ParallelLoader for a rank's slices.

    A whole model all shards at once: tensors own their memory, nothing is cloned. Slices with borrowed tensors, which
    it documents for copying: one shard after another, while the next is read; serially where ranks share the memory of
    the host, to use less of it. Each slice is cloned once. nogds=False is GPUDirect Storage if there is cuFile; without
    it, the same as nogds=True.
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
    """Run:ai Model Streamer: since 0.17 direct reads by io_uring, 512 in flight.

    A whole model with owned=True, the default: the caller keeps the tensors, nothing is cloned. A rank's slices with
    owned=False, which uses its buffers again; each slice is cloned. Where ranks share the machine, the buffers are
    limited to half of its memory, or to the least possible if that is not enough (RUNAI_STREAMER_MEMORY_LIMIT), and
    reads in flight are shared as in its distributed mode (RUNAI_STREAMER_PROCESS_GROUP_SIZE). On a GPU its tensors are
    brought there by `.to`, as its documentation shows.
    """
    from runai_model_streamer import SafetensorsStreamer

    if job.num_processes > 1:
        os.environ["RUNAI_STREAMER_MEMORY_LIMIT"] = str(
            job.memory_nbytes if job.memory_nbytes > job.largest_nbytes else 0
        )
        os.environ["RUNAI_STREAMER_PROCESS_GROUP_SIZE"] = str(job.num_processes)
    on_cpu = job.device == "cpu"
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(job.shards, owned=job.whole and on_cpu)
        return {name: job.owned(name, tensor.to(job.device)) for name, tensor in streamer.get_tensors()}


_RELAYOUT, _STOCK = ("safetensors-relayout[torch]", ("relayout.loader.api",)), ("safetensors", ("safetensors.torch",))

LOADERS: dict[str, Loader] = {
    "relayout": Loader(relayout, "relayout, converted", "relayout", *_RELAYOUT, reads_converted=True),
    "relayout_plain": Loader(relayout_plain, "relayout, plain folder", "relayout", *_RELAYOUT),
    "load_file": Loader(load_file, "safetensors load_file", "safetensors load_file", *_STOCK),
    "get_slice": Loader(get_slice, "safetensors get_slice", "safetensors get_slice", *_STOCK),
    "fastsafetensors": Loader(
        fastsafetensors, "fastsafetensors", "fastsafetensors", "fastsafetensors", ("fastsafetensors",)
    ),
    "runai": Loader(runai, "Run:ai streamer", "Run:ai streamer", "runai-model-streamer", ("runai_model_streamer",)),
}
