"""Backends that load into the memory of a CUDA device: `pinned`, and `gds`, which falls back to it for some bytes.

`pinned`: each thread reads directly into a pinned host buffer; its own stream copies from there to the final address,
while the thread reads into its other buffer. `gds`: cuFile reads whole blocks into device memory; bytes that are in the
page cache, or do not fill a block, go through pinned buffers. `cufile-compat`: the same calls, which cuFile carries out
in compat mode, through host memory. It shows on any machine with cuFile that these calls are right, and is not fast.
"""

from __future__ import annotations

import ctypes
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cache as once
from typing import TYPE_CHECKING
from weakref import finalize

from relayout.core.extents import BLOCK, Grid, Transfer
from relayout.errors import FormatError
from relayout.format.index import Read
from relayout.loader.backends.base import Backend, Memory, Pool, ReadJob, kind_of, refuse_without_descriptors
from relayout.loader.backends.files import ReadableFiles, closed_on_error
from relayout.loader.backends.host import ThreadedJob, scatter
from relayout.loader.requests import DEVICE_BUFFERS, Budget, Request, plan_requests
from relayout.loader.sources.rank import StoredFile
from relayout.storage.stores import Access

if TYPE_CHECKING:
    import torch

    from relayout.loader.backends.cufile import CuFile, Handle

_LOGGER = logging.getLogger("relayout")

_COMPAT = "cufile-compat"
_TITLES = {"gds": "GPUDirect Storage", _COMPAT: "cuFile, compat mode"}
"""Backends that read by cuFile, and their names in messages."""

BUFFERS_PER_LANE = 2
"""Number of buffers per lane: one receives a read while the other is copied to the device."""


class CudaLane:
    """One thread's two pinned buffers and CUDA stream."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        """Allocate two buffers of `nbytes`, a size that `_buffer_nbytes` returned."""
        import torch

        torch.cuda.set_device(device)  # Only for this thread, which belongs to the loader.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        try:
            slabs = [torch.empty(nbytes + BLOCK, dtype=torch.uint8, pin_memory=True) for _ in range(BUFFERS_PER_LANE)]
        except RuntimeError as error:
            raise MemoryError(f"cannot pin {nbytes} bytes of host memory: {str(error).splitlines()[0]}") from None
        # cudaHostAlloc does not align small allocations (512 KiB, seen on an H200 with driver 580).
        self._buffers = [_aligned(slab, nbytes) for slab in slabs]
        self._copied: list[torch.cuda.Event | None] = [None] * BUFFERS_PER_LANE
        self._current = 0

    def buffer(self) -> torch.Tensor:
        """Return the next pinned buffer (1-D, uint8, aligned to `BLOCK`), after its last copy is done."""
        self._current = (self._current + 1) % BUFFERS_PER_LANE
        copied = self._copied[self._current]
        if copied is not None:
            copied.synchronize()
        return self._buffers[self._current]

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Begin to copy to the device from the buffer that `buffer` last returned."""
        import torch

        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        self._copied[self._current] = event

    def settle(self) -> None:
        """Make the caller's current stream wait for everything that was sent."""
        import torch

        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def drain(self) -> None:
        """Wait until everything that was sent has arrived."""
        self._stream.synchronize()

    def close(self) -> None:
        """Free the buffers now, even if something refers to them. Call `drain` first."""
        for slab in self._buffers:
            slab.untyped_storage().resize_(0)


