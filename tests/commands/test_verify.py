"""`verify` finds and names whatever is changed in a converted folder."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import prestarted
from support.bits import flip
from support.local_stores import read_manifest, read_record
from support.models import Array
from support.rebuilding import rebuild

import relayout
from relayout.cli.command import Line
from relayout.cli.render import verification
from relayout.conversion.copy_plan import Target
from relayout.conversion.run import FileSink
from relayout.core.slices import NOT_HELD, Cut, Slice
from relayout.errors import FormatError
from relayout.format.safetensors import parse_header

FILE = "model-rank-2-part-0.safetensors"


@pytest.fixture(scope="module")
def pristine(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pristine") / "out"
    relayout.convert(llama, out, tp=4)
    return out


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pristine, tmp_path / "out")


def test_an_undisturbed_folder_is_verified_alone_and_against_its_source(pristine: Path, llama: Path) -> None:
    for source in (None, llama):
        report = relayout.verify(pristine, source=source)
        assert report.ok
        assert report.compared_with_source == (source is not None)
        assert report.nbytes == sum(path.stat().st_size for path in pristine.glob("*.safetensors"))


def test_a_folder_with_the_files_of_some_ranks_is_told_from_a_damaged_one(
    folder: Path, llama: Path, tmp_path: Path
) -> None:
    for rank in (1, 3):
        for path in folder.glob(f"*rank-{rank}*"):
            path.unlink()
    report = relayout.verify(folder, source=llama)
    (found,) = report.differences
    assert (found.file, found.culprit) == ("relayout.json", "ranks")
    assert found.what == "lists ranks 0-3, but there is no file of 1,3"
    assert (report.ok, report.ranks, report.culprit) == (False, (0, 2), "ranks")
    assert report.compared_with_source, "the ranks that are here are checked as always"
    assert relayout.verify(folder, ranks="0,2").ok
    flip(folder / FILE, 5000)
    assert relayout.verify(folder).culprit == "folder"


def test_a_rank_that_lacks_one_of_its_files_is_damage(llama: Path, tmp_path: Path) -> None:
    relayout.convert(llama, tmp_path / "out", tp=2, max_part_nbytes=20_000)
    first, *others = sorted((tmp_path / "out").glob("model-rank-1-*"))
    assert others
    first.unlink()
    report = relayout.verify(tmp_path / "out")
    assert (report.culprit, report.ranks) == ("folder", (0, 1))
    for path in (tmp_path / "out").glob("*rank-*"):
        path.unlink()
    assert relayout.verify(tmp_path / "out").culprit == "folder", "without any file of a rank, nothing is told apart"


def test_a_rank_file_may_be_larger_than_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sparse checkpoint, whose rank file is sparse as well."""
    if not sys.platform.startswith("linux"):
        pytest.skip("takes a limit of address space")
    source, nbytes = tmp_path / "model.safetensors", 3 * 2**28
    text = json.dumps({"x": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}).encode()
    source.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(source, 8 + len(text) + nbytes)

    def leave_sparse(sink: FileSink, target: Target, view: memoryview, address: int) -> None:
        with sink._files.use(target.file) as file:
            os.ftruncate(file._fd, 0)  # Gives the space back that it has allocated.
            os.ftruncate(file._fd, file.nbytes)
        sink._hash(target, view)

    monkeypatch.setattr(FileSink, "put", leave_sparse)
    relayout.convert(source, tmp_path / "out")
    env = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    done = prestarted.run("verify", tmp_path / "out", "--json", env=env, limits={resource.RLIMIT_AS: nbytes})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["nbytes"] == nbytes + 4096


@pytest.mark.parametrize(
    "name",
    [
        *(FILE, "relayout.rank-2.json.zst", "relayout.source.json.zst", "config.json", "relayout.chunks"),
        "model.safetensors.index.json",
    ],
)
def test_a_missing_file_is_one_difference(folder: Path, name: str) -> None:
    (folder / name).unlink()
    report = relayout.verify(folder)
    assert [(one.file, one.what) for one in report.differences] == [(name, "cannot be read: No such file or directory")]
    assert report.culprit == "folder"


def test_a_changed_config_is_one_difference_and_not_what_follows_from_it(folder: Path) -> None:
    for content in ('{"model_type": "gpt2"}', "{}", "no JSON"):
        (folder / "config.json").write_text(content)
        found = relayout.verify(folder).differences
        assert [str(one) for one in found] == ["config.json: differs from the file that was copied"]


