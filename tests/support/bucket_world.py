"""Writers of one bucket in a time of their own: each request of each may be delayed, repeated, or its sender's last.

The bucket is `s3_server`'s, without a network. Writers are threads of which one runs at a time; they change only where
one makes a request or waits, so that a schedule is the same each time it is made from the same seed.
"""

from __future__ import annotations

import hashlib
import random
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from xml.sax.saxutils import escape, unescape

import pytest
from support import s3_server
from support.s3_server import Request, answer

from relayout.errors import FormatError, RelayoutError
from relayout.storage.cloud.client import CLOUD_COST, Body, NotCompleted, Version
from relayout.storage.cloud.output import lease, prefix
from relayout.storage.cloud.output.lease import Lease
from relayout.storage.cloud.store import CloudStore
from relayout.storage.protocols import FileStat, RequestError

BUCKET = "bucket"
STALL_SECONDS = 20.0
"""After so long without an answer a client asks again."""
NEVER = 10**9


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
    """The whole process stands still for minutes, before it looks at its lease."""


class World:
    """A bucket, its time, and those who make requests."""

    def __init__(self, seed: int = 0, chances: Chances = Chances()) -> None:
        self.server = s3_server.Server()
        self.server.server_close()
        self.server.put = self._put  # type: ignore[method-assign]
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

    def _put(self, bucket: str, key: str, content: bytes) -> s3_server.Object:
        """As S3 does: equal bytes have equal ETags."""
        made = s3_server.Object(content, f'"{hashlib.md5(content).hexdigest()}"')
        self.server.objects[bucket, key] = made
        return made

    def apply(self, request: Request) -> s3_server.Answer:
        found = answer(self.server, request)
        if request.method not in ("GET", "HEAD"):
            self.changed()
        return found

    def run(self) -> None:
        """Let all writers work until each has ended."""
        for writer in self.writers:
            writer.thread.start()
        self.switch()
        assert self.ended.wait(60), "a writer hangs"
        for writer in self.writers:
            writer.thread.join()
        for _, request in sorted(self.late, key=lambda one: one[0]):
            self.apply(request)
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
            self.apply(one[1])
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
        self.lease: Lease | None = None
        self.is_refreshing = False
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
        self.lease = None

    def _work(self, work: Callable[[Writer], None]) -> None:
        self.turn.acquire()
        try:
            work(self)
        except BaseException as error:
            self.error = error
        self.has_ended = True
        self.world.switch()

    def wait(self, seconds: float, *, is_paused: bool = False) -> None:
        """Let time pass. Meanwhile the lease is refreshed, as its thread does."""
        while True:
            step = seconds if is_paused else min(seconds, lease.REFRESH_SECONDS)
            self.wakes, self.order = self.world.now + step, self.world.random.random()
            if len(self.world.writers) > 1:
                self.world.switch()
                self.turn.acquire()
            else:
                self.world.now = self.wakes
            seconds -= step
            if seconds <= 0:
                return
            held = self.lease
            if held is not None and not (self.is_refreshing or held._stop.is_set() or held._lock.locked()):
                self.is_refreshing = True
                try:
                    with suppress(OSError, RelayoutError):
                        held.refresh()
                finally:
                    self.is_refreshing = False

    def request(
        self, method: str, key: str, query: dict[str, str] | None = None, body: bytes = b"", **headers: str
    ) -> Any:
        """The answer to a request, which may be made several times, as clients do."""
        world, chances = self.world, self.world.chances
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = Request(method, BUCKET, key, query or {}, named, body)
        if self.is_killed:
            raise Killed
        self.num_requests += 1
        world.watch(self, request)
        if self.num_requests == self.killed_at:
            self.is_killed = True
            if self.is_done_when_killed:
                world.apply(request)
            raise Killed
        began = world.now
        if world.random.random() < chances.late:
            world.late.append((began + world.random.uniform(0, lease.REQUEST_SECONDS), request))
            self.wait(STALL_SECONDS + 1)
        if world.random.random() < chances.lost:
            world.apply(request)
            self._delay(chances)
        self._delay(chances)
        if self.is_killed:
            raise Killed
        return world.apply(request)

    def _delay(self, chances: Chances) -> None:
        """A request takes its time. Two together are not longer than a request may live."""
        if self.world.random.random() < chances.long_delay:
            self.wait(self.world.random.uniform(1, lease.REQUEST_SECONDS / 2))
        elif self.world.random.random() < chances.delay:
            self.wait(self.world.random.uniform(0, 0.3))


