"""Updates of the weights of SGLang's own classes: by deltas, folders, steps, plain checkpoints, and by wrong ones."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from support.conversions import reference_tensors
from support.updates_worker import TP, write_steps

import relayout
from engines.cases import source_of
from engines.environments import Environment
from engines.starts.updates import write_changed

UPDATED = ("llama", "qwen2", "qwen3_moe")
_PAUSES = ((2, 0.01), (10, 0.01), (20, 0.01), (10, 0.001), (10, 0.05), (10, 0.2))
"""Layers, of about 0.1 GB each, and the share of the elements that change."""
_NUM_TURNS = 3
_LEFT_OUT = "model.norm.weight"


def updates(environment: Environment, work: Path, only: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """What each update comes to: what SGLang answers, and the tensors that are not those of a fresh start."""
    for family in UPDATED:
        if fnmatch(family, only):
            root = work / "updates"
            shutil.rmtree(root, ignore_errors=True)
            _write(family, root, work)
            for what, outcome in environment.result(work, "comparing.sglang_updates", root).items():
                yield f"{family}, {what}", outcome
    if fnmatch("pauses", only):
        for layers, share in _PAUSES:
            root = work / f"pause-{layers}-{share}"
            shutil.rmtree(root, ignore_errors=True)
            write_changed(root, layers, share)
            found = environment.result(work, "comparing.sglang_pauses", root, _NUM_TURNS)
            shutil.rmtree(root)
            yield f"pause, {layers} layers, {share:.2%}", found


def _write(family: str, root: Path, work: Path) -> None:
    write_steps(source_of(family, work), root, 2)
    relayout.convert(source_of("qwen3", work), root / "other-model", tp=TP)
    publisher = relayout.Publisher(root / "root", config=root / "model-0", tp=TP)
    for step in range(3):
        publisher.publish(reference_tensors(root / f"model-{step}"), 10 + step)
    for name in ("lacks", "truncated"):
        shutil.copytree(root / "model-1", root / name)
    _leave_out(root / "lacks")
    relayout.convert(root / "lacks", root / "lacks-tp2", tp=TP)
    _divide(root / "truncated")


def _leave_out(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        tensors.pop(_LEFT_OUT, None)
        save_file(tensors, file)
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)


def _divide(folder: Path) -> None:
    """Put the tensors of a checkpoint into two files, of which the second is cut off."""
    tensors = reference_tensors(folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    names = sorted(tensors)
    halves = {"model-1.safetensors": names[: len(names) // 2], "model-2.safetensors": names[len(names) // 2 :]}
    for file, of_file in halves.items():
        save_file({name: tensors[name] for name in of_file}, folder / file)
    weight_map = {name: file for file, of_file in halves.items() for name in of_file}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    os.truncate(folder / "model-2.safetensors", 9000)
