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
    "conversion": ("core", "reporting", "format", "storage", "publish", "checkpoint", "plans", "observe"),
    "cache": ("core", "reporting", "format", "storage", "checkpoint", "plans", "conversion"),
    "commands": (
        *("core", "reporting", "format", "storage", "publish"),
        *("checkpoint", "plans", "conversion", "cache"),
    ),
    "loader": ("core", "reporting", "format", "storage", "checkpoint", "cache"),
    "train": (
        *("core", "reporting", "format", "storage", "publish", "checkpoint", "plans"),
        *("conversion", "loader", "engines"),
    ),
    "rl": ("format", "checkpoint", "loader", "train"),
    "benchmark": (
        *("core", "reporting", "format", "storage", "checkpoint", "plans", "conversion"),
        *("commands", "loader"),
    ),
    "html_report": ("core", "reporting", "format", "storage", "checkpoint", "conversion"),
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
    ),
    "live": ("core", "format", "storage", "checkpoint", "cache", "loader", "engines"),
    "plugins": ("checkpoint", "plans", "engines"),
    "clusters": ("reporting", "conversion"),
    "testing": ("core", "format", "storage", "checkpoint", "loader"),
    "cli": (
        *("core", "reporting", "format", "storage", "plans", "observe", "conversion"),
        *("commands", "loader", "benchmark", "html_report", "train", "clusters"),
    ),
}
"""`plans` reads files only where a person names a plan file."""

EXCEPTIONS: dict[str, tuple[str, ...]] = {
    "loader.sources.reshard": ("plans",),
}
"""Modules that import more than their package may: what slices plain checkpoints, or joins the slices of several ranks,
needs plans for it."""
