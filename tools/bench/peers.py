"""The registry of `relayout bench`, with what only this workshop measures: other settings, GPUs, object stores.

Every peer delivers what `relayout.benchmark.loaders` says: the rank's slices, contiguous, in memory of the rank's own.
"""

from __future__ import annotations

import mmap
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from relayout.benchmark import loaders
from relayout.benchmark.loaders import Loader, LoadJob

if TYPE_CHECKING:
    from relayout.benchmark.loaders import Tensors

NUM_THREADS = 8
"""vLLM's default number of threads for loading, and for prefetching."""


def load_file_pread(job: LoadJob) -> Tensors:
    """load_file(backend="pread"), new in 0.8: reads into memory of the tensors' own. A whole model is not cloned."""
    from safetensors.torch import load_file

    files = (load_file(shard, backend="pread") for shard in job.shards)
    return {name: job.owned(name, tensor) for file in files for name, tensor in file.items()}


def _can_pread() -> bool:
    return tuple(map(int, metadata.version("safetensors").split(".")[:2])) >= (0, 8)


def threads(job: LoadJob) -> Tensors:
    """safe_open and get_slice, shards in 8 threads (as the threaded iterators of vLLM and SGLang), each cloned."""
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        shards = pool.map(lambda shard: list(job.slices(shard)), job.shards)
        return {name: tensor for tensors in shards for name, tensor in tensors}


def map_populate(job: LoadJob) -> Tensors:
    """Shards brought into the page cache by MAP_POPULATE, 8 at once, then get_slice (as SGLang's prefetch); cloned."""

    def one(shard: str) -> None:
        with Path(shard).open("rb") as file:
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ).close()

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(one, job.shards))
    return loaders.get_slice(job)


def fastsafetensors_group(job: LoadJob) -> Tensors:
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


def relayout_requests(job: LoadJob, requests: int) -> Tensors:
    """relayout.load of the converted folder with so many requests in flight, whatever the file system is."""
    from relayout.loader.api import load

    return load(job.converted, job.rank, tp=job.tp, device=job.device, threads=requests)


def relayout_group(job: LoadJob) -> Tensors:
    """relayout.load of the converted folder by processes that load the same rank: each byte is read once by one."""
    from torch import distributed

    from relayout.loader.api import load

    return load(job.converted, job.rank, tp=job.tp, device=job.device, group=distributed.group.WORLD)


def relayout_plain_group(job: LoadJob) -> Tensors:
    """relayout.load of the plain checkpoint by processes that load any ranks: each byte is read once by one."""
    from torch import distributed

    from relayout.loader.api import load

    return load(job.source, job.rank, tp=job.tp, device=job.device, group=distributed.group.WORLD)


def prefetch(job: LoadJob) -> Tensors:
    """safe_open.prefetch of safetensors 0.9, all shards at once, 8 threads each, rows of the rank only.

    Its plan can cut rows but no columns: row-parallel tensors come whole and are cut here, by a clone.
    """
    from safetensors import safe_open

    tensors = {}
    with ExitStack() as stack:
        started = []
        for shard in job.shards:
            opened = stack.enter_context(safe_open(shard, framework="pt", device=job.device))
            plan: dict[str, slice | None] = {}
            for name in opened.keys():  # noqa: SIM118
                part = job.slice(name)
                [(start, length)] = part.ranges if part.axis == 0 and part.is_box and part.ranges else [(0, 0)]
                plan[name] = slice(start, start + length) if length else None
            started.append((plan, stack.enter_context(opened.prefetch(plan, device=job.device))))
        for plan, loader in started:
            for name, tensor in loader:
                tensors[name] = tensor if plan[name] is not None else job.owned(name, tensor)
    return tensors


def _has_prefetch() -> bool:
    from safetensors import safe_open

    return hasattr(safe_open, "prefetch")


def s3fs(job: LoadJob) -> Tensors:
    """s3fs reads each file of the plain checkpoint whole, safetensors takes it apart, and parts are copied."""
    from s3fs import S3FileSystem
    from safetensors.torch import load

    files = (load(S3FileSystem().cat_file(shard)) for shard in job.shards)
    return {name: job.owned(name, tensor) for file in files for name, tensor in file.items()}


