"""What a load in an engine is: weights that relayout delivers, or the engine's own loader. Both plugins ask here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from logging import Logger
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

from relayout.engines.first_start import Filling, WantedConversion, first_start, what_instead
from relayout.engines.folders import Folder, Shapes, WeightsPlace
from relayout.engines.rank_weights import Delivery, EngineOptions, RankWeights
from relayout.errors import PlanError

if TYPE_CHECKING:
    import torch

    from relayout.cache.conversions import KeptConversion, Observer
    from relayout.checkpoint.delta import Paths
    from relayout.engines.unwritten import Marks
    from relayout.loader.group.collectives import Group
    from relayout.storage.stores import Store


@dataclass(frozen=True, slots=True)
class Weights:
    """relayout delivers the weights of a converted folder, or of a checkpoint that the engine cannot read."""

    delivery: Delivery
    is_from_cache: bool = False
    """Whether they are a conversion of a checkpoint that the engine's own loader can read, too."""

    def after(self, error: Exception, engine: EngineRank, source: str) -> Stock:
        """What loads a model after an error: the engine's own loader, in the place of a conversion in a cache.

        Raises:
            the error: nothing else can load this.
        """
        if not self.is_from_cache:
            raise error
        engine.logger.warning(
            "relayout: cannot load from the cache: %s: %s loads %s itself", error, engine.name, source
        )
        return Stock(f"the cache has failed: {error}")


@dataclass(frozen=True, slots=True)
class Stock:
    """The engine's own loader loads the model, and nothing is checked after it."""

    why: str
    filling: Filling | None = None
    """A conversion into the cache, for the next start."""

    def has_loaded(self) -> None:
        """Start what waits for the end of the load."""
        if self.filling is not None:
            self.filling.start()


Load: TypeAlias = Weights | Stock


@dataclass(frozen=True, slots=True)
class Experts:
    """How an engine places experts."""

    is_owned: bool
    """Whether each is one rank's, and not cut over all."""
    is_in_blocks: bool
    """Whether a rank that owns experts has a contiguous block of them, as a conversion gives it."""
    is_elsewhere: bool
    """Whether they are not cut as a folder has them that was converted without --expert-parallel."""
    options: str
    """The engine, and the options by which it owns experts as a folder for `{num_ranks}` ranks does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRank:
    """One rank of an engine that loads a model: all that a load asks of the engine."""

    name: str
    """The engine's."""
    logger: Logger
    rank: int
    """The tensor-parallel rank."""
    num_ranks: int
    num_attention_ranks: int
    """The degree for which the engine cuts attention."""
    experts: Experts
    is_draft: bool
    """Whether the model is a draft model. It takes a few of its target's layers, and engines do not say which."""
    is_convertible: bool
    """Whether a conversion can be as this engine cuts and places tensors."""
    device: str | torch.device
    """The device that slices are best read to."""
    is_skipped: Callable[[str], bool]
    is_unused: Callable[[str], bool]
    """Tensors that the engine's own loader passes over, or is not expected to use; see `RankWeights`."""
    local_ranks: tuple[int, ...] | None = None
    """The ranks on this node, if others are elsewhere; only these are converted. None: all."""
    observe: Callable[[], Observer] | None = None
    """Returns what finds plans for models that no built-in plan is for."""
    members: Group | None = None
    """Replicas that load the same rank at the same time."""
    progress: bool = False

    def check(self, folder: Folder, path: str) -> None:
        """Tell what makes a load of a folder slower.

        Raises:
            PlanError: the folder's experts are not where the engine wants them.
        """
        experts, is_same = self.experts, folder.num_ranks == self.num_ranks
        if folder.expert_parallel and not (experts.is_in_blocks and is_same):
            options = experts.options.format(num_ranks=folder.num_ranks)
            what = f"was converted with --expert-parallel for {folder.num_ranks} ranks: run {options}"
            raise PlanError(f"{what}; or convert without --expert-parallel", path=path, code="unsupported")
        faster = f"`relayout convert SRC --tp {self.num_ranks}"
        if not is_same:
            what = "relayout: %s was converted for %d ranks and is resharded for %d; %s` makes loads faster"
            self.logger.warning(what, path, folder.num_ranks, self.num_ranks, faster)
        if experts.is_elsewhere and not folder.expert_parallel:
            what = (
                "relayout: %s has experts cut for %d ranks, but the engine places them differently: they are read from"
                " the files of all ranks; %s --expert-parallel` makes loads faster, without data parallelism"
            )
            self.logger.warning(what, path, folder.num_ranks, faster)
        if self.num_attention_ranks != self.num_ranks:
            what = "relayout: %s has attention cut for %d ranks, and %s cuts it for %d: loads are slower"
            self.logger.warning(what, path, folder.num_ranks, self.name, self.num_attention_ranks)

    def weights(
        self,
        path: str,
        folder: Folder | None,
        options: EngineOptions,
        *,
        store: Store | None = None,
        deltas: Paths | None = None,
    ) -> RankWeights:
        """The tensors at a path for this rank; arguments as of `RankWeights`. A `folder` was checked."""
        return RankWeights(
            path,
            self.rank,
            self.num_ranks,
            options,
            store=store,
            deltas=deltas,
            device=self.device,
            is_skipped=self.is_skipped,
            is_unused=self.is_unused,
            only_held=folder is None or folder.expert_parallel or not self.experts.is_owned,
            lazy=self.is_draft,
            progress=self.progress,
            members=None if folder is None or store is not None else self.members,
        )


