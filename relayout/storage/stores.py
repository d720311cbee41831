"""Stores: files in one folder or under one prefix, read by ranges; and the registry of stores by URL scheme.

Callers query the capabilities of a store or file (`fileno`, `alignment`, `cost`), never its type. The scheme of a URL
selects the module of the store. A path without a scheme is local.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Protocol, Self, TypeVar

from relayout.core.arguments import path_text
from relayout.errors import FormatError, PlanError, about

Found = TypeVar("Found")


class Access(Enum):
    """A way to read a file. A store without a page cache rejects `DIRECT` and treats the other ways alike."""

    DIRECT = "direct"
    """Bypass the page cache; fail if the file system refuses."""
    BUFFERED = "buffered"
    """Read through the page cache."""
    AUTO = "auto"
    """Bypass the page cache if possible."""
    ONCE = "once"
    """Read as with `AUTO`, and afterwards drop the pages that a buffered read brought into the page cache."""


class Kind(Enum):
    """The kind of thing at a store's own path or prefix."""

    FOLDER = "folder"
    FILE = "file"
    OTHER = "other"
    """A device, or a broken link."""
    NOTHING = "nothing"


_NUM_REMOTE_OPENS = 16


@dataclass(frozen=True, slots=True)
class RequestCost:
    """The cost of reading from a store: requests and digests. The defaults fit a local drive."""

    request_nbytes: int = 8 * 2**20
    """Bytes of the largest useful request; a multiple of 4096.

    At 8 MiB Python's overhead per request is negligible, and a bounce buffer is still small.
    """
    max_gap_nbytes: int = 256 * 2**10
    """Bytes of the largest gap between two extents that is cheaper to read than to split the request."""
    concurrency: int | None = None
    """Requests in flight that saturate the store from one node. None: the number depends on the number of
    processors."""
    is_remote: bool = False
    """True if each request is a network round trip, so that callers avoid requests for data they already received."""
    needs_digests: bool = False
    """True if every part that is read must be compared with a digest of its own. The store names a file by the digest
    of the whole file, which does not verify a part."""

    @property
    def num_opens(self) -> int:
        """Number of files to open at the same time."""
        return _NUM_REMOTE_OPENS if self.is_remote else 1


LOCAL_COST = RequestCost()
"""Cost of local drives and of memory."""


class RequestError(OSError):
    """A failed request to a store over a network. Its text includes advice."""

    def __init__(
        self,
        number: int,
        what: str,
        location: str,
        status: int | None = None,
        code: str = "",
        retry_after: float | None = None,
    ) -> None:
        super().__init__(number, what, location)
        self.status = status
        """HTTP status. None: there was no answer."""
        self.code = code
        """Error code in the server's answer; empty if the answer has none."""
        self.retry_after = retry_after
        """Seconds in the header `Retry-After` of the answer; None if the header is missing."""


@dataclass(frozen=True, slots=True)
class FileStat:
    """Metadata of a file, available without reading its content."""

    nbytes: int
    version: str
    """A value that changes with the content: length and modification time of a local file, or the ETag of an object.

    Empty if a web server reports none. Two requests for such a file may then read different versions, so its bytes need
    verification by digests.
    """
    mode: int = 0o644
    """Permission bits. The default is for stores without permissions."""
    vouched: str | None = None
    """An identifier that the store guarantees: no file with other content has it, in any location. None: only time and
    length are available, and files with other content may have the same ones."""

    def check(self, location: str | Path, nbytes: int | None, version: str | None = None) -> None:
        """Raise FormatError unless the file at `location` has this length and version. None accepts any."""
        if nbytes not in (None, self.nbytes):
            raise FormatError(f"{self.nbytes} bytes long, expected {nbytes}", path=location, code="mismatch")
        if version not in (None, self.version):
            raise FormatError("has changed since it was last checked", path=location, code="mismatch")


def unversioned(location: str) -> FormatError:
    """Return the error for a file read by several requests if nothing verifies that they read one version."""
    what = (
        "the server sends neither ETag nor Last-Modified, so that parts of two versions could be mixed: download it,"
        " and give the folder"
    )
    return FormatError(what, path=location, code="mismatch")


