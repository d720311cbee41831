"""`relayout.open` beside the stock `safetensors.safe_open`, beside `load`, and beside torch's indexing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from support.bits import flip
from support.conversions import Conversions
from support.loader_fixtures import (
    MEASURE,
    MIB,
    assert_equal,
    child,
    extents,
    nothing_left_behind,
    open_files,
    readahead,
    skip_unless_drives_are_counted,
    whole_tensors,
    write_model,
)

import relayout
from relayout.errors import FormatError, PlanError
from relayout.loader.backends.base import Options
from relayout.loader.backends.host import HostBackend

pytestmark = pytest.mark.filterwarnings("ignore:.*plain checkpoint")


def rank_files(folder: Path, rank: int) -> list[Path]:
    return sorted(folder.glob(f"model-rank-{rank}-part-*.safetensors"))


def test_it_shows_what_the_stock_reader_shows_of_all_files(converted: Path) -> None:
    for rank in range(2):
        stored = whole_tensors(converted, f"model-rank-{rank}-*")
        with relayout.open(str(converted), rank) as opened:
            assert (opened.rank, opened.num_ranks) == (rank, 2)
            assert opened.keys() == opened.offset_keys() == list(stored)
            assert_equal({name: opened.get_tensor(name) for name in stored}, stored)
            assert_equal({name: opened.get_slice(name)[...] for name in stored}, stored)
            for number, file in enumerate(rank_files(converted, rank)):
                with safe_open(file, framework="pt") as stock:
                    assert number or opened.metadata() == stock.metadata()
                    for name in stock.keys():  # noqa: SIM118
                        mine, theirs = opened.get_slice(name), stock.get_slice(name)
                        assert (mine.get_shape(), mine.get_dtype()) == (theirs.get_shape(), theirs.get_dtype())


def test_what_a_slice_gives_has_memory_of_its_own(converted: Path) -> None:
    name = "model.layers.1.mlp.gate_proj.weight"
    with relayout.open(converted, 0) as opened:
        part = opened.get_slice(name)[3:5]
        assert part.untyped_storage().nbytes() == part.nbytes
        before = opened.get_tensor(name).clone()
        part.zero_()
        assert_equal({name: opened.get_tensor(name)}, {name: before})


def test_all_tensors_at_once_are_the_tensors_one_by_one(model: Path, converted: Path) -> None:
    for opened in (relayout.open(converted, 0), relayout.open(model, 1, tp=2), relayout.safe_open(converted)):
        with opened:
            found = opened.get_tensors()
            assert list(found) == opened.keys()
            assert_equal(found, {name: opened.get_tensor(name) for name in opened})


def test_what_is_written_to_a_tensor_does_not_reach_the_files(converted: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(converted, tmp_path / "copy"))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    stored = {name: tensor.clone() for name, tensor in whole_tensors(folder, "model-rank-0-*").items()}
    with relayout.open(folder, 0) as opened, relayout.open(folder, 0) as other:
        for name in opened.keys():  # noqa: SIM118
            tensor = opened.get_tensor(name)
            tensor.view(torch.uint8).bitwise_xor_(0xFF)
            assert not torch.equal(tensor, stored[name]) or not tensor.numel()
        assert_equal({name: other.get_tensor(name) for name in other.keys()}, stored)  # noqa: SIM118
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    with relayout.open(folder, 0) as again:
        assert_equal({name: again.get_tensor(name) for name in stored}, stored)


def test_a_closed_one_answers_no_more_and_what_it_gave_stays(converted: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(converted, tmp_path / "copy"))
    stored = {name: tensor.clone() for name, tensor in whole_tensors(folder, "model-rank-0-*").items()}
    with nothing_left_behind():
        with relayout.open(folder, 0) as opened:
            kept = {name: opened.get_tensor(name) for name in stored}
            part = opened.get_slice("lm_head.weight")
        for call in (opened.get_tensor, opened.get_slice, opened.held_slice):
            with pytest.raises(PlanError, match="is closed"):
                call("lm_head.weight")
        for ask in (opened.keys, opened.offset_keys, opened.metadata, opened.get_tensors, lambda: list(opened)):
            with pytest.raises(PlanError, match="is closed"):
                ask()
        opened.close()
    shutil.rmtree(folder)
    assert_equal(kept, stored)
    assert torch.equal(part[1:3], stored["lm_head.weight"][1:3])


def test_it_holds_no_file_open(converted: Path) -> None:
    before = open_files()
    with relayout.open(converted, 0) as opened:
        assert opened.get_tensor("lm_head.weight").sum() != 0
        assert open_files().items() <= before.items()


def test_what_is_not_there_is_named(model: Path, converted: Path, tmp_path: Path) -> None:
    with relayout.open(converted, 1) as opened:
        for call in (opened.get_tensor, opened.get_slice, opened.held_slice):
            with pytest.raises(PlanError, match=r"out: rank 1 has no tensor 'model\.norm'") as caught:
                call("model.norm")
            assert (caught.value.code, caught.value.path) == ("missing", str(converted))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "notes.txt").touch()
    for path, code, message in (
        (model, "option", r"source: not converted \(relayout\.json is missing\); set tp=N"),
        (tmp_path / "nothing", "missing", "nothing: no such file or folder$"),
        (tmp_path / "notes", "missing", "notes: contains no safetensors file"),
    ):
        with nothing_left_behind(), pytest.raises(PlanError, match=message) as caught:
            relayout.open(path, 0)
        assert (caught.value.code, str(caught.value.path)) == (code, str(path))
    with pytest.raises(PlanError, match="only converted checkpoints have digests") as caught:
        relayout.open(model, 0, tp=1, verify=True)
    assert (caught.value.code, caught.value.path) == ("unsupported", str(model))


def test_on_another_device_tensors_are_copies(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Else "meta" is refused: of the devices that need no driver, only this one is not the host's memory.
    monkeypatch.setattr(Options, "kind", "a device")
    with relayout.open(converted, 0, device="meta") as opened:
        tensor = opened.get_tensor("lm_head.weight")
        assert (tensor.device.type, tuple(tensor.shape)) == ("meta", (128, 33))
        assert opened.get_slice("lm_head.weight")[3:5].device.type == "meta"


def test_bytes_are_read_when_they_are_used(tmp_path: Path) -> None:
    sizes = {f"t.{n:02}": (torch.uint8, (4 * MIB // 4096 + n, 4096)) for n in range(10)}
    relayout.convert(write_model(tmp_path / "source", sizes), tmp_path / "out")
    script = (
        MEASURE
        + """
