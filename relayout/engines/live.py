"""Weights that change in a live engine; of vLLM, a worker extension that reads a delta, or a folder, into parameters.

First every worker reads all that it is about to load, and compares every byte with its digest. Only when all of them
have said so does the first one change anything. vLLM's own reload then takes the tensors, as its loader does at the
start; it goes from layer to layer, quantizes and rearranges again, and leaves parameters where they are in memory.
"""

from __future__ import annotations

from collections import Counter
from logging import getLogger
from typing import TYPE_CHECKING, Any, NoReturn

from relayout.checkpoint.converted import read_manifest_blob
from relayout.core.digests import digest_hex
from relayout.engines.load import Content, EngineModel, WeightsPlace, known_of, remember, source_url
from relayout.engines.rank_weights import EngineOptions, publish
from relayout.errors import PlanError, about

if TYPE_CHECKING:
    from relayout.engines.rank_weights import RankWeights
    from relayout.loader.group.collectives import Group

_LOGGER = getLogger("vllm.relayout")


class WeightUpdates:
    """A worker extension of vLLM: `--worker-extension-cls relayout.engines.live.WeightUpdates`.

    vLLM's worker class inherits from it. `collective_rpc` calls the method in all workers at once, between two steps.
    """

    vllm_config: Any
    """The worker's own field; with its methods `get_model` and `reload_weights` all that is used of it here."""

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
            state = "is unusable now: start it again" if _known(self).is_mixed else "keeps its weights"
            _LOGGER.error("relayout: not updated from %s, the engine %s: %s", source, state, error)
            # vLLM reads the workers' answers in order until one is an error, and would take those behind that for
            # answers to its next call.
            if group.index == group.num_members - 1:
                raise
            return None


def _update(worker: Any, source: str, group: Group) -> str:
    known = _known(worker)
    with group.collective():
        new = _next_content(worker, known, source)
        weights = _open(worker, new)
        _check_same_layout(source, _open(worker, _content_of(worker, known)), weights)
        _check_padding(worker.get_model())
        digest = _prove(weights)
    if len(digests := set(group.all_gather(digest))) > 1:
        what = f"is not the same for all workers: contents {', '.join(sorted(digests))}"
        raise PlanError(what, path=source, code="option")
    known.is_mixed = True
    try:
        with group.collective():
            delivery = weights.deliver()
            worker.reload_weights(weights_iterator=iter(delivery))
            _pack_tied(worker.get_model())
            publish(delivery.report(), _LOGGER)
    except BaseException:
        _stop_computing(worker)
        raise
    known.is_mixed, known.updated = False, new
    return digest


def _known(worker: Any) -> EngineModel:
    """What is known of a worker's model, for as long as that lives."""
    model = worker.get_model()
    known = known_of(model)
    if known is None:
        known = EngineModel(EngineOptions(), None)
        remember(known, model)
    return known


def _content_of(worker: Any, known: EngineModel) -> Content:
    """What a worker has."""
    return known.updated or (_loader(worker).source_of(worker.vllm_config.model_config), ())


def _next_content(worker: Any, known: EngineModel, source: str) -> Content:
    """What the worker is to have.

    Raises:
        FormatError, PlanError, OSError: nothing can be updated, or not from here; or as `WeightsPlace.check_policy`.
    """
    from relayout.checkpoint.delta import is_delta

    if known.is_mixed:
        raise PlanError("an update has failed: start the engine again", code="unsupported")
    if worker.vllm_config.parallel_config.data_parallel_size > 1:
        what = "weights are not updated with data parallelism: no replica would know of an error in another"
        raise PlanError(what, code="unsupported")
    WeightsPlace(source_url(source, None)).check_policy()
    path, deltas = _content_of(worker, known)
    return (path, (*deltas, source)) if is_delta(source) else (source, ())


def _layout(weights: RankWeights) -> dict[str, tuple[object, ...]]:
    """The dtype, shape and slice of each tensor that the rank holds."""
    columns = weights.opened.source.columns()
    rows = zip(columns.dtypes, map(tuple, columns.source_shapes), columns.parts, strict=True)
    return dict(zip(columns.names, rows, strict=True))


def _check_same_layout(source: str, had: RankWeights, new: RankWeights) -> None:
    """Check that a rank is given what it was given before.

    Raises:
        PlanError: it is not.
    """
    before, after = _layout(had), _layout(new)
    if differing := [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]:
        what = f"{len(differing)} tensors have another dtype, shape or slice than those of the engine, or are missing"
        raise PlanError(what, path=source, tensor=differing[0], code="mismatch")


def _prove(weights: RankWeights) -> str:
    """Read all that will be delivered, and compare all digests; return that of relayout.json, with deltas too."""
    with about(path=weights.path):
        for _ in weights.stream():
            pass
    return digest_hex(read_manifest_blob(weights.opened.source.store))


def _stop_computing(worker: Any) -> None:
    """Let every further step of the worker fail, for good.

    vLLM has no way of its own for a worker to say that it is unfit: nobody looks at `check_health` between steps, an
    extension must not have methods of the worker's names, and no hook of a module is called where a graph is replayed.
    So the one method that carries out steps, whichever executor calls it, is hidden on this one object.
    """
    worker.model_runner.execute_model = _refuse


def _check_padding(model: Any) -> None:
    """Check that vLLM can make a model ready for kernels a second time.

    On a CPU it pads experts once, notes their new size, and does not pad what it reloads.

    Raises:
        PlanError: it cannot.
    """
    try:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    except ImportError:  # Another version, of which this is not known.
        return
    for prefix, layer in model.named_modules():
        as_loaded = get_layerwise_info(layer).restore_metadata[0]
        for name, tensor in layer.named_parameters(recurse=False):
            was = as_loaded.get(name)
            if was is not None and tensor.device.type == "cpu" and tensor.dim() == 3 and tensor.numel() > was.numel():
                what = f"was {list(was.shape)} and is padded to {list(tensor.shape)}: vLLM cannot reload this on a CPU"
                raise PlanError(f"{what}; start the engine again", tensor=f"{prefix}.{name}", code="unsupported")


def _pack_tied(model: Any) -> None:
    """Pack weights for a CPU again that a layer shares with another: vLLM's reload does so for the other alone."""
    packed = [layer for layer in model.modules() if hasattr(layer, "cpu_linear")]
    num_uses = Counter(id(layer.weight) for layer in packed)
    for layer in packed:
        if num_uses[id(layer.weight)] > 1:
            layer.quant_method.process_weights_after_loading(layer)


def _open(worker: Any, content: Content) -> RankWeights:
    """The tensors for a worker, as its loader opens them at the start."""
    model, config = worker.get_model(), worker.vllm_config.model_config
    weights: RankWeights = _loader(worker).open_update(model, config, *content)
    return weights


def _loader(worker: Any) -> Any:
    from vllm.model_executor.model_loader import get_model_loader

    loader = get_model_loader(worker.vllm_config.load_config)
    if not hasattr(loader, "open_update"):
        raise PlanError("the engine loads by another loader: start it with --load-format relayout", code="option")
    return loader


def _refuse(*args: object, **kwargs: object) -> NoReturn:
    """Raise RuntimeError, in the place of a step."""
    raise RuntimeError("relayout: an update of the weights has failed, and they are a mixture: start the engine again")
