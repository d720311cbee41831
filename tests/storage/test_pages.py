"""relayout.storage.system: the choice on simulated hosts, and what the kernel is told."""

import mmap
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relayout.storage import system as pages
from relayout.storage.system import HUGE_PAGE, FreshMemory, PageCosts, describe_pages

AT_HAND, TAKEN_BACK, SMALL = 0.0002, 0.0045, 0.0006
NUM_PAGES = 2000

Host = Callable[[int, bool], float]
"""Seconds that touching the n-th 2 MiB takes, in a huge page or in small ones."""

HOSTS: dict[str, Host] = {
    "at hand": lambda page, is_huge: AT_HAND if is_huge else SMALL,
    "taken back": lambda page, is_huge: TAKEN_BACK if is_huge else SMALL,
    "taken back, small pages too": lambda page, is_huge: TAKEN_BACK if is_huge else 1.2 * TAKEN_BACK,
    "at hand, then taken back": lambda page, is_huge: (AT_HAND if page < 900 else TAKEN_BACK) if is_huge else SMALL,
    "taken back, then at hand": lambda page, is_huge: (AT_HAND if page > 900 else TAKEN_BACK) if is_huge else SMALL,
    "small pages are used up": lambda page, is_huge: TAKEN_BACK if is_huge else SMALL if page < 700 else 0.005,
}


@given(host=st.sampled_from(sorted(HOSTS)), noise=st.sampled_from([0.0, 0.3]), seed=st.integers(0, 2**32))
def test_the_choice_costs_at_most_a_fifth_more_than_the_better_constant(host: str, noise: float, seed: int) -> None:
    rng = random.Random(seed)
    seconds = [
        [HOSTS[host](page, bool(kind)) * rng.lognormvariate(0, noise) for kind in (0, 1)] for page in range(NUM_PAGES)
    ]
    costs, spent = PageCosts(), 0.0
    for page in range(NUM_PAGES):
        is_huge = costs.is_next_huge
        spent += seconds[page][is_huge]
        costs = costs.after(seconds[page][is_huge], is_huge=is_huge)
    assert spent <= 1.2 * min(sum(small for small, _ in seconds), sum(huge for _, huge in seconds))


def test_one_touch_that_was_interrupted_changes_no_choice() -> None:
    assert PageCosts(AT_HAND, SMALL).after(1.0, is_huge=True).are_huge_better


