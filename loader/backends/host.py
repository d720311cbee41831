"""Backends that read into host memory with threads: `direct`, `buffered`, and `auto`, which combines both.

The memory is an arena (one allocation for all of a rank's tensors), or the memory of existing tensors.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Generic, TypeVar

from relayout.core.extents import BLOCK, Extent, Transfer, align_up, copy_runs, split
from relayout.core.workers import Workers
from relayout.loader.backends.base import (
    Backend,
    Memory,
    Pool,
    ReadJob,
    kind_of,
    refuse_without_descriptors,
)
from relayout.loader.backends.files import ReadableFiles, closed_on_error
from relayout.loader.requests import MIN_BUFFER, Budget, Pace, Request, steps
from relayout.loader.sources.rank import StoredFile
from relayout.loader.tensors import check_mode
from relayout.storage.stores import Access
from relayout.storage.system import HUGE_PAGE, Buffer, FreshMemory, address_of, are_small, map_file

if TYPE_CHECKING:
    import torch

MAP_FIXED = 0x10
"""Flag of mmap(2): replace the mapping at the address. The value on Linux and macOS."""

_FIRST_NBYTES = 8 * 2**20
"""Upper bound of a request before anything is measured, in bytes."""

State = TypeVar("State")
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class HostArena:
    """Anonymous memory, aligned to a page, or to a huge page if it is at least that large.

    It is freed when the last reference is gone.
    """

    memory: mmap.mmap
    start: int
    """Offset of the arena in `memory`, in bytes."""
    nbytes: int
    fresh: FreshMemory | None = None
    """Chooses the page size of untouched memory; None: the kernel does."""

    def span(self, offset: int, nbytes: int) -> memoryview:
        if self.fresh is not None:  # Touched by the thread that fills it, so that other threads can read meanwhile.
            self.fresh.touch(offset, nbytes)
        return memoryview(self.memory)[self.start + offset : self.start + offset + nbytes]

    @property
    def address(self) -> int:
        """Address of the arena's first byte."""
        return address_of(self.memory) + self.start

    def tensor(self, on_free: Callable[[HostArena], None] | None = None) -> torch.Tensor:
        """Return the arena as a tensor; `on_free` is called when the last view of it is gone."""
        import torch

        check_mode()
        nbytes = max(self.nbytes, 1)
        memory = (ctypes.c_char * nbytes).from_buffer(self.memory, self.start)
        if on_free is not None:
            weakref.finalize(memory, on_free, self).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)

    def discard(self) -> None:
        # Frees pages now, and the address range when the last reference is gone.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANON | MAP_FIXED
        with suppress(OSError):
            map_file(-1, 0, len(self.memory), flags=flags, writable=True, address=self.address - self.start)
        with suppress(BufferError):  # A traceback may refer to views of it.
            self.memory.close()


def allocate(nbytes: int) -> HostArena:
    """Reserve `nbytes` of memory; pages are allocated when `span` first returns them."""
    if nbytes < HUGE_PAGE:
        return HostArena(_reserve(align_up(max(nbytes, 1), mmap.PAGESIZE)), 0, nbytes)
    memory = _reserve(align_up(nbytes, HUGE_PAGE) + HUGE_PAGE)
    start = -address_of(memory) % HUGE_PAGE
    return HostArena(memory, start, nbytes, FreshMemory(memory, start, nbytes))


def _reserve(nbytes: int) -> mmap.mmap:
    try:
        # Private: few systems have huge pages for shared memory, and a forked child would write to it, too.
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else "more than there are addresses"
        raise MemoryError(f"cannot reserve {nbytes} bytes for a rank: {reason}") from None


class ArenaPool(Pool[memoryview]):
    """A pool that reuses an arena once its tensor is unreferenced, which saves allocating its pages again."""

    def __init__(self, nbytes: int) -> None:
        """Make arenas of at least `nbytes`; only arenas of exactly `nbytes` are reused."""
        self._nbytes = nbytes
        self._free: list[HostArena] = []
        self._is_open = True

    def take(self, nbytes: int) -> tuple[HostArena, torch.Tensor]:
        if nbytes <= self._nbytes and self._free:
            arena = self._free.pop()
        else:
            self._free.clear()  # Free idle arenas before a larger one is allocated.
            arena = allocate(max(nbytes, self._nbytes))
        return arena, arena.tensor(self._give)

    def _give(self, arena: HostArena) -> None:
        """Return an unused arena to the pool."""
        if self._is_open and arena.nbytes == self._nbytes:
            self._free.append(arena)

    def close(self) -> None:
        self._is_open = False
        self._free.clear()


