"""Weights of a stub engine that change: what parameters then have, against the source; and what is proven."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints import write_family
from support.conversions import reference_tensors
from support.fake_vllm import Model
from support.families import FAMILIES
from support.live_engine import engine_rank, live_weights
from support.updates_worker import write_steps
from torch import nn

import relayout
from relayout.core.digests import blake3_hex
from relayout.core.workers import Stop, Stopped, heeding
from relayout.engines.global_tensor import GlobalTensor
from relayout.engines.load import EngineRank
from relayout.engines.rank_weights import EngineOptions
from relayout.errors import FormatError, PlanError
from relayout.live.staging import Content, Flips, LiveWeights, Modules, StagedUpdate

TP = 2
LIMIT = 2**30
PACKED = "o_proj.weight"
FUSED = ("q_proj", "k_proj", "v_proj")
Tensors = dict[str, torch.Tensor]


class Layer(nn.Module):
    """A weight, and what the engine does with it when it is loaded."""

    def __init__(self, shape: tuple[int, ...], is_packed: bool, device: str) -> None:
        super().__init__()
        self.is_packed = is_packed
        self.as_loaded = shape
        self.device = device
        self.restore()

    def restore(self) -> None:
        memory = torch.empty(self.as_loaded, dtype=torch.bfloat16, device=self.device)
        self.weight = nn.Parameter(memory, requires_grad=False)

    def process(self) -> None:
        if self.is_packed:
            self.weight = nn.Parameter(self.weight.data.t().contiguous(), requires_grad=False)

    def unpacked(self) -> torch.Tensor:
        return self.weight.data.t() if self.is_packed else self.weight.data


class Engine(nn.Module):
    """One rank of an engine: it cuts whole tensors, fuses q, k and v, and packs some layers after the load."""

    def __init__(self, whole: Tensors, rank: int, device: str) -> None:
        super().__init__()
        self.cut = Model(whole, rank, TP).cut
        rows: dict[str, int] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        self.starts: dict[str, int] = {}
        for name in sorted(whole):
            cut, layer = self.cut(name, whole[name]), self.layer_of(name)
            self.starts[name] = rows.get(layer, 0)
            rows[layer] = self.starts[name] + cut.shape[0]
            shapes[layer] = (rows[layer], *cut.shape[1:])
        for layer, shape in shapes.items():
            self.add_module(layer, Layer(shape, PACKED.replace(".", "_") in layer, device))

    def layer_of(self, name: str) -> str:
        for part in FUSED:
            name = name.replace(part, "qkv_proj")
        return name.replace(".", "_")

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            part, layer = self.cut(name, tensor), self.layers()[self.layer_of(name)]
            layer.weight.data[self.starts[name] :][: part.shape[0]].copy_(part)

    def process(self) -> None:
        for layer in self.children():
            layer.process()

    def wrap(self) -> None:
        """As for LoRA: each layer is behind another module in its place."""
        for name, layer in self.named_children():
            self._modules[name] = torch.nn.ModuleDict({"base_layer": layer})

    def layers(self) -> dict[str, Layer]:
        """By their names before they were wrapped."""
        found = self.named_children()
        return {name: one["base_layer"] if isinstance(one, torch.nn.ModuleDict) else one for name, one in found}

    def reload(self, modules: Modules, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """As vLLM does: into new memory, from which what was made of it is copied to where parameters are."""
        layers = {name: layer for name, layer in self.layers().items() if modules is None or layer in modules}
        kept = {name: layer.weight for name, layer in layers.items()}
        for layer in layers.values():
            layer.restore()
        self.load_weights(tensors)
        for name, layer in layers.items():
            layer.process()
            kept[name].data.copy_(layer.weight)
            layer.weight = kept[name]

    def has(self, whole: Tensors) -> bool:
        return all(
            torch.equal(
                self.layers()[self.layer_of(name)]
                .unpacked()[self.starts[name] :][: self.cut(name, one).shape[0]]
                .cpu(),
                self.cut(name, one),
            )
            for name, one in whole.items()
        )


@pytest.fixture(scope="module")
def steps(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("staging")
    write_steps(llama, root, num_steps=3)
    (root / "model-other").mkdir()
    write_family(FAMILIES["qwen3"], root / "model-other")
    relayout.convert(root / "model-other", root / "other", tp=TP)
    return root


def started(
    folder: Path, rank: int, source: Path, device: str = "cpu", of_engine: EngineRank | None = None
) -> tuple[Engine, LiveWeights]:
    engine = Engine(reference_tensors(source), rank, device)

    def load(tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        engine.load_weights(tensors)
        engine.process()

    return engine, live_weights(engine, of_engine or engine_rank(rank, TP, device), folder, load)


NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: this has not run on a GPU")


@pytest.fixture(params=[(0, "cpu"), (1, "cpu"), pytest.param((1, "cuda:0"), marks=NO_CUDA)], ids=str)
def live(steps: Path, request: pytest.FixtureRequest) -> tuple[Engine, LiveWeights]:
    rank, device = request.param
    return started(steps / "step-0", rank, steps / "model-0", device)


def content_of(folder: Path) -> str:
    return blake3_hex((folder / "relayout.json").read_bytes())


def stage(live: LiveWeights, *sources: Path, memory: int = LIMIT) -> StagedUpdate:
    return live.stage([str(source) for source in sources], live.content, memory)


def test_what_is_left_as_it_is_has_views_and_what_is_packed_has_none(live: tuple[Engine, LiveWeights]) -> None:
    recorded = live[1].recorded
    assert recorded.views
    assert {name for name in (*recorded.views, *recorded.reloaded) if PACKED in name} == set(recorded.reloaded)


def placing() -> EngineRank:
    """The first rank of an engine that takes MLPs whole, and uses what it wants of them."""
    return replace(engine_rank(0, TP, "cpu"), owns_experts=True, is_placed=lambda name: ".mlp." in name)


def test_what_was_read_ahead_of_other_ranks_is_refused(steps: Path, live: tuple[Engine, LiveWeights]) -> None:
    """This rank's table does not tell how it changes."""
    weights = live[1]
    placed = Content.of(placing().weights(str(steps / "step-0"), EngineOptions()))
    lacking = {*weights.first.columns.names} - {*placed.columns.names}
    assert lacking == {
        name for name in weights.first.columns.names if ".mlp." in name and not name.endswith("down_proj.bias")
    }, "of which the rank has a part"
    weights.first = placed
    with pytest.raises(PlanError, match=r"stub uses parts of model\.layers\..*mlp.* that its rank does not hold"):
        stage(weights, steps / "step-1")


