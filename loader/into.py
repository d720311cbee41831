"""Fills tensors that exist already: directly where their memory allows it, else through memory of the loader's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from relayout.errors import PlanError
from relayout.loader.arena import Scattered
from relayout.loader.backends import Filling, fill_of
from relayout.loader.contents import Contents, select
from relayout.loader.device import DeviceBackend, ScatteredOnDevice
from relayout.loader.loading import Options, load_contents
from relayout.loader.placement import place_at
from relayout.loader.progress import reporting
from relayout.loader.sources import Access, Sources
from relayout.loader.streaming import stream
from relayout.loader.tensors import bytes_of, torch_dtype, torch_shape

if TYPE_CHECKING:
    import torch


def load_into(
    contents: Contents, into: Mapping[str, torch.Tensor], patterns: Sequence[str] | None, options: Options
) -> dict[str, torch.Tensor]:
    """Load those of a rank's tensors that are in `into` there, and what else the patterns name into new memory.

    Raises:
        PlanError: a given tensor is none of the rank's, or has another dtype, shape or device.
    """
    row_of = {name: row for row, name in enumerate(contents.names)}
    for name, tensor in into.items():
        if name not in row_of:
            raise PlanError(f"tensor {name!r}, given to be filled, is none of the rank's {len(row_of)}")
        _check(name, tensor, contents.dtypes[row_of[name]], contents.shapes[row_of[name]], options)
    wanted = set(select(contents.names, patterns)) if patterns is not None else set()
    straight = [row for name, row in row_of.items() if name in into and _can_be_filled(into[name], options)]
    others = [row for name, row in row_of.items() if name in into and not _can_be_filled(into[name], options)]
    new = [row for name, row in row_of.items() if row in wanted and name not in into]
    for row in new:
        torch_shape(contents.names[row], contents.dtypes[row], contents.shapes[row])
        torch_dtype(contents.names[row], contents.dtypes[row])
    # All that can be known to be wrong is told before a byte is written.
    Sources(contents.rows([*straight, *others, *new]).files, Access.BUFFERED).close()
    parts = [contents.rows(rows) for rows in (straight, others, new)]
    sizes = [sum(part.sizes()) for part in parts]
    with reporting(options.progress, sum(sizes)) as report:
        stages = [_stage(options, report, sum(sizes[:number])) for number in range(len(parts))]
        through = stream(parts[1], stages[1]) if others else iter(())
        _fill(parts[0], into, stages[0])
        for name, loaded in through:
            _copy(into[name], loaded)
        found = dict(into)
        if new:
            found |= load_contents(parts[2], stages[2])
    return {name: found[name] for name in contents.names if name in found}


def _stage(options: Options, report: Callable[[int], None] | None, before: int) -> Options:
    """The options for a part of the load, which begins when `before` bytes have arrived."""
    return replace(options, progress=None if report is None else lambda done, total: report(before + done))


def _fill(contents: Contents, into: Mapping[str, torch.Tensor], options: Options) -> None:
    """Fill contiguous tensors without a detour."""
    if not contents.names:
        return
    choice, budget = options.choose(contents.files)
    targets = [bytes_of(into[name]) for name in contents.names]
    memory: Scattered | ScatteredOnDevice
    if isinstance(choice.backend, DeviceBackend):
        memory = ScatteredOnDevice(targets)
    else:
        memory = Scattered([(target.data_ptr(), target.numel()) for target in targets])
    reads = place_at(contents.reads, memory.offsets)
    fill = fill_of(contents, memory.offsets, reads, budget, verify=options.verify)
    filling: Filling
    with reporting(options.progress, sum(contents.sizes())) as report:
        if isinstance(memory, Scattered):
            assert not isinstance(choice.backend, DeviceBackend)
            filling = choice.backend.start(memory, fill)
        else:
            assert isinstance(choice.backend, DeviceBackend)
            filling = choice.backend.start(memory, fill)
        try:
            filling.join(report)
        except BaseException:
            filling.cancel()
            raise


def _check(name: str, tensor: torch.Tensor, dtype: str, shape: tuple[int, ...], options: Options) -> None:
    import torch

    expected = (torch_dtype(name, dtype), torch_shape(name, dtype, shape))
    if (tensor.dtype, tuple(tensor.shape)) != expected:
        raise PlanError(
            f"tensor {name!r}, given to be filled, is {tensor.dtype} {list(tensor.shape)};"
            f" the rank's slice is {expected[0]} {list(expected[1])}"
        )
    if tensor.device != torch.device(options.device):
        raise PlanError(f"tensor {name!r}, given to be filled, is on {tensor.device}; the load is for {options.device}")
    overlaps = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    lazy = tensor.is_conj() or tensor.is_neg() or tensor.layout != torch.strided
    if tensor.numel() and (tensor.data_ptr() == 0 or overlaps or lazy):
        raise PlanError(f"tensor {name!r}, given to be filled, has no memory of its own for each element")


def _can_be_filled(tensor: torch.Tensor, options: Options) -> bool:
    return tensor.is_contiguous() and (
        options.on_host or (tensor.is_cuda and options.backend in ("auto", "pinned", "gds"))
    )


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    import torch

    with torch.no_grad():
        target.copy_(source)
