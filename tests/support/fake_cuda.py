"""A device that is none: its memory is host memory, copies to it happen late, and its cuFile reads less than asked for.

With these, all of the loader that is for CUDA devices runs where there is none. What only a device can show is in
test_cuda.py.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import threading
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from relayout.storage.system import Buffer

BLOCK = 4096
EAGERNESS = 0.3
"""The share of copies that begin at once."""
STALE = 0xDD
"""What a buffer is full of when it is handed out."""


class Lanes:
    """Makes lanes. One thread does all copies: one lane's in order, most of them only when somebody waits for them."""

    def __init__(self, *, refuse: bool = False) -> None:
        """With `refuse`, no memory can be pinned.

        `fails` may be set to the name of a lane's method: each second call of it fails from then on.
        """
        self.fails = ""
        self.num_calls = 0
        self.changed = threading.Condition()
        self.in_flight = 0
        """Bytes that were sent and have not arrived."""
        self.pinned = 0
        """Bytes of all buffers that there were."""
        self.held = 0
        """Bytes of buffers that have not been freed."""
        self.random = random.Random(0)
        self._refuse = refuse
        self._lanes: list[SlowLane] = []
        """Those that have something to copy."""
        self._is_over = False
        self._thread = threading.Thread(target=self._copy, name="copies", daemon=True)

    def make(self, nbytes: int) -> SlowLane:
        """What `DeviceBackend` is given to make lanes with."""
        if self._refuse:
            raise MemoryError(f"cannot pin {nbytes} bytes of host memory")
        lane = SlowLane(self, nbytes)
        with self.changed:
            self.pinned += 2 * nbytes
            self.held += 2 * nbytes
        return lane

    def free(self, nbytes: int) -> None:
        """Buffers were freed."""
        self.held -= nbytes

    def call(self, method: str) -> None:
        """A lane's method is called; as a device would, it may fail."""
        if method == self.fails:
            with self.changed:
                self.num_calls += 1
                fails = self.num_calls % 2 == 0
            if fails:
                raise RuntimeError(f"CUDA error: {method}: an illegal memory access was encountered\nCompile with ...")

    def expect(self, lane: SlowLane) -> None:
        """A lane has something to copy."""
        if lane not in self._lanes:
            self._lanes.append(lane)

    def forget(self) -> None:
        """Count from 0 again; nothing may be on its way."""
        assert self.in_flight == 0
        self.pinned = 0

    def _copy(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self._is_over or self._wanted())
                wanted = self._wanted()
                if not wanted:
                    return
                lane = self.random.choice(wanted)
                source, target = lane.waiting.popleft()
                pause = self.random.random() * 0.0004
            time.sleep(pause)
            with torch.inference_mode():  # A device knows nothing of it.
                target.copy_(source)
            nbytes = source.numel()
            del source, target  # Whoever waits may count what is still there.
            with self.changed:
                lane.num_done += 1
                self.in_flight -= nbytes
                if not lane.waiting:
                    self._lanes.remove(lane)
                del lane, wanted
                self.changed.notify_all()

    def _wanted(self) -> list[SlowLane]:
        return [lane for lane in self._lanes if lane.num_done < lane.num_wanted]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.changed:
            self._is_over = True
            self.changed.notify_all()
        self._thread.join()


class SlowLane:
    """See `relayout.loader.backends.cuda.CudaLane`."""

    def __init__(self, lanes: Lanes, nbytes: int) -> None:
        self._lanes = lanes
        self._nbytes = nbytes
        self._memory = [Buffer(), Buffer()]
        self._buffers = [torch.frombuffer(one.reserve(nbytes), dtype=torch.uint8) for one in self._memory]
        assert not any(buffer.data_ptr() % BLOCK for buffer in self._buffers)
        self._last = [0, 0]
        """The number of the last copy from each buffer."""
        self._current = 0
        self._num_sent = 0
        self.num_done = 0
        self.num_wanted = 0
        self.waiting: deque[tuple[torch.Tensor, torch.Tensor]] = deque()

    def buffer(self) -> torch.Tensor:
        self._lanes.call("buffer")
        self._current = 1 - self._current
        self._wait(self._last[self._current])
        return self._buffers[self._current].fill_(STALE)

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        assert source.shape == target.shape
        if target.is_inference() and not torch.is_inference_mode_enabled():
            raise RuntimeError("Inplace update to inference tensor outside InferenceMode is not allowed.")
        self._lanes.call("send")
        self._check_buffer(source)
        with self._lanes.changed:
            self.waiting.append((source, target))
            self._lanes.expect(self)
            self._num_sent += 1
            self._last[self._current] = self._num_sent
            self._lanes.in_flight += source.numel()
            if self._lanes.random.random() < EAGERNESS:
                self.num_wanted = self._num_sent
                self._lanes.changed.notify_all()

    def settle(self) -> None:
        self._lanes.call("settle")
        self._wait(self._num_sent)

    def drain(self) -> None:
        self._lanes.call("drain")
        self._wait(self._num_sent)

    def close(self) -> None:
        assert self.num_done == self._num_sent or self._lanes.fails
        self._lanes.free(2 * self._nbytes)
        self._buffers.clear()
        for one in self._memory:  # As pinned memory, it is given back even while the error's frames refer to it.
            one.discard()

    def _wait(self, number: int) -> None:
        with self._lanes.changed:
            self.num_wanted = max(self.num_wanted, number)
            self._lanes.changed.notify_all()
            self._lanes.changed.wait_for(lambda: self.num_done >= number)

    def _check_buffer(self, piece: torch.Tensor) -> None:
        buffer = self._buffers[self._current]
        assert piece.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr(), "not the last buffer"


