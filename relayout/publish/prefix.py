"""The prefix of an output in a bucket: its objects, by their names in the output, and the proof that one is ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeVar

from relayout.core.digests import digest_hex
from relayout.errors import FormatError
from relayout.storage.cloud.client import Version, WritableClient
from relayout.storage.protocols import RequestError, Store, if_there

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
        return {
            full.removeprefix(f"{self.prefix}/"): version for full, version in self.client.list_objects(self.prefix)
        }

    def load(self, name: str, limit: int) -> tuple[bytes, Version] | None:
        """A small object and its version; None if it does not exist. FormatError: it is larger than `limit` bytes."""
        body = if_there(lambda: self.client.get(self.full(name), 0, None, None))
        return None if body is None else (body.content(limit), body.replaces)

    def put(self, name: str, content: bytes, *, replaced: Version | Literal[True] | None = None) -> Version:
        """Write a small object where there is none, or replace this version of it; True: whatever is there.

        The answer to a first request may have been lost: what is there with this content is ours, or equal to ours.

        Raises:
            FileExistsError: it exists with another content, or no longer has the version.
            RequestError: the request failed, and was not carried out until now.
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
