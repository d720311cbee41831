"""Updates of a real vLLM's weights while it lives: the tokens after each, beside those of fresh starts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
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
_LIVE = _SETTINGS | {"worker_extension_cls": "relayout.engines.live.WeightUpdates"}
_FIRST, _LAST, _OTHER = "step-0", f"step-{NUM_STEPS}", "other-model"


def updates(environment: Environment, work: Path, family: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of a model: what one engine says to deltas and folders, right ones and wrong ones, and what it then generates."""
    environment = environment.with_variables(VLLM_ENABLE_V1_MULTIPROCESSING="0")
    root = work / "updates" / family
    shutil.rmtree(root, ignore_errors=True)
    _write_steps(source_of(family, work, wide=True), root)
    relayout.convert(source_of("qwen3", work, wide=True), root / _OTHER, tp=TP)
    fresh = {name: start(environment, root / name, _SETTINGS, root / f"{name}.log").result for name in _fresh()}
    sources = [source for source, _, _ in _updates()]
    settings = _LIVE | {"updates": [str(root / source) for source in sources]}
    live = start(environment, root / _FIRST, settings, root / "live.log").result
    if "error" in live:
        yield family, {"error": live["error"]}
        return
    said = live.pop("updates")
    last: list[float] = []
    for (source, content, reason), outcome in zip(_updates(), said, strict=True):
        expected = fresh.get(content)
        refused = outcome.get("refused", "")
        is_as_expected = reason in refused if reason else not refused and len(set(outcome["contents"])) == 1
        if content not in fresh:
            continue
        tokens = {key: outcome.get(key) for key in ("tokens", "logprobs")}
        yield (
            f"{family}, {source}",
            {
                "as_expected": is_as_expected,
                "same": tokens == expected,
                "tokens_of": content,
                "differs_from_before": tokens != live,
            }
            | ({"refused": refused.replace(f"{root}/", "")[:300]} if refused else {}),
        )
        live = tokens
    last = [outcome["mib"] for outcome in said]
    yield f"{family}, memory", {"updates": len(said), "mib_after_fifth": last[4], "mib_after_last": last[-1]}


def _updates() -> Iterator[tuple[str, str, str]]:
    """(source, what the engine then has, a part of the reason if it is refused), in order."""
    for step in range(1, NUM_STEPS + 1):
        yield f"delta-{step}", f"step-{step}", ""
    yield "delta-1", _LAST, "applies to content"
    yield _OTHER, _LAST, "have another dtype, shape or slice"
    yield "nowhere", _LAST, "is not a folder"
    yield "damaged-folder", _LAST, "damaged"
    yield _FIRST, _FIRST, ""
    yield "damaged-delta", _FIRST, "damaged"
    yield "delta-1", "step-1", ""


def _fresh() -> list[str]:
    return [_FIRST, "step-1", _LAST]


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
