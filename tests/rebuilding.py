"""Puts a source's tensors together again from converted rank files, which stock safetensors reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from conftest import read_tensors

from relayout.folder import read_manifest, read_table
from relayout.slicing import Slice

Array = npt.NDArray[Any]


def indices(part: Slice) -> Array:
    """The indices along the slice's axis, in the order in which they are held."""
    assert part.ranges is not None
    return np.concatenate([np.arange(0), *(np.arange(start, start + length) for start, length in part.ranges)])


def ranks_of(out: Path) -> Iterator[tuple[int, dict[str, tuple[Slice, Array]]]]:
    """Each rank and what it holds: the slice by its table, the bytes by stock safetensors."""
    manifest = read_manifest(out)
    for rank in range(manifest.num_ranks):
        table = read_table(out, manifest, rank)
        stored = read_tensors(out, f"model-rank-{rank}-part-*.safetensors")
        assert stored.keys() == set(table.names)
        yield rank, {name: (part, stored[name]) for name, part in zip(table.names, table.slices, strict=True)}


def assert_ranks_give_back(out: Path, whole: Mapping[str, Array], num_ranks: int) -> None:
    """Every element of every tensor is held, with the source's bytes, by every rank that holds it."""
    rebuilt = {name: np.zeros_like(array) for name, array in whole.items()}
    covered = {name: np.zeros(array.shape, bool) for name, array in whole.items()}
    last = -1
    for last, held in ranks_of(out):
        assert held.keys() <= whole.keys()
        for name, (part, stored) in held.items():
            where = f"{name}, rank {last}"
            if part.ranges is None:
                np.testing.assert_array_equal(stored, whole[name], err_msg=where)
                rebuilt[name][...], covered[name][...] = stored, True
                continue
            array, seen = (np.moveaxis(one[name], part.axis, 0) for one in (rebuilt, covered))
            mine, rows = np.moveaxis(stored, part.axis, 0), indices(part)
            assert len(mine) == len(rows), where
            assert np.array_equal(array[rows][seen[rows]], mine[seen[rows]]), f"{where}: ranks differ"
            array[rows], seen[rows] = mine, True
    assert last == num_ranks - 1
    for name, array in whole.items():
        assert covered[name].all(), f"{name}: elements that no rank holds"
        np.testing.assert_array_equal(rebuilt[name], array, err_msg=name)
