"""Runs in an environment that has vLLM: what its classes load of small checkpoints, of several sizes each.

`several_sizes FOLDER RESULTS [NAME ...]`: NAME is an architecture that transformers has a class for, `family:NAME` for
a table of families.py, or `form:NAME` for a quantized form of quantized.py. For each size in `SIZES` a checkpoint is
made, and observed at the degrees of that size. Each is a fork of this process. A line of JSON in RESULTS for each, see
`tests/support/observed_slices.py`.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import transformers
from support.observed_slices import Checkpoint, Tensor, dump
from support.quantized import write_quantized

from engines.cases import FORMS, complete_config, write_wide
from engines.observing import registry, small_models, small_sizes
from engines.observing.forks import Report, Result, write_results
from relayout.checkpoint.source import read_source
from relayout.observe.observation import Observation
from relayout.observe.ranks import ObservationJob
from relayout.observe.vllm import configuration, observe_rank
from relayout.storage.stores import find_store

TIMEOUT_S = 1500


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
        {"H": 384, "HEADS": 12, "KV_HEADS": 2, "HEAD_DIM": 64, "INNER": 768, "EXPERTS": 6, "VOCABULARY": 1151}
        | {"GROUPS": 1},
        (2, 4, 6),
    ),
    "all KV heads": Size({"KV_HEADS": 8, "EXPERTS": 12, "VOCABULARY": 1056, "GROUPS": 8}, (2, 8)),
}
"""Together they tell heads, KV heads, experts, vocabulary and what is divided evenly from each other."""


def main() -> None:
    folder, results, *names = sys.argv[1:]
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    for name in ("LlamaForCausalLM", "Qwen3MoeForCausalLM", "Qwen2VLForConditionalGeneration"):
        warm_up(name, Path(folder, "warm"))
    works = [
        ({"name": name, "size": size}, partial(observe, name, size, checkpoint), checkpoint)
        for name, checkpoint in ((name, Path(folder, name.replace(":", "-"))) for name in names)
        for size in list(SIZES)[: 1 if ":" in name else None]
    ]
    write_results(Path(results), works, TIMEOUT_S)


def warm_up(name: str, folder: Path) -> None:
    """Import here, once, what each fork would import: that takes twenty times as long as to build a small model."""
    make(name, {}, folder)
    tensors = [(tensor.name, tensor.dtype, tensor.shape) for tensor in read_source(find_store(folder)).tensors]
    job = ObservationJob("vllm", str(folder), tensors, 2)
    observe_rank(job, configuration(job), 0)
    shutil.rmtree(folder)


def observe(name: str, size: str, folder: Path, _report: Report) -> Result:
    """Make and observe."""
    torch.Tensor.normal_ = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]  # Its values do not matter.
    try:
        make(name, SIZES[size].numbers, folder)
        source, results = registry.observe_source(folder, SIZES[size].degrees)
        observed = {degree: result for degree, result in results.items() if isinstance(result, Observation)}
        refused = {degree: str(result) for degree, result in results.items() if degree not in observed}
        if not observed:
            return {"error": next(iter(refused.values()))[:600]}
        tensors = [Tensor(tensor.name, tensor.dtype, tensor.shape) for tensor in source.tensors]
        slices = {degree: observation.loaded_slices for degree, observation in observed.items()}
        engine = next(iter(observed.values())).engine
        return {"refused": refused, **dump(Checkpoint(name, engine, dict(source.config), tensors, slices))}
    except Exception as error:
        return {"error": registry.text_of(error, folder)}


def make(name: str, numbers: dict[str, int], folder: Path) -> None:
    """A checkpoint with these numbers."""
    small_sizes.choose(**numbers)
    for module in ("architectures", "multimodal_architectures", "small_models"):  # They have the numbers from before.
        importlib.reload(importlib.import_module(f"engines.observing.{module}"))
    kind, _, family = name.partition(":")
    if kind == "family":
        write_wide(family, folder)
        complete_config(folder / "config.json")
    elif kind == "form":
        write_quantized(FORMS[family], folder)
        complete_config(folder / "config.json")
    else:
        small_models.write(name, folder)


if __name__ == "__main__":
    main()
