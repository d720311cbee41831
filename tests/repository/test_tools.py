"""Every tool starts, and no test but those of tools depends on one."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import lines
import pytest
from support.patience import PATIENCE
from support.tools import run_tool

ROOT = Path(__file__).parents[2]
TOOLS = {path.stem for path in (ROOT / "tools").glob("*.py")} | {
    path.parent.name for path in (ROOT / "tools").glob("*/__main__.py")
}
WITHOUT_HELP = {"documents", "fuzzing"}
"""One writes what other tests compare; the other is a part of `fuzz`."""
TESTS_OF_TOOLS = ("repository/", "format/test_fuzz.py", "format/test_vectors.py")
TESTS_OF_TOOLS += ("benchmark/test_loaders.py", "benchmark/test_clients.py", "benchmark/test_budget.py")
TESTS_OF_TOOLS += ("cli/test_fullsize.py",)


@pytest.mark.documents
@pytest.mark.parametrize("tool", sorted(TOOLS - WITHOUT_HELP))
def test_a_tool_says_how_it_is_used(tool: str) -> None:
    done = run_tool(tool, "--help")
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()


@pytest.mark.parametrize("tool", ["bench", "gpu"])
def test_each_module_of_a_tool_can_be_imported(tool: str) -> None:
    for path in (ROOT / "tools" / tool).glob("[a-z]*.py"):  # Some are imported by a step of the work only.
        importlib.import_module(f"{tool}.{path.stem}")


def test_tools_run_names_every_tool() -> None:
    done = subprocess.run([ROOT / "tools" / "run"], capture_output=True, text=True, timeout=PATIENCE)
    listed = dict(re.findall(r"^(\w+) +([A-Z`].{20,})$", done.stderr, re.MULTILINE))
    assert listed.keys() == TOOLS - {"fuzzing"}


@pytest.mark.parametrize("arguments", [[], ["nosuch"], ["--help"], ["bench demo"]])
def test_tools_run_says_what_there_is(arguments: list[str]) -> None:
    done = subprocess.run([ROOT / "tools" / "run", *arguments], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: tools/run TOOL")


def test_tools_test_says_how_it_is_used_without_an_environment(tmp_path: Path) -> None:
    """A copy has none, and makes none."""
    shutil.copytree(ROOT / "tools", tmp_path / "tools", ignore=shutil.ignore_patterns("*.py", "results"))
    for tool, option, code in (("test", "--help", 0), ("test", "-h", 0), ("run", "--help", 2)):
        done = subprocess.run([tmp_path / "tools" / tool, option], capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == code
        assert (done.stdout or done.stderr).startswith(f"usage: tools/{tool}")
    assert not (tmp_path / ".venv").exists()


SKIPPING = """
import pytest

@pytest.mark.parametrize("number", range(5))
def test_one(number, tmp_path):
    pytest.skip(f"no drive in {tmp_path}" if number else "no network")
"""


def test_skipped_tests_are_summed_up_by_reason(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_some.py").write_text(SKIPPING)
    done = run_tool(
        "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tmp_path), str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    _, _, summary = done.stdout.partition(" 5 skipped, by reason ")
    assert summary.splitlines()[1:3] == ["    4 no drive in PATH", "    1 no network"]


def skips(file: Path) -> list[ast.Call]:
    """The calls that skip tests of a file: pytest.skip, pytest.mark.skip, pytest.mark.skipif."""
    calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    return [one for one in calls if re.fullmatch(r"pytest\.(mark\.)?skip(if)?", ast.unparse(one.func))]


def has_reason(call: ast.Call) -> bool:
    """Whether a call gives a reason; an empty or a very short text is none."""
    is_condition = ast.unparse(call.func).endswith("skipif")
    given = [one.value for one in call.keywords if one.arg == "reason"] or call.args[1 if is_condition else 0 :]
    return bool(given) and not (isinstance(given[0], ast.Constant) and len(str(given[0].value)) < 8)


def test_each_skip_says_its_reason() -> None:
    calls = {(file, call.lineno): call for file in (ROOT / "tests").rglob("*.py") for call in skips(file)}
    assert [place for place, call in calls.items() if not has_reason(call)] == []
    assert len(calls) > 50


@pytest.mark.parametrize(
    ("source", "is_right"),
    [
        ("pytest.skip('no network here')", True),
        ("pytest.skip(why)", True),
        ("pytest.skip(reason='no network here')", True),
        ("pytest.mark.skipif(True, reason='no network here')", True),
        ("pytest.skip()", False),
        ("pytest.skip('')", False),
        ("pytest.mark.skip()", False),
        ("pytest.mark.skipif(IS_SLOW)", False),
        ("pytest.mark.skipif(IS_SLOW, reason='slow')", False),
    ],
)
def test_a_skip_without_a_reason_is_found(source: str, is_right: bool, tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(f"{source}\n")
    [call] = skips(tmp_path / "test_some.py")
    assert has_reason(call) == is_right


OF_SAFETENSORS = """
import unittest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

