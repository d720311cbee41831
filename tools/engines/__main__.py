"""The command."""

from __future__ import annotations

import json
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
from engines.cases import BGE_M3, RERANKER, RUNS, WHOLE_IN_SGLANG, Case, Run, all_cases, converted_of, source_of
from engines.environments import ENGINES, ROOT, Environment, environment_of, versions_in
from engines.observing import laboratory
from engines.starts.cold_start import measure, placements, reads
from engines.starts.failures import fail
from engines.starts.first_start import first_starts
from engines.starts.nodes import load_on_nodes
from engines.starts.starting import start
from engines.starts.updates import updates as update_weights
from engines.upstream import try_patch

RESULTS = ROOT / "tools" / "results" / "engines.json"
SKIPPED = (
    *("llama", "qwen3_moe", "fp8_blocks", "fp8_blocks_moe", "gptq_4bit", "gptq_4bit_moe", "awq", "awq_moe"),
    *("qwen2_5_vl", RERANKER, BGE_M3, "llama 2 stages", "qwen3_moe 2 stages", "deepseek_v3 draft model"),
)
"""Cases of which each kind of tensor is left out."""
HOME = Path(tempfile.gettempdir(), "engine-envs")
BATCH = 40
"""Jobs for one process: what an engine keeps of a model goes away with it."""
TIMEOUT_S = 1800
REPLICATED = "qwen3_moe"
"""What data-parallel replicas load: vLLM lets only those of mixtures of experts know of each other."""
KEPT = (
    "same", "distinct", "parameters", "elements", "different", "never_loaded", "whole_reads", "straight", "refused",
    "error",
)  # fmt: skip

Result = dict[str, Any]


def main(
    engines: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(ENGINES)}. Default: all.")] = None,
    only: Annotated[str, typer.Option(help="Pattern of names, such as 'qwen*'.")] = "*",
    compare: Annotated[bool, typer.Option(help="Compare the parameters of all ranks.")] = True,
    generate: Annotated[bool, typer.Option(help="Generate tokens (vLLM).")] = True,
    failures: Annotated[bool, typer.Option(help="See what is said of damaged folders (vLLM).")] = True,
    replicas: Annotated[bool, typer.Option(help="Load as data-parallel replicas (vLLM).")] = True,
    starts: Annotated[int, typer.Option(help="How often cold starts are measured (vLLM).")] = 5,
    observe: Annotated[
        bool, typer.Option("--observe", help="Only: every architecture of vLLM's registry, by observation.")
    ] = False,
    plans: Annotated[
        bool, typer.Option("--plans", help="Only: observe checkpoints of several sizes; write the built-in plans.")
    ] = False,
    mutations: Annotated[bool, typer.Option("--mutations", help="Only: are wrong plans seen to be wrong?")] = False,
    skipped: Annotated[bool, typer.Option("--skipped", help="Only: is it seen if a tensor is skipped? (vLLM)")] = False,
    first_start: Annotated[bool, typer.Option("--first-start", help="Only: first starts with a cache (vLLM).")] = False,
    updates: Annotated[bool, typer.Option("--updates", help="Only: weights of a live engine change (vLLM).")] = False,
    nodes: Annotated[bool, typer.Option("--nodes", help="Only: each node has its own ranks (vLLM, root).")] = False,
    upstream: Annotated[bool, typer.Option("--upstream", help="Only: test the patch for vLLM in its tree.")] = False,
    table: Annotated[bool, typer.Option("--table", help="Only: write OBSERVED.md anew from all results.")] = False,
    home: Annotated[Path, typer.Option("--environments", help="Folder of environments and checkpoints.")] = HOME,
) -> None:
    """Load small checkpoints of all families and forms by the engines' own loaders and through relayout."""
    transformers_logging.disable_progress_bar()
    if observe or plans or mutations or table:
        environment = environment_of(laboratory.ENGINE, home)
        steps = {laboratory.observe_registry: observe, laboratory.make_plans: plans, laboratory.mutate: mutations}
        for step, is_wanted in steps.items():
            if is_wanted:
                step(environment, home)
        laboratory.write_table(versions_in(environment))
        return
    if skipped:
        skip_tensors(environment_of("vllm", home), home / "vllm-work")
        return
    if first_start:
        for what, outcome in first_starts(environment_of("vllm", home), home / "vllm-work", only):
            record("vllm", "first_start", {what: outcome})
            say(f"{what}: {outcome}")
        return
    if nodes:
        outcome = load_on_nodes(environment_of("vllm", home), home / "vllm-work")
        record("vllm", "nodes", outcome)
        say(f"two nodes: {outcome}")
        return
    if upstream:
        say(try_patch(environment_of("vllm", home)))
        return
    if updates:
        for what, outcome in update_weights(environment_of("vllm", home), home / "vllm-work"):
            record("vllm", "updates", {what: outcome})
            say(f"{what}: {outcome}")
        return
    for name in engines or list(ENGINES):
        work = home / f"{name}-work"
        work.mkdir(parents=True, exist_ok=True)
        environment = environment_of(name, home)
        record(name, "versions", versions_in(environment))
        record(name, "plugin", environment.result(work, "footprint", name.partition("-")[0]))
        cases = [case for case in all_cases() if fnmatch(case.name, only)]
        if compare:
            for result in run_cases(name, environment, cases, work, ENGINES[name].comparing):
                record(name, "parameters", {f"{result['name']}, tp {result['tp']}": kept(result, work)})
                say(describe(result, work))
        if name == "sglang":
            continue
        for run in RUNS if generate else ():
            if fnmatch(run.name, only):
                record(name, "tokens", {run.name: generate_both_ways(environment, run, work)})
        for what, outcome in fail(environment, work, only) if failures else ():
            record(name, "failures", {what: outcome})
            say(f"{what}: {outcome}")
        if replicas:
            record(name, "replicas", {f"{REPLICATED}, tp {tp}": load_replicas(environment, tp, work) for tp in (1, 2)})
        if starts:
            record(name, "cold_start", measure(environment, work, starts))
            record(name, "placement", placements(environment, work, starts))
            record(name, "reads", dict(reads(environment, work)))


