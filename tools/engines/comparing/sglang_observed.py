"""Runs in an environment that has SGLang: what the observer sees, beside the built-in plan and beside a real load.

`sglang_observed JOBS.json`: a checkpoint at one degree is observed, and its slices are compared with those of the
built-in plan of its model type, if it has one. Then it is converted by the observed plan, and every parameter of every
rank is loaded from the source by SGLang's own loader, and from the conversion through relayout. Prints a line of JSON
for each job.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from support.plan_comparing import is_same

import relayout
from engines.comparing import sglang_classes
from engines.comparing.jobs import Job, nothing_found, run_jobs
from engines.observing.forks import Report, in_a_fork
from relayout.checkpoint.source import SourceCheckpoint, read_source
from relayout.core.arguments import collapse_numbers
from relayout.observe.observation import Observation, observe, plan_of
from relayout.observe.ranks import failure, run_here
from relayout.plans.plan import Plan
from relayout.plans.planner import plan_for
from relayout.storage.stores import find_store

TIMEOUT_S = 240


def compare(job: Job, result: dict[str, Any]) -> None:
    """Observe, compare with the built-in plan, and convert and load."""
    source = read_source(find_store(job.source))
    [observed] = observe(source, [job.tp], engine="sglang", trust_remote_code=True, run=run_here)
    if isinstance(observed, relayout.PlanError):
        result["own_load"] = "error" not in in_a_fork(partial(load_source, job), TIMEOUT_S)
        raise observed
    result["observed"] = observed.version
    result |= beside_builtin(source, observed, job.tp)
    plan = plan_of(source, observed, job.tp)
    result["unused"] = len(plan.unused)
    result |= in_a_fork(partial(load_both_ways, job, plan), TIMEOUT_S)


def beside_builtin(source: SourceCheckpoint, observed: Observation, tp: int) -> Mapping[str, Any]:
    """Name the built-in plan, and patterns of the tensors that it cuts otherwise than SGLang does."""
    try:
        plan = plan_for(source, tp)
    except relayout.PlanError as error:
        return {"builtin": f"none: {error.what}"}
    pairs = zip(source.tensors, observed.loaded_slices, strict=True)
    others = (
        collapse_numbers(tensor.name)
        for t, (tensor, slices) in enumerate(pairs)
        if not is_same(plan.cut(t).slices, slices, tensor.shape)
    )
    return {"builtin": plan.name, "other": list(dict.fromkeys(others))}


def load_source(job: Job, _report: Report) -> dict[str, Any]:
    """Load every rank by SGLang's own loader; return the error if it fails."""
    try:
        for rank in range(job.tp):
            sglang_classes.load(job.source, job, rank, "auto")
    except Exception as error:
        return failure(error, "load", "sglang")
    return {}


def load_both_ways(job: Job, plan: Plan, _report: Report) -> dict[str, Any]:
    """Compare the parameters of a load of the source with those of a load of its conversion by a plan."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    found = nothing_found()
    with TemporaryDirectory(dir=Path(job.source).parent) as folder:
        converted = relayout.convert(job.source, Path(folder, "converted"), tp=job.tp, plan=plan).output
        try:
            sglang_classes.compare(Job(job.name, job.source, converted, job.tp, strict=False), found)
        except Exception as error:
            found |= failure(error, "load", "sglang")
    return found


def main() -> None:
    run_jobs(compare)


if __name__ == "__main__":
    main()
