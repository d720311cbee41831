"""vLLM: `vllm serve FOLDER --load-format relayout`, for converted folders and for plain checkpoints.

vLLM's own weight loaders do all the cutting, fusing and padding; they are handed global tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from logging import getLogger
from typing import TYPE_CHECKING, Any

from relayout.engines.rank_weights import EngineOptions, Folder, RankWeights, find_folder, listed, replicas, speculative
from relayout.errors import PlanError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from relayout.loader.group.members import Members

FORMAT = "relayout"
_LOGGER = getLogger("vllm.relayout")
"""Below vLLM's own, which is set up to be seen."""


def register() -> None:
    """Tell vLLM about the load format. May be called any number of times.

    Raises:
        ImportError, AttributeError, TypeError: this vLLM is not as expected.
    """
    from vllm.model_executor import model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    if FORMAT not in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
        model_loader.register_model_loader(FORMAT)(loader_class(DefaultModelLoader))


def loader_class(base: type[Any]) -> type[Any]:
    """The model loader, given vLLM's default one, of which it changes only where the tensors come from.

    Raises:
        TypeError: the default loader is not as expected.
    """
    missing = [name for name in ("load_weights", "get_all_weights", "download_model") if not hasattr(base, name)]
    if missing:
        raise TypeError(f"{base.__module__}.{base.__name__} has no {', '.join(missing)}")
    return type("RelayoutModelLoader", (_Loading, base), {"__module__": __name__})


class _Loading:
    """What `RelayoutModelLoader` has beside the methods of vLLM's `DefaultModelLoader`, from which it inherits too."""

    load_config: Any

    def __init__(self, load_config: Any) -> None:
        self._options = EngineOptions.parse(load_config.model_loader_extra_config or {}, "--model-loader-extra-config")
        self._weights: RankWeights | None = None
        self._opened: RankWeights | None = None
        """That the next load takes."""
        # vLLM's own loader refuses options that it does not know, and may still have to load a draft model.
        super().__init__(replace(load_config, load_format="auto", model_loader_extra_config={}))  # type: ignore[call-arg]

    def download_model(self, model_config: Any) -> None:
        """Refuse what is no folder: nothing is downloaded.

        Raises:
            PlanError: it is none.
        """
        find_folder(_path(model_config), "--load-format auto")

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Let the model load this rank's weights; vLLM then checks that every parameter has been loaded.

        Raises:
            FormatError, PlanError, OSError, MemoryError: as `relayout.iter_load`, or the folder does not fit.
        """
        device, is_draft = _device(model), model_config.runner_type == "draft"
        with replicas(_group(device) if self._options.shares and not is_draft else None) as members:
            self._opened = weights = self._open(model, model_config, members)
            tensors = [*model.parameters(), *model.buffers()]
            is_online = any(one.is_meta for one in tensors)
            if is_online:
                _LOGGER.info("relayout: layers that are quantized while they are loaded get copies of their slices")
            with nullcontext() if weights is None or is_online else weights.placing(tensors):
                super().load_weights(model, model_config)  # type: ignore[misc]
            report = None if self._weights is None else self._weights.report()
        if report is not None:
            _LOGGER.info("%s", report)
            if report.unused:
                _LOGGER.warning("relayout: rank %d: vLLM did not use %s", report.rank, listed(report.unused))

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of the checkpoint, as this rank has them; also for vLLM's `reload_weights`.

        Raises:
            FormatError, PlanError, OSError, MemoryError: as `load_weights`.
        """
        self._weights, self._opened = self._opened or self._open(model, model_config), None
        if self._weights is None:
            yield from super().get_all_weights(model_config, model)  # type: ignore[misc]
            return
        self.counter_before_loading_weights = time.perf_counter()  # From here vLLM counts the seconds that it logs.
        yield from self._weights

    def _open(self, model: Any, model_config: Any, members: Members | None = None) -> RankWeights | None:
        """The tensors of the folder, shared with other replicas if they load, too; None if vLLM is to load them."""
        from vllm.config import get_current_vllm_config
        from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

        path, is_draft = _path(model_config), model_config.runner_type == "draft"
        folder = find_folder(path, "--load-format auto")
        if is_draft and folder is None:
            _LOGGER.info("relayout: the draft model %s was not converted: vLLM loads it itself", path)
            return None
        rank, num_ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        parallel = get_current_vllm_config().parallel_config
        owned = _check(path, folder, num_ranks, parallel)
        return RankWeights(
            path,
            rank,
            num_ranks,
            self._options,
            device=_device(model),
            wanted=_wanted(model, model_config, is_draft=is_draft),
            only_held=owned,
            # A draft model takes a few of the target's layers, and vLLM does not say which.
            lazy=is_draft,
            progress=rank == 0 and bool(self.load_config.use_tqdm_on_load),
            members=None if folder is None else members,
        )


