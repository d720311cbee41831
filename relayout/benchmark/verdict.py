"""Measurements of loaders, and a verdict in one sentence. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from relayout.benchmark.machine import Machine
from relayout.benchmark.samples import DriveSample

_CLEAR = 1.1
"""Ratio of times from which a difference counts as a gain."""
_SPREAD = 1.5
"""Ratio of the slowest to the fastest run beyond which figures are not reliable."""
_BUSY = 0.15
"""Share of the processors used by other processes beyond which a measurement is disturbed."""
_TOO_SHORT_SECONDS = 0.05
"""Loads shorter than this (seconds) mostly do other work than reading: open files, start threads, parse headers."""
_AT_LIMIT = 0.85
"""Share of the drive's limit beyond which a loader can hardly be faster."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One load of one or more ranks at once. Peaks are of resident host memory, including mapped pages of files."""

    seconds: float
    """Seconds from the first rank's start to the last rank's end."""
    cpu_seconds: float
    """Processor time of all ranks, in seconds."""
    nbytes: int
    """Bytes of the tensors of all ranks."""
    drive_nbytes: int
    """Bytes that the drives read for these processes."""
    peak_minus_needed_nbytes: int
    """Peak memory of a rank minus the bytes of its tensors; the maximum over all ranks. If tensors are on a GPU, all
    host memory counts."""
    other_load: float
    """Share of the machine's processors that other processes used during the load."""
    digests: tuple[str, ...]
    """Digest of each rank's tensors, see `run.digest_of`."""
    drive: tuple[DriveSample, ...] = ()
    """The drive's reads during the load, in order. Empty: the drive was not sampled, or the system does not count."""


