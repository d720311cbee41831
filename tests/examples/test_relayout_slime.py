"""What slime writes for its engines as steps; by its own code, if RELAYOUT_SLIME names a checkout of it (624b824a)."""

from __future__ import annotations

import importlib
import json
import logging
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import relayout_slime as slime
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from support import fake_sglang
from support.conversions import reference_tensors
from support.fake_vllm import Model, put_modules

import relayout
from relayout.errors import PlanError

SOURCE = os.environ.get("RELAYOUT_SLIME", "")
TP = 2


@pytest.fixture
def args(tmp_path: Path, llama: Path) -> SimpleNamespace:
    """slime's arguments, as far as they matter."""
    slime._publisher.cache_clear()
    (tmp_path / "disk").mkdir()
    return SimpleNamespace(
        update_weight_disk_dir=str(tmp_path / "disk"), sglang_tp_size=TP, hf_checkpoint=str(llama),
        custom_update_weight_post_write_path="relayout_slime.published", update_weight_start_version=0,
        update_weight_disk_keep_files=False, update_weight_local_checkpoint_dir=None, offload_rollout=False,
        ci_test=False, relayout_publisher={"full_every": 3},
    )  # fmt: skip


def write(source: Path, folder: Path, step: int) -> None:
    """Write a checkpoint as slime does: two files and their index, and the configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(source / "config.json", folder)
    tensors = weights_of(source, step)
    names = sorted(tensors)
    files = {f"model-{part:05d}-of-00002.safetensors": names[part - 1 :: 2] for part in (1, 2)}
    for file, of_file in files.items():
        save_file({name: tensors[name] for name in of_file}, folder / file)
    weight_map = {name: file for file, of_file in files.items() for name in of_file}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def weights_of(source: Path, step: int) -> dict[str, torch.Tensor]:
    """Of a step, a row of each tensor is another one."""
    tensors = {name: tensor.clone() for name, tensor in reference_tensors(source).items()}
    for tensor in tensors.values():
        tensor[step % len(tensor)] += step
    return tensors


def test_a_checkpoint_becomes_a_step_and_a_root_that_leads_to_it(args: SimpleNamespace, llama: Path) -> None:
    disk = Path(args.update_weight_disk_dir)
    kinds = []
    for step in range(1, 6):
        folder = disk / f"weight_v{step:06d}"
        write(llama, folder, step)
        slime.published(args, str(folder), [])
        entry = relayout.Steps(disk / "relayout-steps").newest()
        assert entry is not None
        kinds.append((entry.step, entry.full is not None, entry.delta is not None))
        [*others, last] = relayout.Steps(folder).entries()
        assert last.content == entry.content
        for rank in range(TP):
            follower = relayout.Follower(folder, rank)
            assert follower.update() == step
            chain = relayout.Steps(folder).chain()
            assert chain is not None
            assert len(chain.deltas) == len(others)
            new = weights_of(llama, step)
            cut = Model(new, rank, TP).cut
            assert follower.tensors.keys() == new.keys()
            assert all(torch.equal(tensor, cut(name, new[name])) for name, tensor in follower.tensors.items())
        assert load_file(folder / "model-00001-of-00002.safetensors"), "SGLang without relayout loads this"
        shutil.rmtree(folder)  # As slime does.
    assert kinds == [(1, True, False), (2, False, True), (3, False, True), (4, True, True), (5, False, True)]


def test_sglang_loads_the_step_by_the_path_of_the_checkpoint_also_when_that_is_gone(
    args: SimpleNamespace, llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, model = fake_sglang.install(monkeypatch), Model(reference_tensors(llama), 1, TP)
    caplog.set_level(logging.INFO, "sglang.relayout")
    engine.load(llama, model, load_format="auto")
    was: Path | None = llama
    for step in (1, 2):
        folder = Path(args.update_weight_disk_dir, f"weight_v{step:06d}")
        write(llama, folder, step)
        slime.published(args, str(folder), [])
        done, answer = engine.update(model, folder, was)
        assert done, answer
        assert answer.endswith(f", step {step}")
        model.assert_holds_what_it_cuts_of(weights_of(llama, step))
        shutil.rmtree(folder)
        was = None
    model.memory["model.norm.weight"].zero_()
    assert engine.update(model, folder, weight_name_filter=lambda name: name == "model.norm.weight")[0]
    model.assert_holds_what_it_cuts_of(weights_of(llama, 2))


@pytest.mark.parametrize("name", ["weight_v000001", "disk"])
def test_what_slime_writes_in_its_delta_mode_is_refused(args: SimpleNamespace, llama: Path, name: str) -> None:
    folder = Path(args.update_weight_disk_dir, name)
    write(llama, folder, 1)
    if name != "disk":
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"delta_encoding": "xor"}}))
    with pytest.raises(PlanError, match="is no whole checkpoint of slime: use --update-weight-mode full"):
        slime.published(args, str(folder), [])


def test_only_the_first_process_publishes(args: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    slime.published(args, "nowhere", [])


@pytest.mark.skipif(not SOURCE, reason="RELAYOUT_SLIME names no checkout of slime")
def test_slimes_own_code_calls_the_hook_and_lets_the_engines_load_what_it_has_made(
    args: SimpleNamespace, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, model = fake_sglang.install(monkeypatch), Model(reference_tensors(llama), 1, TP)
    engine.load(llama, model, load_format="auto")
    engine.updated = fake_sglang.ModelConfig.of(llama)
    step = SimpleNamespace(number=0)

    def save(args: Any, folder: Path, model: Any, **named: Any) -> None:
        step.number += 1
        write(llama, folder, step.number)

    trainer, group = of_slime(monkeypatch, save)
    answers: list[tuple[bool, str]] = []

    def remote(call: Any) -> SimpleNamespace:
        return SimpleNamespace(remote=call)

    def update(model_path: str, weight_version: str) -> None:
        answers.append(engine.update(model, model_path))

    actor = SimpleNamespace(update_weights_from_disk=remote(update))
    for name in ("pause_generation", "flush_cache", "continue_generation"):
        setattr(actor, name, remote(lambda: None))
    manager = SimpleNamespace(get_updatable_engines_and_lock=remote(lambda: ([actor], None)))
    updater = trainer.UpdateWeightFromDisk(args, [], dict, model_name="llama", quantization_config=None)
    updater.connect_rollout_engines([actor], None)
    me = SimpleNamespace(
        args=args, role="actor", _disk_weight_version=0, _rollout_manager=manager,
        _actor_handlers=[SimpleNamespace(update_weights=remote(updater.update_weights))],
        _full_disk_weight_update_enabled=lambda: True, _release_train_enabled=lambda: False,
    )  # fmt: skip
    me._reload_rollout_weights_from_disk = lambda *given: group._reload_rollout_weights_from_disk(me, *given)
    for number in (1, 2, 3):
        group.update_weights(me)
        assert answers[-1][0], answers
        assert answers[-1][1].endswith(f", step {number}")
        model.assert_holds_what_it_cuts_of(weights_of(llama, number))
        assert [one.name for one in Path(args.update_weight_disk_dir).iterdir()] == ["relayout-steps"]


def of_slime(monkeypatch: pytest.MonkeyPatch, save: Any) -> tuple[Any, Any]:
    """slime's module that writes for engines, and its class that lets them load, with what these import left out."""
    monkeypatch.setattr(dist, "get_rank", lambda *_: 0)
    monkeypatch.setattr(dist, "barrier", lambda **_: None)
    ray: dict[str, Any] = {"get": lambda value: value, "remote": lambda one: one, "kill": None}
    put_modules(
        monkeypatch,
        {
            "ray": ray,
            "ray.actor": {"ActorHandle": object},
            "ray.util.placement_group": {"PlacementGroup": object},
            "ray.util.scheduling_strategies": {"PlacementGroupSchedulingStrategy": object},
            "slime.utils.http_utils": {"is_port_available": None},
            "slime.utils.distributed_utils": {"get_gloo_group": lambda: None},
            "slime.backends.megatron_utils.hf_checkpoint_saver": {"save_hf_model_to_path": save},
            "slime.backends.megatron_utils.update_weight": {},
            "slime.ray.utils": {"NOSET_VISIBLE_DEVICES_ENV_VARS_LIST": [], "add_default_ray_env_vars": None},
        },
    )
    for name in ("slime", "slime.utils", "slime.ray", "slime.backends.megatron_utils.update_weight"):
        sys.modules[name].__path__ = [str(Path(SOURCE, *name.split(".")))]
    found: list[ModuleType] = []
    for name in ("slime.backends.megatron_utils.update_weight.update_weight_from_disk", "slime.ray.actor_group"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        found.append(importlib.import_module(name))
        assert str(found[-1].__file__).startswith(SOURCE)
    return found[0], found[1].RayTrainGroup


def assert_is_rank(tensors: dict[str, torch.Tensor], new: dict[str, torch.Tensor], rank: int = 0) -> None:
    cut = Model(new, rank, TP).cut
    assert tensors.keys() == new.keys()
    assert all(torch.equal(tensor, cut(name, new[name])) for name, tensor in tensors.items())


def test_a_checkpoint_that_is_synced_again_or_whose_hook_failed_halfway_leads_to_its_last_step(
    args: SimpleNamespace, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(args.update_weight_disk_dir) / "weight_v000001"
    for step in (1, 2, 2):
        write(llama, folder, step)
        slime.published(args, str(folder), [])
        follower = relayout.Follower(folder, 0)
        assert follower.update() == 1
        assert_is_rank(follower.tensors, weights_of(llama, step))
    with monkeypatch.context() as patch:
        patch.setattr(slime.StepRepository, "move", lambda *_: (_ for _ in ()).throw(OSError("the drive is full")))
        write(llama, folder, 3)
        with pytest.raises(OSError, match="the drive is full"):
            slime.published(args, str(folder), [])
    assert relayout.Follower(folder, 0).update() == 1, "what was there before"
    slime.published(args, str(folder), [])
    follower = relayout.Follower(folder, 0)
    follower.update()
    assert_is_rank(follower.tensors, weights_of(llama, 3))


@pytest.mark.parametrize("kind", ["a file", "another link"])
def test_what_is_no_link_of_the_hook_is_not_replaced(args: SimpleNamespace, llama: Path, kind: str) -> None:
    folder = Path(args.update_weight_disk_dir) / "weight_v000001"
    write(llama, folder, 1)
    slime.published(args, str(folder), [])
    [link] = [one for one in folder.iterdir() if one.is_symlink()]
    link.unlink()
    link.write_text("theirs") if kind == "a file" else link.symlink_to(llama)
    step = relayout.Steps(Path(args.update_weight_disk_dir) / "relayout-steps").newest()
    assert step is not None
    with pytest.raises(FileExistsError):
        slime.link_step(Path(args.update_weight_disk_dir) / "relayout-steps", step, folder)
    assert link.is_symlink() == (kind != "a file")