class DeviceBackend(Backend["torch.Tensor"]):
    """Backend that fills the memory of a device: by cuFile if available, else through lanes."""

    access = Access.AUTO
    max_buffer_nbytes = DEVICE_BUFFERS

    def __init__(
        self, device: str | torch.device, make_lane: Callable[[int], CudaLane], cufile: CuFile | None = None
    ) -> None:
        """Set up a backend; `make_lane` returns a lane with two buffers of the given number of bytes."""
        self.device = device
        self.make_lane = make_lane
        self.cufile = cufile
        is_compat = cufile is not None and cufile.compat
        self.name = "pinned" if cufile is None else _COMPAT if is_compat else "gds"
        self.is_experimental = cufile is not None
        self.is_zero_copy = cufile is not None and not is_compat

    def requests(
        self, reads: Sequence[Read], alignment: int, budget: Budget, grids: Sequence[Grid | None] = ()
    ) -> list[Request]:
        nbytes = _buffer_nbytes(budget)
        cost = replace(budget.cost, request_nbytes=min(budget.cost.request_nbytes, nbytes))
        return plan_requests(reads, alignment, cost, nbytes, grids)

    def allocate(self, nbytes: int) -> DeviceArena:
        return allocate_on(self.device, nbytes)

    def pool(self, nbytes: int) -> Pool[torch.Tensor]:
        """Return a pool whose arenas have at least `nbytes`, so that torch can use the memory of one for the next.

        torch does not split large blocks if `max_split_size_mb` is set, as vLLM does while it loads (0.33
        `gpu_worker.py`). Arenas of various sizes would each need new memory of the driver.
        """
        return Pool(lambda wanted: self.allocate(max(wanted, nbytes)))

    def wrap(self, tensors: Sequence[torch.Tensor]) -> ScatteredOnDevice:
        return ScatteredOnDevice(tensors)

    def start(self, memory: Memory[torch.Tensor], job: ReadJob) -> DeviceJob:
        if self.is_experimental and kind_of(self.device) == "cuda":
            _warn_once(_TITLES[self.name])
        with closed_on_error(ReadableFiles(job.files, self.access)) as opened:
            return DeviceJob(self, memory, job, opened)


@once
def _warn_once(title: str) -> None:
    _LOGGER.warning("relayout: %s is experimental: it has never been tested on a GPU", title)


class DeviceJob(ThreadedJob[CudaLane, Request]):
    """Threads that fill a device's memory."""

    def __init__(
        self, backend: DeviceBackend, memory: Memory[torch.Tensor], job: ReadJob, opened: ReadableFiles
    ) -> None:
        """Start the threads."""
        self._backend = backend
        self._memory = memory
        self._handles: list[Handle] = []
        self._lanes: list[CudaLane] = []
        self._buffer_nbytes = _buffer_nbytes(job.budget)
        self._resources = ExitStack()
        """Releases pinned buffers, then what cuFile has registered, even if one step fails."""
        requests = backend.requests(job.reads, opened.alignment, job.budget, opened.grids)
        try:
            if backend.cufile is not None:
                self._register(backend.cufile, job, opened)
            self._resources.callback(self._close_lanes)
            super().__init__(job, opened, self._make_lane, self._work, requests, len(requests))
        except BaseException:
            self._drain()
            self._resources.close()
            raise

    def _register(self, cufile: CuFile, job: ReadJob, opened: ReadableFiles) -> None:
        for index, file in enumerate(job.files):
            # Checked by `_offer`.
            assert file.path is not None
            assert not file.is_verified
            self._handles.append(cufile.open(file.path))
            self._resources.callback(self._handles[index].close)
            opened.check_not_replaced(index)
        if isinstance(self._memory, DeviceArena):
            self._resources.callback(cufile.deregister, self._memory.whole)
            cufile.register(self._memory.whole)

    def join(self, on_progress: Callable[[int], None] | None = None) -> None:
        try:
            super().join(on_progress)
        except BaseException:
            self.cancel()
            raise
        self._resources.close()

    def settle(self) -> None:
        for lane in list(self._lanes):
            lane.settle()

    @property
    def current_stream(self) -> object:
        import torch

        device = torch.device(self._backend.device)
        return torch.cuda.current_stream(device) if device.type == "cuda" else None

    def cancel(self) -> None:
        super().cancel()
        if self.job.stop.is_lost:  # CUDA does not work in a process that was forked after its first use.
            return
        try:
            self._drain()
        finally:
            self._resources.close()

    def _make_lane(self) -> CudaLane:
        lane = self._backend.make_lane(self._buffer_nbytes)
        self._lanes.append(lane)
        return lane

    def _drain(self) -> None:
        # Memory must not be freed while a copy to it is running. A failed copy has raised its error elsewhere.
        for lane in self._lanes:
            with suppress(RuntimeError):
                lane.drain()

    def _close_lanes(self) -> None:
        while self._lanes:
            self._lanes.pop().close()

    def _work(self, lane: CudaLane, request: Request) -> int:
        import torch

        with torch.inference_mode():  # It allows writes to tensors that were created in inference mode, too.
            return self._read(lane, request)

    def _read(self, lane: CudaLane, request: Request) -> int:
        if request.arena_offset is None:
            self._send(lane, request.file, request.extent.offset, request.extent.nbytes, request.transfers)
            return request.nbytes
        shift = request.arena_offset - request.extent.offset
        for offset, nbytes, is_cached in self.opened.pieces(request.file, request.extent.offset, request.extent.nbytes):
            if self._handles and not is_cached:
                self._read_by_cufile(request.file, offset, offset + shift, nbytes)
            else:
                for start in range(offset, offset + nbytes, self._buffer_nbytes):
                    length = min(self._buffer_nbytes, offset + nbytes - start)
                    self._send(lane, request.file, start, length, (Transfer(0, start + shift, length),))
        return request.nbytes

    def _send(self, lane: CudaLane, file: int, offset: int, nbytes: int, transfers: Sequence[Transfer]) -> None:
        """Read into a pinned buffer, and copy from it to the device."""
        buffer = lane.buffer()
        view = _view(buffer)[:nbytes]
        self.opened.read(file, offset, view)
        for transfer in transfers:
            span = self._memory.span(transfer.target, transfer.target_end - transfer.target)
            if transfer.count == 1:
                lane.send(buffer[transfer.source : transfer.source + transfer.nbytes], span)
            else:
                size = (transfer.count, transfer.nbytes)
                source = buffer.as_strided(size, (transfer.source_stride, 1), buffer.storage_offset() + transfer.source)
                lane.send(source, span.as_strided(size, (transfer.target_stride, 1), span.storage_offset()))
            # The consumer may drop the memory as soon as it has arrived, and its thread must be the one that frees it:
            # vLLM's pool for sleep mode enters Python while it holds the lock of torch's allocator.
            del span
            self.job.on_arrival(transfer.target, transfer.total_nbytes)

    def _read_by_cufile(self, file: int, offset: int, target: int, nbytes: int) -> None:
        span = self._memory.span(target, nbytes)
        done = 0
        while done < nbytes:
            count = self._handles[file].read(span[done:], offset + done)
            if count <= 0:
                stored = self.job.files[file]
                raise FormatError(
                    f"ends at byte {offset + done}, expected {stored.nbytes} bytes",
                    path=stored.where,
                    offset=offset + done,
                    code="truncated",
                )
            done += count
        self.job.on_arrival(target, nbytes)


