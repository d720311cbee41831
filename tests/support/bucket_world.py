"""Writers of one bucket in a time of their own: each request of each may be delayed, repeated, or its sender's last.

The bucket is a `Shelf`. Writers are threads of which one runs at a time; they change only where one makes a request or
waits, so that a schedule is the same each time it is made from the same seed.
"""

from __future__ import annotations

import hashlib
import random
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from support.toy_store import Shelf

from relayout.core import workers
from relayout.errors import RelayoutError
from relayout.publish import bucket, claim
from relayout.storage.cloud.store import CLOUD_COST, Body, CloudStore, Version
from relayout.storage.stores import FileStat

STALL_SECONDS = 20.0
"""After so long without an answer a client asks again."""
REQUEST_SECONDS = 110.0
"""So long a request is repeated, and may still be carried out after it was given up."""
NEVER = 10**9
Result = TypeVar("Result")


class Killed(BaseException):
    """The process ends at this request."""


@dataclass(frozen=True)
class Chances:
    """How often something happens to a request."""

    delay: float = 0.0
    long_delay: float = 0.0
    lost: float = 0.0
    """The answer is lost, and the request made again."""
    late: float = 0.0
    """The request brings no answer in time, and is made again; the first one happens too, later."""
    pause: float = 0.0
    """The whole process stands still for minutes."""


@dataclass(frozen=True)
class Request:
    """What a writer asks of the bucket."""

    operation: str
    """The method of the client."""
    name: str
    act: Callable[[], Any]

    @property
    def is_harmless(self) -> bool:
        return self.operation in ("get", "stat", "list_objects")


class Bucket(Shelf):
    """Objects of which, as those of S3, equal ones have equal versions."""

    def write(self, name: str, content: bytes) -> str:
        self.objects[name] = content, hashlib.md5(content).hexdigest()
        return self.objects[name][1]


class World:
    """A bucket, its time, and those who make requests."""

    def __init__(self, seed: int = 0, chances: Chances = Chances()) -> None:
        self.bucket = Bucket("bucket")
        self.random = random.Random(seed)
        self.chances = chances
        self.now = 1000.0
        self.writers: list[Writer] = []
        self.current: Writer | None = None
        self.late: list[tuple[float, Request]] = []
        self.watch: Callable[[Writer, Request], None] = lambda writer, request: None
        """Called before each request is answered."""
        self.changed: Callable[[], None] = lambda: None
        """Called after each request that may have changed something."""
        self.ended = threading.Event()

    def apply(self, request: Request) -> Any:
        try:
            return request.act()
        finally:
            if not request.is_harmless:
                self.changed()

    def lose(self, request: Request) -> None:
        """Do what is asked for; nobody gets the answer."""
        with suppress(OSError, RelayoutError):
            self.apply(request)

    def run(self) -> None:
        """Let all writers work until each has ended."""
        for writer in self.writers:
            writer.thread.start()
        self.switch()
        assert self.ended.wait(60), "a writer hangs"
        for writer in self.writers:
            writer.thread.join()
        for _, request in sorted(self.late, key=lambda one: one[0]):
            self.lose(request)
        errors = [writer.error for writer in self.writers if writer.error is not None]
        if errors:
            raise errors[0]

    def switch(self) -> None:
        """Go to the moment at which the next writer goes on, and let it."""
        waiting = [writer for writer in self.writers if not writer.has_ended]
        if not waiting:
            self.ended.set()
            return
        following = min(waiting, key=lambda writer: (writer.wakes, writer.order))
        for one in sorted((one for one in self.late if one[0] <= following.wakes), key=lambda one: one[0]):
            self.late.remove(one)
            self.lose(one[1])
        self.now = max(self.now, following.wakes)
        self.current = following
        following.turn.release()


