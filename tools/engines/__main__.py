"""The command."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from support.families import FAMILIES
from support.updates_worker import write_steps
from transformers.utils import logging as transformers_logging

import relayout
from engines import coverage
from engines.cases import (
    BGE_M3,
    DEGREES,
    DEGREES_ON_DEVICES,
    FORMS,
    IN_TOKENSPEED,
    NOT_IN_SGLANG,
    RERANKER,
    RUNS,
    WHOLE_IN_SGLANG,
    WHOLE_IN_TOKENSPEED,
    Case,
    all_cases,
    converted_of,
    hub_cases,
    source_of,
)
from engines.environments import ENGINES, ROOT, Environment, environment_of, versions_in, with_packages
from engines.observing import laboratory
from engines.observing.sglang_architectures import SGLANG
from engines.observing.sglang_architectures import write as write_for_sglang
from engines.starts.cold_start import first_loads, measure, reads
from engines.starts.failures import fail
from engines.starts.first_start import first_starts
from engines.starts.nodes import load_on_nodes
from engines.starts.server import serve
from engines.starts.sglang_updates import updates as sglang_updates
from engines.starts.starting import start
from engines.starts.updates import updates
from engines.upstream import try_patch

RESULTS = ROOT / "tools" / "results" / "engines.json"
SKIPPED = (
    *("llama", "qwen3_moe", "fp8_blocks", "fp8_blocks_moe", "gptq_4bit", "gptq_4bit_moe", "awq", "awq_moe"),
    *("qwen2_5_vl", RERANKER, BGE_M3, "llama 2 stages", "qwen3_moe 2 stages", "deepseek_v3 draft model"),
)
"""Cases of which each kind of tensor is left out."""
HOME = Path(tempfile.gettempdir(), "engine-envs")
MODELS_AT_ONCE = 4
"""Models of the hub whose conversions are on the drive together."""
BATCH = 40
"""Jobs for one process: what an engine keeps of a model goes away with it."""
REPLICATED = "qwen3_moe"
"""What data-parallel replicas load: vLLM lets only those of mixtures of experts know of each other."""
MODELEXPRESS = ("modelexpress==0.8.0.dev20261026", "google-crc32c")
"""The first version with a folder of plugins that is known here; and what its modules import."""
KEPT = (
    *("same", "distinct", "parameters", "elements", "different", "never_loaded", "whole_reads", "refused"),
    *("error", "marks", "not_given", "not_used", "unseen", "observed", "unused", "builtin", "other"),
)

Result = dict[str, Any]
Step: TypeAlias = Callable[[Environment, Path, str], Iterator[tuple[str, Any]]]
"""In an environment and a folder, of what matches a pattern: (what, outcome) of each."""


def compare_parameters(environment: Environment, work: Path, only: str) -> Iterator[tuple[str, Result]]:
    """Each parameter of each rank, from the source and through relayout; what is refused, by the engine alone."""
    cases = [case for case in all_cases() if fnmatch(case.name, only)]
    refused: dict[str, Result] = {}
    for name, outcome in run_cases(environment, cases, work):
        if "refused" in outcome:
            refused[name] = outcome
        yield name, outcome
    for case in (case for case in cases if case.is_on_device):
        yield from with_engines_word(environment, case, refused, work)


def compare_hub(environment: Environment, work: Path, only: str) -> Iterator[tuple[str, Result]]:
    """Models with the hub's numbers of heads and experts; where a degree is refused, what the engine says of it."""
    all_of_hub = [case for case in hub_cases() if fnmatch(case.name, only)]
    for first in range(0, len(all_of_hub), MODELS_AT_ONCE):
        cases = all_of_hub[first : first + MODELS_AT_ONCE]
        outcomes = dict(run_cases(environment, cases, work, most=max(cases[0].degrees)))
        for case in cases:
            outcomes |= with_engines_word(environment, case, outcomes, work)
        yield from outcomes.items()
        for folder in (folder for case in cases for folder in work.glob(f"{case.family}-tp*")):
            shutil.rmtree(folder)


