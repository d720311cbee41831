"""Memory of this process and of the machine."""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress
from pathlib import Path


def peak_nbytes() -> int:
    """Peak resident memory in bytes."""
    # ru_maxrss is not for Linux, where it includes the process image before exec.
    unit = 1 if sys.platform == "darwin" else 1024
    return proc_nbytes("self/status", "VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def available_nbytes() -> int:
    """Memory that the system could give without swapping."""
    return proc_nbytes("meminfo", "MemAvailable") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def proc_nbytes(file: str, field: str) -> int | None:
    """A field that a file below /proc has in kB, in bytes; None if there is none."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc", file).read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
    return None
