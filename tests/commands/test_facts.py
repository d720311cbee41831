"""Facts that stand in several places: `verify` names whatever is changed in one of them, with its digests made true."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
import zstandard
from support.loader_fixtures import mlp_model

import relayout
from relayout.errors import FormatError

Tree = dict[str, Any]
HEAD, TABLE = "model-rank-1-part-0.safetensors", "relayout.rank-1.json.zst"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks of one file each, and a folder of one rank beside it, with an index for stock loaders."""
    folder = tmp_path_factory.mktemp("facts")
    mlp_model(folder / "source")
    relayout.convert(folder / "source", folder / "two", tp=2)
    relayout.convert(folder / "source", folder / "one")
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pristine / "two", tmp_path / "two")


def files_of(folder: Path) -> list[Tree]:
    listed: list[Tree] = json.loads((folder / "relayout.json").read_text())["files"]
    return listed


def digest(blob: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(blob)


def edit_manifest(folder: Path, change: Callable[[Tree], object]) -> None:
    """Change relayout.json, and sign it anew."""
    path = folder / "relayout.json"
    top = json.loads(path.read_text())
    change(top)
    del top["self_digest"]
    before = json.dumps(top, indent=1).removesuffix("\n}").encode() + b", "
    path.write_bytes(before + f'"self_digest": "{digest(before)}"}}'.encode())


def edit_table(folder: Path, change: Callable[[Tree], object]) -> None:
    """Change a table, and sign it anew."""
    path = folder / TABLE
    top = json.loads(zstandard.ZstdDecompressor().decompressobj().decompress(path.read_bytes()))
    change(top)
    stored = zstandard.ZstdCompressor().compress(json.dumps(top).encode())
    path.write_bytes(stored)
    edit_manifest(folder, lambda manifest: manifest["ranks"][1].update(table_digest=digest(stored)))


def edit_head(folder: Path, old: str, new: str) -> None:
    """Change a header of a rank file, its length kept, and sign it anew."""
    path = folder / HEAD
    blob = path.read_bytes()
    end = 8 + int.from_bytes(blob[:8], "little")
    text = blob[8:end].decode()
    assert text.count(old) == 1
    head = blob[:8] + text.replace(old, new).rstrip(" ").encode().ljust(end - 8)
    assert len(head) == end
    path.write_bytes(head + blob[end:])
    [number] = (
        n for n, one in enumerate(json.loads((folder / "relayout.json").read_text())["files"]) if one["name"] == HEAD
    )
    edit_manifest(folder, lambda manifest: manifest["files"][number].update(header_digest=digest(head)))


def differences(folder: Path) -> list[str]:
    return [str(one) for one in relayout.verify(folder).differences]


def test_the_edits_alone_change_nothing(folder: Path) -> None:
    edit_manifest(folder, lambda top: None)
    edit_table(folder, lambda top: None)
    assert differences(folder) == []


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("plan", "builtin:qwen2", "plan is builtin:qwen2, by the source record builtin:llama"),
        ("model_type", "qwen2", "model_type is qwen2, by the source record llama"),
        ("expert_parallel", True, "expert_parallel is True, by the source record False"),
        ("alignment", 512, "alignment is 512, by the source record 4096"),
        ("dcp", False, "dcp is False, by the source record True"),
        ("conversion", "0" * 32, f"conversion is {'0' * 32}, by the source record "),
    ],
)
def test_what_the_manifest_repeats_is_compared(folder: Path, field: str, value: object, says: str) -> None:
    edit_manifest(folder, lambda top: top.update({field: value}))
    assert any(one.startswith(f"relayout.json: {says}") for one in differences(folder))


def test_the_bytes_of_the_source_are_compared(folder: Path) -> None:
    edit_manifest(folder, lambda top: top["source"].update(nbytes=top["source"]["nbytes"] + 1))
    assert any("source.nbytes is" in one for one in differences(folder))


def test_the_start_of_a_data_section_is_the_files_own(folder: Path) -> None:
    edit_manifest(folder, lambda top: top["files"][1].update(data_start=top["files"][1]["data_start"] - 512))
    with pytest.raises(FormatError, match=r"its data section starts at \d+, relayout.json says \d+"):
        relayout.load(folder, 1)
    assert any("its data section starts at" in one for one in differences(folder))
    edit_manifest(folder, lambda top: top["files"][1].update(data_start=top["files"][1]["data_start"] + 1024))
    with pytest.raises(FormatError, match="whose data section is"):
        relayout.verify(folder)


