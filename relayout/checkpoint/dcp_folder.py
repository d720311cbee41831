"""Presents a folder written by PyTorch's distributed checkpoint (DCP) as the checkpoint to which it would be exported.

The shards of that export are never written: their headers follow from `.metadata`, and their bytes are read from the
`.distcp` files, a range at a time. All other code handles the folder like any other source. Nothing is unpickled:
`.metadata` and what `torch.save` wrote are read as data (`format/pickles.py`), and the bytes of tensors by their
offsets.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path

from relayout.checkpoint.converted import StoreOver
from relayout.checkpoint.shards import (
    DEFAULT_SHARD_NBYTES,
    MemoryShard,
    in_stored_order,
    lay_out_shards,
    model_order,
    share_out,
)
from relayout.core.digests import xxh3_hex
from relayout.core.extents import Extent, Transfer, copy_runs, split
from relayout.core.slices import TensorHead, slice_transfers
from relayout.core.workers import each
from relayout.errors import FormatError, PlanError
from relayout.format.dcp import DATA_SUFFIX, METADATA_NAME, SavedBox, SavedTensor, parse_metadata
from relayout.format.index import HUB_INDEX_NAME
from relayout.format.manifest import compact_json
from relayout.format.pickles import MAX_PICKLE_NBYTES
from relayout.format.torch_save import find_array
from relayout.storage.reading import OpenFiles
from relayout.storage.stores import (
    Access,
    Enter,
    Entry,
    FileStat,
    HeadFile,
    ReadableFile,
    Store,
    everywhere,
    read_whole,
)
from relayout.storage.system import Buffer

_METADATA_OF_RANK = "__0.metadata"
"""Matches the files that DCP writes without collectives: one for each process, in place of `.metadata`."""
_BOUNCE_NBYTES = 2**22
"""The most bytes of a tensor that a thread reads at once to memory of its own."""


@dataclass(frozen=True, slots=True)
class _PlacedBox:
    """A box (range of each axis) of a tensor, and its location."""

    file: str
    offset: int
    """Absolute file offset of its first byte."""
    transfers: tuple[Transfer, ...]
    """The transfers from the tensor's bytes to those of the box, which are dense."""

    def read(self, part: Extent, view: memoryview, files: OpenFiles[str, ReadableFile], buffer: Buffer) -> None:
        """Fill `view`, the memory of this part of the tensor, with the part's bytes that are in the box."""
        wanted = self._transfers(part)
        if not wanted:
            return
        with files.use(self.file) as file:
            if len(wanted) == 1 and wanted[0].count == 1 and file.alignment == 1:
                position = wanted[0].source - part.offset
                file.read(self.offset + wanted[0].target, view[position : position + wanted[0].nbytes])
                return
            for piece in split(part, _BOUNCE_NBYTES):
                self._bounce(self._transfers(piece), part.offset, view, file, buffer)

    def _transfers(self, part: Extent) -> list[Transfer]:
        return [one for transfer in self.transfers for one in transfer.clipped(part.offset, part.end)]

    def _bounce(
        self, wanted: Sequence[Transfer], start: int, view: memoryview, file: ReadableFile, buffer: Buffer
    ) -> None:
        """Read in one piece the bytes of the box that transfers need; copy them to `view`, which begins at `start`."""
        if not wanted:
            return
        low, high = min(one.target for one in wanted), max(one.target_end for one in wanted)
        blocks = Extent(self.offset + low, high - low).aligned()
        memory = buffer.reserve(blocks.nbytes)
        file.read(blocks.offset, memory)
        for one in wanted:
            copy_runs(memory, view, one.inverted(), self.offset - blocks.offset, -start)


