"""The index of a step repository: the existing steps, and the chain to each. Pure; FORMAT.md is normative.

A repository has folders and deltas that never change, and this index, which is replaced as a whole. Every name is in
the index before anything is written under the name, and until all of it is deleted: so the index is the record of
everything that may be deleted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from relayout.errors import FormatError, PlanError, about, shown
from relayout.format.fields import Fields, parse_object
from relayout.format.manifest import blake3_field, check_self_digest, closed

STEPS_NAME = "steps.json"
MAX_STEPS_NBYTES = 2**26
STEPS_VERSION = 1

GRACE_SECONDS = 3600
"""Default seconds for which retired names are kept."""

FULL, DELTA = "full", "delta"
_NAME = re.compile(rf"({FULL}|{DELTA})-([0-9]{{9}}|[1-9][0-9]{{9,15}})-[0-9a-f]{{8}}")


def step_name(kind: str, step: int, token: str) -> str:
    """Return the name of a folder or delta that is written for a step.

    Args:
        kind: `FULL` or `DELTA`.
        token: 8 hex digits that no other attempt has, so that no name is ever used twice.
    """
    name = f"{kind}-{step:09d}-{token}"
    assert _NAME.fullmatch(name), name
    return name


def step_of(name: str) -> int | None:
    """Return the number in the name of a folder or a delta of a step repository; None: the name has another form."""
    return int(name.split("-")[1]) if _NAME.fullmatch(name) else None


@dataclass(frozen=True, slots=True)
class Stored:
    """A folder or a delta in a step repository."""

    name: str
    nbytes: int
    """Bytes of all weight files of a folder; of all files of a delta."""


@dataclass(frozen=True, slots=True)
class PublishedStep:
    """A step, at its position in the order in which steps were published."""

    step: int
    """The trainer's number. If a number was published again, its last entry has the current content."""
    content: str
    """Content of the step; see `manifest.content_of`."""
    full: Stored | None
    """The step's converted folder; None: it is reached by deltas."""
    delta: Stored | None
    """The delta from the previous entry to this one; None: the step has only a folder."""
    time: int
    """Time of publication: seconds since 1970, by the publisher's clock."""

    @property
    def stored(self) -> tuple[Stored, ...]:
        """The folder and the delta, as far as they exist; at least one does."""
        return tuple(one for one in (self.full, self.delta) if one is not None)


@dataclass(frozen=True, slots=True)
class RetiredName:
    """A name that no entry contains any more, but that readers of an older index may still read."""

    name: str
    since: int
    """Time of retirement: seconds since 1970, by the clock of the publisher that retired the name.

    If that is ahead of the clock of the next publisher, the time when the next publisher began.
    """


@dataclass(frozen=True, slots=True)
class Chain:
    """The folder and deltas that lead a reader to a step."""

    step: int
    content: str
    """Content of the step; see `manifest.content_of`."""
    full: str | None
    """The name of the converted folder to begin with; None: begin with the reader's present content."""
    deltas: tuple[str, ...]
    """The names of the deltas that are then applied, in this order."""
    nbytes: int
    """Bytes of folder and deltas, for all ranks."""
    target: str
    """The name of the step's delta, or of its folder. A signature covers this name, and so the step's number."""


@dataclass(frozen=True, slots=True)
class Retention:
    """The rule that decides which steps of a repository are kept."""

    num_steps: int
    """Number of last entries that are kept at any age."""
    seconds: int
    """Age below which entries are kept, in any number."""

    def first_kept(self, entries: Sequence[PublishedStep], now: int) -> int:
        """Return the position of the first kept entry: the newest folder from which all kept steps can be rebuilt.

        An entry with a time in the future, from a publisher with a fast clock, is treated as published at the time of
        the next entry.
        """
        first, time = max(0, len(entries) - max(1, self.num_steps)), now
        for i in reversed(range(len(entries))):
            time = entries[i].time if entries[i].time <= now else time
            if now - time < self.seconds:
                first = min(first, i)
        return max(i for i, entry in enumerate(entries[: first + 1]) if entry.full is not None)


