"""Digests that are checked while bytes arrive: what has not arrived is not taken for checked."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from relayout.core.workers import Stop
from relayout.errors import FormatError
from relayout.loader.backends.digests import Checks

SIZES = (1000, 0, 48, 5000)
OFFSETS = (0, 1008, 1008, 1056)
WHOLE = np.random.default_rng(5).integers(0, 256, 6056, dtype=np.uint8)


@pytest.fixture
def checks() -> Checks:
    digests = [
        xxhash.xxh3_128_hexdigest(WHOLE[offset : offset + size].tobytes())
        for offset, size in zip(OFFSETS, SIZES, strict=True)
    ]
    return Checks(["one", "none", "two", "three"], OFFSETS, SIZES, digests, lambda offset: f"file of {offset}", Stop())


def test_all_bytes_in_any_pieces_are_all_tensors(checks: Checks) -> None:
    for start, end in ((0, 3), (3, 1020), (1020, 1056), (1056, 5999), (5999, 6056)):
        checks.update(start, WHOLE[start:end].data)
    checks.finish()


@pytest.mark.parametrize(
    ("arrived", "num_left"),
    [
        ([], 3),
        ([(0, 3028)], 1),
        ([(0, 999)], 3),
        ([(0, 1000), (1056, 6056)], 1),
        ([(0, 6055)], 1),
        ([(1056, 3000), (0, 1056)], 1),
    ],
)
def test_bytes_that_never_arrived_are_told_in_the_end(
    checks: Checks, arrived: list[tuple[int, int]], num_left: int
) -> None:
    for start, end in arrived:
        checks.update(start, WHOLE[start:end].data)
    with pytest.raises(
        FormatError, match=rf"^file of (0|1008|1056): {num_left} tensors could not be checked: their bytes did"
    ):
        checks.finish()
