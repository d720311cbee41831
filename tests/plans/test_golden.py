"""relayout.plans.planner against tables of real checkpoints made by hand from the engines' rules: golden/README.md."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.planning import all_slices

from relayout.checkpoint.source import Catalogue, SourceFile, SourceTensor, model_order
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
NBYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1}
WHOLE, WHOLE_EXPERT, NOTHING = "whole", "whole expert", "nothing"


class Case(NamedTuple):
    """One plan of one model."""

    table: Table
    golden: Table
    catalogue: Catalogue
    slices: list[tuple[Slice, ...]]


@lru_cache
def table_of(model: str) -> Table:
    """The golden table of a model."""
    return tomllib.loads((FOLDER / f"{model}.toml").read_text(encoding="utf-8"))


def names_of(pattern: str) -> Iterator[tuple[str, int]]:
    """Every tensor name of a pattern, with its last number (the expert's, where there are experts)."""
    parts = re.split(r"\[(\d+)-(\d+)\]", pattern)
    numbers = [range(int(low), int(high) + 1) for low, high in zip(parts[1::3], parts[2::3], strict=True)]
    for chosen in product(*numbers):
        texts = [parts[0], *(f"{number}{text}" for number, text in zip(chosen, parts[3::3], strict=True))]
        yield "".join(texts), chosen[-1] if chosen else -1


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
def catalogue_of(model: str) -> Catalogue:
    """The whole checkpoint of a table as relayout reads it, but without files."""
    table = table_of(model)
    shapes = {name: entry for pattern, entry in table["tensors"].items() for name, _ in names_of(pattern)}
    tensors, offset = [], 8
    for name, (dtype, shape) in sorted(shapes.items(), key=lambda item: model_order(item[0])):
        nbytes = prod(shape) * NBYTES[dtype]
        tensors.append(SourceTensor(name, dtype, tuple(shape), 0, Extent(offset, nbytes)))
        offset += nbytes
    file = SourceFile("model.safetensors", offset, 8, b"")
    return Catalogue(Path("/nowhere"), (file,), tuple(tensors), {}, table["config"], None, (), ())


def bytes_of(plan: Table) -> list[int]:
    """Bytes of each rank by the table."""
    nbytes = plan["bytes"]
    return nbytes if isinstance(nbytes, list) else [nbytes] * plan["ranks"]


def test_there_is_a_table_for_each_model_and_every_plan_of_it_is_tested() -> None:
    assert {path.stem: list(table_of(path.stem)["plans"]) for path in FOLDER.glob("*.toml")} == PLANS


@pytest.mark.parametrize("model", PLANS)
def test_a_table_has_all_tensors_of_the_published_checkpoint(model: str) -> None:
    table = table_of(model)
    counts = {pattern: sum(1 for _ in names_of(pattern)) for pattern in table["tensors"]}
    assert sum(counts.values()) == table["tensor_count"]
    nbytes = (prod(shape) * NBYTES[dtype] * counts[pattern] for pattern, (dtype, shape) in table["tensors"].items())
    assert sum(nbytes) == table["tensor_bytes"]


@pytest.mark.parametrize("chosen", CASES)
def test_a_table_has_the_slices_of_every_tensor_on_every_rank(chosen: tuple[str, str]) -> None:
    model, name = chosen
    table = table_of(model)
    plan = table["plans"][name]
    assert list(plan["slices"]) == list(table["tensors"])
    assert plan["cuts"]
    assert {entry["cut"] for entry in plan["slices"].values() if isinstance(entry, dict)} == set(plan["cuts"])
    assert {entry for entry in plan["slices"].values() if isinstance(entry, str)} <= {WHOLE, WHOLE_EXPERT}
    assert {len(cut) for cut in plan["cuts"].values()} == {plan["ranks"]}
    assert len(bytes_of(plan)) == plan["ranks"]


@pytest.mark.parametrize("chosen", CASES)
def test_the_bytes_of_a_table_are_those_of_its_shapes(chosen: tuple[str, str]) -> None:
    model, name = chosen
    table = table_of(model)
    plan = table["plans"][name]
    totals = [0] * plan["ranks"]
    for pattern, (dtype, shape) in table["tensors"].items():
        for expert, count in Counter(expert for _, expert in names_of(pattern)).items():
            for rank in range(plan["ranks"]):
                held = expected(plan, plan["slices"][pattern], tuple(shape), expert, rank)[2]
                totals[rank] += prod(held) * NBYTES[dtype] * count if held is not None else 0
    assert totals == bytes_of(plan)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    """A plan of a table, and relayout's."""
    model, name = request.param
    table, catalogue = table_of(model), catalogue_of(model)
    golden = table["plans"][name]
    plan = plan_for(catalogue, golden["ranks"], expert_parallel=golden.get("expert_parallel", False))
    return Case(table, golden, catalogue, [tuple(slices) for slices in all_slices(plan)])


def test_every_rank_holds_the_slices_of_the_table(case: Case) -> None:
    slices_of = {tensor.name: slices for tensor, slices in zip(case.catalogue.tensors, case.slices, strict=True)}
    compared, wrong = 0, []
    for pattern, (_, shape) in case.table["tensors"].items():
        entry = case.golden["slices"][pattern]
        # The first tensor of those with the same owner and slices stands for all of them.
        distinct: dict[tuple[int, tuple[Slice, ...]], tuple[str, int]] = {}
        for tensor, expert in names_of(pattern):
            owner = owner_of(expert, case.golden) if entry == WHOLE_EXPERT else -1
            distinct.setdefault((owner, slices_of[tensor]), (tensor, expert))
            compared += 1
        for (_, slices), (tensor, expert) in distinct.items():
            assert len(slices) == case.golden["ranks"]
            for rank, part in enumerate(slices):
                want = expected(case.golden, entry, tuple(shape), expert, rank)
                have = actual(part, tuple(shape))
                if want[2] is None and have[1] == ():
                    continue  # not held: axis and shape mean nothing
                if want != have:
                    wrong.append(f"{tensor}, rank {rank}: by the table {want}, planned {have}")
    assert not wrong, "\n".join(wrong)
    assert compared == len(case.catalogue.tensors) == case.table["tensor_count"]


def test_every_rank_holds_the_bytes_of_the_table(case: Case) -> None:
    held = [0] * case.golden["ranks"]
    for tensor, slices in zip(case.catalogue.tensors, case.slices, strict=True):
        for rank, part in enumerate(slices):
            if part.ranges != ():
                held[rank] += prod(part.shape(tensor.shape)) * NBYTES[tensor.dtype]
    assert held == bytes_of(case.golden)
