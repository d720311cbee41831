"""Facts that stand in several places: `verify` names whatever is changed in one of them, with its digests made true."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from safetensors.numpy import save_file
from support.loader_fixtures import mlp_model
from support.rebuilding import edit_manifest, edit_table, rebuild

import relayout
from relayout.errors import FormatError

Tree = dict[str, Any]
INDEX = "model.safetensors.index.json"
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


def digest(blob: bytes) -> str:
    return blake3(blob).hexdigest()


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
    rebuild(folder, lambda top: None)
    assert differences(folder) == []


def shift_a_slice(top: Tree) -> None:
    row = next(n for n, one in enumerate(top["kinds"]["slice"]) if one)
    [(axis, [[start, length]])] = top["kinds"]["slice"][row].items()
    top["kinds"]["slice"][row] = {axis: [[start - 1, length]]}


@pytest.mark.parametrize(
    ("edit", "change", "says"),
    [
        *(
            (edit_manifest, {field: value}, f"^relayout.json: {field} is {value}, by the source record {recorded}")
            for field, value, recorded in (
                ("plan", "builtin:qwen2", "builtin:llama"),
                ("model_type", "qwen2", "llama"),
                ("expert_parallel", True, False),
                ("alignment", 512, 4096),
                ("dcp", False, True),
                ("conversion", "0" * 32, ""),
            )
        ),
        (edit_manifest, {"hub_index_digest": "0" * 64}, "^model.safetensors.index.json: differs from what was written"),
        (edit_manifest, lambda top: top["source"].update(nbytes=top["source"]["nbytes"] + 1), "source.nbytes is"),
        (
            edit_manifest,
            lambda top: top["source"].update(num_tensors=0),
            r"relayout.source.json.zst: \d+ tensors, relayout.json says 0",
        ),
        (edit_table, shift_a_slice, "is not the slice in the source record"),
        (edit_table, shift_a_slice, "its tensors_digest is"),
    ],
)
def test_what_is_repeated_is_compared(
    folder: Path, edit: Callable[..., None], change: Tree | Callable[[Tree], object], says: str
) -> None:
    edit(folder, change if callable(change) else lambda top: top.update(change))
    assert any(re.search(says, one) for one in differences(folder)), differences(folder)


def test_what_dcp_takes_for_the_place_of_a_slice_is_compared(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    edit_head(folder, f'\\"{name}\\":{{\\"saved_offsets\\":[512,0]}}', f'\\"{name}\\":{{\\"saved_offsets\\":[511,0]}}')
    found = relayout.verify(folder).differences
    assert [(one.file, one.tensor) for one in found] == [(HEAD, name)]
    assert "DCP_SHARDING_INFO has {'saved_offsets': [511, 0]}" in found[0].what


def test_a_content_that_is_not_that_of_the_table_is_found(folder: Path) -> None:
    number = 1
    old = json.loads((folder / "relayout.json").read_text())["files"][number]["tensors_digest"]
    edit_head(folder, old, "0" * 32)
    edit_manifest(folder, lambda top: top["files"][number].update(tensors_digest="0" * 32))
    assert [one for one in differences(folder) if "its tensors_digest is" in one]


def test_a_bulk_that_cannot_go_directly_to_its_place_is_named(folder: Path) -> None:
    def move(top: Tree) -> None:
        entry = top["ranks"][1]
        for read in entry["reads"]:
            read["arena_offset"] += 16
        entry["arena_nbytes"] += 16

    edit_manifest(folder, move)
    edit_table(folder, lambda top: top.update(arena_offset=[offset + 16 for offset in top["arena_offset"]]))
    assert relayout.load(folder, 1, verify=True)
    assert any("cannot be read directly to byte" in one for one in differences(folder))


@pytest.mark.parametrize(
    "change",
    [
        lambda top: top["weight_map"].popitem(),
        lambda top: top["weight_map"].update({min(top["weight_map"]): "x.safetensors"}),
        lambda top: top.update(weight_map=dict(reversed(top["weight_map"].items()))),
        lambda top: top["metadata"].update(total_size=1),
    ],
)
def test_the_index_for_stock_loaders_is_compared(
    pristine: Path, tmp_path: Path, change: Callable[[Tree], object]
) -> None:
    folder = shutil.copytree(pristine / "one", tmp_path / "out")
    top = json.loads((folder / INDEX).read_text())
    change(top)
    blob = json.dumps(top).encode()
    (folder / INDEX).write_bytes(blob)
    edit_manifest(folder, lambda manifest: manifest.update(hub_index_digest=digest(blob)))
    assert any(one.startswith(f"{INDEX}: ") for one in differences(folder))


def test_an_index_that_no_manifest_lists_is_found(pristine: Path, folder: Path, tmp_path: Path) -> None:
    for out in (shutil.copytree(pristine / "one", tmp_path / "one"), folder):
        edit_manifest(out, lambda top: top.update(hub_index_digest=None))
        assert differences(out) == [f"{INDEX}: is not part of this conversion"]


def test_an_index_that_does_not_stop_other_loaders_is_found(folder: Path) -> None:
    top = json.loads((folder / INDEX).read_text())
    top["weight_map"].popitem()
    blob = json.dumps(top).encode()
    (folder / INDEX).write_bytes(blob)
    edit_manifest(folder, lambda manifest: manifest.update(hub_index_digest=digest(blob)))
    missing = "this-folder-is-converted-for-2-ranks-and-needs-relayout.safetensors"
    assert [one for one in differences(folder) if f"{INDEX}: does not name {missing}" in one]


def exchange_offsets(top: Tree) -> None:
    offsets, names = top["tensors"]["offset"], top["tensors"]["name"]
    one, other = (names.index(f"model.layers.0.mlp.{name}_proj.weight") for name in ("gate", "up"))
    offsets[one], offsets[other] = offsets[other], offsets[one]


def in_header(old: str, new: str) -> Callable[[Tree], None]:
    def change(top: Tree) -> None:
        [text] = top["files"]["header"]
        assert old in text
        top["files"]["header"] = [text.replace(old, new, 1)]

    return change


def cut_otherwise(top: Tree) -> None:
    """The same slices, in two ranges that touch."""
    number = next(n for n, cut in enumerate(top["cuts"]) if cut[0])
    top["cuts"][number] = [
        {axis: [[start, 1], [start + 1, length - 1]]}
        for one in top["cuts"][number]
        for axis, [[start, length]] in one.items()
    ]


def out_of_order(top: Tree) -> None:
    for column in top["tensors"].values():
        column.reverse()


def named(old: str, new: str) -> Callable[[Tree], None]:
    def change(top: Tree) -> None:
        top["side_files"]["name"] = [new if one == old else one for one in top["side_files"]["name"]]

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (exchange_offsets, "gate_proj.weight'.* the source record has"),
        (lambda top: top["tensors"]["offset"].__setitem__(0, 0), "the source record has"),
        (lambda top: top["files"]["nbytes"].__setitem__(0, top["files"]["nbytes"][0] + 1), "trailing bytes"),
        (in_header('"BF16"', '"F16" '), "the source record has"),
        (in_header("gate_proj", "gata_proj"), "gate_proj.weight'.* is not in the header"),
        (cut_otherwise, "canonical form is"),
        (out_of_order, "is not in model order"),
        (named("config.json", "relayout.x"), "'relayout.x' has the name of a file that relayout writes"),
        (named("config.json", HEAD), f"'{HEAD}' has the name of a file that relayout writes"),
        (lambda top: top["plan"]["rules"].update(cut=5), "cannot be loaded at another degree: .*cut"),
        (lambda top: top["plan"]["rules"].update(x=5), "cannot be loaded at another degree: .*'x'"),
        (
            lambda top: top["plan"]["rules"].update(cut={"**": "whole"}),
            "cannot be loaded at another degree: .*does not reproduce",
        ),
        (lambda top: top.update(layout="whole"), "dcp is true: tensors are stored whole"),
        (lambda top: top["tensors"]["dtype"].__setitem__(0, "F8_E8M0"), "the source record has"),
    ],
)
def test_a_record_that_contradicts_itself_or_its_rules_is_named(
    folder: Path, change: Callable[[Tree], object], says: str
) -> None:
    rebuild(folder, change)
    assert any(re.search(says, one) for one in differences(folder)), differences(folder)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"DCP_VERSION":"1.0"', '"DCP_VERSION":"1.1"', "__metadata__ has DCP_VERSION '1.1', expected '1.0'"),
        (',"DCP_VERSION":"1.0"', "", "__metadata__ has DCP_VERSION None, expected '1.0'"),
        ('"format":"pt"', '"format":"np"', "__metadata__ has format 'np', expected 'pt'"),
        ('"format":"pt",', "", "__metadata__ has format None, expected 'pt'"),
        ('"format":"pt"', '"format":"pt","x":"1"', "__metadata__ has x '1', expected None"),
    ],
)
def test_the_entries_of_a_header_are_those_that_follow_from_the_source(
    folder: Path, old: str, new: str, says: str
) -> None:
    edit_head(folder, old, new)
    assert differences(folder) == [f"{HEAD}: {says}"]


def test_the_order_of_a_headers_entries_is_that_of_the_file(folder: Path) -> None:
    blob = (folder / HEAD).read_bytes()
    text = blob[8 : 8 + int.from_bytes(blob[:8], "little")].decode().rstrip()
    metadata, *entries = json.loads(text).items()
    edit_head(folder, text, json.dumps(dict([metadata, *reversed(entries)]), separators=(",", ":")))
    assert relayout.load(folder, 1, verify=True)
    assert differences(folder) == [f"{HEAD}: its header does not name the tensors in file order"]


def test_equal_slices_of_a_tensor_have_equal_digests(tmp_path: Path) -> None:
    """Rank 1 is from another conversion, so that all of its own digests fit."""
    (tmp_path / "plan.toml").write_text('[sizes]\nkv_heads = 2\n[cut]\na = { dim = 0, by = "kv_heads" }')
    for name, start in (("one", 0), ("other", 100)):
        (tmp_path / name).mkdir()
        save_file({"a": np.arange(start, start + 8, dtype=np.float32).reshape(4, 2)}, tmp_path / name / "x.safetensors")
        relayout.convert(tmp_path / name, tmp_path / f"{name}-4", tp=4, plan=tmp_path / "plan.toml")
    folder, other = tmp_path / "one-4", tmp_path / "other-4"
    for name in (HEAD, TABLE):
        shutil.copy(other / name, folder / name)
    chunks, others = ((one / "relayout.chunks").read_bytes() for one in (folder, other))
    (folder / "relayout.chunks").write_bytes(chunks[:32] + others[32:64] + chunks[64:])
    digests, others = ((one / "relayout.digests").read_bytes() for one in (folder, other))
    (folder / "relayout.digests").write_bytes(digests[:16] + others[16:32] + digests[32:])

    def mix(top: Tree) -> None:
        found = json.loads((other / "relayout.json").read_text())
        for key in ("files", "ranks"):
            top[key][1] = found[key][1]

    edit_manifest(folder, mix)
    assert relayout.load(folder, 1, verify=True)
    [found] = relayout.verify(folder).differences
    assert (found.file, found.tensor) == (TABLE, "a")
    assert "for the same slice of another rank" in found.what


def test_a_bulk_is_one_read(folder: Path) -> None:
    offsets: list[int] = []
    edit_table(folder, lambda top: offsets.extend(top["offset"]))

    def split(top: Tree) -> None:
        reads = top["ranks"][1]["reads"]
        first, nbytes = reads[0], offsets[1] - offsets[0]
        rest = {"offset": offsets[1], "nbytes": first["nbytes"] - nbytes, "arena_offset": nbytes}
        reads[:1] = [{**first, "nbytes": nbytes}, {**first, **rest}]

    edit_manifest(folder, split)
    assert relayout.load(folder, 1)
    assert [one for one in differences(folder) if "relayout.json: rank 1: bytes" in one and "must be one read" in one]


def test_names_that_differ_in_case_only_are_named(folder: Path) -> None:
    (folder / HEAD).rename(folder / "Model-rank-0-part-0.safetensors")
    edit_manifest(folder, lambda top: top["files"][1].update(name="Model-rank-0-part-0.safetensors"))
    assert any("differ in case only" in one for one in differences(folder))


def test_a_config_that_is_no_object_is_named(folder: Path) -> None:
    blob = b"[]"
    (folder / "config.json").write_bytes(blob)

    def sign(top: Tree) -> None:
        position = top["side_files"]["name"].index("config.json")
        top["side_files"]["nbytes"][position], top["side_files"]["digest"][position] = len(blob), digest(blob)

    rebuild(folder, sign)
    [found] = differences(folder)
    assert found.startswith("config.json: ")
    assert "a JSON list, expected an object" in found


def test_the_length_of_a_header_is_the_files_own(folder: Path) -> None:
    """The text is as it was, so that the content is the right one."""
    path = folder / HEAD
    blob = path.read_bytes()
    length = int.from_bytes(blob[:8], "little")
    path.write_bytes((length - 8).to_bytes(8, "little") + blob[8:])
    with pytest.raises(FormatError, match=f"its data section starts at {length}, relayout.json says {length + 8}"):
        relayout.load(folder, 1)


def test_shards_with_other_headers_are_not_the_source(pristine: Path, tmp_path: Path) -> None:
    """They have the same tensors, but restoring gives others back."""
    source = shutil.copytree(pristine / "source", tmp_path / "source")
    assert relayout.verify(pristine / "two", source=source).ok
    path = source / "model.safetensors"
    blob = path.read_bytes()
    end = 8 + int.from_bytes(blob[:8], "little")
    path.write_bytes(end.to_bytes(8, "little") + blob[8:end] + b" " * 8 + blob[end:])
    found = relayout.verify(pristine / "two", source=source).differences
    assert [str(one) for one in found] == ["model.safetensors: has changed in the source since the conversion"]
