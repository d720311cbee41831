"""A folder whose tensors are cut along several axes, which no plan does so far.

Four ranks hold quarters, blocks of experts, products of several ranges in another order, or nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file
from support.conversions import dcp_tensors
from support.local_stores import read_source
from support.planning import plan_of
from support.toy_store import shelf
from support.trees import content

import relayout
from relayout.core.slices import NOT_HELD, WHOLE, Slice
from relayout.engines.rank_weights import EngineOptions, RankWeights
from relayout.errors import PlanError
from relayout.plans.plan import Plan

Array = npt.NDArray[Any]
Model = dict[str, tuple[npt.NDArray[np.int32], tuple[Slice, ...]]]
NUM_RANKS = 4

QUARTERS = tuple(
    Slice.of({0: ((down * 300, 300),), 1: ((right * 200, 200),)}) for down in range(2) for right in range(2)
)
BOXES: dict[str, tuple[tuple[int, ...], tuple[Slice, ...]]] = {
    "quarters": ((600, 400), QUARTERS),
    "experts": (
        (6, 200, 160),
        tuple(Slice.of({0: ((3 * part, 3),), 2: ((80 * side, 80),)}) for part in range(2) for side in range(2)),
    ),
    "everywhere": (
        (4, 6, 8),
        tuple(Slice.of({0: ((rank, 1),), 1: ((0, 6),), 2: ((0, 8),)}) for rank in range(NUM_RANKS)),
    ),
    # Of axis 1, rank 3 has nothing left.
    "ragged": (
        (4, 7),
        (
            Slice.of({0: ((0, 4),), 1: ((0, 3),)}),
            Slice.of({0: ((0, 2),), 1: ((3, 4),)}),
            Slice.of({0: ((2, 2),), 1: ((3, 4),)}),
            Slice.of({0: ((0, 4),), 1: ((7, 0),)}),
        ),
    ),
    "owned": ((10, 12), (WHOLE, NOT_HELD, NOT_HELD, NOT_HELD)),
    "norm": ((100,), (WHOLE,) * NUM_RANKS),
}
FUSED = BOXES | {
    # Lower rows first, the columns of two parts: no single box, and not in the order of the source.
    "fused": (
        (1200, 400),
        tuple(
            Slice.of(
                {
                    0: ((600 + 300 * down, 300), (300 * down, 300)),
                    1: ((200 + 100 * right, 100), (100 * right, 100)),
                }
            )
            for down in range(2)
            for right in range(2)
        ),
    ),
    "scattered": (
        (5, 60, 12, 40),
        tuple(
            Slice.of({0: ((3, 2), (0, 3)), 1: ((30 * down, 30),), 3: ((20 * right, 10), (20 * right + 10, 10))})
            for down in range(2)
            for right in range(2)
        ),
    ),
}


def held(whole: Array, part: Slice) -> Array:
    """A slice, by numpy."""
    places = [np.arange(size) for size in whole.shape]
    for axis, ranges in part.by_axis or ():
        places[axis] = np.concatenate([np.arange(0), *(np.arange(start, start + length) for start, length in ranges)])
    return whole[np.ix_(*places)]


@pytest.fixture(scope="module", params=[BOXES, FUSED], ids=["boxes", "fused"])
def model(request: pytest.FixtureRequest) -> Model:
    """Each tensor, and what each rank holds of it; every element is another."""
    return {
        name: (
            np.random.default_rng(len(name)).permutation(np.prod(shape)).astype("i4").reshape(shape),
            tuple(part.canonical(shape) for part in slices),
        )
        for name, (shape, slices) in request.param.items()
    }


@pytest.fixture(scope="module")
def source(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("axes") / "source"
    folder.mkdir()
    names = list(model)
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: model[name][0] for name in part}, folder / f"model-{number}.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


@pytest.fixture(scope="module")
def plan(model: Model, source: Path) -> Plan:
    order = [tensor.name for tensor in read_source(source).tensors]
    return plan_of("x", NUM_RANKS, [model[name][1] for name in order])


@pytest.fixture(scope="module")
def converted(plan: Plan, source: Path) -> Path:
    """In memory in which large tensors take several steps."""
    out = source.with_name("out")
    relayout.convert(source, out, tp=NUM_RANKS, plan=plan, memory="2MiB", threads=2)
    return out


def load_tensors(folder: Path, rank: int, **options: Any) -> dict[str, Array]:
    return {name: tensor.numpy() for name, tensor in relayout.load(folder, rank, **options).items()}


def test_in_more_memory_the_files_are_the_same(plan: Plan, source: Path, converted: Path, tmp_path: Path) -> None:
    relayout.convert(source, tmp_path / "out", tp=NUM_RANKS, plan=plan, memory="1GiB", threads=2)
    assert content(tmp_path / "out") == content(converted)


def test_the_folder_is_verified_loaded_and_restored(
    model: Model, source: Path, converted: Path, tmp_path: Path
) -> None:
    assert relayout.verify(converted, source=source).differences == []
    for rank in range(NUM_RANKS):
        expected = {name: held(whole, parts[rank]) for name, (whole, parts) in model.items() if parts[rank].is_held}
        stored = load_file(converted / f"model-rank-{rank}-part-0.safetensors")
        streamed = {name: tensor.numpy() for name, tensor in relayout.iter_load(converted, rank)}
        with relayout.open(converted, rank) as view:
            mapped = {name: view.get_tensor(name).numpy() for name in view.keys()}  # noqa: SIM118 (it is no mapping)
            assert all(view.held_slice(name).part == model[name][1][rank] for name in expected)
        for found in (
            stored,
            load_tensors(converted, rank),
            load_tensors(converted, rank, verify=True),
            streamed,
            mapped,
        ):
            assert found.keys() == expected.keys()
            for name, array in expected.items():
                np.testing.assert_array_equal(found[name], array, err_msg=name, strict=True)
    relayout.restore(converted, tmp_path / "back")
    assert content(tmp_path / "back") == content(source)
    assert len(content(source)) == 3


def test_whole_tensors_and_parts_of_them_are_put_together(model: Model, converted: Path) -> None:
    with relayout.safe_open(converted) as view:
        for name, (whole, _) in model.items():
            np.testing.assert_array_equal(view.get_tensor(name).numpy(), whole, strict=True)
            stored = view.get_slice(name)
            middle = tuple(slice(size // 3, size - 1) for size in whole.shape)
            for index in (middle, (2, ...), (..., slice(1, None, 2)), (slice(3, 3),)):
                np.testing.assert_array_equal(stored[index].numpy(), whole[index], strict=True)


def test_a_store_without_paths_gives_a_ranks_tensors_and_parts_of_them(model: Model, plan: Plan, source: Path) -> None:
    """There, nothing is mapped: a part is read alone."""
    url = f"toy://{source.parent.name}/out"
    relayout.convert(source, url, tp=NUM_RANKS, plan=plan)
    for rank in range(NUM_RANKS):
        with relayout.open(url, rank) as view:
            for name in view.keys():  # noqa: SIM118 (it is no mapping)
                whole, parts = model[name]
                mine = held(whole, parts[rank])
                np.testing.assert_array_equal(view.get_tensor(name).numpy(), mine, strict=True)
                index = tuple(slice(size // 4, size // 2 + 1) for size in mine.shape)
                np.testing.assert_array_equal(view.get_slice(name)[index].numpy(), mine[index], strict=True)
    shelf(source.parent.name).clear()


def test_pytorch_reads_boxes_as_whole_tensors(model: Model, converted: Path) -> None:
    has_boxes = all(part.is_box for _, parts in model.values() for part in parts)
    assert json.loads((converted / "relayout.json").read_text())["dcp"] == has_boxes == ("fused" not in model)
    if has_boxes:
        found = dcp_tensors(converted)
        assert found.keys() == model.keys()
        for name, (whole, _) in model.items():
            np.testing.assert_array_equal(found[name].numpy(), whole, err_msg=name, strict=True)


def test_inspect_and_preview_name_all_axes(model: Model, plan: Plan, source: Path, converted: Path) -> None:
    groups = {group.pattern: group.cut for group in relayout.inspect(converted).groups}
    assert groups["quarters"] == "dim 0: 0 to 300 of 600; dim 1: 0 to 200 of 400"
    planned = {
        one.pattern: one.cut
        for one in relayout.preview(relayout.plan_conversion(source, tp=NUM_RANKS, plan=plan)).groups
    }
    assert (planned["quarters"], planned["ragged"]) == ("dim 0, dim 1", "dim 0, dim 1")
    if "fused" in model:
        assert groups["fused"] == "dim 0: 600 to 900, 0 to 300 of 1200; dim 1: 200 to 300, 0 to 100 of 400"
        assert planned["fused"] == "dim 0, dim 1, 2 ranges"


def test_an_engine_is_told_that_it_takes_slices_along_one_axis_only(converted: Path) -> None:
    weights = RankWeights(str(converted), 1, NUM_RANKS, EngineOptions()).deliver()
    with pytest.raises(PlanError, match=r"is cut along dims \[0, [12]\], expected at most one$") as error:
        list(weights)
    assert (error.value.code, error.value.path) == ("unsupported", str(converted))
    assert error.value.tensor in BOXES
