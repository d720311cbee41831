"""A network of shared links, as a fluid: at any time each transfer has its max-min fair rate. On simpy.

A transfer stands for any number of equal ones: it says what each link has to carry for it, as a multiple of its rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import simpy

_EPSILON = 1e-9


@dataclass(eq=False)
class Link:
    """What carries at most `bandwidth` bytes per second."""

    bandwidth: float
    carried_nbytes: float = 0
    peak: float = 0
    """The most bytes per second that it ever carried."""


@dataclass(eq=False)
class Transfer:
    """Bytes under way."""

    left: float
    """Bytes."""
    links: Mapping[Link, float]
    """What each link carries, as a multiple of the transfer's rate."""
    most: float
    """Bytes per second."""
    done: simpy.Event
    rate: float = 0


@dataclass
class Network:
    """Transfers that share links."""

    env: simpy.Environment
    transfers: list[Transfer] = field(default_factory=list)
    _since: float = 0
    """The time up to which transfers are accounted for."""
    _changes: int = 0

    def transfer(self, nbytes: float, links: Mapping[Link, float], most: float = math.inf) -> Transfer:
        """Begin a transfer; its event `done` succeeds when it has arrived."""
        self.account()
        begun = Transfer(nbytes, links, most, self.env.event())
        self.transfers.append(begun)
        self._share()
        return begun

    def cancel(self, transfer: Transfer) -> None:
        """Give up a transfer; its event never comes."""
        self.account()
        if transfer in self.transfers:
            self.transfers.remove(transfer)
        self._share()

    def account(self) -> None:
        """Count what has been carried up to now."""
        seconds, self._since = self.env.now - self._since, self.env.now
        for one in self.transfers:
            one.left -= one.rate * seconds
            for link, weight in one.links.items():
                link.carried_nbytes += one.rate * weight * seconds

    def _share(self) -> None:
        """Set all rates, and wait for the first transfer that then ends."""
        ended = [one for one in self.transfers if one.left <= _EPSILON * max(1.0, one.rate)]
        self.transfers = [one for one in self.transfers if one not in ended]
        for one in ended:
            one.done.succeed()
        fair_rates(self.transfers)
        for link in {link for one in self.transfers for link in one.links}:
            link.peak = max(link.peak, sum(one.rate * one.links.get(link, 0) for one in self.transfers))
        self._changes += 1
        if self.transfers:
            self.env.process(self._wait(min(one.left / one.rate for one in self.transfers), self._changes))

    def _wait(self, seconds: float, change: int) -> Iterator[simpy.Event]:
        yield self.env.timeout(seconds)
        if change == self._changes:
            self.account()
            self._share()


def fair_rates(transfers: list[Transfer]) -> None:
    """Max-min fairness by progressive filling: all rates grow alike until a link is full or a transfer has its most."""
    free = {link: link.bandwidth for one in transfers for link in one.links}
    growing = list(transfers)
    level = 0.0
    while growing:
        load = dict.fromkeys(free, 0.0)
        for one in growing:
            for link, weight in one.links.items():
                load[link] += weight
        steps = [free[link] / weight for link, weight in load.items() if weight]
        step = min([*steps, *(one.most - level for one in growing)])
        level += step
        for link, weight in load.items():
            free[link] -= step * weight
        full = {link for link, weight in load.items() if weight and free[link] <= _EPSILON * link.bandwidth}
        for one in growing:
            one.rate = level
        growing = [one for one in growing if one.most - level > _EPSILON * level and full.isdisjoint(one.links)]
