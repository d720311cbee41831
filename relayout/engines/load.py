"""How an engine's model is loaded: the location of its weights, and the loader: relayout or the engine's own.

Shared by the plugins of all engines.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from logging import Logger
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

from relayout.checkpoint.converted import check_lengths, check_present, find_manifest, read_record
from relayout.checkpoint.folder import explain_missing, refuse_incomplete
from relayout.checkpoint.trust import TrustedStore, policy_of, trusted
from relayout.engines.first_start import ConversionRequest, DeferredConversion, first_start
from relayout.engines.rank_weights import Delivery, EngineOptions, RankWeights
from relayout.errors import PlanError
from relayout.format.index import rank_file_name
from relayout.storage.stores import Kind, Store, find_input, scheme_of

if TYPE_CHECKING:
    import torch

    from relayout.cache.conversions import CachedConversion
    from relayout.checkpoint.delta import Paths
    from relayout.engines.unwritten import Sentinels
    from relayout.format.index import Manifest
    from relayout.loader.group.collectives import Group

Shapes: TypeAlias = dict[str, tuple[int, ...]]
"""The shape of each whole tensor of a model, by its name."""
Entry = TypeVar("Entry")

_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w.-]+", re.ASCII)
_OF_ANOTHER_RANK = rank_file_name(1, 0)
"""A file that only folders converted for several ranks have."""


@dataclass(frozen=True)
class WeightsLocation:
    """The location of an engine's weights. It is inspected once, on first use, and verified if there is a policy.

    Each load creates a place, and passes it to all functions that decide about the load.
    """

    source: str
    """A folder or URL; see `source_url`."""
    is_explicit: bool = True
    """True if the user has selected relayout as the engine's loader."""

    @cached_property
    def is_ours(self) -> bool:
        """True if relayout loads this: the user selected relayout, or this is a converted folder.

        Under a policy the engine's own loader never takes over.

        Raises:
            FormatError, PlanError, OSError: as `find_folder`, `check_policy`.
        """
        if policy_of(None) is None:
            return self.is_explicit or (Path(self.source).is_dir() and self.manifest is not None)
        self.check_policy()
        return True

    def check_policy(self) -> None:
        """Check that the weights are signed as the policy (RELAYOUT_TRUST) requires, if there is one.

        Raises:
            FormatError, PlanError, OSError: they are not; or the policy cannot be read.
        """
        if policy_of(None) is not None:
            if scheme_of(self.source) == "hf":
                refuse_unverified(self.source, "is on the hub, where the engine finds it by itself")
            assert self.manifest is not None  # Only a converted folder can be signed.

    @property
    def manifest(self) -> Manifest | None:
        """The manifest; None: not converted, or a repository id, which the engine looks up on the hub."""
        return None if scheme_of(self.source) == "hf" else self._content.manifest

    @property
    def has_engines_loader(self) -> bool:
        """True if engines read a plain checkpoint here by their own loaders: a local folder, or one on the hub."""
        return scheme_of(self.source) in (None, "hf")

    def otherwise(self, engine: str) -> str:
        """Return a clause for messages: how a plain checkpoint that is in no cache is loaded."""
        return f"{engine} loads it itself" if self.has_engines_loader else "it is sliced while it is loaded"

    def shapes(self, rank: int, num_ranks: int) -> Shapes | None:
        """Return the shapes of the weights, after checking that all files that the rank reads are present.

        Returns:
            None: they are not known, for example for a plain checkpoint that is remote or not in safetensors format.

        Raises:
            FormatError: a file is missing or damaged.
            PlanError: the folder does not exist, or it lacks ranks.
        """
        if scheme_of(self.source) == "hf":
            return None
        store, manifest = self._content.store, self._content.manifest
        if manifest is not None:
            needed = [rank] if manifest.num_ranks == num_ranks else range(manifest.num_ranks)
            check_present(store, manifest, needed)
            check_lengths(store, manifest, needed)
            record = read_record(store, manifest)
            return {name: tuple(shape) for name, shape in zip(record.names, record.shapes, strict=True)}
        if scheme_of(self.source) is not None:
            return None
        from relayout.checkpoint.source import read_source

        try:
            return {tensor.name: tensor.shape for tensor in read_source(store).tensors}
        except PlanError:
            return None

    @cached_property
    def _content(self) -> _Content:
        return _look_at(self.source, "--load-format auto")