@dataclass(frozen=True, slots=True, eq=False)
class DcpFolder(StoreOver):
    """The folder of an export that is never written. Thread-safe."""

    shards: Mapping[str, MemoryShard]
    index: bytes | None
    """The index.json of several shards."""
    boxes: Sequence[Sequence[_PlacedBox]]
    """The boxes of each tensor, by the positions that shards have."""
    versions: Mapping[str, str]
    """The version of each `.distcp` file, when it was first opened."""
    left_out: tuple[str, ...]
    """The entries of the checkpoint that are not the model's, as text for the user."""
    _buffers: threading.local = field(default_factory=threading.local)

    def path(self, name: str) -> Path | None:
        return None if name in self.shards or name == HUB_INDEX_NAME else self.base.path(name)

    def walk(self, enter: Enter = everywhere) -> Iterator[Entry]:
        for entry in self.base.walk(enter):
            if not entry.name.endswith(DATA_SUFFIX) and entry.name not in (*self.shards, HUB_INDEX_NAME):
                yield entry
        yield from map(Entry, self.shards)
        if self.index is not None:
            yield Entry(HUB_INDEX_NAME)

    def stat(self, name: str) -> FileStat | None:
        if name == HUB_INDEX_NAME:
            return None if self.index is None else FileStat(len(self.index), xxh3_hex(self.index))
        return self._stat_of(self.shards[name]) if name in self.shards else self.base.stat(name)

    def _stat_of(self, shard: MemoryShard) -> FileStat:
        files = sorted({box.file for t in shard.tensors for box in self.boxes[t]})
        found = [(name, _stat(self.base, name)) for name in (METADATA_NAME, *files)]
        vouched = [status.vouched for _, status in found]
        mode = 0o777
        for _, status in found:
            mode &= status.mode
        return FileStat(
            shard.nbytes,
            xxh3_hex(compact_json([[name, status.version] for name, status in found])),
            mode,
            xxh3_hex(compact_json(vouched)) if None not in vouched else None,
        )

    def read(self, name: str, limit: int) -> bytes:
        return read_whole(self.open(name), self.location(name), limit)

    def open(
        self, name: str, nbytes: int | None = None, *, access: Access = Access.BUFFERED, version: str | None = None
    ) -> ReadableFile:
        if name not in self.shards and name != HUB_INDEX_NAME:
            return self.base.open(name, nbytes, access=access, version=version)
        status = self.stat(name)
        if status is None:
            raise FormatError("no such file", path=self.location(name), code="missing")
        status.check(self.location(name), nbytes, version)
        if name == HUB_INDEX_NAME:
            return HeadFile(self.index or b"", status)
        return _Shard(self, self.shards[name], status, Access.BUFFERED if access is Access.DIRECT else access)

    def buffer(self) -> Buffer:
        """Return this thread's bounce buffer, for bytes that cannot be read into their destination."""
        if not hasattr(self._buffers, "buffer"):
            self._buffers.buffer = Buffer()
        found: Buffer = self._buffers.buffer
        return found


class _Shard(HeadFile):
    """A shard, open for reading: the `.distcp` files are opened when they are needed."""

    def __init__(self, folder: DcpFolder, shard: MemoryShard, stat: FileStat, access: Access) -> None:
        super().__init__(shard.header, stat, self._fill_from)
        self._folder = folder
        self._shard = shard
        self._files = OpenFiles(partial(self._open, access))

    def _open(self, access: Access, name: str) -> ReadableFile:
        return self._folder.base.open(name, access=access, version=self._folder.versions[name])

    def _fill_from(self, offset: int, view: memoryview) -> None:
        buffer = self._folder.buffer()
        for t, part, position in self._shard.parts(Extent(offset, view.nbytes)):
            for box in self._folder.boxes[t]:
                box.read(part, view[position : position + part.nbytes], self._files, buffer)

    def close(self) -> None:
        self._files.close()


def is_dcp(names: Sequence[str]) -> bool:
    """Return True if the names are those of a distributed checkpoint without a safetensors file."""
    has_shards = any(name.endswith(".safetensors") for name in names)
    return not has_shards and any(name.endswith(DATA_SUFFIX) for name in names)


