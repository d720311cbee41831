"""`relayout.iter_load`: all tensors in file order, a bound on what is read ahead, and no memory in use used again."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import loader_fixtures
from support.loader_fixtures import (
    IN_FLIGHT,
    LITTLE,
    MEASURE,
    MIB,
    assert_equal,
    by_two_ways,
    child,
    loader_threads,
    nothing_left_behind,
    whole_tensors,
    write_model,
)
from support.models import as_integers, expected_slice
from support.patience import PATIENCE

import relayout
from relayout.errors import PlanError
from relayout.loader.backends import arena
from relayout.loader.backends.arena import HUGE_PAGE
from relayout.loader.backends.files import Sources


@pytest.mark.parametrize("options", [{}, {"memory": LITTLE}, {"memory": LITTLE, "threads": 1, "verify": True}])
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


def test_a_rank_of_one_file_and_large_tensors_comes_whole(wide: Path, way: str) -> None:
    stored = whole_tensors(wide)
    for memory in (None, IN_FLIGHT, 5 * MIB):
        iterator = relayout.iter_load(wide, 0, backend=way, memory=memory, verify=True)
        assert_equal({name: tensor.clone() for name, tensor in iterator}, stored)


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
    monkeypatch.setattr(Sources, "read", lambda *_: pytest.fail("read too early"))
    with nothing_left_behind():
        iterator = relayout.iter_load(wide, 0)
        assert loader_threads() == []
        del iterator


@pytest.mark.parametrize("backend", ["auto", "direct", "buffered", "pinned"])
@pytest.mark.parametrize("slow", [False, True])
def test_no_more_than_memory_is_read_and_not_yet_yielded(
    wide: Path, backend: str, slow: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if backend == "pinned":
        request.getfixturevalue("fake_pinned")
        backend = "auto"
    lock = threading.Lock()
    ahead = worst = 0
    true_read = Sources.read

    def read(self: Sources, file: int, offset: int, view: memoryview) -> None:
        nonlocal ahead, worst
        with lock:
            ahead += view.nbytes
            worst = max(worst, ahead)
        true_read(self, file, offset, view)

    monkeypatch.setattr(Sources, "read", read)
    for _, tensor in relayout.iter_load(wide, 0, backend=backend, memory=2 * IN_FLIGHT):
        end = time.monotonic() + PATIENCE
        while slow and worst <= 2 * IN_FLIGHT // 3 and time.monotonic() < end:
            time.sleep(0.001)  # What may be read ahead is read ahead.
        time.sleep(0.005 * slow)
        with lock:
            ahead -= tensor.nbytes
    assert ahead == 0
    assert 2 * IN_FLIGHT // 3 * slow < worst <= 2 * IN_FLIGHT


@pytest.fixture
def fake_pinned(monkeypatch: pytest.MonkeyPatch) -> Any:
    yield from loader_fixtures.fake_device(monkeypatch, "pinned")


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
    wide: Path, keep: Callable[[torch.Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    allocated = []
    true_allocate = arena.allocate

    def allocate(nbytes: int) -> arena.HostArena:
        allocated.append(nbytes)
        return true_allocate(nbytes)

    monkeypatch.setattr(arena, "allocate", allocate)
    stored = whole_tensors(wide)
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


def test_who_keeps_everything_and_is_slow_gets_everything(wide: Path, way: str) -> None:
    kept = {}
    for name, tensor in relayout.iter_load(wide, 0, backend=way, memory=IN_FLIGHT):
        time.sleep(0.005)
        kept[name] = tensor
    assert_equal(kept, whole_tensors(wide))


@pytest.mark.parametrize("nbytes", [MIB + 3, 5 * MIB + 4096, 12 * MIB])
@by_two_ways
def test_memory_that_is_too_little_is_refused_with_a_number_that_will_do(tmp_path: Path, way: str, nbytes: int) -> None:
    sizes = {"small": (torch.uint8, (7,)), "largest": (torch.uint8, (nbytes,)), "other": (torch.uint8, (90,))}
    relayout.convert(write_model(tmp_path / "source", sizes), tmp_path / "out")
    stored = whole_tensors(tmp_path / "out")
    if way == "mapped":
        assert_equal(dict(relayout.iter_load(tmp_path / "out", 0, backend=way, memory=2 * MIB)), stored)
        return
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

    def note(done: int, total: int) -> None:
        told.append((done, total))

    for _, tensor in relayout.iter_load(wide, 0, backend=way, memory=IN_FLIGHT, progress=note):
        yielded += tensor.nbytes
        assert way == "mapped" or yielded <= told[-1][0]
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert {total for _, total in told} == {yielded}
    assert told[-1] == (yielded, yielded)
    assert way == "mapped" or len(told) > 10
