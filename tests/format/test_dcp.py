"""`.metadata` is parsed as PyTorch writes it, by its own classes; and what contradicts itself is refused."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from relayout.core.extents import Extent
from relayout.core.slices import TensorHead
from relayout.errors import FormatError, PlanError
from relayout.format.dcp import SavedModel, parse_metadata


def metadata(*boxes: tuple[tuple[int, ...], tuple[int, ...]], shape: tuple[int, ...], **info: Any) -> Metadata:
    """What DCP has of one tensor `x`, in boxes of (start, sizes)."""
    chunks = [ChunkStorageMetadata(torch.Size(start), torch.Size(sizes)) for start, sizes in boxes]
    stored = {
        MetadataIndex("x", start): _StorageInfo(**{"relative_path": "__0_0.distcp", "offset": 9, "length": 7, **info})
        for start, _ in boxes
    }
    tensor = TensorStorageMetadata(TensorProperties(torch.float16), torch.Size(shape), chunks)
    entries: dict[str, Any] = {"x": tensor, "step": BytesStorageMetadata()}
    return Metadata(entries, {"x": ("x",), "step": ("step",)}, stored)


def parse(value: Any) -> SavedModel:
    return parse_metadata(pickle.dumps(value), "here")


def test_boxes_have_their_place_in_tensor_and_file() -> None:
    model = parse(metadata(((0, 0), (2, 3)), ((2, 0), (2, 3)), ((4, 0), (0, 3)), shape=(4, 3)))
    [tensor] = model.tensors
    assert tensor.head == TensorHead("x", "F16", (4, 3))
    assert [box.part.by_axis for box in tensor.boxes] == [((0, ((0, 2),)),), ((0, ((2, 2),)),)]
    assert {(box.file, box.extent) for box in tensor.boxes} == {("__0_0.distcp", Extent(9, 7))}
    assert model.left_out == ("step: 1 entries that are not of the model",)


@pytest.mark.parametrize(
    ("boxes", "match"),
    [
        ([((0, 0), (2, 3))], "6 of 12 elements: was the save interrupted"),
        ([((0, 0), (2, 3)), ((1, 0), (2, 3))], "overlap"),
        ([((0, 0), (4, 2)), ((0, 1), (4, 1))], "overlap"),
        ([((0, 0), (3, 2)), ((2, 1), (2, 2)), ((0, 2), (1, 1)), ((3, 0), (1, 1))], "overlap"),
        ([((0, 0), (4, 3)), ((4, 0), (1, 3))], "is not in"),
        ([((0,), (4,))], "is not in"),
    ],
)
def test_boxes_that_do_not_fill_a_tensor_once_are_refused(boxes: list[Any], match: str) -> None:
    with pytest.raises(FormatError, match=match) as error:
        parse(metadata(*boxes, shape=(4, 3)))
    assert error.value.tensor == "x"


def test_a_grid_fills_a_tensor() -> None:
    grid = [((row, column), (2, 1)) for row in (0, 2) for column in (0, 1, 2)]
    assert len(parse(metadata(*grid, shape=(4, 3))).tensors[0].boxes) == 6


@pytest.mark.parametrize("path", ["../x.distcp", "/etc/passwd", "a//b", ".hidden", "", "x\0y"])
def test_a_path_that_leaves_the_folder_is_refused(path: str) -> None:
    with pytest.raises(FormatError):
        parse(metadata(((0,), (4,)), shape=(4,), relative_path=path))


def test_what_is_not_read_says_so() -> None:
    whole = ((0,), (4,))
    with pytest.raises(PlanError, match="compressed by"):
        parse(metadata(whole, shape=(4,), transform_descriptors=["zstd"]))
    with pytest.raises(FormatError, match="no location in a file"):
        parse(metadata(whole, shape=(4,), offset=-1))
    good = metadata(whole, shape=(4,))
    with pytest.raises(FormatError, match="no file has its box"):
        parse(replace(good, storage_data={}))
    with pytest.raises(FormatError, match="'storage_data' is missing"):
        parse(replace(good, storage_data=None))
    with pytest.raises(FormatError, match="expected Metadata"):
        parse({"x": 1})


def test_names_are_kept_where_nothing_tells_how_dicts_were_flattened() -> None:
    model = parse(replace(metadata(((0,), (4,)), shape=(4,)), planner_data=None))
    assert [tensor.head.name for tensor in model.tensors] == ["x"]


class _Exit:
    def __reduce__(self) -> tuple[Any, tuple[int]]:
        return os._exit, (3,)


@pytest.mark.parametrize("place", ["planner_data", "storage_data", "version", "state_dict_metadata"])
def test_a_hostile_metadata_is_not_run(place: str, tmp_path: Path) -> None:
    """Neither here, nor by the command. `pickle.load`, which is PyTorch's own reader, runs it: see test_pickles."""
    blob = pickle.dumps(replace(metadata(((0,), (4,)), shape=(4,)), **{place: _Exit()}))
    with pytest.raises(FormatError, match=r"imports 'posix._exit'.*was not run") as error:
        parse_metadata(blob, "here")
    assert error.value.code == "unsafe"
    if place == "version":
        (tmp_path / ".metadata").write_bytes(blob)
        (tmp_path / "__0_0.distcp").write_bytes(b"\0" * 16)
        command = [sys.executable, "-m", "relayout", "convert", str(tmp_path), "--tp", "1", "-o", str(tmp_path / "out")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, "was not run" in done.stderr) == (2, True), done.stderr


def test_each_byte_of_a_truncated_metadata_is_missed() -> None:
    blob = pickle.dumps(metadata(((0,), (4,)), shape=(4,)))
    for length in range(0, len(blob), 7):
        with pytest.raises(FormatError):
            parse_metadata(blob[:length], "here")
