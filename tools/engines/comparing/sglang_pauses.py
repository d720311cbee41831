"""Runs in an environment that has SGLang: how long its own `WeightUpdater` takes for new weights, in turns of ways.

`sglang_pauses FOLDER TURNS`: FOLDER has `model-0` and `model-1`, `step-0`, which is the first one converted for one
rank, and `delta-1`, which leads to the second. One process is the only rank of three engines. Prints a line of JSON:
seconds of each turn, in which everything that is read was read before; and the seconds that this process has computed
meanwhile, on all cores, which others on the machine disturb less.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from sglang.srt.plugins import load_plugins

from engines.comparing.sglang_updates import Live
from relayout.live.sglang_updates import LIVE
from relayout.observe.sglang_stubs import stub_rotary


def main() -> None:
    stub_rotary()
    root, turns = Path(sys.argv[1]), int(sys.argv[2])
    load_plugins()
    ways = {
        "SGLang, plain folder": (Live(root / "model-0", 0, tp=1), "model-1", "model-0"),
        "a delta, loaded again": (Live(root / "step-0", 0, tp=1), "delta-1", "step-0"),
        "a delta, live": (Live(root / "step-0", 0, tp=1, live=True), "delta-1", "step-0"),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    computing: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(1 + turns):  # The first one reads everything into the page cache, and is not counted.
        for way, (engine, new, old) in ways.items():
            begun, computed = time.perf_counter(), time.process_time()
            done, answer = engine.update(root / new)
            seconds[way].append(round(time.perf_counter() - begun, 4))
            computing[way].append(round(time.process_time() - computed, 4))
            assert done, answer
            if way.endswith("live"):
                live = LIVE.of(engine.model)
                assert live is not None
                assert live.weights is not None
                found = live.weights.attest()
                assert (found.difference, found.unverified) == (None, ())
            assert engine.update(root / old)[0]
    result: dict[str, Any] = {
        "name": root.name,
        "nbytes": sum(file.stat().st_size for file in (root / "model-0").glob("*.safetensors")),
        "seconds": {way: times[1:] for way, times in seconds.items()},
        "cpu_seconds": {way: times[1:] for way, times in computing.items()},
        "delta_nbytes": sum(file.stat().st_size for file in (root / "delta-1").glob("*.delta")),
        "verified": found.verified,
    }
    print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
