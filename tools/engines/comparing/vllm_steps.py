"""Runs in an environment that has vLLM: its own classes follow a root of many steps, beside models loaded anew.

`vllm_steps FOLDER TP NUM_STEPS`, weights are left as they are stored: FOLDER has `model`, a plain checkpoint. This
process trains it, publishes each step, and is all ranks of four engines: one takes each step, one each 15th, one is
away for so long that it must begin with a folder, one joins in the middle. A process of its own follows, too, is killed
at some steps, and comes back. At 20 steps all are compared with vLLM's own load of the plain checkpoint. Prints a line
of JSON.

`vllm_steps FOLDER TP --follow` is that process. It ends with the step that FOLDER/last names.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from vllm.config import set_current_vllm_config

import relayout
from engines.comparing.jobs import Job, note_differences, nothing_found
from engines.comparing.vllm_updates import MEMORY, everything, leave_unpacked, loaded
from relayout.live.vllm_reload import rehearse, reload
from relayout.live.vllm_updates import LIVE
from relayout.observe.stubs import Unpinned, fake_rank

NUM_SAMPLES = 20
SLOW, KEEP = 15, 20
NUM_KILLS = 3


class Engine:
    """All ranks of a model of vLLM, one after the other."""

    def __init__(self, root: Path, tp: int) -> None:
        """Start it on the newest folder of a root."""
        self._root, self._tp = str(root), tp
        chain = relayout.Steps(root).chain()
        assert chain is not None
        assert chain.full is not None
        self._ranks = []
        for rank in range(tp):
            fake_rank(rank, tp, False)
            self._ranks.append(loaded(Job("", "", "", tp), root / chain.full, rank))
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def follow(self) -> None:
        """Take the newest step."""
        staged = []
        for rank, (config, model) in enumerate(self._ranks):
            fake_rank(rank, self._tp, False)
            begun = time.perf_counter()
            with set_current_vllm_config(config), Unpinned():
                staged.append(_live(model).stage([self._root], _live(model).content, MEMORY))
            self.seconds["stage"].append(time.perf_counter() - begun)
        for rank, (config, model) in enumerate(self._ranks):
            fake_rank(rank, self._tp, False)
            begun = time.perf_counter()
            with set_current_vllm_config(config), Unpinned():
                _live(model).check(model)
                _live(model).check_base([staged[rank]])
                _live(model).rehearse(staged[rank], model, partial(rehearse, model))
                _live(model).commit(staged[rank], partial(reload, model, config.model_config))
            self.seconds["pause"].append(time.perf_counter() - begun)

    @property
    def content(self) -> str:
        """The digest of what all ranks have."""
        [content] = {_live(model).content.digest for _, model in self._ranks}
        return str(content)

    def compare(self, result: dict[str, Any], fresh: list[Any]) -> None:
        """Compare all parameters with those of another model, and let them prove themselves."""
        for rank, (_, model) in enumerate(self._ranks):
            attested = _live(model).attest()
            result["verified"] += attested.verified
            if attested.difference is not None:
                result["different"].append(f"attested, rank {rank}: {attested.difference}")
            note_differences(result, rank, fresh[rank], everything(model))

    def digests(self) -> list[str]:
        """Of all parameters of each rank."""
        return [_digest(everything(model)) for _, model in self._ranks]


def _live(model: Any) -> Any:
    live = LIVE.of(model)
    assert live is not None
    return live


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode() + tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Training:
    """A model whose elements change, and the root to which its steps go."""

    def __init__(self, folder: Path, tp: int) -> None:
        self._model, self.root, self._tp = folder / "model", folder / "root", tp
        self._weights: dict[str, torch.Tensor] = {}
        for shard in sorted(self._model.glob("*.safetensors")):
            self._weights |= load_file(shard)
        self._random = torch.Generator().manual_seed(1)
        self.restart()
        self.number = 0
        self._publisher.publish(self._weights, 0)

    def restart(self) -> None:
        """Go on as another process would: by a whole folder."""
        options: dict[str, Any] = {"keep": KEEP, "keep_seconds": 0, "grace_seconds": 0, "full_every": 100}
        self._publisher = relayout.Publisher(self.root, tp=self._tp, config=self._model, **options)

    def step(self, share: float, skipped: int) -> None:
        """Change a share of the elements by one bit, and publish; so many numbers of steps are left out."""
        for tensor in self._weights.values():
            numbers = tensor.view(-1).view(torch.int16)
            places = torch.randint(0, len(numbers), (max(1, int(len(numbers) * share)),), generator=self._random)
            numbers[places.unique()] ^= 1
        self.number += 1 + skipped
        self._publisher.publish(self._weights, self.number)

    def plain(self, folder: Path) -> Path:
        """The weights as a plain checkpoint."""
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self._model, folder, ignore=lambda _, names: [n for n in names if "safetensors" in n])
        save_file(self._weights, folder / "model.safetensors", {"format": "pt"})
        return folder


def main() -> None:
    torch.accelerator.empty_cache = lambda: None  # As vLLM's worker for CPUs does.
    torch.set_num_threads(1)
    leave_unpacked()
    folder, tp = Path(sys.argv[1]), int(sys.argv[2])
    if sys.argv[3] == "--follow":
        follow(folder, tp)
    else:
        print("RESULT", json.dumps(train(folder, tp, int(sys.argv[3]))), flush=True)


def train(folder: Path, tp: int, num_steps: int) -> dict[str, Any]:
    """Publish steps and let all engines follow; what was found."""
    training, chance = Training(folder, tp), random.Random(1)
    engines = {name: Engine(training.root, tp) for name in ("each", "slow", "away")}
    result: dict[str, Any] = nothing_found() | {"verified": 0, "samples": []}
    mib, files, nbytes = [], [], []
    every = max(1, num_steps // NUM_SAMPLES)
    kills = {round(num_steps * (number + 0.6) / (NUM_KILLS + 1)) for number in range(NUM_KILLS)}
    other = _follower(folder, tp)
    for number in range(1, num_steps + 1):
        if number == num_steps // 3:
            training.restart()
        training.step(0.2 if number % 97 == 0 else 0.01, chance.choice((0, 0, 0, 1, 5)))
        if number == num_steps // 2:
            engines["late"] = Engine(training.root, tp)
        is_sample = number % every == 0
        for name, engine in engines.items():
            if is_sample or name in ("each", "late") or (name == "slow" and number % SLOW == 0):
                engine.follow()
        sizes = [path.stat().st_size for path in training.root.rglob("*") if path.is_file()]
        files.append(len(sizes))
        nbytes.append(sum(sizes))
        if number in kills:
            other.kill()
            other.wait()
            other = _follower(folder, tp)
        if is_sample:
            fresh = _fresh(training.plain(folder / "plain"), tp)
            for engine in engines.values():
                assert engine.content == engines["each"].content
                engine.compare(result, fresh)
            result["samples"].append(number)
            del fresh
            gc.collect()
            mib.append(_mib())
    (folder / "last").write_text(engines["each"].content)
    other.wait(600)
    assert other.returncode == 0
    said = json.loads((folder / "followed.json").read_text())
    result["killed"] = {"times": len(kills), "same": said["digests"] == engines["each"].digests(), **said["counts"]}
    seconds = engines["each"].seconds
    return result | {
        "steps": num_steps,
        "mib": {"at_first_sample": mib[0], "with_all_engines": mib[len(mib) // 2], "at_last_sample": mib[-1]},
        "files": {"most": max(files), "last": files[-1]},
        "root_nbytes": {"first": nbytes[0], "most": max(nbytes), "last": nbytes[-1]},
        "milliseconds": {what: round(1000 * statistics.median(times), 1) for what, times in seconds.items()},
    }


def _fresh(plain: Path, tp: int) -> list[dict[str, torch.Tensor]]:
    """What each rank of an engine that is started now has, by vLLM's own loader."""
    found = []
    for rank in range(tp):
        fake_rank(rank, tp, False)
        found.append(everything(loaded(Job("", "", "", tp), plain, rank)[1]))
    return found


def _follower(folder: Path, tp: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "engines.comparing.vllm_steps", str(folder), str(tp), "--follow"]
    with (folder / "follower.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=lambda: os.nice(5) and None)


def follow(folder: Path, tp: int) -> None:
    """Follow the root of a training, until its last step."""
    engine: Engine | None = None
    counts = {"followed": 0, "came_too_late": 0}
    while engine is None or not (folder / "last").exists() or engine.content != (folder / "last").read_text():
        # What is retired may be deleted at once in this root, while it is read.
        with suppress(FileNotFoundError, relayout.RelayoutError):
            engine = engine or Engine(folder / "root", tp)
            engine.follow()
            counts["followed"] += 1
            continue
        counts["came_too_late"] += 1
    (folder / "followed.json").write_text(json.dumps({"digests": engine.digests(), "counts": counts}))


def _mib() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 2**20


if __name__ == "__main__":
    main()
