"""The command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers.utils import logging as transformers_logging

import relayout
from engines.cases import DEGREES, GENERATED, Case, all_cases, converted_of, source_of
from engines.environments import ENGINES, ROOT, environment_of, versions_in

RESULTS = ROOT / "tools" / "results" / "engines.json"
SCRIPTS = ROOT / "tools" / "engines"
HOME = Path(tempfile.gettempdir(), "engine-envs")
BATCH = 16
"""Jobs for one process: what an engine keeps of a model goes away with it."""
TIMEOUT_S = 1800
KEPT = ("parameters", "elements", "different", "never_loaded", "whole_reads", "refused", "error")

Result = dict[str, Any]


def main(
    engines: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(ENGINES)}. Default: all.")] = None,
    only: Annotated[str, typer.Option(help="Pattern of checkpoint names, such as 'qwen*'.")] = "*",
    compare: Annotated[bool, typer.Option(help="Compare the parameters of all ranks.")] = True,
    generate: Annotated[bool, typer.Option(help="Generate tokens (vLLM).")] = True,
    home: Annotated[Path, typer.Option("--environments", help="Folder of environments and checkpoints.")] = HOME,
) -> None:
    """Load small checkpoints of all families and forms by the engines' own loaders and through relayout."""
    transformers_logging.disable_progress_bar()
    work = home / "work"
    work.mkdir(parents=True, exist_ok=True)
    for name in engines or list(ENGINES):
        python = environment_of(name, home)
        record(name, "versions", versions_in(python))
        if compare:
            for found in compare_cases(name, python, [one for one in all_cases() if fnmatch(one.name, only)], work):
                record(name, "parameters", {f"{found['name']}, tp {found['tp']}": kept(found, work)})
                say(describe(found, work))
        if generate and name == "vllm":
            for family in GENERATED:
                if fnmatch(family, only):
                    record(name, "tokens", dict(generate_both_ways(python, family, work)))


def record(engine: str, part: str, new: dict[str, Any]) -> None:
    """Add to the results; what was found before and is not found anew stays."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results.setdefault(engine, {}).setdefault(part, {}).update(new)
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def compare_cases(engine: str, python: Path, cases: Sequence[Case], work: Path) -> Iterator[Result]:
    """Each case at each degree."""
    jobs: dict[bool, list[Result]] = {False: [], True: []}
    for case in cases:
        for tp in DEGREES:
            job = {"name": case.name, "tp": tp, "expert": case.expert, "draft": case.draft}
            source = source_of(case.family, work)
            try:
                converted = converted_of(source, tp, expert=case.expert)
            except relayout.PlanError as error:
                yield {**job, "refused": str(error).removeprefix(f"{source}: ")}
                continue
            jobs[case.is_quantized].append({**job, "source": str(source), "converted": str(converted)})
    for is_quantized, mine in jobs.items():
        options = ["--stand-in-kernels"] if is_quantized else []
        for start in range(0, len(mine), BATCH):
            yield from run_batch(engine, python, mine[start : start + BATCH], work, options)


def run_batch(engine: str, python: Path, jobs: list[Result], work: Path, options: list[str]) -> Iterator[Result]:
    """Some jobs in one process; those that it does not come to are errors."""
    file = work / f"{engine}-jobs.json"
    file.write_text(json.dumps(jobs))
    command = [python, SCRIPTS / ENGINES[engine].script, file, *options]
    number = 0
    with (work / f"{engine}.log").open("a") as log:
        running = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=variables_of(engine), cwd=work
        )
        assert running.stdout is not None
        for line in running.stdout:
            if "RESULT " in line:
                number += 1
                yield json.loads(line.partition("RESULT ")[2])
        code = running.wait(TIMEOUT_S)
    yield from ({**job, "error": f"the process ended with {code}"} for job in jobs[number:])


def variables_of(engine: str) -> dict[str, str]:
    """What the engine's processes find in their environment: not our own modules."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | dict(ENGINES[engine].variables)


def generate_both_ways(python: Path, family: str, work: Path) -> Iterator[tuple[str, str]]:
    """Greedy tokens and their log-probabilities, from the source by vLLM itself, and through relayout."""
    source = source_of(family, work, wide=True)
    for tp in (1, 2):
        own = tokens(python, source, tp, "auto", work)
        ours = tokens(python, converted_of(source, tp), tp, "relayout", work)
        same = "tokens" in own and own == ours
        found = "same tokens and log-probabilities" if same else f"vLLM: {own}, relayout: {ours}"
        say(f"{family}, tp {tp}: {found}")
        yield f"{family}, tp {tp}", found


def tokens(python: Path, folder: Path, tp: int, load_format: str, work: Path) -> Result:
    """Of one engine, started for them."""
    variables = variables_of("vllm") | {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(tp)))}
    command = [python, SCRIPTS / "vllm_tokens.py", folder, str(tp), load_format]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=work, timeout=TIMEOUT_S)
    (work / f"{folder.name}-{load_format}.log").write_text(done.stdout + done.stderr)
    for line in done.stdout.splitlines():
        if "RESULT " in line:
            found: Result = json.loads(line.partition("RESULT ")[2])
            return found
    return {"error": (done.stdout + done.stderr)[-300:]}


def kept(found: Result, work: Path) -> Result:
    """What is worth writing down; messages without the paths of this machine."""
    if "error" in found:
        found = {"error": ("relayout: " if found.get("own_load") else "the engine's own load: ") + found["error"]}
    brief = {key: found[key] for key in KEPT if key in found}
    for key in {"refused", "error"} & brief.keys():
        brief[key] = str(brief[key]).replace(f"{work}/", "")[:300]
    return brief


def describe(found: Result, work: Path) -> str:
    what = kept(found, work).get("error") or found.get("refused")
    if what is None:
        what = f"{found['parameters']} parameters, {len(found['different'])} different"
    return f"{found['name']}, tp {found['tp']}: {what}"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    typer.run(main)