def pin(owner: object, memory: Iterable[tuple[int, int]], device: torch.device) -> bool:
    """Pin host memory, given as addresses and bytes, until `owner` is gone; return True if all of it was pinned.

    Copies from pageable memory go through the driver's buffers: 7 GB/s on an H100, 42 GB/s from pinned memory. `owner`
    holds the memory, and nothing may free it while `owner` exists. torch's own pinned memory takes up to twice the
    bytes. A separate thread pins the memory, because a CUDA error remains a thread's last error and would be raised by
    the thread's next kernel launch.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_pin, owner, memory, device).result()


def _pin(owner: object, memory: Iterable[tuple[int, int]], device: torch.device) -> bool:
    import torch

    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):  # Without this, a new thread creates a context on the first device.
        for address, nbytes in memory:
            if nbytes:
                if int(runtime.cudaHostRegister(address, nbytes, 0)):
                    return False
                # Not at exit, when CUDA may be gone: memory that is still pinned is released with the process.
                finalize(owner, _unpin, address, device).atexit = False
    return True


def _unpin(address: int, device: torch.device) -> None:
    import torch

    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def _view(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's memory. `Tensor.numpy` would keep torch from freeing it while referenced."""
    return memoryview((ctypes.c_ubyte * tensor.numel()).from_address(tensor.data_ptr())).cast("B")


