"""All-to-all rounds: in each, a message in host memory goes from each member of a group to each other one.

If sender and receiver have planned the same transfers, from the sender's memory to the receiver's, a message consists
of the runs of these transfers, one after the other (`pack`, `unpack`). The caller defines messages of any other form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np

from relayout.core.extents import Bytes, Transfer, copy_runs
from relayout.loader.backends.host import reserve
from relayout.loader.group.collectives import Group
from relayout.storage.system import Buffer

_ROUND_NBYTES = 2**25
"""Approximate limit of the bytes that a member receives in a round."""
_SENT_NBYTES = 2**28
"""Approximate limit of the bytes that a member sends in a round, if all others need its bytes."""

Copy: TypeAlias = Callable[[Bytes, Transfer], None]
"""Function that copies the runs of a transfer from the bytes that a member holds to memory."""


def round_nbytes(num_members: int) -> int:
    """Return the approximate number of bytes that a member should receive in a round."""
    return min(_ROUND_NBYTES, _SENT_NBYTES // num_members)


def pack(message: Bytes, parts: Iterable[tuple[Copy, Transfer]]) -> None:
    """Fill a message with the runs of transfers."""
    position = 0
    for copy, part in parts:
        copy(message, part.packed(position))
        position += part.total_nbytes


def unpack(message: Bytes, parts: Iterable[tuple[Bytes, Transfer]]) -> None:
    """Copy the runs of transfers from a message, each to its memory."""
    position = 0
    for memory, part in parts:
        copy_runs(message, memory, part.unpacked(position))
        position += part.total_nbytes


class AllToAll:
    """Carries out the rounds of a group, one after the other, in reused memory. Not thread-safe."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._sent, self._received = Buffer(), Buffer()

    def exchange(
        self, sent: Sequence[int], received: Sequence[int], fill: Callable[[Sequence[Bytes]], None]
    ) -> list[Bytes]:
        """Carry out a round, which is a block of `Group.collective`.

        Args:
            sent: bytes of this member's message to each member.
            received: bytes of the message from each member to this one.
            fill: writes this member's messages, in the block. The previous round's messages are valid until then.

        Returns:
            The message from each member.
        """
        import torch

        with self._group.collective():
            outgoing = np.asarray(reserve(self._sent, sum(sent)))
            fill(_messages(outgoing, sent))
            incoming = np.asarray(reserve(self._received, sum(received)))
            self._group.exchange(torch.from_numpy(outgoing), list(sent), torch.from_numpy(incoming), list(received))
        return _messages(incoming, received)

    def transfer(
        self, sent: Sequence[Sequence[tuple[Copy, Transfer]]], received: Sequence[Sequence[tuple[Bytes, Transfer]]]
    ) -> None:
        """Carry out a round of transfers, to each member and from each."""
        sent_sizes, received_sizes = (
            [sum(part.total_nbytes for _, part in parts) for parts in side] for side in (sent, received)
        )

        def fill(messages: Sequence[Bytes]) -> None:
            for message, parts in zip(messages, sent, strict=True):
                pack(message, parts)

        messages = self.exchange(sent_sizes, received_sizes, fill)
        for message, parts in zip(messages, received, strict=True):
            unpack(message, parts)


def _messages(memory: Bytes, sizes: Sequence[int]) -> list[Bytes]:
    """Return the messages in memory, one after the other."""
    return [memory[start:end] for start, end in pairwise(accumulate(sizes, initial=0))]
