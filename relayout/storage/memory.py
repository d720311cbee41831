"""Memory use of this process."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def peak_nbytes() -> int:
    """Peak resident memory in bytes."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        # Not used on Linux, where ru_maxrss includes the process image before exec.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
