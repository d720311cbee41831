"""What imports what: the offline half lives without torch, the loader without the planner, no import is circular."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import relayout

PACKAGE = Path(relayout.__file__).parent
ROOT = PACKAGE.parent
SHARED = {
    f"relayout.{name}"
    for name in (
        *("errors", "extents", "dtypes", "index", "slicing", "header", "members"),
        *("fields", "sidecar", "ranktable", "folder", "files", "openfiles", "strided"),
        *("workers", "forks", "integers"),
    )
}
"""The small modules of the offline half that the loader may use."""

MAX_LINES = 400
IMPORT_ALL = """
import importlib, json, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
"""


@dataclass(frozen=True, slots=True)
class Import:
    """One module imported by another."""

    source: str
    target: str
    line: int
    at_import_time: bool
    """Not inside a function."""


def module_files() -> dict[str, Path]:
    """Every module of the two halves, by its full name, and its file."""
    files = {f"relayout.{path.stem}": path for path in PACKAGE.glob("*.py")}
    files |= {f"relayout.loader.{path.stem}": path for path in (ROOT / "loader").glob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in files.items()}


FILES = module_files()
MODULES = sorted(FILES)
IMPORTABLE = [name for name in MODULES if not name.endswith("__main__")]
OFFLINE = [name for name in IMPORTABLE if not name.startswith("relayout.loader")]


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def statements(node: ast.AST, at_import_time: bool = True) -> Iterator[tuple[ast.AST, bool]]:
    """All import statements below a node that are ever carried out, and whether at import time."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, at_import_time
        elif is_type_checking(child):
            assert isinstance(child, ast.If)
            for alternative in child.orelse:
                yield from statements(ast.Module([alternative], []), at_import_time)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from statements(child, at_import_time and not inside)


def imports_of(name: str) -> list[Import]:
    """What a module imports, by full name: `from relayout import conversion` is about relayout.conversion."""
    found = []
    for statement, at_import_time in statements(ast.parse(FILES[name].read_text("utf-8"))):
        if isinstance(statement, ast.Import):
            targets = [alias.name for alias in statement.names]
        else:
            assert isinstance(statement, ast.ImportFrom)
            assert statement.level == 0, f"{name}: a relative import"
            assert statement.module is not None
            submodules = [f"{statement.module}.{alias.name}" for alias in statement.names]
            targets = [module if module in FILES else statement.module for module in submodules]
        found += [Import(name, target, statement.lineno, at_import_time) for target in targets]
    return found


IMPORTS = [one for name in MODULES for one in imports_of(name)]


def python(script: str, *args: str) -> str:
    """Standard output of a script in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", script, *args], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_after(script: str, *args: str) -> set[str]:
    """The modules that are in memory after a script, whose own output is not looked at."""
    return set(python(f"{script}\nimport sys\nprint('\\n', *sys.modules)", *args).rpartition("\n ")[2].split())


def as_json(names: list[str]) -> str:
    return str(names).replace("'", '"')


def test_the_graph_is_not_empty() -> None:
    assert {"relayout", "relayout.cli", "relayout.catalogue", "relayout.loader", "relayout.loader.api"} <= set(MODULES)
    assert len(MODULES) > 25
    edges = {(one.source, one.target, one.at_import_time) for one in IMPORTS}
    assert ("relayout.staging", "relayout.errors", True) in edges
    assert ("relayout.cli", "relayout.conversion", False) in edges
    assert ("relayout", "relayout.loader", True) not in edges, "TYPE_CHECKING is not seen"


def test_importing_the_package_and_the_command_line_loads_nothing_heavy() -> None:
    loaded = loaded_after("import relayout, relayout.cli")
    assert {"relayout", "relayout.cli"} <= loaded
    assert not loaded & {"torch", "numpy", "safetensors", "xxhash", "zstandard", "relayout.loader"}


def test_help_loads_nothing_heavy() -> None:
    script = """