def test_what_dcp_takes_for_the_place_of_a_slice_is_compared(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    edit_head(folder, f'\\"{name}\\":{{\\"saved_offsets\\":[512,0]}}', f'\\"{name}\\":{{\\"saved_offsets\\":[511,0]}}')
    found = relayout.verify(folder).differences
    assert [(one.file, one.tensor) for one in found] == [(HEAD, name)]
    assert "DCP_SHARDING_INFO has {'saved_offsets': [511, 0]}" in found[0].what


def test_a_dtype_in_a_header_is_compared_with_the_table(folder: Path) -> None:
    edit_head(
        folder,
        '"model.layers.0.mlp.up_proj.weight":{"dtype":"BF16"',
        '"model.layers.0.mlp.up_proj.weight":{"dtype":"F16"',
    )
    assert any("header has" in one for one in differences(folder))


def test_a_slice_in_a_table_is_compared_with_the_record(folder: Path) -> None:
    def shift(top: Tree) -> None:
        row = next(n for n, one in enumerate(top["kinds"]["slice"]) if one)
        [(axis, [[start, length]])] = top["kinds"]["slice"][row].items()
        top["kinds"]["slice"][row] = {axis: [[start - 1, length]]}

    edit_table(folder, shift)
    found = differences(folder)
    assert any("is not the slice in the source record" in one for one in found)
    assert any("holds the content" in one for one in found)


def test_a_content_that_is_not_that_of_the_table_is_found(folder: Path) -> None:
    number = 1
    old = json.loads((folder / "relayout.json").read_text())["files"][number]["content"]
    edit_head(folder, old, "0" * 32)
    edit_manifest(folder, lambda top: top["files"][number].update(content="0" * 32))
    assert [one for one in differences(folder) if "holds the content" in one]


def test_a_bulk_that_cannot_go_directly_to_its_place_is_named(folder: Path) -> None:
    def move(top: Tree) -> None:
        entry = top["ranks"][1]
        for read in entry["reads"]:
            read["arena_offset"] += 16
        entry["arena_nbytes"] += 16

    edit_manifest(folder, move)
    edit_table(folder, lambda top: top.update(arena_offset=[offset + 16 for offset in top["arena_offset"]]))
    assert relayout.load(folder, 1, verify=True)
    assert any("cannot go directly to their place" in one for one in differences(folder))


def test_chunk_digests_are_compared_with_the_files(folder: Path) -> None:
    path = folder / "relayout.chunks"
    blob = bytearray(path.read_bytes())
    blob[-1] ^= 1
    path.write_bytes(blob)
    assert any("relayout.chunks: its part for" in one for one in differences(folder))
    counts = [
        -(-(one["nbytes"] - one["data_start"]) // 2**20)
        for one in json.loads((folder / "relayout.json").read_text())["files"]
    ]
    last = bytes(blob[-16 * counts[-1] :])
    edit_manifest(folder, lambda top: top["files"][-1].update(chunks_digest=digest(last)))
    assert any("its chunk has another digest than in relayout.chunks" in one for one in differences(folder))
    path.write_bytes(bytes(blob) + b"\0")
    assert any("bytes long, expected" in one for one in differences(folder))
    path.unlink()
    assert any(one.startswith("relayout.chunks: ") for one in differences(folder))


def test_a_sha256_is_compared_with_the_file(folder: Path) -> None:
    edit_manifest(folder, lambda top: top["files"][0].update(sha256="0" * 64))
    assert any("SHA-256 is" in one for one in differences(folder))


@pytest.mark.parametrize(
    "what", ["a tensor too few", "another file", "another size", "none is listed", "not asked for"]
)
def test_the_index_for_stock_loaders_is_compared(pristine: Path, tmp_path: Path, what: str) -> None:
    folder = shutil.copytree(pristine / ("two" if what == "not asked for" else "one"), tmp_path / "out")
    path = folder / "model.safetensors.index.json"
    if what == "not asked for":
        shutil.copy(pristine / "one" / path.name, path)
    elif what == "none is listed":
        edit_manifest(folder, lambda top: top.update(hub_index_digest=None))
    else:
        top = json.loads(path.read_text())
        name = min(top["weight_map"])
        if what == "a tensor too few":
            del top["weight_map"][name]
        elif what == "another file":
            top["weight_map"][name] = "x.safetensors"
        else:
            top["metadata"]["total_size"] += 1
        blob = json.dumps(top).encode()
        path.write_bytes(blob)
        edit_manifest(folder, lambda manifest: manifest.update(hub_index_digest=digest(blob)))
    assert any(one.startswith("model.safetensors.index.json: ") for one in differences(folder))
