"""Stores: files in one folder or under one prefix, read by ranges; and how the store of a path or URL is found.

Callers ask what a store or file can do (`fileno`, `alignment`, `cost`), never for its type. The scheme of a URL says
which module has the store; a path without a scheme is local.
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
    """How a file is to be read. A store without a page cache refuses `DIRECT` and treats the others alike."""

    DIRECT = "direct"
    """Bypass the page cache; fail if the file system refuses."""
    BUFFERED = "buffered"
    """Read through the page cache."""
    AUTO = "auto"
    """Bypass the page cache if possible."""
    ONCE = "once"
    """Read as with `AUTO`, but drop the pages again that a buffered read brings into the page cache."""


class Kind(Enum):
    """What exists at a store's own path or prefix."""

    FOLDER = "folder"
    FILE = "file"
    OTHER = "other"
    """A device, or a broken link."""
    NOTHING = "nothing"


_NUM_REMOTE_OPENS = 16


@dataclass(frozen=True, slots=True)
class RequestCost:
    """What reading from a store costs: requests, and digests. The defaults fit a local drive."""

    request_nbytes: int = 8 * 2**20
    """The largest useful request; a multiple of 4096.

    At 8 MiB Python's overhead per request is negligible, and a bounce buffer is still small.
    """
    max_gap_nbytes: int = 256 * 2**10
    """The largest gap between two extents that is cheaper to read than to split the request."""
    concurrency: int | None = None
    """Requests of one node in flight that saturate the store; None: it depends on the number of processors."""
    is_remote: bool = False
    """Whether each request is a round trip over a network, so that none is made for what another answer has."""
    needs_digests: bool = False
    """True if every part that is read must be compared with a digest of its own: the store names a file by the digest
    of the whole, which proves no part."""

    @property
    def num_opens(self) -> int:
        """Files to open at the same time."""
        return _NUM_REMOTE_OPENS if self.is_remote else 1


LOCAL_COST = RequestCost()
"""Cost of local drives and of memory."""


class RequestError(OSError):
    """A request to a store over a network failed. The text says what to do about it."""

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
        """The status of HTTP; None: there was no answer."""
        self.code = code
        """The server's own name of the error; empty if it has none."""
        self.retry_after = retry_after
        """Seconds, as the server says (`Retry-After`); None if it does not."""


@dataclass(frozen=True, slots=True)
class FileStat:
    """A file's metadata, known without reading it."""

    nbytes: int
    version: str
    """Changes when the content does: length and modification time of a local file, the ETag of an object.

    Empty if a web server reports none: parts of such a file may be of several versions, and need proof.
    """
    mode: int = 0o644
    """Permission bits; the default for a store without permissions."""
    vouched: str | None = None
    """What the store vouches for: no file of another content has it, wherever it is. None: times and lengths are all
    that is known, and files of other content may have the same."""

    def check(self, location: str | Path, nbytes: int | None, version: str | None = None) -> None:
        """Raise FormatError unless the file at `location` has this length and version; None: any."""
        if nbytes not in (None, self.nbytes):
            raise FormatError(f"{self.nbytes} bytes long, expected {nbytes}", path=location, code="mismatch")
        if version not in (None, self.version):
            raise FormatError("has changed since it was last checked", path=location, code="mismatch")


def unversioned(location: str) -> FormatError:
    """The error for a file that was read by several requests, if nothing proves that they read one version."""
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
    """Why it is not a file of the store, for example a link to a file elsewhere; None for files and folders."""
    is_folder: bool = False
    """True for a folder. A store without folders lists only those that a walk does not enter."""


MAX_LISTED = 100_000
"""The most names of one listing."""
LISTING_SECONDS = 300.0
"""The longest time of one listing, its reader's work included."""


