"""The packages, from the bottom up, and what each may import beside itself and `errors`. CONTRIBUTING.md shows them."""

from __future__ import annotations

LAYERS: dict[str, tuple[str, ...]] = {
    "errors": (),
    "core": (),
    "reporting": (),
    "format": ("core",),
    "storage": ("core", "format"),
    "publish": ("core", "storage"),
    "checkpoint": ("core", "format", "storage", "publish"),
    "plans": ("core", "format", "storage"),
    "observe": ("core", "reporting", "format", "storage", "checkpoint", "plans", "loader"),
    "conversion": ("core", "reporting", "format", "storage", "publish", "checkpoint", "plans"),
    "planning": ("core", "reporting", "format", "storage", "checkpoint", "plans", "observe", "conversion"),
    "cache": ("core", "reporting", "format", "storage", "checkpoint", "plans", "conversion"),
    "commands": (
        *("core", "reporting", "format", "storage", "publish"),
        *("checkpoint", "plans", "planning", "conversion", "cache"),
    ),
    "loader": ("core", "reporting", "format", "storage", "checkpoint", "cache"),
    "saving": (
        *("core", "reporting", "format", "storage", "publish", "checkpoint", "plans"),
        *("conversion", "planning", "loader"),
    ),
    "steps": (
        *("core", "reporting", "format", "storage", "publish", "checkpoint", "plans"),
        *("conversion", "planning", "loader", "saving", "transformers"),
    ),
    "benchmark": (
        *("core", "reporting", "format", "storage", "checkpoint", "plans", "planning"),
        *("commands", "loader"),
    ),
    "html_report": ("core", "reporting", "format", "storage", "checkpoint", "conversion", "planning"),
    "engines": (
        "core",
        "reporting",
        "format",
        "storage",
        "checkpoint",
        "plans",
        "conversion",
        "cache",
        "loader",
        "live",
    ),
    "live": ("core", "format", "storage", "checkpoint", "cache", "loader", "engines"),
    "plugins": ("checkpoint", "plans", "planning", "engines"),
    "transformers": (
        *("core", "reporting", "checkpoint", "plans", "conversion", "planning", "loader"),
        *("saving", "engines"),
    ),
    "testing": ("core", "format", "storage", "checkpoint", "loader"),
    "cli": (
        *("core", "reporting", "format", "storage", "plans", "observe", "conversion", "planning"),
        *("commands", "loader", "benchmark", "html_report", "steps"),
    ),
}
"""`plans` reads files only where a person names a plan file."""

EXCEPTIONS: dict[str, tuple[str, ...]] = {
    "loader.sources.reshard": ("plans",),
}
"""Modules that import more than their package may: what slices plain checkpoints, or joins the slices of several ranks,
needs plans for it."""
