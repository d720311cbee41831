"""Weights that change in a live vLLM: all workers get them, or none; a real vLLM is proven by tools/engines."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import prestarted
from support.checkpoints import write_family
from support.conversions import reference_tensors
from support.fake_vllm import Engine, LoadConfig, Model, Tensors, TransferWorker, put_modules
from support.families import FAMILIES
from support.signing import make_keys
from support.toy_store import shelf
from support.updates_worker import TP, write_steps
from torch.utils._python_dispatch import _get_current_dispatch_mode

import relayout
from relayout.core.digests import blake3_hex
from relayout.core.workers import Stopped, check_stop, current_stop
from relayout.engines.load import Shapes, check_same_model
from relayout.engines.rank_weights import EngineOptions, RankWeights
from relayout.errors import PlanError
from relayout.live.recording import SliceLocations
from relayout.live.staging import Content, LiveWeights
from relayout.live.vllm_updates import LIVE, InitInfo, TransferEngine, UpdateInfo

pytestmark = pytest.mark.xdist_group("group")

SCRIPT = "from support.updates_worker import main; main()"


@pytest.fixture(scope="module")
def updated_folders(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of a llama, converted for two ranks, and deltas between them; and what is damaged, or another's."""
    root = tmp_path_factory.mktemp("live")
    write_steps(llama, root, num_steps=2)
    (root / "model-other").mkdir()
    write_family(FAMILIES["qwen3"], root / "model-other")
    relayout.convert(root / "model-other", root / "other", tp=TP)
    return root


@pytest.fixture(scope="module")
def workers(updated_folders: Path) -> list[dict[str, Any]]:
    """What each worker saw in each case."""
    done = prestarted.run(updated_folders, script=SCRIPT, imports=prestarted.GROUP, env=prestarted.ONE_THREAD)
    assert done.returncode == 0, done.stderr
    return [json.loads((updated_folders / f"worker-{rank}.json").read_text()) for rank in range(TP)]


@pytest.mark.parametrize(
    ("case", "step"),
    [
        ("a delta", 1),
        ("the same delta behind a reload of its base", 1),
        ("the next delta", 2),
        ("another folder", 0),
        ("two deltas", 2),
        ("a list", 2),
        ("nothing", 2),
        ("the first folder again", 0),
        ("a delta after errors", 1),
        ("a delta after sleep", 2),
        ("a folder after a sleep that lets go", 0),
        ("a folder where others have written", 0),
        ("loaded again by the engine", 1),
    ],
)
def test_all_workers_get_what_they_would_cut_out_of_the_new_source(
    updated_folders: Path, workers: list[dict[str, Any]], case: str, step: int
) -> None:
    content = blake3_hex((updated_folders / f"step-{step}" / "relayout.json").read_bytes())
    for worker in workers:
        outcome = worker[case]
        assert (outcome["has"], outcome["content"], outcome["said"]) == ([f"model-{step}"], content, [])
        assert "raised" not in outcome
        attested = outcome["attested"]
        assert (attested["content"], attested["difference"]) == (content, None)
        # The engine of this test puts everything into parameters, or nothing.
        assert (attested["verified"] > 0) is (not attested["unverified"]) is (case != "loaded again by the engine")


@pytest.mark.parametrize(
    ("case", "has", "kind", "reason"),
    [
        ("the same delta again", 1, "PlanError", "applies to content "),
        ("a damaged delta", 0, "FormatError", "piece 1 does not match its digest: damaged"),
        ("a damaged folder", 0, "FormatError", " do not match digest "),
        ("another model", 0, "PlanError", "tensors have another dtype, shape or slice"),
        ("a plain checkpoint", 0, "PlanError", "was not converted: the weights of a live engine change"),
        ("other contents for other workers", 0, "PlanError", "not the same for all workers: contents "),
        ("no source", 0, "PlanError", 'expected {"source": DELTA, FOLDER'),
        ("a worker fails in the rehearsal", 1, "PlanError", "reload of what it has made something else of fails: Zero"),
    ],
)
def test_what_one_worker_refuses_changes_none_and_the_last_one_raises_it(
    workers: list[dict[str, Any]], case: str, has: int, kind: str, reason: str
) -> None:
    for rank, worker in enumerate(workers):
        outcome = worker[case]
        assert outcome["has"] == [f"model-{has}"]
        said = outcome["said"][-1]
        assert reason in said
        assert "the engine keeps its weights: " in said
        # vLLM would take an answer behind an error for one to its next call.
        assert outcome.get("raised") == (kind if rank == TP - 1 else None)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("a delta after a sleep that lets go", "were loaded again by others, or in part: give it a converted folder"),
        ("a delta where others have written", "which has unknown content now: stage it again"),
    ],
)
def test_a_delta_is_not_applied_to_memory_that_has_other_weights(
    workers: list[dict[str, Any]], case: str, reason: str
) -> None:
    assert workers[1][case]["content"] is None
    assert all(reason in worker[case]["said"][-1] for worker in workers)
    assert workers[-1][case]["raised"] == "PlanError"


