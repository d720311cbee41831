"""relayout.errors: programs match on fields, people read one line."""

from __future__ import annotations

import copy
import errno
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.models import SIZES

import relayout
from relayout.errors import FORMAT_CODES, PLAN_CODES, FormatCode, FormatError, PlanCode, PlanError, about


def test_the_text_says_where_then_what() -> None:
    error = FormatError("has no end", path=Path("x") / "y", tensor="a\nb", offset=7, code="truncated")
    assert str(error) == "x/y: tensor 'a\\nb': has no end"
    assert (error.path, error.tensor, error.offset, error.code) == (Path("x") / "y", "a\nb", 7, "truncated")


def test_an_error_that_travels_between_processes_keeps_its_fields() -> None:
    error = pickle.loads(pickle.dumps(PlanError("no", path="p", tensor="t", code="option")))
    assert (type(error), str(error), error.code, error.tensor) == (PlanError, "p: tensor 't': no", "option", "t")


MISSING: dict[str, Callable[[str], object]] = {
    "load": relayout.load,
    "load a rank": lambda path: relayout.load(path, 0),
    "load a rank of a degree": lambda path: relayout.load(path, 0, tp=2),
    "iter_load": lambda path: list(relayout.iter_load(path, 0)),
    "open": relayout.open,
    "safe_open": relayout.safe_open,
    "explain": lambda path: relayout.explain(path, 0),
    "warm": lambda path: relayout.warm(path, rank=0),
    "inspect": relayout.inspect,
    "verify": relayout.verify,
    "restore": lambda path: relayout.restore(path, f"{path}-restored"),
    "convert": lambda path: relayout.convert(path, tp=1),
    "copy": lambda path: relayout.copy(path, f"{path}-copy"),
    "files": relayout.files,
    "report": lambda path: relayout.report(path, f"{path}.html"),
    "delta": lambda path: relayout.delta(path, path, f"{path}-delta"),
    "apply_deltas": lambda path: relayout.apply_deltas(path, path, f"{path}-new"),
    "plan_bench": relayout.plan_bench,
    "trust": lambda path: relayout.load(Path(path).parent, trust=path),
}


@pytest.mark.parametrize("name", MISSING)
def test_a_path_that_does_not_exist_is_one_error_everywhere(name: str, tmp_path: Path) -> None:
    """And what Python's own `open` and safetensors raise."""
    path = str(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=r"nothing: .*(no such file or folder|does not exist)") as caught:
        MISSING[name](path)
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value)), copy.copy(caught.value)):
        assert isinstance(error, PlanError)
        assert (error.code, error.path, error.errno, error.filename) == ("missing", path, errno.ENOENT, path)
        assert str(error) == str(caught.value)


def test_what_an_error_names_already_is_not_named_again() -> None:
    with (
        pytest.raises(PlanError, match=r"^outer: tensor 'inner': dim 0: uneven$"),
        about(path="outer", tensor="outer"),
        about(tensor="inner", part="dim 0"),
    ):
        raise PlanError("uneven")


def test_each_code_is_explained_once() -> None:
    """That no error has another code, mypy proves."""
    assert tuple(FORMAT_CODES) == get_args(FormatCode)
    assert tuple(PLAN_CODES) == get_args(PlanCode)


def test_only_one_function_changes_an_error_that_was_raised() -> None:
    package = Path(relayout.__file__).parent
    files = [path for folder in (package, package.parent / "loader") for path in folder.rglob("*.py")]
    assert len(files) > 50
    changing = re.compile(r"\b(error|caught|failure)\.(what|path|tensor|offset|code) [+]?= ")
    assert [path for path in files if changing.search(path.read_text())] == []


def test_a_bad_header_is_told_by_kind_file_tensor_and_offset(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(FormatError) as caught:
        relayout.convert(tmp_path, tmp_path / "out", tp=1)
    error = caught.value
    assert (error.code, error.tensor, error.offset) == ("coverage", "a", 8 + len(header) + 4)
    assert str(error.path) == str(tmp_path / "model.safetensors")


def test_a_degree_that_does_not_divide_is_told_by_kind_and_tensor(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "model_type": "llama"}))
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({name: np.arange(10 * 4, dtype=np.uint8).reshape(10, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(PlanError) as caught:
        relayout.convert(tmp_path, tmp_path / "out", tp=4)
    assert (caught.value.code, caught.value.tensor) == ("indivisible", name)
