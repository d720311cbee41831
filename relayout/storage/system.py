"""Access to the operating system: C library calls that Python lacks, page cache, file systems, and memory.

Pages of fresh memory may be huge or small. Which is faster is measured where they are touched. Touching a huge page
takes 0.2 ms if the memory is warm, and 4 ms if the hypervisor has reclaimed free memory of a virtual machine (free page
reporting, ballooning). Small pages often come from memory that the hypervisor never reclaimed, and then cost 0.5 ms for
the same number of bytes. Once that memory is used up, they cost the same as huge ones. So neither size is best
everywhere.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import re
import resource
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from relayout.core.extents import BLOCK, align_down, align_up

_REFUSED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ESPIPE})
"""Error numbers of a system or file system that does not support the call."""
_START, _WAIT = 2, 7
"""Flags of sync_file_range(2): SYNC_FILE_RANGE_WRITE alone, and with both WAIT flags."""
_RENAME_EXCHANGE = 2
"""RENAME_EXCHANGE of `linux/fs.h`."""
_MAX_TRIES = 100
"""Maximum number of attempts for a call that signals interrupt."""
_POPULATE_READ, _POPULATE_WRITE = 22, 23
"""MADV_POPULATE_READ and MADV_POPULATE_WRITE of `asm-generic/mman-common.h` (Linux 5.14)."""
_CACHESTAT = 451
"""The system call number of cachestat(2) in every architecture that has it (Linux 6.5)."""
_CLONE_RANGE = 0x4020940D
"""FICLONERANGE of `linux/fs.h`: _IOW(0x94, 13, struct file_clone_range)."""
_READ_AHEAD_NBYTES = 8 * 2**20
"""Read-ahead window used if the system does not report one. Larger than the defaults of file systems."""
_MOUNTS = Path("/proc/self/mountinfo")
_DESCRIPTORS = Path("/proc/self/fdinfo")
_DRIVES = Path("/sys/dev/block")


@cache
def libc() -> ctypes.CDLL:
    """Return the C library, with `mmap` declared to return an address."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    return library


def _call(name: str, *arguments: object) -> bool:
    """Call a function that returns 0; return False if the system or file system does not support it."""
    function: Any = getattr(libc(), name, None)
    code = errno.ENOSYS
    # Repeat on EINTR, as Python does, but not forever: a profiler's timer may interrupt each attempt to allocate a
    # large file in memory.
    for _ in range(_MAX_TRIES if function is not None else 0):
        if function(*arguments) == 0:
            return True
        code = ctypes.get_errno()
        if code != errno.EINTR:
            break
    if code in _REFUSED:
        return False
    raise OSError(code, os.strerror(code))


def sync_range(fd: int, offset: int, nbytes: int, *, wait: bool) -> None:
    """Start writing a range from the page cache to the drive, and optionally wait; does nothing if not supported."""
    _call("sync_file_range", fd, ctypes.c_int64(offset), ctypes.c_int64(nbytes), _WAIT if wait else _START)


def allocate(fd: int, nbytes: int) -> None:
    """Set a file's length and, if the file system can, allocate its blocks, so that a full disk fails here."""
    os.ftruncate(fd, nbytes)
    # Not os.posix_fallocate: if the file system cannot allocate, the C library writes to every block.
    if nbytes:
        _call("fallocate", fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes))


def clone_range(source: int, source_offset: int, fd: int, offset: int, nbytes: int) -> bool:
    """Let a range of a file share the blocks of another open file (reflink); return False if that is impossible.

    It is possible inside one file system of some kinds, such as XFS and Btrfs, for whole blocks. A later write to one
    of the files does not change the other.
    """
    request = struct.pack("=qQQQ", source, source_offset, nbytes, offset)  # struct file_clone_range
    try:
        fcntl.ioctl(fd, _CLONE_RANGE, request)
    except OSError:
        return False
    return True


def exchange_names(folder: int, name: str, other_folder: int, other: str) -> bool:
    """Exchange two names, each in an open folder, atomically. Return False if the system does not support it."""
    return _call("renameat2", folder, os.fsencode(name), other_folder, os.fsencode(other), _RENAME_EXCHANGE)


def map_file(fd: int, offset: int, nbytes: int, *, flags: int, writable: bool = False, address: int = 0) -> int:
    """Map bytes of a file into memory and return the address; `offset` is a multiple of the page size."""
    result = libc().mmap(
        ctypes.c_void_p(address),
        ctypes.c_size_t(nbytes),
        mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0),
        flags,
        fd,
        ctypes.c_int64(offset),
    )
    if result == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot be mapped into memory: {os.strerror(code)}")
    return int(result or 0)