def test_an_engine_whose_weights_are_a_mixture_computes_nothing_any_more(workers: list[dict[str, Any]]) -> None:
    for case, reason in (("a worker fails while it loads", "division by zero"), ("after that", "an update has failed")):
        for rank, worker in enumerate(workers):
            outcome = worker[case]
            assert "has" not in outcome
            assert "they are a mixture: start the engine again" in outcome["refuses"]
            assert "the engine is unusable now: start it again: " in outcome["said"][-1]
            assert reason in outcome["said"][-1]
            assert ("raised" in outcome) is (rank == TP - 1)
            assert outcome["content"] is None
            assert "loaded again by others, or in part" in outcome["attested"]["error"]


class SlowLive:
    """A `LiveWeights` that reads until it is told to stop, or that the test is over."""

    content = SimpleNamespace(digest="old")

    def __init__(self, *, heeds: bool) -> None:
        self.heeds, self.may_end, self.reading = heeds, threading.Event(), threading.Semaphore(0)
        self.lock, self.running, self.most = threading.Lock(), 0, 0

    def stage(self, sources: object, before: object, memory: int, *, step: int | None = None) -> Any:
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
        self.reading.release()
        try:
            while not self.may_end.wait(0.01):
                if self.heeds:
                    check_stop(current_stop())
        finally:
            with self.lock:
                self.running -= 1
        return SimpleNamespace(content=self.content, nbytes=memory, left_nbytes=0, modules=frozenset())


@pytest.fixture
def transfer(monkeypatch: pytest.MonkeyPatch) -> tuple[TransferEngine, SlowLive]:
    """An engine's transfer that waits for a moment only, and weights that it cannot read in it."""
    live = SlowLive(heeds=True)
    monkeypatch.setattr(TransferEngine, "_live", live)
    engine = TransferEngine()
    engine.model = torch.nn.Linear(1, 1)
    engine.init_transfer_engine(InitInfo(wait_seconds=0.05))
    return engine, live


def test_a_staging_that_was_given_up_ends_and_holds_nothing(
    transfer: tuple[TransferEngine, SlowLive], caplog: pytest.LogCaptureFixture
) -> None:
    engine, live = transfer
    caplog.set_level("INFO")
    engine.receive_weights(UpdateInfo("delta"))
    [given_up] = engine._stagings
    assert live.reading.acquire(timeout=60)
    with pytest.raises(TimeoutError, match="delta is still being read"):
        engine._staged()
    engine.start_weight_update()
    assert given_up._ended.wait(60)
    assert (given_up.staged, engine.state()["is_staging"]) == (None, False)
    with pytest.raises(Stopped):
        given_up.wait(0)
    assert "relayout: no longer staged: delta" in caplog.messages


@pytest.mark.parametrize("heeds", [True, False])
def test_new_weights_are_read_after_what_was_given_up_has_ended(
    transfer: tuple[TransferEngine, SlowLive], heeds: bool
) -> None:
    engine, live = transfer
    live.heeds = heeds
    for attempt in range(3):
        engine.start_weight_update()
        engine.receive_weights(UpdateInfo(f"delta-{attempt}"))
        if heeds or not attempt:
            assert live.reading.acquire(timeout=60)
        with pytest.raises(TimeoutError):
            engine._staged()
    assert engine.state()["is_staging"]
    live.may_end.set()
    assert engine._stagings[-1].wait(60).nbytes == 4 * 2**30
    assert live.most == 1


def test_what_a_rank_does_not_hold_is_read_through_the_deltas_too(updated_folders: Path) -> None:
    base, deltas = str(updated_folders / "step-0"), [str(updated_folders / f"delta-{step}") for step in (1, 2)]
    weights = RankWeights(base, 0, TP, EngineOptions(), deltas=deltas).deliver()
    whole = reference_tensors(updated_folders / "model-2")
    with relayout.safe_open(base, deltas=deltas) as opened:
        assert set(opened.keys()) == set(whole)
        for name, tensor in whole.items():
            assert torch.equal(weights.read(name, ...), tensor)
            assert torch.equal(opened.get_tensor(name), tensor)
    older = reference_tensors(updated_folders / "model-0")
    assert not any(torch.equal(older[name], whole[name]) for name in whole)


