"""`relayout.iter_load` that does not get to its end: left, damaged, on a drive that fails, in a program that ends."""

from __future__ import annotations

import gc
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import flip
from support.loader_fixtures import (
    IN_FLIGHT,
    LITTLE,
    assert_equal,
    child,
    extents,
    nothing_left_behind,
    whole_tensors,
)
from support.patience import in_time

import relayout
from relayout.errors import FormatError


def leave_by_error(iterator: Any) -> None:
    for _ in iterator:
        raise ZeroDivisionError("of the caller")


@pytest.mark.parametrize(("how", "count"), [("close", 0), ("close", 5), ("del", 1), ("error", 2)])
def test_an_iterator_that_is_left_gives_everything_back(wide: Path, way: str, how: str, count: int) -> None:
    with nothing_left_behind():
        iterator: Any = relayout.iter_load(wide, 0, backend=way, memory=IN_FLIGHT)
        kept = dict(next(iterator) for _ in range(count))
        if how == "close":
            in_time(iterator.close)
            assert list(iterator) == []
        elif how == "error":
            with suppress(ZeroDivisionError):
                leave_by_error(iterator)
        del iterator
        gc.collect()
    stored = whole_tensors(wide)
    assert_equal(kept, {name: stored[name] for name in list(stored)[:count]})


def test_verify_finds_damage_when_the_tensor_would_come(converted: Path, tmp_path: Path, way: str) -> None:
    folder = Path(shutil.copytree(converted, tmp_path / "copy"))
    stored = whole_tensors(folder, "model-rank-1-*")
    names = list(stored)
    for file in sorted(folder.glob("model-rank-1-*")):
        for name, (start, end) in list(extents(file).items())[::4]:
            if start == end:
                continue
            stored_before = {key: stored[key].clone() for key in names[: names.index(name)]}
            flip(file, end - 1, 3)
            found: dict[str, torch.Tensor] = {}
            with nothing_left_behind(), pytest.raises(FormatError, match=f"^{file}: tensor '{name}': its bytes have"):
                found.update(relayout.iter_load(folder, 1, backend=way, memory=LITTLE, verify=True))
            assert_equal(found, {key: stored_before[key] for key in found})
            assert len(list(relayout.iter_load(folder, 1, backend=way, memory=LITTLE))) == len(names)
            flip(file, end - 1, 3)


def test_a_program_may_end_in_the_middle_of_an_iteration(wide: Path) -> None:
    script = """
import sys, relayout
def main():
    iterator = relayout.iter_load(sys.argv[1], 0, memory=2**23)
    for name, _ in iterator:
        print('"' + name + '"', flush=True)
        return iterator
left = main()
"""
    assert child(script, wide) == "t.00"


def test_an_iterator_may_be_collected_by_one_of_its_own_threads(converted: Path) -> None:
    """Any thread that allocates may be the one that finds a cycle of garbage."""
    script = """
import gc, json, sys, threading, time, relayout
from relayout.loader.backends.files import Sources

gc.disable()
true_read, reading, left = Sources.read, threading.Event(), threading.Event()

def read(self, *rest):
    reading.set()
    left.wait()
    time.sleep(0.05)
    gc.collect()
    return true_read(self, *rest)

iterator = relayout.iter_load(sys.argv[1], 0, memory=2**21, threads=2)
next(iterator)
time.sleep(0.5)  # What may be read ahead has been read.
Sources.read = read
while not reading.wait(0.1):  # What has been used up makes room to read ahead.
    next(iterator)
cycle = [iterator]
cycle.append(cycle)
del iterator, cycle
left.set()
end = time.monotonic() + 60
while any(one.name.startswith("relayout") for one in threading.enumerate()) and time.monotonic() < end:
    time.sleep(0.01)
print(json.dumps([one.name for one in threading.enumerate()]))
"""
    assert child(script, converted) == ["MainThread"]
