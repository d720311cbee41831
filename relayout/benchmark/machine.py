"""This machine: control of page cache and memory for measurements; facts about hardware, load and drive for results."""

from __future__ import annotations

import mmap
import os
import platform
import re
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import local

import numpy as np

from relayout.core.extents import BLOCK
from relayout.storage.local.store import refuses_direct
from relayout.storage.system import filesystem_of, proc_nbytes, resident_nbytes

_COLD_SHARE, _WARM_SHARE = 0.001, 0.99
"""Largest share of bytes in the page cache for a cold set of files, and smallest share for a warm set."""
_READ_NBYTES = 16 * 2**20
_DIRECT_NBYTES, _DIRECT_THREADS = 8 * 2**20, 8
"""Bytes of a direct request, and number of requests in flight, for the measurement of the drive's limit."""
_DIRECT_SECONDS, _MAX_DIRECT_NBYTES = 3.0, 8 * 10**9
"""Limits of that measurement: it ends after this time (seconds) or this many bytes."""


class NotPrepared(Exception):
    """Raised if the page cache is not in the state that a measurement needs."""


def total_nbytes(files: Iterable[Path]) -> int:
    """Return the total size of files, in bytes."""
    return sum(path.stat().st_size for path in files)


def resident_share(files: Sequence[Path]) -> float | None:
    """Return the share of the files' bytes in the page cache; None if the system does not report it."""
    resident = 0
    for path in files:
        with path.open("rb") as file:
            nbytes = resident_nbytes(file.fileno(), 0, path.stat().st_size)
        if nbytes is None:
            return None
        resident += nbytes
    return resident / max(1, total_nbytes(files))


def forget(files: Iterable[Path]) -> None:
    """Drop the files' pages from the page cache. Pages that are dirty, or mapped by a process, may remain.

    On macOS, which has no system call for this, all pages remain.
    """
    for path in files if hasattr(os, "posix_fadvise") else ():
        with path.open("rb") as file:
            with suppress(OSError):  # Another user's file on some systems.
                os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def remember(files: Iterable[Path]) -> None:
    """Read the files, so that they are in the page cache."""
    buffer = bytearray(_READ_NBYTES)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def prepare(to_read: Sequence[Path], to_forget: Sequence[Path], *, cold: bool, needed_nbytes: int) -> None:
    """Make the page cache cold or warm, and check it, because other processes may need memory at any moment.

    Args:
        to_read: the files that the loader reads. Warm: all of their bytes are in the page cache.
        to_forget: all files of the measurement. Cold: none of their bytes are in the page cache.
        needed_nbytes: bytes of memory that the loader will need, see `touch_memory`.
    """
    share: float | None = None
    for _ in range(3):
        if cold:
            forget(to_forget)
        else:
            remember(to_read)
        touch_memory(needed_nbytes)
        share = resident_share(to_forget if cold else to_read)
        if share is None:
            raise NotPrepared("the system does not report what is in the page cache (cachestat, mincore)")
        if share <= _COLD_SHARE if cold else share >= _WARM_SHARE:
            return
    raise NotPrepared(f"{100 * (share or 0):.1f} % of the files are in the page cache after three attempts")


def touch_memory(nbytes: int) -> None:
    """Write to free memory and free it again, so that each measured process gets memory at the same cost.

    A virtual machine that returned free memory to its host gets it back by host page faults, which are slow. Without
    this call, a process would be faster if another process had freed memory before. The page cache is not touched.
    """
    nbytes = min(nbytes, (proc_nbytes("meminfo", "MemFree") or 0) * 8 // 10)
    with mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        pages = np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE]
        pages[:] = 1
        del pages


def num_cpus() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


def cpu_seconds() -> tuple[float, int]:
    """Return the busy seconds of all processors of the machine since it started, and the number of processors.

    Time that the host of a virtual machine took ("steal") counts as busy.
    """
    lines = Path("/proc/stat").read_text().splitlines()
    user, nice, system, _, _, irq, softirq, steal = map(int, lines[0].split()[1:9])
    ticks = user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK"), sum(bool(re.match(r"cpu\d", line)) for line in lines)


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware and system of a measurement, without host names and paths."""

    cpu: str
    num_cpus: int
    memory_nbytes: int
    kernel: str
    python: str
    file_system: str
    drive: str | None
    """Model of the drive, or else its device name, such as "vda". None: not on a single block device."""
    load_average: float
    """Load average of the last minute, before the first measurement."""


def describe(folder: Path) -> Machine:
    """Return a description of the machine now, and of the drive that a folder is on."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return Machine(
        cpu=cpu[1] if cpu else platform.processor() or platform.machine(),
        num_cpus=num_cpus(),
        memory_nbytes=proc_nbytes("meminfo", "MemTotal") or 0,
        kernel=platform.release(),
        python=platform.python_version(),
        file_system=filesystem_of(folder).kind,
        drive=drive_of(folder),
        load_average=os.getloadavg()[0],
    )


def drive_of(folder: Path) -> str | None:
    """Return the model of a folder's drive, or else its device name, such as "vda"; None: not a single block device."""
    device_id = folder.stat().st_dev
    device = Path(f"/sys/dev/block/{os.major(device_id)}:{os.minor(device_id)}")
    if not device.exists():
        return None
    whole = device.resolve()
    if (whole / "partition").exists():
        whole = whole.parent
    model = whole / "device/model"
    return model.read_text().strip() if model.exists() else whole.name


def direct_gb_per_s(files: Sequence[Path]) -> float | None:
    """Return the speed of direct reads of the files, in GB/s (10^9 bytes); None if direct reads are not supported.

    The reads bypass the page cache and do not change it.
    """
    files = [path for path in files if path.stat().st_size >= BLOCK]
    if not files or refuses_direct(files[0]) is not None:
        return None
    requests = [(path, at) for path in files for at in range(0, path.stat().st_size - BLOCK + 1, _DIRECT_NBYTES)]
    own, started = local(), time.monotonic()

    def read(request: tuple[Path, int]) -> int:
        if time.monotonic() - started > _DIRECT_SECONDS:
            return 0
        if not hasattr(own, "buffer"):
            # Huge pages: with small pages, drives split a request into many small ones, and are slower.
            own.buffer = mmap.mmap(-1, _DIRECT_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            own.buffer.madvise(mmap.MADV_HUGEPAGE)
        file = os.open(request[0], os.O_RDONLY | os.O_DIRECT)
        try:
            return os.preadv(file, [own.buffer], request[1])
        finally:
            os.close(file)

    with ThreadPoolExecutor(_DIRECT_THREADS) as threads:
        nbytes = sum(threads.map(read, requests[: _MAX_DIRECT_NBYTES // _DIRECT_NBYTES]))
    return nbytes / (time.monotonic() - started) / 1e9
