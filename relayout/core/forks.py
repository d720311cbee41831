"""What a process that was forked must make anew: locks that a thread held which exists in its parent only."""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol


class Forked(Protocol):
    """Something that has a lock, or threads."""

    def after_fork(self) -> None:
        """Make locks anew, and forget threads: called in a forked child, where there is no other thread."""


_known: set[weakref.ref[Any]] = set()


def remake_in_child(one: Forked) -> None:
    """Call `one.after_fork` in children that are forked while it exists."""
    _known.add(weakref.ref(one, _known.discard))


def _after_fork() -> None:
    for reference in list(_known):
        one = reference()
        if one is not None:
            one.after_fork()


os.register_at_fork(after_in_child=_after_fork)
