"""The chain from a reader's present content to a step of a step repository: the folder and deltas to read, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from relayout.checkpoint.folder import explain_missing
from relayout.checkpoint.trust import check_signers
from relayout.errors import PlanError, RelayoutError
from relayout.format.steps_index import MAX_STEPS_NBYTES, STEPS_NAME, Chain, StepsIndex, parse_steps
from relayout.storage.stores import Kind, Store, find_input, if_there

_Way = TypeVar("_Way")
_Result = TypeVar("_Result")


def read_steps(store: Store) -> tuple[StepsIndex, bytes] | None:
    """Return the index of a step repository, parsed and as stored; None if there is no index."""
    blob = if_there(lambda: store.read(STEPS_NAME, MAX_STEPS_NBYTES))
    return None if blob is None else (parse_steps(blob, store.location(STEPS_NAME)), blob)


def steps_at(path: str) -> StepsIndex | None:
    """Return the index of a step repository, given as a path or URL; None if the path is not a step repository.

    A policy (RELAYOUT_TRUST) must have a signer for the path. The index itself is not signed, but the steps it names
    are.
    """
    check_signers(path)
    found = read_steps(find_input(path))
    return None if found is None else found[0]


def names_of_chain(chain: Chain) -> tuple[str, ...]:
    """Return the full folder of a chain, if it has one, and its deltas, in reading order."""
    return (*([] if chain.full is None else [chain.full]), *chain.deltas)


def chain_to(path: str, have: str | None, step: int | None) -> tuple[str, ...] | None:
    """Return the sources that lead a reader to a step; empty if the reader has that step.

    Args:
        path: a step repository, or its URL.
        have: the digest of relayout.json of the reader's present content; None: it has no known content.
        step: None: the newest.

    Returns:
        None: the path is not a step repository.
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
    """Use the chain to a step. If that fails and the index then gives a different chain, use that one.

    Steps may be retired while a slow reader uses them: that is not an error as long as another chain exists.

    Args:
        find: returns a chain, or None if there is none. Its argument is True only in the first call: the reader still
            has its previous content.
        where: the step repository, for the error.
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
    """Return the error for a step repository without a step."""
    what = f"has no steps yet ({STEPS_NAME} of relayout.Publisher is missing)"
    if store.kind() is Kind.NOTHING:
        what = f"has no steps yet: {explain_missing(store)}"
    elif store.stat(STEPS_NAME) is not None:
        what = "has no steps yet"
    return PlanError(what, path=str(store), code="missing")