@pytest.mark.parametrize("source", ["step-1", "delta-1"])
def test_what_was_read_when_it_was_used_is_loaded_again(steps: Path, source: str) -> None:
    engine, weights = started(steps / "step-0", 0, steps / "model-0", of_engine=placing())
    staged = stage(weights, steps / source)
    assert engine.has(reference_tensors(steps / "model-0"))
    weights.commit(staged, engine.reload)
    assert engine.has(reference_tensors(steps / "model-1"))


@pytest.mark.parametrize("memory", [LIMIT, 4000, 0], ids=["all is held", "some fits", "nothing is held"])
@pytest.mark.parametrize("sources", [[1], [1, 2, 3], [2, 3]], ids=str)
def test_parameters_are_those_of_the_new_source_after_the_commit_and_not_before(
    steps: Path, live: tuple[Engine, LiveWeights], sources: list[int], memory: int
) -> None:
    engine, weights = live
    if sources[0] == 2:
        weights.commit(stage(weights, steps / "delta-1"), engine.reload)
    before, last = reference_tensors(steps / f"model-{sources[0] - 1}"), sources[-1]
    staged = stage(weights, *(steps / f"delta-{number}" for number in sources), memory=memory)
    assert staged.nbytes <= memory
    assert (staged.left_nbytes > 0) is (memory < LIMIT)
    assert engine.has(before)
    weights.check(engine)
    weights.commit(staged, engine.reload)
    assert engine.has(reference_tensors(steps / f"model-{last}"))
    assert weights.content is not None
    assert weights.content.digest == content_of(steps / f"step-{last}")
    found = weights.attest()
    assert (found.content, found.difference) == (weights.content.digest, None)
    assert found.verified == len(weights.recorded.views)
    assert set(found.unverified) == set(weights.recorded.reloaded)


