"""SGLang: a converted folder is recognized and loads with no flag; `--load-format relayout` insists on it.

SGLang has no registry of load formats, but official hooks for plugins. Six are used: two are around the places where
all files are found and read, one lets the name of the format pass, and two are around the making of a model and its
loading: after that, no memory may be left unwritten. One is around updates: only weights of the same model are let in.
`--model-loader-extra-config '{"relayout": {...}}'` has the options, which are those of vLLM's plugin.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from relayout.checkpoint.converted import find_manifest
from relayout.checkpoint.trust import policy_of
from relayout.engines.first_start import first_start
from relayout.engines.folders import Folder, folder_of, is_ours, loads_itself, refuse_unproven, source_url
from relayout.engines.live import Shapes, check_same_model, shapes_of
from relayout.engines.metrics import publish
from relayout.engines.rank_weights import EngineOptions, RankWeights, layer_of, listed, speculative
from relayout.errors import PlanError, RelayoutError
from relayout.storage.stores import find_input

if TYPE_CHECKING:
    import torch

    from relayout.engines.unwritten import Marks

FORMAT = "relayout"
_LOGGER = getLogger("sglang.relayout")
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
_OF_DEFAULT_LOADER = {"auto", "safetensors", "fastsafetensors", "instanttensor", "mistral", "npcache", "pt"}
"""Formats of which SGLang's default loader reads all tensors: other loaders write memory in ways of their own."""


@dataclass(slots=True)
class _Start:
    """How a model was made."""

    options: EngineOptions
    path: str = ""
    """Folder or URL of its weights, if relayout may load them."""
    num_layers: int | None = None
    """Number of layers of the text model."""
    marks: Marks | None = None
    """Marks in memory that was not looked at yet."""
    shapes: Shapes | None = None
    """Shapes of the weights that it has now, if relayout has seen them."""


_starts: WeakKeyDictionary[Any, _Start] = WeakKeyDictionary()
"""How each model of this process was made."""
_updating: ContextVar[EngineOptions | None] = ContextVar("relayout_updating", default=None)
"""While a model's weights are updated: the options that it was started with."""
_stock: set[str] = set()
"""Folders that SGLang has loaded itself."""


def register() -> None:
    """Hook into SGLang. May be called any number of times.

    Raises:
        ImportError, AttributeError, TypeError: this SGLang is not as expected. It would only log hooks that fail.
    """
    from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES, add_load_format_choices
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if FORMAT not in LOAD_FORMAT_CHOICES:
        _expect(LoadConfig, "_verify_load_format", ["self"])
        HookRegistry.register(f"{LoadConfig.__module__}.LoadConfig._verify_load_format", verify, HookType.AROUND)
        add_load_format_choices([FORMAT])


def verify(original: Callable[[Any], None], config: Any) -> None:
    """Around `LoadConfig._verify_load_format`: take out what only relayout understands.

    A process that makes such a configuration is about to load weights, so the loader is hooked here: to import it in
    every process would cost seconds.

    Raises:
        PlanError: an option is unknown.
        AttributeError, TypeError: the loader of this SGLang is not as expected.
    """
    extra = config.model_loader_extra_config
    options = extra.get(FORMAT, {}) if isinstance(extra, dict) else {}
    where = f"--model-loader-extra-config, {FORMAT!r}"
    # An update is told a format, and no options.
    config.relayout_options = _updating.get() or EngineOptions.parse(options, where)
    if config.relayout_options.source is not None:
        raise PlanError(f"{where}: source: only for vLLM", code="option")
    config.relayout_required = str(config.load_format).lower() == FORMAT
    if isinstance(extra, dict):
        config.model_loader_extra_config = {name: value for name, value in extra.items() if name != FORMAT}
    if config.relayout_required:
        config.load_format = "auto"
    original(config)
    try:
        _hook_loader()
    except Exception as error:
        if config.relayout_required or policy_of(None) is not None:
            raise
        _LOGGER.error("relayout: this SGLang does not recognize converted folders and would load them wrong: %r", error)