def populate(address: int, nbytes: int, *, writable: bool = False) -> bool:
    """Bring mapped pages into memory for reading or writing. Return False if that fails or is not supported.

    Accessing a page of a file that cannot be read, or that was truncated, would kill the process.
    """
    return advise(address, nbytes, _POPULATE_WRITE if writable else _POPULATE_READ)


def advise(address: int, nbytes: int, advice: int) -> bool:
    """Call madvise(2) without holding Python's lock, which mmap.madvise would hold. Return False if it failed."""
    return bool(libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice) == 0)


def unmap(address: int, nbytes: int) -> None:
    """Unmap memory that `map_file` mapped."""
    libc().munmap(ctypes.c_void_p(address), ctypes.c_size_t(align_up(nbytes, mmap.PAGESIZE)))


class _Range(ctypes.Structure):
    """`struct cachestat_range` of linux/mman.h."""

    _fields_ = (("off", ctypes.c_uint64), ("len", ctypes.c_uint64))


class _Counts(ctypes.Structure):
    """`struct cachestat` of linux/mman.h, in pages."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cache", "dirty", "writeback", "evicted", "recently_evicted"))


def resident_nbytes(fd: int, offset: int, nbytes: int) -> int | None:
    """Return how many bytes of a file range are in the page cache, by whole pages; None if not reported.

    Uses cachestat(2). If that is missing or not permitted, uses mincore(2), but only for files that this process may
    write: Linux 5.2 and later report all pages of other files as resident (mm/mincore.c, can_do_mincore).
    """
    nbytes = min(nbytes, os.fstat(fd).st_size - offset)
    if nbytes <= 0:
        return 0
    if sys.platform != "linux":
        return None
    num_pages = _cachestat(fd, offset, nbytes)
    if num_pages is None:
        num_pages = _mincore(fd, offset, nbytes)
    return None if num_pages is None else min(nbytes, num_pages * mmap.PAGESIZE)


def read_ahead_nbytes(fd: int) -> int:
    """Return the kernel's read-ahead window of the file's device, in bytes."""
    device = os.fstat(fd).st_dev
    try:
        text = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb").read_text()
        return int(text) * 1024
    except (OSError, ValueError):
        return _READ_AHEAD_NBYTES


def _cachestat(fd: int, offset: int, nbytes: int) -> int | None:
    counts = _Counts()
    location = _Range(offset, nbytes)
    if libc().syscall(ctypes.c_long(_CACHESTAT), fd, ctypes.byref(location), ctypes.byref(counts), 0):
        return None
    return int(counts.cache)


def _mincore(fd: int, offset: int, nbytes: int) -> int | None:
    if os.fstat(fd).st_uid != os.geteuid() and not os.access(f"/proc/self/fd/{fd}", os.W_OK, effective_ids=True):
        return None
    start = align_down(offset, mmap.PAGESIZE)
    length = align_up(offset + nbytes, mmap.PAGESIZE) - start
    pages = (ctypes.c_ubyte * (length // mmap.PAGESIZE))()
    try:
        address = map_file(fd, start, length, flags=mmap.MAP_SHARED)
    except OSError:
        return None
    try:
        if libc().mincore(ctypes.c_void_p(address), ctypes.c_size_t(length), pages):
            return None
    finally:
        unmap(address, length)
    return sum(page & 1 for page in pages)


@dataclass(frozen=True, slots=True)
class Filesystem:
    """The file system of a file."""

    kind: str
    """The name of the kind as in mount(8): ext4, xfs, nfs4, overlay ...; "unknown" if the system does not report it."""
    mount_point: str
    block_nbytes: int
    """Preferred I/O size of the file system."""
    drive_block_nbytes: int | None
    """Logical block size of the drive; None if unknown or if there are several drives."""


def filesystem_of(path: Path) -> Filesystem:
    """Return the file system of an existing file."""
    status = path.stat()
    mount_point, kind = _mount_of(path)
    return Filesystem(kind, mount_point, status.st_blksize, _drive_block(status.st_dev))


def _mount_of(path: Path) -> tuple[str, str]:
    """Return mount point and kind of a file's file system; see proc(5), fdinfo and mountinfo."""
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            described = (_DESCRIPTORS / str(fd)).read_text()
        finally:
            os.close(fd)
        mount = next(line.split()[1] for line in described.splitlines() if line.startswith("mnt_id:"))
        lines = os.fsdecode(_MOUNTS.read_bytes()).splitlines()
        before, _, after = next(line.partition(" - ") for line in lines if line.split(" ", 1)[0] == mount)
    except (AttributeError, OSError, StopIteration):  # AttributeError: macOS has no O_PATH.
        return "/", "unknown"
    mount_point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), before.split(" ")[4])
    return mount_point, after.split(" ")[0]


