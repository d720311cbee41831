"""The peers on the CPU beside those of `relayout bench`, at the best settings that their documentation names.

Every peer delivers what an engine needs: the rank's slices (or the whole model), contiguous, each byte in memory that
stays the rank's own. Where a peer hands out mapped files or memory that it will use again, that takes a clone, which is
timed; where it hands out memory for keeps, a whole model is taken as it comes.
"""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from bench.peers_gpu import GPU_PEERS
from relayout.benchmark.job import Job, Loader, get_slices
from relayout.benchmark.loaders import LOADERS, fastsafetensors, get_slice, relayout, runai

if TYPE_CHECKING:
    from relayout.benchmark.job import Tensors

NUM_THREADS = 8
"""vLLM's default number of threads for loading, and for prefetching."""


def load_file_pread(job: Job) -> Tensors:
    """load_file(backend="pread"), new in 0.8: reads into memory of the tensors' own. A whole model is not cloned."""
    from safetensors.torch import load_file

    return {
        name: job.owned(name, tensor)
        for shard in job.shards
        for name, tensor in load_file(shard, backend="pread").items()
    }


def _can_pread() -> bool:
    return tuple(map(int, metadata.version("safetensors").split(".")[:2])) >= (0, 8)


def threads(job: Job) -> Tensors:
    """safe_open and get_slice, shards in 8 threads (as the threaded iterators of vLLM and SGLang), each cloned."""
    import torch

    def one(shard: str) -> Tensors:
        return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in get_slices(job, shard)}

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return {name: tensor for tensors in pool.map(one, job.shards) for name, tensor in tensors.items()}


def map_populate(job: Job) -> Tensors:
    """Shards brought into the page cache by MAP_POPULATE, 8 at once, then get_slice (as SGLang's prefetch); cloned."""

    def one(shard: str) -> None:
        with Path(shard).open("rb") as file:
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ).close()

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(one, job.shards))
    return get_slice(job)


def fastsafetensors_group(job: Job) -> Tensors:
    """fastsafetensors with a process group: shards dealt to the ranks, slices scattered by get_sharded.

    What it sends is the receiver's own; what it does not send is cloned.
    """
    from fastsafetensors import SafeTensorsFileLoader
    from torch import distributed

    loader = SafeTensorsFileLoader(distributed.group.WORLD, job.device, nogds=True)
    loader.add_filenames({rank: job.shards[rank :: job.tp] for rank in range(job.tp)})
    buffers = loader.copy_files_to_device()
    tensors = {}
    for name in sorted(loader.get_keys()):
        part = job.slice(name)
        if part.is_whole:
            tensors[name] = buffers.get_tensor(name).clone()
        else:
            tensors[name] = buffers.get_sharded(name, dim=part.axis).contiguous()
    buffers.close()
    loader.close()
    return tensors


def preadv(job: Job) -> Tensors:
    """The rank's files, read one after the other into memory of the kind that relayout takes: what a load must cost."""
    import torch

    paths = sorted(Path(job.converted).glob(f"model-rank-{job.rank}-part-*.safetensors"))
    nbytes = sum(path.stat().st_size for path in paths)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    position = 0
    for path in paths:
        with path.open("rb", buffering=0) as file:
            start = position
            while got := os.preadv(file.fileno(), [view[position : position + 8 * 2**20]], position - start):
                position += got
    assert position == nbytes
    return {"": torch.frombuffer(memory, dtype=torch.uint8)}


_BUFFERED_RUNAI = {"RUNAI_STREAMER_FS_STRATEGY": "sync_buffered"}
_BUFFERED_FAST = {"FASTSAFETENSORS_ODIRECT": "0"}
_RUNAI, _FAST = ("runai_model_streamer",), ("fastsafetensors",)
_ON_CUDA = ("relayout.loader.api", "relayout.loader.backends.cuda")

PEERS: dict[str, Loader] = {
    "relayout": LOADERS["relayout"],
    "load_file": LOADERS["load_file"],
    "load_file_pread": Loader(
        load_file_pread,
        "safetensors load_file, pread",
        "safetensors load_file",
        ("safetensors.torch",),
        needs=_can_pread,
    ),
    "get_slice": LOADERS["get_slice"],
    "threads": Loader(threads, "safetensors, 8 threads", "safetensors, 8 threads", ("safetensors.torch",)),
    "map_populate": Loader(map_populate, "MAP_POPULATE prefetch", "MAP_POPULATE prefetch", ("safetensors.torch",)),
    "fastsafetensors": Loader(fastsafetensors, "fastsafetensors, O_DIRECT", "fastsafetensors", _FAST),
    "fastsafetensors_buffered": Loader(
        fastsafetensors, "fastsafetensors, buffered", "fastsafetensors", _FAST, _BUFFERED_FAST
    ),
    "fastsafetensors_group": Loader(
        fastsafetensors_group, "fastsafetensors, get_sharded", "fastsafetensors", _FAST, _BUFFERED_FAST, group=True
    ),
    "runai": Loader(runai, "Run:ai streamer, O_DIRECT", "Run:ai streamer", _RUNAI),
    "runai_buffered": Loader(runai, "Run:ai streamer, buffered", "Run:ai streamer", _RUNAI, _BUFFERED_RUNAI),
}
for _backend in ("auto", "pinned", "gds"):
    PEERS[f"relayout_{_backend}"] = Loader(
        partial(relayout, backend=_backend),
        f"relayout, {_backend}",
        "relayout",
        _ON_CUDA,
        device="cuda",
        reads_converted=True,
    )
PEERS |= GPU_PEERS

BASELINE = Loader(preadv, "plain preadv", "plain preadv", reads_converted=True)
"""No peer: what `tools/run bench table` compares with."""
