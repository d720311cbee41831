"""Errors of loads have fields: which file or tensor is wrong, and what kind of error it is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.bits import flip

import relayout
from relayout.errors import FormatError, PlanError, RelayoutError

FIRST = "model-rank-0-part-0.safetensors"


def test_a_damaged_tensor_is_named(place: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(place / "out", tmp_path / "out"))
    with relayout.open(folder, 0) as opened:
        names = opened.keys()
    flip(folder / FIRST, (folder / FIRST).stat().st_size - 1)
    with pytest.raises(FormatError) as caught:
        relayout.load(folder, 0, verify=True)
    assert caught.value.code == "digest"
    assert caught.value.tensor in names


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"names": "nothing.*"}, "option"),
        ({"names": "{a"}, "option"),
        ({"into": {"nothing": None}}, "option"),
        ({"tp": 1, "verify": True, "backend": "direct"}, "unsupported"),
    ],
)
def test_a_bad_request_has_a_code(place: Path, options: dict[str, Any], code: str) -> None:
    with pytest.raises(PlanError) as caught:
        relayout.load(place / "out", 0, **options)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("ask", "code"),
    [
        (lambda place: relayout.load(place / "nowhere", 0), "missing"),
        (lambda place: relayout.load(place / "source", 0), "option"),
        (lambda place: relayout.load(place / "source", 0, tp=1, verify=True), "unsupported"),
        (lambda place: relayout.safe_open(place / "source"), "missing"),
        (lambda place: relayout.open(place / "out", 0).get_tensor("nothing"), "missing"),
    ],
)
def test_a_request_that_does_not_fit_a_checkpoint_names_it(
    place: Path, ask: Callable[[Path], object], code: str
) -> None:
    with pytest.raises(RelayoutError) as caught:
        ask(place)
    assert caught.value.code == code
    assert str(caught.value.path).startswith(str(place))
