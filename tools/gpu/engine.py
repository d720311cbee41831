"""A real vLLM on one GPU, its own loads next to relayout's: `python3 -P -m gpu.engine OUT`; the step `engine`.

Each part is a process of its own, in the order of their worth. It writes a line of JSON to OUT/engine.jsonl as soon as
it has a result, and ends at its own limit: an error ends only this part. Rows named `verdict` say what had to be equal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from gpu import steps
from gpu.results import Results
from gpu.steps import Step, carry_out

Rows = dict[str, dict[str, Any]]
"""What one process has told, by key."""

RESULTS = "engine.jsonl"
_TURNS = 2
_LOG_LENGTH = 2**20
"""Characters that are kept of the end of a part's log."""
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
_NODE = {
    # NCCL takes two ranks on one card for an error within one host. NCCL_HOSTID is what it takes for a host.
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}
_SHARES = (0.01, 0.05, 0.2)


@dataclass(frozen=True)
class Machine:
    """Where a part runs, and where its results go."""

    results: Results
    work: Path
    device: str

    @property
    def is_cuda(self) -> bool:
        """False in a rehearsal."""
        return self.device == "cuda"

    def start(self, of: str, model: Path | str, calls: list[Any], **options: Any) -> Rows:
        """Run a process with vLLM, keep and return what it tells; `options` are keys of the job."""
        return self.together(of, [self.job(model, calls, **options)])

    def job(self, model: Path | str, calls: list[Any], **options: Any) -> dict[str, Any]:
        """Return a job of `gpu.vllm_start`."""
        settings = {"model": str(model)} | options.pop("settings", {})
        if self.is_cuda and "moe" in Path(model).name:
            settings["moe_backend"] = "triton"
        return {"device": self.device, "settings": settings, "calls": calls} | options

    def together(self, of: str, jobs: list[dict[str, Any]]) -> Rows:
        """Run a process for each job, keep and return what the first one tells, as it comes. All of them end."""
        running = []
        for number, job in enumerate(jobs):
            own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if not self.is_cuda else {}
            own |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CACHE_ROOT": str(self.work / "vllm-cache")}
            environment = {**os.environ, **_QUIET, **own, **job.pop("environment", {})}
            command = [sys.executable, "-P", "-m", "gpu.vllm_start", json.dumps(job)]
            pipe = subprocess.PIPE if number == 0 else subprocess.DEVNULL
            running.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=pipe, text=True))
        rows: Rows = {}
        try:
            assert running[0].stdout is not None
            for line in running[0].stdout:
                print(line, end="", flush=True)
                if line.startswith("RESULT "):
                    row = json.loads(line.removeprefix("RESULT "))
                    rows[row["key"]] = row
                    self._keep(of, row)
            self._keep(of, {"key": "ended", "code": running[0].wait()})
        finally:
            for one in running:  # Workers of the other node do not end by themselves.
                one.kill()
                one.wait()
        return rows

    def _keep(self, of: str, row: dict[str, Any]) -> None:
        """Write a row of a process, without what only verdicts compare."""
        short = {name: value for name, value in row.items() if name not in ("digests", "tokens", "key")}
        self.results.measure(f"{of}, {row['key']}", lambda: short)

    def verdict(self, what: str, one: Any, other: Any) -> None:
        """Write whether two things are equal; None: one of them is missing."""
        is_equal = None if one is None or other is None else one == other
        self.results.measure(f"verdict: {what}", lambda: {"equal": is_equal})


def _value(rows: Rows, key: str, *names: str) -> Any:
    """Return what a process has told, or None if the call had an error or was not made."""
    row = rows.get(key, {})
    found = tuple(row.get(name) for name in names)
    return None if None in found else found[0] if len(found) == 1 else found


def _compare(machine: Machine, what: str, stock: Rows, ours: Rows) -> None:
    for key, names in (("tokens", ("tokens", "logprobs")), ("digests", ("digests",))):
        machine.verdict(f"{what}, {key}", _value(stock, key, *names), _value(ours, key, *names))


_ASKED = [["tokens", "tokens"], ["digests", "digests"]]


def _timed(ways: dict[str, tuple[Path, str]], turns: int = _TURNS) -> list[Any]:
    """Return calls that load by each way in turn, cold and warm."""
    return [
        [f"{'cold' if cold else 'warm'}, {way}, turn {turn}", "fresh", str(path), form, cold]
        for cold in (True, False)
        for turn in range(turns)
        for way, (path, form) in ways.items()
    ]


def _loads_are_equal(machine: Machine, what: str, rows: Rows) -> None:
    for key in [key for key in rows if ", vLLM, " in key]:
        for way in ("relayout", "fastsafetensors"):
            other = key.replace("vLLM", way)
            if other in rows:
                machine.verdict(f"{what}, {other}", _value(rows, key, "digests"), _value(rows, other, "digests"))


