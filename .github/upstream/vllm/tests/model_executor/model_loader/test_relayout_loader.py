# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project

import sys
from types import ModuleType

import pytest
from torch import nn

from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.relayout_loader import RelayoutModelLoader


class _Loader:
    def __init__(self, load_config):
        self.load_config = load_config
        self.calls = []

    def download_model(self, model_config):
        self.calls.append(("download_model", model_config))

    def create_model(self, vllm_config, model_config, prefix=""):
        self.calls.append(("create_model", vllm_config, model_config, prefix))
        return nn.Linear(1, 1)

    def load_weights(self, model, model_config):
        self.calls.append(("load_weights", model, model_config))

    def get_all_weights(self, model_config, model):
        self.calls.append(("get_all_weights", model_config, model))
        return iter([("weight", None)])


@pytest.fixture
def relayout(monkeypatch):
    """The part of the package that vLLM calls."""
    package, plugins = ModuleType("relayout"), ModuleType("relayout.plugins")
    plugins.vllm_loader = _Loader
    package.plugins = plugins
    monkeypatch.setitem(sys.modules, "relayout", package)
    monkeypatch.setitem(sys.modules, "relayout.plugins", plugins)
    return plugins


def test_format_is_registered(relayout):
    config = LoadConfig(load_format="relayout")
    loader = get_model_loader(config)
    assert type(loader) is RelayoutModelLoader
    assert loader._loader.load_config is config


def test_calls_are_passed_on(relayout):
    loader = RelayoutModelLoader(LoadConfig(load_format="relayout"))
    loader.download_model("model config")
    model = loader.create_model("vllm config", "model config", "prefix")
    assert isinstance(model, nn.Linear)
    loader.load_weights(model, "model config")
    assert dict(loader.get_all_weights("model config", model)) == {"weight": None}
    assert loader._loader.calls == [
        ("download_model", "model config"),
        ("create_model", "vllm config", "model config", "prefix"),
        ("load_weights", model, "model config"),
        ("get_all_weights", "model config", model),
    ]


def test_missing_package_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "relayout", None)
    monkeypatch.delitem(sys.modules, "relayout.plugins", raising=False)
    with pytest.raises(ImportError, match="pip install safetensors-relayout"):
        RelayoutModelLoader(LoadConfig(load_format="relayout"))


def test_package_of_the_same_name_is_said(relayout):
    del relayout.vllm_loader
    with pytest.raises(ImportError, match="pip install safetensors-relayout"):
        RelayoutModelLoader(LoadConfig(load_format="relayout"))


def test_other_import_errors_are_raised(relayout, monkeypatch):
    def fails(load_config):
        raise ModuleNotFoundError("No module named 'xxhash'", name="xxhash")

    monkeypatch.setattr(relayout, "vllm_loader", fails)
    with pytest.raises(ModuleNotFoundError, match="xxhash"):
        RelayoutModelLoader(LoadConfig(load_format="relayout"))
