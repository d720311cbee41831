"""Entry points: what engines call in each of their processes. Nothing heavy is imported, and nothing is raised."""

from __future__ import annotations

import logging
from importlib import import_module


def vllm() -> None:
    """Of the group `vllm.general_plugins`: makes `--load-format relayout` known."""
    _register("vllm")


def sglang() -> None:
    """Of the group `sglang.srt.plugins`: converted folders are recognized, and `--load-format relayout` made known."""
    _register("sglang")


def _register(engine: str) -> None:
    """Call `register` of an engine's module; where this engine is not as expected, log that, and leave it alone."""
    try:
        from relayout.engines import warming

        warming.start()
        import_module(f"relayout.engines.{engine}").register()
    except Exception as error:
        logging.getLogger(f"{engine}.relayout").warning("relayout: not available in this %s: %r", engine, error)
