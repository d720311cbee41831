"""TokenSpeed: a converted folder is recognized and loads with no flag.

TokenSpeed's plugins can register models and kernels, but no load format, and its command accepts only its own formats
(0.1.1, `runtime/plugins/registry.py` and `runtime/utils/server_args.py`). So the options of relayout, and the request
to load plain checkpoints with it, are passed in an environment variable: `RELAYOUT_TOKENSPEED='{"cache":
"/nvme/relayout"}'`.

One function of TokenSpeed is replaced: `_initialize_model` of `runtime/model_loader/loader.py`. All of its loaders
create a model with it. The next call of its default loader is `model.load_weights(weights)`, where `weights` is a
generator that opens no file before its first tensor. For this one call the method of the model is replaced: it takes
relayout's tensors, or the generator if TokenSpeed loads the model itself.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from logging import getLogger
from typing import TYPE_CHECKING, Any

from relayout.checkpoint.trust import policy_of
from relayout.engines.load import (
    BuiltinLoad,
    EngineModel,
    EngineRank,
    Weights,
    WeightsLocation,
    open_load,
    refuse_unverified,
    source_url,
    this_device,
)
from relayout.engines.placing import is_expert, is_of_feed_forward, is_rearranged
from relayout.engines.rank_weights import EngineOptions, listed, of_other_layers, publish, speculative
from relayout.errors import PlanError
from relayout.storage.stores import scheme_of

if TYPE_CHECKING:
    import torch

    _Named = tuple[str, torch.Tensor]

OPTIONS = "RELAYOUT_TOKENSPEED"
"""The environment variable with the options, as a JSON object. If it is set, relayout also loads plain checkpoints."""
_LOGGER = getLogger("tokenspeed.relayout")
_OF_DEFAULT_LOADER = {"auto", "instanttensor", "mistral", "npcache", "pt", "safetensors"}
"""Formats that TokenSpeed's default loader reads. Other loaders produce values in different ways."""
IGNORED = {"w13_weight_shape", "w2_weight_shape"}
"""Parameters of experts that no loader writes: TokenSpeed drops them after the load (0.1.1
`layers/moe/weights/mxint4.py`)."""
_EMBEDDING = ".embed_tokens.weight"
_DRAFTS = ("NextN", "Eagle3", "DFlash", "DSpark")
"""Parts of the names of architectures that are draft models only. TokenSpeed gives a draft model such a name if its
checkpoint has the target's name (0.1.1 `runtime/utils/hf_transformers_utils.py`, `get_config`)."""


def register() -> None:
    """Replace TokenSpeed's function that creates a model. May be called any number of times.

    Raises:
        AttributeError, TypeError: this TokenSpeed is not as expected.
    """
    from tokenspeed.runtime import model_loader
    from tokenspeed.runtime.model_loader import loader

    original = loader._initialize_model
    if getattr(original, "func", None) is make_model:
        return
    names, expected = list(inspect.signature(original).parameters), ["model_config", "load_config"]
    if names != expected:
        raise TypeError(f"{loader.__name__}._initialize_model takes {names}, expected {expected}")
    check_scales: Callable[[Iterator[_Named]], Iterator[_Named]] = loader.require_unit_kv_scales
    if policy_of(None) is not None:
        model_loader.get_model_loader = loader.get_model_loader = partial(choose_loader, loader.get_model_loader)
    loader._initialize_model = partial(make_model, original, check_scales)


def choose_loader(original: Callable[[Any], Any], load_config: Any) -> Any:
    """Replace `get_model_loader` under a policy: refuse loaders that bypass relayout.

    Raises:
        PlanError: the loader is not the default one.
    """
    loader = original(load_config)
    if type(loader).__name__ != "DefaultModelLoader":
        refuse_unverified(
            None, f"--load-format {_format(load_config)} ({type(loader).__name__}) is not loaded by relayout"
        )
    return loader


def make_model(
    original: Callable[[Any, Any], Any],
    check_scales: Callable[[Iterator[_Named]], Iterator[_Named]],
    model_config: Any,
    load_config: Any,
) -> Any:
    """Replace `_initialize_model`: mark a model that relayout may load, and let relayout load its weights once.

    A draft model is not marked: it shares modules with its target after the load.

    Args:
        original: creates the model.
        check_scales: TokenSpeed's own check of the tensors that it passes to a model.
        model_config, load_config: TokenSpeed's.

    Raises:
        FormatError, PlanError, OSError: as `WeightsLocation.is_ours`; an option is wrong; or the model reads weights of
            a converted folder by itself.
    """
    model_load = _model_load(model_config)
    assert model_load.location is not None
    if _format(load_config) not in _OF_DEFAULT_LOADER or not model_load.location.is_ours:
        return original(model_config, load_config)
    if is_draft(model_config):
        model = original(model_config, load_config)
    else:
        from relayout.engines.unwritten import Sentinels

        with Sentinels() as model_load.sentinels:
            model = original(model_config, load_config)
    if hasattr(model, "bind_checkpoint_dir") or getattr(model, "secondary_weights", None):
        refuse_unverified(
            model_load.location.source, f"has weights of {type(model).__name__} that TokenSpeed reads itself"
        )
        if model_load.location.manifest is not None:
            what = f"TokenSpeed's {type(model).__name__} reads some of its weights by itself, which it would not find"
            raise PlanError(f"{what} here: serve the source", path=model_load.location.source, code="unsupported")
        if model_load.sentinels is not None:
            model_load.sentinels.restore(model)
        return model
    model.load_weights = partial(_load_weights, model_load, model, model.load_weights, model_config, check_scales)
    return model