@dataclass(frozen=True, slots=True)
class Timing:
    """All runs of one loader."""

    loader: str
    title: str
    family: str
    runs: tuple[Measurement, ...]
    failure: str | None
    """Reason why the last run failed, or None."""

    @property
    def seconds(self) -> list[float]:
        """Time of each run, in seconds."""
        return [run.seconds for run in self.runs]

    def median(self, field: str) -> float:
        """Return the median of a field over all runs; at least one run is required."""
        return float(statistics.median(getattr(run, field) for run in self.runs))

    def median_run(self) -> Measurement:
        """Return the run with the median time, the faster of the two in the middle."""
        return sorted(self.runs, key=lambda run: run.seconds)[(len(self.runs) - 1) // 2]

    @property
    def spread(self) -> float:
        """Time of the slowest run divided by the time of the fastest."""
        return max(self.seconds) / min(self.seconds)

    @property
    def gb_per_s(self) -> float:
        """Loaded bytes per second, in GB/s (10^9 bytes)."""
        return self.runs[0].nbytes / self.median("seconds") / 1e9


@dataclass(frozen=True, slots=True)
class RankLoads:
    """Results of all loaders for one set of ranks loaded at once, from one state of the page cache."""

    title: str
    """Name of the loaded part, such as "one rank of 8"."""
    num_ranks: int
    state: str
    """State of the page cache: "cold" or "warm"."""
    timings: tuple[Timing, ...]
    expected: tuple[str, ...] | None
    """Digest of each rank's tensors in the converted folder's tables. None: no table to compare with."""

    @property
    def done(self) -> list[Timing]:
        """The loaders that were measured, the fastest first."""
        return sorted((timing for timing in self.timings if timing.runs), key=lambda timing: timing.median("seconds"))

    def ours(self) -> Timing | None:
        """Return relayout's timing for the converted folder, or for the plain one if only that was measured."""
        return next((timing for timing in self.timings if timing.family == "relayout" and timing.runs), None)

    def best_other(self) -> Timing | None:
        """Return the timing of the fastest loader other than relayout."""
        return next((timing for timing in self.done if timing.family != "relayout"), None)

    def ratio(self) -> float | None:
        """Return the time of the fastest other loader divided by relayout's."""
        ours, other = self.ours(), self.best_other()
        return None if ours is None or other is None else other.median("seconds") / ours.median("seconds")

    def compared(self) -> list[Timing]:
        """Return the timings of relayout and of the fastest other loader, if they were measured."""
        return [timing for timing in (self.ours(), self.best_other()) if timing is not None]

    def is_too_short(self) -> bool:
        """Return True if a run of relayout or of the fastest other loader was too short to compare them."""
        return any(min(timing.seconds) < _TOO_SHORT_SECONDS for timing in self.compared())

    def caveat(self) -> str | None:
        """Return the reason why the ratio of relayout and the fastest other loader is not reliable, or None."""
        compared = self.compared()
        if self.wrong():
            return "loaders loaded different bytes"
        if self.is_too_short():
            return f"a load took less than {_TOO_SHORT_SECONDS} s"
        if any(len(timing.runs) < 2 for timing in compared):
            return "one run shows no spread"
        if any(timing.spread > _SPREAD for timing in compared):
            return "runs of the same load differ too much"
        if any(timing.median("other_load") > _BUSY for timing in compared):
            return "other processes were busy"
        return None

    def is_clear(self) -> bool:
        """Return True if the times of relayout and of the fastest other loader do not overlap."""
        ours, other = self.ours(), self.best_other()
        if ours is None or other is None:
            return False
        return max(ours.seconds) < min(other.seconds) or max(other.seconds) < min(ours.seconds)

    def wrong(self) -> list[str]:
        """Return a line for each loader that loaded wrong bytes."""
        done = [timing for timing in self.timings if timing.runs]
        reference = self.expected or (done[0].runs[0].digests if done else ())
        by = "the tables of the converted folder" if self.expected else done[0].title if done else ""
        return [
            f"{self.title}, {self.state}: {timing.title} loaded different bytes from {by}"
            for timing in done
            if any(run.digests != reference for run in timing.runs)
        ]


def warnings_of(machine: Machine, loads: Sequence[RankLoads]) -> tuple[str, ...]:
    """Return reasons why the figures are not reliable."""
    warnings = []
    if _is_loaded(machine):
        warnings.append(
            f"load average {machine.load_average:.1f} on {machine.num_cpus} processors before the first load:"
            " other work was running, do not trust these figures"
        )
    timings = [(group, timing) for group in loads for timing in group.done]
    busy = max((timing.median("other_load") for _, timing in timings), default=0.0)
    if busy > _BUSY:
        warnings.append(
            f"other processes used up to {100 * busy:.0f} % of the processors during loads: do not trust these figures"
        )
    spreads = {timing.spread: f"{group.title}, {group.state}, {timing.title}" for group, timing in timings}
    if (largest := max(spreads, default=0.0)) > _SPREAD:
        warnings.append(
            f"runs of the same load differ by up to {largest:.1f}x ({spreads[largest]}):"
            " repeat on a quiet machine, with more runs"
        )
    return tuple(warnings)


def _is_loaded(machine: Machine) -> bool:
    return machine.load_average > machine.num_cpus / 2


def faster(ratio: float) -> str:
    """Return a ratio of times in words."""
    return f"{ratio:.1f}x faster" if ratio >= 1 else f"{1 / ratio:.1f}x slower"


def verdict(machine: Machine, loads: Sequence[RankLoads], tp: int, drive: float | None, *, is_converted: bool) -> str:
    """Return one sentence: the gains and losses on this machine, or that none were found.

    The sentence contains no ratio for loads that failed a check.
    """
    compared = [group for group in loads if group.ratio() is not None]
    if not compared:
        alone = "No other loader was measured: name the plain folder to compare with."
        return alone if any(group.done for group in loads) else "Nothing could be measured."
    if _is_loaded(machine):
        return "No verdict: other work was running before the first load. Repeat on a quiet machine."
    caveats = [(f"{group.title}, {group.state}", caveat) for group in compared if (caveat := group.caveat())]
    compared = [group for group in compared if not group.caveat()]
    if not compared and all(group.is_too_short() for group in loads if group.compared()):
        return (
            f"No verdict: loads took less than {_TOO_SHORT_SECONDS} s, too little to compare loaders. Measure a"
            " larger model, or one that is made for it: relayout bench FOLDER --size 4GB"
        )
    without = "; ".join(f"{where}: {caveat}" for where, caveat in caveats)
    if not compared:
        return f"No verdict: {without}."
    what = "relayout" if is_converted else "relayout, slicing the plain folder,"
    states = [
        f"from a {state} page cache {what} is {' and '.join(told)}"
        for state in ("cold", "warm")
        if (told := [_gain(group) for group in compared if group.state == state])
    ]
    others = {timing.family for group in compared for timing in group.done if timing.family != "relayout"}
    other = "the fastest other loader" if len(others) > 1 else f"{others.pop()}, the only other loader measured"
    text = f"compared with {other}, {'; '.join(states)}"
    if not is_converted and tp > 1:
        text += f"; after relayout convert --tp {tp} measure again"
    if without:
        text += f"; no ratio for {without}"
    gains = [group for group in compared if (group.ratio() or 0) >= _CLEAR and group.is_clear()]
    losses = [group for group in compared if (group.ratio() or 0) <= 1 / _CLEAR and group.is_clear()]
    if gains and losses:
        return f"Faster in some cases and slower in others: {text}."
    if gains:
        return f"{text[0].upper()}{text[1:]}."
    return f"No clear gain here{_reason(compared, drive)}: {text}."


def _gain(group: RankLoads) -> str:
    certainty = "" if group.is_clear() else " (within the spread of the runs)"
    return f"{faster(group.ratio() or 1.0)} for {group.title}{certainty}"


def _reason(compared: Sequence[RankLoads], drive: float | None) -> str:
    cold = [other for group in compared if group.state == "cold" and (other := group.best_other())]
    if not cold:
        return ", where nothing was read from the drive"
    if drive and all(other.gb_per_s > _AT_LIMIT * drive for other in cold):
        return ", as the other loader reaches the drive's limit too"
    return ""
