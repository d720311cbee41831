"""vLLM: a converted folder is recognized and loads with no flag; `--load-format relayout` insists on it.

With that flag, the first start on a plain checkpoint converts it into a cache, if there is one.

vLLM's own weight loaders do all the cutting, fusing and padding; they are handed global tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from logging import getLogger
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from relayout.checkpoint.trust import policy_of
from relayout.engines.first_start import Filling, first_start
from relayout.engines.folders import Folder, folder_of, is_ours, loads_itself, refuse_unproven, source_url
from relayout.engines.live import Shapes, check_same_model, shapes_of
from relayout.engines.metrics import publish
from relayout.engines.rank_weights import EngineOptions, RankWeights, listed, replicas, speculative
from relayout.errors import PlanError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from relayout.conversion.cached import CachedConversion, Observer
    from relayout.engines.unwritten import Marks
    from relayout.loader.group.collectives import Group

FORMAT = "relayout"
_LOGGER = getLogger("vllm.relayout")
"""Below vLLM's own, which is set up to be seen."""
_OPTIONS = ("enable_multithread_load", "num_threads", "enable_weights_track")
"""Of vLLM's own loader, for what that loads itself; the last is for the check of what was loaded, too."""
_OF_TARGET = {"embed_tokens", "lm_head"}
"""Modules that vLLM lets draft models share with their target after the load, where their checkpoints have none."""
_loaded: WeakKeyDictionary[Any, tuple[tuple[Any, ...], Shapes | None]] = WeakKeyDictionary()
"""Models that relayout has loaded: how their configuration names the weights, and of what shapes these are."""
_NAMES = ("model", "model_weights", "revision")
"""What of a model's configuration vLLM replaces when weights are reloaded from elsewhere."""


def register(observe: Callable[[], Observer] | None = None) -> None:
    """Tell vLLM about the load format, and let its default recognize converted folders. May be called repeatedly.

    Args:
        observe: returns what finds plans for models that no built-in plan is for.

    Raises:
        ImportError, AttributeError, TypeError: this vLLM is not as expected.
        PlanError, OSError: as `policy_of`.
    """
    from vllm.model_executor import model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    formats = model_loader._LOAD_FORMAT_TO_MODEL_LOADER
    if getattr(formats.get(FORMAT), "__module__", None) != __name__:
        formats.pop(FORMAT, None)  # A vLLM that has the format calls `plugins.vllm_loader`: the same, with less.
        model_loader.register_model_loader(FORMAT)(loader_class(DefaultModelLoader, observe=observe))
        if formats.get("auto") is DefaultModelLoader:  # Else it is another plugin's.
            formats["auto"] = loader_class(DefaultModelLoader, is_asked_for=False)
    if policy_of(None) is not None:
        others = {name: loader for name, loader in formats.items() if getattr(loader, "__module__", None) != __name__}
        formats.update({name: partial(_refused, loader) for name, loader in others.items()})


def _refused(loader: type[Any], load_config: Any) -> Any:
    """In the place of a loader that reads weights in a way of its own.

    Raises:
        PlanError: there is a policy.
    """
    refuse_unproven(None, f"--load-format {load_config.load_format} is not loaded by relayout")
    return loader(load_config)


def loader_class(
    base: type[Any], *, is_asked_for: bool = True, observe: Callable[[], Observer] | None = None
) -> type[Any]:
    """The model loader, given vLLM's default one, of which it changes only where the tensors come from.

    Args:
        is_asked_for: else only what is a converted folder is loaded by it.
        observe: see `register`.

    Raises:
        TypeError: the default loader is not as expected.
    """
    needed = ("create_model", "load_weights", "get_all_weights", "_get_weights_iterator", "download_model")
    missing = [name for name in needed if not hasattr(base, name)]
    if missing:
        raise TypeError(f"{base.__module__}.{base.__name__} has no {', '.join(missing)}")
    more = {
        "__module__": __name__,
        "is_asked_for": is_asked_for,
        "observe": staticmethod(observe) if observe is not None else None,
    }
    return type("RelayoutModelLoader", (_Loading, base), more)


