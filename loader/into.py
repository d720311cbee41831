"""Fills existing tensors: contiguous ones directly, others through temporary memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from relayout.errors import PlanError, did_you_mean
from relayout.format.index import RankTable
from relayout.loader.backends.base import Backend, ReadJob
from relayout.loader.backends.files import ReadableFiles
from relayout.loader.budgets import Budget
from relayout.loader.loading import Options, load_arena
from relayout.loader.sources.rank import Names, TensorColumns, pack, place_at, select
from relayout.loader.stream import stream
from relayout.loader.tensors import Strided, bytes_of, sharing, torch_dtype, torch_shape
from relayout.reporting import reporting
from relayout.storage.stores import Access

if TYPE_CHECKING:
    import torch


def load_into(
    contents: TensorColumns, into: Mapping[str, torch.Tensor], names: Names, options: Options
) -> dict[str, torch.Tensor]:
    """Fill the tensors of `into`, and load the other tensors that match `names` into new memory.

    Raises:
        PlanError: the rank has no tensor of that name; or a given tensor has another dtype, shape or device, or shares
            memory.
    """
    import torch

    row_of = check_tensors("into", into, contents, options.device)
    for first, second in sharing_memory(into):
        if not _is_tied(first, second, into, contents, row_of):
            raise PlanError(f"into: {first!r} and {second!r} share memory", code="option")
    wanted = set(select(contents.names, names)) if names is not None else set()
    existing = [row for name, row in row_of.items() if name in into]
    new = [row for name, row in row_of.items() if row in wanted and name not in into]
    for row in new:
        torch_shape(contents.names[row], contents.dtypes[row], contents.shapes[row])
        torch_dtype(contents.names[row], contents.dtypes[row])
    # Check the files before the first byte is written.
    ReadableFiles(contents.rows([*existing, *new]).files, Access.BUFFERED).close()
    backend, budget = options.choose(contents.files)
    fits = {row: backend.device == options.device and into[contents.names[row]].is_contiguous() for row in existing}
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


def _hint(name: str, known: Iterable[str]) -> str:
    """Why a name may be unknown: transformers 5 has one parameter for all experts, or it is misspelled."""
    if ".experts.gate_up_proj" in name or ".experts.down_proj" in name:
        return (
            "; transformers fuses experts in memory, the checkpoint has one tensor for each:"
            " relayout.transformers.from_pretrained joins them"
        )
    return did_you_mean(name, known)


def _stage(options: Options, report: Callable[[int], None], before: int) -> Options:
    """The options for a part of the load that starts after `before` bytes."""
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
    job = ReadJob(options.proving(contents.files), reads, budget)
    with reporting(options.progress, "loading", sum(contents.sizes())) as report:
        backend.fill(memory, job, report)


def check_tensors(
    what: str,
    tensors: Mapping[str, torch.Tensor],
    rank: TensorColumns | RankTable,
    device: str | torch.device | None = None,
) -> dict[str, int]:
    """Check that given tensors, called `what`, can hold the rank's of these names, on any device if that is None.

    Returns:
        The row of each of the rank's tensors.

    Raises:
        PlanError: the rank has none of that name; or one has another dtype, shape or device, or no simple memory.
    """
    row_of = {name: row for row, name in enumerate(rank.names)}
    dtypes, shapes = rank.dtypes, rank.shapes
    for name, tensor in tensors.items():
        if name not in row_of:
            raise PlanError(f"{what}: the rank has no tensor {name!r}{_hint(name, row_of)}", code="option")
        _check_tensor(f"{what}[{name!r}]", name, tensor, dtypes[row_of[name]], shapes[row_of[name]], device)
    return row_of


def _check_tensor(
    what: str, name: str, tensor: torch.Tensor, dtype: str, shape: tuple[int, ...], device: str | torch.device | None
) -> None:
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise PlanError(f"{what} is a {type(tensor).__name__}, expected a torch.Tensor", code="option")
    expected = (torch_dtype(name, dtype), torch_shape(name, dtype, shape))
    if (tensor.dtype, tuple(tensor.shape)) != expected:
        raise PlanError(
            f"{what} is {tensor.dtype} {list(tensor.shape)}, expected {expected[0]} {list(expected[1])}", code="option"
        )
    if device is not None and tensor.device != torch.device(device):
        raise PlanError(f"{what} is on {tensor.device}, expected {device}", code="option")
    if tensor.layout != torch.strided:
        raise PlanError(f"{what} is {tensor.layout}, expected torch.strided", code="option")
    if not tensor.numel():
        return
    lazy = tensor.is_conj() or tensor.is_neg()
    if lazy or address_of(tensor) == 0 or not memory_of(tensor).is_simple:
        raise PlanError(f"{what} is a lazy view, has no memory, or has overlapping elements", code="option")


def sharing_memory(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
    """The names of all pairs of checked tensors that share memory."""
    names = [name for name, tensor in tensors.items() if tensor.numel()]
    for first, second in sharing([memory_of(tensors[name]) for name in names]):
        yield names[first], names[second]


def _is_tied(
    first: str, second: str, into: Mapping[str, torch.Tensor], contents: TensorColumns, row_of: Mapping[str, int]
) -> bool:
    """Whether two names are of the same view of the same memory, and of tensors that have the same digest."""
    digests = contents.digests
    is_same = digests is not None and digests[row_of[first]] == digests[row_of[second]]
    return is_same and view_of(into[first]) == view_of(into[second])


def view_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for two tensors that are the same view of the same memory."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def memory_of(tensor: torch.Tensor) -> Strided:
    """The places in memory of a tensor's elements."""
    return Strided(tensor.data_ptr(), tensor.element_size(), tensor.stride(), tuple(tensor.shape))


def address_of(tensor: torch.Tensor | torch.UntypedStorage) -> int:
    """The address of a tensor's first byte; 0: it has no memory."""
    try:
        return tensor.data_ptr()
    except RuntimeError:  # Several kinds of tensors have no memory, and torch has no other test for them.
        return 0


def bump_versions(tensors: Sequence[torch.Tensor]) -> None:
    """Tell autograd that tensors were changed in place, so that a backward pass that has saved one fails."""
    import torch

    increment = getattr(torch.autograd.graph, "increment_version", None)
    if increment is not None:  # Older versions of torch have none.
        increment(tensors)
