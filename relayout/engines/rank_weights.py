"""What an engine is given to load: the tensors of the whole model, of which this rank's slices are at hand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relayout.checkpoint.converted import read_manifest, read_record
from relayout.core.sizes import parse_size
from relayout.errors import PlanError, shown
from relayout.format.index import MANIFEST_NAME

if TYPE_CHECKING:
    import torch

    from relayout.core.slices import Slice
    from relayout.engines.global_tensor import Usage
    from relayout.loader.sources.contents import Contents

_MAX_SHOWN_NAMES = 4


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What a person can set for a load in an engine; see `relayout.load`."""

    backend: str = "auto"
    threads: int | None = None
    memory: int | str | None = None
    """Bytes that may have been read and were not taken by the engine yet: a number, or a size such as "2GiB"."""
    verify: bool = False
    """Compare every slice with its digest."""
    strict: bool = False
    """Refuse what has to read the slices of other ranks, and slices that the engine does not use."""

    @staticmethod
    def parse(given: Mapping[str, object], where: str) -> EngineOptions:
        """The options as an engine hands them over.

        Raises:
            PlanError: an option is unknown, or its value is of another type.
        """
        types: dict[str, tuple[type, ...]] = {
            "backend": (str,),
            "threads": (int,),
            "memory": (int, str),
            "verify": (bool,),
            "strict": (bool,),
        }
        for name, value in given.items():
            if name not in types:
                raise PlanError(f"{where}: relayout has no option {shown(name)}, expected one of {', '.join(types)}")
            if type(value) not in types[name]:
                expected = " or ".join(one.__name__ for one in types[name])
                raise PlanError(f"{where}: {name} is {shown(value)}, expected {expected}")
        return EngineOptions(**{one.name: given[one.name] for one in fields(EngineOptions) if one.name in given})  # type: ignore[arg-type]

    @property
    def memory_nbytes(self) -> int | None:
        """`memory` in bytes.

        Raises:
            PlanError: it is no size.
        """
        return parse_size(self.memory) if isinstance(self.memory, str) else self.memory


@dataclass(frozen=True, slots=True)
class Folder:
    """How a checkpoint folder was converted."""

    num_ranks: int
    """The tensor-parallel degree."""
    expert_parallel: bool
    """Whether experts are owned whole."""


def find_folder(path: Path, engine: str) -> Folder | None:
    """What relayout.json says of the folder; None for a plain checkpoint.

    Args:
        engine: how to ask the engine for its own way to load, for messages.

    Raises:
        FormatError: relayout.json is damaged.
        PlanError: there is no such folder.
    """
    if not path.is_dir():
        raise PlanError(
            f"{path}: is no folder: relayout loads from folders. Download the model, run"
            f" `relayout convert FOLDER --tp N` and serve what it makes; or load with {engine}"
        )
    if not (path / MANIFEST_NAME).exists():
        return None
    manifest = read_manifest(path)
    return Folder(manifest.num_ranks, manifest.expert_parallel)


@dataclass(frozen=True, slots=True)
class Report:
    """What a load has done."""

    rank: int
    num_ranks: int
    num_tensors: int
    """That the engine was given."""
    nbytes: int
    """Of the rank's slices."""
    seconds: float
    """From the first to the last tensor, with what the engine did between them."""
    backend: str
    num_whole: int
    """Whole tensors that had to be read from the files of all ranks."""
    whole_nbytes: int
    unused: tuple[str, ...]
    """Tensors of which the rank's slice was read, and nothing was asked for."""

    def __str__(self) -> str:
        rate = self.nbytes / max(self.seconds, 1e-9)
        return (
            f"relayout: rank {self.rank} of {self.num_ranks}: {self.nbytes / 1e9:.3f} GB in {self.seconds:.2f} s"
            f" ({rate / 1e9:.2f} GB/s), {self.num_tensors} tensors, backend {self.backend},"
            f" {self.num_whole} whole tensors read ({self.whole_nbytes / 1e9:.3f} GB)"
        )