@pytest.mark.parametrize("memory", [LIMIT, 0], ids=["held", "not held"])
def test_another_folder_goes_where_the_first_one_went(
    steps: Path, live: tuple[Engine, LiveWeights], memory: int
) -> None:
    engine, weights = live
    weights.commit(stage(weights, steps / "step-2", memory=memory), engine.reload)
    assert engine.has(reference_tensors(steps / "model-2"))
    weights.commit(stage(weights, steps / "delta-3", memory=memory), engine.reload)
    assert engine.has(reference_tensors(steps / "model-3"))
    weights.commit(stage(weights, steps / "step-0", steps / "delta-1", memory=memory), engine.reload)
    assert engine.has(reference_tensors(steps / "model-1"))
    assert weights.attest().difference is None


FIRST_DEVICE, DEVICE = torch.device("cuda:0"), torch.device("cuda:5")
"""That of a thread which has chosen none, and the engine's."""


class Runtime:
    """What the CUDA runtime is asked to pin, and to let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_pinned: int) -> None:
        self.pinned: dict[int, int] = {}
        self.devices: list[torch.device] = []
        """That of each call's thread."""
        self._left = num_pinned
        self._current = threading.local()
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "device", self._chosen)

    @contextmanager
    def _chosen(self, device: torch.device) -> Iterator[None]:
        before = getattr(self._current, "device", FIRST_DEVICE)
        self._current.device = device
        yield
        self._current.device = before

    def _note(self) -> None:
        self.devices.append(getattr(self._current, "device", FIRST_DEVICE))

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self._note()
        self.thread = threading.current_thread()
        if self._left == 0 or address in self.pinned:
            return 2 if self._left == 0 else 712  # Out of memory; registered already.
        self._left -= 1
        self.pinned[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self._note()
        del self.pinned[address]
        return 0


@pytest.mark.parametrize("limit", [100, 0])
@pytest.mark.parametrize("source", ["delta-1", "step-1"])
def test_what_is_staged_for_a_device_is_pinned_until_it_is_gone(
    steps: Path, monkeypatch: pytest.MonkeyPatch, source: str, limit: int
) -> None:
    engine, weights = started(steps / "step-0", 0, steps / "model-0")
    runtime = Runtime(monkeypatch, limit)
    staged = stage(weights, steps / source)
    assert not runtime.pinned, "a CPU copies from any memory"
    assert staged.pin(DEVICE) is (limit == 100)
    assert runtime.thread is not threading.current_thread(), "an error of CUDA stays with the thread"
    if limit:
        assert staged.nbytes <= sum(runtime.pinned.values()) < staged.nbytes * 1.01
        assert {one.bits.ctypes.data for one in staged.flips} <= runtime.pinned.keys()
    weights.commit(staged, engine.reload)
    assert engine.has(reference_tensors(steps / "model-1"))
    assert bool(runtime.pinned) is bool(limit)
    del staged
    gc.collect()
    assert not runtime.pinned
    assert set(runtime.devices) == {DEVICE}


@NO_CUDA
@pytest.mark.parametrize("source", ["delta-1", "step-1"])
def test_a_device_copies_from_what_cuda_says_is_pinned(steps: Path, source: str) -> None:
    engine, weights = started(steps / "step-0", 0, steps / "model-0", "cuda:0")
    staged = stage(weights, steps / source)
    held = [torch.from_numpy(array) for one in staged.flips for array in (one.indices, one.bits)]
    held += [local(tensor) for _, tensor in staged.held or ()]
    assert held
    assert all(tensor.is_pinned() for tensor in held if tensor.nbytes)
    weights.commit(staged, engine.reload)
    del staged
    gc.collect()
    assert not any(tensor.is_pinned() for tensor in held if tensor.nbytes)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._memory.local if isinstance(tensor, GlobalTensor) else tensor


def test_deltas_that_are_staged_one_after_the_other_are_committed_in_this_order(
    steps: Path, live: tuple[Engine, LiveWeights]
) -> None:
    engine, weights = live
    first = stage(weights, steps / "delta-1")
    second = weights.stage([str(steps / "delta-2")], first.content, LIMIT)
    for staged in (first, second):
        weights.commit(staged, engine.reload)
    assert engine.has(reference_tensors(steps / "model-2"))


@pytest.mark.parametrize("source", ["delta-1", "step-1"])
def test_layers_that_were_wrapped_since_the_load_are_loaded_again(steps: Path, source: str) -> None:
    engine, weights = started(steps / "step-0", 0, steps / "model-0")
    engine.wrap()
    staged = stage(weights, steps / source)
    rehearsed: list[str] = []
    weights.rehearse(staged, engine, lambda modules, tensors: rehearsed.extend(name for name, _ in tensors))
    assert set(rehearsed) == weights.recorded.slices_of(staged.modules)
    weights.commit(staged, engine.reload)
    assert engine.has(reference_tensors(steps / "model-1"))


@pytest.mark.parametrize(("is_gone", "reason"), [(False, "has replaced a module"), (True, "has removed a module")])
def test_a_layer_that_is_not_there_any_more_is_noticed_before_the_commit(
    steps: Path, is_gone: bool, reason: str
) -> None:
    engine, weights = started(steps / "step-0", 0, steps / "model-0")
    staged = stage(weights, steps / "delta-1")
    name = min(staged.modules or ())
    before = getattr(engine, name)
    engine.add_module(name, Layer(before.weight.shape, False, "cpu"))
    if is_gone:
        del before
        gc.collect()
    with pytest.raises(PlanError, match=reason):
        weights.rehearse(staged, engine, engine.reload)


@pytest.mark.parametrize("memory", [LIMIT, 0])
def test_a_rehearsal_sees_the_tensors_that_are_loaded_again_in_their_order_and_forms(steps: Path, memory: int) -> None:
    """Only those that are held have their values."""
    engine, weights = started(steps / "step-0", 0, steps / "model-0")
    staged = stage(weights, steps / "step-1", memory=memory)
    forms: list[list[tuple[object, ...]]] = []
    values: list[list[torch.Tensor]] = []

    def note(tensors: list[tuple[str, torch.Tensor]]) -> None:
        forms.append([(name, one.dtype, one.shape, type(one), local(one).shape) for name, one in tensors])
        values.append([local(one).clone() for _, one in tensors])

    def reload(modules: Modules, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        note(given := list(tensors))
        engine.reload(modules, iter(given))

    weights.rehearse(staged, engine, lambda _, tensors: note(list(tensors)))
    assert engine.has(reference_tensors(steps / "model-0"))
    weights.commit(staged, reload)
    rehearsed, loaded = forms
    assert rehearsed == loaded != []
    assert all(map(torch.equal, *values)) == (memory == LIMIT)


@pytest.mark.parametrize("source", ["delta-1", "step-1"])
def test_a_thread_that_stages_can_be_stopped(steps: Path, live: tuple[Engine, LiveWeights], source: str) -> None:
    stop = Stop()
    stop.request()
    with heeding(stop), pytest.raises(Stopped):
        stage(live[1], steps / source)
    assert stage(live[1], steps / source).nbytes


def test_layers_of_which_nothing_changes_are_not_loaded_again(steps: Path, tmp_path: Path) -> None:
    """And nothing is read whole for them."""
    engine, weights = started(steps / "step-0", 0, steps / "model-0")
    tensors = reference_tensors(steps / "model-0")
    name = next(name for name in sorted(weights.recorded.reloaded))
    write_changed(steps / "model-0", tmp_path / "model", {name: tensors[name] * 2})
    relayout.convert(tmp_path / "model", tmp_path / "step", tp=TP)
    relayout.delta(steps / "step-0", tmp_path / "step", tmp_path / "delta")
    staged = stage(weights, tmp_path / "delta")
    assert staged.modules == {engine.layer_of(name)}
    assert [one for one, _ in staged.held or ()] == [name]
    assert not staged.flips
    weights.commit(staged, engine.reload)
    assert engine.has(tensors | {name: tensors[name] * 2})


def write_changed(source: Path, target: Path, changed: Tensors) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    for file in target.glob("*.safetensors"):
        tensors = load_file(file)
        save_file({name: changed.get(name, one).contiguous() for name, one in tensors.items()}, file)


def test_one_bit_that_is_wrong_is_found(steps: Path, live: tuple[Engine, LiveWeights]) -> None:
    engine, weights = live
    name = "model.layers.1.self_attn.v_proj.weight"
    layer = getattr(engine, engine.layer_of(name))
    row = layer.weight.data[engine.starts[name]].view(torch.int16)
    row[3] ^= 1
    assert weights.attest().difference == name
    row[3] ^= 1
    assert weights.attest().difference is None


@pytest.mark.parametrize(
    ("source", "kind", "reason"),
    [
        ("delta-2", PlanError, "applies to content .* not to what the engine has"),
        ("damaged-delta", FormatError, "does not match its digest: damaged"),
        ("damaged-folder", FormatError, "do not match digest"),
        ("other", PlanError, "tensors have another dtype, shape or slice than those of the engine"),
        ("model-1", PlanError, "was not converted"),
        ("nowhere", PlanError, "is not a folder"),
    ],
)
@pytest.mark.parametrize("memory", [LIMIT, 0], ids=["held", "not held"])
def test_what_is_wrong_is_found_before_anything_changes(
    steps: Path, source: str, kind: type[Exception], reason: str, memory: int
) -> None:
    _, weights = started(steps / "step-0", 1, steps / "model-0")  # The damage is in rank 1.
    with pytest.raises(kind, match=reason):
        stage(weights, steps / source, memory=memory)


def test_a_parameter_that_was_moved_is_not_written_to(steps: Path, live: tuple[Engine, LiveWeights]) -> None:
    engine, weights = live
    weights.check(engine)
    name = sorted(weights.recorded.views)[0]
    layer = getattr(engine, engine.layer_of(name))
    layer.weight = nn.Parameter(layer.weight.data.clone(), requires_grad=False)
    with pytest.raises(PlanError, match="the engine has moved the parameter"):
        weights.check(engine)


def test_weights_that_others_have_loaded_take_a_folder_and_no_delta(
    steps: Path, live: tuple[Engine, LiveWeights]
) -> None:
    engine, weights = live
    weights.content = None
    with pytest.raises(PlanError, match="were loaded again by others"):
        stage(weights, steps / "delta-1")
    weights.commit(stage(weights, steps / "step-1"), engine.reload)
    assert engine.has(reference_tensors(steps / "model-1"))


@pytest.mark.parametrize("meanwhile", ["step-2", "unknown"])
@pytest.mark.parametrize("source", ["delta-1", "step-1"])
def test_what_was_staged_is_not_committed_to_an_engine_that_was_loaded_again_since(
    steps: Path, live: tuple[Engine, LiveWeights], source: str, meanwhile: str
) -> None:
    engine, weights = live
    staged = [stage(weights, steps / source)]
    staged.append(weights.stage([str(steps / "delta-2")], staged[0].content, LIMIT))
    weights.check_base(staged)
    if meanwhile == "unknown":
        weights.content = None
    else:
        weights.commit(stage(weights, steps / meanwhile), engine.reload)
    with pytest.raises(PlanError, match=r"which has (unknown content|[0-9a-f]+) now: stage it again"):
        weights.check_base(staged)
    weights.content = None
    weights.check_base([weights.stage([str(steps / "step-1")], None, LIMIT)])


def test_after_a_commit_that_has_failed_nothing_is_known(steps: Path, live: tuple[Engine, LiveWeights]) -> None:
    engine, weights = live

    def fail(*_: object) -> None:
        raise OSError("the store is gone")

    with pytest.raises(OSError, match="the store is gone"):
        weights.commit(stage(weights, steps / "delta-1"), fail)
    assert weights.content is None
    with pytest.raises(PlanError, match="loaded again by others, or in part"):
        weights.attest()
    assert replace(weights.first) == weights.first
    assert engine


def test_what_the_engine_cannot_load_again_is_refused_while_it_serves(
    steps: Path, live: tuple[Engine, LiveWeights]
) -> None:
    engine, weights = live
    name = min(weights.recorded.reloaded)
    weights.recorded = replace(weights.recorded, fixed=frozenset({engine.layer_of(name)}))
    for source in ("delta-1", "step-1"):
        with pytest.raises(PlanError, match=f"own reload passes over {engine.layer_of(name)}"):
            stage(weights, steps / source)


def test_a_root_of_steps_leads_to_its_newest_step_or_to_one_that_is_named(
    steps: Path, tmp_path: Path, live: tuple[Engine, LiveWeights]
) -> None:
    engine, weights = live
    publisher = relayout.Publisher(tmp_path / "root", tp=TP, config=steps / "model-0", full_every=3)
    for number in range(4):
        publisher.publish(reference_tensors(steps / f"model-{number}"), step=number)
    root = str(tmp_path / "root")
    for step, expected in ((None, 3), (1, 1), (2, 2), (2, 2), (None, 3)):
        weights.commit(weights.stage([root], weights.content, LIMIT, step=step), engine.reload)
        assert engine.has(reference_tensors(steps / f"model-{expected}"))
        assert weights.attest().difference is None
    with pytest.raises(PlanError, match="has no step 9"):
        weights.stage([root], weights.content, LIMIT, step=9)


def test_engines_that_take_each_step_or_few_of_them_or_begin_late_have_what_the_trainer_has(
    steps: Path, tmp_path: Path
) -> None:
    """A thousand steps of vLLM's own classes: `tools/run engines --step updates --only many`."""
    root, trained = tmp_path / "root", reference_tensors(steps / "model-0")
    options: dict[str, Any] = {"keep": 3, "keep_seconds": 0, "grace_seconds": 0, "full_every": 4}
    publisher = relayout.Publisher(root, tp=TP, config=steps / "model-0", **options)
    publisher.publish(trained, 0)
    engines: dict[int, tuple[Engine, LiveWeights]] = {}
    num_files = []

    def begin(every: int) -> None:
        chain = relayout.Steps(root).chain()
        assert chain is not None
        assert chain.full is not None
        engines[every] = started(root / chain.full, 1, steps / "model-0")

    begin(1)
    begin(2)
    begin(6)  # The steps that it has are gone when it comes back.
    for number in range(1, 13):
        if number == 7:
            begin(3)
        for tensor in trained.values():
            tensor.view(-1).view(torch.int16)[number :: 50 + number] ^= 1
        publisher.publish(trained, 2 * number)
        num_files.append(sum(path.is_file() for path in root.rglob("*")))
        for every, (engine, weights) in engines.items():
            if number % every == 0:
                weights.commit(weights.stage([str(root)], weights.content, LIMIT), engine.reload)
                assert engine.has(trained)
                assert weights.attest().difference is None
    assert max(num_files[6:]) <= max(num_files[:6])


def test_many_elements_are_changed_in_shares_and_each_once() -> None:
    random = np.random.default_rng(0)
    memory = random.integers(0, 2**16, 3_000_000, np.uint16)
    indices = np.sort(random.choice(memory.size, 600_001, replace=False)).astype(np.int32)
    flips = Flips(0, indices, random.integers(1, 2**16, indices.size, np.uint16))
    expected = memory.copy()
    expected[indices] ^= flips.bits
    shares = list(flips.shares())
    assert len(shares) > 2
    for share in shares:
        share.apply(torch.from_numpy(memory.view(np.int16)))
    assert np.array_equal(memory, expected)
