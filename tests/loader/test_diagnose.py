"""relayout.explain against facts: the manifest, df and stat, the page cache, and what a load then reads."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.headers import entry, file_of
from support.loader_fixtures import nothing_left_behind
from support.mounts import mounted_tmpfs
from support.page_cache import (  # noqa: F401
    drive_nbytes,
    drop,
    process_drive_nbytes,
    refuse_to_open,
    unmarked,
    warm,
    without_residency,
    write_cold,
)
from typer.testing import CliRunner

import relayout
from relayout.cli.app import app
from relayout.errors import PlanError
from relayout.loader.diagnose import diagnose
from relayout.storage import system
from relayout.storage.system import filesystem_of

Array = npt.NDArray[Any]

MIB = 2**20
SLACK = 2**18
"""Drive bytes that may be code, folders and sidecars instead."""

MLP = "model.layers.0.mlp"
TENSORS: dict[str, Array] = {
    f"{MLP}.down_proj.weight": np.arange(1024 * 2048, dtype=np.int32).reshape(1024, 2048),
    f"{MLP}.up_proj.weight": np.arange(2048 * 1024, dtype=np.int32).reshape(2048, 1024) * 3,
    "model.norm.weight": np.arange(1001, dtype=np.uint8),
    "model.layers.0.input_layernorm.weight": np.arange(3, dtype=np.uint8) + 7,
    "model.layers.0.post_attention_layernorm.weight": np.arange(3, dtype=np.uint8) + 9,
}
RANK_NBYTES = 1024 * 1024 * 4 + 1024 * 1024 * 4 + 1001 + 3 + 3
"""Of either of two ranks."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in two shards; the second one's tensor begins 48 bytes behind a block."""
    folder = tmp_path_factory.mktemp("explain") / "plain"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    weight_map = {}
    for number, names in enumerate(([*TENSORS][:1] + [*TENSORS][2:], [*TENSORS][1:2])):
        file = f"model-{number}.safetensors"
        header: dict[str, Any] = {}
        end = 0
        for name in names:
            array = TENSORS[name]
            kind = {"int32": "I32", "uint8": "U8"}[array.dtype.name]
            header[name] = entry(end, end + array.nbytes, array.shape, kind)
            end += array.nbytes
        text = json.dumps(header).ljust(4096 - 8 + 48 * number)
        (folder / file).write_bytes(file_of(text, b"".join(TENSORS[name].tobytes() for name in names)))
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.fixture(scope="module")
def converted(plain: Path) -> Path:
    """Two ranks in two parts each."""
    relayout.convert(plain, plain.parent / "out", tp=2, max_part_nbytes=5 * MIB)
    return plain.parent / "out"


@pytest.fixture
def cold(converted: Path) -> Path:
    """The same, none of it in the page cache."""
    write_cold(converted.parent / "probe", 4096)  # Skips where files do not become cold.
    for file in converted.glob("*.safetensors"):
        drop(file)
    return converted


def manifest_reads(folder: Path, rank: int) -> list[dict[str, int]]:
    """The rank's reads, by the manifest's own text."""
    reads: list[dict[str, int]] = json.loads((folder / "relayout.json").read_text())["ranks"][rank]["reads"]
    assert len(reads) >= 3
    return reads


