"""vLLM: a converted folder is recognized and loads with no flag; `--load-format relayout` requires it.

With that flag, the first start on a plain checkpoint converts it into a cache, if one is configured.

vLLM's own weight loaders do all the cutting, fusing and padding; they receive global tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain
from logging import getLogger
from typing import TYPE_CHECKING, Any

from relayout.checkpoint.trust import policy_of
from relayout.engines.load import (
    MODELS,
    BuiltinLoad,
    EngineModel,
    EngineRank,
    Load,
    Weights,
    WeightsLocation,
    check_same_model,
    open_load,
    refuse_unverified,
    shows_progress,
    source_url,
)
from relayout.engines.placing import is_expert, is_shared_expert
from relayout.engines.rank_weights import Delivery, EngineOptions, listed, publish, replicas, speculative
from relayout.errors import PlanError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from relayout.loader.group.collectives import Group

FORMAT = "relayout"
_LOGGER = getLogger("vllm.relayout")
"""A child of vLLM's own logger, which is configured to be visible."""
_OPTIONS = ("enable_multithread_load", "num_threads", "enable_weights_track")
"""Options of vLLM's own loader, for loads by it; the last one also controls the check of unwritten memory."""
_OF_TARGET = {"embed_tokens", "lm_head"}
"""Modules that vLLM lets draft models share with their target after the load, if their checkpoints have none."""
_PADDED = {"input_mix_weight_down_block_inject"}
"""Modules with rows of padding that no loader writes (vLLM 0.33 `models/qwen4_exp/nvidia/hyperconnection.py`)."""
_NAMES = ("model", "model_weights", "revision")
"""The fields of a model's configuration that vLLM replaces when weights are reloaded from elsewhere."""


def register(methods: type[VllmLoader] | None = None) -> None:
    """Register the load format, and let vLLM's default recognize converted folders. May be called repeatedly.

    Args:
        methods: see `loader_class`.
    """
    from vllm.model_executor import model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    formats = model_loader._LOAD_FORMAT_TO_MODEL_LOADER
    if getattr(formats.get(FORMAT), "__module__", None) != __name__:
        formats.pop(FORMAT, None)  # A vLLM that has the format calls `plugins.vllm_loader`: the same, with less.
        model_loader.register_model_loader(FORMAT)(loader_class(DefaultModelLoader, methods=methods))
        if formats.get("auto") is DefaultModelLoader:  # Otherwise it is another plugin's.
            formats["auto"] = loader_class(DefaultModelLoader, is_explicit=False, methods=methods)
    if policy_of(None) is not None:
        others = {name: loader for name, loader in formats.items() if getattr(loader, "__module__", None) != __name__}
        formats.update({name: partial(_refused, loader) for name, loader in others.items()})


def _refused(loader: type[Any], load_config: Any) -> Any:
    """Create a loader that bypasses relayout. Raise PlanError if there is a policy."""
    refuse_unverified(None, f"--load-format {load_config.load_format} is not loaded by relayout")
    return loader(load_config)


def loader_class(
    builtin: type[Any],
    *,
    is_explicit: bool = True,
    methods: type[VllmLoader] | None = None,
) -> type[Any]:
    """Return the model loader: vLLM's default one, except for the source of the tensors.

    Args:
        is_explicit: False: only converted folders are loaded by it.
        methods: a subclass of `VllmLoader`, such as the one for live models that change. None: `VllmLoader`.
    """
    needed = ("create_model", "load_weights", "get_all_weights", "_get_weights_iterator", "download_model", "register")
    missing = [name for name in needed if not hasattr(builtin, name)]
    if missing:
        raise TypeError(f"{builtin.__module__}.{builtin.__name__} has no {', '.join(missing)}")
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    setup = _Setup(builtin, BaseModelLoader, is_explicit)
    # vLLM takes only loaders that are derived from its base, which calls the methods of this one.
    bases = (methods or VllmLoader, BaseModelLoader)
    loader = type("RelayoutModelLoader", bases, {"__module__": __name__, "setup": setup})
    # Workers of trainers (prime-rl) check that it is vLLM's default loader before they call `_get_weights_iterator`.
    builtin.register(loader)
    return loader


@dataclass(frozen=True, slots=True)
class _Setup:
    """Settings that all loaders of a class share."""

    builtin: type[Any]
    """vLLM's `DefaultModelLoader`."""
    base: type[Any]
    """vLLM's `BaseModelLoader`."""
    is_explicit: bool


