"""The tensors of transformers models, as the tensors of their checkpoints.

transformers 5 may keep a model in another form than its checkpoint: experts in one tensor, for example. This module
calls transformers' own reverse conversion with tensors that have no memory, and records the operations on them. The
result describes each tensor of the checkpoint as a view of one of the model's tensors. A process holds a part of the
model's tensors.

A checkpoint may have other names than transformers writes: those of another head, or of an older release. `read_by`
finds the parameters to which `from_pretrained` would load such names, by transformers' own renaming.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from relayout.core.slices import NOT_HELD, Range, Slice, TensorHead, positions
from relayout.errors import PlanError
from relayout.loader.held import HeldTensor
from relayout.loader.tensors import torch_dtype

if TYPE_CHECKING:
    import torch


def check_model(model: Any) -> None:
    """Check that the tensors of a model are those of its checkpoint, or views of them can be derived."""
    try:
        from transformers.core_model_loading import revert_weight_conversion  # noqa: F401
    except ImportError:
        raise PlanError("needs transformers 5: `pip install -U transformers`", code="unsupported") from None
    for attribute, what in (("hf_quantizer", "is quantized"), ("_hf_peft_config_loaded", "has adapters")):
        if getattr(model, attribute, None):
            what = f"the model {what}: use transformers' own from_pretrained or save_pretrained"
            raise PlanError(what, code="unsupported")
    if any(hasattr(module, "base_layer") for module in model.modules()):  # PEFT adds it to each adapted layer.
        what = "the model has adapters: merge and unload them, or use transformers' own save_pretrained"
        raise PlanError(what, code="unsupported")


@dataclass(frozen=True, slots=True)
class ModelTensorView:
    """A tensor of the checkpoint as a part of one of the model's tensors."""

    origin: str
    """Name of the model's tensor."""
    shape: tuple[int, ...]
    axes: tuple[int | None, ...]
    """For each axis, the axis of the model's tensor that it corresponds to; None for an axis of one element."""
    starts: tuple[int, ...]
    """Start of the part along each axis of the model's tensor."""

    @staticmethod
    def whole(origin: TensorHead) -> ModelTensorView:
        """Return the view of all of a tensor of the model."""
        axes = tuple(axis if length > 1 else None for axis, length in enumerate(origin.shape))
        return ModelTensorView(origin.name, origin.shape, axes, (0,) * len(axes))

    def of(self, name: str, held: HeldTensor) -> HeldTensor:
        """Return the part of this tensor that a process holds, given the part of the origin that it holds."""
        head = TensorHead(name, held.head.dtype, self.shape)
        if not prod(self.shape):  # Only a whole tensor may be empty, see `_view_of`.
            return HeldTensor(head, held.part, held.data)
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
        return HeldTensor(head, part, held.data[tuple(box)].permute((*kept, *others)).reshape(part.shape(self.shape)))


def _met(ranges: Sequence[Range], first: int, length: int) -> list[tuple[int, int, int]]:
    """Return the intersection of ascending ranges with the `length` elements from `first` on.

    Each entry is (start relative to `first`, length, position in the ranges).
    """
    found = []
    for start, taken, position in positions(ranges):
        low, high = max(first, start), min(first + length, start + taken)
        if low < high:
            found.append((low - first, high - low, position + low - start))
    return found


def checkpoint_of(
    model: Any, heads: Sequence[TensorHead]
) -> tuple[dict[str, ModelTensorView], dict[str, torch.Tensor]]:
    """Return the tensors of the checkpoint that transformers would write for a model, in their order there.

    Args:
        heads: the model's own tensors.

    Returns:
        For each tensor of the checkpoint, its view of a tensor of the model; and fake tensors without memory, which
        share storage if the real ones would.
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
                copies.pop(storage_of(args[0]), None)  # No longer a copy, and of unknown origin.
                origins.pop(storage_of(args[0]), None)
            if func is torch.ops.aten.clone.default and made.is_contiguous():
                copies[storage_of(made)] = (args[0], made)
            return made

    with FakeTensorMode(), Recorder():  # type: ignore[no-untyped-call]
        fakes = {one.name: torch.empty(one.shape, dtype=torch_dtype(one.name, one.dtype)) for one in heads}
        origins.update((storage_of(fake), name) for name, fake in fakes.items())
        reverted = revert_weight_conversion(model, dict(fakes))
    return {name: _view_of(name, tensor, copies, origins, fakes) for name, tensor in reverted.items()}, reverted


@dataclass(frozen=True, slots=True)
class ReadNames:
    """The model's tensors that the names of a checkpoint refer to."""

    views: Mapping[str, ModelTensorView]
    """The view of the model's tensors that each name is."""
    lacking: Mapping[str, ModelTensorView]
    """The missing tensors of the checkpoint, by the names that transformers would write."""
    ignored: frozenset[str]
    """Names that the model does not have and that transformers ignores."""


