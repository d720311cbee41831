"""The part of vLLM that the plugin touches, and a model that cuts whole tensors as vLLM's layers do."""

from __future__ import annotations

import logging
import sys
from abc import ABC
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from relayout import plugins

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class LoadConfig:
    """vllm.config.LoadConfig."""

    load_format: str = "relayout"
    model_loader_extra_config: dict[str, Any] = field(default_factory=dict)
    use_tqdm_on_load: bool = False


class BaseModelLoader(ABC):  # noqa: B024 (as vLLM's, whose methods are abstract)
    """vllm's own base of all loaders."""

    def __init__(self, load_config: LoadConfig) -> None:
        self.load_config = load_config

    def load_model(self, vllm_config: Any, model_config: Any) -> Any:
        model = self.create_model(vllm_config, model_config)  # type: ignore[attr-defined]
        self.load_weights(model, model_config)  # type: ignore[attr-defined]
        return model


class WeightTransferEngine:
    """vllm's own base of what brings new weights."""

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        self.vllm_config, self.model = vllm_config, model
        self.parallel_config, self.model_config = vllm_config.parallel_config, vllm_config.model_config

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        return self.init_info_cls(**init_dict)  # type: ignore[attr-defined]

    def reset_weight_update_target(self) -> None:
        pass


class WeightTransferEngineFactory:
    """vllm's own registry of these."""

    _registry: dict[str, Any]

    @classmethod
    def register_engine(cls, name: str, engine_class: Any) -> None:
        assert name not in cls._registry
        cls._registry[name] = engine_class


class DefaultModelLoader(BaseModelLoader):
    """vllm's own, as far as the plugin uses it."""

    def __init__(self, load_config: LoadConfig) -> None:
        extra = load_config.model_loader_extra_config
        if unknown := extra.keys() - {"enable_multithread_load", "num_threads", "enable_weights_track"}:
            raise ValueError(f"Unexpected extra config keys for load format auto: {unknown}")
        super().__init__(load_config)

    def download_model(self, model_config: Any) -> None:
        raise AssertionError("nothing is downloaded")

    def create_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        vllm_config.model.allocate()
        return vllm_config.model

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for file in sorted(Path(model_config.model).glob("*.safetensors")):
            yield from load_file(file).items()

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return ((source.prefix + name, one) for name, one in torch.load(source.file, weights_only=True).items())

    def load_weights(self, model: Any, model_config: Any) -> None:
        loaded = model.load_weights(self.get_all_weights(model_config, model))
        missing = model.expected - loaded
        if missing:
            raise ValueError(f"Following weights were not initialized from checkpoint: {missing}")


class PPMissingLayer(torch.nn.Module):
    """In the place of what another stage of the pipeline has."""


