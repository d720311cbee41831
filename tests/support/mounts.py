"""File systems that are mounted for a test."""

from __future__ import annotations

import os
import shutil
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


@contextmanager
def mounted_xfs(place: Path) -> Iterator[Path]:
    """A file system of 320 MB whose files can share blocks, at a new folder; the test skips where it cannot be had."""
    if (program := shutil.which("mkfs.xfs", path=f"{os.environ.get('PATH', '')}:/sbin:/usr/sbin")) is None:
        pytest.skip("mkfs.xfs is not installed: package xfsprogs")
    image = place.with_suffix(".xfs")
    with image.open("xb") as file:
        file.truncate(320 * 2**20)
    subprocess.run([program, "-q", "-m", "reflink=1", str(image)], check=True)
    with mounted(place, "-o", "loop", str(image)) as folder:
        yield folder
