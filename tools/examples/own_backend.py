"""A backend in one module: one thread reads into a bytearray.

One line makes it known: `relayout.loader.backends.base.REGISTRY["toy"] = "cpu", own_backend.offer`. `relayout.testing`
says whether it is right.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from relayout.core.extents import BLOCK, Transfer, copy_runs
from relayout.loader.backends.base import Backend, Memory, ReadJob
from relayout.loader.backends.files import ReadableFiles
from relayout.loader.backends.host import Scattered, ThreadedJob
from relayout.loader.requests import Budget, Request
from relayout.loader.sources.rank import StoredFile


class ToyArena:
    """A bytearray, from its first border of a block on."""

    def __init__(self, nbytes: int) -> None:
        self._memory = bytearray(nbytes + BLOCK)
        self._start = -ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) % BLOCK
        self._nbytes = nbytes

    def span(self, offset: int, nbytes: int) -> memoryview:
        return memoryview(self._memory)[self._start + offset : self._start + offset + nbytes]

    def tensor(self) -> torch.Tensor:
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=max(1, self._nbytes), offset=self._start)

    def discard(self) -> None:
        self._memory = bytearray()


class ToyBackend(Backend[memoryview]):
    name = "toy"
    reason = "one thread reads all of it"
    max_buffer_nbytes = 2**20
    is_zero_copy = False

    def allocate(self, nbytes: int) -> ToyArena:
        return ToyArena(nbytes)

    def wrap(self, tensors: Sequence[torch.Tensor]) -> Scattered:
        return Scattered([(tensor.data_ptr(), tensor.numel()) for tensor in tensors])

    def start(self, memory: Memory[memoryview], job: ReadJob) -> ThreadedJob[None, Request]:
        opened = ReadableFiles(job.files, self.access)
        one = replace(job, budget=Budget(1, job.budget.memory))
        requests = self.requests(one.reads, 1, one.budget, opened.grids)
        return ThreadedJob(one, opened, lambda: None, Reader(memory, opened, one).read, requests, len(requests))


@dataclass(frozen=True)
class Reader:
    memory: Memory[memoryview]
    opened: ReadableFiles
    job: ReadJob

    def read(self, state: None, request: Request) -> int:
        """Bring what is requested to where it belongs."""
        brought = memoryview(bytearray(request.extent.nbytes))
        self.opened.read(request.file, request.extent.offset, brought)
        transfers = request.transfers
        if request.arena_offset is not None:
            transfers = (Transfer(0, request.arena_offset, request.extent.nbytes),)
        for one in transfers:
            span = self.memory.span(one.target, one.target_end - one.target)
            copy_runs(brought, span, one.shifted(target=-one.target))
            self.job.on_arrival(one.target, one.total_nbytes)
        return request.nbytes


def offer(device: str | torch.device, files: Sequence[StoredFile], is_by_name: bool) -> ToyBackend:
    return ToyBackend()
