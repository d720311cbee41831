"""`open`: one rank of a converted checkpoint, in the manner of `safetensors.safe_open`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from relayout.core.slices import Slice
from relayout.errors import PlanError
from relayout.format.index import RankTable
from relayout.loader.backends.choice import resolve_device
from relayout.loader.diagnose.hints import advised
from relayout.loader.handles.indexing import check_pairs, selection
from relayout.loader.loading import Options, load_contents
from relayout.loader.sources.checkpoint import ConvertedRank, find_checkpoint
from relayout.loader.sources.contents import contents_of
from relayout.loader.tensors import check_mode, to_device

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Place:
    """Which part of a whole tensor a rank's tensor is."""

    shape: tuple[int, ...]
    """Of the whole tensor, in elements."""
    part: Slice
    """The axis that is cut and the ranges along it that the rank holds; or all of the tensor."""


class RankSlice:
    """A tensor of which parts can be read: what `safe_open(...).get_slice` returns.

    Any number of threads may use it at once.
    """

    def __init__(
        self, name: str, tensor: torch.Tensor, dtype: str, shape: tuple[int, ...], device: str | torch.device
    ) -> None:
        self._name = name
        self._tensor = tensor
        self._dtype = dtype
        self._shape = shape
        self._device = device

    def get_shape(self) -> list[int]:
        """The shape of the rank's slice, in elements."""
        return list(self._shape)

    def get_dtype(self) -> str:
        """The dtype, as safetensors writes it."""
        return self._dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        """The elements that torch's basic indexing selects, in memory of their own.

        Raises:
            IndexError: there are no such elements.
            PlanError: the dtype is F4, and the last axis would be cut; or torch's FakeTensorMode is on.
        """
        check_mode()
        check_pairs(self._name, self._dtype, selection(index, self._shape))
        return to_device(self._tensor[index].clone(), self._device)


class OpenRank:
    """One rank of a converted checkpoint; bytes of a tensor are read when they are used.

    Any number of threads may use it at once, and children of a fork too; on the CPU all of them are given the same
    tensors. Who asks while another thread closes it gets the tensor, or a PlanError.
    """

    def __init__(self, rank: ConvertedRank, device: str | torch.device) -> None:
        self._rank = rank
        self._device = device
        self._table: RankTable = rank.table()
        self._rows = {name: row for row, name in enumerate(self._table.names)}
        self._tensors: Mapping[str, torch.Tensor] | None
        """None when it has been closed."""
        self._tensors = load_contents(contents_of(rank.files, self._table), Options(backend="mapped"))

    def keys(self) -> list[str]:
        """The names of the rank's tensors, in file order."""
        return list(self._table.names)

    def offset_keys(self) -> list[str]:
        """The same: `keys` are in file order."""
        return self.keys()

    def get_tensor(self, name: str) -> torch.Tensor:
        """A tensor: on the CPU a view of the files, private to this process; else a copy on the device.

        Raises:
            PlanError: the rank has no such tensor, or torch's FakeTensorMode is on.
        """
        check_mode()
        _, tensor = self._find(name)
        return to_device(tensor, self._device)

    def get_slice(self, name: str) -> RankSlice:
        """A tensor to be read in part.

        Raises:
            PlanError: the rank has no such tensor.
        """
        row, tensor = self._find(name)
        return RankSlice(name, tensor, self._table.dtypes[row], tuple(self._table.shapes[row]), self._device)

    def metadata(self) -> dict[str, str] | None:
        """The `__metadata__` of the rank's first file.

        Raises:
            FormatError: its header is damaged.
        """
        from relayout.checkpoint.source import read_shard

        _, header = read_shard(self._rank.folder, self._rank.files[0].name)
        return dict(header.metadata) or None

    def place(self, name: str) -> Place:
        """Which part of the whole tensor the rank's is.

        Raises:
            PlanError: the rank has no such tensor.
        """
        row, _ = self._find(name)
        return Place(tuple(self._table.source_shapes[row]), self._table.slices[row])

    @property
    def rank(self) -> int:
        """Which rank this is."""
        return self._rank.rank

    @property
    def num_ranks(self) -> int:
        """The tensor-parallel degree."""
        return self._rank.manifest.num_ranks

    def _find(self, name: str) -> tuple[int, torch.Tensor]:
        """A tensor's row of the table, and all of it."""
        tensors = self._tensors  # Another thread may close this meanwhile.
        if tensors is None:
            raise PlanError(f"{self._rank.folder}: is closed")
        if name not in tensors:
            raise PlanError(f"{self._rank.folder}: rank {self.rank} has no tensor {name!r}")
        return self._rows[name], tensors[name]

    def close(self) -> None:
        """Forget the tensors; those that were handed out stay, and so does what can be read of slices."""
        self._tensors = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_rank(path: str | os.PathLike[str], rank: int, *, device: str | torch.device = "cpu") -> OpenRank:
    """Open one rank of a converted checkpoint, as `safetensors.safe_open` opens a file.

    Nothing but the sidecar is read at once. Use it in a `with` statement, or close it. Any number of threads may share
    what it returns.

    Raises:
        FormatError: sidecar or files are damaged.
        PlanError: the rank does not exist, the folder was not converted, or the device cannot be used.
        OSError: the file system does not map files into memory.
    """
    with advised():
        device = resolve_device(device)
        checkpoint = find_checkpoint(path, rank, None)
        assert isinstance(checkpoint, ConvertedRank)
        return OpenRank(checkpoint, device)
