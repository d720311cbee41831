"""Entry points, which engines call in each of their processes. They import nothing heavy and never raise."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from relayout.checkpoint.source import SourceCheckpoint
    from relayout.plans.plan import Plan


def vllm() -> None:
    """Of the group `vllm.general_plugins`: makes `--load-format relayout` known."""
    _register("vllm", _observer)


def vllm_loader(load_config: Any) -> Any:
    """The model loader of `--load-format relayout`, for a vLLM that has the format itself (.github/upstream/vllm).

    Raises:
        ImportError, TypeError: this vLLM is not as expected.
        PlanError: an option is unknown.
    """
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    from relayout.engines.vllm import loader_class

    return loader_class(DefaultModelLoader, observe=_observer)(load_config)


def sglang() -> None:
    """Of the group `sglang.srt.plugins`: converted folders are recognized, and `--load-format relayout` made known."""
    _register("sglang")


def _register(engine: str, *arguments: Any) -> None:
    """Call `register` of an engine's module; where this engine is not as expected, log that, and leave it alone."""
    try:
        import_module(f"relayout.engines.{engine}").register(*arguments)
    except Exception as error:
        logging.getLogger(f"{engine}.relayout").warning("relayout: not available in this %s: %r", engine, error)


def _observer() -> tuple[str, Callable[[SourceCheckpoint, int], Plan]]:
    """What finds how the classes of the installed vLLM cut a checkpoint that no built-in plan is for."""
    from relayout.planning import observer

    return observer()
