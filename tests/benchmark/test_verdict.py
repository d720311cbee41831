"""The verdict is honest: it says what was measured, and nothing where runs, machine or bytes forbid it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.benchmarks import QUIET, loads, timing

from relayout.benchmark import machine
from relayout.benchmark.verdict import RankLoads, verdict, warnings_of


@pytest.mark.parametrize(
    ("measured", "drive", "said"),
    [
        (
            [loads([1.0, 1.1], [3.0, 3.3])],
            2.0,
            "Compared with safetensors get_slice, the only other loader measured, from a cold page cache relayout is"
            " 3.0x faster for one rank of 4.",
        ),
        (
            [loads([2.2, 3.1], [3.0, 3.3])],
            2.0,
            "No clear gain here: .* 1.2x faster for one rank of 4 .within the spread",
        ),
        ([loads([2.0, 2.1], [1.0, 1.1])], 9.0, "No clear gain here: .* is 2.0x slower"),
        ([loads([1.0, 1.0], [1.0, 1.0])], 1.1, "No clear gain here, as the other loader reaches the drive's limit too"),
        ([loads([1.0, 1.0], [1.0, 1.0], "warm")], 1.1, "No clear gain here, where nothing was read from the drive"),
        (
            [loads([0.009, 0.01], [0.003, 0.004])],
            2.0,
            "No verdict: loads took less than 0.05 s, too little to compare loaders. Measure a larger model",
        ),
        ([loads([0.009, 0.009], [0.08, 0.08])], 2.0, "No verdict: loads took less than 0.05 s"),
        ([loads([0.06, 0.07, 0.08], [0.3, 0.04, 0.3])], 2.0, "No verdict: loads took less than 0.05 s"),
        (
            [loads([0.009, 0.009], [0.003, 0.003], "warm"), loads([1.0, 1.0], [2.0, 2.0])],
            2.0,
            "Compared with .*, from a cold page cache relayout is 2.0x faster for one rank of 4; no ratio for one rank"
            " of 4, warm: a load took less than 0.05 s.$",
        ),
        (
            [loads([1.0, 1.0], [2.0, 2.0]), replace(loads([2.0, 2.0], [1.0, 1.0]), title="all 4 ranks at once")],
            2.0,
            "Faster in some cases and slower in others: compared with .* is 2.0x faster for one rank of 4 and 2.0x"
            " slower for all 4 ranks at once.$",
        ),
        ([loads([1.0], [3.0])], 2.0, "No verdict: one rank of 4, cold: one run shows no spread.$"),
        (
            [loads([1.0, 1.6], [3.0, 3.0])],
            2.0,
            "No verdict: one rank of 4, cold: runs of the same load differ too much.$",
        ),
        (
            [loads([1.0, 1.0], [3.0, 3.0], other_load=0.4)],
            2.0,
            "No verdict: one rank of 4, cold: other processes were busy.$",
        ),
        (
            [loads([1.0, 1.0], [3.0, 3.0], digests=("b",))],
            2.0,
            "No verdict: one rank of 4, cold: loaders loaded different bytes.$",
        ),
        ([replace(loads([1.0], []), timings=(timing("relayout", [1.0]),))], 2.0, "No other loader was measured"),
        ([], None, "Nothing could be measured"),
    ],
)
def test_the_verdict_is_one_honest_sentence(measured: list[RankLoads], drive: float | None, said: str) -> None:
    text = verdict(QUIET, measured, 4, drive, is_converted=True)
    assert re.match(said, text), text


def test_a_busy_machine_gets_no_verdict() -> None:
    text = verdict(replace(QUIET, load_average=8.0), [loads([1.0, 1.0], [3.0, 3.0])], 4, None, is_converted=True)
    assert text == "No verdict: other work was running before the first load. Repeat on a quiet machine."


def test_slicing_a_plain_folder_is_not_taken_for_a_gain_of_a_conversion() -> None:
    alone = RankLoads(
        "one rank of 4", 1, "cold", (timing("relayout_plain", [1.0] * 2), timing("get_slice", [3.0] * 2)), None
    )
    said = verdict(QUIET, [alone], 4, None, is_converted=False)
    assert "relayout, slicing the plain folder, is 3.0x faster" in said
    assert "after relayout convert --tp 4 measure again" in said


def test_a_busy_machine_and_runs_that_differ_are_warned_of(tmp_path: Path) -> None:
    about = replace(machine.describe(tmp_path), num_cpus=2, load_average=0.1)
    assert warnings_of(about, [loads([1.0, 1.1], [3.0])]) == ()
    [busy] = warnings_of(replace(about, load_average=8.0), [loads([1.0], [3.0])])
    assert "load average 8.0 on 2 processors" in busy
    assert "do not trust" in busy
    [others] = warnings_of(about, [loads([1.0], [3.0], other_load=0.4)])
    assert "other processes used up to 40 % of the processors" in others
    [spread] = warnings_of(about, [loads([1.0], [3.0, 9.0])])
    assert "differ by up to 3.0x (one rank of 4, cold, safetensors get_slice)" in spread


def test_other_bytes_are_told_with_their_loader() -> None:
    what = "one rank of 4, cold: safetensors get_slice loaded different bytes from"
    assert loads([1.0], [3.0], digests=("b",)).wrong() == [f"{what} the tables of the converted folder"]
    without = replace(loads([1.0], [3.0], digests=("b",)), expected=None)
    assert without.wrong() == [f"{what} relayout, converted"]
