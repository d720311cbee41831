"""A conversion in a process of its own that has done something, and takes its time with the rest."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.interruptions import finished_parts
from support.patience import PATIENCE
from support.prestarted import heed_all_signals

NUM_TENSORS = 48
NBYTES = NUM_TENSORS * 2**19
PARTIAL = ".big-tp1.relayout-partial"
_SLOWLY = """
import os, time
true_pwrite = os.pwrite
os.pwrite = lambda *given: time.sleep(0.03) or true_pwrite(*given)
from relayout.__main__ import main
main()
"""


@pytest.fixture
def big(tmp_path: Path) -> Path:
    """A folder with nothing in it but a model, `big`."""
    (tmp_path / "work" / "big").mkdir(parents=True)
    values = np.random.default_rng(0).integers(0, 256, (NUM_TENSORS, NBYTES // NUM_TENSORS), np.uint8)
    save_file({f"w.{n}": row for n, row in enumerate(values)}, tmp_path / "work" / "big" / "model.safetensors")
    return tmp_path / "work"


@contextmanager
def converting(
    work: Path, prepare: Callable[[], object] = heed_all_signals, stderr: int = subprocess.PIPE
) -> Iterator[subprocess.Popen[str]]:
    """A conversion of `big` that has finished a part; the rest takes a second and more."""
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            _SLOWLY,
            "convert",
            "big",
            "--tp=1",
            "--threads=1",
            "--memory=4MiB",
            "--max-part-size=4MiB",
        ],
        cwd=work,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
        env=os.environ | {"TERM": "xterm"},
        preexec_fn=prepare,
    ) as child:
        deadline = time.monotonic() + PATIENCE
        while not finished_parts(work / PARTIAL):
            assert child.poll() is None, "ended before it had begun"
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert not (work / "big-tp1").exists()
        yield child
