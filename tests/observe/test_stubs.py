"""What takes the place of vLLM's kernels, classes and memory; that classes are built with it is in test_vllm.py."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from relayout.observe.stubs import (
    of_whole_groups,
    stub_classes,
    stub_inputs,
    stub_quantization,
    to_device_unless_meta,
    without_tokenizer,
)

# Kernels: they refuse what those for GPUs refuse (vLLM 0.33, `check_marlin_supports_layer`).


def chosen(columns: int, num_ranks: int, group: int) -> str:
    shapes = {"full_weight_shape": (columns, 64), "partition_weight_shape": (columns // num_ranks, 64)}
    kernel: str = of_whole_groups(lambda _config: "a kernel")(SimpleNamespace(group_size=group, **shapes))
    return kernel


@pytest.mark.parametrize(
    ("columns", "num_ranks", "group"),
    [(13824, 4, 128), (14336, 16, 128), (25600, 8, 128), (13824, 8, -1), (128, 2, 128)],
)
def test_ranks_of_whole_groups_or_of_one_scale_have_a_kernel(columns: int, num_ranks: int, group: int) -> None:
    assert chosen(columns, num_ranks, group) == "a kernel"


@pytest.mark.parametrize(("columns", "num_ranks"), [(13824, 8), (25600, 16), (29568, 2)])
def test_values_that_share_a_scale_are_not_on_two_ranks(columns: int, num_ranks: int) -> None:
    with pytest.raises(ValueError, match=r"not a multiple of 128, which share a scale"):
        chosen(columns, num_ranks, 128)


# Memory.


def test_a_module_without_memory_keeps_its_device_and_takes_the_dtype() -> None:
    to = to_device_unless_meta(torch.nn.Module.to)
    module = torch.nn.Sequential(torch.nn.Linear(4, 4, device="meta"), torch.nn.Linear(4, 4))
    module.register_buffer("count", torch.zeros(1, dtype=torch.int64))
    assert to(module, "cpu", dtype=torch.bfloat16) is module
    assert [(one.device.type, one.dtype) for one in module.parameters()] == [
        ("meta", torch.bfloat16), ("meta", torch.bfloat16), ("cpu", torch.bfloat16), ("cpu", torch.bfloat16)
    ]  # fmt: skip
    assert module.get_buffer("count").dtype == torch.int64
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        torch.nn.Linear(4, 4, device="meta").to("cpu")


def test_a_module_with_memory_is_moved_by_torch() -> None:
    moved = to_device_unless_meta(torch.nn.Module.to)(torch.nn.Linear(4, 4), device="meta")
    assert all(one.is_meta for one in moved.parameters())


# Classes.


def test_hashes_of_ngrams_are_built_without_a_tokenizer() -> None:
    class Hashes(torch.nn.Module):
        def __init__(self, config: object, layout: object, swa_cache_module: object) -> None:
            raise OSError("no tokenizer.json")

    Hashes.__init__ = without_tokenizer(Hashes)  # type: ignore[method-assign]
    cache = torch.nn.Linear(1, 1)
    made = Hashes(None, "a layout", cache)
    assert (made.layout, made.swa_cache_module) == ("a layout", cache)


def test_a_package_that_chose_classes_for_a_cpu_has_those_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    package, models, found = "vllm.models.chosen", "vllm.model_executor.models.registry", []
    modules = {
        package: {"__all__": ["Model", "Draft"], "Model": "for CPUs", "Draft": "none", "Other": "for CPUs"},
        f"{package}.nvidia.model": {"Model": "for GPUs", "Other": "for GPUs"},
        f"{package}.nvidia.mtp": {"Draft": "a draft"},
        models: {"_try_load_model_cls": SimpleNamespace(cache_clear=lambda: found.append("cleared"))},
    }
    for name, values in modules.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    stub_classes(package)
    chosen = vars(sys.modules[package])
    assert {name: chosen[name] for name in ("Model", "Draft", "Other")} == {
        "Model": "for GPUs", "Draft": "a draft", "Other": "for CPUs"
    }  # fmt: skip
    assert found == ["cleared"]


class ModelConfig:
    """vLLM's, of a model whose processor of inputs asks for a tokenizer."""

    is_multimodal_model = True

    def _supports_multimodal_inputs(self) -> bool:
        raise ValueError("You cannot pass text prompts when `skip_tokenizer_init=True`")


def test_a_class_takes_its_inputs_without_the_processor_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("vllm.config.model")
    monkeypatch.setattr(module, "ModelConfig", ModelConfig, raising=False)
    for name in ("vllm", "vllm.config", module.__name__):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(ModelConfig, "_supports_multimodal_inputs", ModelConfig._supports_multimodal_inputs)
    stub_inputs()
    assert ModelConfig()._supports_multimodal_inputs()


@pytest.mark.parametrize(("model_type", "taken"), [("deepseek_v41", "own"), ("deepseek_v4", "older"), (None, "older")])
def test_deepseek_v41_has_its_own_quantization(
    model_type: str | None, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package, config in {"deepseek_v4": "older", "deepseek_v41": "own"}.items():
        module = ModuleType(f"vllm.models.{package}")
        vars(module)["DeepseekV4FP8Config"] = config
        monkeypatch.setitem(sys.modules, module.__name__, module)
    stub_quantization(model_type)
    assert vars(sys.modules["vllm.models.deepseek_v4"])["DeepseekV4FP8Config"] == taken
