"""SGLang: a converted folder is recognized and loads with no flag; `--load-format relayout` requires it.

SGLang has no registry of load formats, but official hooks for plugins. Five are used: two where all files are found and
read, one that accepts the name of the format, and two around the creation of a model and its loading: after the load,
no memory may be left unwritten. `--model-loader-extra-config '{"relayout": {...}}'` takes the same options as vLLM's
plugin.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from relayout.checkpoint.converted import find_manifest
from relayout.checkpoint.trust import policy_of
from relayout.engines.load import (
    MODELS,
    BuiltinLoad,
    EngineModel,
    Weights,
    WeightsLocation,
    open_load,
    refuse_unverified,
    shows_progress,
    source_url,
)
from relayout.engines.rank_weights import EngineOptions, RankWeights, listed, publish
from relayout.engines.sglang_rank import FORMAT, LOGGER, cut_rank, engine_rank, is_draft, shapes_at
from relayout.engines.sglang_tables import MappedTables, is_in_file
from relayout.errors import PlanError, RelayoutError
from relayout.storage.stores import find_input

if TYPE_CHECKING:
    import torch

    _Named: TypeAlias = tuple[str, torch.Tensor]

_OF_DEFAULT_LOADER = {"auto", "safetensors", "fastsafetensors", "instanttensor", "mistral", "npcache", "pt"}
"""Formats that SGLang's default loader reads. Other loaders write memory in different ways."""


COMPUTED = {
    *("w13_blockscale_swizzled", "w2_blockscale_swizzled"),
    *("w13_weight_g_idx", "w2_weight_g_idx", "w13_g_idx_sort_indices", "w2_g_idx_sort_indices"),
}
"""Parameters of experts that SGLang replaces after the load, and that checkpoints need not have: `modelopt_quant.py`
(NVFP4) and `compressed_tensors_wNa16_moe.py` (without act-order), SGLang 0.5.23."""


class _ExtraConfig(dict[str, Any]):
    """`model_loader_extra_config` as SGLang's loaders get it. relayout's options are attributes, not items of the dict.

    SGLang passes options to loaders in this field, so a copy of the configuration keeps relayout's options, too.
    """

    options: EngineOptions = EngineOptions()
    is_explicit: bool = False
    """True if the format was `relayout`."""

    @staticmethod
    def of(config: Any) -> _ExtraConfig:
        """Return the options of a configuration; default options if `verify` was not called for it."""
        extra = config.model_loader_extra_config
        return extra if isinstance(extra, _ExtraConfig) else _ExtraConfig(extra or {})


@dataclass(frozen=True, slots=True)
class Hook:
    """A hook around a function of SGLang."""

    owner: ModuleType | type[Any]
    """The module or class that has the function."""
    name: str
    parameters: tuple[str, ...]
    """Names of the function's first parameters, as this hook expects them."""
    around: Callable[..., Any]
    """Called in place of the function, which is passed as the first argument."""


def register(hooks: Callable[[], Sequence[Hook]] | None = None) -> None:
    """Install hooks in SGLang. May be called any number of times.

    Args:
        hooks: returns the hooks of a load, in a process that loads weights. Default: `load_hooks`.
    """
    from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES, add_load_format_choices
    from sglang.srt.configs.load_config import LoadConfig

    if FORMAT not in LOAD_FORMAT_CHOICES:
        around = partial(verify, hooks or load_hooks)
        _register([Hook(LoadConfig, "_verify_load_format", ("self",), around)])
        add_load_format_choices([FORMAT])


def _register(hooks: Sequence[Hook]) -> None:
    """Register hooks with SGLang. Raise TypeError if a function has other parameters than its hook expects."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        names = list(inspect.signature(getattr(hook.owner, hook.name)).parameters)
        if tuple(names[: len(hook.parameters)]) != hook.parameters:
            expected = f"takes {names}, expected {list(hook.parameters)} first"
            raise TypeError(f"{_target(hook)} {expected}")
    for hook in hooks:
        HookRegistry.register(_target(hook), hook.around, HookType.AROUND)


def _target(hook: Hook) -> str:
    """Return the full name of a hook's function, such as `sglang.srt.model_loader.loader.get_model_loader`."""
    module = f"{hook.owner.__module__}." if isinstance(hook.owner, type) else ""
    return f"{module}{hook.owner.__name__}.{hook.name}"


