"""The prefix of an output in a bucket, and its claim: the ownership marker `.relayout/claim`, which names the work.

A claim contains the fingerprint of a work and the names of all files that the work writes. It is created only if none
exists, and replaced only by compare-and-swap on its version. A process that finds a claim of its own work resumes that
work; other work is refused. `--force` replaces the claim. The new claim takes over all names of the older one: only
these may be replaced or deleted.

**No lease, no clock.** No process can find out if the writer of a claim still runs. So a process that lost its claim
may continue to write for any time, and must not be able to do harm:

- Weight files are large, and no store supports a conditional create for an object that is sent in several requests. So
two works
  never write the same name: any claim but the first of its prefix has a mark, which is part of the names of its weight
  files. The mark is a digest of the work and of all earlier claims, so no two claims have the same mark. The files of
  one work are equal, and may replace each other.
- All other files are created only if no object exists, or replace the version of an object that the claim took over.
  (If a version is a digest of the content, as in S3, equal content has the same version again: see STORES.md.)
- After the weight files of an older output were deleted, no process writes their names again.
- A process that fails before it has sent a file gives up a claim that it created, by compare-and-swap on its version:
  the previous claim is restored. A process that resumes another's work notes that in the claim, once, which changes the
  version.

A work with fixed names, such as `copy`, cannot have a mark. It takes over no other claim, and replaces only an output
that is complete, because no known process writes there. It deletes the marker of that output first.
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

from relayout.core.digests import xxh3_hex
from relayout.errors import FormatError, PlanError, readable, shown
from relayout.publish.output import OutputKind, OutputSpec, first_of, with_suffix
from relayout.storage.cloud.store import Version, WritableClient
from relayout.storage.stores import RequestError, Store, if_there, limited

HIDDEN = ".relayout/"
CLAIM = f"{HIDDEN}claim"
MAX_NBYTES = 2**28
"""Maximum bytes of a claim or record."""
_NUM_CONFLICTS = 8
_SUFFIX_LENGTH = 8


@dataclass(frozen=True, slots=True)
class Claim:
    """The claim of a prefix by one work."""

    what: str
    """Description of the work, for messages."""
    fingerprint: str
    suffix: str
    """Part of the names of weight files; empty for the first claim of a prefix without objects."""
    names: tuple[str, ...]
    """Names of all files that the work writes."""
    older: tuple[str, ...]
    """Names of all objects that may be replaced or deleted: those of earlier claims, and of an older output."""
    is_released: bool = False
    """True if the work failed and none of its files exist. Any other work may take over."""
    is_shared: bool = False
    """True if other processes than the creator of the claim have begun its work."""
    maker: str = ""
    """Random value of the process that created the claim: no two claims, and no two of their versions, are equal."""

    @property
    def records(self) -> str:
        """Prefix of the names of the records of finished parts."""
        return f"{HIDDEN}{self.fingerprint}-{self.suffix}/"

    def is_of(self, other: Claim) -> bool:
        """Return True if both claims are of the same work with the same mark."""
        return (self.fingerprint, self.suffix) == (other.fingerprint, other.suffix)

    def dump(self) -> bytes:
        """Return the claim's content. PlanError: it would be too large to be read again."""
        return readable(json.dumps({"relayout": "claim"} | asdict(self)).encode(), MAX_NBYTES, CLAIM)

    @staticmethod
    def parse(content: bytes, where: str) -> Claim:
        """Return the claim from its content. FormatError: the object is not a claim."""
        try:
            value = json.loads(content.decode())
            if not isinstance(value, dict) or value.pop("relayout", None) != "claim":
                raise ValueError("no field that says so")
            claim = Claim(**value)
            names = [*claim.names, *claim.older]
            texts = [claim.what, claim.fingerprint, claim.suffix, claim.maker, *names]
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


_NO_CLAIM = Claim("nothing", "", "", (), (), is_released=True)
"""Written in place of a claim that was given up, if no claim existed before: stores cannot delete by
compare-and-swap."""


