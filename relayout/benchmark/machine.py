"""This machine: control of page cache and memory for measurements; facts about hardware, load and drive for results."""

from __future__ import annotations

import json
import mmap
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import local
from typing import Any

import numpy as np

from relayout.core.extents import BLOCK
from relayout.errors import PlanError
from relayout.storage.local.store import refuses_direct
from relayout.storage.system import filesystem_of, proc_nbytes, resident_nbytes

_COLD_SHARE, _WARM_SHARE = 0.001, 0.99
"""Largest share of bytes in the page cache for a cold set of files, and smallest share for a warm set."""
_READ_NBYTES = 16 * 2**20
_DIRECT_NBYTES, _DIRECT_THREADS = 8 * 2**20, 8
"""Bytes of a direct request, and number of requests in flight, for the measurement of the drive's limit."""
_DIRECT_SECONDS, _MAX_DIRECT_NBYTES = 3.0, 8 * 10**9
"""Limits of that measurement: it ends after this time (seconds) or this many bytes."""
_FIO_SECONDS = 600
"""Seconds after which fio is killed: none of its jobs takes as long."""


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


def devices_of(device: str) -> tuple[str, ...]:
    """Return the devices that ranks are loaded to, in rotation.

    Args:
        device: "cpu", "cuda" for all CUDA devices that torch sees, or one of them, such as "cuda:1".

    Raises:
        PlanError: torch cannot use the device.
    """
    import torch

    if not isinstance(device, str):
        raise PlanError(f"device {device!r}, expected cpu, cuda or cuda:N", code="option")
    kind, _, number = device.partition(":")
    if device == "cpu":
        return ("cpu",)
    if kind != "cuda" or not torch.cuda.is_available():
        from relayout.loader.backends.base import resolve_device

        resolve_device(device)
        raise PlanError(f"device {device!r}, expected cpu, cuda or cuda:N", code="option")
    found = tuple(f"cuda:{index}" for index in range(torch.cuda.device_count()))
    if number and device not in found:
        raise PlanError(f"device {device!r}: torch sees {', '.join(found)}", code="option")
    return (device,) if number else found


def device_nbytes(device: str) -> int:
    """Return the bytes of a CUDA device's memory, used and free."""
    import torch

    return int(torch.cuda.get_device_properties(device).total_memory)


def device_title(device: str) -> str:
    """Return the name of a device for people, such as "NVIDIA H200 (150 GB)"."""
    if device == "cpu":
        return "host memory"
    import torch

    return f"{torch.cuda.get_device_name(device)} ({device_nbytes(device) / 1e9:.0f} GB)"


@dataclass(frozen=True, slots=True)
class DriveLimit:
    """The speed of direct reads of files, beyond the page cache."""

    gb_per_s: float
    """GB/s (10^9 bytes)."""
    by: str
    """The program that measured it: "fio", or "threads of direct reads"."""


def drive_limit(files: Sequence[Path]) -> DriveLimit | None:
    """Measure the drive by direct reads of files: with fio if it is installed; None: direct reads are not supported."""
    if shutil.which("fio") is not None:
        names = ":".join(str(path).replace(":", r"\:") for path in files)  # fio splits at other colons.
        seconds = f"--runtime={_DIRECT_SECONDS:.0f}"
        with suppress(subprocess.SubprocessError, ValueError, LookupError):  # Its build lacks an engine.
            read = fio(f"--filename={names}", seconds, "--file_service_type=sequential", "--rw=read", "--readonly")
            if nbytes_per_s := float(read["read"]["bw_bytes"]):
                return DriveLimit(nbytes_per_s / 1e9, "fio")
    found = direct_gb_per_s(files)
    return None if found is None else DriveLimit(found, "threads of direct reads")


def fio(*options: str) -> dict[str, Any]:
    """Run fio with requests like ours, 8 of 8 MiB in flight, and return its results of the job.

    Raises:
        SubprocessError, ValueError, LookupError: it has failed, or has not ended within minutes.
    """
    command = ["fio", "--name=limit", "--direct=1", "--ioengine=libaio", "--iodepth=8", "--bs=8M", *options]
    # Its buffers are in huge pages: with small ones, a drive that takes few segments splits each request. On the
    # virtual machines where this was written, that was a third of the speed.
    environment = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    command += ["--group_reporting", "--output-format=json"]
    run = subprocess.run(command, capture_output=True, check=True, env=environment, timeout=_FIO_SECONDS)
    job: dict[str, Any] = json.loads(run.stdout[run.stdout.index(b"{") :])["jobs"][0]
    return job


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
