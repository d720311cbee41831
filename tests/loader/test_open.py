"""`relayout.open` beside the stock `safetensors.safe_open`: the same answers, from one rank's files as one."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
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
from support.models import as_integers

import relayout
from relayout.errors import FormatError, PlanError


def rank_files(folder: Path, rank: int) -> list[Path]:
    return sorted(folder.glob(f"model-rank-{rank}-part-*.safetensors"))


def test_keys_are_those_of_the_files_in_their_order(converted: Path) -> None:
    for rank in range(2):
        expected = []
        for file in rank_files(converted, rank):
            with safe_open(file, framework="pt") as stock:
                expected += stock.offset_keys()
        with relayout.open(converted, rank) as opened:
            assert opened.keys() == opened.offset_keys() == expected
            assert (opened.rank, opened.num_ranks) == (rank, 2)


def test_tensors_are_those_of_the_stock_reader(converted: Path) -> None:
    for rank in range(2):
        stored = whole_tensors(converted, f"model-rank-{rank}-*")
        with relayout.open(str(converted), rank) as opened:
            assert_equal({name: opened.get_tensor(name) for name in opened.keys()}, stored)  # noqa: SIM118
            assert_equal({name: opened.get_slice(name)[...] for name in opened.keys()}, stored)  # noqa: SIM118


def test_shapes_dtypes_and_metadata_are_those_of_the_stock_reader(converted: Path) -> None:
    with relayout.open(converted, 1) as opened:
        for number, file in enumerate(rank_files(converted, 1)):
            with safe_open(file, framework="pt") as stock:
                if number == 0:
                    assert opened.metadata() == stock.metadata()
                    assert opened.metadata()["format"] == "pt"
                for name in stock.keys():  # noqa: SIM118
                    mine, theirs = opened.get_slice(name), stock.get_slice(name)
                    assert mine.get_shape() == theirs.get_shape()
                    assert mine.get_dtype() == theirs.get_dtype()


def test_what_a_slice_gives_has_memory_of_its_own(converted: Path) -> None:
    name = "model.layers.1.mlp.gate_proj.weight"
    with relayout.open(converted, 0) as opened:
        part = opened.get_slice(name)[3:5]
        assert part.untyped_storage().nbytes() == part.nbytes
        before = opened.get_tensor(name).clone()
        part.zero_()
        assert_equal({name: opened.get_tensor(name)}, {name: before})


def test_place_says_where_numpy_finds_the_slice_in_the_whole(model: Path, converted: Path) -> None:
    whole = {name: as_integers(tensor) for name, tensor in whole_tensors(model).items()}
    axes = set()
    for rank in range(2):
        with relayout.open(converted, rank) as opened:
            for name in opened.keys():  # noqa: SIM118
                place = opened.place(name)
                assert place.shape == whole[name].shape
                expected = whole[name]
                if place.part.ranges is not None:
                    taken = [np.arange(start, start + length) for start, length in place.part.ranges]
                    expected = np.take(expected, np.concatenate(taken), place.part.axis)
                    axes.add(place.part.axis)
                np.testing.assert_array_equal(as_integers(opened.get_tensor(name)), expected, err_msg=name)
    assert axes == {0, 1}


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
        for call in (opened.get_tensor, opened.get_slice, opened.place):
            with pytest.raises(PlanError, match="is closed"):
                call("lm_head.weight")
        opened.close()
    shutil.rmtree(folder)
    assert_equal(kept, stored)
    assert torch.equal(part[1:3], stored["lm_head.weight"][1:3])


def test_it_holds_no_file_open(converted: Path) -> None:
    before = open_files()
    with relayout.open(converted, 0) as opened:
        assert opened.get_tensor("lm_head.weight").sum() != 0
        assert open_files().items() <= before.items()


def test_a_tensor_that_the_rank_does_not_have_is_named(converted: Path) -> None:
    with relayout.open(converted, 1) as opened:
        for call in (opened.get_tensor, opened.get_slice, opened.place):
            with pytest.raises(PlanError, match=r"out: rank 1 has no tensor 'model\.norm'"):
                call("model.norm")


def test_what_cannot_be_opened_is_refused(model: Path, converted: Path, tmp_path: Path) -> None:
    with nothing_left_behind():
        with pytest.raises(PlanError, match="source: not converted"):
            relayout.open(model, 0)
        with pytest.raises(PlanError, match="nothing: no such file or folder"):
            relayout.open(tmp_path / "nothing", 0)
        for rank in (-1, 2):
            with pytest.raises(PlanError, match=f"rank {rank}, expected 0 to 1"):
                relayout.open(converted, rank)
        with pytest.raises(PlanError, match="device 'cuda:77': "):
            relayout.open(converted, 0, device="cuda:77")
        folder = Path(shutil.copytree(converted, tmp_path / "copy"))
        file = rank_files(folder, 0)[1]
        with file.open("ab") as stream:
            stream.write(b"x")
        with pytest.raises(FormatError, match=r"part-1\.safetensors: \d+ bytes long, expected \d+"):
            relayout.open(folder, 0)


def test_on_another_device_tensors_are_copies(converted: Path) -> None:
    with relayout.open(converted, 0, device="meta") as opened:
        tensor = opened.get_tensor("lm_head.weight")
        assert (tensor.device.type, tuple(tensor.shape)) == ("meta", (128, 33))
        assert opened.get_slice("lm_head.weight")[3:5].device.type == "meta"


def test_bytes_are_read_when_they_are_used(tmp_path: Path) -> None:
    sizes = {f"t.{n:02}": (torch.uint8, (4 * MIB // 4096 + n, 4096)) for n in range(16)}
    relayout.convert(write_model(tmp_path / "source", sizes), tmp_path / "out")
    script = (
        MEASURE
        + """
folder = sys.argv[1]
with relayout.open(folder, 0) as opened:
    opened.get_tensor("t.15").sum(), opened.get_slice("t.15")[3:5]  # What is imported is read, too.
forget(folder)
del opened
found = []
start = drive_nbytes()
opened = relayout.open(folder, 0)
found.append(drive_nbytes() - start)
tensor = opened.get_tensor("t.08")
found.append(drive_nbytes() - start)
found.append(int(tensor.sum()))
found.append(drive_nbytes() - start)
del tensor, opened
forget(folder)
opened = relayout.open(folder, 0)
start = drive_nbytes()
part = opened.get_slice("t.08")[700:704, 5:9]
found += [int(part.sum()), drive_nbytes() - start]
print(json.dumps(found))
"""
    )
    opening, having, total, using, part_total, part = child(script, tmp_path / "out")
    stored = whole_tensors(tmp_path / "out")["t.08"]
    assert (total, part_total) == (int(stored.sum()), int(stored[700:704, 5:9].sum()))
    skip_unless_drives_are_counted(using)
    assert opening <= having <= MIB
    # A page fault may read as much before and behind.
    assert stored.nbytes <= using - having <= stored.nbytes + 3 * readahead(tmp_path)
    assert 0 < part <= 5 * 4096 + 3 * readahead(tmp_path)
    (file,) = rank_files(tmp_path / "out", 0)
    assert len(extents(file)) == 16
