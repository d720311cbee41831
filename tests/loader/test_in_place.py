"""`apply` changes tensors in memory to what the other folder has, or refuses before it changes any."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import zstandard
from safetensors.torch import load_file
from support.bits import flip
from support.conversions import Conversions
from support.loader_fixtures import assert_equal
from support.profile import sample
from support.sidecar import RESULT, Piece, forge, forge_digests, forge_pieces, forge_result, proof
from support.training import next_step, tree

import relayout
from relayout.errors import FormatError, PlanError
from relayout.format.delta import encode
from relayout.loader import in_place
from relayout.loader.sources.checkpoint import LoadRequest

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
            relayout.apply(steps / f"{step - 1}-to-{step}", rank, tensors, base=steps / f"{step - 1}")
            assert_equal(tensors, relayout.load(steps / f"{step}", rank))
        assert {name: tensor.data_ptr() for name, tensor in tensors.items()} == addresses


def test_they_are_what_stock_safetensors_reads(steps: Path) -> None:
    tensors = relayout.load(steps / "0", 1)
    relayout.apply(steps / "0-to-1", 1, tensors, base=steps / "0")
    relayout.apply(steps / "1-to-2", 1, tensors, base=[steps / "0", steps / "0-to-1"])
    assert_equal(tensors, load_file(steps / "2" / "model-rank-1-part-0.safetensors"))


@pytest.mark.parametrize("name", sample(["fp8_blocks_deepseek", "mixtral"], ["fp8_blocks_deepseek"]))
def test_small_tensors_that_share_chunks_are_changed(name: str, conversions: Conversions, tmp_path: Path) -> None:
    tp = conversions.largest(name)
    new = tmp_path / "new"
    relayout.convert(next_step(conversions.source(name), tmp_path / "source", 1), new, tp=tp, threads=1)
    relayout.delta(conversions.at(name, tp), new, tmp_path / "delta")
    for rank in range(tp):
        tensors = relayout.load(conversions.at(name, tp), rank)
        relayout.apply(tmp_path / "delta", rank, tensors, base=conversions.at(name, tp))
        assert_equal(tensors, relayout.load(new, rank))


@both_layouts
def test_some_of_the_tensors_are_changed_alone(steps: Path) -> None:
    some = relayout.load(steps / "0", 0, names=["**.norm.weight", "**.down_proj.weight"])
    assert len(some) == 3
    relayout.apply(steps / "0-to-1", 0, some, base=steps / "0")
    assert_equal(some, relayout.load(steps / "1", 0, names=list(some)))
    relayout.apply(steps / "1-to-2", 0, {}, base=steps / "1")


def test_of_two_tensors_the_one_between_them_is_left_alone(tmp_path: Path) -> None:
    """It has changed, too, in a MiB of its own."""
    for step in range(2):
        tensors = {f"layers.{n}.x": torch.full((2**19,), step + n / 4, dtype=torch.bfloat16) for n in range(3)}
        relayout.save(tensors, tmp_path / f"{step}", unmatched="replicate", threads=1)
    relayout.delta(tmp_path / "0", tmp_path / "1", tmp_path / "delta")
    some = relayout.load(tmp_path / "0", 0, names=["layers.0.x", "layers.2.x"])
    relayout.apply(tmp_path / "delta", 0, some, base=tmp_path / "0")
    assert_equal(some, relayout.load(tmp_path / "1", 0, names=list(some)))


def copies(tensors: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


@both_layouts
def test_tensors_at_another_content_are_refused_unchanged(steps: Path) -> None:
    tensors = relayout.load(steps / "0", 0)
    before = copies(tensors)
    with pytest.raises(PlanError, match=r"is not at the content that .*1-to-2 applies to; nothing was changed"):
        relayout.apply(steps / "1-to-2", 0, tensors, base=steps / "1")
    assert_equal(tensors, before)
    name = list(tensors)[-1]
    tensors[name].view(torch.uint8).view(-1)[-1] ^= 1
    before = copies(tensors)
    with pytest.raises(PlanError, match=f"tensor '{name}': is not at the content"):
        relayout.apply(steps / "0-to-1", 0, tensors, base=steps / "0")
    assert_equal(tensors, before)


@both_layouts
def test_another_base_than_the_one_that_a_delta_applies_to_is_refused(steps: Path) -> None:
    tensors = relayout.load(steps / "0", 0)
    before = copies(tensors)
    for delta, base, what in (
        ("1-to-2", "0", "applies to content .*, not to .*/0 of content"),
        ("0-to-1", "1", "applies to content .*, not to .*/1 of content"),
        ("0-to-1", ["0", "0-to-1"], "applies to content .*, not to .*/0 + .*/0-to-1 of content"),
        ("1-to-2", ["0", "1-to-2"], "applies to content .*, not to .*/0 of content"),
    ):
        places = steps / base if isinstance(base, str) else [steps / one for one in base]
        with pytest.raises(PlanError, match=what.replace(" + ", r" \+ ")) as caught:
            relayout.apply(steps / delta, 0, tensors, base=places)
        assert caught.value.code == "option"
        assert_equal(tensors, before)


NO_PATHS: list[Any] = [[], (), 5, None, [5], [None], {}, b"0"]


def test_a_base_is_a_folder_and_the_deltas_that_were_applied_to_it(steps: Path, llama: Path) -> None:
    tensors = relayout.load(steps / "0", 0)
    before = copies(tensors)
    for base, error, what in (
        *((no_path, PlanError, "base: .*, expected the path of a folder, or a list") for no_path in NO_PATHS),
        (steps / "0-to-1", FormatError, "is a delta: relayout apply adds it to its base"),
        ([steps / "0", steps / "1"], FormatError, "not a delta"),
        (llama, FormatError, "not a converted folder"),
        (steps / "none", PlanError, "no such file or folder"),
    ):
        with pytest.raises(error, match=what):
            relayout.apply(steps / "0-to-1", 0, tensors, base=base)
        assert_equal(tensors, before)
    with pytest.raises(TypeError, match="base"):
        relayout.apply(steps / "0-to-1", 0, tensors)  # type: ignore[call-arg]
    with pytest.raises(FormatError, match="not a delta; relayout delta makes one"):
        relayout.apply(steps / "1", 0, tensors, base=steps / "0")
    relayout.apply(steps / "0-to-1", 0, tensors, base=str(steps / "0"))
    assert_equal(tensors, relayout.load(steps / "1", 0))


@both_layouts
def test_of_a_base_only_manifest_and_table_and_digests_are_read(steps: Path, tmp_path: Path) -> None:
    """Each is proven; the manifest by what the delta applies to."""
    base, names = tmp_path / "base", ["relayout.json", "relayout.rank-1.json.zst", "relayout.digests"]
    base.mkdir()
    for name in names:
        shutil.copy(steps / "0" / name, base)
    tensors = relayout.load(steps / "0", 1)
    before = copies(tensors)
    of_others = 16 * len(relayout.load(steps / "0", 0))  # Digests, which come first.
    for name, place in zip(names, (30, 30, of_others + 5), strict=True):
        flip(base / name, place)
        with pytest.raises((FormatError, PlanError), match=rf"{name}: |applies to content"):
            relayout.apply(steps / "0-to-1", 1, tensors, base=base)
        flip(base / name, place)
    flip(base / "relayout.digests", 5)
    assert_equal(tensors, before)
    relayout.apply(steps / "0-to-1", 1, tensors, base=base)
    assert_equal(tensors, relayout.load(steps / "1", 1))


def test_the_tensors_of_another_rank_are_refused(steps: Path) -> None:
    with pytest.raises(PlanError, match=r"is not at the content|expected"):
        relayout.apply(steps / "0-to-1", 1, relayout.load(steps / "0", 0), base=steps / "0")
    with pytest.raises(PlanError, match="rank 2, expected 0 to 1"):
        relayout.apply(steps / "0-to-1", 2, {}, base=steps / "0")


def test_a_rank_that_a_base_lacks_is_refused(steps: Path, tmp_path: Path) -> None:
    for step in range(2):
        relayout.copy(steps / f"{step}", tmp_path / f"{step}", ranks=[1])
    relayout.delta(tmp_path / "0", tmp_path / "1", tmp_path / "delta")
    tensors = relayout.load(tmp_path / "0", 1)
    relayout.apply(tmp_path / "delta", 1, tensors, base=tmp_path / "0")
    assert_equal(tensors, relayout.load(steps / "1", 1))
    with pytest.raises(PlanError, match="of 2 ranks it has only 1, and lacks 0"):
        relayout.apply(tmp_path / "delta", 0, relayout.load(steps / "0", 0), base=tmp_path / "0")
    with pytest.raises(PlanError, match="applies to content"):
        relayout.apply(tmp_path / "delta", 0, relayout.load(steps / "0", 0), base=steps / "0")


def test_a_file_of_any_length_takes_no_memory(steps: Path, tmp_path: Path) -> None:
    """A list of all pieces of a pebibyte would. What is stored of the last one is of fewer bytes than it has then."""
    base = shutil.copytree(steps / "0", tmp_path / "base")
    delta = shutil.copytree(steps / "0-to-1", tmp_path / "delta")

    def lengthen(top: dict[str, Any]) -> None:
        for file in top["files"]:
            file["nbytes"] = 2**50

    forge(base / "relayout.json", lengthen)
    forge_result(delta, lengthen)
    forge(delta / "relayout.json", lambda top: top.update(base=proof((base / "relayout.json").read_bytes())))
    with pytest.raises(FormatError, match=r"of \d+ bytes, expected 1048576"):
        relayout.apply(delta, 0, relayout.load(steps / "0", 0), base=base)


@pytest.mark.parametrize("at", [0, -1])
def test_a_forged_piece_that_cannot_be_decoded_is_told(at: int, steps: Path, tmp_path: Path) -> None:
    """It is of another length than the piece, with proofs that fit."""
    delta = shutil.copytree(steps / "0-to-1", tmp_path / "delta")

    def change(pieces: list[Piece]) -> None:
        number, stored, content = pieces[at]
        pieces[at] = (number, stored[:4] + bytes([stored[4] ^ 1]) + stored[5:], content)  # Bytes of its first run.

    forge_pieces(delta, 0, change)
    tensors = relayout.load(steps / "0", 0)
    if at == 0:  # The header, which is in no tensor.
        with pytest.raises(FormatError, match=r"of \d+ bytes, expected"):
            relayout.load(steps / "0", 0, deltas=delta)
        relayout.apply(delta, 0, tensors, base=steps / "0")
        assert_equal(tensors, relayout.load(steps / "1", 0))
    else:
        with pytest.raises(FormatError, match=r"of \d+ bytes, expected"):
            relayout.apply(delta, 0, tensors, base=steps / "0")


def test_the_second_of_two_forged_pieces_that_cannot_be_decoded_is_told(tmp_path: Path) -> None:
    """The first one, of another MiB of the same tensor, could: it is changed in part."""
    for step in range(2):
        tensors = {"model.norm.weight": torch.full((2**20,), float(step), dtype=torch.bfloat16)}
        relayout.save(tensors, tmp_path / f"{step}", config={"model_type": "llama"}, tp=1, threads=1)
    relayout.delta(tmp_path / "0", tmp_path / "1", tmp_path / "delta")

    def change(pieces: list[Piece]) -> None:
        assert [number for number, *_ in pieces] == [0, 1, 2]
        number, stored, content = pieces[-1]
        pieces[-1] = (number, stored[:4] + bytes([stored[4] ^ 2]) + stored[5:], content)

    forge_pieces(tmp_path / "delta", 0, change)
    tensors = relayout.load(tmp_path / "0", 0)
    with pytest.raises(FormatError, match=r"of \d+ bytes, expected 1048576"):
        relayout.apply(tmp_path / "delta", 0, tensors, base=tmp_path / "0", threads=1)


@both_layouts
@pytest.mark.parametrize("forgery", ["another change", "no change", "a piece less"])
def test_a_forged_delta_that_makes_other_tensors_is_told(forgery: str, steps: Path, tmp_path: Path) -> None:
    """All that is stored has its proof; what it makes is found when it is compared with the digests of the result."""
    delta = shutil.copytree(steps / "0-to-1", tmp_path / "delta")
    file = json.loads((steps / "1" / "relayout.json").read_bytes())["files"][0]
    last = (file["nbytes"] - file["data_start"] - 1) % 2**20 + 1

    def change(pieces: list[Piece]) -> None:
        number, _, content = pieces.pop()
        data = np.zeros(last, np.uint8)
        if forgery == "another change":
            data[-1] = 1
            pieces.append((number, encode(data, [(last, 1)]), content))
        elif forgery == "no change":
            head = np.array([1, last, 1, 0, 0], "<u4").tobytes()
            pieces.append((number, head + zstandard.compress(b""), content))

    forge_pieces(delta, 0, change)
    tensors = relayout.load(steps / "0", 0)
    with pytest.raises(FormatError, match=r"is not what .*delta makes of .*: load the tensors again") as caught:
        relayout.apply(delta, 0, tensors, base=steps / "0")
    assert caught.value.code == "digest"
    assert caught.value.tensor in tensors


DIGESTS: dict[str, Callable[[list[tuple[int, bytes]]], object]] = {
    "a row less": lambda rows: rows.pop(),
    "another digest": lambda rows: rows.insert(0, (rows[0][0], bytes(16))) or rows.pop(1),  # type: ignore[func-returns-value]
    "two swapped": lambda rows: rows.reverse(),
    "behind the last": lambda rows: rows.append((2**20, bytes(16))),
}


@both_layouts
@pytest.mark.parametrize("name", DIGESTS)
def test_forged_digests_change_nothing(name: str, steps: Path, tmp_path: Path) -> None:
    delta = shutil.copytree(steps / "0-to-1", tmp_path / "delta")
    forge_digests(delta, 0, DIGESTS[name])
    tensors = relayout.load(steps / "0", 0)
    before = copies(tensors)
    what = r"digests that changed(: expected rising numbers|, of \d+$)|do not make those of the result"
    with pytest.raises(FormatError, match=rf"relayout\.digests\.delta: .*({what})"):
        relayout.apply(delta, 0, tensors, base=steps / "0")
    assert_equal(tensors, before)
    others = relayout.load(steps / "0", 1)
    relayout.apply(delta, 1, others, base=steps / "0")
    assert_equal(others, relayout.load(steps / "1", 1))


LAYOUTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "table": (lambda top: top["ranks"][0].update(table_digest="0" * 64), "the tables differ"),
    "table of another rank": (lambda top: top["ranks"][1].update(table_digest="0" * 64), "the tables differ"),
    "arena": (lambda top: top["ranks"][0].update(arena_nbytes=top["ranks"][0]["arena_nbytes"] + 1), "the ranks differ"),
    "length": (lambda top: top["files"][0].update(nbytes=top["files"][0]["nbytes"] + 1), "the files differ"),
    "chunks": (lambda top: top.update(chunk_nbytes=2**21), "the size of chunks differs"),
    "source": (lambda top: top["source"].update(num_tensors=1), "the number of source tensors differs"),
}


@both_layouts
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_delta_to_another_layout_changes_nothing(name: str, steps: Path, tmp_path: Path) -> None:
    """Everything is sealed again; nothing says that a table is that of the base."""
    delta = shutil.copytree(steps / "0-to-1", tmp_path / "delta")
    change, what = LAYOUTS[name]
    forge_result(delta, change)
    tensors = relayout.load(steps / "0", 0)
    before = copies(tensors)
    with pytest.raises(FormatError, match=f"delta: does not keep the layout of .*/0: {what}") as caught:
        relayout.apply(delta, 0, tensors, base=steps / "0")
    assert caught.value.code == "mismatch"
    assert_equal(tensors, before)


@both_layouts
def test_a_damaged_delta_changes_nothing(steps: Path, tmp_path: Path) -> None:
    shutil.copytree(steps / "0-to-1", tmp_path / "delta")
    tensors = relayout.load(steps / "0", 0)
    before = copies(tensors)
    of_rank_0 = 24 * json.loads((tmp_path / "delta" / "relayout.json").read_bytes())["digests"][0]["count"]
    assert of_rank_0
    names = [name for name in tree(tmp_path / "delta") if name.endswith((".delta", "relayout.json", RESULT))]
    assert len(names) >= 5
    refused = 0
    for name in names:
        path = tmp_path / "delta" / name
        blob = path.read_bytes()
        places = [len(blob) // 4, len(blob) // 2, len(blob) - 3]  # What is in front of it may be of a header.
        if name == "relayout.digests.delta":
            places += [0, of_rank_0 // 2, of_rank_0 - 1]
        for place in places:
            path.write_bytes(blob[:place] + bytes([blob[place] ^ 1]) + blob[place + 1 :])
            try:
                relayout.apply(tmp_path / "delta", 0, tensors, base=steps / "0")
            except FormatError:
                refused += 1
                assert_equal(tensors, before)
            else:  # What others have.
                assert "rank-1" in name or (name == "relayout.digests.delta" and place >= of_rank_0)
                tensors = copies(before)
        path.write_bytes(blob)
    assert refused >= 3 * 4


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
        relayout.apply(steps / "0-to-1", 0, make(relayout.load(steps / "0", 0)), base=steps / "0")


@both_layouts
def test_what_does_not_become_the_result_is_found(steps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = relayout.load(steps / "0", 0)
    monkeypatch.setattr(in_place._Change, "change", lambda *given: None)
    with pytest.raises(FormatError, match=r"is not what .*0-to-1 makes of .*: load the tensors again"):
        relayout.apply(steps / "0-to-1", 0, tensors, base=steps / "0")
    with pytest.raises(FormatError, match=r"is not what .*0-to-1 makes of .*: load the tensors again"):
        relayout.apply(steps / "0-to-1", 0, {name: tensors[name] for name in list(tensors)[:1]}, base=steps / "0")


def test_autograd_notices(steps: Path) -> None:
    tensors = {name: tensor.requires_grad_() for name, tensor in relayout.load(steps / "0", 0).items()}
    square = tensors["model.norm.weight"].square().sum()
    relayout.apply(steps / "0-to-1", 0, tensors, base=steps / "0")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()


@pytest.mark.parametrize("is_on_host", [True, False])
def test_tensors_of_inference_mode_are_changed(is_on_host: bool, steps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place, "_is_on_host", lambda tensor: is_on_host)
    with torch.inference_mode():
        tensors = relayout.load(steps / "0", 0)
        assert all(tensor.is_inference() for tensor in tensors.values())
        relayout.apply(steps / "0-to-1", 0, tensors, base=steps / "0")
    relayout.apply(steps / "1-to-2", 0, tensors, base=steps / "1")
    assert_equal(tensors, relayout.load(steps / "2", 0))


def test_progress_has_a_phase_for_each_pass(steps: Path) -> None:
    tell = Mock()
    relayout.apply(steps / "0-to-1", 0, relayout.load(steps / "0", 0), base=steps / "0", progress=tell)
    phases = ["comparing with the base", "checking the delta", "applying", "verifying"]
    assert [one.args for one in tell.begin.mock_calls] == [(phase,) for phase in phases]
    (done, total) = tell.call_args.args
    assert done == total > 0


def test_the_memory_of_a_load_is_used_again_if_a_load_would_make_it_just_so(
    steps_of: Callable[[str], Path],
) -> None:
    folder = steps_of("ranks") / "0"
    loaded = relayout.load(folder, 0)
    rank = LoadRequest(path=folder, rank=0).source().columns()
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
