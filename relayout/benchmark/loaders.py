"""The measured loaders, each with the best settings in its documentation, and the definition of the job to load.

Each loader returns what an engine needs: the rank's slices (or the whole model) on the job's device, contiguous, and
with every byte in memory that belongs to the rank. If a loader returns mapped files, or memory that it reuses, the
slices must be cloned, and that is timed. A view of a mapped file does not count as loaded: its bytes are read only when
they are used.
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
    """The checkpoint, rank, device and limits of one load."""

    registry: str
    """Name of the module with the loader in its `LOADERS`."""
    loader: str
    source: str
    """The plain checkpoint; "" if it does not exist."""
    converted: str
    """The converted folder of the same checkpoint; "" if it does not exist."""
    tp: int
    rank: int
    num_processes: int
    """Number of ranks that load at once on this machine."""
    memory_nbytes: int
    """Bytes of memory that a process may use for buffers: half of the available memory, divided by the processes."""
    device: str = "cpu"
    within: Sequence[str] = ()
    """Words before the command of the process, for example to run it in its own network namespace."""

    @property
    def shards(self) -> list[str]:
        """Paths of the plain checkpoint's files, or URLs if it is in an object store."""
        return shards_of(self.source)

    @property
    def largest_nbytes(self) -> int:
        """Bytes of the largest of the plain checkpoint's files."""
        return max(file.nbytes for file in _source(self.source).files)

    @property
    def whole(self) -> bool:
        """True if the whole model is to be loaded."""
        return self.tp == 1

    def slice(self, name: str) -> Slice:
        """Return the slice of a tensor that the rank holds."""
        return WHOLE if self.whole else _plan(self.source, self.tp)[name][self.rank]

    def part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rank's part of a whole tensor: a view, or a copy if the part has several ranges."""
        import torch

        for axis, ranges in self.slice(name).by_axis or ():
            pieces = [tensor.narrow(axis, start, length) for start, length in ranges or ((0, 0),)]
            tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis)
        return tensor

    def copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rank's part of a whole tensor, contiguous, in its own memory."""
        import torch

        return self.part(name, tensor).clone(memory_format=torch.contiguous_format)

    def owned(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rank's part of a whole tensor in memory that the loader does not reuse.

        For a whole model, the tensor is unchanged. A part is copied: a view would keep the whole tensor in memory.
        """
        return tensor if self.whole else self.copy(name, tensor)

    def slices(self, shard: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the rank's slices of a shard, read with safe_open and get_slice, each contiguous in its own memory."""
        import torch
        from safetensors import safe_open

        with safe_open(shard, framework="pt", device=self.device) as opened:
            for name in opened.keys():  # noqa: SIM118 (it is not a mapping)
                part, stored = self.slice(name), opened.get_slice(name)
                if part.is_whole:
                    tensor = opened.get_tensor(name)
                else:
                    before, ranges = (slice(None),) * part.axis, part.ranges or ((0, 0),)
                    pieces = [stored[(*before, slice(start, start + length))] for start, length in ranges]
                    tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces, part.axis)
                # On the CPU the tensor is a view of the mapped file. On other devices it has its own memory.
                on_cpu = self.device == "cpu"
                yield name, tensor.clone(memory_format=torch.contiguous_format) if on_cpu else tensor.contiguous()


