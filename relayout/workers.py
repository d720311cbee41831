"""Runs work items on a few threads: bounded, interruptible, the first error wins and everybody stops."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Generic, TypeVar

Item = TypeVar("Item")
State = TypeVar("State")

_POLL_SECONDS = 0.1


class Stopped(Exception):
    """Raised inside a worker whose work is no longer wanted, because another one failed."""


class Stop:
    """Tells workers to stop."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.requested = False

    def request(self) -> None:
        """Ask all workers to stop, and wake those that wait for their turn."""
        with self.condition:
            self.requested = True
            self.condition.notify_all()


class Turns:
    """Lets work on one key happen in order: turn 0, 1, 2 ... whichever threads hold them.

    Deadlock-free as long as items are started in turn order.
    """

    def __init__(self, stop: Stop) -> None:
        self._stop = stop
        self._next: dict[int, int] = {}

    def wait(self, key: int, turn: int) -> None:
        """Return when it is the turn's turn.

        Raises:
            Stopped: the work was given up.
        """
        with self._stop.condition:
            while self._next.get(key, 0) != turn:
                if self._stop.requested:
                    raise Stopped
                self._stop.condition.wait()

    def done(self, key: int) -> None:
        """Let the next turn of this key go on."""
        with self._stop.condition:
            self._next[key] = self._next.get(key, 0) + 1
            self._stop.condition.notify_all()


class Workers(Generic[Item, State]):
    """`num_threads` threads that take items in order and call `work(state, item)`, each with a state of its own."""

    def __init__(
        self,
        num_threads: int,
        items: Iterable[Item],
        make_state: Callable[[], State],
        work: Callable[[State, Item], int],
        stop: Stop | None = None,
    ) -> None:
        """`work` returns the bytes it dealt with, for progress."""
        self.done_nbytes = 0
        self._num_threads = num_threads
        self._items = iter(items)
        self._make_state = make_state
        self._work = work
        self._lock = threading.Lock()
        self._stop = stop or Stop()
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads."""
        try:
            for number in range(self._num_threads):
                thread = threading.Thread(target=self._run, name=f"relayout-{number}", daemon=True)
                self._threads.append(thread)
                thread.start()
        except BaseException:
            self.cancel()
            raise

    def join(self, on_progress: Callable[[int], None] | None = None) -> None:
        """Wait for all items, calling `on_progress` with the bytes done so far; all threads have ended on return.

        Raises:
            the first error of a worker, or KeyboardInterrupt.
        """
        try:
            for thread in self._threads:
                while thread.is_alive():
                    thread.join(_POLL_SECONDS)
                    if on_progress is not None:
                        on_progress(self.done_nbytes)
        finally:
            self.cancel()
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """Take no further items, and wait for those in work; no thread does anything more after the return."""
        self._stop.request()
        for thread in self._threads:
            # One that has not come up yet cannot be joined; it will find that it has nothing to do.
            with suppress(RuntimeError):
                thread.join()

    def _run(self) -> None:
        try:
            if self._stop.requested:
                return
            state = self._make_state()
            while True:
                with self._lock:
                    if self._stop.requested:
                        return
                    try:
                        item = next(self._items)
                    except StopIteration:
                        return
                nbytes = self._work(state, item)
                with self._lock:
                    self.done_nbytes += nbytes
        except Stopped:
            pass
        except BaseException as error:
            with self._lock:
                self._error = self._error or error
            self._stop.request()
