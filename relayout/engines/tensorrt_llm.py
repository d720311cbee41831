"""TensorRT-LLM: `LLM(FOLDER, checkpoint_loader=checkpoint_loader())`. Experimental.

Written by its sources of 2026 (PyTorch backend) and tested with its interfaces; it has not been run on a GPU. Its own
modules cut what they are given, as `load_weight_shard` does, and are handed global tensors. Names are mapped by its
loader for checkpoints of Hugging Face; only files are read otherwise.
"""

from __future__ import annotations

import warnings
from logging import getLogger
from typing import TYPE_CHECKING, Any

from relayout.engines.metrics import publish
from relayout.engines.rank_weights import EngineOptions, RankWeights, find_folder
from relayout.errors import PlanError

if TYPE_CHECKING:
    import torch

_LOGGER = getLogger("tensorrt_llm.relayout")


def checkpoint_loader(**options: Any) -> Any:
    """A checkpoint loader for `tensorrt_llm.LLM`, which sends it to its processes.

    Args:
        options: those of vLLM's plugin: `backend`, `threads`, `memory`, `verify`, `strict`.

    Raises:
        ImportError: there is no TensorRT-LLM, or another one.
        PlanError: an option is unknown.
    """
    from tensorrt_llm._torch.models.checkpoints.hf.checkpoint_loader import HfCheckpointLoader

    warnings.warn("relayout for TensorRT-LLM is experimental: it has never run with the engine", stacklevel=2)
    return HfCheckpointLoader(weight_loader=_weight_loader(EngineOptions.parse(options, "checkpoint_loader")))


def _weight_loader(options: EngineOptions) -> Any:
    from tensorrt_llm._torch.models.checkpoints.base_weight_loader import BaseWeightLoader

    return type("RelayoutWeightLoader", (_Loading, BaseWeightLoader), {"__module__": __name__})(options)


class _Loading:
    """What the weight loader has beside the methods of TensorRT-LLM's `BaseWeightLoader`."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options

    def __reduce__(self) -> tuple[Any, ...]:
        """The class is made where TensorRT-LLM is; so pickles have what makes it."""
        return _weight_loader, (self._options,)

    def load_weights(self, checkpoint_dir: str, mapping: Any, **_settings: Any) -> dict[str, torch.Tensor]:
        """Name -> tensor of the whole model, of which the rank's slices are in memory, all at once.

        Args:
            mapping: TensorRT-LLM's; it says which rank this is, of how many.

        Raises:
            FormatError, PlanError, OSError, MemoryError: as `relayout.iter_load`, or experts are owned whole.
        """
        path = str(checkpoint_dir)
        folder = find_folder(path, "TensorRT-LLM's own loader")
        if folder is not None and folder.expert_parallel:
            what = "was converted with --expert-parallel: TensorRT-LLM needs `relayout convert SRC --tp N`"
            raise PlanError(what, path=path, code="unsupported")
        only_held = mapping.moe_ep_size == 1
        weights = RankWeights(path, mapping.tp_rank, mapping.tp_size, self._options, only_held=only_held)
        tensors = dict(weights)
        publish(weights.report(), _LOGGER)
        return tensors
