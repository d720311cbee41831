"""Changes of existing tensors: `load(into=...)` fills them, `apply` takes them from one content to another by a delta.

Modules that only deltas need are imported where they are used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from relayout.checkpoint.converted import check_rank, read_manifest
from relayout.checkpoint.trust import policy_of, trusted
from relayout.core.arguments import check_named, integer, path_text
from relayout.core.digests import xxh3_hex
from relayout.core.extents import Extent, split
from relayout.core.workers import Workers, each
from relayout.errors import FormatError, PlanError, did_you_mean, shown
from relayout.format.index import RankTable
from relayout.loader.backends.base import Backend, Options, ReadJob, load_arena
from relayout.loader.backends.files import ReadableFiles, error_hints
from relayout.loader.requests import HOST_BUFFERS, Budget, plan_budget
from relayout.loader.sources.rank import Names, TensorColumns, cost_of, pack, place_at, select
from relayout.loader.stream import stream
from relayout.loader.tensors import (
    bump_versions,
    bytes_of,
    dtype_name,
    memory_of,
    sharing,
    torch_dtype,
    torch_shape,
    view_of,
    why_not_plain,
)
from relayout.reporting import Progress, reporting
from relayout.storage.stores import Access, find_input
from relayout.storage.system import Buffer

if TYPE_CHECKING:
    import torch

    from relayout.checkpoint.delta import Delta, Paths, RankState
    from relayout.loader.changes import ChangedPiece, RankChanges

_PIECE_NBYTES = 8 * 2**20
"""Bytes that a thread copies from a device at once."""


def load_into(
    contents: TensorColumns, into: Mapping[str, torch.Tensor], names: Names, options: Options
) -> dict[str, torch.Tensor]:
    """Fill the tensors of `into`, and load the other tensors that match `names` into new memory."""
    import torch

    row_of = check_into(into, contents, options.device)
    wanted = set(select(contents.names, names)) if names is not None else set()
    existing = [row for name, row in row_of.items() if name in into]
    new = [row for name, row in row_of.items() if row in wanted and name not in into]
    for row in new:
        torch_shape(contents.names[row], contents.dtypes[row], contents.shapes[row])
        torch_dtype(contents.names[row], contents.dtypes[row])
    # Check the files before the first byte is written.
    with ReadableFiles(contents.rows([*existing, *new]).files, Access.BUFFERED) as opened:
        each(opened.check, opened.unchecked, cost_of(contents.files).num_opens)
    backend, budget = options.choose(contents.files)
    can_fill = backend.device == options.device
    fits = {row: can_fill and is_as_stored(into[contents.names[row]], contents.dtypes[row]) for row in existing}
    direct, others = [row for row in existing if fits[row]], [row for row in existing if not fits[row]]
    parts = [contents.rows(rows) for rows in (direct, others, new)]
    sizes = [sum(part.sizes()) for part in parts]
    with reporting(options.progress, "loading", sum(sizes)) as report:
        stages = [_stage(options, report, sum(sizes[:index])) for index in range(len(parts))]
        through = stream(parts[1], stages[1]) if others else iter(())
        _fill(parts[0], into, stages[0], backend, budget)
        for name, loaded in through:
            with torch.no_grad():
                into[name].copy_(loaded)
        tensors = dict(into)
        if new:
            tensors |= load_arena(pack(parts[2]), stages[2])
    return {name: tensors[name] for name in contents.names if name in tensors}


def check_into(into: Mapping[str, torch.Tensor], contents: TensorColumns, device: str | torch.device) -> dict[str, int]:
    """Check that tensors can be filled with the contents, and return the row of each tensor of the rank.

    The dtypes of the contents may be narrower; see `check_tensors`.
    """
    row_of = check_tensors("into", into, contents, device, may_widen=True)
    for first, second in sharing_memory(into):
        if not _is_tied(first, second, into, contents):
            raise PlanError(f"into: {first!r} and {second!r} share memory", code="option")
    return row_of


def _hint(name: str, known: Iterable[str]) -> str:
    """Return why a name may be unknown: transformers 5 fuses experts into one parameter, or the name is misspelled."""
    if ".experts.gate_up_proj" in name or ".experts.down_proj" in name:
        return (
            "; transformers fuses experts in memory, the checkpoint has one tensor for each:"
            " relayout.transformers.from_pretrained joins them"
        )
    return did_you_mean(name, known)


def _stage(options: Options, report: Callable[[int], None], before: int) -> Options:
    """Return the options for a part of the load that starts after `before` bytes."""
    return replace(options, progress=lambda done, total: report(before + done))


def _fill(
    contents: TensorColumns, into: Mapping[str, torch.Tensor], options: Options, backend: Backend[Any], budget: Budget
) -> None:
    """Read into contiguous tensors."""
    if not contents.names:
        return
    bump_versions([into[name] for name in contents.names])
    targets = [bytes_of(into[name]) for name in contents.names]
    memory = backend.wrap(targets)
    reads = place_at(contents.reads, memory.offsets)
    job = ReadJob(options.verified_files(contents.files), reads, budget)
    with reporting(options.progress, "loading", sum(contents.sizes())) as report:
        backend.fill(memory, job, report)


def check_tensors(
    what: str,
    tensors: Mapping[str, torch.Tensor],
    rank: TensorColumns | RankTable,
    device: str | torch.device | None = None,
    *,
    may_widen: bool = False,
) -> dict[str, int]:
    """Check that given tensors can hold the rank's tensors of the same names.

    Args:
        what: name of the given tensors, for messages.
        device: the device that they must be on; None: any.
        may_widen: True to allow wider dtypes, see `holds_values_of`.

    Returns:
        The row of each of the rank's tensors.
    """
    import torch

    row_of = {name: row for row, name in enumerate(rank.names)}
    dtypes, shapes = rank.dtypes, rank.shapes
    for name, tensor in tensors.items():
        if name not in row_of:
            raise PlanError(f"{what}: the rank has no tensor {name!r}{_hint(name, row_of)}", code="option")
        called, row = f"{what}[{name!r}]", row_of[name]
        expected = torch_dtype(name, dtypes[row]), torch_shape(name, dtypes[row], shapes[row])
        if may_widen and isinstance(tensor, torch.Tensor) and holds_values_of(tensor.dtype, expected[0]):
            expected = tensor.dtype, expected[1]
        _check_tensor(called, tensor, expected, device)
    return row_of


def holds_values_of(dtype: torch.dtype, stored: torch.dtype) -> bool:
    """Return True if a floating-point dtype can represent all values of `stored`: FP32 those of BF16, for example."""
    import torch

    halves = torch.bfloat16, torch.float16
    narrower: dict[torch.dtype, tuple[torch.dtype, ...]]
    narrower = {torch.float32: halves, torch.float64: (*halves, torch.float32)}
    return stored in narrower.get(dtype, ())


def is_as_stored(tensor: torch.Tensor, dtype: str) -> bool:
    """Return True if a tensor's memory has the bytes that a file with this dtype stores."""
    return tensor.is_contiguous() and dtype_name(tensor.dtype) == dtype


