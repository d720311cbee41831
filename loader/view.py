"""`open` and `safe_open`: a rank's slices, or whole tensors, with the interface of `safetensors.safe_open`.

If the files are on this machine, tensors are mapped pages of the files, which are read when they are first used.
Engines map draft models in this way, too.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from relayout.core.extents import Transfer, align_down, align_up
from relayout.core.slices import Range, Slice
from relayout.errors import FormatError, PlanError, did_you_mean, shown
from relayout.format.index import Read
from relayout.loader.backends.base import Options, ReadJob, load_arena
from relayout.loader.backends.files import ReadableFiles, error_hints
from relayout.loader.backends.host import MAP_FIXED, HostArena, HostBackend, allocate
from relayout.loader.requests import HOST_BUFFERS, plan_budget
from relayout.loader.sources.checkpoint import LoadRequest, find_tensors, warn_if_slow
from relayout.loader.sources.rank import ArenaPlan, Names, Pieces, RankSource, StoredFile, pack, parts_of
from relayout.loader.stream import stream
from relayout.loader.tensors import check_mode, make_views, numpy_dtype, to_device, to_numpy
from relayout.storage.stores import Access, Closable
from relayout.storage.system import map_file

if TYPE_CHECKING:
    import numpy as np
    import torch

    from relayout.cache.folder import CacheOption
    from relayout.checkpoint.delta import Paths
    from relayout.checkpoint.trust import Trust

_FLAGS = mmap.MAP_PRIVATE | MAP_FIXED
"""Flags of mmap(2): replace the arena's own pages. Private, so that a write to a tensor copies the page."""


@dataclass(frozen=True, slots=True)
class HeldSlice:
    """The part of a whole tensor that a rank holds.

    Example:
        >>> import relayout
        >>> with relayout.open("llama-3.1-8b-tp8", rank=3) as checkpoint:
        ...     checkpoint.held_slice("model.layers.0.self_attn.q_proj.weight").part.by_axis
        ((0, ((48, 16),)),)
    """

    shape: tuple[int, ...]
    """The shape of the whole tensor, in elements."""
    part: Slice
    """The dims that are cut, and the ranges along each that the rank holds; or all of the tensor."""


class _Reader(Protocol):
    """Reads tensors, by their rows in `Pieces.columns`. Thread-safe."""

    def tensor(self, row: int) -> torch.Tensor:
        """Return a whole tensor."""

    def part(self, row: int, index: Any) -> torch.Tensor:
        """Return the elements that a valid index selects, in new memory."""

    def all(self) -> list[torch.Tensor]:
        """Return all tensors, whole, in the order of their rows."""


