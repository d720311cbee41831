"""`relayout.iter_load` that does not get to its end: left, damaged, on a drive that fails, in a program that ends."""

from __future__ import annotations

import gc
import os
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import flip
from support.faults import environment
from support.loader_fixtures import (
    IN_FLIGHT,
    LITTLE,
    MEASURE,
    MIB,
    assert_equal,
    child,
    extents,
    forget,
    not_mapped,
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
            with nothing_left_behind(), pytest.raises(FormatError, match=f"tensor '{name}': its bytes have digest"):
                found.update(relayout.iter_load(folder, 1, backend=way, memory=LITTLE, verify=True))
            assert_equal(found, {key: stored_before[key] for key in found})
            assert len(list(relayout.iter_load(folder, 1, backend=way, memory=LITTLE))) == len(names)
            flip(file, end - 1, 3)


@not_mapped  # As with every mapping, the process would be killed.
def test_a_file_that_is_cut_meanwhile_is_named(wide: Path, tmp_path: Path, way: str) -> None:
    folder = Path(shutil.copytree(wide, tmp_path / "copy"))
    (file,) = folder.glob("model-rank-0-*")
    forget(file)
    stored = {name: tensor.clone() for name, tensor in whole_tensors(folder).items()}
    with nothing_left_behind():
        iterator = relayout.iter_load(folder, 0, backend=way, memory=IN_FLIGHT)
        found = dict([next(iterator)])
        os.truncate(file, 22 * MIB)
        with pytest.raises(FormatError, match=rf"{file.name}: ends at byte \d+, expected \d+ bytes"):
            in_time(partial(found.update, iterator))
        assert list(iterator) == []
    assert_equal(found, {name: stored[name] for name in list(stored)[: len(found)]})
    assert len(found) >= 5


def test_a_drive_that_fails_ends_the_iteration_and_short_reads_do_not(
    converted: Path, tmp_path: Path, shim: Path
) -> None:
    folders = [Path(shutil.copytree(converted, tmp_path / name)) for name in ("broken", "odd", "torn", "late")]
    broken, *_ = folders
    forget(*broken.iterdir())
    faults = [
        *("read|broken/model-rank-0|4+|eio", "read|broken/model-rank-1|4+|eio"),
        *("read|odd/model-rank|/3|short|5000", "read|odd/model-rank|/5|eintr", "read|torn/model-rank|/1|short|9"),
        "read|late/model-rank|3+|eio",
    ]
    script = (
        MEASURE
        + """
import threading
from safetensors import safe_open

broken, odd, torn, late = map(Path, sys.argv[1:])
found = []
for rank, backend in ((0, "auto"), (1, "buffered")):
    before = len(os.listdir("/proc/self/fd"))
    tensors = []
    try:
        tensors += relayout.iter_load(broken, rank, backend=backend, memory=2**21)
    except OSError as error:
        text = str(error)
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("relayout")]
        found.append([error.errno, error.filename, text, left, len(os.listdir("/proc/self/fd")) - before])
stored = {}
for file in sorted(odd.glob("model-rank-1-*")):  # Mapped by the stock package, not read.
    with safe_open(file, framework="pt") as stock:
        stored |= {name: stock.get_tensor(name) for name in stock.keys()}
for backend in ("auto", "buffered"):
    for memory in (None, 2_200_000):
        tensors = dict(relayout.iter_load(odd, 1, backend=backend, memory=memory, verify=True))
        same = tensors.keys() == stored.keys() and all(
            tensor.contiguous().view(torch.uint8).equal(stored[name].contiguous().view(torch.uint8))
            for name, tensor in tensors.items()
        )
        found.append(same)
try:
    found.append(len(list(relayout.iter_load(torn, 0, backend="buffered", names="**norm**"))))
except relayout.RelayoutError as error:
    found.append(str(error))
name = "model.layers.1.mlp.gate_proj.weight"
try:
    transposed = torch.empty(stored[name].shape[::-1], dtype=stored[name].dtype).t()
    relayout.load(late, 1, into={name: transposed}, backend="buffered")
except OSError as error:
    found.append(str(error).count("see dmesg"))
print(json.dumps(found))
"""
    )
    *errors, a, b, c, d, e, f = child(script, *folders, env=environment(shim, faults))
    for rank, (code, name, text, threads, num_files) in enumerate(errors):
        assert (code, threads, num_files) == (5, [], 0)
        assert name.startswith(str(broken / f"model-rank-{rank}-part-"))
        assert "the drive or file system failed: see dmesg" in text
    assert len(errors) == 2
    assert [a, b, c, d] == [True] * 4
    assert e == 9  # Tensors: a header that comes in pieces is as good as another.
    assert f == 1  # What to do about it is told once.


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
