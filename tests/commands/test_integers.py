"""Integers as callers have them: those of numpy are as good as Python's; what is none is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.trees import content

import relayout
from relayout.errors import PlanError


def test_integers_of_numpy_are_as_good_as_pythons(llama: Path, tmp_path: Path) -> None:
    relayout.convert(llama, tmp_path / "ours", tp=2, align=512, max_part_nbytes=400_000, threads=2, memory=2**24)
    relayout.convert(
        llama,
        tmp_path / "theirs",
        tp=np.int64(2),  # type: ignore[arg-type]
        align=np.uint16(512),  # type: ignore[arg-type]
        max_part_nbytes=np.uint64(400_000),  # type: ignore[arg-type]
        threads=np.int8(2),  # type: ignore[arg-type]
        memory=np.int32(2**24),  # type: ignore[arg-type]
    )
    assert content(tmp_path / "theirs") == content(tmp_path / "ours")
    assert len(content(tmp_path / "ours")) > 8
    relayout.restore(tmp_path / "ours", tmp_path / "back", threads=np.int64(1), memory=np.int64(2**24))  # type: ignore[arg-type]
    assert content(tmp_path / "back") == content(llama)
    assert relayout.inspect(tmp_path / "ours", rank=np.int16(1)) == relayout.inspect(tmp_path / "ours", rank=1)  # type: ignore[arg-type]
    assert str(relayout.plan_conversion(llama, tp=np.int64(2)).output).endswith("/llama-tp2")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [True, 2.0, np.float64(2), "2", None, np.array([2, 4])], ids=repr)
@pytest.mark.parametrize(
    ("call", "name"),
    [
        *[(relayout.convert, name) for name in ("tp", "align", "max_part_nbytes", "threads", "memory")],
        *[(relayout.plan_conversion, name) for name in ("tp", "align", "max_part_nbytes")],
        *[(relayout.restore, name) for name in ("threads", "memory")],
    ],
)
def test_what_is_no_integer_is_refused_by_name(
    tmp_path: Path, call: Callable[..., Any], name: str, value: object
) -> None:
    if isinstance(value, str) and name in ("align", "max_part_nbytes", "memory"):
        value = "2 of them"  # A size may be text, but not any.
    with pytest.raises(PlanError, match=rf"^{name}( .*)?: .* is not an integer$|^{name}.*: '2 of them' is not a size"):
        call(tmp_path / "nothing", tmp_path / "out", **{name: value})


@pytest.mark.parametrize("value", [False, 1.0, "1"])
def test_a_rank_to_inspect_that_is_no_integer_is_refused_by_name(tmp_path: Path, value: Any) -> None:
    with pytest.raises(PlanError, match=r"^rank: .* is not an integer$"):
        relayout.inspect(tmp_path, rank=value)