def blocks_of(reads: list[dict[str, int]]) -> set[tuple[int, int]]:
    """(file, number of the block) of all that holds a byte of them, gaps included."""
    return {
        (one["file"], block)
        for one in reads
        for block in range(
            one["offset"] // 4096,
            -(-(one["offset"] + (one.get("count", 1) - 1) * one.get("stride", 0) + one["nbytes"]) // 4096),
        )
    }


def whole_blocks_of(reads: list[dict[str, int]]) -> int:
    """How many blocks of the files are copied to whole blocks of memory."""
    return sum(
        (one["offset"] + one["nbytes"]) // 4096 - -(-one["offset"] // 4096)
        for one in reads
        if "count" not in one and (one["arena_offset"] - one["offset"]) % 4096 == 0 and one["nbytes"] >= 8192
    )


def df(path: Path, field: str) -> str:
    """A column of df(1): what the system says of the file system below a path."""
    if shutil.which("df") is None or not sys.platform.startswith("linux"):
        pytest.skip("df of Linux is missing")
    done = subprocess.run(["df", f"--output={field}", str(path)], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[1].rstrip()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("backend", ["auto", "direct"])
def test_bytes_are_those_of_the_manifest(cold: Path, rank: int, backend: str) -> None:
    told = relayout.explain(cold, rank, backend=backend)
    reads = manifest_reads(cold, rank)
    assert told.nbytes == RANK_NBYTES
    assert told.read_nbytes == 4096 * len(blocks_of(reads))
    assert told.zero_copy_nbytes == 4096 * whole_blocks_of(reads) == 8 * MIB
    assert told.num_requests == 4  # The bulk of each of two files, and its tail of small odd tensors.
    assert told.resident_nbytes == 0
    assert [(file.name, file.nbytes) for file in told.files] == [
        (path.name, path.stat().st_size) for path in sorted(cold.glob(f"model-rank-{rank}-*"))
    ]
    assert [file.resident_nbytes for file in told.files] == [0, 0]
    assert [file.refuses_direct for file in told.files] == [None, None]


def test_through_the_page_cache_just_the_bytes_are_requested(cold: Path) -> None:
    told = relayout.explain(cold, 0, backend="buffered")
    assert (told.backend, told.nbytes, told.read_nbytes) == ("buffered", RANK_NBYTES, RANK_NBYTES)
    assert told.zero_copy_nbytes == RANK_NBYTES  # Without alignment each read goes to its place.
    assert told.resident_nbytes == 0


def test_what_auto_comes_to_is_told(cold: Path) -> None:
    assert relayout.explain(cold, 0).backend == "direct"
    for file in cold.glob("model-rank-0-*"):
        warm(file, 0, file.stat().st_size)
    assert relayout.explain(cold, 0).backend == "buffered"


def test_what_was_asked_for_is_repeated(converted: Path) -> None:
    told = relayout.explain(str(converted), 1, "cpu", threads=3, memory=5 * MIB)
    assert (told.path, told.rank, told.device) == (str(converted), 1, "cpu")
    assert (told.threads, told.memory, told.gds) == (3, 5 * MIB, None)
    assert "all others by direct I/O where the file system allows it" in told.reason
    assert relayout.explain(converted, 1, backend="direct").reason.startswith("requested: read past the page cache")


@pytest.mark.usefixtures("unmarked")
@pytest.mark.parametrize("backend", ["auto", "direct"])
def test_a_load_then_reads_what_was_told(cold: Path, backend: str) -> None:
    relayout.load(cold, 0, names="model.norm.weight")  # Torch and code are there now.
    for number, file in enumerate(sorted(cold.glob("model-rank-1-*"))):
        drop(file)
        warm(file, 4096 + number * MIB, MIB)
    told = relayout.explain(cold, 1, backend=backend)
    assert told.resident_nbytes == (2 * MIB if backend == "auto" else 0)
    before = process_drive_nbytes()
    held = relayout.load(cold, 1, backend=backend)
    assert abs(process_drive_nbytes() - before - (told.read_nbytes - told.resident_nbytes)) < SLACK
    np.testing.assert_array_equal(held[f"{MLP}.down_proj.weight"].numpy(), TENSORS[f"{MLP}.down_proj.weight"][:, 1024:])
    np.testing.assert_array_equal(held[f"{MLP}.up_proj.weight"].numpy(), TENSORS[f"{MLP}.up_proj.weight"][1024:])


def test_nothing_is_loaded_but_the_sidecar_and_a_block_of_each_file(cold: Path) -> None:
    relayout.explain(cold, 0)
    for file in cold.iterdir():
        drop(file)
    before = drive_nbytes()
    with nothing_left_behind():
        relayout.explain(cold, 1)
    assert drive_nbytes() - before <= (cold / "relayout.json").stat().st_size + 2 * 4096 + SLACK
    assert [file.resident_nbytes for file in relayout.explain(cold, 0).files] == [0, 0]
    assert [file.resident_nbytes for file in relayout.explain(cold, 1).files] == [0, 0]


def test_torch_is_not_needed_to_explain_a_load_to_host_memory(converted: Path) -> None:
    code = "import sys, relayout; relayout.explain(sys.argv[1], 0); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(converted)], check=True)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_plain_folder_is_explained_at_any_degree(plain: Path, rank: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        told = relayout.explain(plain, rank, tp=2, backend="direct")
    assert told.nbytes == RANK_NBYTES
    # Rows are 4 MiB in a row, 48 bytes behind a block, and go to such a place: all but their first and last block.
    assert told.zero_copy_nbytes == 4 * MIB - 4096
    up_blocks = 4 * MIB // 4096 + 1
    # Columns are every second run of 4 KiB: read with their gaps, from the first run of each request to the last.
    assert told.read_nbytes <= 4096 * (up_blocks + 2048 + 2)
    assert told.read_nbytes >= 4096 * (up_blocks + 2047 - 3)
    assert [file.name for file in told.files] == ["model-0.safetensors", "model-1.safetensors"]
    assert [file.nbytes for file in told.files] == [4096 + 8 * MIB + 1007, 4096 + 48 + 8 * MIB]
    whole = relayout.explain(plain, 0, tp=1)
    assert whole.nbytes == sum(array.nbytes for array in TENSORS.values())


@pytest.mark.parametrize(("tp", "nbytes", "most"), [(1, 16 * MIB + 1007, 1.01), (4, 4 * MIB + 1007, 1.6)])
def test_a_converted_folder_is_explained_at_any_degree(converted: Path, tp: int, nbytes: int, most: float) -> None:
    """Where columns are cut out of rows, the gaps between them are read as well."""
    told = relayout.explain(converted, tp - 1, tp=tp, backend="buffered")
    assert told.nbytes == nbytes
    assert nbytes <= told.read_nbytes <= most * nbytes
    assert {file.name for file in told.files} <= {path.name for path in converted.glob("model-rank-*")}


def test_the_file_system_is_the_one_that_df_tells(converted: Path) -> None:
    for file in relayout.explain(converted, 0).files:
        path = converted / file.name
        assert file.filesystem.kind == df(path, "fstype")
        assert file.filesystem.mount_point == df(path, "target")
        assert file.filesystem.block_nbytes == int(subprocess.check_output(["stat", "-c", "%o", str(path)]))


def test_the_drives_block_is_the_one_that_the_kernel_tells(converted: Path) -> None:
    path = converted / "model-rank-0-part-0.safetensors"
    device = Path(df(path, "source"))
    if not device.is_block_device() or device.stat().st_rdev != path.stat().st_dev:
        pytest.skip(f"{path} lies on no single drive")
    done = subprocess.run(["lsblk", "-ndo", "LOG-SEC", str(device)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"lsblk: {done.stderr.strip()}")
    assert relayout.explain(converted, 0).files[0].filesystem.drive_block_nbytes == int(done.stdout)


@pytest.mark.parametrize("name", ["small", "with a space\tand \\040", "größe"])
def test_a_file_system_in_memory_is_told_as_such(plain: Path, tmp_path: Path, name: str) -> None:
    with mounted_tmpfs(tmp_path / name, "40m") as place:
        relayout.convert(plain, place / "out", tp=2)
        told = relayout.explain(place / "out", 0)
        assert {file.filesystem.kind for file in told.files} == {"tmpfs"}
        assert {file.filesystem.mount_point for file in told.files} == {str(place.resolve())}
        assert {file.filesystem.drive_block_nbytes for file in told.files} == {None}
        assert [file.resident_nbytes for file in told.files] == [file.nbytes for file in told.files]
        if told.files[0].refuses_direct is None:  # Linux 6.6 and later.
            assert told.resident_nbytes == RANK_NBYTES
        assert relayout.explain(place / "out", 0, backend="buffered").resident_nbytes == RANK_NBYTES
        (tmp_path / "link").symlink_to(place / "out")
        linked = relayout.explain(tmp_path / "link", 0)
        assert replace(linked, path=told.path, reason=told.reason) == told
        assert "; memory: " in told.reason


def test_a_mount_that_another_one_hides_is_not_told(tmp_path: Path) -> None:
    outer = tmp_path / "a"
    with mounted_tmpfs(outer, "1m"), mounted_tmpfs(outer / "b", "1m"), mounted_tmpfs(outer, "1m"):
        (outer / "b").mkdir()
        assert filesystem_of(outer / "b").mount_point == str(outer)


def test_an_older_mount_in_a_newer_one_is_told(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "older", "1m") as older, mounted_tmpfs(tmp_path / "newer", "1m") as newer:
        inner = newer / "inner"
        inner.mkdir()
        done = subprocess.run(["mount", "--move", str(older), str(inner)], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"mounts cannot be moved here: {done.stderr.strip()}")
        try:
            assert (filesystem_of(inner).kind, filesystem_of(inner).mount_point) == ("tmpfs", str(inner))
        finally:
            subprocess.run(["mount", "--move", str(inner), str(older)], check=True)


def test_a_mount_of_seaweedfs_is_read_in_order_by_one_request_at_a_time(
    converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mounted_tmpfs(tmp_path / "weed", "64m") as place:
        shutil.copytree(converted, place / "out")
        assert relayout.explain(place / "out", 0).threads > 1
        said = tmp_path / "mountinfo"
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
        said.write_text("\n".join(re.sub(r" - tmpfs ", " - fuse.seaweedfs ", line) for line in lines))
        monkeypatch.setattr(system, "_MOUNTS", said)
        shutil.move(place / "out", place / "weed")  # What a folder was on is not asked again.
        told = relayout.explain(place / "weed", 0)
        assert (told.threads, {file.filesystem.kind for file in told.files}) == (1, {"fuse.seaweedfs"})
        assert relayout.explain(place / "weed", 0, threads=3).threads == 3
        assert relayout.explain(converted, 0).threads > 1
        offsets, preadv = dict[str, list[int]](), os.preadv

        def noted(fd: int, buffers: Any, offset: int) -> int:
            offsets.setdefault(str(Path(f"/proc/self/fd/{fd}").readlink()), []).append(offset)
            return preadv(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", noted)
        tensors = relayout.load(place / "weed", 0, backend="buffered")
    assert tensors.keys() == TENSORS.keys()
    assert all(one == sorted(one) for one in offsets.values())
    assert max(map(len, offsets.values())) > 2


def test_a_mount_whose_name_is_no_text_is_no_trouble(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / os.fsdecode(b"no text \xff"), "1m"):
        assert filesystem_of(tmp_path).mount_point == df(tmp_path, "target")


def test_a_file_system_that_refuses_direct_io_is_told(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_to_open(monkeypatch, errno.EINVAL)
    told = relayout.explain(converted, 0)
    assert [file.refuses_direct for file in told.files] == [
        "the file system refuses direct I/O; use backend 'buffered'"
    ] * 2
    assert told.read_nbytes == RANK_NBYTES  # No blocks are needed.
    assert "refuses direct I/O" in told.reason
    with pytest.raises(OSError, match=r"refuses direct I/O; use backend 'buffered'.*part-0.safetensors"):
        relayout.explain(converted, 0, backend="direct")


# `relayout doctor`: the explanations of the loads that are asked about.


def test_without_a_degree_it_is_that_of_the_conversion_or_one(plain: Path, converted: Path) -> None:
    assert [one.rank for one in diagnose(converted, device="cpu").ranks] == [0, 1]
    for found, expected in (
        (diagnose(converted, device="cpu").ranks[1:], relayout.explain(converted, 1)),
        (diagnose(plain, device="cpu").ranks, relayout.explain(plain, 0, tp=1)),
    ):
        assert list(map(without_residency, found)) == [without_residency(expected)]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_another_degree_is_explained_for_both_kinds_of_folders(plain: Path, converted: Path, tp: int) -> None:
    for folder in (plain, converted):
        expected = tuple(relayout.explain(folder, rank, tp=tp) for rank in range(tp))
        found = diagnose(folder, device="cpu", tp=tp).ranks
        assert list(map(without_residency, found)) == list(map(without_residency, expected))
    words = ["doctor", str(converted), "--tp", str(tp), "--device", "cpu", "--json"]
    told = json.loads(CliRunner().invoke(app, words).stdout)
    assert [one["nbytes"] for one in told["ranks"]] == [one.nbytes for one in expected]
    assert all(one.keys() == set(relayout.Explanation.__dataclass_fields__) for one in told["ranks"])


@pytest.mark.parametrize("rank", [None, 0])
@pytest.mark.parametrize("tp", [0, -1, True, 1.0])
def test_a_degree_of_no_ranks_is_refused(plain: Path, converted: Path, tp: int, rank: int | None) -> None:
    for folder in (plain, converted):
        with pytest.raises(PlanError, match=r"^tp: -?\d, expected 1 or more$|^tp: (True|1\.0) is not an integer$"):
            diagnose(folder, rank=rank, device="cpu", tp=tp)


def test_without_a_rank_the_load_of_the_whole_model_is_explained(converted: Path, plain: Path) -> None:
    for folder in (converted, plain):
        told = relayout.explain(folder)
        assert (told.rank, told.nbytes) == (0, sum(tensor.nbytes for tensor in relayout.load(folder).values()))
