"""`tools/run fuzz`: gives parsers bytes that somebody might have made, for as long as one likes.

With atheris (libFuzzer, guided by coverage) where it is installed, else with our own mutations at random. Each parser
has a process of its own, which starts from the vectors and from what earlier runs have found interesting (build/fuzz).
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from fuzzing import MAX_INPUT_NBYTES, TARGETS, Target

FOLDER = Path(__file__).parent.parent / "build" / "fuzz"
MAX_SECONDS = 10
"""For one input: more is a finding."""
MAX_MEMORY_MIB = 2048
"""The same."""


def main(
    parsers: Annotated[
        list[str] | None, typer.Argument(metavar="[PARSER]...", help=f"{', '.join(TARGETS)}. Default: all.")
    ] = None,
    seconds: Annotated[float, typer.Option(metavar="S", help="For each parser, all at the same time.")] = 60,
    engine: Annotated[
        Literal["atheris", "own"], typer.Option(help="Who mutates; what atheris changes depends on what it covers.")
    ] = "atheris" if importlib.util.find_spec("atheris") else "own",
    folder: Annotated[Path, typer.Option(help="Where corpus, findings and logs go.")] = FOLDER,
) -> None:
    """Fuzz parsers; prints a line of JSON for each, and fails if there is a finding."""
    names = parsers or list(TARGETS)
    if unknown := set(names) - set(TARGETS):
        raise typer.BadParameter(f"{min(unknown)!r} is none of {', '.join(TARGETS)}")
    jobs = {name: _start(name, seconds, engine, folder / name) for name in names}
    results = [_result(name, engine, *job) for name, job in jobs.items()]
    raise typer.Exit(1 if any(result["findings"] for result in results) else 0)


def _start(name: str, seconds: float, engine: str, folder: Path) -> tuple[subprocess.Popen[bytes], Path, float]:
    for place in ("corpus", "findings"):
        (folder / place).mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(TARGETS[name].seeds()):
        (folder / "corpus" / f"seed-{number}").write_bytes(seed)
    log = folder / "log"
    command = [sys.executable, __file__, "--child", engine, name, str(seconds), str(folder)]
    with log.open("wb") as stream:
        return subprocess.Popen(command, stdout=stream, stderr=stream), folder, time.monotonic()


def _result(name: str, engine: str, process: subprocess.Popen[bytes], folder: Path, started: float) -> dict[str, Any]:
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = code = os.waitstatus_to_exitcode(status)
    log = (folder / "log").read_text("utf-8", "replace")
    runs = re.findall(r"(?:DONE|stat::number_of_executed_units:|#)\D*(\d+)", log)
    findings = sorted(path.name for path in (folder / "findings").iterdir())
    if code and not findings:
        findings = [f"exit status {code}, see {folder / 'log'}"]
    result = {
        "parser": name,
        "engine": engine,
        "seconds": round(time.monotonic() - started),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime),
        "inputs": max(map(int, runs), default=None),
        "corpus": len(list((folder / "corpus").iterdir())),
        "findings": findings,
    }
    print(json.dumps(result), flush=True)
    return result


def _fuzz(engine: str, name: str, seconds: float, folder: Path) -> None:
    """The child's work."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if engine == "own":
        _fuzz_at_random(TARGETS[name], seconds, folder)
        return
    import atheris

    for module in [module for module in sys.modules if module.split(".")[0] in ("relayout", "fuzzing")]:
        del sys.modules[module]
    with atheris.instrument_imports(include=["relayout", "fuzzing"]):
        from fuzzing import TARGETS as instrumented
    target = instrumented[name]

    def mutate(data: bytes, max_nbytes: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.3:
            return atheris.Mutate(data, max_nbytes)
        changed = target.mutate(data, rng)
        return changed if len(changed) <= max_nbytes else data

    flags = {
        "max_total_time": int(seconds),
        "max_len": MAX_INPUT_NBYTES,
        "timeout": MAX_SECONDS,
        "rss_limit_mb": MAX_MEMORY_MIB,
        "artifact_prefix": f"{folder / 'findings'}/",
        "print_final_stats": 1,
        "verbosity": 1,
    }
    arguments = [sys.argv[0], *(f"-{key}={value}" for key, value in flags.items()), str(folder / "corpus")]
    atheris.Setup(arguments, target.run, custom_mutator=mutate)
    atheris.Fuzz()


def _fuzz_at_random(target: Target, seconds: float, folder: Path) -> None:
    number = 0
    seeds = target.seeds()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        rng = random.Random(f"{time.time_ns()}")
        data = rng.choice(seeds)
        for _ in range(rng.choice([1, 1, 2, 4])):
            data = target.mutate(data, rng)
        started = time.monotonic()
        try:
            target.run(data)
            error = None if time.monotonic() - started < MAX_SECONDS else "slow"
        except Exception as exception:
            error = type(exception).__name__
            print(repr(exception), flush=True)
        if error is not None:
            (folder / "findings" / f"{error}-{number}").write_bytes(data)
        number += 1
    print(f"DONE {number}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _fuzz(sys.argv[2], sys.argv[3], float(sys.argv[4]), Path(sys.argv[5]))
    else:
        typer.run(main)