def serve(machine: Machine) -> None:
    """vLLM serves a llama: tokens, log-probabilities and parameters of both; seconds of loads in turns."""
    from gpu.checkpoints import converted_at, source_at

    source, converted = (
        source_at(machine.work, "llama", machine.device),
        converted_at(machine.work, "llama", machine.device, 1),
    )
    ways = {
        "vLLM": (source, "auto"),
        "relayout": (converted, "relayout"),
        "fastsafetensors": (source, "fastsafetensors"),
    }
    stock = machine.start("vLLM", source, [*_ASKED, *_timed(ways)])
    ours = machine.start("relayout", converted, _ASKED, settings={"load_format": "relayout"})
    _compare(machine, "llama", stock, ours)
    _loads_are_equal(machine, "llama", stock)


def serve_moe(machine: Machine) -> None:
    """The same of a small mixture of experts."""
    from gpu.checkpoints import converted_at, source_at

    source, converted = (
        source_at(machine.work, "moe", machine.device),
        converted_at(machine.work, "moe", machine.device, 1),
    )
    stock = machine.start("vLLM", source, _ASKED)
    ours = machine.start("relayout", converted, _ASKED, settings={"load_format": "relayout"})
    _compare(machine, "moe", stock, ours)


def _experts(machine: Machine, name: str) -> None:
    from gpu.checkpoints import converted_at, source_at

    source, converted = (
        source_at(machine.work, name, machine.device),
        converted_at(machine.work, name, machine.device, 1),
    )
    # By "auto", which takes converted folders. By its name, the format asks vLLM for the group.
    ways = {"vLLM": (source, "auto"), "relayout": (converted, "auto")}
    calls = [call for call in _timed(ways) if machine.is_cuda or not call[4]]
    rows = machine.start(name, source, calls, rank=0, tp=1)
    _loads_are_equal(machine, name, rows)


def fused_experts(machine: Machine) -> None:
    """Seconds of `load_weights` where one tensor has all experts of a layer (bf16; Llama 4's shapes)."""
    _experts(machine, "fused experts")


def small_experts(machine: Machine) -> None:
    """Seconds of `load_weights` of 100,000 small tensors of experts."""
    _experts(machine, "small experts")


def live(machine: Machine) -> None:
    """Steps of a training into a live llama: pauses, attestation, a flipped bit, sleep."""
    import relayout
    from gpu.checkpoints import steps_at

    root, plain = steps_at(machine.work, "llama", machine.device, _SHARES)
    repository = relayout.Steps(root)
    full = repository.path(next(entry.full.name for entry in repository.entries() if entry.full is not None))
    calls: list[Any] = [["attest", "attest"], ["digests, start", "digests"]]
    for number, (share, folder) in enumerate(zip(_SHARES, plain, strict=True), 1):
        calls += [
            [f"update, {share}", "update", str(root), number],
            [f"digests, {share}", "digests"],
            [f"expected, {share}", "fresh", str(folder), "auto", False],
        ]
    calls += [["attest again", "attest"], ["tokens", "tokens"], ["sleep 1", "sleep", 1], ["tokens, slept", "tokens"]]
    calls += [["digests, slept", "digests"], ["flip", "flip"], ["attest a flipped bit", "attest"]]
    # Level 2 discards the weights: the engine then reads those of its start.
    calls += [["sleep 2", "sleep", 2], ["reload", "reload"], ["digests, reloaded", "digests"]]
    settings = {"load_format": "relayout"} | ({"enable_sleep_mode": True} if machine.is_cuda else {})
    rows = machine.start("live", full, calls, settings=settings, updates=True)
    for share in _SHARES:
        expected = _value(rows, f"expected, {share}", "digests")
        machine.verdict(f"live, {share} changed", expected, _value(rows, f"digests, {share}", "digests"))
    last = _value(rows, f"digests, {_SHARES[-1]}", "digests")
    machine.verdict("live, parameters after sleep", last, _value(rows, "digests, slept", "digests"))
    machine.verdict(
        "live, tokens after sleep", _value(rows, "tokens", "tokens"), _value(rows, "tokens, slept", "tokens")
    )
    first = _value(rows, "digests, start", "digests")
    machine.verdict("live, parameters after sleep 2", first, _value(rows, "digests, reloaded", "digests"))
    for key, wanted in (("attest", None), ("attest again", None), ("attest a flipped bit", "model.norm.weight")):
        found = _value(rows, key, "attest")
        said = None if found is None else [one.get("difference") for one in found]
        machine.verdict(f"live, {key}", said, [wanted])


def cufile(machine: Machine) -> None:
    """cuFile in compat mode by the product's own backend: bytes equal, counted; and GPUDirect Storage, if possible."""
    from gpu.checkpoints import converted_at
    from gpu.cufile import facts, load

    folder = converted_at(machine.work, "llama", machine.device, 1)
    machine.results.measure("facts", lambda: facts(folder))
    for backend in ("gds", "cufile-compat"):
        machine.results.measure(backend, lambda backend=backend: load(folder, backend, machine.device))  # type: ignore[misc]


