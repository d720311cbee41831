"""Packages called vllm and sglang, for processes of their own, and models of the one class that they have."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support import fake_sglang_package, fake_vllm_package

import relayout

_MODULES = {"vllm": fake_vllm_package.MODULES, "sglang": fake_sglang_package.MODULES}


def write_package(engine: str, folder: Path) -> None:
    """Make the package in a folder that is then named by PYTHONPATH."""
    for name, text in _MODULES[engine].items():
        file = folder / engine / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))


def without_package(engine: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be imported in processes that are started."""
    (folder / "packages").mkdir(exist_ok=True)
    (folder / "packages" / f"{engine}.py").write_text("raise ImportError('none here')")
    monkeypatch.setenv("PYTHONPATH", f"{folder / 'packages'}:{Path(relayout.__file__).parents[1]}")


HIDDEN = 16


def write_source(folder: Path, **config: Any) -> Mapping[str, np.ndarray[Any, Any]]:
    """A model of 4 heads of 4 elements; `unused` is what its class does not take."""
    shapes = {
        "embed.weight": (64, HIDDEN),
        "qkv.weight": (3 * HIDDEN, HIDDEN),
        "out.weight": (HIDDEN, HIDDEN),
        "odd.weight": (8, HIDDEN),
        "unused": (5,),
        **{f"unused.{number}": (50,) for number in range(config.pop("num_unused", 0))},
    }
    tensors = {
        name: np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape) for name, shape in shapes.items()
    }
    tensors |= {name: np.full(1, value, np.float32) for name, value in config.pop("more", {}).items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps({"model_type": "odd", "hidden_size": HIDDEN, "num_attention_heads": 4, **config})
    )
    return tensors


def assert_holds_slices(folder: Path, tensors: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Each of the four ranks of a folder has what the class copies."""
    for rank in range(4):
        held = relayout.load(folder, rank)
        rows = slice(12 * rank, 12 * (rank + 1))  # q, k and v of its head are neighbors, as stored.
        np.testing.assert_array_equal(held["qkv.weight"].numpy(), tensors["qkv.weight"][rows])
        np.testing.assert_array_equal(held["out.weight"].numpy(), tensors["out.weight"][:, 4 * rank : 4 * (rank + 1)])
        np.testing.assert_array_equal(held["embed.weight"].numpy(), tensors["embed.weight"])
        # Three rows; the last rank has those that no rank takes, too.
        odd = slice(rank, rank + 3 if rank < 3 else None)
        np.testing.assert_array_equal(held["odd.weight"].numpy(), tensors["odd.weight"][odd])
