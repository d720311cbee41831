"""`load` and `iter_load`: one rank's tensors, from a converted checkpoint or a plain one."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from relayout.errors import FormatError, PlanError
from relayout.loader.diagnose.hints import error_hints
from relayout.loader.loading import Options, load_arena, options_of
from relayout.loader.reads import ArenaPlan
from relayout.loader.sources.base import RankSource
from relayout.loader.sources.checkpoint import changed_rank, doubt_cache, find_rank, lease_of
from relayout.loader.sources.columns import Names
from relayout.progress import Progress

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from relayout.checkpoint.delta import Paths
    from relayout.checkpoint.trust import Trust
    from relayout.loader.sources.columns import TensorColumns
    from relayout.storage.cache_folder import CacheOption
    from relayout.storage.protocols import Store


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
    group: ProcessGroup | None = None,
    cache: CacheOption = None,
    deltas: Paths = (),
    trust: Trust = None,
) -> dict[str, torch.Tensor]:
    """Load the tensors of one tensor-parallel rank.

    They are views of one allocation, at addresses that are multiples of 16 bytes. Every byte has arrived when the call
    returns; on a CUDA device, work that is queued on the current stream from then on sees it. Several threads may load
    at once, but not into the same memory.

    Args:
        path: a folder that `relayout convert` wrote, or a plain checkpoint; as `str`, it may be a store's URL.
        rank: from 0.
        device: the torch device of the tensors.
        backend: "auto" takes the fastest that works here (see `relayout.explain`). To host memory: "direct" bypasses
            the page cache, "buffered" reads through it. To a CUDA device: "pinned" reads through pinned host memory,
            "gds" by GPUDirect Storage.
        names: load only tensors whose names match one of these patterns; other bytes are not read. As in plans, `*` is
            text without a dot (one part of the name), `**` any text, `{a,b}` one of these words, `#` a number.
        verify: compare digests while bytes arrive: of all chunks of the files (1 MiB each) that have bytes of the
            tensors.
        threads: requests in flight. Default: twice the processors, at most 8, divided among the ranks of the node if
            LOCAL_WORLD_SIZE is set; more if that is measured to be faster while bytes arrive.
        memory: bytes of buffers, or text such as "64MiB", beside the tensors; pinned memory for a CUDA device.
            Default: at most 32 MiB, pinned 128 MiB; all ranks of a node together 1 GiB.
        progress: True for a bar on stderr, or a function to call with (bytes that have arrived, total bytes).
        into: existing tensors to fill, such as an engine's parameters, with the slice's dtype and shape, on `device`.
            Other tensors are loaded only if `names` asks for them. Tensors that are not contiguous are filled through
            temporary memory, a few at a time. No two tensors may share memory, except two names of one tensor that
            have the same digest in a converted checkpoint.
        tp: the tensor-parallel degree, by default that of the conversion. Slices for another degree are assembled from
            the stored slices by the same rules. A plain checkpoint is sliced at this degree, or
            converted into `cache`.
        group: a torch.distributed group whose members all load this rank of a converted checkpoint now: each reads a
            part of its bytes and gets the rest from the others. Its backend must serve `device`. With `verify`, each
            compares the digests of the chunks that it reads. An error of one member is raised by all; a member that
            is killed fails the others at once over gloo, over NCCL after the group's timeout. No cache is used.
            Of a plain checkpoint each member loads its own rank, any ranks, to the CPU: together they read each byte
            once, and send each other what several need. That takes 40 MiB of buffers more than `memory`.
        cache: a folder on a local drive, or a `relayout.Cache` with a limit, that keeps the files of ranks that are
            loaded from a remote store: the next load is local. Every byte is proven when it is fetched. A plain
            checkpoint is converted into it first. Processes of a machine share it, and read nothing twice. Default:
            RELAYOUT_CACHE, if that is set; "" is no cache.
        deltas: folders that `relayout.delta` wrote, or their URLs: load what they make of the converted checkpoint,
            one after the other. Every byte is proven, with or without `verify`. The backend is "auto" or "buffered".
        trust: a policy file (TOML) that names whose signatures count. What is not signed so is an error before a tensor
            is returned; every byte is proven in host memory. Default: RELAYOUT_TRUST, if that is set.

    Returns:
        This rank's slice of each tensor, by its name in the source checkpoint; with `into`, the given tensors.

    Raises:
        FormatError: a file is damaged, missing, or of another conversion; with `verify`, also if a digest differs.
        PlanError: the path or the rank does not exist, or an argument does not fit the checkpoint; torch's
            FakeTensorMode is on.
        OSError: a read failed, or the backend does not work on this file system.
        MemoryError: there is not enough memory for the tensors.
        RuntimeError: the interpreter is shutting down, or the `progress` function forked this process.

    Example:
        >>> import relayout
        >>> tensors = relayout.load("llama-3.1-8b-tp8", rank=3, names="**.norm.weight")
        >>> list(tensors)
        ['model.norm.weight']
    """

    def prepare() -> tuple[RankSource, ArenaPlan, Options]:
        if into is not None:
            raise PlanError("group cannot be combined with into: a group loads into new memory", code="option")
        options = options_of(device, backend, verify, threads, memory, progress)
        source = find_source(path, rank, tp, verify, cache, None, deltas, trust, is_shared=True)
        return source, source.arena(names), options

    with error_hints():
        if group is not None:
            from relayout.loader.group.sharing import load_together

            return load_together(prepare, group, names)
        options = options_of(device, backend, verify, threads, memory, progress)
        find = partial(find_source, path, rank, tp, verify, progress=progress, deltas=deltas, trust=trust)
        source = find(cache=cache)
        try:
            return _load(source, names, into, options)
        except FormatError as error:
            if not doubt_cache(source):
                raise
            warnings.warn(f"{error}: loading again; `relayout cache list` lists the entries", stacklevel=2)
        return _load(find(cache=cache), names, into, options)


def _load(
    source: RankSource, names: Names, into: Mapping[str, torch.Tensor] | None, options: Options
) -> dict[str, torch.Tensor]:
    if into is None:
        plan = source.arena(names)
        warn_if_slow(source, stacklevel=4)
        return load_arena(plan, options)
    if not into and names is None:
        raise PlanError("into: no tensors to fill; leave it out to load into new memory", code="option")
    from relayout.loader.into import load_into

    contents = source.contents()
    warn_if_slow(source, stacklevel=4)
    return load_into(contents, into, names, options)


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
    group: ProcessGroup | None = None,
    cache: CacheOption = None,
    deltas: Paths = (),
    trust: Trust = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of one rank in file order, as they arrive.

    For code that copies each tensor to its parameter. (Not for `load_weights` of a stock vLLM or SGLang, which cuts
    whole tensors itself: they have plugins.) The caller may keep tensors; neighbors share memory, which is freed or
    used again when the last of them is deleted. Reading starts with the first `next`; an unfinished iterator frees its
    resources when it is closed or collected.

    Threads may take turns with one iterator, and each tensor is yielded once; calling `next` or `close` while another
    thread is inside one raises ValueError. On a CUDA device, the stream that is current at a `next` sees its tensor.
    After a fork, the child may close the iterator and use the tensors that were yielded, but cannot continue.

    Args:
        path, rank, device, backend, names, verify, threads, progress, tp, cache, deltas, trust: as for `load`.
        memory: bytes, or text such as "2GiB", of tensors that are being read or wait to be yielded, with all buffers.
            Default: 512 MiB, 2 GiB for all ranks of a node together, and always enough for the largest tensor.
        group: as for `load`, of a converted checkpoint. All members iterate to the end, each in one thread and on one
            CUDA stream, and wait for each other; the least `memory` counts for all. A member that stops early fails
            the others.

    Raises:
        FormatError, OSError, MemoryError: as `load`, while iterating too.
        RuntimeError: while iterating: this process was forked since the first `next`, or is shutting down.
        PlanError: as `load`, or `memory` is less than the largest tensor takes. With a group, while iterating.

    Example:
        >>> import relayout
        >>> sum(tensor.nbytes for name, tensor in relayout.iter_load("llama-3.1-8b-tp8", rank=3)) > 200_000
        True
    """

    def prepare() -> tuple[RankSource, TensorColumns, Options]:
        options = options_of(device, backend, verify, threads, memory, progress)
        source = find_source(path, rank, tp, verify, cache, None, deltas, trust, is_shared=True)
        return source, source.contents(names), options

    with error_hints():
        if group is not None:
            from relayout.loader.group.collectives import Group
            from relayout.loader.group.sharing import stream_together

            return stream_together(prepare, Group(group))
        from relayout.loader.stream import stream

        options = options_of(device, backend, verify, threads, memory, progress)
        source = find_source(path, rank, tp, verify, cache, progress, deltas, trust)
        contents = source.contents(names)
        warn_if_slow(source)
        return doubting(stream(contents, options), source)