def _aligned(slab: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Return the part of a slab that begins at a multiple of `BLOCK`; the slab has at least `nbytes + BLOCK` bytes."""
    start = -slab.data_ptr() % BLOCK
    return slab[start : start + nbytes]


def _buffer_nbytes(budget: Budget) -> int:
    """Return the bytes of one pinned buffer: a power of two less one `BLOCK`.

    torch rounds pinned memory up to a power of two; the block is for alignment.
    """
    return (1 << (budget.buffer_nbytes // BUFFERS_PER_LANE).bit_length() - 1) - BLOCK


@dataclass(frozen=True, slots=True)
class DeviceArena:
    """One allocation on a device."""

    whole: torch.Tensor
    """1-D, uint8, at a multiple of `BLOCK`."""

    def span(self, offset: int, nbytes: int) -> torch.Tensor:
        return self.whole[offset : offset + nbytes]

    def tensor(self) -> torch.Tensor:
        return self.whole

    def discard(self) -> None:
        self.whole.untyped_storage().resize_(0)


def allocate_on(device: str | torch.device, nbytes: int) -> DeviceArena:
    """Allocate device memory that no queued work uses."""
    import torch

    try:
        whole = torch.empty(nbytes + BLOCK, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise MemoryError(f"cannot allocate {nbytes} bytes on {device}: {str(error).splitlines()[0]}") from None
    if whole.is_cuda:
        _wait_for(whole.device)
    return DeviceArena(_aligned(whole, nbytes))


def _wait_for(device: torch.device) -> None:
    """Wait for work on the current stream that may still use memory that is to be filled.

    The allocator may have recycled that memory, or it belongs to existing tensors. The lanes' streams and cuFile do not
    wait for such work.
    """
    import torch

    torch.cuda.current_stream(device).synchronize()


class ScatteredOnDevice:
    """The memory of existing tensors on a device."""

    def __init__(self, pieces: Sequence[torch.Tensor]) -> None:
        """Take 1-D uint8 tensors; `arena.scatter` assigns their offsets."""
        self.offsets = scatter([(piece.data_ptr(), piece.numel()) for piece in pieces])
        self._pieces = pieces
        for device in {piece.device for piece in pieces if piece.is_cuda}:
            _wait_for(device)

    def span(self, offset: int, nbytes: int) -> torch.Tensor:
        which = bisect_right(self.offsets, offset) - 1
        start = offset - self.offsets[which]
        return self._pieces[which][start : start + nbytes]


def offer_pinned(device: str | torch.device, files: Sequence[StoredFile], is_by_name: bool) -> DeviceBackend:
    """Return the `pinned` backend."""
    backend = DeviceBackend(device, _lanes_of(device))
    backend.reason = "read into pinned memory, copied from there"
    return backend


def offer_gds(device: str | torch.device, files: Sequence[StoredFile], is_by_name: bool) -> DeviceBackend | str:
    """Return the `gds` backend if GPUDirect Storage works. Opening cuFile disables compat mode for the process."""
    return _offer_cufile("gds", device, files, is_by_name)


def offer_compat(device: str | torch.device, files: Sequence[StoredFile], is_by_name: bool) -> DeviceBackend | str:
    """Return the `cufile-compat` backend if cuFile works. Opening cuFile enables compat mode for the process."""
    assert is_by_name
    return _offer_cufile(_COMPAT, device, files, is_by_name)


def _offer_cufile(
    name: str, device: str | torch.device, files: Sequence[StoredFile], is_by_name: bool
) -> DeviceBackend | str:
    if refused := refuse_without_descriptors(name, files):
        return refused
    if any(file.is_verified for file in files):
        return f"backend {name!r} does not show its bytes to the host, which proves them: use 'pinned' to verify"
    # Imported here because loads to host memory do not need cuFile.
    from relayout.loader.backends import cufile

    why = "neither nvidia-fs nor PCI P2PDMA is set up"
    path = files[0].path if files else None
    if path is not None and not is_by_name and cufile.is_likely() and is_integrated(device):
        why = f"{device} has no memory of its own, but a part of the host's"
    elif path is not None and (is_by_name or cufile.is_likely()):
        found = cufile.find_cufile(path, compat=name == _COMPAT)
        if not isinstance(found, str):
            backend = DeviceBackend(device, _lanes_of(device), found.driver)
            what = found.path or _TITLES[name]
            backend.reason = f"{what} is {'asked for' if is_by_name else 'available'}: {found.reason}"
            backend.gds = found.path
            return backend
        why = found
    return f"backend {name!r}: {_TITLES[name]} is not available: {why}"


def is_integrated(device: str | torch.device | int) -> bool:
    """Return True if a CUDA device shares the host's memory instead of having its own."""
    import torch

    return bool(getattr(torch.cuda.get_device_properties(device), "is_integrated", False))


def _lanes_of(device: str | torch.device) -> Callable[[int], CudaLane]:
    import torch

    target = torch.device(device)
    assert target.index is not None  # A thread's default device may differ.
    return lambda nbytes: CudaLane(target, nbytes)
