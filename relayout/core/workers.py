"""Runs work items on a few threads: bounded, interruptible, the first error wins and everybody stops."""

from __future__ import annotations

import atexit
import errno
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from relayout.core.forks import remake_in_child

Item = TypeVar("Item")
State = TypeVar("State")

_POLL_SECONDS = 0.1


_live: set[weakref.ref[Workers[Any, Any]]] = set()


@atexit.register
def _cancel_all() -> None:
    """End threads while they can still run: later, whoever waits for one, waits for ever."""
    for reference in list(_live):  # Other threads go on: a WeakSet could change under the loop.
        workers = reference()
        if workers is not None:
            workers.cancel()


class Stopped(RuntimeError):
    """The work was given up before its end.

    Inside a worker: because another one failed. For whoever waits: because the interpreter ends, or this process was
    forked in the middle of it.
    """


class Stop:
    """Tells workers to stop."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.requested = False
        self.is_lost = False
        """Whether this process was forked in the middle of the work: the threads are its parent's."""
        remake_in_child(self)

    def request(self) -> None:
        """Ask all workers to stop, and wake those that wait for their turn."""
        with self.condition:
            self.requested = True
            self.condition.notify_all()

    def check_process(self) -> None:
        """Refuse to go on in a process that was forked in the middle of the work.

        Raises:
            Stopped: it was.
        """
        if self.is_lost:
            raise Stopped("this process was forked in the middle of the work, whose threads are its parent's")

    def after_fork(self) -> None:
        """See `forks.Forked`."""
        self.condition = threading.Condition()
        self.requested = self.is_lost = True


def _no_work(state: Any, item: Any) -> int:
    raise AssertionError("the work is over")


def _no_state() -> Any:
    raise AssertionError("the work is over")


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
        self._changed = threading.Condition()
        self._num_working = 0
        self._num_ended = 0
        self._num_begun = 0
        self._num_done = 0
        self._is_used_up = num_threads == 0
        """Whether there are no more items to begin."""
        remake_in_child(self)

    def run(self, on_progress: Callable[[int], None] | None = None) -> None:
        """Do all the work: `start` and `join`."""
        try:
            self.start()
            self.join(on_progress)
        finally:
            self.cancel()

    def start(self) -> None:
        """Start the threads.

        Raises:
            OSError: the system gives no more threads.
        """
        _live.add(weakref.ref(self, _live.discard))
        try:
            for number in range(self._num_threads):
                thread = threading.Thread(target=self._run, name=f"relayout-{number}", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # All that Python says where the system gives no more threads.
                    raise OSError(errno.EAGAIN, str(error)) from None
                self._threads.append(thread)
        except BaseException:
            self.cancel()
            raise

    def join(self, on_progress: Callable[[int], None] | None = None) -> None:
        """Wait for all items, calling `on_progress` with the bytes done so far; nobody works any more on return.

        Raises:
            the first error of a worker, or KeyboardInterrupt.
            Stopped: items are left, though none has failed: somebody else has cancelled the work, or this process was
                forked in the middle of it.
        """
        try:
            ended = False
            while not ended:
                with self._changed:
                    ended = self._changed.wait_for(lambda: self._num_ended == len(self._threads), _POLL_SECONDS)
                if on_progress is not None:
                    on_progress(self.done_nbytes)
        finally:
            self.cancel()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # Its traceback knows this frame: nothing that it refers to would be freed soon.
        self._stop.check_process()
        if not self._is_used_up or self._num_done < self._num_begun:
            raise Stopped("the work was given up before its end, as the interpreter is ending")

    def cancel(self) -> None:
        """Take no further items, and wait for those in work; nobody works any more on return."""
        self._stop.request()
        if threading.current_thread() in self._threads or sys.is_finalizing():
            # The garbage collector may call this in a worker; after `_cancel_all` there is nobody to wait for.
            return
        # Not by Thread.join alone: before Python 3.13, one that a signal interrupted has marked its thread as ended.
        with self._changed:
            self._changed.wait_for(lambda: self._num_working == 0)
        for thread in self._threads:
            thread.join()
        _live.discard(weakref.ref(self))
        # What the work refers to may refer to this.
        self._items = iter(())
        self._work = _no_work
        self._make_state = _no_state

    def after_fork(self) -> None:
        """See `forks.Forked`: in the child there are no threads, and nobody may wait for them."""
        self._lock = threading.Lock()
        self._changed = threading.Condition()
        self._threads = []
        self._num_working = self._num_ended = 0
        _live.discard(weakref.ref(self))

    def _run(self) -> None:
        with self._changed:
            is_wanted = not self._stop.requested
            self._num_working += is_wanted
        try:
            if is_wanted:
                self._work_off()
        except Stopped:
            pass
        except BaseException as error:
            with self._lock:
                self._error = self._error or error
            self._stop.request()
        finally:
            with self._changed:
                self._num_working -= is_wanted
                self._num_ended += 1
                self._changed.notify_all()

    def _work_off(self) -> None:
        state = self._make_state()
        while True:
            with self._lock:
                if self._stop.requested:
                    return
                try:
                    item = next(self._items)
                except StopIteration:
                    self._is_used_up = True
                    return
                self._num_begun += 1
            nbytes = self._work(state, item)
            with self._lock:
                self.done_nbytes += nbytes
                self._num_done += 1
