"""What an engine is given to load: the tensors of the whole model, of which this rank's slices are at hand."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from relayout.checkpoint.converted import is_converted, read_manifest_blob
from relayout.core.arguments import at_least_one, size
from relayout.core.digests import digest_hex
from relayout.errors import FormatError, PlanError, about, shown
from relayout.storage.pages import describe_pages
from relayout.storage.stores import find_input, scheme_of

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from relayout.checkpoint.delta import Paths
    from relayout.conversion.cached import CachedConversion
    from relayout.core.slices import Range, Slice
    from relayout.engines.global_tensor import Usage
    from relayout.loader.group.collectives import Group
    from relayout.loader.loading import Options
    from relayout.loader.sources.base import RankSource
    from relayout.loader.sources.columns import TensorColumns
    from relayout.loader.view import CheckpointView

_MAX_SHOWN_NAMES = 4
_UPDATE_NBYTES = 2**27
"""In flight while a live engine's weights are replaced; or what the largest slice needs."""
_LAYER = re.compile(r"(?:(?:model|language_model|text_model|backbone|transformer|thinker|llm)\.)*layers\.([0-9]+)\.")
"""Only of the text model: others, such as `vision_tower.layers.7.`, have numbers of their own."""


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
    """Refuse what has to read the slices of other ranks."""
    share: bool = True
    """Data-parallel replicas that load the same rank at the same time read it once, together."""
    cache: str | None = None
    """Folder that keeps conversions of plain checkpoints, and files of remote ones; see `relayout.load`."""
    source: str | None = None
    """URL of the weights, where the engine's model is a folder with configuration and tokenizer only."""

    @staticmethod
    def parse(values: Mapping[str, object], where: str) -> EngineOptions:
        """The options as an engine hands them over.

        Raises:
            PlanError: an option is unknown, or its value is of another type, or none that it can have.
        """
        types = get_type_hints(EngineOptions)
        for name, value in values.items():
            if name not in types:
                expected = ", ".join(types)
                raise PlanError(f"{where}: relayout has no option {shown(name)}, expected {expected}", code="option")
            allowed = [kind for kind in get_args(types[name]) or (types[name],) if kind is not type(None)]
            if type(value) not in allowed:
                expected = " or ".join(kind.__name__ for kind in allowed)
                raise PlanError(f"{where}: {name} is {shown(value)}, expected {expected}", code="option")
        options = EngineOptions(**values)  # type: ignore[arg-type]
        if options.source is not None and scheme_of(options.source) in (None, "hf"):
            what = f"source is {shown(options.source)}, expected a URL such as s3://BUCKET/PREFIX: name it as the model"
            raise PlanError(f"{where}: {what}", code="option")
        with about(part=where):
            options.check()
        return options

    def check(self) -> None:
        """Raise PlanError unless each option has a value that it can have."""
        if self.backend != "auto":
            from relayout.loader.backends.choice import check_name

            check_name(self.backend)
        if self.threads is not None:
            at_least_one(self.threads, "threads")
        if self.memory is not None:
            at_least_one(size(self.memory, "memory"), "memory")


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
    cache: str
    """Whether the rank's files were in a cache on the drive: "hit", "miss", or "none": it has no cache."""
    num_whole: int
    """Whole tensors that had to be read from the files of all ranks."""
    whole_nbytes: int
    memory: int
    """Most bytes that the load was allowed to take beside the engine's tensors."""
    page_cache_nbytes: int | None
    """Bytes of the files that the page cache has more, or less, than before; None: unknown."""
    num_readers: int
    """Replicas that have read the slices together, each a part of them; 1: this process alone."""
    unused: tuple[str, ...]
    """Tensors of which the rank's slice was read, and nothing has been asked for yet."""

    def __str__(self) -> str:
        rate = self.nbytes / max(self.seconds, 1e-9)
        cached = self.page_cache_nbytes
        page_cache = "" if cached is None else f", page cache {cached / 1e9:+.3f} GB"
        together = f", read once for {self.num_readers} replicas" if self.num_readers > 1 else ""
        return (
            f"relayout: rank {self.rank} of {self.num_ranks}: {self.nbytes / 1e9:.3f} GB in {self.seconds:.2f} s"
            f" ({rate / 1e9:.2f} GB/s), {self.num_tensors} tensors, backend {self.backend},"
            f" cache {self.cache}, {self.num_whole} whole tensors read ({self.whole_nbytes / 1e9:.3f} GB),"
            f" at most {self.memory / 2**20:.0f} MiB beside the tensors{page_cache}{together}"
            f", {describe_pages()}"
        )