@dataclass(frozen=True, slots=True)
class StepsIndex:
    """The content of steps.json. The first entry has a folder, and each entry has a folder or a delta."""

    entries: tuple[PublishedStep, ...] = ()
    pending: tuple[str, ...] = ()
    """Names that a publisher is writing now, or was writing when it was killed."""
    retired: tuple[RetiredName, ...] = ()
    grace_seconds: int = GRACE_SECONDS
    """Seconds for which retired names are kept: the time that a reader of an older index has to read them."""

    def __post_init__(self) -> None:
        assert not self.entries or self.entries[0].full is not None
        assert all(entry.full is not None or entry.delta is not None for entry in self.entries)

    @property
    def names(self) -> frozenset[str]:
        """All names in entries."""
        return frozenset(one.name for entry in self.entries for one in entry.stored)

    @property
    def last_names(self) -> frozenset[str]:
        """The names of the last entry, and pending names. If a publisher finds unknown names, another took over."""
        return frozenset(one.name for entry in self.entries[-1:] for one in entry.stored).union(self.pending)

    def announced(self, names: Iterable[str], now: int, grace_seconds: int) -> StepsIndex:
        """Return the index with new pending names. Those of another publisher are retired: what it is publishing fails.

        Times of retirement that lie in the future, by another publisher's fast clock, are set to now.

        Args:
            grace_seconds: of the publisher, from now on.
        """
        pending = tuple(names)
        left = tuple(RetiredName(name, now) for name in self.pending if name not in pending)
        before = tuple(RetiredName(one.name, min(one.since, now)) for one in self.retired)
        return replace(self, pending=pending, retired=(*before, *left), grace_seconds=grace_seconds)

    def published(self, entry: PublishedStep, retention: Retention) -> StepsIndex:
        """Return the index with one more step, reduced to the entries to keep; `entry.time` is now."""
        entries = (*self.entries, entry)
        entries = entries[retention.first_kept(entries, entry.time) :]
        # No reader is known to have the content before the first entry.
        after = replace(self, entries=(replace(entries[0], delta=None), *entries[1:]), pending=(), retired=())
        left = {*self.names, *self.pending, *StepsIndex(entries).names} - after.names
        return replace(after, retired=(*self.retired, *(RetiredName(name, entry.time) for name in sorted(left))))

    def abandoned(self, names: Iterable[str], now: int) -> StepsIndex:
        """Return the index after retiring names that it had dropped, but under which files were still written."""
        known = self.names.union(self.pending, (one.name for one in self.retired))
        return replace(self, retired=(*self.retired, *(RetiredName(name, now) for name in names if name not in known)))

    def without(self, names: Iterable[str]) -> StepsIndex:
        """Return the index without these retired names, after their files were deleted."""
        gone = frozenset(names)
        return replace(self, retired=tuple(one for one in self.retired if one.name not in gone))

    def position(self, step: int | str) -> int | None:
        """Return the position of the last entry of a step, by its number or its content; None if there is none."""
        found = (
            i for i in reversed(range(len(self.entries))) if step in (self.entries[i].step, self.entries[i].content)
        )
        return next(found, None)

    def chain(self, have: int | str | None = None, step: int | str | None = None) -> Chain | None:
        """Return the chain to a step with the fewest bytes; if equal, with fewer deltas.

        Args:
            have: the number or the content of the step that the reader has. One that is not in the index is treated as
                None: nothing.
            step: the number or the content of the requested step; None: the newest.

        Returns:
            None: the repository has no step yet.
        """
        if not self.entries:
            return None
        end = len(self.entries) - 1 if step is None else self.position(step)
        if end is None:
            first, last = self.entries[0].step, self.entries[-1].step
            what = f"has no step {step} (any more): there are {len(self.entries)}, {first} to {last}"
            raise PlanError(what, code="missing")
        begin = None if have is None else self.position(have)
        best: tuple[int, int, Stored | None] | None = None
        """Bytes of the best chain, its first entry, and that entry's folder."""
        deltas_nbytes = 0
        for i in range(end, -1, -1):
            entry = self.entries[i]
            for is_there, full in ((i == begin, None), (entry.full is not None, entry.full)):
                nbytes = deltas_nbytes + (0 if full is None else full.nbytes)
                if is_there and (best is None or nbytes < best[0]):
                    best = nbytes, i, full
            if entry.delta is None:
                break
            deltas_nbytes += entry.delta.nbytes
        assert best is not None  # The first entry has a folder, and so has each entry without a delta.
        nbytes, first, full = best
        names = tuple(entry.delta.name for entry in self.entries[first + 1 : end + 1] if entry.delta is not None)
        target = self.entries[end]
        name = target.stored[-1].name
        return Chain(target.step, target.content, None if full is None else full.name, names, nbytes, name)

    def dump(self) -> bytes:
        """Serialize the index for `parse_steps`."""
        top = {
            "relayout": "steps",
            "version": STEPS_VERSION,
            "requires": [],
            "grace_seconds": self.grace_seconds,
            "steps": [
                {
                    "step": entry.step,
                    "content": entry.content,
                    "full": _dump_stored(entry.full),
                    "delta": _dump_stored(entry.delta),
                    "time": entry.time,
                }
                for entry in self.entries
            ],
            "pending": list(self.pending),
            "retired": [{"name": one.name, "since": one.since} for one in self.retired],
        }
        return closed(json.dumps(top, separators=(",", ":")).removesuffix("}").encode() + b",")


