"""What imports what: the offline half lives without torch, the loader without the planner, no import is circular."""

from __future__ import annotations

import ast
import graphlib
import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.layers import EVERYWHERE, EXCEPTIONS, EXTENSIONS, LAYERS
from support.tools import python

import relayout

PACKAGE = Path(relayout.__file__).parent
ROOT = PACKAGE.parent
WITH_TORCH = {
    "relayout.core.aten",
    "relayout.engines.global_tensor",
    "relayout.live.recording",
    "relayout.live.staging",
    "relayout.engines.unwritten",
    "relayout.observe.sglang_stubs",
    "relayout.observe.stubs",
    "relayout.observe.tracing",
}
"""What defines a kind of tensor, or uses it throughout, and so needs torch at import time."""

NOT_FOR_LOADS = {
    "relayout.checkpoint.source",
    "relayout.format.source_record",
    "relayout.loader.backends.cuda",
    "relayout.loader.backends.cufile",
    "relayout.loader.diagnose",
    "relayout.loader.group.plan",
    "relayout.loader.group.collectives",
    "relayout.loader.group.sharing",
    "relayout.loader.in_place",
    "relayout.cache.copies",
    "relayout.cache.folder",
    "relayout.loader.sources.reshard",
    "relayout.loader.stream",
    "relayout.loader.view",
    "relayout.storage.reading",
    "relayout.storage.cloud.store",
    "relayout.publish.folder",
    "rich",
    "safetensors",
    "tomllib",
}
"""What a load of a rank as stored to host memory does not import: a rank loads in as little as 0.1 s."""

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


def module_files() -> dict[str, Path]:
    """Every module of the two halves, by its full name, and its file."""
    files = {}
    for package, folder in (("relayout", PACKAGE), ("relayout.loader", ROOT / "loader")):
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            if parts[0] != "loader":  # A link, seen from the package.
                files[".".join((package, *parts)).removesuffix(".__init__")] = path
    return files


FILES = module_files()
MODULES = sorted(FILES)
IMPORTABLE = [name for name in MODULES if not name.endswith("__main__") and name not in WITH_TORCH]
ONLINE = (
    "relayout.loader",
    "relayout.engines",
    "relayout.train",
    "relayout.testing.backends",
)
OFFLINE = [name for name in IMPORTABLE if not name.startswith(ONLINE)]