def test_a_file_beside_those_of_the_folder_leaves_these_intact(folder: Path) -> None:
    (folder / "model-00001.safetensors").write_bytes((folder / FILE).read_bytes())
    report = relayout.verify(folder)
    assert [str(one) for one in report.differences] == ["model-00001.safetensors: is not part of this conversion"]
    lines = [block.text for block in verification(report, has_source=False) if isinstance(block, Line)]
    assert (report.culprit, lines[-1]) == ("others", "the folder's own files are intact: move the others away")


@pytest.mark.parametrize(
    ("shape", "cut", "says"),
    [
        # The upper half and the right half: of each axis every element is somewhere, but not the lower left quarter.
        ((4, 4), Cut((Slice.along(0, ((0, 2),)), Slice.along(1, ((2, 2),)))), "no rank holds element [2, 0] of [4, 4]"),
        *((shape, Cut((NOT_HELD,) * 2), "no rank holds the tensor") for shape in ((4, 4), (), (0,), (0, 6))),
    ],
)
def test_what_no_rank_holds_is_found(shape: tuple[int, ...], cut: Cut, says: str, tmp_path: Path) -> None:
    """By another plan than the rules': what is there is right, by all digests."""
    source, name = tmp_path / "source", "model.norm.weight"
    write_checkpoint(source, {name: np.ones(shape, np.float32)}, model_type="llama")
    plan = replace(relayout.plan_conversion(source, tp=2).plan, cuts=(cut,))
    relayout.convert(source, tmp_path / "out", tp=2, plan=plan)
    for compared in (None, source):
        report = relayout.verify(tmp_path / "out", source=compared)
        assert not report.compared_with_source
        found = {(one.file, one.tensor, one.what.partition(": ")[0]) for one in report.differences}
        record = "relayout.source.json.zst"
        assert found == {(record, name, says), (record, None, "cannot be loaded at another degree")}
    if 0 not in shape:
        with pytest.raises(FormatError, match=r"do not make the tensor of the|no rank holds it, so the file cannot"):
            relayout.restore(tmp_path / "out", tmp_path / "back")


EXPERT = "model.layers.0.block_sparse_moe.experts.{}.w1.weight"
ROUTER = "model.layers.0.block_sparse_moe.gate.weight"
FUSED = "transformer.h.0.self_attention.query_key_value.weight"


