"""What was measured of some ranks, and what follows from it. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from relayout.benchmark.machine import Machine
from relayout.benchmark.run import Measured

_CLEAR = 1.1
"""A ratio below this is no gain."""
_SPREAD = 1.5
"""Runs of which the slowest takes this much longer than the fastest are not to be trusted."""
_BUSY = 0.15
"""Of the processors: more than this in use by other processes disturbs a measurement."""
_AT_LIMIT = 0.85
"""Of the drive's limit: a loader that reaches this has little left to gain."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One loader, all runs."""

    loader: str
    title: str
    family: str
    runs: tuple[Measured, ...]
    failure: str | None
    """Why a run failed, the last one; None: none did."""

    @property
    def seconds(self) -> list[float]:
        """Of each run."""
        return [one.seconds for one in self.runs]

    def median(self, field: str) -> float:
        """Of a field of the runs, of which there is one."""
        return float(statistics.median(getattr(one, field) for one in self.runs))

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes of tensors per second."""
        return self.runs[0].nbytes / self.median("seconds") / 1e9


@dataclass(frozen=True, slots=True)
class RankLoads:
    """Some ranks, loaded at once by each loader, from one state of the page cache."""

    title: str
    """Such as "one rank of 8"."""
    num_ranks: int
    """That were loaded at once."""
    state: str
    """"cold" or "warm"."""
    timings: tuple[Timing, ...]
    expected: tuple[str, ...] | None
    """Digest of each rank's tensors, by the converted folder's tables."""

    @property
    def done(self) -> list[Timing]:
        """The loaders that were measured, the fastest first."""
        return sorted((one for one in self.timings if one.runs), key=lambda one: one.median("seconds"))

    def ours(self) -> Timing | None:
        """relayout: of the converted folder, or of the plain one if that was measured only."""
        return next((one for one in self.timings if one.family == "relayout" and one.runs), None)

    def best_other(self) -> Timing | None:
        """The fastest loader that is not relayout."""
        return next((one for one in self.done if one.family != "relayout"), None)

    def ratio(self) -> float | None:
        """Seconds of the fastest other loader over relayout's."""
        ours, other = self.ours(), self.best_other()
        return None if ours is None or other is None else other.median("seconds") / ours.median("seconds")

    def is_clear(self) -> bool:
        """Whether every run of one of the two was faster than every run of the other."""
        ours, other = self.ours(), self.best_other()
        if ours is None or other is None:
            return False
        return max(ours.seconds) < min(other.seconds) or max(other.seconds) < min(ours.seconds)

    def wrong(self) -> list[str]:
        """Loaders whose bytes are not those that they should be, a line each."""
        done = [one for one in self.timings if one.runs]
        reference = self.expected or (done[0].runs[0].digests if done else ())
        by = "the tables of the converted folder" if self.expected else done[0].title if done else ""
        return [
            f"{self.title}, {self.state}: {one.title} loaded other bytes than {by}"
            for one in done
            if any(run.digests != reference for run in one.runs)
        ]


def warnings_of(machine: Machine, loads: Sequence[RankLoads]) -> tuple[str, ...]:
    """Why the figures should not be trusted."""
    warnings = []
    if machine.load_average > machine.num_cpus / 2:
        warnings.append(
            f"load average {machine.load_average:.1f} on {machine.num_cpus} processors before the first load:"
            " other work was running, do not trust these figures"
        )
    busy = [one.median("other_load") for group in loads for one in group.done]
    if busy and max(busy) > _BUSY:
        warnings.append(
            f"other processes used up to {100 * max(busy):.0f} % of the processors during loads:"
            " do not trust these figures"
        )
    spread = {
        max(one.seconds) / min(one.seconds): f"{group.title}, {group.state}, {one.title}"
        for group in loads
        for one in group.done
    }
    if spread and max(spread) > _SPREAD:
        warnings.append(
            f"runs of one load differ by up to {max(spread):.1f}x ({spread[max(spread)]}):"
            " repeat on a quiet machine, with more runs"
        )
    return tuple(warnings)


def faster(ratio: float) -> str:
    """A ratio of times in words."""
    return f"{ratio:.1f}x faster" if ratio >= 1 else f"{1 / ratio:.1f}x slower"


def verdict(loads: Sequence[RankLoads], tp: int, drive: float | None, *, is_converted: bool) -> str:
    """One sentence: what is gained here, or that nothing is."""
    compared = [one for one in loads if one.ratio() is not None]
    if not compared:
        alone = "No other loader was measured: name the plain folder to compare with."
        return alone if any(one.done for one in loads) else "Nothing could be measured."
    what = "relayout" if is_converted else "relayout, slicing the plain folder,"
    states = [
        f"from a {state} page cache {what} is {' and '.join(map(_told, group))}"
        for state in ("cold", "warm")
        if (group := [one for one in compared if one.state == state])
    ]
    others = {timing.family for one in compared for timing in one.done if timing.family != "relayout"}
    other = "the fastest other loader" if len(others) > 1 else f"{others.pop()}, the only other loader measured"
    told = f"compared with {other}, {'; '.join(states)}"
    if not is_converted and tp > 1:
        told += f"; after relayout convert --tp {tp} measure again"
    if any((one.ratio() or 0) >= _CLEAR and one.is_clear() for one in compared):
        return f"{told[0].upper()}{told[1:]}."
    return f"No clear gain here{_reason(compared, drive)}: {told}."


def _reason(compared: Sequence[RankLoads], drive: float | None) -> str:
    cold = [one for one in compared if one.state == "cold"]
    if not cold:
        return ", where nothing was read from the drive"
    if drive and all(other.gb_per_s > _AT_LIMIT * drive for one in cold if (other := one.best_other())):
        return ", as the other loader reaches the drive's limit too"
    return ""


def _told(one: RankLoads) -> str:
    ratio = one.ratio()
    assert ratio is not None
    return f"{faster(ratio)} for {one.title}{'' if one.is_clear() else ' (within the spread of the runs)'}"
