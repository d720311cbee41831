"""transformers: models of converted folders, in its own tensor parallelism, under torchrun; and models to save.

A load: transformers asks of each weight exactly the part that its plan gives to the rank. What lies in relayout's slice
of the rank is answered from that; the rest, where the two cut differently, is read from the other ranks' files.

A save: what `save_pretrained` would write is found out without its elements. transformers 5 may keep a model in another
form than its checkpoint: experts in one tensor, for example. Its own reverse conversion is called with tensors that
have no memory, and what it does to them is recorded. Each tensor of the checkpoint then is known as a view of one of
the model's, and each process gives its part of that.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from relayout.checkpoint.folder import SINGLE_NAME
from relayout.conversion.layout import DEFAULT_ALIGNMENT, DEFAULT_MAX_PART_NBYTES
from relayout.conversion.run import DEFAULT_MEMORY, Summary
from relayout.core.arguments import integer, size
from relayout.core.slices import NOT_HELD, Range, Slice, positions
from relayout.engines.load import find_folder
from relayout.engines.rank_weights import Delivery, EngineOptions, RankWeights, listed
from relayout.errors import PlanError
from relayout.loader.tensors import torch_dtype
from relayout.planning import PlanOptions
from relayout.plans.plan import Plan
from relayout.plans.planner import Unmatched
from relayout.reporting import Progress
from relayout.saving.api import DEFAULT_SHARD_NBYTES, DEFAULT_THREADS, Held, Saving, Sharding, check_floating
from relayout.saving.folder import TensorHead, files_of
from relayout.saving.held import HeldTensor

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

__all__ = ["from_pretrained", "save_pretrained"]


def from_pretrained(
    folder: str | os.PathLike[str],
    *,
    model_class: type[Any] | None = None,
    backend: str = "auto",
    threads: int | None = None,
    memory: int | str | None = None,
    verify: bool = False,
    **settings: Any,
) -> Any:
    """Load a model, cut for the processes of the default group of `torch.distributed`, or whole without one.

    Each process reads its own rank's slices; no bytes go between processes.

    Args:
        folder: what `relayout convert` wrote, best for as many ranks as there are processes.
        model_class: of transformers. Default: the one that config.json names.
        backend, threads, memory, verify: as for `relayout.iter_load`.
        settings: for the class's own `from_pretrained`, such as `dtype`.

    Raises:
        FormatError, PlanError, OSError, MemoryError: as `relayout.iter_load`; or the folder was not converted, or
            owns experts whole, which transformers does otherwise.
    """
    import transformers
    from torch import distributed
    from transformers.distributed.configuration_utils import DistributedConfig

    from relayout.engines.global_tensor import GlobalTensor

    path = os.fspath(folder)
    converted = find_folder(path, "transformers' own from_pretrained")
    if converted is None or converted.expert_parallel:
        state = "was not converted" if converted is None else "was converted with --expert-parallel"
        what = f"{state}; `relayout convert SRC --tp N` makes a folder that transformers can use"
        raise PlanError(what, path=path, code="unsupported")
    rank, num_ranks = (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)
    config = settings.pop("config", None) or transformers.AutoConfig.from_pretrained(path)
    weights = RankWeights(path, rank, num_ranks, EngineOptions(backend, threads, memory, verify)).deliver()
    state_dict = {
        name: _Weight(weights, name, tensor) if isinstance(tensor, GlobalTensor) else tensor for name, tensor in weights
    }
    if num_ranks > 1:
        settings.setdefault("distributed_config", DistributedConfig(tp_size=num_ranks))
    wants_report = settings.pop("output_loading_info", False)
    model, report = (model_class or _class_of(config)).from_pretrained(
        None, config=config, state_dict=state_dict, output_loading_info=True, **{"dtype": config.dtype, **settings}
    )
    if report["missing_keys"]:  # transformers only warns, and gives them random values.
        what = f"nothing was loaded into {listed(sorted(report['missing_keys']))}: the checkpoint lacks what"
        raise PlanError(f"{what} transformers' {type(model).__name__} needs", path=path, code="missing")
    if Path(path, "generation_config.json").exists() and model.can_generate():
        model.generation_config = transformers.GenerationConfig.from_pretrained(path)
    return (model, report) if wants_report else model


def _class_of(config: Any) -> type[Any]:
    """The class of transformers that config.json names.

    Raises:
        PlanError: it names none.
    """
    import transformers

    for name in getattr(config, "architectures", None) or ():
        model_class: type[Any] | None = getattr(transformers, name, None)
        if model_class is not None:
            return model_class
    raise PlanError(f"config.json names no class of transformers ({config.architectures}): give model_class")


class _Weight:
    """A weight of which parts can be asked for, as of a `safe_open(...).get_slice`; threads may do so at once."""

    def __init__(self, weights: Delivery, name: str, tensor: torch.Tensor) -> None:
        self._weights = weights
        self._name = name
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        """The shape of the whole weight."""
        return list(self._tensor.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """A part: a view of the rank's slice if that has all of it, else read."""
        from relayout.engines.global_tensor import GlobalTensor

        part = self._tensor[index]
        return self._weights.read(self._name, index) if isinstance(part, GlobalTensor) else part


