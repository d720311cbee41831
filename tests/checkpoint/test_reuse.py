"""What of a new folder an older one has: planned from the indexes, compared with the bytes in both by numpy."""

from __future__ import annotations

import errno
import json
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from safetensors.numpy import load_file, save_file
from support import toy_store
from support.bits import flip
from support.conversions import Conversions, grouped
from support.models import llama_files

import relayout
from relayout.checkpoint import reuse
from relayout.checkpoint.converted import read_manifest
from relayout.checkpoint.reuse import Contents, Reuse, ReusedRange, plan_reuse
from relayout.core.extents import Extent
from relayout.storage.stores import Store, find_store
from relayout.storage.system import Buffer

TP = 4
NEW_ROWS = 64


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 13 MB, the same with another layer 1, and with more rows in its vocabulary; all at TP 4."""
    place = tmp_path_factory.mktemp("reused")
    for name, vocabulary in (("base", 1024), ("tuned", 1024), ("grown", 1024 + NEW_ROWS)):
        (place / "plain" / name).mkdir(parents=True)
        for file, blob in llama_files(512, head_dim=64, mlp=768, layers=3, vocabulary=1024).items():
            (place / "plain" / name / file).write_bytes(blob)
        for path in (place / "plain" / name).glob("*.safetensors"):
            tensors = load_file(path)
            for tensor in [one for one in tensors if name == "tuned" and "layers.1." in one]:
                tensors[tensor] = -tensors[tensor]
            for tensor in [one for one in tensors if name == "grown" and "embed_tokens" in one]:
                rows = np.flip(tensors[tensor][:NEW_ROWS], axis=1)
                tensors[tensor] = np.concatenate([tensors[tensor], rows])
            save_file(tensors, path, {"format": "pt"})
        config = place / "plain" / name / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": vocabulary}))
        relayout.convert(place / "plain" / name, place / name, tp=TP)
    return place


def contents(folder: Path | str) -> Contents:
    store = find_store(str(folder))
    manifest = read_manifest(store)
    return Contents.read(store, manifest, manifest.holders)


def planned_nbytes(plan: Mapping[int, list[ReusedRange]]) -> int:
    return sum(one.extent.nbytes for taken in plan.values() for one in taken)


def wrong_nbytes(new: Path, old: Path, plan: Mapping[int, list[ReusedRange]]) -> int:
    """Bytes of planned ranges that differ, once each range is inside both files, and they are in order."""
    files, others = (read_manifest(find_store(str(folder))).files for folder in (new, old))
    wrong = 0
    for number, taken in plan.items():
        stored = np.fromfile(new / files[number].name, np.uint8)
        ends = [0, *(one.extent.end for one in taken)]
        assert all(one.extent.offset >= end for one, end in zip(taken, ends, strict=False))
        assert ends[-1] <= len(stored)
        for one in taken:
            there = np.fromfile(old / others[one.file].name, np.uint8)
            assert one.offset + one.extent.nbytes <= len(there)
            ours = stored[one.extent.offset : one.extent.end]
            wrong += int(np.count_nonzero(ours != there[one.offset : one.offset + one.extent.nbytes]))
    return wrong


def test_of_an_unchanged_folder_everything_is_planned_in_one_range_a_file(folders: Path) -> None:
    plan = plan_reuse(contents(folders / "base"), contents(folders / "base"))
    files = read_manifest(find_store(str(folders / "base"))).files
    assert planned_nbytes(plan) == sum(file.nbytes for file in files)
    assert wrong_nbytes(folders / "base", folders / "base", plan) == 0
    assert max(map(len, plan.values())) <= 3  # Header, what is whole chunks, and a tail that all files share.


def test_of_a_fine_tune_all_but_the_changed_layer_is_planned(folders: Path) -> None:
    plan = plan_reuse(contents(folders / "tuned"), contents(folders / "base"))
    assert wrong_nbytes(folders / "tuned", folders / "base", plan) == 0
    tensors = [one for path in (folders / "plain" / "tuned").glob("*.safetensors") for one in load_file(path).items()]
    changed = sum(tensor.nbytes for name, tensor in tensors if "layers.1." in name)
    files = read_manifest(find_store(str(folders / "tuned"))).files
    total = sum(file.nbytes - file.data_start for file in files)
    replicated = sum(3 * tensor.nbytes for name, tensor in tensors if tensor.ndim == 1)
    assert 0 <= total - changed - planned_nbytes(plan) <= replicated + 4 * 2 * reuse._MIN_NBYTES


def test_of_a_larger_vocabulary_all_but_the_new_rows_is_planned(folders: Path) -> None:
    """Each rank's rows are others, and all that lies behind them has moved: no chunk of the first file is the same."""
    new, old = contents(folders / "grown"), contents(folders / "base")
    plan = plan_reuse(new, old)
    assert wrong_nbytes(folders / "grown", folders / "base", plan) == 0
    total = sum(file.nbytes - file.data_start for file in new.manifest.files)
    assert total - planned_nbytes(plan) <= NEW_ROWS * 512 * 2 + 4 * 2 * reuse._MIN_NBYTES
    equal = {new.chunk_digests[0][at : at + 32] for at in range(0, len(new.chunk_digests[0]), 32)}
    assert not equal & {old.chunk_digests[0][at : at + 32] for at in range(0, len(old.chunk_digests[0]), 32)}


