"""Optional packages of relayout. All other packages find them by name and never import them directly."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

_WITH_COMMANDS = ("train", "benchmark", "html_report", "observe")
"""Packages that add commands, in the order of the help. Their module `commands` contains the commands, and their
group."""


def find(module: str) -> ModuleType | None:
    """Import a module of an extension, such as "observe.observation". Return None if it is not installed."""
    name = f"relayout.{module}"
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):  # The module, or its package.
            return None
        raise


def with_commands() -> Iterator[ModuleType]:
    """Yield the modules that add commands."""
    for package in _WITH_COMMANDS:
        module = find(f"{package}.commands")
        if module is not None:
            yield module
