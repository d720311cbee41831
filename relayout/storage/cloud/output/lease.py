"""The lease of an output: who publishes or replaces something there, or takes over what an earlier attempt has left.

An object below the hidden prefix, created if there is none, and written anew by its holder all the time, each time on
condition that it is still the one that the holder has written last. Who finds it ends with an error that says who
writes. If nobody writes it any more, or its holder was a process of this machine that is gone, it may be taken over.
Clocks of two machines are never compared: an observer waits until it has itself seen no change for long enough.
"""

from __future__ import annotations

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
from relayout.storage.cloud.output.place import Place
from relayout.storage.cloud.output.records import LEASE, Holder
from relayout.storage.protocols import RequestError

REFRESH_SECONDS = 10.0
"""From one refresh to the next."""
VALID_SECONDS = 20.0
"""A lease that was confirmed so long ago is confirmed again before something is deleted or published."""
REQUEST_SECONDS = connect.RETRY_SECONDS + connect.STALL_SECONDS
"""The longest life of a request: after so long it was carried out, or never will be."""
EXPIRY_SECONDS = VALID_SECONDS + REQUEST_SECONDS + 2 * REFRESH_SECONDS
"""A lease that was seen without a change for so long may be taken over: all that its holder asked for has happened."""
_POLL_SECONDS = 2.0
_NUM_CONFLICTS = 3

_held: set[str] = set()
"""Tokens of leases that this process holds now."""

monotonic = time.monotonic
sleep = time.sleep
"""Replaced by tests."""


class Lease:
    """The lease of one output, in a `with` block. Thread-safe."""

    def __init__(self, place: Place, what: str) -> None:
        """`what` says what the holder does, for people."""
        self._place = place
        self._name = place.hidden + LEASE
        self._where = f"{place.client.root}/{self._name}"
        self._token = secrets.token_hex(16)
        self._what = what
        self._started = datetime.now(UTC).isoformat(" ", "seconds")
        self._number = 0
        self._version: Version | None = None
        self._confirmed = 0.0
        """When the last request was begun that was carried out."""
        self.is_lost = False
        """Whether another process has it now: this one deletes and publishes nothing any more."""
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def __enter__(self) -> Lease:
        """Take it.

        Raises:
            PlanError: another process writes the output.
            FormatError: what lies there is no lease. Nothing was changed.
        """
        self._take()
        _held.add(self._token)
        self._begin_refreshing()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        _held.discard(self._token)
        # By proof: a check has just told that it is ours. If this fails, a later process finds that its holder is gone.
        with suppress(OSError, RelayoutError):
            self.check()
            with self._lock:
                self._place.client.delete([self._name])

    def check(self) -> None:
        """Check that nobody else can have the lease now, nor for as long as one request takes.

        Raises:
            PlanError: another process has it.
            RequestError: the store cannot be asked.
        """
        while self.is_lost or monotonic() - self._confirmed > VALID_SECONDS:
            self.refresh()

    def refresh(self) -> None:
        """Write the lease anew; errors as for `check`."""
        with self._lock:
            for _ in range(_NUM_CONFLICTS):
                if self.is_lost:
                    raise PlanError(
                        "was taken over by another process, as this one was not heard of: nothing more is changed",
                        path=str(self._place),
                        code="busy",
                    )
                if self._write(self._version):
                    return
                # An earlier refresh may have been carried out late: then the lease has our token, and is ours.
                found = None
                with suppress(FormatError):
                    found = self._read()
                self.is_lost = found is None or found[0].token != self._token
                self._version = None if found is None else found[1]
            raise RequestError(5, "cannot be written: the store refuses its own versions", self._where)

    def _take(self) -> None:
        seen: Version | None = None
        since = 0.0
        while True:
            found = self._read()
            if found is None:
                if self._write(None):
                    return
                continue
            holder, version = found
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
                    f"{self._place}: {_named(holder)} has not said that it has ended: waiting for up to"
                    f" {EXPIRY_SECONDS:.0f} s whether it is heard of",
                    stacklevel=2,
                )
            sleep(_POLL_SECONDS)

    def _busy(self, holder: Holder) -> PlanError:
        what = f"is being written by another conversion: {_named(holder)}"
        return PlanError(what, path=str(self._place), code="busy")

    def _read(self) -> tuple[Holder, Version] | None:
        found = self._place.client.load(self._name, records.MAX_NBYTES)
        return None if found is None else (records.parse(found[0], Holder, self._where), found[1])

    def _write(self, replaced: Version | None) -> bool:
        """Write the lease if it is still this version, or still none; return whether it was."""
        self._number += 1
        pid = os.getpid()
        holder = Holder(
            self._token, self._number, platform.node(), machine(), pid, _start_of(pid) or 0, self._started, self._what
        )
        content, began = records.dump(holder), monotonic()
        try:
            version = self._place.client.put(self._name, content, replaced)
        except (FileExistsError, RequestError) as error:
            # The answer to the request may have been lost.
            found = self._place.client.load(self._name, records.MAX_NBYTES)
            if found is None or found[0] != content:
                if isinstance(error, RequestError):
                    raise
                return False
            version = found[1]
        self._version, self._confirmed = version, began
        return True

    def _begin_refreshing(self) -> None:
        threading.Thread(target=self._refresh_on, name="relayout-lease", daemon=True).start()

    def _refresh_on(self) -> None:
        while not self._stop.wait(REFRESH_SECONDS) and not self.is_lost:
            with suppress(OSError, RelayoutError):  # `check` says so to whoever relies on it.
                self.refresh()


def _named(holder: Holder) -> str:
    return f"{holder.what}, process {holder.pid} on {holder.host}, since {holder.started}"


def _is_gone(holder: Holder) -> bool | None:
    """Whether the holder's process has ended; None if this cannot be told from here.

    The proof: its number belongs to no process, or to one that began at another time, of the same running system, and
    in the same numbering.
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
        pass  # It is another user's.
    return _start_of(holder.pid) not in (None, holder.process_start)


@cache
def machine() -> str:
    """Tells this running system and its numbering of processes, as containers have their own; "" if it does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def _start_of(pid: int) -> int | None:
    """When a process began, in ticks since the system did; 0 if it has ended, None if it cannot be told."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return 0 if fields[0] in "ZX" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None
