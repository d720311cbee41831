"""Loads at another degree with `verify`, by the digests of chunks; and files that were never filled."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from support.bits import flip
from support.holes import has_holes
from support.loader_fixtures import MIB, assert_equal, mlp_model

import relayout
from relayout.checkpoint.converted import VerifiedFile, file_digests_of, read_manifest
from relayout.core.extents import Extent
from relayout.errors import FormatError
from relayout.loader.backends.cuda import offer_gds
from relayout.loader.sources.rank import files_of
from relayout.storage.local.store import holes
from relayout.storage.stores import find_input


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four ranks of several chunks each."""
    folder = tmp_path_factory.mktemp("proven")
    mlp_model(folder / "source", num_layers=8)
    relayout.convert(folder / "source", folder / "out", tp=4)
    relayout.convert(folder / "source", folder / "two", tp=2)
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pristine / "out", tmp_path / "out")


@pytest.mark.parametrize("backend", ["auto", "buffered", "direct"])
@pytest.mark.parametrize("kind", ["load", "iter_load", "open"])
def test_a_load_at_another_degree_is_verified(pristine: Path, folder: Path, kind: str, backend: str) -> None:
    def load(rank: int) -> object:
        if kind == "open":
            with relayout.open(folder, rank, tp=2, verify=True) as view:
                return {name: view.get_tensor(name) for name in view.keys()}  # noqa: SIM118 (it is no mapping)
        return dict(getattr(relayout, kind)(folder, rank, tp=2, verify=True, backend=backend))

    expected = relayout.load(pristine / "two", 1)
    assert_equal(load(1), expected)
    file = folder / "model-rank-3-part-0.safetensors"
    assert file.stat().st_size > 2 * MIB
    flip(file, file.stat().st_size - 2 * MIB)
    with pytest.raises(FormatError, match=r"model-rank-3-part-0.safetensors: bytes \d+ to \d+ do not match digest"):
        load(1)
    assert_equal(load(0), relayout.load(pristine / "two", 0))
    assert relayout.load(folder, 1, tp=2)


def test_reads_anywhere_give_the_bytes_of_the_file(folder: Path) -> None:
    store, manifest = find_input(folder), read_manifest(find_input(folder))
    file, blob = manifest.files[0], (folder / manifest.files[0].name).read_bytes()
    opened = VerifiedFile(store.open(file.name), file_digests_of(store, manifest, 0, with_header=True), file.name)
    start, chunk = file.data_start, manifest.chunk_nbytes
    for offset, end in (
        (0, 9),
        (8, 60),
        (60, start),
        (start - 9, start + 9),
        (9, len(blob)),
        (start + chunk - 1, start + chunk + 1),
    ):
        found = memoryview(bytearray(end - offset))
        opened.read(offset, found)
        assert found == blob[offset:end]


def test_a_backend_that_does_not_show_bytes_to_the_host_refuses_to_prove_them(folder: Path) -> None:
    manifest = read_manifest(find_input(folder))
    files = tuple(file.verified() for file in files_of(find_input(folder), manifest, [0]))
    refused = offer_gds("cuda:0", files, True)
    assert isinstance(refused, str)
    assert "use 'pinned' to verify" in refused


def test_digests_of_chunks_that_are_damaged_are_refused(folder: Path) -> None:
    flip(folder / "relayout.chunks", 3)
    with pytest.raises(FormatError, match=r"relayout.chunks: its part for model-rank-0-part-0.safetensors differs"):
        relayout.load(folder, 0, verify=True)
    assert relayout.load(folder, 0)


@pytest.mark.parametrize("tp", [None, 2])
@pytest.mark.parametrize("kind", ["nothing was written", "the middle is missing", "space was reserved"])
def test_a_file_whose_copy_never_finished_is_told_from_one_that_did(folder: Path, kind: str, tp: int | None) -> None:
    """As of a download that reserves the space at first, and dies: length and first bytes are right."""
    if not has_holes(folder):
        pytest.skip("this file system does not tell of holes")
    file = folder / "model-rank-0-part-0.safetensors"
    blob = file.read_bytes()
    file.unlink()
    with file.open("xb") as copy:
        if kind == "space was reserved":
            os.posix_fallocate(copy.fileno(), 0, len(blob))
        else:
            os.truncate(copy.fileno(), len(blob))
        copy.write(blob[: 64 * 1024])
        if kind == "the middle is missing":
            copy.seek(3 * MIB)
            copy.write(blob[3 * MIB :])
        os.fsync(copy.fileno())
    with pytest.raises(FormatError, match=r"model-rank-0-part-0.safetensors: bytes \d+ to \d+ were never written"):
        relayout.load(folder, 0, tp=tp)
    with file.open("r+b") as copy:
        copy.write(blob)
    assert relayout.load(folder, 0, tp=tp)


def test_zeros_that_belong_there_may_be_a_hole(tmp_path: Path) -> None:
    """As `cp --sparse=always` makes them."""
    import torch
    from safetensors.torch import save_file

    (tmp_path / "model").mkdir()
    weights = {"a": torch.arange(MIB, dtype=torch.int32), "zeros": torch.zeros(2 * MIB, dtype=torch.int32)}
    save_file(weights, tmp_path / "model" / "model.safetensors")
    relayout.convert(tmp_path / "model", tmp_path / "out")
    if not has_holes(tmp_path):
        pytest.skip("this file system does not tell of holes")
    [file] = (tmp_path / "out").glob("*.safetensors")
    blob = file.read_bytes()
    with file.open("wb") as copy:
        copy.truncate(len(blob))
        for start in range(0, len(blob), 4096):
            if any(piece := blob[start : start + 4096]):
                copy.seek(start)
                copy.write(piece)
        os.fsync(copy.fileno())
    with file.open("rb") as copy:
        assert list(holes(copy.fileno(), Extent(0, len(blob))))
    assert_equal(relayout.load(tmp_path / "out", 0), weights)


def test_parts_of_chunks_are_of_the_chunk_that_is_asked_for(folder: Path) -> None:
    """In any order: some chunks are kept."""
    store = find_input(folder)
    manifest = read_manifest(store)
    file, stored = manifest.files[0], (folder / manifest.files[0].name).read_bytes()
    assert file.nbytes > file.data_start + 2 * manifest.chunk_nbytes
    with store.open(file.name) as opened:
        verified = VerifiedFile(opened, file_digests_of(store, manifest, 0), file.name)
        for chunk in (1, 0, 1, 0):
            offset, part = file.data_start + chunk * manifest.chunk_nbytes + 64, bytearray(256)
            verified.read(offset, memoryview(part))
            assert part == stored[offset : offset + 256]
