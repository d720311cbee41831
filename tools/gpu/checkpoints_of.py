"""The checkpoints that steps load: Llama-3.1-8B shapes with some layers, as it is and converted, made once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import relayout
from relayout.benchmark.made import write_llama


def source_of(work: Path, num_layers: int) -> Path:
    """The plain checkpoint."""
    return _made(work / f"llama-{num_layers}", lambda folder: write_llama(folder, num_layers, shard_nbytes=10**9))


def converted_of(work: Path, num_layers: int, tp: int) -> Path:
    """The converted one; interrupted conversions go on."""
    folder = work / f"llama-{num_layers}-tp{tp}"
    if not folder.exists():
        relayout.convert(source_of(work, num_layers), folder, tp=tp)
    return folder


def _made(folder: Path, make: Callable[[Path], object]) -> Path:
    if not folder.exists():
        fresh = folder.with_suffix(".new")
        shutil.rmtree(fresh, ignore_errors=True)
        make(fresh)
        os.sync()
        fresh.rename(folder)
    return folder