def limited(listing: Iterable[Found], location: str | Path) -> Iterator[Found]:
    """Yield what a listing has, up to its limits.

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
    """Return a function that raises FormatError when `LISTING_SECONDS` have passed since now."""
    end = time.monotonic() + LISTING_SECONDS

    def check() -> None:
        if time.monotonic() > end:
            raise _beyond(f"takes more than {LISTING_SECONDS:g} s", location)

    return check


def _beyond(limit: str, location: str | Path) -> FormatError:
    what = f"its listing {limit}, the limit; name a folder that contains only the checkpoint"
    return FormatError(what, path=location, code="limit")


Enter = Callable[[str], bool]
"""Selects the folders that a walk enters, by their relative names."""


def everywhere(folder: str) -> bool:
    """Enter each folder."""
    return True


def nowhere(folder: str) -> bool:
    """Enter no folder: a walk then lists only what is directly in the folder of the store."""
    return False


def entered(names: Iterable[str], enter: Enter) -> Iterator[Entry]:
    """The entries of a walk over the files with these names, for a store without folders."""
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
    """Something to close, by `close` or at the end of a `with` block."""

    def close(self) -> None:
        """Close it. A written file: return when the bytes are on the drive.

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
    """One version of a file, open for reading. Thread-safe. Bytes of a replacement file are never mixed in."""

    @property
    def nbytes(self) -> int:
        """Length in bytes."""

    @property
    def version(self) -> str:
        """The version of the open file, see `FileStat.version`; `*` if its first read will tell it."""

    @property
    def alignment(self) -> int:
        """Offset, length and address of a read must be multiples of this: 4096 for direct I/O, else 1.

        Falls to 1 while the file is open if direct I/O turns out to be impossible.
        """

    def fileno(self) -> int | None:
        """The descriptor, for mmap(2), cachestat(2) or cuFile; None if the store has no file descriptors."""

    def read(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes at `offset`, up to the end of the file. Thread-safe.

        Raises:
            FormatError: the file was truncated or replaced after it was opened.
            OSError: the read failed.
        """


def read_whole(file: ReadableFile, location: str | Path, limit: int) -> bytes:
    """The content of a small file. FormatError: the file at `location` is larger than `limit` bytes."""
    if file.nbytes > limit:
        raise FormatError(f"{file.nbytes} bytes, limit {limit}", path=location, code="limit")
    content = bytearray(file.nbytes)
    file.read(0, memoryview(content))
    return bytes(content)


def if_there(call: Callable[[], Found]) -> Found | None:
    """What `call` returns; None if it raises the FormatError of a missing file."""
    try:
        return call()
    except FormatError as error:
        if error.code != "missing":
            raise
        return None


class WritableFile(Closable, Protocol):
    """A file of known length, open for writing. Thread-safe. Each byte is written at most once.

    Offsets rise, except among concurrent writes: a store that needs a stream must hold back writes that are ahead. A
    local file accepts any order.
    """

    def write(self, offset: int, view: memoryview, address: int = 0) -> None:
        """Write `view` at `offset`. `address` is its memory address modulo 4096. The caller reuses the memory."""


class Store(Protocol):
    """Files in one folder or under one prefix. Thread-safe, and usable in forked children.

    Names are relative, with "/" between their parts. Methods raise OSError if a request or a system call fails. As
    text, a store is the path or URL that the caller gave.
    """

    @property
    def cost(self) -> RequestCost:
        """What requests cost."""

    def location(self, name: str) -> str:
        """A file's path or URL for messages."""

    def path(self, name: str) -> Path | None:
        """The file's path for system calls; None if the store has no file descriptors. Does not access the file."""

    def kind(self) -> Kind:
        """What exists at the store's own path or prefix."""

    def parent(self) -> tuple[Store, str]:
        """The store one level up, and this store's name in it."""

    def snapshot(self) -> Store:
        """This store for one reader, such as a load.

        A remote store opens each file once, at the first `stat` or `open`, and stays at the version that it found. It
        may leave this to the first read, if the length is given: then that tells what is wrong with a file. A store
        whose files cost nothing to open returns itself.
        """

    def walk(self, enter: Enter = everywhere) -> Iterator[Entry]:
        """Every file and folder, recursively, in any order. Skips names that begin with a dot, and all below them.

        A folder that `enter` does not select is listed, and nothing below it. A folder below the store's own that
        cannot be listed, or has vanished, is an entry with a refusal.

        Raises:
            FormatError: there are more entries, or deeper ones, than the limits allow; see `limited`.
        """

    def stat(self, name: str) -> FileStat | None:
        """A file's metadata; None if it does not exist.

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
            nbytes: the expected length. None: any length; a file that cannot be opened is then a FormatError.
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
"""The module for each scheme of URLs, imported on first use. It has `offer(url: str) -> Store`, which raises PlanError
for a URL that names no place there."""
_LOCAL = "relayout.storage.local.store"
"""The module for paths."""

_SLASH = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/(?P<rest>[^/].*)", re.DOTALL)
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+)://")


def find_store(path: str | os.PathLike[str]) -> Store:
    """The store for a path or URL. A URL must be a `str`, because `pathlib.Path` joins double slashes.

    Raises:
        PlanError: the scheme is not registered, or its store refuses the URL; or it is neither text nor a path.
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
    """Raise PlanError for a URL that lacks a slash, unless there is a folder of that name."""
    match = _SLASH.match(os.fspath(path))
    if match and match["scheme"].lower() in REGISTRY and not os.path.lexists(match["scheme"] + ":"):
        url = f"{match['scheme']}://{match['rest']}"
        raise PlanError(f"a URL has two slashes: {url}", path=os.fspath(path), code="option")


def _shown(url: str | os.PathLike[str]) -> str:
    """A URL without what may be secret: a signature, or a password, which may be typed with a slash or a backslash.

    What is behind a slash alone is a name: hf://ORG/MODEL@REVISION.
    """
    secret = re.compile(r"//(?=[^/]*[:@%]|.*\\).*(@|%40)", re.IGNORECASE | re.DOTALL)
    return secret.sub("//", os.fspath(url)).partition("?")[0]


def find_input(path: str | os.PathLike[str]) -> Store:
    """The store of something to read: as `find_store`; "ORG/MODEL" is a repository of the hub if there is no such path.

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
    """The scheme of a URL, in lower case; None for a path."""
    match = _URL.match(path) if isinstance(path, str) else None
    return match["scheme"].lower() if match else None


class ReadOnlyStore:
    """A folder that shows no path."""

    __slots__ = ()

    def path(self, name: str) -> Path | None:
        return None

    def kind(self) -> Kind:
        return Kind.FOLDER

    def snapshot(self) -> Self:
        return self


class HeadFile(Closable):
    """A `ReadableFile`. It holds nothing to close."""

    alignment: ClassVar[int] = 1

    def __init__(self, head: bytes, stat: FileStat, fill: Callable[[int, memoryview], None] | None = None) -> None:
        """`fill` fills memory with the bytes at an offset behind the head; None: all of the file is in the head."""
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
