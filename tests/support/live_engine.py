"""A stub engine that was started on a folder, as far as its live weights are concerned."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from relayout.engines.load import EngineRank
from relayout.engines.rank_weights import EngineOptions
from relayout.live.recording import Recording
from relayout.live.staging import Content, LiveWeights


def engine_rank(rank: int, tp: int, device: str) -> EngineRank:
    """A rank of an engine that takes all tensors, and has nothing of its own."""
    nothing: Any = lambda name: False  # noqa: E731
    return EngineRank(
        name="stub",
        logger=logging.getLogger("stub"),
        rank=rank,
        num_ranks=tp,
        owns_experts=False,
        has_own_block=False,
        is_placed=None,
        is_draft=False,
        device=device,
        is_skipped=nothing,
        is_unused=nothing,
    )


def live_weights(
    model: torch.nn.Module,
    rank: EngineRank,
    folder: Path | str,
    load: Callable[[Iterator[tuple[str, torch.Tensor]]], object],
) -> LiveWeights:
    """Load a folder into a model, and record where the weights come to lie."""
    options = EngineOptions()
    weights = rank.weights(str(folder), options)
    recording = Recording(model)
    with recording:
        load(recording.given(weights.deliver()))
    return LiveWeights(recording.finish(), rank, options, Content.of(weights))