def doubting(tensors: Iterator[tuple[str, torch.Tensor]], source: RankSource) -> Iterator[tuple[str, torch.Tensor]]:
    """The same tensors. If they are from a cache, the next load makes an entry again in which this one finds damage."""
    return tensors if lease_of(source) is None else _doubting(tensors, source)


def _doubting(tensors: Iterator[tuple[str, torch.Tensor]], source: RankSource) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        yield from tensors
    except FormatError as error:
        doubt_cache(source)
        error.amend(
            what=f"{error.what}; the next load makes this entry of the cache again (`relayout cache list` lists them)"
        )
        raise


def find_source(
    path: str | os.PathLike[str] | Store,
    rank: int,
    tp: int | None,
    verify: bool,
    cache: CacheOption = None,
    progress: Progress = None,
    deltas: Paths = (),
    trust: Trust = None,
    *,
    is_shared: bool = False,
) -> RankSource:
    """The rank's source; with `is_shared`, for a load that the members of a group share.

    Raises:
        FormatError, OSError: as `find_rank`, and `changed_rank` of deltas.
        PlanError: the same; or `verify` is set and the checkpoint is a plain one; or a group asks for a cache.
    """
    if is_shared and cache:
        what = "group cannot be combined with cache: members share the reads of a rank, a cache fetches all of it"
        raise PlanError(what, code="option")
    source = find_rank(path, rank, tp, "" if is_shared else cache, progress, trust)
    if deltas:
        source = changed_rank(source, tp, deltas)
    if verify and source.is_plain:
        what = "cannot be verified: only converted checkpoints have digests"
        raise PlanError(what, path=str(source.store), code="unsupported")
    return source


def warn_if_slow(source: RankSource, stacklevel: int = 3) -> None:
    """Warn, by default at the line of the caller's caller, if there is a faster way to load."""
    if source.slow_because is not None:
        warnings.warn(source.slow_because, stacklevel=stacklevel)
