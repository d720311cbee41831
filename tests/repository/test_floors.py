"""Coverage by package, and its floors, which only rise."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import floors
import pytest
from lines import statements

ROOT = Path(__file__).parents[2]
VIEW = ROOT / "loader" / "view.py"


@pytest.fixture
def noted(tmp_path: Path) -> Path:
    """Notes of a run that ran every second statement of one module by a test, and the others by imports."""
    coverage = pytest.importorskip("coverage")
    data = coverage.CoverageData(str(tmp_path / "noted"))
    found = sorted(statements(VIEW))
    for context, ran in (("tests/a.py::test_a|run", found[::2]), ("", found)):
        data.set_context(context)
        data.add_lines({str(ROOT / "relayout" / "loader" / "view.py"): set(ran)})
    data.write()
    return tmp_path / "noted"


def test_only_statements_that_tests_run_count(noted: Path) -> None:
    counts = floors.reached(noted)
    done, total = counts["loader"]
    assert done == (len(statements(VIEW)) + 1) // 2
    assert total == sum(len(statements(file)) for file in (ROOT / "loader").rglob("*.py"))
    assert counts["storage"][0] == 0
    with pytest.raises(SystemExit, match="tools/test --coverage"):
        floors.reached(noted.parent / "nothing")


def test_a_package_below_its_floor_is_an_error_and_no_floor_falls(
    noted: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = noted.parent / "floors.json"
    monkeypatch.setattr(floors, "FLOORS", file)
    file.write_text('{"storage": 50}')
    monkeypatch.setattr(sys, "argv", ["floors", "--noted", str(noted), "--raise"])
    assert floors.main() == 1
    assert "below the floor: storage" in capsys.readouterr().out
    kept = json.loads(file.read_text())
    assert kept["storage"] == 50
    done, total = floors.reached(noted)["loader"]
    assert kept["loader"] == int(100 * done / total)


def test_floors_are_those_of_packages() -> None:
    packages = {floors.package_of(file) for file in (ROOT / "relayout").rglob("*.py") if "loader" not in file.parts}
    kept = json.loads(floors.FLOORS.read_text())
    assert kept.keys() <= packages | {"loader"}
    assert all(0 < floor <= 100 for floor in kept.values())
