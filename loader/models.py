"""Models of transformers, seen as the tensors of their checkpoints.

transformers 5 may keep a model in another form than its checkpoint: experts in one tensor, for example. Its own reverse
conversion is called with tensors that have no memory, and what it does to them is recorded. Each tensor of the
checkpoint then is known as a view of one of the model's, which a process holds a part of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from relayout.core.slices import NOT_HELD, Range, Slice, positions
from relayout.errors import PlanError
from relayout.loader.held import HeldTensor, TensorHead
from relayout.loader.tensors import torch_dtype

if TYPE_CHECKING:
    import torch


def check_model(model: Any) -> None:
    """Check that the tensors of a model are those of its checkpoint, or can be seen so.

    Raises:
        PlanError: it is of an older transformers, is quantized, or has adapters.
    """
    try:
        from transformers.core_model_loading import revert_weight_conversion  # noqa: F401
    except ImportError:
        raise PlanError("needs transformers 5: `pip install -U transformers`", code="unsupported") from None
    for attribute, what in (("hf_quantizer", "is quantized"), ("_hf_peft_config_loaded", "has adapters")):
        if getattr(model, attribute, None):
            what = f"the model {what}: use transformers' own from_pretrained or save_pretrained"
            raise PlanError(what, code="unsupported")
    if any(hasattr(module, "base_layer") for module in model.modules()):  # As PEFT has it in each layer it adapts.
        what = "the model has adapters: merge and unload them, or use transformers' own save_pretrained"
        raise PlanError(what, code="unsupported")


@dataclass(frozen=True, slots=True)
class View:
    """A tensor of the checkpoint as a part of one of the model's tensors."""

    origin: str
    """Name of the model's tensor."""
    shape: tuple[int, ...]
    axes: tuple[int | None, ...]
    """The axis of the model's tensor that each axis is; None for an axis of one element."""
    starts: tuple[int, ...]
    """Where the part begins along each axis of the model's tensor."""

    def of(self, name: str, held: HeldTensor) -> HeldTensor:
        """What a process holds of it, from what it holds of the origin."""
        head = TensorHead(name, held.head.dtype, self.shape)
        sizes = {axis: length for axis, length in zip(self.axes, self.shape, strict=True) if axis is not None}
        box, cut = list[slice](), dict[int, list[Range]]()
        for axis, (first, whole) in enumerate(zip(self.starts, held.head.shape, strict=True)):
            length = sizes.get(axis, 1)
            ranges = held.part.ranges_along(axis)
            met = _met(((0, whole),) if ranges is None else ranges, first, length)
            if not met or not held.part.is_held:
                return HeldTensor(head, NOT_HELD, held.data.reshape(-1)[:0])
            num_held = sum(taken for _, taken, _ in met)
            box.append(slice(met[0][2], met[0][2] + num_held))
            if num_held < length:
                cut[self.axes.index(axis)] = [(start, taken) for start, taken, _ in met]
        part = Slice.of(cut)
        kept = [axis for axis in self.axes if axis is not None]
        others = [axis for axis in range(len(self.starts)) if axis not in kept]
        return HeldTensor(head, part, held.data[tuple(box)].permute(*kept, *others).reshape(part.shape(self.shape)))


def _met(ranges: Sequence[Range], first: int, length: int) -> list[tuple[int, int, int]]:
    """What rising ranges have of `length` elements from `first` on: (start behind `first`, length, position)."""
    found = []
    for start, taken, position in positions(ranges):
        low, high = max(first, start), min(first + length, start + taken)
        if low < high:
            found.append((low - first, high - low, position + low - start))
    return found


def checkpoint_of(model: Any, heads: Sequence[TensorHead]) -> tuple[dict[str, View], dict[str, torch.Tensor]]:
    """The tensors of the checkpoint that transformers would write of a model, in its order.

    Args:
        heads: the model's own tensors.

    Returns:
        What part of the model's tensors each is; and stand-ins for them without memory, which share storage where the
        tensors would.

    Raises:
        PlanError: a tensor of the checkpoint is no part of one of the model's.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from transformers.core_model_loading import revert_weight_conversion

    copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    """The tensor that was copied to a storage, and the copy, by the identity of the storage."""
    origins: dict[int, str] = {}
    """The name of the model's tensor that a storage belongs to, by the identity of the storage."""

    class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            if func._schema.is_mutable and args and isinstance(args[0], torch.Tensor):
                copies.pop(storage_of(args[0]), None)  # No longer a copy: it then comes from nowhere.
                origins.pop(storage_of(args[0]), None)
            if func is torch.ops.aten.clone.default and made.is_contiguous():
                copies[storage_of(made)] = (args[0], made)
            return made

    with FakeTensorMode(), Recorder():  # type: ignore[no-untyped-call]
        fakes = {one.name: torch.empty(one.shape, dtype=torch_dtype(one.name, one.dtype)) for one in heads}
        origins.update((storage_of(fake), name) for name, fake in fakes.items())
        reverted = revert_weight_conversion(model, dict(fakes))
    return {name: _view_of(name, tensor, copies, origins, fakes) for name, tensor in reverted.items()}, reverted


