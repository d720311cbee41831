"""The prefix of an output in a bucket, and its claim: one object in it, `.relayout/claim`, which says who writes there.

A claim says which work it is, and under which names it writes. It is created only where there is none, and replaced
only on condition of its version. Who finds the same work in it goes on with that; any other is refused. `--force`
replaces it, and the new claim takes over all names of the older one: these, and no others, may be replaced or deleted.

**No lease, no clock.** Nobody knows whether the process that wrote a claim still runs. So a process that lost its claim
may write for as long as it likes, and must not be able to harm:

- Weight files are large, and no store creates one by several requests on condition that there is none. So two works
  never write one name: a claim that was not the first of its prefix has a mark, which the names of its weight files
  carry. It is the digest of the work and of all that was claimed before, so that no claim has the mark of another.
  The files of one work are equal, and may replace each other.
- All other files are created only where there is none, or replace the version of an object that the claim took over.
  (A version that is a digest of the content, as of S3, comes again with the content: see STORES.md.)
- Who deletes an older output's weight files deletes names that nobody will write again.
- A process that fails before it has sent a file gives up the claim that it has made, on condition of its version: what
  was there before is there again. Who goes on with a claim notes that in it, once, so that the version is another.

Work whose names are given, such as that of `copy`, cannot have a mark. It takes over no other claim, and replaces only
an output that is complete: nobody is known to write there. The marker of that is deleted first.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Literal, TypeVar

from relayout.core.digests import digest_hex
from relayout.errors import FormatError, PlanError, readable, shown
from relayout.publish.output import Replaceable, Work, first_of, marked
from relayout.storage.cloud.store import Version, WritableClient
from relayout.storage.stores import RequestError, Store, if_there, limited

HIDDEN = ".relayout/"
CLAIM = f"{HIDDEN}claim"
MAX_NBYTES = 2**28
"""The largest claim or record."""
_NUM_CONFLICTS = 8
_MARK_LENGTH = 8


@dataclass(frozen=True, slots=True)
class Claim:
    """Who writes to a prefix."""

    what: str
    """The work, for messages."""
    fingerprint: str
    mark: str
    """What the names of weight files carry; empty for the first claim of a prefix without objects."""
    names: tuple[str, ...]
    """All that the work writes."""
    older: tuple[str, ...]
    """All that may be replaced or deleted: what earlier claims named, and an older output."""
    is_released: bool = False
    """Whether the work failed, and none of its files are there: anybody may take over."""
    is_shared: bool = False
    """Whether more processes than the one that made the claim have begun its work."""
    maker: str = ""
    """Drawn by the process that made the claim: no two claims are equal, and no version of one comes again."""

    @property
    def records(self) -> str:
        """How the names of the records of finished parts begin."""
        return f"{HIDDEN}{self.fingerprint}-{self.mark}/"

    def is_of(self, other: Claim) -> bool:
        """Whether both are claims of the same work, under the same names."""
        return (self.fingerprint, self.mark) == (other.fingerprint, other.mark)

    def dump(self) -> bytes:
        """Its content. PlanError: it would be too large to be read again."""
        return readable(json.dumps({"relayout": "claim"} | asdict(self)).encode(), MAX_NBYTES, CLAIM)

    @staticmethod
    def parse(content: bytes, where: str) -> Claim:
        """The inverse of `dump`. FormatError: the object is no claim."""
        try:
            value = json.loads(content.decode())
            if not isinstance(value, dict) or value.pop("relayout", None) != "claim":
                raise ValueError("no field that says so")
            claim = Claim(**value)
            names = [*claim.names, *claim.older]
            texts = [claim.what, claim.fingerprint, claim.mark, claim.maker, *names]
            flags = {type(claim.is_released), type(claim.is_shared)}
            if not all(isinstance(text, str) for text in texts) or flags != {bool}:
                raise ValueError("a field of another type")
            for name in names:
                if any(part in ("", ".", "..") for part in name.split("/")):
                    raise ValueError("expected the name of a file")
            return replace(claim, names=tuple(claim.names), older=tuple(claim.older))
        except (ValueError, TypeError, RecursionError) as error:
            what = (
                f"not a claim of relayout, or of another version ({shown(str(error))[1:-1]}): nothing was changed;"
                " delete this object, or name another output"
            )
            raise FormatError(what, path=where, code="field") from None


_NOBODYS = Claim("nothing", "", "", (), (), is_released=True)
"""What is written in place of a claim that was given up, where none was before: no store deletes on a condition."""


def read_claim(prefix: Prefix) -> tuple[Claim | None, Version | None]:
    """The claim of a prefix, or None; and the version of the object, or None. FormatError: the object is no claim."""
    loaded = prefix.load(CLAIM, MAX_NBYTES)
    if loaded is None:
        return None, None
    claim = Claim.parse(loaded[0], prefix.location(CLAIM))
    return None if claim == _NOBODYS else claim, loaded[1]


@dataclass(frozen=True, slots=True)
class Made:
    """A claim that this process has made, and has sent no file for."""

    claim: Claim
    version: Version
    earlier: Claim | None
    """What it has replaced."""

    def give_up(self, prefix: Prefix) -> None:
        """Have what was there before there again.

        The proof: the claim has the version that this process has made. So nobody has taken over, nobody has begun the
        same work, and under the names of the claim there is nothing, nor will be.
        """
        with suppress(FileExistsError):
            prefix.put(CLAIM, (self.earlier or _NOBODYS).dump(), replaced=self.version)


def claim_prefix(
    prefix: Prefix, older: Replaceable, work: Work, *, force: bool, is_new: bool = True
) -> tuple[Claim, Made | None]:
    """The claim of this work, which is made if another process has not made it, and `is_new`."""
    for _ in range(_NUM_CONFLICTS):
        earlier, version = read_claim(prefix)
        if earlier is not None and not earlier.is_released:
            if earlier.fingerprint != work.fingerprint:
                _check_may_take_over(prefix, earlier, work, force=force)
            elif not _is_complete(prefix, older, earlier):
                check_vacant(prefix, older, earlier, force=force)
                shared = replace(earlier, is_shared=True)
                if shared == earlier or _write(prefix, shared, version) is not None:
                    return shared, None
                continue
        if not is_new:
            check_vacant(prefix, older, earlier, force=force)
            raise PlanError("no unit of this conversion is done", path=str(prefix), code="missing")
        claim = _new(prefix, older, earlier, work, force=force)
        if (made := _write(prefix, claim, version)) is None:
            continue
        # Another work may have begun and ended before, since its claim was looked for.
        if older.marker in prefix.objects().keys() - set(claim.older):
            release(prefix, claim)
            continue
        return claim, Made(claim, made, earlier)
    raise PlanError("other processes claim it again and again", path=str(prefix), code="busy")


def _write(prefix: Prefix, claim: Claim, replaced: Version | None) -> Version | None:
    """Write a claim in place of this version of one, or where there is none. None: another process was faster."""
    try:
        return prefix.put(CLAIM, claim.dump(), replaced=replaced)
    except FileExistsError:
        return None


def _is_complete(prefix: Prefix, older: Replaceable, claim: Claim) -> bool:
    """Whether the output of a claim is published, and the claim was left over."""
    return older.marker not in claim.older and prefix.client.stat(prefix.full(older.marker)) is not None


def check_vacant(prefix: Prefix, older: Replaceable, claim: Claim | None, *, force: bool) -> frozenset[str]:
    """The names of all objects that may be replaced or deleted."""
    there = {name for name in prefix.objects() if not name.startswith(HIDDEN)}
    claimed = frozenset[str]() if claim is None else frozenset([*claim.names, *claim.older])
    if claim is None or (older.marker in there and not force):
        return older.check(prefix.store, there, force=force)
    with suppress(FormatError):  # What the claim names is proof enough.
        claimed |= older.names(prefix.store) if older.marker in there else frozenset()
    if foreign := sorted(there - claimed):
        what = f"holds files that relayout did not write, which nothing replaces: {first_of(foreign)}"
        raise PlanError(what, path=str(prefix), code="exists")
    return claimed


def _check_may_take_over(prefix: Prefix, earlier: Claim, work: Work, *, force: bool) -> None:
    """Raise PlanError unless work may replace the claim of another that may still be under way."""
    if force and work.weights:
        return
    num_there = len(set(earlier.names) & prefix.objects().keys())
    what = f"is claimed by {earlier.what}, of which {num_there} files are there"
    if work.weights:
        advice = "the command that began that resumes it; --force takes over"
    else:
        advice = "the command that began that resumes it; or, when no process writes there any more,"
        advice += f" delete all of {prefix}/"
    raise PlanError(f"{what}: {advice}", path=str(prefix), code="busy")


def _new(prefix: Prefix, older: Replaceable, earlier: Claim | None, work: Work, *, force: bool) -> Claim:
    """The claim of work where another was, or none."""
    named = check_vacant(prefix, older, earlier, force=force)
    before: object = None if earlier is None else asdict(earlier)
    if earlier is None and named:
        loaded = prefix.load(older.marker, MAX_NBYTES)
        before = None if loaded is None else digest_hex(loaded[0])
    mark = ""
    if before is not None and work.weights:
        mark = digest_hex(json.dumps([work.fingerprint, before]).encode())[:_MARK_LENGTH]
    names = [*(marked(name, mark) for name in work.weights), *work.others]
    left = [name for name in prefix.objects() if name.startswith(HIDDEN) and name != CLAIM] if named else []
    older_names = tuple(sorted({*named, *left}))
    maker = os.urandom(8).hex()
    return Claim(work.what, work.fingerprint, mark, tuple(sorted(names)), older_names, maker=maker)


def release(prefix: Prefix, claim: Claim) -> None:
    """Let others take over, if the claim is still of this work."""
    found, version = read_claim(prefix)
    if found is not None and found.is_of(claim):
        prefix.put(CLAIM, replace(found, is_released=True).dump(), replaced=version)


_NUM_REQUESTS = 16
"""Small requests at the same time."""

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Sent:
    """A file that was sent: what identifies its object as ours, or as equal to ours."""

    nbytes: int
    version: str
    """The object's version when it was written; empty if the store did not tell."""
    digest: str
    """Digest of its first bytes."""
    digest_nbytes: int
    """All of a small file; the header of a weight file, which has the digest of all else."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix of a bucket."""

    client: WritableClient
    prefix: str
    store: Store
    """The store of the output."""

    def __str__(self) -> str:
        return f"{self.client.root}/{self.prefix}"

    def full(self, name: str) -> str:
        """The object's name of a file."""
        return f"{self.prefix}/{name}"

    def location(self, name: str) -> str:
        """A file in messages."""
        return f"{self}/{name}"

    def objects(self) -> dict[str, str]:
        """The versions of all objects below the prefix, including hidden ones."""
        listed = limited(self.client.list_objects(self.prefix), str(self))
        return {full.removeprefix(f"{self.prefix}/"): version for full, version in listed}

    def load(self, name: str, limit: int) -> tuple[bytes, Version] | None:
        """A small object and its version; None if it does not exist. FormatError: it is larger than `limit` bytes."""
        body = if_there(lambda: self.client.get(self.full(name), 0, None, None))
        return None if body is None else (body.content(limit), body.replaces)

    def put(self, name: str, content: bytes, *, replaced: Version | Literal[True] | None = None) -> Version:
        """Write a small object where there is none, or replace this version of it; True: whatever is there.

        The answer to a first request may have been lost: what is there with this content is ours, or equal to ours.
        """
        try:
            return self.client.put(self.full(name), content, replaced)
        except (FileExistsError, RequestError):
            loaded = None
            with suppress(FormatError):  # It is larger.
                loaded = self.load(name, len(content))
            if loaded is None or loaded[0] != content:
                raise
            return loaded[1]

    def replace(self, name: str, expected: bytes | None, content: bytes) -> None:
        """Replace a small object if its content is the expected one, see `StorePublisher.replace`."""
        loaded = self.load(name, MAX_NBYTES)
        if (None if loaded is None else loaded[0]) != expected:
            raise FileExistsError(errno.EEXIST, "was replaced by another process", self.location(name))
        self.put(name, content, replaced=None if loaded is None else loaded[1])

    def proves(self, name: str, sent: Sent) -> bool:
        """Whether a file's object exists, and has the length and the first bytes that were sent."""
        stat = self.client.stat(self.full(name))
        if stat is None or stat.nbytes != sent.nbytes:
            return False
        start = b""
        if sent.digest_nbytes:
            start = self.client.get(self.full(name), 0, sent.digest_nbytes, None).content()
        return digest_hex(start) == sent.digest

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; names without an object are no error."""
        full = [self.full(name) for name in names]
        if full:
            self.client.delete(full)


def is_version(known: str, listed: str | None) -> bool:
    """Whether a version is that of a listing: some answers have the quotes of an ETag, and others lack them."""
    return listed is not None and known != "" and bare(known) == bare(listed)


def bare(version: str) -> str:
    """A version without quotes, and without the mark of a weak one."""
    return version.removeprefix("W/").strip('"')


def in_parallel(
    call: Callable[[Item], Result], items: Iterable[Item], num_requests: int = _NUM_REQUESTS
) -> list[Result]:
    """The results of a call for each item. If one fails, those that have begun end first: what they create is known."""
    with ThreadPoolExecutor(num_requests) as pool:
        return list(pool.map(call, items))
