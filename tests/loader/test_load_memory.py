"""Loads that get no memory, thread or descriptor, or whose device fails: one clear error, and nothing left."""

from __future__ import annotations

import errno
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import faulty
from support.fake_cuda import FakeCuFile, Lanes, SlowLane
from support.loader_fixtures import (
    BLOCK,
    MIB,
    WAYS,
    assert_equal,
    child,
    fake_device,
    nothing_left_behind,
    write_model,
)
from support.patience import in_time

import relayout
from relayout.loader.backends.base import Options
from relayout.loader.sources import checkpoint

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="takes Linux's /proc and limits")

CALLS = [call for call in faulty.CALLS if call != "open"]


def assert_fails(call: Callable[[], object], kind: type[BaseException], message: str) -> BaseException:
    with nothing_left_behind(), pytest.raises(kind, match=message) as caught:
        in_time(call)
    assert type(caught.value) is kind
    return caught.value


LIMITED = """
import json, resource, sys, threading
from pathlib import Path
import relayout
from relayout.loader import view
from relayout.loader.backends import host

MIB = 2**20
folder = sys.argv[1]
threading.stack_size(2**18)

def limit(nbytes):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + nbytes, -1))

def limited(function, nbytes):
    def call(*arguments):
        limit(nbytes)
        return function(*arguments)
    return call

def load(**options):
    return relayout.load(folder, 0, names="**", **options)

def iterate(**options):
    return dict(relayout.iter_load(folder, 0, **options))

def map_all():
    relayout.open(folder, 0).close()

found = []
sums = {name: int(tensor.sum()) for name, tensor in load(backend="buffered").items()}
for module, name, nbytes, call, options in (
    (host, "allocate", 4 * MIB, load, {}),
    (view, "allocate", 4 * MIB, map_all, {}),
    (host, "allocate", 4 * MIB, load, {"verify": True}),
    (host, "allocate", 4 * MIB, load, {"tp": 1}),
    (host, "ArenaPool", 4 * MIB, iterate, {}),
    # One thread: Python waits for ever for a thread that cannot begin for lack of memory.
    (host, "reserve", 4 * MIB, load, {"backend": "direct", "threads": 1}),
    (host, "reserve", 4 * MIB, load, {"verify": True, "backend": "direct", "threads": 1}),
):
    true = getattr(module, name)
    setattr(module, name, limited(true, nbytes))
    try:
        call(**options)
        found.append(["none", ""])
    except BaseException as error:
        found.append([type(error).__name__, str(error)])
    finally:
        setattr(module, name, true)
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    found[-1].append([one.name for one in threading.enumerate()])
    found[-1].append({name: int(tensor.sum()) for name, tensor in load(backend="direct").items()} == sums)
print(json.dumps(found))
"""


def test_memory_that_the_system_refuses_is_told_with_bytes_and_purpose(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {f"odd.{n}": (torch.uint8, (9 * MIB + 1,)) for n in range(2)}
    relayout.convert(write_model(tmp_path / "source", sizes), tmp_path / "out")
    outcomes = child(LIMITED, tmp_path / "out")
    messages = ["for a rank"] * 5 + ["for a buffer"] * 2
    for (kind, text, threads, is_right), purpose in zip(outcomes, messages, strict=True):
        assert kind == "MemoryError"
        nbytes = int(text.removeprefix("cannot reserve ").partition(" ")[0])
        assert text == f"cannot reserve {nbytes} bytes {purpose}: Cannot allocate memory"
        assert nbytes > 4 * MIB
        assert threads == ["MainThread"]
        assert is_right


@pytest.fixture
def expected(place: Path) -> dict[str, torch.Tensor]:
    return faulty.stored(place / "out", "model-rank-0-*")


def test_memory_that_python_lacks_is_told_with_words(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(checkpoint, "read_table", fail)
    for call in (relayout.load, relayout.iter_load):
        assert_fails(partial(call, place / "out", 0), MemoryError, "^out of memory for objects other than tensors")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**40, 2**41))
    message = rf"for objects other than tensors and buffers: this process may have {2**40} bytes \(ulimit -v\)$"
    assert_fails(partial(relayout.load, place / "out", 0, names="**"), MemoryError, message)


@pytest.mark.parametrize(
    ("way", "name"),
    [*((way, "load") for way in WAYS), *(("auto", name) for name in CALLS if name != "load"), ("gds", "iter_load")],
    indirect=["way"],
)
def test_a_thread_that_does_not_start_ends_the_load(
    name: str, way: str, place: Path, monkeypatch: pytest.MonkeyPatch, expected: dict[str, torch.Tensor]
) -> None:
    call = partial(faulty.CALLS[name], place / "out", way, {})
    true_start = threading.Thread.start
    for number in (1,) if way == "toy" else (1, 3):  # The toy has one thread.
        started: list[str] = []

        def start(thread: threading.Thread, number: int = number, started: list[str] = started) -> None:
            if thread.name.startswith("relayout"):
                started.append(thread.name)
                if len(started) == number:
                    raise RuntimeError("can't start new thread")
            true_start(thread)

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            error = assert_fails(call, BlockingIOError, "can't start new thread; .*: use fewer threads, or raise")
        assert isinstance(error, OSError)
        assert error.errno == errno.EAGAIN
        assert str(error).count("use fewer threads") == 1
    assert_equal(relayout.load(place / "out", 0, backend=way), expected)


