"""A thread-safe pool of open files: opened on first use, the least recently used closed at a limit."""

from __future__ import annotations

import resource
import sys
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Generic, TypeVar

from relayout.storage.protocols import Closable

_MAX_OPEN_FILES = 64
_SHARE = 4
"""A pool uses at most 1 / _SHARE of the process's descriptor limit."""


Key = TypeVar("Key", bound=Hashable)
File = TypeVar("File", bound=Closable)


class OpenFiles(Closable, Generic[Key, File]):
    """Files by key, of which a bounded number is open at a time. Thread-safe.

    A thread must not request a second file while it uses one: threads could deadlock.
    """

    def __init__(self, open_file: Callable[[Key], File], *, num_descriptors: int = 1) -> None:
        """Keep files open that `open_file` opens by a key; each uses `num_descriptors`.

        Calls for one key never overlap each other, or the closing of its file.
        """
        self._open_file = open_file
        self._limit = max(1, min(_MAX_OPEN_FILES, _max_descriptors() // (_SHARE * num_descriptors)))
        self._changed = threading.Condition()
        self._files: dict[Key, File] = {}
        """Open files, least recently used first."""
        self._users: Counter[Key] = Counter()
        self._busy: set[Key] = set()
        """Keys whose file a thread is opening or closing."""

    @contextmanager
    def use(self, key: Key) -> Iterator[File]:
        """Yield the file of a key, which stays open until the block ends.

        Raises:
            OSError: the file cannot be opened, or the file that it replaces cannot be closed.
        """
        file = self._take(key)
        try:
            yield file
        finally:
            with self._changed:
                self._users[key] -= 1
                self._changed.notify_all()

    def _take(self, key: Key) -> File:
        with self._changed:
            while key not in self._files:
                idle = next((other for other in self._files if not self._users[other]), None)
                if key in self._busy:
                    self._changed.wait()
                elif len(self._files) + len(self._busy) < self._limit:
                    with self._unlocked(key):
                        opened = self._open_file(key)
                    self._files[key] = opened
                elif idle is not None:
                    closed = self._files.pop(idle)
                    with self._unlocked(idle):
                        closed.close()
                else:
                    self._changed.wait()
            self._files[key] = self._files.pop(key)
            self._users[key] += 1
            return self._files[key]

    @contextmanager
    def _unlocked(self, key: Key) -> Iterator[None]:
        """Release the lock while this thread opens or closes a file, which may take long."""
        self._busy.add(key)
        self._changed.release()
        try:
            yield
        finally:
            self._changed.acquire()
            self._busy.remove(key)
            self._changed.notify_all()

    def close(self) -> None:
        """Close all open files, also if one cannot be closed. Nobody may use the pool then, nor afterwards."""
        with ExitStack() as stack:
            for file in self._files.values():
                stack.callback(file.close)
            self._files.clear()


def advice_on_limit() -> str:
    """Advice for EMFILE: the process has reached its limit of open files."""
    return f"this process may open {_max_descriptors()} files: raise that with ulimit -n"


def _max_descriptors() -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit
