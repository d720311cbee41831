"""Slow storage on this machine: a FUSE file system and a TCP proxy, with latency and rate; each counts its bytes.

The link of both sends one byte after another at its rate, for all of its users together. A TCP connection begins with
10 packets in flight and doubles them each round trip, up to 4 MiB. The proxy moves answers within the kernel.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ctypes.util import find_library
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

FIRST_WINDOW, MAX_WINDOW = 14_600, 4 * 2**20
"""Bytes of one TCP connection in flight, at first and at most."""
_PIECE_NBYTES = 2**20
_LATE_SECONDS = 0.001
"""A sender that is late by less than this has not left the link idle: that was the machine's scheduler."""
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
    """Lets bytes pass at the link's rate. Thread-safe."""

    def __init__(self, link: Link, counter: Any) -> None:
        self._rate = link.bytes_per_second
        self._counter = counter
        self._lock = threading.Lock()
        self._free_at = 0.0

    def carry(self, nbytes: int, ready_at: float) -> None:
        """Return when bytes have passed that are ready at a time."""
        _sleep_until(ready_at)
        with self._lock:
            self._counter.value += nbytes
            if self._rate is None:
                return
            self._free_at = max(self._free_at, time.monotonic() - _LATE_SECONDS) + nbytes / self._rate
            passed_at = self._free_at
        _sleep_until(passed_at)


def _sleep_until(moment: float) -> None:
    left = moment - time.monotonic()
    if left > 0:
        time.sleep(left)


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
    if library := find_library("fuse3"):  # mfusepy takes version 2 where both are, and that knows not all options.
        os.environ.setdefault("FUSE_LIBRARY_PATH", library)
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
            wire.carry(len(content), now + link.latency_seconds)
            return content

        def release(self, path: str, fh: int) -> int:
            os.close(fh)
            return 0

    libc = ctypes.CDLL(None)
    libc.prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: never outlive the measurement.
    options = {"max_read": link.request_nbytes, "max_threads": 256, "ro": True, "default_permissions": True}
    mfusepy.FUSE(Passthrough(), mount_point, foreground=True, **options)


def _serve(port: int, link: Link, counter: Any) -> None:
    wire = _Wire(link, counter)
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        counter.value = -listener.getsockname()[1]
        while True:
            client, _ = listener.accept()
            threading.Thread(target=_connect, args=(client, port, link, wire), daemon=True).start()


def _connect(client: socket.socket, port: int, link: Link, wire: _Wire) -> None:
    time.sleep(link.latency_seconds)  # The handshake.
    with client, socket.create_connection(("127.0.0.1", port)) as server:
        for one in (client, server):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        asking = threading.Thread(target=_ask, args=(client, server, link), daemon=True)
        asking.start()
        with suppress(OSError):  # Whoever has hung up.
            _answer(server, client, link, wire)
        for one in (client, server):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        asking.join()


def _ask(client: socket.socket, server: socket.socket, link: Link) -> None:
    """Requests arrive a round trip later; answers then need no delay."""
    with suppress(OSError):
        while content := client.recv(_PIECE_NBYTES):
            time.sleep(link.latency_seconds)
            server.sendall(content)
    with suppress(OSError):
        server.shutdown(socket.SHUT_WR)


def _answer(server: socket.socket, client: socket.socket, link: Link, wire: _Wire) -> None:
    """Each byte leaves a round trip after the one that is a window before it."""
    window, in_flight_until = FIRST_WINDOW, 0.0
    out, into = os.pipe()
    try:
        fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, _PIECE_NBYTES)
        while nbytes := os.splice(server.fileno(), into, min(window, _PIECE_NBYTES)):
            in_flight_until = max(in_flight_until, time.monotonic()) + link.latency_seconds * nbytes / window
            window = min(MAX_WINDOW, window + nbytes)
            wire.carry(nbytes, in_flight_until - link.latency_seconds)
            while nbytes:
                nbytes -= os.splice(out, client.fileno(), nbytes)
    finally:
        os.close(out)
        os.close(into)