def open_load(place: WeightsPlace, options: EngineOptions, engine: EngineRank) -> Load:
    """Decide how a model is loaded from a place. Nothing of its tensors is read yet.

    Raises:
        FormatError, PlanError, OSError: as `WeightsPlace.is_ours`; or as `EngineRank.check`, `first_start`.
    """
    if not place.is_ours:
        return Stock("it was not converted")
    if place.folder is not None:
        engine.check(place.folder, place.source)
        return Weights(engine.weights(place.source, place.folder, options).deliver())
    kept = _first_start(place, options, engine)
    if kept is not None and not isinstance(kept, Filling):
        folder = Folder(engine.num_ranks, engine.experts.is_owned)
        engine.check(folder, str(kept))
        return Weights(engine.weights(str(kept), folder, options, store=kept).deliver(), place.has_engines_loader)
    if place.has_engines_loader:
        return Stock("it is not in a cache", kept)
    return Weights(engine.weights(place.source, None, options).deliver())


def _first_start(place: WeightsPlace, options: EngineOptions, engine: EngineRank) -> KeptConversion | Filling | None:
    """Convert a model that can be converted into the cache, see `first_start`."""
    if engine.is_draft:
        instead = what_instead(place.source, engine.name)
        engine.logger.info("relayout: the draft model %s was not converted: %s", place.source, instead)
    if engine.is_draft or not engine.is_convertible:
        return None
    owned, local = engine.experts.is_owned, engine.local_ranks
    wanted = WantedConversion(place.source, engine.num_ranks, owned, local, engine.observe)
    return first_start(wanted, options, engine.name, engine.logger)


def open_update(path: str, deltas: Paths, options: EngineOptions, engine: EngineRank) -> RankWeights:
    """The weights that a live engine is to have: what deltas make of a converted folder.

    Raises:
        FormatError, PlanError, OSError: as `open_load`; or the folder was not converted.
    """
    folder = WeightsPlace(path).folder
    if folder is None:
        what = "was not converted: the weights of a live engine change from one converted folder to another"
        raise PlanError(what, path=path, code="unsupported")
    engine.check(folder, path)
    return engine.weights(path, folder, options, deltas=deltas)


@dataclass(slots=True)
class EngineModel:
    """What is known of a model of an engine, from the moment when it is made."""

    options: EngineOptions
    place: WeightsPlace | None
    """The source of the load that is about to begin; None: it has ended, and whatever loads next looks anew."""
    marks: Marks | None = None
    """Marks in memory that was not looked at yet."""
    load: Load | None = None
    """The load that has begun."""
    names: tuple[Any, ...] | None = None
    """How the engine's configuration names weights that relayout has loaded; None: it has not loaded any."""
    shapes: Shapes | None = None
    """The shapes of the weights that it has, if relayout has seen them."""


_models: WeakKeyDictionary[Any, EngineModel] = WeakKeyDictionary()
"""What is known of models, by the model, and by its configuration where an engine names no model.

Engines hand nothing on between making a model, loading it and updating it: each is another call of another loader. So
it is kept here, beside the engine's objects and not in them, for as long as they live.
"""


def remember(known: EngineModel, *keys: object) -> None:
    """Keep what is known of a model, by objects of the engine; those that cannot be keys are left out."""
    for key in keys:
        try:
            _models[key] = known
        except TypeError:  # Of a class that compares by value: nothing fails for it.
            continue


def known_of(key: object) -> EngineModel | None:
    """What is known of a model; None: nothing."""
    try:
        return _models.get(key)
    except TypeError:
        return None