def read_by(model: Any, heads: Sequence[TensorHead], names: Iterable[str]) -> ReadNames:
    """Find the view of a model's tensors for each tensor of a checkpoint, like transformers' own `from_pretrained`.

    transformers assigns each name to a parameter. If the parameter consists of several tensors, it also assigns the
    name to a pattern. The tensors of a pattern are taken in the order of their names. The names that transformers would
    write are renamed in the same way. So the first of the checkpoint's names for a pattern corresponds to the first of
    the written names, and so on.

    Args:
        heads: the model's own tensors.
    """
    known = {one.name: one for one in heads}
    saved, _ = checkpoint_of(model, heads)
    written = saved if getattr(model, "_weight_conversions", None) is None else checkpoint_of(_Unused(model), heads)[0]
    parts, asked = _by_pattern(_targets(model, written, known)), _targets(model, names, known)
    views = dict[str, ModelTensorView]()
    for (target, pattern), same in _by_pattern(asked).items():
        mine = parts.get((target, pattern), [])
        if target not in known:  # Unless the model was loaded with the caller's own `key_mapping`.
            views |= {name: saved[name] for name in same if name in saved}
        elif pattern is None:
            views |= {name: ModelTensorView.whole(known[target]) for name in same}
        elif len(same) == len(mine):
            views |= {name: written[part] for name, part in zip(same, mine, strict=True)}
        else:
            views |= {name: written[name] for name in same if name in mine}
    taken = set(views.values())
    whole = {view.origin for view in taken if view == ModelTensorView.whole(known[view.origin])}
    lacking = {name: view for name, view in written.items() if view not in taken and view.origin not in whole}
    rest = {name: target for name, (target, _) in asked.items() if name not in views}
    return ReadNames(views, lacking, _ignored_by(model, asked, rest))


class _Unused:
    """Wrapper that shows a model without the conversions which `from_pretrained` recorded when it created the model."""

    _weight_conversions = None

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


_Targets: TypeAlias = Mapping[str, tuple[str, str | None]]
"""The parameter of each name of a checkpoint, in natural order, and the pattern of a parameter with several tensors."""


def _targets(model: Any, names: Iterable[str], known: dict[str, TensorHead]) -> _Targets:
    """Return the parameters that `from_pretrained` assigns names to.

    This is the first part of `convert_and_load_state_dict_in_model` of transformers 5.24.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    conversions = get_model_conversion_mapping(model)
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    prefix, targets = model.base_model_prefix, dict[str, tuple[str, str | None]]()
    for name in sorted(names, key=dot_natural_key):
        targets[name] = rename_source_key(name, renamings, converters, prefix, known)
        if targets[name][0] not in known and name in known:
            targets[name] = rename_source_key(name, [], [], prefix, known)
    return targets


def _by_pattern(targets: _Targets) -> dict[tuple[str, str | None], list[str]]:
    """Return the names of each parameter and pattern, in their order."""
    found = dict[tuple[str, str | None], list[str]]()
    for name, target in targets.items():
        found.setdefault(target, []).append(name)
    return found


def _ignored_by(model: Any, asked: _Targets, rest: Mapping[str, str]) -> frozenset[str]:
    """Return the names of `rest` that a checkpoint may have in addition to the model's.

    They are the names that transformers' `_adjust_missing_and_unexpected_keys` ignores and, for a model without a head,
    those of the head.
    """
    patterns = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    ignored = {name for name, target in rest.items() if any(re.search(one, target) for one in patterns)}
    prefix = f"{model.base_model_prefix}."
    if len(prefix) > 1 and model.base_model is model:
        plain = {name: target for name, (target, _) in _targets(model, asked, {}).items()}
        if any(target.startswith(prefix) for target in plain.values()):
            ignored |= {name for name in rest if not plain[name].startswith(prefix)}
    return frozenset(ignored)


def storage_of(tensor: torch.Tensor) -> int:
    """Return a number that is equal for tensors that share a storage."""
    identity: int = tensor.untyped_storage()._cdata
    return identity


def _view_of(
    name: str,
    tensor: torch.Tensor,
    copies: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
    origins: Mapping[int, str],
    fakes: Mapping[str, torch.Tensor],
) -> ModelTensorView:
    """Return the part of a tensor of the model that a tensor of the checkpoint corresponds to."""
    shape = tuple(tensor.shape)
    storage, base, steps = _origin_of(tensor, copies) or (0, 0, [])
    origin = origins.get(storage)
    refused = PlanError(
        "is not part of a tensor of the model: use save_pretrained and from_pretrained of transformers",
        tensor=name,
        code="unsupported",
    )
    if origin is None or tensor.dtype != fakes[origin].dtype:
        raise refused
    whole = tuple(fakes[origin].shape)
    if not prod(shape):
        if shape != whole:
            raise refused
        return ModelTensorView.whole(TensorHead(origin, "", shape))
    dense = [prod(whole[axis + 1 :]) for axis in range(len(whole))]
    axis_of = {stride: axis for axis, (stride, length) in enumerate(zip(dense, whole, strict=True)) if length > 1}
    axes = tuple(axis_of.get(step) if length > 1 else None for step, length in zip(steps, shape, strict=True))
    starts = tuple(base // stride % length for stride, length in zip(dense, whole, strict=True))
    sizes = {axis: length for axis, length in zip(axes, shape, strict=True) if axis is not None}
    fits = all(starts[axis] + length <= whole[axis] for axis, length in sizes.items())
    if prod(sizes.values()) != prod(shape) or not fits:
        raise refused
    return ModelTensorView(origin, shape, axes, starts)


def _origin_of(
    tensor: torch.Tensor, copies: Mapping[int, tuple[torch.Tensor, torch.Tensor]]
) -> tuple[int, int, list[int]] | None:
    """Return where a tensor's elements come from: storage, position of the first, and steps along each axis.

    Returns None if steps vary.
    """
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
    """Convert positions in the dense copy of a tensor to positions in its own storage; None if steps there vary.

    Think of a position in the copy as a mixed-radix number: its digits are the index in the source. Steps are constant
    if each step changes one digit, and no digit carries over.
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
    """Return the axes of a tensor, last first, as (step in its dense copy, length, stride in its storage).

    Adjacent axes that are contiguous in the storage are joined.
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