class Kernel:
    """Stands in for madvise and for the clock: touching a page takes as long as the host says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, host: Host, enabled: str = "always [madvise] never") -> None:
        self.advised: list[tuple[int, int]] = []
        """(advice, bytes)."""
        self.now, self.num_touched, self.refuses = 0.0, 0, False
        self._host, self._advice = host, dict[int, int]()
        monkeypatch.setattr(pages, "_ENABLED", FakeFile(enabled))
        monkeypatch.setattr(pages, "_machine", [])
        monkeypatch.setattr(pages, "advise", self.advise)
        monkeypatch.setattr(pages, "populate", self.populate)
        monkeypatch.setattr("time.thread_time", lambda: self.now)

    def advise(self, address: int, nbytes: int, advice: int) -> bool:
        self.advised.append((advice, nbytes))
        self._advice |= dict.fromkeys(range(address, address + nbytes, HUGE_PAGE), advice)
        return not self.refuses

    def populate(self, address: int, nbytes: int, *, writable: bool) -> bool:
        assert (writable, nbytes, address % HUGE_PAGE) == (True, HUGE_PAGE, 0)
        self.now += self._host(self.num_touched, self._advice[address] == mmap.MADV_HUGEPAGE)
        self.num_touched += 1
        return True


class FakeFile:
    def __init__(self, text: str) -> None:
        self._text = text

    def read_text(self) -> str:
        if not self._text:
            raise FileNotFoundError
        return self._text


def touch(num_pages: int, times: int = 1) -> mmap.mmap:
    memory = mmap.mmap(-1, (num_pages + 1) * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
    fresh = FreshMemory(memory)
    for _ in range(times):
        for offset in range(0, len(memory), 3 * HUGE_PAGE + 4096):
            fresh.touch(offset, 3 * HUGE_PAGE + 4096)
    return memory


def test_every_huge_page_is_touched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch, HOSTS["at hand"])
    memory = touch(200, times=2)
    start = -pages.address_of(memory) % HUGE_PAGE
    assert kernel.num_touched == (len(memory) - start) // HUGE_PAGE
    FreshMemory(memory, start + 4096, 3 * HUGE_PAGE).touch(0, 3 * HUGE_PAGE)
    assert kernel.num_touched == (len(memory) - start) // HUGE_PAGE + 2, "whole ones only, and none beyond the part"


@pytest.mark.parametrize(
    ("host", "better", "said"),
    [
        ("at hand", mmap.MADV_HUGEPAGE, "memory: huge pages (0.2 ms a huge page"),
        ("taken back", mmap.MADV_NOHUGEPAGE, "memory: small pages (4.5 ms a huge page"),
    ],
)
def test_most_memory_gets_the_cheaper_pages(monkeypatch: pytest.MonkeyPatch, host: str, better: int, said: str) -> None:
    kernel = Kernel(monkeypatch, HOSTS[host])
    touch(1000)
    whole = [advice for advice, nbytes in kernel.advised if nbytes > HUGE_PAGE]
    trials = [advice for advice, nbytes in kernel.advised if nbytes == HUGE_PAGE]
    assert whole[-1] == better
    assert len(whole) <= 2
    assert 2 <= len(trials) < 100
    assert better not in trials[1:]
    assert describe_pages().startswith(said)
    assert pages.are_small() == (host == "taken back")


@pytest.mark.parametrize("enabled", ["always madvise [never]", ""])
def test_a_system_without_huge_pages_is_told_nothing(monkeypatch: pytest.MonkeyPatch, enabled: str) -> None:
    kernel = Kernel(monkeypatch, HOSTS["at hand"], enabled)
    touch(10)
    pages.in_huge_pages(HUGE_PAGE)[:2] = b"ab"
    assert (kernel.advised, kernel.num_touched, pages.are_small()) == ([], 0, False)
    assert describe_pages() == "memory: small pages: the system has no huge ones"


def test_a_sandbox_that_refuses_the_advice_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch, HOSTS["at hand"])
    kernel.refuses = True
    touch(10)
    assert (len(kernel.advised), kernel.num_touched) == (1, 0)


def test_an_old_kernel_that_cannot_populate_is_asked_for_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch, HOSTS["at hand"])
    monkeypatch.setattr(pages, "populate", lambda address, nbytes, *, writable: False)
    touch(10)
    assert [advice for advice, _ in kernel.advised] == [mmap.MADV_HUGEPAGE] * 2


def test_what_was_measured_a_while_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch, lambda page, is_huge: TAKEN_BACK if is_huge == (page < 100) else AT_HAND)
    touch(98)
    monkeypatch.setattr(pages, "_FORGOTTEN_SECONDS", -1e9)
    touch(4)
    assert kernel.advised[-1][0] == mmap.MADV_HUGEPAGE


@pytest.mark.parametrize("host", ["at hand", "taken back"])
def test_content_stays_as_it_is(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    real = pages.populate
    kernel = Kernel(monkeypatch, HOSTS[host])

    def populate(address: int, nbytes: int, *, writable: bool) -> bool:
        kernel.populate(address, nbytes, writable=writable)
        return real(address, nbytes, writable=writable)

    monkeypatch.setattr(pages, "populate", populate)
    memory = mmap.mmap(-1, 8 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
    memory[:: HUGE_PAGE // 2] = bytes(range(1, 17))
    FreshMemory(memory).touch(0, len(memory))
    assert memory[:: HUGE_PAGE // 2] == bytes(range(1, 17))
