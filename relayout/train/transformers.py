"""transformers: load models of converted folders, in its own tensor parallelism, under torchrun; and save models.

A load: transformers requests of each weight exactly the part that its plan gives to the rank. Elements in relayout's
slice of the rank are taken from it; the rest, where the two cut differently, is read from the other ranks' files.

A save: the output of `save_pretrained` is determined without reading any values (`loader/models.py`). Each tensor of
the checkpoint is a view of one of the model's tensors, and each process gives its part of that.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from relayout.checkpoint.folder import SINGLE_NAME
from relayout.conversion.run import Summary
from relayout.core.arguments import path_text, takes
from relayout.engines.load import find_folder
from relayout.engines.rank_weights import Delivery, EngineOptions, RankWeights, listed
from relayout.errors import PlanError
from relayout.loader.held import HeldTensor, unwrapped
from relayout.loader.models import check_model, checkpoint_of, storage_of
from relayout.train.memory_folder import files_of
from relayout.train.save import HeldTensors, SaveOptions, SaveRequest, Sharding, check_floating, start

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

    Each process reads its own rank's slices; no bytes are sent between processes.

    Args:
        folder: an output of `relayout convert`, best with one rank per process.
        model_class: of transformers. Default: the class that config.json names.
        backend, threads, memory, verify: as for `relayout.iter_load`.
        settings: for the class's own `from_pretrained`, such as `dtype`.

    Raises:
        FormatError, PlanError, OSError, MemoryError: as `relayout.iter_load`; or the folder was not converted, or has
            whole experts per rank, which transformers distributes differently.
        ModuleNotFoundError: transformers 5 is not installed.
    """
    from torch import distributed

    try:
        import transformers
        from transformers.distributed.configuration_utils import DistributedConfig
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("transformers"):
            raise
        what = "relayout.transformers needs transformers 5: pip install -U transformers"
        raise ModuleNotFoundError(what, name=error.name) from None

    from relayout.engines.global_tensor import GlobalTensor

    path = path_text(folder, "folder")
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
    """Return the class of transformers that config.json names."""
    import transformers

    for name in getattr(config, "architectures", None) or ():
        model_class: type[Any] | None = getattr(transformers, name, None)
        if model_class is not None:
            return model_class
    raise PlanError(f"config.json names no class of transformers ({config.architectures}): give model_class")


