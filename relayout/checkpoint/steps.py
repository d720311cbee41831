"""The way from what a reader has to a step of a root: which folder and which deltas it reads, in which order."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from relayout.checkpoint.folder import explain_missing
from relayout.checkpoint.trust import check_place
from relayout.errors import PlanError, RelayoutError
from relayout.format.steps import MAX_STEPS_NBYTES, STEPS_NAME, Chain, StepsIndex, parse_steps
from relayout.storage.stores import Kind, Store, find_input, if_there

_Way = TypeVar("_Way")
_Result = TypeVar("_Result")


def read_steps(store: Store) -> tuple[StepsIndex, bytes] | None:
    """The index of a root of steps, parsed and as stored; None: there is none."""
    blob = if_there(lambda: store.read(STEPS_NAME, MAX_STEPS_NBYTES))
    return None if blob is None else (parse_steps(blob, store.location(STEPS_NAME)), blob)


def steps_at(path: str) -> StepsIndex | None:
    """The index of a root of steps, given as a path or URL; None: this is no root.

    A policy (RELAYOUT_TRUST) must have a signer for the path. The index itself is not signed: what it names is.
    """
    check_place(path)
    found = read_steps(find_input(path))
    return None if found is None else found[0]


def names_of_chain(chain: Chain) -> tuple[str, ...]:
    """The folder, if there is one, and the deltas of a chain, in the order in which they are read."""
    return (*([] if chain.full is None else [chain.full]), *chain.deltas)


def way_to(path: str, have: str | None, step: int | None) -> tuple[str, ...] | None:
    """The sources that lead a reader to a step; nothing, if it has that.

    Args:
        path: a root of steps, or its URL.
        have: the digest of relayout.json of what the reader has; None: it has nothing that it knows.
        step: None: the newest.

    Returns:
        None: this is no root of steps.
    """
    index = steps_at(path)
    if index is None:
        return None
    chain = index.chain(have, step)
    if chain is None:
        raise no_steps(find_input(path))
    return () if chain.content == have else tuple(f"{path.rstrip('/')}/{name}" for name in names_of_chain(chain))


_NUM_TRIES = 8


def follow(find: Callable[[bool], _Way], use: Callable[[_Way], _Result], where: str) -> _Result:
    """Use the way to a step. If that fails, use the way that the index then says, if it is another one.

    A reader may be too slow for what was retired: that is no error while there is another way.

    Args:
        find: finds a way; None: there is none. It is told whether the reader still has what it had: only the first
            time it has.
        where: the root, for the error.
    """
    way = find(True)
    for _ in range(_NUM_TRIES):
        try:
            return use(way)
        except (RelayoutError, OSError):
            again = find(False)
            if again is None or again == way:
                raise
            way = again
    raise PlanError("its steps are deleted faster than they are read", path=where, code="busy")


def no_steps(store: Store) -> PlanError:
    """The error for a root without a step."""
    what = f"has no steps yet ({STEPS_NAME} of relayout.Publisher is missing)"
    if store.kind() is Kind.NOTHING:
        what = f"has no steps yet: {explain_missing(store)}"
    elif store.stat(STEPS_NAME) is not None:
        what = "has no steps yet"
    return PlanError(what, path=str(store), code="missing")
