"""Backends, which read files into memory: the interface, the choice of a backend, and loads into a new arena."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

from relayout.core.extents import Grid
from relayout.core.workers import Stop
from relayout.errors import PlanError, shown
from relayout.format.index import Read
from relayout.loader.requests import HOST_BUFFERS, Budget, Request, plan_budget, plan_requests
from relayout.loader.sources.rank import ArenaPlan, StoredFile, cost_of
from relayout.loader.tensors import check_mode, make_views, to_device
from relayout.reporting import Progress, reporting
from relayout.storage.stores import Access

if TYPE_CHECKING:
    import torch

Span = TypeVar("Span")
"""A piece of memory: a `memoryview` of host memory, or a 1-D uint8 tensor of device memory."""
SpanOut = TypeVar("SpanOut", covariant=True)


class Memory(Protocol[SpanOut]):
    """Memory to fill: a separate address space that starts at 0."""

    def span(self, offset: int, nbytes: int) -> SpanOut:
        """Return writable memory at these offsets, which must be inside one piece.

        Its address is congruent with `offset`, modulo `BLOCK`.
        """


class Allocation(Memory[SpanOut], Protocol[SpanOut]):
    """One allocation, freed when the last reference to it is gone."""

    def tensor(self) -> torch.Tensor:
        """Return the allocation as a 1-D uint8 tensor, which keeps it alive. An empty arena may have one byte."""

    def discard(self) -> None:
        """Free the memory now, even if something, such as a traceback, refers to it. It must not be used afterwards."""


class TensorMemory(Memory[SpanOut], Protocol[SpanOut]):
    """Memory of existing tensors."""

    @property
    def offsets(self) -> Sequence[int]:
        """Offset of each tensor's first byte."""


class Pool(Generic[Span]):
    """Arenas for one load. This pool does not reuse them."""

    def __init__(self, allocate: Callable[[int], Allocation[Span]]) -> None:
        self._allocate = allocate

    def take(self, nbytes: int) -> tuple[Allocation[Span], torch.Tensor]:
        """Return an uninitialized arena of at least `nbytes`, and its tensor.

        The arena returns to the pool when the last view of the tensor is gone.

        Raises:
            MemoryError: there is not enough memory.
        """
        arena = self._allocate(nbytes)
        return arena, arena.tensor()

    def close(self) -> None:
        """Free idle arenas now, and arenas in use when they return."""


@dataclass(frozen=True, slots=True)
class ReadJob:
    """The files and ranges to read, with their budget and callbacks."""

    files: tuple[StoredFile, ...]
    reads: tuple[Read, ...]
    """Their targets do not overlap."""
    budget: Budget
    on_arrival: Callable[[int, int], None] = lambda offset, nbytes: None
    """Called by any thread, with (offset, nbytes) of memory that has been filled."""
    stop: Stop = field(default_factory=Stop)
    """Ends the job when a stop is requested. A job that fails requests it, too."""


class RunningJob(Protocol):
    """A job that has been started."""

    def join(self, on_progress: Callable[[int], None] | None = None) -> None:
        """Wait until all memory is filled; on return, the job's threads have ended and its files are closed.

        Calls `on_progress` now and then with the number of bytes that have arrived. On a device, work queued on the
        caller's current stream after the call sees the bytes.

        Raises:
            FormatError: a file is shorter than expected, or the digest of a chunk of a verified file differs.
            OSError: a read failed.
            Stopped: the job was cancelled because this process is shutting down or was forked during the job.
        """

    @property
    def current_stream(self) -> object:
        """The caller's current stream on the device; None for host memory, which does not need `settle`."""

    def settle(self) -> None:
        """Make the caller's current stream wait for all bytes that have arrived."""

    def cancel(self) -> None:
        """Stop; on return, the job's threads have ended and its files are closed."""


