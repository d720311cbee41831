"""C library calls that Python lacks, such as mmap(2) at a given address and renameat2(2)."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from functools import cache

from relayout.core.extents import align_up

_REFUSED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ESPIPE})
"""Errors of a system or file system that does not support the call."""
_START, _WAIT = 2, 7
"""Flags of sync_file_range(2): SYNC_FILE_RANGE_WRITE alone, and with both WAIT flags."""
_RENAME_EXCHANGE = 2
"""`linux/fs.h`."""
_POPULATE_READ, _POPULATE_WRITE = 22, 23
"""MADV_POPULATE_READ and MADV_POPULATE_WRITE of `asm-generic/mman-common.h` (Linux 5.14)."""


@cache
def libc() -> ctypes.CDLL:
    """The C library; `mmap` returns an address."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    return library


def _call(name: str, *arguments: object) -> bool:
    """Call a function that returns 0; return False if the system or file system does not support it.

    Raises:
        OSError: the call failed.
    """
    function = getattr(libc(), name, None)
    if function is not None and function(*arguments) == 0:
        return True
    code = errno.ENOSYS if function is None else ctypes.get_errno()
    if code in _REFUSED:
        return False
    raise OSError(code, os.strerror(code))


def sync_range(fd: int, offset: int, nbytes: int, *, wait: bool) -> None:
    """Start writing a range from the page cache to the drive, and optionally wait; does nothing if not supported.

    Raises:
        OSError: the bytes could not be written; a later fsync would not report it again.
    """
    _call("sync_file_range", fd, ctypes.c_int64(offset), ctypes.c_int64(nbytes), _WAIT if wait else _START)


def allocate(fd: int, nbytes: int) -> None:
    """Set a file's length and, if the file system can, allocate its blocks, so that a full disk fails here."""
    os.ftruncate(fd, nbytes)
    # Not os.posix_fallocate: if the file system cannot allocate, the C library writes to every block.
    if nbytes:
        _call("fallocate", fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes))


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
    """Bring mapped pages into memory, to be read or written. Return False if one cannot be had, or there is no support.

    Using a page of a file that cannot be read, or that was truncated, would kill the process.
    """
    return advise(address, nbytes, _POPULATE_WRITE if writable else _POPULATE_READ)


def advise(address: int, nbytes: int, advice: int) -> bool:
    """Call madvise(2), without Python's lock, which mmap.madvise would hold. Return False if it failed."""
    return bool(libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice) == 0)


def unmap(address: int, nbytes: int) -> None:
    """Unmap memory that `map_file` mapped."""
    libc().munmap(ctypes.c_void_p(address), ctypes.c_size_t(align_up(nbytes, mmap.PAGESIZE)))
