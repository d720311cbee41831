"""`relayout doctor`: the explanations of the loads that are asked about, no more and no fewer."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from support import prestarted
from support.page_cache import without_residency

import relayout
from relayout.errors import PlanError
from relayout.loader.diagnose.doctor import diagnose


def doctor(*arguments: object) -> subprocess.CompletedProcess[str]:
    return prestarted.run("doctor", *arguments, imports=prestarted.LOADER)


def test_without_a_degree_it_is_that_of_the_conversion_or_one(model: Path, converted: Path) -> None:
    assert [one.rank for one in diagnose(converted, device="cpu").ranks] == [0, 1]
    for found, expected in (
        (diagnose(converted, device="cpu").ranks[1:], relayout.explain(converted, 1)),
        (diagnose(model, device="cpu").ranks, relayout.explain(model, 0, tp=1)),
    ):
        assert list(map(without_residency, found)) == [without_residency(expected)]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_another_degree_is_explained_for_both_kinds_of_folders(model: Path, converted: Path, tp: int) -> None:
    for folder in (model, converted):
        expected = tuple(relayout.explain(folder, rank, tp=tp) for rank in range(tp))
        found = diagnose(folder, device="cpu", tp=tp).ranks
        assert list(map(without_residency, found)) == list(map(without_residency, expected))
    told = json.loads(doctor(converted, "--tp", tp, "--device", "cpu", "--json").stdout)
    assert [one["nbytes"] for one in told["ranks"]] == [one.nbytes for one in expected]


@pytest.mark.parametrize("rank", [None, 0])
@pytest.mark.parametrize("tp", [0, -1, True, 1.0])
def test_a_degree_of_no_ranks_is_refused(model: Path, converted: Path, tp: int, rank: int | None) -> None:
    for folder in (model, converted):
        with pytest.raises(PlanError, match=r"^tp: -?\d, expected 1 or more$|^tp: (True|1\.0) is not an integer$"):
            diagnose(folder, rank=rank, device="cpu", tp=tp)


def test_a_degree_of_no_ranks_is_refused_at_the_command_line(model: Path, converted: Path) -> None:
    for folder in (model, converted):
        done = doctor(folder, "--tp", "0")
        assert (done.returncode, done.stdout) == (2, "")
        assert "tp: 0, expected 1 or more" in done.stderr
