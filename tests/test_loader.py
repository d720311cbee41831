"""The loader: one suite that every backend passes, and what it refuses."""

from __future__ import annotations

import json
import os
import shutil
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import as_integers, expected_slice, read_tensors
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import relayout
from relayout.errors import FormatError, PlanError
from relayout.extents import Transfer
from relayout.index import Read
from relayout.loader.arena import HUGE_PAGE, allocate
from relayout.loader.backends import BACKENDS, StoredFile, choose_backend
from relayout.loader.readplan import plan_chunks

MIB = 2**20


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def converted(llama: Path, tmp_path: Path) -> Path:
    relayout.convert(llama, tmp_path / "out", tp=4, max_part_nbytes=200_000)
    return tmp_path / "out"


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sizes that are multiples of nothing, several of each, between larger ones; over one chunk in all."""
    folder = tmp_path_factory.mktemp("odd") / "source"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    sizes = [1, 3, 3, 5, 16, 17, 24, 4096, 4097, 0, 9 * MIB, 9 * MIB + 2, 100_000, 33]
    tensors = {
        f"layer.{n}.x": torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        for n, size in enumerate(sizes)
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_rank_is_equal_to_numpy_slices_of_the_source(converted: Path, llama: Path, backend: str) -> None:
    whole = read_tensors(llama)
    for rank in range(4):
        held = relayout.load(converted, rank, backend=backend)
        assert held.keys() == whole.keys()
        for name, tensor in held.items():
            assert tensor.dtype == torch.bfloat16
            np.testing.assert_array_equal(as_integers(tensor), expected_slice(name, whole[name], rank, 4), err_msg=name)


@pytest.mark.parametrize("align", [512, 4096, 2 * MIB])
@pytest.mark.parametrize("max_part_nbytes", [10**9, 10 * MIB])
def test_odd_sizes_arrive_whole_and_at_multiples_of_16(
    odd: Path, tmp_path: Path, backend: str, align: int, max_part_nbytes: int
) -> None:
    relayout.convert(odd, tmp_path / "out", align=align, max_part_nbytes=max_part_nbytes)
    held = relayout.load(tmp_path / "out", 0, backend=backend)
    whole = read_tensors(odd)
    assert held.keys() == whole.keys()
    for name, tensor in held.items():
        assert tensor.data_ptr() % 16 == 0
        np.testing.assert_array_equal(tensor.numpy(), whole[name], err_msg=name)


def test_tensors_share_one_allocation_of_the_ranks_bytes(converted: Path, backend: str) -> None:
    held = relayout.load(converted, 1, backend=backend)
    assert len({tensor.untyped_storage().data_ptr() for tensor in held.values()}) == 1
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in held.values())
    files = len(list(converted.glob("model-rank-1-part-*")))
    assert nbytes <= next(iter(held.values())).untyped_storage().nbytes() <= nbytes + (files + 1) * 4096


def test_tensors_are_writable_and_outlive_everything_else(converted: Path, backend: str) -> None:
    tensor = relayout.load(converted, 1, backend=backend)["model.norm.weight"]
    shutil.rmtree(converted)
    before = tensor.clone()
    tensor += 1
    assert torch.equal(tensor, before + 1)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_plain_folder_is_sliced_on_the_fly(llama: Path, backend: str, tp: int) -> None:
    whole = read_tensors(llama)
    rank = tp - 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        held = relayout.load(llama, rank, tp=tp, backend=backend)
    assert [str(one.message).count("relayout convert") for one in caught] == ([1] if tp > 1 else [])
    assert held.keys() == whole.keys()
    for name, tensor in held.items():
        assert tensor.data_ptr() % 16 == 0
        np.testing.assert_array_equal(as_integers(tensor), expected_slice(name, whole[name], rank, tp), err_msg=name)


def test_large_column_cuts_of_a_plain_folder_are_right(tmp_path: Path, backend: str) -> None:
    """Larger than a chunk, at odd file offsets; rows wider than what is read one by one, and narrower."""
    tensors = {
        "model.layers.0.mlp.down_proj.weight": torch.arange(3000 * 2048, dtype=torch.int32).reshape(3000, 2048),
        "model.layers.1.mlp.down_proj.weight": torch.arange(9 * 600_000, dtype=torch.int32).reshape(9, -1),
        "model.layers.2.mlp.up_proj.weight": torch.arange(4098 * 1000, dtype=torch.int32).reshape(4098, 1000),
    }
    save_file(tensors | {"model.norm.weight": torch.arange(3, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for rank in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            held = relayout.load(tmp_path, rank, tp=2, backend=backend)
        for name, tensor in tensors.items():
            axis = 0 if "up_proj" in name else 1
            np.testing.assert_array_equal(held[name].numpy(), np.split(tensor.numpy(), 2, axis)[rank], err_msg=name)


def test_the_slower_way_is_told_at_the_callers_line(llama: Path) -> None:
    with pytest.warns(UserWarning, match="relayout convert .* --tp 2") as caught:
        relayout.load(llama, 0, tp=2)
    assert Path(caught[0].filename).name == Path(__file__).name


@pytest.mark.parametrize(
    ("rank", "options", "message"),
    [
        (4, {}, r"rank 4, expected 0 to 3"),
        (-1, {}, r"rank -1, expected 0 to 3"),
        (0, {"tp": 2}, r"converted for tp=4, asked for tp=2"),
        (0, {"backend": "magic"}, r"backend 'magic', expected one of"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(
    converted: Path, rank: int, options: dict[str, int], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        relayout.load(converted, rank, **options)  # type: ignore[arg-type]


def test_a_plain_folder_without_a_degree_is_refused(llama: Path) -> None:
    with pytest.raises(PlanError, match=r"not converted .* say tp=N"):
        relayout.load(llama, 0)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no such file or folder"):
        relayout.load(tmp_path / "nothing", 0)


def _swap_ranks(folder: Path) -> None:
    one, other = sorted(folder.glob("model-rank-[01]-part-0.safetensors"))
    spare = one.with_suffix(".spare")
    one.rename(spare)
    other.rename(one)
    spare.rename(other)


def _truncate(folder: Path) -> None:
    path = folder / "model-rank-0-part-1.safetensors"
    os.truncate(path, path.stat().st_size - 1)


def _grow(folder: Path) -> None:
    with (folder / "model-rank-0-part-1.safetensors").open("ab") as file:
        file.write(b"x")


def _other_table(folder: Path) -> None:
    shutil.copy(folder / "relayout.rank-1.json.zst", folder / "relayout.rank-0.json.zst")


def _garbage_table(folder: Path) -> None:
    (folder / "relayout.rank-0.json.zst").write_bytes(b"no zstd frame")


def _no_table(folder: Path) -> None:
    (folder / "relayout.rank-0.json.zst").unlink()


def _garbage_manifest(folder: Path) -> None:
    (folder / "relayout.json").write_text("{")


def _newer_manifest(folder: Path) -> None:
    path = folder / "relayout.json"
    path.write_text(path.read_text().replace('"relayout": 1', '"relayout": 2'))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_swap_ranks, "its header is not of rank 0, part 0, of this conversion|bytes long, expected"),
        (_truncate, r"part-1.safetensors: \d+ bytes long, expected \d+"),
        (_grow, r"part-1.safetensors: \d+ bytes long, expected \d+"),
        (_other_table, "digest differs from the one in relayout.json"),
        (_garbage_table, "digest differs from the one in relayout.json"),
        (_no_table, "cannot be read: No such file"),
        (_garbage_manifest, "not valid JSON"),
        (_newer_manifest, "format version 2, this relayout reads 1"),
    ],
)
def test_a_damaged_folder_is_refused_and_leaves_no_thread_or_file_behind(
    converted: Path, backend: str, damage: object, message: str
) -> None:
    assert callable(damage)
    damage(converted)
    relayout_threads = [t for t in threading.enumerate() if t.name.startswith("relayout")]
    num_files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with pytest.raises(FormatError, match=message):
        relayout.load(converted, 0, backend=backend)
    assert [t for t in threading.enumerate() if t.name.startswith("relayout")] == relayout_threads == []
    assert len(os.listdir("/proc/self/fd")) == num_files  # noqa: PTH208


def test_a_file_of_another_conversion_of_the_same_shapes_is_refused(llama: Path, tmp_path: Path, backend: str) -> None:
    relayout.convert(llama, tmp_path / "a", tp=2)
    changed = shutil.copytree(llama, tmp_path / "changed")
    shard = sorted(changed.glob("*.safetensors"))[0]
    blob = bytearray(shard.read_bytes())
    blob[-1] ^= 1
    shard.write_bytes(blob)
    relayout.convert(changed, tmp_path / "b", tp=2)
    shutil.copy(tmp_path / "b" / "model-rank-1-part-0.safetensors", tmp_path / "a")
    with pytest.raises(FormatError, match="not of rank 1, part 0, of this conversion"):
        relayout.load(tmp_path / "a", 1, backend=backend)


def test_a_folder_moved_elsewhere_loads(converted: Path, tmp_path: Path) -> None:
    moved = converted.rename(tmp_path / "elsewhere")
    assert relayout.load(moved, 3)


def test_an_arena_starts_at_a_huge_page_border() -> None:
    arena = allocate(5 * MIB + 3)
    array = np.frombuffer(arena.view, np.uint8)
    assert array.ctypes.data % HUGE_PAGE == 0
    assert array.size == 5 * MIB + 3


@st.composite
def reads_of_a_file(draw: st.DrawFn) -> tuple[int, list[Read], int]:
    """A file's length, reads that do not overlap in the arena, and the arena's length."""
    file_nbytes = draw(st.integers(1, 60_000))
    reads = []
    end = 0
    for _ in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, file_nbytes - 1))
        nbytes = draw(st.integers(1, min(9_000, file_nbytes - start)))
        stride = draw(st.integers(nbytes, nbytes + 3_000))
        count = draw(st.integers(1, 1 + (file_nbytes - start - nbytes) // stride))
        pitch = draw(st.integers(nbytes, nbytes + 40))
        target = end + draw(st.one_of(st.integers(0, 20), st.just((start - end) % 512)))
        strides = (stride, pitch) if count > 1 else (0, 0)
        reads.append(Read(0, Transfer(start, target, nbytes, count, *strides)))
        end = reads[-1].transfer.target_end
    return file_nbytes, reads, end


@given(reads_of_a_file(), st.sampled_from([1, 512]), st.sampled_from([1024, 8192]))
def test_chunks_bring_every_byte_of_the_reads_to_its_place_and_touch_no_other(
    case: tuple[int, list[Read], int], alignment: int, chunk_nbytes: int
) -> None:
    file_nbytes, reads, arena_nbytes = case
    stored = np.random.default_rng(0).integers(0, 255, file_nbytes, dtype=np.uint8)
    padded = np.concatenate([stored, np.full(8192 + chunk_nbytes, 255, np.uint8)])
    expected = np.full(arena_nbytes, 255, np.uint8)
    for read in reads:
        one = read.transfer
        for run in range(one.count):
            source, target = one.source + run * one.source_stride, one.target + run * one.target_stride
            expected[target : target + one.nbytes] = stored[source : source + one.nbytes]
    arena = np.full(arena_nbytes, 255, np.uint8)
    for chunk in plan_chunks(reads, alignment, chunk_nbytes):
        assert chunk.extent.offset % alignment == chunk.extent.nbytes % alignment == 0
        assert chunk.extent.nbytes <= max(chunk_nbytes, 12_000) + 2 * alignment
        taken = padded[chunk.extent.offset : chunk.extent.end]
        if chunk.arena_offset is not None:
            assert chunk.arena_offset % alignment == 0
            arena[chunk.arena_offset : chunk.arena_offset + chunk.extent.nbytes] = taken
        for part in chunk.transfers:
            for run in range(part.count):
                source, target = part.source + run * part.source_stride, part.target + run * part.target_stride
                arena[target : target + part.nbytes] = taken[source : source + part.nbytes]
    np.testing.assert_array_equal(arena, expected)


def test_direct_reads_that_the_file_system_refuses_are_an_error_only_where_direct_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 64)
    true_open = os.open

    def refuse(name: str, flags: int, *rest: int, **options: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument", str(name))
        return true_open(name, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refuse)
    files, reads = [StoredFile(path, 16384)], [Read(0, Transfer(100, 0, 9000))]
    arena = allocate(9000)
    choose_backend("auto").start(arena.view, files, reads).join()
    assert bytes(arena.view) == (bytes(range(256)) * 64)[100:9100]
    with pytest.raises(OSError, match="refuses direct I/O; use backend 'buffered'"):
        choose_backend("direct").start(arena.view, files, reads)


def test_a_device_that_is_not_there_is_refused_before_anything_is_read(converted: Path) -> None:
    (converted / "model-rank-0-part-0.safetensors").unlink()
    missing = "cuda:77"  # With or without CUDA.
    with pytest.raises(PlanError, match=f"device '{missing}': "):
        relayout.load(converted, 0, device=missing)


def test_an_f4_tensor_that_torch_cannot_hold_is_refused(tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"abc")
    relayout.convert(tmp_path / "model.safetensors", tmp_path / "out")
    with pytest.raises(PlanError, match=r"'x': torch has no F4 tensor of shape .2, 3."):
        relayout.load(tmp_path / "out", 0)


def test_an_arena_belongs_to_its_process_alone(converted: Path) -> None:
    tensor = relayout.load(converted, 0)["model.norm.weight"]
    before = tensor.clone()
    child = os.fork()
    if child == 0:
        tensor.zero_()
        os._exit(0)
    os.waitpid(child, 0)
    assert torch.equal(tensor, before)
    assert before.abs().sum() > 0
