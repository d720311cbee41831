"""Programs as tests run them: `relayout` in this process, scripts and the programs of tools/ in one of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from support.patience import PATIENCE

_ROOT = Path(__file__).parents[2]
PYTHONPATH = os.pathsep.join(
    [str(_ROOT / "tools"), str(_ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
)
"""With which a child finds the tools and tests.support."""


@cache
def built_command() -> Any:
    """What typer makes of `relayout`'s functions whenever it is called, made once: most of what a refusal takes."""
    from typer.main import get_command

    from relayout.cli.app import app

    return get_command(app)


def run_tool(*words: str) -> subprocess.CompletedProcess[str]:
    """`tools/run WORDS` in this environment."""
    return subprocess.run(
        [sys.executable, "-m", *words],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def python(script: str, *args: str) -> str:
    """Standard output of a script in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", script, *args], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stdout