def storage_of(tensor: torch.Tensor) -> int:
    """Equal for tensors that share a storage."""
    identity: int = tensor.untyped_storage()._cdata
    return identity


def _view_of(
    name: str,
    tensor: torch.Tensor,
    copies: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
    origins: Mapping[int, str],
    fakes: Mapping[str, torch.Tensor],
) -> View:
    """The part of a tensor of the model that a tensor of the checkpoint is.

    Raises:
        PlanError: it is no box of one.
    """
    shape = tuple(tensor.shape)
    storage, base, steps = _origin_of(tensor, copies) or (0, 0, [])
    origin = origins.get(storage)
    refused = PlanError(
        "is no part of one of the model's tensors: only transformers' own save and load know it",
        tensor=name,
        code="unsupported",
    )
    if origin is None or tensor.dtype != fakes[origin].dtype or not prod(shape):
        raise refused
    whole = tuple(fakes[origin].shape)
    dense = [prod(whole[axis + 1 :]) for axis in range(len(whole))]
    axis_of = {stride: axis for axis, (stride, length) in enumerate(zip(dense, whole, strict=True)) if length > 1}
    axes = tuple(axis_of.get(step) if length > 1 else None for step, length in zip(steps, shape, strict=True))
    starts = tuple(base // stride % length for stride, length in zip(dense, whole, strict=True))
    sizes = {axis: length for axis, length in zip(axes, shape, strict=True) if axis is not None}
    fits = all(starts[axis] + length <= whole[axis] for axis, length in sizes.items())
    if prod(sizes.values()) != prod(shape) or not fits:
        raise refused
    return View(origin, shape, axes, starts)


def _origin_of(
    tensor: torch.Tensor, copies: Mapping[int, tuple[torch.Tensor, torch.Tensor]]
) -> tuple[int, int, list[int]] | None:
    """Where elements come from: storage, position of the first, and steps along each axis; None if steps vary."""
    storage, base, steps = storage_of(tensor), int(tensor.storage_offset()), list(tensor.stride())
    while storage in copies:
        source, _ = copies[storage]
        found = _through(tuple(tensor.shape), base, steps, source)
        if found is None or source.dtype != tensor.dtype:
            return None
        storage, (base, steps) = storage_of(source), found
    return storage, base, steps


def _through(
    shape: Sequence[int], base: int, steps: Sequence[int], source: torch.Tensor
) -> tuple[int, list[int]] | None:
    """Positions in the dense copy of a tensor, as positions in its own storage; None if steps there are not constant.

    A position in the copy is a number whose digits are the index in the source. Steps are constant where each changes
    one digit, and all together carry over none.
    """
    digits = _digits(source)
    found, moved, limits = int(source.storage_offset()), [0] * len(shape), list[int]()
    for unit, count, stride in digits:
        digit = base // unit % count
        found += digit * stride
        limits.append(count - digit)
    for axis, (length, step) in enumerate(zip(shape, steps, strict=True)):
        if length > 1 and step:
            fitting = [d for d, (unit, count, _) in enumerate(digits) if unit <= step < unit * count]
            if not fitting or step % digits[fitting[0]][0]:
                return None
            unit, _, stride = digits[fitting[0]]
            limits[fitting[0]] -= (length - 1) * (step // unit)
            moved[axis] = step // unit * stride
    return (found, moved) if all(limit > 0 for limit in limits) else None


def _digits(source: torch.Tensor) -> list[tuple[int, int, int]]:
    """The axes of a tensor, last first, as those of its dense copy: step there, length, and stride in its storage.

    Axes that lie as one are one.
    """
    digits = list[tuple[int, int, int]]()
    unit = 1
    for length, stride in zip(reversed(source.shape), reversed(source.stride()), strict=True):
        if length > 1 and digits and stride == digits[-1][1] * digits[-1][2]:
            last, count, inner = digits[-1]
            digits[-1] = (last, count * length, inner)
        elif length > 1:
            digits.append((unit, length, stride))
        unit *= length
    return digits