def save_pretrained(
    model: Any,
    output: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    group: ProcessGroup | None = None,
    tp: int = 1,
    align: int | str = DEFAULT_ALIGNMENT,
    plan: Plan | str | os.PathLike[str] | None = None,
    trust_remote_code: bool = False,
    expert_parallel: bool = False,
    unmatched: Unmatched | None = None,
    max_part_nbytes: int | str = DEFAULT_MAX_PART_NBYTES,
    layout: Literal["ranks", "whole"] = "ranks",
    ranks: str | Iterable[int] | None = None,
    digest: Literal["xxh3_128", "sha256"] = "xxh3_128",
    background: bool = False,
    max_shard_size: int | str = DEFAULT_SHARD_NBYTES,
    force: bool = False,
    threads: int = DEFAULT_THREADS,
    memory: int | str = DEFAULT_MEMORY,
    progress: Progress = None,
) -> Summary | Future[Summary]:
    """Write a model of transformers as the folder that `convert` makes of what its `save_pretrained` writes.

    Where `torch.distributed` is initialized, all processes of the group call this, and each gives what it holds:
    nothing is gathered, under FSDP2 or tensor parallelism. config.json and the generation configuration are written;
    the files of a tokenizer are not.

    Args:
        model: of transformers 5; not quantized, and without adapters. All processes give the same one, not stages.
        dtype: the floating-point dtype to write, as if the model had been moved `to` it before; it keeps its own.
        group: the processes that hold the model. Default: the default group, if there is one.

    All other arguments (`output`, `tp`, `align`, `plan`, `trust_remote_code`, `expert_parallel`, `unmatched`,
    `max_part_nbytes`, `layout`, `ranks`, `digest`, `background`, `max_shard_size`, `force`, `threads`, `memory`,
    `progress`) are those of `relayout.save`.

    Raises:
        PlanError: the model cannot be saved like this; or as `relayout.save`.
        FormatError, OSError: as `relayout.save`.
    """
    max_shard_nbytes = size(max_shard_size, "max_shard_size")
    hold = holding_model(model, dtype, max_shard_nbytes)
    saving = Saving(
        output=output,
        max_shard_nbytes=max_shard_nbytes,
        force=force,
        threads=integer(threads, "threads"),
        memory=size(memory, "memory"),
        progress=progress,
        options=PlanOptions(
            tp=tp,
            align=align,
            plan=plan,
            trust_remote_code=trust_remote_code,
            expert_parallel=expert_parallel,
            unmatched=unmatched,
            max_part_nbytes=max_part_nbytes,
            layout=layout,
            ranks=ranks,
            digest=digest,
        ),
    )
    return saving.start(hold, group_of(group), background)


def group_of(group: ProcessGroup | None) -> ProcessGroup | None:
    """The processes that hold a model: a group, or the default one; None: this process alone."""
    from torch import distributed

    is_distributed = distributed.is_initialized() and distributed.get_world_size() > 1
    return distributed.group.WORLD if group is None and is_distributed else group


def holding_model(model: Any, dtype: torch.dtype | None, max_shard_nbytes: int) -> Callable[[bool], Held]:
    """What a process gives to a save of a model, see `Saving.start` and `save_pretrained`."""
    check_floating(dtype)
    model = getattr(model, "_orig_mod", model)  # Of torch.compile.

    def hold(is_first: bool) -> Held:
        whole = {name: HeldTensor.of(name, tensor, dtype) for name, tensor in _state_of(model).items()}
        views, index = _checkpoint_of(model, [one.head for one in whole.values()], max_shard_nbytes)
        tensors = {name: view.of(name, whole[view.origin]) for name, view in views.items()}
        return Held(tensors, _small_files(model, dtype or model.dtype) if is_first else {}, index)

    return hold


