"""`tools/run bench table`: what a table of 92,000 tensors costs the loader, beside reading the same bytes plainly.

DeepSeek-V3's names, all of them, with matrices so narrow that a rank is a few hundred megabytes.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from support.hub_models import MODELS

import relayout
from bench.peers import BASELINE, PEERS
from bench.run import Folders, run_peer

# Eight ranks still cut at borders of blocks of 128 x 128.
_NARROW = {
    "hidden_size": 64,
    "intermediate_size": 1024,
    "moe_intermediate_size": 1024,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "vocab_size": 8192,
}
_SECONDS = 600.0


def measure(scratch: Path, runs: int) -> dict[str, Any]:
    """Load rank 0 of 8 so many times, warm, each time beside a plain read."""
    deepseek = MODELS["DeepSeek-V3"]
    model = replace(deepseek, config={**deepseek.config, **_NARROW})
    folders = Folders(scratch / "source", scratch / "converted", scratch / "packed")
    folders.packed.mkdir()
    model.write(folders.source)
    relayout.convert(folders.source, folders.converted, tp=8)
    loads, plain = [], []
    for _ in range(runs):
        loads.append(run_peer("relayout", PEERS["relayout"], folders, 8, [0], cold=False, limit=_SECONDS))
        plain.append(run_peer("plain preadv", BASELINE, folders, 8, [0], cold=False, limit=_SECONDS, verify=False))
    return {
        "num_tensors": sum(1 for _ in model.tensors()),
        "rank_nbytes": loads[0].nbytes,
        "seconds": statistics.median(one.seconds for one in loads),
        "plain_seconds": statistics.median(one.seconds for one in plain),
        "overhead_seconds": statistics.median(
            one.seconds - other.seconds for one, other in zip(loads, plain, strict=True)
        ),
        "peak_minus_needed_nbytes": statistics.median(one.peak_minus_needed_nbytes for one in loads),
        "all_seconds": [one.seconds for one in loads],
        "all_plain_seconds": [one.seconds for one in plain],
        "runs": runs,
    }


def print_result(console: Console, results: dict[str, Any]) -> None:
    """What `measure` found."""
    console.print(
        f"{results['num_tensors']:,} tensors, {results['rank_nbytes'] / 1e6:.0f} MB of one rank of 8, warm, medians of"
        f" {results['runs']}:\n"
        f"relayout.load {results['seconds']:.3f} s, plain preadv {results['plain_seconds']:.3f} s,"
        f" overhead {results['overhead_seconds']:.3f} s\n"
        f"peak memory beyond the rank's bytes: {results['peak_minus_needed_nbytes'] / 2**20:.0f} MiB"
    )