@contextmanager
def replicas(group: ProcessGroup | None) -> Iterator[Group | None]:
    """Around all of an engine's load: the members of a group that load the same rank; an error of one fails all.

    Args:
        group: None: this process is alone.

    Raises:
        PlanError: this process is no member.
    """
    if group is None:
        yield None
        return
    from relayout.loader.group.collectives import Group

    members = Group(group)
    try:
        yield members
        members.fail(PlanError("group: this load cannot be shared"))  # If nothing was.
    except BaseException as error:
        members.fail(error)
        raise


@dataclass(eq=False, kw_only=True)
class RankWeights:
    """The tensors of a checkpoint for one rank of an engine: iterate once, then ask for the report.

    Tensors that the rank holds whole are plain; the others are global tensors. They are the engine's to keep. One
    thread may iterate; the tensors may be used by any. Nothing is read before.
    """

    path: str = field(kw_only=False)
    """A converted folder, or a plain checkpoint, which is sliced while it is loaded."""
    rank: int = field(kw_only=False)
    """The engine's tensor-parallel rank."""
    num_ranks: int = field(kw_only=False)
    """The engine's degree; if it is not the folder's, slices are put together from those of its ranks."""
    options: EngineOptions = field(kw_only=False)
    device: str | torch.device = "cpu"
    """Where slices shall lie."""
    is_skipped: Callable[[str], bool] = lambda name: False
    """Whether the engine's own loader is known to pass over a tensor, which it is not given then."""
    is_unused: Callable[[str], bool] = lambda name: False
    """Whether nothing of a tensor is expected to be used. The engine is given it; if it does use it, it is read from
    the files of all ranks."""
    only_held: bool = True
    """Give no tensors of which the rank holds nothing, such as other ranks' experts."""
    lazy: bool = False
    """Read slices when they are used, through the page cache, into the CPU's memory."""
    progress: bool = False
    """Show a bar on stderr."""
    members: Group | None = None
    """Of replicas that load this rank of a converted checkpoint, too, and read it together; see `replicas`. The group's
    backend serves the device."""
    kept: CachedConversion | None = None
    """The conversion in a cache that `path` is; not removed from there while this object lives."""
    deltas: Paths | None = None
    """For an engine that already has weights: what these make of the converted folder, every byte proven."""
    usage: Usage = field(init=False)
    """What the engine has asked of global tensors."""
    _view: CheckpointView | None = field(init=False, default=None)
    _seconds: float | None = field(init=False, default=None)
    _nbytes: int = field(init=False, default=0)
    _num_tensors: int = field(init=False, default=0)
    _memory: int = field(init=False, default=0)
    _page_cache_nbytes: int | None = field(init=False, default=None)
    _cut: list[str] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        from relayout.engines.global_tensor import Usage

        self.usage = Usage(strict=self.options.strict)
        self._backend = self.options.backend
        self._lease = None if self.kept is None else self.kept.lease
        if self.lazy:
            self.device = "cpu"
        if self.deltas is not None:
            self.options = replace(self.options, verify=True)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors, in file order; those that are not read come last.

        Raises:
            FormatError, PlanError, OSError, MemoryError: as `relayout.iter_load`.
        """
        from relayout.loader.api import warn_if_slow
        from relayout.loader.backends.choice import choose
        from relayout.loader.sources.stored import cached_nbytes
        from relayout.loader.stream import most_memory

        started = time.perf_counter()
        source, contents, unused = self._found
        options = self._load_options()
        del self._found  # It is not needed for long.
        is_mapped = self._maps(source, contents)
        chosen = choose(options.backend, options.device, contents.files).backend.name
        self._backend = "mapped" if is_mapped else chosen
        if not is_mapped or options.verify:  # Digests are compared in a stream, before anything is mapped.
            self._memory = most_memory(contents, options)
        cached = cached_nbytes(contents.files)
        warn_if_slow(source)
        columns, left = source.columns(), set(contents.names)
        with about(path=self.path):  # An engine has more than one folder: a draft model's, adapters.
            for name, tensor in self._slices(columns, self._tensors(source, contents, options)):
                left.discard(name)
                yield name, tensor
        if left:
            raise FormatError(f"{listed(sorted(left))}: read, but not passed to the engine", path=self.path)
        yield from self._unread(columns, unused)
        self._seconds = time.perf_counter() - started
        if cached is not None and (now := cached_nbytes(contents.files)) is not None:
            self._page_cache_nbytes = now - cached

    def _load_options(self) -> Options:
        from relayout.loader.loading import options_of
        from relayout.loader.stream import least_memory

        settings, contents = self.options, self._found[1]
        memory = settings.memory
        if memory is None and self.deltas is not None:
            memory = max(_UPDATE_NBYTES, least_memory(contents))
        backend = "auto" if self.lazy else settings.backend  # That may be for another device than the CPU.
        return options_of(self.device, backend, settings.verify, settings.threads, memory, self.progress)

    def layout(self) -> dict[str, tuple[object, ...]]:
        """What the rank holds of each tensor, by its name: dtype, shape, slice. For errors see `prove`."""
        columns = self._found[0].columns()
        rows = zip(columns.dtypes, map(tuple, columns.source_shapes), columns.parts, strict=True)
        return dict(zip(columns.names, rows, strict=True))

    def prove(self) -> str:
        """Read what will be iterated, and compare all digests; return that of relayout.json, of what deltas make too.

        Raises:
            FormatError, PlanError, OSError, MemoryError: as `relayout.iter_load`.
        """
        from relayout.loader.api import doubting
        from relayout.loader.stream import stream

        source, contents, _ = self._found
        with about(path=self.path):
            for _ in doubting(stream(contents, self._load_options()), source):
                pass
        return digest_hex(read_manifest_blob(source.store))

    def _tensors(
        self, source: RankSource, contents: TensorColumns, options: Options
    ) -> Iterator[tuple[str, torch.Tensor]]:
        if self.members is not None:
            from relayout.loader.group.sharing import stream_together

            return stream_together(lambda: (source, contents, options), self.members)
        from relayout.loader.api import doubting
        from relayout.loader.stream import stream

        if not self._maps(source, contents):
            return doubting(stream(contents, options), source)
        from relayout.loader.mapped import map_tensors
        from relayout.loader.pack import pack

        if options.verify:
            for _ in doubting(stream(contents, options), source):
                pass
        return iter(map_tensors(pack(contents)).items())

    def _maps(self, source: RankSource, contents: TensorColumns) -> bool:
        """Whether slices are mapped, to be read when they are used. Those that are put together cannot be."""
        from relayout.loader.mapped import can_map

        return self.lazy and source.is_as_stored and can_map(contents.files)

    @cached_property
    def _found(self) -> tuple[RankSource, TensorColumns, set[str]]:
        """The source, what of it is read, and the names of what is given unread."""
        from relayout.loader.api import find_source
        from relayout.loader.sources.checkpoint import lease_of

        verify, cache, deltas = self.options.verify, self.options.cache, self.deltas or ()
        source = find_source(self.path, self.rank, self.num_ranks, verify, cache, deltas=deltas)
        self._lease = lease_of(source) or self._lease
        contents = source.contents()
        rows = [row for row, name in enumerate(contents.names) if not self.is_skipped(name)]
        unused = {name for row in rows if contents.shapes[row] and self.is_unused(name := contents.names[row])}
        return source, contents.rows([row for row in rows if contents.names[row] not in unused]), unused

    def report(self) -> Report:
        """What the load has done.

        Raises:
            PlanError: the engine has not taken all tensors.
        """
        if self._seconds is None:
            what = f"rank {self.rank}: the engine stopped after {self._num_tensors} tensors"
            raise PlanError(what, path=self.path)
        unused = tuple(name for name in self._cut if name not in self.usage.used)
        return Report(
            self.rank,
            self.num_ranks,
            self._num_tensors,
            self._nbytes,
            self._seconds,
            self._backend,
            "none" if self._lease is None else "miss" if self._lease.was_filled else "hit",
            self.usage.count,
            self.usage.nbytes,
            self._memory,
            self._page_cache_nbytes,
            1 if self.members is None else self.members.num_members,
            unused,
        )

    def read(self, name: str, index: Any) -> torch.Tensor:
        """A part of a tensor, from the files of all ranks that hold some of it. Any thread may call this.

        Raises:
            FormatError, PlanError, OSError, MemoryError: as `relayout.safe_open`.
        """
        return self._whole.get_slice(name)[index]

    @property
    def _whole(self) -> CheckpointView:
        """The whole tensors of the folder, converted or plain; opened when one is needed."""
        from relayout.loader.view import open, safe_open

        with self.usage.lock:
            if self._view is None:
                is_ours = is_converted(find_input(self.path))
                self._view = safe_open(self.path, deltas=self.deltas or ()) if is_ours else open(self.path, 0, tp=1)
            return self._view

    def _slices(
        self, columns: TensorColumns, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        from relayout.engines.global_tensor import GlobalTensor
        from relayout.loader.tensors import torch_shape

        row_of = {name: row for row, name in enumerate(columns.names)}
        make, read, usage = GlobalTensor.of, self.read, self.usage
        for name, tensor in tensors:
            row = row_of[name]
            part = columns.parts[row]
            self._nbytes += tensor.nbytes
            self._num_tensors += 1
            if part.is_whole:
                yield name, tensor
                continue
            dtype, shape = columns.dtypes[row], columns.source_shapes[row]
            with about(path=self.path, tensor=name):
                ranges: Sequence[Range] = part.ranges or ()
            if dtype == "F4":  # torch counts pairs of them.
                shape, ranges = torch_shape(name, dtype, shape), _paired(shape, part)
            whole = make(name, tensor, shape, part.axis, ranges, partial(read, name, ...), usage)
            if whole is not tensor and not self.lazy:
                self._cut.append(name)
            yield name, whole

    def _unread(self, columns: TensorColumns, unused: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors that are read if they are used: those that should not be, and, if they are given, those not held."""
        import torch

        from relayout.engines.global_tensor import GlobalTensor
        from relayout.loader.tensors import torch_dtype, torch_shape

        given = [
            row for row in zip(columns.names, columns.dtypes, columns.source_shapes, strict=True) if row[0] in unused
        ]
        if not self.only_held:
            held, whole = set(columns.names), self._whole
            for name in whole.keys():  # noqa: SIM118 (it is no mapping)
                if name not in held and not self.is_skipped(name):
                    stored = whole.get_slice(name)
                    given.append((name, stored.get_dtype(), tuple(stored.get_shape())))
        for name, dtype, source_shape in given:
            self._num_tensors += 1
            shape = torch_shape(name, dtype, source_shape)
            if not shape:
                yield name, self.read(name, ...).to(self.device)
                continue
            nothing = torch.empty((0, *shape[1:]), dtype=torch_dtype(name, dtype), device=self.device)
            yield name, GlobalTensor.of(name, nothing, shape, 0, (), partial(self.read, name, ...), self.usage)


