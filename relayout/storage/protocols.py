"""The store protocols: files in one folder or under one prefix, read by ranges and published all at once.

Callers ask what a store or file can do (`fileno`, `alignment`, `cost`), never for its type.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TypeVar

from relayout.errors import FormatError, PlanError, shown

Found = TypeVar("Found")


class Access(Enum):
    """How a file is to be read. A store without a page cache refuses `DIRECT` and treats the others alike."""

    DIRECT = "direct"
    """Bypass the page cache; fail if the file system refuses."""
    BUFFERED = "buffered"
    """Through the page cache."""
    AUTO = "auto"
    """Bypass the page cache if possible."""
    ONCE = "once"
    """As `AUTO`; pages that a buffered read brings into the page cache are dropped again."""


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
    """What a store's requests cost. The defaults fit a local drive."""

    chunk_nbytes: int = 8 * 2**20
    """The largest useful request; a multiple of 4096.

    At 8 MiB Python's overhead per request is negligible, and a bounce buffer is still small.
    """
    max_gap_nbytes: int = 256 * 2**10
    """The largest gap between two extents that is cheaper to read than to split the request."""
    concurrency: int | None = None
    """Requests of one node in flight that saturate the store; None: it depends on the number of processors."""
    is_remote: bool = False
    """Whether each request is a round trip over a network, so that none is made for what another answer has."""

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
        """Of HTTP; None: there was no answer."""
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
    is_readable: bool = True
    """Whether this process may read it."""
    is_folder: bool = False
    """Whether it is a folder; only some stores have folders."""


@dataclass(frozen=True, slots=True)
class Modes:
    """Permissions of written files and folders, before the umask, for stores that have permissions."""

    folder: int = 0o777
    file: int = 0o666


_NUM_SHOWN = 3
"""Files that an error names."""


@dataclass(frozen=True, slots=True)
class Replaceable:
    """What `force` may replace, and by what proof: an output that its own records describe, and nothing beside it."""

    marker: str
    """The file that every such output has, which is written last."""
    describe: Callable[[Store], str]
    """What an output is, by its records. A FormatError: they are damaged, or foreign."""
    names: Callable[[Store], frozenset[str]]
    """Names of all files that an output's records name, the records too. A FormatError as of `describe`."""

    def check(self, store: Store, there: Collection[str], *, force: bool) -> frozenset[str]:
        """Check that an output may be written to `store`. Changes nothing.

        Args:
            there: names of all that exists, including hidden names and empty folders.
            force: whether an older output may be replaced.

        Returns:
            What may be deleted then: the files that the older output's records name. Nothing else is ever deleted.

        Raises:
            PlanError: something is there that may not be deleted.
        """
        if not there:
            return frozenset()
        if self.marker not in there:
            what = (
                f"is not empty: holds {_first(there)}, and no {self.marker}, so nothing proves that relayout wrote it;"
                " choose another output"
            )
            raise PlanError(what, path=str(store), code="exists")
        try:
            if not force:
                what = f"already holds {self.describe(store)}; --force replaces it"
                raise PlanError(what, path=str(store), code="exists")
            named = self.names(store)
        except FormatError as error:
            what = f"is not empty; nothing proves that relayout wrote it, so choose another output: {error}"
            raise PlanError(what, path=str(store), code="exists") from None
        if foreign := sorted(set(there) - named):
            what = f"holds files that relayout did not write, so --force does not replace it: {_first(foreign)}"
            raise PlanError(what, path=str(store), code="exists")
        return named


def _first(names: Collection[str]) -> str:
    """The first names, for a message."""
    first = ", ".join(map(shown, sorted(names)[:_NUM_SHOWN]))
    return f"{first} ..." if len(names) > _NUM_SHOWN else first


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
        """As `FileStat.version`."""

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


class Notes(Closable, Protocol):
    """An append-only file."""

    def append(self, text: bytes) -> None:
        """Append `text` atomically. Thread-safe."""


LIVE = "live-"
"""Names that parts share begin with it if whoever publishes them has the output's lock from before the first part. So
whoever has the lock knows that parts of other such names are left of processes that ended, and deletes them."""


def kept_note(location: str) -> str:
    """The note on the error of an attempt whose files are kept."""
    return f"finished work is kept in {location}; the same command resumes it"


