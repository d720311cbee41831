"""Weights that change in a live vLLM: a worker extension that reads a delta, or another folder, into the parameters.

First every worker reads all that it is about to load, and compares every byte with its digest. Only when all of them
have said so does the first one change anything. vLLM's own reload then takes the tensors, as its loader does at the
start; it goes from layer to layer, quantizes and rearranges again, and leaves parameters where they are in memory.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from logging import getLogger
from typing import TYPE_CHECKING, Any, NoReturn

from relayout.errors import PlanError

if TYPE_CHECKING:
    from relayout.engines.rank_weights import RankWeights
    from relayout.loader.group.collectives import Group

_LOGGER = getLogger("vllm.relayout")


@dataclass(frozen=True, slots=True)
class _Content:
    """What an engine has loaded, or is to load."""

    path: str
    """A converted folder, or its URL."""
    deltas: tuple[str, ...] = ()
    """That were applied to it, in this order."""

    def then(self, source: str) -> _Content:
        """After an update from a delta, or from another folder."""
        from relayout.checkpoint.delta import is_delta

        return _Content(self.path, (*self.deltas, source)) if is_delta(source) else _Content(source)


class WeightUpdates:
    """A worker extension of vLLM: `--worker-extension-cls relayout.engines.live.WeightUpdates`.

    vLLM lets its worker class inherit from it. `collective_rpc` calls the method in all workers of an engine at once,
    between two steps of the model.
    """

    vllm_config: Any
    """This and what is used below is the worker's."""
    _relayout_content: _Content | None = None
    """After the last update; None: there was none."""
    _relayout_is_mixed: bool = False
    """Whether an update has begun and has not ended: some weights are new, others old, others missing."""

    def update_weights_from(self, source: str) -> str | None:
        """Let the engine's weights be those of another converted folder, or of what a delta makes of those it has.

        All workers change, or none does: whatever is wrong with `source` is found before. An error after that, such as
        a store that can no longer be read, makes the engine unusable: every further step and update is an error. Keys
        and values that were computed before stay as they are: the caller resets the prefix cache.

        Args:
            source: a folder that each worker can read, or its URL.

        Returns:
            the digest of relayout.json of what the engine has now, by which the next delta names its base. None: it was
            not updated. The error is in the log, and the last worker raises it.

        Raises:
            FormatError: `source` is damaged.
            PlanError: `source` is a delta for other weights, or the rank has other tensors or slices there; or the
                engine was not started from a converted folder, or has data-parallel replicas.
            OSError, MemoryError: as `relayout.iter_load`; or a worker is gone.
        """
        from vllm.config import set_current_vllm_config
        from vllm.distributed.parallel_state import get_world_group

        from relayout.loader.group.collectives import Group

        group = Group(get_world_group().cpu_group)
        try:
            with set_current_vllm_config(self.vllm_config):
                return _update(self, source, group)
        except Exception as error:
            state = "is unusable now: start it again" if self._relayout_is_mixed else "keeps its weights"
            _LOGGER.error("relayout: not updated from %s, the engine %s: %s", source, state, error)
            # vLLM reads the workers' answers in order until one is an error. It would take those behind that for
            # answers to its next call.
            if group.index == group.num_members - 1:
                raise
            return None


def _update(worker: Any, source: str, group: Group) -> str:
    with group.collective():
        if worker._relayout_is_mixed:
            raise PlanError("an update has failed: start the engine again", code="unsupported")
        if worker.vllm_config.parallel_config.data_parallel_size > 1:
            what = "weights are not updated with data parallelism: no replica would know of an error in another"
            raise PlanError(what, code="unsupported")
        from relayout.engines.vllm import source_of

        old = worker._relayout_content or _Content(source_of(worker.vllm_config.model_config))
        new = old.then(source)
        weights = _open(worker, new)
        _check_layout(_open(worker, old).layout(), weights.layout(), source)
        digest = weights.prove()
    if len(digests := set(group.all_gather(digest))) > 1:
        what = f"is not the same for all workers: contents {', '.join(sorted(digests))}"
        raise PlanError(what, path=source, code="option")
    worker._relayout_is_mixed, worker.execute_model = True, _refuse
    with group.collective():
        worker.reload_weights(weights_iterator=iter(weights))
        _LOGGER.info("%s", weights.report())
    worker._relayout_is_mixed, worker._relayout_content = False, new
    del worker.execute_model  # Which hid the worker's own.
    return digest


def _open(worker: Any, content: _Content) -> RankWeights:
    """The tensors for a worker, as its loader opens them at the start.

    Raises:
        FormatError, PlanError, OSError: as `relayout.iter_load`; or the engine loads by another loader.
    """
    from vllm.model_executor.model_loader import get_model_loader

    loader = get_model_loader(worker.vllm_config.load_config)
    if not hasattr(loader, "open_weights"):
        raise PlanError("the engine loads by another loader: start it with --load-format relayout", code="option")
    config = copy(worker.vllm_config.model_config)
    config.model, config.model_weights, config.revision = content.path, "", None
    weights: RankWeights = loader.open_weights(worker.get_model(), config, deltas=content.deltas)
    return weights


def _check_layout(old: dict[str, Any], new: dict[str, Any], source: str) -> None:
    """Check that a rank has the same slices of the same tensors.

    Raises:
        PlanError: it has not.
    """
    differing = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
    if differing:
        what = f"is not what the engine was started with: {len(differing)} tensors have another dtype, shape or slice,"
        raise PlanError(f"{what} or are missing", path=source, tensor=differing[0], code="mismatch")


def _refuse(*args: object, **kwargs: object) -> NoReturn:
    """In the place of the worker's step.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError("relayout: an update of the weights has failed, and they are a mixture: start the engine again")
