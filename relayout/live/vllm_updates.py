"""vLLM's weight transfer, `--weight-transfer-config '{"backend": "relayout"}'`: weights that change in a live engine.

vLLM calls its workers in three steps. `start_weight_update` begins a session. `update_weights` names a delta or a
converted folder, and returns at once: each worker reads and verifies its part in the background, while it serves.
`finish_weight_update`, in a pause, waits for all workers, and then changes the weights of all of them, or of none. A
model that is started with this option is loaded by `LiveLoader`, which records the locations of its weights in memory.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, replace
from functools import partial, wraps
from logging import getLogger
from typing import TYPE_CHECKING, Any, NoReturn

from relayout.core.arguments import integer, size
from relayout.core.workers import Stop, Stopped, check_stop, heeding
from relayout.engines import vllm
from relayout.engines.load import MODELS, ByModel, Weights, WeightsLocation
from relayout.engines.vllm import FORMAT, VllmLoader
from relayout.errors import PlanError, shown

if TYPE_CHECKING:
    import torch

    from relayout.engines.rank_weights import RankWeights
    from relayout.live.staging import Content, LiveWeights, Modules, StagedUpdate

LIVE: ByModel[LiveWeights] = ByModel()
"""The weights of models that may change."""
_LOGGER = getLogger("vllm.relayout")
_NICENESS = 10
"""The niceness of the thread that reads new weights: the engine's own threads come first."""
_POLL_SECONDS = 0.1
_WEIGHTS = "weights"
"""vLLM's tag of the memory that its sleep mode allocates for weights."""
_LOSES: dict[str, Callable[..., bool]] = {
    "sleep": lambda level=1, *_, **__: level != 1,  # At level 1 they return unchanged.
    "discard": lambda tags=(), *_, **__: _WEIGHTS in tags,
    "reset_weights": lambda *_, **__: True,
}
"""Methods of vLLM's worker (0.33 `gpu_worker.py`) after which the weights may be gone; whether a call is such a one."""


class LiveLoader(VllmLoader):
    """A loader that records the locations of weights during a first load, if they may change later."""

    _until_processed: ExitStack | None = None
    """Ends when vLLM has finished its post-processing of the weights."""

    def load_model(self, *arguments: Any, **options: Any) -> Any:
        """Create the model, load it and prepare it for kernels, as vLLM does."""
        try:
            with ExitStack() as self._until_processed:
                return super().load_model(*arguments, **options)
        finally:
            self._until_processed = None

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Load all weights; see `VllmLoader`. Records of an earlier load of the model become invalid."""
        LIVE.forget(model)
        super().load_weights(model, model_config)

    def _given(self, weights: Weights, location: WeightsLocation, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        tensors, engine = super()._given(weights, location, model), weights.engine
        if self._until_processed is None or engine.is_draft or location.manifest is None or not _may_change():
            return tensors
        from relayout.live.recording import Recording
        from relayout.live.staging import Content, LiveWeights
        from relayout.live.vllm_reload import loader_of, note_defaults

        known = MODELS.of(model)
        if known is not None and known.sentinels is not None:
            note_defaults(model)
        recording, opened = Recording(model, loader_of), weights.delivery.weights

        def note(failed: object, *_: object) -> None:
            if failed is None:
                rank = replace(engine, members=None, progress=False)
                LIVE.remember(LiveWeights(recording.finish(), rank, self._options, Content.of(opened)), model)

        self._until_processed.push(note)
        return self._until_processed.enter_context(recording).given(tensors)

    def get_all_weights(self, model_config: Any, model: Any) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the tensors of a reload; see `VllmLoader`. A later delta applies to the weights of this reload."""
        live, tensors = LIVE.of(model), super().get_all_weights(model_config, model)
        if live is None:
            return tensors
        live.loaded_again(None)  # Until all is loaded, the base for deltas is unknown.
        weights = self.load.delivery.weights if isinstance(self.load, Weights) else None
        return tensors if weights is None or weights.store is not None else _followed(tensors, live, weights)