class Backend(ABC, Generic[Span]):
    """A method of filling memory from files."""

    name: str
    """The name used in messages. "auto" decides for each request."""
    device: str | torch.device = "cpu"
    """The device of its memory, as `resolve_device` returns it."""
    reason: str = ""
    """Why a load uses this backend, for a person."""
    gds: str | None = None
    """The path that GPUDirect Storage takes: "GDS" or "P2PDMA". None: it is not used, as in cuFile's compat mode."""
    access: Access = Access.BUFFERED
    """The mode in which it opens files."""
    max_buffer_nbytes = HOST_BUFFERS
    """Default limit of all buffers, in bytes."""
    is_zero_copy = True
    """True if a request that has an arena offset is read into the arena without a buffer."""
    is_experimental = False
    """True if it was only tested with stubs, never on its hardware."""

    def requests(
        self, reads: Sequence[Read], alignment: int, budget: Budget, grids: Sequence[Grid | None] = ()
    ) -> list[Request]:
        """Return the requests for these reads, of files that must be read at multiples of `alignment`.

        They are for threads that have one bounce buffer each. `grids` are as for `plan_requests`.
        """
        return plan_requests(reads, alignment, budget.cost, budget.buffer_nbytes, grids)

    @abstractmethod
    def allocate(self, nbytes: int) -> Allocation[Span]:
        """Return new memory of `nbytes` that this backend can fill.

        Raises:
            MemoryError: there is not enough memory.
        """

    def pool(self, nbytes: int) -> Pool[Span]:
        """Return a pool of arenas. Most of them will have `nbytes`."""
        return Pool(self.allocate)

    @abstractmethod
    def wrap(self, tensors: Sequence[torch.Tensor]) -> TensorMemory[Span]:
        """Return the memory of tensors (1-D, uint8, on `device`), to be filled. The caller keeps them alive."""

    @abstractmethod
    def start(self, memory: Memory[Span], job: ReadJob) -> RunningJob:
        """Begin to fill memory from `allocate`, `pool` or `wrap`, or a combination of these, and return at once.

        Raises:
            FormatError: a file is missing or has another length than expected.
            OSError: a file cannot be opened in the mode that this backend needs.
        """

    def fill(self, memory: Memory[Span], job: ReadJob, on_progress: Callable[[int], None] | None = None) -> None:
        """Fill memory, and wait for it: `start` and `join`, with their errors."""
        running = self.start(memory, job)
        try:
            running.join(on_progress)
        except BaseException:
            running.cancel()
            raise


Probe: TypeAlias = "Callable[[str | torch.device, Sequence[StoredFile], bool], Backend[Any] | str]"
"""Function that returns the backend for the device of the tensors and the files to read, or why it cannot be used.

The reason begins with the backend's name. The last argument is True if the caller named the backend. The backend may
then change settings of the whole process.
"""

REGISTRY: dict[str, tuple[str | None, Probe | str]] = {
    "auto": (None, "relayout.loader.backends.host:offer_auto"),
    "direct": (None, "relayout.loader.backends.host:offer_direct"),
    "buffered": (None, "relayout.loader.backends.host:offer_buffered"),
    "pinned": ("cuda", "relayout.loader.backends.cuda:offer_pinned"),
    "gds": ("cuda", "relayout.loader.backends.cuda:offer_gds"),
    "cufile-compat": ("cuda", "relayout.loader.backends.cuda:offer_compat"),
}
"""For each backend, the kind of device that it loads to (None: any), and its probe or the MODULE:FUNCTION to import."""

_AUTO = {"cuda": ("gds", "pinned")}
"""Backends that "auto" tries for a kind of device, the best first. Other kinds use the "auto" entry of `REGISTRY`."""


def check_name(name: str) -> None:
    """Raise PlanError unless a backend of this name exists."""
    if not isinstance(name, str) or name not in REGISTRY:
        raise PlanError(f"backend {name!r}, expected one of {', '.join(REGISTRY)}", code="option")


def kind_of(device: str | torch.device) -> str:
    """Return the kind of a device: "cpu", "cuda" or another device type of torch."""
    return str(device).partition(":")[0]


