"""A plugin of ModelExpress: a strategy in its chain of loaders that loads converted folders in vLLM.

    MX_LOAD_PLUGIN=relayout vllm serve llama-3.1-8b-tp8 -tp 8 --load-format modelexpress

An example for modelexpress 0.8 (plugins.py, and `LoadStrategy` in load_strategy/base.py), not part of the package: copy
this file, under this name, to ModelExpress's folder of plugins, or set `MX_PLUGIN_DIR` to the folder that has it.

ModelExpress's own last resort calls vLLM's default loader by its class, not by vLLM's registry, so it does not
recognize converted folders.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from relayout.engines.load import WeightsLocation, source_url


def register_plugin() -> type[Any]:
    """Return the class of the strategy; ModelExpress calls this."""
    from modelexpress.load_strategy.base import NativeLoadStrategy  # type: ignore[import-not-found]

    class RelayoutStrategy(NativeLoadStrategy):  # type: ignore[misc]  # It has no types here.
        """Hands a rank's slices to the model by relayout's own loader; ModelExpress makes them ready afterwards."""

        name = "relayout"

        def is_available(self, ctx: Any) -> bool:
            """Return True for the first load of a converted folder by vLLM; the next strategy takes all others."""
            return not ctx.is_reload and _is_ours(ctx.model_config) and bool(super().is_available(ctx))

        def load(self, result: Any, ctx: Any) -> Any:
            """Load by vLLM's own choice of a loader, which relayout's plugin has extended.

            A load that fails has written to the model: ModelExpress makes a new one for the next strategy.

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
    """Return True if vLLM loads the model, and its weights are a converted folder."""
    vllm = sys.modules.get("vllm.config")
    if vllm is None or not isinstance(model_config, vllm.ModelConfig):
        return False
    path = str(getattr(model_config, "model_weights", "") or model_config.model)
    return WeightsLocation(source_url(path, model_config.revision), is_explicit=False).is_ours
