"""This process of SGLang, as a load or an update sees it."""

from __future__ import annotations

from collections.abc import Callable
from logging import getLogger
from typing import Any

from relayout.engines.load import EngineRank, Experts, Shapes, WeightsPlace
from relayout.engines.rank_weights import layer_of, speculative

FORMAT = "relayout"
"""The name of the load format that insists on relayout."""
LOGGER = getLogger("sglang.relayout")


def is_draft(model_config: Any, draft_model_idx: int | None = None) -> bool:
    """Whether a model is a draft model."""
    return draft_model_idx is not None or bool(getattr(model_config, "is_draft_model", False))


def engine_rank(model_config: Any, draft_model_idx: int | None = None) -> EngineRank:
    """All that a load asks of SGLang."""
    from sglang.srt.runtime_context import get_parallel

    parallel, of_draft = get_parallel(), is_draft(model_config, draft_model_idx)
    text_config = getattr(model_config, "hf_text_config", None)
    num_layers = None if of_draft else getattr(text_config, "num_hidden_layers", None)
    is_owned, is_in_blocks = parallel.moe_ep_size > 1, parallel.moe_ep_size == parallel.tp_size
    return EngineRank(
        name="SGLang",
        logger=LOGGER,
        rank=parallel.tp_rank,
        num_ranks=parallel.tp_size,
        num_attention_ranks=parallel.attn_tp_size,
        experts=Experts(is_owned, is_in_blocks, is_owned, "SGLang with --tp {num_ranks} --ep-size {num_ranks}"),
        is_draft=of_draft,
        is_convertible=parallel.attn_tp_size == parallel.tp_size and (is_in_blocks or not is_owned),
        device=_device(),
        is_skipped=of_other_stages(parallel, num_layers),
        is_unused=speculative(text_config) if num_layers is not None else lambda name: False,
    )


def shapes_at(place: WeightsPlace) -> Shapes | None:
    """The shapes of the weights at a place."""
    from sglang.srt.runtime_context import get_parallel

    return place.shapes(get_parallel().tp_rank, get_parallel().tp_size)


def of_other_stages(parallel: Any, num_layers: int | None) -> Callable[[str], bool]:
    """Whether a tensor is of a layer of another stage of the pipeline."""
    if parallel.pp_size == 1 or num_layers is None:
        return lambda name: False
    from sglang.srt.distributed.utils import get_pp_indices

    stage = range(*get_pp_indices(num_layers, parallel.pp_rank, parallel.pp_size))

    def is_elsewhere(name: str) -> bool:
        layer = layer_of(name)
        # Proof: SGLang's models pass over these by the same number.
        return layer is not None and layer < num_layers and layer not in stage

    return is_elsewhere


def _device() -> str:
    """The device that slices are best read to: this process's GPU, if it has one."""
    import torch

    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
