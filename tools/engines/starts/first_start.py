"""First starts of a real vLLM on plain checkpoints with a cache: what converts, what is loaded, and the tokens."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from engines.cases import source_of
from engines.environments import Environment
from engines.observing import small_models
from engines.starts.starting import Start, start

TP = 2
FAMILIES = ("llama", "qwen3_moe", "gpt_oss")
OBSERVED = ("MiMoV2FlashForCausalLM",)
"""Architectures that no built-in plan is for."""
_SETTINGS: dict[str, Any] = {"tensor_parallel_size": TP, "load_format": "relayout"}
_CONVERTS = r"is being converted into the cache"
_FROM_CACHE = rf"relayout: rank \d of {TP}: "


def first_starts(environment: Environment, work: Path, only: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of each model whose name matches: the first start, the second, and one after a change, each beside vLLM alone."""
    environment = environment.with_variables(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="INFO")
    for name in (name for name in (*FAMILIES, *OBSERVED) if fnmatch(name, only)):
        folder = work / "first-starts" / name
        shutil.rmtree(folder, ignore_errors=True)
        source, cache = folder / "model", folder / "cache"
        if name in OBSERVED:
            small_models.write(name, source)
        else:
            shutil.copytree(source_of(name, work, wide=True), source)
        cached = environment.with_variables(RELAYOUT_CACHE=str(cache))
        outcome: dict[str, Any] = {}
        for stage in ("first", "second", "changed"):
            if stage == "changed":
                _change(source)
            if stage != "second":
                alone = start(environment, source, {"tensor_parallel_size": TP}, folder / f"{stage}, own.log").result
            ours = start(cached, source, _SETTINGS, folder / f"{stage}.log")
            outcome[stage] = _outcome(ours, alone)
        outcome["entries"] = len(list(cache.glob("relayout-cache-v1/*/model/relayout.json")))
        yield f"{name}, tp {TP}", outcome


def _outcome(ours: Start, alone: dict[str, Any]) -> dict[str, Any]:
    result = ours.result
    outcome: dict[str, Any] = {
        "same": "error" not in alone and result == alone,
        "conversions": sum(bool(re.search(_CONVERTS, line)) for line in ours.lines),
        "ranks_from_cache": sum(bool(re.search(_FROM_CACHE, line)) for line in ours.lines),
    }
    for whose, there in (("vLLM alone: ", alone), ("", result)):
        if "error" in there:
            outcome.setdefault("error", whose + str(there["error"])[:300])
    return outcome


def _change(source: Path) -> None:
    """Exchange the halves of the largest tensor of a shard: other weights, of the same names and lengths."""
    shard = min(source.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    header_nbytes = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:header_nbytes])
    extents = [tensor["data_offsets"] for name, tensor in header.items() if name != "__metadata__"]
    first, end = max(extents, key=lambda extent: extent[1] - extent[0])
    whole, middle = slice(header_nbytes + first, header_nbytes + end), header_nbytes + (first + end) // 2
    content[whole] = content[middle : whole.stop] + content[whole.start : middle]
    shard.write_bytes(content)
