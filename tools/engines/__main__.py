"""The command."""

from __future__ import annotations

import json
import lzma
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any

import typer
from support.families import FAMILIES
from support.observed_slices import read
from transformers.utils import logging as transformers_logging

import relayout
from engines.cases import RUNS, WHOLE_IN_SGLANG, Case, Run, all_cases, converted_of, source_of
from engines.environments import ENGINES, ROOT, Environment, environment_of, versions_in
from engines.observing import plan_making, tables
from engines.observing.plan_table import TABLE
from engines.starts.cold_start import measure, placements, reads
from engines.starts.failures import fail
from engines.starts.starting import start

RESULTS = ROOT / "tools" / "results" / "engines.json"
OBSERVED = "vllm-0.33"
OBSERVED_RESULTS = RESULTS.with_name("observed.jsonl")
BUILTIN_RESULTS = RESULTS.with_name("builtin_plans.jsonl")
MUTATED_RESULTS = RESULTS.with_name("mutations.jsonl")
SLICES = ROOT / "tests" / "plans" / "observed.jsonl.xz"
MUTATED = (
    *("GPT2LMHeadModel", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV2ForCausalLM", "Qwen3NextForCausalLM"),
    "Qwen2VLForConditionalGeneration",
)
"""Whose plans are made wrong: fused and transposed weights, experts, latent and linear attention, a vision part."""
TABLE_FILE = ROOT / "relayout" / "plans" / "OBSERVED.md"
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
    table: Annotated[bool, typer.Option("--table", help="Only: write OBSERVED.md anew from all results.")] = False,
    home: Annotated[Path, typer.Option("--environments", help="Folder of environments and checkpoints.")] = HOME,
) -> None:
    """Load small checkpoints of all families and forms by the engines' own loaders and through relayout."""
    transformers_logging.disable_progress_bar()
    if observe or plans or mutations or table:
        environment = environment_of(OBSERVED, home)
        for wanted, do in ((observe, observe_registry), (plans, make_plans), (mutations, mutate)):
            if wanted:
                do(environment, home)
        write_table(versions_in(environment))
        return
    for name in engines or list(ENGINES):
        work = home / f"{name}-work"
        work.mkdir(parents=True, exist_ok=True)
        environment = environment_of(name, home)
        record(name, "versions", versions_in(environment))
        cases = [case for case in all_cases() if fnmatch(case.name, only)]
        if compare:
            for found in compare_cases(name, environment, cases, work):
                record(name, "parameters", {f"{found['name']}, tp {found['tp']}": kept(found, work)})
                say(describe(found, work))
        if name == "sglang":
            continue
        for run in RUNS if generate else ():
            if fnmatch(run.name, only):
                record(name, "tokens", {run.name: generate_both_ways(environment, run, work)})
        for what, said in fail(environment, work, only) if failures else ():
            record(name, "failures", {what: said})
            say(f"{what}: {said}")
        if replicas:
            record(name, "replicas", {f"{REPLICATED}, tp {tp}": load_replicas(environment, tp, work) for tp in (1, 2)})
        if starts:
            record(name, "cold_start", measure(environment, work, starts))
            record(name, "placement", placements(environment, work, starts))
            record(name, "reads", dict(reads(environment, work)))


def observe_registry(environment: Environment, home: Path) -> None:
    """Convert and load each architecture of vLLM's registry that a checkpoint can be made for."""
    OBSERVED_RESULTS.unlink(missing_ok=True)
    run_module(environment, home, "registry", OBSERVED_RESULTS)
    keep_results(OBSERVED_RESULTS)


def keep_results(file: Path) -> None:
    """Those of `registry.py`: of built-in plans in a file of their own."""
    results = sorted(tables.read(file), key=lambda result: str(result["architecture"]))
    builtin = [{"architecture": result["architecture"], **result.pop("builtin", {})} for result in results]
    write_lines(OBSERVED_RESULTS, results)
    write_lines(BUILTIN_RESULTS, [result for result in builtin if len(result) > 1])


def make_plans(environment: Environment, home: Path) -> None:
    """Observe what can be made small, in several sizes; write built-in plans from it."""
    names = [result["architecture"] for result in tables.read(OBSERVED_RESULTS) if result["step"] != "make"]
    found = home / "vllm-work" / "slices.jsonl"
    found.unlink(missing_ok=True)
    run_module(environment, home, "several_sizes", found, *names, *(f"family:{name}" for name in FAMILIES))
    lines = [line for line in found.read_text().splitlines(keepends=True) if "error" not in json.loads(line)]
    SLICES.write_bytes(lzma.compress("".join(sorted(lines)).encode(), preset=9))
    plan_making.write(TABLE, read(SLICES))