def two_ranks(machine: Machine) -> None:
    """TP 2 on one card, as two nodes: stock, converted, and a first and second start with the cache."""
    from gpu.checkpoints import converted_at, source_at

    source, converted = (
        source_at(machine.work, "moe", machine.device),
        converted_at(machine.work, "moe", machine.device, 2),
    )
    cache = {"RELAYOUT_CACHE": str(machine.work / "cache")}
    ours: dict[str, Any] = {"load_format": "relayout"}
    starts: list[tuple[str, Path, dict[str, Any], dict[str, str]]] = [
        ("stock", source, {}, {}),
        ("converted", converted, ours, {}),
        ("first start", source, ours, cache),
        ("second start", source, ours, cache),
    ]
    found: dict[str, Rows] = {}
    for number, (name, model, settings, environment) in enumerate(starts):
        jobs = []
        for rank in (0, 1):
            nodes = {"tensor_parallel_size": 2, "nnodes": 2, "node_rank": rank, "master_addr": "127.0.0.1"}
            nodes |= {"master_port": 29511 + 20 * number, "disable_custom_all_reduce": True}
            own = _NODE | environment | {"NCCL_HOSTID": f"node-{rank}", "VLLM_CPU_OMP_THREADS_BIND": str(rank)}
            nodes |= settings | {"distributed_executor_backend": "mp"}
            jobs.append(machine.job(model, _ASKED, settings=nodes, environment=own))
        found[name] = machine.together(name, jobs)
        if number:
            _compare(machine, f"two ranks, {name}", found["stock"], found[name])


def size(machine: Machine) -> None:
    """A checkpoint of tens of GB: conversion; loads cold and warm, by rank, whole, into tensors; budgets, threads."""
    from gpu.size import measure_all

    measure_all(machine.results, machine.work, machine.device)


def sglang(machine: Machine) -> None:
    """Say what is missing for SGLang."""
    from importlib.util import find_spec

    machine.results.measure("sglang", lambda: {"installed": find_spec("sglang") is not None, "in_kit": False})


PARTS: dict[str, tuple[Callable[[Machine], None], float]] = {
    "serve": (serve, 120),
    "serve_moe": (serve_moe, 60),
    "fused_experts": (fused_experts, 60),
    "small_experts": (small_experts, 75),
    "live": (live, 75),
    "cufile": (cufile, 40),
    "two_ranks": (two_ranks, 100),
    "sglang": (sglang, 10),
    "size": (size, 150),
}
"""Parts in the order of their worth, each with its longest time in seconds."""


def parts(out: Path, work: Path, device: str, factor: float = 1) -> Iterator[Step]:
    """Yield the steps of `carry_out`; a rehearsal on a slow machine multiplies the limits."""
    for name, (_, seconds) in PARTS.items():
        command = (sys.executable, "-P", "-m", "gpu.engine", str(out), "--work", str(work), "--device", device)
        yield Step(name, (*command, "--part", name), seconds * factor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir(), "relayout-engine"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu rehearses with small models")
    parser.add_argument("--seconds", type=float, default=420, help="limit of all parts")
    parser.add_argument("--factor", type=float, default=1, help="multiplies the limit of each part")
    parser.add_argument("--only", default="*", help="pattern of names of parts")
    parser.add_argument("--part", choices=PARTS, help="run this part in this process")
    options = parser.parse_args()
    out, work = options.out.absolute(), options.work.absolute()
    out.mkdir(parents=True, exist_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    if options.part is not None:
        PARTS[options.part][0](Machine(Results(out / RESULTS, options.part), work, options.device))
        return
    steps.LEAST_S = 15
    wanted = [step for step in parts(out, work, options.device, options.factor) if fnmatch(step.name, options.only)]
    deadline = time.monotonic() + options.seconds
    told = work / "parts"
    try:
        is_done = carry_out(told, wanted, deadline, {"PYTHONUNBUFFERED": "1"})
    finally:  # One file of all logs: a machine may return only a few files.
        logs = [path for path in (told / f"{name}.log" for name in PARTS) if path.exists()]
        texts = [f"== {path.stem}\n{path.read_text(errors='replace')[-_LOG_LENGTH:]}\n" for path in logs]
        (out / "engine.log").write_text("".join(texts))
    sys.exit(summary(out) or (0 if is_done else 75))


def summary(out: Path) -> int:
    """Print the verdicts, and return 1 if one of them is "different"."""
    code = 0
    rows = [json.loads(line) for line in (out / RESULTS).read_text().splitlines()] if (out / RESULTS).exists() else []
    for row in rows:
        if "equal" in row:
            word = {True: "equal", False: "DIFFERENT", None: "missing"}[row["equal"]]
            print(f"{word}: {row['part']}: {row['key'].removeprefix('verdict: ')}")
            code |= row["equal"] is False
    return code


if __name__ == "__main__":
    main()