class RankWeights:
    """The tensors of a checkpoint for one rank of an engine: iterate once, then ask for the report.

    Tensors that the rank holds whole are plain; the others are global tensors. They are the engine's to keep and to
    write to. One thread may iterate; the tensors may be used by any.
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        num_ranks: int,
        options: EngineOptions,
        *,
        device: str | torch.device = "cpu",
        wanted: Callable[[str], bool] | None = None,
        only_held: bool = True,
        lazy: bool = False,
        progress: bool = False,
    ) -> None:
        """Look at nothing yet.

        Args:
            path: a converted folder, or a plain checkpoint, which is sliced while it is loaded.
            rank, num_ranks: the engine's tensor-parallel rank and degree; another degree than the folder's is put
                together from its ranks' slices.
            device: where slices shall lie.
            wanted: whether the engine wants a tensor; the bytes of others are not read. None: it wants all.
            only_held: give no tensors of which the rank holds nothing, such as other ranks' experts.
            lazy: read slices when they are used, through the page cache.
            progress: show a bar on stderr.
        """
        from relayout.engines.global_tensor import Usage

        self._path = path
        self._rank = rank
        self._num_ranks = num_ranks
        self._options = options
        self._device = "cpu" if lazy else device
        self._wanted = wanted
        self._only_held = only_held
        self._lazy = lazy
        self._progress = progress
        self._backend = options.backend
        self._nbytes = self._num_tensors = 0
        self._seconds: float | None = None
        self._cut: list[str] = []
        self._whole = _WholeTensors(path)
        self.usage: Usage = Usage(strict=options.strict)
        """What the engine has asked of global tensors."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors, in file order; those that the rank does not hold come last.

        Raises:
            FormatError, PlanError, OSError, MemoryError: as `relayout.iter_load`.
        """
        from relayout.loader.api import check_verifiable, warn_if_plain
        from relayout.loader.loading import options_of
        from relayout.loader.sources.checkpoint import ConvertedRank, find_checkpoint
        from relayout.loader.stream import stream

        started = time.perf_counter()
        checkpoint = find_checkpoint(self._path, self._rank, self._num_ranks)
        given, converted = self._options, isinstance(checkpoint, ConvertedRank)
        # Slices that are put together from several ranks' cannot be mapped.
        backend = "mapped" if self._lazy and converted else given.backend
        if converted:
            self._backend = _backend_of(self._path, self._rank, self._device, backend, given)
        if given.verify:
            check_verifiable(checkpoint)
        warn_if_plain(checkpoint)
        contents = checkpoint.contents(None)
        held = set(contents.names)
        if self._wanted is not None:
            contents = contents.rows([row for row, name in enumerate(contents.names) if self._wanted(name)])
        options = options_of(self._device, backend, given.verify, given.threads, given.memory_nbytes, self._progress)
        yield from self._slices(contents, stream(contents, options))
        if not self._only_held:
            yield from self._others(held)
        self._seconds = time.perf_counter() - started

    def report(self) -> Report:
        """What the load has done.

        Raises:
            PlanError: the engine has not taken all tensors; in strict mode also if it has not used one.
        """
        if self._seconds is None:
            raise PlanError(f"{self._path}: rank {self._rank}: the engine stopped after {self._num_tensors} tensors")
        unused = tuple(name for name in self._cut if name not in self.usage.used)
        if unused and self._options.strict:
            raise PlanError(f"{self._path}: rank {self._rank}: the engine did not use {listed(unused)}")
        return Report(
            self._rank,
            self._num_ranks,
            self._num_tensors,
            self._nbytes,
            self._seconds,
            self._backend,
            self.usage.count,
            self.usage.nbytes,
            unused,
        )

    def read(self, name: str, index: Any) -> torch.Tensor:
        """A part of a tensor, from the files of all ranks that hold some of it.

        Raises:
            FormatError, PlanError, OSError, MemoryError: as `relayout.safe_open`.
        """
        return self._whole.read(name, index)

    def _slices(
        self, contents: Contents, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        rows = zip(contents.dtypes, contents.source_shapes, contents.slices, tensors, strict=True)
        for dtype, shape, part, (name, tensor) in rows:
            self._nbytes += tensor.nbytes
            self._num_tensors += 1
            yield name, tensor if part.is_whole else self._global(name, dtype, shape, part, tensor)

    def _global(self, name: str, dtype: str, shape: tuple[int, ...], part: Slice, tensor: torch.Tensor) -> torch.Tensor:
        from relayout.engines.global_tensor import GlobalTensor
        from relayout.loader.tensors import torch_shape

        ranges: Sequence[tuple[int, int]] = part.ranges or ()
        if dtype == "F4" and part.axis == len(shape) - 1:  # torch counts pairs of them.
            ranges = [(start // 2, length // 2) for start, length in ranges]
        read = partial(self._whole.read, name)
        made = GlobalTensor.of(name, tensor, torch_shape(name, dtype, shape), part.axis, ranges, read, self.usage)
        if made is not tensor and not self._lazy:
            self._cut.append(name)
        return made

    def _others(self, held: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of which the rank holds nothing: read only if the engine uses them."""
        import torch

        from relayout.engines.global_tensor import GlobalTensor
        from relayout.loader.tensors import torch_dtype, torch_shape

        for name, dtype, shape in self._whole.columns():
            if name in held or (self._wanted is not None and not self._wanted(name)):
                continue
            self._num_tensors += 1
            shape = torch_shape(name, dtype, shape)
            if not shape:
                yield name, self._whole.read(name).to(self._device)
                continue
            nothing = torch.empty((0, *shape[1:]), dtype=torch_dtype(name, dtype), device=self._device)
            yield name, GlobalTensor.of(name, nothing, shape, 0, (), partial(self._whole.read, name), self.usage)


