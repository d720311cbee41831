"""Runs safetensors' own Python tests with `relayout.safe_open` in the place of `safetensors.safe_open`."""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Generator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import safetensors

import relayout

TESTS = Path("bindings/python/tests")
OTHER_FRAMEWORKS = ("flax", "tf", "paddle", "mlx")
"""Frameworks that relayout has no tensors of, each with a file of tests."""
DIFFERENT = {
    "test_simple.py::ErrorsTestCase::test_file_not_found": (
        "it is a FileNotFoundError, with a text of relayout's own",
        r"^'notafile: no such file or folder'",
    ),
    "test_simple.py::ReadmeTestCase::test_numpy_slice": (
        "what is beyond the end of an axis is an IndexError, as torch and numpy have it; safetensors itself says so for"
        " 'pt', and has an error of its own for 'np'",
        r"^index -6 is out of bounds for dimension 1 with size 5$",
    ),
}
"""Tests that fail for a reason: what is different in relayout, and the message with which they end, as a pattern."""
PATCHED = ("safetensors", "safetensors.torch", "safetensors.numpy")


def main() -> int:
    parser = argparse.ArgumentParser(prog="dropin", description=__doc__)
    parser.add_argument("checkout", type=Path, help="a checkout of github.com/huggingface/safetensors")
    tests = parser.parse_args().checkout.resolve() / TESTS
    if not tests.is_dir():
        parser.error(f"no folder {tests}")
    ran = DropIn()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "tests", "data").mkdir(parents=True)  # The tests write there, below the current folder.
        os.chdir(folder)
        options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tests), "--tb", "short"]
        ignored = [f"--ignore={tests / f'test_{framework}_comparison.py'}" for framework in OTHER_FRAMEWORKS]
        pytest.main([*options, *ignored, str(tests)], plugins=[ran])
        os.chdir(tests)
    return ran.summary()


_OWN_ERROR = safetensors.SafetensorError


class AnyError(type):
    """Type of an exception of which the errors of relayout count as subclasses, for `assertRaises`."""

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, (_OWN_ERROR, relayout.RelayoutError))


class DropIn:
    """A plugin of pytest that puts relayout in place, and notes how each test ends."""

    def __init__(self) -> None:
        self._running = ""
        self._opening: set[str] = set()
        """Tests that have called `safe_open`."""
        self._ends: dict[str, str] = {}
        """How each test ended."""
        self._reasons: list[str] = []
        for name in PATCHED:
            vars(import_module(name))["safe_open"] = self._open
        vars(safetensors)["SafetensorError"] = AnyError("SafetensorError", (Exception,), {})

    def _open(self, *given: Any, **options: Any) -> relayout.CheckpointView:
        self._opening.add(self._running)
        return relayout.safe_open(*given, **options)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        report = yield
        if report.when == "call" or report.outcome != "passed":
            self._ends[item.nodeid] = report.outcome
        if report.outcome == "failed" and item.nodeid in DIFFERENT:
            reason, message = DIFFERENT[item.nodeid]
            if re.search(message, str(call.excinfo and call.excinfo.value)):
                self._ends[item.nodeid] = report.outcome = "different"
                self._reasons.append(f"different: {item.nodeid}: {reason}")
        return report

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running = nodeid

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        return ("different", "d", "DIFFERENT") if report.outcome == "different" else None

    def summary(self) -> int:
        """Print what was found, and return the exit code."""
        opening = Counter(end for name, end in self._ends.items() if name in self._opening)
        stale = [name for name in DIFFERENT if self._ends.get(name) == "passed"]
        lines = [*self._reasons, *(f"not different any more: {name}" for name in stale)]
        ends = ", ".join(f"{count} {end}" for end, count in sorted(opening.items()))
        lines += [
            f"not run: the tests of {', '.join(OTHER_FRAMEWORKS)}: relayout has tensors of torch, and numpy arrays"
        ]
        lines += [f"safetensors {safetensors.__version__}: {opening.total()} tests call safe_open: {ends}"]
        print(*lines, sep="\n")
        return 1 if stale or "failed" in self._ends.values() or not opening["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