_KNOWN = loaders.LOADERS
_BUILTIN, _FAST, _RUNAI = (_KNOWN[name] for name in ("get_slice", "fastsafetensors", "runai"))
_INSTANT = replace(_KNOWN["instanttensor"], title="InstantTensor, O_DIRECT")


def _stock(load: object, what: str, device: str, **more: object) -> Loader:
    return replace(_BUILTIN, load=load, title=what, family=what, devices=(device,), **more)  # type: ignore[arg-type]


LOADERS: dict[str, Loader] = {
    "relayout": replace(_KNOWN["relayout"], title="relayout"),
    "relayout_plain": replace(_KNOWN["relayout_plain"], devices=("cpu",)),
    **{
        f"relayout_{backend}": replace(
            _KNOWN["relayout"],
            load=partial(loaders.relayout, backend=backend),
            title=f"relayout, {backend}",
            modules=("relayout.loader.api", "relayout.loader.backends.cuda"),
            devices=("cuda",),
        )
        for backend in ("pinned", "gds")
    },
    **{
        f"relayout_{backend}": replace(
            _KNOWN["relayout"],
            load=partial(loaders.relayout, backend=backend),
            title=f"relayout, {backend}",
            devices=(),
        )
        for backend in ("direct", "buffered")
    },
    **{
        f"relayout_{requests}": replace(
            _KNOWN["relayout"],
            load=partial(relayout_requests, requests=requests),
            title=f"relayout, converted, requests in flight: {requests}",
            devices=(),
        )
        for requests in (1, 4, 16)
    },
    "relayout_group": replace(
        _KNOWN["relayout"], load=relayout_group, title="relayout, converted, group", devices=(), group=True
    ),
    "relayout_plain_group": replace(
        _KNOWN["relayout_plain"],
        load=relayout_plain_group,
        title="relayout, plain folder, group",
        devices=(),
        group=True,
    ),
    "load_file": _KNOWN["load_file"],
    "load_file_pread": replace(
        _KNOWN["load_file"], load=load_file_pread, title="safetensors pread", devices=("cpu",), needs=_can_pread
    ),
    "get_slice": _BUILTIN,
    "threads": _stock(threads, "safetensors, 8 threads", "cpu"),
    "map_populate": _stock(map_populate, "MAP_POPULATE prefetch", "cpu"),
    "prefetch": _stock(prefetch, "safetensors prefetch", "cuda", needs=_has_prefetch),
    "fastsafetensors": replace(_FAST, title="fastsafetensors, O_DIRECT"),
    "fastsafetensors_buffered": replace(
        _FAST, title="fastsafetensors, buffered", environment={"FASTSAFETENSORS_ODIRECT": "0"}
    ),
    "fastsafetensors_group": replace(
        _FAST,
        load=fastsafetensors_group,
        title="fastsafetensors, sharded",
        environment={"FASTSAFETENSORS_ODIRECT": "0"},
        devices=("cpu",),
        group=True,
    ),
    "fastsafetensors_gds": replace(
        _FAST, load=partial(loaders.fastsafetensors, nogds=False), title="fastsafetensors, GDS", devices=("cuda",)
    ),
    "runai": replace(_RUNAI, title="Run:ai streamer, O_DIRECT"),
    "runai_buffered": replace(
        _RUNAI, title="Run:ai streamer, buffered", environment={"RUNAI_STREAMER_FS_STRATEGY": "sync_buffered"}
    ),
    "instanttensor": _INSTANT,
    "instanttensor_buffered": replace(
        _INSTANT, title="InstantTensor, buffered", environment={"INSTANTTENSOR_BACKEND": "BUFFERED"}
    ),
    "s3fs": Loader(s3fs, "s3fs + safetensors", "s3fs + safetensors", "s3fs", ("s3fs", "safetensors.torch"), devices=()),
}
