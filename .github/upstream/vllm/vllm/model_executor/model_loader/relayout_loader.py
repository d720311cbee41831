# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project

from __future__ import annotations

import importlib
from collections.abc import Iterator

import torch
from torch import nn

from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

_RELAYOUT_MODULE = "relayout.plugins"


class RelayoutModelLoader(BaseModelLoader):
    """Thin vLLM loader wrapper for checkpoints that relayout has converted."""

    def __init__(self, load_config: LoadConfig):
        super().__init__(load_config)
        try:
            module = importlib.import_module(_RELAYOUT_MODULE)
            make_loader = module.vllm_loader
        except (ModuleNotFoundError, AttributeError) as exc:
            # A package called relayout on PyPI is another project.
            if getattr(exc, "name", None) not in (
                "relayout",
                "vllm_loader",
                _RELAYOUT_MODULE,
            ):
                raise
            raise ImportError(
                "The 'relayout' load format requires the relayout Python package. "
                "Install it with `pip install safetensors-relayout`."
            ) from exc
        self._loader = make_loader(load_config)

    def download_model(self, model_config: ModelConfig) -> None:
        self._loader.download_model(model_config)

    def create_model(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = ""
    ) -> nn.Module:
        return self._loader.create_model(vllm_config, model_config, prefix)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        self._loader.load_weights(model, model_config)

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        return self._loader.get_all_weights(model_config, model)
