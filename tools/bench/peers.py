"""The peers on the CPU, each at the best settings that its documentation names, and the table of all peers.

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

from bench.job import Job, Peer, get_slices
from bench.peers_gpu import GPU_PEERS, fastsafetensors

if TYPE_CHECKING:
    from bench.job import Tensors

NUM_THREADS = 8
"""vLLM's default number of threads for loading, and for prefetching."""


def relayout(job: Job, backend: str = "auto") -> Tensors:
    """relayout.load of the converted folder. Tensors are views of one allocation, the caller's to keep: no clone."""
    from relayout.loader import load

    return load(job.converted, job.rank, device=job.device, backend=backend)


def load_file(job: Job) -> Tensors:
    """safetensors.torch.load_file, shard by shard. On the CPU it maps the file, so every tensor is cloned."""
    from safetensors.torch import load_file

    return {name: job.copy(name, tensor) for shard in job.shards for name, tensor in load_file(shard).items()}


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


def get_slice(job: Job) -> Tensors:
    """safe_open and get_slice, shard by shard. Slices are views of the mapped file, so each is cloned."""
    import torch

    return {
        name: tensor.clone(memory_format=torch.contiguous_format)
        for shard in job.shards
        for name, tensor in get_slices(job, shard)
    }


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
        cut = job.cut(name, tuple(loader.get_shape(name)))
        if cut is None:
            tensors[name] = buffers.get_tensor(name).clone()
        else:
            tensors[name] = buffers.get_sharded(name, dim=cut[0]).contiguous()
    buffers.close()
    loader.close()
    return tensors


def runai(job: Job) -> Tensors:
    """Run:ai Model Streamer: since 0.17 direct reads by io_uring, 512 in flight.

    A whole model with owned=True, the default: tensors are the caller's to keep, nothing is cloned. A rank's slices
    with owned=False, for which its buffers are used again, each slice cloned. Where ranks share the machine, the
    buffers are limited to half of its memory, or the least where that is not enough (RUNAI_STREAMER_MEMORY_LIMIT), and
    reads in flight are shared as its distributed mode does (RUNAI_STREAMER_PROCESS_GROUP_SIZE).
    """
    from runai_model_streamer import SafetensorsStreamer

    if job.num_processes > 1:
        largest = max(Path(shard).stat().st_size for shard in job.shards)
        os.environ["RUNAI_STREAMER_MEMORY_LIMIT"] = str(job.memory_nbytes if job.memory_nbytes > largest else 0)
        os.environ["RUNAI_STREAMER_PROCESS_GROUP_SIZE"] = str(job.num_processes)
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(job.shards, owned=job.whole)
        return {name: job.owned(name, tensor) for name, tensor in streamer.get_tensors()}


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

PEERS: dict[str, Peer] = {
    "relayout": Peer(relayout, "relayout", "relayout", ("relayout.loader.api",)),
    "load_file": Peer(load_file, "safetensors load_file", "safetensors load_file", ("safetensors.torch",)),
    "load_file_pread": Peer(
        load_file_pread,
        "safetensors load_file, pread",
        "safetensors load_file",
        ("safetensors.torch",),
        needs=_can_pread,
    ),
    "get_slice": Peer(get_slice, "safetensors get_slice", "safetensors get_slice", ("safetensors.torch",)),
    "threads": Peer(threads, "safetensors, 8 threads", "safetensors, 8 threads", ("safetensors.torch",)),
    "map_populate": Peer(map_populate, "MAP_POPULATE prefetch", "MAP_POPULATE prefetch", ("safetensors.torch",)),
    "fastsafetensors": Peer(fastsafetensors, "fastsafetensors, O_DIRECT", "fastsafetensors", _FAST),
    "fastsafetensors_buffered": Peer(
        fastsafetensors, "fastsafetensors, buffered", "fastsafetensors", _FAST, _BUFFERED_FAST
    ),
    "fastsafetensors_group": Peer(
        fastsafetensors_group, "fastsafetensors, get_sharded", "fastsafetensors", _FAST, _BUFFERED_FAST, group=True
    ),
    "runai": Peer(runai, "Run:ai streamer, O_DIRECT", "Run:ai streamer", _RUNAI),
    "runai_buffered": Peer(runai, "Run:ai streamer, buffered", "Run:ai streamer", _RUNAI, _BUFFERED_RUNAI),
}
for _backend in ("auto", "pinned", "gds"):
    PEERS[f"relayout_{_backend}"] = Peer(
        partial(relayout, backend=_backend), f"relayout, {_backend}", "relayout", _ON_CUDA, device="cuda"
    )
PEERS |= GPU_PEERS

BASELINE = Peer(preadv, "plain preadv", "plain preadv")
"""No peer: what `tools/run bench table` compares with."""