def _path(model_config: Any) -> str:
    return str(getattr(model_config, "model_weights", "") or model_config.model)


def _check(path: str, folder: Folder | None, num_ranks: int, parallel: Any) -> bool:
    """Whether the experts that the rank holds are those that vLLM will use; tell what makes the load slower.

    Raises:
        PlanError: the folder's experts are not where vLLM wants them.
    """
    if folder is None:
        return True
    experts = bool(parallel.enable_expert_parallel)
    num_owners = num_ranks * parallel.data_parallel_size * getattr(parallel, "prefill_context_parallel_size", 1)
    in_blocks = getattr(parallel, "expert_placement_strategy", "linear") == "linear" and not parallel.enable_eplb
    if folder.expert_parallel and not (experts and in_blocks and num_owners == num_ranks == folder.num_ranks):
        raise PlanError(
            f"was converted with --expert-parallel for {folder.num_ranks} ranks: run vLLM with --enable-expert-parallel"
            f" -tp {folder.num_ranks}, and without data parallelism, EPLB or another expert placement; or convert"
            " without --expert-parallel",
            path=path,
            code="unsupported",
        )
    advice = f"`relayout convert SRC --tp {num_ranks}"
    if folder.num_ranks != num_ranks:
        _LOGGER.warning(
            "relayout: %s was converted for %d ranks and is put together for %d; %s` makes loads faster",
            path, folder.num_ranks, num_ranks, advice,
        )  # fmt: skip
    if not folder.expert_parallel and (experts or parallel.data_parallel_size > 1):
        _LOGGER.warning(
            "relayout: %s has experts cut for %d ranks, and vLLM places them otherwise: they are read from the files of"
            " all ranks; %s --expert-parallel` makes loads faster, without data parallelism",
            path, folder.num_ranks, advice,
        )  # fmt: skip
    return folder.expert_parallel or not experts


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

    found = get_dp_group()
    group: ProcessGroup = found.cpu_group if device == "cpu" else found.device_group
    return group


def _wanted(model: Any, model_config: Any, *, is_draft: bool) -> Callable[[str], bool]:
    """Which tensors this process can need: not those of other pipeline stages, nor of layers for speculation only."""
    from vllm.model_executor.models.utils import get_pp_missing_layer_names

    # Tied, the embedding may be wanted where only its module is missing.
    is_tied = getattr(model_config.hf_text_config, "tie_word_embeddings", True)
    missing = tuple(
        name
        for name in get_pp_missing_layer_names(model)
        if not is_tied or name.rstrip(".").rpartition(".")[2].isdigit()
    )
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    is_speculative = speculative(model_config.hf_text_config)

    def wanted(name: str) -> bool:
        if not is_draft and is_speculative(name):
            return False
        mapped = name if mapper is None or not missing else mapper._map_name(name)
        return not (mapped or name).startswith(missing)

    return wanted


def _device(model: Any) -> Any:
    """Where the parameters are: slices are best read to there."""
    return next((one.device for one in model.parameters() if one.device.type == "cuda"), "cpu")