def read_claim(prefix: Prefix) -> tuple[Claim | None, Version | None]:
    """Return the claim of a prefix and the version of its object; None for missing ones.

    Raises:
        FormatError: the object is not a claim.
    """
    loaded = prefix.load(CLAIM, MAX_NBYTES)
    if loaded is None:
        return None, None
    claim = Claim.parse(loaded[0], prefix.location(CLAIM))
    return None if claim == _NO_CLAIM else claim, loaded[1]


@dataclass(frozen=True, slots=True)
class NewClaim:
    """A claim that this process has created without sending a file for it yet."""

    claim: Claim
    version: Version
    earlier: Claim | None
    """The claim that it replaced. None: no claim existed."""

    def give_up(self, prefix: Prefix) -> None:
        """Restore the previous claim, if the object still has the version that this process wrote.

        With that version, no process has taken over or begun the same work. So no files with the names of the claim
        exist, or will exist.
        """
        with suppress(FileExistsError):
            prefix.put(CLAIM, (self.earlier or _NO_CLAIM).dump(), replaced=self.version)


def claim_prefix(
    prefix: Prefix, older: OutputKind, work: OutputSpec, *, force: bool, is_new: bool = True
) -> tuple[Claim, NewClaim | None]:
    """Return the claim of this work; create it if no other process has done so, and `is_new`."""
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
        # Another work may have begun and ended since the earlier claim was read.
        if older.marker in prefix.objects().keys() - set(claim.older):
            release(prefix, claim)
            continue
        return claim, NewClaim(claim, made, earlier)
    raise PlanError("other processes claim it again and again", path=str(prefix), code="busy")


def _write(prefix: Prefix, claim: Claim, replaced: Version | None) -> Version | None:
    """Create a claim, or replace this version of one, and return its version; None if another process was faster."""
    try:
        return prefix.put(CLAIM, claim.dump(), replaced=replaced)
    except FileExistsError:
        return None


def _is_complete(prefix: Prefix, older: OutputKind, claim: Claim) -> bool:
    """Return True if the output of a claim is published, and the claim is left over."""
    return older.marker not in claim.older and prefix.client.stat(prefix.full(older.marker)) is not None


def check_vacant(prefix: Prefix, older: OutputKind, claim: Claim | None, *, force: bool) -> frozenset[str]:
    """Check the prefix; return the names of all objects that may be replaced or deleted."""
    there = {name for name in prefix.objects() if not name.startswith(HIDDEN)}
    claimed = frozenset[str]() if claim is None else frozenset([*claim.names, *claim.older])
    if claim is None or (older.marker in there and not force):
        return older.check(prefix.store, there, force=force)
    with suppress(FormatError):  # The names in the claim suffice.
        claimed |= older.names(prefix.store) if older.marker in there else frozenset()
    if foreign := sorted(there - claimed):
        what = f"holds files that relayout did not write, which nothing replaces: {first_of(foreign)}"
        raise PlanError(what, path=str(prefix), code="exists")
    return claimed


def _check_may_take_over(prefix: Prefix, earlier: Claim, work: OutputSpec, *, force: bool) -> None:
    """Raise PlanError unless work may replace the claim of other work that may still be running."""
    if force and work.weights:
        return
    num_there = len(set(earlier.names) & prefix.objects().keys())
    what = f"is claimed by {earlier.what}, {num_there} files of it exist"
    if work.weights:
        advice = "the command that began that resumes it; --force takes over"
    else:
        advice = "the command that began that resumes it; or, when no process writes there any more,"
        advice += f" delete all of {prefix}/"
    raise PlanError(f"{what}: {advice}", path=str(prefix), code="busy")


