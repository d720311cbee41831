"""The tensors that an engine is given to load: they have the shapes of the whole model, and hold this rank's slices.

The result of a load is reported as a log line, and in counters of the Prometheus registry. Engines serve `/metrics`
from another process than those that load. prometheus_client adds up the counters of processes if they have
`PROMETHEUS_MULTIPROC_DIR`, which engines set or take over; without it the counters stay in this process.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache, cached_property, partial
from math import prod
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from relayout.checkpoint.converted import is_converted
from relayout.core.arguments import at_least_one, size
from relayout.engines.placing import expected, first_layers, layers_of
from relayout.errors import FormatError, PlanError, about, shown
from relayout.storage.stores import find_input, scheme_of
from relayout.storage.system import describe_pages

if TYPE_CHECKING:
    from logging import Logger

    import torch
    from torch.distributed import ProcessGroup

    from relayout.checkpoint.delta import Paths
    from relayout.core.slices import Range, Slice
    from relayout.loader.backends.base import Options
    from relayout.loader.group.collectives import Group
    from relayout.loader.sources.checkpoint import LoadRequest
    from relayout.loader.sources.rank import RankSource, TensorColumns
    from relayout.loader.view import CheckpointView
    from relayout.storage.stores import Store

_MAX_SHOWN_NAMES = 4
_SMALL_NBYTES = 4096
"""Slices of fewer bytes are small."""
_UPDATE_NBYTES = 2**27
"""Bytes in flight while a live engine's weights are replaced; more if the largest slice needs it."""
_LAYER = re.compile(r"(?:(?:model|language_model|text_model|backbone|transformer|thinker|llm)\.)*layers\.([0-9]+)\.")
"""Matches the layers of the text model only: other layers, such as `vision_tower.layers.7.`, are numbered separately.
"""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of a load in an engine that a user can set; see `relayout.load`."""

    backend: str = "auto"
    threads: int | None = None
    memory: int | str | None = None
    """Bytes that may have been read and not yet taken by the engine: a number, or a size such as "2GiB"."""
    verify: bool = False
    """True to compare every slice with its digest."""
    strict: bool = False
    """True to raise an error instead of reading the slices of other ranks."""
    share: bool = True
    """True to let data-parallel replicas that load the same rank at the same time read it once, together."""
    cache: str | None = None
    """Folder that keeps conversions of plain checkpoints, and files of remote ones; see `relayout.load`."""
    live: bool = False
    """True to record the weights' locations in memory, so that an update of SGLang takes time only for changed
    elements."""
    source: str | None = None
    """URL of the weights, if the engine's model is a folder with only configuration and tokenizer."""

    @staticmethod
    def parse(values: Mapping[str, object], where: str) -> EngineOptions:
        """Parse the options in the form in which an engine passes them."""
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
        """Raise PlanError unless each option has a valid value."""
        if self.backend != "auto":
            from relayout.loader.backends.base import check_name

            check_name(self.backend)
        if self.threads is not None:
            at_least_one(self.threads, "threads")
        if self.memory is not None:
            at_least_one(size(self.memory, "memory"), "memory")


@contextmanager
def replicas(group: ProcessGroup | None) -> Iterator[Group | None]:
    """Enclose an engine's load, for the members of a group that load the same rank: an error of one fails all.

    Args:
        group: None: this process is alone.
    """
    if group is None:
        yield None
        return
    from relayout.loader.group.collectives import Group

    members = Group(group)
    try:
        yield members
        members.fail(PlanError("group: this load cannot be shared"))  # If nothing was shared.
    except BaseException as error:
        members.fail(error)
        raise


@dataclass(frozen=True, slots=True)
class OpenedRank:
    """The opened checkpoint of a load, and the tensors to read from it."""

    source: RankSource
    contents: TensorColumns
    """The tensors that are read."""
    unread: frozenset[str]
    """Names of tensors that the engine is also given, and that are read only if it uses them."""

    @property
    def is_mappable(self) -> bool:
        """True if slices can be mapped, to be read on use. Slices assembled from several ranks cannot be mapped."""
        from relayout.loader.view import can_map

        return self.source.is_as_stored and can_map(self.contents.files)


