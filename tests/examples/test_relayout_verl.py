"""The backend of verl's checkpoint engine, in verl's own manager: RELAYOUT_VERL names a checkout of it (1dda039b)."""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.conversions import reference_tensors
from support.fake_vllm import put_modules

import relayout
from relayout.errors import PlanError

SOURCE = os.environ.get("RELAYOUT_VERL", "")
pytestmark = pytest.mark.skipif(not SOURCE, reason="RELAYOUT_VERL names no checkout of verl")


@pytest.fixture
def verl(monkeypatch: pytest.MonkeyPatch) -> Any:
    """verl's module of checkpoint engines, with what it imports left out."""
    ray = {"remote": lambda one: one, "get": lambda given: [one.result() for one in given]}
    alike: Callable[..., Any] = lambda **_: lambda method: method  # noqa: E731
    dispatch = SimpleNamespace(ONE_TO_ALL=0, DP_COMPUTE=1)
    put_modules(
        monkeypatch,
        {
            "ray": ray,
            "verl.single_controller.base": {"Worker": object},
            "verl.single_controller.base.decorator": {"Dispatch": dispatch, "register": alike},
            "verl.single_controller.ray": {"RayClassWithInitArgs": SimpleNamespace, "RayWorkerGroup": Group},
            "verl.utils.distributed": {"initialize_global_process_group_ray": None},
            "verl.utils.import_utils": {"import_external_libs": importlib.import_module},
            "verl.utils.ray_utils": {"auto_await": lambda method: method},
            "verl.workers.config": dict.fromkeys(("CheckpointEngineConfig", "HFModelConfig", "RolloutConfig"), object),
            "verl.workers.rollout": dict.fromkeys(("BaseRollout", "RolloutReplica", "get_rollout_class"), object),
            "verl.workers.rollout.utils": {"ensure_async_iterator": None},
            "verl.checkpoint_engine": {},
        },
    )  # fmt: skip
    sys.modules["verl.checkpoint_engine"].__path__ = [str(Path(SOURCE, "verl", "checkpoint_engine"))]
    for name in ("verl.checkpoint_engine.base", "relayout_verl"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("verl.checkpoint_engine.base")


class Group:
    """verl's RayWorkerGroup, of threads."""

    def __init__(self, *, worker_handles: list[Any], ray_cls_with_init: Any = None) -> None:
        self.workers, self.world_size = worker_handles, len(worker_handles)
        self.pool = ThreadPoolExecutor(self.world_size)

    def execute_checkpoint_engine(self, method: list[str], **kwargs: list[Any]) -> list[Future[Any]]:
        each = [{key: values[number] for key, values in kwargs.items()} for number in range(self.world_size)]
        return [
            self.pool.submit(getattr(worker.engine, name), **given)
            for worker, name, given in zip(self.workers, method, each, strict=True)
        ]

    def update_weights(self, *, global_steps: int, mode: str = "") -> list[Future[Any]]:
        return [self.pool.submit(worker.update, global_steps) for worker in self.workers]


class Replica:
    """verl's RolloutReplica, whose requests nobody has."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers

    def __getattr__(self, name: str) -> Any:
        async def nothing() -> None:
            return None

        return nothing


def test_verls_manager_moves_the_weights_of_each_step_to_all_rollouts(verl: Any, llama: Path, tmp_path: Path) -> None:
    whole = reference_tensors(llama)
    options = {"bucket_size": 1, "root": str(tmp_path / "root"), "wait_seconds": 60}
    config = SimpleNamespace(backend="relayout", custom_backend_module="relayout_verl")
    actors = [SimpleNamespace(walked=0) for _ in range(2)]
    manager = verl.CheckpointEngineManager(config, Group(worker_handles=actors), [])
    new = partial(verl.CheckpointEngineRegistry.new, "relayout")
    rollouts = [SimpleNamespace(engine=new(**options), has={}) for _ in range(3)]
    manager.add_replicas([Replica(rollouts[:2]), Replica(rollouts[2:])])

    def send(actor: Any, global_steps: int) -> Any:
        def weights() -> Any:
            for name, tensor in whole.items():
                actor.walked += 1
                yield name, tensor

        return asyncio.run(actor.engine.send_weights(weights(), global_steps=global_steps))

    async def receive(rollout: Any, global_steps: int) -> None:
        rollout.has = {name: tensor async for name, tensor in rollout.engine.receive_weights(global_steps=global_steps)}

    for number, actor in enumerate(actors):
        actor.engine = new(**options, is_master=number == 0, config=str(llama), tp=2)
        actor.update = partial(send, actor)
    for rollout in rollouts:
        rollout.update = lambda step, rollout=rollout: asyncio.run(receive(rollout, step))
    for step in (1, 2, 2, 3):
        for tensor in whole.values():
            tensor[step % len(tensor)] += 1
        metrics = asyncio.run(manager.update_weights(global_steps=step))
        assert metrics is None or metrics.get("relayout/nbytes", 1) > 0
        for rollout in rollouts:
            assert rollout.has.keys() == whole.keys()
            assert all(torch.equal(tensor, whole[name]) for name, tensor in rollout.has.items())
    assert [actor.walked for actor in actors] == [4 * len(whole)] * 2
    entries = relayout.Steps(tmp_path / "root").entries()
    assert [(entry.step, entry.full is None) for entry in entries] == [(1, False), (2, True), (2, True), (3, True)]


def test_a_rollout_does_not_wait_for_ever(verl: Any, tmp_path: Path) -> None:
    importlib.import_module("relayout_verl")
    engine = verl.CheckpointEngineRegistry.new("relayout", bucket_size=1, root=str(tmp_path), wait_seconds=0.5)
    engine.init_process_group(engine.prepare())

    async def receive() -> None:
        async for _ in engine.receive_weights():
            pass

    with pytest.raises(PlanError, match=r"no step was published in 0\.5 s: see the log of the actor"):
        asyncio.run(receive())
