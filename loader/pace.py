"""How many requests of a load are in flight, and how large they are: found by measuring while reading. Pure.

A load begins with the number that suits most storage. While it reads, a step up is tried: twice the requests, and when
there may be no more of them, requests of twice the size. A step that reads faster is kept, and the next one tried; else
the load goes back, and stays. More in flight than the storage needs would only take memory and disturb others.
"""

from __future__ import annotations

from dataclasses import dataclass

_MIN_GAIN = 1.05
"""A step that reads less than 5 % faster is taken back."""
_MIN_SECONDS = 0.1
"""The least time in which a step is measured. Short loads are over before anything is tried."""


@dataclass(frozen=True, slots=True)
class Step:
    """What is in flight."""

    threads: int
    """Requests in flight."""
    request_nbytes: int
    """The largest request."""


def steps(threads: int, max_threads: int, request_nbytes: int, max_request_nbytes: int) -> list[Step]:
    """The steps from the first pair to the second, each with up to twice the bytes in flight of the one before."""
    found = [Step(threads, request_nbytes)]
    while (step := found[-1]).threads < max_threads:
        found.append(Step(min(2 * step.threads, max_threads), request_nbytes))
    while (step := found[-1]).request_nbytes < max_request_nbytes:
        found.append(Step(step.threads, min(2 * step.request_nbytes, max_request_nbytes)))
    return found


class Pace:
    """Chooses the step of one load. Not thread-safe; reads no clock."""

    def __init__(self, ladder: list[Step]) -> None:
        """`ladder` has the steps to try, in order; the first is where the load begins."""
        self._ladder = ladder
        self._place = 0
        self._rate_below = 0.0
        self._is_settled = len(ladder) == 1
        self._begin()

    def _begin(self) -> None:
        self._num_done, self._nbytes, self._seconds = 0, 0, 0.0

    @property
    def step(self) -> Step:
        """What should be in flight now."""
        return self._ladder[self._place]

    def finished(self, step: Step, nbytes: int, seconds: float) -> None:
        """A request for `nbytes`, begun when `step` was the step, has taken so long."""
        if self._is_settled or step != self.step:
            return
        self._num_done += 1
        self._nbytes += nbytes
        self._seconds += seconds
        if self._num_done < step.threads or self._seconds < _MIN_SECONDS * step.threads:
            return
        # By Little's law: bursts of arrivals, which a clock would see, do not change it.
        rate = step.threads * self._nbytes / self._seconds
        if rate < _MIN_GAIN * self._rate_below:
            self._place -= 1
            self._is_settled = True
        elif self._place + 1 == len(self._ladder):
            self._is_settled = True
        else:
            self._rate_below = rate
            self._place += 1
        self._begin()
