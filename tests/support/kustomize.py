"""The part of kustomize that the folders in tools/examples/kubernetes use: resources, components and JSON patches.

`kubectl kustomize` renders the same objects (`tests/repository/test_kustomize.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def render(folder: Path) -> list[dict[str, Any]]:
    """Return the objects of a folder with a kustomization.yaml.

    Raises:
        ValueError: a `test` of a patch fails, a patch selects no object, or the folder uses another feature.
    """
    text = yaml.safe_load((folder / "kustomization.yaml").read_text())
    objects: list[dict[str, Any]] = []
    for name in text.get("resources", []):
        path = (folder / name).resolve()
        objects += render(path) if path.is_dir() else list(yaml.safe_load_all(path.read_text()))
    return _changed(folder, text, objects)


def _changed(folder: Path, text: dict[str, Any], objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Apply the components, then the patches of one kustomization."""
    unknown = text.keys() - {"apiVersion", "kind", "resources", "components", "patches"}
    if unknown:
        raise ValueError(f"{folder}: {sorted(unknown)} is not supported")
    for name in text.get("components", []):
        path = (folder / name).resolve()
        objects = _changed(path, yaml.safe_load((path / "kustomization.yaml").read_text()), objects)
    for patch in text.get("patches", []):
        target = patch["target"]
        selected = [
            one
            for one in objects
            if one["kind"] == target["kind"] and one["metadata"]["name"] == target.get("name", one["metadata"]["name"])
        ]
        if not selected:
            raise ValueError(f"{folder}: no object is {target}")
        for one in selected:
            for operation in yaml.safe_load(patch["patch"]):
                _operate(one, **operation)
    return objects


def _operate(one: Any, op: str, path: str, value: Any) -> None:
    """Apply one operation of a JSON patch (RFC 6902): `test` or `replace`."""
    *above, last = path.strip("/").split("/")
    for key in above:
        one = one[int(key) if isinstance(one, list) else key]
    at = int(last) if isinstance(one, list) else last
    found = one[at]
    if op == "test" and found != value:
        raise ValueError(f"{path}: {found!r}, expected {value!r}")
    if op == "replace":
        one[at] = value
    elif op != "test":
        raise ValueError(f"{path}: {op} is not supported")
