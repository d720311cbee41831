"""The packages, from the bottom up, and what each may import beside itself and `EVERYWHERE`.

CONTRIBUTING.md shows them. Imports for type checkers count, too.
"""

from __future__ import annotations

EVERYWHERE = ("errors", "core", "format", "reporting")
"""Values, arithmetic and messages, which every package above them may import."""

CORE: dict[str, tuple[str, ...]] = {
    "errors": (),
    "core": (),
    "reporting": (),
    "format": (),
    "storage": (),
    "publish": ("storage",),
    "checkpoint": ("storage", "publish"),
    "plans": ("storage",),
    "conversion": ("extensions", "storage", "publish", "checkpoint", "plans"),
    "cache": ("storage", "checkpoint", "plans", "conversion"),
    "commands": ("storage", "publish", "checkpoint", "plans", "conversion", "cache"),
    "loader": ("storage", "checkpoint", "cache"),
    "engines": ("storage", "checkpoint", "plans", "conversion", "cache", "loader"),
    "extensions": (),
    "plugins": ("extensions", "checkpoint", "plans", "conversion", "engines"),
    "cli": ("extensions", "storage", "plans", "conversion", "commands", "loader"),
}
"""`plans` reads files only where a person names a plan file."""

EXTENSIONS: dict[str, tuple[str, ...]] = {
    "observe": ("storage", "checkpoint", "plans", "loader", "cli"),
    "live": ("storage", "checkpoint", "cache", "loader", "engines"),
    "train": ("storage", "publish", "checkpoint", "plans", "conversion", "loader", "engines", "cli"),
    "benchmark": ("storage", "checkpoint", "plans", "conversion", "commands", "loader", "cli"),
    "html_report": ("storage", "checkpoint", "conversion", "cli"),
    "testing": ("storage", "checkpoint", "loader"),
}
"""Packages that no other package imports: each can be deleted, and the rest works (`relayout/extensions.py`)."""

LAYERS = CORE | EXTENSIONS

EXCEPTIONS: dict[str, tuple[str, ...]] = {
    "loader.sources.reshard": ("plans",),
}
"""Modules that import more than their package may: what slices plain checkpoints, or joins the slices of several ranks,
needs plans for it."""