def write_checkpoint(folder: Path, arrays: dict[str, Array], **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(arrays, folder / "model.safetensors")
    return folder


@pytest.fixture
def mixtral(tmp_path: Path) -> Path:
    """Three experts and their router."""
    arrays: dict[str, Array] = {
        EXPERT.format(number): np.arange(48, dtype=np.float32).reshape(8, 6) + 100 * number for number in range(3)
    }
    arrays[ROUTER] = np.arange(18, dtype=np.float32).reshape(3, 6)
    return write_checkpoint(tmp_path / "mixtral", arrays, model_type="mixtral", num_local_experts=3)


@pytest.fixture
def bloom(tmp_path: Path) -> Path:
    """q, k, v of four heads of two rows each, head by head."""
    fused = np.arange(24 * 5, dtype=np.float32).reshape(24, 5)
    return write_checkpoint(tmp_path / "bloom", {FUSED: fused}, model_type="bloom", n_head=4, n_embed=8)


def test_a_folder_of_owned_experts_is_verified_alone_and_against_its_source(mixtral: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    relayout.convert(mixtral, out, tp=2, expert_parallel=True)
    held = [load_file(out / f"model-rank-{rank}-part-0.safetensors").keys() for rank in range(2)]
    assert held == [{EXPERT.format(0), EXPERT.format(1), ROUTER}, {EXPERT.format(2), ROUTER}]
    for source in (None, mixtral):
        report = relayout.verify(out, source=source)
        assert (report.ok, report.compared_with_source, report.num_tensors) == (True, source is not None, 5)
    # One expert's last byte, in the source and then in its owner's file.
    shard = mixtral / "model.safetensors"
    data = parse_header(shard.read_bytes(), shard.stat().st_size, "")
    [place] = [data.data_start + one.offset for one in data.tensors if one.name == EXPERT.format(2)]
    flip(shard, place + 8 * 6 * 4 - 1)
    found = relayout.verify(out, source=mixtral).differences
    assert {one.tensor for one in found} == {EXPERT.format(2)}
    assert "model-rank-1-part-0.safetensors" in {one.file for one in found}
    path = out / "model-rank-1-part-0.safetensors"
    header = parse_header(path.read_bytes(), path.stat().st_size, "")
    [offset] = [header.data_start + one.offset for one in header.tensors if one.name == EXPERT.format(2)]
    flip(path, offset)
    assert [(one.file, one.tensor) for one in relayout.verify(out).differences] == [(path.name, EXPERT.format(2))]


def test_an_interleaved_tensor_is_verified_alone_and_against_its_source(bloom: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    relayout.convert(bloom, out, tp=2)
    groups = load_file(bloom / "model.safetensors")[FUSED].reshape(4, 3, 2, 5)
    for rank in range(2):
        expected = groups[2 * rank : 2 * rank + 2].swapaxes(0, 1).reshape(12, 5)
        np.testing.assert_array_equal(load_file(out / f"model-rank-{rank}-part-0.safetensors")[FUSED], expected)
    for source in (None, bloom):
        report = relayout.verify(out, source=source)
        assert (report.ok, report.compared_with_source) == (True, source is not None)
    shard = bloom / "model.safetensors"
    flip(shard, shard.stat().st_size - 1)  # The last head's.
    found = relayout.verify(out, source=bloom).differences
    assert {one.file for one in found} == {"model-rank-1-part-0.safetensors", str(bloom)}
    assert {one.tensor for one in found} == {FUSED}


def test_a_slice_that_a_rank_lacks_is_found(mixtral: Path, tmp_path: Path) -> None:
    """The record says that both ranks hold the expert that one of them owns."""
    out = tmp_path / "out"
    relayout.convert(mixtral, out, tp=2, expert_parallel=True)

    def lie(record: dict[str, Any]) -> None:
        record["cuts"].append([{}, {}])
        record["tensors"]["cut"][record["tensors"]["name"].index(EXPERT.format(0))] = len(record["cuts"]) - 1

    rebuild(out, lie)
    rules, found = relayout.verify(out).differences
    assert "cannot be loaded at another degree: " in rules.what
    assert (found.file, found.tensor) == ("relayout.rank-1.json.zst", EXPERT.format(0))
    assert "is missing" in found.what


def test_a_whole_tensor_whose_digest_is_not_the_sources_is_found(mixtral: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    relayout.convert(mixtral, out, tp=2, expert_parallel=True)

    names = read_record(out, read_manifest(out)).names

    def lie(digests: list[str | None]) -> None:
        digests[names.index(ROUTER)] = 31 * "0" + "1"

    rebuild(out)
    assert relayout.verify(out, source=mixtral).ok
    rebuild(out, change_digests=lie)
    found = relayout.verify(out).differences
    assert {(one.file, one.tensor) for one in found} == {(f"relayout.rank-{rank}.json.zst", ROUTER) for rank in (0, 1)}
    assert all("its digest differs from the source tensor's" in one.what for one in found)


def test_a_tensor_that_only_the_header_names_is_found(mixtral: Path, tmp_path: Path) -> None:
    """An empty one, behind all others: the bytes are the same with it and without."""
    out = tmp_path / "out"
    relayout.convert(mixtral, out, tp=2, expert_parallel=True)
    names = sorted(path.name for path in out.glob("*.safetensors"))

    def lie(header: bytes) -> bytes:
        text = header[8:].rstrip(b" ")
        end = max(entry["data_offsets"][1] for entry in json.loads(text).values() if "dtype" in entry)
        more = json.dumps({"zzz": {"dtype": "U8", "shape": [0], "data_offsets": [end, end]}}).encode()
        return header[:8] + (text[:-1] + b"," + more[1:]).ljust(len(header) - 8)

    rebuild(out, change_header=lie)
    found = relayout.verify(out).differences
    assert [(one.file, one.what) for one in found] == [
        (names[0], "4 tensors, the rank table has 3"),
        (names[1], "3 tensors, the rank table has 2"),
    ]


def test_a_side_file_that_has_changed_in_the_source_is_found(pristine: Path, llama: Path, tmp_path: Path) -> None:
    source = shutil.copytree(llama, tmp_path / "source")
    (source / "config.json").write_text((source / "config.json").read_text() + " ")
    report = relayout.verify(pristine, source=source)
    assert [(one.file, one.what) for one in report.differences] == [
        ("config.json", "has changed in the source since the conversion")
    ]
    assert (report.culprit, report.compared_with_source) == ("side files", True)


def test_a_source_that_lacks_a_side_file_is_not_another_model(pristine: Path, llama: Path, tmp_path: Path) -> None:
    source = shutil.copytree(llama, tmp_path / "source")
    (source / "config.json").unlink()
    report = relayout.verify(pristine, source=source)
    assert [(one.file, one.what) for one in report.differences] == [
        (str(source / "config.json"), "is missing in the source, the folder has it")
    ]
    assert (report.culprit, report.compared_with_source) == ("side files", True)
    lines = "\n".join(block.text for block in verification(report, has_source=True) if isinstance(block, Line))
    assert "the weights are equal" in lines
    assert "another model" not in lines


def _changed_copy(llama: Path, folder: Path, change: str) -> Path:
    source = shutil.copytree(llama, folder / "source")
    shard = sorted(source.glob("*.safetensors"))[-1]
    if change == "byte":
        flip(shard, shard.stat().st_size - 1)
    else:
        shard.unlink()
        index = json.loads((source / "model.safetensors.index.json").read_text())
        kept = {name: file for name, file in index["weight_map"].items() if file != shard.name}
        (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": kept}))
    return source


@pytest.mark.parametrize(
    ("change", "message"),
    [("byte", "has changed in the source since"), ("tensors", "is not the source")],
)
def test_a_source_that_is_another_one_is_told(
    pristine: Path, llama: Path, tmp_path: Path, change: str, message: str
) -> None:
    source = _changed_copy(llama, tmp_path, change)
    report = relayout.verify(pristine, source=source)
    assert message in "\n".join(map(str, report.differences))
    assert report.culprit == "source"


def test_a_part_of_a_tensor_does_not_tell_which_of_folder_and_source_is_wrong(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.gate_proj.weight"
    array = np.arange(64, dtype=np.float32).reshape(8, 8)
    source = write_checkpoint(tmp_path / "source", {name: array}, model_type="llama")
    relayout.convert(source, tmp_path / "out", tp=2)
    flip(source / "model.safetensors", (source / "model.safetensors").stat().st_size - 1)
    for ranks, culprit in {"0": None, "1": "either", "0,1": "source"}.items():
        assert relayout.verify(tmp_path / "out", source=source, ranks=ranks).culprit == culprit


def test_a_damaged_folder_is_what_is_wrong_whatever_source_is_named(folder: Path, llama: Path, tmp_path: Path) -> None:
    flip(folder / FILE, (folder / FILE).stat().st_size - 1)
    for source in (llama, _changed_copy(llama, tmp_path, "byte")):
        assert relayout.verify(folder, source=source).culprit == "folder"


def test_a_wrong_slice_under_right_digests_is_found_by_comparing_with_the_source(tmp_path: Path) -> None:
    """Everything in the folder agrees with itself, but was made from a source with two tensors exchanged."""
    arrays: dict[str, Array] = {
        f"model.layers.{n}.mlp.down_proj.weight": np.arange(n, n + 64 * 96, dtype=np.float32).reshape(64, 96)
        for n in range(2)
    }
    for name, order in (("right", (0, 1)), ("wrong", (1, 0))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"model_type": "llama"}')
        mixed = dict(zip(arrays, [list(arrays.values())[n] for n in order], strict=True))
        save_file(mixed, tmp_path / name / "model.safetensors")
    assert load_file(tmp_path / "right" / "model.safetensors").keys() == arrays.keys()
    relayout.convert(tmp_path / "wrong", tmp_path / "out", tp=2)
    assert relayout.verify(tmp_path / "out").ok
    report = relayout.verify(tmp_path / "out", source=tmp_path / "right")
    assert {one.tensor for one in report.differences} == set(arrays)
    assert {one.file for one in report.differences if one.file.startswith("model-rank")} == {
        "model-rank-0-part-0.safetensors",
        "model-rank-1-part-0.safetensors",
    }


def test_slices_that_do_not_make_the_recorded_tensor_are_found_by_restore_and_with_the_source_only(
    bloom: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    relayout.convert(bloom, out, tp=2)

    names = read_record(out, read_manifest(out)).names

    def lie(digests: list[str | None]) -> None:
        digests[names.index(FUSED)] = 31 * "0" + "1"

    rebuild(out, change_digests=lie)
    assert relayout.verify(out).ok
    [found] = relayout.verify(out, source=bloom).differences
    assert (found.tensor, found.what) == (FUSED, "has changed in the source since the conversion")
    with pytest.raises(FormatError, match=rf"{FUSED}.*slices.* do not make the tensor of the source record"):
        relayout.restore(out, tmp_path / "back")