def as_loaded(tensors: Mapping[str, torch.Tensor], rank: TensorColumns) -> dict[str, torch.Tensor]:
    """Return the tensors in host memory with the dtype, shape and layout that a load of the rank gives them."""
    import torch

    expected = {name: (dtype, shape) for name, dtype, shape in zip(rank.names, rank.dtypes, rank.shapes, strict=True)}

    def is_as_loaded(name: str, tensor: torch.Tensor) -> bool:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or not tensor.is_contiguous():
            return False
        dtype, shape = expected[name]
        return (tensor.dtype, tuple(tensor.shape)) == (torch_dtype(name, dtype), torch_shape(name, dtype, shape))

    return {name: tensor for name, tensor in tensors.items() if name in expected and is_as_loaded(name, tensor)}


def _check_tensor(
    what: str,
    tensor: torch.Tensor,
    expected: tuple[torch.dtype, tuple[int, ...]],
    device: str | torch.device | None,
) -> None:
    import torch

    if (why := why_not_plain(tensor)) is not None:
        raise PlanError(f"{what} is {why}", code="option")
    if (tensor.dtype, tuple(tensor.shape)) != expected:
        raise PlanError(
            f"{what} is {tensor.dtype} {list(tensor.shape)}, expected {expected[0]} {list(expected[1])}", code="option"
        )
    if device is not None and tensor.device != torch.device(device):
        raise PlanError(f"{what} is on {tensor.device}, expected {device}", code="option")
    if tensor.numel() and (tensor.is_conj() or tensor.is_neg() or not memory_of(tensor).is_simple):
        raise PlanError(f"{what} is a lazy view, or has overlapping elements", code="option")


