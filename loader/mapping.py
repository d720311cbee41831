"""mmap(2) as Python's module does not offer it: at a given address, and with the address told."""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cache

from relayout.extents import align_up


@cache
def libc() -> ctypes.CDLL:
    """The C library; `mmap` returns an address."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    return library


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
