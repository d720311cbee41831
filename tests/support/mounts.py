"""File systems that are mounted for a test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(place: Path, *options: str) -> Iterator[Path]:
    """What mount(8) puts at a new folder; the test skips where it cannot be had."""
    place.mkdir(exist_ok=True)
    if os.getuid() or not sys.platform.startswith("linux"):
        pytest.skip("mounting takes a superuser of Linux")
    done = subprocess.run(["mount", *options, str(place)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def mounted_tmpfs(place: Path, size: str) -> AbstractContextManager[Path]:
    """A file system of that size (as mount writes it), at a new folder; the test skips where it cannot be had."""
    return mounted(place, "-t", "tmpfs", "-o", f"size={size},mode=755", "tmpfs")
