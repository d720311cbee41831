"""Weights that change in a live engine; of vLLM, a worker extension that reads a delta, or a folder, into parameters.

First every worker reads all that it is about to load, and compares every byte with its digest. Only when all of them
have said so does the first one change anything. vLLM's own reload then takes the tensors, as its loader does at the
start; it goes from layer to layer, quantizes and rearranges again, and leaves parameters where they are in memory.
"""

from __future__ import annotations

from collections import Counter
from logging import getLogger
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from relayout.checkpoint.converted import check_lengths, check_present, find_manifest, read_record
from relayout.checkpoint.trust import trusted
from relayout.engines.folders import find_folder, is_ours, source_url
from relayout.engines.metrics import publish
from relayout.errors import PlanError
from relayout.storage.stores import find_input, scheme_of

if TYPE_CHECKING:
    from relayout.engines.rank_weights import RankWeights
    from relayout.loader.group.collectives import Group

    _Content: TypeAlias = tuple[str, tuple[str, ...]]
    """A converted folder, or its URL, and the deltas that were applied to it, in this order."""

Shapes: TypeAlias = dict[str, tuple[int, ...]]
"""Shapes of the whole tensors of a model, by name."""
_LOGGER = getLogger("vllm.relayout")


class WeightUpdates:
    """A worker extension of vLLM: `--worker-extension-cls relayout.engines.live.WeightUpdates`.

    vLLM's worker class inherits from it. `collective_rpc` calls the method in all workers at once, between two steps.
    """

    vllm_config: Any
    """Of the worker, as all that is used of it here."""
    _relayout_content: _Content | None = None
    """After the last update."""
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
            # vLLM reads the workers' answers in order until one is an error, and would take those behind that for
            # answers to its next call.
            if group.index == group.num_members - 1:
                raise
            return None


def shapes_of(path: str, rank: int, num_ranks: int) -> Shapes | None:
    """What weights in a folder or at a URL are, all that the rank reads of a converted folder being there.

    Returns:
        None: it is not known, as of a plain checkpoint that is remote or in another form than safetensors.

    Raises:
        FormatError: a file is missing or damaged.
        PlanError: there is no such folder, or it lacks ranks.
    """
    if scheme_of(path) == "hf":
        return None
    find_folder(path, "the engine's own loader")
    store = trusted(find_input(path), None)
    manifest = find_manifest(store)
    if manifest is not None:
        needed = [rank] if manifest.num_ranks == num_ranks else range(manifest.num_ranks)
        check_present(store, manifest, needed)
        check_lengths(store, manifest, needed)
        record = read_record(store, manifest)
        return {name: tuple(shape) for name, shape in zip(record.names, record.shapes, strict=True)}
    if scheme_of(path) is not None:
        return None
    from relayout.checkpoint.source import read_source

    try:
        return {tensor.name: tensor.shape for tensor in read_source(store).tensors}
    except PlanError:
        return None


def check_same_model(had: Shapes | None, path: str, new: Shapes | None) -> None:
    """Check that weights are for the model that an engine has loaded, so that an update writes all of it.

    Proof: its loaders take tensors by names and shapes, and with these they have written every parameter before.

    Raises:
        PlanError: they are not.
    """
    if had is None or new is None:
        return
    if differing := [name for name in sorted({*had, *new}) if had.get(name) != new.get(name)]:
        what = (
            f"is not for the model that the engine has: {len(differing)} tensors have another shape, are missing, or"
            " are there in addition"
        )
        raise PlanError(what, path=path, tensor=differing[0], code="mismatch")


def _update(worker: Any, source: str, group: Group) -> str:
    from relayout.checkpoint.delta import is_delta

    with group.collective():
        if worker._relayout_is_mixed:
            raise PlanError("an update has failed: start the engine again", code="unsupported")
        if worker.vllm_config.parallel_config.data_parallel_size > 1:
            what = "weights are not updated with data parallelism: no replica would know of an error in another"
            raise PlanError(what, code="unsupported")
        is_ours(source_url(source, None), is_asked_for=True)
        config = worker.vllm_config.model_config
        path, deltas = old = worker._relayout_content or (_loader(worker).source_of(config), ())
        new = (path, (*deltas, source)) if is_delta(source) else (source, ())
        weights = _open(worker, new)
        before, after = _open(worker, old).layout(), weights.layout()
        if differing := [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]:
            what = (
                f"{len(differing)} tensors have another dtype, shape or slice than those of the engine, or are missing"
            )
            raise PlanError(what, path=source, tensor=differing[0], code="mismatch")
        _check_padding(worker.get_model())
        digest = weights.prove()
    if len(digests := set(group.all_gather(digest))) > 1:
        what = f"is not the same for all workers: contents {', '.join(sorted(digests))}"
        raise PlanError(what, path=source, code="option")
    worker._relayout_is_mixed, worker.execute_model = True, _refuse
    with group.collective():
        worker.reload_weights(weights_iterator=iter(weights))
        _pack_tied(worker.get_model())
        publish(weights.report(), _LOGGER)
    worker._relayout_is_mixed, worker._relayout_content = False, new
    del worker.execute_model  # Which hid the worker's own.
    return digest


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


def _open(worker: Any, content: _Content) -> RankWeights:
    """The tensors for a worker, as its loader opens them at the start."""
    model, config = worker.get_model(), worker.vllm_config.model_config
    weights: RankWeights = _loader(worker).open_weights(model, config, update=content)
    return weights


def _loader(worker: Any) -> Any:
    from vllm.model_executor.model_loader import get_model_loader

    loader = get_model_loader(worker.vllm_config.load_config)
    if not hasattr(loader, "open_weights"):
        raise PlanError("the engine loads by another loader: start it with --load-format relayout", code="option")
    return loader


def _refuse(*args: object, **kwargs: object) -> NoReturn:
    """In the place of the worker's step. Raises: RuntimeError."""
    raise RuntimeError("relayout: an update of the weights has failed, and they are a mixture: start the engine again")
