"""relayout.load of a plain checkpoint with a group: each member has its rank, and together they read each byte once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import write_family
from support.conversions import reference_tensors
from support.engine_oracle import expected
from support.families import FAMILIES
from support.group_worker import NUM_MEMBERS, digests, seen_by_members
from support.loader_fixtures import mlp_model, skip_unless_drives_are_counted
from support.models import as_integers
from support.plain_group_worker import NAMES
from support.remote import HEADER

import relayout

pytestmark = pytest.mark.xdist_group("group")

SCRIPT = "from support.plain_group_worker import main; main()"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plain checkpoints: one of each family, and `wide` and `foreign` of 17 MB; `out` is a conversion of `wide`."""
    place = tmp_path_factory.mktemp("group")
    for name in NAMES:
        write_family(FAMILIES[name], place / name)
    for seed, name in enumerate(("wide", "foreign")):
        mlp_model(place / name, num_layers=2, width=6144, seed=seed)
    relayout.convert(place / "wide", place / "out", tp=2)
    return place


@pytest.fixture(scope="module")
def group(place: Path) -> list[dict[str, Any]]:
    """What each member of a group saw in each case."""
    return seen_by_members(place, SCRIPT)


def cut(whole: torch.Tensor, kind: str, tp: int, rank: int, sizes: dict[str, int]) -> torch.Tensor:
    """A rank's slice, by numpy."""
    part = expected(kind, as_integers(whole), tp, sizes)[rank]
    return torch.from_numpy(part).clone(memory_format=torch.contiguous_format).view(whole.dtype)


def slices(folder: Path, name: str, tp: int, rank: int) -> dict[str, str]:
    """What identifies a rank's slices of a family's checkpoint."""
    whole, sizes = reference_tensors(folder), FAMILIES[name].all_sizes()
    entries = FAMILIES[name].entries(sizes)
    assert {entry.name for entry in entries} == set(whole)
    return digests({entry.name: cut(whole[entry.name], entry.cut, tp, rank, sizes) for entry in entries})


@pytest.mark.parametrize("name", NAMES)
def test_each_member_has_the_slices_of_its_rank(place: Path, group: list[dict[str, Any]], name: str) -> None:
    for number, member in enumerate(group):
        four, two = (slices(place / name, name, tp, number % tp) for tp in (4, 2))
        assert len(four) > 10
        assert member[name]["tensors"] == member[f"{name}, of a store"]["tensors"] == four
        assert member[f"{name}, two"]["tensors"] == two


def wide_slices(place: Path, tp: int, rank: int) -> dict[str, str]:
    kinds = {"gate_proj": "even", "up_proj": "even", "down_proj": "even@1", "lm_head": "vocabulary"}
    kinds["embed_tokens"] = "vocabulary"
    whole = reference_tensors(place / "wide").items()
    kind_of = {name: next((cut for part, cut in kinds.items() if part in name), "whole") for name, _ in whole}
    return digests({name: cut(tensor, kind_of[name], tp, rank, {}) for name, tensor in whole})


@pytest.mark.parametrize("case", ["wide", "direct", "cold", "afterwards"])
def test_from_a_store_or_a_drive(place: Path, group: list[dict[str, Any]], case: str) -> None:
    assert [member[case]["tensors"] for member in group] == [wide_slices(place, 4, rank) for rank in range(4)]


def test_any_ranks_may_load(place: Path, group: list[dict[str, Any]]) -> None:
    cases = {"ranks repeat": (2, [0, 1, 0, 1]), "the same rank": (2, [1] * 4), "all of it": (1, [0] * 4)}
    for case, (tp, ranks) in {**cases, "some ranks": (8, [0, 2, 4, 6])}.items():
        assert [member[case]["tensors"] for member in group] == [wide_slices(place, tp, rank) for rank in ranks]


def test_some_tensors_only(place: Path, group: list[dict[str, Any]]) -> None:
    for number, member in enumerate(group):
        every = wide_slices(place, 4, number).items()
        some = {name: one for name, one in every if ".0.mlp." in name or name == "model.norm.weight"}
        assert len(some) == 4
        assert member["some"]["tensors"] == some


@pytest.mark.parametrize("case", ["wide", "ranks repeat", "all of it", "afterwards"])
def test_the_store_sends_each_byte_once(place: Path, group: list[dict[str, Any]], case: str) -> None:
    file, *others = (place / "wide").iterdir()
    if file.suffix == ".json":
        file, *others = *others, file
    small = sum(other.stat().st_size for other in others)
    # Each member reads the beginning of the file, which has the header.
    beginnings = NUM_MEMBERS * (HEADER + small)
    nbytes = file.stat().st_size - HEADER
    read = sum(member[case]["nbytes"] for member in group)
    assert nbytes - HEADER <= read - beginnings <= nbytes
    assert max(member[case]["nbytes"] for member in group) < read / 2


def test_the_drive_reads_each_byte_once(place: Path, group: list[dict[str, Any]]) -> None:
    read = sum(member["cold"]["drive"] for member in group)
    skip_unless_drives_are_counted(read)
    assert read <= 1.05 * (place / "wide" / "model.safetensors").stat().st_size


def test_progress_is_told_of_the_rank(group: list[dict[str, Any]]) -> None:
    for member in group:
        told, total = member["progress"], member["progress"][-1][1]
        assert told[-1] == [total, total]
        assert len(told) > 10
        assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_members_that_load_something_else_are_named(group: list[dict[str, Any]]) -> None:
    for case in ("another degree", "another checkpoint", "a converted one", "other names"):
        for number, member in enumerate(group):
            assert member[case]["kind"] == "PlanError"
            assert f"member {number} loads " in member[case]["error"]
            assert "all members of a group must load the same" in member[case]["error"]
    assert "member 1 a rank of 2 of" in group[0]["another degree"]["error"]
    assert "foreign" in group[3]["another checkpoint"]["error"]


@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("verify", "only converted checkpoints have digests"),
        ("meta", "device 'meta': its tensors have no memory to load into"),
        ("into", "group cannot be combined with into"),
        ("streamed", "iter_load shares converted checkpoints only"),
        ("bad progress", "progress: 'a bar', expected True, False, None or a function"),
        ("no such rank", "rank 7, expected 0 to 3"),
    ],
)
def test_what_is_refused(group: list[dict[str, Any]], case: str, what: str) -> None:
    for member in group:
        assert member[case]["kind"] == "PlanError"
        assert what in member[case]["error"]


@pytest.mark.parametrize(("case", "culprit"), [("gate_proj fails", 2), ("down_proj fails", 2), ("progress fails", 1)])
def test_what_fails_on_one_member_fails_all_with_its_reason(
    group: list[dict[str, Any]], case: str, culprit: int
) -> None:
    for number, member in enumerate(group):
        assert member[case]["kind"] == "OSError"
        assert "the drive is on fire" in member[case]["error"]
        assert (f"member {culprit} of the group failed" in member[case]["error"]) == (number != culprit)


def test_a_member_that_is_killed_fails_the_others_in_time(group: list[dict[str, Any]]) -> None:
    assert "killed" not in group[3]
    for member in group[:3]:
        assert member["killed"]["kind"] in ("OSError", "ConnectionAbortedError")
        assert "a member may be gone" in member["killed"]["error"]
        assert member["killed"]["seconds"] < 60
