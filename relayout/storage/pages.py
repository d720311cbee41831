"""Fresh memory: whether its pages should be huge or small, measured where they are touched.

A huge page is touched in 0.2 ms where memory is at hand, and in 4 ms where the host of a virtual machine has taken free
memory back (free page reporting, ballooning). Small pages are often had from memory that the host never took, and cost
0.5 ms for as many bytes; where that is used up, they cost as much as huge ones. So neither is right everywhere. A
`Buffer` is memory that one thread fills again and again.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from relayout.core.extents import BLOCK, align_up
from relayout.storage.system import advise, populate

HUGE_PAGE = 2 * 2**20
"""Bytes of a huge page on x86-64 and, mostly, arm64."""

_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_OTHER_SHARE = 1 / 20
"""Most of the time that may be lost by trying the pages that were dearer."""
_MIN_BETWEEN = 8
"""The least number of touches between two trials, each of which divides a mapping."""
_MOST_AT_ONCE = 4.0
"""One touch that took longer than so many times the cost says no more: something came between."""
_FORGOTTEN_SECONDS = 1.0
"""What was measured longer ago says nothing about the memory that is free now."""


@dataclass(frozen=True, slots=True)
class PageCosts:
    """What it costs to touch `HUGE_PAGE` bytes of fresh memory, as huge page or as small ones. Pure."""

    huge: float | None = None
    """Seconds, lately; None: not tried."""
    small: float | None = None
    spent: float = 0.0
    """Seconds since the dearer pages were tried."""
    wait: float = 0.0
    """When so much has been spent they are tried again."""

    @property
    def are_huge_better(self) -> bool:
        """Whether huge pages cost less, or hardly more: the drive and the processor are faster with them."""
        return self.small is None or (self.huge is not None and self.huge <= 1.1 * self.small)

    @property
    def is_next_huge(self) -> bool:
        """Whether the next page should be huge: the better kind, or now and then the other, to measure it."""
        if self.huge is None or self.small is None:
            return self.huge is None
        return self.are_huge_better != (self.spent >= self.wait)

    def after(self, seconds: float, *, is_huge: bool) -> PageCosts:
        """The costs when touching `HUGE_PAGE` bytes has taken so long."""
        known = self.huge if is_huge else self.small
        weight = 1 / 4 if is_huge == self.are_huge_better else 1 / 2  # Few tell about the dearer ones.
        cost = seconds if known is None else known + weight * (min(seconds, _MOST_AT_ONCE * known) - known)
        costs = replace(self, huge=cost) if is_huge else replace(self, small=cost)
        if costs.huge is None or costs.small is None:
            return costs
        if is_huge == costs.are_huge_better == self.are_huge_better:
            return replace(costs, spent=self.spent + seconds)
        better, other = sorted((costs.huge, costs.small))
        excess = (seconds if is_huge != costs.are_huge_better else other) - better
        # The first that is cheaper than expected is followed by others at once.
        wait = 0.0 if excess < -better / 5 else max(excess / _OTHER_SHARE, _MIN_BETWEEN * better)
        return replace(costs, spent=0.0, wait=wait)


class _Machine:
    """What this process knows of the machine's memory. Thread-safe: an observation that is lost does no harm."""

    def __init__(self) -> None:
        self.costs = PageCosts()
        self.can_choose = False
        self._measured_at = 0.0
        with suppress(OSError):  # A system without huge pages, or a sandbox.
            self.can_choose = "[never]" not in _ENABLED.read_text() and hasattr(mmap, "MADV_HUGEPAGE")

    def next(self) -> bool:
        """Whether the next page should be huge."""
        if time.monotonic() > self._measured_at + _FORGOTTEN_SECONDS:
            self.costs = PageCosts()
        return self.costs.is_next_huge

    def touched(self, seconds: float, *, is_huge: bool) -> None:
        self.costs = self.costs.after(seconds, is_huge=is_huge)
        self._measured_at = time.monotonic()


_machine: list[_Machine] = []


def _this_machine() -> _Machine:
    if not _machine:
        _machine.append(_Machine())
    return _machine[0]


