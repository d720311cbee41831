"""`apply` changes tensors in memory to what the other folder has, or refuses before it changes any."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import zstandard
from blake3 import blake3
from safetensors.torch import load_file
from support.conversions import Conversions
from support.loader_fixtures import assert_equal
from support.profile import sample
from support.training import next_step, tree
from xxhash import xxh3_128_digest

import relayout
from relayout.errors import FormatError, PlanError
from relayout.format.manifest import compress, sealed
from relayout.loader import in_place
from relayout.loader.sources.checkpoint import Asked

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def steps_of(conversions: Conversions, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with three steps, 0 to 2, converted to a layout, and the deltas between them.

    Of whole tensors those of Phi-3, of which a rank has several rows apart.
    """

    @cache
    def make(layout: str) -> Path:
        folder = tmp_path_factory.mktemp("steps")
        first = conversions.source("llama" if layout == "ranks" else "phi3")
        for step in range(3):
            source = next_step(folder / f"source-{step - 1}" if step else first, folder / f"source-{step}", step)
            relayout.convert(source, folder / f"{step}", tp=2, layout=layout, threads=1)
        for step in range(2):
            relayout.delta(folder / f"{step}", folder / f"{step + 1}", folder / f"{step}-to-{step + 1}")
        return folder

    return make


@pytest.fixture
def steps(request: pytest.FixtureRequest, steps_of: Callable[[str], Path]) -> Path:
    """In the layout that is asked for; if none is, `ranks`."""
    return steps_of(getattr(request, "param", "ranks"))


both_layouts = pytest.mark.parametrize("steps", ["ranks", "whole"], indirect=True)


