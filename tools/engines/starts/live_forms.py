"""Live updates of families and forms by vLLM's own classes: equal to a fresh load, or refused with the old weights."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
from support.families import FAMILIES
from support.quantized import QUANTIZED, Quantized, write_quantized

import relayout
from engines.cases import RERANKER, complete_config, source_of
from engines.environments import Environment

PLAIN, LORA, TP_2 = "one rank", "LoRA", "two ranks"
TIED_RERANKER = "qwen3_reranker_tied"
_MLA = ("deepseek_v2", "deepseek_v2_lite", "deepseek_v3")
_FAMILIES = (
    *("llama", "qwen2_tied", "qwen3", "qwen3_moe", "gemma3_text", "gemma3", "qwen2_5_vl", "gpt_oss_mxfp4"),
    *(*_MLA, "mixtral", RERANKER, TIED_RERANKER),
)
_INT8_STATIC = "int8_static_asymmetric"
"""Of compressed-tensors. q, k and v each have a scale and a zero point of activations; vLLM has one for all three."""
_FORMS = (
    *("fp8_tensor", "fp8_tensor_compressed", "fp8_channel", "fp8_blocks", "fp8_blocks_moe", "fp8_blocks_deepseek"),
    *("int8_channel", _INT8_STATIC, "int4_groups", "int4_groups_asymmetric", "int8_groups"),
    *("gptq_4bit", "gptq_4bit_moe", "awq", "awq_moe", "nvfp4", "nvfp4_modelopt", "nvfp4_modelopt_moe", "mxfp4"),
)
_KEPT = ("outcome", "why", "tensors", "modules_loaded_again", "undefined", "own_reload", "error")
_SIZES: dict[str, dict[str, int]] = {
    **{name: {"H": 256} for name in ("fp8_tensor", "fp8_tensor_compressed", "fp8_channel")},
    **{name: {"H": 256} for name in ("int8_channel", _INT8_STATIC)},
    "fp8_blocks_deepseek": {"L": 2, "H": 256, "N": 128, "R": 64, "KL": 512, "QL": 256, "S": 512},
}
"""Sizes that vLLM has kernels for on a CPU."""
_PER_BATCH = 12
"""Jobs for one process: what an engine retains of a model is freed with it."""
_CHANGED_BITS = {"BF16": 1, "F16": 1, "F32": 2**8, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "I32": 0x11111111}
_EVERY = 7
"""One element in so many changes, and the first one."""


@dataclass(frozen=True)
class LiveCase:
    """A model whose weights change while it lives."""

    family: str
    way: str
    keeps_kv_b: bool = False
    """MLA as on a GPU: vLLM's AMX kernel, which releases kv_b_proj, is left off."""

    @property
    def name(self) -> str:
        return f"{self.family}, {self.way}{', no AMX' * self.keeps_kv_b}"


def live_cases() -> Iterator[LiveCase]:
    """All families and forms, each in three ways."""
    for family in (*_FAMILIES, *_FORMS):
        is_mla = family in _MLA or "deepseek" in family
        for way in (PLAIN, LORA, TP_2):
            if is_mla:
                yield LiveCase(family, way, keeps_kv_b=True)
            if not is_mla or way == PLAIN:
                yield LiveCase(family, way)