class Writer:
    """A person who gives a command, again and again; each time it is a new process."""

    def __init__(self, world: World, machine: str, work: Callable[[Writer], None] = lambda writer: None) -> None:
        self.world = world
        self.machine = machine
        self.pid = 0
        self.killed_at = NEVER
        """The process ends at its request of this number."""
        self.is_done_when_killed = False
        """Whether that request still happens."""
        self.num_requests = 0
        self.is_killed = False
        self.wakes = world.now + world.random.uniform(0, 0.1)
        self.order = world.random.random()
        self.turn = threading.Semaphore(0)
        self.has_ended = False
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._work, args=(work,), daemon=True)
        world.writers.append(self)

    def store(self, name: str = "out") -> CloudStore:
        return CloudStore(WorldClient(self), name)

    def begin(self, killed_at: int = NEVER, *, is_done: bool = False) -> None:
        """A new process begins."""
        self.pid += 1
        self.num_requests, self.killed_at, self.is_done_when_killed, self.is_killed = 0, killed_at, is_done, False

    def _work(self, work: Callable[[Writer], None]) -> None:
        self.turn.acquire()
        try:
            work(self)
        except BaseException as error:
            self.error = error
        self.has_ended = True
        self.world.switch()

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.wakes, self.order = self.world.now + seconds, self.world.random.random()
        if len(self.world.writers) > 1:
            self.world.switch()
            self.turn.acquire()
        else:
            self.world.now = self.wakes

    def request(self, request: Request) -> Any:
        """The answer to a request, which may be made several times, as clients do."""
        world, chances = self.world, self.world.chances
        if self.is_killed:
            raise Killed
        self.num_requests += 1
        world.watch(self, request)
        if self.num_requests == self.killed_at:
            self.is_killed = True
            if self.is_done_when_killed:
                world.lose(request)
            raise Killed
        began = world.now
        if world.random.random() < chances.pause:
            self.wait(world.random.uniform(60, 400))
        if world.random.random() < chances.late:
            # A delete has no condition, and its repetition comes after the first one.
            longest = STALL_SECONDS if request.operation == "delete" else 10 * REQUEST_SECONDS
            world.late.append((began + world.random.uniform(0, longest), request))
            self.wait(STALL_SECONDS + 1)
        if world.random.random() < chances.lost:
            world.lose(request)
            self._delay(chances)
        self._delay(chances)
        if self.is_killed:
            raise Killed
        return world.apply(request)

    def _delay(self, chances: Chances) -> None:
        """A request takes its time. Two together are not longer than a request may live."""
        if self.world.random.random() < chances.long_delay:
            self.wait(self.world.random.uniform(1, REQUEST_SECONDS / 2))
        elif self.world.random.random() < chances.delay:
            self.wait(self.world.random.uniform(0, 0.3))


@dataclass(frozen=True, repr=False)
class WorldClient:
    """A writer's client of the bucket."""

    writer: Writer
    root = "s3://bucket"
    cost = CLOUD_COST

    @property
    def _bucket(self) -> Bucket:
        return self.writer.world.bucket

    def _ask(self, act: Callable[..., Result], name: str, *arguments: object) -> Result:
        found: Result = self.writer.request(Request(act.__name__, name, partial(act, name, *arguments)))
        return found

    def get(self, name: str, start: int, end: int | None, version: str | None) -> Body:
        return self._ask(self._bucket.get, name, start, end, version)

    def stat(self, name: str) -> FileStat | None:
        return self._ask(self._bucket.stat, name)

    def list_objects(self, prefix: str) -> Iterator[tuple[str, str]]:
        return self._ask(self._bucket.list_objects, prefix)

    def put(self, name: str, content: bytes, replaced: Any = True) -> Version:
        return self._ask(self._bucket.put, name, content, replaced)

    def delete(self, names: Sequence[str]) -> None:
        self.writer.request(Request("delete", "", partial(self._bucket.delete, names)))

    def upload(self, name: str, file: Path, num_streams: int, check: Callable[[], None]) -> Version:
        content = file.read_bytes()
        check()
        return self.writer.request(Request("upload", name, partial(self._bucket.put, name, content)))


class Serial:
    """Does everything at once, one after the other, in place of a pool of threads."""

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> Serial:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def map(self, call: Any, *items: Any) -> list[Any]:
        return [call(*args) for args in zip(*items, strict=True)]

    def submit(self, call: Any, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call(*args))
        except BaseException as error:
            future.set_exception(error)
        return future

    def shutdown(self, **_: object) -> None:
        pass


class SerialWorkers:
    """The same in place of threads: of a writer's threads, the bucket's time knows one."""

    def __init__(self, _: int, items: Iterable[Any], make_state: Callable[[], Any], work: Callable[[Any, Any], int]):
        self._items, self._state, self._do = items, make_state(), work

    def run(self) -> None:
        for item in self._items:
            self._do(self._state, item)


@contextmanager
def in_its_time() -> Iterator[Callable[..., World]]:
    """Let the product run in worlds that are made by what this yields."""

    def make(seed: int = 0, chances: Chances = Chances()) -> World:
        return World(seed, chances)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(workers, "Workers", SerialWorkers)  # Those of `each`.
        patch.setattr(claim, "ThreadPoolExecutor", Serial)
        patch.setattr(bucket, "ThreadPoolExecutor", Serial)
        yield make