class Staging(Protocol):
    """Where an output is assembled, invisible to readers. At most one process has it open for an output.

    Files of known length: `write_file` opens them any number of times, and `write_head` completes them with their first
    bytes, which depend on all others (in a multipart upload, the first part is sent last). Small files: `put` writes
    them whole.

    If an attempt fails, the files are kept for the next one if there are notes about them behind a header, and the
    error says so. Without notes they are deleted. An attempt that has changed nothing leaves those of an earlier one.

    Methods raise OSError if a request or a system call fails, and FormatError if what is here under the name that they
    are given is not a regular file of this user.
    """

    @property
    def can_read(self) -> bool:
        """Whether `open` can read what was written.

        If not, a file counts for the next attempt if `write_head` completed it: `names` then has no others of an
        earlier attempt.
        """

    @property
    def location(self) -> str:
        """The path or URL for messages."""

    def clear(self) -> None:
        """Delete everything that was written here, also by an earlier attempt."""

    def check_space(self, nbytes: int) -> None:
        """Check that there is space for an output of `nbytes` in all, less what is here already.

        A store that does not know its space accepts any size.

        Raises:
            PlanError: there is less space.
        """

    def take_parts(self) -> None:
        """Take the parts that were added since the output was staged under a `LIVE` name. All have been added."""

    def names(self) -> list[str]:
        """Names of the files here."""

    def remove(self, name: str) -> None:
        """Delete the file `name`, if it exists."""

    def open(self, name: str, nbytes: int) -> ReadableFile:
        """Open a file that was written here, to read what is stored on the drive.

        Raises:
            FormatError: the file is missing, or has another length.
            OSError: the file cannot be opened, or written bytes did not reach the drive.
        """

    def write_file(self, name: str, nbytes: int) -> WritableFile:
        """Open a file of known length for writing. If it is not here yet, create it and allocate its space.

        Raises:
            OSError: there is not enough space.
        """

    def write_head(self, name: str, head: bytes, nbytes: int) -> None:
        """Write the first bytes of a file of `nbytes` after all others, and close it."""

    def put(self, name: str, pieces: Iterable[bytes], mode: int | None = None) -> None:
        """Write a new file whole.

        Args:
            mode: the file's permissions before the umask; None: those of all other files.
        """

    def read_notes(self, name: str) -> bytes | None:
        """Read notes, which do not become part of the output; None if this user has no notes here."""

    def open_notes(self, name: str, header: bytes | None) -> Notes:
        """Open notes for appending. Of an output, they are named `relayout.*`.

        Args:
            header: begin new notes with it, in place of existing ones; None: continue existing notes.
        """


class Store(Protocol):
    """Files in one folder or under one prefix. Thread-safe, and usable in forked children.

    Names are relative, with "/" between their parts. Methods raise OSError if a request or a system call fails.
    """

    @property
    def cost(self) -> RequestCost:
        """What requests cost."""

    def __str__(self) -> str:
        """The path or URL that the caller gave."""

    def location(self, name: str) -> str:
        """A file's path or URL for messages."""

    def path(self, name: str) -> Path | None:
        """The file's path for system calls; None if the store has no file descriptors. Does not access the file."""

    def kind(self) -> Kind:
        """What exists at the store's own path or prefix."""

    def not_found_message(self) -> str:
        """The message for a store of `Kind.NOTHING`: the reason, and possibly a remedy."""

    def parent(self) -> tuple[Store, str]:
        """The store one level up, and this store's name in it."""

    def snapshot(self) -> Store:
        """This store for one reader, such as a load.

        A remote store opens each file once, at the first `stat` or `open`, and stays at the version that it found. A
        store whose files cost nothing to open returns itself.
        """

    def walk(self) -> Iterator[Entry]:
        """Every file and folder, recursively, in any order. Skips names that begin with a dot, and all below them."""

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

    def add(self, name: str, content: bytes) -> None:
        """Write a small file beside what is published, in place of an older one.

        Raises:
            PlanError: the store is read-only.
        """

    def check_output(self, source: Store, older: Replaceable, *, force: bool) -> None:
        """Check that an output here would not destroy other files; delete what a killed process of this user left.

        Args:
            older: what `force` replaces.

        Raises:
            PlanError: this is the source, contains it or is inside it; is not empty; or cannot be written.
        """

    def stage(
        self, older: Replaceable, *, replace: bool, modes: Modes, shared: str | None = None
    ) -> AbstractContextManager[Staging]:
        """Begin an output, which is published when the block ends.

        With `shared`, all files and notes of parts that were added under this name are there; without, parts of an
        output here are refused, or deleted with `replace`. A name that begins with `LIVE` is that of parts which are
        added while the block runs, and are deleted if it fails.

        A local folder is renamed as a whole; on failure nothing changes. A store without rename writes the marker
        last and fails if it exists by then; with `replace`, it first deletes the marker of the older output. Only files
        that the records of the older output name are deleted.

        Raises:
            PlanError: another process is writing the same output, or the existing output cannot be replaced.
            OSError: something else has been created here meanwhile.
        """

    def stage_part(
        self, older: Replaceable, shared: str, part: str, *, replace: bool, modes: Modes
    ) -> AbstractContextManager[Staging]:
        """Begin a part of an output that several processes assemble, also at the same time, to be published by `stage`.

        If the block writes notes named `part`, the part is complete at its end: its files are added to the output, and
        then these notes. Else nothing of it is left. Two that do the same part at once write the same files, and do
        not meet before the end. `read_notes(part)` has the notes of a part that is complete already.

        Args:
            shared: what all parts have in common; those of another name are never mixed with them.

        Raises:
            PlanError: the output exists already, and `replace` is not set.
        """