def statements(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """All import statements below a node, also those that only type checkers see."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        else:
            yield from statements(child)


def imports_of(name: str) -> list[Import]:
    """What a module imports, by full name: `from relayout import conversion` is about relayout.conversion."""
    found = []
    for statement in statements(ast.parse(FILES[name].read_text("utf-8"))):
        if isinstance(statement, ast.Import):
            targets = [alias.name for alias in statement.names]
        else:
            assert statement.level == 0, f"{name}: a relative import"
            assert statement.module is not None
            submodules = [f"{statement.module}.{alias.name}" for alias in statement.names]
            targets = [module if module in FILES else statement.module for module in submodules]
        found += [Import(name, target, statement.lineno) for target in targets]
    return found


IMPORTS = [one for name in MODULES for one in imports_of(name)]


def loaded_after(script: str, *args: str) -> set[str]:
    """The modules that are in memory after a script, whose own output is not looked at."""
    return set(python(f"{script}\nimport sys\nprint('\\n', *sys.modules)", *args).rpartition("\n ")[2].split())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint; `out` beside it is its conversion."""
    (tmp_path / "model").mkdir()
    save_file({"w": np.arange(1, 9, dtype=np.uint8)}, tmp_path / "model" / "model.safetensors")
    relayout.convert(tmp_path / "model", tmp_path / "out")
    return tmp_path / "model"


def test_importing_the_package_and_help_load_nothing_heavy() -> None:
    script = """
import sys, relayout.cli.app
sys.argv = ["relayout", "--help"]
try: relayout.cli.app.main()
except SystemExit as end: assert not end.code
"""
    loaded = loaded_after(script)
    assert {"relayout", "relayout.cli.app"} <= loaded
    assert not loaded & {"torch", "numpy", "safetensors", "blake3", "xxhash", "zstandard", "relayout.loader"}


def test_no_module_needs_torch_at_import_time_and_the_offline_half_never_loads_the_loader() -> None:
    script = """
import importlib, json, sys
for names in sys.argv[1:]:
    for name in json.loads(names):
        importlib.import_module(name)
    print(*sys.modules)
"""
    offline, all_of_it = map(str.split, python(script, json.dumps(OFFLINE), json.dumps(IMPORTABLE)).splitlines())
    assert set(OFFLINE) <= set(offline)
    assert not {name for name in offline if name.startswith("relayout.loader")}
    assert set(IMPORTABLE) <= set(all_of_it)
    assert "torch" not in all_of_it


def test_an_engine_finds_its_plugins_without_torch_and_without_the_loader() -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    modules = [value.partition(":")[0] for group in points.values() for value in group.values()]
    assert modules
    loaded = loaded_after(IMPORT_ALL, json.dumps(modules))
    assert set(modules) <= loaded
    assert not loaded & {"torch", "numpy", "safetensors", "rich", "relayout.loader", "relayout.plans"}


def test_the_command_waits_for_no_module_that_only_its_work_needs() -> None:
    loaded = loaded_after(IMPORT_ALL, json.dumps(["relayout.cli.app"]))
    assert "relayout.cli.writing" in loaded
    assert not loaded & {"torch", "numpy", "ctypes", "rich", "relayout.storage.system", "relayout.core.extents"}


def test_a_load_waits_only_for_modules_that_it_needs(source: Path) -> None:
    """The planner, for plain checkpoints only."""
    assert {name for name in NOT_FOR_LOADS if name.startswith("relayout")} <= set(MODULES)
    script = """
import sys, relayout
converted, plain = sys.argv[1:]
for names in (None, ["w"]):
    relayout.load(converted, 0, names=names)
print(*sys.modules)
relayout.load(plain, 0, tp=1)
print(*sys.modules)
"""
    lines = python(script, str(source.with_name("out")), str(source)).splitlines()
    converted, plain = (set(line.split()) for line in lines)
    assert {"torch", "relayout.loader.api", "relayout.loader.backends.host"} <= converted
    assert not NOT_FOR_LOADS & converted
    assert not {name for name in converted if name.startswith(("relayout.plans", "relayout.conversion"))}
    assert {"relayout.checkpoint.source", "relayout.plans.planner", "relayout.plans.family"} <= plain


def test_the_offline_half_works_where_torch_cannot_be_imported(source: Path, tmp_path: Path) -> None:
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
    printed = python(script, json.dumps(IMPORTABLE), str(source), str(tmp_path / "again")).splitlines()
    assert len(printed) == 2
    assert "torch" in printed[0]
    assert printed[1] == "True 1"
    stored = "model-rank-0-part-0.safetensors"
    assert (tmp_path / "again" / stored).read_bytes() == (tmp_path / "out" / stored).read_bytes()


def test_imports_go_one_way() -> None:
    graph: dict[str, set[str]] = {name: set() for name in MODULES}
    for one in IMPORTS:
        if one.target in FILES:
            graph[one.source].add(one.target)
    assert sum(map(len, graph.values())) > 50
    order = list(graphlib.TopologicalSorter(graph).static_order())  # Raises CycleError.
    assert (
        order.index("relayout.errors")
        < order.index("relayout.checkpoint.source")
        < order.index("relayout.conversion.run")
    )


def package_of(name: str) -> str:
    """The package of a module, below relayout; "" for relayout itself and its entry point."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] != "__main__" else ""


def test_each_package_imports_only_those_below_it() -> None:
    seen = set()
    for one in IMPORTS:
        package, imported = package_of(one.source), package_of(one.target)
        if not one.target.startswith("relayout") or "" in (package, imported) or package == imported:
            continue
        seen.add((package, imported))
        allowed = {*LAYERS[package], *EXCEPTIONS.get(one.source.removeprefix("relayout."), ())}
        allowed |= {*EVERYWHERE} if package not in EVERYWHERE else {*EVERYWHERE[: EVERYWHERE.index(package)]}
        assert imported in allowed, f"{one.source}, line {one.line}: {one.target}"
    assert ("conversion", "plans") in seen
    assert ("loader", "storage") in seen


def test_no_other_package_imports_an_extension() -> None:
    """Type checkers alone see some in `relayout` itself, which has the public names."""
    others = [one for one in IMPORTS if package_of(one.source) not in ("", package_of(one.target))]
    assert len(others) > 100
    assert [one for one in others if package_of(one.target) in EXTENSIONS] == []


def test_the_name_of_a_class_is_given_once() -> None:
    homes: dict[str, list[str]] = {}
    for name, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(name)
    assert len(homes) > 200
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


def test_a_package_says_what_lives_there() -> None:
    packages = [name for name, path in FILES.items() if path.name == "__init__.py"]
    assert {"relayout.core", "relayout.format", "relayout.storage", "relayout.loader.backends"} <= set(packages)
    for package in packages:
        assert ast.get_docstring(ast.parse(FILES[package].read_text("utf-8"))), package


def test_the_published_package_has_all_packages() -> None:
    published = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(published) == sorted(name for name, path in FILES.items() if path.name == "__init__.py")
