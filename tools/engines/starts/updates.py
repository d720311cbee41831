"""Updates of a real vLLM's weights while it lives: the tokens after each, beside those of fresh starts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from statistics import median
from typing import Any

from support.checkpoints import write_family
from support.families import FAMILIES
from support.updates_worker import TP, write_steps

import relayout
from engines.cases import complete_config, source_of
from engines.environments import Environment
from engines.starts.starting import start

NUM_TURNS = 5
_V, _H = 2**17, 2048
_LARGE = replace(FAMILIES["qwen2_tied"], sizes={"V": _V, "H": _H, "I": 5632, "L": 4, "A": 32, "K": 8, "D": 64})
"""1 GB; half of it is the embedding."""
UPDATED = ("llama", "qwen3_moe")
NUM_STEPS = 20
_SETTINGS: dict[str, Any] = {"tensor_parallel_size": TP}
_FIRST, _LAST, _OTHER = "step-0", f"step-{NUM_STEPS}", "other-model"


@dataclass(frozen=True)
class _Update:
    """What an engine is updated from, and what it must then have."""

    name: str
    source: str
    content: str
    """The folder on whose source vLLM gives the same tokens."""
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
_COMPARED = (_FIRST, "step-1", _LAST)
"""Folders whose sources fresh starts are made on."""


def updates(environment: Environment, work: Path, only: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of each model: what one engine says to deltas and folders, right ones and wrong ones, and what it generates."""
    alone = environment.with_variables(VLLM_ENABLE_V1_MULTIPROCESSING="0")
    for family in (family for family in UPDATED if fnmatch(family, only)):
        for what, outcome in _updates_of(family, alone, work):
            yield f"{family}, {what}", outcome
    if fnmatch("speed", only):
        yield "speed", _speed(alone, work)


def _speed(environment: Environment, work: Path) -> dict[str, Any]:
    """Seconds of each way to other weights, in turns, and the memory that a worker takes meanwhile."""
    root = work / "updates" / "large"
    shutil.rmtree(root, ignore_errors=True)
    (root / "source").mkdir(parents=True)
    write_family(_LARGE, root / "source")
    complete_config(root / "source" / "config.json")
    write_steps(root / "source", root, num_steps=1)
    ways = {
        "a folder": f"{root / _FIRST}",
        "a delta": f"{root / 'delta-1'}",
        "vLLM's reload of a plain folder": f"{root / 'model-1'}#reload_by_itself",
        "vLLM's reload of a converted folder": f"{root / _FIRST}#reload_by_itself",
    }
    settings = _SETTINGS | {"updates": [*ways.values()] * NUM_TURNS}
    live = start(environment, root / _FIRST, settings, root / "live.log").result
    if "error" in live:
        return {"error": live["error"]}
    result: dict[str, Any] = {"turns": NUM_TURNS}
    for number, name in enumerate(ways):
        runs = live["updates"][number :: len(ways)]
        assert not any("refused" in run for run in runs), runs
        seconds = sorted(round(run["seconds"], 2) for run in runs)
        beside = round(max(run["beside_mib"] for run in runs))
        result[name] = {"seconds": [seconds[0], median(seconds), seconds[-1]], "beside_mib": beside}
    nbytes = {
        name: sum(path.stat().st_size for path in (root / name).rglob("*")) for name in ("model-1", "step-1", "delta-1")
    }
    shutil.rmtree(root)
    return result | {"nbytes": nbytes, "largest_slice_mib": _V * _H * 2 // TP // 2**20}


def _updates_of(family: str, environment: Environment, work: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    root = work / "updates" / family
    shutil.rmtree(root, ignore_errors=True)
    write_steps(source_of(family, work, wide=True), root, NUM_STEPS)
    relayout.convert(source_of("qwen3", work, wide=True), root / _OTHER, tp=TP)
    fresh = {name: _by_itself(environment, root, name) for name in _COMPARED}
    settings = _SETTINGS | {"updates": [str(root / update.source) for update in (*_UPDATES, _FAILS)]}
    live = start(environment, root / _FIRST, settings, root / "live.log").result
    if "error" in live:
        yield "all", {"error": live["error"]}
        return
    *said, failed = live["updates"]
    before = live
    for update, outcome in zip(_UPDATES, said, strict=True):
        tokens = {key: outcome.get(key) for key in ("tokens", "logprobs")}
        if update.content in _COMPARED:
            changes = any(tokens[key] != before[key] for key in tokens)
            started, reloaded = ({key: one.get(key) for key in tokens} for one in fresh[update.content])
            result = {
                "same_as_start": tokens == started,
                "same_as_own_reload": tokens == reloaded,
                "tokens_of": update.content,
                "tokens_change": changes,
            }
            yield update.name, result | _said(update, outcome, root)
        before = tokens
    yield _FAILS.name, {"died": failed.get("died", "")[:120]} | _said(_FAILS, failed, root)
    sizes = [round(outcome["mib"], 1) for outcome in said]
    yield "memory", {"mib_after_10": sizes[9], "mib_after_all": sizes[-1], "num_updates": len(sizes)}


def _by_itself(environment: Environment, root: Path, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tokens of vLLM on the source of a folder, without relayout, and those after it has loaded that once more.

    On a CPU, its kernels for experts give other numbers after its own reload.
    """
    model = root / name.replace("step", "model")
    settings = _SETTINGS | {"updates": [f"{model}#reload_by_itself"]}
    started = start(environment, model, settings, root / f"{name}.log").result
    return started, started.get("updates", [{}])[0]


def _said(update: _Update, outcome: dict[str, Any], root: Path) -> dict[str, Any]:
    refused: str = outcome.get("refused", "")
    if update.reason:
        return {"as_expected": update.reason in refused, "refused": refused.replace(f"{root}/", "")[:200]}
    return {"as_expected": not refused and len(set(outcome["contents"])) == 1}
