"""Prints which tests run lines of the product: `tools/test --coverage FILE:LINE` or `FILE:FIRST-LAST`.

`tools/test --coverage` notes that before, in build/coverage, for all tests or for those that are named after it.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOTED = ROOT / "build" / "coverage" / "lines"


def tests_of(noted: Path, file: Path, lines: Iterable[int]) -> list[str] | None:
    """The tests that run any of the lines, by their names; None if nothing runs them, not even an import.

    Raises:
        SystemExit: nothing has been noted.
    """
    from coverage import CoverageData

    if not noted.exists():
        raise SystemExit(f"{noted}: no such file; `tools/test --coverage [TESTS]` makes it")
    data = CoverageData(str(noted))
    data.read()
    contexts = data.contexts_by_lineno(os.path.realpath(file))
    found = [contexts[line] for line in lines if line in contexts]
    # A context is a test with its case and phase, "tests/core/test_slices.py::test_x[a]|run", or empty.
    return (
        sorted({name.rpartition("|")[0].partition("[")[0] for names in found for name in names} - {""})
        if found
        else None
    )


def statements(file: Path) -> set[int]:
    """The lines of functions on which a statement begins."""
    tree = ast.parse(file.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inside = (node for function in functions for node in ast.walk(function) if isinstance(node, ast.stmt))
    return {
        node.lineno
        for node in inside
        if not isinstance(node, ast.FunctionDef)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="lines", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("lines", nargs="+", metavar="FILE:LINE", help="such as relayout/core/slices.py:120")
    code = 0
    for one in parser.parse_args().lines:
        match = re.fullmatch(r"(.*\.py):(\d+)(?:-(\d+))?", one)
        if match is None:
            parser.error(f"{one!r}: expected FILE:LINE or FILE:FIRST-LAST")
        if not Path(match[1]).exists():
            parser.error(f"{match[1]}: no such file")
        first = int(match[2])
        lines = range(first, int(match[3] or first) + 1)
        tests = tests_of(NOTED, Path(match[1]), lines)
        if tests:
            print(f"{one}: {len(tests)} tests", *tests, sep="\n    ")
        elif tests is None and not statements(Path(match[1])).intersection(lines):
            print(f"{one}: no statement of a function begins there")
            code = 1
        else:
            print(f"{one}: " + ("run by none of the noted tests" if tests is None else "run by imports alone"))
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