def _hook_loader() -> None:
    from sglang.srt.model_loader import loader
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    DefaultModelLoader = loader.DefaultModelLoader
    if not getattr(DefaultModelLoader, "reads_relayout", False):
        _expect(DefaultModelLoader, "_get_weights_iterator", ["self", "source"])
        _expect(DefaultModelLoader, "_prepare_weights", ["self", "model_name_or_path"])
        _expect(DefaultModelLoader, "load_weights_only", ["model", "weights"])
        _expect(loader, "_initialize_model", ["model_config", "load_config"])
        target = f"{DefaultModelLoader.__module__}.DefaultModelLoader"
        HookRegistry.register(f"{target}._get_weights_iterator", weights_iterator, HookType.AROUND)
        HookRegistry.register(f"{target}._prepare_weights", prepare_weights, HookType.AROUND)
        HookRegistry.register(f"{target}.load_weights_only", load_weights, HookType.AROUND)
        HookRegistry.register(f"{loader.__name__}._initialize_model", make_model, HookType.AROUND)
        with suppress(ImportError):  # Another version has it elsewhere.
            updater = import_module(_UPDATER)
            _expect(updater.WeightUpdater, "update_weights_from_disk", ["self", "model_path", "load_format"])
            HookRegistry.register(f"{_UPDATER}.WeightUpdater.update_weights_from_disk", update_weights, HookType.AROUND)
        if policy_of(None) is not None:
            _expect(loader, "get_model_loader", ["load_config"])
            HookRegistry.register(f"{loader.__name__}.get_model_loader", choose_loader, HookType.AROUND)
        HookRegistry.apply_hooks()
        DefaultModelLoader.reads_relayout = True


def choose_loader(original: Callable[..., Any], load_config: Any, model_config: Any = None) -> Any:
    """Around `get_model_loader`, under a policy: loaders that read weights in a way of their own are refused.

    Raises:
        PlanError: this one does.
    """
    loader = original(load_config, model_config)
    # These two read by `_get_weights_iterator`, if they do not quantize what transformers has read.
    is_read_here = type(loader).__name__ == "DefaultModelLoader" or (
        type(loader).__name__ == "ModelOptModelLoader" and model_config._is_already_quantized()
    )
    if not is_read_here or getattr(model_config, "modelopt_quant", None):
        load_format = getattr(load_config.load_format, "value", load_config.load_format)
        refuse_unproven(None, f"--load-format {load_format} ({type(loader).__name__}) is not loaded by relayout")
    return loader