def read_dcp(root: Store) -> DcpFolder:
    """Read `.metadata` of a folder, and the location of each of the model's tensors in its files.

    Raises:
        FormatError: a file is missing or damaged; or a pickle imports more than it needs.
        PlanError: the folder has no model that can be converted.
    """
    where = root.location(METADATA_NAME)
    if root.stat(METADATA_NAME) is None:
        raise FormatError(_why_without_metadata(root), path=where, code="missing")
    model = parse_metadata(root.read(METADATA_NAME, MAX_PICKLE_NBYTES), where)
    tensors = sorted(model.tensors, key=lambda one: (model_order(one.head.name), one.head.name))
    files = sorted({box.file for tensor in tensors for box in tensor.boxes})
    versions = {name: status.version for name, status in zip(files, _stats(root, files), strict=True)}
    boxes = _placed(root, tensors, versions)
    heads = [tensor.head for tensor in tensors]
    shared_out = share_out([head.nbytes for head in heads], DEFAULT_SHARD_NBYTES)
    shards, index = lay_out_shards(heads, [in_stored_order(heads, group) for group in shared_out], _totals(heads))
    return DcpFolder(root, {shard.name: shard for shard in shards}, index, boxes, versions, model.left_out)


def _totals(heads: Sequence[TensorHead]) -> dict[str, int]:
    return {
        "total_parameters": sum(prod(head.shape) for head in heads),
        "total_size": sum(head.nbytes for head in heads),
    }


def _why_without_metadata(root: Store) -> str:
    with suppress(FormatError):
        if root.stat(_METADATA_OF_RANK) is not None:
            return f"is missing: each process wrote its own ({_METADATA_OF_RANK} ...): save with use_collectives=True"
    return "is missing next to .distcp files: was the save interrupted? save again"


def _stats(root: Store, names: Sequence[str]) -> list[FileStat]:
    return each(partial(_stat, root), names, root.cost.num_opens)


def _stat(root: Store, name: str) -> FileStat:
    status = root.stat(name)
    if status is None:
        raise FormatError("is missing, but .metadata names it", path=root.location(name), code="missing")
    return status


def _placed(root: Store, tensors: Sequence[SavedTensor], versions: Mapping[str, str]) -> list[tuple[_PlacedBox, ...]]:
    """Find the bytes of each box, by one or two small reads for each."""
    wanted = [(t, box) for t, tensor in enumerate(tensors) for box in tensor.boxes]
    wanted.sort(key=lambda pair: (pair[1].file, pair[1].extent))

    def place(pair: tuple[int, SavedBox]) -> _PlacedBox:
        t, box = pair
        head = tensors[t].head
        with files.use(box.file) as file:
            return _place(head, box, file, root.location(box.file))

    def open_file(name: str) -> ReadableFile:
        return root.open(name, version=versions[name])

    with OpenFiles(open_file) as files:
        placed = each(place, wanted, root.cost.num_opens)
    found: list[list[_PlacedBox]] = [[] for _ in tensors]
    for (t, _), box in zip(wanted, placed, strict=True):
        found[t].append(box)
    return [tuple(boxes) for boxes in found]


def _place(head: TensorHead, box: SavedBox, file: ReadableFile, where: str) -> _PlacedBox:
    extent = box.extent
    if extent.end > file.nbytes:
        what = f"{file.nbytes} bytes long, but .metadata has {extent.end}: was the save interrupted?"
        raise FormatError(what, path=where, tensor=head.name, code="truncated")

    def read(offset: int, nbytes: int) -> bytes:
        content = bytearray(nbytes)
        file.read(extent.offset + offset, memoryview(content))
        return bytes(content)

    try:
        found = find_array(read, extent.nbytes, where)
    except (FormatError, PlanError) as error:
        error.amend(tensor=head.name)
        raise
    if (found.dtype, found.shape) != (head.dtype, box.shape):
        what = f"{found.dtype} {list(found.shape)}, expected {head.dtype} {list(box.shape)}, as .metadata has it"
        raise FormatError(what, path=where, tensor=head.name, code="mismatch")
    transfers = slice_transfers(head.dtype, head.shape, box.part)
    return _PlacedBox(box.file, extent.offset + found.extent.offset, transfers)
