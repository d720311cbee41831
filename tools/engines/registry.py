"""Runs in an environment that has vLLM: every architecture of its registry, converted by observation and loaded.

`registry.py FOLDER RESULTS [ARCHITECTURE ...]`: for each architecture that transformers has a class for, a small
checkpoint is made, converted at TP 2 and 4 as vLLM's class takes it, and by the plan that is built in, if there is one.
Every parameter of every rank is compared with vLLM's own load. Each architecture is a fork of this process. A line of
JSON in RESULTS for each.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import small_models
import torch
import transformers
import vllm_classes
from comparing import Job
from vllm.model_executor.models import registry

import relayout
from relayout.observe import observation, stand_ins
from relayout.observe.vllm import Job as Observed
from relayout.observe.vllm import carry_out
from relayout.plans.family import find_family

DEGREES = (2, 4)
TIMEOUT_S = 240
SECTIONS = {
    "text": registry._TEXT_GENERATION_MODELS,
    "multimodal": registry._MULTIMODAL_MODELS,
}


def main() -> None:
    folder, results, *wanted = sys.argv[1:]
    known = {name: section for section, names in SECTIONS.items() for name in names}
    Path(folder).mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    observe_in_this_process()
    with Path(results).open("a") as output:
        for name in wanted or known:
            found = one(name, known.get(name, ""), Path(folder))
            print(json.dumps(found), file=output, flush=True)
            print(found["architecture"], found.get("step"), found.get("error", "same"), flush=True)


def observe_in_this_process() -> None:
    """Where vLLM has been imported already."""
    observation.run = lambda jobs: [
        json.loads(json.dumps(carry_out(Observed(**json.loads(json.dumps(job)))))) for job in jobs
    ]
    registry._run_in_subprocess = lambda function: function()


def one(name: str, section: str, folder: Path) -> dict[str, Any]:
    """In a process of its own."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=attempt, args=(name, folder / name, theirs))
    process.start()
    theirs.close()
    started = time.monotonic()
    found: dict[str, Any] = {"error": f"took longer than {TIMEOUT_S} s"}
    try:
        while ours.poll(max(0.1, TIMEOUT_S - (time.monotonic() - started))):
            found = ours.recv()
            if found.get("done"):
                break
    except EOFError:
        found = {**found, "error": "the process ended"}
    process.kill()
    process.join()
    shutil.rmtree(folder / name, ignore_errors=True)
    found.pop("done", None)
    module = SECTIONS[section][name][0] if section else ""
    return {
        "architecture": name,
        "module": module,
        "section": section,
        "seconds": round(time.monotonic() - started, 1),
        **found,
    }


def attempt(name: str, folder: Path, told: Any) -> None:
    """Make, observe, convert, load, compare."""
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    found: dict[str, Any] = {"step": "make"}
    try:
        told.send({**found, "error": "took too long"})
        small_models.write(name, folder / "source")
        found["tensors"] = relayout.inspect(folder / "source").num_tensors
        found["degrees"] = {}
        for tp in DEGREES:
            found["step"] = f"observe, tp {tp}"
            told.send({**found, "error": "took too long"})
            target = folder / f"tp{tp}"
            done = convert(folder / "source", target, tp)
            found["step"] = f"load, tp {tp}"
            told.send({**found, "error": "took too long"})
            compared = compare(name, folder / "source", target, tp)
            if compared["different"] or compared["whole_reads"]:
                found["error"] = f"different: {compared['different'][:3]}, whole reads: {compared['whole_reads']}"
            found["degrees"][tp] = {
                **{key: compared[key] for key in ("parameters", "elements", "never_loaded", "whole_reads")},
                "different": len(compared["different"]),
                "untaken": len(done.untaken),
                "replicated": round(done.replicated_nbytes / done.source_nbytes, 4),
            }
        found |= {"stand_ins": sorted(stand_ins.replaced), "by": small_models.class_of(name).__name__}
        found["step"] = "built-in plan"
        told.send(found)
        found["builtin"] = by_builtin_plan(name, folder)
        found["step"] = "done"
    except BaseException as error:
        found["error"] = f"{type(error).__name__}: {error}".replace(str(folder), "")[:600]
        found["trace"] = traceback.format_exc()[-1500:]
        if found["step"].startswith("observe") and (why := own_failure(name, folder / "source")):
            found["error"] = f"vLLM's own load fails, too: {why}"[:600]
    told.send({**found, "done": True})
    told.close()
    os._exit(0)


def compare(name: str, source: Path, converted: Path, tp: int) -> dict[str, Any]:
    """All parameters of all ranks."""
    compared: dict[str, Any] = {"parameters": 0, "elements": 0, "different": [], "never_loaded": 0, "whole_reads": 0}
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
    """What is otherwise, or why it cannot be converted; empty: there is no plan."""
    found: dict[str, Any] = {}
    try:
        for tp in DEGREES:
            target = folder / f"builtin{tp}"
            found["plan"] = find_family(relayout.inspect(folder / "source").model_type).name
            relayout.convert(folder / "source", target, tp=tp)
            compared = compare(name, folder / "source", target, tp)
            found[str(tp)] = {
                "parameters": compared["parameters"],
                "different": compared["different"][:3],
                "whole_reads": compared["whole_reads"],
            }
    except Exception as error:
        if getattr(error, "code", "") != "no_plan":
            found["error"] = f"{type(error).__name__}: {error}".replace(str(folder), "")[:400]
    return found


def convert(source: Path, target: Path, tp: int) -> relayout.Summary:
    """By observation; keys that only the hub's config.json has are supplied."""
    while True:
        try:
            return relayout.convert(source, target, tp=tp, plan="vllm", trust_remote_code=True)
        except relayout.PlanError as error:
            missing = re.search(r"Config' object has no attribute '(\w+)'", str(error))
            if missing is None or not small_models.supply(source, missing[1]):
                raise


if __name__ == "__main__":
    main()