class _WholeTensors:
    """The whole tensors of a folder, converted or plain. Any number of threads may use it at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._opened: Any = None
        self._files: dict[str, Path] = {}

    def columns(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Name, dtype and shape of each tensor."""
        if (self._path / MANIFEST_NAME).exists():
            record = read_record(self._path, read_manifest(self._path))
            yield from zip(record.names, record.dtypes, record.shapes, strict=True)
        else:
            from relayout.checkpoint.source import read_catalogue

            for tensor in read_catalogue(self._path).tensors:
                yield tensor.name, tensor.dtype, tensor.shape

    def read(self, name: str, index: Any = ...) -> torch.Tensor:
        """A part of a tensor, in memory of its own; by default all of it."""
        with self._lock:
            if self._opened is None and not self._files:
                self._open()
        found: torch.Tensor
        if self._opened is not None:
            found = self._opened.get_slice(name)[index]
            return found
        from safetensors import safe_open

        with safe_open(self._files[name], framework="pt") as file:
            found = file.get_slice(name)[index]
            return found

    def _open(self) -> None:
        if (self._path / MANIFEST_NAME).exists():
            from relayout.loader.handles.whole import safe_open

            self._opened = safe_open(self._path)
        else:
            from relayout.checkpoint.source import read_catalogue

            catalogue = read_catalogue(self._path)
            self._files = {one.name: catalogue.files[one.file].path for one in catalogue.tensors}


def listed(names: Sequence[str]) -> str:
    """Names for a message: the first few, and how many more."""
    text = ", ".join(names[:_MAX_SHOWN_NAMES])
    return text if len(names) <= _MAX_SHOWN_NAMES else f"{text} and {len(names) - _MAX_SHOWN_NAMES} more"


def _backend_of(path: Path, rank: int, device: str | torch.device, backend: str, options: EngineOptions) -> str:
    from relayout.loader.diagnose.explain import explain

    found = explain(path, rank, device, backend=backend, threads=options.threads, memory=None)
    return f"{found.backend} ({100 * found.resident_nbytes / max(1, found.read_nbytes or found.nbytes):.0f} % resident)"