def _dump_stored(stored: Stored | None) -> dict[str, object] | None:
    return None if stored is None else {"name": stored.name, "nbytes": stored.nbytes}


def parse_steps(blob: bytes, where: str) -> StepsIndex:
    """Parse the index of a step repository."""
    top = Fields(parse_object(blob, where), where)
    if top.top.get("relayout") != "steps":
        raise FormatError("is not the index of a step repository", path=where, code="field")
    if (version := top.size("version")) != STEPS_VERSION or (required := top.column("requires", str)):
        wants = f"version {version}" if version != STEPS_VERSION else ", ".join(map(shown, required))
        raise FormatError(f"needs a newer relayout: {wants}", path=where, code="version")
    with about(path=where):
        check_self_digest(blob, top.top)
    entries = tuple(_parse_entry(Fields(entry, where)) for entry in top.column("steps", dict))
    retired = [Fields(one, where) for one in top.column("retired", dict)]
    pending = tuple(top.column("pending", str))
    gone = tuple(RetiredName(one.text("name"), one.size("since")) for one in retired)
    names = [one.name for entry in entries for one in entry.stored]
    names += [*pending, *(one.name for one in gone)]
    for name in names:
        if not _NAME.fullmatch(name):
            raise FormatError(f"{shown(name)} is not the name of a step", path=where, code="unsafe")
    if len(set(names)) < len(names):
        raise FormatError("two entries have one name", path=where, code="field")
    if any(entry.full is None and entry.delta is None for entry in entries) or (entries and entries[0].full is None):
        raise FormatError("an entry has neither a folder nor a delta behind one", path=where, code="field")
    if entries and entries[0].delta is not None:
        raise FormatError("the first entry has a delta, and nothing to apply it to", path=where, code="field")
    return StepsIndex(entries, pending, gone, top.size("grace_seconds"))


def _parse_entry(fields: Fields) -> PublishedStep:
    step = fields.size("step")
    full, delta = (
        _parse_stored(fields.object_or_null(kind), f"{kind}-{step:09d}-", fields.where) for kind in (FULL, DELTA)
    )
    return PublishedStep(step, blake3_field(fields, "content"), full, delta, fields.size("time"))


def _parse_stored(value: Mapping[str, Any] | None, start: str, where: str | None) -> Stored | None:
    if value is None:
        return None
    fields = Fields(value, where)
    name = fields.text("name")
    if not name.startswith(start):
        what = f"{shown(name)} is not the name of what leads to its step, expected {start}XXXXXXXX"
        raise FormatError(what, path=where, code="unsafe")
    return Stored(name, fields.size("nbytes"))
