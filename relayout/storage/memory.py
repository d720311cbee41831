"""What this process holds in memory."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def peak_nbytes() -> int:
    """The most bytes that were ever resident."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        # Elsewhere; on Linux this would count what the process was before it became this program.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