@dataclass(frozen=True, repr=False)
class WorldClient:
    """A writer's client of the bucket."""

    writer: Writer
    root = f"s3://{BUCKET}"
    cost = CLOUD_COST

    def get(self, name: str, start: int, end: int | None, version: str | None) -> Body:
        found = self.writer.request("GET", name)
        if found.status == 404:
            raise FormatError("is missing", path=name, code="missing")
        content = found.body[start:end]
        stat = FileStat(len(found.body), found.headers["ETag"])
        if version not in (None, stat.version):
            raise FormatError("was replaced while it was read", path=name, code="mismatch")
        return Body(
            stat,
            name,
            start,
            len(content),
            iter([content]),
            lambda offset: self.get(name, offset, end, stat.version),
            {"e_tag": stat.version},
        )

    def stat(self, name: str) -> FileStat | None:
        found = self.writer.request("HEAD", name)
        return None if found.status == 404 else FileStat(len(found.body), found.headers["ETag"])

    def list_objects(self, prefix: str) -> Iterator[tuple[str, str]]:
        self.writer.request("GET", "", {"list-type": "2", "prefix": f"{prefix}/"})
        server = self.writer.world.server
        for name in server.names(BUCKET, f"{prefix}/"):
            yield name, server.objects[BUCKET, name].etag

    def put(self, name: str, content: bytes, replaced: Any = True) -> Version:
        condition = (
            {} if replaced is True else {"if_none_match": "*"} if not replaced else {"if_match": replaced["e_tag"]}
        )
        found = self.writer.request("PUT", name, body=content, **condition)
        if found.status == 412:
            raise FileExistsError(17, "exists", name)
        return {"e_tag": found.headers["ETag"]}

    def delete(self, names: Sequence[str]) -> None:
        keys = "".join(f"<Object><Key>{escape(name)}</Key></Object>" for name in names)
        self.writer.request("POST", "", {"delete": ""}, f"<Delete>{keys}</Delete>".encode())

    def uploads(self) -> WorldClient:
        return self

    def begin(self, name: str) -> str:
        body = self.writer.request("POST", name, {"uploads": ""}).body.decode()
        return str(body.partition("<UploadId>")[2].partition("<")[0])

    def send(self, name: str, upload: str, index: int, body: memoryview) -> str:
        query = {"uploadId": upload, "partNumber": str(index + 1)}
        found = self.writer.request("PUT", name, query, bytes(body))
        if found.status != 200:
            raise RequestError(22, "the store refuses the request (HTTP 404, NoSuchUpload)", name, 404)
        return str(found.headers["ETag"])

    def complete(self, name: str, upload: str, tags: Sequence[str]) -> str | NotCompleted:
        parts = "".join(
            f"<Part><PartNumber>{n}</PartNumber><ETag>{escape(t)}</ETag></Part>" for n, t in enumerate(tags, 1)
        )
        body = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
        answer = self.writer.request("POST", name, {"uploadId": upload}, body, if_none_match="*")
        if answer.status == 200:
            return unescape(answer.body.decode().partition("<ETag>")[2].partition("</ETag>")[0])
        return NotCompleted.GONE if answer.status == 404 else NotCompleted.EXISTS

    def abort(self, name: str, upload: str) -> None:
        self.writer.request("DELETE", name, {"uploadId": upload})


class _Serial(ThreadPoolExecutor):
    """Does everything at once, one after the other."""

    def map(self, call: Any, *items: Any, **options: Any) -> Any:  # type: ignore[override]
        return [call(*args) for args in zip(*items, strict=True)]


@contextmanager
def in_its_time() -> Iterator[Callable[..., World]]:
    """Let the product run in worlds that are made by what this yields."""
    worlds: list[World] = []

    def make(seed: int = 0, chances: Chances = Chances()) -> World:
        worlds.append(World(seed, chances))
        return worlds[-1]

    def here() -> Writer:
        current = worlds[-1].current or worlds[-1].writers[-1]
        assert current is not None
        return current

    def kill(pid: int, signal: int) -> None:
        alive = {
            writer.pid for writer in worlds[-1].writers if writer.machine == here().machine and not writer.is_killed
        }
        if pid not in alive:
            raise ProcessLookupError

    def hold(held: Lease) -> None:
        here().lease = held

    check = Lease.check

    def checked(held: Lease) -> None:
        if worlds[-1].random.random() < worlds[-1].chances.pause:
            here().wait(worlds[-1].random.uniform(60, 400), is_paused=True)
        check(held)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(lease, "monotonic", lambda: worlds[-1].now)
        patch.setattr(lease, "sleep", lambda seconds: here().wait(seconds))
        patch.setattr(lease, "machine", lambda: here().machine)
        patch.setattr(lease, "os", SimpleNamespace(getpid=lambda: here().pid, kill=kill))
        patch.setattr(lease, "_start_of", lambda pid: pid)
        patch.setattr(Lease, "_begin_refreshing", hold)
        patch.setattr(Lease, "check", checked)
        patch.setattr(prefix, "ThreadPoolExecutor", _Serial)
        yield make
