"""The way from what a reader has to a step of a root: which folder and which deltas it reads, in which order."""

from __future__ import annotations

from relayout.errors import PlanError
from relayout.format.steps import MAX_STEPS_NBYTES, STEPS_NAME, parse_steps
from relayout.storage.stores import Kind, Store, find_input, if_there, why_missing


def way_to(path: str, have: str | None, step: int | None) -> tuple[str, ...] | None:
    """The sources that lead a reader to a step; nothing, if it has that.

    Args:
        path: a root of steps, or its URL.
        have: the digest of relayout.json of what the reader has; None: it has nothing that it knows.
        step: None: the newest.

    Returns:
        None: this is no root of steps.

    Raises:
        FormatError: its index is damaged.
        PlanError: the step is not there; or as `find_input`.
    """
    store = find_input(path)
    blob = if_there(lambda: store.read(STEPS_NAME, MAX_STEPS_NBYTES))
    if blob is None:
        return None
    chain = parse_steps(blob, store.location(STEPS_NAME)).chain(have, step)
    if chain is None:
        raise no_steps(store)
    names = (*([] if chain.full is None else [chain.full]), *chain.deltas)
    return () if chain.content == have else tuple(f"{path.rstrip('/')}/{name}" for name in names)


def no_steps(store: Store) -> PlanError:
    """The error for a root without a step."""
    what = f"has no steps yet ({STEPS_NAME} of relayout.Publisher is missing)"
    if store.kind() is Kind.NOTHING:
        what = f"has no steps yet: {why_missing(store)}"
    elif store.stat(STEPS_NAME) is not None:
        what = "has no steps yet"
    return PlanError(what, path=str(store), code="missing")