class FakeCuFile:
    """See `relayout.loader.backends.cufile.CuFile`: reads with pread, as few bytes as it likes."""

    def __init__(self, *, registers: bool = True, fails_at: int | None = None, refuses: str = "") -> None:
        """The read of number `fails_at` fails, from 1; files with `refuses` in their name cannot be opened."""
        self.compat = False
        self.registered: dict[int, int] = {}
        """Address and bytes of arenas."""
        self.num_registered = 0
        """Since the beginning."""
        self.handles: list[FakeHandle] = []
        """Those that are open."""
        self.random = random.Random(0)
        self.lock = threading.Lock()
        self.num_reads = 0
        self.nbytes = 0
        """Read since the beginning."""
        self.fails_at = fails_at
        self._registers = registers
        self._refuses = refuses

    def register(self, arena: torch.Tensor) -> bool:
        assert arena.dtype == torch.uint8
        assert arena.data_ptr() % BLOCK == 0
        assert arena.data_ptr() not in self.registered
        self.num_registered += 1
        if self._registers:
            self.registered[arena.data_ptr()] = arena.numel()
        return self._registers

    def deregister(self, arena: torch.Tensor) -> None:
        if self._registers:
            assert self.registered.pop(arena.data_ptr()) == arena.numel()

    def open(self, path: Path) -> FakeHandle:
        if self._refuses and self._refuses in path.name:
            raise OSError(errno.EOPNOTSUPP, "cuFile refuses it", str(path))
        handle = FakeHandle(self, path)
        self.handles.append(handle)
        return handle

    def assert_restored(self) -> None:
        """Nothing is open or registered any more."""
        assert self.registered == {}
        assert self.handles == []


class FakeHandle:
    """See `relayout.loader.backends.cufile.Handle`."""

    def __init__(self, cufile: FakeCuFile, path: Path) -> None:
        self._cufile = cufile
        self._path = path
        self._num_reading = 0
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)

    def read(self, target: torch.Tensor, offset: int) -> int:
        cufile = self._cufile
        assert self._fd >= 0
        assert target.dtype == torch.uint8
        assert target.is_contiguous()
        assert (target.data_ptr() - offset) % BLOCK == 0
        with cufile.lock:
            cufile.num_reads += 1
            if cufile.num_reads == cufile.fails_at:
                raise OSError(errno.EIO, f"cuFile failed at byte {offset}", str(self._path))
            self._num_reading += 1
            # Now and then a little, else all.
            wanted = max(1, int(target.numel() * min(1.0, cufile.random.random() * 3)))
        memory = (ctypes.c_char * wanted).from_address(target.data_ptr())
        try:
            count = os.preadv(self._fd, [memory], offset)
        except OSError as error:
            with cufile.lock:
                self._num_reading -= 1
            del target, memory  # The error would keep them.
            raise OSError(error.errno, f"cuFile: {error.strerror} at byte {offset}", str(self._path)) from None
        # cuFile passes the page cache by.
        os.posix_fadvise(self._fd, offset, wanted, os.POSIX_FADV_DONTNEED)
        with cufile.lock:
            self._num_reading -= 1
            cufile.nbytes += count
        return count

    def close(self) -> None:
        assert self._num_reading == 0
        self._cufile.handles.remove(self)
        os.close(self._fd)
        self._fd = -1
