"""The command."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated

import typer

from gpu import kit
from gpu.steps import Step, carry_out

ROOT = Path(__file__).resolve().parents[2]
PEERS = ("fastsafetensors>=0.5", "runai-model-streamer>=0.17", "instanttensor")
NEEDED = ("blake3", "xxhash", "zstandard", "hypothesis", "pytest", "typer>=0.28", "rich", "humanize", "matplotlib")
LAYER_GB, EMBEDDING_GB = 0.436, 2.1


def main(
    out: Annotated[Path, typer.Option(help="Folder of results and logs; what is there is not done again.")],
    work: Annotated[Path | None, typer.Option(help="Folder of checkpoints. Default: a temporary one, kept.")] = None,
    seconds: Annotated[float, typer.Option(help="Stop in time for this limit; run again to go on.")] = 580,
    layers: Annotated[int, typer.Option(help="Of Llama-3.1-8B's shapes: 32 are 16 GB, 68 are 32 GB.")] = 32,
    wheels: Annotated[Path | None, typer.Option(help="Folder of wheels, where there is no network.")] = None,
    only: Annotated[str, typer.Option(help="Pattern of names of steps.")] = "*",
    device: Annotated[str, typer.Option(help="cuda; cpu rehearses without a GPU.")] = "cuda",
    step: Annotated[
        str | None, typer.Option(help="kit: pack vLLM into OUT, for a machine without a network; engine: run vLLM.")
    ] = None,
) -> None:
    """Tests, limits, benchmarks and sweeps on a device, in steps; exit code 75: run it again to go on."""
    if step is not None:
        engine_step(step, out, wheels, seconds, device, only)
        return
    deadline = time.monotonic() + seconds
    work = (work or Path(tempfile.gettempdir(), "relayout-gpu")).absolute()
    work.mkdir(parents=True, exist_ok=True)
    packages = work / "packages"
    environment = {
        "PYTHONPATH": ":".join(map(str, (ROOT, ROOT / "tools", ROOT / "tests", packages))),
        "PYTHONUNBUFFERED": "1",
    }
    install(packages, wheels, environment)
    steps = [step for step in all_steps(out.absolute(), work, layers, device) if fnmatch(step.name, only)]
    if not carry_out(out.absolute(), steps, deadline, environment):
        raise typer.Exit(75)


def engine_step(step: str, out: Path, wheels: Path | None, seconds: float, device: str, only: str) -> None:
    """Pack the kit, or run the step `engine` in this environment, which then has vLLM."""
    if step == "kit":
        with tempfile.TemporaryDirectory() as scratch:
            for line in kit.calls(kit.make_kit(out, wheels or Path(scratch, "wheels"), kit.room(ROOT))):
                print(line)
    elif step == "engine":
        options = ("--device", device, "--seconds", str(seconds), "--only", only)
        command = (sys.executable, "-P", "-m", "gpu.engine", str(out.absolute()), *options)
        raise typer.Exit(subprocess.run(command).returncode)
    else:
        raise typer.BadParameter(f"{step!r}, expected kit or engine", param_hint="--step")


def all_steps(out: Path, work: Path, layers: int, device: str) -> list[Step]:
    """In the order of what is wanted most, should the time not be enough for all."""
    python = sys.executable
    size = EMBEDDING_GB + layers * LAYER_GB
    small = max(2, layers // 4)
    tests = ("-rA", "-q", "-p", "no:cacheprovider", f"--basetemp={work / 'tests'}")
    files = [str(ROOT / "tests" / name) for name in ("loader/test_cuda.py", "live/test_staging.py")]
    steps = [Step("tests", (python, "-m", "pytest", *files, *tests))]
    for name in ("limits", "engine_ways", "live", "groups", "sweep"):
        arguments = (str(out / f"{name}.jsonl"), str(work), str(small), device)
        steps.append(Step(name, (python, "-m", f"gpu.{name}", *arguments)))
    for scenario in ("one", "whole"):
        for heat in ("cold", "warm"):
            words = f"bench load --device {device} --scenario {scenario} --{heat} --size {size:.1f} --runs 3"
            file = out / f"load-{scenario}-{heat}.json"
            command = (python, "-m", *words.split(), "--limit", "120", "--dir", str(work), "--out", str(file))
            steps.append(Step(f"bench {scenario} {heat}", command))
    return steps


def install(packages: Path, wheels: Path | None, environment: dict[str, str]) -> None:
    """Install what this Python has not, alone: torch stays as it is. What cannot be had is said."""
    code = (
        "import sys; from importlib.metadata import version; from packaging.requirements import Requirement;"
        "wanted = Requirement(sys.argv[1]); sys.exit(not wanted.specifier.contains(version(wanted.name)))"
    )
    where = ("--no-index", "--find-links", str(wheels)) if wheels is not None else ()
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages), *where)
    for requirement in (*NEEDED, *PEERS):
        command = [sys.executable, "-c", code, requirement]
        if subprocess.run(command, capture_output=True, env=os.environ | environment).returncode:
            done = subprocess.run([*pip, requirement], capture_output=True, text=True, timeout=120)
            print(f"install {requirement}: {'done' if not done.returncode else done.stderr.strip()[-200:]}", flush=True)


if __name__ == "__main__":
    typer.run(main)
