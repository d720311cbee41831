"""Files and names that the pages for contributors mention exist."""

from __future__ import annotations

import re
from pathlib import Path

import lines

ROOT = Path(__file__).parents[2]
FILES = [
    path
    for folder in ("relayout", "loader", "tests", "tools", "docs", ".github")
    for path in (ROOT / folder).rglob("*.*")
    if "__pycache__" not in path.parts and not path.is_relative_to(ROOT / "relayout" / "loader")
]
EXAMPLES = {"relayout/x/y.py", "tests/x/test_y.py", "loader/y.py", "tests/loader/test_y.py"}
EXAMPLES |= {"relayout/plans/builtin/NAME.toml"}


def test_files_and_names_are_there() -> None:
    docs = ROOT / "docs"
    pages = [docs / "CONTRIBUTING.md", docs / "RELEASING.md", *sorted((docs / "design").glob("*.md"))]
    text = "\n".join(page.read_text() for page in pages)
    called = re.findall(r"`([\w./]+\.(?:py|toml|ya?ml|sh|xz|md))(?::\s+(?:\w+\.)*(\w+))?`", text)
    assert len(called) > 100
    for one in re.findall(r"tools/test --coverage (\S+\.py:\d+)", text):
        file, _, number = one.partition(":")
        assert int(number) in lines.statements(ROOT / file), one
    for file, name in called:
        found = [path for path in FILES if f"{path.as_posix()}".endswith(f"/{file}")]
        assert found or file in EXAMPLES, file
        defined = re.compile(rf"(class|def) {name}\b|^ *{name}\b *[:=]", re.MULTILINE)
        assert not name or any(defined.search(path.read_text()) for path in found), f"{file}: {name}"
