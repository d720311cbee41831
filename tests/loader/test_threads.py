"""One handle, or one iterator, used by several threads at once: the stock reader's bytes, or an error that says so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from support import loader_fixtures
from support.loader_fixtures import LITTLE, assert_equal, nothing_left_behind, whole_tensors, write_model
from support.patience import PATIENCE

import relayout
from relayout.errors import PlanError
from relayout.loader.backends.cuda import DeviceJob
from relayout.loader.sources import reshard as regrouped

Result = TypeVar("Result")


NUM_THREADS = 8
ROUNDS = 3


def at_once(call: Callable[[int], Result]) -> list[Result]:
    """What each of several threads gets that all begin at the same moment."""
    start = threading.Barrier(NUM_THREADS)

    def run(number: int) -> Result:
        start.wait(PATIENCE)
        return call(number)

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return list(pool.map(run, range(NUM_THREADS)))


@contextmanager
def refused(kind: type[Exception], message: str) -> Iterator[None]:
    """Nothing goes wrong, or just this."""
    try:
        yield
    except kind as error:
        if message not in str(error):
            raise


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source of so many tensors that a rank's table takes a while; converted beside it for eight ranks."""
    folder = tmp_path_factory.mktemp("many")
    sizes = {f"model.layers.{n}.mlp.gate_proj.weight": (torch.int16, (8, 4)) for n in range(600)}
    sizes["model.layers.0.mlp.down_proj.weight"] = (torch.int16, (6, 64))
    sizes["model.norm.weight"] = (torch.int16, (33,))
    relayout.convert(write_model(folder / "source", sizes), folder / "out", tp=8)
    return folder / "out"


@pytest.mark.usefixtures("hasty")
def test_slices_that_threads_read_from_one_safe_open_are_the_sources_and_each_table_is_parsed_once(
    many: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[int] = []
    read_table = regrouped.read_table

    def note(folder: Path, manifest: Any, rank: int) -> Any:
        parsed.append(rank)
        return read_table(folder, manifest, rank)

    monkeypatch.setattr(regrouped, "read_table", note)
    stored, name = whole_tensors(many.parent / "source"), "model.layers.7.mlp.gate_proj.weight"
    for _ in range(ROUNDS):
        parsed.clear()
        with relayout.safe_open(many) as opened, nothing_left_behind():
            found = at_once(lambda rank, one=opened: one.get_slice(name)[rank : rank + 1])  # type: ignore[misc]
        assert_equal({"": torch.cat(found)}, {"": stored[name]})
        assert sorted(parsed) == list(range(8))


@pytest.mark.usefixtures("hasty")
def test_whole_tensors_that_threads_read_from_one_safe_open_are_the_sources(many: Path) -> None:
    stored = whole_tensors(many.parent / "source")
    names = [*list(stored)[:: len(stored) // 6], "model.layers.0.mlp.down_proj.weight", "model.norm.weight"]
    with relayout.safe_open(many) as opened:

        def read(number: int) -> dict[str, torch.Tensor]:
            mine = names[number:] + names[:number]
            return {name: opened.get_tensor(name) for name in mine}

        for found in at_once(read):
            assert_equal(found, {name: stored[name] for name in found})


@pytest.mark.usefixtures("hasty")
@pytest.mark.filterwarnings("ignore:.*plain checkpoint")
@pytest.mark.parametrize("kind", ["as stored", "plain"])
def test_tensors_that_threads_take_from_one_open_rank_are_the_stored_ones(
    kind: str, converted: Path, model: Path
) -> None:
    stored = whole_tensors(converted, "model-rank-1-*")
    with relayout.open(converted if kind == "as stored" else model, 1, tp=2) as opened:
        for found in at_once(lambda number: {name: opened.get_slice(name)[...] for name in opened.keys()}):  # noqa: SIM118
            assert_equal(found, stored)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("kind", ["open", "safe_open"])
def test_who_reads_while_another_thread_closes_gets_the_tensor_or_is_told(
    kind: str, model: Path, converted: Path
) -> None:
    name = "model.layers.3.input_layernorm.weight"
    expected = whole_tensors(model)[name]
    for _ in range(ROUNDS):
        opened: Any = relayout.open(converted, 1) if kind == "open" else relayout.safe_open(converted)

        def use(number: int, one: Any = opened) -> list[torch.Tensor]:
            if number == 3:
                one.close()
            found = []
            with refused(PlanError, "closed"):
                for _ in range(20):
                    found.append(one.get_tensor(name))
                    found.append(one.get_slice(name)[...])
            return found

        for found in at_once(use):
            assert all(torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8)) for tensor in found)


@pytest.mark.usefixtures("hasty")
def test_threads_that_share_an_iterator_get_each_tensor_once_or_an_error(converted: Path) -> None:
    stored = whole_tensors(converted, "model-rank-1-*")
    iterator = relayout.iter_load(converted, 1, memory=LITTLE)

    def take(number: int) -> list[tuple[str, torch.Tensor]]:
        mine = []
        is_over = False
        while not is_over:
            with refused(ValueError, "already executing"):  # By another thread.
                one = next(iterator, None)
                is_over = one is None
                mine += [one] if one is not None else []
        return mine

    found = [pair for mine in at_once(take) for pair in mine]
    assert len(found) == len(stored)
    assert_equal(dict(found), stored)
    assert loader_fixtures.loader_threads() == []


@pytest.mark.usefixtures("hasty")
def test_loads_at_once_of_the_same_rank_and_of_others_are_the_stored_bytes(converted: Path) -> None:
    stored = [whole_tensors(converted, f"model-rank-{rank}-*") for rank in range(2)]
    found = at_once(lambda number: relayout.load(converted, number % 2, threads=2, verify=number < 4))
    for number, tensors in enumerate(found):
        assert_equal(tensors, stored[number % 2])


def test_every_tensor_is_waited_for_by_the_stream_that_is_current_when_it_comes(
    converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several tensors come in one part, and each `next` is called with another stream."""
    current = ""
    waited: list[str] = []
    settle = DeviceJob.settle

    def note(filling: DeviceJob) -> None:
        waited.append(current)
        settle(filling)

    monkeypatch.setattr(DeviceJob, "settle", note)
    monkeypatch.setattr(DeviceJob, "current_stream", property(lambda _: current))
    found = {}
    for way in loader_fixtures.fake_device(monkeypatch, "pinned"):
        iterator = relayout.iter_load(converted, 1, backend=way)
        for number in range(23):
            current = f"stream {number}"
            name, tensor = next(iterator)
            found[name] = tensor
            assert waited[-1] == current
        assert list(iterator) == []
    assert_equal(found, whole_tensors(converted, "model-rank-1-*"))
