"""Resets locks in forked children: a thread of the parent may have held them, and does not exist in the child."""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol


class Forked(Protocol):
    """An object with locks or threads."""

    def after_fork(self) -> None:
        """Replace locks and forget threads. Called in a forked child, which has a single thread."""


_known: set[weakref.ref[Any]] = set()


def remake_in_child(one: Forked) -> None:
    """Call `one.after_fork` in each child forked while `one` exists; keeps only a weak reference."""
    _known.add(weakref.ref(one, _known.discard))


def _after_fork() -> None:
    for reference in list(_known):
        one = reference()
        if one is not None:
            one.after_fork()


os.register_at_fork(after_in_child=_after_fork)
