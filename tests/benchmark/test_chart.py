"""The chart has a line for each loader and the drive's limit, at the places that their numbers say."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest
from support.benchmarks import loads

from relayout.benchmark.chart import _ticks, bandwidth_chart
from relayout.benchmark.samples import DriveSample
from relayout.benchmark.verdict import RankLoads

SVG = "{http://www.w3.org/2000/svg}"


def sampled(group: RankLoads, gb_per_s: float) -> RankLoads:
    """Each run reads this fast for half of its time, and then half as fast."""

    def samples(seconds: float) -> tuple[DriveSample, ...]:
        half, nbytes = seconds / 2, int(gb_per_s * 1e9 * seconds / 2)
        return DriveSample(0.0, half, nbytes, 10, 1.0), DriveSample(half, half, nbytes // 2, 10, 1.0)

    timings = [
        replace(
            one, title=f"<{one.title}> & more", runs=tuple(replace(run, drive=samples(run.seconds)) for run in one.runs)
        )
        for one in group.timings
    ]
    return replace(group, timings=tuple(timings))


def test_a_line_goes_through_the_speeds_of_the_run_with_the_median_time() -> None:
    drawn = bandwidth_chart([sampled(loads([1.0, 2.0, 9.0], [4.0, 4.0, 4.0]), 2.0), loads([1.0], [1.0], "warm")], 4.0)
    root = ElementTree.fromstring(drawn or "")
    [panel] = root.findall(f"{SVG}g")
    [limit] = [line for line in panel.findall(f"{SVG}line") if line.get("class") == "limit"]
    zero, top = (float(panel.findall(f"{SVG}line")[0].get("y1") or 0), float(limit.get("y1") or 0))
    ours, other = (
        [tuple(map(float, point.split(","))) for point in (line.get("points") or "").split()]
        for line in panel.findall(f"{SVG}polyline")
    )
    # The limit is 4 GB/s: 2 GB/s is half as high, 1 GB/s a quarter.
    for line in (ours, other):
        assert [(zero - y) / (zero - top) for _, y in line] == pytest.approx([0.5, 0.5, 0.25, 0.25], abs=0.01)
    left, right = float(limit.get("x1") or 0), float(limit.get("x2") or 0)
    seconds = [(x - left) / (right - left) * 4 for x, _ in ours]
    assert seconds == pytest.approx([0, 1, 1, 2], abs=0.02)
    texts = [text.text or "" for text in panel.findall(f"{SVG}text")]
    assert any(text.startswith("<relayout, converted> & more 2.00 s") for text in texts)


def test_loads_without_samples_are_not_drawn() -> None:
    assert bandwidth_chart([loads([1.0], [2.0])], 2.0) is None
    assert bandwidth_chart([], None) is None


@pytest.mark.parametrize(("most", "last", "count"), [(0.04, 0.04, 5), (1.0, 1.0, 6), (2.4, 2.0, 5), (37.0, 30.0, 4)])
def test_ticks_are_round_numbers(most: float, last: float, count: int) -> None:
    found = _ticks(most)
    assert found[-1] == pytest.approx(last)
    assert (found[0], len(found)) == (0, count)
