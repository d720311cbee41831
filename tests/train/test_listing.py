"""The proof that the chains of a root lead to what its index says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.steps import changed, delete, files_of, names_of, published, put


def in_manifest(root: str) -> str:
    name = names_of(root, "full")[-1]
    changed(root, f"{name}/relayout.json", 40)
    return name


def in_header(root: str) -> str:
    name = names_of(root, "full")[-1]
    changed(root, f"{name}/model-rank-1-part-0.safetensors", 20)
    return name


def table_of_folder(root: str) -> str:
    name = names_of(root, "full")[-1]
    delete(root, f"{name}/relayout.rank-0.json.zst")
    return name


def in_index_of_changes(root: str) -> str:
    name = names_of(root, "delta")[-1]
    changed(root, f"{name}/model-rank-0-part-0.safetensors.delta", -1)
    return name


def changes(root: str) -> str:
    name = names_of(root, "delta")[-1]
    delete(root, f"{name}/model-rank-0-part-0.safetensors.delta")
    return name


def of_another_step(root: str) -> str:
    one, other = names_of(root, "delta")[-2:]
    for path, content in files_of(root).items():
        if path.startswith(f"{one}/") and content:
            put(root, path.replace(one, other), content)
    return other


def truncated(name: str) -> Callable[[str], str]:
    """The damage of a small file of a delta."""

    def damage(root: str) -> str:
        path = f"{names_of(root, 'delta')[-1]}/{name}"
        put(root, path, files_of(root)[path][:5])
        return path

    return damage


def without(name: str) -> Callable[[str], str]:
    def damage(root: str) -> str:
        path = f"{names_of(root, 'delta')[-1]}/{name}"
        delete(root, path)
        return path

    return damage


def chunks_of_folder(root: str) -> str:
    path = f"{names_of(root, 'full')[-1]}/relayout.chunks"
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
