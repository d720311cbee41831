"""`relayout.load` in part (`names`), with digests checked (`verify`), within budgets, and with its progress shown."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.bits import flip
from support.fake_cuda import FakeCuFile, Lanes
from support.headers import entry, file_of
from support.loader_fixtures import (
    BLOCK,
    MIB,
    assert_equal,
    by_two_ways,
    extents,
    nothing_left_behind,
    whole_tensors,
    write_model,
)
from support.page_cache import drop, opened, write_cold
from support.patience import PATIENCE

import relayout
from relayout.errors import FormatError, PlanError
from relayout.loader.backends import cuda
from relayout.loader.backends.base import REGISTRY, Options, ReadJob
from relayout.loader.backends.cuda import DeviceArena, DeviceBackend
from relayout.loader.backends.files import ReadableFiles
from relayout.loader.diagnose import diagnose
from relayout.loader.requests import Budget
from relayout.loader.sources.checkpoint import find_rank
from relayout.storage.stores import Access
from relayout.storage.system import resident_nbytes


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Converted: tensors of several chunks and between them smaller ones, then a tail of odd sizes."""
    folder = tmp_path_factory.mktemp("large")
    sizes = {f"x{n}.weight": 4096 * n for n in (1, 2, 3)} | {"chunks": 17 * MIB}
    odd = {"odd.one": 8 * MIB + 1, "odd.two": 33, "odd.three": 3, "odd.four": 70_001}
    write_model(folder / "source", {name: (torch.uint8, (size,)) for name, size in (sizes | odd).items()})
    relayout.convert(folder / "source", folder / "out", max_part_nbytes=30 * MIB)
    return folder / "out"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("**", lambda name: True),
        ("model.layers.1.**", lambda name: ".layers.1." in name),
        (["**norm**", "lm_head.weight"], lambda name: "norm" in name or "lm_head" in name),
        (
            ["**.{0,2}.mlp.*_proj.weight", "**up_proj**"],
            lambda name: ".0.mlp" in name or ".2.mlp" in name or "up_" in name,
        ),
        ("model.embed_tokens.weight", lambda name: "embed" in name),
        ("model.norm.weight", lambda name: name == "model.norm.weight"),
        ([], lambda name: False),
    ],
)
@by_two_ways
def test_names_chooses_tensors(converted: Path, way: str, names: Any, expected: Any) -> None:
    stored = whole_tensors(converted, "model-rank-1-*")
    chosen = {name: tensor for name, tensor in stored.items() if expected(name)}
    held = relayout.load(converted, 1, names=names, backend=way)
    assert list(held) == list(chosen)
    assert_equal(held, chosen)
    assert {tensor.data_ptr() % 16 for tensor in held.values() if tensor.numel()} <= {0}
    assert_equal(relayout.load(converted, 1, names=names, backend=way, verify=True), chosen)


