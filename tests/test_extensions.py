"""relayout works without its extensions: each is deleted in turn, and what needs one says so."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from support.layers import EXTENSIONS
from support.tools import python

import relayout

PACKAGE = Path(relayout.__file__).parent

WITHOUT = """
import os, sys
from pathlib import Path
import numpy, rich.console, safetensors, torch, typer.testing  # Once, for all.
# An editable installation finds packages that are not in the folder.
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in str(finder)]
source, *folders = map(Path, sys.argv[1:])
def use(folder):
    sys.path[:0] = [str(folder)]
    import relayout
    from relayout.cli.app import app
    assert Path(relayout.__file__).is_relative_to(folder), relayout.__file__
    out = folder / "out"
    for arguments in (["--help"], ["convert", source, "-o", out, "--tp", "2"], ["verify", out]):
        done = typer.testing.CliRunner().invoke(app, list(map(str, arguments)))
        assert done.exit_code == 0, (arguments, done.output)
    loaded = [relayout.load(out, rank) for rank in range(2)]
    for rank, tensors in enumerate(loaded):
        assert all(torch.equal(tensors[name], one) for name, one in relayout.iter_load(out, rank))
    print(len(loaded[0]), *(hasattr(relayout, name) for name in ("save", "plan_bench", "report")), flush=True)
for folder in folders:
    if not (child := os.fork()):
        use(folder)
        os._exit(0)
    assert not os.waitpid(child, 0)[1], folder
"""


def test_the_core_works_without_each_extension(llama: Path, tmp_path: Path) -> None:
    """Its folder, and then those of all, are deleted from a copy of the package, which converts, verifies and loads."""
    cases = [*([one] for one in EXTENSIONS), list(EXTENSIONS)]
    for number, left_out in enumerate(cases):
        copy = tmp_path / str(number) / "relayout"
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "d3*"))
        for name in left_out:
            shutil.rmtree(copy / name)
    printed = python(WITHOUT, str(llama), *(str(tmp_path / str(number)) for number in range(len(cases)))).splitlines()
    assert len(printed) == len(cases)
    for line, left_out in zip(printed, cases, strict=True):
        count, *is_there = line.split()
        assert int(count) > 10
        assert is_there == [str(name not in left_out) for name in ("train", "benchmark", "html_report")]


def test_a_plan_of_vllm_says_what_is_missing(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "relayout.observe.observation", None)
    with pytest.raises(relayout.PlanError, match=r"plan: 'vllm': relayout\.observe is not installed"):
        relayout.plan_conversion(llama, tp=2, plan="vllm")
