"""What a loader is, and what it is asked to load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import util
from typing import TYPE_CHECKING, Any

from relayout.checkpoint.source import SourceCheckpoint, read_source
from relayout.core.slices import WHOLE, Slice
from relayout.plans.planner import plan_by, plan_for
from relayout.storage.stores import find_store

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Job:
    """What to load."""

    registry: str
    """The module whose `LOADERS` has the loader."""
    loader: str
    source: str
    """The plain checkpoint; "" if there is none."""
    converted: str
    """The same, converted; "" if there is none."""
    tp: int
    rank: int
    num_processes: int
    """Ranks that load at once on this machine."""
    memory_nbytes: int
    """Memory that a process may use for buffers: half of what was available, divided by the processes."""
    device: str = "cpu"

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
    """Takes a `Job`. Returns the rank's slices, contiguous, in memory that stays theirs."""
    title: str
    family: str
    """The name of its project; of several loaders of a family, the fastest counts."""
    package: str = ""
    """What pip installs it by."""
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
            return f"not installed (pip install {self.package})"
        return None if self.needs() else "not in the installed version"

    def describe(self) -> dict[str, Any]:
        """For results: what it is and its settings."""
        text = " ".join((getattr(self.load, "func", self.load).__doc__ or "").split())
        return {"title": self.title, "family": self.family, "environment": dict(self.environment), "what": text}


@lru_cache(maxsize=1)
def _source(source: str) -> SourceCheckpoint:
    return read_source(find_store(source))


@lru_cache(maxsize=1)
def _plan(source: str, tp: int) -> dict[str, tuple[Slice, ...]]:
    """Of each tensor the slice of each rank."""
    checkpoint = _source(source)
    plan = plan_for(checkpoint, tp) if tp > 1 else plan_by(checkpoint, 1, None)
    return {tensor.name: plan.cut(t).slices for t, tensor in enumerate(checkpoint.tensors)}


def prepare(job: Job) -> None:
    """Read headers and make the plan, before the clock starts: engines know both from their classes and configuration.

    Raises:
        RelayoutError: the checkpoint is damaged, or cannot be cut at this degree.
    """
    if job.source:
        _plan(job.source, job.tp)


def shards_of(source: str) -> list[str]:
    """Paths or URLs of the weight files of a plain checkpoint."""
    store = _source(source).folder
    return [str(store.path(file.name) or store.location(file.name)) for file in _source(source).files]
