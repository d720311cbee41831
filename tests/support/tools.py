"""The programs of tools/, run in a process of their own, as `tools/run` does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.patience import PATIENCE

_ROOT = Path(__file__).parents[2]
PYTHONPATH = os.pathsep.join(
    [str(_ROOT / "tools"), str(_ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
)
"""With which a child finds the tools and tests.support."""


def run_tool(*words: str) -> subprocess.CompletedProcess[str]:
    """`tools/run WORDS` in this environment."""
    return subprocess.run(
        [sys.executable, "-m", *words],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
