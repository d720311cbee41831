"""Modules that must never be imported from a folder, such as a working folder that is an untrusted checkpoint."""

from __future__ import annotations

from pathlib import Path

TRAPS = ["json", "xxhash", "numpy", "torch", "vllm", "relayout/__init__", "sitecustomize", "usercustomize"]
_TRAP = """
import os
with open({caught!r}, "a") as file:
    file.write({name!r} + "\\n")
raise ImportError("a trap")
"""


def set_traps(folder: Path, caught: Path) -> None:
    """Write the modules into the folder; one that is imported adds its name to the file `caught`."""
    for name in TRAPS:
        trap = folder / f"{name}.py"
        trap.parent.mkdir(exist_ok=True)
        trap.write_text(_TRAP.format(caught=str(caught), name=name))


def caught_in(caught: Path) -> list[str]:
    """The modules that were imported."""
    return caught.read_text().split() if caught.exists() else []
