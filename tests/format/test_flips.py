"""Any single flipped bit of a converted folder is found, and told with its place."""

from __future__ import annotations

import random
import shutil
from itertools import chain
from math import prod
from pathlib import Path

import pytest
from safetensors import safe_open
from support.bits import flip

import relayout
from relayout.errors import FormatError


@pytest.fixture(scope="module")
def converted(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flips") / "out"
    relayout.convert(llama, folder, tp=2, align=512)
    assert relayout.verify(folder).ok
    return folder


def bits_of(path: Path, number: int) -> list[int]:
    """The first and the last bit of a file, some between, and more where headers are."""
    nbytes = path.stat().st_size
    rng = random.Random(path.name)
    between = (rng.sample(range(8 * min(end, nbytes)), number) for end in (nbytes, 20_000))
    return [0, 8 * nbytes - 1, *chain(*between)]


def test_a_flipped_bit_anywhere_is_found_in_its_file(converted: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(converted, folder)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    assert {"config.json", "relayout.json", "relayout.rank-1.json.zst", "relayout.source.json.zst"} < set(names)
    for name in names:
        for bit in bits_of(folder / name, 8):
            flip(folder / name, *divmod(bit, 8))
            try:
                told = [str(one) for one in relayout.verify(folder).differences]
            except FormatError as error:
                told = [str(error)]
            assert any(name in line for line in told), (name, bit, told)
            flip(folder / name, *divmod(bit, 8))
    assert relayout.verify(folder).ok


def test_a_flipped_bit_of_a_tensor_is_told_with_tensor_and_bytes(converted: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(converted, folder)
    name = "model-rank-1-part-0.safetensors"
    with safe_open(folder / name, framework="np") as stock:
        start = 8 + int.from_bytes((folder / name).read_bytes()[:8], "little")
        entries = {key: stock.get_slice(key).get_shape() for key in stock.offset_keys()}
    for key, shape in entries.items():
        end = start + 2 * prod(shape)
        for byte in (start, end - 1):
            flip(folder / name, byte, 3)
            [found] = relayout.verify(folder).differences
            assert (found.file, found.tensor, found.start, found.end) == (name, key, start, end)
            flip(folder / name, byte, 3)
        start = end
    assert start == (folder / name).stat().st_size
