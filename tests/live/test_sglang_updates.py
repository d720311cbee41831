"""Weights that change in a live SGLang, with its interfaces and none of it: see tools/engines for its own classes."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import prestarted
from support.bits import flip
from support.conversions import reference_tensors
from support.fake_sglang import Engine, install
from support.fake_vllm import Model, Tensors
from support.signing import make_keys
from support.steps import closed_index
from support.toy_store import shelf
from support.updates_worker import TP, write_steps

import relayout
from relayout.core.digests import blake3_hex
from relayout.engines.rank_weights import RankWeights
from relayout.live.sglang_updates import LIVE, update_weights
from relayout.live.staging import Flips, LiveWeights

pytestmark = pytest.mark.xdist_group("group")

SCRIPT = "from support.sglang_updates_worker import main; main()"


@pytest.fixture(params=[False, True], ids=["loads again", "live"])
def engine(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest) -> Engine:
    caplog.set_level(logging.INFO, "sglang.relayout")
    engine = install(monkeypatch)
    engine.options = {"live": True} if request.param else {}
    return engine


def model_of(engine: Engine, whole: Tensors) -> Model:
    """Rank 1 of a model that was not loaded; where it is live, with its memory in parameters."""
    return Model(whole, 1, TP, in_parameters=bool(engine.options))


def damage(folder: Path) -> None:
    """Flip a bit of what is of rank 1."""
    file = folder / "model-rank-1-part-0.safetensors"
    flip(file, file.stat().st_size - 9)


@pytest.fixture
def updates(folders: Path, tmp_path: Path) -> Path:
    """What a llama may be updated from: another one as `new`, and folders that are something else."""
    changes = {
        "new": lambda name, one: one.neg(),
        "larger": lambda name, one: torch.cat([one, one]) if name == "model.norm.weight" else one,
        "lacks": lambda name, one: None if name == "model.norm.weight" else one,
    }
    for folder, change in changes.items():
        shutil.copytree(folders / "llama", tmp_path / folder, ignore=shutil.ignore_patterns("*.index.json"))
        for file in (tmp_path / folder).glob("*.safetensors"):
            tensors = {name: change(name, one) for name, one in load_file(file).items()}
            save_file({name: one for name, one in tensors.items() if one is not None}, file)
    for name in ("new", "lacks", "larger"):
        relayout.convert(tmp_path / name, tmp_path / f"{name}-tp2", tp=2)
    relayout.convert(tmp_path / "new", tmp_path / "new-tp4", tp=4)
    for name in ("truncated", "no file", "damaged"):
        shutil.copytree(tmp_path / "new-tp2", tmp_path / name)
    os.truncate(tmp_path / "truncated" / "model-rank-1-part-0.safetensors", 9000)
    (tmp_path / "no file" / "model-rank-1-part-0.safetensors").unlink()
    damage(tmp_path / "damaged")
    shutil.copytree(folders / "moe-tp2", tmp_path / "another model")
    return tmp_path


@pytest.mark.parametrize("start", ["llama-tp2", "llama"])
@pytest.mark.parametrize("name", ["new", "new-tp2", "new-tp4"])
@pytest.mark.parametrize("load_format", ["auto", "relayout"])
def test_a_model_is_updated_from_weights_of_the_same_model(
    folders: Path, engine: Engine, whole: Tensors, updates: Path, start: str, name: str, load_format: str
) -> None:
    model = model_of(engine, whole)
    engine.load(folders / start, model, load_format=load_format)
    assert engine.update(model, updates / name, folders / start, load_format)[0]
    model.assert_holds_what_it_cuts_of(reference_tensors(updates / "new"))


@pytest.mark.parametrize("start", ["llama-tp2", "llama"])
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("lacks-tp2", "is not for the model that the engine has: 1 tensors have another shape, are missing"),
        ("larger-tp2", "is not for the model that the engine has: "),
        ("another model", "is not for the model that the engine has: "),
        ("lacks", "is not for the model that the engine has: 1 tensors"),
        ("truncated", "bytes long, expected"),
        ("no file", "is missing"),
        ("damaged", "do not match digest"),
        ("nothing", "no such file or folder"),
    ],
)
def test_what_an_update_cannot_be_made_from_changes_nothing(
    folders: Path, engine: Engine, whole: Tensors, updates: Path, start: str, name: str, says: str
) -> None:
    """Also for a model that SGLang has loaded itself, where relayout is asked to update it."""
    model = model_of(engine, whole)
    engine.load(folders / start, model, load_format="auto")
    done, answer = engine.update(model, updates / name, folders / start, "auto" if "tp2" in start else "relayout")
    assert not done
    assert says in answer
    assert "SGLang: keeps them: " in answer
    assert engine.updated.model_path == str(folders / start)
    model.assert_holds_what_it_cuts_of(whole)


def test_an_update_that_sglang_refuses_leaves_the_path_as_it_was() -> None:
    model, config = torch.nn.Module(), SimpleNamespace(model_path="old")
    updater = SimpleNamespace(get_model=lambda: model, model_config=config)

    def refuse(updater: Any, path: str, load_format: str) -> tuple[bool, str]:
        config.model_path = path
        return False, "no"

    assert update_weights(refuse, updater, "new", "auto") == (False, "no")
    assert config.model_path == "old"


def test_updates_of_what_sglang_reads_itself_are_its_own(
    folders: Path, engine: Engine, whole: Tensors, updates: Path
) -> None:
    model = model_of(engine, whole)
    engine.load(folders / "llama", model, load_format="auto")
    assert engine.update(model, updates / "lacks", folders / "llama") == (True, "Succeeded to update model weights.")


@pytest.fixture(scope="module")
def steps(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`step-N`, `delta-N` and `model-N` of three steps, and `root` with these as steps 10 to 12."""
    root = tmp_path_factory.mktemp("steps")
    write_steps(llama, root, num_steps=2)
    publisher = relayout.Publisher(root / "root", config=llama, tp=TP)
    for step in range(3):
        publisher.publish(reference_tensors(root / f"model-{step}"), 10 + step)
    return root


