"""`relayout.open` of any rank, as stored, at another degree or plain: beside `load` and torch's indexing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.conversions import Conversions
from support.loader_fixtures import MIB, assert_equal, nothing_left_behind

import relayout
from relayout.errors import FormatError, PlanError

pytestmark = pytest.mark.filterwarnings("ignore:.*plain checkpoint")

INDEXES: dict[str, Any] = {
    "all": ...,
    "rows": slice(3, 17),
    "last rows": slice(-5, None, 2),
    "one row": 2,
    "columns": (slice(None), slice(1, 9)),
    "a box": (slice(2, 11, 3), slice(4, 20, 5)),
    "nothing": slice(7, 7),
    "an element": (1, -1),
    "a list": [4, 0, 3],
}
KINDS = ["as stored", "another degree", "plain"]


@pytest.fixture(params=KINDS)
def where(request: pytest.FixtureRequest, conversions: Conversions) -> tuple[Path, int]:
    """Something that rank 1 of 2 can be loaded from, and the degree."""
    paths: dict[str, Callable[[], Path]] = {
        "as stored": lambda: conversions.at("llama", 2),
        "another degree": lambda: conversions.at("llama", 4),
        "plain": lambda: conversions.source("llama"),
    }
    return paths[request.param](), 2


@pytest.fixture
def expected(conversions: Conversions) -> dict[str, torch.Tensor]:
    return relayout.load(conversions.at("llama", 2), 1)


def test_tensors_and_their_places_are_those_of_the_rank(
    where: tuple[Path, int], expected: dict[str, torch.Tensor], conversions: Conversions
) -> None:
    path, tp = where
    whole = relayout.safe_open(conversions.at("llama", 4))
    with nothing_left_behind(), relayout.open(path, 1, tp=tp) as opened:
        assert (opened.rank, opened.num_ranks) == (1, 2)
        assert sorted(opened.keys()) == sorted(expected)
        assert_equal({name: opened.get_tensor(name) for name in expected}, expected)
        for name, tensor in expected.items():
            place = opened.place(name)
            assert list(place.shape) == whole.get_slice(name).get_shape()
            ranges = place.part.ranges or ((0, place.shape[place.part.axis]),)
            pieces = [whole.get_tensor(name).narrow(place.part.axis, *one) for one in ranges]
            assert torch.equal(torch.cat(pieces, place.part.axis), tensor)


@pytest.mark.parametrize("index", INDEXES.values(), ids=INDEXES)
def test_slices_are_what_torch_takes_of_the_tensor(
    where: tuple[Path, int], expected: dict[str, torch.Tensor], index: Any
) -> None:
    path, tp = where
    matrices = {name: tensor for name, tensor in expected.items() if tensor.ndim == 2}
    assert len(matrices) > 5
    with relayout.open(path, 1, tp=tp) as opened:
        for name, tensor in matrices.items():
            part = opened.get_slice(name)
            assert part.get_shape() == list(tensor.shape)
            assert part.get_dtype() == "BF16" if tensor.dtype == torch.bfloat16 else part.get_dtype()
            found = part[index]
            assert torch.equal(found, tensor[index]), name
            assert found.shape == tensor[index].shape
    with pytest.raises(IndexError):
        part[len(matrices) * 10**6]


def test_only_some_names_are_known_if_some_are_asked_for(
    where: tuple[Path, int], expected: dict[str, torch.Tensor]
) -> None:
    path, tp = where
    chosen = {name: tensor for name, tensor in expected.items() if name.endswith("norm.weight")}
    with relayout.open(path, 1, tp=tp, names=["**norm.weight"]) as opened:
        assert sorted(opened.keys()) == sorted(chosen)
        assert_equal({name: opened.get_tensor(name) for name in chosen}, chosen)
        with pytest.raises(PlanError, match=r"rank 1 has no tensor 'lm_head\.weight'"):
            opened.get_tensor("lm_head.weight")
    with pytest.raises(PlanError, match=r"no tensor matches '\*\*\.nothing'"):
        relayout.open(path, 1, tp=tp, names="**.nothing")


def test_metadata_is_the_sources(where: tuple[Path, int]) -> None:
    path, tp = where
    with relayout.open(path, 1, tp=tp) as opened:
        found = opened.metadata()
    assert found
    assert found["format"] == "pt"


def test_damage_is_told_when_it_is_opened_if_that_is_asked_for(conversions: Conversions, tmp_path: Path) -> None:
    source = conversions.source("llama")
    folder = tmp_path / "out"
    relayout.convert(source, folder, tp=2)
    relayout.open(folder, 1, verify=True).close()
    file = folder / "model-rank-1-part-0.safetensors"
    with file.open("r+b") as stream:
        stream.seek(-9, 2)
        byte = stream.read(1)
        stream.seek(-9, 2)
        stream.write(bytes([byte[0] ^ 1]))
    relayout.open(folder, 1).close()
    with nothing_left_behind(), pytest.raises(FormatError, match=r"tensor '.*': its bytes have digest"):
        relayout.open(folder, 1, verify=True)
    with relayout.open(folder, 3, tp=4, verify=True) as view:
        names = list(view.keys())
        with pytest.raises(FormatError, match="do not match digest"):
            [view.get_tensor(name) for name in names]


def test_all_names_and_no_names_are_one_way_to_the_same_arena(
    where: tuple[Path, int], expected: dict[str, torch.Tensor]
) -> None:
    path, tp = where
    found = []
    for names in (None, "**", sorted(expected)):
        tensors = relayout.load(path, 1, tp=tp, names=names)
        assert_equal(tensors, expected)
        base = min(tensor.data_ptr() for tensor in tensors.values())
        found.append({name: tensor.data_ptr() - base for name, tensor in tensors.items()})
    assert found[0] == found[1] == found[2]


def test_sizes_are_bytes_or_text(where: tuple[Path, int], expected: dict[str, torch.Tensor]) -> None:
    path, tp = where
    assert_equal(relayout.load(path, 1, tp=tp, memory="8MiB"), expected)
    assert_equal(dict(relayout.iter_load(path, 1, tp=tp, memory="64M")), expected)
    assert relayout.explain(path, 1, tp=tp, memory="16 MiB").memory == 16 * MIB
    for call in (relayout.load, relayout.iter_load, relayout.explain):
        with pytest.raises(PlanError, match="'much' is not a size"):
            call(path, 1, tp=tp, memory="much")