def with_engines_word(
    environment: Environment, case: Case, outcomes: Mapping[str, Result], work: Path
) -> Iterator[tuple[str, Result]]:
    """Of a case the outcomes that are refusals, each with what the engine's own load of the source says."""
    tps = [tp for tp in case.degrees if "refused" in outcomes.get(f"{case.name}, tp {tp}", ())]
    job = {"name": case.name, "expert": case.expert, "source": str(source_of(case.family, work)), "converted": ""}
    jobs = [{**job, "tp": tp} for tp in tps]
    for result in run_batch(environment, jobs, work, comparing(environment, case)) if jobs else ():
        name = f"{case.name}, tp {result['tp']}"
        yield name, {**outcomes[name], "engine": kept(result, work).get("error", "loads it")}


def skip_tensors(environment: Environment, work: Path, only: str) -> Iterator[tuple[str, Result]]:
    """Load without one tensor in turn, at TP 2, or the least that there is, and ask whether it is seen."""
    cases = [case for case in all_cases() if case.name in SKIPPED and fnmatch(case.name, only)]
    yield from run_cases(environment, cases, work, module="comparing.skipped", most=2)


def run_cases(
    environment: Environment,
    cases: Sequence[Case],
    work: Path,
    *,
    module: str = "",
    most: int = max(DEGREES_ON_DEVICES),
) -> Iterator[tuple[str, Result]]:
    """Each case at each degree up to `most`, by a module of `engines`."""
    jobs: dict[tuple[str, ...], list[Result]] = {}
    is_sglang, is_tokenspeed = (environment.engine == name for name in ("sglang", "tokenspeed"))
    for case in cases:
        is_vllms = case.draft or case.moe_backend != "auto" or case.settings or case.stages > 1
        if (is_sglang or is_tokenspeed) and is_vllms:
            continue  # Draft models are built by workers, and kernels are not chosen here.
        if (is_sglang and case.family in NOT_IN_SGLANG) or (is_tokenspeed and case.family not in IN_TOKENSPEED):
            continue
        command = tuple(comparing(environment, case, module))
        is_uncut = (is_sglang and case.family in WHOLE_IN_SGLANG) or (
            is_tokenspeed and case.family in WHOLE_IN_TOKENSPEED
        )
        for tp in (tp for tp in case.degrees if tp <= most):
            job = {"name": case.name, "tp": tp, "strict": case.strict and not is_uncut}
            job |= {key: getattr(case, key) for key in ("expert", "draft", "moe_backend", "stages", "settings")}
            source = source_of(case.family, work)
            try:
                converted = converted_of(source, tp, expert=case.expert)
            except relayout.PlanError as error:
                yield f"{case.name}, tp {tp}", kept({"refused": str(error).removeprefix(f"{source}: ")}, work)
                continue
            jobs.setdefault(command, []).append({**job, "source": str(source), "converted": str(converted)})
    for command, mine in jobs.items():
        for first in range(0, len(mine), BATCH):
            for result in run_batch(environment, mine[first : first + BATCH], work, list(command)):
                yield f"{result['name']}, tp {result['tp']}", kept(result, work)


def comparing(environment: Environment, case: Case, module: str = "") -> list[str]:
    """A module of `engines` that compares, by default the engine's, and its options for a case."""
    options = ["--stub-devices"] if case.is_on_device else ["--stub-kernels"] * case.is_quantized
    return [module or ENGINES[environment.engine].comparing, *options]


def run_batch(environment: Environment, jobs: list[Result], work: Path, command: list[str]) -> Iterator[Result]:
    """Some jobs in one process of a module; those that it does not come to are errors."""
    file = work / "jobs.json"
    file.write_text(json.dumps(jobs))
    module, *options = command
    left = list(jobs)
    try:
        for result in environment.results(work, module, file, *options):
            left.pop(0)
            yield result
    except subprocess.CalledProcessError as error:
        yield from ({**job, "error": f"the process ended with {error.returncode}"} for job in left)