def _model_load(model_config: Any) -> EngineModel:
    """Return the location of a model's weights, and the options of its load."""
    text, url = os.environ.get(OPTIONS), source_url(str(model_config.model_path), model_config.revision)
    try:
        options = json.loads(text or "{}")
    except ValueError as error:
        raise PlanError(f"{OPTIONS}: not valid JSON: {error}", code="option") from error
    if not isinstance(options, dict):
        raise PlanError(f"{OPTIONS}: is {text}, expected a JSON object such as {{}}", code="option")
    parsed = EngineOptions.parse(options, OPTIONS)
    if parsed.live or parsed.source is not None:
        raise PlanError(f"{OPTIONS}: live and source: not for TokenSpeed", code="option")
    # With this variable TokenSpeed looks up model ids elsewhere than on the Hugging Face hub.
    is_elsewhere = scheme_of(url) == "hf" and "TOKENSPEED_USE_MODELSCOPE" in os.environ
    return EngineModel(parsed, WeightsLocation(url, is_explicit=bool(text) and not is_elsewhere))


def _load_weights(
    model_load: EngineModel,
    model: Any,
    original: Callable[[Iterator[_Named]], Any],
    model_config: Any,
    check_scales: Callable[[Iterator[_Named]], Iterator[_Named]],
    weights: Iterator[_Named],
) -> Any:
    """Replace a new model's `load_weights`: load the weights; check that all memory of the model was written.

    Args:
        weights: the tensors as TokenSpeed reads them itself.
    """
    # Later calls are live updates.
    del model.load_weights
    if model.load_weights != original:  # The model had one of its own.
        model.load_weights = original
    location = model_load.location
    assert location is not None
    load = open_load(location, model_load.options, engine_rank(model, model_config))
    if isinstance(load, Weights):
        try:
            loaded = original(check_scales(iter(load.delivery)))
            report = load.delivery.report()
            if model_load.sentinels is not None:
                from relayout.engines.unwritten import check_written

                check_written(model, location.source, "TokenSpeed", IGNORED)
            publish(report, _LOGGER)
            if report.unused:
                _LOGGER.warning("relayout: rank %d: TokenSpeed did not use %s", report.rank, listed(report.unused))
        except Exception as error:
            load = load.after(error, location.source)
    if isinstance(load, BuiltinLoad):
        loaded = original(weights)
        load.has_loaded()
    if model_load.sentinels is not None:
        model_load.sentinels.restore(model)
    return loaded


def engine_rank(model: Any, model_config: Any) -> EngineRank:
    """Return the properties of this process that a load depends on."""
    mapping, of_draft = model_config.mapping, is_draft(model_config)
    attention, experts, text_config = mapping.attn, mapping.moe, model_config.hf_text_config
    owns_experts = experts.ep_size > 1
    degrees = {mapping.dense.tp_size, mapping.lm_head.tp_size, *(() if owns_experts else (experts.tp_size,))}
    # With data-parallel attention, the layers after it are cut over other processes than attention, or whole.
    is_placed = is_of_feed_forward if degrees != {attention.tp_size} else is_expert if owns_experts else None
    is_by_use = is_placed or (lambda name: False)
    is_block = owns_experts and experts.ep_size == attention.tp_size
    is_whole = attention.tp_size > 1 and _has_whole_embedding(model)
    is_used = getattr(model, "checkpoint_weight_name_filter", None)
    is_elsewhere = _of_other_stages(mapping, None if of_draft else text_config.num_hidden_layers)
    return EngineRank(
        name="TokenSpeed",
        logger=_LOGGER,
        rank=attention.tp_rank,
        num_ranks=attention.tp_size,
        owns_experts=owns_experts,
        has_own_block=is_block and not is_whole and not is_rearranged(_expert_placement()),
        is_placed=(lambda name: name.endswith(_EMBEDDING) or is_by_use(name)) if is_whole else is_placed,
        is_draft=of_draft,
        device=this_device(),
        # Source: TokenSpeed's own loader skips the tensors that this method rejects.
        is_skipped=lambda name: is_elsewhere(name) or (is_used is not None and not is_used(name)),
        is_unused=speculative(text_config) if not of_draft else lambda name: False,
    )


def _has_whole_embedding(model: torch.nn.Module) -> bool:
    """Return True if each rank has the whole embedding, as in DeepSeek's class (0.1.1 `models/deepseek_v3.py`)."""
    return any(
        f".{name}.weight".endswith(_EMBEDDING) and getattr(module, "tp_size", None) == 1
        for name, module in model.named_modules()
    )


def is_draft(model_config: Any) -> bool:
    """Return True if a model is a draft model, by the names of its architectures."""
    names = getattr(model_config.hf_config, "architectures", None) or ()
    return any(part in name for name in names for part in _DRAFTS)


def _of_other_stages(mapping: Any, num_layers: int | None) -> Callable[[str], bool]:
    """Return a test for tensors of layers of another pipeline stage."""
    if mapping.pp_size == 1 or num_layers is None:
        return lambda name: False
    from tokenspeed.runtime.distributed.pp_stage import pp_layer_window

    # Source: TokenSpeed's models skip these layers by the same function.
    return of_other_layers(range(*pp_layer_window(num_layers, mapping)), num_layers)


def _expert_placement() -> Any:
    """Return TokenSpeed's own expert location table, which a process creates before it loads; None: none."""
    from tokenspeed.runtime.moe.expert_location import get_global_expert_location_metadata

    return get_global_expert_location_metadata()


def _format(load_config: Any) -> str:
    return str(getattr(load_config.load_format, "value", load_config.load_format)).lower()