class VllmLoader:
    """The methods of `RelayoutModelLoader`. It holds vLLM's own loader, which does all but finding the tensors."""

    setup: _Setup
    load_config: Any

    def __init__(self, load_config: Any) -> None:
        options = dict(load_config.model_loader_extra_config or {})
        known = {field.name for field in fields(EngineOptions)}
        # An option unknown to both loaders is rejected by the one the user selected.
        names = set(_OPTIONS) if self.setup.is_explicit else options.keys() - known
        of_vllm = {name: options.pop(name) for name in list(options) if name in names}
        self._option_names = tuple(options)
        self._options = EngineOptions.parse(options, "--model-loader-extra-config")
        if self._options.live:
            what = 'live: only for SGLang; for vLLM it is --weight-transfer-config \'{"backend": "relayout"}\''
            raise PlanError(f"--model-loader-extra-config: {what}", code="option")
        # vLLM's own loader rejects unknown options, and may still have to load a draft model.
        own_config = replace(load_config, load_format="auto", model_loader_extra_config=of_vllm)
        self.setup.base.__init__(self, own_config)
        self._stock = self._make_builtin()
        self.load: Load | None = None
        """The most recent load."""

    def _make_builtin(self) -> Any:
        return self.setup.builtin(self.load_config)

    def source_of(self, model_config: Any) -> str:
        """Return the folder or URL of a model's weights."""
        own = source_url(_path(model_config), getattr(model_config, "revision", None))
        return own if _is_draft(model_config) or self._options.source is None else self._options.source

    def _location(self, model_config: Any) -> WeightsLocation:
        """Return the location of a model's weights."""
        location = WeightsLocation(self.source_of(model_config), self.setup.is_explicit)
        if self._option_names and not location.is_ours:
            what = f"--model-loader-extra-config: {', '.join(self._option_names)}: only for folders that relayout has"
            raise PlanError(
                f"{what} converted, or with --load-format {FORMAT}", path=_path(model_config), code="option"
            )
        return location

    def download_model(self, model_config: Any) -> None:
        """Delegate to vLLM's downloader unless the model is a converted folder."""
        location = self._location(model_config)
        if not location.is_ours or (location.has_engines_loader and location.manifest is None):
            self._stock.download_model(model_config)

    def create_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        """Return the model, without weights; if relayout loads it, in marked memory."""
        location = self._location(model_config)
        if not location.is_ours:
            return self._stock.create_model(vllm_config, model_config, prefix)
        from relayout.engines.unwritten import Sentinels

        with Sentinels() as sentinels:
            model = self._stock.create_model(vllm_config, model_config, prefix)
        MODELS.remember(EngineModel(self._options, location, sentinels), model)
        return model

    def load_model(self, *arguments: Any, **options: Any) -> Any:
        """Create the model, load it and prepare it for kernels, as vLLM does."""
        return self.setup.base.load_model(self, *arguments, **options)

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Load this rank's weights into the model; check that all its memory was written, unless vLLM leaves it so."""
        known = MODELS.of(model)
        if known is None or known.location is None or known.location.source != self.source_of(model_config):
            known = EngineModel(self._options, self._location(model_config))
        location, known.location = known.location, None
        assert location is not None
        if not location.is_ours:
            self._stock.load_weights(model, model_config)
            return
        group = _group(_device(model)) if self._options.share and not _is_draft(model_config) else None
        with replicas(group) as members:
            engine = self._engine_rank(model, model_config, members)
            self.load = open_load(location, self._options, engine)
            if isinstance(self.load, Weights):
                try:
                    self._take(self.load, self._given(self.load, location, model), model, model_config)
                    known.names = tuple(getattr(model_config, name, None) for name in _NAMES)
                    known.shapes = location.shapes(engine.rank, engine.num_ranks)
                    MODELS.remember(known, model)
                except Exception as error:
                    self.load = self.load.after(error, _path(model_config))
            if isinstance(self.load, BuiltinLoad):
                self._stock.load_weights(model, model_config)
                self.load.has_loaded()
        if known.sentinels is not None:
            known.sentinels.restore(model)

    def _given(self, weights: Weights, location: WeightsLocation, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the tensors of a first load, in the form that vLLM receives."""
        return self._tensors(weights.delivery, model)

    def _take(
        self, weights: Weights, tensors: Iterator[tuple[str, torch.Tensor]], model: Any, model_config: Any
    ) -> None:
        """Let vLLM's own loader load tensors: it takes the result of `get_all_weights`, and checks names."""
        loader = self._make_builtin()
        loader.get_all_weights = lambda *_: tensors
        loader.counter_before_loading_weights = time.perf_counter()  # vLLM logs the seconds since then.
        loader.load_weights(model, model_config)
        report = weights.delivery.report()
        self._check_written(model, model_config)
        publish(report, _LOGGER)
        if report.unused:
            _LOGGER.warning("relayout: rank %d: vLLM did not use %s", report.rank, listed(report.unused))

    def _check_written(self, model: Any, model_config: Any) -> None:
        from relayout.engines.unwritten import check_written

        try:
            exempt = _PADDED | _padded_experts(model) | (_OF_TARGET if _is_draft(model_config) else set())
            check_written(model, _path(model_config), "vLLM", exempt)
        except PlanError as error:
            if self.load_config.model_loader_extra_config.get("enable_weights_track") is not False:
                raise
            _LOGGER.warning("relayout: %s", error)

    def get_all_weights(self, model_config: Any, model: Any) -> Iterable[tuple[str, torch.Tensor]]:
        """Return this rank's (name, tensor) pairs of the checkpoint, for vLLM's `reload_weights`."""
        location, known = self._location(model_config), MODELS.of(model)
        names = None if known is None else known.names
        if names is None and not location.is_ours:
            self.load = BuiltinLoad("it was not converted")
            return self._builtin_weights(model_config, model)
        engine = self._engine_rank(model, model_config)
        if known is not None and names is not None:
            try:
                check_same_model(known.shapes, _path(model_config), location.shapes(engine.rank, engine.num_ranks))
            except Exception:
                for name, value in zip(_NAMES, names, strict=True):
                    setattr(model_config, name, value)
                raise
        self.load = open_load(location, self._options, engine)
        if isinstance(self.load, Weights):
            weights = replace(self.load.delivery.weights, small_first=True)
            self.load = replace(self.load, delivery=weights.deliver())
            return self._tensors(self.load.delivery, model)
        return self._builtin_weights(model_config, model)

    def _builtin_weights(self, model_config: Any, model: Any) -> Iterable[tuple[str, torch.Tensor]]:
        weights: Iterable[tuple[str, torch.Tensor]] = self._stock.get_all_weights(model_config, model)
        return weights

    def _tensors(self, delivery: Delivery, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Chain the delivered tensors and the files or folders that the model class names for vLLM to read itself."""
        beside = getattr(model, "secondary_weights", ())
        for source in beside:
            refuse_unverified(source.model_or_path, f"has weights of {type(model).__name__} that vLLM reads itself")
        return chain(delivery, chain.from_iterable(map(self._stock._get_weights_iterator, beside)))

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of a source, for programs that call vLLM's default loader; all tensors are whole.

        The target model is unknown here, so the tensors are whole: otherwise code that cuts them would cut them twice.
        """
        path = "/".join(filter(None, (str(source.model_or_path), getattr(source, "subfolder", None))))
        location = WeightsLocation(source_url(path, getattr(source, "revision", None)), is_explicit=False)
        if not location.is_ours:
            yield from self._stock._get_weights_iterator(source)
            return
        from relayout.loader.view import safe_open

        with safe_open(location.source) as folder:
            for name in folder.keys():  # noqa: SIM118 (it is no mapping)
                yield source.prefix + name, folder.get_tensor(name)

    def _engine_rank(self, model: Any, model_config: Any, members: Group | None = None) -> EngineRank:
        """Return the properties of this process that a load depends on."""
        from vllm.config import get_current_vllm_config
        from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

        is_draft = _is_draft(model_config)
        # Before any step that may differ between nodes, as all ranks must take part.
        local_ranks = _ranks_of_node() if self.setup.is_explicit and not is_draft else None
        rank, num_ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        parallel = get_current_vllm_config().parallel_config
        has_own_block, is_placed = _experts(parallel, num_ranks)
        is_skipped, is_elsewhere = _of_other_stages(model, model_config, parallel)
        is_speculative = speculative(model_config.hf_text_config)
        return EngineRank(
            name="vLLM",
            logger=_LOGGER,
            rank=rank,
            num_ranks=num_ranks,
            owns_experts=bool(parallel.enable_expert_parallel),
            has_own_block=has_own_block,
            is_placed=is_placed,
            is_draft=is_draft,
            device=_device(model),
            is_skipped=is_skipped,
            is_unused=lambda name: is_elsewhere(name) or (not is_draft and is_speculative(name)),
            local_ranks=local_ranks if is_placed is None or has_own_block else None,
            observe="vllm",
            members=members,
            progress=bool(self.load_config.use_tqdm_on_load) and shows_progress(),
        )


def _path(model_config: Any) -> str:
    return str(getattr(model_config, "model_weights", "") or model_config.model)


def _padded_experts(model: torch.nn.Module) -> set[str]:
    """Return the names of expert parameters that a class makes wider than in the checkpoint (vLLM 0.33 Kimi K3).

    No loader writes their padding, and kernels skip it.
    """
    found = set()
    for module, layer in model.named_modules():
        config = getattr(layer, "moe_config", None)
        width = getattr(config, "intermediate_size_per_partition", None)
        if getattr(config, "intermediate_size_per_partition_unpadded", width) != width:
            found |= {f"{module}.{name}" for name, _ in layer.named_parameters()}
    return found


def _is_draft(model_config: Any) -> bool:
    return bool(model_config.runner_type == "draft")


def _experts(parallel: Any, num_ranks: int) -> tuple[bool, Callable[[str], bool] | None]:
    """Return True if a rank has a conversion's block of experts, and a test for tensors that vLLM places itself."""
    if not parallel.enable_expert_parallel:
        return False, None
    num_owners = num_ranks * parallel.data_parallel_size * getattr(parallel, "prefill_context_parallel_size", 1)
    is_linear = getattr(parallel, "expert_placement_strategy", "linear") == "linear"
    has_own_block = is_linear and not parallel.enable_eplb and num_owners == num_ranks
    if getattr(parallel, "use_sequence_parallel_moe", False):  # A process has a part of the tokens: it needs all of it.
        return has_own_block, lambda name: is_expert(name) or is_shared_expert(name)
    return has_own_block, is_expert


def _group(device: Any) -> ProcessGroup | None:
    """Return the group of the processes that have this rank in data-parallel replicas; None if there is none.

    vLLM has such a group for mixtures of experts only: replicas of other models are not connected. With expert
    parallelism the tensors of replicas differ.
    """
    from vllm.config import get_current_vllm_config

    parallel = get_current_vllm_config().parallel_config
    if parallel.data_parallel_size == 1 or parallel.enable_expert_parallel:
        return None
    from vllm.distributed.parallel_state import get_dp_group

    replicas_group = get_dp_group()
    group: ProcessGroup = replicas_group.cpu_group if device == "cpu" else replicas_group.device_group
    return group


def _ranks_of_node() -> tuple[int, ...] | None:
    """Return the tensor-parallel ranks on this node, ascending; None if all are. Every rank of the group calls it.

    Nodes are detected one by one as in vLLM (`_node_count` of vLLM 0.32): one rank shares memory, and the ranks that
    can open it are on its node.
    """
    try:
        from vllm.distributed.parallel_state import get_node_count, get_tp_group, in_the_same_node_as
    except ImportError:  # Another version: each node converts all ranks.
        return None
    if get_node_count() == 1:
        return None
    group = get_tp_group()
    left: list[int] = list(range(group.world_size))
    mine: tuple[int, ...] = (group.rank_in_group,)
    while left:
        first, *others = left
        is_there = in_the_same_node_as(group.cpu_group, first)
        node = (first, *(rank for rank in others if is_there[rank]))
        mine = node if group.rank_in_group in node else mine
        left = [rank for rank in others if not is_there[rank]]
    return None if len(mine) == group.world_size else mine


def _of_other_stages(
    model: Any, model_config: Any, parallel: Any
) -> tuple[Callable[[str], bool], Callable[[str], bool]]:
    """Return two tests for tensors of another pipeline stage: of its layers, and of its other modules.

    Modules of other stages are recognized by the class of their placeholder, as in vLLM's own loaders. Placeholders of
    other classes do not count: a loader replaces them by modules that it then loads.
    """
    if parallel.pipeline_parallel_size == 1:
        return lambda name: False, lambda name: False
    from vllm.model_executor.models.utils import PPMissingLayer

    missing = [name for name, module in model.named_modules() if isinstance(module, PPMissingLayer)]
    layers = tuple(f"{name}." for name in missing if name.rpartition(".")[2].isdigit())
    # A tied embedding may be needed where only its module is missing.
    is_tied = getattr(model_config.hf_text_config, "tie_word_embeddings", True)
    others = () if is_tied else tuple({f"{name}." for name in missing}.difference(layers))
    mapper = getattr(model, "hf_to_vllm_mapper", None)

    def begins(name: str, prefixes: tuple[str, ...]) -> bool:
        mapped = mapper._map_name(name) if mapper is not None and prefixes else name
        return (mapped or name).startswith(prefixes)

    return partial(begins, prefixes=layers), partial(begins, prefixes=others)


def _device(model: Any) -> Any:
    """Return the device of the parameters, which slices are read to."""
    return next((parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"), "cpu")
