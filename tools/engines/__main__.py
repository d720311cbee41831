"""The command."""

from __future__ import annotations

import json
import lzma
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any

import typer
from support.families import FAMILIES
from transformers.utils import logging as transformers_logging

import relayout
from engines import observed, observed_slices, plan_making
from engines.cases import BGE_M3, RERANKER, RUNS, WHOLE_IN_SGLANG, Case, Run, all_cases, converted_of, source_of
from engines.cold_start import measure, placements, reads
from engines.environments import ENGINES, ROOT, Environment, environment_of, versions_in
from engines.failures import fail
from engines.plan_table import TABLE
from engines.starts import start

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
SKIPPED = (
    *("llama", "qwen3_moe", "fp8_blocks", "fp8_blocks_moe", "gptq_4bit", "gptq_4bit_moe", "awq", "awq_moe"),
    *("qwen2_5_vl", RERANKER, BGE_M3, "llama 2 stages", "qwen3_moe 2 stages", "deepseek_v3 draft model"),
)
"""Cases of which each kind of tensor is left out."""
TABLE_FILE = ROOT / "relayout" / "plans" / "OBSERVED.md"
SCRIPTS = ROOT / "tools" / "engines"
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
    if skipped:
        skip_tensors(environment_of("vllm", home), home / "vllm-work")
        return
    for name in engines or list(ENGINES):
        work = home / f"{name}-work"
        work.mkdir(parents=True, exist_ok=True)
        environment = environment_of(name, home)
        record(name, "versions", versions_in(environment))
        cases = [one for one in all_cases() if fnmatch(one.name, only)]
        if compare:
            for found in run_cases(name, environment, cases, work, ENGINES[name].script):
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
    run_script(environment, home, "registry.py", OBSERVED_RESULTS)
    keep_results(OBSERVED_RESULTS)


def keep_results(file: Path) -> None:
    """Those of `registry.py`: of built-in plans in a file of their own."""
    results = sorted(observed.read(file), key=lambda one: str(one["architecture"]))
    builtin = [{"architecture": one["architecture"], **one.pop("builtin", {})} for one in results]
    write_lines(OBSERVED_RESULTS, results)
    write_lines(BUILTIN_RESULTS, [one for one in builtin if len(one) > 1])


def make_plans(environment: Environment, home: Path) -> None:
    """Observe what can be made small, in several sizes; write built-in plans from it."""
    names = [one["architecture"] for one in observed.read(OBSERVED_RESULTS) if one["step"] != "make"]
    found = home / "vllm-work" / "slices.jsonl"
    found.unlink(missing_ok=True)
    run_script(environment, home, "observing.py", found, *names, *(f"family:{name}" for name in FAMILIES))
    lines = [line for line in found.read_text().splitlines(keepends=True) if "error" not in json.loads(line)]
    SLICES.write_bytes(lzma.compress("".join(sorted(lines)).encode(), preset=9))
    plan_making.write(TABLE, observed_slices.read(SLICES))


def mutate(environment: Environment, home: Path) -> None:
    """Convert and load by wrong plans."""
    MUTATED_RESULTS.unlink(missing_ok=True)
    run_script(environment, home, "mutations.py", MUTATED_RESULTS, *MUTATED)


def run_script(environment: Environment, home: Path, script: str, results: Path, *names: str) -> None:
    """One that observes vLLM."""
    variables = environment.variables | {"OMP_NUM_THREADS": "1"}
    folders = [ROOT, variables.get("PYTHONPATH", ""), SCRIPTS, ROOT / "tools", ROOT / "tests"]
    variables["PYTHONPATH"] = os.pathsep.join(map(str, folders))
    scratch = home / "vllm-work" / script.removesuffix(".py")
    subprocess.run(
        [environment.python, SCRIPTS / script, scratch, results, *names], check=True, env=variables, cwd=home
    )


def write_lines(file: Path, results: Sequence[Result]) -> None:
    file.write_text("".join(f"{json.dumps(one)}\n" for one in results))


