"""Many small reads by one system call: asynchronous I/O of Linux (`io_submit`, include/uapi/linux/aio_abi.h).

Python threads begin only some thousand small reads per second, even on a faster drive. Here one call begins many reads,
and the kernel keeps them in flight. With O_DIRECT they run at the same time. Reads through the page cache run one after
the other, still without a Python call for each. (io_uring would do the same, but container runtimes forbid it by
default.)

The kernel writes to memory until a read has ended, so no function here returns, or raises, while a read is in flight.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from relayout.core.workers import remake_in_child
from relayout.storage.stores import Closable
from relayout.storage.system import libc

_CALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2), "arm64": (0, 1, 4, 2)}
_SETUP, _DESTROY, _GETEVENTS, _SUBMIT = range(4)
"""Indices of io_setup, io_destroy, io_getevents and io_submit in the values of `_CALLS`, which are their numbers."""
_REQUEST = np.dtype(
    {
        "names": ["data", "fd", "address", "nbytes", "offset"],
        "formats": ["<u8", "<u4", "<u8", "<u8", "<i8"],
        "offsets": [0, 20, 24, 32, 40],
        "itemsize": 64,
    }
)
"""`struct iocb`; its operation is 0, IOCB_CMD_PREAD."""
_EVENT = np.dtype([("data", "<u8"), ("request", "<u8"), ("result", "<i8"), ("second", "<i8")])
"""`struct io_event`."""

Numbers = npt.NDArray[np.int64]


class BatchedReads(Closable):
    """A queue of reads of local files. Threads that share it take turns. A forked child gets a queue of its own.

    It only saves time. A caller that gets an OSError, or fewer bytes than requested, reads in the ordinary way, which
    reports the cause.
    """

    def __init__(self, depth: int) -> None:
        """Keep at most `depth` reads in flight."""
        self._depth = depth
        self._lock = threading.Lock()
        self._context: ctypes.c_ulong | None = None
        remake_in_child(self)

    def after_fork(self) -> None:
        """Discard the queue, which belongs to the parent process."""
        self._lock, self._context = threading.Lock(), None

    def read(self, fd: int, addresses: Numbers, offsets: Numbers, sizes: Numbers) -> Numbers:
        """Read ranges of a file into memory, and return when all have ended.

        Args:
            fd: an open file. With O_DIRECT, addresses, offsets and sizes are multiples of its block.
            addresses: memory addresses, one for each range.
            offsets, sizes: offsets and sizes of the ranges, in bytes.

        Returns:
            For each range the number of bytes that were read, or a negative errno.

        Raises:
            OSError: this system does not support such reads, or has reached their limit (fs.aio-max-nr).
        """
        requests = np.zeros(len(offsets), _REQUEST)
        requests["data"] = np.arange(len(offsets))
        requests["fd"] = fd
        requests["address"], requests["nbytes"], requests["offset"] = addresses, sizes, offsets
        pointers = requests.ctypes.data + _REQUEST.itemsize * np.arange(len(offsets), dtype=np.uint64)
        with self._lock:
            if self._context is None:
                context = ctypes.c_ulong(0)
                _call(_SETUP, ctypes.c_uint(self._depth), ctypes.byref(context))
                self._context = context
            try:
                return self._run(self._context, pointers)
            except BaseException:  # Also on Ctrl-C: no read may be in flight when the memory is freed.
                self._destroy()
                raise

    def _run(self, context: ctypes.c_ulong, pointers: npt.NDArray[np.uint64]) -> Numbers:
        results = np.empty(len(pointers), np.int64)
        events = np.empty(self._depth, _EVENT)
        begun = ended = 0
        while ended < len(pointers):
            room = min(self._depth - (begun - ended), len(pointers) - begun)
            if room:
                first = ctypes.c_void_p(pointers.ctypes.data + pointers.itemsize * begun)
                begun += _call(_SUBMIT, context, ctypes.c_long(room), first)
            most, into = ctypes.c_long(len(events)), ctypes.c_void_p(events.ctypes.data)
            done = events[: _call(_GETEVENTS, context, ctypes.c_long(1), most, into, None)]
            results[done["data"].astype(np.int64)] = done["result"]
            ended += len(done)
        return results

    def _destroy(self) -> None:
        """Release the queue. The kernel waits for reads in flight."""
        context, self._context = self._context, None
        if context is not None:
            _call(_DESTROY, context)

    def close(self) -> None:
        """Release the queue."""
        with self._lock:
            self._destroy()


def _call(which: int, *arguments: Any) -> int:
    """Call one of the functions, and repeat it if a signal interrupts it."""
    numbers = _CALLS.get(platform.machine()) if sys.platform == "linux" and sys.byteorder == "little" else None
    if numbers is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    while (result := libc().syscall(ctypes.c_long(numbers[which]), *arguments)) < 0:
        if (code := ctypes.get_errno()) != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return int(result)
