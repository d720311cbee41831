"""Weights that change in a live SGLang, by its own `POST /update_weights_from_disk`.

The path of the request is a converted folder, a delta for the engine's current weights, or a step repository. A
repository means its newest step; `ROOT#12` means step 12. SGLang runs the request on each rank separately, and returns
only the first rank's answer. Therefore all ranks first read and verify their new weights. If one fails after that, all
load their previous weights again.

Four hooks: around the request, the load that SGLang starts for it, the tensors that this load reads, and the
preparation of the old weights before it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from relayout.checkpoint.converted import read_manifest_blob
from relayout.checkpoint.step_chain import follow, names_of_chain, steps_at
from relayout.engines import sglang
from relayout.engines.load import (
    MODELS,
    ByModel,
    EngineModel,
    Load,
    Shapes,
    Weights,
    WeightsLocation,
    check_same_model,
    open_converted,
    source_url,
)
from relayout.engines.rank_weights import EngineOptions
from relayout.engines.sglang import Hook
from relayout.engines.sglang_rank import FORMAT, LOGGER, engine_rank, shapes_at
from relayout.errors import PlanError, RelayoutError, about
from relayout.format.manifest import content_of
from relayout.format.steps_index import PublishedStep, StepsIndex
from relayout.storage.stores import scheme_of

if TYPE_CHECKING:
    from relayout.engines.rank_weights import RankWeights
    from relayout.live.recording import Recording
    from relayout.live.staging import LiveWeights, StagedUpdate
    from relayout.loader.group.collectives import Group

Value = TypeVar("Value")
Sources: TypeAlias = tuple[str, tuple[str, ...]]
"""A converted folder, or its URL, and the deltas that were applied to it, in this order."""

_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
_Original: TypeAlias = Callable[..., tuple[bool, str]]
_HELD_NBYTES = 4 * 2**30
"""The most bytes of changes held in memory. Larger changes are verified first, and read again when they are applied."""


def register() -> None:
    """Install hooks in SGLang, for starts and updates."""
    sglang.register(_hooks)


def _hooks() -> list[Hook]:
    """Return the hooks of a start, and those of updates if this SGLang has its update code in the known module."""
    reading, *others = sglang.load_hooks()
    try:
        updater = import_module(_UPDATER)
    except ImportError:  # Another version has it elsewhere.
        return [reading, *others]
    loader, parameters = reading.owner, ("model", "weights", "target_device")
    return [
        replace(reading, around=weights_iterator),
        *others,
        Hook(updater.WeightUpdater, "update_weights_from_disk", ("self", "model_path", "load_format"), update_weights),
        Hook(loader, "load_weights_and_postprocess", parameters, process_weights),
        Hook(loader, "restore_weights_before_loading", parameters[::2], restore_weights),
    ]


@dataclass(slots=True)
class Update:
    """New weights for a model. SGLang calls its own loader once more to load them."""

    location: WeightsLocation
    """The location that the request names."""
    weights: RankWeights | None
    """Verified weights to load instead of `location`. None: load `location` itself."""
    staged: StagedUpdate | None = None
    """Changes to apply in memory instead of a load."""
    error: Exception | None = None
    """The exception that the in-memory change raised. SGLang retries the same update."""
    is_whole: bool = True
    """True if the model takes all of the weights."""
    has_begun: bool = False
    """True once SGLang has requested tensors, and may have changed the model."""


@dataclass(slots=True)
class LiveModel:
    """A model of SGLang whose weights may change."""

    weights: LiveWeights | None = None
    """Its weights in memory, if the load was recorded."""
    has: Sources | None = None
    """The source of its weights since the last update. None: the source that SGLang's configuration names."""
    update: Update | None = None
    """The update that SGLang is loading."""
    is_mixed: bool = False
    """True from the start of an update to its success: some weights are new, others old, others missing."""


LIVE: ByModel[LiveModel] = ByModel()
"""Models that were recorded or updated."""


def weights_iterator(
    original: Callable[..., Iterator[Any]], loader: Any, source: Any, **settings: Any
) -> Iterator[Any]:
    """Wrap `DefaultModelLoader._get_weights_iterator`: an update reads the weights that were verified for it."""
    live, known = LIVE.of(source.model_config), MODELS.of(source.model_config)
    update = None if live is None else live.update
    if update is None or known is None:
        return sglang.weights_iterator(original, loader, source, **settings)
    if update.staged is not None:
        return iter(())
    known.location, update.has_begun = update.location, True
    return sglang.deliver(known, update.weights, loader, source, partial(original, loader, source, **settings))


