"""What a store is: files in one folder or under one prefix, read by ranges, written as streams, published at once.

Callers ask what a store or file can do (`fileno`, `alignment`, `cost`), and never what it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self


class Access(Enum):
    """How a file is to be read. A store without a page cache reads all alike, but refuses `DIRECT`."""

    DIRECT = "direct"
    """Past the page cache; where that is refused, it is an error."""
    BUFFERED = "buffered"
    """Through the page cache."""
    AUTO = "auto"
    """Past the page cache where that is possible."""
    ONCE = "once"
    """As `AUTO`; and what has to go through the page cache does not stay there."""


class Kind(Enum):
    """What is at the place that a store was made for."""

    FOLDER = "folder"
    FILE = "file"
    OTHER = "other"
    """A device, or a link to nothing."""
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class RequestCost:
    """What reads of a store should look like. The defaults fit a local drive."""

    chunk_nbytes: int = 8 * 2**20
    """The largest request that is worth making; a multiple of 4096.

    At 8 MiB Python's part in a request is noise, and a bounce buffer is still small.
    """
    max_gap_nbytes: int = 256 * 2**10
    """Bytes that it is cheaper to read in vain, up to this, than to make another request."""
    concurrency: int | None = None
    """Requests in flight that keep the store busy, however many processors there are; None: it depends on them."""


LOCAL_COST = RequestCost()
"""Of local drives, and of memory."""


@dataclass(frozen=True, slots=True)
class FileStat:
    """What a store tells of a file without reading it."""

    nbytes: int
    version: str
    """Changes when the content does: length and time of a local file, the ETag of an object."""
    mode: int = 0o644
    """Permission bits; where a store has none, these."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a store, or something else that has a name there."""

    name: str
    refusal: str | None = None
    """Why it is no file of the store: a link to somewhere else, for example."""
    is_readable: bool = True
    """Whether this process may read it."""
    is_folder: bool = False
    """Whether it is a folder, which only some stores know."""


@dataclass(frozen=True, slots=True)
class Modes:
    """The most permissions that what is written may have, less the umask; for stores that know permissions."""

    folder: int = 0o777
    file: int = 0o666


@dataclass(frozen=True, slots=True)
class Refusal:
    """There is no store for a path."""

    reason: str