def verify(hooks: Callable[[], Sequence[Hook]], original: Callable[[Any], None], config: Any) -> None:
    """Wrap `LoadConfig._verify_load_format` to remove the values that only relayout understands.

    A process that creates such a configuration is about to load weights, so the loader is hooked here; importing it in
    every process would cost seconds.

    Raises:
        PlanError: an option is unknown.
        AttributeError, TypeError: the loader of this SGLang is not as expected.
    """
    extra = _ExtraConfig.of(config)
    where = f"--model-loader-extra-config, {FORMAT!r}"
    if FORMAT in extra:
        extra.options = EngineOptions.parse(extra.pop(FORMAT), where)
    if extra.options.source is not None:
        raise PlanError(f"{where}: source: only for vLLM", code="option")
    if str(config.load_format).lower() == FORMAT:
        extra.is_explicit, config.load_format = True, "auto"
    config.model_loader_extra_config = extra
    original(config)
    try:
        _hook_loader(hooks)
    except Exception as error:
        if extra.is_explicit or policy_of(None) is not None:
            raise
        LOGGER.error("relayout: this SGLang does not recognize converted folders and would load them wrong: %r", error)


def _hook_loader(hooks: Callable[[], Sequence[Hook]]) -> None:
    from sglang.srt.model_loader import loader
    from sglang.srt.plugins.hook_registry import HookRegistry

    if not getattr(loader.DefaultModelLoader, "reads_relayout", False):
        _register(hooks())
        HookRegistry.apply_hooks()
        loader.DefaultModelLoader.reads_relayout = True


def load_hooks() -> list[Hook]:
    """Return the hooks of a start."""
    from sglang.srt.model_loader import loader

    builtin = loader.DefaultModelLoader
    hooks = [
        Hook(builtin, "_get_weights_iterator", ("self", "source"), weights_iterator),
        Hook(builtin, "_prepare_weights", ("self", "model_name_or_path"), prepare_weights),
        Hook(builtin, "load_weights_only", ("model", "weights"), load_weights),
        Hook(loader, "_initialize_model", ("model_config", "load_config"), make_model),
    ]
    if policy_of(None) is not None:
        hooks.append(Hook(loader, "get_model_loader", ("load_config",), choose_loader))
    return hooks


def choose_loader(original: Callable[..., Any], load_config: Any, model_config: Any = None) -> Any:
    """Wrap `get_model_loader` under a policy: refuse loaders that bypass relayout."""
    loader = original(load_config, model_config)
    # These two read by `_get_weights_iterator`, unless they quantize weights that transformers has read.
    is_read_here = type(loader).__name__ == "DefaultModelLoader" or (
        type(loader).__name__ == "ModelOptModelLoader" and model_config._is_already_quantized()
    )
    if not is_read_here or getattr(model_config, "modelopt_quant", None):
        load_format = getattr(load_config.load_format, "value", load_config.load_format)
        refuse_unverified(None, f"--load-format {load_format} ({type(loader).__name__}) is not loaded by relayout")
    return loader


def weights_iterator(
    original: Callable[..., Iterator[_Named]], loader: Any, source: Any, **settings: Any
) -> Iterator[_Named]:
    """Wrap `DefaultModelLoader._get_weights_iterator`: yield relayout's tensors, or SGLang's own."""
    model_load = _model_of_source(loader.load_config, source)
    return deliver(model_load, None, loader, source, partial(original, loader, source, **settings))


def _model_of_source(config: Any, source: Any) -> EngineModel:
    """Return the model that tensors are read for, with the location of its weights; a new one if none is known."""
    url, extra = source_url(str(source.model_or_path), getattr(source, "revision", None)), _ExtraConfig.of(config)
    model_load = MODELS.of(source.model_config)
    if model_load is not None and model_load.location is not None and model_load.location.source == url:
        return model_load
    return EngineModel(extra.options, WeightsLocation(url, extra.is_explicit))


def deliver(
    model_load: EngineModel,
    weights: RankWeights | None,
    loader: Any,
    source: Any,
    builtin: Callable[[], Iterator[_Named]],
) -> Iterator[_Named]:
    """Return the tensors of a load, as SGLang names them.

    Args:
        known: the model, with the place of its weights.
        weights: opened before; None: those at the place.
        loader, source: SGLang's `DefaultModelLoader`, and the source that it reads.
        stock: returns the tensors as SGLang reads them itself.
    """
    assert model_load.location is not None
    if weights is None and not model_load.location.is_ours:
        return builtin()
    engine = engine_rank(source.model_config, loader.load_config.draft_model_idx)
    engine = replace(engine, is_skipped=_or_in(engine.is_skipped, model_load.mapped), progress=shows_progress())
    opened = (
        open_load(model_load.location, model_load.options, engine)
        if weights is None
        else Weights(weights.deliver(), engine)
    )
    model_load.load = opened
    return _given(model_load, loader, source, builtin)


def _or_in(is_skipped: Callable[[str], bool], names: frozenset[str]) -> Callable[[str], bool]:
    return (lambda name: name in names or is_skipped(name)) if names else is_skipped


