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
from relayout.loader.sources.checkpoint import Asked, LoadOptions, doubt_cache, doubting, warn_if_slow
from relayout.loader.sources.rank import RankSource

if TYPE_CHECKING:
    import torch

    from relayout.loader.sources.rank import TensorColumns


@takes(LoadOptions, Asked)
def load(
    path: str | os.PathLike[str],
    rank: int | None = None,
    *,
    into: Mapping[str, torch.Tensor] | torch.nn.Module | None = None,
    **options: Unpack[LoadOptions],
) -> dict[str, torch.Tensor]:
    """Load the tensors of one tensor-parallel rank, or the whole model; or fill what this process holds of one.

    Tensors are views of one allocation, at addresses that are multiples of 16 bytes. Every byte has arrived when the
    call returns; on a CUDA device, work that is queued on the current stream from then on sees it. Several threads may
    load at once, but not into the same memory.

    Args:
        path: a folder that `relayout convert` wrote, or a plain checkpoint; as `str`, it may be a store's URL.
        rank: from 0. Without one: whole tensors, those of all ranks; or what `into` says that this process holds.
        device: the torch device of the tensors.
        backend: "auto" takes the fastest that works here (see `relayout.explain`). To host memory: "direct" bypasses
            the page cache, "buffered" reads through it. To a CUDA device: "pinned" reads through pinned host memory,
            "gds" by GPUDirect Storage.
        names: load only tensors whose names match one of these patterns; other bytes are not read. As in plans, `*` is
            text without a dot (one part of the name), `**` any text, `{a,b}` one of these words, `#` a number. What
            matches a pattern behind a `!` is left out; with such patterns only, all else is loaded.
        experts: load these experts, each whole, in place of those that the rank has: numbers, or text such as
            "0-31,64". A process of wide expert parallelism loads those that it runs, and reads nothing of others, from
            any converted folder. `input_scale` and `input_global_scale` are loaded for all experts.
        verify: compare digests while bytes arrive: of all chunks of the files (1 MiB each) that have bytes of the
            tensors.
        threads: requests in flight. Default: twice the processors, at most 8, divided among the ranks of the node if
            LOCAL_WORLD_SIZE is set; more if that is measured to be faster while bytes arrive.
        memory: bytes of buffers, or text such as "64MiB", beside the tensors; pinned memory for a CUDA device.
            Default: at most 32 MiB, pinned 128 MiB; all ranks of a node together 1 GiB.
        progress: True for a bar on stderr, or a function to call with (bytes that have arrived, total bytes).
        into: existing tensors to fill, such as an engine's parameters, with the slice's dtype and shape, on `device`.
            Other tensors are loaded only if `names` asks for them. Tensors that are not contiguous are filled through
            temporary memory, a few at a time; so are those of a floating-point dtype that has all values of the
            slice's, such as FP32 for BF16. No two tensors may share memory, except two names of one tensor that have
            the same digest in a converted checkpoint.
            Without a rank: a model, or its state dict. Of a DTensor the shard is filled that this process holds, of
            another tensor all. A model of transformers 5 is filled as its `from_pretrained` does it, experts in one
            tensor, for example. They must have memory, on one device. Whatever a checkpoint lacks or has beside is an
            error; with `names`, only what these match counts. Names that share memory, as of tied weights, need one
            tensor, or equal ones.
        tp: the tensor-parallel degree of the rank, by default that of the conversion. Slices for another degree are
            assembled from the stored slices by the same rules. A plain checkpoint is sliced at this degree, or
            converted into `cache`.
        group: a torch.distributed group whose members all load this rank of a converted checkpoint now: each reads a
            part of its bytes and gets the rest from the others. Its backend must serve `device`. With `verify`, each
            compares the digests of the chunks that it reads. An error of one member is raised by all; a member that
            is killed fails the others at once over gloo, over NCCL after the group's timeout. No cache is used.
            Of a plain checkpoint each member loads its own rank, any ranks, to the CPU: together they read each byte
            once, and send each other what several need. That takes 40 MiB of buffers more than `memory`.
            So they do with `into` and no rank, from any checkpoint and to any device; each gives what it holds.
        cache: a folder on a local drive, or a `relayout.Cache` with a limit, that keeps the files of ranks that are
            loaded from a remote store: the next load is local. Every byte is proven when it is fetched. A plain
            checkpoint is converted into it first. Processes of a machine share it, and read nothing twice. Default:
            RELAYOUT_CACHE, if that is set; "" is no cache.
        deltas: folders that `relayout.delta` wrote, or their URLs: load what they make of the converted checkpoint,
            one after the other. Every byte is proven, with or without `verify`. The backend is "auto" or "buffered".
        trust: a policy file (TOML) that names whose signatures count. What is not signed so is an error before a tensor
            is returned; every byte is proven in host memory. Default: RELAYOUT_TRUST, if that is set.

    Returns:
        This rank's slice of each tensor, or the whole one, by its name in the source checkpoint; with `into`, the given
        tensors, by the model's names.

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
    asked = Asked(path=path, rank=rank, into=into, **options)
    if isinstance(into, Mapping):
        check_named(into, "into")
    with error_hints():
        if rank is None and into is not None:
            from relayout.loader.sharded import load_held

            return load_held(asked)
        if asked.group is not None:
            from relayout.loader.group.sharing import load_together

            return load_together(asked, asked.group)
        how, source = asked.options(), asked.source()
        try:
            return _load(asked, source, how)
        except FormatError as error:
            if not doubt_cache(source, error):
                raise
            warn(f"{error}: loading again")
        return _load(asked, asked.source(), how)


def _load(asked: Asked, source: RankSource, options: Options) -> dict[str, torch.Tensor]:
    if asked.into is None:
        plan = source.arena(asked.names)
        warn_if_slow(source)
        return load_arena(plan, options)
    if not isinstance(asked.into, Mapping):
        if hasattr(asked.into, "state_dict"):
            raise PlanError("into is a model: leave out the rank, as the model says what it holds", code="option")
        raise PlanError(f"into is a {type(asked.into).__name__}, expected tensors by name", code="option")
    if not asked.into and asked.names is None:
        raise PlanError("into: no tensors to fill; leave it out to load into new memory", code="option")
    from relayout.loader.in_place import load_into

    contents = source.contents()
    warn_if_slow(source)
    return load_into(contents, asked.into, asked.names, options)


@takes(LoadOptions, Asked)
def iter_load(
    path: str | os.PathLike[str],
    rank: int | None = None,
    **options: Unpack[LoadOptions],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of one rank, or of the whole model, in file order, as they arrive.

    For code that copies each tensor to its parameter. (Not for `load_weights` of a stock vLLM or SGLang, which cuts
    whole tensors itself: they have plugins.) The caller may keep tensors; neighbors share memory, which is freed or
    used again when the last of them is deleted. Reading starts with the first `next`; an unfinished iterator frees its
    resources when it is closed or collected.

    Threads may take turns with one iterator, and each tensor is yielded once; calling `next` or `close` while another
    thread is inside one raises ValueError. On a CUDA device, the stream that is current at a `next` sees its tensor.
    After a fork, the child may close the iterator and use the tensors that were yielded, but cannot continue.

    Args:
        path, rank: as for `load`.
        memory: bytes, or text such as "2GiB", of tensors that are being read or wait to be yielded, with all buffers.
            Default: 512 MiB, 2 GiB for all ranks of a node together, and always enough for the largest tensor.
        group: as for `load`, of a converted checkpoint. All members iterate to the end, each in one thread and on one
            CUDA stream, and wait for each other; the least `memory` counts for all. A member that stops early fails
            the others.
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
    asked = Asked(path=path, rank=rank, **options)
    with error_hints():
        if asked.group is not None:
            from relayout.loader.group.collectives import Group
            from relayout.loader.group.sharing import stream_together

            return stream_together(partial(_prepared, asked), Group(asked.group))
        from relayout.loader.stream import stream

        source, contents, how = _prepared(asked)
        warn_if_slow(source)
        return doubting(stream(contents, how), source)


def _prepared(asked: Asked) -> tuple[RankSource, TensorColumns, Options]:
    """The source that a load reads from, what it reads there, and how."""
    options, source = asked.options(), asked.source()
    return source, source.contents(asked.names), options
