"""What the plugin does to a process of an engine that does not use it: what it imports, and what it changes."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

LOADERS = {
    "vllm": ("vllm.model_executor.model_loader.default_loader",),
    "sglang": (
        "sglang.srt.arg_groups.choices",
        "sglang.srt.configs.load_config",
        "sglang.srt.plugins.hook_registry",
    ),
    "tokenspeed": ("tokenspeed",),
}
"""Modules of an engine that the plugin needs for its registration."""
WATCHED = ("vllm", "sglang", "tokenspeed", "torch", "transformers", "safetensors", "huggingface_hub")
"""Packages in which every attribute of modules and classes is compared, and every entry of dicts, lists and sets."""


def footprint(engine: str) -> dict[str, list[str]]:
    """Import what an engine's process has, call the plugin, and compare.

    Returns:
        `imported`: modules, but not relayout's own, and whether the loader is one of these; `changed`: names of what
        has another value.
    """
    for name in LOADERS[engine]:
        importlib.import_module(name)
    plugins = importlib.import_module("relayout.plugins")
    modules = set(sys.modules)
    before = dict(_values(modules))
    getattr(plugins, engine)()
    after = dict(_values(modules))
    new = set(sys.modules) - modules
    return {
        "imported": sorted(name for name in new if name.split(".")[0] != "relayout" or "loader" in name.split(".")),
        "changed": sorted(name for name in {*before, *after} if before.get(name) != after.get(name)),
    }


def _values(modules: set[str]) -> Iterator[tuple[str, Any]]:
    """What can be changed, by its name; objects by their addresses."""
    yield "environment", dict(os.environ)
    yield "signal handlers", [signal.getsignal(number) for number in signal.valid_signals()]
    yield "threads", [thread.ident for thread in threading.enumerate()]
    yield "import hooks", [*map(id, sys.meta_path), *map(id, sys.path_hooks), *sys.path]
    for name in modules:
        module = sys.modules.get(name)
        if name.split(".")[0] not in WATCHED or module is None:
            continue
        for attribute, value in list(vars(module).items()):
            yield f"{name}.{attribute}", id(value)
            yield from _inside(f"{name}.{attribute}", value)


def _inside(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if type(value) is dict:  # Others may make their entries when they are asked for them.
        yield from ((f"{name}[{key!r}]", id(one)) for key, one in list(value.items()))
    elif type(value) in (list, set):
        yield f"{name}[...]", list(map(id, list(value)))
    elif isinstance(value, type) and value.__module__.split(".")[0] in WATCHED:
        for key, one in list(vars(value).items()):
            yield f"{name}.{key}", id(one)
            if not isinstance(one, type):
                yield from _inside(f"{name}.{key}", one)


if __name__ == "__main__":
    print("RESULT", json.dumps(footprint(sys.argv[1])))
