"""ModelExpress: a strategy of its chain of loaders that loads converted folders, in vLLM.

ModelExpress imports this file itself, and nothing else does: `MX_LOAD_PLUGIN=relayout`, and `MX_PLUGIN_DIR` names this
folder, or one that has a link to this file. Its own last resort calls vLLM's default loader by its class, past what
vLLM has registered, so it knows no converted folders. The contract is that of modelexpress 0.8 (plugins.py and
load_strategy/base.py: `LoadStrategy`).
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from relayout.engines.load import WeightsPlace, source_url


def register_plugin() -> type[Any]:
    """The strategy's class: what ModelExpress calls this file for."""
    from modelexpress.load_strategy.base import NativeLoadStrategy  # type: ignore[import-not-found]

    class RelayoutStrategy(NativeLoadStrategy):  # type: ignore[misc]  # It has no types here.
        """Hands a rank's slices to the model by relayout's own loader; ModelExpress makes them ready afterwards."""

        name = "relayout"

        def is_available(self, ctx: Any) -> bool:
            """Whether this is the first load of a converted folder, by vLLM; others are left to the next strategy."""
            return not ctx.is_reload and _is_ours(ctx.model_config) and bool(super().is_available(ctx))

        def load(self, result: Any, ctx: Any) -> Any:
            """Load as vLLM does without a word of the format.

            What fails here has written to the model, and ModelExpress makes another before it goes on.

            Raises:
                FormatError, PlanError, OSError, MemoryError: as `relayout.iter_load`, or the folder does not fit the
                    model.
            """
            from vllm.model_executor.model_loader import get_model_loader

            loader = get_model_loader(replace(ctx.load_config, load_format="auto"))
            loader.load_weights(result.model, ctx.model_config)
            return result

    return RelayoutStrategy


def _is_ours(model_config: Any) -> bool:
    """Whether vLLM loads the model, and its weights are a converted folder."""
    vllm = sys.modules.get("vllm.config")
    if vllm is None or not isinstance(model_config, vllm.ModelConfig):
        return False
    path = str(getattr(model_config, "model_weights", "") or model_config.model)
    return WeightsPlace(source_url(path, model_config.revision), is_asked_for=False).is_ours
