"""Entry points, which engines call in each of their processes. They import no large packages.

They raise only under a trust policy: a policy that cannot be enforced ends the process.
"""

from __future__ import annotations

import logging
import os
import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from relayout import extensions

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


_LOADERS = {"vllm": "vllm.model_executor.model_loader", "tokenspeed": "tokenspeed.runtime.model_loader.loader"}
"""Modules that the engine plugins change. Only processes that load weights import them."""


def vllm() -> None:
    """Register `--load-format relayout` once vLLM imports its loaders: the plugin of `vllm.general_plugins`."""
    _register_after_import("vllm")


def vllm_loader(load_config: Any) -> Any:
    """Return the loader of `--load-format relayout`, for a vLLM with built-in support (.github/upstream/vllm).

    Raises:
        ImportError, TypeError: this version of vLLM is not supported.
        PlanError: an option is unknown.
    """
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    return _plugin("vllm").loader_class(DefaultModelLoader)(load_config)


def sglang() -> None:
    """Make SGLang recognize converted folders and `--load-format relayout`: the plugin of `sglang.srt.plugins`."""
    _register("sglang")


def tokenspeed() -> None:
    """Make TokenSpeed recognize converted folders once it imports its loaders: the plugin of `tokenspeed.plugins`."""
    _register_after_import("tokenspeed")


def _register_after_import(engine: str) -> None:
    """Call `_register` once the engine has imported its loaders; importing them in every process would take seconds."""
    if _LOADERS[engine] in sys.modules:
        _register(engine)
    elif not any(isinstance(finder, _AfterImport) and finder.engine == engine for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(engine))


class _AfterImport(MetaPathFinder):
    """An import hook that registers relayout with an engine once the engine's loaders have been imported."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self._is_asking = False
        """True during the search by the other finders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's spec from the other finders, changed so that the import ends with `_register`."""
        if fullname != _LOADERS[self.engine] or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = find_spec(fullname)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:  # Not earlier: a caller of `find_spec` may not import the module.
                    sys.meta_path.remove(self)
                _register(self.engine)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def _register(engine: str) -> None:
    """Call `register` of an engine's module; if that fails, log the error and leave the engine unchanged."""
    try:
        _plugin(engine).register()
    except Exception as error:
        if "RELAYOUT_TRUST" in os.environ:
            raise SystemExit(f"relayout: RELAYOUT_TRUST cannot be kept in this {engine}: {error!r}") from error
        logging.getLogger(f"{engine}.relayout").warning("relayout: not available in this %s: %r", engine, error)


def _plugin(engine: str) -> Any:
    """Return the module that registers an engine's loader, with updates of a live engine if they are installed."""
    return extensions.find(f"live.{engine}_updates") or import_module(f"relayout.engines.{engine}")
