"""What a peer is asked to load, and what a peer is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Job:
    """What to load."""

    peer: str
    source: str
    """The plain checkpoint."""
    converted: str
    """The same, converted for `tp` ranks."""
    packed: str
    """The same as one FlashPack file, where that peer takes part."""
    tp: int
    rank: int
    num_processes: int
    """Ranks that load at once on this machine."""
    memory_nbytes: int
    """What a process may take for its buffers, if all take as much: half of what was available, shared."""
    device: str = "cpu"
    verify: bool = True

    @property
    def shards(self) -> list[str]:
        """The plain checkpoint's files."""
        return [str(path) for path in sorted(Path(self.source).glob("*.safetensors"))]

    @property
    def whole(self) -> bool:
        """Whether all of the model is asked for."""
        return self.tp == 1

    def cut(self, name: str, shape: tuple[int, ...]) -> tuple[int, slice] | None:
        """Axis and elements that the rank holds of a Llama tensor; None: all of it."""
        if self.whole or "norm" in name:
            return None
        axis = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        size = shape[axis] // self.tp
        return axis, slice(self.rank * size, (self.rank + 1) * size)

    def part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The rank's part of a whole tensor, as a view of it."""
        cut = self.cut(name, tuple(tensor.shape))
        if cut is None:
            return tensor
        axis, part = cut
        return tensor.narrow(axis, part.start, part.stop - part.start)

    def copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The rank's part of a whole tensor, contiguous in memory of its own."""
        import torch

        return self.part(name, tensor).clone(memory_format=torch.contiguous_format)

    def owned(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The rank's part of a whole tensor whose memory is the caller's to keep.

        A whole model is kept as it is. A part is copied, or else the whole tensor would stay in memory for it.
        """
        return tensor if self.whole else self.copy(name, tensor)


@dataclass(frozen=True)
class Peer:
    """A way to load, which takes part in the benchmark."""

    load: Callable[[Job], Tensors]
    title: str
    """What tables call it."""
    family: str
    """What the chart calls it: of the peers of one family, it shows the one that is the fastest."""
    modules: tuple[str, ...] = ()
    """Imported before the clock starts; without the first one, the peer is not installed."""
    environment: dict[str, str] = field(default_factory=dict)
    """The settings that it reads from there."""
    device: str = "cpu"
    group: bool = False
    """Whether its ranks load together, through a process group of torch: then only all ranks at once are measured."""
    needs: Callable[[], bool] = lambda: True
    """Whether what is installed is of a version that has it."""

    def describe(self) -> dict[str, Any]:
        """For the results: what it is and how it was set."""
        text = " ".join((getattr(self.load, "func", self.load).__doc__ or "").split())
        return {"title": self.title, "family": self.family, "environment": self.environment, "what": text}


def get_slices(job: Job, shard: str, device: str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
    """The rank's slices of a shard, by safe_open and get_slice."""
    from safetensors import safe_open

    with safe_open(shard, framework="pt", device=device) as opened:
        for name in opened.keys():  # noqa: SIM118 (it is no mapping)
            part = opened.get_slice(name)
            cut = job.cut(name, tuple(part.get_shape()))
            if cut is None:
                yield name, part[:]
            else:
                axis, mine = cut
                yield name, part[:, mine] if axis else part[mine]