@pytest.fixture(params=["pinned", "gds"])
def lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lanes]:
    """Of the fake device that loads go to; all of its memory is to be given back."""
    lanes = Lanes()
    for _ in fake_device(monkeypatch, request.param, lanes):
        yield lanes
        lanes.fails = ""


DEVICE_CALLS = ("load", "load into", "iter_load")


@pytest.mark.parametrize(
    ("name", "method"),
    [*(("load", method) for method in ("send", "buffer", "settle")), ("load into", "send"), ("iter_load", "settle")],
)
def test_copies_and_events_that_fail_are_told_as_the_device_does(
    lanes: Lanes,
    name: str,
    method: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    expected: dict[str, torch.Tensor],
) -> None:
    true_drain = SlowLane.drain

    def drain(lane: SlowLane) -> None:
        true_drain(lane)
        raise RuntimeError("CUDA error: of all that comes after the first")

    monkeypatch.setattr(SlowLane, "drain", drain)
    lanes.fails = method
    error = assert_fails(
        lambda: faulty.CALLS[name](place / "out", "auto", {}), RuntimeError, f"^CUDA error: {method}: an illegal memory"
    )
    assert (lanes.held, lanes.in_flight) == (0, 0), "pinned memory is kept by the error"
    assert error.__context__ is None
    lanes.fails = ""
    assert_equal(relayout.load(place / "out", 0), expected)


@pytest.mark.parametrize("name", DEVICE_CALLS)
def test_memory_that_a_device_lacks_is_told_with_bytes(
    lanes: Lanes, name: str, place: Path, monkeypatch: pytest.MonkeyPatch, expected: dict[str, torch.Tensor]
) -> None:
    true_empty = torch.empty

    def empty(*size: Any, device: Any = None, **options: Any) -> torch.Tensor:
        if device is not None and size and type(size[0]) is int and size[0] > BLOCK:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore lines")
        return true_empty(*size, device=device, **options)

    def call() -> None:
        faulty.CALLS[name](place / "out", "auto", {})

    if name != "load into":  # Its tensors are there.
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", empty)
            assert_fails(call, MemoryError, r"^cannot allocate \d+ bytes on cpu: CUDA out of memory. Tried to [^\n]*$")
    with monkeypatch.context() as patch:
        patch.setattr(lanes, "_refuse", True)
        assert_fails(call, MemoryError, r"^cannot pin \d+ bytes of host memory$")
    assert (lanes.held, lanes.in_flight) == (0, 0)
    assert_equal(relayout.load(place / "out", 0), expected)


@pytest.mark.parametrize("backend", ["direct", "buffered"])
def test_memory_that_a_device_lacks_for_what_was_read_on_the_host(
    backend: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_to = torch.Tensor.to

    def to(tensor: torch.Tensor, device: Any) -> torch.Tensor:
        if tensor.nbytes > MIB:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate.\nMore lines")
        return true_to(tensor, device)

    # Else "meta" is refused: of the devices that need no driver, only this one is not the host's memory.
    monkeypatch.setattr(Options, "kind", "a device")
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", to)
        message = r"^cannot allocate \d+ bytes on meta: CUDA out of memory. Tried to allocate.$"
        for read in (relayout.load, lambda *given, **options: list(relayout.iter_load(*given, **options))):
            assert_fails(partial(read, place / "out", 0, backend=backend, device="meta"), MemoryError, message)
    assert len(relayout.load(place / "out", 0, backend=backend, device="meta")) == 33


def test_an_arena_that_cannot_be_registered_is_an_error_that_leaves_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch, expected: dict[str, torch.Tensor]
) -> None:
    fake, lanes = FakeCuFile(), Lanes()

    def fail(arena: torch.Tensor) -> bool:
        fake.registered[arena.data_ptr()] = arena.numel()
        raise OSError(errno.EIO, "cuFile cannot register it")

    for _ in fake_device(monkeypatch, "gds", lanes, fake):
        with monkeypatch.context() as patch:
            patch.setattr(fake, "register", fail)
            assert_fails(lambda: relayout.load(place / "out", 0), OSError, "cuFile cannot register it")
        fake.assert_restored()
        assert_equal(relayout.load(place / "out", 0), expected)
