"""Tensors that are mapped pages of the files, read when they are first used: for `open`, and for draft models."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from relayout.core.extents import Transfer, align_down, align_up
from relayout.errors import FormatError
from relayout.format.index import Read
from relayout.loader.backends.base import ReadJob
from relayout.loader.backends.files import ReadableFiles
from relayout.loader.backends.host import MAP_FIXED, HostArena, HostBackend, allocate
from relayout.loader.budgets import HOST_BUFFERS, plan_budget
from relayout.loader.diagnose.hints import error_hints
from relayout.loader.reads import ArenaPlan
from relayout.loader.sources.stored import StoredFile
from relayout.loader.tensors import make_views
from relayout.storage.libc import map_file
from relayout.storage.protocols import Access

if TYPE_CHECKING:
    import torch

_FLAGS = mmap.MAP_PRIVATE | MAP_FIXED
"""Replace the arena's own pages. Private: a write to a tensor copies the page."""


def can_map(files: Iterable[StoredFile]) -> bool:
    """Whether files can be mapped: not those of most stores, nor those whose bytes are proven as they are read."""
    return all(file.path is not None and not file.is_proven for file in files)


def map_tensors(plan: ArenaPlan) -> dict[str, torch.Tensor]:
    """Map whole pages of the files over a new arena, where offset and address are congruent, and copy the rest.

    A tensor costs nothing until it is used. As with every mapping, using a page that the drive cannot read, or that was
    truncated, kills the process (SIGBUS).

    Args:
        plan: its files can be mapped.

    Raises:
        FormatError, PlanError, MemoryError: as `api.load`.
        OSError: a read failed, or the file system does not map files into memory.
    """
    with error_hints():
        tensors = plan.tensors()
        arena = allocate(plan.arena_nbytes)
        try:
            with ReadableFiles(plan.files, Access.BUFFERED) as opened:
                rest = tuple(part for read in plan.reads for part in _map(arena, opened, read))
                budget = plan_budget(None, None, HOST_BUFFERS)
                HostBackend(Access.BUFFERED).fill(arena, ReadJob(plan.files, rest, budget))
                _check_lengths(plan.files, opened)
            return make_views(arena.tensor(), tensors)
        except BaseException:
            arena.discard()
            raise


def _map(arena: HostArena, opened: ReadableFiles, read: Read) -> Iterator[Read]:
    """Map what can be mapped of a read, and yield what has to be copied."""
    transfer = read.transfer
    shift = transfer.target - transfer.source
    low, high = align_up(transfer.source, mmap.PAGESIZE), align_down(transfer.source_end, mmap.PAGESIZE)
    if transfer.count > 1 or shift % mmap.PAGESIZE or low >= high:
        yield read
        return
    address = ctypes.addressof(ctypes.c_char.from_buffer(arena.span(low + shift, high - low)))
    map_file(opened.fd(read.file), low, high - low, flags=_FLAGS, writable=True, address=address)
    for start, end in ((transfer.source, low), (high, transfer.source_end)):
        if start < end:
            yield Read(read.file, Transfer(start, start + shift, end - start))


def _check_lengths(files: Iterable[StoredFile], opened: ReadableFiles) -> None:
    """Check that no file was truncated meanwhile: using its pages would kill the process."""
    for index, file in enumerate(files):
        length = os.fstat(opened.fd(index)).st_size
        if length < file.nbytes:
            what = f"ends at byte {length}, expected {file.nbytes} bytes"
            raise FormatError(what, path=file.where, offset=length, code="truncated")