def test_with_other_chunks_slices_are_found(folders: Path) -> None:
    base = contents(folders / "base")
    step = 2**16
    chunk_digests = {}
    for number, file in enumerate(base.manifest.files):
        stored = (folders / "base" / file.name).read_bytes()
        pieces = [stored[at : at + step] for at in range(file.data_start, len(stored), step)]
        chunk_digests[number] = b"".join(blake3(piece).digest() for piece in pieces)
    other = Contents(replace(base.manifest, chunk_nbytes=step), chunk_digests, base.tables, base.digests)
    plan = plan_reuse(contents(folders / "tuned"), other)
    assert planned_nbytes(plan) > 0.6 * sum(file.nbytes for file in base.manifest.files)
    assert wrong_nbytes(folders / "tuned", folders / "base", plan) == 0


@pytest.mark.parametrize("name", grouped(["llama", "phi3", "gpt2", "gpt_oss_mxfp4"]))
def test_of_another_degree_or_layout_each_planned_range_has_the_same_bytes(
    conversions: Conversions, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(reuse, "_MIN_NBYTES", 1)  # These checkpoints are small.
    forms = [conversions.at(name, 1), conversions.at(name, 2), conversions.whole(name, 2)]
    for new in forms:
        for old in forms:
            plan = plan_reuse(contents(new), contents(old))
            assert wrong_nbytes(new, old, plan) == 0, (new, old)
            assert planned_nbytes(plan) > 0.2 * sum(file.nbytes for file in contents(new).manifest.files), (new, old)


def test_without_the_table_of_whole_tensors_their_files_are_compared_by_chunks(conversions: Conversions) -> None:
    """A cache has the tables of the ranks that were loaded."""
    folder = conversions.whole("llama", 2)
    store = find_store(str(folder))
    manifest = read_manifest(store)
    plan = plan_reuse(Contents.read(store, manifest, [0]), Contents.read(store, manifest, [0]))
    assert manifest.shared <= plan.keys()
    assert planned_nbytes(plan) == sum(manifest.files[number].nbytes for number in plan)
    assert wrong_nbytes(folder, folder, plan) == 0


def test_of_another_model_nothing_is_planned(conversions: Conversions) -> None:
    plan = plan_reuse(contents(conversions.at("llama", 2)), contents(conversions.at("gpt2", 2)))
    assert set(plan) == {0, 1}
    assert planned_nbytes(plan) == 0


# What is read.


@pytest.fixture
def shelf() -> Iterator[toy_store.Shelf]:
    found = toy_store.shelf("reused")
    found.clear()
    yield found
    found.clear()


def nothing(extent: Extent, view: memoryview) -> None:
    raise AssertionError("the source is not asked")


def filled(new: Contents, older: Store, old: Contents, extent: Extent) -> bytes | None:
    """What a chunk of the first file is filled with."""
    view = memoryview(bytearray(extent.nbytes))
    with Reuse(new, older, old) as found:
        return bytes(view) if found.fill(0, extent, view, Buffer(), nothing) else None


def test_chunks_and_headers_are_filled_and_parts_of_them_are_not(folders: Path) -> None:
    base, store = contents(folders / "base"), find_store(str(folders / "base"))
    file = base.manifest.files[0]
    stored, start, step = (folders / "base" / file.name).read_bytes(), file.data_start, base.manifest.chunk_nbytes
    last = start + (len(stored) - start - 1) // step * step
    for extent in (Extent(0, start), Extent(start, step), Extent(start + step, step), Extent(last, len(stored) - last)):
        assert filled(base, store, base, extent) == stored[extent.offset : extent.end]
    for extent in (Extent(0, 512), Extent(start, step // 2), Extent(start + 4096, step), Extent(last, 16)):
        assert filled(base, store, base, extent) is None


def test_what_the_older_folder_lacks_is_read_by_the_caller(folders: Path) -> None:
    new, store = contents(folders / "grown"), find_store(str(folders / "base"))
    file, asked = new.manifest.files[3], list[Extent]()
    stored = (folders / "grown" / file.name).read_bytes()

    def rest(extent: Extent, view: memoryview) -> None:
        asked.append(extent)
        view[:] = stored[extent.offset : extent.end]

    chunk = Extent(file.data_start, new.manifest.chunk_nbytes)
    view = memoryview(bytearray(chunk.nbytes))
    with Reuse(new, store, contents(folders / "base")) as found:
        assert found.fill(3, chunk, view, Buffer(), rest)
        assert view == stored[chunk.offset : chunk.end]
        assert found.nbytes == chunk.nbytes - sum(extent.nbytes for extent in asked)
    assert sum(extent.nbytes for extent in asked) == NEW_ROWS * 512 * 2  # The last rank has all of the new rows.


def test_other_bytes_than_the_index_says_are_not_used(folders: Path, tmp_path: Path) -> None:
    base = contents(folders / "base")
    file = base.manifest.files[0]
    damaged = tmp_path / file.name
    damaged.write_bytes((folders / "base" / file.name).read_bytes())
    flip(damaged, file.data_start + 5000)
    chunk = Extent(file.data_start, base.manifest.chunk_nbytes)
    assert filled(base, find_store(str(tmp_path)), base, chunk) is None
    after = Extent(chunk.end, chunk.nbytes)
    assert filled(base, find_store(str(tmp_path)), base, after) == damaged.read_bytes()[after.offset : after.end]


@pytest.mark.parametrize("fault", ["missing", "short", "folder", "link"])
def test_a_file_that_is_no_longer_there_is_given_up_alone(folders: Path, tmp_path: Path, fault: str) -> None:
    base = contents(folders / "base")
    for file in base.manifest.files:
        (tmp_path / file.name).write_bytes((folders / "base" / file.name).read_bytes())
    first, start = tmp_path / base.manifest.files[0].name, base.manifest.files[0].data_start
    if fault == "short":
        first.write_bytes(first.read_bytes()[:-1])
    else:
        first.unlink()
    if fault == "folder":
        first.mkdir()
    if fault == "link":
        first.symlink_to(folders / "base" / first.name)  # Leads out of the checkpoint.
    chunk = Extent(start, base.manifest.chunk_nbytes)
    view = memoryview(bytearray(chunk.nbytes))
    with Reuse(base, find_store(str(tmp_path)), base) as found:
        assert not found.fill(0, chunk, view, Buffer(), nothing)
        assert found.fill(1, chunk, view, Buffer(), nothing)


def test_a_store_that_fails_is_asked_once(folders: Path, shelf: toy_store.Shelf) -> None:
    for path in (folders / "base").iterdir():
        shelf.write(f"old/{path.name}", path.read_bytes())
    base = contents("toy://reused/old")
    chunk = Extent(base.manifest.files[0].data_start, base.manifest.chunk_nbytes)
    view = memoryview(bytearray(chunk.nbytes))
    broken = toy_store.Fault("read", times=None, error=lambda: OSError(errno.ETIMEDOUT, "no answer"))
    shelf.faults.append(broken)
    with Reuse(base, find_store("toy://reused/old").snapshot(), base) as found:
        for number in range(TP):
            assert not found.fill(number, chunk, view, Buffer(), nothing)
    assert broken.num_struck == 1


# Blocks that are shared.


class Sharing:
    """An output on a file system whose files can share blocks: here the bytes are copied, and read back."""

    nbytes = 0

    def __init__(self, *, is_able: bool = True, damage: int = 0) -> None:
        self.is_able = is_able
        self.damage = damage
        self.asked: list[int] = []

    def clone(self, source: int, source_offset: int, offset: int, view: memoryview) -> bool:
        self.asked.append(offset)
        if self.is_able:
            with mmap.mmap(-1, view.nbytes) as aligned:  # The descriptor may be one of direct I/O.
                assert os.preadv(source, [aligned], source_offset) == view.nbytes
                view[:] = aligned[:]
            view[100] ^= self.damage
        return self.is_able

    def write(self, offset: int, view: memoryview, address: int = 0) -> None:
        raise AssertionError("nothing is written")

    def close(self) -> None:
        pass


def cloned(folder: Path, index: Contents, extents: list[Extent], output: Sharing) -> tuple[list[bool], int]:
    """What of the first file shares blocks with the same folder, and the bytes that are counted for it."""
    done, stored = list[bool](), (folder / index.manifest.files[0].name).read_bytes()
    with Reuse(index, find_store(str(folder)), index) as found:
        for extent in extents:
            view = memoryview(bytearray(extent.nbytes))
            done.append(found.clone(0, extent, output, view))  # type: ignore[arg-type]
            assert not done[-1] or view == stored[extent.offset : extent.end]
        assert found.nbytes == found.shared_nbytes
        return done, found.shared_nbytes


def test_whole_chunks_share_blocks_and_nothing_else_does(folders: Path) -> None:
    base = contents(folders / "base")
    file, step = base.manifest.files[0], base.manifest.chunk_nbytes
    first = Extent(file.data_start, step)
    others = [Extent(0, file.data_start), Extent(first.offset, step // 2), Extent(first.offset + 512, step)]
    output = Sharing()
    assert cloned(folders / "base", base, [first, *others], output) == ([True, False, False, False], step)
    assert output.asked == [first.offset]


def test_a_chunk_that_has_moved_by_less_than_a_block_is_read(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = contents(folders / "base")
    chunk = Extent(base.manifest.files[0].data_start, base.manifest.chunk_nbytes)
    moved = {0: [ReusedRange(chunk, 0, chunk.offset + 16)]}
    monkeypatch.setattr(reuse, "plan_reuse", lambda new, old: moved)
    output = Sharing()
    assert cloned(folders / "base", base, [chunk], output) == ([False], 0)
    assert output.asked == []


def test_shared_blocks_with_other_bytes_are_not_used(folders: Path) -> None:
    """The older file may change until the blocks are shared, and never after: what is verified is the new file."""
    base = contents(folders / "base")
    file, step = base.manifest.files[0], base.manifest.chunk_nbytes
    chunks = [Extent(file.data_start + at * step, step) for at in range(2)]
    output = Sharing(damage=1)
    assert cloned(folders / "base", base, chunks, output) == ([False, False], 0)
    assert len(output.asked) == 2


def test_a_file_system_without_shared_blocks_is_asked_once(folders: Path) -> None:
    base = contents(folders / "base")
    file, step = base.manifest.files[0], base.manifest.chunk_nbytes
    chunks = [Extent(file.data_start + at * step, step) for at in range(2)]
    output = Sharing(is_able=False)
    assert cloned(folders / "base", base, chunks, output) == ([False, False], 0)
    assert len(output.asked) == 1


def test_a_store_without_descriptors_shares_nothing(folders: Path, shelf: toy_store.Shelf) -> None:
    for path in (folders / "base").iterdir():
        shelf.write(f"old/{path.name}", path.read_bytes())
    base = contents("toy://reused/old")
    chunk = Extent(base.manifest.files[0].data_start, base.manifest.chunk_nbytes)
    output = Sharing()
    with Reuse(base, find_store("toy://reused/old").snapshot(), base) as found:
        view = memoryview(bytearray(chunk.nbytes))
        assert not found.clone(0, chunk, output, view)  # type: ignore[arg-type]
    assert output.asked == []
