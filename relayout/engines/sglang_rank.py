"""Properties of this SGLang process that a load or an update depends on."""

from __future__ import annotations

from collections.abc import Callable
from logging import getLogger
from typing import Any

from relayout.engines.load import EngineRank, Shapes, WeightsLocation, this_device
from relayout.engines.placing import is_expert, is_of_feed_forward, is_rearranged
from relayout.engines.rank_weights import of_other_layers, speculative

FORMAT = "relayout"
"""The name of the load format that requires relayout."""
LOGGER = getLogger("sglang.relayout")


def is_draft(model_config: Any, draft_model_idx: int | None = None) -> bool:
    """Return True if a model is a draft model."""
    return draft_model_idx is not None or bool(getattr(model_config, "is_draft_model", False))


def engine_rank(model_config: Any, draft_model_idx: int | None = None) -> EngineRank:
    """Return the properties of this process that a load depends on."""
    from sglang.srt.runtime_context import get_parallel

    parallel, of_draft = get_parallel(), is_draft(model_config, draft_model_idx)
    text_config = getattr(model_config, "hf_text_config", None)
    num_layers = None if of_draft else getattr(text_config, "num_hidden_layers", None)
    rank, num_ranks = cut_rank(parallel)
    owns_experts = parallel.moe_ep_size > 1
    is_whole_group = parallel.moe_ep_size == parallel.tp_size == num_ranks
    return EngineRank(
        name="SGLang",
        logger=LOGGER,
        rank=rank,
        num_ranks=num_ranks,
        owns_experts=owns_experts,
        has_own_block=owns_experts and is_whole_group and not is_rearranged(_expert_placement()),
        is_placed=is_of_feed_forward if num_ranks != parallel.tp_size else is_expert if owns_experts else None,
        is_draft=of_draft,
        device=this_device(),
        is_skipped=of_other_stages(parallel, num_layers),
        is_unused=speculative(text_config) if num_layers is not None else lambda name: False,
        observe="sglang",
    )


def cut_rank(parallel: Any) -> tuple[int, int]:
    """Return the rank, and the number of ranks, that attention is cut for: most other tensors are cut alike.

    With data-parallel attention there are fewer such ranks than processes (SGLang 0.5.23 `layers/dp_attention.py`,
    `compute_dp_attention_world_info`). The layers after attention are then cut over all processes, or whole.
    """
    return parallel.attn_tp_rank, parallel.attn_tp_size


def _expert_placement() -> Any:
    """Return SGLang's own expert location table, which a process creates before it loads weights; None: none."""
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    return get_global_expert_location_metadata()


def shapes_at(location: WeightsLocation) -> Shapes | None:
    """Return the shapes of the weights at a place."""
    from sglang.srt.runtime_context import get_parallel

    return location.shapes(*cut_rank(get_parallel()))


def of_other_stages(parallel: Any, num_layers: int | None) -> Callable[[str], bool]:
    """Return a test for tensors of layers of another pipeline stage."""
    if parallel.pp_size == 1 or num_layers is None:
        return lambda name: False
    from sglang.srt.distributed.utils import get_pp_indices

    # Source: SGLang's models skip these layers by the same function.
    return of_other_layers(range(*get_pp_indices(num_layers, parallel.pp_rank, parallel.pp_size)), num_layers)