class TensorSlice:
    """A tensor that can be read in parts; returned by `get_slice`.

    Thread-safe, and usable after the checkpoint has been closed.

    Example:
        >>> import relayout
        >>> with relayout.safe_open("llama-3.1-8b-tp8") as whole:
        ...     whole.get_slice("lm_head.weight")[:2, 8:].shape
        torch.Size([2, 120])
    """

    def __init__(self, reader: _Reader, pieces: Pieces, row: int) -> None:
        self._reader = reader
        self._row = row
        self._name = pieces.columns.names[row]
        self._dtype = pieces.columns.dtypes[row]
        self._shape = pieces.columns.shapes[row]

    def __repr__(self) -> str:
        return f"<TensorSlice {self._name!r}: {self._dtype} {list(self._shape)}>"

    def get_shape(self) -> list[int]:
        """Return the shape in elements: of the rank's slice, or of the whole tensor."""
        return list(self._shape)

    def get_dtype(self) -> str:
        """Return the dtype, as safetensors writes it."""
        return self._dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return the elements that torch's basic indexing selects, in new memory; for framework "np" too.

        With integers, slices and `...`, only the elements selected along dim 0 and along the dim of the cut are read.

        Raises:
            IndexError: the index is out of range.
            PlanError: the dtype is F4 and the index cuts the last dim; or torch's FakeTensorMode is on.
            FormatError, OSError: as `load`.
        """
        check_mode()
        selected = selection(index, self._shape)
        if self._dtype == "F4" and (selected is None or (selected and selected[-1] != slice(None))):
            raise PlanError(
                "torch stores F4 in pairs, which cannot be sliced along the last dim",
                tensor=self._name,
                code="unsupported",
            )
        with error_hints():
            return self._reader.part(self._row, index)


class CheckpointView(Closable):
    """Tensors of a checkpoint under the names of its source: one rank's slices, or whole tensors.

    Thread-safe, and usable in a forked child. A read while another thread closes the view returns the tensor or raises
    PlanError.

    Example:
        >>> import relayout
        >>> checkpoint = relayout.open("llama-3.1-8b-tp8", rank=3, names="**.norm.weight")
        >>> checkpoint
        <CheckpointView 'llama-3.1-8b-tp8': rank 3 of 8, 1 tensors>
        >>> checkpoint.close()
    """

    def __init__(
        self, path: str, rank: int, num_ranks: int, pieces: Pieces, reader: _Reader, *, is_whole: bool = False
    ) -> None:
        self.path = path
        """The folder or URL, as given."""
        self.rank = rank
        """The rank, from 0; 0 for whole tensors."""
        self.num_ranks = num_ranks
        """The tensor-parallel degree; 1 for whole tensors."""
        self._is_whole = is_whole
        self._pieces = pieces
        self._open: tuple[_Reader, Mapping[str, int]] | None
        """The reader, and the row of each name; None after `close`."""
        self._open = reader, {name: row for row, name in enumerate(pieces.columns.names)}

    def __repr__(self) -> str:
        what = "whole tensors" if self._is_whole else f"rank {self.rank} of {self.num_ranks}"
        state = ", closed" if self._open is None else ""
        return f"<CheckpointView {self.path!r}: {what}, {len(self._pieces.columns.names):,} tensors{state}>"

    def keys(self) -> list[str]:
        """Return the names of the tensors, in file order.

        Raises:
            PlanError: the checkpoint was closed, as for all methods.
        """
        self._opened()
        return list(self._pieces.columns.names)

    def offset_keys(self) -> list[str]:
        """Return the names, in file order, like `keys`."""
        return self.keys()

    def metadata(self) -> dict[str, str] | None:
        """Return the `__metadata__` of the rank's first file, or the entries shared by all source files; None if empty.

        Raises:
            FormatError: a header is damaged.
        """
        self._opened()
        return dict(self._pieces.metadata()) or None

    def __getitem__(self, name: str) -> torch.Tensor:
        """Read a tensor; see `get_tensor`."""
        return self.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, as a dict does; `in` tests for one."""
        return iter(self.keys())

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor: a private mapping of its file, or a copy.

        It is a mapping if the device is the CPU and the slice is stored in the requested form.

        Raises:
            PlanError: the tensor does not exist, or torch's FakeTensorMode is on.
            FormatError, OSError: as `load`.
        """
        check_mode()
        reader, row = self._find(name)
        with error_hints():
            return reader.tensor(row)

    def get_tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors by name, in file order; for errors see `get_tensor`."""
        check_mode()
        reader, _ = self._opened()
        with error_hints():
            return dict(zip(self._pieces.columns.names, reader.all(), strict=True))

    def get_slice(self, name: str) -> TensorSlice:
        """Return a tensor that can be read in part.

        Raises:
            PlanError: the tensor does not exist.
        """
        reader, row = self._find(name)
        return TensorSlice(reader, self._pieces, row)

    def held_slice(self, name: str) -> HeldSlice:
        """Return the part of the whole tensor that the rank holds.

        Raises:
            PlanError: the tensor does not exist.
        """
        columns = self._pieces.columns
        _, row = self._find(name)
        return HeldSlice(tuple(columns.source_shapes[row]), columns.parts[row])

    def _opened(self) -> tuple[_Reader, Mapping[str, int]]:
        """Return the reader, and the row of each name; raise PlanError if they were released."""
        state = self._open  # Another thread may close the view meanwhile.
        if state is None:
            raise PlanError("is closed", path=self.path)
        return state

    def _find(self, name: str) -> tuple[_Reader, int]:
        """Return the reader, and the tensor's row."""
        reader, rows = self._opened()
        if not isinstance(name, str):
            raise PlanError(f"name: {shown(name)}, expected the name of a tensor", path=self.path, code="option")
        if name not in rows:
            whose = "" if self._is_whole else f"rank {self.rank} "
            raise PlanError(f"{whose}has no tensor {name!r}{did_you_mean(name, rows)}", path=self.path, code="missing")
        return reader, rows[name]

    def close(self) -> None:
        """Release the tensors. Tensors and slices that were returned before remain usable."""
        self._open = None