class FreshMemory:
    """Pages of new anonymous memory, which are chosen and touched by whoever is about to fill them. Thread-safe."""

    def __init__(self, memory: mmap.mmap, start: int = 0, nbytes: int | None = None) -> None:
        """Take the part of `memory` that will be used; what is not a whole huge page is left to the kernel."""
        nbytes = len(memory) - start if nbytes is None else nbytes
        self._address = address_of(memory) + start
        self._first = -self._address % HUGE_PAGE
        count = max(0, nbytes - self._first) // HUGE_PAGE
        self._untouched = set(range(count)) if _this_machine().can_choose else set()
        """Numbers of huge pages. Removing one claims it: of two threads, one succeeds."""
        self._whole = self._address + self._first, count * HUGE_PAGE
        self._are_huge: bool | None = None
        """What the kernel was told about all of it."""

    def touch(self, offset: int, nbytes: int) -> None:
        """Have the kernel allocate pages for this part, and measure what they cost. Content stays as it is."""
        if not self._untouched:
            return
        for page in range((offset - self._first) // HUGE_PAGE, -((self._first - offset - nbytes) // HUGE_PAGE)):
            try:
                self._untouched.remove(page)
            except KeyError:
                continue
            if not self._allocate(self._whole[0] + page * HUGE_PAGE):
                self._untouched.clear()

    def _allocate(self, address: int) -> bool:
        """Allocate a huge page, or small ones; False if this system lets nobody choose."""
        machine = _this_machine()
        is_huge = machine.next()
        if not self._advise(address, is_huge=is_huge, is_better=is_huge == machine.costs.are_huge_better):
            return False
        # The time of this thread: it has the host's part in it, and not what other threads do meanwhile.
        began = time.thread_time()
        if not populate(address, HUGE_PAGE, writable=True):
            advise(*self._whole, mmap.MADV_HUGEPAGE)  # An old kernel: nothing can be measured.
            return False
        machine.touched(time.thread_time() - began, is_huge=is_huge)
        return True

    def _advise(self, address: int, *, is_huge: bool, is_better: bool) -> bool:
        if is_huge == self._are_huge:
            return True
        if is_better or self._are_huge is None:
            self._are_huge = is_huge
            return advise(*self._whole, mmap.MADV_HUGEPAGE if is_huge else mmap.MADV_NOHUGEPAGE)
        return advise(address, HUGE_PAGE, mmap.MADV_HUGEPAGE if is_huge else mmap.MADV_NOHUGEPAGE)


def in_huge_pages(nbytes: int) -> memoryview:
    """New memory in huge pages, whatever they cost, if the system has any: for buffers that are filled many times.

    They are few, and a drive was seen to read into small pages at half of its speed.

    Raises:
        OSError: the address space is exhausted.
    """
    memory = mmap.mmap(-1, align_up(nbytes, HUGE_PAGE) + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
    if _this_machine().can_choose:
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    start = -address_of(memory) % HUGE_PAGE
    return memoryview(memory)[start : start + nbytes]


def address_of(memory: mmap.mmap) -> int:
    """Address of its first byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def are_small() -> bool:
    """Whether small pages were measured to be better here."""
    return bool(_machine) and not _machine[0].costs.are_huge_better


def describe_pages() -> str:
    """Which pages fresh memory gets, and why, for a person."""
    machine = _this_machine()
    huge, small = machine.costs.huge, machine.costs.small
    if not machine.can_choose:
        return "memory: small pages: the system has no huge ones"
    if huge is None or small is None:
        return "memory: not measured yet"
    chosen = "small" if are_small() else "huge"
    return f"memory: {chosen} pages ({huge * 1e3:.1f} ms a huge page, {small * 1e3:.1f} ms as many small ones)"


def measured_pages() -> str:
    """Touch some memory now, and describe the pages that it got, as `describe_pages`."""
    nbytes = 6 * HUGE_PAGE
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON) as memory:
        FreshMemory(memory).touch(0, nbytes)
    return describe_pages()


class Buffer:
    """Page-aligned memory that grows on demand. Not thread-safe."""

    def __init__(self) -> None:
        self._memory: memoryview | None = None

    def reserve(self, nbytes: int) -> memoryview:
        """The first `nbytes` of the memory. Growing it discards its content."""
        if self._memory is None or self._memory.nbytes < nbytes:
            if nbytes < HUGE_PAGE:
                memory = mmap.mmap(-1, align_up(max(nbytes, 1), BLOCK), flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
                self._memory = memoryview(memory)
            else:
                self._memory = in_huge_pages(nbytes)
        return self._memory[:nbytes]

    def discard(self) -> None:
        """Give the pages back now, whatever still refers to the memory; its content is lost."""
        if self._memory is not None and hasattr(mmap, "MADV_DONTNEED"):
            mapping = self._memory.obj
            assert isinstance(mapping, mmap.mmap)
            mapping.madvise(mmap.MADV_DONTNEED)
