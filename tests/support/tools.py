"""The programs of tools/, run in a process of their own, as `tools/run` does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_tool(*words: str) -> subprocess.CompletedProcess[str]:
    """`tools/run WORDS` in this environment; at most a minute."""
    paths = [str(ROOT / "tools"), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-m", *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=60,
    )