@dataclass(frozen=True, slots=True)
class Entry:
    """A name in a store: a file, a folder, or something that is neither."""

    name: str
    refusal: str | None = None
    """Reason why it is not a file of the store, for example a link to a file elsewhere. None for files and folders."""
    is_folder: bool = False
    """True for a folder. A store without folders lists only the folders that a walk does not enter."""


MAX_LISTED = 100_000
"""Maximum number of names in one listing."""
LISTING_SECONDS = 300.0
"""Maximum duration of one listing in seconds, including the work of its reader."""


def limited(listing: Iterable[Found], location: str | Path) -> Iterator[Found]:
    """Yield the items of a listing within its limits.

    Raises:
        FormatError: the listing has more than `MAX_LISTED` names, or takes longer than `LISTING_SECONDS`.
    """
    check_time = listing_timer(location)
    for count, found in enumerate(listing):
        check_time()
        if count >= MAX_LISTED:
            raise _beyond(f"has more than {MAX_LISTED:,} names", location)
        yield found


def listing_timer(location: str | Path) -> Callable[[], None]:
    """Return a function that raises FormatError once `LISTING_SECONDS` have passed from now."""
    end = time.monotonic() + LISTING_SECONDS

    def check() -> None:
        if time.monotonic() > end:
            raise _beyond(f"takes more than {LISTING_SECONDS:g} s", location)

    return check


def _beyond(limit: str, location: str | Path) -> FormatError:
    what = f"its listing {limit}, the limit; name a folder that contains only the checkpoint"
    return FormatError(what, path=location, code="limit")


Enter = Callable[[str], bool]
"""Returns True for the folders that a walk enters, by their relative names."""


def everywhere(folder: str) -> bool:
    """Return True: a walk enters each folder."""
    return True


def nowhere(folder: str) -> bool:
    """Return False: a walk then lists only the entries directly in the folder of the store."""
    return False


def entered(names: Iterable[str], enter: Enter) -> Iterator[Entry]:
    """Yield the entries of a walk over the files with these names, for a store without folders."""
    closed: set[str] = set()
    for name in names:
        ends = (match.start() for match in re.finditer("/", name))
        folder = next((name[:end] for end in ends if not enter(name[:end])), None)
        if folder is None:
            yield Entry(name)
        elif folder not in closed:
            closed.add(folder)
            yield Entry(folder, is_folder=True)


@dataclass(frozen=True, slots=True)
class Modes:
    """Permissions of written files and folders, before the umask, for stores that have permissions."""

    folder: int = 0o777
    file: int = 0o666


class Closable(Protocol):
    """A resource that is closed by `close` or at the end of a `with` block."""

    def close(self) -> None:
        """Close the resource. For a written file, return when the bytes are on the drive.

        Raises:
            OSError: some bytes could not be written.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ReadableFile(Closable, Protocol):
    """One version of a file, open for reading. Thread-safe. Never returns bytes of a file that replaced it."""

    @property
    def nbytes(self) -> int:
        """Length in bytes."""

    @property
    def version(self) -> str:
        """The version of the open file, see `FileStat.version`; `*` if it becomes known with the first read."""

    @property
    def alignment(self) -> int:
        """Divisor of the offset, length and address of each read: 4096 for direct I/O, else 1.

        Falls to 1 while the file is open if direct I/O turns out to be impossible.
        """

    def fileno(self) -> int | None:
        """Return the descriptor, for mmap(2), cachestat(2) or cuFile; None if the store has no file descriptors."""

    def read(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes at `offset`, up to the end of the file. Thread-safe.

        Raises:
            FormatError: the file was truncated or replaced after it was opened.
            OSError: the read failed.
        """


def read_whole(file: ReadableFile, location: str | Path, limit: int) -> bytes:
    """Return the content of a small file. FormatError: the file at `location` is larger than `limit` bytes."""
    if file.nbytes > limit:
        raise FormatError(f"{file.nbytes} bytes, limit {limit}", path=location, code="limit")
    content = bytearray(file.nbytes)
    file.read(0, memoryview(content))
    return bytes(content)