@dataclass(frozen=True, slots=True)
class _Content:
    """The content found at a place."""

    store: Store
    """The store of the folder. It verifies all reads, if there is a policy."""
    manifest: Manifest | None
    """The manifest; None: a plain checkpoint."""


def find_folder(path: str, engine: str) -> Manifest | None:
    """Return the manifest of a converted folder; None for a plain checkpoint.

    Args:
        path: a folder, or the URL of a store.
        engine: how a user selects the engine's own loader, for messages.

    Raises:
        FormatError: relayout.json is damaged, or missing from what was a converted folder; or RELAYOUT_TRUST requires a
            signature that is missing, or does not cover all files.
        PlanError: the folder does not exist.
    """
    return _look_at(path, engine).manifest


def _look_at(path: str, engine: str) -> _Content:
    """Find a checkpoint, and verify its side files if there is a policy. Arguments as of `find_folder`."""
    try:
        store = trusted(find_input(path), None)
        manifest = find_manifest(store)
        if isinstance(store, TrustedStore):
            store.verify_side_files()  # The engine reads them itself.
        if manifest is not None:
            return _Content(store, manifest)
        reason = None if store.kind() is Kind.FOLDER else explain_missing(store)
    except PlanError as error:  # Raised by a store or the hub.
        if policy_of(None) is not None:
            raise
        reason = error.what
    if reason is not None:
        raise PlanError(
            f"is not a folder: {reason}. Download the model, run `relayout convert FOLDER --tp N` and serve its output;"
            f" or load with {engine}",
            path=path,
            code="missing",
        )
    if store.stat(_OF_ANOTHER_RANK) is not None:  # Engines would take its slices for whole tensors.
        refuse_incomplete(store, [_OF_ANOTHER_RANK])
    return _Content(store, None)


def source_url(model: str, revision: str | None) -> str:
    """Return the folder or URL of a model as engines name it: a folder, a URL, or the id of a repository on the hub."""
    if not _REPOSITORY.fullmatch(model) or Path(model).exists():
        return model
    return f"hf://{model}" + (f"@{revision}" if revision else "")


def this_device() -> str:
    """Return the device to read slices to: this process's GPU, if it has one."""
    import torch

    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"


def shows_progress() -> bool:
    """Return True if this process shows the progress of loads: one process of an engine does.

    Source: the loaders of both engines (vLLM 0.33 `weight_utils.enable_tqdm`, SGLang 0.5.23 `weight_utils.py`).
    """
    from torch import distributed

    return not distributed.is_available() or not distributed.is_initialized() or distributed.get_rank() == 0


def check_same_model(had: Shapes | None, path: str, new: Shapes | None) -> None:
    """Check that weights are for the model that an engine has loaded, so that an update writes all of it.

    Reason: the engine's loaders match tensors by name and shape, so tensors with the names and shapes of the first load
    again write every parameter.

    Raises:
        PlanError: they are not.
    """
    if had is None or new is None:
        return
    if differing := [name for name in sorted({*had, *new}) if had.get(name) != new.get(name)]:
        what = (
            f"is not for the model that the engine has: {len(differing)} tensors have another shape, are missing, or"
            " are unexpected"
        )
        raise PlanError(what, path=path, tensor=differing[0], code="mismatch")


def refuse_unverified(path: str | None, what: str) -> None:
    """Raise PlanError if a policy is set, as the engine would load these weights itself, without verification.

    Raises:
        PlanError, OSError: there is a policy; or as `policy_of`.
    """
    policy = policy_of(None)
    if policy is not None:
        instead = "serve a folder of `relayout convert` and `relayout sign`"
        what = f"{what}: the policy {policy.path} (RELAYOUT_TRUST) requires that all weights are verified; {instead}"
        raise PlanError(what, path=path, code="unsupported")


@dataclass(frozen=True, slots=True)
class Weights:
    """A load by relayout, of a converted folder, or of a checkpoint that the engine cannot read."""

    delivery: Delivery
    engine: EngineRank
    """The rank that the weights are for."""
    is_from_cache: bool = False
    """True if the weights are a conversion of a checkpoint that the engine's own loader can also read."""

    def after(self, error: Exception, source: str) -> BuiltinLoad:
        """Return the engine's own load, to replace a load from the cache that failed.

        Raises:
            the error: nothing else can load this.
        """
        if not self.is_from_cache:
            raise error
        what = "relayout: cannot load from the cache: %s: %s loads %s itself"
        self.engine.logger.warning(what, error, self.engine.name, source)
        return BuiltinLoad(f"the cache has failed: {error}")


