"""Many loads: descriptors, threads, mappings and pinned memory are as many as before, whatever came of each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import faulty
from support.loader_fixtures import MIB
from support.patience import PATIENCE
from support.tools import PYTHONPATH

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="takes Linux's /proc"),
    pytest.mark.xdist_group("load_leaks"),  # One child counts them all.
]

WARM_UP = 6
ARENA = 6 * MIB
"""Address space that a whole rank takes."""
MEMORY = 8 * MIB

SCRIPT = """
import errno, gc, itertools, json, os, sys, threading, time
from contextlib import suppress
from pathlib import Path
import pytest, torch
import relayout
from support.faulty import CALLS, LARGE, PART, device, stored
from support.fake_cuda import Lanes
from support.loader_fixtures import DEVICE, WAYS, holdings, other_threads

folder, warm_up, memory = Path(sys.argv[1]), *map(int, sys.argv[2:])
file = folder / PART
length = file.stat().st_size

def succeed(backend, number):
    call = list(CALLS)[number % 6]
    if backend != "mapped" or call != "load into":
        CALLS[call](folder, backend, {})

def fail(backend, number):
    # Before it begins, where it is opened; in the middle, by who watches; and by a digest.
    try:
        if number % 3 == 0:
            os.truncate(file, length - 1)
            relayout.load(folder, 0, backend=backend)
        elif number % 3 == 1:
            relayout.load(folder, 0, backend=backend, progress=lambda done, total: 1 // 0)
        else:
            flip()
            for _ in relayout.iter_load(folder, 0, backend=backend, verify=backend != "mapped", memory=memory):
                pass
            assert backend == "mapped"
            relayout.load(folder, 0, backend=backend, verify=True)
    except (relayout.FormatError, ZeroDivisionError):
        pass
    else:
        raise AssertionError("no error")
    finally:
        if number % 3 == 0:
            os.truncate(file, length)
            with file.open("r+b") as stream:
                stream.seek(length - 1)
                stream.write(last)
        elif number % 3 == 2:
            flip()

def flip():
    with file.open("r+b") as stream:
        stream.seek(length - 5000)
        (byte,) = stream.read(1)
        stream.seek(length - 5000)
        stream.write(bytes([byte ^ 1]))

def abandon(backend, number):
    iterator = relayout.iter_load(folder, 0, backend=backend, memory=memory)
    for _ in range(number % 5):
        next(iterator)
    if number % 2:
        iterator.close()
    else:
        cycle = [iterator]
        cycle.append(cycle)
        del iterator, cycle
        gc.collect()

last = file.read_bytes()[-1:]
torch.set_num_threads(1)
threading.stack_size(2**19)
gc.collect()
gc.freeze()
others = other_threads()
found = {}
for way in sys.stdin.read().split():
    for what, repeats in ((succeed, 12), (fail, 9), (abandon, 10)):  # All that goes by the number comes round.
        with device(way) as lanes:
            for number in range(warm_up + repeats):
                if number == warm_up:
                    gc.collect()
                    before = holdings(LARGE, others)
                what("auto" if way in DEVICE else way, number)
            gc.collect()
            after = holdings(LARGE, others)
            found[f"{way}: {what.__name__}"] = [
                [getattr(one, key) for one in (before, after)]
                for key in ("descriptors", "threads", "mapped_files", "large", "nbytes")
            ] + [[0, lanes.held if lanes else 0]]
print(json.dumps(found))
"""


LEAKING = ("auto", "mapped", "gds")
"""The backends whose jobs hold different things: "direct" and "buffered" are "auto", "pinned" is a part of "gds"."""


@pytest.fixture(scope="module")
def counts(place: Path) -> dict[str, list[list[int]]]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(place / "out"), str(WARM_UP), str(MEMORY)],
        env={**os.environ, **faulty.QUIET, "PYTHONPATH": PYTHONPATH},
        input=" ".join(LEAKING),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, list[list[int]]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("what", ["succeed", "fail", "abandon"])
@pytest.mark.parametrize("way", LEAKING)
def test_many_loads_leave_nothing(counts: dict[str, Any], way: str, what: str) -> None:
    *exact, (nbytes_before, nbytes_after), (_, pinned) = counts[f"{way}: {what}"]
    # Descriptors, threads, mappings of files, arenas.
    assert [after - before for before, after in exact] == [0, 0, 0, 0]
    assert pinned == 0
    assert exact[2] == [0, 0]
    assert nbytes_after - nbytes_before < ARENA
