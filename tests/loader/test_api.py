"""`relayout.load` of whole ranks: the same tensors by every way to memory, and what is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.headers import entry, file_of
from support.loader_fixtures import MIB, assert_equal, by_two_ways, nothing_left_behind, whole_tensors
from support.models import expected_slice, read_tensors

import relayout
from relayout.errors import FormatError, PlanError
from relayout.loader.backends.host import HUGE_PAGE, allocate

DTYPES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
    "F4": 4,
}
"""Bits of an element."""


@pytest.fixture(scope="module")
def quartered(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("quartered") / "out"
    relayout.convert(llama, output, tp=4, max_part_nbytes=200_000)
    return output


@pytest.fixture
def converted(quartered: Path, tmp_path: Path) -> Path:
    """The same, for a test to damage."""
    return Path(shutil.copytree(quartered, tmp_path / "out"))


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


def test_a_rank_is_equal_to_numpy_slices_of_the_source_in_one_allocation(
    quartered: Path, llama: Path, way: str
) -> None:
    whole = read_tensors(llama)
    for rank in range(4):
        held = relayout.load(quartered, rank, backend=way)
        assert {tensor.dtype for tensor in held.values()} == {torch.bfloat16}
        assert_equal(held, {name: expected_slice(name, array, rank, 4) for name, array in whole.items()})
        [(_, nbytes)] = {(one.untyped_storage().data_ptr(), one.untyped_storage().nbytes()) for one in held.values()}
        num_files = len(list(quartered.glob(f"model-rank-{rank}-part-*")))
        assert 0 <= nbytes - sum(tensor.nbytes for tensor in held.values()) <= (num_files + 1) * 4096


@pytest.fixture(scope="module", params=[(512, 10**9), (4096, 10 * MIB), (2 * MIB, 10 * MIB)])
def odd_converted(odd: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    align, max_part_nbytes = request.param
    output = tmp_path_factory.mktemp("odd") / "out"
    relayout.convert(odd, output, align=align, max_part_nbytes=max_part_nbytes)
    return output


@by_two_ways
def test_odd_sizes_arrive_whole_and_at_multiples_of_16(odd: Path, odd_converted: Path, way: str) -> None:
    held = relayout.load(odd_converted, 0, backend=way)
    assert_equal(held, whole_tensors(odd))
    assert {tensor.data_ptr() % 16 for tensor in held.values()} == {0}


def test_tensors_whose_pages_cannot_be_mapped_as_they_lie_are_copied(odd: Path, odd_converted: Path) -> None:
    with relayout.open(odd_converted, 0) as opened:
        held = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (it is no mapping)
    assert_equal(held, whole_tensors(odd))
    assert {tensor.data_ptr() % 16 for tensor in held.values()} == {0}


def test_every_dtype_is_what_the_stock_reader_makes_of_it(tmp_path: Path, way: str) -> None:
    rng = np.random.default_rng(0)
    header, content = {}, b""
    for dtype, bits in DTYPES.items():
        values = rng.integers(0, 2 if dtype == "BOOL" else 256, 30 * bits // 8, np.uint8).tobytes()
        header[dtype] = entry(len(content), len(content) + len(values), [3, 10], dtype)
        content += values
    (tmp_path / "model.safetensors").write_bytes(file_of(header, content))
    relayout.convert(tmp_path / "model.safetensors", tmp_path / "out")
    assert_equal(relayout.load(tmp_path / "out", 0, backend=way), load_file(tmp_path / "model.safetensors"))


def test_tensors_are_writable_and_outlive_everything_else(converted: Path, way: str) -> None:
    tensor = relayout.load(converted, 1, backend=way)["model.norm.weight"]
    shutil.rmtree(converted)
    before = tensor.clone()
    tensor += 1
    assert torch.equal(tensor, before + 1)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@by_two_ways
def test_a_plain_folder_is_sliced_on_the_fly(llama: Path, way: str, tp: int) -> None:
    whole = read_tensors(llama)
    rank = tp - 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        held = relayout.load(llama, rank, tp=tp, backend=way)
    assert [str(one.message).count(f"relayout convert {llama} --tp {tp}`") for one in caught] == ([1] if tp > 1 else [])
    assert {Path(one.filename).name for one in caught} <= {Path(__file__).name}
    assert {tensor.data_ptr() % 16 for tensor in held.values()} == {0}
    assert_equal(held, {name: expected_slice(name, array, rank, tp) for name, array in whole.items()})


@pytest.mark.parametrize(
    "call",
    [
        relayout.load,
        lambda *given, **options: dict(relayout.iter_load(*given, **options)),
        lambda *given, **options: relayout.open(*given, **options).close(),
        lambda *given, **options: relayout.load(*given, names="**.norm.weight", **options),
    ],
)
def test_a_warning_is_at_the_line_that_called_relayout(llama: Path, call: Callable[..., object]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(llama, 0, tp=2)
    [warning] = caught
    assert "relayout convert" in str(warning.message)
    line = Path(warning.filename).read_text().splitlines()[warning.lineno - 1]
    assert Path(warning.filename).name == Path(__file__).name
    assert "call(llama, 0, tp=2)" in line or "relayout." in line


@by_two_ways
def test_large_column_cuts_of_a_plain_folder_are_right(tmp_path: Path, way: str) -> None:
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
            held = relayout.load(tmp_path, rank, tp=2, backend=way)
        for name, tensor in tensors.items():
            axis = 0 if "up_proj" in name else 1
            np.testing.assert_array_equal(held[name].numpy(), np.split(tensor.numpy(), 2, axis)[rank], err_msg=name)


def test_a_folder_that_waits_to_be_put_back_is_told_of(converted: Path) -> None:
    """As a conversion with --force leaves it that is killed between its two renames."""
    old = converted.with_name(f".{converted.name}.relayout-old")
    converted.rename(old)
    calls: list[Callable[[], Any]] = [
        lambda: relayout.load(converted, 0),
        lambda: relayout.load(converted, 0, tp=2),
        lambda: relayout.iter_load(converted, 0),
        lambda: relayout.open(converted, 0),
        lambda: relayout.explain(converted, 0),
        lambda: relayout.safe_open(converted),
    ]
    for call in calls:
        with pytest.raises(PlanError) as caught:
            call()
        assert str(caught.value) == (
            f"{converted}: no such file or folder; an interrupted replacement left the older folder at {old}:"
            " rename it back"
        )
    old.rename(converted)
    assert relayout.load(converted, 0)
    converted.rename(converted.with_name("away"))
    for call in calls:
        with pytest.raises(PlanError, match=r"no such file or folder$"):
            call()


def _swap_ranks(folder: Path) -> None:
    one, other = sorted(folder.glob("model-rank-[01]-part-0.safetensors"))
    spare = one.with_suffix(".spare")
    one.rename(spare)
    other.rename(one)
    spare.rename(other)


def _write(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def _resize(by: int) -> Callable[[Path], object]:
    return lambda folder: os.truncate(folder / PART, (folder / PART).stat().st_size + by)


def _newer_manifest(folder: Path) -> None:
    path = folder / "relayout.json"
    path.write_text(path.read_text().replace('"relayout": 1', '"relayout": 2'))


PART, TABLE = "model-rank-0-part-1.safetensors", "relayout.rank-0.json.zst"
DAMAGES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "ranks exchanged": (
        _swap_ranks,
        "owner|mismatch",
        "tensors_digest in its header differs from|bytes long, expected",
    ),
    "cut": (_resize(-1), "mismatch", r"part-1.safetensors: \d+ bytes long, expected \d+$"),
    "longer": (_resize(1), "mismatch", r"part-1.safetensors: \d+ bytes long, expected \d+$"),
    "missing": (
        lambda folder: (folder / PART).unlink(),
        "missing",
        "is missing; of 4 ranks these are complete here: 1-3$",
    ),
    "newer": (_newer_manifest, "version", "format version 2, this relayout reads 1"),
    "garbage": (_write("relayout.json", "{"), "syntax", "relayout.json: .*not valid JSON"),
    "another table": (
        lambda folder: shutil.copy(folder / "relayout.rank-1.json.zst", folder / TABLE),
        "digest",
        "digest differs from the one in relayout.json",
    ),
    "no table": (_write(TABLE, "no zstd frame"), "digest", "digest differs from the one in relayout.json"),
    "missing table": (lambda folder: (folder / TABLE).unlink(), "missing", "cannot be read: No such file"),
}
CALLS: dict[str, Callable[[Path], object]] = {
    "load": lambda folder: relayout.load(folder, 0),
    "names": lambda folder: relayout.load(folder, 0, names="**"),
    "into": lambda folder: relayout.load(folder, 0, names="**", into={}),
    "verify": lambda folder: relayout.load(folder, 0, verify=True),
    "iter_load": lambda folder: list(relayout.iter_load(folder, 0)),
    "open": lambda folder: relayout.open(folder, 0),
    "explain": lambda folder: relayout.explain(folder, 0),
}


OF_EACH_PART = {"newer": "the manifest", "cut": "a length", "ranks exchanged": "a header", "another table": "a table"}
"""A damage of each thing that is checked."""


@pytest.mark.parametrize(
    ("call", "damage"),
    [
        *(("load", damage) for damage in DAMAGES),
        *(("explain", damage) for damage in ("newer", "cut")),  # It reads neither tables nor headers.
        *((call, damage) for call in CALLS if call not in ("load", "explain") for damage in OF_EACH_PART),
    ],
)
def test_a_damaged_folder_is_refused_by_every_call(converted: Path, call: str, damage: str) -> None:
    change, code, message = DAMAGES[damage]
    change(converted)
    with nothing_left_behind(), pytest.raises(FormatError, match=message) as caught:
        CALLS[call](converted)
    assert re.fullmatch(code, caught.value.code)
    assert str(caught.value.path).startswith(str(converted))


def test_an_arena_starts_at_a_huge_page_border() -> None:
    arena = allocate(5 * MIB + 3)
    array = np.frombuffer(arena.span(0, arena.nbytes), np.uint8)
    assert array.ctypes.data % HUGE_PAGE == 0
    assert array.size == 5 * MIB + 3


def test_an_f4_tensor_that_torch_cannot_hold_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(file_of({"x": entry(0, 3, [2, 3], "F4")}, b"abc"))
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
