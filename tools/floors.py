"""Compares the coverage of each package with its floor, which is in tools/results/coverage.json.

    tools/test --coverage     # runs the tests, and notes the lines that they run
    tools/run floors          # prints each package, and exits with 1 if one is below its floor
    tools/run floors --raise  # raises floors to what was reached, rounded down

Coverage is the share of the statements in functions that a test runs. Imports do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import defaultdict
from pathlib import Path

from lines import NOTED, ROOT, statements

FLOORS = ROOT / "tools" / "results" / "coverage.json"


def package_of(file: Path) -> str:
    """Return the package of a module of the product, such as "storage"; a module of the top level is its own."""
    inside = file.relative_to(ROOT)
    return "loader" if inside.parts[0] == "loader" else inside.with_suffix("").parts[1]


def reached(noted: Path) -> dict[str, tuple[int, int]]:
    """Return the statements that tests ran, and all statements, of each package.

    Raises:
        SystemExit: nothing has been noted.
    """
    from coverage import CoverageData

    if not noted.exists():
        raise SystemExit(f"{noted}: no such file; `tools/test --coverage [TESTS]` makes it")
    data = CoverageData(str(noted))
    data.read()
    # A module of loader/ is also found by way of the link in relayout/.
    ran: dict[str, set[int]] = defaultdict(set)
    for name in data.measured_files():
        by_line = data.contexts_by_lineno(name)
        ran[os.path.realpath(name)] |= {line for line, contexts in by_line.items() if any(contexts)}
    counts: dict[str, tuple[int, int]] = {}
    for folder in (ROOT / "relayout", ROOT / "loader"):
        for file in sorted(folder.rglob("*.py")):
            if file.is_relative_to(ROOT / "relayout" / "loader"):
                continue
            all_lines = statements(file)
            done, total = counts.get(package_of(file), (0, 0))
            counts[package_of(file)] = (done + len(all_lines & ran[str(file)]), total + len(all_lines))
    return {package: count for package, count in counts.items() if count[1]}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="floors", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--raise", dest="is_raised", action="store_true", help="raise floors; none is lowered")
    parser.add_argument("--noted", type=Path, default=NOTED, help="default: %(default)s")
    arguments = parser.parse_args()
    floors: dict[str, int] = json.loads(FLOORS.read_text())
    below = []
    for package, (done, total) in sorted(reached(arguments.noted).items(), key=lambda one: one[1][0] / one[1][1]):
        share, floor = 100 * done / total, floors.get(package)
        print(f"{package:<14}{share:5.1f} %  floor {'none' if floor is None else f'{floor} %'}")
        if floor is not None and share < floor:
            below.append(package)
        if arguments.is_raised:
            floors[package] = max(int(share), floor or 0)
    if arguments.is_raised:
        FLOORS.write_text(json.dumps(floors, indent=1, sort_keys=True) + "\n")
    if below:
        print(f"below the floor: {', '.join(below)}")
    return 1 if below else 0


if __name__ == "__main__":
    sys.exit(main())