def content_of(folder: Path) -> str:
    return blake3_hex((folder / "relayout.json").read_bytes())


def started(engine: Engine, folder: Path, whole: Tensors, **options: Any) -> Model:
    model = model_of(engine, whole)
    engine.load(folder, model, load_format="auto", **options)
    assert engine.update(model, folder, folder)[0]
    return model


def test_deltas_change_what_the_engine_has_one_after_the_other(steps: Path, engine: Engine, whole: Tensors) -> None:
    model = started(engine, steps / "step-0", whole)
    for number in (1, 2):
        done, answer = engine.update(model, steps / f"delta-{number}")
        assert (done, answer) == (
            True,
            f"Succeeded to update model weights. relayout: content {content_of(steps / f'step-{number}')}",
        )
        model.assert_holds_what_it_cuts_of(reference_tensors(steps / f"model-{number}"))
    done, answer = engine.update(model, steps / "delta-1")
    assert not done
    assert "SGLang: keeps them: " in answer
    assert "applies to content" in answer
    assert engine.update(model, steps / "step-0")[0]
    assert engine.update(model, steps / "delta-1")[0]
    model.assert_holds_what_it_cuts_of(reference_tensors(steps / "model-1"))


def test_a_damaged_delta_changes_nothing(steps: Path, engine: Engine, whole: Tensors) -> None:
    model = started(engine, steps / "step-0", whole)
    done, answer = engine.update(model, steps / "damaged-delta")
    assert not done
    assert "SGLang: keeps them: " in answer
    assert "does not match its digest: damaged" in answer
    model.assert_holds_what_it_cuts_of(whole)


def test_a_delta_is_not_for_an_engine_that_has_loaded_a_plain_checkpoint(
    steps: Path, engine: Engine, whole: Tensors
) -> None:
    model = model_of(engine, whole)
    engine.load(steps / "model-0", model, load_format="auto")
    done, answer = engine.update(model, steps / "delta-1", steps / "model-0")
    assert not done
    assert "was not converted: the weights of a live engine change" in answer
    model.assert_holds_what_it_cuts_of(whole)


@pytest.mark.parametrize(("name", "step"), [("root", 2), ("root#11", 1), ("root#10", 0), ("root#12", 2)])
@pytest.mark.parametrize("load_format", ["auto", "relayout"])
def test_of_a_root_the_newest_step_is_taken_or_the_one_that_is_named(
    steps: Path, engine: Engine, whole: Tensors, name: str, step: int, load_format: str
) -> None:
    model = started(engine, steps / "step-1", whole)
    entry = relayout.Steps(steps / "root").entries()[step]
    done, answer = engine.update(model, steps / name, load_format=load_format)
    assert done
    assert answer.endswith(f" relayout: content {entry.content}, step {10 + step}")
    model.assert_holds_what_it_cuts_of(reference_tensors(steps / f"model-{step}"))


