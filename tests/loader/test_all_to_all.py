"""relayout.loader.group.all_to_all: rounds of messages. Those of several processes are in the tests of groups."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from relayout.core.extents import Bytes, Transfer, copy_runs
from relayout.loader.group.all_to_all import AllToAll, pack, round_nbytes, unpack
from relayout.loader.group.collectives import Alone

COLUMNS = Transfer(2, 1, 3, 4, 10, 5)
RUN = Transfer(0, 21, 7)


def test_a_message_has_the_runs_of_its_transfers_one_behind_the_other() -> None:
    source, target, message = np.arange(40, dtype=np.uint8), np.zeros(30, np.uint8), np.zeros(19, np.uint8)
    pack(message, [(partial(copy_runs, source), part) for part in (COLUMNS, RUN)])
    assert message.tolist() == [2, 3, 4, 12, 13, 14, 22, 23, 24, 32, 33, 34, *range(7)]
    unpack(message, [(target, COLUMNS), (target, RUN)])
    assert target.tolist() == [
        *(0, 2, 3, 4, 0, 0, 12, 13, 14, 0, 0, 22, 23, 24, 0, 0, 32, 33, 34, 0, 0),
        *(*range(7), 0, 0),
    ]


def test_transfers_reach_the_memory_of_the_receiver() -> None:
    source, target = np.arange(40, dtype=np.uint8), np.zeros(30, np.uint8)
    messages = AllToAll(Alone())
    messages.transfer([[(partial(copy_runs, source), RUN)]], [[(target, RUN)]])
    messages.transfer([[]], [[]])
    assert target.tolist() == [0] * 21 + [*range(7)] + [0, 0]


def test_rounds_share_memory_and_the_last_messages_are_valid_until_the_next_ones_are_written() -> None:
    messages, found = AllToAll(Alone()), list[list[int]]()
    received: Sequence[Bytes] = ()

    def fill(value: int, outgoing: Sequence[Bytes]) -> None:
        found.extend(message.tolist() for message in received)
        outgoing[0][:] = value

    places = set()
    for value, nbytes in ((1, 5), (2, 3), (3, 0), (4, 5)):
        received = messages.exchange([nbytes], [nbytes], partial(fill, value))
        places.add(received[0].ctypes.data)
    assert found == [[1] * 5, [2] * 3, []]
    assert received[0].tolist() == [4] * 5
    assert len(places) == 1


def test_nothing_is_sent_of_a_round_whose_messages_cannot_be_written() -> None:
    def fill(outgoing: Sequence[Bytes]) -> None:
        outgoing[0][:] = 1
        raise OSError("the drive is on fire")

    messages = AllToAll(Alone())
    (received,) = messages.exchange([2], [2], lambda outgoing: outgoing[0].fill(7))
    with pytest.raises(OSError, match="on fire"):
        messages.exchange([2], [2], fill)
    assert received.tolist() == [7, 7]


def test_the_bytes_of_a_round_are_bounded_for_senders_too() -> None:
    assert round_nbytes(2) == 2**25
    assert all(number * round_nbytes(number) <= 2**28 for number in (2, 8, 9, 64, 1000))