@dataclass(frozen=True, slots=True)
class BuiltinLoad:
    """A load by the engine's own loader, with no checks after it."""

    why: str
    deferred: DeferredConversion | None = None
    """A conversion into the cache, for the next start."""

    def has_loaded(self) -> None:
        """Start the conversion that waits for the end of the load."""
        if self.deferred is not None:
            self.deferred.start()


Load: TypeAlias = Weights | BuiltinLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRank:
    """One rank of an engine that loads a model: all properties of the engine that a load depends on."""

    name: str
    """The engine's name."""
    logger: Logger
    rank: int
    """The tensor-parallel rank, among the ranks that attention is cut over."""
    num_ranks: int
    owns_experts: bool
    """True if each expert is held whole by one process, as with expert parallelism."""
    has_own_block: bool
    """True if the rank uses the contiguous block of experts that a conversion with --expert-parallel gives it."""
    is_placed: Callable[[str], bool] | None
    """Returns True for tensors that the engine places by itself, see `RankWeights`; None: each rank uses the tensors
    that a conversion gives it."""
    is_draft: bool
    """True for a draft model. It shares a few layers with its target, and engines do not expose which."""
    device: str | torch.device
    """The device to read slices to."""
    is_skipped: Callable[[str], bool]
    is_unused: Callable[[str], bool]
    """Return True for tensors that the engine's own loader skips, or is not expected to use; see `RankWeights`."""
    local_ranks: tuple[int, ...] | None = None
    """The ranks on this node, if some ranks run on other nodes; only these are converted. None: all."""
    observe: str | None = None
    """The engine's package, a key of `plans.family.ENGINES`: plans are observed from it for models without a built-in
    plan. None: plans are not observed."""
    members: Group | None = None
    """Replicas that load the same rank at the same time."""
    progress: bool = False
    """True to show the progress of a load on stderr; see `shows_progress`."""

    @property
    def places_all_experts(self) -> bool:
        """True if there is one rank, and each process uses only experts that the engine selects."""
        return self.num_ranks == 1 and self.owns_experts and not self.has_own_block

    def check(self, manifest: Manifest, path: str) -> None:
        """Check that a converted folder suits the engine; warn if another conversion would load faster.

        Raises:
            PlanError: the folder has whole experts, and the engine cuts them.
        """
        if manifest.expert_parallel and not self.owns_experts:
            what = f"was converted with --expert-parallel, but {self.name} slices experts: launch it with expert"
            raise PlanError(f"{what} parallelism, or convert without --expert-parallel", path=path, code="unsupported")
        is_same, has_whole = manifest.num_ranks == self.num_ranks, manifest.expert_parallel or manifest.num_ranks == 1
        faster = f"`relayout convert SRC --tp {self.num_ranks}"
        if not is_same:
            what = "relayout: %s was converted for %d ranks and is resharded for %d; %s` makes loads faster"
            self.logger.warning(what, path, manifest.num_ranks, self.num_ranks, faster)
        if self.owns_experts and not has_whole:
            what = (
                "relayout: %s has experts sliced for %d ranks, but %s uses whole experts: they are read from the"
                " files of all ranks; %s --expert-parallel` makes loads faster"
            )
            self.logger.warning(what, path, manifest.num_ranks, self.name, faster)

    def weights(
        self,
        path: str,
        options: EngineOptions,
        *,
        manifest: Manifest | None = None,
        store: Store | None = None,
        deltas: Paths | None = None,
    ) -> RankWeights:
        """Return the tensors at a path for this rank.

        Args:
            manifest: the checked manifest of a folder that the user has converted. None: the checkpoint is plain, or in
                a cache.
            options, store, deltas: as of `RankWeights`.
        """
        has_all = manifest is None or manifest.num_ranks == 1 or manifest.expert_parallel
        is_as_here = store is not None or (manifest is not None and manifest.num_ranks == self.num_ranks)
        is_held = self.has_own_block and has_all and is_as_here
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
            is_placed=None if is_held else self.is_placed,
            lazy=self.is_draft,
            progress=self.progress,
            members=None if manifest is None else self.members,
        )


