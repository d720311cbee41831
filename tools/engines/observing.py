"""Runs in an environment that has vLLM: what its classes take of small checkpoints, of several sizes each.

`observing.py FOLDER RESULTS [NAME ...]`: NAME is an architecture that transformers has a class for, or `family:NAME`
for a table of families.py. For each size in `SIZES` a checkpoint is made, and observed at the degrees of that size.
Each is a fork of this process. A line of JSON in RESULTS for each, see `tests/support/observed_slices.py`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import small_sizes
import torch
import transformers
from support.observed_slices import Checkpoint, Tensor, dump
from vllm.model_executor.models import registry

from relayout.checkpoint.source import SourceCheckpoint, read_source
from relayout.errors import PlanError
from relayout.observe import observation
from relayout.observe.vllm import Job, _configuration, _Rank, carry_out
from relayout.storage.stores import find_store

TIMEOUT_S = 400


@dataclass(frozen=True)
class Size:
    """Numbers, and the degrees that they allow."""

    numbers: dict[str, int]
    degrees: tuple[int, ...]


SIZES = {
    "many heads": Size(
        {"H": 512, "HEADS": 16, "KV_HEADS": 4, "INNER": 1024, "EXPERTS": 16, "GROUPS": 16}, (2, 4, 8, 16)
    ),
    "few KV heads": Size(
        {
            "H": 384,
            "HEADS": 12,
            "KV_HEADS": 2,
            "HEAD_DIM": 64,
            "INNER": 768,
            "EXPERTS": 6,
            "VOCABULARY": 1151,
            "GROUPS": 1,
        },
        (2, 4, 6),
    ),
    "all KV heads": Size({"KV_HEADS": 8, "EXPERTS": 12, "VOCABULARY": 1056, "GROUPS": 8}, (2, 8)),
}
"""Together they tell heads, KV heads, experts, vocabulary and what is divided evenly from each other."""


def main() -> None:
    folder, results, *names = sys.argv[1:]
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    registry._run_in_subprocess = lambda function: function()
    observation.run = lambda jobs: [json.loads(json.dumps(carry_out(_job(job)))) for job in jobs]
    for name in ("LlamaForCausalLM", "Qwen3MoeForCausalLM", "Qwen2VLForConditionalGeneration"):
        warm_up(name, Path(folder, "warm"))
    with Path(results).open("a") as output:
        for name in names:
            for size in list(SIZES)[: 1 if name.startswith("family:") else None]:
                started = time.monotonic()
                found = in_a_fork(name, size, Path(folder, name.replace(":", "-")))
                print(json.dumps(found), file=output, flush=True)
                seconds = round(time.monotonic() - started, 1)
                print(f"{name}, {size}: {found.get('error') or found['degrees']} ({seconds} s)", flush=True)


def warm_up(name: str, folder: Path) -> None:
    """Import here, once, what each fork would import: that takes twenty times as long as to build a small model."""
    make(name, {}, folder)
    tensors = [(one.name, one.dtype, list(one.shape)) for one in read_source(find_store(folder)).tensors]
    job = Job(str(folder), tensors, 2)
    _Rank(job, _configuration(job))(0)
    shutil.rmtree(folder)


def _job(fields: Mapping[str, Any]) -> Job:
    return Job(**json.loads(json.dumps(fields)))


def in_a_fork(name: str, size: str, folder: Path) -> dict[str, Any]:
    """The line for one checkpoint."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=observe_one, args=(name, size, folder, theirs))
    process.start()
    theirs.close()
    found: dict[str, Any] = {"error": f"took longer than {TIMEOUT_S} s"}
    try:
        if ours.poll(TIMEOUT_S):
            found = ours.recv()
    except EOFError:
        found = {"error": "the process ended"}
    process.kill()
    process.join()
    shutil.rmtree(folder, ignore_errors=True)
    return {"name": name, "size": size, **found}


def observe_one(name: str, size: str, folder: Path, told: Any) -> None:
    """Make and observe."""
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    torch.Tensor.normal_ = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]  # Its values do not matter.
    try:
        make(name, SIZES[size].numbers, folder)
        source, found = observe(folder, SIZES[size].degrees)
        seen = {degree: one for degree, one in found.items() if not isinstance(one, PlanError)}
        refused = {degree: str(one) for degree, one in found.items() if isinstance(one, PlanError)}
        if not seen:
            raise next(iter(found.values()))
        tensors = [Tensor(one.name, one.dtype, one.shape) for one in source.tensors]
        slices = {degree: one.slices for degree, one in seen.items()}
        engine = next(iter(seen.values())).engine
        told.send({"refused": refused, **dump(Checkpoint(name, engine, dict(source.config), tensors, slices))})
    except BaseException as error:
        told.send({"error": f"{type(error).__name__}: {error}".replace(str(folder), "")[:600]})
    told.close()
    os._exit(0)


def make(name: str, numbers: dict[str, int], folder: Path) -> None:
    """A checkpoint with these numbers."""
    small_sizes.choose(**numbers)
    for module in ("small_models", "architectures", "multimodal_architectures"):
        sys.modules.pop(module, None)  # They have taken the numbers that there were before.
    kind, _, family = name.partition(":")
    if kind == "family":
        write_wide(family, folder)
    else:
        import small_models

        small_models.write(name, folder)


def write_wide(name: str, folder: Path) -> None:
    """A checkpoint of families.py with 16 heads, and 4 KV heads where it has any."""
    from cases import complete_config
    from support.checkpoints import write_family
    from support.families import FAMILIES

    family = FAMILIES[name]
    kv_heads = {8: 16, 1: 1}.get(family.sizes.get("K", 2), 4)
    sizes = {"A": 16, "K": kv_heads, "H": 512, "D": 32, "E": 16, "G": 16, "W": 32}
    write_family(replace(family, sizes={**family.sizes, **sizes}), folder)
    complete_config(folder / "config.json")


def observe(folder: Path, degrees: tuple[int, ...]) -> tuple[SourceCheckpoint, dict[int, Any]]:
    """What was observed at each degree; keys that only the hub's config.json has are supplied."""
    while True:
        source = read_source(find_store(folder))
        found = dict(zip(degrees, observation.observe(source, degrees, trust_remote_code=True), strict=True))
        errors = [str(one) for one in found.values() if isinstance(one, PlanError)]
        missing = [key for one in errors for key in re.findall(r"Config' object has no attribute '(\w+)'", one)]
        import small_models

        if not missing or not small_models.supply(folder, missing[0]):
            return source, found


if __name__ == "__main__":
    main()
