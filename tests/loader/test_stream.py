"""`relayout.iter_load`: all tensors in file order, a bound on what is read ahead, and an end at any point."""

from __future__ import annotations

import gc
import re
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import flip
from support.loader_fixtures import (
    IN_FLIGHT,
    LITTLE,
    MEASURE,
    MIB,
    WAYS,
    assert_equal,
    by_two_ways,
    child,
    extents,
    loader_threads,
    nothing_left_behind,
    whole_tensors,
    write_model,
)
from support.models import as_integers, expected_slice
from support.patience import PATIENCE, in_time

import relayout
from relayout.errors import FormatError, PlanError
from relayout.loader.backends import host
from relayout.loader.backends.files import ReadableFiles
from relayout.loader.backends.host import HUGE_PAGE

FEW = {"memory": LITTLE, "threads": 1, "verify": True}


@pytest.fixture(scope="module")
def stored(wide: Path) -> dict[str, torch.Tensor]:
    """What the files of `wide` hold."""
    return whole_tensors(wide)


@pytest.mark.parametrize(
    ("way", "options"),
    [
        *((way, {"memory": LITTLE}) for way in WAYS),
        *(
            (way, options)
            for way in ("auto", "gds")
            for options in ({}, {"memory": LITTLE, "threads": 1, "verify": True})
        ),
    ],
    indirect=["way"],
)
def test_tensors_come_in_file_order_and_are_equal_to_numpy_slices(
    model: Path, converted: Path, way: str, options: dict[str, Any]
) -> None:
    whole = {name: as_integers(tensor) for name, tensor in whole_tensors(model).items()}
    for rank in range(2):
        stored = whole_tensors(converted, f"model-rank-{rank}-*")
        with nothing_left_behind():
            # Looked at when they are yielded: they are not to arrive later.
            found = [(name, one.clone()) for name, one in relayout.iter_load(converted, rank, backend=way, **options)]
        assert [name for name, _ in found] == list(stored)
        assert_equal(dict(found), stored)
        assert_equal(dict(found), {name: expected_slice(name, array, rank, 2) for name, array in whole.items()})


@pytest.mark.parametrize("memory", [None, LITTLE])
@by_two_ways
def test_a_plain_folder_is_cut_on_the_fly(model: Path, way: str, memory: int | None) -> None:
    whole = whole_tensors(model)
    with pytest.warns(UserWarning, match="relayout convert .* --tp 2") as caught:
        found = dict(relayout.iter_load(str(model), 1, tp=2, backend=way, memory=memory))
    assert [Path(one.filename).name for one in caught] == [Path(__file__).name]
    assert_equal(found, {name: expected_slice(name, as_integers(one), 1, 2) for name, one in whole.items()})


@by_two_ways
def test_names_chooses_tensors(converted: Path, way: str) -> None:
    stored = whole_tensors(converted, "model-rank-0-*")
    chosen = {name: tensor for name, tensor in stored.items() if ".2." in name or "norm" in name}
    for memory in (None, LITTLE):
        found = list(relayout.iter_load(converted, 0, names=["**.2.**", "**norm**"], backend=way, memory=memory))
        assert [name for name, _ in found] == list(chosen)
        assert_equal(dict(found), chosen)
    assert list(relayout.iter_load(converted, 0, names=[], backend=way)) == []
    with pytest.raises(PlanError, match=r"no tensor matches 'nothing' \(there are 23\)"):
        relayout.iter_load(converted, 0, names="nothing", backend=way)


def test_nothing_is_read_before_the_first_tensor_is_asked_for(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReadableFiles, "read", lambda *_: pytest.fail("read too early"))
    with nothing_left_behind():
        iterator = relayout.iter_load(wide, 0)
        assert loader_threads() == []
        del iterator


