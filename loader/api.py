"""`load` and `iter_load`: one rank's tensors, from a converted checkpoint or a plain one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Unpack

from relayout.core.arguments import check_named, takes
from relayout.errors import FormatError, PlanError, warn
from relayout.loader.backends.base import Options, load_arena
from relayout.loader.backends.files import error_hints
from relayout.loader.sources.checkpoint import (
    LoadOptions,
    LoadRequest,
    invalidate_cache_entry,
    invalidating,
    warn_if_slow,
)
from relayout.loader.sources.rank import RankSource

if TYPE_CHECKING:
    import torch

    from relayout.loader.sources.rank import TensorColumns


@takes(LoadOptions, LoadRequest)
def load(
    path: str | os.PathLike[str],
    rank: int | None = None,
    *,
    into: Mapping[str, torch.Tensor] | torch.nn.Module | None = None,
    **options: Unpack[LoadOptions],
) -> dict[str, torch.Tensor]:
    """Load the tensors of one tensor-parallel rank or of the whole model, or fill existing tensors.

    Tensors are views of one allocation, at addresses that are multiples of 16 bytes. Every byte has arrived when the
    call returns. On a CUDA device, work that is queued on the current stream after the call sees all bytes. Several
    threads may load at the same time, but not into the same memory.

    Args:
        path: a folder that `relayout convert` wrote, or a plain checkpoint. A `str` may also be the URL of a store.
        rank: from 0. Default: whole tensors, assembled from all ranks; with `into`, the parts that `into` holds.
        device: the torch device of the tensors.
        backend: "auto" takes the fastest that works here (see `relayout.explain`). To host memory: "direct" bypasses
            the page cache, "buffered" reads through it. To a CUDA device: "pinned" reads through pinned host memory,
            "gds" by GPUDirect Storage, "cufile-compat" by cuFile through host memory, to test it.
        names: load only tensors with names that match one of these patterns; no other bytes are read. As in plans, `*`
            is text without a dot (one part of the name), `**` any text, `{a,b}` one of these words, `#` a number. A
            pattern that begins with `!` excludes the names that it matches. If all patterns begin with `!`, all other
            tensors are loaded.
        experts: load these experts, each whole, instead of the rank's own: numbers, or text such as "0-31,64". In wide
            expert parallelism, a process loads the experts that it runs and reads no other, from any converted folder.
            `input_scale` and `input_global_scale` are loaded for all experts.
        verify: compare the digests of all chunks (1 MiB each) that contain bytes of the tensors, while bytes arrive.
        threads: requests in flight. Default: twice the number of processors, divided among the ranks of the node if
            LOCAL_WORLD_SIZE is set, but at most 8; more if measurements during the load show that more are faster.
        memory: bytes of buffers, or text such as "64MiB", in addition to the tensors; pinned memory for a CUDA device.
            Default: at most 32 MiB, or 128 MiB if pinned, and at most 1 GiB for all ranks of a node together.
        progress: True for a bar on stderr, or a function to call with (bytes that have arrived, total bytes).
        into: existing tensors to fill, such as an engine's parameters, with the slice's dtype and shape, on `device`.
            Tensors that are not in `into` are loaded only if `names` matches them. Tensors that are not contiguous are
            filled through temporary memory, a few at a time. The same holds for tensors of a wider floating-point dtype
            that can represent all values of the slice's dtype, such as FP32 for BF16. Tensors must not share memory,
            with one exception: two names may refer to one tensor if their digests in a converted checkpoint are equal.
            Without a rank: a model, or its state dict. Of a DTensor, this process's shard is filled; of any other
            tensor, all elements. A model of transformers 5 is filled as its `from_pretrained` does it, for example with
            all experts in one tensor. All tensors must have memory, on one device. Missing and unexpected tensors are
            errors; with `names`, only tensors that match are considered. For names that share memory, such as tied
            weights, the checkpoint must contain only one tensor, or equal tensors.
        tp: the tensor-parallel degree of the rank, by default that of the conversion. Slices for another degree are
            assembled from the stored slices by the same rules. A plain checkpoint is sliced at this degree, or
            converted into `cache`.
        group: a torch.distributed group. All members call this at the same time to load the same rank of a converted
            checkpoint. Each reads a part of its bytes and receives the rest from the other members. The group's backend
            must serve `device`. With `verify`, each member compares the digests of the chunks that it reads. An error
            of one member is raised by all. If a member is killed, the others fail: over gloo at once, over NCCL after
            the group's timeout. No cache is used. From a plain checkpoint, each member loads its own rank to the CPU
            (any ranks, in any combination). Together they read each byte once, and send each other bytes that several
            members need. This takes 40 MiB of buffers more than `memory`. With `into` and no rank, members also read
            each byte once, from any checkpoint and to any device. Each member passes the tensors that it holds.
        cache: a folder on a local drive, or a `relayout.Cache` with a limit. It keeps the files of ranks that are
            loaded from a remote store, so that the next load is local. Every byte is verified when it is fetched. A
            plain checkpoint is converted into it first. Processes of a machine share it, and read nothing twice.
            Default: RELAYOUT_CACHE, if set; "" disables the cache.
        deltas: folders that `relayout.delta` wrote, or their URLs. They are applied to the converted checkpoint in this
            order. Every byte is verified, with or without `verify`. The backend is "auto" or "buffered".
        trust: a policy file (TOML) that lists accepted signers. A checkpoint without an accepted signature is an error
            before a tensor is returned; every byte is verified in host memory. Default: RELAYOUT_TRUST, if set.

    Returns:
        This rank's slice of each tensor, or the whole tensor, by its name in the source checkpoint. With `into`: the
        given tensors, by the model's names.

    Raises:
        FormatError: a file is damaged, missing, or of another conversion; with `verify`, also if a digest differs.
        PlanError: the path or the rank does not exist, or an argument does not fit the checkpoint; torch's
            FakeTensorMode is on.
        OSError: a read failed, or the backend does not work on this file system.
        MemoryError: there is not enough memory for the tensors.
        RuntimeError: the interpreter is shutting down, or the `progress` function forked this process.

    Example:
        >>> import relayout
        >>> tensors = relayout.load("llama-3.1-8b-tp8", rank=3, names="**.q_proj.weight")
        >>> tensors["model.layers.0.self_attn.q_proj.weight"].shape
        torch.Size([16, 128])
        >>> whole = relayout.load("llama-3.1-8b-tp8", names="**.q_proj.weight")
        >>> whole["model.layers.0.self_attn.q_proj.weight"].shape
        torch.Size([128, 128])
    """
    request = LoadRequest(path=path, rank=rank, into=into, **options)
    if isinstance(into, Mapping):
        check_named(into, "into")
    with error_hints():
        if rank is None and into is not None:
            from relayout.loader.sharded import load_held

            return load_held(request)
        if request.group is not None:
            from relayout.loader.group.sharing import load_together

            return load_together(request, request.group)
        how, source = request.options(), request.source()
        try:
            return _load(request, source, how)
        except FormatError as error:
            if not invalidate_cache_entry(source, error):
                raise
            warn(f"{error}: loading again")
        return _load(request, request.source(), how)


def _load(request: LoadRequest, source: RankSource, options: Options) -> dict[str, torch.Tensor]:
    if request.into is None:
        plan = source.arena(request.names)
        warn_if_slow(source)
        return load_arena(plan, options)
    if not isinstance(request.into, Mapping):
        if hasattr(request.into, "state_dict"):
            raise PlanError("into is a model: leave out the rank, as the model says what it holds", code="option")
        raise PlanError(f"into is a {type(request.into).__name__}, expected tensors by name", code="option")
    if not request.into and request.names is None:
        raise PlanError("into: no tensors to fill; leave it out to load into new memory", code="option")
    from relayout.loader.in_place import load_into

    contents = source.contents()
    warn_if_slow(source)
    return load_into(contents, request.into, request.names, options)


@takes(LoadOptions, LoadRequest)
def iter_load(
    path: str | os.PathLike[str],
    rank: int | None = None,
    **options: Unpack[LoadOptions],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of one rank, or of the whole model, in file order, as the tensors arrive.

    Use it in code that copies each tensor to its parameter. (It is not for the built-in `load_weights` of vLLM or
    SGLang, which cuts whole tensors itself: use relayout's plugins.) The caller may keep tensors. Neighbors share
    memory, which is freed or reused when the last of them is deleted. Reading starts with the first `next`. An
    unfinished iterator frees its resources when it is closed or collected.

    Threads may take turns with one iterator, and each tensor is yielded once. Calling `next` or `close` while another
    thread is inside `next` or `close` raises ValueError. On a CUDA device, the stream that is current at a `next` sees
    its tensor. After a fork, the child may close the iterator and use the tensors that were yielded, but cannot
    continue.

    Args:
        path, rank: as for `load`.
        memory: limit of the tensors that are being read or wait to be yielded, plus all buffers; bytes, or text such as
            "2GiB". Default: 512 MiB, but at most 2 GiB for all ranks of a node together, and always enough for the
            largest tensor.
        group: as for `load`, of a converted checkpoint. All members iterate to the end, each in one thread and on one
            CUDA stream, and wait for each other. The smallest `memory` among the members applies to all. A member that
            stops early fails the others.
        options: all others as for `load`.

    Raises:
        FormatError, OSError, MemoryError: as `load`, while iterating too.
        RuntimeError: while iterating: this process was forked since the first `next`, or is shutting down.
        PlanError: as `load`, or `memory` is less than the largest tensor takes. With a group, while iterating.

    Example:
        >>> import relayout
        >>> sum(tensor.nbytes for name, tensor in relayout.iter_load("llama-3.1-8b-tp8", rank=3)) > 200_000
        True
    """
    request = LoadRequest(path=path, rank=rank, **options)
    with error_hints():
        if request.group is not None:
            from relayout.loader.group.collectives import Group
            from relayout.loader.group.sharing import stream_together

            return stream_together(partial(_prepared, request), Group(request.group))
        from relayout.loader.stream import stream

        source, contents, how = _prepared(request)
        warn_if_slow(source)
        return invalidating(stream(contents, how), source)


def _prepared(request: LoadRequest) -> tuple[RankSource, TensorColumns, Options]:
    """Return the source of a load, the tensors to read from it, and the options."""
    options, source = request.options(), request.source()
    return source, source.contents(request.names), options
