"""The source on real folders, whose files the stock safetensors package wrote."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file
from support.local_stores import read_source
from support.rights import drop_superuser_rights
from support.toy_store import shelf

import relayout
from relayout.checkpoint.shards import lay_out_shards
from relayout.checkpoint.source import SourceCheckpoint
from relayout.checkpoint.source import read_source as source_of
from relayout.commands.convert import convert
from relayout.core.slices import TensorHead
from relayout.errors import FormatError, PlanError
from relayout.storage.local.store import LocalStore
from relayout.train.memory_folder import MemoryFolder

Array = npt.NDArray[Any]
INDEX = "model.safetensors.index.json"

# F4 and its like are for the header's own tests; these are of four sizes and four shapes.
A: Array = np.arange(1, 13, dtype=np.float32).reshape(3, 4)
B: Array = np.arange(101, 108, dtype=np.uint8)
C: Array = np.arange(2, 8, dtype=np.float16).reshape(1, 2, 3)
D: Array = np.array(77, dtype=np.int64)
DTYPES = {"float32": "F32", "uint8": "U8", "float16": "F16", "int64": "I64"}


def write(path: Path, tensors: dict[str, Array], **metadata: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={"format": "pt", **metadata})


def write_index(path: Path, weight_map: dict[str, Any], **top: Any) -> None:
    path.write_text(json.dumps({"metadata": {"total_size": 1}, **top, "weight_map": weight_map}))


def write_shards(folder: Path, first: str, second: str) -> None:
    """A and B in one file, C and D in another, and no index."""
    write(folder / first, {"a": A, "b": B})
    write(folder / second, {"c": C, "d": D})


def assert_holds(source: SourceCheckpoint, expected: dict[str, Array]) -> None:
    """The source names these tensors, no others, and each extent holds the bytes that numpy has."""
    assert {tensor.name for tensor in source.tensors} == set(expected)
    for tensor in source.tensors:
        array = expected[tensor.name]
        path = Path(source.folder.location(source.files[tensor.file].name))
        stored = path.read_bytes()[tensor.extent.offset : tensor.extent.end]
        assert (tensor.dtype, tensor.shape, stored) == (DTYPES[array.dtype.name], array.shape, array.tobytes())
    assert source.nbytes == sum(array.nbytes for array in expected.values())


def names(source: SourceCheckpoint) -> list[str]:
    return [file.name for file in source.files]


def test_a_file_is_described_as_it_lies_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write(path, {"a": A})
    blob = path.read_bytes()
    [file] = read_source(tmp_path).files
    assert (file.name, file.nbytes) == (path.name, len(blob))
    assert file.data_start == len(blob) - A.nbytes
    assert file.header == blob[: -A.nbytes]


# Of these files and indices the checkpoint holds those tensors; the files that are not of it get a word each.
XY = {"x.safetensors": {"a": A, "b": B}, "y.safetensors": {"c": C, "d": D}}
MODEL_AND_OTHERS = {"model.safetensors": {"a": A}, "consolidated.safetensors": {"l": A}, "zzz.safetensors": {"a": A}}
OTHER_INDEX = "consolidated.safetensors.index.json"
Files = dict[str, dict[str, Array]]
Indices = dict[str, dict[str, str]]


@pytest.mark.parametrize(
    ("files", "indices", "held", "left_out"),
    [
        ({"model.safetensors": {"a": A, "b": B, "c": C, "d": D}}, {}, "abcd", []),
        (XY, {}, "abcd", []),
        (MODEL_AND_OTHERS, {}, "a", [f"{name}: model.safetensors is the model" for name in list(MODEL_AND_OTHERS)[1:]]),
        # Tensors of its files that the index does not know go along.
        (XY, {INDEX: {"a": "x.safetensors", "c": "y.safetensors"}}, "abcd", []),
        (XY, {INDEX: {"a": "x.safetensors"}}, "ab", [f"y.safetensors: not named by {INDEX}"]),
        # An index of another name counts, but not before the usual one, nor before the usual file.
        (XY, {OTHER_INDEX: {"a": "x.safetensors"}}, "ab", [f"y.safetensors: not named by {OTHER_INDEX}"]),
        (
            XY,
            {OTHER_INDEX: {"a": "x.safetensors"}, INDEX: {"c": "y.safetensors"}},
            "cd",
            [f"x.safetensors: not named by {INDEX}"],
        ),
        (
            {"model.safetensors": {"a": A}, "x.safetensors": {"b": B}},
            {OTHER_INDEX: {"b": "x.safetensors"}},
            "a",
            ["x.safetensors: model.safetensors is the model"],
        ),
        (
            MODEL_AND_OTHERS | XY,
            {INDEX: {"a": "x.safetensors"}},
            "ab",
            [
                f"consolidated.safetensors: not named by {INDEX}",
                f"model.safetensors: not named by {INDEX}, which engines load; transformers loads this file instead",
                *(f"{name}.safetensors: not named by {INDEX}" for name in ("y", "zzz")),
            ],
        ),
        # Of a tensor in two files the index decides.
        *(
            (
                {one: {"a": A, "b": B}, other: {"a": A[::-1].copy(), "c": C}},
                {INDEX: {"a": one, "b": one, "c": other}},
                "abc",
                [f"{other}: the index assigns 1 of its tensors to other files"],
            )
            for one, other in (("x.safetensors", "y.safetensors"), ("y.safetensors", "x.safetensors"))
        ),
        # Shards may be called anything.
        *(
            ({one: XY["x.safetensors"], other: XY["y.safetensors"]}, {INDEX: {"a": one, "d": other}}, "abcd", [])
            for one, other in (
                ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
                ("model_00001-of-00002.safetensors", "model_00002-of-00002.safetensors"),
                ("model-00000-of-00002.safetensors", "model-00001-of-00002.safetensors"),
                ("model-00001-of-00009.safetensors", "model-00007-of-00009.safetensors"),
                ("model.safetensors-00001-of-00002.safetensors", "model.safetensors-00002-of-00002.safetensors"),
                ("model.safetensors", "vision.safetensors"),
                ("zeta.safetensors", "Ünï cødé.safetensors"),
            )
        ),
    ],
)
def test_the_files_of_a_model_are_those_of_its_index_or_of_its_names(
    tmp_path: Path, files: Files, indices: Indices, held: str, left_out: list[str]
) -> None:
    for file, tensors in files.items():
        write(tmp_path / file, tensors)
    for name, weight_map in indices.items():
        write_index(tmp_path / name, weight_map)
    source = read_source(tmp_path)
    assert_holds(source, {name: {"a": A, "b": B, "c": C, "d": D}[name] for name in held})
    assert names(source) == sorted(
        files.keys() - {word.partition(":")[0] for word in left_out if "assigns" not in word}
    )
    assert (source.left_out, source.side_files) == (tuple(left_out), ())
    if source.index is not None:
        name, blob = source.index
        assert (name, blob) == (INDEX if INDEX in indices else OTHER_INDEX, (tmp_path / name).read_bytes())
    assert (source.index is None) == (not indices or ("model.safetensors" in names(source) and INDEX not in indices))


@pytest.mark.parametrize(
    "name", ["x.safetensors.bin", "x.safetensors/y", "d/x.safetensors", "../x.safetensors", ".x", 5]
)
def test_an_index_names_safetensors_files_beside_it(tmp_path: Path, name: Any) -> None:
    write(tmp_path / "model.safetensors", {"a": A})
    write_index(tmp_path / INDEX, {"a": name})
    with pytest.raises(FormatError, match=r"is not the name of a \.safetensors file") as caught:
        read_source(tmp_path)
    assert caught.value.code == "field"


@pytest.mark.parametrize("metadata", [{"total_size": 1}, {"total_size": 10**15}, {"total_size": "many"}, {}, None, 7])
def test_a_wrong_total_size_is_ignored(tmp_path: Path, metadata: Any) -> None:
    write_shards(tmp_path, "x.safetensors", "y.safetensors")
    write_index(
        tmp_path / INDEX,
        {"a": "x.safetensors", "b": "x.safetensors", "c": "y.safetensors", "d": "y.safetensors"},
        metadata=metadata,
    )
    assert read_source(tmp_path).nbytes == A.nbytes + B.nbytes + C.nbytes + D.nbytes


def test_two_indices_of_other_names_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", {"a": A})
    for name in ("one", "two"):
        write_index(tmp_path / f"{name}.safetensors.index.json", {"a": "x.safetensors"})
    with pytest.raises(PlanError, match=r"one\.safetensors\.index\.json, two\.safetensors\.index\.json"):
        read_source(tmp_path)


def test_a_tensor_in_two_files_is_refused_without_an_index(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", {"a": A})
    write(tmp_path / "y.safetensors", {"a": A})
    with pytest.raises(FormatError, match=r"y\.safetensors: tensor 'a': is also in x\.safetensors"):
        read_source(tmp_path)


def write_set(folder: Path, *files: str) -> dict[str, Array]:
    """A tensor in each file; what they hold together."""
    tensors = {f"w.{number}": np.arange(number, number + 5, dtype=np.uint8) for number in range(len(files))}
    for name, file in zip(tensors, files, strict=True):
        write(folder / f"{file}.safetensors", {name: tensors[name]})
    return tensors


@pytest.mark.parametrize(
    "files",
    [
        ["model-00001-of-00002", "model-00002-of-00002"],
        ["model-00000-of-00002", "model-00001-of-00002"],
        ["model-00000-of-00002", "model-00001-of-00002", "model-00002-of-00002"],
        ["model-00001-of-000002", "model-00002-of-000002"],
        ["model_00001-of-00001", "vision-00001-of-00002", "vision-00002-of-00002", "extra"],
        ["model.fp16-00001-of-00001", "model.safetensors-00001-of-00001"],
        ["model-00001-of-00001.fp16", "model-00001-of-00002.bf16", "model-00002-of-00002.bf16"],
        ["00001-of-00002", "00002-of-00002"],
        # Some other count than that of the files of one model.
        ["epoch-3-of-10", "epoch-4-of-10"],
        ["model-00001-of-many", "model-00002-of-", "model-00003-of-00009-or-more", "model-٠٠٠٠١-of-٠٠٠٠٢"],  # noqa: RUF001
    ],
)
def test_without_an_index_numbered_shards_of_which_none_is_missing_are_the_model(
    tmp_path: Path, files: list[str]
) -> None:
    expected = write_set(tmp_path, *files)
    source = read_source(tmp_path)
    assert_holds(source, expected)
    assert source.left_out == ()


@pytest.mark.parametrize(
    ("files", "missing"),
    [
        (["model-00001-of-00002"], "model-00002-of-00002"),
        (["model-00001-of-00004", "model-00002-of-00004", "model-00004-of-00004"], "model-00003-of-00004"),
        (
            ["model-00002-of-00004", "model-00004-of-00004"],
            "model-00001-of-00004",
        ),
        (["model-00000-of-00003", "model-00002-of-00003"], "model-00001-of-00003"),
        (["model-00001-of-99999999999999999999"], "model-00002-of-99999999999999999999"),
        (["model_00001-of-000002"], "model_00002-of-000002"),
        (["x", "model-00001-of-00001", "vision-00002-of-00002"], "vision-00001-of-00002"),
        (["model.fp16-00001-of-00002", "model-00002-of-00002"], "model-00001-of-00002"),
        (["model-00001-of-00002.fp16", "model-00002-of-00002.bf16"], "model-00002-of-00002.fp16"),
        (["00002-of-00002"], "00001-of-00002"),
        (["consolidated-00001-of-00002"], "consolidated-00002-of-00002"),
    ],
)
def test_without_an_index_a_missing_one_of_numbered_shards_is_named(
    tmp_path: Path, files: list[str], missing: str
) -> None:
    write_set(tmp_path, *files)
    with pytest.raises(FormatError, match=re.escape(f"{tmp_path}/{missing}.safetensors: is missing")):
        read_source(tmp_path)


def test_one_of_numbered_shards_can_be_converted_alone(tmp_path: Path) -> None:
    expected = write_set(tmp_path, "model-00002-of-00004")
    assert_holds(read_source(tmp_path / "model-00002-of-00004.safetensors"), expected)


def test_without_an_index_numbered_shards_of_two_models_are_refused(tmp_path: Path) -> None:
    write_set(tmp_path, "model-00001-of-00002", "model-00002-of-00002", "model-00001-of-00001")
    with pytest.raises(
        FormatError, match=r"model-00001-of-00001\S+ and model-00001-of-00002\S+ belong to different models"
    ):
        read_source(tmp_path)


@pytest.mark.parametrize(
    "consolidated",
    [
        ["consolidated"],
        ["consolidated-00001-of-00002", "consolidated-00002-of-00002"],
        ["consolidated-00001-of-00002"],
        ["consolidated.00", "consolidated.01"],
    ],
)
def test_without_an_index_the_numbered_model_counts_and_not_the_same_weights_by_other_names(
    tmp_path: Path, consolidated: list[str]
) -> None:
    for file in consolidated:
        write(tmp_path / f"{file}.safetensors", {f"layers.{file}": A})
    expected = write_set(tmp_path, "model-00001-of-00002", "model-00002-of-00002", "vision")
    source = read_source(tmp_path)
    assert_holds(source, expected)
    reason = "model-00001-of-00002.safetensors and the other files of its set are the model"
    assert source.left_out == tuple(f"{file}.safetensors: {reason}" for file in consolidated)


@pytest.mark.parametrize("other", ["consolidated_2", "my-consolidated", "vision"])
def test_consolidated_weights_alone_are_the_model(tmp_path: Path, other: str) -> None:
    expected = write_set(tmp_path, "consolidated", other)
    source = read_source(tmp_path)
    assert_holds(source, expected)
    assert source.left_out == ()


@pytest.mark.parametrize("which", ["folder", "file", "index"])
def test_a_shard_whose_name_is_not_utf8_is_refused_before_a_byte_is_copied(tmp_path: Path, which: str) -> None:
    name = os.fsdecode(b"m\xff.safetensors")
    source = tmp_path / "model"
    try:
        write(source / name, {"a": A})
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    if which == "index":
        (source / name).rename(source / "x.safetensors")
        name += ".index.json"
        write_index(source / name, {"a": "x.safetensors"})
    says = re.escape(rf"{source}: the file name {os.fsencode(name)!r} is not UTF-8; rename the file")
    with pytest.raises(PlanError, match=says):
        convert(source / name if which == "file" else source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize(
    ("listed", "says"),
    [
        ("a//b.json", "is not the name of a file inside the checkpoint"),
        ("tokenizer.json/vocabulary.json", "'tokenizer.json' is used for two files or folders"),
        ("m.safetensors/notes.txt", "'m.safetensors' is used for two files or folders"),
    ],
)
def test_names_of_a_store_that_no_folder_can_have_are_refused_before_a_byte_is_copied(
    tmp_path: Path, listed: str, says: str
) -> None:
    """As a bucket may list them."""
    write(tmp_path / "m.safetensors", {"a": A})
    there = shelf(tmp_path.name)
    there.clear()
    weights = (tmp_path / "m.safetensors").read_bytes()
    for name, content in {"m.safetensors": weights, "tokenizer.json": b"{}", listed: b"{}"}.items():
        there.objects[f"model/{name}"] = content, "1"
    with pytest.raises(FormatError, match=re.escape(says)):
        convert(f"toy://{tmp_path.name}/model", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]


def test_a_relative_path_is_read_from_where_one_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "model.safetensors", {"a": A})
    monkeypatch.chdir(tmp_path)
    assert_holds(read_source(Path()), {"a": A})
    assert_holds(read_source(Path("model.safetensors")), {"a": A})


@pytest.mark.parametrize("name", ["one.safetensors", "weights"])
def test_a_single_file_is_a_checkpoint_with_the_config_beside_it(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, {"a": A, "b": B})
    write(tmp_path / "model.safetensors", {"c": C})
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    source = read_source(tmp_path / name)
    assert_holds(source, {"a": A, "b": B})
    assert (source.root, names(source), source.model_type) == (LocalStore(tmp_path / name), [name], "qwen2")
    assert (source.side_files, source.left_out, source.index) == (("config.json",), (), None)
    assert source.folder == LocalStore(tmp_path, name)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, ()),
        ({"hf_quant_config": {"quantization": {"quant_algo": "FP8"}}}, ("hf_quant_config.json",)),
        (
            {"config": {}, "quantize_config": {"bits": 4}, "quant_config": {"bits": 4}},
            ("config.json", "quantize_config.json"),
        ),
        ({"config": {"quantization_config": {"quant_method": "fp8"}}, "quant_config": {"bits": 4}}, ("config.json",)),
    ],
)
def test_with_a_single_file_goes_what_it_would_be_planned_by(
    tmp_path: Path, files: dict[str, Any], expected: tuple[str, ...]
) -> None:
    write(tmp_path / "one.safetensors", {"a": A})
    for name in ("tokenizer", "generation_config"):
        (tmp_path / f"{name}.json").write_text("{}")
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert read_source(tmp_path / "one.safetensors").side_files == expected


@pytest.mark.parametrize("indexed", [False, True])
def test_a_dangling_link_in_the_place_of_a_shard_is_refused(tmp_path: Path, indexed: bool) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    write(snapshot / "x.safetensors", {"a": A})
    (snapshot / "y.safetensors").symlink_to("../../blobs/gone")
    if indexed:
        write_index(snapshot / INDEX, {"a": "x.safetensors", "b": "y.safetensors"})
    why = r"is missing, but model\.safetensors\.index\.json names it" if indexed else "cannot be read: No such file"
    with pytest.raises(FormatError, match=rf"y\.safetensors: {why}"):
        read_source(snapshot)


def test_a_side_file_that_is_a_dangling_link_does_not_vanish_without_a_word(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"a": A})
    (tmp_path / "tokenizer.json").symlink_to("../../blobs/gone")
    assert any("tokenizer.json" in word for word in read_source(tmp_path).left_out)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="drops the superuser's rights by Linux's prctl")
def test_an_unreadable_file_is_a_format_error(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", {"a": A})
    write_index(tmp_path / INDEX, {"a": "x.safetensors"})
    (tmp_path / "config.json").write_text("{}")
    script = """