class _Loading:
    """What `RelayoutModelLoader` has beside the methods of vLLM's `DefaultModelLoader`, from which it inherits too."""

    load_config: Any
    is_asked_for: bool
    observe: Callable[[], Observer] | None
    _get_weights_iterator: Callable[[Any], Iterator[tuple[str, torch.Tensor]]]

    def __init__(self, load_config: Any) -> None:
        options = dict(load_config.model_loader_extra_config or {})
        known = {field.name for field in fields(EngineOptions)}
        # What neither knows is refused by the one that was asked for.
        names = set(_OPTIONS) if self.is_asked_for else options.keys() - known
        of_vllm = {name: options.pop(name) for name in list(options) if name in names}
        self._option_names = tuple(options)
        self._options = EngineOptions.parse(options, "--model-loader-extra-config")
        self._weights: RankWeights | None = None
        self._opened: RankWeights | None = None
        """That the next load takes."""
        self._is_stock = False
        """Whether vLLM loads all of the model itself."""
        self._filling: Filling | None = None
        self._marks: Marks | None = None
        """In the model that was created last."""
        # vLLM's own loader refuses options that it does not know, and may still have to load a draft model.
        super().__init__(replace(load_config, load_format="auto", model_loader_extra_config=of_vllm))  # type: ignore[call-arg]

    def _takes(self, model_config: Any) -> bool:
        """Whether a model is loaded here, and not by vLLM alone: see `is_ours`.

        Raises:
            PlanError: it is not, and has options that only relayout knows.
        """
        is_here = is_ours(self.source_of(model_config), is_asked_for=self.is_asked_for)
        if self._option_names and not is_here:
            what = f"--model-loader-extra-config: {', '.join(self._option_names)}: only for folders that relayout has"
            raise PlanError(
                f"{what} converted, or with --load-format {FORMAT}", path=_path(model_config), code="option"
            )
        return is_here

    def source_of(self, model_config: Any) -> str:
        """The folder or URL of a model's weights."""
        is_draft = model_config.runner_type == "draft"
        own = source_url(_path(model_config), getattr(model_config, "revision", None))
        return own if is_draft or self._options.source is None else self._options.source

    def download_model(self, model_config: Any) -> None:
        """Let vLLM download what is no converted folder."""
        is_here, source = self._takes(model_config), self.source_of(model_config)
        if not is_here or (loads_itself(source) and folder_of(source) is None):
            super().download_model(model_config)  # type: ignore[misc]

    def create_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        """The model, without weights, in memory that is marked."""
        if not self._takes(model_config):
            return super().create_model(vllm_config, model_config, prefix)  # type: ignore[misc]
        from relayout.engines.unwritten import Marks

        self._marks = Marks()
        with self._marks:
            return super().create_model(vllm_config, model_config, prefix)  # type: ignore[misc]

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Let the model load this rank's weights; check that all its memory was written, or is as vLLM leaves it.

        Raises:
            FormatError, PlanError, OSError, MemoryError: as `relayout.iter_load`, or the folder does not fit the model.
        """
        if not self._takes(model_config):
            super().load_weights(model, model_config)  # type: ignore[misc]
            return
        try:
            self._load(model, model_config)
        except Exception as error:
            weights = self._opened or self._weights
            if weights is None or weights.kept is None or not loads_itself(self.source_of(model_config)):
                raise
            weights.kept.has_failed(error)
            _LOGGER.warning(
                "relayout: cannot load from the cache: %s: vLLM loads %s itself", error, _path(model_config)
            )
            self._weights, self._opened, self._is_stock = None, None, True
            super().load_weights(model, model_config)  # type: ignore[misc]
        if self._marks is not None:
            self._marks.give_back(model)

    def _load(self, model: Any, model_config: Any) -> None:
        device, is_draft = _device(model), model_config.runner_type == "draft"
        with replicas(_group(device) if self._options.share and not is_draft else None) as members:
            self._opened = self.open_weights(model, model_config, members)
            self._is_stock = self._opened is None
            super().load_weights(model, model_config)  # type: ignore[misc]
            if self._weights is None:
                if self._filling is not None:
                    self._filling.start()
                return
            report = self._weights.report()
            self._check_written(model, model_config)
            named = tuple(getattr(model_config, name, None) for name in _NAMES)
            _loaded[model] = named, self._shapes(model_config)
        publish(report, _LOGGER)
        if report.unused:
            _LOGGER.warning("relayout: rank %d: vLLM did not use %s", report.rank, listed(report.unused))

    def _check_written(self, model: Any, model_config: Any) -> None:
        from relayout.engines.unwritten import check_written

        is_draft = model_config.runner_type == "draft"
        try:
            check_written(model, _path(model_config), "vLLM", _OF_TARGET if is_draft else ())
        except PlanError as error:
            if getattr(self, "enable_weights_track", None) is not False:
                raise
            _LOGGER.warning("relayout: %s", error)

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of the checkpoint, as this rank has them; also for vLLM's `reload_weights`.

        Raises:
            FormatError, PlanError, OSError, MemoryError: as `load_weights`; before anything changes, if a model that
                relayout has loaded is to be reloaded from what is not for it.
        """
        for source in getattr(model, "secondary_weights", ()):
            refuse_unproven(source.model_or_path, f"has weights of {type(model).__name__} that vLLM reads itself")
        if self._opened is None and (loaded := _loaded.get(model)) is not None:
            try:
                check_same_model(loaded[1], _path(model_config), self._shapes(model_config))
            except Exception:
                for name, value in zip(_NAMES, loaded[0], strict=True):
                    setattr(model_config, name, value)
                raise
        return self._all_weights(model_config, model)

    def _shapes(self, model_config: Any) -> Shapes | None:
        from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

        source = self.source_of(model_config)
        return shapes_of(source, get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size())

    def _all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        if self._takes(model_config) and not self._is_stock:
            self._weights, self._opened = self._opened or self.open_weights(model, model_config), None
        if self._weights is None:
            yield from super().get_all_weights(model_config, model)  # type: ignore[misc]
            return
        self.counter_before_loading_weights = time.perf_counter()  # From here vLLM counts the seconds that it logs.
        yield from self._weights
        for source in getattr(model, "secondary_weights", ()):  # Other files or folders, which vLLM reads itself.
            yield from self._get_weights_iterator(source)

    def open_weights(
        self,
        model: Any,
        model_config: Any,
        members: Group | None = None,
        update: tuple[str, tuple[str, ...]] | None = None,
    ) -> RankWeights | None:
        """The tensors of the folder, shared with other replicas if they load, too; None if vLLM is to load them.

        With `update`, the model has weights already, and these are what deltas make of a converted folder.
        """
        from vllm.config import get_current_vllm_config
        from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

        path, deltas = update or (self.source_of(model_config), None)
        is_draft = model_config.runner_type == "draft"
        # Before anything that may differ from node to node, as all ranks must take part.
        ranks = _ranks_of_node() if self.is_asked_for and not is_draft and deltas is None else None
        folder = folder_of(path)
        if folder is None and deltas is not None:
            what = "was not converted: the weights of a live engine change from one converted folder to another"
            raise PlanError(what, path=path, code="unsupported")
        if is_draft and folder is None:
            _LOGGER.info("relayout: the draft model %s was not converted: vLLM loads it itself", path)
            return None
        rank, num_ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        parallel = get_current_vllm_config().parallel_config
        is_owned = bool(parallel.enable_expert_parallel)
        kept, self._filling = (None, None) if folder else self._first_start(path, num_ranks, parallel, ranks)
        if kept is not None:
            path, folder = str(kept), Folder(num_ranks, is_owned)
        elif folder is None and loads_itself(path):
            return None
        if folder is not None:
            folder.check(
                path,
                num_ranks,
                _LOGGER,
                is_owned=is_owned or parallel.data_parallel_size > 1,
                is_in_blocks=is_owned and _owns_blocks(parallel, num_ranks),
                options=f"vLLM with --enable-expert-parallel -tp {folder.num_ranks}, and without data parallelism, EPLB"
                " or another expert placement",
            )
        config, mapper = model_config.hf_text_config, getattr(model, "hf_to_vllm_mapper", None)
        layers, others = _of_other_stages(model, config) if parallel.pipeline_parallel_size > 1 else ((), ())
        is_speculative = speculative(config)

        def mapped(name: str) -> str:
            return (mapper._map_name(name) if mapper is not None and layers + others else name) or name

        return RankWeights(
            path,
            rank,
            num_ranks,
            self._options,
            device=_device(model),
            is_skipped=lambda name: mapped(name).startswith(layers),
            is_unused=lambda name: mapped(name).startswith(others) or (not is_draft and is_speculative(name)),
            only_held=folder is None or folder.expert_parallel or not is_owned,
            # A draft model takes a few of the target's layers, and vLLM does not say which.
            lazy=is_draft,
            progress=rank == 0 and deltas is None and bool(self.load_config.use_tqdm_on_load),
            members=None if folder is None or kept is not None else members,
            kept=kept,
            deltas=deltas,
        )

    def _first_start(
        self, source: str, num_ranks: int, parallel: Any, ranks: tuple[int, ...] | None
    ) -> tuple[CachedConversion | None, Filling | None]:
        """As `first_start`, if vLLM places experts as a conversion can."""
        owned = bool(parallel.enable_expert_parallel)
        if not (_owns_blocks(parallel, num_ranks) if owned else parallel.data_parallel_size == 1):
            return None, None
        return first_start(
            source, num_ranks, self._options, "vLLM", _LOGGER, expert_parallel=owned, ranks=ranks, observe=self.observe
        )


