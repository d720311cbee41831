"""`relayout steps`: what a root has, and the proof that its chains lead to what its index says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import prestarted
from support.steps import CONFIG, delete, files_of, outputs_of, put, weights_of

import relayout


def published(root: str) -> None:
    """Five steps, of which the first is retired."""
    publisher = relayout.Publisher(root, config=CONFIG, tp=2, full_every=2, keep=3, keep_seconds=0)
    for step in range(1, 6):
        publisher.publish(weights_of(step), step)


def listed(*words: str) -> tuple[int, Any]:
    done = prestarted.run("steps", *words, "--json")
    return done.returncode, json.loads(done.stdout or done.stderr)


def test_the_steps_are_listed_and_what_none_needs_is_deleted_when_it_was_needed_long_ago(tmp_path: Path) -> None:
    root = str(tmp_path / "steps")
    published(root)
    index = json.loads(files_of(root)["steps.json"])
    code, found = listed(root)
    assert code == 0
    assert found["steps"] == index["steps"]
    assert found["retired"] == index["retired"] != []
    assert (found["deleted"], found["differences"]) == ([], None)
    before = outputs_of(root)
    assert listed(root, "--prune")[1]["deleted"] == []
    assert outputs_of(root) == before
    code, found = listed(root, "--prune", "--grace", "0", "--check")
    assert code == 0
    assert sorted(found["deleted"]) == sorted(one["name"] for one in index["retired"])
    assert before - outputs_of(root) == set(found["deleted"])
    assert (found["retired"], found["differences"]) == ([], [])
    text = prestarted.run("steps", root).stdout
    assert all(f" {one['step']} " in text for one in index["steps"])


def names(root: str, kind: str) -> list[str]:
    return [one[kind]["name"] for one in json.loads(files_of(root)["steps.json"])["steps"] if one[kind] is not None]


def changed(root: str, name: str, position: int) -> None:
    """Change a byte of a file."""
    content = bytearray(files_of(root)[name])
    content[position] ^= 1
    put(root, name, bytes(content))


def in_manifest(root: str) -> str:
    name = names(root, "full")[-1]
    changed(root, f"{name}/relayout.json", 40)
    return name


def in_header(root: str) -> str:
    name = names(root, "full")[-1]
    changed(root, f"{name}/model-rank-1-part-0.safetensors", 20)
    return name


def table_of_folder(root: str) -> str:
    name = names(root, "full")[-1]
    delete(root, f"{name}/relayout.rank-0.json.zst")
    return name


def in_index_of_changes(root: str) -> str:
    name = names(root, "delta")[-1]
    changed(root, f"{name}/model-rank-0-part-0.safetensors.delta", -1)
    return name


def changes(root: str) -> str:
    name = names(root, "delta")[-1]
    delete(root, f"{name}/model-rank-0-part-0.safetensors.delta")
    return name


def of_another_step(root: str) -> str:
    one, other = names(root, "delta")[-2:]
    for path, content in files_of(root).items():
        if path.startswith(f"{one}/") and content:
            put(root, path.replace(one, other), content)
    return other


def truncated(name: str) -> Callable[[str], str]:
    """The damage of a small file of a delta."""

    def damage(root: str) -> str:
        path = f"{names(root, 'delta')[-1]}/{name}"
        put(root, path, files_of(root)[path][:5])
        return path

    return damage


def without(name: str) -> Callable[[str], str]:
    def damage(root: str) -> str:
        path = f"{names(root, 'delta')[-1]}/{name}"
        delete(root, path)
        return path

    return damage


def chunks_of_folder(root: str) -> str:
    path = f"{names(root, 'full')[-1]}/relayout.chunks"
    changed(root, path, 3)
    return path


SMALL = ["old/relayout.rank-0.json.zst"]
SMALL += [f"new/{name}" for name in ("relayout.rank-1.json.zst", "relayout.chunks", "relayout.source.json.zst")]
SMALL += ["new/model.safetensors.index.json"]


@pytest.mark.parametrize(
    "damage",
    [
        *(in_manifest, in_header, table_of_folder, in_index_of_changes, changes, of_another_step, chunks_of_folder),
        *(pytest.param(kind(name), id=f"{kind.__name__} {name}") for name in SMALL for kind in (truncated, without)),
    ],
)
def test_a_chain_that_leads_elsewhere_is_named(root: str, damage: Any) -> None:
    from relayout.train.listing import list_steps

    published(root)
    assert list_steps(root, check=True).differences == ()
    name = damage(root)
    differences = list_steps(root, check=True).differences
    assert differences is not None
    assert len(differences) == 1
    assert name in differences[0]


def test_the_exit_code_says_that_something_differs_or_that_there_is_nothing(tmp_path: Path) -> None:
    root = str(tmp_path / "steps")
    code, found = listed(root)
    assert code == 2
    assert "has no steps yet" in str(found)
    published(root)
    in_manifest(root)
    assert listed(root, "--check")[0] == 1