def _followed(
    tensors: Iterable[tuple[str, torch.Tensor]], live: LiveWeights, weights: RankWeights
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a reload's tensors; once exhausted, record their content as the base for deltas."""
    from relayout.live.staging import Content

    yield from tensors
    live.loaded_again(Content.of(weights))


def _may_change() -> bool:
    """Return True if the engine was started with relayout's weight transfer."""
    from vllm.config import get_current_vllm_config

    transfer = getattr(get_current_vllm_config(), "weight_transfer_config", None)
    return transfer is not None and transfer.backend == FORMAT


def register() -> None:
    """Register the load format, and the weight transfer if this vLLM has weight transfer; see `vllm.register`."""
    vllm.register(LiveLoader)
    try:
        from vllm.distributed.weight_transfer.base import WeightTransferEngine
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        return
    if FORMAT not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(FORMAT, engine_class(WeightTransferEngine))


loader_class = partial(vllm.loader_class, methods=LiveLoader)
"""The loaders of a vLLM whose weights may change; arguments as of `vllm.loader_class`."""


def engine_class(base: type[Any]) -> type[Any]:
    """Return the class that vLLM instantiates in each worker.

    Args:
        base: vLLM's `WeightTransferEngine`.
    """
    return type("RelayoutTransferEngine", (TransferEngine, base), {"__module__": __name__})


@dataclass(frozen=True, slots=True)
class InitInfo:
    """Options of `init_weight_transfer_engine`, which need not be called."""

    memory: int | str = "4GiB"
    """The most host memory that each worker holds new weights in: a number of bytes, or a size. Larger weights stay in
    their source and are read again in the pause."""
    wait_seconds: float = 600.0
    """Seconds that `finish_weight_update` waits for unfinished reads."""


@dataclass(frozen=True, slots=True)
class UpdateInfo:
    """The arguments of `update_weights`."""

    source: str | list[str]
    """A delta, or several in the order in which they apply, a converted folder, or a step repository: paths that each
    worker can read, or URLs."""
    step: int | None = None
    """The step of a step repository; None: the newest."""

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources as a tuple, in the order in which they apply."""
        return (self.source,) if isinstance(self.source, str) else tuple(self.source)


class _Staging:
    """New weights that are being read by a thread."""

    def __init__(
        self,
        live: LiveWeights,
        update: UpdateInfo,
        before: _Staging | None,
        memory: int,
        canceled: Sequence[_Staging] = (),
    ) -> None:
        """Start the thread.

        Args:
            before: the staging that is committed before this one.
            memory: bytes that this one and those before it may hold.
            canceled: canceled stagings that may still read: this one reads nothing before they have ended.
        """
        self.sources, self._step = update.sources, update.step
        self._canceled, self._stop = canceled, Stop()
        self.staged: StagedUpdate | None = None
        """The staged weights; None: not read yet, or canceled."""
        self.error: Exception | None = None
        self._live, self._before, self._memory = live, before, memory
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="relayout-stage", daemon=True).start()

    @property
    def is_over(self) -> bool:
        """True once everything was read, or an error was raised."""
        return self._ended.is_set()

    def wait(self, seconds: float) -> StagedUpdate:
        """Wait for the staged weights and return them."""
        if not self._ended.wait(max(0.0, seconds)):
            raise TimeoutError(f"{', '.join(self.sources)} is still being read")
        if self.error is not None:
            raise self.error
        assert self.staged is not None
        return self.staged

    def cancel(self) -> None:
        """Request the thread to stop, and release the staged weights."""
        self._stop.request()
        self.staged = None

    def _run(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        started, what = time.monotonic(), ", ".join(self.sources)
        try:
            for other in self._canceled:
                self._wait_for(other)
            self._canceled = ()
            before: Content | None = self._live.content
            memory = self._memory
            if self._before is not None:
                self._wait_for(self._before)
                staged = self._before.wait(0)
                before, memory = staged.content, memory - staged.nbytes
                self._before = None
            with heeding(self._stop):
                staged = self._live.stage(self.sources, before, memory, step=self._step)
            self.staged = staged
            check_stop(self._stop)
            seconds, held, left = time.monotonic() - started, staged.nbytes / 2**20, staged.left_nbytes / 2**20
            again = "all modules" if staged.modules is None else f"{len(staged.modules)} modules"
            _LOGGER.info(
                "relayout: staged %s in %.1f s: %.0f MiB held, %.0f MiB to be read again, %s loaded again by vLLM",
                what, seconds, held, left, again,
            )  # fmt: skip
        except Stopped as error:
            self.staged, self.error = None, error
            _LOGGER.info("relayout: no longer staged: %s", what)
        except Exception as error:
            self.error = error
            _LOGGER.error("relayout: not staged: %s: %s", what, error)
        finally:
            self._before, self._canceled = None, ()
            self._ended.set()

    def _wait_for(self, other: _Staging) -> None:
        """Wait until another staging has ended. Raise Stopped if this one is canceled."""
        while not other._ended.wait(_POLL_SECONDS):
            check_stop(self._stop)


class TransferEngine:
    """The methods of vLLM's `WeightTransferEngine`."""

    init_info_cls, update_info_cls = InitInfo, UpdateInfo
    supports_draft_weight_update = False
    defers_processing = True

    model: torch.nn.Module
    model_config: Any
    parallel_config: Any

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._options = InitInfo()
        self._stagings: list[_Staging] = []
        self._canceled: list[_Staging] = []
        """Stagings of earlier sessions that were canceled and whose threads have not ended yet."""
        self._error: Exception | None = None
        """The exception of an update that could not begin; it is raised when the session ends."""
        self._is_mixed = False
        """True from the start of a commit to its success: some weights are new, others old, others missing."""
        self._worker = _worker_of(self)
        if self._worker is not None:  # For `collective_rpc`.
            self._worker.relayout_state, self._worker.relayout_attest = self.state, self.attest
            for name, loses in _LOSES.items():
                if hasattr(self._worker, name):
                    setattr(self._worker, name, self._noted(getattr(self._worker, name), loses))

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Set limits."""
        size(init_info.memory, "memory")
        self._options = init_info

    def start_weight_update(self) -> None:
        """Begin an update session. The model keeps serving."""
        self._forget()

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        """Begin to read new weights. Errors are raised at the session's end: here all workers must answer alike."""
        try:
            self.receive_weights(_parsed(update_info))
        except Exception as error:
            self._error = self._error or error
            _LOGGER.error("relayout: %s", error)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Begin to read new weights, after those that were named before in this session."""
        before = self._stagings[-1] if self._stagings else None
        memory = size(self._options.memory, "memory")
        self._canceled = [one for one in self._canceled if not one.is_over]
        self._stagings.append(_Staging(self._live, update_info, before, memory, tuple(self._canceled)))

    def drain_pending(self) -> None:
        """Wait for unfinished reads; errors are raised when the session ends."""
        for staging in self._stagings:
            with suppress(Exception):
                staging.wait(self._options.wait_seconds)

    def finish_weight_update(self) -> None:
        """Change the weights of all workers, or of none.

        Errors in the named sources are found before the change. An error after that, such as a store that can no longer
        be read, makes the engine unusable: every further step and update is an error.
        """
        from vllm.distributed.parallel_state import get_world_group

        from relayout.loader.group.collectives import Group

        group = Group(get_world_group().cpu_group)
        try:
            self._commit(group)
        except Exception as error:
            state = "is unusable now: start it again" if self._is_mixed else "keeps its weights"
            _LOGGER.error("relayout: weights are not updated, the engine %s: %s", state, error)
            # vLLM reads the workers' answers in order up to the first error, and would take the remaining ones for
            # answers to its next call. After an error it also leaves the session open.
            worker = self._worker
            if worker is None or worker.rank == self.parallel_config.world_size - 1:
                if worker is not None:
                    worker._weight_update_active = False
                raise
        finally:
            self._forget()

    def _commit(self, group: Any) -> None:
        with group.collective():
            staged = self._staged()
        contents = set(group.all_gather(staged[-1].content.digest if staged else "nothing"))
        if len(contents) > 1:
            what = f"the new weights are not the same for all workers: contents {', '.join(sorted(contents))}"
            raise PlanError(what, code="option")
        if not staged:
            return
        self._is_mixed = True
        started = time.monotonic()
        try:
            with group.collective():
                for one in staged:
                    self._live.commit(one, self._reload)
        except BaseException:
            self._live.content = None  # Also for a worker that has changed all of its weights.
            _stop_computing(self._worker, self.model)
            raise
        self._is_mixed = False
        for name in ("reset_encoder_cache", "reset_mm_cache"):
            if reset := getattr(getattr(self._worker, "model_runner", None), name, None):
                reset()
        _LOGGER.info("relayout: the engine has %s: %.2f s", staged[-1].content.digest, time.monotonic() - started)

    def _staged(self) -> list[StagedUpdate]:
        """Return the staged weights of this session, checked and rehearsed."""
        from relayout.live.vllm_reload import rehearse

        if self._is_mixed:
            raise PlanError("an update has failed: start the engine again", code="unsupported")
        if self._error is not None:
            raise self._error
        limit = time.monotonic() + self._options.wait_seconds
        staged = [staging.wait(limit - time.monotonic()) for staging in self._stagings]
        if staged:
            _check_awake()
            self._live.check(self.model)
            self._live.check_base(staged)
        for one in staged:
            self._live.rehearse(one, self.model, partial(rehearse, self.model))
        return staged

    def _reload(self, modules: Modules, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        from relayout.live.vllm_reload import reload

        reload(self.model, self.model_config, modules, tensors)

    @property
    def _live(self) -> LiveWeights:
        live = LIVE.of(self.model)
        if live is None:
            what = "the engine was not started on a converted folder: start it with --load-format relayout, on one"
            raise PlanError(what, code="unsupported")
        return live

    def _forget(self) -> None:
        """Cancel unfinished reads."""
        for staging in self._stagings:
            staging.cancel()
        self._canceled += [one for one in self._stagings if not one.is_over]
        self._stagings, self._error = [], None

    def state(self) -> dict[str, Any]:
        """Return this worker's content, and the staged content; `collective_rpc` calls it as `relayout_state`."""
        live, last = LIVE.of(self.model), self._stagings[-1] if self._stagings else None
        staged = None if last is None else last.staged
        error = self._error or (None if last is None else last.error)
        return {
            "content": None if live is None or live.content is None else live.content.digest,
            "staged": None if staged is None else staged.content.digest,
            "is_staging": not all(one.is_over for one in (*self._canceled, *self._stagings)),
            "error": None if error is None else str(error),
        }

    def attest(self) -> dict[str, Any]:
        """Compare this worker's parameters with digests; `collective_rpc` calls it as `relayout_attest`.

        Returns:
            `content`, the digest of relayout.json of the worker's weights; the number of slices that are `verified`;
            the names of those that are `unverified`, because vLLM has transformed them; the first one that differs, as
            `difference`; or an `error`.
        """
        try:
            _check_awake()
            found = self._live.attest()
        except Exception as error:
            return {"error": str(error)}
        if found.difference is not None:
            rank = getattr(self._worker, "rank", 0)
            _LOGGER.error("relayout: rank %d: %s is not what %s has", rank, found.difference, found.content)
        return {one.name: getattr(found, one.name) for one in fields(found)}

    def _noted(self, method: Callable[..., Any], loses: Callable[..., bool]) -> Callable[..., Any]:
        """Wrap a worker's method: if it discards the weights, later deltas are refused. vLLM sends no notice of it."""

        @wraps(method)
        def noted(*arguments: Any, **named: Any) -> Any:
            live = LIVE.of(self.model)
            if live is not None and loses(*arguments, **named):
                live.loaded_again(None)
            return method(*arguments, **named)

        return noted

    def shutdown(self) -> None:
        """Cancel unfinished reads."""
        self._forget()


def _parsed(update_info: Mapping[str, Any]) -> UpdateInfo:
    """Return the request as an `UpdateInfo`. Raise PlanError if it is not one."""
    source: Any = update_info.get("source")
    step = update_info.get("step")
    is_list = isinstance(source, list) and source and all(isinstance(one, str) for one in source)
    if not set(update_info) <= {"source", "step"} or not (isinstance(source, str) or is_list):
        what = f'update_weights: {shown(dict(update_info))}, expected {{"source": DELTA, FOLDER or STEPS, or a list}}'
        raise PlanError(what, code="option")
    return UpdateInfo(source, None if step is None else integer(step, "step"))


def _check_awake() -> None:
    """Raise PlanError if vLLM's sleep mode has released the memory of weights.

    An access to that memory would be a CUDA error that no later call of the process survives. Source: vLLM 0.32 and
    0.33 `device_allocator/cumem.py`; its records contain what is mapped, whichever calls have led to that.
    """
    pool = sys.modules.get("vllm.device_allocator.cumem")
    allocator = None if pool is None else pool.CuMemAllocator.instance
    if allocator is None:
        return
    if any(one.is_asleep and one.tag == _WEIGHTS for one in allocator.pointer_to_data.values()):
        what = "the weights are asleep: call wake_up(tags=['weights']) first"
        raise PlanError(what, code="unsupported")


def _worker_of(engine: TransferEngine) -> Any:
    """Return the worker of vLLM that is creating its transfer engine; None: another caller creates it.

    vLLM does not pass the worker to the engine. Without the worker, `collective_rpc` reaches no method of the engine,
    and after a failed commit only the model itself would refuse to compute.
    """
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if caller is not engine and hasattr(caller, "model_runner") and hasattr(caller, "finish_weight_update"):
            return caller
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _stop_computing(worker: Any, model: torch.nn.Module) -> None:
    """Make every further step of the worker fail, permanently.

    vLLM has no way for a worker to report that it is unusable: `check_health` is not called between steps, and module
    hooks are not called when a graph is replayed. So the method through which every executor and both of vLLM's model
    runners run steps is replaced, on this object only. After it has failed, V2's `sample_tokens` and `pool` return
    None, for which vLLM raises the error of the step (0.33 `engine/core.py`).
    """
    model.forward = _refuse
    if worker is not None:
        worker.model_runner.execute_model = _refuse


def _refuse(*args: object, **kwargs: object) -> NoReturn:
    """Raise RuntimeError, in place of a step."""
    raise RuntimeError("relayout: an update of the weights has failed, and they are a mixture: start the engine again")