class _Weight:
    """A weight that can be read in parts, like `safe_open(...).get_slice`; several threads may read at once."""

    def __init__(self, weights: Delivery, name: str, tensor: torch.Tensor) -> None:
        self._weights = weights
        self._name = name
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        """Return the shape of the whole weight."""
        return list(self._tensor.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return a part: a view of the rank's slice if the slice has all of it; otherwise the part is read."""
        from relayout.engines.global_tensor import GlobalTensor

        part = self._tensor[index]
        return self._weights.read(self._name, index) if isinstance(part, GlobalTensor) else part


@takes(SaveOptions, SaveRequest)
def save_pretrained(
    model: Any,
    output: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    group: ProcessGroup | None = None,
    background: bool = False,
    **options: Unpack[SaveOptions],
) -> Summary | Future[Summary]:
    """Write a model of transformers as the folder that `convert` makes of the output of its `save_pretrained`.

    If `torch.distributed` is initialized, all processes of the group call this, and each gives the tensors that it
    holds: nothing is gathered, under FSDP2 or tensor parallelism. config.json and the generation configuration are
    written; the files of a tokenizer are not.

    Args:
        output, background: as for `relayout.save`.
        model: of transformers 5, also in DistributedDataParallel, and with compiled layers; not quantized, and without
            adapters. All processes give the same model, not stages.
        dtype: the floating-point dtype to write, as if the model had been loaded by `from_pretrained(dtype=...)`:
            tensors that its class keeps in FP32 at a dtype of 16 bits are written as FP32. The model keeps its own
            dtypes.
        group: the processes that hold the model. Default: the default group, if there is one.
        options: as for `relayout.save`.

    Raises:
        PlanError: the model cannot be saved like this; or as `relayout.save`.
        FormatError, OSError: as `relayout.save`.
    """

    def prepare() -> tuple[SaveRequest, Callable[[bool], HeldTensors]]:
        saving = SaveRequest(output=output, **options)
        return saving, holding_model(model, dtype, int(saving.max_shard_size))

    return start(prepare, group_of(group), background)


def group_of(group: ProcessGroup | None) -> ProcessGroup | None:
    """Return the processes that hold a model: a group, or the default one; None: this process alone."""
    from torch import distributed

    is_distributed = distributed.is_initialized() and distributed.get_world_size() > 1
    return distributed.group.WORLD if group is None and is_distributed else group


def holding_model(model: Any, dtype: torch.dtype | None, max_shard_nbytes: int) -> Callable[[bool], HeldTensors]:
    """Return a function that returns the tensors that a process contributes to a save of a model, see `save.start`."""
    check_floating(dtype)
    model, name_of = unwrapped(model)

    def hold(is_first: bool) -> HeldTensors:
        state, dtype_of = _state_of(model, name_of), _dtypes_at(model, dtype)
        whole = {name: HeldTensor.of(name, tensor, dtype_of(name)) for name, tensor in state.items()}
        views, stubs = checkpoint_of(model, [one.head for one in whole.values()])
        index = _sharding(model, stubs, max_shard_nbytes)
        tensors = {name: view.of(name, whole[view.origin]) for name, view in views.items()}
        return HeldTensors(tensors, _small_files(model, dtype or model.dtype) if is_first else {}, index)

    return hold


def _dtypes_at(model: Any, dtype: torch.dtype | None) -> Callable[[str], torch.dtype | None]:
    """Return the dtype to save each floating-point tensor as, by the model's own name of it; None: its present one.

    Some stay in FP32 at a dtype of 16 bits, by names that the class lists, following `from_pretrained(dtype=...)`
    (transformers 5.24: `_get_dtype_plan` in `modeling_utils.py`, and its use in `core_model_loading.py`).
    """
    from transformers.core_model_loading import build_glob_alternation

    kept: dict[str, torch.dtype] = {} if dtype is None else model._get_dtype_plan(dtype)
    if not kept:
        return lambda _: dtype
    pattern, key_of, _ = build_glob_alternation(list(kept))

    def dtype_of(name: str) -> torch.dtype | None:
        found = pattern.search(name)
        return dtype if found is None else kept[key_of[str(found.lastgroup)]]

    return dtype_of


def _sharding(model: Any, stubs: dict[str, Any], max_shard_nbytes: int) -> Sharding:
    """Return the grouping of a checkpoint's tensors into shards, as `save_pretrained` does it."""
    from huggingface_hub import split_state_dict_into_shards_factory

    split = split_state_dict_into_shards_factory(
        stubs,
        get_storage_size=lambda tensor: tensor.untyped_storage().nbytes(),
        get_storage_id=storage_of,
        filename_pattern=SINGLE_NAME.replace(".", "{suffix}.", 1),
        max_shard_size=max_shard_nbytes,
    )
    totals = {"total_parameters": model.num_parameters(), **split.metadata}
    return Sharding(list(split.filename_to_tensors.values()), totals)


def _state_of(model: Any, name_of: Callable[[str], str]) -> dict[str, torch.Tensor]:
    """Return the tensors that are saved, under the model's own names, as `save_pretrained` chooses them.

    Args:
        name_of: removes from a name the additions of wrappers inside the model, see `unwrapped`.
    """
    import torch

    if isinstance(model, torch.nn.Module):
        check_model(model)
    from transformers import PreTrainedModel
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    if not isinstance(model, PreTrainedModel):
        how = "give tensors to `relayout.save`, and shard a model by fully_shard (FSDP2)"
        what = f"the model is a {type(model).__name__}, expected one of transformers: {how}"
        raise PlanError(what, code="unsupported")
    _check_scopes(model)
    state = {name_of(name): tensor for name, tensor in model.state_dict().items()}
    for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
        state.pop(name, None)
    # Tied tensors are one parameter. Their placeholders share memory.
    own = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    parameters = {name_of(name): tensor for name, tensor in own}
    shared: dict[int, torch.Tensor] = {}
    stubs = {
        name: shared.setdefault(id(parameters.get(name, tensor)), torch.empty(1)) for name, tensor in state.items()
    }
    return {name: state[name] for name in remove_tied_weights_from_state_dict(stubs, model)}


def _check_scopes(model: Any) -> None:
    """Check that transformers finds the tensors of nested models, which may have other names in a checkpoint."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    if getattr(model, "_weight_conversions", None) is not None:  # Set by its from_pretrained, before compilation.
        return
    for conversion in get_model_conversion_mapping(model, add_legacy=False):
        scope = getattr(conversion, "scope_prefix", None) or ""
        if "_orig_mod" in scope.split("."):
            what = f"the model has a compiled model inside, {scope.removesuffix('._orig_mod')!r}"
            raise PlanError(f"{what}, of which transformers loses the names: call compile() on it", code="unsupported")


def _small_files(model: Any, dtype: torch.dtype) -> dict[str, bytes]:
    """Return config.json and the other small files that `save_pretrained` writes, by the same steps."""
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