def write_table(versions: dict[str, str]) -> None:
    """From the results."""
    builtin = {one["architecture"]: one for one in observed.read(BUILTIN_RESULTS)}
    mutated = [json.loads(line) for line in MUTATED_RESULTS.read_text().splitlines()]
    parts = (
        observed.render(observed.read(OBSERVED_RESULTS), builtin, versions),
        observed.render_comparison(observed_slices.read(SLICES)),
        observed.render_mutations(mutated),
    )
    TABLE_FILE.write_text("\n".join(parts))


def record(engine: str, part: str, new: dict[str, Any]) -> None:
    """Add to the results; what was found before and is not found anew stays."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results.setdefault(engine, {}).setdefault(part, {}).update(new)
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def skip_tensors(environment: Environment, work: Path) -> None:
    """Load without one tensor in turn, at TP 2, or the least that there is."""
    work.mkdir(parents=True, exist_ok=True)
    cases = [case for case in all_cases() if case.name in SKIPPED]
    for found in run_cases("vllm", environment, cases, work, "skipped.py", most=2):
        keys = ("marks", "not_given", "not_used", "unseen", "error", "refused")
        say(f"{found['name']}, tp {found['tp']}: { {key: found[key] for key in keys if key in found} }")


def run_cases(
    engine: str, environment: Environment, cases: Sequence[Case], work: Path, script: str, *, most: int = 4
) -> Iterator[Result]:
    """Each case at each degree up to `most`."""
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
            yield from run_batch(engine, environment, mine[first : first + BATCH], work, [script, *options])


def run_batch(
    engine: str, environment: Environment, jobs: list[Result], work: Path, command: list[str]
) -> Iterator[Result]:
    """Some jobs in one process of a script; those that it does not come to are errors."""
    file = work / f"{engine}-jobs.json"
    file.write_text(json.dumps(jobs))
    script, *options = command
    number = 0
    with (work / f"{engine}.log").open("a") as log:
        running = subprocess.Popen(
            [environment.python, SCRIPTS / script, file, *options],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment.variables,
            cwd=work,
        )
        assert running.stdout is not None
        for line in running.stdout:
            if "RESULT " in line:
                number += 1
                yield json.loads(line.partition("RESULT ")[2])
        code = running.wait(TIMEOUT_S)
    yield from ({**job, "error": f"the process ended with {code}"} for job in jobs[number:])


def generate_both_ways(environment: Environment, run: Run, work: Path) -> Result:
    """Greedy tokens and their log-probabilities, from the source by vLLM itself, and through relayout."""
    # Else it depends on the moment in which requests come to the engine's process how they are put together.
    if run.stages == 1:  # Stages need that process.
        environment = replace(environment, variables=environment.variables | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    source = source_of(run.family, work, wide=True)
    found: Result = start(environment, source, run.settings, work / f"{run.name}, own.log").result
    if "error" not in found:
        settings = run.settings | {"load_format": "relayout", "model_loader_extra_config": {"strict": True}}
        folder = converted_of(source, run.tp, expert=run.expert)
        ours = start(environment, folder, settings, work / f"{run.name}, relayout.log").result
        distinct = len({token for one in found["tokens"] for token in one})
        found = {"own_load": True, "same": ours == found, "distinct": distinct}
        if "error" in ours:
            found["error"] = ours["error"]
    say(f"{run.name}: {found}")
    return kept(found, work)


def load_replicas(environment: Environment, tp: int, work: Path) -> Result:
    """Two data-parallel replicas of TP processes each, in vLLM's own groups: what their loads have in common."""
    source = source_of(REPLICATED, work, wide=True)
    command = [environment.python, SCRIPTS / "vllm_replicas.py", source, converted_of(source, tp), str(tp)]
    variables = environment.variables | {
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([str(ROOT), environment.variables.get("PYTHONPATH", "")]),
    }
    with (work / "replicas.log").open("a") as log:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=variables, cwd=work, check=True
        )
    processes = json.loads(done.stdout.rpartition("RESULT ")[2])
    found = {
        "processes": len(processes),
        "readers": sorted({one["shared"]["num_readers"] for one in processes}),
        "parameters": sum(one["shared"]["parameters"] for one in processes),
        "different": [name for one in processes for name in one["shared"]["different"] + one["alone"]["different"]],
        "whole_reads": sum(one["shared"]["whole_reads"] for one in processes),
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