@pytest.mark.parametrize(("is_on_host", "steps"), [(True, "ranks"), (False, "whole")], indirect=["steps"])
def test_tensors_become_those_of_each_next_step(is_on_host: bool, steps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those on a device, for which tensors here stand in, pass through host memory, a few bytes at a time."""
    monkeypatch.setattr(in_place, "_PIECE_NBYTES", 5000)
    monkeypatch.setattr(in_place, "_is_on_host", lambda tensor: is_on_host)
    for rank in range(2):
        tensors = relayout.load(steps / "0", rank)
        addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        for step in (1, 2):
            relayout.apply(steps / f"{step - 1}-to-{step}", rank, tensors, verify=True)
            assert_equal(tensors, relayout.load(steps / f"{step}", rank))
        assert {name: tensor.data_ptr() for name, tensor in tensors.items()} == addresses


def test_they_are_what_stock_safetensors_reads(steps: Path) -> None:
    tensors = relayout.load(steps / "0", 1)
    relayout.apply(steps / "0-to-1", 1, tensors)
    relayout.apply(steps / "1-to-2", 1, tensors)
    assert_equal(tensors, load_file(steps / "2" / "model-rank-1-part-0.safetensors"))


@pytest.mark.parametrize("name", sample(["fp8_blocks_deepseek", "mixtral"], ["fp8_blocks_deepseek"]))
def test_small_tensors_that_share_chunks_are_changed(name: str, conversions: Conversions, tmp_path: Path) -> None:
    tp = conversions.largest(name)
    new = tmp_path / "new"
    relayout.convert(next_step(conversions.source(name), tmp_path / "source", 1), new, tp=tp, threads=1)
    relayout.delta(conversions.at(name, tp), new, tmp_path / "delta")
    for rank in range(tp):
        tensors = relayout.load(conversions.at(name, tp), rank)
        relayout.apply(tmp_path / "delta", rank, tensors, verify=True)
        assert_equal(tensors, relayout.load(new, rank))


@both_layouts
def test_some_of_the_tensors_are_changed_alone(steps: Path) -> None:
    some = relayout.load(steps / "0", 0, names=["**.norm.weight", "**.down_proj.weight"])
    assert len(some) == 3
    relayout.apply(steps / "0-to-1", 0, some, verify=True)
    assert_equal(some, relayout.load(steps / "1", 0, names=list(some)))
    relayout.apply(steps / "1-to-2", 0, {})


def test_of_two_tensors_the_one_between_them_is_left_alone(tmp_path: Path) -> None:
    """It has changed, too, in a MiB of its own."""
    for step in range(2):
        tensors = {f"layers.{n}.x": torch.full((2**19,), step + n / 4, dtype=torch.bfloat16) for n in range(3)}
        relayout.save(tensors, tmp_path / f"{step}", unmatched="replicate", threads=1)
    relayout.delta(tmp_path / "0", tmp_path / "1", tmp_path / "delta")
    some = relayout.load(tmp_path / "0", 0, names=["layers.0.x", "layers.2.x"])
    relayout.apply(tmp_path / "delta", 0, some, verify=True)
    assert_equal(some, relayout.load(tmp_path / "1", 0, names=list(some)))


def copies(tensors: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


@both_layouts
def test_tensors_at_another_content_are_refused_unchanged(steps: Path) -> None:
    tensors = relayout.load(steps / "0", 0)
    before = copies(tensors)
    with pytest.raises(PlanError, match=r"is not at the content that .*1-to-2 applies to; nothing was changed"):
        relayout.apply(steps / "1-to-2", 0, tensors)
    assert_equal(tensors, before)
    name = list(tensors)[-1]
    tensors[name].view(torch.uint8).view(-1)[-1] ^= 1
    before = copies(tensors)
    with pytest.raises(PlanError, match=f"tensor '{name}': is not at the content"):
        relayout.apply(steps / "0-to-1", 0, tensors)
    assert_equal(tensors, before)


def test_the_tensors_of_another_rank_are_refused(steps: Path) -> None:
    with pytest.raises(PlanError, match=r"is not at the content|expected"):
        relayout.apply(steps / "0-to-1", 1, relayout.load(steps / "0", 0))
    with pytest.raises(PlanError, match="rank 2, expected 0 to 1"):
        relayout.apply(steps / "0-to-1", 2, {})


def test_a_rank_that_a_delta_lacks_is_refused(steps: Path, tmp_path: Path) -> None:
    for step in range(2):
        relayout.copy(steps / f"{step}", tmp_path / f"{step}", ranks=[1])
    relayout.delta(tmp_path / "0", tmp_path / "1", tmp_path / "delta")
    tensors = relayout.load(tmp_path / "0", 1)
    relayout.apply(tmp_path / "delta", 1, tensors, verify=True)
    assert_equal(tensors, relayout.load(steps / "1", 1))
    with pytest.raises(PlanError, match="of 2 ranks it has only 1, and lacks 0"):
        relayout.apply(tmp_path / "delta", 0, relayout.load(steps / "0", 0))


def test_a_file_of_any_length_takes_no_memory_before_its_delta_proves_it(steps: Path, tmp_path: Path) -> None:
    """A list of all pieces of a pebibyte would take more memory than there is."""
    shutil.copytree(steps / "0-to-1", tmp_path / "delta")

    def edit(name: str, change: Callable[[dict[str, Any]], None]) -> str:
        top = json.loads((path := tmp_path / "delta" / name).read_bytes())
        change(top)
        del top["self_digest"]
        path.write_bytes(sealed(top))
        return blake3(path.read_bytes()).hexdigest()

    def lengthen(top: dict[str, Any]) -> None:
        for file in top["files"]:
            file["nbytes"] = 2**50

    digests = {side: edit(f"{name}/relayout.json", lengthen) for side, name in (("base", "old"), ("makes", "new"))}
    edit("relayout.json", lambda top: top.update(digests))
    with pytest.raises(FormatError, match="pieces takes more"):
        relayout.apply(tmp_path / "delta", 0, relayout.load(steps / "0", 0))


def test_with_verify_a_forged_delta_that_cannot_be_decoded_changes_nothing(steps: Path, tmp_path: Path) -> None:
    """The last piece of a file is of another length than the piece, with digests that fit."""
    shutil.copytree(steps / "0-to-1", tmp_path / "delta")
    manifest = json.loads((steps / "1" / "relayout.json").read_bytes())
    top = json.loads((tmp_path / "delta" / "relayout.json").read_bytes())
    file, path = manifest["files"][0], tmp_path / "delta" / f"{manifest['files'][0]['name']}.delta"
    num_pieces = 1 - (file["data_start"] - file["nbytes"]) // manifest["chunk_nbytes"]
    blob = path.read_bytes()
    pieces, rows = blob[: -24 * num_pieces], blob[-24 * num_pieces :]
    last = bytearray(pieces[-int.from_bytes(rows[-24:-16], "little") :])
    last[4] ^= 1  # Of the bytes of its first run.
    rows = rows[:-16] + xxh3_128_digest(last)
    path.write_bytes(pieces[: -len(last)] + last + rows)
    top["files"][0]["index_digest"] = blake3(rows).hexdigest()
    del top["self_digest"]
    (tmp_path / "delta" / "relayout.json").write_bytes(sealed(top))
    tensors = relayout.load(steps / "0", 0)
    before = copies(tensors)
    with pytest.raises(FormatError, match=r"of \d+ bytes, expected"):
        relayout.apply(tmp_path / "delta", 0, tensors, verify=True)
    assert_equal(tensors, before)
    with pytest.raises(FormatError, match=r"of \d+ bytes, expected"):
        relayout.apply(tmp_path / "delta", 0, tensors)


def test_with_verify_nothing_changes_if_the_second_of_two_pieces_cannot_be_decoded(tmp_path: Path) -> None:
    """The first one, of another MiB of the same tensor, could."""
    for step in range(2):
        tensors = {"model.norm.weight": torch.full((2**20,), float(step), dtype=torch.bfloat16)}
        relayout.save(tensors, tmp_path / f"{step}", config={"model_type": "llama"}, tp=1, threads=1)
    relayout.delta(tmp_path / "0", tmp_path / "1", tmp_path / "delta")
    top = json.loads((tmp_path / "delta" / "relayout.json").read_bytes())
    [path] = (tmp_path / "delta").glob("*.delta")
    blob = bytearray(path.read_bytes())
    rows = blob[-24 * 3 :]  # Of the header and two chunks.
    first = sum(int.from_bytes(rows[at : at + 8], "little") for at in (0, 24))
    blob[first + 4] ^= 2  # Of the bytes of the last piece's run.
    rows[-16:] = xxh3_128_digest(blob[first : -24 * 3])
    path.write_bytes(blob[: -24 * 3] + rows)
    top["files"][0]["index_digest"] = blake3(rows).hexdigest()
    del top["self_digest"]
    (tmp_path / "delta" / "relayout.json").write_bytes(sealed(top))
    tensors = relayout.load(tmp_path / "0", 0)
    with pytest.raises(FormatError, match=r"of \d+ bytes, expected 1048576"):
        relayout.apply(tmp_path / "delta", 0, tensors, verify=True, threads=1)
    assert_equal(tensors, relayout.load(tmp_path / "0", 0))


def test_a_delta_between_other_slices_changes_nothing(steps: Path, tmp_path: Path) -> None:
    """Everything is sealed again; two tensors of one shape have changed places in the new table."""
    delta = tmp_path / "delta"
    shutil.copytree(steps / "0-to-1", delta)
    manifest = json.loads((delta / "new" / "relayout.json").read_bytes())
    path = delta / "new" / manifest["ranks"][0]["table"]
    table = json.loads(zstandard.ZstdDecompressor().decompressobj().decompress(path.read_bytes()))
    one, other = (table["name"].index(f"model.layers.{layer}.mlp.down_proj.weight") for layer in range(2))
    table["name"][one], table["name"][other] = table["name"][other], table["name"][one]
    path.write_bytes(compress(json.dumps(table).encode()))
    manifest["ranks"][0]["table_digest"] = blake3(path.read_bytes()).hexdigest()
    del manifest["self_digest"]
    (delta / "new" / "relayout.json").write_bytes(sealed(manifest))
    top = json.loads((delta / "relayout.json").read_bytes())
    top["makes"] = blake3((delta / "new" / "relayout.json").read_bytes()).hexdigest()
    del top["self_digest"]
    (delta / "relayout.json").write_bytes(sealed(top))
    tensors = relayout.load(steps / "0", 0)
    before = copies(tensors)
    with pytest.raises(FormatError, match="the slices of rank 0 are not those of the base"):
        relayout.apply(delta, 0, tensors)
    assert_equal(tensors, before)


@both_layouts
def test_a_damaged_delta_changes_nothing(steps: Path, tmp_path: Path) -> None:
    shutil.copytree(steps / "0-to-1", tmp_path / "delta")
    tensors = relayout.load(steps / "0", 0)
    before = copies(tensors)
    names = [name for name in tree(tmp_path / "delta") if name.endswith((".delta", "rank-0.json.zst", "relayout.json"))]
    assert len(names) >= 6
    refused = 0
    for name in names:
        path = tmp_path / "delta" / name
        blob = path.read_bytes()
        for place in (len(blob) // 4, len(blob) // 2, len(blob) - 3):  # What is in front of it may be of a header.
            path.write_bytes(blob[:place] + bytes([blob[place] ^ 1]) + blob[place + 1 :])
            try:
                relayout.apply(tmp_path / "delta", 0, tensors)
            except FormatError:
                refused += 1
                assert_equal(tensors, before)
            else:  # What other ranks have.
                assert "rank-1" in name
                tensors = copies(before)
        path.write_bytes(blob)
    assert refused >= 3 * 5


ARGUMENTS: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "unknown": (lambda tensors: {"a.weight": torch.zeros(3)}, "the rank has no tensor 'a.weight'"),
    "dtype": (lambda tensors: {name: tensor.float() for name, tensor in tensors.items()}, "expected torch.bfloat16"),
    "transposed": (
        lambda tensors: {name: tensor.T.contiguous().T for name, tensor in tensors.items() if tensor.dim() == 2},
        "is not contiguous",
    ),
    "shared": (
        lambda tensors: {
            name: tensors["model.layers.0.input_layernorm.weight"] for name in tensors if "layernorm" in name
        },
        "share memory",
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_tensors_that_cannot_be_changed_in_place_are_refused(name: str, steps: Path) -> None:
    make, message = ARGUMENTS[name]
    with pytest.raises(PlanError, match=message):
        relayout.apply(steps / "0-to-1", 0, make(relayout.load(steps / "0", 0)))


def test_verify_finds_what_does_not_become_the_result(steps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = relayout.load(steps / "0", 0)
    monkeypatch.setattr(in_place._Change, "change", lambda *given: None)
    relayout.apply(steps / "0-to-1", 0, tensors)
    with pytest.raises(FormatError, match=r"is not what .*0-to-1 makes"):
        relayout.apply(steps / "0-to-1", 0, tensors, verify=True)


def test_autograd_notices(steps: Path) -> None:
    tensors = {name: tensor.requires_grad_() for name, tensor in relayout.load(steps / "0", 0).items()}
    square = tensors["model.norm.weight"].square().sum()
    relayout.apply(steps / "0-to-1", 0, tensors)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()


@pytest.mark.parametrize("is_on_host", [True, False])
def test_tensors_of_inference_mode_are_changed(is_on_host: bool, steps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place, "_is_on_host", lambda tensor: is_on_host)
    with torch.inference_mode():
        tensors = relayout.load(steps / "0", 0)
        assert all(tensor.is_inference() for tensor in tensors.values())
        relayout.apply(steps / "0-to-1", 0, tensors, verify=True)
    relayout.apply(steps / "1-to-2", 0, tensors, verify=True)
    assert_equal(tensors, relayout.load(steps / "2", 0))


def test_progress_has_a_phase_for_each_pass(steps: Path) -> None:
    tell = Mock()
    relayout.apply(steps / "0-to-1", 0, relayout.load(steps / "0", 0), verify=True, progress=tell)
    phases = ["comparing with the base", "checking the delta", "applying", "verifying"]
    assert [one.args for one in tell.begin.mock_calls] == [(phase,) for phase in phases]
    (done, total) = tell.call_args.args
    assert done == total > 0


def test_the_memory_of_a_load_is_used_again_if_a_load_would_make_it_just_so(
    steps_of: Callable[[str], Path],
) -> None:
    folder = steps_of("ranks") / "0"
    loaded = relayout.load(folder, 0)
    rank = Asked(path=folder, rank=0).source().columns()
    assert {name: id(one) for name, one in in_place.as_loaded(loaded, rank).items()} == {
        name: id(one) for name, one in loaded.items()
    }
    name, tensor = next((name, one) for name, one in loaded.items() if one.dim() == 2)
    others = [
        tensor.float(),
        tensor.clone()[:-1],
        tensor.clone().reshape(-1),
        torch.empty_like(tensor, memory_format=torch.contiguous_format).t().contiguous().t(),
        tensor.to_sparse(),
        tensor.to("meta"),
    ]
    for other in others:
        assert in_place.as_loaded({name: other, "another": tensor}, rank) == {}
