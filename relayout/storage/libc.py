"""Calls of the C library that Python does not offer, or not like this: mmap(2) at a given address, for one."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from functools import cache
from typing import Any

from relayout.core.extents import align_up

_REFUSED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})
"""Of a system or file system that cannot do it."""
_START, _WAIT = 2, 7
"""Linux `sync_file_range`: SYNC_FILE_RANGE_WRITE, and with it both waits."""
_RENAME_EXCHANGE = 2
"""`linux/fs.h`."""


@cache
def libc() -> ctypes.CDLL:
    """The C library; `mmap` returns an address."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    return library


def _function(name: str) -> Any:
    return getattr(libc(), name, None)


def sync_range(fd: int, offset: int, nbytes: int, *, wait: bool) -> None:
    """Start writing bytes from the page cache to the drive, and perhaps wait for it, where the system can.

    Raises:
        OSError: they could not be written; a later fsync would not tell again.
    """
    function = _function("sync_file_range")
    if function is None:
        return
    flags = ctypes.c_uint(_WAIT if wait else _START)
    if function(fd, ctypes.c_int64(offset), ctypes.c_int64(nbytes), flags) != 0:
        code = ctypes.get_errno()
        if code not in _REFUSED | {errno.ESPIPE}:
            raise OSError(code, os.strerror(code))


def allocate(fd: int, nbytes: int) -> None:
    """Give a file its length and, where the file system can, its blocks, so that a full disk shows at once.

    Raises:
        OSError: there is no space.
    """
    os.ftruncate(fd, nbytes)
    # Not os.posix_fallocate: where the file system cannot, the C library would write to every block.
    function = _function("fallocate")
    if nbytes and function is not None and function(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)) != 0:
        code = ctypes.get_errno()
        if code not in _REFUSED:
            raise OSError(code, os.strerror(code))


def exchange_names(folder: int, name: str, other_folder: int, other: str) -> bool:
    """Let two names, each in an open folder, change places in one step; whether the system can do that.

    Raises:
        OSError: it is refused.
    """
    function = _function("renameat2")
    if function is None:
        return False
    flag = ctypes.c_uint(_RENAME_EXCHANGE)
    if function(folder, os.fsencode(name), other_folder, os.fsencode(other), flag) == 0:
        return True
    code = ctypes.get_errno()
    if code in _REFUSED:
        return False
    raise OSError(code, os.strerror(code))


def map_file(fd: int, offset: int, nbytes: int, *, flags: int, writable: bool = False, address: int = 0) -> int:
    """Map bytes of a file, from a multiple of the page size on, and return the address.

    Raises:
        OSError: the file system or the system refuses it.
    """
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


def unmap(address: int, nbytes: int) -> None:
    """Undo `map_file`."""
    libc().munmap(ctypes.c_void_p(address), ctypes.c_size_t(align_up(nbytes, mmap.PAGESIZE)))