def _path(model_config: Any) -> str:
    return str(getattr(model_config, "model_weights", "") or model_config.model)


def _owns_blocks(parallel: Any, num_ranks: int) -> bool:
    """Whether each rank owns a contiguous block of the experts."""
    num_owners = num_ranks * parallel.data_parallel_size * getattr(parallel, "prefill_context_parallel_size", 1)
    is_linear = getattr(parallel, "expert_placement_strategy", "linear") == "linear"
    return is_linear and not parallel.enable_eplb and num_owners == num_ranks


def _group(device: Any) -> ProcessGroup | None:
    """The group of the processes that have this rank in data-parallel replicas; None if there is none.

    vLLM has one for mixtures of experts only: replicas of other models know nothing of each other. With expert
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
    """The tensor-parallel ranks on this node, rising; None if all are. Every rank of the group calls it.

    Node after node is found as vLLM counts them (`_node_count` of vLLM 0.32): by who sees the memory that one shares.
    """
    try:
        from vllm.distributed.parallel_state import get_node_count, get_tp_group, in_the_same_node_as
    except ImportError:  # Of another version: each node converts all ranks.
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


def _of_other_stages(model: Any, config: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Beginnings of the names of layers, and of other modules, that other stages of the pipeline have.

    Proof: the class of the placeholder, by which vLLM's own loaders pass over layers, too. There are other
    placeholders, which a loader replaces by what it then loads.
    """
    from vllm.model_executor.models.utils import PPMissingLayer

    missing = [name for name, module in model.named_modules() if isinstance(module, PPMissingLayer)]
    layers = [name for name in missing if name.rpartition(".")[2].isdigit()]
    # Tied, the embedding may be wanted where only its module is missing.
    is_tied = getattr(config, "tie_word_embeddings", True)
    others = () if is_tied else set(missing).difference(layers)
    return tuple(f"{name}." for name in layers), tuple(f"{name}." for name in others)


def _device(model: Any) -> Any:
    """Where the parameters are: slices are best read to there."""
    return next((parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"), "cpu")
