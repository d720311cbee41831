"""Two workers of a fake vLLM whose weights are updated, case after case, and what each of them saw.

`main` with `FOLDER` in sys.argv: it has what `updated_folders` of tests/live/test_vllm_updates.py makes. Each process
writes FOLDER/worker-N.json.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from support.group_worker import forked, join

import relayout

TP = 2


def write_steps(source: Path, root: Path, num_steps: int, tp: int = TP) -> None:
    """Models of some steps of a training, converted as `step-N`, and deltas between them as `delta-N`.

    `damaged-delta` is delta-1, and `damaged-folder` the last step, with a wrong bit in what is of the last rank.
    """
    for step in range(num_steps + 1):
        model = root / f"model-{step}"
        shutil.copytree(root / f"model-{step - 1}" if step else source, model)
        for shard in sorted(model.glob("*.safetensors")) if step else ():
            content = np.fromfile(shard, np.uint8)
            start_of_data = 8 + int.from_bytes(content[:8].tobytes(), "little")
            # Of each BF16, the low byte has most of the mantissa.
            content[start_of_data + 2 * step :: 2 * max(num_steps, 7)] ^= 0x40
            content.tofile(shard)
        relayout.convert(model, root / f"step-{step}", tp=tp)
        if step:
            relayout.delta(root / f"step-{step - 1}", root / f"step-{step}", root / f"delta-{step}")
    for name, damaged in (("delta-1", "damaged-delta"), (f"step-{num_steps}", "damaged-folder")):
        shutil.copytree(root / name, root / damaged)
        file = max((root / damaged).glob(f"model-rank-{tp - 1}-*"), key=lambda one: one.stat().st_size)
        content = np.fromfile(file, np.uint8)
        content[len(content) // 2] ^= 1
        content.tofile(file)


def main() -> None:
    folder = Path(sys.argv[1])
    codes = forked(partial(_worker, folder), TP)
    assert codes == [0] * TP, codes


def _worker(folder: Path, rank: int) -> None:
    import pytest
    import torch
    import torch.distributed as dist
    from support.conversions import reference_tensors
    from support.fake_vllm import LoadConfig, Model, TransferWorker, install, logged

    join(folder, rank, TP)
    engine = install(pytest.MonkeyPatch())
    engine.workers = dist.group.WORLD
    errors = logged(logging.ERROR)
    wholes = {name: reference_tensors(folder / name) for name in ("model-0", "model-1", "model-2")}
    seen: dict[str, Any] = {}

    def started(*, in_parameters: bool = True, load_format: str = "auto") -> TransferWorker:
        model = Model(wholes["model-0"], rank, TP, in_parameters=in_parameters)
        return TransferWorker(engine, folder / "step-0", model, load_format)

    def case(name: str, worker: TransferWorker, *sources: Any) -> None:
        errors.clear()
        result: dict[str, Any] = {}
        try:
            worker.start_weight_update()
            for source in sources:
                info = source if isinstance(source, dict) else {"source": str(folder / source)}
                worker.update_weights(info)
            worker.finish_weight_update()
        except Exception as error:
            result["raised"] = type(error).__name__
        try:
            kept = worker.execute_model()
            result["has"] = [
                name
                for name, whole in wholes.items()
                if all(torch.equal(kept[one], worker.model.cut(one, whole[one])) for one in worker.model.expected)
            ]
        except RuntimeError as error:
            result["refuses"] = str(error)
        result["content"] = worker.relayout_state()["content"]
        result["attested"] = worker.relayout_attest()
        seen[name] = {**result, "said": list(errors)}
        (folder / f"worker-{rank}.json").write_text(json.dumps(seen))

    worker = started()
    worker.init_weight_transfer_engine({"memory": "1GiB"})
    case("a delta", worker, "delta-1")
    case("the same delta again", worker, "delta-1")
    loader = engine.formats["auto"](LoadConfig("auto"))
    worker.model.load_weights(loader.get_all_weights(worker.vllm_config.model_config, worker.model))
    case("the same delta behind a reload of its base", worker, "delta-1")
    case("the next delta", worker, "delta-2")
    case("another folder", worker, "step-0")
    case("two deltas", worker, "delta-1", "delta-2")
    case("a list", worker, "step-0", {"source": [str(folder / "delta-1"), str(folder / "delta-2")]})
    case("nothing", worker)
    case("the first folder again", worker, "step-0")
    case("a damaged delta", worker, "damaged-delta")
    case("a damaged folder", worker, "damaged-folder")
    case("another model", worker, "other")
    case("a plain checkpoint", worker, "model-1")
    case("other contents for other workers", worker, f"step-{1 + rank}")
    case("no source", worker, {"sources": "delta-1"})
    case("a delta after errors", worker, "delta-1")
    worker.sleep()
    case("a delta after sleep", worker, "delta-2")
    worker.sleep(level=2)
    case("a delta after a sleep that lets go", worker, "delta-2")
    case("a folder after a sleep that lets go", worker, "step-0")
    if rank == 1:
        for parameter in worker.model.parameters():
            parameter.data.neg_()
    case("a delta where others have written", worker, "delta-1")
    case("a folder where others have written", worker, "step-0")
    worker = started(in_parameters=False)
    case("loaded again by the engine", worker, "delta-1")
    if rank == 1:
        worker.model.load_weights = lambda weights: next(iter(weights)) and 1 / 0  # type: ignore[method-assign]
    case("a worker fails in the rehearsal", worker, "delta-2")
    if rank == 1:
        del worker.model.load_weights
        worker.model.end_reload = lambda: 1 / 0  # type: ignore[assignment,return-value]
    case("a worker fails while it loads", worker, "delta-2")
    case("after that", worker, "step-0")