def _state_of(model: Any) -> dict[str, torch.Tensor]:
    """The tensors that are saved, under the model's own names, as `save_pretrained` chooses them.

    Raises:
        PlanError: it is of an older transformers, is quantized, or has adapters.
    """
    import torch

    try:
        from transformers.modeling_utils import remove_tied_weights_from_state_dict
    except ImportError:
        raise PlanError("needs transformers 5: `pip install -U transformers`", code="unsupported") from None
    for attribute, what in (("hf_quantizer", "is quantized"), ("_hf_peft_config_loaded", "has adapters")):
        if getattr(model, attribute, None):
            raise PlanError(f"the model {what}: use its own save_pretrained, and convert", code="unsupported")
    if any(hasattr(module, "base_layer") for module in model.modules()):  # As PEFT has it in each layer it adapts.
        raise PlanError("the model has adapters: merge and unload them, or save and convert", code="unsupported")
    state = model.state_dict()
    for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
        state.pop(name, None)
    # Tied tensors are one parameter. Stand-ins share memory where they do.
    parameters = dict(model.named_parameters(remove_duplicate=False))
    parameters |= dict(model.named_buffers(remove_duplicate=False))
    shared: dict[int, torch.Tensor] = {}
    stand_ins = {
        name: shared.setdefault(id(parameters.get(name, tensor)), torch.empty(1)) for name, tensor in state.items()
    }
    return {name: state[name] for name in remove_tied_weights_from_state_dict(stand_ins, model)}


def _small_files(model: Any, dtype: torch.dtype) -> dict[str, bytes]:
    """config.json and what else `save_pretrained` writes beside the weights, by the same steps."""
    from transformers.dynamic_module_utils import custom_object_save

    config = copy.deepcopy(model.config)
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    with tempfile.TemporaryDirectory() as folder:
        if model.is_remote_code():
            custom_object_save(model, folder, config=config)
        config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        return files_of(Path(folder))


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


def _checkpoint_of(model: Any, heads: Sequence[TensorHead], max_shard_nbytes: int) -> tuple[dict[str, View], Sharding]:
    """The tensors of the checkpoint, in its order, and how they are grouped into shards.

    Raises:
        PlanError: a tensor of the checkpoint is no part of one of the model's.
    """
    import torch
    from huggingface_hub import split_state_dict_into_shards_factory
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
                copies.pop(_storage(args[0]), None)  # No longer a copy: it then comes from nowhere.
                origins.pop(_storage(args[0]), None)
            if func is torch.ops.aten.clone.default and made.is_contiguous():
                copies[_storage(made)] = (args[0], made)
            return made

    with FakeTensorMode(), Recorder():  # type: ignore[no-untyped-call]
        fakes = {one.name: torch.empty(one.shape, dtype=torch_dtype(one.name, one.dtype)) for one in heads}
        origins.update((_storage(fake), name) for name, fake in fakes.items())
        reverted = revert_weight_conversion(model, dict(fakes))
        split = split_state_dict_into_shards_factory(
            reverted,
            get_storage_size=lambda tensor: tensor.untyped_storage().nbytes(),
            get_storage_id=_storage,
            filename_pattern=SINGLE_NAME.replace(".", "{suffix}.", 1),
            max_shard_size=max_shard_nbytes,
        )
    views = {name: _view_of(name, tensor, copies, origins, fakes) for name, tensor in reverted.items()}
    totals = {"total_parameters": model.num_parameters(), **split.metadata}
    return views, Sharding(list(split.filename_to_tensors.values()), totals)


def _storage(tensor: torch.Tensor) -> int:
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
        "is no part of one of the model's tensors: use the model's own save_pretrained, and convert",
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
    storage, base, steps = _storage(tensor), int(tensor.storage_offset()), list(tensor.stride())
    while storage in copies:
        source, _ = copies[storage]
        found = _through(tuple(tensor.shape), base, steps, source)
        if found is None or source.dtype != tensor.dtype:
            return None
        storage, (base, steps) = _storage(source), found
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
