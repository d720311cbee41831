"""Runs tests several times in random order on a busy machine, and prints those that failed in some of the runs.

    tools/run repeat                           # all tests, five times
    tools/run repeat --runs 20 tests/publish
    tools/run repeat --runs 1 --seed 7         # again the order that run 7 had

Needs pytest-randomly (the extra `nightly`). The load is two processes for each processor: they compute, and write and
flush a file of 4 MiB. A test that fails only here depends on the order of tests or on time, and is a bug of the test or
of the product.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
_LOAD = """
import os, sys
block = os.urandom(1 << 20)
while os.getppid() == int(sys.argv[2]):  # It ends with the process that started it.
    with open(sys.argv[1], "wb") as file:
        for _ in range(4):
            file.write(block)
        os.fsync(file.fileno())
    sum(range(2_000_000))
"""


@contextmanager
def load(folder: Path, count: int) -> Iterator[None]:
    """Keep the processors and the drive of a folder busy by `count` processes."""
    own = str(os.getpid())
    processes = [
        subprocess.Popen([sys.executable, "-c", _LOAD, str(folder / f"load-{number}"), own]) for number in range(count)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def run(seed: int, words: Sequence[str], limit: float, report: Path) -> list[str]:
    """Run the tests once in the order of a seed, and return those that failed.

    Args:
        limit: seconds after which the run is stopped.
        report: the file for pytest's report (JUnit XML); an older one is removed.

    Raises:
        SystemExit: pytest did not report, for example because it was stopped, or because pytest-randomly is missing.
    """
    report.unlink(missing_ok=True)
    options = [f"--randomly-seed={seed}", f"--junit-xml={report}", "-p", "no:cacheprovider"]
    try:
        code = subprocess.run([sys.executable, "-m", "pytest", *options, *words], timeout=limit).returncode
    except subprocess.TimeoutExpired:
        raise SystemExit(f"repeat: seed {seed}: not done after {limit:.0f} s") from None
    if code not in (0, 1) or not report.exists():
        raise SystemExit(f"repeat: seed {seed}: pytest ended with {code}")
    cases = ElementTree.parse(report).iter("testcase")
    failed = (one for one in cases if one.find("failure") is not None or one.find("error") is not None)
    return [f"{one.get('classname')}::{one.get('name')}" for one in failed]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="repeat", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first run; each next one is 1 larger")
    parser.add_argument("--limit", type=float, default=90, metavar="MINUTES", help="for each run; default: %(default)s")
    parser.add_argument("--load", type=int, default=2 * (os.cpu_count() or 1), metavar="N", help="processes of load")
    parser.add_argument("tests", nargs="*", help="arguments for pytest; default: all tests, by three workers")
    arguments = parser.parse_args()
    words = arguments.tests or ["--numprocesses", "3", "--dist", "loadgroup"]
    failed: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory(prefix="relayout-repeat-") as name, load(Path(name), arguments.load):
        for seed in range(arguments.seed, arguments.seed + arguments.runs):
            for test in run(seed, words, 60 * arguments.limit, Path(name) / "report.xml"):
                failed.setdefault(test, []).append(seed)
    for test, seeds in sorted(failed.items()):
        print(f"{test}: failed in {len(seeds)} of {arguments.runs} runs, seeds {', '.join(map(str, seeds))}")
    print(f"{arguments.runs} runs, {len(failed)} tests failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
