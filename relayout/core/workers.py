"""Work on several threads and in child processes: how it starts, how it stops, and what a forked child discards.

Workers can be interrupted. The first error stops all of their threads and is raised. A child process imports the same
modules as its parent, and nothing from the working folder, which may be an untrusted checkpoint.
"""

from __future__ import annotations

import atexit
import errno
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, cast

Child: TypeAlias = subprocess.Popen[bytes]
PIPE, QUIET, WITH_STDOUT = subprocess.PIPE, subprocess.DEVNULL, subprocess.STDOUT
ADVICE_ON_THREADS = (
    "a limit of this process, user or container is reached: use fewer threads, or raise ulimit -u or -l, or pids.max"
)
"""Advice for the case that the system cannot start another thread, or lock more memory (EAGAIN)."""
_LOG_POLL_SECONDS = 0.5


def start_child(
    module: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    within: Sequence[str] = (),
    **streams: Any,
) -> Child:
    """Start `python -m MODULE ARGUMENTS` in a separate session. Python code is started in no other way.

    Args:
        environment: of the child, without variables that would let it import from the working folder; None: this
            process's environment.
        within: words to put before the command: a program that then executes it in its place, such as `nsenter`.
        streams: `stdin`, `stdout`, `stderr` and `bufsize`, as for `subprocess.Popen`.
    """
    command = [*within, sys.executable, "-P", *_inherited_flags(), "-m", module, *arguments]
    safe = _safe_environment(os.environ if environment is None else environment)
    return subprocess.Popen(command, env=safe, start_new_session=True, **streams)


def _inherited_flags() -> list[str]:
    """Return the flags that isolate this process, so that its children are isolated, too."""
    flags = {"-I": sys.flags.isolated, "-E": sys.flags.ignore_environment, "-s": sys.flags.no_user_site}
    return [flag for flag, is_set in {**flags, "-S": sys.flags.no_site}.items() if is_set]


def _safe_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which no descendant imports modules from the working folder or relative to it."""
    safe = {name: value for name, value in environment.items() if name not in ("PYTHONPATH", "PYTHONSTARTUP")}
    folders = environment.get("PYTHONPATH", "").split(os.pathsep)
    kept = [folder for folder in folders if Path(folder).is_absolute() and not _is_working_folder(folder)]
    return {**safe, "PYTHONSAFEPATH": "1", **({"PYTHONPATH": os.pathsep.join(kept)} if kept else {})}


def _is_working_folder(folder: str) -> bool:
    with suppress(OSError):
        return Path(folder).samefile(".")
    return False


def wait_for_child(child: Child, log: Path, silence_seconds: float) -> int | None:
    """Wait for a child as long as its log grows. At the end, or after an error here, kill it and its descendants.

    Returns:
        The exit status of the child; None: it wrote nothing for `silence_seconds`.
    """
    nbytes, since = 0, time.monotonic()
    try:
        while True:
            with suppress(subprocess.TimeoutExpired):
                return child.wait(_LOG_POLL_SECONDS)
            now = time.monotonic()
            if (size := log.stat().st_size) != nbytes:
                nbytes, since = size, now
            elif now - since > silence_seconds:
                return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


class Forked(Protocol):
    """An object with locks or threads."""

    def after_fork(self) -> None:
        """Replace locks and discard threads. Called in a forked child, which has a single thread."""


_known: set[weakref.ref[Any]] = set()


def remake_in_child(instance: Forked) -> None:
    """Call `instance.after_fork` in each child forked while `instance` exists; keeps only a weak reference.

    A thread of the parent may have held its locks, and does not exist in the child.
    """
    _known.add(weakref.ref(instance, _known.discard))


def _after_fork() -> None:
    for reference in list(_known):
        instance = reference()
        if instance is not None:
            instance.after_fork()


os.register_at_fork(after_in_child=_after_fork)


Item = TypeVar("Item")
State = TypeVar("State")
Result = TypeVar("Result")

_POLL_SECONDS = 0.1

_worker = threading.local()
"""Thread-local: `stop` is the `Stop` that a worker's thread obeys."""


_live: set[weakref.ref[Workers[Any, Any]]] = set()


@atexit.register
def _cancel_all() -> None:
    """Stop workers before the interpreter shuts down; joining a daemon thread later would hang."""
    for reference in list(_live):  # A set, as other threads still run and a WeakSet could change during iteration.
        workers = reference()
        if workers is not None:
            workers.cancel()


class Stopped(RuntimeError):
    """The work was canceled before it was complete.

    In a worker: another worker failed. In `join`: the interpreter is shutting down, or this process was forked while
    the work ran.
    """