def if_there(call: Callable[[], Found]) -> Found | None:
    """Return the result of `call`, or None if it raises the FormatError of a missing file."""
    try:
        return call()
    except FormatError as error:
        if error.code != "missing":
            raise
        return None


class WritableFile(Closable, Protocol):
    """A file of known length, open for writing. Thread-safe. Each byte is written at most once, or cloned before.

    Offsets rise, except among concurrent writes. A store that needs a stream must delay writes that arrive too early. A
    local file accepts any order.
    """

    def write(self, offset: int, view: memoryview, address: int = 0) -> None:
        """Write `view` at `offset`. `address` is its memory address modulo 4096.

        The caller reuses the memory after the call.
        """

    def clone(self, source: int, source_offset: int, offset: int, view: memoryview) -> bool:
        """Let a range at `offset` share the blocks of an open file, without a copy, and read it back into `view`.

        Args:
            source: descriptor of the open file.
            source_offset: offset of the range there.

        Returns:
            True: the range and `view` have equal bytes, which no later write to the other file changes. False: it is
                impossible here, and the content of both is undefined.

        Raises:
            OSError: reading failed.
        """


class Store(Protocol):
    """Files in one folder or under one prefix. Thread-safe, and usable in forked children.

    Names are relative, with "/" between their parts. Methods raise OSError if a request or a system call fails.
    `str(store)` is the path or URL that the caller gave.
    """

    @property
    def cost(self) -> RequestCost:
        """The cost of requests."""

    def location(self, name: str) -> str:
        """Return a file's path or URL for messages."""

    def path(self, name: str) -> Path | None:
        """Return the file's path for system calls, without accessing it; None if the store has no file descriptors."""

    def kind(self) -> Kind:
        """Return the kind of thing at the store's own path or prefix."""

    def parent(self) -> tuple[Store, str]:
        """Return the store one level up, and this store's name in it."""

    def snapshot(self) -> Store:
        """Return this store for one reader, such as a load.

        A snapshot of a remote store opens each file once, at the first `stat` or `open`, and keeps the version that it
        found. If the caller gives the length, the snapshot may delay the request to the first read, which then raises
        the errors of opening. A store that opens files at no cost returns itself.
        """

    def walk(self, enter: Enter = everywhere) -> Iterator[Entry]:
        """Yield every file and folder, recursively, in any order.

        Names that begin with a dot are skipped, and all below them. A folder that `enter` does not select is listed
        without its content. A subfolder that cannot be listed, or has vanished, is yielded as an entry that contains
        the reason.

        Raises:
            FormatError: there are more entries, or deeper ones, than the limits allow; see `limited`.
        """

    def stat(self, name: str) -> FileStat | None:
        """Return a file's metadata; None if it does not exist.

        Raises:
            FormatError: it is not a file of the store, but a folder, a device, or a link to a file elsewhere.
        """

    def read(self, name: str, limit: int) -> bytes:
        """Read a small file whole.

        Raises:
            FormatError: the file is missing, cannot be opened, or is larger than `limit` bytes.
        """

    def open(
        self, name: str, nbytes: int | None = None, *, access: Access = Access.BUFFERED, version: str | None = None
    ) -> ReadableFile:
        """Open a file for reading.

        Args:
            nbytes: the expected length. None: any length; FormatError is then raised for a file that cannot be opened.
            version: the expected `FileStat.version`; None: any.

        Raises:
            FormatError: the file is missing, or has another length or version.
            OSError: the file cannot be opened, or not with this `access`.
        """


REGISTRY: dict[str, str] = {
    "https": "relayout.storage.web.http",
    "http": "relayout.storage.web.http",
    "hf": "relayout.storage.web.hub",
    "oci": "relayout.storage.web.oci",
    "oci+http": "relayout.storage.web.oci",
    **dict.fromkeys(("s3", "gs", "az"), "relayout.storage.cloud.bucket"),
}
"""Module names by URL scheme. A module is imported on first use. Its function `offer(url: str) -> Store` raises
PlanError for a URL that is not a valid location of its store."""
_LOCAL = "relayout.storage.local.store"
"""Module of the store for paths."""

