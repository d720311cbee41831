"""Which architectures of the engines have a plan: built in, observed, or none and why.

All of it is recomputed from what tools have recorded and from the built-in plans. An architecture is

- **built-in** if a built-in plan is for its type of model, as packages have it or an observation has confirmed, and no
  observation found another cut;
- **observed** if `--plan vllm` or `--plan sglang` converts a small checkpoint of it and every tensor is loaded;
- **none** otherwise. The reason is the error of the attempt. The architecture *cannot be built* here if the attempt
  failed for what no configuration would give: no package has one, or the class wants a GPU or another package.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from engines import registries
from relayout.plans.family import builtin_families

_RESULTS = Path(__file__).parents[1] / "results"

ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
_UNBUILDABLE = re.compile(
    r"no package has a configuration|Unrecognized configuration class|No module named|cannot import name|ImportError"
    r"|CUDA|GPU|cuda|[Tt]riton",
    re.ASCII,
)
"""In the error of an attempt to build a class: what no configuration would change."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture that an engine generates text with, and its plan."""

    name: str
    since: Mapping[str, str]
    """By engine that has it: the oldest compared release that has it, if an older one lacks it; else empty."""
    types: tuple[str, ...]
    """Types of models, of config.json."""
    plan: str = ""
    """Of the built-in plan."""
    observed: tuple[str, ...] = ()
    """Engines of which it was observed."""
    why: str = ""
    """The reason, if there is no plan and it was not observed."""
    is_built: bool = True
    """False: an attempt has shown that its class cannot be built here."""

    @property
    def state(self) -> str:
        """One of `built-in`, `observed`, `none`."""
        return "built-in" if self.plan else "observed" if self.observed else "none"

    @property
    def newness(self) -> int:
        """The number of compared releases of all engines that lack it."""
        releases = registries.RELEASES
        return sum(
            len(releases[engine]) - 1 - releases[engine].index(since) for engine, since in self.since.items() if since
        )


def architectures() -> list[Architecture]:
    """Return all architectures of both engines that generate text, the newest first."""
    found = [
        _architecture(name, row)
        for name, row in json.loads(registries.RESULTS.read_text())["architectures"].items()
        if registries.is_generating(name, row["section"])
    ]
    return sorted(found, key=lambda one: (-one.newness, one.name))


def counted(found: list[Architecture]) -> dict[str, dict[str, int]]:
    """Return by engine the number of architectures, of each state, and of those that cannot be built."""
    counts = {}
    for engine in ENGINES:
        mine = [one for one in found if engine in one.since]
        counts[engine] = {
            "all": len(mine),
            **{state: sum(one.state == state for one in mine) for state in ("built-in", "observed", "none")},
            "cannot be built": sum(one.state == "none" and not one.is_built for one in mine),
        }
    return counts


def share(counts: Mapping[str, int]) -> float:
    """Return the part of the architectures that can be built which have a plan or were observed."""
    return (counts["built-in"] + counts["observed"]) / (counts["all"] - counts["cannot be built"])


def _architecture(name: str, row: Mapping[str, Any]) -> Architecture:
    engines = [engine for engine in ENGINES if engine in row]
    since = {engine: row[engine]["since"] for engine in engines}
    attempts = [attempt for engine in ENGINES if (attempt := _attempts().get((engine, name)))]
    types = tuple(row["model_types"]) or tuple(
        dict.fromkeys(attempt["model_type"] for attempt in attempts if attempt.get("model_type"))
    )
    observed = [engine for engine in ENGINES if name in _observed(engine)]
    compared = [builtin for attempt in attempts if (builtin := attempt.get("builtin"))]
    named = [plan for one in row["model_types"] if (plan := _plans().get(one))]
    named += [_proven().get(name, ""), *(builtin["plan"] for builtin in compared)]
    plan = "" if any(map(_differs, compared)) else next(filter(None, named), "")
    if plan or observed:
        return Architecture(name, since, types, plan, tuple(observed))
    failed = [attempt for attempt in attempts if "error" in attempt]
    # The attempt that came furthest says most.
    steps = ("make", "build", "name", "observe")
    failed.sort(key=lambda attempt: -steps.index(attempt["step"]))
    if not failed:
        return Architecture(name, since, types, why="not attempted")
    why, step = failed[0]["error"], failed[0]["step"]
    is_built = step in ("name", "observe") or _UNBUILDABLE.search(why) is None
    return Architecture(name, since, types, why=f"{step}: {why}", is_built=is_built)


def _differs(builtin: Mapping[str, Any]) -> bool:
    return "error" in builtin or bool(builtin["different"])


@cache
def _plans() -> dict[str, str]:
    """Built-in plans by type of model."""
    return {model_type: family.name for family in reversed(builtin_families()) for model_type in family.model_types}


@cache
def _lines(name: str) -> tuple[dict[str, Any], ...]:
    file = _RESULTS / f"{name}.jsonl"
    return tuple(map(json.loads, file.read_text().splitlines()))


@cache
def _attempts() -> dict[tuple[str, str], dict[str, Any]]:
    """What `tools/run engines --step attempts` has recorded, by engine and architecture."""
    return {(line["engine"], line["architecture"]): line for line in _lines("attempts")}


@cache
def _proven() -> dict[str, str]:
    """Built-in plans by architecture whose parameters were compared with vLLM's own load."""
    return {
        line["architecture"]: line["plan"]
        for line in _lines("builtin_plans")
        if "error" not in line
        and not any(one["different"] or one["whole_reads"] for one in line.values() if isinstance(one, dict))
    }


@cache
def _observed(engine: str) -> frozenset[str]:
    """Architectures that were observed of an engine."""
    names = {name for (of, name), attempt in _attempts().items() if of == engine and attempt["step"] == "done"}
    if engine == "vllm":
        names |= {line["architecture"] for line in _lines("observed") if line["step"] == "done" and "error" not in line}
    else:
        found = json.loads((_RESULTS / "engines.json").read_text())[engine]["observe"]
        loads = {name.partition(",")[0]: load for name, load in found.items() if name.endswith("tp 2")}
        names |= {name for name, load in loads.items() if "error" not in load and not load["different"]}
    return frozenset(names)
