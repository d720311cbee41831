"""The part of TokenSpeed that the plugin touches: its default loader, and what a process knows of its rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.fake_vllm import put_modules

from relayout import plugins

LOADER = "tokenspeed.runtime.model_loader.loader"


def _mapping() -> SimpleNamespace:
    parts = {name: SimpleNamespace(tp_rank=0, tp_size=1) for name in ("attn", "dense", "lm_head", "moe")}
    parts["moe"].ep_size = 1
    return SimpleNamespace(**parts, pp_rank=0, pp_size=1)


@dataclass
class Engine:
    """One process of TokenSpeed."""

    loader: Any
    """Its module of loaders."""
    monkeypatch: pytest.MonkeyPatch
    mapping: SimpleNamespace = field(default_factory=_mapping)
    """tokenspeed.runtime.distributed.mapping.Mapping."""
    num_replicas: int = 1
    """Of attention, which each cut it for a part of the ranks."""
    owns: bool = False
    """Whether each process owns whole experts."""
    places: list[list[int]] | None = None
    """By layers, the experts in the places for them; None: TokenSpeed has no table of these."""
    name: str = "TokenSpeed"
    option: str = "RELAYOUT_TOKENSPEED"
    """Where options of relayout are given."""

    def own_experts(self) -> None:
        """Let each process own whole experts."""
        self.owns = True

    def replicate(self, num_replicas: int) -> None:
        """Cut attention over a part of the processes, so that there are so many replicas of it."""
        self.num_replicas = num_replicas

    def load(
        self, folder: Path | str, model: Any, *, load_format: str = "relayout", draft: bool = False, **options: Any
    ) -> None:
        """Make a model and load it as `get_model` does; of the format relayout, or with options, it is asked for."""
        if load_format == "relayout" or options:
            self.monkeypatch.setenv(self.option, json.dumps(options))
        else:
            self.monkeypatch.delenv(self.option, raising=False)
        self.start(model.rank, model.tp * self.num_replicas)
        config = SimpleNamespace(load_format="auto" if load_format == "relayout" else load_format)
        self.loader.get_model_loader(config).load_model(model_config=self.model_config(folder, model, draft=draft))

    def start(self, rank: int, world_size: int) -> None:
        """Be the process of a rank, of so many replicas of attention; sizes are TokenSpeed's own defaults for these."""
        attention, mapping = world_size // self.num_replicas, self.mapping
        for part in (mapping.attn, mapping.dense, mapping.lm_head):
            vars(part).update(tp_rank=rank % attention, tp_size=attention)
        if self.num_replicas > 1:
            vars(mapping.lm_head).update(tp_rank=0, tp_size=1)
        owners = world_size if self.owns else 1
        vars(mapping.moe).update(ep_size=owners, tp_size=world_size // owners)

    def model_config(self, folder: Path | str, model: Any, *, draft: bool = False) -> SimpleNamespace:
        """tokenspeed.runtime.configs.model_config.ModelConfig."""
        return SimpleNamespace(
            model_path=str(folder),
            revision=None,
            mapping=self.mapping,
            hf_config=SimpleNamespace(architectures=["DeepseekV3ForCausalLM" + "NextN" * draft]),
            hf_text_config=SimpleNamespace(num_hidden_layers=3),
            model=model,
        )


def install(monkeypatch: pytest.MonkeyPatch, *, with_plugin: bool = True) -> Engine:
    """Put the modules where the plugin imports them from, and call it twice."""

    class DefaultModelLoader:
        def __init__(self, load_config: Any) -> None:
            self.load_config = load_config

        def _get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
            """Nothing is read before the first tensor is asked for."""
            for file in sorted(Path(model_config.model_path).glob("*.safetensors")):
                for name, tensor in load_file(file).items():
                    if getattr(model, "checkpoint_weight_name_filter", lambda name: True)(name):
                        yield name, tensor

        def load_model(self, *, model_config: Any) -> Any:
            model = engine.loader._initialize_model(model_config, self.load_config)
            model.load_weights(self._get_all_weights(model_config, model))
            return model

    class DummyModelLoader(DefaultModelLoader):
        """It makes values in a way of its own."""

        def load_model(self, *, model_config: Any) -> Any:
            model = engine.loader._initialize_model(model_config, self.load_config)
            for one in model.memory.values():
                one.fill_(1)
            return model

    def initialize_model(model_config: Any, load_config: Any) -> Any:
        model_config.model.allocate()
        return model_config.model

    def get_model_loader(load_config: Any) -> DefaultModelLoader:
        return (DummyModelLoader if load_config.load_format == "dummy" else DefaultModelLoader)(load_config)

    def require_unit_kv_scales(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if name.endswith("k_scale") and not bool(torch.all(tensor == 1)):
                raise ValueError(f"checkpoint KV-cache scales {name}; only unit KV-cache scales are supported")
            yield name, tensor

    def expert_places() -> SimpleNamespace | None:
        if engine.places is None:
            return None
        return SimpleNamespace(
            physical_to_logical_map_cpu=torch.tensor(engine.places), num_logical_experts=1 + max(engine.places[0])
        )

    def pp_layer_window(num_layers: int, mapping: Any) -> tuple[int, int]:
        return mapping.pp_rank * num_layers // mapping.pp_size, (mapping.pp_rank + 1) * num_layers // mapping.pp_size

    initialize_model.__qualname__ = initialize_model.__name__ = "_initialize_model"
    functions: list[Callable[..., Any]] = [initialize_model, get_model_loader, require_unit_kv_scales]
    put_modules(
        monkeypatch,
        {
            LOADER: {function.__name__: function for function in functions},
            "tokenspeed.runtime.distributed.pp_stage": {"pp_layer_window": pp_layer_window},
            "tokenspeed.runtime.moe.expert_location": {"get_global_expert_location_metadata": expert_places},
        },
    )
    from tokenspeed.runtime.model_loader import loader  # type: ignore[import-not-found]

    engine = Engine(loader, monkeypatch)
    if with_plugin:
        plugins.tokenspeed()
        plugins.tokenspeed()
    return engine