@dataclass(frozen=True)
class Loader:
    """One of the measured loaders."""

    load: Callable[[Any], Tensors]
    """Loads a `LoadJob`; returns the rank's slices, contiguous, in memory that the loader does not reuse."""
    title: str
    family: str
    """Name of the loader's project. For each family, only the fastest loader counts."""
    package: str = ""
    """Name for pip install. Empty: it comes with an extra of relayout, which is in no package index."""
    modules: tuple[str, ...] = ()
    """Modules that are imported before timing starts. If the first one is missing, the loader is not installed."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Settings of the loader in environment variables."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    """Kinds of devices that it can load to."""
    group: bool = False
    """True if its ranks load through a process group of torch. It is then measured only with all ranks at once."""
    needs: Callable[[], bool] = lambda: True
    """Returns True if the installed version supports this loader."""
    reads_converted: bool = False
    """True if it reads the converted folder instead of the plain one."""

    def absence(self, device: str | None = None) -> str | None:
        """Return the reason why it cannot be measured, or None.

        Args:
            device: the kind of device to load to. None: any.
        """
        if device is not None and device not in self.devices:
            return f"it cannot load to {device}"
        if self.modules and util.find_spec(self.modules[0].partition(".")[0]) is None:
            how = f"pip install {self.package}" if self.package else how_to_install("torch")
            return f"not installed ({how})"
        return None if self.needs() else "not in the installed version"

    def describe(self) -> dict[str, Any]:
        """Return its title, family, settings and description, for the results."""
        text = " ".join((getattr(self.load, "func", self.load).__doc__ or "").split())
        return {"title": self.title, "family": self.family, "environment": dict(self.environment), "what": text}


@lru_cache(maxsize=1)
def _source(source: str) -> SourceCheckpoint:
    return read_source(find_store(source))


@lru_cache(maxsize=1)
def _plan(source: str, tp: int) -> dict[str, tuple[Slice, ...]]:
    """Return the slice of each rank, by the name of the tensor."""
    checkpoint = _source(source)
    plan = plan_for(checkpoint, tp) if tp > 1 else plan_by(checkpoint, 1, None)
    return {tensor.name: plan.cut(t).slices for t, tensor in enumerate(checkpoint.tensors)}


def plan_rank(job: LoadJob) -> None:
    """Read headers and create the plan before timing starts, as engines derive both from classes and configuration."""
    if job.source:
        _plan(job.source, job.tp)


def shards_of(source: str) -> list[str]:
    """Return paths or URLs of the weight files of a plain checkpoint."""
    store = _source(source).folder
    return [str(store.path(file.name) or store.location(file.name)) for file in _source(source).files]


def relayout(job: LoadJob, backend: str = "auto", memory: int | None = None) -> Tensors:
    """Load the converted folder with relayout.load. Tensors are views of one allocation, so no clone is needed."""
    from relayout.loader.api import load

    return load(job.converted, job.rank, tp=job.tp, device=job.device, backend=backend, memory=memory)


def relayout_plain(job: LoadJob) -> Tensors:
    """Load the plain checkpoint with relayout.load, which slices it during the load."""
    from relayout.loader.api import load

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The warning is that a converted folder is faster.
        return load(job.source, job.rank, tp=job.tp, device=job.device)


def load_file(job: LoadJob) -> Tensors:
    """Use safetensors.torch.load_file, shard by shard. On the CPU it maps the file, so every tensor is cloned."""
    from safetensors.torch import load_file

    take = job.copy if job.device == "cpu" else job.owned
    files = (load_file(shard, device=job.device) for shard in job.shards)
    return {name: take(name, tensor) for file in files for name, tensor in file.items()}


def get_slice(job: LoadJob) -> Tensors:
    """Use safe_open and get_slice, shard by shard. On the CPU slices are views of the mapped file, and are cloned."""
    return {name: tensor for shard in job.shards for name, tensor in job.slices(shard)}


def fastsafetensors(job: LoadJob, nogds: bool = True) -> Tensors:
    """Use fastsafetensors: fastsafe_open for a whole model, ParallelLoader for a rank's slices.

    A whole model is loaded from all shards at once: tensors own their memory, and nothing is cloned. Slices are loaded
    with borrowed tensors, which its documentation describes for copying: one shard after another, while the next one
    is read. If ranks share the host's memory, the next one is not read ahead, to save memory. Each slice is cloned
    once. nogds=False uses GPUDirect Storage if cuFile is installed; otherwise it is the same as nogds=True.
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
    """Use Run:ai Model Streamer: since 0.17, direct reads by io_uring, 512 in flight.

    A whole model is loaded with owned=True, the default: the caller keeps the tensors, and nothing is cloned. A rank's
    slices are loaded with owned=False, which reuses its buffers, so each slice is cloned. If several ranks load on this
    machine, the buffers are limited to half of its memory, or to the smallest possible size if that is not enough
    (RUNAI_STREAMER_MEMORY_LIMIT), and reads in flight are shared as in its distributed mode
    (RUNAI_STREAMER_PROCESS_GROUP_SIZE). Tensors are moved to a GPU with `.to`, as in its documentation.
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


def instanttensor(job: LoadJob) -> Tensors:
    """Use InstantTensor, with all shards in one call.

    A whole model is loaded with copy=True, the default: tensors own their memory. Slices are cloned from its views.
    """
    from instanttensor import safe_open

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It warns of views that are kept; none is.
        with safe_open(job.shards, framework="pt", device=job.device, copy=job.whole) as opened:
            return {name: job.owned(name, tensor) for name, tensor in opened.tensors()}


_RELAYOUT = ("", ("relayout.loader.api", "relayout.loader.backends.cuda"))
_BUILTIN = ("safetensors", ("safetensors.torch",))

LOADERS: dict[str, Loader] = {
    "relayout": Loader(relayout, "relayout, converted", "relayout", *_RELAYOUT, reads_converted=True),
    "relayout_plain": Loader(relayout_plain, "relayout, plain folder", "relayout", *_RELAYOUT),
    "load_file": Loader(load_file, "safetensors load_file", "safetensors load_file", *_BUILTIN),
    "get_slice": Loader(get_slice, "safetensors get_slice", "safetensors get_slice", *_BUILTIN),
    "fastsafetensors": Loader(
        fastsafetensors, "fastsafetensors", "fastsafetensors", "fastsafetensors", ("fastsafetensors",)
    ),
    "runai": Loader(runai, "Run:ai streamer", "Run:ai streamer", "runai-model-streamer", ("runai_model_streamer",)),
    "instanttensor": Loader(
        instanttensor, "InstantTensor", "InstantTensor", "instanttensor", ("instanttensor",), devices=("cuda",)
    ),
}
