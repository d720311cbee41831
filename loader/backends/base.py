"""Backends: the ways from files into memory, behind one protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

from relayout.core.dtypes import num_bytes
from relayout.core.workers import Stop
from relayout.format.index import Read
from relayout.loader.backends.digests import Checks
from relayout.loader.budgets import Budget
from relayout.loader.placement import PlacedTensors
from relayout.loader.read_plan import Chunk
from relayout.loader.sources.contents import StoredFile
from relayout.storage.protocols import Access

if TYPE_CHECKING:
    import torch

Span = TypeVar("Span")
"""A piece of memory: a `memoryview` of host memory, a 1-D uint8 tensor of a device's."""
SpanOut = TypeVar("SpanOut", covariant=True)


class Memory(Protocol[SpanOut]):
    """Where bytes go: an address space of its own, which starts at 0."""

    def span(self, offset: int, nbytes: int) -> SpanOut:
        """Writable memory of these offsets, which must all have been asked for as one piece.

        Its address is congruent with `offset`, modulo `BLOCK`.
        """

    @property
    def whole(self) -> SpanOut | None:
        """All of it, where that is one allocation."""


class Arena(Memory[SpanOut], Protocol[SpanOut]):
    """Memory that is one allocation, freed when nothing refers to it."""

    def tensor(self) -> torch.Tensor:
        """All of it as a 1-D uint8 tensor, which keeps it alive; of an arena of no bytes, perhaps one byte more."""

    def discard(self) -> None:
        """Free the memory now, whatever still refers to it, such as the traceback of an error; nobody may use it."""


class Pieces(Memory[SpanOut], Protocol[SpanOut]):
    """Memory of tensors that exist already."""

    @property
    def offsets(self) -> Sequence[int]:
        """Of the tensors' first bytes."""


class Pool(Protocol[SpanOut]):
    """Arenas for one load, of which some may be used again."""

    def take(self, nbytes: int) -> tuple[Arena[SpanOut], torch.Tensor]:
        """An arena of at least `nbytes` with any content, and its tensor; given back when no view of that is left.

        Raises:
            MemoryError: there is no room for it.
        """

    def close(self) -> None:
        """Keep no memory, nor any that is still to be given back."""


@dataclass(frozen=True, slots=True)
class FreshArenas(Generic[Span]):
    """A pool that uses nothing again."""

    allocate: Callable[[int], Arena[Span]]

    def take(self, nbytes: int) -> tuple[Arena[Span], torch.Tensor]:
        """See `Pool.take`."""
        arena = self.allocate(nbytes)
        return arena, arena.tensor()

    def close(self) -> None:
        """See `Pool.close`."""


@dataclass(frozen=True, slots=True)
class ReadJob:
    """What is to be read, and how."""

    files: tuple[StoredFile, ...]
    reads: tuple[Read, ...]
    """They do not overlap where they go."""
    budget: Budget
    checks: Checks | None = None
    """Digests to check; `reads` brings the bytes of each tensor in order."""
    arrived: Callable[[int, int], None] | None = None
    """Called by any thread, with (offset, nbytes), for bytes that have arrived at an offset of the memory."""
    stop: Stop = field(default_factory=Stop)
    """Ends the job when it is requested; requested by the job when it fails."""

    def tell(self, offset: int, nbytes: int) -> None:
        """Call `arrived`, if anybody wants to know."""
        if self.arrived is not None:
            self.arrived(offset, nbytes)


def checks_of(tensors: PlacedTensors, stop: Stop) -> Checks:
    """What checks the digests of tensors that are loaded by a job that `stop` ends."""
    assert tensors.digests is not None
    sizes = [num_bytes(*one) or 0 for one in zip(tensors.dtypes, tensors.shapes, strict=True)]
    return Checks(tensors.names, tensors.offsets, sizes, tensors.digests, stop)