class TestCase(unittest.TestCase):
    def test_right(self):
        save_file({"a": torch.arange(6.0)}, "./tests/data/a.safetensors")
        with safe_open("./tests/data/a.safetensors", "pt") as opened:
            self.assertTrue(type(opened).__module__.startswith("relayout."))
        with self.assertRaises(SafetensorError):
            opened.keys()
        self.assertEqual(load_file("./tests/data/a.safetensors")["a"][1:3].tolist(), [1, 2])

    def test_of_something_else(self):
        pass
"""
WRONG = """
    def test_wrong(self):
        safe_open("./nothing", "pt")
"""


@pytest.mark.documents
def test_the_suite_of_safetensors_runs_on_our_safe_open(tmp_path: Path) -> None:
    """On a suite of ours: the true one is not here."""
    tests = tmp_path / "bindings" / "python" / "tests"
    tests.mkdir(parents=True)
    (tests / "test_one.py").write_text(OF_SAFETENSORS)
    done = run_tool("dropin", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 tests call safe_open: 1 passed" in done.stdout
    (tests / "test_one.py").write_text(OF_SAFETENSORS + WRONG)
    done = run_tool("dropin", str(tmp_path))
    assert done.returncode == 1
    assert "2 tests call safe_open: 1 failed, 1 passed" in done.stdout
    assert "nothing: no such file or folder" in done.stdout


def test_only_tests_of_tools_import_tools() -> None:
    imports = re.compile(r"^ *(?:from|import) (\w+)", re.MULTILINE)
    importing = [
        name
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if set(imports.findall(path.read_text())) & TOOLS
        and not (name := path.relative_to(ROOT / "tests").as_posix()).startswith(TESTS_OF_TOOLS)
    ]
    assert importing == []
    assert {"bench", "engines", "gpu", "vectors"} <= TOOLS


def test_the_tests_of_a_line_are_those_that_were_noted(tmp_path: Path) -> None:
    """A module of loader/ is the same by way of the link in relayout/."""
    coverage = pytest.importorskip("coverage")
    data = coverage.CoverageData(str(tmp_path / "noted"))
    pace = str(ROOT / "loader" / "requests.py")
    for context, line in (("", 1), ("tests/a.py::test_a[x|y]|run", 40), ("tests/a.py::test_a[x|y]|setup", 40)):
        data.set_context(context)
        data.add_lines({pace: {line}})
    data.write()
    linked = ROOT / "relayout" / "loader" / "requests.py"
    assert lines.tests_of(tmp_path / "noted", linked, range(30, 50)) == ["tests/a.py::test_a"]
    assert lines.tests_of(tmp_path / "noted", linked, [1]) == []
    assert lines.tests_of(tmp_path / "noted", linked, [2]) is None
    with pytest.raises(SystemExit, match="tools/test --coverage"):
        lines.tests_of(tmp_path / "nothing", linked, [1])


FAKE_PYTHON = """#!/bin/sh
case "$1 $2" in
    "-m venv") mkdir -p "$3/bin"; printf 'echo pip >>"%s/../calls"' "$3" >"$3/bin/pip"; chmod +x "$3/bin/pip" ;;
    *) exec {python} "$@" ;;
esac
"""


@pytest.fixture
def make_environment(tmp_path: Path) -> Callable[[], subprocess.CompletedProcess[str]]:
    """Makes the environment of a checkout with a stub for venv and pip, which notes its calls in a file."""
    (tmp_path / "tools").mkdir()
    for name in ("pyproject.toml", "tools/environment"):
        shutil.copy(ROOT / name, tmp_path / name)
    fake = tmp_path / "python"
    fake.write_text(FAKE_PYTHON.replace("{python}", sys.executable))
    fake.chmod(0o755)
    source = ["bash", "-euc", f"source {tmp_path}/tools/environment"]
    env = {**os.environ, "PYTHON": str(fake)}
    return lambda: subprocess.run(source, env=env, capture_output=True, text=True, timeout=PATIENCE)


def test_the_environment_is_made_again_only_when_what_it_installs_has_changed(
    make_environment: Callable[[], subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    project, calls = tmp_path / "pyproject.toml", tmp_path / "calls"
    assert make_environment().returncode == 0
    (tmp_path / ".venv" / "old").touch()
    first = calls.read_text()
    project.write_text("# A comment.\n" + project.read_text())
    assert make_environment().returncode == 0
    assert (calls.read_text(), (tmp_path / ".venv" / "old").exists()) == (first, True)
    project.write_text(project.read_text().replace("\ndependencies = [", "\ndependencies = ['more',", 1))
    assert make_environment().returncode == 0
    assert (calls.read_text(), (tmp_path / ".venv" / "old").exists()) == (2 * first, False)


def test_an_environment_of_somebody_else_is_not_erased(
    make_environment: Callable[[], subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    mine = tmp_path / ".venv" / "mine"
    mine.parent.mkdir()
    mine.touch()
    done = make_environment()
    assert (done.returncode, mine.exists()) == (1, True)
    assert ".venv was not made by tools/environment, which erases only what it made: move or delete it" in done.stderr
    (mine.parent / "relayout-stamp").write_text("being made")  # By an attempt that was interrupted.
    assert (make_environment().returncode, mine.exists()) == (0, False)