def open_load(location: WeightsLocation, options: EngineOptions, engine: EngineRank) -> Load:
    """Decide how a model is loaded from a place. None of its tensors is read yet.

    Raises:
        FormatError, PlanError, OSError: as `WeightsLocation.is_ours`; or as `EngineRank.check`, `first_start`.
    """
    if not location.is_ours:
        return BuiltinLoad("it was not converted")
    if location.manifest is not None:
        return Weights(open_converted(location, None, options, engine).deliver(), engine)
    if engine.places_all_experts and not engine.is_draft:
        # A plain checkpoint stores whole experts like a conversion for one rank.
        return Weights(engine.weights(location.source, options).deliver(), engine, location.has_engines_loader)
    kept = _first_start(location, options, engine)
    if kept is not None and not isinstance(
        kept, DeferredConversion
    ):  # Converted as this engine cuts and places tensors.
        return Weights(engine.weights(str(kept), options, store=kept).deliver(), engine, location.has_engines_loader)
    if location.has_engines_loader:
        return BuiltinLoad("it is not in a cache", kept)
    return Weights(engine.weights(location.source, options).deliver(), engine)


def _first_start(
    location: WeightsLocation, options: EngineOptions, engine: EngineRank
) -> CachedConversion | DeferredConversion | None:
    """Convert a model into the cache, see `first_start`. Draft models are not converted."""
    otherwise = location.otherwise(engine.name)
    if engine.is_draft:
        engine.logger.info("relayout: the draft model %s was not converted: %s", location.source, otherwise)
    if engine.is_draft:
        return None
    owned, local = engine.owns_experts, engine.local_ranks
    wanted = ConversionRequest(location.source, engine.num_ranks, owned, local, engine.observe)
    return first_start(wanted, options, otherwise, engine.logger)


def open_converted(
    location: WeightsLocation, deltas: Paths | None, options: EngineOptions, engine: EngineRank
) -> RankWeights:
    """Open the weights of a converted folder, with deltas applied.

    Args:
        deltas: applied in this order; None: the folder is loaded unchanged.

    Raises:
        FormatError, PlanError, OSError: as `open_load`; or the folder was not converted.
    """
    manifest, path = location.manifest, location.source
    if manifest is None:
        what = "was not converted: the weights of a live engine change from one converted folder to another"
        raise PlanError(what, path=path, code="unsupported")
    engine.check(manifest, path)
    return engine.weights(path, options, manifest=manifest, deltas=deltas)


@dataclass(slots=True)
class EngineModel:
    """A model of an engine, from its creation on, with the state of its load."""

    options: EngineOptions
    location: WeightsLocation | None
    """The source of the load that is about to begin; None: it has ended, and the next load determines its source anew.
    """
    sentinels: Sentinels | None = None
    """Marks in memory that was not checked yet."""
    load: Load | None = None
    """The load that has begun."""
    names: tuple[Any, ...] | None = None
    """The engine configuration's names of the weights that relayout has loaded; None: none were loaded."""
    shapes: Shapes | None = None
    """Shapes of its weights, if relayout has seen them."""
    mapped: frozenset[str] = frozenset()
    """Tensors of the load that is about to begin that are in the model's memory already."""


class ByModel(Generic[Entry]):
    """Values that belong to the models of an engine, and live as long as these.

    Engines pass no state between creating a model, loading it and updating it: each is a separate call of a separate
    loader. So values are kept outside the engine's objects, keyed by the model, and by its configuration where an
    engine passes no model.
    """

    def __init__(self) -> None:
        self._values: WeakKeyDictionary[Any, Entry] = WeakKeyDictionary()

    def remember(self, value: Entry, *keys: object) -> None:
        """Keep a value, with objects of the engine as keys. Objects that cannot be keys are left out."""
        for key in keys:
            with suppress(TypeError):  # Instances of a class that compares by value: not an error.
                self._values[key] = value

    def forget(self, key: object) -> None:
        """Drop the value of an object, if there is one."""
        with suppress(TypeError):
            self._values.pop(key, None)

    def of(self, key: object) -> Entry | None:
        """Return the value of an object, or None."""
        try:
            return self._values.get(key)
        except TypeError:
            return None


MODELS: ByModel[EngineModel] = ByModel()
"""Models that a start has created or loaded."""