class RunningJob(Protocol):
    """A job that is under way."""

    def join(self, on_progress: Callable[[int], None] | None = None) -> None:
        """Return when every byte is where it belongs; all threads and files of the job are gone then.

        Calls `on_progress` now and then with the bytes that have arrived. On a device, what the caller's current
        stream does from now on sees the bytes.

        Raises:
            FormatError: a file is shorter than expected, or a digest differs.
            OSError: a read failed.
            Stopped: the job was given up before its end: this process is ending, or was forked in the middle of it.
        """

    @property
    def current_stream(self) -> object:
        """What the caller's work on the memory goes into now; None where everybody sees bytes that have arrived."""

    def settle(self) -> None:
        """Let what the caller's current stream does from now on see all bytes that have arrived."""

    def cancel(self) -> None:
        """Give up; all threads and files of the job are gone on return."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A backend that cannot do what is asked of it."""

    reason: str
    """Names the backend."""


class Backend(Protocol[Span]):
    """One way to fill memory."""

    @property
    def name(self) -> str:
        """What it is called in messages."""

    @property
    def device(self) -> str | torch.device:
        """Where its memory lies, as `choice.resolve_device` writes it."""

    @property
    def access(self) -> Access:
        """How it opens files."""

    @property
    def max_buffer_nbytes(self) -> int:
        """Bytes of buffers that it takes by default, at most."""

    @property
    def reads_when_used(self) -> bool:
        """Whether bytes are read when a tensor is used: tensors are all made at once, and nothing need be requested."""

    @property
    def is_zero_copy(self) -> bool:
        """Whether a chunk that has an arena offset goes there through no buffer."""

    def name_for(self, ways: Sequence[Access]) -> str:
        """The same name, or of a backend that decides for each request, the name of what it comes to.

        Requests go directly, through the page cache, or by both `ways`.
        """

    def chunks(self, reads: Sequence[Read], alignment: int, budget: Budget) -> list[Chunk]:
        """The requests that it makes for these reads, of files that must be read at multiples of `alignment`."""

    def allocate(self, nbytes: int) -> Arena[Span]:
        """New memory of `nbytes` that it can fill.

        Raises:
            MemoryError: there is no room for it.
        """

    def pool(self, nbytes: int) -> Pool[Span]:
        """The same for many arenas, most of which are asked to have `nbytes`."""

    def wrap(self, tensors: Sequence[torch.Tensor]) -> Pieces[Span] | Refusal:
        """Memory made of tensors (1-D, uint8, on `device`), which it can fill; the caller keeps them alive."""

    def start(self, memory: Memory[Span], job: ReadJob) -> RunningJob:
        """Begin to fill memory of `allocate`, `pool` or `wrap`, or put together of it, and return at once.

        Raises:
            FormatError: a file is missing or has another length than expected.
            OSError: a file cannot be opened as this backend needs it.
        """


@dataclass(frozen=True, slots=True)
class Request:
    """What a backend is wanted for."""

    device: str | torch.device
    """Where the tensors shall lie, as `choice.resolve_device` writes it."""
    files: Sequence[StoredFile]
    is_by_name: bool
    """Whether the caller named the backend: it then may do what has effects on the whole process."""

    @property
    def kind(self) -> str:
        """The kind of the device: "cpu", "cuda" or another of torch's."""
        return str(self.device).partition(":")[0]

    def refusal_without_descriptors(self, backend: str) -> Refusal | None:
        """Why a backend that needs descriptors cannot read the files; None if they have them."""
        without = next((file for file in self.files if file.path is None), None)
        if without is None:
            return None
        return Refusal(f"backend {backend!r} needs files with descriptors, which {without.folder} has not")

    def reason(self, how: str) -> str:
        """A reason for a person: whether it was asked for, and how it reads."""
        return f"asked for: {how}" if self.is_by_name else how


@dataclass(frozen=True, slots=True)
class Choice:
    """The way that a load takes."""

    backend: Backend[Any]
    reason: str
    """For a person."""
    gds: str | None = None
    """The way that GPUDirect Storage takes, "GDS" or "P2PDMA"; None without it."""


Factory: TypeAlias = Callable[[Request], Choice | Refusal]
"""Makes a backend for a request."""