def sharing_memory(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
    """Yield the names of all pairs of checked tensors that share memory."""
    names = [name for name, tensor in tensors.items() if tensor.numel()]
    for first, second in sharing([memory_of(tensors[name]) for name in names]):
        yield names[first], names[second]


def _is_tied(first: str, second: str, into: Mapping[str, torch.Tensor], contents: TensorColumns) -> bool:
    """Return True if two names refer to the same view of the same memory, and their tensors have equal digests."""
    if contents.digests is None or view_of(into[first]) != view_of(into[second]):
        return False
    digests = contents.digests()
    return digests[first] == digests[second]


def apply(
    delta: str | os.PathLike[str],
    rank: int,
    tensors: Mapping[str, torch.Tensor],
    *,
    base: Paths,
    threads: int | None = None,
    progress: Progress = None,
) -> None:
    """Change the tensors of one rank in place, from the content that a delta applies to, to the content that results.

    First every tensor is compared with its digest in the base, and the bytes of the delta with its own digests. So
    damage is found before the first byte changes. In the end, the tensors that changed are compared with the digests of
    the delta's result. After an error of this comparison, or of a read, some tensors have changed: load them again. No
    other code may use the tensors meanwhile.

    Args:
        delta: a folder that `relayout.delta` wrote, or its URL.
        rank: from 0.
        tensors: as `relayout.load` returned them, at the degree of the conversion; all of the rank's, or some. They are
            contiguous and share no memory. On a device they pass through host memory to be compared, at most 8 MiB
            for each thread; only changes pass back.
        base: the content that the tensors have: a converted folder, or its URL; or a list of it and the deltas that
            were applied to it, in order. Its manifest is read, and the rank's table and digests.
        threads: threads that compare and change. Default: as of `relayout.load`.
        progress: True for a bar on stderr, or a function that is called with (bytes done, total bytes).

    Raises:
        FormatError: the delta or the base is damaged, or the changed tensors differ from the delta's result.
        PlanError: the tensors do not have the content that the delta applies to, or do not fit the rank; or the rank
            does not exist.
        OSError: reading failed.

    Example:
        >>> import relayout
        >>> tensors = relayout.load("step-1", rank=3)
        >>> relayout.apply("step-1-to-2", 3, tensors, base="step-1")
    """
    from relayout.checkpoint.delta import RankState, read_deltas, with_deltas

    with error_hints():
        policy = policy_of(None)
        [read] = read_deltas(path_text(delta, "delta"), policy)
        paths: list[Any] = list(base) if isinstance(base, list | tuple) else [base]
        if not paths or not all(isinstance(path, str | os.PathLike) for path in paths):
            what = "expected the path of a folder, or a list of that and the paths of deltas"
            raise PlanError(f"base: {shown(base)}, {what}", code="option")
        store = with_deltas(trusted(find_input(paths[0]).snapshot(), None), read_deltas(paths[1:], policy))
        rank = integer(rank, "rank")
        check_rank(store, rank, read_manifest(store).num_ranks)
        state = RankState.of(store, rank)
        check_named(tensors, "tensors")
        num_threads = None if threads is None else integer(threads, "threads")
        change_by([read], state, tensors, str(store), num_threads, progress)


def change_by(
    deltas: Sequence[Delta],
    state: RankState,
    tensors: Mapping[str, torch.Tensor],
    base: str,
    threads: int | None,
    progress: Progress = None,
    *,
    compare_first: bool = True,
) -> RankState:
    """Change tensors of one rank in place by deltas, one after the other; see `apply`, also for errors.

    Args:
        state: of the tensors before the first delta.
        base: name of the content that the tensors have, for messages.
        compare_first: compare all tensors with the base before any changes, and in the end those that changed. False:
            compare all once, in the end; tensors that do not have the base's content are found only then.

    Returns:
        The state of the tensors after the last delta.
    """
    from relayout.loader.changes import RankChanges

    _check(state.table, tensors)
    budget = plan_budget(threads, None, HOST_BUFFERS, deltas[-1].store.cost)
    changes, last = RankChanges.of(deltas, state, base, tensors), deltas[-1].store
    flat = {name: bytes_of(tensor) for name, tensor in tensors.items()}
    change = _Change(changes, flat, budget.threads, progress)
    _synchronize(tensors.values())
    old, new = state.by_name, changes.state.by_name
    if compare_first and (differing := change.differing("comparing with the base", {name: old[name] for name in flat})):
        what = f"is not at the content that {deltas[0].store} applies to; nothing was changed"
        raise PlanError(what, tensor=min(differing), code="option")
    change.run("checking the delta", None)
    bump_versions(list(tensors.values()))
    change.run("applying", change.change)
    touched = {part.name for of_file in changes.parts.values() for parts in of_file.values() for part in parts}
    touched.update(name for name in flat if old[name] != new[name] or not compare_first)
    if differing := change.differing("verifying", {name: new[name] for name in touched}):
        what = f"is not what {last} makes of {base}: load the tensors again"
        raise FormatError(what, path=str(last), tensor=min(differing), code="digest")
    _synchronize(tensors.values())
    return changes.state


@dataclass(frozen=True, slots=True)
class _Change:
    """A change of tensors by deltas, with the tensors' bytes and the threads that apply it."""

    changes: RankChanges
    tensors: Mapping[str, torch.Tensor]
    """The bytes of the tensors: 1-D, uint8."""
    threads: int
    progress: Progress

    def differing(self, phase: str, digests: Mapping[str, str]) -> list[str]:
        """Return the names of the tensors with other digests than these."""
        found = []

        def work(buffer: Buffer, name: str) -> int:
            if _digest(self.tensors[name], buffer) != digests[name]:
                found.append(name)
            return self.tensors[name].numel()

        total = sum(self.tensors[name].numel() for name in digests)
        with reporting(self.progress, phase, total) as report:
            Workers(self.threads, list(digests), Buffer, work).run(report)
        return found

    def run(self, phase: str, use: Callable[[ChangedPiece, Buffer], object] | None) -> None:
        """Read the changes, verify their digests, and call `use` with each piece."""
        self.changes.run(self.changes.batches(), use, self.threads, phase=phase, progress=self.progress)

    def change(self, piece: ChangedPiece, buffer: Buffer) -> None:
        """Apply the changes of a piece to the tensors."""
        import numpy as np
        import torch

        parts = piece.parts
        whole = self.tensors[parts[0].name]
        if parts[0].nbytes == piece.nbytes and _is_on_host(whole):  # The usual case: in place.
            piece.apply(whole.numpy()[parts[0].offset : parts[0].offset + piece.nbytes].data)
            return
        change = piece.decode(buffer)
        for part in parts:
            tensor, there = self.tensors[part.name], slice(part.offset, part.offset + part.nbytes)
            if _is_on_host(tensor):  # numpy, because torch would split each of these small changes among threads.
                view = tensor.numpy()[there]
                np.bitwise_xor(view, np.frombuffer(change, np.uint8, part.nbytes, part.place), out=view)
                continue
            source = torch.frombuffer(change, dtype=torch.uint8, count=part.nbytes, offset=part.place)
            with torch.inference_mode():  # Tensors that were created in inference mode can be changed, too.
                tensor[there].bitwise_xor_(source.to(tensor.device))


def _check(table: RankTable, tensors: Mapping[str, torch.Tensor]) -> None:
    """Check that the tensors belong to the rank, and can be changed in place."""
    check_tensors("tensors", tensors, table)
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise PlanError(f"tensors[{name!r}] is not contiguous", code="option")
    for first, second in sharing_memory(tensors):
        raise PlanError(f"tensors: {first!r} and {second!r} share memory", code="option")


def _digest(tensor: torch.Tensor, buffer: Buffer) -> str:
    """Return the digest of a tensor's bytes; those on a device are copied to `buffer`, piece by piece."""
    import torch
    import xxhash

    if _is_on_host(tensor):
        return xxh3_hex(tensor.numpy().data)
    running = xxhash.xxh3_128()
    for piece in split(Extent(0, tensor.numel()), _PIECE_NBYTES):
        view = buffer.reserve(piece.nbytes)
        torch.frombuffer(view, dtype=torch.uint8).copy_(tensor[piece.offset : piece.end])
        running.update(view)
    return running.hexdigest()


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _synchronize(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for all work on the devices of tensors, because other threads use other streams."""
    import torch

    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)