def test_a_layout_tells_slices_of_the_same_shape_apart(updated_folders: Path) -> None:
    """So an update is refused in which the rank has other ones."""
    first, second = (
        Content.of(RankWeights(str(updated_folders / "step-0"), rank, TP, EngineOptions())) for rank in range(TP)
    )
    with pytest.raises(PlanError, match="tensors have another dtype, shape or slice"):
        first.check_same_layout(second, "step-0")
    first.check_same_layout(first, "step-0")


@pytest.mark.parametrize("new", [{}, {"a": (3,)}, {"b": (2,)}, {"a": (2,), "b": (2,)}])
def test_a_model_is_the_same_only_with_the_same_tensors(new: Shapes) -> None:
    check_same_model({"a": (2,)}, "folder", {"a": (2,)})
    with pytest.raises(PlanError, match="is not for the model that the engine has"):
        check_same_model({"a": (2,)}, "folder", new)


def test_a_policy_is_asked_before_anything_is_requested(
    tmp_path: Path, updated_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller names the place."""
    keys = make_keys(tmp_path)
    keys.policy.write_text(f'[[signer]]\npublic_key = "{keys.public}"\nprefixes = ["{tmp_path}"]\n')
    monkeypatch.setenv("RELAYOUT_TRUST", str(keys.policy))
    recorded = SliceLocations({}, {}, {})
    nothing: Any = None
    live = LiveWeights(recorded, nothing, EngineOptions(), nothing)
    for source in ("toy://live/step-1", str(updated_folders / "delta-1")):
        with pytest.raises(PlanError, match="has no signer for this place"):
            live.stage([source], None, 0)
    assert not shelf("live").log


@pytest.fixture
def worker(vllm: Engine, folders: Path, whole: Tensors) -> TransferWorker:
    """One that has loaded rank 0 of 2, and may be updated."""
    return TransferWorker(vllm, folders / "llama-tp2", Model(whole, 0, 2), "auto")


def test_weights_that_are_loaded_once_more_are_not_taken_for_those_recorded(
    worker: TransferWorker, vllm: Engine
) -> None:
    assert worker.relayout_state()["content"] is not None
    loader = vllm.formats["auto"](LoadConfig("auto"))
    loader.load_weights(worker.model, worker.vllm_config.model_config)
    assert LIVE.of(worker.model) is None
    assert worker.relayout_state()["content"] is None


def test_no_recording_begins_behind_a_load_that_has_failed(worker: TransferWorker, vllm: Engine) -> None:
    loader = vllm.formats["auto"](LoadConfig("auto"))
    with pytest.raises(AttributeError):
        loader.load_model(None, worker.vllm_config.model_config)
    loader.load_weights(worker.model, worker.vllm_config.model_config)
    assert _get_current_dispatch_mode() is None


@pytest.mark.parametrize(
    ("lose", "is_known"),
    [
        (lambda worker: worker.sleep(), True),
        (lambda worker: worker.sleep(level=1), True),
        (lambda worker: worker.discard(("kv_cache",)), True),
        (lambda worker: worker.sleep(level=2), False),
        (lambda worker: worker.discard(tags=("kv_cache", "weights")), False),
        (lambda worker: worker.reset_weights(), False),
    ],
)
def test_calls_that_discard_weights_are_noted(
    worker: TransferWorker, lose: Callable[[TransferWorker], None], is_known: bool
) -> None:
    lose(worker)
    assert (worker.relayout_state()["content"] is not None) is is_known


def test_memory_of_weights_that_sleep_is_not_read(
    worker: TransferWorker, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, a read of it would be the last call of the process. New weights may be read meanwhile."""
    weights, others = (SimpleNamespace(tag=tag, is_asleep=True) for tag in ("weights", "kv_cache"))
    allocator = SimpleNamespace(pointer_to_data={1: others, 2: weights})
    memory = SimpleNamespace(instance=allocator)
    put_modules(monkeypatch, {"vllm.device_allocator.cumem": {"CuMemAllocator": memory}})
    transfer = worker.weight_transfer_engine
    transfer.receive_weights(UpdateInfo(str(folders / "llama-tp2")))
    with monkeypatch.context() as patch:
        patch.setattr(LiveWeights, "_look", lambda live: pytest.fail("sleeping memory was read"))
        patch.setattr(LiveWeights, "attest", lambda live: pytest.fail("sleeping memory was read"))
        with pytest.raises(PlanError, match=r"the weights are asleep: call wake_up\(tags=\['weights'\]\) first"):
            transfer._staged()
        assert "the weights are asleep" in worker.relayout_attest()["error"]
    weights.is_asleep = False
    assert len(transfer._staged()) == 1
    assert "error" not in worker.relayout_attest()
    memory.instance = None  # Sleep mode is off.
    assert len(transfer._staged()) == 1
