"""Keeps a bounded number of files open for many threads: opened when first used, closed when others are wanted more."""

from __future__ import annotations

import resource
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

_MAX_OPEN_FILES = 64
_SHARE = 4
"""A pool takes one of so many parts of the descriptors that this process may have."""


class Closable(Protocol):
    """A file."""

    def close(self) -> None:
        """Close it; of one that was written, return when that is on the drive."""


Key = TypeVar("Key", bound=Hashable)
File = TypeVar("File", bound=Closable)


class OpenFiles(Generic[Key, File]):
    """Files by key, of which only some are open at a time. For any number of threads.

    A thread must not ask for a second file while it uses one: all threads could wait for each other.
    """

    def __init__(self, open_file: Callable[[Key], File], *, num_descriptors: int = 1) -> None:
        """`open_file` opens a file, of `num_descriptors`; never twice at once for one key, nor while it is closed."""
        self._open_file = open_file
        self._limit = _max_open_files(num_descriptors)
        self._changed = threading.Condition()
        self._files: dict[Key, File] = {}
        """What is open. Least recently used first."""
        self._users: Counter[Key] = Counter()
        self._busy: set[Key] = set()
        """What a thread opens or closes now."""

    @contextmanager
    def use(self, key: Key) -> Iterator[File]:
        """Give a file that stays open until the end of the block.

        Raises:
            OSError: it cannot be opened, or another one, for which it takes the room, not be closed.
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
        """Let the others go on while this thread opens or closes a file, which may take long."""
        self._busy.add(key)
        self._changed.release()
        try:
            yield
        finally:
            self._changed.acquire()
            self._busy.remove(key)
            self._changed.notify_all()

    def close(self) -> None:
        """Close all that are open; nobody may use any now, or later.

        Raises:
            OSError: one could not be closed. All others are.
        """
        with ExitStack() as stack:
            for file in self._files.values():
                stack.callback(file.close)
            self._files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def advice_on_limit() -> str:
    """What to do where this process can open no more files (EMFILE)."""
    return f"this process may open {_max_descriptors()} files: raise that with ulimit -n"


def _max_open_files(num_descriptors: int) -> int:
    limit = _max_descriptors()
    if limit == resource.RLIM_INFINITY:
        return _MAX_OPEN_FILES
    return max(1, min(_MAX_OPEN_FILES, limit // (_SHARE * num_descriptors)))


def _max_descriptors() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
