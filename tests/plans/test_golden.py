"""relayout.plans.planner against tables of real checkpoints made by hand from the engines' rules: golden/README.md."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.hub_models import MODELS, tensor_nbytes
from support.planning import all_slices

from relayout.checkpoint.source import SourceCheckpoint, SourceFile, SourceTensor, model_order
from relayout.core.extents import Extent
from relayout.core.slices import Slice
from relayout.plans.planner import plan_for

Table = Mapping[str, Any]
Ranges = tuple[tuple[int, int], ...]

FOLDER = Path(__file__).parent / "golden"
PLANS = {
    "bloom-176b": ["tp8"],
    "deepseek-v3": ["tp8", "experts8"],
    "falcon-40b": ["tp8", "tp16"],
    "gpt-oss-120b": ["tp8", "tp16", "experts8"],
    "gpt2": ["tp4"],
    "llama-3.1-70b": ["tp8", "tp16"],
    "mixtral-8x7b": ["tp8", "experts8"],
    "qwen1.5-moe-a2.7b": ["experts8"],
    "qwen2.5-72b": ["tp8", "tp16"],
    "qwen3-235b-a22b": ["tp8", "tp16"],
}
CASES = [pytest.param((model, name), id=f"{model}-{name}") for model, names in PLANS.items() for name in names]
WHOLE, WHOLE_EXPERT, NOTHING = "whole", "whole expert", "nothing"


class Case(NamedTuple):
    """One plan of one model."""

    name: str
    golden: Table
    source: SourceCheckpoint
    slices: list[tuple[Slice, ...]]


@lru_cache
def table_of(name: str) -> Table:
    """A golden table: the file, with what a plan takes from another one filled in."""
    table = tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    for plan in table["plans"].values():
        if "like" in plan:
            other = table["plans"][plan["like"]]
            plan["slices"] = {**other["slices"], **plan["slices"]}
            plan["cuts"] = {**other["cuts"], **plan.get("cuts", {})}
            used = {entry["cut"] for entry in plan["slices"].values() if isinstance(entry, dict)}
            plan["cuts"] = {
                cut: ranges for cut, ranges in plan["cuts"].items() if cut in used or cut not in other["cuts"]
            }
    return table


@lru_cache
def tensors_of(name: str) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    """Data type and shape of every tensor of a table's model."""
    return {tensor: (dtype, shape) for tensor, dtype, shape in MODELS[table_of(name)["model"]].tensors()}


@lru_cache(maxsize=100)
def names_of(pattern: str) -> list[tuple[str, int]]:
    """Every tensor name of a pattern, with its last number (the expert's, where there are experts)."""
    parts = re.split(r"\[(\d+)-(\d+)\]", pattern)
    numbers = [range(int(low), int(high) + 1) for low, high in zip(parts[1::3], parts[2::3], strict=True)]
    found = []
    for chosen in product(*numbers):
        texts = [parts[0], *(f"{number}{text}" for number, text in zip(chosen, parts[3::3], strict=True))]
        found.append(("".join(texts), chosen[-1] if chosen else -1))
    return found


def ranges_of(cut: str) -> Ranges:
    """The ranges of one rank, as written in a table."""
    if cut == NOTHING:
        return ()
    ranges: list[tuple[int, int]] = []
    for part in cut.split(", "):
        match = re.fullmatch(r"(\d+)\+(\d+)(?: x(\d+) every (\d+))?", part)
        assert match is not None, part
        start, length, times, every = (int(group or 0) for group in match.groups())
        ranges += [(start + i * every, length) for i in range(times or 1)]
    return tuple(ranges)


def owner_of(expert: int, plan: Table) -> int:
    """The rank that owns an expert."""
    (owner,) = [
        rank
        for rank, owned in enumerate(plan["experts_of_rank"])
        if int(owned.split("-")[0]) <= expert <= int(owned.split("-")[1])
    ]
    return owner


def expected(
    plan: Table, entry: Any, shape: tuple[int, ...], expert: int, rank: int
) -> tuple[int | None, Ranges | None, tuple[int, ...] | None]:
    """Axis, ranges and shape of a rank's slice by the table: all None for a tensor that the rank does not hold."""
    if entry == WHOLE or (entry == WHOLE_EXPERT and owner_of(expert, plan) == rank):
        return None, None, shape
    if entry == WHOLE_EXPERT:
        return None, (), None
    return (
        entry["axis"],
        ranges_of(plan["cuts"][entry["cut"]][rank]),
        tuple(entry.get("but", {}).get(str(rank), entry["shape"])),
    )


def actual(part: Slice, shape: tuple[int, ...]) -> tuple[int | None, Ranges | None, tuple[int, ...] | None]:
    """The same of a planned slice."""
    if part.ranges is None:
        return None, None, part.shape(shape)
    return part.axis, tuple(one for one in part.ranges if one[1]), part.shape(shape)


