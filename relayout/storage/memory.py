"""Memory of this process and of the machine."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_CONTROLLERS = {
    "": ("", "memory.max", "memory.current", ""),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}
"""The memory controllers of cgroups, versions 2 and 1, by the name in /proc/self/cgroup: the folder, the files of limit
and usage, and how the counters of a cgroup with those below it begin."""


def peak_nbytes() -> int:
    """Peak resident memory in bytes."""
    # ru_maxrss is not for Linux, where it includes the process image before exec.
    unit = 1 if sys.platform == "darwin" else 1024
    return proc_nbytes("self/status", "VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def available_nbytes() -> int:
    """Memory that this process could get without swapping: of the system, and of the cgroups that it is in."""
    system = proc_nbytes("meminfo", "MemAvailable") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([system, *_left_in_cgroups()])


def _left_in_cgroups() -> Iterator[int]:
    """What each cgroup of this process has left of its limit. Pages of files can be dropped, and count as left."""
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
    """A field that a file below /proc has in kB, in bytes; None if there is none."""
    with suppress(OSError, StopIteration):
        lines = (_PROC / file).read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
    return None
