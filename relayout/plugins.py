"""Entry points, which engines call in each of their processes. They import nothing heavy.

Only under a policy do they raise: what cannot be kept ends the process.
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
"""The modules in which the plugins of engines change something: only processes that load weights import them."""


def vllm() -> None:
    """Make `--load-format relayout` known when vLLM imports its loaders: the plugin of `vllm.general_plugins`."""
    _register_after_import("vllm")


def vllm_loader(load_config: Any) -> Any:
    """The model loader of `--load-format relayout`, for a vLLM that has the format itself (.github/upstream/vllm).

    Raises:
        ImportError, TypeError: this vLLM is not as expected.
        PlanError: an option is unknown.
    """
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    return _plugin("vllm").loader_class(DefaultModelLoader)(load_config)


def sglang() -> None:
    """Make SGLang recognize converted folders and know `--load-format relayout`: the plugin of `sglang.srt.plugins`."""
    _register("sglang")


def tokenspeed() -> None:
    """Make TokenSpeed recognize converted folders when it imports its loaders: the plugin of `tokenspeed.plugins`."""
    _register_after_import("tokenspeed")


def _register_after_import(engine: str) -> None:
    """Call `_register` once the engine has imported its loaders: to import them in every process would cost seconds."""
    if _LOADERS[engine] in sys.modules:
        _register(engine)
    elif not any(isinstance(finder, _AfterImport) and finder.engine == engine for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(engine))


class _AfterImport(MetaPathFinder):
    """Registers with an engine once its loaders have been imported."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self._is_asking = False
        """Whether the other finders are being asked."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module as others find it; its import ends with `_register`."""
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
                if self in sys.meta_path:  # Not before: others may ask where the module is, and import nothing.
                    sys.meta_path.remove(self)
                _register(self.engine)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def _register(engine: str) -> None:
    """Call `register` of an engine's module; where this engine is not as expected, log that, and leave it alone."""
    try:
        _plugin(engine).register()
    except Exception as error:
        if "RELAYOUT_TRUST" in os.environ:
            raise SystemExit(f"relayout: RELAYOUT_TRUST cannot be kept in this {engine}: {error!r}") from error
        logging.getLogger(f"{engine}.relayout").warning("relayout: not available in this %s: %r", engine, error)


def _plugin(engine: str) -> Any:
    """Return the module that registers an engine's loader: with updates of a live engine, if they are installed."""
    return extensions.find(f"live.{engine}_updates") or import_module(f"relayout.engines.{engine}")