@lru_cache(maxsize=2)
def source_of(model: str) -> SourceCheckpoint:
    """The whole checkpoint of a table as relayout reads it, but without files."""
    tensors, offset = [], 8
    for name, (dtype, shape) in sorted(tensors_of(model).items(), key=lambda item: model_order(item[0])):
        nbytes = tensor_nbytes((name, dtype, shape))
        tensors.append(SourceTensor(name, dtype, shape, 0, Extent(offset, nbytes)))
        offset += nbytes
    file = SourceFile("model.safetensors", offset, 8, b"")
    return SourceCheckpoint(
        Path("/nowhere"), (file,), tuple(tensors), {}, MODELS[table_of(model)["model"]].config, None, (), ()
    )


def kind_of(model: str, pattern: str) -> tuple[str, tuple[int, ...]]:
    """Data type and shape of the tensors of a pattern, which all have the same."""
    [kind] = {tensors_of(model)[tensor] for tensor, _ in names_of(pattern)}
    return kind


def bytes_of(plan: Table) -> list[int]:
    """Bytes of each rank by the table."""
    nbytes = plan["bytes"]
    return nbytes if isinstance(nbytes, list) else [nbytes] * plan["ranks"]


def test_there_is_a_table_for_each_model_and_every_plan_of_it_is_tested() -> None:
    assert {path.stem: list(table_of(path.stem)["plans"]) for path in FOLDER.glob("*.toml")} == PLANS


@pytest.mark.parametrize("chosen", CASES)
def test_a_table_has_the_slices_of_every_tensor_on_every_rank(chosen: tuple[str, str]) -> None:
    model, name = chosen
    plan = table_of(model)["plans"][name]
    matched = Counter(tensor for pattern in plan["slices"] for tensor, _ in names_of(pattern))
    assert matched == Counter(tensors_of(model).keys())
    assert plan["cuts"]
    assert {entry["cut"] for entry in plan["slices"].values() if isinstance(entry, dict)} == set(plan["cuts"])
    assert {entry for entry in plan["slices"].values() if isinstance(entry, str)} <= {WHOLE, WHOLE_EXPERT}
    assert {len(cut) for cut in plan["cuts"].values()} == {plan["ranks"]}
    assert len(bytes_of(plan)) == plan["ranks"]


@pytest.mark.parametrize("chosen", CASES)
def test_the_bytes_of_a_table_are_those_of_its_shapes(chosen: tuple[str, str]) -> None:
    model, name = chosen
    plan = table_of(model)["plans"][name]
    totals = [0] * plan["ranks"]
    for pattern, entry in plan["slices"].items():
        dtype, shape = kind_of(model, pattern)
        for expert, count in Counter(expert for _, expert in names_of(pattern)).items():
            for rank in range(plan["ranks"]):
                held = expected(plan, entry, shape, expert, rank)[2]
                totals[rank] += tensor_nbytes((pattern, dtype, held)) * count if held is not None else 0
    assert totals == bytes_of(plan)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    """A plan of a table, and relayout's."""
    model, name = request.param
    source = source_of(model)
    golden = table_of(model)["plans"][name]
    plan = plan_for(source, golden["ranks"], expert_parallel=golden.get("expert_parallel", False))
    return Case(model, golden, source, [tuple(slices) for slices in all_slices(plan)])


def test_every_rank_holds_the_slices_of_the_table(case: Case) -> None:
    slices_of = {tensor.name: slices for tensor, slices in zip(case.source.tensors, case.slices, strict=True)}
    compared, wrong = 0, []
    for pattern, entry in case.golden["slices"].items():
        _, shape = kind_of(case.name, pattern)
        # The first tensor of those with the same owner and slices stands for all of them.
        distinct: dict[tuple[int, tuple[Slice, ...]], tuple[str, int]] = {}
        for tensor, expert in names_of(pattern):
            owner = owner_of(expert, case.golden) if entry == WHOLE_EXPERT else -1
            distinct.setdefault((owner, slices_of[tensor]), (tensor, expert))
            compared += 1
        for (_, slices), (tensor, expert) in distinct.items():
            assert len(slices) == case.golden["ranks"]
            for rank, part in enumerate(slices):
                want = expected(case.golden, entry, shape, expert, rank)
                have = actual(part, shape)
                if want[2] is None and have[1] == ():
                    continue  # not held: axis and shape mean nothing
                if want != have:
                    wrong.append(f"{tensor}, rank {rank}: by the table {want}, planned {have}")
    assert not wrong, "\n".join(wrong)
    assert compared == len(case.source.tensors)
