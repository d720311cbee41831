"""The options of public functions: shown by `help`, refused if unknown, and checked by mypy where they are given."""

from __future__ import annotations

import inspect
import pydoc
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.patience import PATIENCE

import relayout
from relayout.conversion.planning import ConvertOptions, CutOptions, PlanOptions
from relayout.loader.sources.checkpoint import LoadOptions, LoadRequest
from relayout.train.save import SaveOptions, SaveRequest

ROOT = Path(__file__).parents[2]
TAKEN: dict[str, tuple[Any, Any, Any]] = {
    "convert": (relayout.convert, ConvertOptions, PlanOptions),
    "plan_conversion": (relayout.plan_conversion, ConvertOptions, PlanOptions),
    "save": (relayout.save, SaveOptions, SaveRequest),
    "save_pretrained": (relayout.transformers.save_pretrained, SaveOptions, SaveRequest),
    "Publisher.__init__": (relayout.Publisher, CutOptions, PlanOptions),
    "load": (relayout.load, LoadOptions, LoadRequest),
    "iter_load": (relayout.iter_load, LoadOptions, LoadRequest),
}
"""Functions that take options, the type of these, and the class that has their defaults."""
GIVEN = {
    "convert": ["source"],
    "plan_conversion": ["source"],
    "save": ["tensors", "output"],
    "save_pretrained": ["model", "output"],
    "Publisher.__init__": ["root"],
    "load": ["path"],
    "iter_load": ["path"],
}
"""Arguments without a default, which are never looked at."""

WRONG = """
relayout.convert("model", tpp=2)
relayout.convert("model", tp="2")
relayout.plan_conversion("model", layout="hole")
relayout.save({}, "out", max_shard_sise=5)
relayout.save({}, "out", memory=None)
relayout.transformers.save_pretrained(None, "out", scratch="/tmp")
relayout.Publisher("root", layout="whole")
relayout.load("model", 0, nmaes="*")
relayout.load("model", 0, verify="yes")
relayout.iter_load("model", 0, into={})
"""
RIGHT = """
relayout.convert("model", tp=2, plan=None, force=True)
relayout.plan_conversion("model", "out", align="16KiB", layout="whole", ranks=range(4))
relayout.save({}, "out", config={}, max_shard_size="5GB", tp=2, background=True)
relayout.transformers.save_pretrained(None, "out", dtype=None, layout="whole")
relayout.load("model", 0, device="cuda", names=["*"], into={}, memory="64MiB", cache="")
relayout.iter_load("model", rank=0, group=None, deltas="delta", trust=None)
relayout.Publisher("root", tp=2, max_part_nbytes="1GiB", plan="llama")
"""


@pytest.mark.parametrize("name", TAKEN)
def test_help_shows_each_option_with_its_default(name: str) -> None:
    function, options, parsed = TAKEN[name]
    shown, known = inspect.signature(function).parameters, inspect.signature(parsed).parameters
    taken = options.__optional_keys__
    assert taken
    assert {option: str(shown[option]) for option in taken} == {option: str(known[option]) for option in taken}
    assert not [one for one in shown.values() if one.kind is inspect.Parameter.VAR_KEYWORD]
    assert all(f"{option}: " in pydoc.plain(pydoc.render_doc(function)) for option in taken)


@pytest.mark.parametrize("name", TAKEN)
def test_an_unknown_option_is_refused_before_anything_else(name: str) -> None:
    what = re.escape(f"{name}() got an unexpected keyword argument 'tpp'")
    with pytest.raises(TypeError, match=f"^{what}"):
        TAKEN[name][0](*map(Unused, GIVEN[name]), tpp=2)


class Unused:
    """An argument that nothing may use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{self._name} was asked for {name}")


def test_mypy_finds_wrong_options_of_callers(tmp_path: Path) -> None:
    caller = tmp_path / "caller.py"
    caller.write_text(f"import relayout\n{RIGHT}{WRONG}")
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", caller]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    lines = caller.read_text().splitlines()
    found = [lines[int(line) - 1] for line in re.findall(r"caller\.py:(\d+): error", done.stdout)]
    assert found == WRONG.splitlines()[1:], done.stdout + done.stderr
