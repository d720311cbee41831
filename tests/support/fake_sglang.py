"""The part of SGLang that the plugin touches: its hooks, its default loader, and what a process knows of its rank."""

from __future__ import annotations

import functools
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, TypeAlias

import pytest
import torch
from safetensors.torch import load_file
from support import fake_tokenspeed, fake_vllm
from support.fake_vllm import put_modules

from relayout import plugins


class HookType(Enum):
    """sglang.srt.plugins.hook_registry.HookType."""

    AROUND = "around"


class ModelConfig(SimpleNamespace):
    """sglang.srt.configs.model_config.ModelConfig: two are never equal."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @staticmethod
    def of(folder: Path | str, *, model: Any = None, draft: bool = False) -> ModelConfig:
        text = SimpleNamespace(num_hidden_layers=3)
        return ModelConfig(
            model_path=str(folder), revision=None, model=model, is_draft_model=draft, hf_text_config=text
        )


@dataclass
class Engine:
    """One process of SGLang."""

    formats: list[str]
    load_config: type[Any]
    loader: type[Any]
    parallel: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(
            tp_rank=0,
            tp_size=1,
            attn_tp_rank=0,
            attn_tp_size=1,
            moe_ep_size=1,
            pp_rank=0,
            pp_size=1,
            tp_group=SimpleNamespace(world_size=1, cpu_group=None),
        )
    )

    def own_experts(self) -> None:
        """Let each of two ranks own whole experts."""
        self.parallel.moe_ep_size = 2

    def replicate(self, num_replicas: int) -> None:
        """Cut attention over a part of the processes, so that there are so many replicas of it."""
        self.num_replicas = num_replicas

    def load(
        self,
        folder: Path | str,
        model: Any,
        *,
        load_format: str = "relayout",
        draft: bool = False,
        text_config: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Make a model and load it, with options of relayout; `text_config` is put into that of the model."""
        loader = sys.modules["sglang.srt.model_loader.loader"]
        options = {**self.options, **options}
        config = self.load_config(load_format, {"relayout": options} if options else {}, None)
        made = ModelConfig.of(folder, model=model, draft=draft)
        vars(made.hf_text_config).update(text_config or {})
        self.start(model.rank, model.tp * self.num_replicas)
        reader = loader.get_model_loader(config)
        loader._initialize_model(made, config)
        weights = reader._get_weights_iterator(source_of(made))
        reader.load_weights_and_postprocess(model, weights, None)

    def update(
        self, model: Any, folder: Path | str, was: Path | str | None = None, load_format: str = "auto", **named: Any
    ) -> tuple[bool, str]:
        """Update a model that was loaded from a folder, or None: updated before. Returns what WeightUpdater answers."""
        if was is not None:
            self.updated = ModelConfig.of(was)
        updater = sys.modules["sglang.srt.model_executor.model_runner_components.weight_updater"].WeightUpdater()
        updater.get_model, updater.model_config = lambda: model, self.updated
        answer: tuple[bool, str] = updater.update_weights_from_disk(str(folder), load_format, **named)
        return answer

    options: dict[str, Any] = field(default_factory=dict)
    """Of relayout, for all loads."""
    updated: Any = None
    """The configuration of the model that was updated last."""

    def weights(
        self,
        folder: Path | str,
        rank: int,
        tp: int,
        *,
        load_format: str = "auto",
        draft: int | None = None,
        **options: Any,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """What a model's load_weights would be given."""
        self.start(rank, tp)
        make_loader = sys.modules["sglang.srt.model_loader.loader"].get_model_loader
        loader = make_loader(self.load_config(load_format, {"relayout": options} if options else {}, draft))
        return iter(loader._get_weights_iterator(source_of(ModelConfig.of(folder))))

    def start(self, rank: int, tp: int) -> None:
        """Be the process of a rank, of so many replicas of attention."""
        attention = tp // self.num_replicas
        vars(self.parallel).update(tp_rank=rank, tp_size=tp, attn_tp_rank=rank % attention, attn_tp_size=attention)

    num_replicas: int = 1
    """Of attention, which each cut it for a part of the ranks."""
    places: list[list[int]] | None = None
    """By layers, the experts in the places for them; None: SGLang has no table of these."""
    name: str = "SGLang"
    option: str = "--model-loader-extra-config"
    """Where options of relayout are given."""


def source_of(config: ModelConfig) -> SimpleNamespace:
    """DefaultModelLoader.Source of a model's own weights."""
    return SimpleNamespace(model_or_path=config.model_path, revision=config.revision, prefix="", model_config=config)


AnyEngine: TypeAlias = fake_vllm.Engine | fake_tokenspeed.Engine | Engine
"""All are told in the same words to load."""


def install(monkeypatch: pytest.MonkeyPatch, *, with_plugin: bool = True) -> Engine:
    """Put the modules where the plugin imports them from, and call it twice, as processes of SGLang do."""

    class HookRegistry:
        """Replaces targets by their hooks, and only logs where that fails."""

        hooks: ClassVar[dict[str, Callable[..., Any]]] = {}
        applied: ClassVar[set[str]] = set()

        @classmethod
        def register(cls, target: str, hook: Callable[..., Any], hook_type: HookType) -> None:
            assert hook_type is HookType.AROUND
            cls.hooks[target] = hook

        @classmethod
        def apply_hooks(cls) -> None:
            for target in cls.hooks.keys() - cls.applied:
                owner_path, _, name = target.rpartition(".")
                owner = pkgutil.resolve_name(owner_path)
                original, hook = getattr(owner, name), cls.hooks[target]
                wrapped = functools.wraps(original)(lambda *a, o=original, h=hook, **k: h(o, *a, **k))
                is_static = isinstance(vars(owner)[name], staticmethod)
                setattr(owner, name, staticmethod(wrapped) if is_static else wrapped)
                cls.applied.add(target)

    class LoadConfig:
        def __init__(self, load_format: str, extra: dict[str, Any], draft_model_idx: int | None) -> None:
            self.load_format = load_format
            self.model_loader_extra_config = extra
            self.draft_model_idx = draft_model_idx
            self._verify_load_format()

        def _verify_load_format(self) -> None:
            if self.load_format not in ("auto", "safetensors", "dummy"):
                raise ValueError(f"{self.load_format!r} is not a valid LoadFormat")

    class DefaultModelLoader:
        def __init__(self, load_config: LoadConfig) -> None:
            assert not load_config.model_loader_extra_config, "options that SGLang does not know"
            self.load_config = load_config

        def _prepare_weights(self, model_name_or_path: str, revision: str | None) -> tuple[str, list[str], bool]:
            return model_name_or_path, sorted(map(str, Path(model_name_or_path).glob("*.safetensors"))), True

        def _get_weights_iterator(self, source: Any, **settings: Any) -> Iterator[tuple[str, torch.Tensor]]:
            for file in sorted(Path(source.model_or_path).glob("*.safetensors")):
                yield from load_file(file).items()

        @staticmethod
        def load_weights_only(model: Any, weights: Any, target_device: Any) -> None:
            model.load_weights(weights)

        @staticmethod
        def load_weights_and_postprocess(model: Any, weights: Any, target_device: Any) -> None:
            DefaultModelLoader.load_weights_only(model, weights, target_device)

        @staticmethod
        def restore_weights_before_loading(model: Any, target_device: Any) -> None:
            """Nothing is packed."""

        @classmethod
        def _filter_mtp_weights(cls, weights: Any, prefix: str, draft_model_idx: int) -> Any:
            return ((f"{prefix}draft-{draft_model_idx}.{name}", tensor) for name, tensor in weights)

    class WeightUpdater:
        def update_weights_from_disk(
            self, model_path: str, load_format: str, weight_name_filter: Callable[[str], bool] | None = None
        ) -> tuple[bool, str]:
            """As 0.5.23, which "rolls back" to the path that it has just been given."""
            self.model_config.model_path = model_path
            loader = DefaultModelLoader(LoadConfig(load_format, {}, None))

            def load() -> None:
                given = loader._get_weights_iterator(source_of(self.model_config))
                weights = ((name, one) for name, one in given if weight_name_filter is None or weight_name_filter(name))
                DefaultModelLoader.restore_weights_before_loading(self.get_model(), None)
                loader.load_weights_and_postprocess(self.get_model(), weights, None)

            try:
                load()
            except Exception as error:
                load()
                return False, f"Failed to update weights: {error}.\nRolling back to original weights."
            return True, "Succeeded to update model weights."

    def initialize_model(model_config: Any, load_config: LoadConfig, quant_config: Any = None) -> Any:
        model_config.model.allocate()
        return model_config.model

    class DummyModelLoader(DefaultModelLoader):
        """As all but the default one, it makes values in a way of its own."""

    def get_model_loader(load_config: LoadConfig, model_config: Any = None) -> DefaultModelLoader:
        kind = DummyModelLoader if load_config.load_format == "dummy" else DefaultModelLoader
        return kind(load_config)

    HookRegistry.__module__ = "sglang.srt.plugins.hook_registry"
    LoadConfig.__module__ = "sglang.srt.configs.load_config"
    DefaultModelLoader.__module__ = "sglang.srt.model_loader.loader"
    WeightUpdater.__module__ = "sglang.srt.model_executor.model_runner_components.weight_updater"
    formats: list[str] = ["auto", "safetensors"]
    engine = Engine(formats, LoadConfig, DefaultModelLoader)
    put_modules(
        monkeypatch,
        {
            "sglang.srt.arg_groups.choices": {
                "LOAD_FORMAT_CHOICES": formats,
                "add_load_format_choices": formats.extend,
            },
            "sglang.srt.configs.load_config": {"LoadConfig": LoadConfig},
            "sglang.srt.distributed.utils": {
                "get_pp_indices": lambda layers, rank, size: (rank * layers // size, (rank + 1) * layers // size)
            },
            "sglang.srt.model_loader.loader": {
                "DefaultModelLoader": DefaultModelLoader,
                "_initialize_model": initialize_model,
                "get_model_loader": get_model_loader,
            },
            WeightUpdater.__module__: {"WeightUpdater": WeightUpdater},
            "sglang.srt.plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
            "sglang.srt.runtime_context": {"get_parallel": lambda: engine.parallel},
            "sglang.srt.eplb.expert_location": {
                "get_global_expert_location_metadata": lambda: (
                    None
                    if engine.places is None
                    else SimpleNamespace(
                        physical_to_logical_map_cpu=torch.tensor(engine.places),
                        num_logical_experts=1 + max(engine.places[0]),
                    )
                )
            },
        },
    )
    if with_plugin:
        plugins.sglang()
        plugins.sglang()
        HookRegistry.apply_hooks()
    return engine