def generate_both_ways(environment: Environment, work: Path, only: str) -> Iterator[tuple[str, Result]]:
    """Greedy tokens and their log-probabilities, from the source by vLLM itself, and through relayout."""
    for run in (run for run in RUNS if fnmatch(run.name, only)):
        # Else it depends on the moment in which requests come to the engine's process how they are put together.
        alone = {} if run.stages > 1 else {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # Stages need that process.
        mine, source = environment.with_variables(**alone), source_of(run.family, work, wide=True)
        result: Result = start(mine, source, run.settings, work / f"{run.name}, own.log").result
        if "error" not in result:
            settings = run.settings | {"load_format": "relayout", "model_loader_extra_config": {"strict": True}}
            folder = converted_of(source, run.tp, expert=run.expert)
            ours = start(mine, folder, settings, work / f"{run.name}, relayout.log").result
            distinct = len({token for tokens in result["tokens"] for token in tokens})
            errors = {"error": ours["error"]} if "error" in ours else {}
            result = {"own_load": True, "same": ours == result, "distinct": distinct} | errors
        yield run.name, kept(result, work)


def observe_sglang(environment: Environment, work: Path, only: str) -> Iterator[tuple[str, Result]]:
    """What the observer sees of SGLang, beside the built-in plans and beside parameters after a load."""
    families = [name for name in (*FAMILIES, *FORMS) if fnmatch(name, only)]
    sources = {name: source_of(name, work) for name in families}
    for name in (name for name in SGLANG if fnmatch(name, only)):
        sources[name] = work / "architectures" / name
        shutil.rmtree(sources[name], ignore_errors=True)
        write_for_sglang(name, sources[name])
    jobs = [
        {"name": name, "source": str(source), "converted": "", "tp": tp}
        for name, source in sources.items()
        for tp in DEGREES
    ]
    for first in range(0, len(jobs), BATCH):
        for result in run_batch(environment, jobs[first : first + BATCH], work, ["comparing.sglang_observed"]):
            yield f"{result['name']}, tp {result['tp']}", kept(result, work)


def load_replicas(environment: Environment, work: Path, only: str) -> Iterator[tuple[str, Result]]:
    """Two data-parallel replicas of some processes each, in vLLM's own groups: what their loads have in common."""
    source = source_of(REPLICATED, work, wide=True)
    environment = environment.with_variables(GLOO_SOCKET_IFNAME="lo")
    for tp in (1, 2) if fnmatch(REPLICATED, only) else ():
        steps = work / "replicas" / str(tp)
        shutil.rmtree(steps, ignore_errors=True)
        write_steps(source, steps, 1, tp=tp)
        processes = environment.result(work, "comparing.vllm_replicas", source, converted_of(source, tp), tp, steps)
        yield (
            f"{REPLICATED}, tp {tp}",
            {
                "processes": len(processes),
                "readers": sorted({process["shared"]["num_readers"] for process in processes}),
                "parameters": sum(process["shared"]["parameters"] for process in processes),
                "different": [
                    name
                    for process in processes
                    for name in process["shared"]["different"] + process["alone"]["different"]
                ],
                "whole_reads": sum(process["shared"]["whole_reads"] for process in processes),
                "live": {
                    "different": [name for process in processes for name in process["live"]["different"]],
                    "contents": len({process["live"]["content"] for process in processes}),
                    "attested": [process["live"].get("difference") for process in processes],
                    "verified": [process["live"].get("verified") for process in processes],
                    "refused": sorted({process["live"].get("refused", "") for process in processes}),
                },
            },
        )


def load_by_modelexpress(environment: Environment, work: Path, only: str) -> Iterator[tuple[str, Result]]:
    """Converted folders by ModelExpress's chain of strategies, into which its loader of plugins puts relayout's."""
    environment = with_packages(environment, work / MODELEXPRESS[0], *MODELEXPRESS)
    cases = [case for case in all_cases() if case.name in ("llama", "qwen3_moe") and fnmatch(case.name, only)]
    yield from run_cases(environment, cases, work, module="comparing.vllm_modelexpress", most=2)


STEPS: Mapping[str, Step] = {
    "parameters": compare_parameters,
    "tokens": generate_both_ways,
    "failures": fail,
    "replicas": load_replicas,
    "modelexpress": load_by_modelexpress,
    "skipped": skip_tensors,
    "hub": compare_hub,
    "first_start": first_starts,
    "updates": updates,
    "server": serve,
    "nodes": load_on_nodes,
    "cold_start": measure,
    "first_loads": first_loads,
    "reads": reads,
}
"""What is recorded of vLLM; by default the first four."""
OF_SGLANG: Mapping[str, Step] = {
    "parameters": compare_parameters,
    "hub": compare_hub,
    "updates": sglang_updates,
    "observe": observe_sglang,
}
"""What is recorded of SGLang."""
OF_TOKENSPEED: Mapping[str, Step] = {"parameters": compare_parameters}
"""What is recorded of TokenSpeed."""
LABORATORY: Mapping[str, Callable[[Environment, Path, str], None]] = {
    "observe": laboratory.observe_registry,
    "plans": laboratory.make_plans,
    "table": laboratory.write_table,
    "registries": laboratory.read_registries,
}
"""What is done with one engine: each architecture is observed; built-in plans are written; OBSERVED.md is; the
registries of both engines are read."""


KNOWN = [*STEPS, *LABORATORY, "attempts", "upstream"]


def main(
    engines: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(ENGINES)}. Default: all.")] = None,
    step: Annotated[
        list[str] | None, typer.Option(help=f"Only this, of {', '.join(KNOWN)}. May be given several times.")
    ] = None,
    only: Annotated[str, typer.Option(help="Pattern of names, such as 'qwen*'.")] = "*",
    home: Annotated[Path, typer.Option("--environments", help="Folder of environments and checkpoints.")] = HOME,
) -> None:
    """Load small checkpoints of all families and forms by the engines' own loaders and through relayout."""
    transformers_logging.disable_progress_bar()
    steps = step or KNOWN[:4]
    if unknown := set(steps) - set(KNOWN):
        raise typer.BadParameter(f"{', '.join(unknown)}: expected {', '.join(KNOWN)}")
    for name in steps:
        if name in LABORATORY and engines != ["sglang"]:
            LABORATORY[name](environment_of(laboratory.ENGINE, home), home, only)
        elif name == "attempts":
            for engine in engines or coverage.ENGINES:
                laboratory.attempt(engine, home, only)
        elif name == "upstream":
            say(try_patch(environment_of("vllm", home)))
    for engine in engines or ENGINES:
        of_engine = {"sglang": OF_SGLANG, "tokenspeed": OF_TOKENSPEED}.get(engine, STEPS)
        if not of_engine.keys() & set(steps):
            continue
        work = home / f"{engine}-work"
        work.mkdir(parents=True, exist_ok=True)
        environment = environment_of(engine, home)
        record(engine, "versions", versions_in(environment))
        record(engine, "plugin", environment.result(work, "footprint", engine.partition("-")[0]))
        for name in (name for name in steps if name in of_engine):
            for what, outcome in of_engine[name](environment, work, only):
                record(engine, name, {what: outcome})
                say(f"{engine}, {name}, {what}: {outcome}")


def record(engine: str, part: str, new: dict[str, Any]) -> None:
    """Add to the results; what was measured before and is not measured anew stays."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results.setdefault(engine, {}).setdefault(part, {}).update(new)
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def kept(result: Result, work: Path) -> Result:
    """What is worth writing down; messages without the paths of this machine."""
    if "error" in result:
        result = {"error": ("relayout: " if result.get("own_load") else "the engine's own load: ") + result["error"]}
    brief = {key: result[key] for key in KEPT if key in result}
    for key in {"refused", "error"} & brief.keys():
        brief[key] = str(brief[key]).replace(f"{work}/", "")[:300]
    return brief


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    typer.run(main)