@pytest.mark.parametrize("way", ["auto", "direct", "buffered", "pinned"], indirect=True)
@pytest.mark.parametrize("slow", [False, True])
def test_no_more_than_memory_is_read_and_not_yet_yielded(
    wide: Path, way: str, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = threading.Lock()
    ahead = worst = 0
    true_read = ReadableFiles.read

    def read(self: ReadableFiles, file: int, offset: int, view: memoryview) -> None:
        nonlocal ahead, worst
        with lock:
            ahead += view.nbytes
            worst = max(worst, ahead)
        true_read(self, file, offset, view)

    monkeypatch.setattr(ReadableFiles, "read", read)
    for _, tensor in relayout.iter_load(wide, 0, backend=way, memory=2 * IN_FLIGHT):
        end = time.monotonic() + PATIENCE
        while slow and worst <= 2 * IN_FLIGHT // 3 and time.monotonic() < end:
            time.sleep(0.001)  # What may be read ahead is read ahead.
        time.sleep(0.005 * slow)
        with lock:
            ahead -= tensor.nbytes
    assert ahead == 0
    assert 2 * IN_FLIGHT // 3 * slow < worst <= 2 * IN_FLIGHT


def test_the_process_grows_by_no_more_than_memory(wide: Path) -> None:
    script = (
        MEASURE
        + """
def status(key):
    return int(Path("/proc/self/status").read_text().split(key + ":")[1].split()[0]) * 1024

def grows(**options):
    Path("/proc/self/clear_refs").write_text("5")  # The peak begins here.
    before = status("VmRSS")
    nbytes = 0
    for _, tensor in relayout.iter_load(sys.argv[1], 0, **options):
        nbytes += tensor[:, ::64].sum().item() >= 0 and tensor.nbytes
        del tensor
    return nbytes, status("VmHWM") - before

grown = []
for backend in ("auto", "direct", "buffered"):
    grows(backend=backend, names="t.{00,01}", memory=2**24)  # What is imported grows it, too.
    for memory in json.loads(sys.argv[2]):
        grown.append((memory, *grows(backend=backend, memory=memory)))
print(json.dumps(grown))
"""
    )
    for memory, nbytes, peak in child(script, wide, [IN_FLIGHT, 2 * IN_FLIGHT]):
        assert nbytes > 1.9 * memory
        # Each of the parts that are in memory at once may end in the middle of a huge page.
        assert peak <= memory + 5 * HUGE_PAGE


KEEPERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda tensor: tensor,
    "view": lambda tensor: tensor.view(-1).view(torch.int16),
    "slice": lambda tensor: tensor[3:5],
    "row": lambda tensor: tensor[-1],
    "transposed": lambda tensor: tensor.t(),
    "parameter": lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
    "detached": lambda tensor: tensor.detach(),
    "array": lambda tensor: tensor.numpy(),
    "part of an array": lambda tensor: tensor.numpy()[7:, 3],
    "memoryview": lambda tensor: memoryview(tensor.numpy()),
    "storage": lambda tensor: tensor.untyped_storage(),
    "capsule": lambda tensor: torch.utils.dlpack.to_dlpack(tensor),
}


def content(kept: Any) -> bytes:
    if isinstance(kept, torch.UntypedStorage):
        kept = torch.empty(0, dtype=torch.uint8).set_(kept)
    if isinstance(kept, torch.Tensor):
        kept = kept.detach().contiguous().view(torch.uint8).numpy()
    if not hasattr(kept, "tobytes"):
        kept = torch.utils.dlpack.from_dlpack(kept).numpy()
    result: bytes = kept.tobytes()
    return result