class _Mapped:
    """Reader of tensors that are mapped pages of the files, which are read when they are first used."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], names: Sequence[str], device: str | torch.device) -> None:
        self._tensors = [tensors[name] for name in names]
        self._device = device

    def tensor(self, row: int) -> torch.Tensor:
        return to_device(self._tensors[row], self._device)

    def part(self, row: int, index: Any) -> torch.Tensor:
        return to_device(self._tensors[row][index].clone(), self._device)

    def all(self) -> list[torch.Tensor]:
        return [self.tensor(row) for row in range(len(self._tensors))]


class _OnDemand:
    """Reader that reads each tensor on demand."""

    def __init__(self, pieces: Pieces, options: Options) -> None:
        self._pieces = pieces
        self._options = options

    def tensor(self, row: int) -> torch.Tensor:
        return self.part(row, ...)

    def part(self, row: int, index: Any) -> torch.Tensor:
        import torch

        columns = self._pieces.columns
        shape = columns.shapes[row]
        # Let torch check the index, on a tensor without memory.
        torch.empty(shape, device="meta")[index]
        selected = selection(index, shape)
        wanted = columns.parts[row]
        if selected is not None and shape:
            for axis in {0, *self._pieces.axes(row)}:
                start, length = bounds(selected[axis], shape[axis])
                wanted = _narrowed(wanted, axis, columns.source_shapes[row][axis], start, length)
                selected[axis] = within(selected[axis], length)
        [tensor] = self._read({row: wanted})
        return tensor[index if selected is None else tuple(selected)]

    def all(self) -> list[torch.Tensor]:
        return self._read(dict(enumerate(self._pieces.columns.parts)))

    def _read(self, wanted: Mapping[int, Slice]) -> list[torch.Tensor]:
        """Read parts of the whole tensors, by row, into one allocation."""
        return list(load_arena(pack(parts_of(self._pieces, wanted)), self._options).values())


class _AsNumpy:
    """Reader that returns the tensors of another reader as numpy arrays, which share their memory."""

    def __init__(self, reader: _Reader, pieces: Pieces) -> None:
        self._reader = reader
        self._columns = pieces.columns

    def tensor(self, row: int) -> Any:
        return self._array(row, self._reader.tensor)

    def part(self, row: int, index: Any) -> Any:
        return self._array(row, lambda row: self._reader.part(row, index))

    def all(self) -> list[Any]:
        rows = range(len(self._columns.names))
        dtypes = [self._dtype(row) for row in rows]  # Before any tensor is read.
        return list(map(to_numpy, self._reader.all(), dtypes))

    def _array(self, row: int, read: Callable[[int], torch.Tensor]) -> Any:
        dtype = self._dtype(row)
        return to_numpy(read(row), dtype)

    def _dtype(self, row: int) -> np.dtype[Any]:
        return numpy_dtype(self._columns.names[row], self._columns.dtypes[row])


Selection: TypeAlias = list[int | slice]
"""An integer or slice for each axis."""


def selection(index: Any, shape: tuple[int, ...]) -> Selection | None:
    """Expand an index of integers, slices and `...` to one entry for each axis; return None for any other index."""
    entries = list(index) if isinstance(index, tuple) else [index]
    if not any(entry is Ellipsis for entry in entries):
        entries.append(Ellipsis)
    held_slice = next(i for i, entry in enumerate(entries) if entry is Ellipsis)
    entries[held_slice : held_slice + 1] = [slice(None)] * (len(shape) - len(entries) + 1)
    return entries if all(type(entry) is int or isinstance(entry, slice) for entry in entries) else None


def bounds(part: int | slice, size: int) -> Range:
    """Return (start, length) of the elements along an axis from the first to the last selected one."""
    if isinstance(part, int):
        return part % size, 1
    selected = range(size)[part]
    return (selected.start, selected[-1] + 1 - selected.start) if selected else (0, 0)


def within(part: int | slice, length: int) -> int | slice:
    """Return a selection relative to the start of its bounds, which span `length` elements."""
    return 0 if isinstance(part, int) else slice(0, length, part.step)


def _narrowed(part: Slice, axis: int, size: int, start: int, length: int) -> Slice:
    """Return a part of a slice: `length` of the elements that it has along an axis, from its element `start` on.

    The axis of the whole tensor has `size` elements.
    """
    cut = dict(part.by_axis or ())
    whole = cut.get(axis, ((0, size),))
    if length == sum(count for _, count in whole):
        return part
    ranges = []
    for first, count in whole:
        low, high = max(start, 0), min(start + length, count)
        if low < high:
            ranges.append((first + low, high - low))
        start -= count
    return Slice.of(cut | {axis: ranges})


def open(  # noqa: A001 (`relayout.open`)
    path: str | os.PathLike[str],
    rank: int | None = None,
    *,
    device: str | torch.device = "cpu",
    names: Sequence[str] | str | None = None,
    verify: bool = False,
    tp: int | None = None,
    cache: CacheOption = None,
    trust: Trust = None,
) -> CheckpointView:
    """Open one rank of a checkpoint, or its whole tensors, as `safetensors.safe_open` opens a file.

    Use it in a `with` statement, or close it. Threads may share the result. Files of a rank as stored are mapped into
    memory, and pages are read when they are used. At another degree, for a plain checkpoint, or from an object store,
    each tensor or slice is read when it is requested.

    Args:
        path, rank, device, names, tp, cache, trust: as for `load`. With a policy, nothing is mapped.
        verify: read all tensors now and compare them with their digests.

    Returns:
        The rank's tensors: `keys`, `get_tensor`, `get_slice`, `metadata`, and `held_slice` in the whole tensor.

    Raises:
        FormatError: the manifest, the rank table or a file is damaged.
        PlanError: the rank does not exist, a pattern matches nothing, or the device cannot be used; or as `load`.
        OSError: the file system does not map files into memory.

    Example:
        >>> import relayout
        >>> with relayout.open("llama-3.1-8b-tp8", rank=3) as checkpoint:
        ...     checkpoint.get_tensor("model.norm.weight").shape
        torch.Size([128])
    """
    with error_hints():
        names = list(names) if isinstance(names, Iterator) else names  # They are used twice.
        request = LoadRequest(path=path, rank=rank, device=device, verify=verify, tp=tp, cache=cache, trust=trust)
        options, source = request.options(), request.source()
        pieces = source.pieces(names)
        warn_if_slow(source)
        reader = _reader(source, names, pieces, options)
        return CheckpointView(str(source.store), source.rank, source.num_ranks, pieces, reader)


def _reader(source: RankSource, names: Names, pieces: Pieces, options: Options) -> _Reader:
    if not source.is_as_stored:
        return _OnDemand(pieces, options)
    if options.verify:
        for _ in stream(source.contents(names), Options(verify=True)):
            pass
    plan = source.arena(names)
    if not can_map(plan.files):
        return _OnDemand(pieces, options)
    return _Mapped(map_tensors(plan), pieces.columns.names, options.device)


def safe_open(
    path: str | os.PathLike[str],
    framework: str = "pt",
    device: str | torch.device | None = "cpu",
    *,
    backend: str = "mmap",
    deltas: Paths = (),
    trust: Trust = None,
) -> CheckpointView:
    """Open a checkpoint as one file of whole tensors; a converted one is assembled from the ranks' files.

    It can replace `safetensors.safe_open`, for all shards at once. Only the manifest and the source record of a
    converted checkpoint are read now, or the headers of a plain one. Threads may share the result.

    Args:
        path, deltas, trust: as for `load`.
        framework: "pt" for tensors of torch, or "np" for numpy arrays, for jax and others. numpy has bfloat16 and 8-bit
            floating-point dtypes once `ml_dtypes` is imported, which jax does. Both frameworks need torch.
        device: as for `load`; None is the CPU, the only device of numpy.
        backend: "mmap" or "pread", as `safetensors.safe_open` has them. Either reads a tensor when it is requested.

    Returns:
        The whole tensors; see `open`.

    Raises:
        FormatError: the manifest or the source record, or a header, is damaged.
        PlanError: `path` does not exist (then also a FileNotFoundError), or the value of another argument is invalid.

    Example:
        >>> import relayout
        >>> with relayout.safe_open("llama-3.1-8b-tp8") as whole:
        ...     whole.get_slice("lm_head.weight").get_shape()
        [1000, 128]
    """
    if framework not in (*_TORCH, *_NUMPY):
        raise PlanError(f"framework {framework!r}, expected 'pt' or 'np'", code="option")
    if backend not in ("mmap", "pread"):
        raise PlanError(f"backend {backend!r}, expected 'mmap' or 'pread', as safetensors has them", code="option")
    with error_hints():
        options = LoadRequest(path=path, device="cpu" if device is None else device).options()
        if framework in _NUMPY and options.kind != "cpu":
            raise PlanError(f"device {str(device)!r}: arrays of numpy are on the CPU", code="option")
        pieces = find_tensors(path, deltas, trust).pieces
        reader: _Reader = _OnDemand(pieces, options)
        reader = _AsNumpy(reader, pieces) if framework in _NUMPY else reader
        return CheckpointView(os.fspath(path), 0, 1, pieces, reader, is_whole=True)


_TORCH = ("pt", "torch", "pytorch")
_NUMPY = ("np", "numpy")
"""Names of frameworks, as in safetensors."""


def can_map(files: Iterable[StoredFile]) -> bool:
    """Return True if files can be mapped: they are in a store with descriptors, and are not verified while reading."""
    return all(file.path is not None and not file.is_verified for file in files)


def map_tensors(plan: ArenaPlan) -> dict[str, torch.Tensor]:
    """Map whole pages of the files over a new arena, where offset and address are congruent, and copy the rest.

    A tensor takes no time or memory until it is used. Using a page that the drive cannot read, or that was
    truncated, kills the process (SIGBUS), as with every mapping.

    Args:
        plan: the files of the plan can be mapped.
    """
    with error_hints():
        tensors = plan.tensors()
        arena = allocate(plan.arena_nbytes)
        try:
            with ReadableFiles(plan.files, Access.BUFFERED) as opened:
                rest = tuple(part for read in plan.reads for part in _map(arena, opened, read))
                budget = plan_budget(None, None, HOST_BUFFERS)
                HostBackend(Access.BUFFERED).fill(arena, ReadJob(plan.files, rest, budget))
                _check_lengths(plan.files, opened)
            return make_views(arena.tensor(), tensors)
        except BaseException:
            arena.discard()
            raise


def _map(arena: HostArena, opened: ReadableFiles, read: Read) -> Iterator[Read]:
    """Map the whole pages of a read, and yield the parts that have to be copied."""
    transfer = read.transfer
    shift = transfer.target - transfer.source
    low, high = align_up(transfer.source, mmap.PAGESIZE), align_down(transfer.source_end, mmap.PAGESIZE)
    if transfer.count > 1 or shift % mmap.PAGESIZE or low >= high:
        yield read
        return
    address = ctypes.addressof(ctypes.c_char.from_buffer(arena.span(low + shift, high - low)))
    map_file(opened.fd(read.file), low, high - low, flags=_FLAGS, writable=True, address=address)
    for start, end in ((transfer.source, low), (high, transfer.source_end)):
        if start < end:
            yield Read(read.file, Transfer(start, start + shift, end - start))


def _check_lengths(files: Iterable[StoredFile], opened: ReadableFiles) -> None:
    """Check that no file was truncated meanwhile: using its pages would kill the process."""
    for index, file in enumerate(files):
        length = os.fstat(opened.fd(index)).st_size
        if length < file.nbytes:
            what = f"ends at byte {length}, expected {file.nbytes} bytes"
            raise FormatError(what, path=file.where, offset=length, code="truncated")
