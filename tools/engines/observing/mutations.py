"""Runs in an environment that has vLLM: wrong plans, and whether the comparison of parameters sees that they are wrong.

`mutations FOLDER RESULTS [ARCHITECTURE ...]`: a small checkpoint is observed and its plan written as a file. Each
mutation changes one rule of it; the checkpoint is converted by the file, and loaded through vLLM's class at TP 2. A
line of JSON in RESULTS for each mutation. Without a change, nothing may be seen.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
import transformers

import relayout
from engines.observing import registry, small_models
from relayout.checkpoint.source import SourceCheckpoint
from relayout.core.patterns import compile_glob
from relayout.core.slices import NOT_HELD, WHOLE, Slice
from relayout.observe.fitting import Example, fit
from relayout.plans.family import EVEN, Family, Rule
from relayout.plans.plan_text import as_toml
from relayout.plans.planner import plan_by

TP = 2


def main() -> None:
    folder, results, *names = sys.argv[1:]
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    with Path(results).open("a") as output:
        for name in names:
            for result in attempt(name, Path(folder, name)):
                print(json.dumps({"architecture": name, **result}), file=output, flush=True)
                print(name, result, flush=True)
            shutil.rmtree(Path(folder, name))


def attempt(name: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Each mutation, and what was seen of it."""
    small_models.write(name, folder / "source")
    source, results = registry.observe_source(folder / "source", [TP])
    if isinstance(observation := results[TP], relayout.PlanError):
        raise observation
    fitted = fit([Example(source, {TP: observation.loaded_slices})])
    for index, (what, family) in enumerate(mutants(fitted.family, source)):
        mutant = folder / f"{index}.toml"
        mutant.write_text(as_toml(family, what))
        yield {"mutation": what, "seen": seen(name, folder, mutant)}


def mutants(family: Family, source: SourceCheckpoint) -> Iterator[tuple[str, Family]]:
    """One without a change; a cut along the other axis; borders moved by one; ranks exchanged; an expert missing."""
    yield "none", family
    plan = plan_by(source, TP, family)
    for rule in family.rules:
        if rule.dim is None:
            continue
        t = next(t for t, tensor in enumerate(source.tensors) if compile_glob(rule.pattern).match(tensor.name))
        tensor, slices = source.tensors[t], plan.cut(t).slices
        if len(tensor.shape) == 2 and tensor.shape[1 - rule.dim] % TP == 0:
            yield f"flipped: {rule.pattern}", _with(family, replace(rule, dim=1 - rule.dim, units=(EVEN,), widths=()))
        first, second = (part.ranges_along(rule.dim) or () for part in slices)
        if len(first) == len(second) == 1:
            moved = ((first[0][0], first[0][1] - 1),), ((second[0][0] - 1, second[0][1] + 1),)
            cut = tuple(Slice.along(rule.dim, ranges) for ranges in moved)
            yield f"border moved by one: {tensor.name}", _with(family, _listed(tensor.name, cut))
        yield f"ranks exchanged: {tensor.name}", _with(family, _listed(tensor.name, slices[::-1]))
        if ".experts." in rule.pattern:
            missing = tuple(NOT_HELD if rank else part for rank, part in enumerate(slices))
            yield f"missing on rank 1: {tensor.name}", _with(family, _listed(tensor.name, missing))
            owned = tuple(NOT_HELD if rank else WHOLE for rank in range(TP))
            yield f"only on rank 0: {tensor.name}", _with(family, _listed(tensor.name, owned))


def _listed(name: str, cut: tuple[Slice, ...]) -> Rule:
    return Rule(name, None, slices=((TP, cut),))


def _with(family: Family, rule: Rule) -> Family:
    """The rule in place of the one with its pattern, or before all."""
    rules = {known.pattern: known for known in family.rules}
    rules = rules | {rule.pattern: rule} if rule.pattern in rules else {rule.pattern: rule} | rules
    return replace(family, rules=tuple(rules.values()))


def seen(name: str, folder: Path, plan: Path) -> str:
    """How the check of `registry.py` shows that the plan is wrong; empty: it does not."""
    target = folder / "mutant"
    shutil.rmtree(target, ignore_errors=True)
    try:
        relayout.convert(folder / "source", target, tp=TP, plan=plan)
    except relayout.RelayoutError as error:
        return f"refused: {error.what}"[:200]
    try:
        compared = registry.compare(name, folder / "source", target, TP)
    except Exception as error:
        return f"fails: {type(error).__name__}: {error}".replace(str(folder), "")[:200]
    if compared["different"]:
        return f"{len(compared['different'])} parameters are different"
    if compared["whole_reads"]:
        return f"{compared['whole_reads']} tensors are read whole, from the files of other ranks"
    return ""


if __name__ == "__main__":
    main()