class File(Protocol):
    """An open file."""

    def close(self) -> None:
        """Close it. Of one that was written: return when the bytes are safe.

        Raises:
            OSError: they could not all be written.
        """

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class ReadableFile(File, Protocol):
    """One version of a file, read by any number of threads. What replaces it meanwhile is never mixed in."""

    @property
    def nbytes(self) -> int:
        """Its length."""

    @property
    def version(self) -> str:
        """See `FileStat.version`."""

    @property
    def alignment(self) -> int:
        """What offset, length and address of a read must be multiples of: 4096 for direct I/O, else 1.

        May fall to 1 while the file is open, if direct I/O turns out to be impossible.
        """

    def fileno(self) -> int | None:
        """Its descriptor, for mmap(2), cachestat(2) or cuFile; None where there is none."""

    def read(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes at `offset`, as far as the file reaches. Any thread.

        Raises:
            FormatError: the file has become shorter, or was replaced.
            OSError: the read failed.
        """


class WritableFile(File, Protocol):
    """A file of known length that is being written, by any number of threads, each byte at most once.

    Within a file offsets rise, but for the pieces that threads bring at once: a store that needs a stream holds those
    back that are ahead. A local file takes any order.
    """

    def write(self, offset: int, view: memoryview, address: int = 0) -> None:
        """Write `view` at `offset`; its memory starts at `address`, modulo 4096. The memory is reused after the call.

        Raises:
            OSError: the write failed.
        """


class Notes(File, Protocol):
    """A file that only grows."""

    def append(self, text: bytes) -> None:
        """Add `text` at the end, in one piece. Any thread.

        Raises:
            OSError: it cannot be written.
        """


class Staging(Protocol):
    """A place where an output is put together, unseen by readers. At most one process has it open for an output.

    Files: those of known length are opened any number of times by `write_file`, and complete when `write_head` has
    given them their first bytes, which depend on all others (of a multipart upload, its first part comes last); small
    ones are written at once by `put`.
    """

    is_kept: bool
    """Whether what is here shall stay for the next attempt, if this one fails."""
    advice: str | None
    """What to add to the error, if it stays."""

    @property
    def where(self) -> str:
        """What messages call the place."""

    def clear(self) -> None:
        """Delete everything that an earlier attempt has left."""

    def allocated_nbytes(self) -> int:
        """Bytes that the files here take already."""

    def check_space(self, nbytes: int) -> None:
        """Refuse to start what the store cannot hold.

        Raises:
            PlanError: less than `nbytes` bytes are free, where the store can tell.
        """

    def names(self) -> list[str]:
        """Of the files that are here."""

    def remove(self, name: str) -> None:
        """Delete what has this name, if there is anything."""

    def open(self, name: str, nbytes: int) -> ReadableFile:
        """Open a file that was written here, to read what is really stored.

        Raises:
            FormatError: it is missing, no regular file of this user's, or has another length.
            OSError: it cannot be opened, or what was written has not reached the drive.
        """

    def write_file(self, name: str, nbytes: int, *, is_new: bool) -> WritableFile:
        """Open a file of known length for writing: a new one, for which there must be space, or one that is here.

        Raises:
            FormatError: the one that is here is no regular file of this user's.
            OSError: a new one exists, or there is no space.
        """

    def write_head(self, name: str, head: bytes, nbytes: int) -> None:
        """Write the first bytes of a file of `nbytes`, whose others, if it has any, have been written, and close it.

        Raises:
            FormatError: what is here is no regular file of this user's.
            OSError: writing failed.
        """

    def put(self, name: str, pieces: Iterable[bytes], mode: int | None = None) -> None:
        """Write a new file whole.

        Args:
            mode: its permissions, less the umask; None: as those of all others.

        Raises:
            OSError: it exists, or writing failed.
        """

    def read_notes(self, name: str) -> bytes | None:
        """What notes in the place hold, which do not become part of the output; None if there are none of this user's.

        Raises:
            OSError: they cannot be read now.
        """

    def open_notes(self, name: str, *, is_new: bool) -> Notes:
        """Notes to add to: new ones in place of what may be there, or those that are there.

        Raises:
            FormatError, OSError: they cannot be opened.
        """


class Store(Protocol):
    """Files in one folder or under one prefix. Any number of threads may use it, and children of a fork.

    Names are relative, with "/" between their parts.
    """

    @property
    def cost(self) -> RequestCost:
        """What reads should look like."""

    def __str__(self) -> str:
        """The path or URL that was asked for."""

    def where(self, name: str) -> str:
        """What messages call a file."""

    def path(self, name: str) -> Path | None:
        """Where calls of the system find a file; None where there are no descriptors. Does not look at it."""

    def kind(self) -> Kind:
        """What is at the store's own place.

        Raises:
            OSError: it cannot be looked at.
        """

    def absence(self) -> str:
        """What to tell where there is nothing: a reason, and perhaps what to do about it."""

    def parent(self) -> tuple[Store, str]:
        """The store that this one's place lies in, and its name there."""

    def folder_mode(self) -> int:
        """The permission bits of the folder; 0o777 where there are none."""

    def walk(self) -> Iterator[Entry]:
        """Every file and folder here and below, in any order, but those below or at a name that begins with a dot.

        Raises:
            OSError: a folder cannot be listed.
        """

    def stat(self, name: str) -> FileStat | None:
        """Look at a file; None if there is none.

        Raises:
            FormatError: it is no file of the store: a folder, a device, a link to somewhere else.
            OSError: it cannot be looked at.
        """

    def read(self, name: str, limit: int) -> bytes:
        """Read a small file whole.

        Raises:
            FormatError: it is missing, cannot be opened, or is larger than `limit` bytes.
            OSError: reading failed.
        """

    def open(
        self, name: str, nbytes: int | None = None, *, access: Access = Access.BUFFERED, version: str | None = None
    ) -> ReadableFile:
        """Open a file for reading.

        Args:
            nbytes: the length that it must have. None: any; what cannot be opened is bad input then.
            version: as `stat` told it, if it must still be that.

        Raises:
            FormatError: the file is missing, or has another length or version.
            OSError: it cannot be opened, or not as asked.
        """

    def check_output(self, source: Store, marker: str, *, force: bool) -> None:
        """Refuse to make an output here that would lose something; delete what a killed process of ours has left.

        Args:
            marker: the file that an output has that relayout wrote, and that `force` may replace.

        Raises:
            PlanError: this is, contains or lies in the source, holds something, or cannot be written.
        """

    def stage(self, marker: str, *, replace: bool, modes: Modes) -> AbstractContextManager[Staging]:
        """Begin an output, which is complete when the block ends, and not an output before.

        A local folder is renamed as a whole, or nothing has changed. Where there is no rename, `marker` is written last
        and must not exist by then; with `replace`, that of the older output is deleted first.

        Raises:
            PlanError: another process is writing the same output, or it cannot be replaced.
            OSError: among others, something else has come to be here meanwhile.
        """