import os, sys
from relayout.checkpoint.source import read_source
from relayout.storage.stores import find_store
from relayout.errors import FormatError
store = find_store(sys.argv[1])
print(len(read_source(store).tensors))
for name in sys.argv[2:]:
    os.chmod(name, 0)
    try: print(len(read_source(store).tensors))
    except FormatError as error: print("FormatError", error)
    os.chmod(name, 0o600)
"""
    names = [str(tmp_path / name) for name in ("x.safetensors", INDEX, "config.json")]
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), *names],
        capture_output=True,
        text=True,
        preexec_fn=drop_superuser_rights,
    )
    assert done.returncode == 0, done.stderr
    refusals = [f"FormatError {name}: cannot be read: Permission denied" for name in names]
    assert done.stdout.splitlines() == ["1", *refusals]


def test_weights_of_a_store_that_has_no_versions_are_refused() -> None:
    [shard], _ = lay_out_shards([TensorHead("a", "U8", (4,))], [[0]], {})
    folder = MemoryFolder({}, {shard.name: shard}, lambda *_: None, version="")
    with pytest.raises(FormatError, match="neither ETag nor Last-Modified"):
        source_of(folder)


def test_a_converted_folder_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "model" / "model.safetensors", {"a": A})
    convert(tmp_path / "model", tmp_path / "out")
    with pytest.raises(PlanError, match=r"out: is already a converted checkpoint"):
        read_source(tmp_path / "out")


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        INDEX,
        "config.json",
        "out/relayout.json",
        "out/relayout.rank-0.json.zst",
        "out/relayout.source.json.zst",
    ],
)
def test_what_git_lfs_left_in_place_of_a_file_is_called_so(tmp_path: Path, name: str) -> None:
    write(tmp_path / "model.safetensors", {"a": A})
    write_index(tmp_path / INDEX, {"a": "model.safetensors"})
    (tmp_path / "config.json").write_text("{}")
    convert(tmp_path / "model.safetensors", tmp_path / "out")
    # As git-lfs 3.7 writes it (docs/spec.md).
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d7a' * 16}\nsize 12345\n"
    (tmp_path / name).write_text(pointer)
    with pytest.raises(FormatError, match=rf"{re.escape(name)}: this is a git-lfs pointer, .*: run `git lfs pull`$"):
        relayout.restore(tmp_path / "out", tmp_path / "back") if "out" in name else read_source(tmp_path)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="contains no safetensors file"):
        read_source(tmp_path)


def test_safetensors_files_in_subfolders_are_no_model(tmp_path: Path) -> None:
    write(tmp_path / "sub" / "model.safetensors", {"a": A})
    with pytest.raises(PlanError, match=r"contains no safetensors file; name one of its subfolders: sub$"):
        read_source(tmp_path)


def test_of_a_pipeline_of_models_the_folders_that_can_be_converted_are_named(tmp_path: Path) -> None:
    for name in ("vae", "transformer", "text_encoder"):
        write(tmp_path / name / "diffusion_pytorch_model.safetensors", {"a": A})
    convert(tmp_path / "vae", tmp_path / "vae-tp1")
    write(tmp_path / ".cache" / "x.safetensors", {"a": A})
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(PlanError, match=r"contains no safetensors file; .*: text_encoder, transformer, vae$"):
        read_source(tmp_path)


def test_of_a_folder_of_the_hubs_cache_the_snapshots_are_named(tmp_path: Path) -> None:
    model = tmp_path / "hub" / "models--org--name"
    for revision, name in (("0123abcd", "model.safetensors"), ("4567cdef", "relayout.json")):
        (model / "snapshots" / revision).mkdir(parents=True)
        write(model / "blobs" / f"{revision}.safetensors", {"a": A})
        (model / "snapshots" / revision / name).symlink_to(Path("../../blobs") / f"{revision}.safetensors")
    for folder, prefix in ((model, ""), (tmp_path / "hub", "models--org--name/")):
        names = ", ".join(f"{prefix}snapshots/{revision}" for revision in ("0123abcd", "4567cdef"))
        with pytest.raises(PlanError, match=rf"contains no safetensors file; name a snapshot in it: {names}$"):
            read_source(folder)
        with pytest.raises(FormatError, match=rf"not a converted folder .*; name a snapshot in it: {names}$"):
            relayout.copy(folder, tmp_path / "out")


@pytest.mark.parametrize("name", ["nothing", "nothing/below", "nothing.safetensors"])
def test_a_missing_source_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises((PlanError, FormatError), match=f"{name}: .*[Nn]o such file"):
        read_source(tmp_path / name)


def test_side_files_go_along_but_for_hidden_and_reserved_names(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"a": A})
    kept = ["config.json", "chat_template.jinja", "LICENSE", "tokenizer.json", "sub/deep/vocab.txt", "sub/modeling.py"]
    reserved = ["relayout.rank-0.json.zst"]
    hidden = [".gitattributes", ".git/config", "sub/.cache/blob"]
    for name in [*kept, *reserved, *hidden]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    source = read_source(tmp_path)
    assert source.side_files == tuple(sorted(kept))
    assert sorted(word.partition(": ")[0] for word in source.left_out) == sorted(reserved)


def test_a_converted_folder_inside_the_source_does_not_go_along_in_part(tmp_path: Path) -> None:
    # Without its rank files it is no use to anyone.
    write(tmp_path / "model.safetensors", {"a": A})
    convert(tmp_path / "model.safetensors", tmp_path / "model-tp1")
    assert (tmp_path / "model-tp1" / "relayout.json").is_file()
    assert read_source(tmp_path).side_files == ()


def test_metadata_is_what_all_shards_agree_on(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", {"a": A}, author="ann", part="1", only="x")
    write(tmp_path / "y.safetensors", {"b": B}, author="ann", part="2")
    assert dict(read_source(tmp_path).metadata) == {"format": "pt", "author": "ann"}


def test_a_config_with_infinity_is_read(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"a": A})
    (tmp_path / "config.json").write_text('{"model_type": "x", "low": -Infinity, "high": Infinity, "none": NaN}')
    source = read_source(tmp_path)
    assert source.model_type == "x"
    assert (source.config["low"], source.config["high"]) == (-np.inf, np.inf)
    assert np.isnan(source.config["none"])


@pytest.mark.parametrize("model_type", [None, 5, ["llama"], {}])
def test_a_model_type_that_is_no_string_is_none(tmp_path: Path, model_type: Any) -> None:
    write(tmp_path / "model.safetensors", {"a": A})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert read_source(tmp_path).model_type is None


def test_tensors_come_in_model_order_across_shards(tmp_path: Path) -> None:
    order = [
        "lm_head.weight",
        "model.layers.0.mlp.weight",
        "model.layers.2.mlp.bias",
        "model.layers.2.mlp.weight",
        "model.layers.10.mlp.weight",
        "model.layers.101.mlp.weight",
        "model.norm.weight",
    ]
    write(tmp_path / "x.safetensors", dict.fromkeys(order[::2], A))
    write(tmp_path / "y.safetensors", dict.fromkeys(order[1::2], A))
    assert [tensor.name for tensor in read_source(tmp_path).tensors] == order


def test_an_index_that_names_very_many_files_is_read_in_linear_time(tmp_path: Path) -> None:
    def seconds(count: int) -> float:
        folder = tmp_path / str(count)
        folder.mkdir()
        names = [f"model-{number:05}-of-{count}.safetensors" for number in range(count)]
        index = {"metadata": {}, "weight_map": {f"w{number}": name for number, name in enumerate(names)}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        for name in names[1 : count // 10 + 1]:
            (folder / name).touch()
        started = time.process_time()
        with pytest.raises(FormatError, match=f"{names[0]}: is missing"):
            read_source(folder)
        return time.process_time() - started

    assert seconds(40_000) < 40 * seconds(4_000), "a set of all names for each file takes 100 times as long"


def test_folders_nested_very_deep_are_an_error(tmp_path: Path) -> None:
    save_file({"w": np.arange(4, dtype=np.uint8)}, tmp_path / "model.safetensors")
    fd = os.open(tmp_path, os.O_RDONLY)
    for _ in range(2100):  # Linux has no longer paths than 4,095 bytes.
        os.mkdir("d", dir_fd=fd)
        inner = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)
    try:
        assert_holds(read_source(tmp_path), {"w": np.arange(4, dtype=np.uint8)})
        with pytest.raises(FormatError, match="holds folders nested too deep: more than 64, such as "):
            relayout.convert(tmp_path, tmp_path.with_name("out"))
    finally:
        subprocess.run(["rm", "-rf", tmp_path / "d"], check=True)