@pytest.mark.parametrize("keep", KEEPERS.values(), ids=list(KEEPERS))
def test_memory_of_which_anything_is_kept_is_not_used_again(
    wide: Path, stored: dict[str, torch.Tensor], keep: Callable[[torch.Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    allocated = []
    true_allocate = host.allocate

    def allocate(nbytes: int) -> host.HostArena:
        allocated.append(nbytes)
        return true_allocate(nbytes)

    monkeypatch.setattr(host, "allocate", allocate)
    kept = {}
    for number, (name, tensor) in enumerate(relayout.iter_load(wide, 0, memory=2 * IN_FLIGHT)):
        if number % 4 == 1:
            kept[name] = keep(tensor)
        else:
            tensor.fill_(0xEE)  # It is the caller's.
        del tensor
    assert len(kept) < len(allocated) <= 10, "nothing was used again, so this shows nothing"
    assert len(kept) == 4
    for name, one in kept.items():
        if isinstance(one, torch.UntypedStorage):
            assert stored[name].numpy().tobytes() in content(one)
        else:
            assert content(one) == content(keep(stored[name]))


@by_two_ways
def test_who_keeps_everything_and_is_slow_gets_everything(
    wide: Path, stored: dict[str, torch.Tensor], way: str
) -> None:
    kept = {}
    for name, tensor in relayout.iter_load(wide, 0, backend=way, memory=IN_FLIGHT):
        time.sleep(0.005)
        kept[name] = tensor
    assert_equal(kept, stored)


@pytest.mark.parametrize(
    ("way", "nbytes"), [("auto", MIB + 3), ("auto", 12 * MIB), ("gds", 5 * MIB + 4096)], indirect=["way"]
)
def test_memory_that_is_too_little_is_refused_with_a_number_that_will_do(tmp_path: Path, way: str, nbytes: int) -> None:
    sizes = {"small": (torch.uint8, (7,)), "largest": (torch.uint8, (nbytes,)), "other": (torch.uint8, (90,))}
    relayout.convert(write_model(tmp_path / "source", sizes), tmp_path / "out")
    stored = whole_tensors(tmp_path / "out")
    for memory in (2 * MIB, max(nbytes, 2 * MIB)):
        with (
            nothing_left_behind(),
            pytest.raises(PlanError, match=f"too small for tensor 'largest' of {nbytes} bytes") as caught,
        ):
            relayout.iter_load(tmp_path / "out", 0, backend=way, memory=memory)
        (number,) = re.findall(r"use at least (\d+)", str(caught.value))
        assert nbytes < int(number) <= nbytes * 4 // 3 + MIB + 4 * 4096
    assert_equal(dict(relayout.iter_load(tmp_path / "out", 0, backend=way, memory=int(number))), stored)
    assert_equal(dict(relayout.iter_load(tmp_path / "out", 0, backend=way, memory=int(number) + 12345)), stored)


@by_two_ways
def test_iterators_at_once_do_not_disturb_each_other(wide: Path, converted: Path, way: str) -> None:
    stored = [whole_tensors(wide), whole_tensors(converted, "model-rank-0-*"), whole_tensors(wide)]
    with nothing_left_behind():
        iterators = [
            relayout.iter_load(wide, 0, backend=way, memory=IN_FLIGHT),
            relayout.iter_load(converted, 0, backend=way, memory=LITTLE),
            relayout.iter_load(wide, 0, backend=way, memory=IN_FLIGHT, verify=True),
        ]
        found: list[dict[str, torch.Tensor]] = [{}, {}, {}]
        for _ in range(max(map(len, stored)) + 1):
            for iterator, tensors in zip(iterators, found, strict=True):
                tensors.update([one] if (one := next(iterator, None)) else [])
    for tensors, expected in zip(found, stored, strict=True):
        assert_equal(tensors, expected)


@by_two_ways
def test_progress_rises_with_what_was_yielded_up_to_the_total(wide: Path, way: str) -> None:
    told: list[tuple[int, int]] = []
    yielded = 0
    for _, tensor in relayout.iter_load(wide, 0, backend=way, memory=IN_FLIGHT, progress=lambda *one: told.append(one)):
        yielded += tensor.nbytes
        assert yielded <= told[-1][0]
    assert told == sorted(told)
    assert {total for _, total in told} == {yielded}
    assert told[-1] == (yielded, yielded)
    assert len(told) > 10


# Iterations that do not get to their end.


def leave_by_error(iterator: Any) -> None:
    for _ in iterator:
        raise ZeroDivisionError("of the caller")


@pytest.mark.parametrize(
    ("way", "how", "count"),
    [
        *((way, "close", 5) for way in WAYS),
        *((way, *left) for way in ("auto", "gds") for left in (("close", 0), ("del", 1), ("error", 2))),
    ],
    indirect=["way"],
)
def test_an_iterator_that_is_left_gives_everything_back(
    wide: Path, stored: dict[str, torch.Tensor], way: str, how: str, count: int
) -> None:
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
    assert_equal(kept, {name: stored[name] for name in list(stored)[:count]})


@by_two_ways
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
            with nothing_left_behind(), pytest.raises(FormatError, match=rf"^{file}: bytes \d+ to \d+ do not"):
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
from relayout.loader.backends.files import ReadableFiles

gc.disable()
true_read, reading, left = ReadableFiles.read, threading.Event(), threading.Event()

def read(self, *rest):
    reading.set()
    left.wait()
    time.sleep(0.05)
    gc.collect()
    return true_read(self, *rest)

iterator = relayout.iter_load(sys.argv[1], 0, memory=2**21, threads=2)
next(iterator)
time.sleep(0.2)  # What may be read ahead has been read.
ReadableFiles.read = read
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