def _drive_block(device: int) -> int | None:
    drive = _DRIVES / f"{os.major(device)}:{os.minor(device)}"
    for place in (drive, drive.resolve().parent):  # A partition's queue is its drive's.
        try:
            return int((place / "queue" / "logical_block_size").read_text())
        except (OSError, ValueError):
            continue
    return None


def advice_on_limit() -> str:
    """Return the advice for EMFILE: the process has reached its limit of open files."""
    return f"this process may open {max_descriptors()} files: raise that with ulimit -n"


def max_descriptors() -> int:
    """Return the maximum number of files that this process may have open."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_CONTROLLERS = {
    "": ("", "memory.max", "memory.current", ""),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}
"""The memory controllers of cgroups (versions 2 and 1) by their name in /proc/self/cgroup. Each value is the folder,
the file of the limit, the file of the usage, and the prefix of the counters that include child cgroups."""


def peak_nbytes() -> int:
    """Return the peak resident memory in bytes."""
    # ru_maxrss is not used on Linux, where it includes the process image before exec.
    unit = 1 if sys.platform == "darwin" else 1024
    return proc_nbytes("self/status", "VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def available_nbytes() -> int:
    """Return the bytes that this process could allocate without swapping, limited by the system and by its cgroups."""
    system = proc_nbytes("meminfo", "MemAvailable") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([system, *_left_in_cgroups()])


def _left_in_cgroups() -> Iterator[int]:
    """Yield the bytes left below each cgroup limit of this process. File pages count as left: they can be dropped."""
    with suppress(OSError):
        for line in (_PROC / "self/cgroup").read_text().splitlines():
            _, controller, path = line.split(":", 2)
            if controller not in _CONTROLLERS:
                continue
            name, limit, used, prefix = _CONTROLLERS[controller]
            lowest = _CGROUPS / name / path.lstrip("/")
            for folder in (lowest, *lowest.parents):
                with suppress(OSError, ValueError):  # No such file, or no limit ("max").
                    nbytes = int((folder / limit).read_text()) - int((folder / used).read_text())
                    counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                    files = sum(int(counts.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
                    yield max(0, nbytes + files)


def proc_nbytes(file: str, field: str) -> int | None:
    """Return a field in kB of a file below /proc, in bytes; None if the field does not exist."""
    with suppress(OSError, StopIteration):
        lines = (_PROC / file).read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
    return None


HUGE_PAGE = 2 * 2**20
"""Bytes of a huge page on x86-64 and, mostly, arm64."""

_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_OTHER_SHARE = 1 / 20
"""Largest share of the time that measuring the slower page size may cost."""
_MIN_BETWEEN = 8
"""Minimum number of touches between two measurements of the slower page size. Each one divides a mapping."""
_MOST_AT_ONCE = 4.0
"""Cap of one sample as a multiple of the mean; longer samples are scheduling noise."""
_FORGOTTEN_SECONDS = 1.0
"""Seconds after which a measurement expires: it does not describe the memory that is free now."""


@dataclass(frozen=True, slots=True)
class PageCosts:
    """The measured cost of touching `HUGE_PAGE` bytes of fresh memory as one huge page or as small pages. Immutable."""

    huge: float | None = None
    """Recent mean in seconds for a huge page. None: not measured."""
    small: float | None = None
    spent: float = 0.0
    """Seconds of page touching since the slower page size was last measured."""
    wait: float = 0.0
    """Seconds of page touching after which the slower page size is measured again."""

    @property
    def are_huge_better(self) -> bool:
        """True if huge pages cost less or hardly more than small ones: drives and processors are faster with them."""
        return self.small is None or (self.huge is not None and self.huge <= 1.1 * self.small)

    @property
    def is_next_huge(self) -> bool:
        """True if the next page should be huge: the faster size, or occasionally the slower one to measure it."""
        if self.huge is None or self.small is None:
            return self.huge is None
        return self.are_huge_better != (self.spent >= self.wait)

    def after(self, seconds: float, *, is_huge: bool) -> PageCosts:
        """Return the costs updated by one sample: touching `HUGE_PAGE` bytes took `seconds`."""
        known = self.huge if is_huge else self.small
        weight = 1 / 4 if is_huge == self.are_huge_better else 1 / 2  # The slower size has few samples.
        cost = seconds if known is None else known + weight * (min(seconds, _MOST_AT_ONCE * known) - known)
        costs = replace(self, huge=cost) if is_huge else replace(self, small=cost)
        if costs.huge is None or costs.small is None:
            return costs
        if is_huge == costs.are_huge_better == self.are_huge_better:
            return replace(costs, spent=self.spent + seconds)
        better, other = sorted((costs.huge, costs.small))
        excess = (seconds if is_huge != costs.are_huge_better else other) - better
        # If this sample was cheaper than expected, measure the slower size again at once.
        wait = 0.0 if excess < -better / 5 else max(excess / _OTHER_SHARE, _MIN_BETWEEN * better)
        return replace(costs, spent=0.0, wait=wait)


class _Machine:
    """The memory measurements of this process. Thread-safe: losing an observation does no harm."""

    def __init__(self) -> None:
        self.costs = PageCosts()
        self.can_choose = False
        self._measured_at = 0.0
        with suppress(OSError):  # A system without huge pages, or a sandbox.
            self.can_choose = "[never]" not in _ENABLED.read_text() and hasattr(mmap, "MADV_HUGEPAGE")

    def next(self) -> bool:
        """Return True if the next page should be huge."""
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
    """Pages of new anonymous memory. The thread about to fill a page chooses its size and touches it. Thread-safe."""

    def __init__(self, memory: mmap.mmap, start: int = 0, nbytes: int | None = None) -> None:
        """Manage the part of `memory` that will be used; bytes outside whole huge pages are left to the kernel."""
        nbytes = len(memory) - start if nbytes is None else nbytes
        self._address = address_of(memory) + start
        self._first = -self._address % HUGE_PAGE
        count = max(0, nbytes - self._first) // HUGE_PAGE
        self._untouched = set(range(count)) if _this_machine().can_choose else set()
        """Numbers of huge pages that were not touched. Removing one claims it: of two threads, one succeeds."""
        self._whole = self._address + self._first, count * HUGE_PAGE
        self._are_huge: bool | None = None
        """The last advice given to the kernel for all huge pages: huge or small. None: no advice yet."""

    def touch(self, offset: int, nbytes: int) -> None:
        """Have the kernel allocate pages for this part, and measure their cost. The content is unchanged."""
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
        """Allocate a huge page, or small ones; return False if this system does not let the process choose."""
        machine = _this_machine()
        is_huge = machine.next()
        if not self._advise(address, is_huge=is_huge, is_better=is_huge == machine.costs.are_huge_better):
            return False
        # Thread time includes the hypervisor's work for this thread, and excludes the work of other threads.
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
    """Return new memory, in huge pages if the system has any, however slow: for buffers that are filled many times.

    Such buffers are few, and a drive was observed to read into small pages at half of its speed.
    """
    memory = mmap.mmap(-1, align_up(nbytes, HUGE_PAGE) + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
    if _this_machine().can_choose:
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    start = -address_of(memory) % HUGE_PAGE
    return memoryview(memory)[start : start + nbytes]


def address_of(memory: mmap.mmap) -> int:
    """Return the address of the first byte of a mapping."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def are_small() -> bool:
    """Return True if small pages were measured to be faster on this machine."""
    return bool(_machine) and not _machine[0].costs.are_huge_better


def describe_pages() -> str:
    """Return a text for people: the page size chosen for fresh memory, and the reason."""
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
        """Return the first `nbytes` of the memory. Growing it discards its content."""
        if self._memory is None or self._memory.nbytes < nbytes:
            self._memory = None  # Free it before allocating more.
            if nbytes < HUGE_PAGE:
                memory = mmap.mmap(-1, align_up(max(nbytes, 1), BLOCK), flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
                self._memory = memoryview(memory)
            else:
                self._memory = in_huge_pages(nbytes)
        return self._memory[:nbytes]

    def discard(self) -> None:
        """Return the pages to the system now, even if the memory is still referenced. Its content is lost."""
        if self._memory is not None and hasattr(mmap, "MADV_DONTNEED"):
            mapping = self._memory.obj
            assert isinstance(mapping, mmap.mmap)
            mapping.madvise(mmap.MADV_DONTNEED)