def update_forms(environment: Environment, work: Path, only: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of each case: whether the update was equal to a fresh load, or refused, or left the engine unusable."""
    cases = [case for case in live_cases() if fnmatch(case.name, only)]
    for first in range(0, len(cases), _PER_BATCH):
        batch = cases[first : first + _PER_BATCH]
        jobs = []
        for case in batch:
            tp = 2 if case.way == TP_2 else 1
            root = work / "live_forms" / f"{case.family}-{tp}"
            if not (root / "complete").exists():
                write_two(case.family, root, work, tp)
            job = {"name": case.name, "source": str(root), "converted": str(root), "tp": tp}
            settings = {"enable_lora": True, "max_lora_rank": 8} if case.way == LORA else {}
            settings |= {"runner": "pooling"} if "reranker" in case.family else {}
            jobs.append({**job, "keeps_kv_b": case.keeps_kv_b, "settings": settings})
        found = _outcomes(environment, work, jobs)
        failed = [job for job in jobs if found[job["name"]]["outcome"] == "not loaded" and is_quantized(job["name"])]
        for name, outcome in _outcomes(environment, work, failed, "--stub-kernels").items() if failed else ():
            found[name] = {**outcome, "kernels": "stubs"}
        for case in batch:
            yield f"forms, {case.name}", found[case.name]


def is_quantized(name: str) -> bool:
    """Whether a case is one of a quantized form, for which a CPU may have no kernels."""
    return name.partition(",")[0] not in FAMILIES or "mxfp4" in name


def _outcomes(environment: Environment, work: Path, jobs: list[dict[str, Any]], *options: str) -> dict[str, Any]:
    file = work / "live_forms.json"
    file.write_text(json.dumps(jobs))
    found = {job["name"]: {"outcome": "ended", "why": "the process has ended"} for job in jobs}
    with suppress(subprocess.CalledProcessError):
        for result in environment.results(work, "comparing.vllm_live", file, *options):
            found[result["name"]] = {key: result[key] for key in _KEPT if key in result}
            if "outcome" not in result:
                found[result["name"]]["outcome"] = "error"
    return found


def write_two(family: str, root: Path, work: Path, tp: int) -> None:
    """Write a model, and the same with other numbers, converted; and the delta between them."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    shutil.copytree(_source(family, work), root / "model-0")
    shutil.copytree(root / "model-0", root / "model-1")
    for shard in sorted((root / "model-1").glob("*.safetensors")):
        _change(shard)
    try:
        for step in (0, 1):
            relayout.convert(root / f"model-{step}", root / f"step-{step}", tp=tp)
        relayout.delta(root / "step-0", root / "step-1", root / "delta-1")
    except relayout.PlanError as error:
        (root / "refused").write_text(str(error))
    (root / "complete").touch()


def _source(family: str, work: Path) -> Path:
    if family != TIED_RERANKER and family not in _SIZES:
        return source_of(family, work, wide=family in FAMILIES)
    folder = work / f"{family}-live"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if family == TIED_RERANKER:
            shutil.copytree(source_of(RERANKER, work), folder, dirs_exist_ok=True)
            _tie(folder)
        else:
            form = _int8_static() if family == _INT8_STATIC else QUANTIZED[family]
            write_quantized(replace(form, sizes=_SIZES[family]), folder)
            complete_config(folder / "config.json")
        (folder / "complete").touch()
    return folder


def _tie(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    for shard in folder.glob("*.safetensors"):
        tensors = {name: one for name, one in load_file(shard).items() if name != "lm_head.weight"}
        save_file(tensors, shard, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))


def _int8_static() -> Quantized:
    base = QUANTIZED["int8_channel"]
    form = base.method.form
    activations = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "tensor", "dynamic": False}
    groups = {"group_0": {**form.config["config_groups"]["group_0"], "input_activations": activations}}
    table = f"{form.table}\ninput_scale BF16 1\ninput_zero_point I8 1"
    changed = replace(form, table=table, config={**form.config, "config_groups": groups})
    return replace(base, method=replace(base.method, form=changed))


def _change(shard: Path) -> None:
    """Change bits of some elements of each tensor that has numbers; what has indices and shapes is left."""
    with shard.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    content = np.memmap(shard, np.uint8, "r+", 8 + length)
    for name, tensor in header.items():
        bits = _CHANGED_BITS.get(tensor["dtype"])
        if bits is None or name.endswith(("g_idx", "weight_shape")):
            continue
        start, end = tensor["data_offsets"]
        width = 4 if "32" in tensor["dtype"] else 2 if "16" in tensor["dtype"] else 1
        elements = content[start:end].view(f"u{width}")
        elements[::_EVERY] ^= bits
    content.flush()
