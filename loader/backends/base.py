"""Backends read files into memory; these are their base class and protocols."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

from relayout.core.workers import Stop
from relayout.format.index import Read
from relayout.loader.backends.digests import Checks
from relayout.loader.budgets import HOST_BUFFERS, Budget
from relayout.loader.read_plan import Chunk, plan_chunks
from relayout.loader.sources.stored import StoredFile
from relayout.storage.protocols import Access, Refusal

if TYPE_CHECKING:
    import torch

Span = TypeVar("Span")
"""A piece of memory: a `memoryview` of host memory, or a 1-D uint8 tensor of device memory."""
SpanOut = TypeVar("SpanOut", covariant=True)


class Memory(Protocol[SpanOut]):
    """Memory to fill: an address space of its own, which starts at 0."""

    def span(self, offset: int, nbytes: int) -> SpanOut:
        """Writable memory at these offsets, which must be inside one piece.

        Its address is congruent with `offset`, modulo `BLOCK`.
        """


class Arena(Memory[SpanOut], Protocol[SpanOut]):
    """One allocation, freed when nothing refers to it."""

    def tensor(self) -> torch.Tensor:
        """All of it as a 1-D uint8 tensor, which keeps it alive. An empty arena may give a tensor of one byte."""

    def discard(self) -> None:
        """Free the memory now, even if something, such as a traceback, refers to it. It must not be used afterwards."""


class TensorMemory(Memory[SpanOut], Protocol[SpanOut]):
    """Memory of existing tensors."""

    @property
    def offsets(self) -> Sequence[int]:
        """Offset of each tensor's first byte."""


class Pool(Generic[Span]):
    """Arenas for one load. This pool does not reuse them."""

    def __init__(self, allocate: Callable[[int], Arena[Span]]) -> None:
        self._allocate = allocate

    def take(self, nbytes: int) -> tuple[Arena[Span], torch.Tensor]:
        """An uninitialized arena of at least `nbytes`, and its tensor. It returns when the last view of that is gone.

        Raises:
            MemoryError: there is not enough memory.
        """
        arena = self._allocate(nbytes)
        return arena, arena.tensor()

    def close(self) -> None:
        """Free idle arenas now, and others when they return."""


@dataclass(frozen=True, slots=True)
class ReadJob:
    """What to read, and how."""

    files: tuple[StoredFile, ...]
    reads: tuple[Read, ...]
    """Their targets do not overlap."""
    budget: Budget
    checks: Checks | None = None
    """Digests to check; `reads` has the bytes of each tensor in order."""
    on_arrival: Callable[[int, int], None] = lambda offset, nbytes: None
    """Called by any thread, with (offset, nbytes) of memory that has been filled."""
    stop: Stop = field(default_factory=Stop)
    """A request to stop ends the job; the job requests it when it fails."""


class RunningJob(Protocol):
    """A job that has been started."""

    def join(self, on_progress: Callable[[int], None] | None = None) -> None:
        """Wait until all memory is filled; the job's threads have ended and its files are closed on return.

        Calls `on_progress` now and then with the bytes that have arrived. On a device, work that is queued on the
        caller's current stream from now on sees the bytes.

        Raises:
            FormatError: a file is shorter than expected, or a digest differs.
            OSError: a read failed.
            Stopped: the job was cancelled, as this process is shutting down, or was forked during the job.
        """

    @property
    def current_stream(self) -> object:
        """The caller's current stream on the device; None for host memory, which needs no `settle`."""

    def settle(self) -> None:
        """Make the caller's current stream wait for all bytes that have arrived."""

    def cancel(self) -> None:
        """Stop; the job's threads have ended and its files are closed on return."""


class Backend(ABC, Generic[Span]):
    """One way to fill memory."""

    name: str
    """In messages; "auto" decides for each request."""
    device: str | torch.device = "cpu"
    """Of its memory, as `choice.resolve_device` returns it."""
    access: Access = Access.BUFFERED
    """How it opens files."""
    max_buffer_nbytes = HOST_BUFFERS
    """Most bytes of buffers by default."""
    is_zero_copy = True
    """Whether a chunk that has an arena offset is read there without a buffer."""
    is_experimental = False
    """Whether it has been tested with stand-ins only, never on the hardware that it is for."""

    def chunks(self, reads: Sequence[Read], alignment: int, budget: Budget) -> list[Chunk]:
        """The requests that it makes for these reads, of files that must be read at multiples of `alignment`.

        These are for threads that have one bounce buffer each.
        """
        return plan_chunks(reads, alignment, budget.cost, budget.buffer_nbytes)

    @abstractmethod
    def allocate(self, nbytes: int) -> Arena[Span]:
        """New memory of `nbytes` that it can fill.

        Raises:
            MemoryError: there is not enough memory.
        """

    def pool(self, nbytes: int) -> Pool[Span]:
        """A pool of arenas, most of which will have `nbytes`."""
        return Pool(self.allocate)

    @abstractmethod
    def wrap(self, tensors: Sequence[torch.Tensor]) -> TensorMemory[Span]:
        """The memory of tensors (1-D, uint8, on `device`), to be filled. The caller keeps them alive."""

    @abstractmethod
    def start(self, memory: Memory[Span], job: ReadJob) -> RunningJob:
        """Begin to fill memory from `allocate`, `pool` or `wrap`, or a combination of such, and return at once.

        Raises:
            FormatError: a file is missing or has another length than expected.
            OSError: a file cannot be opened as this backend needs it.
        """

    def fill(self, memory: Memory[Span], job: ReadJob, on_progress: Callable[[int], None] | None = None) -> None:
        """Fill memory, and wait for it: `start` and `join`, with their errors."""
        running = self.start(memory, job)
        try:
            running.join(on_progress)
        except BaseException:
            running.cancel()
            raise


@dataclass(frozen=True, slots=True)
class Request:
    """What a backend is needed for."""

    device: str | torch.device
    """The device of the tensors, as `choice.resolve_device` returns it."""
    files: Sequence[StoredFile]
    is_by_name: bool
    """Whether the caller named the backend, which may then change settings of the whole process."""

    @property
    def kind(self) -> str:
        """The kind of the device: "cpu", "cuda" or another of torch's."""
        return str(self.device).partition(":")[0]

    def refusal_without_descriptors(self, backend: str) -> Refusal | None:
        """Why a backend that needs file descriptors cannot read the files; None if it can."""
        without = next((file for file in self.files if file.path is None), None)
        if without is None:
            return None
        return Refusal(f"backend {backend!r} needs file descriptors, which {without.folder} does not have")

    def reason(self, how: str) -> str:
        """The reason for a choice, for a person."""
        return f"requested: {how}" if self.is_by_name else how


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend of a load."""

    backend: Backend[Any]
    reason: str
    """For a person."""
    gds: str | None = None
    """The way that GPUDirect Storage really takes, "GDS" or "P2PDMA"; None without it."""


Factory: TypeAlias = Callable[[Request], Choice | Refusal]
"""Makes a backend for a request."""
