"""Any single flipped bit of a converted folder is found, and told with its place."""

from __future__ import annotations

import json
import random
import shutil
from itertools import accumulate, chain
from math import prod
from pathlib import Path

import pytest
from safetensors import safe_open
from support.bits import flip

import relayout
from relayout.errors import FormatError


@pytest.fixture(scope="module", params=["ranks", "whole"])
def converted(llama: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.mktemp("flips") / "out"
    relayout.convert(llama, folder, tp=2, align=512, layout=request.param)
    assert relayout.verify(folder).ok
    return folder


def is_whole(folder: Path) -> bool:
    return json.loads((folder / "relayout.json").read_text())["whole"] is not None


def bits_of(path: Path, count: int) -> list[int]:
    """The first and the last bit of a file, some between, and more where headers are."""
    nbytes = path.stat().st_size
    rng = random.Random(path.name)
    between = (rng.sample(range(8 * min(end, nbytes)), count) for end in (nbytes, 20_000))
    return [0, 8 * nbytes - 1, *chain(*between)]


def test_a_flipped_bit_anywhere_is_found_in_its_file(converted: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(converted, folder)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    index = "model.safetensors.index.json"
    packed = {"relayout.chunks", "relayout.digests"}
    assert {"config.json", "relayout.json", "relayout.source.json.zst", index, *packed} < set(names)
    assert ("relayout.whole.json.zst" in names) == is_whole(folder)
    for name in names:
        for bit in bits_of(folder / name, 1):
            flip(folder / name, *divmod(bit, 8))
            try:
                lines = list(map(str, relayout.verify(folder).differences))
            except FormatError as error:
                lines = [str(error)]
            assert any(name in line for line in lines), (name, bit, lines)
            flip(folder / name, *divmod(bit, 8))
    assert relayout.verify(folder).ok


def test_a_flipped_bit_of_a_tensor_is_told_with_tensor_and_bytes(converted: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(converted, folder)
    name = "relayout-rank-1-part-0.slices" if is_whole(folder) else "model-rank-1-part-0.safetensors"
    with safe_open(folder / name, framework="np") as stock:
        start = 8 + int.from_bytes((folder / name).read_bytes()[:8], "little")
        entries = {key: stock.get_slice(key).get_shape() for key in stock.offset_keys()}
    ends = [start + 2 * nelements for nelements in accumulate(map(prod, entries.values()))]
    assert ends[-1] == (folder / name).stat().st_size
    places = list(zip(entries, [start, *ends[:-1]], ends, strict=True))
    for byte_of in (lambda place: place[1], lambda place: place[2] - 1):
        for place in places:
            flip(folder / name, byte_of(place), 3)
        differences = relayout.verify(folder).differences
        assert [(found.file, found.tensor, found.start, found.end) for found in differences] == [
            (name, *place) for place in places
        ]
        for place in places:
            flip(folder / name, byte_of(place), 3)


@pytest.mark.parametrize("converted", ["ranks"], indirect=True)
def test_a_flipped_bit_of_a_chunk_digest_is_found_by_a_load_at_another_degree(converted: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(converted, folder)
    for bit in bits_of(folder / "relayout.chunks", 4):
        flip(folder / "relayout.chunks", *divmod(bit, 8))
        with pytest.raises(FormatError, match=r"relayout\.chunks: its part for .* differs from the manifest"):
            relayout.load(folder, 0, tp=1, verify=True)
        flip(folder / "relayout.chunks", *divmod(bit, 8))
    relayout.load(folder, 0, tp=1, verify=True)


def test_a_flipped_bit_of_a_digest_is_found_by_a_copy_and_by_a_restore_that_uses_it(
    converted: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    shutil.copytree(converted, folder)
    manifest = json.loads((folder / "relayout.json").read_text())
    of_ranks = 0 if manifest["whole"] is None else 16 * sum(rank["num_tensors"] for rank in manifest["ranks"])
    for bit in bits_of(folder / "relayout.digests", 2):
        flip(folder / "relayout.digests", *divmod(bit, 8))
        # Whole tensors are restored by their own digests.
        for make in (relayout.copy, relayout.restore) if bit >= 8 * of_ranks else (relayout.copy,):
            with pytest.raises(FormatError, match=r"relayout\.digests: its part for .* differs from the manifest"):
                make(folder, tmp_path / make.__name__)
        flip(folder / "relayout.digests", *divmod(bit, 8))
    assert relayout.verify(folder).ok
