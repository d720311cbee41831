"""Runs in an environment that has vLLM: how long an engine is paused for new weights, in turns with vLLM's own reload.

`vllm_pauses FOLDER TURNS [--unpacked]`: FOLDER has `model-0` and `model-1`, `step-0` and `step-1`, which are these
converted for one rank, and `delta-1` between them. One process is the only rank of a model of vLLM's own classes.
Prints a line of JSON: seconds of each turn, in which everything that is read was read before; and the seconds that
this process has computed meanwhile, on all cores, which others on the machine disturb less.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload.inplace import reload_weights

from engines.comparing.jobs import Job
from engines.comparing.vllm_updates import MEMORY, leave_unpacked, loaded
from relayout.live.vllm_reload import rehearse, reload
from relayout.live.vllm_updates import LIVE
from relayout.observe.stubs import Unpinned, fake_rank


def main() -> None:
    torch.accelerator.empty_cache = lambda: None
    if "--unpacked" in sys.argv:
        leave_unpacked()
    root, turns = Path(sys.argv[1]), int(sys.argv[2])
    fake_rank(0, 1, False)
    started = time.perf_counter()
    config, model = loaded(Job(root.name, str(root), str(root), 1), root / "step-0", 0)
    load_seconds = time.perf_counter() - started
    live = LIVE.of(model)
    assert live is not None
    seconds: dict[str, list[float]] = {}
    computing: dict[str, list[float]] = {}
    staged: Any = None

    def timed(what: str, call: Callable[[], Any]) -> Any:
        begun, computed = time.perf_counter(), time.process_time()
        with set_current_vllm_config(config), Unpinned():
            result = call()
        seconds.setdefault(what, []).append(round(time.perf_counter() - begun, 4))
        computing.setdefault(what, []).append(round(time.process_time() - computed, 4))
        return result

    for _ in range(1 + turns):  # The first one reads everything into the page cache, and is not counted.
        staged = timed("stage", lambda: live.stage([str(root / "delta-1")], live.content, MEMORY))
        timed("rehearse", partial(live.rehearse, staged, model, partial(rehearse, model)))
        timed("pause", partial(live.commit, staged, partial(reload, model, config.model_config)))
        found = timed("attest", live.attest)
        assert found.difference is None
        timed("vLLM's reload, plain folder", partial(reload_weights, config, model, None, str(root / "model-1"), True))
        timed("vLLM's reload, our folder", partial(reload_weights, config, model, None, str(root / "step-0"), True))
    views, again = live.recorded.views, live.recorded.reloaded
    sizes = dict(zip(live.first.columns.names, live.first.columns.sizes(), strict=True))
    result = {
        "name": root.name,
        "packed": "--unpacked" not in sys.argv,
        "load_seconds": round(load_seconds, 2),
        "seconds": {what: times[1:] for what, times in seconds.items()},
        "cpu_seconds": {what: times[1:] for what, times in computing.items()},
        "changed": sum(len(one.bits) for one in staged.flips),
        "held_mib": round(staged.nbytes / 2**20, 1),
        "modules_loaded_again": None if staged.modules is None else len(staged.modules),
        "nbytes_with_views": sum(sizes[name] for name in views),
        "nbytes_loaded_again": sum(sizes.get(name, 0) for name in again),
        "delta_nbytes": sum(path.stat().st_size for path in (root / "delta-1").glob("*.delta")),
        "verified": found.verified,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 2**10,
    }
    print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