def update_weights(
    original: _Original, updater: Any, model_path: str, load_format: str, *args: Any, **named: Any
) -> tuple[bool, str]:
    """Wrap `WeightUpdater.update_weights_from_disk`: all ranks have new weights after it, or none.

    A plain checkpoint, for a model that SGLang has loaded itself, is left to SGLang.
    """
    request = _Request(original, updater, str(load_format).lower() == FORMAT, (load_format, *args), named)
    if "weight_name_filter" in named:  # SGLang reads again the weights that a rank has lost.
        return request.load(model_path, replace(request.again(), is_whole=False))
    try:
        return request.change(model_path)
    except (RelayoutError, OSError, MemoryError) as error:
        return request.refused(model_path, error)


def process_weights(original: Callable[..., None], model: Any, weights: Iterable[Any], target_device: Any) -> None:
    """Wrap `DefaultModelLoader.load_weights_and_postprocess`: apply staged changes in memory.

    With the option `live`, a load is recorded, which later updates in memory need.
    """
    known = MODELS.of(model)
    if known is None:
        original(model, weights, target_device)
        return
    live = LIVE.of(model) or LiveModel()
    update = live.update
    if update is not None and update.staged is not None:
        assert live.weights is not None
        _commit(live.weights, update, update.staged, model)
        return
    live.weights = None
    if update is not None:
        is_followed = update.is_whole and update.weights is not None
    else:  # SGLang loads an unmarked model itself, or it is a draft model, which shares memory with another.
        is_followed = known.sentinels is not None and known.location is not None and known.location.manifest is not None
    if not (known.options.live and is_followed):
        original(model, weights, target_device)
        return
    from relayout.live.recording import Recording
    from relayout.live.staging import Content, LiveWeights

    load: Load | None = None

    def given(recording: Recording) -> Iterator[Any]:
        nonlocal load
        yield from recording.given(weights)
        load = known.load

    with Recording(model) as recording:
        original(model, given(recording), target_device)
    if isinstance(load, Weights):
        recorded = recording.finish()
        live.weights = LiveWeights(recorded, load.engine, known.options, Content.of(load.delivery.weights))
        LIVE.remember(live, model)
        what = "relayout: %d slices lie in memory as they are; SGLang has made something else of %d"
        LOGGER.info(what, len(recorded.views), len(recorded.reloaded))


def restore_weights(original: Callable[..., None], model: Any, target_device: Any) -> None:
    """Wrap `DefaultModelLoader.restore_weights_before_loading`: skip unpacking if changes apply in memory."""
    live = LIVE.of(model)
    if live is None or live.update is None or live.update.staged is None:
        original(model, target_device)


def _commit(live: LiveWeights, update: Update, staged: StagedUpdate, model: Any) -> None:
    """Apply staged changes in memory."""
    if update.error is not None:
        raise update.error
    try:
        live.check(model)
        live.check_base([staged])
        update.has_begun = True
        live.commit(staged, _loaded_again)
    except Exception as error:
        update.error = error
        raise


def _loaded_again(*_: object) -> None:
    raise AssertionError("nothing of what was staged is loaded again")


@dataclass(frozen=True, slots=True)
class _New:
    """The weights that a model is to have after an update."""

    update: Update
    shapes: Shapes | None
    content: Sources | None
    """Their converted folder and deltas; None: the checkpoint is plain."""
    description: str = ""
    """A description for the answer."""


