"""A cgroup with a limit of memory, of version 1 or 2, for this process and those that it starts."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_ROOTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory"))
_FILES = {
    "cgroup.controllers": ("memory.max", "anon"),
    "memory.limit_in_bytes": ("memory.limit_in_bytes", "total_rss"),
}
"""By a file that shows the version: the file of the limit, and the counter of own memory."""


class Group:
    """A cgroup for this process and those that it starts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._limit, self._own = next(names for file, names in _FILES.items() if (path / file).exists())
        self.peak_nbytes = 0

    def _stat(self) -> dict[str, int]:
        lines = (line.split() for line in (self.path / "memory.stat").read_text().splitlines())
        return {name: int(value) for name, value in lines}

    @contextmanager
    def limited(self, nbytes: int) -> Iterator[None]:
        """Run the block inside, with so much memory; `peak_nbytes` is what its processes used at most, of their own."""
        (self.path / self._limit).write_text(str(nbytes))
        before, over = self._place(), threading.Event()
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

        def watch() -> None:
            while not over.wait(0.005):
                self.peak_nbytes = max(self.peak_nbytes, self._stat()[self._own])

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()
            (before / "cgroup.procs").write_text(str(os.getpid()))

    def _place(self) -> Path:
        """The cgroup of this process."""
        kind = "" if self._limit == "memory.max" else "memory"
        lines = (line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines())
        return self.path.parent / next(where for _, controllers, where in lines if controllers == kind).lstrip("/")


@contextmanager
def new_group() -> Iterator[Group]:
    """A new cgroup.

    Raises:
        SystemExit: there can be none.
    """
    name = f"relayout-bench-{os.getpid()}-{time.monotonic_ns()}"
    for root in _ROOTS:
        with suppress(OSError):
            (root / name).mkdir()
            if (root / name / "memory.stat").exists():
                break
            (root / name).rmdir()
    else:
        raise SystemExit("no memory controller of cgroups can be written to here")
    try:
        yield Group(root / name)
    finally:
        for _ in range(100):  # Its last process may still be ending.
            with suppress(OSError):
                (root / name).rmdir()
                break
            time.sleep(0.05)
