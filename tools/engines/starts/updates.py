"""Updates of a real vLLM's weights while it lives: the tokens after each, beside those of fresh starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
from support.checkpoints import write_family
from support.families import FAMILIES
from support.updates_worker import TP, write_steps

import relayout
from engines.cases import FORMS, complete_config, source_of
from engines.environments import Environment
from engines.starts.live_forms import update_forms
from engines.starts.starting import start

NUM_TURNS = 3
_LARGE = replace(FAMILIES["llama"], sizes={"V": 8192, "H": 2048, "I": 5632, "A": 32, "K": 8, "D": 64})
"""67 MB, and 90 MB for each layer."""
_PAUSES = (
    *((layers, share, True) for layers, share in ((2, 0.01), (5, 0.0051), (10, 0.00254), (22, 0.0012))),
    *((10, share, True) for share in (0.001, 0.01, 0.05, 0.2)),
    (10, 0.01, False),
)
"""Layers, share of the elements that change, and whether weights are left unpacked. Of the first four, the same number
of elements changes."""
CHANGED = ("llama", "qwen2_tied", "qwen3_moe", "qwen2_5_vl", "gpt_oss_mxfp4", "fp8_blocks", "fp8_tensor")
IN_STAGES = ("llama", "qwen3_moe")
"""Families of which each of two stages of a pipeline is changed, too."""
NUM_MANY = 1000
_FOLLOWING = {"llama": 2, "qwen3_moe": 1}
"""Models whose steps are followed, and their ranks."""
_KEPT = ("different", "error", "views", "loaded_again", "nbytes", "verified", "attested", "wrong_bit_found")
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
    if fnmatch("classes", only) or fnmatch("stages", only):
        yield from _classes(alone, work, only)
    if fnmatch("runners", only):
        yield from _runners(alone, work)
    if only.startswith("forms"):  # 20 minutes.
        yield from update_forms(alone, work, only.partition(", ")[2] or "*")
    if fnmatch("attest", only):
        yield "attest", _attest(alone, work)
    for family, tp in _FOLLOWING.items():
        if fnmatch(f"many {family}", only):
            yield f"{NUM_MANY} steps, {family}, tp {tp}", _follow(alone, work, family, tp)
    if fnmatch("pauses", only):
        yield from _pauses(alone, work)


def _classes(environment: Environment, work: Path, only: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """vLLM's own classes: which slices of each family are changed where they lie, and what is then different."""
    ways = [(False, 1), (True, 1)] * fnmatch("classes", only) + [(True, 2)] * fnmatch("stages", only)
    for unpacked, stages in ways:
        for family in CHANGED if stages == 1 else IN_STAGES:
            root = work / "updates" / "classes" / family
            if not root.exists():
                write_steps(source_of(family, work, wide=True), root, 2)
            jobs = work / "updates.json"
            job = {"name": family, "source": str(root), "converted": str(root), "tp": TP, "stages": stages}
            jobs.write_text(json.dumps([job]))
            options = ["--unpacked"] * unpacked + ["--stub-kernels"] * (family in FORMS or "mxfp4" in family)
            found = environment.result(work, "comparing.vllm_updates", jobs, *options)
            form = ", unpacked" * unpacked + f", {stages} stages" * (stages > 1)
            yield f"classes, {family}{form}", {key: found[key] for key in _KEPT if key in found}


def _runners(environment: Environment, work: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """vLLM's worker for GPUs and each of its model runners: what an update, a sleep and a failure do to them."""
    for family in UPDATED:
        root = work / "updates" / "runners" / family
        if not root.exists():
            write_steps(source_of(family, work, wide=True), root, 2, 1)
        jobs = work / "updates.json"
        jobs.write_text(json.dumps([{"name": family, "source": str(root), "converted": str(root), "tp": 1}]))
        found = environment.result(work, "comparing.vllm_runners", jobs)
        for runner in ("V1", "V2"):
            holds = found.get(runner, {})
            errors = {"error": found["error"]} if "error" in found else {}
            yield (
                f"runner {runner}, {family}",
                {"holds": sum(holds.values()), "of": len(holds)}
                | errors
                | {"fails": [what for what, is_so in holds.items() if not is_so]},
            )


def _attest(environment: Environment, work: Path) -> dict[str, Any]:
    """What each worker of a real vLLM says when it is asked: behind a delta, with a wrong bit, and without it."""
    root = work / "updates" / "attest"
    shutil.rmtree(root, ignore_errors=True)
    write_steps(source_of("llama", work, wide=True), root, 1)
    settings = _SETTINGS | {"updates": [str(root / "delta-1"), "#flip_a_bit", "#flip_a_bit"]}
    said = start(environment, root / _FIRST, settings, root / "live.log").result
    if "error" in said:
        return {"error": said["error"]}
    states = ("after a delta", "with a wrong bit in the last rank", "without it")
    found = [one["attested"] for one in said["updates"]]
    return {
        state: [
            {key: rank[key] for key in ("verified", "difference")} | {"unverified": len(rank["unverified"])}
            for rank in ranks
        ]
        for state, ranks in zip(states, found, strict=True)
    }


def _follow(environment: Environment, work: Path, family: str, tp: int) -> dict[str, Any]:
    """Many published steps, and engines of vLLM's classes that follow them: what differs from fresh starts."""
    folder = work / "updates" / f"many-{family}"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source_of(family, work, wide=True), folder / "model")
    found: dict[str, Any] = environment.result(folder, "comparing.vllm_steps", folder, tp, NUM_MANY)
    return found


def _pauses(environment: Environment, work: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Seconds that an engine is paused for, by size, by what changes, and by whether a CPU's weights are packed."""
    for layers, share, unpacked in _PAUSES:
        root = work / "updates" / f"pause-{layers}-{share}"
        shutil.rmtree(root, ignore_errors=True)
        write_changed(root, layers, share)
        found = environment.result(work, "comparing.vllm_pauses", root, NUM_TURNS, *["--unpacked"] * unpacked)
        shutil.rmtree(root)
        yield f"pause, {layers} layers, {share:.2%}{', unpacked' * unpacked}", found


def write_changed(root: Path, layers: int, share: float) -> None:
    """A model, one in which a share of the elements differ by one bit, the first one converted, and the delta."""
    (root / "model-0").mkdir(parents=True)
    write_family(replace(_LARGE, sizes=_LARGE.sizes | {"L": layers}), root / "model-0")
    complete_config(root / "model-0" / "config.json")
    shutil.copytree(root / "model-0", root / "model-1")
    random = np.random.default_rng(1)
    for shard in sorted((root / "model-1").glob("*.safetensors")):
        with shard.open("rb") as file:
            start_of_data = 8 + int.from_bytes(file.read(8), "little")
        elements = np.memmap(shard, np.uint16, "r+", start_of_data)
        elements[np.unique(random.integers(0, len(elements), int(len(elements) * share)))] ^= 1
        elements.flush()
    for step in (0, 1):
        relayout.convert(root / f"model-{step}", root / f"step-{step}", tp=1)
    relayout.delta(root / "step-0", root / "step-1", root / "delta-1")


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
