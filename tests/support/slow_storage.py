"""Slow storage on this machine: a FUSE file system and a TCP proxy, with latency and rate; each counts its bytes.

The link of both sends one byte after another at its rate, for all of its users together. A TCP connection begins with
10 packets in flight and doubles them each round trip, up to 4 MiB.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

FIRST_WINDOW, MAX_WINDOW = 14_600, 4 * 2**20
"""Bytes of one TCP connection in flight, at first and at most."""
_PIECE_NBYTES = 256 * 2**10
_SECONDS_TO_START = 20


@dataclass(frozen=True, slots=True)
class Link:
    """What is between this machine and the storage."""

    latency_seconds: float = 0.0
    """A round trip."""
    bytes_per_second: float | None = None
    """None: as fast as the machine."""
    request_nbytes: int = 2**20
    """The largest request of the file system."""
    direct: bool = True
    """Whether the file system takes O_DIRECT."""


@dataclass(frozen=True, slots=True)
class Slow:
    """Storage that is running."""

    where: str
    """Mount point, or URL."""
    counter: Any

    def sent_nbytes(self) -> int:
        """Bytes that went over the link since it was started."""
        return int(self.counter.value)


class _Wire:
    """Reserves time on the link. Thread-safe."""

    def __init__(self, link: Link, counter: Any) -> None:
        self._rate = link.bytes_per_second
        self._counter = counter
        self._lock = threading.Lock()
        self._free_at = 0.0

    def reserve(self, nbytes: int, ready_at: float) -> float:
        """When bytes that are ready at a time have passed."""
        with self._lock:
            self._counter.value += nbytes
            self._free_at = max(self._free_at, ready_at) + (nbytes / self._rate if self._rate else 0.0)
            return self._free_at


def absence() -> str | None:
    """Why there can be no FUSE file system here; None if there can."""
    try:
        import mfusepy  # noqa: F401
    except (ImportError, OSError) as error:
        return f"FUSE needs the package mfusepy and the system's fuse3: {error}"
    return None if os.access("/dev/fuse", os.R_OK | os.W_OK) else "/dev/fuse cannot be opened"


@contextmanager
def slow_folder(folder: Path, mount_point: Path, link: Link) -> Iterator[Slow]:
    """A folder, seen through a slow file system. Its files should be in the page cache."""
    mount_point.mkdir(exist_ok=True)
    with _process(_mount, str(folder), str(mount_point), link) as counter:
        try:
            _wait(lambda: os.path.ismount(mount_point))
            yield Slow(str(mount_point), counter)
        finally:
            subprocess.run(["fusermount3", "-u", "-z", str(mount_point)], check=False)


@contextmanager
def slow_server(port: int, link: Link) -> Iterator[Slow]:
    """A server on loopback, reached through a slow link."""
    with _process(_serve, port, link) as counter:
        _wait(lambda: counter.value < 0)
        proxy, counter.value = -int(counter.value), 0
        yield Slow(f"http://127.0.0.1:{proxy}", counter)


def _wait(is_ready: Any) -> None:
    end = time.monotonic() + _SECONDS_TO_START
    while not is_ready():
        if time.monotonic() > end:
            raise SystemExit("the slow storage did not start")
        time.sleep(0.02)


@contextmanager
def _process(target: Any, *arguments: Any) -> Iterator[Any]:
    context = get_context("spawn")
    counter = context.Value("q", 0, lock=False)
    process = context.Process(target=target, args=(*arguments, counter), daemon=True)
    process.start()
    try:
        yield counter
    finally:
        process.kill()
        process.join()


def _mount(folder: str, mount_point: str, link: Link, counter: Any) -> None:
    import mfusepy

    wire = _Wire(link, counter)

    class Passthrough(mfusepy.Operations):  # type: ignore[misc]
        use_ns = True

        def init_with_config(self, conn_info: Any, config_3: Any) -> None:
            conn_info.max_read = link.request_nbytes  # libfuse wants the option and this alike.

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            try:
                status = os.lstat(folder + path)
            except OSError as error:
                raise mfusepy.FuseOSError(error.errno) from None
            return {name: getattr(status, name) for name in ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid")} | {
                "st_mtime": status.st_mtime_ns
            }

        def readdir(self, path: str, fh: int) -> list[str]:
            return [".", "..", *(one.name for one in Path(folder + path).iterdir())]

        def open(self, path: str, flags: int) -> int:
            time.sleep(link.latency_seconds)
            if flags & os.O_DIRECT and not link.direct:
                raise mfusepy.FuseOSError(errno.EINVAL)
            return os.open(folder + path, os.O_RDONLY)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            now = time.monotonic()
            content = os.pread(fh, size, offset)
            left = wire.reserve(len(content), now + link.latency_seconds) - time.monotonic()
            if left > 0:
                time.sleep(left)
            return content

        def release(self, path: str, fh: int) -> int:
            os.close(fh)
            return 0

    libc = ctypes.CDLL(None)
    libc.prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: never outlive the measurement.
    options = {"max_read": link.request_nbytes, "max_threads": 256, "ro": True, "default_permissions": True}
    mfusepy.FUSE(Passthrough(), mount_point, foreground=True, **options)


def _serve(port: int, link: Link, counter: Any) -> None:
    asyncio.run(_proxy(port, link, counter))


async def _proxy(port: int, link: Link, counter: Any) -> None:
    wire = _Wire(link, counter)

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(link.latency_seconds)  # The handshake.
        their_reader, their_writer = await asyncio.open_connection("127.0.0.1", port, limit=2 * _PIECE_NBYTES)
        pumps = [_ask(reader, their_writer, link), _answer(their_reader, writer, link, wire)]
        await asyncio.gather(*map(asyncio.ensure_future, pumps), return_exceptions=True)

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    counter.value = -server.sockets[0].getsockname()[1]
    await server.serve_forever()


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: Link) -> None:
    """Requests arrive a round trip later; answers then need no delay."""
    try:
        while content := await reader.read(_PIECE_NBYTES):
            await asyncio.sleep(link.latency_seconds)
            writer.write(content)
            await writer.drain()
    finally:
        writer.close()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: Link, wire: _Wire) -> None:
    window, ready_at = FIRST_WINDOW, 0.0
    try:
        while content := await reader.read(min(window, _PIECE_NBYTES)):
            now = time.monotonic()
            ready_at = max(ready_at, now) + link.latency_seconds * len(content) / window
            window = min(MAX_WINDOW, window + len(content))
            left = max(wire.reserve(len(content), now), ready_at) - now
            if left > 0:
                await asyncio.sleep(left)
            writer.write(content)
            await writer.drain()
    finally:
        writer.close()
