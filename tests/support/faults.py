"""Faults of the C library's calls, injected by `faults.c` in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled `faults.c`."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler (cc)")
    path = tmp_path_factory.mktemp("shim") / "faults.so"
    source = Path(__file__).with_name("faults.c")
    subprocess.run(
        [compiler, "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(path), str(source), "-ldl"], check=True
    )
    return path


def environment(shim: Path | None, faults: Sequence[str] = (), log: Path | None = None) -> dict[str, str]:
    found = {**os.environ, "NO_COLOR": "1"}
    if shim is not None:
        found |= {"LD_PRELOAD": str(shim), "FAULTS": "\n".join(faults)}
    if log is not None:
        found["FAULTS_LOG"] = str(log)
    return found