class Scattered:
    """Existing memory in pieces, each at the first free offset that is congruent with its address."""

    def __init__(self, pieces: Sequence[tuple[int, int]]) -> None:
        """Take (address, nbytes) of each piece; the caller keeps them alive."""
        self.offsets = scatter(pieces)
        """Offset of each piece."""
        self._addresses = [address for address, _ in pieces]

    def span(self, offset: int, nbytes: int) -> memoryview:
        which = bisect_right(self.offsets, offset) - 1
        address = self._addresses[which] + offset - self.offsets[which]
        return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def scatter(pieces: Sequence[tuple[int, int]]) -> list[int]:
    """Return offsets for pieces of memory, given as (address, nbytes), in an address space that starts at 0."""
    offsets = []
    end = 0
    for address, nbytes in pieces:
        offsets.append(align_up(end, BLOCK) + address % BLOCK)
        end = offsets[-1] + max(nbytes, 1)  # No two pieces at one offset.
    return offsets


class HostBackend(Backend[memoryview]):
    """Backend of threads that read directly into memory, and through bounce buffers where that is not possible."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self.name = access.value

    def allocate(self, nbytes: int) -> HostArena:
        return allocate(nbytes)

    def pool(self, nbytes: int) -> ArenaPool:
        return ArenaPool(nbytes)

    def wrap(self, tensors: Sequence[torch.Tensor]) -> Scattered:
        return Scattered([(tensor.data_ptr(), tensor.numel()) for tensor in tensors])

    def start(self, memory: Memory[memoryview], job: ReadJob) -> _PacedJob:
        with closed_on_error(ReadableFiles(job.files, self.access)) as opened:
            requests = self.requests(job.reads, opened.alignment, job.budget, opened.grids)
            return _PacedJob(memory, job, opened, requests)


def _pace_of(requests: Sequence[Request], budget: Budget) -> Pace:
    """Return the pace of a job, such that the buffers of all threads fit into the memory of the budget."""
    bounced = max((one.extent.nbytes for one in requests if one.arena_offset is None), default=0)
    most = max(budget.threads, min(budget.max_threads, budget.memory // max(bounced, MIN_BUFFER)))
    largest = budget.cost.request_nbytes
    first = min(largest, _FIRST_NBYTES)
    if budget.cost.is_remote:  # A small rank, too, is read by all threads at once.
        nbytes = sum(one.extent.nbytes for one in requests)
        first = min(first, max(MIN_BUFFER, align_up(-(-nbytes // budget.threads), BLOCK)))
    return Pace(steps(budget.threads, most, first, largest))


def _num_parts(requests: Sequence[Request], nbytes: int) -> int:
    """Return the number of requests after those that go straight into the arena are cut into parts of `nbytes`."""
    return sum(1 if one.arena_offset is None else -(-one.extent.nbytes // nbytes) for one in requests)


def reserve(buffer: Buffer, nbytes: int) -> memoryview:
    """Return the first `nbytes` of a buffer."""
    try:
        return buffer.reserve(nbytes)
    except OSError as error:
        raise MemoryError(f"cannot reserve {nbytes} bytes for a buffer: {error.strerror}") from None


class Buffers:
    """The bounce buffers of a job's threads."""

    def __init__(self) -> None:
        self._buffers: list[Buffer] = []

    def make(self) -> Buffer:
        """Return a new buffer. Thread-safe."""
        buffer = Buffer()
        self._buffers.append(buffer)
        return buffer

    def discard(self) -> None:
        """Free the memory of all buffers now. They must not be used afterwards."""
        while self._buffers:
            self._buffers.pop().discard()