class _Request:
    """A request to SGLang to load other weights into a model."""

    def __init__(
        self, original: _Original, updater: Any, is_explicit: bool, args: Sequence[Any], named: dict[str, Any]
    ) -> None:
        self._original = partial(original, updater)
        self._args, self._named, self._is_asked_for = args, named, is_explicit
        self._config, self._model = updater.model_config, updater.get_model()
        self._had_path = str(self._config.model_path)
        self._known = MODELS.of(self._model) or EngineModel(EngineOptions(), None)
        self._live = LIVE.of(self._model) or LiveModel()
        MODELS.remember(self._known, self._model, self._config)
        LIVE.remember(self._live, self._model, self._config)
        self._group: Group | None = None
        """The ranks that change together; None: there is one rank, or SGLang handles the update alone."""

    @property
    def _has(self) -> Sources:
        """The source of the model's current weights."""
        return self._live.has or (self._url(self._had_path), ())

    def _url(self, path: str) -> str:
        return source_url(path, getattr(self._config, "revision", None))

    def _location(self, path: str) -> WeightsLocation:
        return WeightsLocation(self._url(path), self._is_asked_for)

    def change(self, path: str) -> tuple[bool, str]:
        """Load the weights at a path into the model, on all ranks or none."""
        location, known, live = self._location(path), self._known, self._live
        location.check_policy()
        if not (_is_repository_or_delta(location) or location.is_ours) and known.shapes is None:
            return self._own(path, location)
        self._group = _group()
        new = self._verified(path, location)
        was_mixed, live.is_mixed = live.is_mixed, True
        outcome = self._attempt(path, new.update)
        failed = [answer for is_done, answer in self._all_of(outcome) if not is_done]
        if not failed:
            live.has, known.shapes, live.is_mixed = new.content, new.shapes, False
            return True, f"{outcome[1]}{new.description}"
        if any(self._all_of(new.update.has_begun)):
            live.is_mixed = not all(self._all_of(not was_mixed and self._go_back()))
        else:
            live.is_mixed = was_mixed
        return self.refused(path, failed[0])

    def _own(self, path: str, location: WeightsLocation) -> tuple[bool, str]:
        """Let SGLang read a checkpoint without relayout."""
        done, answer = self.load(path, Update(location, None))
        if not done:
            self._config.model_path = self._had_path
        return done, answer

    def load(self, path: str, update: Update) -> tuple[bool, str]:
        """Let SGLang load, and return its answer. May raise any exception."""
        self._live.update = update
        try:
            return self._original(path, *self._args, **self._named)
        finally:
            self._live.update = self._known.location = None

    def _attempt(self, path: str, update: Update | None) -> tuple[bool, str]:
        """Let SGLang load an update, or the current weights if there is none; return an error as the answer.

        An exception must not leave this rank: the other ranks need its outcome, to restore their weights too.
        """
        try:
            return self.load(path, self.again() if update is None else update)
        except Exception as error:
            return False, str(error) if isinstance(error, RelayoutError | OSError) else repr(error)

    def _go_back(self) -> bool:
        """Load the model's previous weights."""
        done, answer = self._attempt(self._had_path, None)
        if not done:
            LOGGER.error("relayout: %s cannot be loaded again: %s", self._had_path, answer)
        return done

    def again(self) -> Update:
        """Return an update that loads the current weights once more."""
        path, deltas = self._has
        location = WeightsLocation(path, self._is_asked_for)
        is_converted = self._live.has is not None or (location.is_ours and location.manifest is not None)
        return Update(self._location(self._had_path), self._open(location, deltas) if is_converted else None)

    def _open(self, location: WeightsLocation, deltas: Sequence[str]) -> RankWeights:
        """Open the weights of a converted folder with deltas applied."""
        return open_converted(location, deltas, self._known.options, engine_rank(self._config))

    def _verified(self, path: str, location: WeightsLocation) -> _New:
        """Read and verify the weights at a path, on all ranks."""

        def verify(step: PublishedStep | None) -> _New:
            with self._collective():
                return self._verify(path, location, step)

        new = follow(lambda _: self._agreed_step(path), verify, path)
        if len(contents := set(self._all_of(new.description))) > 1:
            what = f"is not the same for all ranks:{' and'.join(sorted(contents))}"
            raise PlanError(what, path=path, code="option")
        return new

    def _agreed_step(self, path: str) -> PublishedStep | None:
        """Return the newest step that all ranks see, or the step in the path; None: the path is not a repository."""
        with self._collective():
            root, number = _root_of(path)
            index = _index_of(self._url(root))
            entries = None if index is None else index.entries
            if number is None and index is not None and _is_in_stages():
                what = f"stages of a pipeline are updated one after the other: name the step, as {path}#12"
                raise PlanError(what, path=path, code="option")
        seen = self._all_of(entries)
        if all(one is None for one in seen):
            return None
        by_all = [entry for entry in entries or () if all(entry in (others or ()) for others in seen)]
        found = [entry for entry in by_all if number in (None, entry.step)]
        if not found:
            what = "has no step" if number is None else f"has no step {number}"
            raise PlanError(f"{what} that all ranks see", path=root, code="missing")
        return found[-1]

    def _verify(self, path: str, location: WeightsLocation, step: PublishedStep | None) -> _New:
        content = self._content(path, location, step)
        where = location if content in (None, (location.source, ())) else WeightsLocation(content[0])
        shapes, known = shapes_at(where), self._known.shapes
        check_same_model(known or shapes_at(WeightsLocation(self._has[0])), path, shapes)
        if content is None:
            return _New(Update(location, None), shapes, None)
        number = "" if step is None else f", step {step.step}"
        if (staged := self._staged(path, location, step)) is not None:
            description = f" relayout: content {staged.content.digest}{number}"
            return _New(Update(location, None, staged), shapes, content, description)
        weights = self._open(where, content[1])
        with about(path=weights.path):
            for _ in weights.stream():  # Compares every slice with its digest.
                pass
        digest = content_of(read_manifest_blob(weights.opened.source.store))
        return _New(Update(location, weights), shapes, content, f" relayout: content {digest}{number}")

    def _staged(self, path: str, location: WeightsLocation, step: PublishedStep | None) -> StagedUpdate | None:
        """Stage an update in memory. None: SGLang must load all or part of the model again."""
        from relayout.loader.requests import MAX_IN_FLIGHT, plan_budget

        live = self._live.weights
        if live is None:
            return None
        try:
            live.check(self._model)
        except PlanError:  # SGLang has moved a parameter.
            return None
        if (has := live.content) is None:
            return None
        sources = [location.source] if step is None else _chain_of(self._url(_root_of(path)[0]), step, has.digest)
        threads = plan_budget(self._known.options.threads, None, MAX_IN_FLIGHT).threads
        staged = live.stage(sources, has, _HELD_NBYTES, threads=threads)
        return None if staged.modules is None or staged.modules else staged

    def _content(self, path: str, location: WeightsLocation, step: PublishedStep | None) -> Sources | None:
        """Return the folder and the deltas that a path stands for; None: the checkpoint is plain."""
        if step is not None:
            full, *others = _chain_of(self._url(_root_of(path)[0]), step, None)
            return full, tuple(others)
        if _is_delta(location.source):
            if self._live.is_mixed:
                what = "a delta changes what the engine has, and that is a mixture: update it from a folder"
                raise PlanError(what, path=path, code="unsupported")
            base, deltas = self._has
            return base, (*deltas, location.source)
        return None if location.manifest is None else (location.source, ())

    def _collective(self) -> AbstractContextManager[None]:
        return nullcontext() if self._group is None else self._group.collective()

    def _all_of(self, value: Value) -> list[Value]:
        """Return the value of each rank that changes together with this one."""
        return [value] if self._group is None else self._group.all_gather(value)

    def refused(self, path: str, reason: object) -> tuple[bool, str]:
        """Return the answer to an update that failed."""
        self._config.model_path = self._had_path
        is_mixed = self._live.is_mixed
        state = "its weights are a mixture now: update them again, or start it again" if is_mixed else "keeps them"
        LOGGER.error("relayout: not updated from %s, SGLang %s: %s", path, state, reason)
        return False, f"relayout: weights were not updated, SGLang: {state}: {reason}"