def record(engine: str, part: str, new: dict[str, Any]) -> None:
    """Add to the results; what was measured before and is not measured anew stays."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results.setdefault(engine, {}).setdefault(part, {}).update(new)
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def skip_tensors(environment: Environment, work: Path) -> None:
    """Load without one tensor in turn, at TP 2, or the least that there is."""
    work.mkdir(parents=True, exist_ok=True)
    cases = [case for case in all_cases() if case.name in SKIPPED]
    for result in run_cases("vllm", environment, cases, work, "comparing.skipped", most=2):
        keys = ("marks", "not_given", "not_used", "unseen", "error", "refused")
        say(f"{result['name']}, tp {result['tp']}: { {key: result[key] for key in keys if key in result} }")


def run_cases(
    engine: str, environment: Environment, cases: Sequence[Case], work: Path, module: str, *, most: int = 4
) -> Iterator[Result]:
    """Each case at each degree up to `most`, by a module of `engines`."""
    jobs: dict[bool, list[Result]] = {False: [], True: []}
    for case in cases:
        if engine == "sglang" and (case.draft or case.moe_backend != "auto" or case.settings or case.stages > 1):
            continue  # Its draft models are built by its workers, and its kernels are not chosen here.
        is_uncut = engine == "sglang" and case.family in WHOLE_IN_SGLANG
        for tp in (tp for tp in case.degrees if tp <= most):
            job = {"name": case.name, "tp": tp, "strict": case.strict and not is_uncut}
            job |= {key: getattr(case, key) for key in ("expert", "draft", "moe_backend", "stages", "settings")}
            source = source_of(case.family, work)
            try:
                converted = converted_of(source, tp, expert=case.expert)
            except relayout.PlanError as error:
                yield {**job, "refused": str(error).removeprefix(f"{source}: ")}
                continue
            jobs[case.is_quantized].append({**job, "source": str(source), "converted": str(converted)})
    for is_quantized, mine in jobs.items():
        options = ["--stand-in-kernels"] if is_quantized else []
        for first in range(0, len(mine), BATCH):
            yield from run_batch(engine, environment, mine[first : first + BATCH], work, [module, *options])


def run_batch(
    engine: str, environment: Environment, jobs: list[Result], work: Path, command: list[str]
) -> Iterator[Result]:
    """Some jobs in one process of a module; those that it does not come to are errors."""
    file = work / f"{engine}-jobs.json"
    file.write_text(json.dumps(jobs))
    module, *options = command
    count = 0
    with (work / f"{engine}.log").open("a") as log:
        running = subprocess.Popen(
            environment.command(module, file, *options),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment.variables,
            cwd=work,
        )
        assert running.stdout is not None
        for line in running.stdout:
            if "RESULT " in line:
                count += 1
                yield json.loads(line.partition("RESULT ")[2])
        code = running.wait(TIMEOUT_S)
    yield from ({**job, "error": f"the process ended with {code}"} for job in jobs[count:])


def generate_both_ways(environment: Environment, run: Run, work: Path) -> Result:
    """Greedy tokens and their log-probabilities, from the source by vLLM itself, and through relayout."""
    # Else it depends on the moment in which requests come to the engine's process how they are put together.
    if run.stages == 1:  # Stages need that process.
        environment = environment.with_variables(VLLM_ENABLE_V1_MULTIPROCESSING="0")
    source = source_of(run.family, work, wide=True)
    result: Result = start(environment, source, run.settings, work / f"{run.name}, own.log").result
    if "error" not in result:
        settings = run.settings | {"load_format": "relayout", "model_loader_extra_config": {"strict": True}}
        folder = converted_of(source, run.tp, expert=run.expert)
        ours = start(environment, folder, settings, work / f"{run.name}, relayout.log").result
        distinct = len({token for tokens in result["tokens"] for token in tokens})
        result = {"own_load": True, "same": ours == result, "distinct": distinct}
        if "error" in ours:
            result["error"] = ours["error"]
    say(f"{run.name}: {result}")
    return kept(result, work)


def load_replicas(environment: Environment, tp: int, work: Path) -> Result:
    """Two data-parallel replicas of TP processes each, in vLLM's own groups: what their loads have in common."""
    source = source_of(REPLICATED, work, wide=True)
    environment = environment.with_variables(GLOO_SOCKET_IFNAME="lo")
    processes = environment.result(work, "comparing.vllm_replicas", source, converted_of(source, tp), tp)
    result = {
        "processes": len(processes),
        "readers": sorted({process["shared"]["num_readers"] for process in processes}),
        "parameters": sum(process["shared"]["parameters"] for process in processes),
        "different": [
            name for process in processes for name in process["shared"]["different"] + process["alone"]["different"]
        ],
        "whole_reads": sum(process["shared"]["whole_reads"] for process in processes),
    }
    say(f"{REPLICATED}, two replicas, tp {tp}: {result}")
    return result


def kept(result: Result, work: Path) -> Result:
    """What is worth writing down; messages without the paths of this machine."""
    if "error" in result:
        result = {"error": ("relayout: " if result.get("own_load") else "the engine's own load: ") + result["error"]}
    brief = {key: result[key] for key in KEPT if key in result}
    for key in {"refused", "error"} & brief.keys():
        brief[key] = str(brief[key]).replace(f"{work}/", "")[:300]
    return brief


def describe(result: Result, work: Path) -> str:
    what = kept(result, work).get("error") or result.get("refused")
    if what is None:
        counts = result["parameters"], len(result["different"]), result["whole_reads"]
        what = "{} parameters, {} different, {} tensors read whole".format(*counts)
        what += f", {100 * result['straight']:.1f} % straight into parameters" if "straight" in result else ""
    return f"{result['name']}, tp {result['tp']}: {what}"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    typer.run(main)
