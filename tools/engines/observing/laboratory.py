"""What the laboratory does: observe the registry, make plans, and write what came out as a table."""

from __future__ import annotations

import json
import lzma
import subprocess
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from support.families import FAMILIES
from support.observed_slices import read
from support.quantized import QUANTIZED

from engines import coverage, registries
from engines.environments import ROOT, Environment, environment_of, versions_in
from engines.observing import plan_making, tables
from engines.observing.multimodal_architectures import OTHER_FORMS
from engines.observing.plan_table import TABLE

ENGINE = "vllm-0.33"
RESULTS = ROOT / "tools" / "results"
OBSERVED_RESULTS = RESULTS / "observed.jsonl"
ATTEMPTS = RESULTS / "attempts.jsonl"
BUILTIN_RESULTS = RESULTS / "builtin_plans.jsonl"
QUANTIZED_FORMS = [name for name, quantized in QUANTIZED.items() if quantized.pattern]
"""Quantized forms of one family's own, whose tensors no other checkpoint has."""
SLICES = ROOT / "tests" / "plans" / "observed.jsonl.xz"
TABLE_FILE = ROOT / "docs" / "reference" / "OBSERVED.md"


def observe_registry(environment: Environment, home: Path, _only: str) -> None:
    """Convert and load each architecture of vLLM's registry that a checkpoint can be made for."""
    OBSERVED_RESULTS.unlink(missing_ok=True)
    run_module(environment, home, "registry", OBSERVED_RESULTS)
    # What was found of built-in plans goes into a file of its own.
    results = sorted(tables.read(OBSERVED_RESULTS), key=lambda result: str(result["architecture"]))
    builtin = [{"architecture": result["architecture"], **result.pop("builtin", {})} for result in results]
    write_lines(OBSERVED_RESULTS, results)
    write_lines(BUILTIN_RESULTS, [result for result in builtin if len(result) > 1])
    write_table(environment, home)


def read_registries(_environment: Environment, home: Path, _only: str) -> None:
    """Read from wheels which architectures the releases of both engines register."""
    registries.write(home)


def attempt(engine: str, home: Path, only: str) -> None:
    """Attempt to observe the architectures of an engine that have no built-in plan; keep what was found of others."""
    names = {
        one.name: one.types
        for one in coverage.architectures()
        if engine in one.since and not one.plan and fnmatch(one.name, only)
    }
    environment = environment_of(ENGINE if engine == "vllm" else engine, home)
    work = home / f"{engine}-work"
    work.mkdir(parents=True, exist_ok=True)
    file, asked = work / "attempts.jsonl", work / "names.json"
    file.unlink(missing_ok=True)
    asked.write_text(json.dumps(names))
    command = environment.command("observing.attempts", engine, work / "attempts", file, asked)
    subprocess.run(command, check=True, env=environment.variables | {"OMP_NUM_THREADS": "1"}, cwd=home)
    keep_attempts(file)


def keep_attempts(file: Path) -> None:
    """Record attempts, each in the place of an earlier one of the same engine and architecture."""
    kept = {}
    for source in (ATTEMPTS, file):
        for line in source.read_text().splitlines() if source.exists() else ():
            result = json.loads(line)
            kept[result["engine"], result["architecture"]] = result
    write_lines(ATTEMPTS, [kept[key] for key in sorted(kept)])


def make_plans(environment: Environment, home: Path, only: str) -> None:
    """Observe what can be made small, in several sizes; write built-in plans from it. Others are as they were."""
    names = [result["architecture"] for result in tables.read(OBSERVED_RESULTS) if result["step"] != "make"]
    names += [*OTHER_FORMS, *(f"family:{name}" for name in FAMILIES), *(f"form:{name}" for name in QUANTIZED_FORMS)]
    names = [name for name in names if fnmatch(name, only)]
    file = home / "vllm-work" / "slices.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    run_module(environment, home, "several_sizes", file, *names)
    keep_slices(file, names)
    observed = {plan_making.full_name(name) for wanted in TABLE.values() for name in wanted.names} & set(names)
    if observed:
        plan_making.write(TABLE, read(SLICES))
    write_table(environment, home)


def keep_slices(file: Path, names: Collection[str]) -> None:
    """Keep what was observed of these, in the place of what was kept of them before."""
    kept = lzma.decompress(SLICES.read_bytes()).decode().splitlines(keepends=True) if SLICES.exists() else []
    lines = [line for line in kept if json.loads(line)["name"] not in names]
    lines += [line for line in file.read_text().splitlines(keepends=True) if "error" not in json.loads(line)]
    SLICES.write_bytes(lzma.compress("".join(sorted(lines)).encode(), preset=9))


def run_module(environment: Environment, home: Path, module: str, results: Path, *names: str) -> None:
    """Of those that observe vLLM."""
    command = environment.command(f"observing.{module}", home / "vllm-work" / module, results, *names)
    subprocess.run(command, check=True, env=environment.variables | {"OMP_NUM_THREADS": "1"}, cwd=home)


def write_lines(file: Path, results: Sequence[Mapping[str, Any]]) -> None:
    file.write_text("".join(f"{json.dumps(result)}\n" for result in results))


def write_table(environment: Environment, _home: Path, _only: str = "*") -> None:
    """Write OBSERVED.md from the results."""
    builtin = {result["architecture"]: result for result in tables.read(BUILTIN_RESULTS)}
    text = tables.render(tables.read(OBSERVED_RESULTS), builtin, versions_in(environment))
    TABLE_FILE.write_text(f"{text}\n{tables.render_comparison(read(SLICES))}")
