"""Every tool starts, and no test but those of tools depends on one."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from support.tools import run_tool

ROOT = Path(__file__).parents[2]
TOOLS = {path.stem for path in (ROOT / "tools").glob("*.py")} | {
    path.parent.name for path in (ROOT / "tools").glob("*/__main__.py")
}
WITHOUT_HELP = {"demo", "documents", "fuzzing"}
"""The first runs for 20 s; one writes what other tests compare; the last is a part of `fuzz`."""
TESTS_OF_TOOLS = ("repository/", "format/test_fuzz.py", "format/test_vectors.py")
TESTS_OF_TOOLS += ("benchmark/test_bench.py", "cli/test_fullsize.py")


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
    [listed] = re.findall(r'echo "(bench .*)" >&2', (ROOT / "tools" / "run").read_text())
    assert set(listed.split()) == TOOLS - {"fuzzing"}


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
