"""Queries of the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path

from relayout.core.extents import align_down, align_up
from relayout.storage.libc import libc, map_file, unmap

_CACHESTAT = 451
"""The number of cachestat(2) in every architecture that has it (Linux 6.5)."""
_READ_AHEAD_NBYTES = 8 * 2**20
"""More than the defaults of file systems; used if the system does not report it."""


class _Range(ctypes.Structure):
    """`struct cachestat_range` of linux/mman.h."""

    _fields_ = (("off", ctypes.c_uint64), ("len", ctypes.c_uint64))


class _Counts(ctypes.Structure):
    """`struct cachestat` of linux/mman.h, in pages."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cache", "dirty", "writeback", "evicted", "recently_evicted"))


def resident_nbytes(fd: int, offset: int, nbytes: int) -> int | None:
    """How many of a file's bytes are in the page cache, by whole pages; None if the system does not report it.

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
    """The kernel's read-ahead window of the file's device, in bytes."""
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