@pytest.mark.parametrize(("name", "says"), [("root#7", "has no step 7 that all ranks see"), ("root#x", "is not a f")])
def test_a_step_that_is_not_there_changes_nothing(
    steps: Path, engine: Engine, whole: Tensors, name: str, says: str
) -> None:
    model = started(engine, steps / "step-0", whole)
    done, answer = engine.update(model, steps / name)
    assert not done
    assert "SGLang: keeps them: " in answer
    assert says in answer
    model.assert_holds_what_it_cuts_of(whole)


def test_a_step_that_is_deleted_while_it_is_read_gives_way_to_a_newer_one(
    steps: Path, engine: Engine, whole: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = relayout.Publisher(tmp_path / "root", config=steps / "model-0", tp=TP, full_every=1)
    old, new = (publisher.publish(reference_tensors(steps / f"model-{step}"), step) for step in (1, 2))
    index, read = tmp_path / "root" / "steps.json", RankWeights.stream
    top = json.loads(index.read_text())
    index.write_bytes(closed_index(top | {"steps": top["steps"][:1]}))

    def retired(weights: RankWeights) -> Iterator[tuple[str, torch.Tensor]]:
        if old.full is not None and old.full.name in weights.path:
            shutil.rmtree(weights.path)
            index.write_bytes(closed_index(top | {"steps": [top["steps"][1] | {"delta": None}]}))
        return read(weights)

    monkeypatch.setattr(RankWeights, "stream", retired)
    model = started(engine, steps / "step-0", whole)
    done, answer = engine.update(model, tmp_path / "root")
    assert done, answer
    assert answer.endswith(f" relayout: content {new.content}, step 2")
    model.assert_holds_what_it_cuts_of(reference_tensors(steps / "model-2"))


def test_stages_of_a_pipeline_take_a_step_by_its_number(steps: Path, engine: Engine, whole: Tensors) -> None:
    """One stage has new weights before the next is asked: they would see different steps as the newest."""
    model = started(engine, steps / "step-0", whole)
    engine.parallel.pp_size = 2
    assert "name the step, as " in engine.update(model, steps / "root")[1]
    model.assert_holds_what_it_cuts_of(whole)


def after_the_proof(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Let something happen when all is read, and before anything changes. Nothing is held: it is read again."""
    monkeypatch.setattr("relayout.live.sglang_updates._HELD_NBYTES", 0)
    deliver, acts = RankWeights.deliver, [act]

    def delivered(weights: RankWeights, *args: Any) -> Any:
        for one in acts:
            one()
        acts.clear()
        return deliver(weights, *args)

    monkeypatch.setattr(RankWeights, "deliver", delivered)


@pytest.mark.parametrize("start", ["llama-tp2", "llama"])
def test_what_is_damaged_after_the_proof_lets_the_engine_load_again_what_it_had(
    folders: Path, engine: Engine, whole: Tensors, updates: Path, monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    """SGLang's own way back reads the new path once more."""
    model = model_of(engine, whole)
    engine.load(folders / start, model, load_format="auto")
    after_the_proof(monkeypatch, lambda: damage(updates / "new-tp2"))
    done, answer = engine.update(model, updates / "new-tp2", folders / start)
    assert not done
    assert "do not match digest" in answer
    assert "SGLang: keeps them: " in answer
    assert engine.updated.model_path == str(folders / start)
    model.assert_holds_what_it_cuts_of(whole)


@pytest.mark.parametrize("name", ["new", "new-tp2"])
def test_whatever_a_load_fails_by_the_engine_loads_again_what_it_had(
    folders: Path, engine: Engine, whole: Tensors, updates: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Also if it reads the new weights itself."""
    if engine.options and name != "new":
        pytest.skip("nothing is loaded")
    model = started(engine, folders / "llama-tp2", whole)
    load, calls = model.load_weights, list[int]()

    def broken(weights: Any) -> Any:
        calls.append(1)
        return load(weights) if len(calls) > 2 else load(next(iter(weights)) for _ in range(2)) and 1 / 0

    monkeypatch.setattr(model, "load_weights", broken)
    done, answer = engine.update(model, updates / name)
    assert not done
    assert "SGLang: keeps them: " in answer
    assert "division" in answer
    assert len(calls) == 3
    assert engine.updated.model_path == str(folders / "llama-tp2")
    model.assert_holds_what_it_cuts_of(whole)


def test_it_goes_back_to_the_last_delta(
    steps: Path, engine: Engine, whole: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(steps / "step-2", tmp_path / "new")
    model = started(engine, steps / "step-0", whole)
    assert engine.update(model, steps / "delta-1")[0]
    after_the_proof(monkeypatch, lambda: damage(tmp_path / "new"))
    assert "SGLang: keeps them: " in engine.update(model, tmp_path / "new")[1]
    model.assert_holds_what_it_cuts_of(reference_tensors(steps / "model-1"))
    assert engine.update(model, steps / "delta-2")[0]
    model.assert_holds_what_it_cuts_of(reference_tensors(steps / "model-2"))


def test_without_a_way_back_the_answer_says_that_the_weights_are_a_mixture(
    steps: Path, engine: Engine, whole: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    had, new = (shutil.copytree(steps / f"step-{step}", tmp_path / f"step-{step}") for step in (0, 1))
    model = started(engine, had, whole)
    after_the_proof(monkeypatch, lambda: (damage(new), shutil.rmtree(had)))
    done, answer = engine.update(model, new)
    assert not done
    assert "SGLang: its weights are a mixture now: update them again, or start it again: " in answer
    shutil.copytree(steps / "step-0", had)
    done, answer = engine.update(model, steps / "delta-1")
    assert not done
    assert "a delta changes what the engine has, and that is a mixture: update it from a folder" in answer
    assert engine.update(model, had)[0]
    assert engine.update(model, steps / "delta-1")[0]
    model.assert_holds_what_it_cuts_of(reference_tensors(steps / "model-1"))


def test_sglang_reads_again_some_of_what_the_last_delta_has_made(
    steps: Path, engine: Engine, whole: Tensors, tmp_path: Path
) -> None:
    """So its balancing of experts does, by the path of the last request, in the ranks that lack some."""
    new = reference_tensors(steps / "model-1")
    lost = "model.norm.weight"
    for last in (steps / "delta-1", steps / "root#11"):
        model = started(engine, steps / "step-0", whole)
        assert engine.update(model, last)[0]
        model.memory[lost].zero_()
        assert engine.update(model, last, weight_name_filter=lambda name: name == lost)[0]
        model.assert_holds_what_it_cuts_of(new)


def test_a_policy_is_asked_before_anything_is_requested(
    steps: Path, engine: Engine, whole: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller names the place."""
    keys = make_keys(tmp_path)
    keys.policy.write_text(f'[[signer]]\npublic_key = "{keys.public}"\nprefixes = ["{tmp_path}"]\n')
    model = started(engine, steps / "step-0", whole)
    monkeypatch.setenv("RELAYOUT_TRUST", str(keys.policy))
    for source in ("toy://sglang/root", str(steps / "root"), str(steps / "delta-1"), str(steps / "root#11")):
        done, answer = engine.update(model, source)
        assert not done
        assert "has no signer for this place" in answer
    assert not shelf("sglang").log
    model.assert_holds_what_it_cuts_of(whole)


def test_a_root_in_a_store_is_read_without_a_flag(engine: Engine, whole: Tensors, steps: Path) -> None:
    publisher = relayout.Publisher("toy://sglang/run", config=steps / "model-0", tp=TP)
    publisher.publish(reference_tensors(steps / "model-1"), 1)
    model = started(engine, steps / "step-0", whole)
    assert engine.update(model, "toy://sglang/run")[0]
    model.assert_holds_what_it_cuts_of(reference_tensors(steps / "model-1"))


@pytest.fixture
def live(engine: Engine) -> Engine:
    if not engine.options:
        pytest.skip("the same without")
    return engine


def loads_of(model: Model, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One more for each load."""
    load, loads = model.load_weights, list[int]()
    monkeypatch.setattr(model, "load_weights", lambda weights: loads.append(1) or load(weights))
    return loads


def weights_of(model: Model) -> LiveWeights:
    live = LIVE.of(model)
    assert live is not None
    assert live.weights is not None
    return live.weights


def test_what_changes_goes_where_it_lies(
    steps: Path, live: Engine, whole: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders, deltas and steps; also steps that lead back. Nothing is loaded again, and nothing moves."""
    model = started(live, steps / "step-0", whole)
    loads, indices = loads_of(model, monkeypatch), [one.data_ptr() for one in model.memory.values()]
    for name, step in (("delta-1", 1), ("root", 2), ("root#10", 0), ("root#11", 1), ("step-0", 0), ("root#11", 1)):
        done, answer = live.update(model, steps / name)
        found = weights_of(model).attest()
        assert (done, found.difference, found.unverified) == (True, None, ())
        assert f" relayout: content {found.content}" in answer
        model.assert_holds_what_it_cuts_of(reference_tensors(steps / f"model-{step}"))
    assert not loads
    assert [one.data_ptr() for one in model.memory.values()] == indices
    assert live.updated.model_path == str(steps / "root#11")


def written_by_others(model: Model) -> None:
    for one in model.memory.values():
        one.neg_()


def moved(model: Model) -> None:
    model.allocate()
    written_by_others(model)


@pytest.mark.parametrize("act", [written_by_others, moved])
def test_memory_that_is_not_as_it_was_left_is_loaded_again(
    steps: Path, live: Engine, whole: Tensors, monkeypatch: pytest.MonkeyPatch, act: Callable[[Model], None]
) -> None:
    """And from then on, what changes goes where it lies."""
    model = started(live, steps / "step-0", whole)
    loads = loads_of(model, monkeypatch)
    act(model)
    for step in (1, 2):
        assert live.update(model, steps / f"delta-{step}")[0]
        model.assert_holds_what_it_cuts_of(reference_tensors(steps / f"model-{step}"))
    assert loads == [1]


def test_after_a_failure_in_the_middle_the_engine_loads_again_what_it_had(
    steps: Path, live: Engine, whole: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = started(live, steps / "step-0", whole)
    loads, apply, calls = loads_of(model, monkeypatch), Flips.apply, list[int]()

    def failing(flips: Flips, numbers: torch.Tensor) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError("no memory is left")
        apply(flips, numbers)

    monkeypatch.setattr(Flips, "apply", failing)
    done, answer = live.update(model, steps / "delta-1")
    assert (done, "SGLang: keeps them: " in answer, "no memory is left" in answer) == (False, True, True)
    model.assert_holds_what_it_cuts_of(whole)
    assert loads == [1]
    assert live.update(model, steps / "delta-1")[0]
    model.assert_holds_what_it_cuts_of(reference_tensors(steps / "model-1"))
    assert loads == [1]


def test_a_model_that_is_not_asked_to_be_live_is_not_recorded(
    steps: Path, engine: Engine, whole: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(engine, whole)
    engine.load(steps / "step-0", model, load_format="auto")
    live = LIVE.of(model)
    assert (live is not None and live.weights is not None) is bool(engine.options)
    engine.load(steps / "model-0", model, load_format="auto")
    live = LIVE.of(model)
    assert live is None or live.weights is None


@pytest.fixture(scope="module", params=["", "live", "live in part"])
def ranks(
    steps: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> list[dict[str, Any]]:
    """What each of two ranks saw in each case."""
    folder = shutil.copytree(steps, tmp_path_factory.mktemp("ranks") / "steps")
    done = prestarted.run(folder, request.param, script=SCRIPT, imports=prestarted.GROUP, env=prestarted.ONE_THREAD)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(TP)]


@pytest.mark.parametrize(
    ("case", "step", "says"),
    [
        ("a delta", 1, "Succeeded to update model weights. relayout: content "),
        ("rank 1 sees an older root", 1, ", step 11"),
        ("a folder whose rank 1 is damaged", 1, "SGLang: keeps them: "),
        ("rank 1 fails while it loads", 1, "SGLang: keeps them: "),
        ("other contents", 1, "SGLang: keeps them: TMP/step-N: is not the same for all ranks: relayout: content "),
        ("the root", 2, ", step 12"),
        (
            "a plain checkpoint, of which rank 0 fails",
            2,
            "SGLang: keeps them: Failed to update weights: division",
        ),
        ("rank 1 fails, and rank 0 cannot go back", None, "SGLang: its weights are a mixture now: update them again"),
    ],
)
def test_all_ranks_change_or_none_and_all_answer_the_same(
    ranks: list[dict[str, Any]], case: str, step: int | None, says: str
) -> None:
    for seen in ranks:
        assert says in seen[case]["answer"]
        assert step is None or seen[case]["has"] == [f"model-{step}"]
