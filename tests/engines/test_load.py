"""What a load is, in all engines, with the engines' interfaces: real ones are proven by tools/engines."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.conversions import reference_tensors
from support.fake_sglang import AnyEngine
from support.fake_vllm import Model, Tensors, expert_of
from torch.nn import init

import relayout
from relayout.commands.cache import add
from relayout.errors import FormatError, PlanError


@pytest.mark.parametrize("load_format", ["auto", "relayout"])
@pytest.mark.parametrize("name", ["llama", "moe"])
def test_a_converted_folder_is_recognized_and_each_rank_gets_its_part(
    folders: Path, engine: AnyEngine, name: str, load_format: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole = reference_tensors(folders / name)
    for rank in range(2):
        model = Model(whole, rank, 2)
        engine.load(folders / f"{name}-tp2", model, load_format=load_format, strict=True, backend="buffered", threads=2)
        model.assert_holds_what_it_cuts_of(whole)
        [line] = caplog.messages
        for part in (f"relayout: rank {rank} of 2: 0.0", " GB in ", " GB/s)", "backend buffered", "0 whole tensors"):
            assert part in line
        caplog.clear()


def test_other_folders_are_left_to_the_engine(
    folders: Path, engine: AnyEngine, caplog: pytest.LogCaptureFixture, whole: Tensors
) -> None:
    model = Model(whole, 1, 2, score=3)  # Relayout would miss its weight.
    engine.load(folders / "llama", model, load_format="auto")
    model.assert_holds_what_it_cuts_of(whole)
    assert not caplog.messages
    with pytest.raises(PlanError, match=r"nothing: is not a folder: .*relayout convert FOLDER --tp N"):
        engine.load(folders / "nothing", model)


def test_another_degree_is_put_together_and_said(
    folders: Path, engine: AnyEngine, caplog: pytest.LogCaptureFixture, whole: Tensors
) -> None:
    for rank in range(2):
        model = Model(whole, rank, 2)
        engine.load(folders / "llama-tp4", model, strict=True)
        model.assert_holds_what_it_cuts_of(whole)
    assert "was converted for 4 ranks and is resharded for 2; `relayout convert SRC --tp 2` makes" in caplog.text


def test_experts_that_are_owned_are_given_to_their_owner(
    folders: Path, engine: AnyEngine, caplog: pytest.LogCaptureFixture
) -> None:
    whole = reference_tensors(folders / "moe")
    refused = rf"moe-ep2: was converted with --expert-parallel, but {engine.name} slices experts: launch it with expert"
    with pytest.raises(PlanError, match=refused):
        engine.load(folders / "moe-ep2", Model(whole, 0, 2))
    engine.own_experts()
    for rank in range(2):
        model = Model(whole, rank, 2, experts=range(4 * rank, 4 * rank + 4))
        engine.load(folders / "moe-ep2", model, strict=True)
        model.assert_holds_what_it_cuts_of(whole)
        others = [name for name in whole if expert_of(name) // 4 == 1 - rank]
        assert f", {len(whole) - len(others)} tensors," in caplog.messages[-1]


def test_experts_that_are_cut_are_read_whole_where_the_engine_owns_them(
    folders: Path, engine: AnyEngine, caplog: pytest.LogCaptureFixture
) -> None:
    whole = reference_tensors(folders / "moe")
    engine.own_experts()
    model = Model(whole, 1, 2, experts=range(4, 8))
    engine.load(folders / "moe-tp2", model, strict=True)
    model.assert_holds_what_it_cuts_of(whole)
    assert "has experts sliced for 2 ranks" in caplog.text
    assert "relayout convert SRC --tp 2 --expert-parallel" in caplog.text


@pytest.mark.parametrize("load_format", ["auto", "relayout"])
def test_memory_that_nobody_writes_is_an_error(
    folders: Path, engine: AnyEngine, load_format: str, whole: Tensors
) -> None:
    lacks = rf"llama-tp2: nothing was loaded into score.weight: the checkpoint lacks what {engine.name}'s Model needs"
    with pytest.raises(PlanError, match=lacks):
        engine.load(folders / "llama-tp2", Model(whole, 0, 2, score=3), load_format=load_format)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"thread": 2}, "OPTION.*: relayout has no option 'thread', expected backend, threads"),
        ({"threads": "2"}, "threads is '2', expected int"),
        ({"verify": 1}, "verify is 1, expected bool"),
        ({"threads": 0}, "OPTION.*: threads: 0, expected 1 or more"),
        ({"memory": "lots"}, "memory: 'lots' is not a size"),
        ({"memory": -5}, "memory: -5, expected 1 or more"),
        ({"backend": "gpu"}, "backend 'gpu', expected one of auto, direct"),
    ],
)
def test_options_are_checked(folders: Path, engine: AnyEngine, options: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message.replace("OPTION", engine.option)):
        engine.load(folders / "llama-tp2", Model(reference_tensors(folders / "llama"), 0, 2), **options)


def test_a_damaged_byte_is_found_by_verify_and_a_missing_file_always(
    folders: Path, engine: AnyEngine, tmp_path: Path, whole: Tensors
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(folders / "llama-tp2", folder)
    file = folder / "model-rank-1-part-0.safetensors"
    blob = bytearray(file.read_bytes())
    blob[-1000] ^= 1
    file.write_bytes(blob)
    with pytest.raises(FormatError, match=rf"^{file}: bytes \d+ to \d+ do not match digest .*: damaged"):
        engine.load(folder, Model(whole, 1, 2), verify=True)
    file.unlink()
    with pytest.raises(FormatError, match=r"model-rank-1-part-0\.safetensors: is missing"):
        engine.load(folder, Model(whole, 1, 2))
    engine.load(folder, Model(whole, 0, 2))
    file.write_bytes(blob[:-4096])
    with pytest.raises(FormatError, match="bytes long, expected"):
        engine.load(folder, Model(whole, 1, 2))
    (folder / "relayout.json").unlink()
    with pytest.raises(FormatError, match=r"relayout\.json: is missing next to rank files"):
        engine.load(folder, Model(whole, 1, 2))


LEFT = "draft.lm_head.weight"


class Leaves(Model):
    """Beside what a checkpoint has, it is made with random values that its checkpoint may lack."""

    def allocate(self) -> None:
        super().allocate()
        torch.manual_seed(1)
        self.memory[LEFT] = init.normal_(torch.nn.Parameter(torch.empty(3, 640)))


def damaged(model: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    add(model, 2)
    for file in (model.parent / "cache").rglob("model-rank-*.safetensors"):
        os.truncate(file, file.stat().st_size - 4096)


def converted(model: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.move(model, model.parent / "source")
    relayout.convert(model.parent / "source", model, tp=2)


def without_a_cache(_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RELAYOUT_CACHE")


def with_a_cache(_model: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    pass


@pytest.mark.parametrize("load_format", ["auto", "relayout"])
@pytest.mark.parametrize(
    ("prepare", "draft"),
    [(without_a_cache, False), (with_a_cache, False), (damaged, False), (without_a_cache, True), (converted, True)],
)
def test_what_the_engine_leaves_as_it_was_made_is_as_without_relayout(
    folders: Path, engine: AnyEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Tensors,
    load_format: str, prepare: Callable[[Path, pytest.MonkeyPatch], None], draft: bool,
) -> None:  # fmt: skip
    """Whichever way a load takes that is not an error."""
    monkeypatch.setenv("RELAYOUT_CACHE", str(tmp_path / "cache"))
    folder = Path(shutil.copytree(folders / "llama", tmp_path / "model"))
    prepare(folder, monkeypatch)
    model, alone = Leaves(whole, 1, 2), Leaves(whole, 1, 2)
    alone.allocate()
    engine.load(folder, model, load_format=load_format, draft=draft)
    model.assert_holds_what_it_cuts_of(whole)
    assert torch.equal(model.memory[LEFT], alone.memory[LEFT])