import sys, relayout.cli
sys.argv = ["relayout", "--help"]
try: relayout.cli.main()
except SystemExit as end: assert not end.code
"""
    loaded = loaded_after(script)
    assert "relayout.cli" in loaded
    assert not loaded & {"torch", "numpy", "safetensors", "xxhash", "zstandard", "relayout.loader"}


def test_no_module_needs_torch_at_import_time() -> None:
    loaded = loaded_after(IMPORT_ALL, as_json(IMPORTABLE))
    assert set(IMPORTABLE) <= loaded
    assert "torch" not in loaded


def test_load_needs_torch_always_and_the_planner_for_plain_checkpoints_only(tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    save_file({"w": np.arange(1, 9, dtype=np.uint8)}, source / "model.safetensors")
    relayout.convert(source, tmp_path / "out")
    script = """
import sys, relayout
for path in sys.argv[1:]:
    before = set(sys.modules)
    relayout.load(path, 0, tp=1)
    print(*(set(sys.modules) - before))
"""
    converted, plain = (set(line.split()) for line in python(script, str(tmp_path / "out"), str(source)).splitlines())
    planner = {"relayout.catalogue", "relayout.plan", "relayout.families"}
    assert {"torch", "relayout.loader"} <= converted
    assert not planner & converted
    assert planner <= plain


def test_the_offline_half_never_loads_the_loader() -> None:
    loaded = loaded_after(IMPORT_ALL, as_json(OFFLINE))
    assert set(OFFLINE) <= loaded
    assert not {name for name in loaded if name.startswith("relayout.loader")}


def test_the_offline_half_works_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    weights: dict[str, np.ndarray[Any, Any]] = {
        "a": np.arange(1, 2049, dtype=np.uint16).reshape(2, 1024),
        "b": np.arange(5, 12, dtype=np.uint8),
    }
    save_file(weights, source / "model.safetensors")
    script = f"""
import sys
sys.modules["torch"] = None
{IMPORT_ALL.strip()}
import relayout
try: relayout.load(sys.argv[2], 0, tp=1)
except ImportError as error: print(error)
relayout.convert(sys.argv[2], sys.argv[3])
print(relayout.verify(sys.argv[3], source=sys.argv[2]).ok, relayout.inspect(sys.argv[3]).num_tensors)
"""
    printed = python(script, as_json(IMPORTABLE), str(source), str(tmp_path / "out")).splitlines()
    assert len(printed) == 2
    assert "torch" in printed[0]
    assert printed[1] == "True 2"
    stored = load_file(tmp_path / "out" / "model-rank-0-part-0.safetensors")
    assert stored.keys() == weights.keys()
    for name, array in weights.items():
        np.testing.assert_array_equal(stored[name], array)


def test_imports_go_one_way() -> None:
    graph: dict[str, set[str]] = {name: set() for name in MODULES}
    for one in IMPORTS:
        if one.target in FILES:
            graph[one.source].add(one.target)
    assert sum(map(len, graph.values())) > 50
    order = list(graphlib.TopologicalSorter(graph).static_order())  # Raises CycleError.
    assert order.index("relayout.errors") < order.index("relayout.catalogue") < order.index("relayout.conversion")


def test_the_offline_half_does_not_import_the_loader_at_import_time() -> None:
    wrong = [one for one in IMPORTS if one.source in OFFLINE and one.target.startswith("relayout.loader")]
    assert [one for one in wrong if one.at_import_time] == []


PLANNING = {f"relayout.loader.{name}" for name in ("plain", "regrouped", "whole")}
"""What slices plain checkpoints, or joins the slices of several ranks, needs the planner for it."""


@pytest.mark.parametrize("name", sorted(set(MODULES) - set(OFFLINE) - {"relayout.__main__"} - PLANNING))
def test_the_loader_shares_only_small_modules_with_the_offline_half(name: str) -> None:
    wrong = [
        one
        for one in IMPORTS
        if one.source == name
        and one.at_import_time
        and one.target.split(".")[0] == "relayout"
        and not one.target.startswith("relayout.loader")
        and one.target not in SHARED
    ]
    assert wrong == []


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_short(name: str) -> None:
    num_lines = len(FILES[name].read_text("utf-8").splitlines())
    assert num_lines <= MAX_LINES
