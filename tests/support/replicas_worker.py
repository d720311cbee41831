"""Two replicas of a fake vLLM, rank 1 of 2 each, that load one case after the other, and what each of them saw.

`main` with `FOLDER` in sys.argv: FOLDER/moe is a checkpoint, converted as FOLDER/moe-tp2. Each process writes
FOLDER/replica-N.json. The conversion is in a toy store, too, of which each process has its own: it counts.
"""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from support.group_worker import digests, forked, join
from support.toy_store import Fault, shelf

from relayout.engines.load import Weights
from relayout.storage.stores import REGISTRY

NUM_REPLICAS = 2
RANK, TP = 1, 2


def main() -> None:
    folder = Path(sys.argv[1])
    REGISTRY["toy"] = "support.toy_store"
    for file in (folder / "moe-tp2").iterdir():
        shelf("replicas").write(f"moe-tp2/{file.name}", file.read_bytes())
    codes = forked(partial(_replica, folder), NUM_REPLICAS)
    assert codes == [0] * NUM_REPLICAS, codes


def _replica(folder: Path, number: int) -> None:
    import pytest
    import torch.distributed as dist
    from support.conversions import reference_tensors
    from support.fake_vllm import Model, install, logged, model_config

    join(folder, number, NUM_REPLICAS)
    engine = install(pytest.MonkeyPatch())
    engine.replicas = dist.group.WORLD
    engine.parallel.data_parallel_size = NUM_REPLICAS
    log = logged()
    whole = reference_tensors(folder / "moe")
    mine, seen = shelf("replicas"), dict[str, Any]()

    class Failing(Model):
        """Fails in the second tensor."""

        def load_weights(self, weights: Iterable[Any]) -> set[str]:
            given = iter(weights)
            next(given)
            raise ValueError("no place for this tensor")

    class Impatient(Model):
        """Stops after the second tensor, and says that it has all."""

        def load_weights(self, weights: Iterable[Any]) -> set[str]:
            for _, _ in zip(range(2), weights, strict=False):
                pass
            return self.expected

    def case(name: str, path: str = "toy://replicas/moe-tp2", model: type[Model] = Model, **options: Any) -> None:
        before = mine.read_nbytes
        log.clear()
        made = model(whole, RANK, TP)
        result: dict[str, Any] = {}
        try:
            loader = engine.load(path, made, **options)
            made.assert_holds_what_it_cuts_of(whole)
            if isinstance(loader.load, Weights):
                result["readers"] = loader.load.delivery.report().num_readers
            result["tensors"] = digests(made.kept)
            if name == "shared":  # A reload is for one replica alone.
                made.kept.clear()
                made.load_weights(loader.get_all_weights(model_config(folder / "moe-tp2"), made))
                made.assert_holds_what_it_cuts_of(whole)
        except Exception as error:
            result |= {"kind": type(error).__name__, "error": str(error)}
        mine.faults.clear()
        seen[name] = {**result, "nbytes": mine.read_nbytes - before, "log": list(log)}
        (folder / f"replica-{number}.json").write_text(json.dumps(seen))

    case("shared")
    case("verified", verify=True)
    case("alone", share=False)
    case("draft", str(folder / "moe-tp2"), draft=True)
    if number == 0:
        error = partial(OSError, errno.EIO, "the drive is on fire", "model")
        mine.faults.append(Fault("read", "*.safetensors", times=None, error=error))
    case("a read fails")
    case("missing", "toy://replicas/none" if number == 0 else "toy://replicas/moe-tp2")
    case("one shares nothing", str(folder / "moe") if number == 0 else "toy://replicas/moe-tp2")
    case("the engine fails", model=Failing if number == 1 else Model)
    case("the engine stops", model=Impatient if number == 1 else Model)
    case("again")
