"""What CONTRIBUTING calls by file and name is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = [
    path
    for folder in ("relayout", "loader", "tests", "tools", "docs", ".github")
    for path in (ROOT / folder).rglob("*.*")
    if "__pycache__" not in path.parts and not path.is_relative_to(ROOT / "relayout" / "loader")
]
EXAMPLES = {"relayout/x/y.py", "tests/x/test_y.py", "loader/y.py", "tests/loader/test_y.py"}
EXAMPLES |= {"relayout/plans/builtin/NAME.toml"}


def statements(file: Path) -> set[int]:
    """The lines on which something begins that runs when it is called."""
    tree = ast.parse(file.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inside = (node for function in functions for node in ast.walk(function) if isinstance(node, ast.stmt))
    return {node.lineno for node in inside if not isinstance(node, ast.FunctionDef) and not is_text(node)}


def is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def test_files_and_names_are_there() -> None:
    text = (ROOT / "docs" / "CONTRIBUTING.md").read_text()
    called = re.findall(r"`([\w./]+\.(?:py|toml|ya?ml|sh|xz|md))(?::\s+(?:\w+\.)*(\w+))?`", text)
    assert len(called) > 100
    for line in re.findall(r"tools/test --coverage (\S+\.py:\d+)", text):
        file, _, number = line.partition(":")
        assert int(number) in statements(ROOT / file), line
    for file, name in called:
        found = [path for path in FILES if f"{path.as_posix()}".endswith(f"/{file}")]
        assert found or file in EXAMPLES, file
        defined = re.compile(rf"(class|def) {name}\b|^ *{name}\b *[:=]", re.MULTILINE)
        assert not name or any(defined.search(path.read_text()) for path in found), f"{file}: {name}"