def weights_iterator(
    original: Callable[..., Iterator[tuple[str, torch.Tensor]]], loader: Any, source: Any, **settings: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """Around `DefaultModelLoader._get_weights_iterator`: (name, tensor) of a converted folder; others are SGLang's.

    Raises:
        FormatError, PlanError, OSError, MemoryError: as `relayout.iter_load`, or the folder does not fit.
    """
    config, path = loader.load_config, str(source.model_or_path)
    if not _takes(config, path, getattr(source, "revision", None)):
        return original(loader, source, **settings)
    if config.draft_model_idx is not None and loads_itself(path) and folder_of(path) is None:
        return original(loader, source, **settings)
    options = getattr(config, "relayout_options", None) or EngineOptions()

    def stock() -> Iterator[tuple[str, torch.Tensor]]:
        return ((name.removeprefix(source.prefix), tensor) for name, tensor in original(loader, source, **settings))

    weights = _weights(path, options, config, source, stock)
    if config.draft_model_idx is not None:
        renamed: Iterator[tuple[str, torch.Tensor]] = loader._filter_mtp_weights(
            weights, source.prefix, config.draft_model_idx
        )
        return renamed
    return ((source.prefix + name, tensor) for name, tensor in weights)


def _takes(config: Any, path: str, revision: str | None = None) -> bool:
    """Whether what is there is loaded by relayout: see `is_ours`."""
    return is_ours(source_url(path, revision), is_asked_for=getattr(config, "relayout_required", False))


def prepare_weights(
    original: Callable[..., tuple[str, list[str], bool]], loader: Any, model_name_or_path: str, *args: Any, **named: Any
) -> tuple[str, list[str], bool]:
    """Around `DefaultModelLoader._prepare_weights`: of a folder with slices only, the files that the rank reads.

    SGLang asks for them to have them in the page cache early, and not to read them.
    """
    folder = str(model_name_or_path)
    manifest = find_manifest(find_input(folder)) if Path(folder).is_dir() else None
    if manifest is None or manifest.whole is not None or manifest.num_ranks == 1:
        return original(loader, model_name_or_path, *args, **named)
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    is_own = parallel.tp_size == manifest.num_ranks
    held = [manifest.ranks[parallel.tp_rank]] if is_own else manifest.ranks
    files = sorted({number for entry in held if entry is not None for number in entry.files})
    return folder, [str(Path(folder, manifest.files[number].name)) for number in files], True


def make_model(original: Callable[..., Any], model_config: Any, load_config: Any, *settings: Any, **named: Any) -> Any:
    """Around `_initialize_model`: the memory of a model that relayout may load is marked.

    That of a draft model is not: it shares modules with its target after the load, and keeps others as they were made.
    """
    path, load_format = str(model_config.model_path), load_config.load_format
    is_default = str(getattr(load_format, "value", load_format)).lower() in _OF_DEFAULT_LOADER
    start = _Start(getattr(load_config, "relayout_options", None) or EngineOptions())
    if not _takes(load_config, path) or not is_default or _is_draft(load_config, model_config):
        model = original(model_config, load_config, *settings, **named)
    else:
        from relayout.engines.unwritten import Marks

        with Marks() as start.marks:
            model = original(model_config, load_config, *settings, **named)
        start.path = path
        start.num_layers = getattr(getattr(model_config, "hf_text_config", None), "num_hidden_layers", None)
    _starts[model] = start
    return model


def load_weights(original: Callable[..., None], model: Any, weights: Any, *settings: Any, **named: Any) -> None:
    """Around `DefaultModelLoader.load_weights_only`: all memory of a model that was marked has been written.

    What SGLang has loaded itself may have left some as it was made: there it has its values again.

    Raises:
        PlanError: some was not.
    """
    start = _starts.get(model)
    original(model, weights, *settings, **named)
    if start is None or start.marks is None:
        return
    marks, start.marks = start.marks, None
    if start.path not in _stock:
        _check_written(model, start)
        start.shapes = _shapes(start.path)
    marks.give_back(model)


def _check_written(model: Any, start: _Start) -> None:
    from sglang.srt.runtime_context import get_parallel

    from relayout.engines.unwritten import check_written, unwritten

    parallel = get_parallel()
    is_elsewhere = _of_other_stages(parallel, start.num_layers)
    if parallel.pp_size > 1 and (others := [name for name in unwritten(model) if is_elsewhere(name)]):
        what = f"SGLang's {type(model).__name__} makes the layers of all stages of the pipeline ({listed(others)})"
        raise PlanError(f"{what}: it has no pipeline parallelism; use --pp-size 1", path=start.path, code="unsupported")
    check_written(model, start.path, "SGLang")


def update_weights(
    original: Callable[..., tuple[bool, str]], updater: Any, model_path: str, load_format: str, *args: Any, **named: Any
) -> tuple[bool, str]:
    """Around `WeightUpdater.update_weights_from_disk`: weights that are not for the model change nothing.

    Those that SGLang reads itself, for a model that it has loaded itself, are its own.
    """
    model, config = updater.get_model(), updater.model_config
    had, start = str(config.model_path), _starts.get(model) or _Start(EngineOptions())
    token = _updating.set(start.options)
    is_changing = False
    try:
        shapes = None
        is_known = start.shapes is not None or str(load_format).lower() == FORMAT
        if is_ours(source_url(model_path, None), is_asked_for=is_known):
            shapes = _shapes(model_path)
            check_same_model(start.shapes or _shapes(had), model_path, shapes)
        is_changing = True
        done, answer = original(updater, model_path, load_format, *args, **named)
        if done:
            start.shapes = shapes
        else:
            config.model_path = had
        return done, answer
    except (RelayoutError, OSError) as error:
        config.model_path = had
        state = "its weights are a mixture now: update them again, or start it again" if is_changing else "keeps them"
        _LOGGER.error("relayout: not updated from %s, SGLang %s: %s", model_path, state, error)
        return False, f"relayout: weights were not updated, SGLang: {state}: {error}"
    finally:
        _updating.reset(token)


def _shapes(path: str) -> Shapes | None:
    from sglang.srt.runtime_context import get_parallel

    return shapes_of(source_url(path, None), get_parallel().tp_rank, get_parallel().tp_size)


def _is_draft(config: Any, model_config: Any) -> bool:
    return config.draft_model_idx is not None or bool(getattr(model_config, "is_draft_model", False))


def _weights(
    path: str, options: EngineOptions, config: Any, source: Any, stock: Callable[[], Iterator[tuple[str, torch.Tensor]]]
) -> Iterator[tuple[str, torch.Tensor]]:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    num_ranks, model_config = parallel.tp_size, source.model_config
    url = source_url(path, getattr(source, "revision", None))
    folder, kept, filling = folder_of(url), None, None
    is_draft = _is_draft(config, model_config)
    if folder is None:
        owned = parallel.moe_ep_size > 1
        is_cached = not is_draft and parallel.attn_tp_size == num_ranks and parallel.moe_ep_size in (1, num_ranks)
        if is_cached:
            kept, filling = first_start(url, num_ranks, options, "SGLang", _LOGGER, expert_parallel=owned)
        if kept is not None:
            url, folder = str(kept), Folder(num_ranks, owned)
        elif loads_itself(url):
            _stock.add(path)
            yield from stock()
            if filling is not None:
                filling.start()
            return
    _stock.discard(path)
    if folder is not None:
        folder.check(
            url,
            num_ranks,
            _LOGGER,
            is_owned=parallel.moe_ep_size > 1,
            is_in_blocks=parallel.moe_ep_size == num_ranks,
            options=f"SGLang with --tp {folder.num_ranks} --ep-size {folder.num_ranks}",
        )
        if parallel.attn_tp_size != num_ranks:
            what = "relayout: %s has attention cut for %d ranks, and SGLang cuts it for %d: loads are slower"
            _LOGGER.warning(what, url, folder.num_ranks, parallel.attn_tp_size)
    text_config = getattr(model_config, "hf_text_config", None)
    num_layers = None if is_draft else getattr(text_config, "num_hidden_layers", None)
    weights = RankWeights(
        url,
        parallel.tp_rank,
        num_ranks,
        options,
        device=_device(),
        is_skipped=_of_other_stages(parallel, num_layers),
        is_unused=speculative(text_config) if num_layers is not None else lambda name: False,
        only_held=folder is None or parallel.moe_ep_size == 1 or folder.expert_parallel,
        # A draft model takes a few of the target's layers, and SGLang does not say which.
        lazy=is_draft,
        kept=kept,
    )
    try:
        yield from weights
    except (RelayoutError, OSError) as error:
        if kept is None or not loads_itself(path):
            raise
        kept.has_failed(error)
        # The model is given all tensors anew, and writes over what it has.
        _LOGGER.warning("relayout: cannot load from the cache: %s: SGLang loads %s itself", error, path)
        _stock.add(path)
        yield from stock()
        return
    publish(weights.report(), _LOGGER)


def _of_other_stages(parallel: Any, num_layers: int | None) -> Callable[[str], bool]:
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
    """Where slices are best read to: this process's GPU, if it has one."""
    import torch

    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"


def _expect(owner: Any, name: str, parameters: list[str]) -> None:
    """Check that a hook's target takes these parameters first.

    Raises:
        AttributeError: there is no such target.
        TypeError: it takes others.
    """
    names = list(inspect.signature(getattr(owner, name)).parameters)
    if names[: len(parameters)] != parameters:
        raise TypeError(f"{owner.__module__}.{owner.__name__}.{name} takes {names}, expected {parameters} first")
