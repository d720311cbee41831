"""Units: each reads its own tensors alone, and writes its own files from front to back."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from support.local_stores import read_source, staging_folder
from support.planning import conversion_of, plan_of

from relayout.conversion.copy import run_steps, run_unit
from relayout.conversion.layout import Conversion
from relayout.conversion.steps import CopyPlan, Target
from relayout.core.slices import NOT_HELD, WHOLE, Slice
from relayout.storage.local.files import InputFile

NUM_RANKS = 4
ROWS, COLUMNS = 16, 24


def slices_of(kind: str, shape: tuple[int, ...]) -> tuple[Slice, ...]:
    """How a tensor of a kind is cut for four ranks."""
    match kind:
        case "rows" | "columns":
            axis = int(kind == "columns")
            share = shape[axis] // NUM_RANKS
            return tuple(Slice.along(axis, ((rank * share, share),)) for rank in range(NUM_RANKS))
        case "shared":  # By two ranks each.
            return tuple(Slice.along(0, ((rank // 2 * shape[0] // 2, shape[0] // 2),)) for rank in range(NUM_RANKS))
        case "interleaved":  # Held part by part, stored group by group.
            size = shape[0] // 8
            return tuple(
                Slice.along(
                    0, tuple(((2 * rank + group) * size + part, 1) for part in range(size) for group in range(2))
                )
                for rank in range(NUM_RANKS)
            )
        case "owned":
            return tuple(WHOLE if rank == shape[1] % NUM_RANKS else NOT_HELD for rank in range(NUM_RANKS))
    return (WHOLE,) * NUM_RANKS


KINDS = ["rows", "columns", "shared", "interleaved", "owned", "whole"]


def planned(folder: Path, kinds: list[str], widths: list[int], max_part_nbytes: int) -> Conversion:
    """A conversion of tensors of these kinds, whose bytes depend on their positions."""
    source = folder / "model"
    source.mkdir(exist_ok=True)
    arrays = {
        f"{t:02}": ((np.arange(ROWS * width) + 1) * (2654435761 + t) >> 7).astype(np.uint16).reshape(ROWS, width)
        for t, width in enumerate(widths)
    }
    half = len(arrays) // 2
    for number, names in enumerate((list(arrays)[:half], list(arrays)[half:])):
        save_file({name: arrays[name] for name in names}, source / f"model-{number}.safetensors")
    checkpoint = read_source(source)
    plan = plan_of("x", NUM_RANKS, [slices_of(kind, arrays[f"{t:02}"].shape) for t, kind in enumerate(kinds)])
    return conversion_of(checkpoint, plan, 512, max_part_nbytes)


class Noting:
    """Notes what is put, and where."""

    def __init__(self) -> None:
        self.places: list[tuple[int, int, int]] = []

    def put(self, target: Target, view: memoryview, address: int) -> None:
        self.places.append((target.file, target.offset, view.nbytes))


@st.composite
def models(draw: st.DrawFn) -> tuple[list[str], list[int], int]:
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=10))
    widths = [draw(st.sampled_from([1, 2, 4, 7, 16])) * NUM_RANKS for _ in kinds]
    return kinds, widths, draw(st.sampled_from([300, 2000, 10**6]))


@settings(max_examples=25)
@given(model=models())
def test_a_unit_writes_its_files_from_front_to_back_and_reads_its_tensors_alone(
    tmp_path_factory: pytest.TempPathFactory, model: tuple[list[str], list[int], int]
) -> None:
    conversion = planned(tmp_path_factory.mktemp("units"), *model)
    tensors = conversion.source.tensors
    for unit, held in enumerate(conversion.layout.units):
        sink = Noting()
        steps = list(CopyPlan(conversion, chunk_nbytes=4096, small_nbytes=600).steps(unit))
        run_steps(conversion, steps, sink.put, threads=1)
        for number, file in enumerate(conversion.layout.files):
            end = file.data_start
            for offset, nbytes in ((o, n) for f, o, n in sink.places if f == number):
                assert offset == end
                end += nbytes
            is_of_unit = number in range(unit * NUM_RANKS, (unit + 1) * NUM_RANKS)
            assert end == (file.nbytes if is_of_unit else file.data_start)
        covered = sorted((t, extent) for step in steps for t, extent in step.tensors)
        assert {t for t, _ in covered} == set(held)
        for t in held:
            extents = [extent for other, extent in covered if other == t]
            assert sum(extent.nbytes for extent in extents) == tensors[t].extent.nbytes
            assert all(a.end == b.offset for a, b in pairwise(extents))


@settings(max_examples=25)
@given(model=models(), ranks=st.sets(st.integers(0, NUM_RANKS - 1), min_size=1))
def test_some_ranks_get_what_they_get_of_all_and_only_the_rows_that_they_need_are_read(
    tmp_path_factory: pytest.TempPathFactory, model: tuple[list[str], list[int], int], ranks: set[int]
) -> None:
    conversion = planned(tmp_path_factory.mktemp("units"), *model)
    some = conversion.only(ranks)
    written: list[dict[str, bytearray]] = []
    for one in (conversion, some):
        files = {file.name: bytearray(file.nbytes) for file in one.layout.files}
        written.append(files)

        def put(target: Target, view: memoryview, address: int, one: Conversion = one, files: Any = files) -> None:
            files[one.layout.files[target.file].name][target.offset : target.offset + view.nbytes] = view

        plan = CopyPlan(one, chunk_nbytes=4096, small_nbytes=600)
        steps = [step for unit in range(len(one.layout.units)) for step in plan.steps(unit)]
        digests = run_steps(one, steps, put, threads=1)
    own = {name for name in written[0] if any(f"-rank-{rank}-" in name for rank in ranks)}
    assert written[1] == {name: written[0][name] for name in own}
    for t, tensor in enumerate(some.source.tensors):
        kind, row_nbytes = model[0][t], tensor.extent.nbytes // ROWS
        slices = [slices_of(kind, tensor.shape)[rank] for rank in ranks]
        needed = np.zeros((ROWS, row_nbytes), int)
        for part in (part for part in slices if part.is_held):
            rows = None if kind == "columns" else part.ranges_along(0)
            for start, length in [(0, ROWS)] if rows is None else rows:
                needed[start : start + length] = 1
        read = np.zeros(ROWS * row_nbytes, int)
        for extent in (extent for step in steps for other, extent in step.tensors if other == t):
            read[extent.offset - tensor.extent.offset : extent.end - tensor.extent.offset] += 1
        assert np.array_equal(read.reshape(ROWS, -1), needed)
        is_known = t in digests and digests[t].source is not None
        assert is_known == bool(needed.all())


def test_memory_does_not_grow_with_the_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of slices that are stored in another order than the source's, too."""
    widths = [40 * NUM_RANKS] * 200
    conversion = planned(tmp_path, [KINDS[t % len(KINDS)] for t in range(200)], widths, 10**9)
    chunk_nbytes = 16 * 1024
    for small_nbytes in (0, 10**6):
        plan = CopyPlan(conversion, chunk_nbytes=chunk_nbytes, small_nbytes=small_nbytes)
        for step in plan.steps(0):
            staged = sum(span.nbytes for span in step.spans)
            read = sum(one.extent.nbytes for one in step.ranges)
            assert max(staged, read) <= 4 * chunk_nbytes
    requests: list[int] = []
    true_read = InputFile.read

    def read_and_note(self: InputFile, offset: int, view: memoryview) -> None:
        requests.append(view.nbytes)
        true_read(self, offset, view)

    monkeypatch.setattr(InputFile, "read", read_and_note)
    with staging_folder(tmp_path / "out") as staging:
        run_unit(CopyPlan(conversion, chunk_nbytes=chunk_nbytes), 0, staging)
    assert max(requests) <= 2 * chunk_nbytes
