"""The loaders, each with the best settings that its documentation names, and what each is asked to load.

Each returns what an engine needs: the rank's slices (or the whole model) on the job's device, contiguous, every byte in
memory that stays the rank's own. Where a loader returns mapped files, or memory that it uses again, that needs a clone,
which is timed. A view of a mapped file is no load: its bytes are read when they are used.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import util
from typing import TYPE_CHECKING, Any

from relayout.checkpoint.source import SourceCheckpoint, read_source
from relayout.core.slices import WHOLE, Slice
from relayout.errors import how_to_install
from relayout.plans.planner import plan_by, plan_for
from relayout.storage.stores import find_store

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class LoadJob:
    """What to load."""

    registry: str
    """The module whose `LOADERS` has the loader."""
    loader: str
    source: str
    """The plain checkpoint; "" if there is none."""
    converted: str
    """The converted folder of the same checkpoint; "" if there is none."""
    tp: int
    rank: int
    num_processes: int
    """Ranks that load at once on this machine."""
    memory_nbytes: int
    """Memory that a process may use for buffers: half of what was available, divided by the processes."""
    device: str = "cpu"
    within: Sequence[str] = ()
    """Words before the command of its process, which then runs in a network of its own, for example."""

    @property
    def shards(self) -> list[str]:
        """Paths of the plain checkpoint's files; in an object store, their URLs."""
        return shards_of(self.source)

    @property
    def largest_nbytes(self) -> int:
        """Bytes of the largest of them."""
        return max(file.nbytes for file in _source(self.source).files)

    @property
    def whole(self) -> bool:
        """Whether all of the model is wanted."""
        return self.tp == 1

    def slice(self, name: str) -> Slice:
        """The part of a tensor that the rank holds."""
        return WHOLE if self.whole else _plan(self.source, self.tp)[name][self.rank]

    def part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The rank's part of a whole tensor; a view of it, except where the part has several ranges."""
        import torch

        for axis, ranges in self.slice(name).by_axis or ():
            pieces = [tensor.narrow(axis, start, length) for start, length in ranges or ((0, 0),)]
            tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis)
        return tensor

    def copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The rank's part of a whole tensor, contiguous, in its own memory."""
        import torch

        return self.part(name, tensor).clone(memory_format=torch.contiguous_format)

    def owned(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The rank's part of a whole tensor that the loader does not use again.

        A whole model is kept as it is. A part is copied: a view would keep the whole tensor in memory.
        """
        return tensor if self.whole else self.copy(name, tensor)

    def slices(self, shard: str) -> Iterator[tuple[str, torch.Tensor]]:
        """The rank's slices of a shard, by safe_open and get_slice, each contiguous in its own memory."""
        import torch
        from safetensors import safe_open

        with safe_open(shard, framework="pt", device=self.device) as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                part, stored = self.slice(name), opened.get_slice(name)
                if part.is_whole:
                    tensor = opened.get_tensor(name)
                else:
                    before, ranges = (slice(None),) * part.axis, part.ranges or ((0, 0),)
                    pieces = [stored[(*before, slice(start, start + length))] for start, length in ranges]
                    tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces, part.axis)
                # On the CPU it is a view of the mapped file, on another device it has come to stay.
                on_cpu = self.device == "cpu"
                yield name, tensor.clone(memory_format=torch.contiguous_format) if on_cpu else tensor.contiguous()


@dataclass(frozen=True)
class Loader:
    """A way to load a rank."""

    load: Callable[[Any], Tensors]
    """Takes a `LoadJob`. Returns the rank's slices, contiguous, in memory that stays theirs."""
    title: str
    family: str
    """The name of its project; of several loaders of a family, the fastest counts."""
    package: str = ""
    """What pip installs it by; empty: an extra of relayout, which no index has."""
    modules: tuple[str, ...] = ()
    """Imported before the clock starts; without the first, the loader is not installed."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Settings that it reads from the environment."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    """Kinds of devices that it loads to."""
    group: bool = False
    """Whether its ranks load through a process group of torch; measured only with all ranks at once."""
    needs: Callable[[], bool] = lambda: True
    """Whether the installed version can do this."""
    reads_converted: bool = False
    """Whether it reads the converted folder, and not the plain one."""

    def absence(self) -> str | None:
        """The reason that it cannot be measured, or None."""
        if self.modules and util.find_spec(self.modules[0].partition(".")[0]) is None:
            how = f"pip install {self.package}" if self.package else how_to_install("torch")
            return f"not installed ({how})"
        return None if self.needs() else "not in the installed version"

    def describe(self) -> dict[str, Any]:
        """What it is and its settings, as results tell them."""
        text = " ".join((getattr(self.load, "func", self.load).__doc__ or "").split())
        return {"title": self.title, "family": self.family, "environment": dict(self.environment), "what": text}


@lru_cache(maxsize=1)
def _source(source: str) -> SourceCheckpoint:
    return read_source(find_store(source))


@lru_cache(maxsize=1)
def _plan(source: str, tp: int) -> dict[str, tuple[Slice, ...]]:
    """The slice of each rank, by the name of the tensor."""
    checkpoint = _source(source)
    plan = plan_for(checkpoint, tp) if tp > 1 else plan_by(checkpoint, 1, None)
    return {tensor.name: plan.cut(t).slices for t, tensor in enumerate(checkpoint.tensors)}


def plan_rank(job: LoadJob) -> None:
    """Read headers and make the plan before the clock starts: engines know both from classes and configuration."""
    if job.source:
        _plan(job.source, job.tp)


def shards_of(source: str) -> list[str]:
    """Paths or URLs of the weight files of a plain checkpoint."""
    store = _source(source).folder
    return [str(store.path(file.name) or store.location(file.name)) for file in _source(source).files]


def relayout(job: LoadJob, backend: str = "auto") -> Tensors:
    """relayout.load of the converted folder. Tensors are views of one allocation, which the caller keeps: no clone."""
    from relayout.loader.api import load

    return load(job.converted, job.rank, tp=job.tp, device=job.device, backend=backend)


def relayout_plain(job: LoadJob) -> Tensors:
    """relayout.load of the plain checkpoint, which slices it while it loads."""
    from relayout.loader.api import load

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It warns that a converted folder is faster.
        return load(job.source, job.rank, tp=job.tp, device=job.device)


def load_file(job: LoadJob) -> Tensors:
    """safetensors.torch.load_file, shard by shard. On the CPU it maps the file, so every tensor is cloned."""
    from safetensors.torch import load_file

    take = job.copy if job.device == "cpu" else job.owned
    files = (load_file(shard, device=job.device) for shard in job.shards)
    return {name: take(name, tensor) for file in files for name, tensor in file.items()}


def get_slice(job: LoadJob) -> Tensors:
    """safe_open and get_slice, shard by shard. On the CPU slices are views of the mapped file, so each is cloned."""
    return {name: tensor for shard in job.shards for name, tensor in job.slices(shard)}


def fastsafetensors(job: LoadJob, nogds: bool = True) -> Tensors:
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


def runai(job: LoadJob) -> Tensors:
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


_RELAYOUT, _STOCK = ("", ("relayout.loader.api",)), ("safetensors", ("safetensors.torch",))

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
