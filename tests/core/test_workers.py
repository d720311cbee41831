"""Workers that somebody else cancels: whoever waits for them is never told that the work is done."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from support import loader_fixtures
from support.loader_fixtures import child
from support.patience import PATIENCE, in_time

from relayout.core.workers import Stop, Stopped, Workers, check_stop, current_stop, heeding, pause

wide = loader_fixtures.wide


def test_whoever_waits_is_told_of_items_that_were_left() -> None:
    begun, may_go_on = threading.Event(), threading.Event()

    def work(state: None, item: int) -> int:
        if item >= 10:
            begun.set()
            may_go_on.wait()
        return 1

    stop = Stop()
    workers = Workers(2, range(100), lambda: None, work, stop)
    workers.start()
    begun.wait()
    stopper = threading.Thread(target=workers.cancel)
    stopper.start()
    while not stop.requested:
        pass
    may_go_on.set()
    with pytest.raises(Stopped, match="canceled before it was complete"):
        in_time(workers.join)
    stopper.join()
    assert workers.done_nbytes < 100


def test_an_item_that_is_given_up_is_one_that_is_left() -> None:
    def work(state: None, item: int) -> int:
        raise Stopped

    with pytest.raises(Stopped, match="canceled before it was complete"):
        in_time(Workers(1, [1], lambda: None, work).run)


def test_work_that_is_not_wanted_before_it_begins_is_left() -> None:
    stop = Stop()
    stop.request()
    with pytest.raises(Stopped, match="canceled before it was complete"):
        in_time(Workers(3, range(5), lambda: None, lambda state, item: 1, stop).run)


@pytest.mark.parametrize(("num_threads", "num_items"), [(0, 0), (1, 0), (1, 5), (3, 5)])
def test_a_cancel_after_the_last_item_changes_nothing(num_threads: int, num_items: int) -> None:
    workers = Workers(num_threads, range(num_items), lambda: None, lambda state, item: 1)
    workers.start()
    in_time(workers.join)
    workers.cancel()
    in_time(workers.join)
    assert workers.done_nbytes == num_items


@pytest.mark.parametrize("call", ["load", "iter_load"])
def test_a_load_in_a_daemon_thread_returns_nothing_unfilled_at_the_end_of_the_program(wide: Path, call: str) -> None:
    """At its end the interpreter runs what was registered first last: our own end of all threads, then `show`."""
    script = f"""
import atexit, json, sys, threading

found = []
def show():
    loading.join({PATIENCE})
    print(json.dumps([loading.is_alive(), found]))

atexit.register(show)
import torch, relayout
from relayout.loader.backends.files import ReadableFiles

reading, may_read = threading.Event(), threading.Event()
true_read = ReadableFiles.read

def read(self, *rest):
    reading.set()
    may_read.wait()
    return true_read(self, *rest)

def load():
    try:
        tensors = dict(relayout.load(sys.argv[1], 0, threads=2) if "{call}" == "load" else
                       relayout.iter_load(sys.argv[1], 0, threads=2))
        found.append(len(tensors))
    except RuntimeError as error:
        found.append(str(error))

ReadableFiles.read = read
loading = threading.Thread(target=load, daemon=True)
loading.start()
reading.wait()

def go_on():
    while not any(stop.requested for stop in stops):
        pass
    may_read.set()

from relayout.core.workers import Stop
import gc
stops = [one for one in gc.get_objects() if isinstance(one, Stop)]
threading.Thread(target=go_on, daemon=True).start()
"""
    # What is registered to run at the end depends on the order of imports.
    # Of relayout nothing is imported yet: what is registered to run at the end depends on the order of imports.
    assert child(script, wide, imports="torch,xxhash,zstandard") == [
        False,
        ["the work was canceled before it was complete: the interpreter is shutting down"],
    ]


@pytest.mark.parametrize(("first", "then"), [(1, 5), (5, 1), (2, 2)])
def test_the_number_of_threads_is_what_work_says(first: int, then: int) -> None:
    lock, seen, working = threading.Lock(), list[int](), set[int]()
    changed = threading.Event()
    met = threading.Barrier(then)

    def work(state: None, item: int) -> int:
        if item == 0:
            workers.resize(then)
            changed.set()
        changed.wait(PATIENCE)
        if item < first:  # Those that are too many end after these.
            return 1
        with lock:
            working.add(threading.get_ident())
            seen.append(item)
        met.wait(PATIENCE)  # All threads at the same time, or never.
        return 1

    workers = Workers(first, range(first + 4 * then), lambda: None, work)
    in_time(workers.run)
    assert workers.done_nbytes == first + 4 * then
    assert sorted(seen) == list(range(first, first + 4 * then))
    assert len(working) == then


def test_no_more_threads_than_the_system_gives_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(state: None, item: int) -> int:
        if item == 0:
            monkeypatch.setattr(threading.Thread, "start", refuse)
            workers.resize(8)
        return 1

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    workers = Workers(1, range(50), lambda: None, work)
    workers.start()
    workers.join()  # Here, as `in_time` needs another thread.
    assert workers.done_nbytes == 50


def test_what_a_thread_heeds_ends_with_the_block() -> None:
    stop = Stop()
    with heeding(stop):
        assert current_stop() is stop
        check_stop(stop)
        pause(0)
        stop.request()
        with pytest.raises(Stopped):
            pause(60)
        with pytest.raises(Stopped):
            check_stop(current_stop())
    assert current_stop() is None
    check_stop(None)
    pause(0)