_SLASH = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/(?P<rest>[^/].*)", re.DOTALL)
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+)://")


def find_store(path: str | os.PathLike[str]) -> Store:
    """Return the store for a path or URL. A URL must be a `str`, because `pathlib.Path` joins double slashes.

    Raises:
        PlanError: the scheme is not registered, its store rejects the URL, or the argument is neither text nor a path.
    """
    text = path_text(path)
    scheme = scheme_of(path)
    if scheme is None:
        _check_slashes(path)
    elif scheme not in REGISTRY:
        known = ", ".join(f"{name}://" for name in REGISTRY)
        what = f"no store for {scheme}://, expected a path, or one of {known}"
        raise PlanError(what, path=_shown(path), code="option")
    with about(path=_shown(path)):
        store: Store = import_module(_LOCAL if scheme is None else REGISTRY[scheme]).offer(text)
    return store


def _check_slashes(path: str | os.PathLike[str]) -> None:
    """Raise PlanError for a URL that lacks a slash, unless a folder of that name exists."""
    match = _SLASH.match(os.fspath(path))
    if match and match["scheme"].lower() in REGISTRY and not os.path.lexists(match["scheme"] + ":"):
        url = f"{match['scheme']}://{match['rest']}"
        raise PlanError(f"a URL has two slashes: {url}", path=os.fspath(path), code="option")


def _shown(url: str | os.PathLike[str]) -> str:
    """Return a URL without parts that may be secret: a signature, or a password.

    A password may be typed with a slash or a backslash. But the text before the @ of hf://ORG/MODEL@REVISION is a name,
    and is kept.
    """
    secret = re.compile(r"//(?=[^/]*[:@%]|.*\\).*(@|%40)", re.IGNORECASE | re.DOTALL)
    return secret.sub("//", os.fspath(url)).partition("?")[0]


def find_input(path: str | os.PathLike[str]) -> Store:
    """Return the store of an input, as `find_store`; "ORG/MODEL" is a hub repository if no such path exists.

    Raises:
        PlanError: as `find_store`.
    """
    store = find_store(path)
    try:
        is_absent = isinstance(path, str) and scheme_of(path) is None and store.kind() is Kind.NOTHING
    except PermissionError:  # It exists: reading it reports the error.
        return store
    if is_absent:
        of_hub: Store | None = import_module(REGISTRY["hf"]).offer_model(str(path))
        return of_hub or store
    return store


def scheme_of(path: str | os.PathLike[str]) -> str | None:
    """Return the scheme of a URL in lower case, or None for a path."""
    match = _URL.match(path) if isinstance(path, str) else None
    return match["scheme"].lower() if match else None


class ReadOnlyStore:
    """Base class of read-only stores; by default a folder without file descriptors."""

    __slots__ = ()

    def path(self, name: str) -> Path | None:
        return None

    def kind(self) -> Kind:
        return Kind.FOLDER

    def snapshot(self) -> Self:
        return self


class HeadFile(Closable):
    """A `ReadableFile` with its first bytes in memory. It has nothing to close."""

    alignment: ClassVar[int] = 1

    def __init__(self, head: bytes, stat: FileStat, fill: Callable[[int, memoryview], None] | None = None) -> None:
        """Keep `head`; `fill(offset, view)` reads the bytes behind it. None: `head` contains the whole file."""
        self.stat = stat
        self.nbytes = stat.nbytes
        self.version = stat.version
        self._head = head
        self._fill = fill

    def fileno(self) -> None:
        return

    def read(self, offset: int, view: memoryview) -> None:
        view = view[: max(0, self.nbytes - offset)]
        known = memoryview(self._head)[offset : offset + view.nbytes]
        view[: known.nbytes] = known
        if self._fill is not None and known.nbytes < view.nbytes:
            self._fill(offset + known.nbytes, view[known.nbytes :])

    def close(self) -> None:
        """Do nothing."""
