"""transformers: models of converted folders, in its own tensor parallelism, under torchrun; and models to save.

Its loader asks of each weight exactly the part that its plan gives to the rank. What lies in relayout's slice of the
rank is answered from that; the rest, where the two cut differently, is read from the other ranks' files.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relayout.engines.folders import find_folder
from relayout.engines.rank_weights import Delivery, EngineOptions, RankWeights, listed
from relayout.errors import PlanError
from relayout.saving.pretrained import save_pretrained

if TYPE_CHECKING:
    import torch

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