class Stop:
    """A request to stop, shared by workers and the threads that wait for them. Thread-safe."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.requested = False
        self.is_lost = False
        """True if this process was forked while the work ran: the threads exist only in its parent."""
        remake_in_child(self)

    def request(self) -> None:
        """Request all workers to stop, and wake those that wait."""
        with self.condition:
            self.requested = True
            self.condition.notify_all()

    def check_process(self) -> None:
        """Raise Stopped if this process was forked while the work ran."""
        if self.is_lost:
            raise Stopped("this process was forked while the work ran; its threads exist only in the parent process")

    def after_fork(self) -> None:
        self.condition = threading.Condition()
        self.requested = self.is_lost = True


@contextmanager
def heeding(stop: Stop) -> Iterator[None]:
    """Let `pause` and `current_stop` in this thread obey `stop`, until the block ends."""
    before = current_stop()
    _worker.stop = stop
    try:
        yield
    finally:
        _worker.stop = before


def current_stop() -> Stop | None:
    """Return the `Stop` that this thread obeys; None if it has none."""
    stop: Stop | None = getattr(_worker, "stop", None)
    return stop


def check_stop(stop: Stop | None) -> None:
    """Raise Stopped if a stop was requested."""
    if stop is not None and stop.requested:
        raise Stopped("the work was canceled")


def pause(seconds: float) -> None:
    """Sleep; in a worker, raise Stopped as soon as a stop is requested."""
    stop = current_stop()
    if stop is None:
        time.sleep(seconds)
        return
    with stop.condition:
        if stop.condition.wait_for(lambda: stop.requested, seconds):
            raise Stopped("another worker failed, or the work was canceled")


def each(work: Callable[[Item], Result], items: Sequence[Item], num_threads: int) -> list[Result]:
    """Return the result of `work` for each item, in order; with several threads if there are several items."""
    if min(num_threads, len(items)) < 2:
        return [work(item) for item in items]
    done: list[Result | None] = [None] * len(items)

    def put(_: None, index: int) -> int:
        done[index] = work(items[index])
        return 0

    Workers(min(num_threads, len(items)), range(len(items)), lambda: None, put).run()
    return cast("list[Result]", done)


def _ended(*_: Any) -> Any:
    raise AssertionError("the workers have ended")


class Workers(Generic[Item, State]):
    """Threads (`num_threads`) that take items in order and call `work(state, item)`, each with its own state.

    `resize` changes the number of threads.
    """

    def __init__(
        self,
        num_threads: int,
        items: Iterable[Item],
        make_state: Callable[[], State],
        work: Callable[[State, Item], int],
        stop: Stop | None = None,
    ) -> None:
        """Take `work`, which returns the number of bytes it processed, for progress."""
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
        self._num_running = 0
        """Number of threads that take items."""
        self._num_working = 0
        self._num_ended = 0
        self._num_started = 0
        self._num_done = 0
        self._is_exhausted = num_threads == 0
        """True if every item has been started."""
        remake_in_child(self)

    def run(self, on_progress: Callable[[int], None] | None = None) -> None:
        """Call `start`, then `join`; no thread is working on return."""
        try:
            self.start()
            self.join(on_progress)
        finally:
            self.cancel()

    def start(self) -> None:
        """Start the threads. Raises OSError if the system cannot start another thread (EAGAIN)."""
        _live.add(weakref.ref(self, _live.discard))
        try:
            for _ in range(self._num_threads):
                self._start_thread()
        except BaseException:
            self.cancel()
            raise

    def _start_thread(self) -> bool:
        """Start another thread; return False if enough are running. Raises OSError if the system cannot start one."""
        with self._lock:
            if self._num_running >= self._num_threads:
                return False
            self._num_running += 1
        thread = threading.Thread(target=self._run, name=f"relayout-{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # Python raises RuntimeError if pthread_create fails.
            with self._lock:
                self._num_running -= 1
            raise OSError(errno.EAGAIN, f"{error}; {ADVICE_ON_THREADS}") from None
        self._threads.append(thread)
        return True

    def resize(self, num_threads: int) -> None:
        """Change the number of threads. Called by `work`.

        New threads are started, if the system can; excess threads end after their item.
        """
        with self._lock:
            self._num_threads = num_threads
        with suppress(OSError):
            while not (self._stop.requested or self._is_exhausted) and self._start_thread():
                pass

    def join(self, on_progress: Callable[[int], None] | None = None) -> None:
        """Wait for all items and call `on_progress` with the bytes done so far; no thread is working on return.

        Raises:
            the first error of a worker, or KeyboardInterrupt.
            Stopped: no worker failed, but items are left: another thread called `cancel`, or this process was forked.
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
                del error  # Breaks the cycle of error, traceback and this frame, which would delay freeing buffers.
        self._stop.check_process()
        if not self._is_exhausted or self._num_done < self._num_started:
            raise Stopped("the work was canceled before it was complete: the interpreter is shutting down")

    def cancel(self) -> None:
        """Start no further items and wait for those in progress; no thread is working on return."""
        self._stop.request()
        if threading.current_thread() in self._threads or sys.is_finalizing():
            # The garbage collector may call this in a worker. After `_cancel_all`, no thread remains to wait for.
            return
        # Thread.join is not enough: before Python 3.13 a join interrupted by a signal marks its thread as ended.
        with self._changed:
            self._changed.wait_for(lambda: self._num_working == 0)
        for thread in self._threads:
            thread.join()
        _live.discard(weakref.ref(self))
        # Break reference cycles between the work callback and self.
        self._items = iter(())
        self._work = self._make_state = _ended

    def after_fork(self) -> None:
        # The child has none of the threads and must not wait for them.
        self._lock = threading.Lock()
        self._changed = threading.Condition()
        self._threads = []
        self._num_working = self._num_ended = 0
        _live.discard(weakref.ref(self))

    def _run(self) -> None:
        with self._changed:
            is_counted = not self._stop.requested
            self._num_working += is_counted
        try:
            if is_counted:
                self._run_items()
        except Stopped:
            pass
        except BaseException as error:
            with self._lock:
                self._error = self._error or error
            self._stop.request()
        finally:
            with self._changed:
                self._num_working -= is_counted
                self._num_ended += 1
                self._changed.notify_all()

    def _run_items(self) -> None:
        _worker.stop = self._stop
        state = self._make_state()
        while True:
            with self._lock:
                if self._stop.requested:
                    return
                if self._num_running > self._num_threads:
                    self._num_running -= 1
                    return
                try:
                    item = next(self._items)
                except StopIteration:
                    self._is_exhausted = True
                    return
                self._num_started += 1
            nbytes = self._work(state, item)
            with self._lock:
                self.done_nbytes += nbytes
                self._num_done += 1
