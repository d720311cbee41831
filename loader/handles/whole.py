"""`safe_open`: the whole tensors of a converted checkpoint, in the manner of `safetensors.safe_open`."""

from __future__ import annotations

import os
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from relayout.checkpoint.converted import is_converted, read_manifest, read_record
from relayout.core.slices import WHOLE, Slice
from relayout.errors import PlanError
from relayout.format.index import MANIFEST_NAME, Manifest
from relayout.format.safetensors import parse_header
from relayout.format.source_record import SourceRecord
from relayout.loader.backends.choice import resolve_device
from relayout.loader.diagnose.hints import advised
from relayout.loader.handles.indexing import bounds, check_pairs, selection, within
from relayout.loader.loading import Options, load_contents
from relayout.loader.sources.resharded import Ranks
from relayout.loader.tensors import check_mode
from relayout.storage.protocols import Kind, Store
from relayout.storage.stores import find_store

if TYPE_CHECKING:
    import torch


class WholeTensor:
    """A tensor of which parts can be read: what `safe_open(...).get_slice` returns.

    Any number of threads may use it at once.
    """

    def __init__(self, opened: WholeCheckpoint, row: int) -> None:
        self._opened = opened
        self._row = row

    def get_shape(self) -> list[int]:
        """The tensor's shape, in elements."""
        return list(self._opened.shape(self._row))

    def get_dtype(self) -> str:
        """The dtype, as safetensors writes it."""
        return self._opened.dtype(self._row)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """The elements that torch's basic indexing (integers, slices, `...`) selects.

        Only what is asked for along axis 0, and along the axis of the cut, is read.

        Raises:
            IndexError: there are no such elements.
        """
        return self._opened.read(self._row, index)


class WholeCheckpoint:
    """A converted checkpoint, with the names and shapes of its source.

    Any number of threads may use it at once, and children of a fork too. Who reads while another thread closes it gets
    the tensor, or a PlanError.
    """

    def __init__(self, folder: Store, device: str | torch.device) -> None:
        self._folder = folder
        self._options = Options(device=resolve_device(device))
        self._manifest: Manifest = read_manifest(folder)
        self._record: SourceRecord = read_record(folder, self._manifest)
        self._ranks = Ranks(folder, self._manifest, self._record)
        self._rows = {name: row for row, name in enumerate(self._record.names)}

    def keys(self) -> list[str]:
        """The tensors' names, in the order of the source's files."""
        order = sorted(self._rows.values(), key=lambda row: (self._record.file_of[row], self._record.offsets[row]))
        return [self._record.names[row] for row in order]

    def offset_keys(self) -> list[str]:
        """The same: `keys` are in file order."""
        return self.keys()

    def metadata(self) -> dict[str, str] | None:
        """The `__metadata__` entries on which all files of the source agree; None if there are none."""
        found: dict[str, str] | None = None
        for file in self._record.files:
            mine = parse_header(file.header, file.nbytes, f"{self._folder}: header of {file.name}").metadata
            found = dict(mine) if found is None else {key: text for key, text in found.items() if mine.get(key) == text}
        return found or None

    def get_tensor(self, name: str) -> torch.Tensor:
        """A whole tensor, in memory of its own.

        Raises:
            PlanError: there is no such tensor, or torch's FakeTensorMode is on.
            FormatError, OSError: as `load`.
        """
        return self.read(self._row(name), ...)

    def get_slice(self, name: str) -> WholeTensor:
        """A tensor to be read in part.

        Raises:
            PlanError: there is no such tensor.
        """
        return WholeTensor(self, self._row(name))

    def shape(self, row: int) -> tuple[int, ...]:
        """Shape of a tensor of the record."""
        return self._record.shapes[row]

    def dtype(self, row: int) -> str:
        """dtype of a tensor of the record."""
        return self._record.dtypes[row]

    def read(self, row: int, index: Any) -> torch.Tensor:
        """The elements of a tensor that an index selects."""
        import torch

        check_mode()
        shape = self.shape(row)
        # torch says what is wrong with an index, of a tensor that has a shape and no memory.
        torch.empty(shape, device="meta")[index]
        parts = selection(index, shape)
        check_pairs(self._record.names[row], self.dtype(row), parts)
        axis = next((part.axis for part in self._record.cut(row).distinct if part.ranges), 0)
        wanted, rows, box = WHOLE, None, list(shape)
        if parts is not None and shape:
            start, length = bounds(parts[axis], shape[axis])
            wanted, box[axis] = Slice(axis, ((start, length),)), length
            parts[axis] = within(parts[axis], length)
            if axis:
                rows = bounds(parts[0], shape[0])
                box[0] = rows[1]
                parts[0] = within(parts[0], rows[1])
        with advised():
            contents = self._ranks.pick_one(row, wanted, rows, tuple(box))
            [tensor] = load_contents(contents, self._options).values()
        return tensor[index if parts is None else tuple(parts)]

    def _row(self, name: str) -> int:
        row = self._rows.get(name)  # Another thread may close this meanwhile.
        if row is None:
            raise PlanError(f"{self._folder}: has no tensor {name!r}, or is closed")
        return row

    def close(self) -> None:
        """Know no names any more; tensors that were handed out stay, and slices can still be read."""
        self._rows = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def safe_open(
    path: str | os.PathLike[str], framework: str = "pt", device: str | torch.device = "cpu"
) -> WholeCheckpoint:
    """Open a converted checkpoint as if it were the source: whole tensors, put together from the ranks' files.

    It can be used in place of `safetensors.safe_open`, for all shards at once. Nothing but the sidecar is read at once.
    Any number of threads may share what it returns.

    Raises:
        FormatError: the sidecar is damaged.
        PlanError: there is nothing, `path` was not converted, or another framework than torch ("pt") is asked for.
    """
    if framework not in ("pt", "torch", "pytorch"):
        raise PlanError(f"framework {framework!r}: tensors are torch's, expected 'pt'")
    folder = find_store(path)
    if folder.kind() is Kind.NOTHING:
        raise PlanError(f"{folder}: {folder.absence()}")
    if not is_converted(folder):
        raise PlanError(f"{folder}: not converted ({MANIFEST_NAME} is missing): safetensors.safe_open reads its files")
    with advised():
        return WholeCheckpoint(folder, device)
