"""Two ranks of a stub of SGLang whose weights are updated, case after case, and what each of them saw.

`main` with `FOLDER` in sys.argv: it has what `steps` of tests/live/test_sglang_updates.py makes. Each process writes
FOLDER/rank-N.json. With `live` behind it, what changes goes where it lies; of rank 1 only, with `live in part`.
"""

from __future__ import annotations

import json
import shutil
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.group_worker import forked, join
from support.steps import closed_index
from support.updates_worker import TP


def main() -> None:
    folder = Path(sys.argv[1])
    codes = forked(partial(_rank, folder), TP)
    assert codes == [0] * TP, codes


def _rank(folder: Path, rank: int) -> None:
    import pytest
    import torch
    import torch.distributed as dist
    from support.bits import flip
    from support.conversions import reference_tensors
    from support.fake_sglang import install
    from support.fake_vllm import Model

    from relayout.live.staging import LiveWeights

    join(folder, rank, TP)
    engine = install(pytest.MonkeyPatch())
    engine.parallel.tp_group = SimpleNamespace(world_size=TP, cpu_group=dist.group.WORLD)
    wholes = {name: reference_tensors(folder / name) for name in ("model-0", "model-1", "model-2")}
    is_live = sys.argv[2:] == ["live"] or (sys.argv[2:] == ["live in part"] and rank == 1)
    engine.options = {"live": is_live}
    model = Model(wholes["model-0"], rank, TP, in_parameters=is_live)
    engine.load(folder / "step-0", model, load_format="auto")
    seen: dict[str, Any] = {}

    def case(name: str, source: str, *, was: Path | None = None, fails: bool = False) -> None:
        """With `fails`, the first load of this rank breaks off in its middle."""
        load = model.load_weights
        if fails:
            commit = LiveWeights.commit

            def mend() -> None:
                model.load_weights, LiveWeights.commit = load, commit  # type: ignore[method-assign]

            def broken(weights: Any) -> Any:
                mend()
                load(next(iter(weights)) for _ in range(2))
                return 1 / 0

            def breaking(*_: Any) -> Any:
                mend()
                next(iter(model.memory.values())).neg_()
                return 1 / 0

            model.load_weights, LiveWeights.commit = broken, breaking  # type: ignore[method-assign]
        done, answer = engine.update(model, folder / source, was)
        has = [
            name
            for name, whole in wholes.items()
            if all(torch.equal(model.memory[one], model.cut(one, whole[one])) for one in model.expected)
        ]
        seen[name] = {"done": done, "answer": answer.replace(str(folder), "TMP"), "has": has}
        dist.barrier()

    case("a delta", "delta-1", was=folder / "step-0")
    older = shutil.copytree(folder / "root", folder / f"older-{rank}")
    if rank == 1:
        index = json.loads((older / "steps.json").read_text())
        (older / "steps.json").write_bytes(closed_index(index | {"steps": index["steps"][:-1]}))
    case("rank 1 sees an older root", f"older-{rank}")
    if rank == 1:
        shutil.copytree(folder / "step-2", folder / "damaged-rank")
        file = folder / "damaged-rank" / "model-rank-1-part-0.safetensors"
        flip(file, file.stat().st_size - 9)
    dist.barrier()
    case("a folder whose rank 1 is damaged", "damaged-rank")
    case("rank 1 fails while it loads", "step-2", fails=rank == 1)
    case("other contents", f"step-{2 * rank}")
    seen["other contents"]["answer"] = seen["other contents"]["answer"].replace(f"step-{2 * rank}:", "step-N:")
    case("the root", "root")
    case("a plain checkpoint, of which rank 0 fails", "model-0", fails=rank == 0)
    shutil.move(folder / "root", folder / f"gone-{rank}") if rank == 0 else None
    dist.barrier()
    case("rank 1 fails, and rank 0 cannot go back", "step-1", fails=rank == 1)
    (folder / f"rank-{rank}.json").write_text(json.dumps(seen))
