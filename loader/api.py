"""`load` and `iter_load`: one rank's tensors, from a converted checkpoint, or a plain one sliced on the fly."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from relayout.errors import PlanError
from relayout.loader.diagnose.hints import error_hints
from relayout.loader.into import load_into
from relayout.loader.loading import load_arena, options_of
from relayout.loader.sources.checkpoint import RankSource, find_rank
from relayout.loader.stream import stream
from relayout.progress import Progress

if TYPE_CHECKING:
    import torch


def load(
    path: str | os.PathLike[str],
    rank: int,
    *,
    device: str | torch.device = "cpu",
    backend: str = "auto",
    names: Sequence[str] | str | None = None,
    verify: bool = False,
    threads: int | None = None,
    memory: int | str | None = None,
    progress: Progress = None,
    into: Mapping[str, torch.Tensor] | None = None,
    tp: int | None = None,
) -> dict[str, torch.Tensor]:
    """Load the tensors of one tensor-parallel rank.

    They are views of one allocation, at addresses that are multiples of 16 bytes. Every byte has arrived when the call
    returns; on a CUDA device, what the current stream does from then on sees it. Several threads may load at once, but
    not into the same memory.

    Args:
        path: a folder that `relayout convert` wrote, or a plain checkpoint; as `str`, it may be a store's URL.
        rank: from 0.
        device: where the tensors shall lie.
        backend: "auto" takes what is best here (see `relayout.explain`). To host memory: "direct" reads past the page
            cache, "buffered" through it, "mapped" makes tensors of the page cache's own pages, read when first used.
            To a CUDA device: "pinned" through pinned host memory, "gds" by GPUDirect Storage.
        names: load only tensors whose names match one of these patterns; other bytes are not read. As in plans, `*` is
            text without a dot (one part of the name), `**` any text, `{a,b}` one of these words, `#` a number.
        verify: compare every tensor with its digest while it arrives.
        threads: requests in flight. Default: twice the processors, at most 8, shared with the other ranks of the node
            where LOCAL_WORLD_SIZE is set.
        memory: bytes of buffers, or text such as "64MiB", pinned ones for a CUDA device, beside the tensors themselves.
            Default: at most 32 MiB, pinned 128 MiB; all ranks of a node together 1 GiB.
        progress: True for a bar on stderr, or a function to call with (bytes that have arrived, bytes in all).
        into: tensors to fill, an engine's parameters for example, instead of new ones: of the slice's dtype and shape,
            on `device`. Other tensors are loaded only if `names` asks for them. Tensors that are not contiguous are
            filled through memory of their own, some at a time. No two may share memory, but for the two names of one
            tensor that a converted checkpoint has twice, with the same digest.
        tp: the tensor-parallel degree, by default that of the conversion. Another one is put together from the slices
            of several ranks, or cut out of one, by the same rules; just the bytes needed are read where the ranks' own
            slices are joined. A plain checkpoint is sliced at this degree, which is slower.

    Returns:
        Tensor names of the source checkpoint, and this rank's slice of each; with `into`, the given tensors.

    Raises:
        FormatError: a file is damaged, missing, or of another conversion; with `verify`, also if a digest differs.
        PlanError: the rank does not exist, or the request makes no sense for this folder; torch's FakeTensorMode is on.
        OSError: a read failed, or the backend asked for cannot be had on this file system.
        MemoryError: there is no room for the tensors.
        RuntimeError: the load was given up before its end, as the interpreter is ending; or this process was forked by
            the `progress` function.
    """
    with error_hints():
        options = options_of(device, backend, verify, threads, memory, progress)
        source = find_source(path, rank, tp, verify)
        patterns = patterns_of(names)
        if into is None:
            plan = source.arena(patterns)
            warn_of_detour(source)
            return load_arena(plan, options)
        contents = source.contents(None)
        warn_of_detour(source)
        return load_into(contents, into, patterns, options)


def iter_load(
    path: str | os.PathLike[str],
    rank: int,
    *,
    device: str | torch.device = "cpu",
    backend: str = "auto",
    names: Sequence[str] | str | None = None,
    verify: bool = False,
    threads: int | None = None,
    memory: int | str | None = None,
    progress: Progress = None,
    tp: int | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of one rank in file order, as they arrive.

    For engines that copy each tensor to where it belongs, such as `load_weights(iterator)` of vLLM and SGLang. Tensors
    are the caller's to keep; neighbors share memory, which is freed, or used again, when none of them is left. Reading
    starts with the first `next`; an iterator that is not used up gives everything back when it is closed or collected.

    Threads may take turns at one iterator, and each tensor comes once; who calls `next` or `close` while another thread
    is in the middle of it gets a ValueError. On a CUDA device, the stream that is current at a `next` sees its tensor.
    A process that is forked in the middle may close it, and keeps the tensors that have come, but cannot go on.

    Args:
        path, rank, device, backend, names, verify, threads, progress, tp: as for `load`. "mapped" yields tensors that
            are read when they are used.
        memory: bytes, or text such as "2GiB", that may have been read, or are being read, and were not yielded yet,
            with all buffers. Default: 512 MiB, 2 GiB for all ranks of a node together, and room for the largest tensor.

    Raises:
        FormatError, OSError, MemoryError: as `load`, while iterating too.
        RuntimeError: while iterating: this process is a child that was forked in the middle, or is ending.
        PlanError: as `load`, or `memory` is less than the largest tensor takes.
    """
    with error_hints():
        options = options_of(device, backend, verify, threads, memory, progress)
        source = find_source(path, rank, tp, verify)
        contents = source.contents(patterns_of(names))
        warn_of_detour(source)
        return stream(contents, options)


def patterns_of(names: Sequence[str] | str | None) -> Sequence[str] | None:
    """The patterns that a caller gave; one may stand by itself."""
    return [names] if isinstance(names, str) else names


def find_source(path: str | os.PathLike[str], rank: int, tp: int | None, verify: bool) -> RankSource:
    """The rank that a caller asks for.

    Raises:
        FormatError: the manifest is damaged.
        PlanError: as `sources.checkpoint.find_rank`; or there is nothing to verify by.
    """
    source = find_rank(path, rank, tp)
    if verify and source.no_digests is not None:
        raise PlanError(source.no_digests, code="unsupported")
    return source


def warn_of_detour(source: RankSource) -> None:
    """Tell at the line of the caller's caller that there is a faster way."""
    if source.detour is not None:
        warnings.warn(source.detour, stacklevel=3)