def refuse_without_descriptors(backend: str, files: Sequence[StoredFile]) -> str | None:
    """Return why a backend that needs file descriptors cannot read the files; None if it can."""
    without = next((file for file in files if file.path is None), None)
    if without is None:
        return None
    return f"backend {backend!r} needs file descriptors, which {without.folder} does not have"


def resolve_device(device: str | torch.device) -> str | torch.device:
    """Return the device with its index: "cuda" is the current CUDA device; the CPU is always "cpu".

    Raises:
        PlanError: torch cannot use the device; or as `tensors.check_mode`.
    """
    check_mode()
    if str(device) == "cpu":  # Saves the import of torch.
        return "cpu"
    import torch

    try:
        resolved: torch.device = torch.empty(0, device=device).device
    except TypeError:
        raise PlanError(f"device: {shown(device)}, expected a torch device, or its name", code="option") from None
    except (RuntimeError, AssertionError) as error:
        raise PlanError(f"device {str(device)!r}: {str(error).splitlines()[0]}", code="option") from None
    return "cpu" if resolved.type == "cpu" else resolved


@dataclass(frozen=True, slots=True)
class Options:
    """The checked options of a load."""

    device: str | torch.device = "cpu"
    """The device, as `resolve_device` returned it."""
    backend: str = "auto"
    verify: bool = False
    threads: int | None = None
    memory: int | None = None
    """Bytes."""
    progress: Progress = None

    @property
    def kind(self) -> str:
        """The kind of the device: "cpu", "cuda" or another device type of torch."""
        return kind_of(self.device)

    def backend_for(self, files: Sequence[StoredFile]) -> Backend[Any]:
        """Return the backend for these files; for "auto", the best one. Its `reason` explains the choice.

        Raises:
            PlanError: the named backend does not exist, or cannot be used here.
        """
        check_name(self.backend)
        files, is_by_name, refusals = self.verified_files(files), self.backend != "auto", list[str]()
        for name in (self.backend,) if is_by_name else _AUTO.get(self.kind, (self.backend,)):
            kind, probe = REGISTRY[name]
            if kind not in (None, self.kind):
                memory = "host memory" if kind == "cpu" else f"a {kind.upper()} device"
                refusals.append(f"backend {name!r} loads to {memory}, not to {str(self.device)!r}")
                continue
            offer: Probe = resolve_name(probe) if isinstance(probe, str) else probe
            found = offer(self.device, files, is_by_name)
            if not isinstance(found, str):
                reason = f"requested: {found.reason}" if is_by_name else found.reason
                state = ["experimental: never tested on a GPU"] if found.is_experimental else []
                found.reason = "; ".join([*refusals, reason, *state])
                return found
            refusals.append(found)
        raise PlanError("; ".join(refusals), code="unsupported")

    def choose(self, files: Sequence[StoredFile]) -> tuple[Backend[Any], Budget]:
        """Return the backend for these files, and its budget; for errors see `backend_for` and `plan_budget`."""
        backend = self.backend_for(files)
        return backend, plan_budget(self.threads, self.memory, backend.max_buffer_nbytes, cost_of(files))

    def verified_files(self, files: Sequence[StoredFile]) -> tuple[StoredFile, ...]:
        """Return the files to read: with `verify`, files that verify their bytes."""
        return tuple(file.verified() for file in files) if self.verify else tuple(files)


def load_arena(plan: ArenaPlan, options: Options) -> dict[str, torch.Tensor]:
    """Load tensors into a new arena."""
    backend, budget = options.choose(plan.files)
    job = ReadJob(options.verified_files(plan.files), plan.reads, budget)
    with reporting(options.progress, "loading", plan.nbytes) as report:
        arena = backend.allocate(plan.arena_nbytes)
        try:
            running = backend.start(arena, job)
            try:
                tensors = plan.tensors()
                if backend.device != options.device:
                    running.join(report)
                    return make_views(to_device(arena.tensor(), options.device), tensors)
                views = make_views(arena.tensor(), tensors)
                running.join(report)
                return views
            except BaseException:
                running.cancel()
                raise
        except BaseException:
            arena.discard()
            raise
