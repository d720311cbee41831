"""A follower that is written from FORMAT.md alone has each step, and refuses what is damaged."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load
from support import golden
from support.follower_example import Follower
from support.models import as_integers
from support.steps import CONFIG, assert_is_step, weights_of

import relayout

NUM_STEPS = 9


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("place") / "steps"
    publisher = relayout.Publisher(root, config=CONFIG, tp=2, full_every=4, max_part_nbytes="40KB")
    for step in range(1, NUM_STEPS + 1):
        publisher.publish(weights_of(step), step)
    return root


@pytest.fixture(scope="module")
def decoded() -> Callable[[bytes], bytes]:
    """What the document says of a piece, by what it says before that."""
    document, names = (Path(__file__).parents[2] / "docs/FORMAT.md").read_text(), dict[str, Any]()
    for number in (12, 15):
        section = document.split(f"\n## {number}. ")[1].split("\n## ")[0]
        exec(section.split("```python\n")[1].split("```")[0], names)
    found: Callable[[bytes], bytes] = names["decoded"]
    return found


def tensors_of(follower: Follower) -> dict[str, torch.Tensor]:
    return {name: tensor for blob in follower.files.values() for name, tensor in load(bytes(blob)).items()}


@pytest.mark.parametrize("rank", [0, 1])
def test_it_has_each_step_by_deltas_and_from_folders(root: Path, decoded: Callable[[bytes], bytes], rank: int) -> None:
    follower = Follower(root, rank, decoded)
    ways = []
    for step in range(1, NUM_STEPS + 1):
        ways.append([name.split("-")[0] for name in follower.go(step)])
        assert_is_step(tensors_of(follower), weights_of(step), rank)
    assert ways == [["full"], *[["delta"]] * (NUM_STEPS - 1)]
    for step in (7, 2, 5, 4, NUM_STEPS):
        follower.go(step)
        assert_is_step(tensors_of(follower), weights_of(step), rank)
    assert [name.split("-")[0] for name in Follower(root, rank, decoded).go()] == ["full"]


@pytest.mark.parametrize("rank", range(golden.NUM_RANKS))
def test_it_has_the_golden_steps(decoded: Callable[[bytes], bytes], rank: int) -> None:
    follower = Follower(golden.STEPS, rank, decoded)
    for step, ranks in golden.read_list()["steps"].items():
        follower.go(int(step))
        found = {name: as_integers(tensor).tobytes() for name, tensor in tensors_of(follower).items()}
        assert {name: hashlib.sha256(blob).hexdigest() for name, blob in found.items()} == {
            name: row["sha256"] for name, row in ranks[rank].items()
        }


def test_each_change_of_a_byte_that_it_reads_is_noticed(
    root: Path, decoded: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    entries = json.loads((root / "steps.json").read_text())["steps"]
    full, delta = entries[0]["full"]["name"], entries[1]["delta"]["name"]
    names = ["relayout.json", "relayout.chunks", "relayout.digests", "model-rank-0-part-0.safetensors"]
    names = [f"{full}/{name}" for name in names]
    names += [f"{delta}/{name}" for name in ("relayout.json", "relayout.digests.delta", "new/relayout.json.zst")]
    names += [f"{delta}/model-rank-0-part-0.safetensors.delta"]
    num_tensors = json.loads((root / full / "relayout.json").read_bytes())["ranks"][0]["num_tensors"]
    num_changed = json.loads((root / delta / "relayout.json").read_bytes())["digests"][0]["count"]
    own = {"relayout.chunks": 16, "relayout.digests": 16 * num_tensors, "relayout.digests.delta": 24 * num_changed}
    random = np.random.default_rng(0)
    for name in names:
        shutil.copytree(root, tmp_path / "steps")
        file = tmp_path / "steps" / name
        whole = file.read_bytes()
        nbytes = own.get(file.name, len(whole))  # The rest is of other files, or of another rank.
        for position in random.integers(nbytes, size=10).tolist():
            content = bytearray(whole)
            content[position] ^= 1
            file.write_bytes(content)
            with pytest.raises((ValueError, LookupError, FileNotFoundError)):  # The name of a file may be what changed.
                Follower(tmp_path / "steps", 0, decoded).go(2)
        shutil.rmtree(tmp_path / "steps")