def mutate(environment: Environment, home: Path) -> None:
    """Convert and load by wrong plans."""
    MUTATED_RESULTS.unlink(missing_ok=True)
    run_module(environment, home, "mutations", MUTATED_RESULTS, *MUTATED)


def run_module(environment: Environment, home: Path, module: str, results: Path, *names: str) -> None:
    """Of those that observe vLLM."""
    command = environment.command(f"observing.{module}", home / "vllm-work" / module, results, *names)
    subprocess.run(command, check=True, env=environment.variables | {"OMP_NUM_THREADS": "1"}, cwd=home)


def write_lines(file: Path, results: Sequence[Result]) -> None:
    file.write_text("".join(f"{json.dumps(result)}\n" for result in results))


def write_table(versions: dict[str, str]) -> None:
    """From the results."""
    builtin = {result["architecture"]: result for result in tables.read(BUILTIN_RESULTS)}
    mutated = [json.loads(line) for line in MUTATED_RESULTS.read_text().splitlines()]
    parts = (
        tables.render(tables.read(OBSERVED_RESULTS), builtin, versions),
        tables.render_comparison(read(SLICES)),
        tables.render_mutations(mutated),
    )
    TABLE_FILE.write_text("\n".join(parts))


def record(engine: str, part: str, new: dict[str, Any]) -> None:
    """Add to the results; what was found before and is not found anew stays."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results.setdefault(engine, {}).setdefault(part, {}).update(new)
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def compare_cases(engine: str, environment: Environment, cases: Sequence[Case], work: Path) -> Iterator[Result]:
    """Each case at each degree."""
    jobs: dict[bool, list[Result]] = {False: [], True: []}
    for case in cases:
        if engine == "sglang" and (case.draft or case.moe_backend != "auto" or case.settings or case.stages > 1):
            continue  # Its draft models are built by its workers, and its kernels are not chosen here.
        is_uncut = engine == "sglang" and case.family in WHOLE_IN_SGLANG
        for tp in case.degrees:
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
            yield from run_batch(engine, environment, mine[first : first + BATCH], work, options)


def run_batch(
    engine: str, environment: Environment, jobs: list[Result], work: Path, options: list[str]
) -> Iterator[Result]:
    """Some jobs in one process; those that it does not come to are errors."""
    file = work / f"{engine}-jobs.json"
    file.write_text(json.dumps(jobs))
    command = environment.command(ENGINES[engine].comparing, file, *options)
    count = 0
    with (work / f"{engine}.log").open("a") as log:
        running = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment.variables, cwd=work
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
    found: Result = start(environment, source, run.settings, work / f"{run.name}, own.log").result
    if "error" not in found:
        settings = run.settings | {"load_format": "relayout", "model_loader_extra_config": {"strict": True}}
        folder = converted_of(source, run.tp, expert=run.expert)
        ours = start(environment, folder, settings, work / f"{run.name}, relayout.log").result
        distinct = len({token for tokens in found["tokens"] for token in tokens})
        found = {"own_load": True, "same": ours == found, "distinct": distinct}
        if "error" in ours:
            found["error"] = ours["error"]
    say(f"{run.name}: {found}")
    return kept(found, work)


def load_replicas(environment: Environment, tp: int, work: Path) -> Result:
    """Two data-parallel replicas of TP processes each, in vLLM's own groups: what their loads have in common."""
    source = source_of(REPLICATED, work, wide=True)
    environment = environment.with_variables(GLOO_SOCKET_IFNAME="lo")
    processes = environment.result(work, "comparing.vllm_replicas", source, converted_of(source, tp), tp)
    found = {
        "processes": len(processes),
        "readers": sorted({process["shared"]["num_readers"] for process in processes}),
        "parameters": sum(process["shared"]["parameters"] for process in processes),
        "different": [
            name for process in processes for name in process["shared"]["different"] + process["alone"]["different"]
        ],
        "whole_reads": sum(process["shared"]["whole_reads"] for process in processes),
    }
    say(f"{REPLICATED}, two replicas, tp {tp}: {found}")
    return found


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
        counts = found["parameters"], len(found["different"]), found["whole_reads"]
        what = "{} parameters, {} different, {} tensors read whole".format(*counts)
        what += f", {100 * found['straight']:.1f} % straight into parameters" if "straight" in found else ""
    return f"{found['name']}, tp {found['tp']}: {what}"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    typer.run(main)
