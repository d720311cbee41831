"""Backends: the ways from files into memory, behind one protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from relayout.core.workers import Stop
from relayout.format.index import Read
from relayout.loader.budgets import Budget
from relayout.loader.digests import Checks
from relayout.loader.read_plan import Chunk
from relayout.loader.sources.contents import Contents, StoredFile

Memory = TypeVar("Memory", contravariant=True)


@dataclass(frozen=True, slots=True)
class Fill:
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
    """Ends the fill when it is requested; requested by the fill when it fails."""

    def tell(self, offset: int, nbytes: int) -> None:
        """Call `arrived`, if anybody wants to know."""
        if self.arrived is not None:
            self.arrived(offset, nbytes)


def fill_of(
    contents: Contents,
    offsets: Sequence[int],
    reads: tuple[Read, ...],
    budget: Budget,
    *,
    verify: bool,
    arrived: Callable[[int, int], None] | None = None,
    stop: Stop | None = None,
) -> Fill:
    """The fill that brings tensors to `offsets` of a memory, by `reads`; with `verify`, their digests are checked."""
    stop = stop or Stop()
    checks = None
    if verify:
        assert contents.digests is not None
        checks = Checks(contents.names, offsets, contents.sizes(), contents.digests, stop)
    return Fill(contents.files, reads, budget, checks, arrived, stop)


class Filling(Protocol):
    """A fill that is under way."""

    def join(self, on_progress: Callable[[int], None] | None = None) -> None:
        """Return when every byte is where it belongs; all threads and files of the fill are gone then.

        Calls `on_progress` now and then with the bytes that have arrived. On a device, what the caller's current
        stream does from now on sees the bytes.

        Raises:
            FormatError: a file is shorter than expected, or a digest differs.
            OSError: a read failed.
            Stopped: the fill was given up before its end: this process is ending, or was forked in the middle of it.
        """

    def settle(self) -> None:
        """Let what the caller's current stream does from now on see all bytes that have arrived."""

    def cancel(self) -> None:
        """Give up; all threads and files of the fill are gone on return."""


class Backend(Protocol, Generic[Memory]):
    """One way to fill memory."""

    @property
    def name(self) -> str:
        """What it is called in messages."""

    def chunks(self, reads: Sequence[Read], alignment: int, budget: Budget) -> list[Chunk]:
        """The requests that it makes for these reads, of files that must be read at multiples of `alignment`."""

    def start(self, memory: Memory, fill: Fill) -> Filling:
        """Begin to fill the memory, and return at once.

        Raises:
            FormatError: a file is missing or has another length than expected.
            OSError: a file cannot be opened as this backend needs it.
        """