def _new(prefix: Prefix, older: OutputKind, earlier: Claim | None, work: OutputSpec, *, force: bool) -> Claim:
    """Return a new claim of work, which takes over the earlier claim, if any."""
    named = check_vacant(prefix, older, earlier, force=force)
    before: object = None if earlier is None else asdict(earlier)
    if earlier is None and named:
        loaded = prefix.load(older.marker, MAX_NBYTES)
        before = None if loaded is None else xxh3_hex(loaded[0])
    suffix = ""
    if before is not None and work.weights:
        suffix = xxh3_hex(json.dumps([work.fingerprint, before]).encode())[:_SUFFIX_LENGTH]
    names = [*(with_suffix(name, suffix) for name in work.weights), *work.others]
    left = [name for name in prefix.objects() if name.startswith(HIDDEN) and name != CLAIM] if named else []
    older_names = tuple(sorted({*named, *left}))
    maker = os.urandom(8).hex()
    return Claim(work.what, work.fingerprint, suffix, tuple(sorted(names)), older_names, maker=maker)


def release(prefix: Prefix, claim: Claim) -> None:
    """Let other work take over, if the claim is still of this work."""
    found, version = read_claim(prefix)
    if found is not None and found.is_of(claim):
        prefix.put(CLAIM, replace(found, is_released=True).dump(), replaced=version)


_NUM_REQUESTS = 16
"""Number of small requests at the same time."""

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Sent:
    """Data about a sent file, which identifies its object as this file or an equal one."""

    nbytes: int
    version: str
    """Version of the object when it was written; empty if the store did not report it."""
    digest: str
    """Digest of the first `digest_nbytes` bytes."""
    digest_nbytes: int
    """Bytes that the digest covers: all of a small file; the header of a weight file, which contains a digest of the
    rest."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix of a bucket."""

    client: WritableClient
    prefix: str
    store: Store
    """The store below the prefix, for checks and messages."""

    def __str__(self) -> str:
        return f"{self.client.root}/{self.prefix}"

    def full(self, name: str) -> str:
        """Return the object name of a file."""
        return f"{self.prefix}/{name}"

    def location(self, name: str) -> str:
        """Return the URL of a file for messages."""
        return f"{self}/{name}"

    def objects(self) -> dict[str, str]:
        """Return the versions of all objects below the prefix by name, including hidden ones."""
        listed = limited(self.client.list_objects(self.prefix), str(self))
        return {full.removeprefix(f"{self.prefix}/"): version for full, version in listed}

    def load(self, name: str, limit: int) -> tuple[bytes, Version] | None:
        """Return a small object and its version, or None. FormatError: it is larger than `limit` bytes."""
        body = if_there(lambda: self.client.get(self.full(name), 0, None, None))
        return None if body is None else (body.content(limit), body.replaces)

    def put(self, name: str, content: bytes, *, replaced: Version | Literal[True] | None = None) -> Version:
        """Write a small object and return its version; create it, replace one version, or (True) replace any object.

        The answer to a first attempt may have been lost. So an existing object with this content counts as written, by
        this process or by one with the same work.
        """
        try:
            return self.client.put(self.full(name), content, replaced)
        except (FileExistsError, RequestError):
            loaded = None
            with suppress(FormatError):  # The object is larger.
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

    def is_stored(self, name: str, sent: Sent) -> bool:
        """Return True if a file's object exists, with the length and first bytes that were sent."""
        stat = self.client.stat(self.full(name))
        if stat is None or stat.nbytes != sent.nbytes:
            return False
        start = b""
        if sent.digest_nbytes:
            start = self.client.get(self.full(name), 0, sent.digest_nbytes, None).content()
        return xxh3_hex(start) == sent.digest

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects. Names without an object are not an error."""
        full = [self.full(name) for name in names]
        if full:
            self.client.delete(full)


def is_version(known: str, listed: str | None) -> bool:
    """Return True if a listed version equals a known one. Some answers quote the ETag, and others do not."""
    return listed is not None and known != "" and bare(known) == bare(listed)


def bare(version: str) -> str:
    """Return a version without quotes, and without the prefix of a weak ETag."""
    return version.removeprefix("W/").strip('"')


def in_parallel(
    call: Callable[[Item], Result], items: Iterable[Item], num_requests: int = _NUM_REQUESTS
) -> list[Result]:
    """Return the results of a call for each item.

    If one call fails, the calls that have begun end before the error is raised, so that the caller can find what they
    created.
    """
    with ThreadPoolExecutor(num_requests) as pool:
        return list(pool.map(call, items))