@pytest.mark.parametrize("backend", ["direct", "buffered"])
def test_bytes_that_are_not_chosen_are_not_read(tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {f"layer.{n:02}.{kind}": MIB + 4096 * n for n in range(8) for kind in ("a", "b")}
    write_model(tmp_path / "source", {name: (torch.uint8, (size,)) for name, size in sizes.items()})
    relayout.convert(tmp_path / "source", tmp_path / "out")
    requested: list[int] = []
    true_read = ReadableFiles.read

    def read(self: ReadableFiles, file: int, offset: int, view: memoryview) -> None:
        requested.append(view.nbytes)
        true_read(self, file, offset, view)

    monkeypatch.setattr(ReadableFiles, "read", read)
    held = relayout.load(tmp_path / "out", 0, backend=backend, names=["*.05.*", "layer.01.b"])
    stored = whole_tensors(tmp_path / "out")
    assert_equal(held, {name: one for name, one in stored.items() if ".05." in name or "01.b" in name})
    nbytes = sum(tensor.nbytes for tensor in held.values())
    assert nbytes <= sum(requested) <= nbytes + 4 * BLOCK  # Two stretches, of which each has two edges.


def positions(folder: Path) -> list[tuple[Path, int]]:
    """Bytes of rank 0: the first and last of every tensor, and those at the borders of chunks."""
    found = []
    for file in sorted(folder.glob("model-rank-0-*")):
        for start, end in extents(file).values():
            found += [(file, start), (file, end - 1), *((file, at) for at in range(start + 8 * MIB - 1, end, 8 * MIB))]
    return found


@by_two_ways
def test_verify_finds_a_flipped_bit_anywhere_and_names_file_and_range(large: Path, way: str) -> None:
    expected = {name: tensor.clone() for name, tensor in whole_tensors(large, "model-rank-0-*").items()}
    assert_equal(relayout.load(large, 0, verify=True, backend=way), expected)
    flips = positions(large)
    assert len(flips) == 8 * 2 + 3
    for number, (file, position) in enumerate(flips):
        (name,) = (name for name, (start, end) in extents(file).items() if start <= position < end)
        flip(file, position, number % 8)
        try:
            with nothing_left_behind(), pytest.raises(FormatError, match=f"^{file}: bytes .* digest") as caught:
                relayout.load(large, 0, verify=True, backend=way, names=name if number % 4 else None)
            assert caught.value.code == "digest"
            assert caught.value.offset is not None
            assert caught.value.offset <= position < caught.value.offset + MIB
        finally:
            flip(file, position, number % 8)
    assert_equal(relayout.load(large, 0, verify=True, backend=way), expected)


@by_two_ways
def test_damage_is_loaded_as_it_is_where_nobody_looks(large: Path, tmp_path: Path, way: str) -> None:
    """Without `verify`; and with it if no chosen tensor has bytes of the chunk."""
    folder = Path(shutil.copytree(large, tmp_path / "copy"))
    file = min(folder.glob("model-rank-0-*"))
    before = {name: tensor.clone() for name, tensor in whole_tensors(folder, "model-rank-0-*").items()}
    name, (start, end) = next(item for item in extents(file).items() if item[0] == "chunks")
    before[name][5] ^= 4
    flip(file, start + 5, 2)
    assert_equal(relayout.load(folder, 0, backend=way), before)
    others = [other for other, (first, _) in extents(file).items() if first >= end]
    assert others
    assert list(relayout.load(folder, 0, names=others, verify=True, backend=way)) == others


@pytest.mark.parametrize("threads", [1, 50])
@pytest.mark.parametrize("memory", [None, MIB])
@by_two_ways
def test_any_threads_and_memory_give_the_same(converted: Path, way: str, threads: int, memory: int | None) -> None:
    held = relayout.load(converted, 0, threads=threads, memory=memory, backend=way, verify=threads == 50)
    assert_equal(held, whole_tensors(converted, "model-rank-0-*"))


def test_threads_is_how_many_read(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readers: set[str] = set()
    true_read = ReadableFiles.read
    everybody = threading.Barrier(3)

    def read(self: ReadableFiles, file: int, offset: int, view: memoryview) -> None:
        if threading.current_thread().name not in readers:
            readers.add(threading.current_thread().name)
            everybody.wait(PATIENCE)
        true_read(self, file, offset, view)

    monkeypatch.setattr(ReadableFiles, "read", read)
    held = relayout.load(large, 0, threads=3)
    assert len(readers) == 3
    assert_equal(held, whole_tensors(large, "model-rank-0-*"))


@pytest.mark.parametrize("options", [{}, {"verify": True}, {"names": "**proj**"}, {"names": "**norm**"}])
@by_two_ways
def test_a_function_is_told_rising_bytes_up_to_the_total(large: Path, converted: Path, way: str, options: Any) -> None:
    for folder in (converted,) if "names" in options else (large, converted):
        told: list[tuple[int, int]] = []
        held = relayout.load(folder, 0, backend=way, progress=lambda *one, told=told: told.append(one), **options)
        total = sum(tensor.nbytes for tensor in held.values())
        assert {one for _, one in told} == {total}
        assert told == sorted(told)
        assert told[-1] == (total, total)


def test_true_shows_a_bar_on_stderr_alone(large: Path, capfd: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    for variable, value in {"TTY_COMPATIBLE": "1", "FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "100"}.items():
        monkeypatch.setenv(variable, value)
    relayout.load(large, 0, progress=True)
    shown = capfd.readouterr()
    assert "loading" in shown.err
    assert "MB" in shown.err
    assert shown.out == ""
    for quiet in (None, False):
        relayout.load(large, 0, progress=quiet)
        assert capfd.readouterr() == ("", "")


@by_two_ways
def test_a_torch_dtype_that_is_missing_is_refused_and_its_file_can_be_loaded_without(tmp_path: Path, way: str) -> None:
    header = {"six": entry(0, 3, [4], "F6_E2M3"), "eight": entry(3, 5, [2], "U8")}
    (tmp_path / "model.safetensors").write_bytes(file_of(header, b"abcde"))
    relayout.convert(tmp_path / "model.safetensors", tmp_path / "out")
    with nothing_left_behind(), pytest.raises(PlanError, match=r"'six': torch .* has no dtype for F6_E2M3"):
        relayout.load(tmp_path / "out", 0, backend=way)
    assert relayout.load(tmp_path / "out", 0, names="eight", backend=way)["eight"].tolist() == [100, 101]


def test_a_backend_of_somebody_else_is_explained_as_any_other(converted: Path) -> None:
    told = relayout.explain(converted, 1, backend="toy")
    assert (told.backend, told.zero_copy_nbytes) == ("toy", 0)
    assert told.reason.startswith("requested: one thread reads all of it; here ")
    assert told.read_nbytes >= told.nbytes > 0


def test_a_backend_that_never_ran_on_its_hardware_says_so_in_explain_and_once_when_it_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = DeviceBackend("cuda:0", Lanes().make, FakeCuFile())  # type: ignore[arg-type]
    device.reason = "reads"
    monkeypatch.setitem(REGISTRY, "gds", (None, lambda *_: device))
    assert Options("cpu", "gds").backend_for(()).reason == "requested: reads; experimental: never tested on a GPU"
    assert "experimental" not in Options("cpu", "auto").backend_for(()).reason
    assert caplog.text == ""
    cuda._warn_once.cache_clear()
    for _ in range(2):
        device.start(DeviceArena(torch.empty(0, dtype=torch.uint8)), ReadJob((), (), Budget(1, MIB))).cancel()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "GPUDirect Storage is experimental" in caplog.text


@pytest.mark.parametrize("backend", ["gds", "cufile-compat"])
def test_compat_mode_is_taken_by_its_own_name_only(monkeypatch: pytest.MonkeyPatch, large: Path, backend: str) -> None:
    from relayout.loader.backends import cufile

    asked: list[bool] = []

    def find(path: Path, *, compat: bool) -> cufile.FoundCuFile:
        asked.append(compat)
        driver = FakeCuFile()
        driver.compat = compat
        return cufile.FoundCuFile(driver, None if compat else "P2PDMA", "reads")  # type: ignore[arg-type]

    monkeypatch.setattr(cufile, "find_cufile", find)
    files = find_rank(large, 0).used_files()
    found = Options("cuda:0", backend).backend_for(files)
    is_compat = backend == "cufile-compat"
    assert asked == [is_compat]
    assert (found.name, found.gds, found.is_zero_copy) == (backend, None if is_compat else "P2PDMA", not is_compat)
    what = "cuFile, compat mode" if is_compat else "P2PDMA"
    assert found.reason == f"requested: {what} is asked for: reads; experimental: never tested on a GPU"
    verified = Options("cuda:0", backend, verify=True)
    with pytest.raises(PlanError, match=f"backend '{backend}' does not show its bytes to the host"):
        verified.backend_for(files)


def test_auto_takes_the_first_backend_that_does_not_refuse_and_tells_what_the_others_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from relayout.loader.backends import cufile

    monkeypatch.setattr(cufile, "is_likely", lambda: False)
    found = Options("cuda:0", "auto").backend_for(())
    assert (found.name, found.device, found.gds) == ("pinned", "cuda:0", None)
    why = "backend 'gds': GPUDirect Storage is not available: neither nvidia-fs nor PCI P2PDMA is set up"
    how = "read into pinned memory, copied from there"
    assert found.reason == f"{why}; {how}"
    with pytest.raises(PlanError, match=f"^{why}$"):
        Options("cuda:0", "gds").backend_for(())
    assert Options("cuda:0", "pinned").backend_for(()).reason == f"requested: {how}"


def test_a_gpu_without_memory_of_its_own_gets_bounded_buffers_and_doctor_says_so(
    monkeypatch: pytest.MonkeyPatch, large: Path
) -> None:
    from relayout.loader.backends import cufile

    properties = SimpleNamespace(name="NVIDIA GB10", total_memory=128 * 10**9, is_integrated=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(cufile, "is_likely", lambda: True)
    monkeypatch.setattr(cufile, "find_cufile", lambda path, **_: pytest.fail("cuFile was opened"))
    files = find_rank(large, 0).used_files()
    found = Options("cuda:0", "auto").backend_for(files)
    assert found.reason.startswith(
        "backend 'gds': GPUDirect Storage is not available: cuda:0 has no memory of its own, but a part of the host's;"
        " read into pinned memory"
    )
    assert (found.name, found.access, found.max_buffer_nbytes) == (
        "pinned",
        Access.AUTO,
        128 * MIB,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert diagnose(large, device="cpu").gpus == ("NVIDIA GB10, 128 GB of the host's memory",)


def test_a_load_to_a_device_leaves_the_page_cache_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_cold(tmp_path / "probe", 2**16)  # Skips where that cannot be had.
    write_model(tmp_path / "source", {"x": (torch.uint8, (17 * MIB,))})
    relayout.convert(tmp_path / "source", tmp_path / "out")
    [file] = (tmp_path / "out").glob("*.safetensors")
    with Lanes() as lanes:
        monkeypatch.setitem(REGISTRY, "pinned", (None, lambda *_: DeviceBackend("cpu", lanes.make)))
        drop(file)
        loaded = relayout.load(tmp_path / "out", 0, backend="pinned", memory="4MiB")
        assert lanes.pinned <= 4 * MIB
    with opened(file) as fd:
        assert resident_nbytes(fd, 0, file.stat().st_size) == 0
    assert_equal(loaded, whole_tensors(tmp_path / "source"))