def _given(
    model_load: EngineModel, loader: Any, source: Any, builtin: Callable[[], Iterator[_Named]]
) -> Iterator[_Named]:
    load, draft_model_idx = model_load.load, loader.load_config.draft_model_idx
    if isinstance(load, Weights):
        try:
            if draft_model_idx is not None:
                yield from loader._filter_mtp_weights(load.delivery, source.prefix, draft_model_idx)
            else:
                yield from ((source.prefix + name, tensor) for name, tensor in load.delivery)
            publish(load.delivery.report(), LOGGER)
        except (RelayoutError, OSError) as error:
            model_load.load = load = load.after(error, str(source.model_or_path))
    if isinstance(load, BuiltinLoad):
        yield from builtin()  # After an error the model is given all tensors again, and overwrites earlier ones.
        load.has_loaded()


def prepare_weights(
    original: Callable[..., tuple[str, list[str], bool]], loader: Any, model_name_or_path: str, *args: Any, **named: Any
) -> tuple[str, list[str], bool]:
    """Wrap `DefaultModelLoader._prepare_weights`: for a folder with slices only, return the rank's files.

    SGLang uses the result only to prefetch the files into the page cache, not to load tensors.
    """
    folder = str(model_name_or_path)
    manifest = find_manifest(find_input(folder)) if Path(folder).is_dir() else None
    if manifest is None or manifest.whole is not None or manifest.num_ranks == 1:
        return original(loader, model_name_or_path, *args, **named)
    from sglang.srt.runtime_context import get_parallel

    rank, num_ranks = cut_rank(get_parallel())
    held = [manifest.ranks[rank]] if num_ranks == manifest.num_ranks else manifest.ranks
    files = sorted({number for entry in held if entry is not None for number in entry.files})
    return folder, [str(Path(folder, manifest.files[number].name)) for number in files], True


def make_model(original: Callable[..., Any], model_config: Any, load_config: Any, *settings: Any, **named: Any) -> Any:
    """Wrap `_initialize_model`: the memory of a model that relayout may load is marked.

    A draft model is not marked: it shares modules with its target after the load, and leaves others in their initial
    state.
    """
    load_format, extra = load_config.load_format, _ExtraConfig.of(load_config)
    is_default = str(getattr(load_format, "value", load_format)).lower() in _OF_DEFAULT_LOADER
    url = source_url(str(model_config.model_path), getattr(model_config, "revision", None))
    model_load = EngineModel(extra.options, WeightsLocation(url, extra.is_explicit))
    assert model_load.location is not None
    if not model_load.location.is_ours or not is_default or is_draft(model_config, load_config.draft_model_idx):
        model = original(model_config, load_config, *settings, **named)
    else:
        from relayout.engines.unwritten import Sentinels

        with Sentinels() as model_load.sentinels, _mapping_tables(model_load, model_config):
            model = original(model_config, load_config, *settings, **named)
    MODELS.remember(model_load, model, model_config)
    return model


@contextmanager
def _mapping_tables(model_load: EngineModel, model_config: Any) -> Iterator[None]:
    """Map n-gram tables that a converted folder has, if SGLang is to keep them in files."""
    location = model_load.location
    assert location is not None
    if (
        location.manifest is None
        or model_load.options.verify
        or policy_of(None) is not None
        or not is_in_file(model_config)
    ):
        yield
        return
    from sglang.srt.models import qwen4_exp
    from sglang.srt.runtime_context import get_parallel

    tables = MappedTables(location.source, *cut_rank(get_parallel()), LOGGER)
    with tables.replacing(qwen4_exp):
        yield
    model_load.mapped = frozenset(tables.names)


def load_weights(original: Callable[..., None], model: Any, weights: Any, *settings: Any, **named: Any) -> None:
    """Wrap `DefaultModelLoader.load_weights_only`: check that all marked memory of a model has been written.

    If SGLang has loaded the model itself, unwritten memory is restored to its initial values.
    """
    original(model, weights, *settings, **named)
    model_load = MODELS.of(model)
    if model_load is None:
        return
    location, load, sentinels = model_load.location, model_load.load, model_load.sentinels
    model_load.location = model_load.load = model_load.sentinels = None
    model_load.mapped = frozenset()
    if sentinels is None or location is None:
        return
    if not isinstance(load, BuiltinLoad):
        _check_written(model, location.source, load)
        model_load.shapes = shapes_at(location)
    sentinels.restore(model)


def _check_written(model: Any, path: str, load: Weights | None) -> None:
    from sglang.srt.runtime_context import get_parallel

    from relayout.engines.unwritten import check_written, unwritten

    if load is not None and get_parallel().pp_size > 1:
        is_elsewhere = load.delivery.weights.is_skipped
        if others := [name for name in unwritten(model) if is_elsewhere(name)]:
            what = f"SGLang's {type(model).__name__} makes the layers of all stages of the pipeline ({listed(others)})"
            raise PlanError(f"{what}: it has no pipeline parallelism; use --pp-size 1", path=path, code="unsupported")
    check_written(model, path, "SGLang", COMPUTED)