folder = sys.argv[1]
with relayout.open(folder, 0) as opened:
    opened.get_tensor("t.09").sum(), opened.get_slice("t.09")[3:5]  # What is imported is read, too.
forget(folder)
del opened
found = []
start = drive_nbytes()
opened = relayout.open(folder, 0)
found.append(drive_nbytes() - start)
tensor = opened.get_tensor("t.05")
found.append(drive_nbytes() - start)
found.append(int(tensor.sum()))
found.append(drive_nbytes() - start)
del tensor, opened
forget(folder)
opened = relayout.open(folder, 0)
start = drive_nbytes()
part = opened.get_slice("t.05")[700:704, 5:9]
found += [int(part.sum()), drive_nbytes() - start]
print(json.dumps(found))
"""
    )
    opening, having, total, using, part_total, part = child(script, tmp_path / "out")
    stored = whole_tensors(tmp_path / "out")["t.05"]
    assert (total, part_total) == (int(stored.sum()), int(stored[700:704, 5:9].sum()))
    skip_unless_drives_are_counted(using)
    assert opening <= having <= MIB
    # A page fault may read as much before and behind.
    assert stored.nbytes <= using - having <= stored.nbytes + 3 * readahead(tmp_path)
    assert 0 < part <= 5 * 4096 + 3 * readahead(tmp_path)
    (file,) = rank_files(tmp_path / "out", 0)
    assert len(extents(file)) == 10


# Any rank: as stored, at another degree or plain.


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
    if request.param == "plain":
        return conversions.source("llama"), 2
    return conversions.at("llama", 2 if request.param == "as stored" else 4), 2


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
            held_slice = opened.held_slice(name)
            assert list(held_slice.shape) == whole.get_slice(name).get_shape()
            ranges = held_slice.part.ranges or ((0, held_slice.shape[held_slice.part.axis]),)
            pieces = [whole.get_tensor(name).narrow(held_slice.part.axis, *one) for one in ranges]
            assert torch.equal(torch.cat(pieces, held_slice.part.axis), tensor)


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
            assert (part.get_shape(), part.get_dtype()) == (list(tensor.shape), "BF16")
            assert_equal({name: part[index]}, {name: tensor[index]})
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
    relayout.convert(conversions.source("llama"), tmp_path / "out", tp=2)
    relayout.open(tmp_path / "out", 1, verify=True).close()
    file = tmp_path / "out" / "model-rank-1-part-0.safetensors"
    flip(file, file.stat().st_size - 9)
    relayout.open(tmp_path / "out", 1).close()
    with nothing_left_behind(), pytest.raises(FormatError, match=r"bytes \d+ to \d+ do not match digest"):
        relayout.open(tmp_path / "out", 1, verify=True)


def test_a_file_that_is_cut_while_it_is_mapped_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To use its pages would kill the process."""
    relayout.convert(write_model(tmp_path / "source", {"weight": (torch.uint8, (MIB,))}), tmp_path / "out")
    (file,) = rank_files(tmp_path / "out", 0)
    length = file.stat().st_size
    monkeypatch.setattr(HostBackend, "fill", lambda *_: os.truncate(file, length - 4096))
    with nothing_left_behind(), pytest.raises(FormatError, match=f"ends at byte {length - 4096}, expected {length}"):
        relayout.open(tmp_path / "out", 0)


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


def test_a_view_is_subscripted_and_iterated_by_names(converted: Path) -> None:
    with relayout.open(converted, rank=0) as view:
        names = view.keys()
        assert list(view) == names
        assert (names[0] in view, "nothing" in view) == (True, False)
        assert_equal({"": view[names[0]]}, {"": view.get_tensor(names[0])})
