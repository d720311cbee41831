"""Updates of a real vLLM's weights while it lives: the tokens after each, beside those of fresh starts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import relayout
from engines.cases import source_of
from engines.environments import Environment
from engines.starts.starting import start

TP = 2
NUM_STEPS = 20
_SETTINGS: dict[str, Any] = {"tensor_parallel_size": TP}
_LIVE = _SETTINGS | {"worker_extension_cls": "engines.starts.vllm_tokens.Fragile"}
_FIRST, _LAST, _OTHER = "step-0", f"step-{NUM_STEPS}", "other-model"


@dataclass(frozen=True)
class _Update:
    """What an engine is updated from, and what it must then have."""

    name: str
    source: str
    content: str
    """The folder that a fresh start gives the same tokens on."""
    reason: str = ""
    """Part of why it is refused."""


_UPDATES = (
    *(_Update(f"delta {step}", f"delta-{step}", f"step-{step}") for step in range(1, NUM_STEPS + 1)),
    _Update("a delta of another base", "delta-1", _LAST, "applies to content"),
    _Update("a folder of another model", _OTHER, _LAST, "have another dtype, shape or slice"),
    _Update("no folder", "nowhere", _LAST, "is not a folder"),
    _Update("a damaged folder", "damaged-folder", _LAST, "damaged"),
    _Update("the first folder", _FIRST, _FIRST),
    _Update("a damaged delta", "damaged-delta", _FIRST, "damaged"),
    _Update("delta 1 once more", "delta-1", "step-1"),
)
_FAILS = _Update("a failure while weights change", "delta-2#fail_while_updating", "", "the store is gone")
_COMPARED = {_FIRST, "step-1", _LAST}
"""Folders that fresh starts are made on."""


def updates(environment: Environment, work: Path, family: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of a model: what one engine says to deltas and folders, right ones and wrong ones, and what it then generates."""
    environment = environment.with_variables(VLLM_ENABLE_V1_MULTIPROCESSING="0")
    root = work / "updates" / family
    shutil.rmtree(root, ignore_errors=True)
    _write_steps(source_of(family, work, wide=True), root)
    relayout.convert(source_of("qwen3", work, wide=True), root / _OTHER, tp=TP)
    fresh = {name: start(environment, root / name, _SETTINGS, root / f"{name}.log").result for name in _COMPARED}
    settings = _LIVE | {"updates": [str(root / update.source) for update in (*_UPDATES, _FAILS)]}
    live = start(environment, root / _FIRST, settings, root / "live.log").result
    if "error" in live:
        yield family, {"error": live["error"]}
        return
    *said, failed = live["updates"]
    before = live
    for update, outcome in zip(_UPDATES, said, strict=True):
        tokens = {key: outcome.get(key) for key in ("tokens", "logprobs")}
        if update.content in _COMPARED:
            changes = any(tokens[key] != before[key] for key in tokens)
            result = {"same": tokens == fresh[update.content], "tokens_of": update.content, "tokens_change": changes}
            yield f"{family}, {update.name}", result | _said(update, outcome, root)
        before = tokens
    yield f"{family}, {_FAILS.name}", {"died": failed.get("died", "")[:120]} | _said(_FAILS, failed, root)
    sizes = [round(outcome["mib"], 1) for outcome in said]
    yield f"{family}, memory", {"mib_after_10": sizes[9], "mib_after_all": sizes[-1], "num_updates": len(sizes)}


def _said(update: _Update, outcome: dict[str, Any], root: Path) -> dict[str, Any]:
    refused: str = outcome.get("refused", "")
    if update.reason:
        return {"as_expected": update.reason in refused, "refused": refused.replace(f"{root}/", "")[:200]}
    return {"as_expected": not refused and len(set(outcome["contents"])) == 1}


def _write_steps(source: Path, root: Path) -> None:
    """Converted folders of some steps of a training, and deltas between them."""
    for step in range(NUM_STEPS + 1):
        model = root / f"model-{step}"
        shutil.copytree(root / f"model-{step - 1}" if step else source, model)
        for shard in sorted(model.glob("*.safetensors")) if step else ():
            content = np.fromfile(shard, np.uint8)
            start_of_data = 8 + int.from_bytes(content[:8].tobytes(), "little")
            # Of each BF16, the low byte has most of the mantissa.
            content[start_of_data + 2 * step :: 2 * NUM_STEPS] ^= 0x40
            content.tofile(shard)
        relayout.convert(model, root / f"step-{step}", tp=TP)
        if step:
            relayout.delta(root / f"step-{step - 1}", root / f"step-{step}", root / f"delta-{step}")
    for name, damaged in (("delta-1", "damaged-delta"), (_LAST, "damaged-folder")):
        shutil.copytree(root / name, root / damaged)
        file = max((root / damaged).glob("model-rank-1-*"), key=lambda one: one.stat().st_size)
        content = np.fromfile(file, np.uint8)
        content[len(content) // 2] ^= 1
        content.tofile(file)