@dataclass(frozen=True, eq=False)
class RankWeights:
    """The tensors of a checkpoint for one rank of an engine. Nothing is read before they are opened or delivered."""

    path: str
    """A converted folder, or a plain checkpoint, which is sliced while it is loaded."""
    rank: int
    """The engine's tensor-parallel rank."""
    num_ranks: int
    """The engine's degree; if the folder has another one, slices are assembled from those of the folder's ranks."""
    options: EngineOptions
    _: KW_ONLY
    store: Store | None = None
    """The store of `path`, if it is open already: a conversion stays in a cache while this object lives."""
    deltas: Paths | None = None
    """Deltas to apply to the converted folder, for an engine that has weights already. Every byte is verified."""
    device: str | torch.device = "cpu"
    """The device of the slices."""
    is_skipped: Callable[[str], bool] = lambda name: False
    """Returns True for tensors that the engine's own loader skips. The engine is not given these."""
    is_unused: Callable[[str], bool] = lambda name: False
    """Returns True for tensors that the engine is not expected to use. The engine is given these; if it does use one,
    it is read from the files of all ranks."""
    is_placed: Callable[[str], bool] | None = None
    """Returns True for tensors that the engine places by itself. It is given all of them, regardless of the rank that
    holds them, and the used ones are read, see `placing`. None: the engine uses the tensors that the rank holds."""
    small_first: bool = False
    """True to read and deliver slices of less than a page before all others; see `vllm_reload`."""
    lazy: bool = False
    """True to read slices when they are used, through the page cache, into CPU memory, regardless of `device`."""
    progress: bool = False
    """True to show a progress bar on stderr."""
    members: Group | None = None
    """Replicas that also load this rank of a converted checkpoint, and read it together; see `replicas`. The group's
    backend must support the device."""

    @cached_property
    def opened(self) -> OpenedRank:
        """The checkpoint, opened once."""
        source = self._request().source()
        contents = source.contents()
        is_placed = self.is_placed or (lambda name: False)
        rows = [row for row, name in enumerate(contents.names) if not (self.is_skipped(name) or is_placed(name))]
        if self.small_first:
            sizes = contents.sizes()
            rows.sort(key=lambda row: sizes[row] >= _SMALL_NBYTES)
        unread = {name for row in rows if contents.shapes[row] and self.is_unused(name := contents.names[row])}
        read = contents.rows([row for row in rows if contents.names[row] not in unread])
        return OpenedRank(source, read, frozenset(unread))

    @property
    def is_verified(self) -> bool:
        """True if every slice is compared with its digest."""
        return self.options.verify or self.deltas is not None

    def stream_options(self) -> Options:
        """Return the options for reading the slices."""
        from relayout.loader.stream import least_memory

        request = replace(self._request(), progress=self.progress)
        if request.memory is None and self.deltas is not None:
            request = replace(request, memory=max(_UPDATE_NBYTES, least_memory(self.opened.contents)))
        if self.lazy:  # The chosen backend may be for another device than the CPU.
            request = replace(request, device="cpu", backend="auto")
        return request.options()

    @cached_property
    def placed(self) -> TensorColumns:
        """The tensors that the engine places by itself, whole."""
        from relayout.loader.sources.rank import TensorColumns

        if self.is_placed is None:
            return TensorColumns((), (), ())
        contents = self._request(rank=0, tp=1).source().contents()
        rows = [row for row, name in enumerate(contents.names) if self.is_placed(name) and not self.is_skipped(name)]
        return replace(contents, source_shapes=contents.shapes).rows(rows)

    def _request(self, **others: Any) -> LoadRequest:
        """Return this object's request to the loader."""
        from relayout.loader.sources.checkpoint import LoadRequest

        request = LoadRequest(
            path=self.store or self.path,
            rank=self.rank,
            device=self.device,
            backend=self.options.backend,
            verify=self.is_verified,
            threads=self.options.threads,
            memory=self.options.memory,
            tp=self.num_ranks,
            cache=self.options.cache,
            deltas=self.deltas or (),
        )
        return replace(request, **others)

    def without_values(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors like the slices to read, without reading values: large ones take no physical memory."""
        import torch

        from relayout.loader.tensors import torch_dtype, torch_shape

        contents = self.opened.contents
        for name, dtype, shape in zip(contents.names, contents.dtypes, contents.shapes, strict=True):
            of_torch, size = torch_dtype(name, dtype), torch_shape(name, dtype, shape)
            nbytes = prod(size) * of_torch.itemsize
            memory = (torch.zeros if nbytes < _SMALL_NBYTES else torch.empty)(nbytes, dtype=torch.uint8)
            yield name, memory.view(of_torch).view(size)

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return an iterator over the slices, in file order, as this process reads them."""
        from relayout.loader.sources.checkpoint import invalidating
        from relayout.loader.stream import stream

        return invalidating(stream(self.opened.contents, self.stream_options()), self.opened.source)

    def deliver(self, held: Iterable[tuple[str, torch.Tensor]] | None = None) -> Delivery:
        """Begin a load. `held`: the slices, if they were read before."""
        return Delivery(self, held)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The result of a load."""

    rank: int
    num_ranks: int
    num_tensors: int = 0
    """Tensors that the engine was given."""
    nbytes: int = 0
    """Bytes of the rank's slices."""
    seconds: float = 0.0
    """Seconds from the first to the last tensor, including the engine's work between them."""
    backend: str = "auto"
    cache: str = "none"
    """State of the rank's files in a cache on the drive: "hit", "miss", or "none" (no cache)."""
    num_whole: int = 0
    """Whole tensors that had to be read from the files of all ranks."""
    whole_nbytes: int = 0
    memory: int = 0
    """The most bytes that the load was allowed to use in addition to the engine's tensors."""
    page_cache_nbytes: int | None = None
    """Change of the files' bytes in the page cache; None: unknown."""
    num_readers: int = 1
    """Replicas that read the slices together, each a part of them; 1: this process alone."""
    unused: tuple[str, ...] = ()
    """Tensors with a slice that was read and not used so far."""

    def __str__(self) -> str:
        rate = self.nbytes / max(self.seconds, 1e-9)
        cached = self.page_cache_nbytes
        page_cache = "" if cached is None else f", page cache {cached / 1e9:+.3f} GB"
        together = f", read once for {self.num_readers} replicas" if self.num_readers > 1 else ""
        return (
            f"relayout: rank {self.rank} of {self.num_ranks}: {self.nbytes / 1e9:.3f} GB in {self.seconds:.2f} s"
            f" ({rate / 1e9:.2f} GB/s), {self.num_tensors} tensors, backend {self.backend},"
            f" cache {self.cache}, {self.num_whole} whole tensors read ({self.whole_nbytes / 1e9:.3f} GB),"
            f" at most {self.memory / 2**20:.0f} MiB in addition to the tensors{page_cache}{together}"
            f", {describe_pages()}"
        )


class Delivery:
    """The tensors of one load on their way to an engine, and the result: iterate once, then call `report`.

    Tensors that the rank holds whole are plain; all other tensors are global tensors. The engine owns them. One thread
    may iterate; any thread may use the tensors.
    """

    def __init__(self, weights: RankWeights, held: Iterable[tuple[str, torch.Tensor]] | None = None) -> None:
        from relayout.engines.global_tensor import Usage

        self.weights = weights
        self._held = held
        self._usage = Usage(strict=weights.options.strict)
        self._placed = Usage(is_expected=True)
        self._view: CheckpointView | None = None
        self._num_tensors = 0
        self._nbytes = 0
        self._cut: list[str] = []
        """Names of the global tensors with slices that were read."""
        self._done: LoadReport | None = None

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors, in file order; unread tensors come last.

        Of the tensors that the engine places by itself, the first layers come before all other tensors, and the rest
        after them. By the time the last slice is read, engines that load in threads have used the first layers.
        """
        from relayout.loader.sources.checkpoint import warn_if_slow
        from relayout.loader.sources.rank import cached_nbytes

        started = time.perf_counter()
        opened = self.weights.opened
        report, cached = self._expected(opened), cached_nbytes(opened.contents.files)
        warn_if_slow(opened.source)
        columns, placed = opened.source.columns(), self.weights.placed
        layers = layers_of(name for name in placed.names if not self.weights.is_unused(name))
        first = {name for layer in first_layers(layers) for name in layer.names.values()}
        yield from self._unread_of(placed, first)
        yield from self._read(columns, set(opened.contents.names))
        yield from self._unread_of(columns, opened.unread)
        yield from self._expected_of(placed, set(expected(layers, self._placed.whole)), first)
        seconds, now = time.perf_counter() - started, cached_nbytes(opened.contents.files)
        self._done = replace(
            report,
            num_tensors=self._num_tensors,
            nbytes=self._nbytes + self._placed.nbytes,
            seconds=seconds,
            page_cache_nbytes=None if cached is None or now is None else now - cached,
        )

    def report(self) -> LoadReport:
        """Return the result of the load. Raise PlanError if the engine did not take all tensors."""
        if self._done is None:
            what = f"rank {self.weights.rank}: the engine stopped after {self._num_tensors} tensors"
            raise PlanError(what, path=self.weights.path)
        usage = self._usage
        unused = tuple(name for name in self._cut if name not in usage.used)
        return replace(self._done, num_whole=usage.count, whole_nbytes=usage.nbytes, unused=unused)

    def read(self, name: str, index: Any) -> torch.Tensor:
        """Read a part of a tensor, from the files of all ranks that hold some of it. Any thread may call this."""
        return self._whole.get_slice(name)[index]

    @property
    def _whole(self) -> CheckpointView:
        """The whole tensors of the folder, converted or plain; opened when one is needed."""
        from relayout.loader import view

        path, deltas = self.weights.path, self.weights.deltas or ()
        with self._usage.lock:
            if self._view is None:
                is_ready = is_converted(find_input(path))
                self._view = view.safe_open(path, deltas=deltas) if is_ready else view.open(path, 0, tp=1)
            return self._view

    def _expected(self, opened: OpenedRank) -> LoadReport:
        """Return the part of the report that is known before anything is read."""
        from relayout.loader.sources.checkpoint import held_entry
        from relayout.loader.stream import most_memory

        weights, contents, options = self.weights, opened.contents, self.weights.stream_options()
        entry, is_mapped = held_entry(opened.source), weights.lazy and opened.is_mappable
        chosen = options.choose(contents.files)[0].name
        is_streamed = not is_mapped or weights.is_verified  # Digests are compared before anything is mapped.
        return LoadReport(
            weights.rank,
            weights.num_ranks,
            backend="mapped" if is_mapped else chosen,
            cache="none" if entry is None else "miss" if entry.was_filled else "hit",
            memory=most_memory(contents, options) if is_streamed else 0,
            num_readers=1 if weights.members is None else weights.members.num_members,
        )

    def _read(self, columns: TensorColumns, left: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors to read, named in `left`. Raise FormatError if one is missing in the end."""
        path = self.weights.path
        with about(path=path):  # An engine has more than one folder: a draft model's, adapters.
            for name, tensor in self._slices(columns, self._tensors()):
                left.discard(name)
                yield name, tensor
        if left:
            raise FormatError(f"{listed(sorted(left))}: read, but not passed to the engine", path=path)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        weights, opened = self.weights, self.weights.opened
        if self._held is not None:
            return iter(self._held)
        if weights.members is not None:
            from relayout.loader.group.sharing import stream_together

            return stream_together(lambda: (opened.source, opened.contents, weights.stream_options()), weights.members)
        if not (weights.lazy and opened.is_mappable):
            return weights.stream()
        from relayout.loader.sources.rank import pack
        from relayout.loader.view import map_tensors

        if weights.is_verified:
            for _ in weights.stream():
                pass
        return iter(map_tensors(pack(opened.contents)).items())

    def _slices(
        self, columns: TensorColumns, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        from relayout.engines.global_tensor import GlobalTensor
        from relayout.loader.tensors import torch_shape

        row_of = {name: row for row, name in enumerate(columns.names)}
        for name, tensor in tensors:
            row = row_of[name]
            part = columns.parts[row]
            self._nbytes += tensor.nbytes
            self._num_tensors += 1
            if part.is_whole:
                yield name, tensor
                continue
            dtype, shape = columns.dtypes[row], columns.source_shapes[row]
            with about(path=self.weights.path, tensor=name):
                ranges: Sequence[Range] = part.ranges or ()
            if dtype == "F4":  # torch counts pairs of them.
                shape, ranges = torch_shape(name, dtype, shape), _paired(shape, part)
            read = partial(self.read, name)
            whole = GlobalTensor.of(name, tensor, shape, part.axis, ranges, read, self._usage)
            if whole is not tensor and not self.weights.lazy:
                self._cut.append(name)
            yield name, whole

    def _unread_of(self, columns: TensorColumns, names: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors of these names unread: they are read where they are used."""
        import torch

        from relayout.engines.global_tensor import GlobalTensor
        from relayout.loader.tensors import torch_dtype, torch_shape

        weights = self.weights
        usage = self._usage if weights.placed is not columns else self._placed
        device = "cpu" if weights.lazy else weights.device
        for name, dtype, source_shape in zip(columns.names, columns.dtypes, columns.source_shapes, strict=True):
            if name not in names:
                continue
            self._num_tensors += 1
            shape = torch_shape(name, dtype, source_shape)
            if not shape:
                yield name, self.read(name, ...).to(device)
                continue
            nothing = torch.empty((0, *shape[1:]), dtype=torch_dtype(name, dtype), device=device)
            yield name, GlobalTensor.of(name, nothing, shape, 0, (), partial(self.read, name), usage)

    def _expected_of(
        self, placed: TensorColumns, names: Collection[str], given: Collection[str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the placed tensors in `names`, read; then all other placed tensors except `given`, unread."""
        from relayout.loader.sources.checkpoint import invalidating
        from relayout.loader.stream import stream

        rows = [row for row, name in enumerate(placed.names) if name in names]
        tensors = stream(placed.rows(rows), self.weights.stream_options()) if rows else iter(())
        for name, tensor in invalidating(tensors, self.weights.opened.source):
            self._num_tensors += 1
            self._nbytes += tensor.nbytes
            yield name, tensor
        yield from self._unread_of(placed, set(placed.names) - set(names) - set(given))


def publish(report: LoadReport, logger: Logger) -> None:
    """Log a load, and count it if prometheus_client is installed. Never raises: a load does not fail for it."""
    logger.info("%s", report)
    try:
        for counter, amount in zip(_counters(), (1, report.nbytes, report.seconds), strict=True):
            counter.labels(report.backend, report.cache).inc(amount)
    except ImportError:
        pass
    except Exception as error:  # PROMETHEUS_MULTIPROC_DIR is not writable, or other code has registered the counters.
        logger.warning("relayout: the load is not counted by Prometheus: %s", error)


@cache
def _counters() -> tuple[Any, ...]:
    from prometheus_client import Counter

    labels = ("backend", "cache")
    return (
        Counter("relayout_loads_total", "Loads of one rank's weights.", labels),
        Counter("relayout_loaded_bytes_total", "Bytes of the ranks' slices.", labels),
        Counter("relayout_load_seconds_total", "From the first tensor of a load to its last.", labels),
    )


def _paired(shape: tuple[int, ...], part: Slice) -> Sequence[Range]:
    """Return the ranges of a slice, counted in pairs of elements along the last axis."""
    ranges = part.ranges or ()
    return [(start // 2, length // 2) for start, length in ranges] if part.axis == len(shape) - 1 else ranges


def speculative(config: Any) -> Callable[[str], bool]:
    """Return a test for tensors of speculative layers (MTP), which a checkpoint's main model does not use.

    Args:
        config: of the text model.
    """
    num_layers: int | None = config.num_hidden_layers if getattr(config, "num_nextn_predict_layers", None) else None

    def is_speculative(name: str) -> bool:
        layer = layer_of(name)
        is_behind = num_layers is not None and layer is not None and layer >= num_layers
        return is_behind or "mtp" in name.split(".")

    return is_speculative


def of_other_layers(stage: range, num_layers: int) -> Callable[[str], bool]:
    """Return a test for tensors of a text model's layers that another pipeline stage holds.

    Args:
        stage: the numbers of this stage's layers.
        num_layers: of all stages. Later layers, for speculation, belong to no stage.
    """

    def is_elsewhere(name: str) -> bool:
        layer = layer_of(name)
        return layer is not None and layer < num_layers and layer not in stage

    return is_elsewhere


def layer_of(name: str) -> int | None:
    """Return the number of the text model's layer that a tensor belongs to."""
    layer = _LAYER.match(name)
    return None if layer is None else int(layer[1])


def listed(names: Sequence[str]) -> str:
    """Return names for a message: the first few, and the number of further ones."""
    text = ", ".join(names[:_MAX_SHOWN_NAMES])
    return text if len(names) <= _MAX_SHOWN_NAMES else f"{text} and {len(names) - _MAX_SHOWN_NAMES} more"
