"""Runs in an environment that has vLLM: every architecture of its registry, converted by observation and loaded.

`registry FOLDER RESULTS [ARCHITECTURE ...]`: for each architecture that transformers has a class for, a small
checkpoint is made, converted at TP 2 and 4 as vLLM's class loads it, and by the plan that is built in, if there is one.
Every parameter of every rank is compared with vLLM's own load. Each architecture is a fork of this process. A line of
JSON in RESULTS for each.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
import transformers
from vllm.model_executor.models import registry

import relayout
from engines.comparing import vllm_classes
from engines.comparing.jobs import Job, nothing_found
from engines.observing import small_models
from engines.observing.forks import Report, Result, write_results
from relayout.checkpoint.source import SourceCheckpoint, read_source
from relayout.observe import vllm
from relayout.observe.observation import Observation, observe, plan_of
from relayout.observe.ranks import ObservationJob, carry_out
from relayout.plans.family import find_family
from relayout.storage.stores import find_store

DEGREES = (2, 4)
TIMEOUT_S = 240
SECTIONS = {
    "text": registry._TEXT_GENERATION_MODELS,
    "multimodal": registry._MULTIMODAL_MODELS,
}


def main() -> None:
    folder, results, *names = sys.argv[1:]
    known = {name: section for section, models in SECTIONS.items() for name in models}
    Path(folder).mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    works = [
        (
            {"architecture": name, "module": SECTIONS[section][name][0] if section else "", "section": section},
            partial(attempt, name, Path(folder, name)),
            Path(folder, name),
        )
        for name, section in ((name, known.get(name, "")) for name in names or known)
    ]
    write_results(Path(results), works, TIMEOUT_S)


def attempt(name: str, folder: Path, report: Report) -> Result:
    """Make, observe, convert, load, compare."""
    result: Result = {"step": "make", "degrees": {}}
    try:
        report(result)
        small_models.write(name, folder / "source")
        result["tensors"] = relayout.inspect(folder / "source").num_tensors
        for tp in DEGREES:
            result["step"] = f"observe, tp {tp}"
            report(result)
            target = folder / f"tp{tp}"
            summary = convert(folder / "source", target, tp)
            result["step"] = f"load, tp {tp}"
            report(result)
            compared = compare(name, folder / "source", target, tp)
            if compared["different"] or compared["whole_reads"]:
                result["error"] = f"different: {compared['different'][:3]}, whole reads: {compared['whole_reads']}"
            result["degrees"][tp] = {
                **{key: compared[key] for key in ("parameters", "elements", "never_loaded", "whole_reads")},
                "different": len(compared["different"]),
                "unused": len(summary.unused),
                "replicated": round(summary.replicated_nbytes / summary.source_nbytes, 4),
            }
        result |= {"by": small_models.class_of(name).__name__, "step": "built-in plan"}
        report(result)
        result["builtin"] = by_builtin_plan(name, folder)
        result["step"] = "done"
    except Exception as error:
        result["error"] = text_of(error, folder)
        if result["step"].startswith("observe") and (why := own_failure(name, folder / "source")):
            result["error"] = f"vLLM's own load fails, too: {why}"[:600]
    return result


def text_of(error: BaseException, folder: Path) -> str:
    """Of an error, without the paths of this machine."""
    return f"{type(error).__name__}: {error}".replace(str(folder), "")[:600]


def compare(name: str, source: Path, converted: Path, tp: int) -> dict[str, Any]:
    """All parameters of all ranks."""
    compared = nothing_found()
    vllm_classes.compare(Job(name, str(source), str(converted), tp, strict=False), compared)
    return compared


def own_failure(name: str, source: Path) -> str:
    """Why vLLM's own loader fails for the first of two ranks of the source; empty: it does not."""
    try:
        job = Job(name, str(source), "", DEGREES[0])
        vllm_classes.load_rank(job, 0, *vllm_classes.setup(job, job.source, "auto"))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def by_builtin_plan(name: str, folder: Path) -> dict[str, Any]:
    """What is different, or why it cannot be converted; empty: there is no plan."""
    result: dict[str, Any] = {}
    try:
        for tp in DEGREES:
            target = folder / f"builtin{tp}"
            result["plan"] = find_family(relayout.inspect(folder / "source").model_type).name
            relayout.convert(folder / "source", target, tp=tp)
            compared = compare(name, folder / "source", target, tp)
            compared["different"] = compared["different"][:3]
            result[str(tp)] = {key: compared[key] for key in ("parameters", "different", "whole_reads")}
    except Exception as error:
        if getattr(error, "code", "") != "no_plan":
            result["error"] = text_of(error, folder)[:400]
    return result


def run_in_place(jobs: Sequence[Result]) -> list[Result]:
    """Carry out jobs in this process: what stands in for a GPU then also does for the comparison."""
    return [carry_out(vllm, vllm.start(), ObservationJob(**job)) for job in jobs]


def observe_source(
    folder: Path, degrees: Sequence[int]
) -> tuple[SourceCheckpoint, dict[int, Observation | relayout.PlanError]]:
    """What is observed at each degree in this process; keys that only the hub's config.json has are supplied."""
    while True:
        source = read_source(find_store(folder))
        results = dict(zip(degrees, observe(source, degrees, trust_remote_code=True, run=run_in_place), strict=True))
        if not small_models.supply(folder, [str(result) for result in results.values()]):
            return source, results


def convert(folder: Path, target: Path, tp: int) -> relayout.Summary:
    """By observation."""
    source, results = observe_source(folder, [tp])
    if isinstance(observation := results[tp], relayout.PlanError):
        raise observation
    return relayout.convert(folder, target, tp=tp, plan=plan_of(source, observation, tp))


if __name__ == "__main__":
    main()
