"""The kit of `tools/run gpu --step kit`: what is packed here is there after it was joined, in a folder of its own."""

from __future__ import annotations

import struct
import subprocess
import sys
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import numpy as np
import pytest
import zstandard
from gpu import engine, kit
from gpu.results import Results
from support.patience import PATIENCE

pytestmark = pytest.mark.documents

JOIN = Path(kit.__file__).with_name("join.py")
FILES = {
    "vllm/__init__.py": b"__version__ = '0'\n",
    "vllm/large.bin": np.random.default_rng(1).bytes(5_000),
    "vllm/tests/test_it.py": b"left out",
    "other-1.dist-info/RECORD": b"kept",
}


def library() -> tuple[bytes, list[tuple[int, int, int, int]]]:
    """An ELF library with two fat binaries, written down from the formats; kind, arch, offset and bytes of programs."""
    programs = [(1, 90, 72), (2, 80, 40), (2, 90, 56)], [(2, 100, 64), (1, 52, 8)]
    section, found = bytearray(), []
    for binary in programs:
        body = bytearray()
        for kind, arch, nbytes in binary:
            header = struct.pack("<HHIQ", kind, 1, 64, nbytes) + bytes(12) + struct.pack("<I", arch) + bytes(32)
            found.append((kind, arch, 64 + len(section) + 16 + len(body) + 64, nbytes))
            body += header + bytes([arch]) * nbytes
        section += struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body
    names = b"\0.nv_fatbin\0.names\0"
    table = 64 + len(section) + len(names)
    header = bytearray(64)
    header[:4] = b"\x7fELF"
    struct.pack_into("<Q", header, 0x28, table)
    struct.pack_into("<HHH", header, 0x3A, 64, 3, 2)
    rows = [(0, 0, 0), (1, 64, len(section)), (12, 64 + len(section), len(names))]
    sections = b"".join(struct.pack("<IIQQQQ", name, 1, 0, 0, at, nbytes) + bytes(24) for name, at, nbytes in rows)
    return bytes(header) + bytes(section) + names + sections, found


def test_only_machine_code_of_the_gpu_is_left_in_a_library() -> None:
    original, programs = library()
    pruned = kit.prune(original)
    expected = bytearray(original)
    for kind, arch, start, nbytes in programs:
        assert original[start : start + nbytes] == bytes([arch]) * nbytes
        if (kind, arch) != (2, 90):
            expected[start : start + nbytes] = bytes(nbytes)
    assert pruned == expected
    assert pruned != original
    other = original.replace(b".nv_fatbin", b".nv_fatcod")
    assert kit.prune(other) == other


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A kit of two pieces, made of a wheel that is written here."""
    engine, unpacker = tmp_path / "vllm.whl", tmp_path / "zstandard.whl"
    with zipfile.ZipFile(engine, "w") as archive:
        for name, content in FILES.items():
            archive.writestr(name, content)
    with zipfile.ZipFile(unpacker, "w") as archive:
        for file in filter(Path.is_file, Path(zstandard.__file__).parent.glob("*")):
            archive.write(file, f"zstandard/{file.name}")
    downloads = {(kit.UNPACKER,): [unpacker], (kit.VLLM, *kit.OTHERS.split()): [engine]}
    monkeypatch.setattr(kit, "download", lambda folder, asked: downloads[(*asked,)])
    return kit.make_kit(tmp_path / "kit", tmp_path, len(kit.unpacker_of(unpacker)) + 2_000, level=1)


def join(folder: Path, home: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(JOIN), str(folder), "--home", str(home)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)


def test_pieces_that_came_one_after_the_other_are_the_files_and_vllm_finds_the_plugin(
    folders: list[Path], tmp_path: Path
) -> None:
    assert [line.partition(": ")[0] for line in kit.calls(folders)] == ["call 1 of 2", "call 2 of 2"]
    for folder in folders:
        done = join(folder, tmp_path / "home")
        assert done.returncode == 0, done.stderr
    site = tmp_path / "home" / "site"
    kept = {name: content for name, content in FILES.items() if "tests" not in name}
    assert {name: (site / name).read_bytes() for name in kept} == kept
    assert not (site / "vllm" / "tests").exists()
    (ours,) = [one for one in distributions(path=[str(site)]) if one.name == "safetensors-relayout"]
    points = {(point.group, point.value) for point in ours.entry_points}
    assert ("vllm.general_plugins", "relayout.plugins:vllm") in points
    assert f"PYTHONPATH={JOIN.parents[2]}:" in done.stdout


def test_a_piece_is_waited_for_and_a_damaged_one_is_refused(folders: list[Path], tmp_path: Path) -> None:
    first, second = folders
    assert "still to come: piece-2" in join(first, tmp_path / "home").stdout
    damaged = bytearray((second / "piece-2").read_bytes())
    damaged[100] ^= 1
    (second / "piece-2").write_bytes(damaged)
    done = join(second, tmp_path / "home")
    assert done.returncode == 1
    assert "piece 2 is damaged" in done.stderr
    assert not (tmp_path / "home" / "site").exists()


def test_a_folder_of_somebody_else_is_not_replaced_by_a_kit(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    with pytest.raises(SystemExit, match="is not a kit: it is not replaced"):
        kit.write_pieces(tmp_path / "mine", b"packed", b"unpacker", 100)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years"


def test_a_piece_fits_beside_all_files_that_a_checkout_would_carry(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    empty = kit.room(tmp_path)
    (tmp_path / ".gitignore").write_text("ignored\n")
    (tmp_path / "ignored").write_bytes(bytes(5_000))
    (tmp_path / "kept").write_bytes(bytes(3_000))
    assert empty - kit.room(tmp_path) == 3_000 + len("ignored\n")
    assert empty < kit.CALL_NBYTES
    with pytest.raises(SystemExit, match="the checkout is too large"):
        kit.write_pieces(tmp_path / "kit", b"packed", b"unpacker", 8)


def test_a_file_that_packing_has_changed_is_noticed() -> None:
    packed = kit.pack({"a": b"1", "b": b"2"}, 1)
    kit.check(packed, {"a": b"1", "b": b"2"})
    with pytest.raises(SystemExit, match="b differs after packing"):
        kit.check(packed, {"a": b"1", "b": b"3"})
    with pytest.raises(SystemExit, match="1 files are missing after packing, such as c"):
        kit.check(packed, {"a": b"1", "b": b"2", "c": b""})


@pytest.mark.parametrize(("equal", "code"), [(True, 0), (None, 0), (False, 1)])
def test_a_verdict_that_differs_is_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], equal: bool | None, code: int
) -> None:
    rows = Results(tmp_path / engine.RESULTS, "serve")
    rows.measure("vLLM, started", lambda: {"seconds": 3})
    rows.measure("verdict: llama, tokens", lambda: {"equal": equal})
    assert engine.summary(tmp_path) == code
    word = {True: "equal", None: "missing", False: "DIFFERENT"}[equal]
    assert capsys.readouterr().out.endswith(f"\n{word}: serve: llama, tokens\n")


def test_parts_share_a_file_and_measure_their_own_keys(tmp_path: Path) -> None:
    for part in ("serve", "live"):
        Results(tmp_path / "all.jsonl", part).measure("started", lambda part=part: {"of": part})  # type: ignore[misc]
    assert Results(tmp_path / "all.jsonl", "live").rows["started"]["of"] == "live"
    assert Results(tmp_path / "all.jsonl", "size").rows == {}