class ThreadedJob(Generic[State, Item]):
    """Threads that work on the items of a job, such as requests. Each thread has its own state."""

    def __init__(
        self,
        job: ReadJob,
        opened: ReadableFiles,
        make_state: Callable[[], State],
        work: Callable[[State, Item], int],
        items: Iterable[Item],
        num_items: int,
        discard: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the threads; `work` returns the number of bytes that it filled. The job closes `opened`.

        Each thread begins with an item; then the threads also check remote files, because a check is a round trip like
        any other request.

        Args:
            discard: frees the memory of all states; called when the job is cancelled.
        """
        self._discard = discard
        self.job = job
        self.opened = opened
        left, unchecked = iter(items), opened.unchecked
        first = islice(left, job.budget.threads)
        tasks: Iterable[Callable[[State], int]] = chain(
            (partial(_worked, work, item) for item in first),
            (partial(_checked, opened, file) for file in unchecked),
            (partial(_worked, work, item) for item in left),
        )
        try:
            num_threads = min(job.budget.threads, num_items + len(unchecked))
            self._workers = Workers(num_threads, tasks, make_state, lambda state, task: task(state), job.stop)
            self._workers.start()
        except BaseException:
            opened.close()
            raise

    def resize(self, num_threads: int) -> None:
        """Change the number of threads; see `Workers.resize`."""
        self._workers.resize(num_threads)

    def join(self, on_progress: Callable[[int], None] | None = None) -> None:
        try:
            self._workers.join(on_progress)
        finally:
            self.opened.close()
        self.settle()

    def settle(self) -> None:
        """Do nothing: host memory has no streams."""

    @property
    def current_stream(self) -> object:
        return None

    def cancel(self) -> None:
        self._workers.cancel()
        self.opened.close()
        self._discard()


def _worked(work: Callable[[State, Item], int], item: Item, state: State) -> int:
    return work(state, item)


def _checked(opened: ReadableFiles, file: int, _: object) -> int:
    opened.check(file)
    return 0


class _PacedJob(ThreadedJob[Buffer, Request]):
    """A job that reads into memory and adapts the number and size of requests in flight to measurements."""

    def __init__(
        self, memory: Memory[memoryview], job: ReadJob, opened: ReadableFiles, requests: Sequence[Request]
    ) -> None:
        """Start the threads."""
        self._memory = memory
        self._lock = threading.Lock()
        self._pace = _pace_of(requests, job.budget)
        self._copied_nbytes = opened.whole_chunks(min(HUGE_PAGE, job.budget.buffer_nbytes))
        """Bytes that a thread reads into its buffer at once where pages are small."""
        buffers, num_parts = Buffers(), _num_parts(requests, self._pace.step.request_nbytes)
        super().__init__(job, opened, buffers.make, self._work, self._parts(requests), num_parts, buffers.discard)

    def _parts(self, requests: Sequence[Request]) -> Iterator[Request]:
        """Yield the requests, each cut to the pace's current request size when it is begun."""
        for request in requests:
            while request.arena_offset is not None and request.extent.nbytes > (
                size := self.opened.whole_chunks(self._pace.step.request_nbytes)
            ):
                offset, end = request.extent.offset, request.extent.end
                yield replace(request, extent=Extent(offset, size))
                rest = Extent(offset + size, end - offset - size)
                request = replace(request, extent=rest, arena_offset=request.arena_offset + size)
            yield request

    def _work(self, bounce: Buffer, request: Request) -> int:
        step, began = self._pace.step, time.perf_counter()
        self._read(bounce, request)
        with self._lock:
            self._pace.finished(step, request.extent.nbytes, time.perf_counter() - began)
            threads = self._pace.step.threads
        if threads != step.threads:
            self.resize(threads)
        return request.nbytes

    def _read(self, bounce: Buffer, request: Request) -> None:
        """Fill the memory of a request, through the bounce buffer if needed."""
        if request.arena_offset is not None:
            span = self._memory.span(request.arena_offset, request.extent.nbytes)
            if self.opened.alignment > 1 and are_small() and self._may_copy():
                self._read_and_copy(bounce, request, span)
            else:
                self.opened.read(request.file, request.extent.offset, span)
            self.job.on_arrival(request.arena_offset, span.nbytes)
        elif request.is_sparse:
            with self.opened.mapped(request.file, request.extent.offset, request.extent.nbytes) as view:
                self._scatter(request, self._bounced(bounce, request) if view is None else view)
        else:
            self._scatter(request, self._bounced(bounce, request))

    def _may_copy(self) -> bool:
        """Return True if the budget has a buffer for each thread; if so, limit the threads to the buffers."""
        with self._lock:
            return self._pace.limit(self.job.budget.memory // self._copied_nbytes)

    def _read_and_copy(self, bounce: Buffer, request: Request, span: memoryview) -> None:
        """Read into huge pages, and copy to small ones: a drive's request can address only few small pages.

        Direct reads into small pages were seen at less than half of the drive's speed.
        """
        whole = request.extent
        # Memory beyond the end of the file is unchanged.
        end = min(whole.end, self.job.files[request.file].nbytes)
        for part in split(Extent(whole.offset, end - whole.offset), self._copied_nbytes):
            view = reserve(bounce, align_up(part.nbytes, BLOCK))
            self.opened.read(request.file, part.offset, view)
            copy_runs(view, span, Transfer(0, part.offset - whole.offset, part.nbytes))

    def _bounced(self, bounce: Buffer, request: Request) -> memoryview:
        view = reserve(bounce, request.extent.nbytes)
        self.opened.read(request.file, request.extent.offset, view)
        return view

    def _scatter(self, request: Request, view: memoryview) -> None:
        for transfer in request.transfers:
            span = self._memory.span(transfer.target, transfer.target_end - transfer.target)
            copy_runs(view, span, transfer.shifted(target=-transfer.target))
            self.job.on_arrival(transfer.target, transfer.total_nbytes)


def _offer(
    access: Access, device: str | torch.device, files: Sequence[StoredFile], is_by_name: bool
) -> HostBackend | str:
    separator, how = ", ", "read through the page cache"
    if access is Access.DIRECT:
        if refused := refuse_without_descriptors("direct", files):
            return refused
        how = "read past the page cache"
    elif access is Access.AUTO:
        separator = "; "
        if any(file.folder.cost.is_remote for file in files):
            how = "threads request ranges of the files, which go straight into memory"
        else:
            how = "bytes in the page cache are read there, all others by direct I/O where the file system allows it"
    if kind_of(device) != "cpu":
        how += f"{separator}then copied to {device} in one piece"
    backend = HostBackend(access)
    backend.reason = how
    return backend


offer_auto, offer_direct, offer_buffered = (
    partial(_offer, access) for access in (Access.AUTO, Access.DIRECT, Access.BUFFERED)
)