class Model(torch.nn.Module):
    """Takes whole tensors and keeps what its rank needs: projections, a padded vocabulary, experts."""

    def __init__(
        self,
        whole: Tensors,
        rank: int,
        tp: int,
        *,
        stage: Callable[[str], bool] | None = None,
        experts: Collection[int] | None = None,
        score: int = 0,
        in_parameters: bool = False,
    ) -> None:
        """With `score`, the model has as many classes that no checkpoint has weights for.

        It uses all `experts` whole, and no others. None: it has a part of each.

        With `in_parameters`, its memory is that of parameters, as in an engine; else nobody knows whose it is.
        """
        super().__init__()
        self.rank, self.tp, self.experts = rank, tp, experts
        self.kept: Tensors = {}
        self.stage = stage or (lambda name: True)
        self.expected = {name for name in whole if self.stage(name) and self.owns(name)}
        self.missing: dict[str, torch.nn.Module] = {}
        """Placeholders by the names of their modules."""
        self.memory = {name: torch.full_like(self.cut(name, whole[name]), -7) for name in sorted(self.expected)}
        if score:
            self.memory["score.weight"] = torch.zeros(score, 8)
        self.in_parameters = in_parameters
        self.buffered: list[tuple[str, torch.Tensor]] | None = None
        """What is loaded again, until the reload ends; None: there is no reload."""

    def allocate(self) -> None:
        """Memory without values."""
        self.memory = {name: torch.empty_like(one) for name, one in self.memory.items()}
        if self.in_parameters:
            for name, one in self.memory.items():
                self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(one, requires_grad=False))

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        yield from self._parameters.values()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        yield from self.memory.items()

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Module]]:
        yield from {"": self, **self.missing}.items()

    def owns(self, name: str) -> bool:
        return self.experts is None or expert_of(name) < 0 or expert_of(name) in self.experts

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        for name, tensor in weights:
            if name == "score.weight":
                self.memory[name].copy_(tensor)
            elif self.stage(name) and self.owns(name):
                if self.buffered is None:
                    self.kept[name] = self.memory[name].copy_(self.cut(name, tensor))
                else:
                    self.buffered.append((name, self.cut(name, tensor)))
        return set(self.kept)

    def begin_reload(self) -> None:
        self.buffered = []

    def end_reload(self) -> None:
        for name, tensor in self.buffered or ():
            self.kept[name] = self.memory[name].copy_(tensor)
        self.buffered = None

    def cut(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """What the rank keeps of a whole tensor."""
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            padded = -(-tensor.shape[0] // 64) * 64
            per_rank = padded // self.tp
            start = min(self.rank * per_rank, tensor.shape[0])
            return tensor.narrow(0, start, min(per_rank, tensor.shape[0] - start))
        whole_expert = self.experts is not None and expert_of(name) >= 0
        if not name.endswith(("_proj.weight", "_proj.bias")) or whole_expert:
            return tensor
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            return part(tensor, 1, self.rank, self.tp)
        if name.endswith(("o_proj.bias", "down_proj.bias")):
            return tensor
        num_heads = 2 if ".k_proj." in name or ".v_proj." in name else self.tp
        copies = max(1, self.tp // num_heads)
        return part(tensor, 0, self.rank // copies, self.tp // copies)

    def assert_holds_what_it_cuts_of(self, whole: Tensors) -> None:
        assert self.kept.keys() == self.expected
        for name in self.expected:
            assert torch.equal(self.kept[name], self.cut(name, whole[name])), name


def part(tensor: torch.Tensor, axis: int, number: int, count: int) -> torch.Tensor:
    size = tensor.shape[axis] // count
    return tensor.narrow(axis, number * size, size)


def expert_of(name: str) -> int:
    return int(name.split(".experts.")[1].split(".")[0]) if ".experts." in name else -1


@dataclass
class Engine:
    """A vLLM that consists of what is in this module."""

    formats: dict[str, Any] = field(default_factory=dict)
    parallel: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(
            enable_expert_parallel=False, data_parallel_size=1, prefill_context_parallel_size=1,
            expert_placement_strategy="linear", enable_eplb=False, pipeline_parallel_size=1,
        )
    )  # fmt: skip
    rank: int = 0
    tp: int = 1
    replicas: Any = None
    """The torch.distributed group of the processes that have this rank in all replicas."""
    workers: Any = None
    """The torch.distributed group of all workers."""
    transfer: Any = None
    """The configuration of weight transfer."""
    num_nodes: int = 1
    nodes: tuple[int, ...] = ()
    """Of each tensor-parallel rank; if there are several nodes."""
    name: str = "vLLM"
    option: str = "--model-loader-extra-config"
    """Where options of relayout are given."""

    def own_experts(self) -> None:
        """Let each rank own whole experts."""
        self.parallel.enable_expert_parallel = True

    def replicate(self, num_replicas: int) -> None:
        """Be one of so many replicas, which share experts."""
        self.parallel.data_parallel_size = num_replicas

    def load(
        self,
        folder: Path | str,
        model: Model,
        *,
        draft: bool = False,
        tied: bool = False,
        load_format: str = "relayout",
        **options: Any,
    ) -> Any:
        """Load as vLLM does; returns the loader."""
        self.rank, self.tp = model.rank, model.tp
        loader = self.formats[load_format](LoadConfig(load_format, model_loader_extra_config=options))
        config = model_config(folder, draft=draft, tied=tied)
        loader.load_weights(loader.create_model(SimpleNamespace(model=model), config), config)
        return loader


class TransferWorker:
    """vllm.v1.worker.gpu_worker.Worker with relayout's weight transfer: its methods do what vLLM's do."""

    relayout_state: Callable[[], dict[str, Any]]
    relayout_attest: Callable[[], dict[str, Any]]

    def __init__(self, engine: Engine, folder: Path | str, model: Model, load_format: str = "auto") -> None:
        engine.rank, engine.tp, self.rank, self.model = model.rank, model.tp, model.rank, model
        engine.transfer = SimpleNamespace(backend="relayout")
        self.model_runner = SimpleNamespace(execute_model=lambda: self.model.memory)
        self.vllm_config = SimpleNamespace(model_config=model_config(folder), parallel_config=engine.parallel)
        engine.parallel.world_size = model.tp
        loader = engine.formats[load_format](LoadConfig(load_format))
        loader.load_model(SimpleNamespace(model=model), self.vllm_config.model_config)
        made = WeightTransferEngineFactory._registry["relayout"]
        self.weight_transfer_engine = made(engine.transfer, self.vllm_config, "cpu", model)
        self._weight_update_active = False

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.weight_transfer_engine.init_transfer_engine(self.weight_transfer_engine.parse_init_info(init_info))

    def start_weight_update(self) -> None:
        if self._weight_update_active:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        self.weight_transfer_engine.start_weight_update()
        self._weight_update_active = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        assert self._weight_update_active
        try:
            self.weight_transfer_engine.update_weights(update_info)
        except BaseException:
            self._weight_update_active = False
            raise

    def finish_weight_update(self) -> None:
        if not self._weight_update_active:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update")
        self.weight_transfer_engine.finish_weight_update()
        self._weight_update_active = False

    def sleep(self, level: int = 1) -> None:
        if level > 1:
            for parameter in self.model.parameters():
                parameter.data.zero_()

    def discard(self, tags: tuple[str, ...]) -> None:
        if "weights" in tags:
            self.sleep(level=2)

    def reset_weights(self) -> None:
        self.sleep(level=2)

    def execute_model(self) -> Tensors:
        """What a step computes with."""
        kept: Tensors = self.model_runner.execute_model()
        return kept


def model_config(folder: Path | str, *, draft: bool = False, tied: bool = False) -> SimpleNamespace:
    """vllm.config.ModelConfig."""
    text = SimpleNamespace(num_hidden_layers=2, tie_word_embeddings=tied, num_nextn_predict_layers=int(draft))
    return SimpleNamespace(
        model=str(folder),
        model_weights="",
        runner_type="draft" if draft else "generate",
        hf_text_config=text,
        dtype=torch.float32,
    )


def install(monkeypatch: pytest.MonkeyPatch, *, with_plugin: bool = True) -> Engine:
    """Put the modules where the plugin imports them from, and call it."""
    engine = Engine(dict.fromkeys(("auto", "safetensors"), DefaultModelLoader))
    WeightTransferEngineFactory._registry = {}
    put_modules(
        monkeypatch,
        {
            "vllm.config": {
                "get_current_vllm_config": lambda: SimpleNamespace(
                    parallel_config=engine.parallel, weight_transfer_config=engine.transfer
                ),
                "set_current_vllm_config": nullcontext,
            },
            "vllm.distributed": {
                "get_tensor_model_parallel_rank": lambda: engine.rank,
                "get_tensor_model_parallel_world_size": lambda: engine.tp,
            },
            "vllm.distributed.parallel_state": {
                "get_dp_group": lambda: SimpleNamespace(cpu_group=engine.replicas, device_group=None),
                "get_node_count": lambda: engine.num_nodes,
                "get_world_group": lambda: SimpleNamespace(cpu_group=engine.workers),
                "get_tp_group": lambda: SimpleNamespace(
                    rank_in_group=engine.rank, world_size=engine.tp, cpu_group=engine.nodes
                ),
                "in_the_same_node_as": lambda nodes, source_rank: [node == nodes[source_rank] for node in nodes],
            },
            "vllm.model_executor.model_loader": {
                "register_model_loader": lambda name: partial(engine.formats.__setitem__, name),
                "_LOAD_FORMAT_TO_MODEL_LOADER": engine.formats,
                "get_model_loader": lambda load_config: engine.formats[load_config.load_format](load_config),
            },
            "vllm.model_executor.model_loader.base_loader": {"BaseModelLoader": BaseModelLoader},
            "vllm.model_executor.model_loader.default_loader": {"DefaultModelLoader": DefaultModelLoader},
            "vllm.model_executor.models.utils": {"PPMissingLayer": PPMissingLayer},
            "vllm.model_executor.model_loader.weight_utils": {"default_weight_loader": Model.load_weights},
            "vllm.model_executor.layers.attention": {"is_deferred_attention_layer": lambda layer: False},
            "vllm.model_executor.model_loader.reload.layerwise": {
                "get_layerwise_info": lambda layer: SimpleNamespace(
                    restore_metadata=({}, {}), load_numel=0, load_numel_total=0, loaded_weights=[]
                ),
                "initialize_layerwise_reload": lambda model: model.begin_reload(),
                "finalize_layerwise_reload": lambda model, config: model.end_reload(),
                "_layerwise_process": lambda layer, info: None,
                "materialize_layer": lambda layer, info: None,
            },
            "vllm.model_executor.model_loader.reload.meta": {"to_meta_tensor": lambda tensor: tensor.to("meta")},
            "vllm.distributed.weight_transfer.base": {"WeightTransferEngine": WeightTransferEngine},
            "vllm.distributed.weight_transfer.factory": {"WeightTransferEngineFactory": WeightTransferEngineFactory},
        },
    )
    if with_plugin:
        plugins.vllm()
    return engine


def logged(level: int = logging.INFO) -> list[str]:
    """What the plugin logs from now on, of this level and above."""
    lines: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.relayout")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return lines


def put_modules(monkeypatch: pytest.MonkeyPatch, modules: Mapping[str, Mapping[str, Any]]) -> None:
    """Let these be imported, with what is given of each, and the packages that they are in."""
    parents = {name.rsplit(".", count)[0] for name in modules for count in range(1, name.count(".") + 1)}
    for name in sorted({*parents, *modules}):
        module = ModuleType(name)
        vars(module).update(modules.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
        package, _, child = name.rpartition(".")
        if package:
            setattr(sys.modules[package], child, module)
