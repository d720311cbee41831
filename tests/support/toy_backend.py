"""A backend in one module: one thread reads with pread into a bytearray. The suites take it as one more."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from relayout.core.extents import BLOCK, Extent, Transfer, copy_runs
from relayout.errors import FormatError
from relayout.loader.backends.arena import Scattered
from relayout.loader.backends.base import Backend, Choice, Memory, ReadJob, Request
from relayout.loader.backends.files import Sources
from relayout.loader.backends.host import ThreadedJob
from relayout.loader.budgets import Budget
from relayout.loader.read_plan import Chunk
from relayout.storage.protocols import Refusal


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
    max_buffer_nbytes = 2**20
    is_zero_copy = False

    def allocate(self, nbytes: int) -> ToyArena:
        return ToyArena(nbytes)

    def wrap(self, tensors: Sequence[torch.Tensor]) -> Scattered:
        return Scattered([(tensor.data_ptr(), tensor.numel()) for tensor in tensors])

    def start(self, memory: Memory[memoryview], job: ReadJob) -> ThreadedJob[None, Chunk]:
        sources = Sources(job.files, self.access)
        one = replace(job, budget=Budget(1, job.budget.memory))
        chunks = self.chunks(one.reads, 1, one.budget)
        return ThreadedJob(one, sources, lambda: None, Reader(memory, sources, one).read, chunks)


@dataclass(frozen=True)
class Reader:
    memory: Memory[memoryview]
    sources: Sources
    job: ReadJob

    def read(self, state: None, chunk: Chunk) -> int:
        """Bring one chunk to where it belongs."""
        brought = memoryview(self._pread(chunk.file, chunk.extent))
        transfers = chunk.transfers
        if chunk.arena_offset is not None:
            transfers = (Transfer(0, chunk.arena_offset, chunk.extent.nbytes),)
        for one in transfers:
            span = self.memory.span(one.target, one.target_end - one.target)
            copy_runs(brought, span, one.shifted(target=-one.target))
            if self.job.checks is not None:
                self.job.checks.update(one.target, span)
            self.job.on_arrival(one.target, one.total_nbytes)
        return chunk.nbytes

    def _pread(self, file: int, extent: Extent) -> bytearray:
        found = bytearray()
        while len(found) < extent.nbytes:
            piece = os.pread(self.sources.fd(file), extent.nbytes - len(found), extent.offset + len(found))
            if not piece:
                stored = self.job.files[file]
                end = extent.offset + len(found)
                raise FormatError(f"{stored.where}: ends at byte {end}, expected {stored.nbytes} bytes")
            found += piece
        return found


def offer(request: Request) -> Choice | Refusal:
    if request.kind != "cpu":
        return Refusal(f"backend 'toy' loads to host memory, not to {str(request.device)!r}")
    return Choice(ToyBackend(), request.reason("one thread reads all of it"))
