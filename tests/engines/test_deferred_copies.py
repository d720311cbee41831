"""Slices are read straight into memory of the engine, and the engine finds there what it would have copied itself."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bits import flip
from support.fake_vllm import Model
from support.profile import IS_LONG, sample

from relayout.engines import rank_weights
from relayout.engines.rank_weights import EngineOptions, RankWeights
from relayout.errors import FormatError

Tensors = dict[str, torch.Tensor]
Step = Callable[[torch.Tensor, torch.Tensor], None]
"""What an engine does with a parameter, and with what it has cut for it out of a tensor."""


def scaled(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    parameter.copy_(loaded)
    parameter.copy_(parameter * 2)


def checked(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    parameter.copy_(loaded)
    parameter.add_(parameter.flatten()[0].item())


def cleared(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    parameter.copy_(loaded)
    parameter[0].zero_()


def copied_in_rows(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    for row in range(len(loaded)):
        parameter.data[row] = loaded[row]


def copied_in_columns(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    size = -(-parameter.shape[-1] // 7)
    for to, of in zip(parameter.split(size, -1), loaded.split(size, -1), strict=True):
        to.copy_(of)


def copied_by_half(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    parameter.zero_()
    half = len(loaded) // 2
    parameter[half:].copy_(loaded[half:])


def copied_first_half(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    half = len(loaded) // 2
    parameter[:half].copy_(loaded[:half])


def copied_twice(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    parameter.copy_(loaded)
    parameter.copy_(loaded.flip(0))
    parameter[1:].copy_(loaded[1:])


def copied_by_another_thread(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    thread = threading.Thread(target=parameter.copy_, args=(loaded,))
    thread.start()
    thread.join()


def used_by_another_thread(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    seen = []

    def copy_and_look() -> None:
        parameter.copy_(loaded)
        seen.append(parameter.clone())

    thread = threading.Thread(target=copy_and_look)
    thread.start()
    thread.join()
    parameter.copy_(seen[0].flip(0))


def copied_by_way_of_other_memory(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    other = torch.empty_like(loaded)
    other.copy_(loaded)
    parameter.copy_(other)


def zeroed_before(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    parameter.copy_(loaded)
    loaded.zero_()
    parameter[:1].copy_(loaded[:1])


NAMED: tuple[Step, ...] = (
    *(scaled, checked, cleared, copied_in_rows, copied_in_columns, copied_by_half, copied_first_half, copied_twice),
    *(copied_by_another_thread, used_by_another_thread, copied_by_way_of_other_memory, zeroed_before),
)
STEPS: dict[str, Step] = {
    **{step.__name__.replace("_", " "): step for step in NAMED},
    "copied": lambda parameter, loaded: parameter.copy_(loaded),
    "copied as it lies": lambda parameter, loaded: parameter.t().copy_(loaded.t()),
    "copied as bits": lambda parameter, loaded: parameter.view(torch.int16).copy_(loaded.view(torch.int16)),
    "rearranged": lambda parameter, loaded: parameter.copy_(loaded.flip(0)),
    "converted": lambda parameter, loaded: parameter.copy_(loaded.float() + 1),
    "copied as another type": lambda parameter, loaded: parameter.view(torch.int16).copy_(loaded),
    "added": lambda parameter, loaded: parameter.add_(loaded),
    "indexed": lambda parameter, loaded: parameter.index_copy_(0, torch.arange(len(loaded)), loaded),
    "not used": lambda parameter, loaded: None,
}
STRAIGHT = ("copied", "copied as it lies", "copied as bits", "copied in rows")
"""Steps of which nothing remains but to read the slice."""


class Engine(Model):
    """Keeps a rank's part of each tensor, and does with it what it is told to by the tensor's name."""

    def __init__(self, whole: Tensors, rank: int, tp: int, steps: dict[str, Step]) -> None:
        super().__init__(whole, rank, tp)
        self.steps = steps
        self.order: list[str] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        for name, loaded in weights:
            self.order.append(name)
            parameter = self.memory[name]
            cut = self.cut(name, loaded)
            is_row = cut.ndim == 1
            self.steps[name](parameter[:, None] if is_row else parameter, cut[:, None] if is_row else cut)
        return set(self.order)


def load(folder: Path, engine: Engine, **options: bool) -> RankWeights:
    given = EngineOptions(strict=True, placement="direct", **options)
    weights = RankWeights(str(folder), engine.rank, engine.tp, given)
    with weights.placing(list(engine.parameters())):
        engine.load_weights(weights)
    return weights


def assert_holds_what_it_would_from(whole: Tensors, engine: Engine) -> None:
    """What it would hold had it been given plain whole tensors, in the same order."""
    plain = Engine(whole, engine.rank, engine.tp, engine.steps)
    plain.load_weights((name, whole[name].clone()) for name in engine.order)
    for name, memory in engine.memory.items():
        assert torch.equal(memory.view(torch.int16), plain.memory[name].view(torch.int16)), name


@pytest.mark.parametrize(
    ("name", "tp"),
    sample(
        [(name, tp) for name in STEPS for tp in (2, 4)],
        # At 4 ranks, keys and values are replicated.
        [*((name, 2) for name in STEPS), *((name, 4) for name in ("copied", "copied in columns", "scaled"))],
    ),
)
def test_whatever_the_engine_does_it_finds_what_it_has_copied(
    folders: Path, name: str, tp: int, whole: Tensors
) -> None:
    for rank in (0, tp - 1):
        engine = Engine(whole, rank, tp, dict.fromkeys(whole, STEPS[name]))
        report = load(folders / f"llama-tp{tp}", engine).report()
        assert sorted(engine.order) == sorted(whole)
        assert_holds_what_it_would_from(whole, engine)
        assert report.num_whole == 0
        if name in STRAIGHT:
            assert report.placed_nbytes == report.nbytes


@settings(max_examples=100 if IS_LONG else 10)  # Of some 20 steps each.
@given(data=st.data())
def test_what_the_engine_does_may_differ_from_tensor_to_tensor(
    folders: Path, data: st.DataObject, whole: Tensors
) -> None:
    steps = {name: STEPS[data.draw(st.sampled_from(sorted(STEPS)))] for name in sorted(whole)}
    engine = Engine(whole, data.draw(st.integers(0, 1)), 2, steps)
    load(folders / "llama-tp2", engine)
    assert_holds_what_it_would_from(whole, engine)


def test_an_engine_may_collect_all_tensors_before_it_copies(folders: Path, whole: Tensors) -> None:
    class Collecting(Engine):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
            return super().load_weights(sorted(weights, key=lambda one: one[0]))

    engine = Collecting(whole, 1, 2, dict.fromkeys(whole, STEPS["copied"]))
    load(folders / "llama-tp2", engine)
    assert_holds_what_it_would_from(whole, engine)


def test_of_two_tensors_for_one_parameter_the_last_stays(folders: Path, whole: Tensors) -> None:
    class Tied(Engine):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
            self.memory["lm_head.weight"] = self.memory["model.embed_tokens.weight"]
            return super().load_weights(weights)

    engine = Tied(whole, 0, 2, dict.fromkeys(whole, STEPS["copied"]))
    report = load(folders / "llama-tp2", engine).report()
    last = max(("lm_head.weight", "model.embed_tokens.weight"), key=engine.order.index)
    assert torch.equal(engine.memory[last], engine.cut(last, whole[last]))
    assert report.placed_nbytes == report.nbytes - engine.memory[last].nbytes, "the other one is not read"


def test_of_two_tensors_for_parts_of_the_same_memory_the_last_stays(folders: Path, whole: Tensors) -> None:
    names = [name for name in whole if name.endswith(("gate_proj.weight", "up_proj.weight"))]
    sizes = {name: 2 * whole[name].shape[0] // 2 for name in names}
    engine = Engine(whole, 0, 1, dict.fromkeys(whole, STEPS["copied"]))
    plain = Engine(whole, 0, 1, engine.steps)
    for one in (engine, plain):
        for layer in range(2):
            gate, up = (f"model.layers.{layer}.mlp.{part}_proj.weight" for part in ("gate", "up"))
            shared = torch.zeros(sizes[gate] + 8, whole[gate].shape[1], dtype=whole[gate].dtype)
            one.memory |= {gate: shared[8:], up: shared[:-8]}
    given = dict(RankWeights(str(folders / "llama-tp1"), 0, 1, EngineOptions()))
    load(folders / "llama-tp1", engine)
    assert engine.order == list(given), "the order is that of the files"
    plain.load_weights(given.items())
    for name, memory in engine.memory.items():
        assert torch.equal(memory, plain.memory[name]), name


def test_pieces_that_lie_apart_in_one_parameter_are_not_read_as_one(folders: Path, whole: Tensors) -> None:
    class Apart(Engine):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
            for name, loaded in weights:
                half = len(loaded) // 2
                self.memory[name][:half].copy_(loaded[:half])
                self.memory[name][-(len(loaded) - half) :].copy_(loaded[half:])
            return set(self.memory)

    engine = Apart(whole, 0, 1, {})
    engine.memory = {name: one.new_full((4 * len(one), *one.shape[1:]), -7) for name, one in whole.items()}
    load(folders / "llama-tp1", engine)
    for name, one in whole.items():
        half, memory = len(one) // 2, engine.memory[name]
        between = torch.full_like(memory[half : half - len(one)], -7)
        assert torch.equal(memory, torch.cat([one[:half], between, one[half:]])), name


def test_memory_that_is_no_parameter_gets_a_copy(folders: Path, whole: Tensors) -> None:
    engine = Engine(whole, 0, 2, dict.fromkeys(whole, STEPS["copied"]))
    weights = RankWeights(str(folders / "llama-tp2"), 0, 2, EngineOptions(placement="direct"))
    with weights.placing([]):
        engine.load_weights(weights)
    assert weights.report().placed_nbytes == 0
    assert_holds_what_it_would_from(whole, engine)


def test_digests_are_compared_of_what_is_read_straight(folders: Path, tmp_path: Path, whole: Tensors) -> None:
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in (folders / "llama-tp2").iterdir():
        blob = bytearray(file.read_bytes())
        if file.name == "model-rank-0-part-0.safetensors":
            blob[-1000] ^= 1
        (folder / file.name).write_bytes(blob)
    engine = Engine(whole, 0, 2, dict.fromkeys(whole, STEPS["copied"]))
    with pytest.raises(FormatError, match=r"its bytes have digest .*: damaged"):
        load(folder, engine, verify=True)


def test_an_error_that_the_engine_passes_over_comes_again(folders: Path, tmp_path: Path, whole: Tensors) -> None:
    def used(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
        parameter.copy_(loaded)
        with suppress(FormatError):
            parameter.sum()

    folder = Path(shutil.copytree(folders / "llama-tp2", tmp_path / "copy"))
    file = folder / "model-rank-0-part-0.safetensors"
    flip(file, 8 + int.from_bytes(file.read_bytes()[:8], "little"))  # Of the first tensor, so that it gets a probe.
    engine = Engine(whole, 0, 2, dict.fromkeys(whole, used))
    with pytest.raises(FormatError, match=r"its bytes have digest .*: damaged"):
        load(folder, engine, verify=True)


def test_a_load_that_fails_leaves_nothing_watched(folders: Path, whole: Tensors) -> None:
    class Failing(Engine):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
            def some() -> Iterator[tuple[str, torch.Tensor]]:
                yield from weights
                raise ValueError("refused")

            return super().load_weights(some())

    with pytest.raises(ValueError, match="refused"):
        load(folders / "llama-tp2", Failing(whole, 0, 2, dict.fromkeys(whole, STEPS["copied"])))
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_slices_are_placed_where_they_are_large_enough_to_pay(
    folders: Path, monkeypatch: pytest.MonkeyPatch, whole: Tensors
) -> None:
    mean = sum(one.nbytes for one in whole.values()) // len(whole)
    for least, placement, is_placed in [
        (mean, "auto", True), (mean + 1, "auto", False), (mean, "copy", False), (mean + 1, "direct", True)
    ]:  # fmt: skip
        monkeypatch.setattr(rank_weights, "MIN_PLACED_NBYTES", least)
        engine = Engine(whole, 0, 1, dict.fromkeys(whole, STEPS["copied"]))
        weights = RankWeights(str(folders / "llama-tp1"), 0, 1, EngineOptions(placement=placement))
        with weights.placing(list(engine.parameters())):
            engine.load_weights(weights)
        assert weights.report().placed_nbytes == (weights.report().nbytes if is_placed else 0)