def _is_repository_or_delta(location: WeightsLocation) -> bool:
    """Return True if a place has steps, or a delta, which SGLang itself cannot read. Call after the policy check."""
    if scheme_of(location.source) is None and not Path(_root_of(location.source)[0]).is_dir():
        return False
    return _index_of(_root_of(location.source)[0]) is not None or _is_delta(location.source)


def _is_delta(url: str) -> bool:
    from relayout.checkpoint.delta import is_delta

    return scheme_of(url) != "hf" and is_delta(url)


def _root_of(path: str) -> tuple[str, int | None]:
    """Return a step repository and the step number after `#`, if the path has one."""
    root, _, number = path.rpartition("#")
    return (root, int(number)) if root and number.isascii() and number.isdecimal() else (path, None)


def _chain_of(root: str, step: PublishedStep, have: str | None) -> list[str]:
    """Return the chain to a step: deltas for the content that the model has, or a folder and deltas."""
    index = _index_of(root)
    chain = None if index is None else index.chain(have=have, step=step.content)
    if chain is None:
        raise PlanError("its steps were deleted", path=root, code="missing")
    return [_real(root, name) for name in names_of_chain(chain)]


def _real(root: str, name: str) -> str:
    """Return the real path of a repository's folder or delta: a link to it may be removed before its target."""
    path = f"{root}/{name}"
    return path if scheme_of(root) else os.path.realpath(path)


def _index_of(url: str) -> StepsIndex | None:
    """Return the index of a step repository; None: the URL is not one."""
    return None if scheme_of(url) == "hf" else steps_at(url)


def _is_in_stages() -> bool:
    from sglang.srt.runtime_context import get_parallel

    return bool(get_parallel().pp_size > 1)


def _group() -> Group | None:
    """Return the ranks of this pipeline stage, which SGLang updates at the same time. None: there is one rank."""
    from sglang.srt.runtime_context import get_parallel

    from relayout.loader.group.collectives import Group

    ranks = get_parallel().tp_group
    return Group(ranks.cpu_group) if ranks.world_size > 1 else None