def _paired(shape: tuple[int, ...], part: Slice) -> Sequence[Range]:
    """The ranges of a slice, counted in pairs of elements along the last axis."""
    ranges = part.ranges or ()
    return [(start // 2, length // 2) for start, length in ranges] if part.axis == len(shape) - 1 else ranges


def speculative(config: Any) -> Callable[[str], bool]:
    """Whether a tensor is of layers for speculation (MTP), which a checkpoint's main model does not use.

    Args:
        config: of the text model.
    """
    num_layers: int | None = config.num_hidden_layers if getattr(config, "num_nextn_predict_layers", None) else None

    def is_speculative(name: str) -> bool:
        layer = layer_of(name)
        is_behind = num_layers is not None and layer is not None and layer >= num_layers
        return is_behind or "mtp" in name.split(".")

    return is_speculative


def layer_of(name: str) -> int | None:
    """The number of the layer of the text model that a tensor is of."""
    layer = _LAYER.match(name)
    return None if layer is None else int(layer[1])


def listed(names: Sequence[str]) -> str:
    """Names for a message: the first few, and how many more."""
    text = ", ".join(names[:_MAX_SHOWN_NAMES])
    return text if len(names) <= _MAX_SHOWN_NAMES else f"{text} and {len(names) - _MAX_SHOWN_NAMES} more"
