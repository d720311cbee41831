"""The lease of an output: it admits one process that publishes, replaces, or takes over what an attempt has left.

It is an object below the hidden prefix, created if there is none. Its holder writes it again at intervals, each time on
condition that it still has the holder's last version. A process that finds it ends with an error that names the holder.
If it is not written again, or its holder was a process of this machine that has ended, it may be taken over. Clocks of
two machines are never compared: an observer must itself see no change for long enough.
"""

from __future__ import annotations

import errno
import os
import platform
import secrets
import threading
import time
import warnings
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from relayout.errors import FormatError, PlanError, RelayoutError
from relayout.storage.cloud import connect
from relayout.storage.cloud.client import Version
from relayout.storage.cloud.output import records
from relayout.storage.cloud.output.prefix import OutputPrefix
from relayout.storage.cloud.output.records import LEASE, Holder
from relayout.storage.protocols import RequestError

REFRESH_SECONDS = 10.0
"""From one refresh to the next."""
VALID_SECONDS = 20.0
"""An older confirmation of the lease is renewed before something is deleted or published."""
REQUEST_SECONDS = connect.RETRY_SECONDS + connect.STALL_SECONDS
"""The longest life of a request. Later it has been carried out, or never will be."""
EXPIRY_SECONDS = VALID_SECONDS + REQUEST_SECONDS + 2 * REFRESH_SECONDS
"""A lease that does not change for so long may be taken over: all requests of its holder have ended."""
_POLL_SECONDS = 2.0
_NUM_CONFLICTS = 3

_held: set[str] = set()
"""Tokens of leases that this process holds now."""

monotonic = time.monotonic
sleep = time.sleep
"""Replaced by tests."""


class Lease:
    """The lease of one output, in a `with` block. Thread-safe."""

    def __init__(self, output: OutputPrefix, what: str) -> None:
        """`what` says what the holder does, for messages."""
        self._output = output
        self._name = output.hidden + LEASE
        self._location = f"{output.client.root}/{self._name}"
        self._token = secrets.token_hex(16)
        self._what = what
        self._started = datetime.now(UTC).isoformat(" ", "seconds")
        self._refreshes = 0
        self._version: Version | None = None
        self._confirmed = 0.0
        """When the last successful refresh began."""
        self.is_lost = False
        """Whether another process has it now. This one then deletes and publishes nothing more."""
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def __enter__(self) -> Lease:
        """Take it. PlanError: another process writes the output. FormatError: the object of its name is no lease."""
        self._take()
        _held.add(self._token)
        self._begin_refreshing()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        _held.discard(self._token)
        # The proof is a check just before. If this fails, a later process finds that the holder has ended.
        with suppress(OSError, RelayoutError):
            self.check()
            with self._lock:
                self._output.client.delete([self._name])

    def check(self) -> None:
        """Check that no other process can have the lease now, nor while one request takes.

        Raises:
            PlanError: another process has it.
            RequestError: the store does not answer.
        """
        while self.is_lost or monotonic() - self._confirmed > VALID_SECONDS:
            self.refresh()

    def refresh(self) -> None:
        """Write the lease again; errors as for `check`."""
        with self._lock:
            for _ in range(_NUM_CONFLICTS):
                if self.is_lost:
                    raise PlanError(
                        "was taken over by another process after this one's lease expired: this one stops",
                        path=str(self._output),
                        code="busy",
                    )
                if self._write(self._version):
                    return
                # An earlier refresh may have been carried out late. Then the lease has our token.
                current = None
                with suppress(FormatError):
                    current = self._read()
                self.is_lost = current is None or current[0].token != self._token
                self._version = None if current is None else current[1]
            what = "cannot be written: the store does not accept the version that it reports"
            raise RequestError(errno.EIO, what, self._location)

    def _take(self) -> None:
        seen: Version | None = None
        since = 0.0
        while True:
            current = self._read()
            if current is None:
                if self._write(None):
                    return
                continue
            holder, version = current
            if seen is not None and version != seen:
                raise self._busy(holder)
            is_gone = _is_gone(holder)
            if is_gone is False:
                raise self._busy(holder)
            if is_gone or (seen is not None and monotonic() - since >= EXPIRY_SECONDS):
                if self._write(version):
                    return
                continue
            if seen is None:
                seen, since = version, monotonic()
                warnings.warn(
                    f"{self._output}: {_named(holder)} may still be running: waiting up to"
                    f" {EXPIRY_SECONDS:.0f} s for it to refresh its lease",
                    stacklevel=2,
                )
            sleep(_POLL_SECONDS)

    def _busy(self, holder: Holder) -> PlanError:
        what = f"is being written by another conversion: {_named(holder)}"
        return PlanError(what, path=str(self._output), code="busy")

    def _read(self) -> tuple[Holder, Version] | None:
        loaded = self._output.load(self._name, records.MAX_NBYTES)
        return None if loaded is None else (records.parse(loaded[0], Holder, self._location), loaded[1])

    def _write(self, replaced: Version | None) -> bool:
        """Write the lease on condition that it has this version, or does not exist; return whether it was so."""
        self._refreshes += 1
        pid = os.getpid()
        holder = Holder(
            self._token,
            self._refreshes,
            platform.node(),
            machine(),
            pid,
            _start_of(pid) or 0,
            self._started,
            self._what,
        )
        began = monotonic()
        try:
            self._version, _ = self._output.put(self._name, records.dump(holder), replaced)
        except FileExistsError:
            return False
        self._confirmed = began
        return True

    def _begin_refreshing(self) -> None:
        threading.Thread(target=self._refresh_on, name="relayout-lease", daemon=True).start()

    def _refresh_on(self) -> None:
        while not self._stop.wait(REFRESH_SECONDS) and not self.is_lost:
            with suppress(OSError, RelayoutError):  # `check` reports it where it matters.
                self.refresh()


def _named(holder: Holder) -> str:
    return f"{holder.what}, process {holder.pid} on {holder.host}, since {holder.started}"


def _is_gone(holder: Holder) -> bool | None:
    """Whether the holder's process has ended; None if this is unknown.

    The proof: on the same running system, and in the same process namespace, its process id belongs to no process, or
    to one that started at another time.
    """
    if not holder.machine or holder.machine != machine():
        return None
    if holder.pid == os.getpid() and holder.process_start == _start_of(holder.pid):
        return holder.token not in _held
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # It belongs to another user.
    return _start_of(holder.pid) not in (None, holder.process_start)


@cache
def machine() -> str:
    """Identifies this running system and its process namespace; "" if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def _start_of(pid: int) -> int | None:
    """When a process started, in ticks since the system did; 0 if it has ended, None if unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return 0 if fields[0] in "ZX" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None
