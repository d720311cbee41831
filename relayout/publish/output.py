"""Outputs: what is made, what may be replaced, and in which order the methods of an output are called."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from relayout.errors import FormatError, PlanError, shown
from relayout.storage.protocols import Modes, Store, WritableFile

if TYPE_CHECKING:
    from relayout.publish.local_output import LocalOutput

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
                f"is not empty: holds {first_of(there)}, and no {self.marker}, so nothing proves that relayout wrote"
                " it; choose another output"
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
            what = f"holds files that relayout did not write, so --force does not replace it: {first_of(foreign)}"
            raise PlanError(what, path=str(store), code="exists")
        return named


def first_of(names: Collection[str]) -> str:
    """The first names, for a message."""
    first = ", ".join(map(shown, sorted(names)[:_NUM_SHOWN]))
    return f"{first} ..." if len(names) > _NUM_SHOWN else first


def kept_note(location: str) -> str:
    """The note on the error of an attempt whose files are kept."""
    return f"finished work is kept in {location}; the same command resumes it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What an output is going to be. Who makes the same goes on with what others, or an earlier attempt, finished."""

    what: str
    """What is made, for messages, such as "a conversion of MODEL"."""
    fingerprint: str
    """Digest of all that decides which bytes are written."""
    weights: Collection[str] = ()
    """Names of the weight files, if they are the work's own choice, so that a mark may be added; see `marked`."""
    others: Collection[str] = ()
    """Names of all other files."""
    modes: Modes = field(default_factory=Modes)
    is_resumable: bool = True
    """Whether finished parts are kept if the work fails. Else nothing is left."""
    is_live: bool = False
    """Whether its parts are added only while the process that publishes has begun the output, as in a group."""
    scratch: str | Path | None = None
    """The folder for files on their way to a bucket; None: the system's folder of temporary files."""


def marked(name: str, mark: str) -> str:
    """The name of a weight file that has a mark: before its extension."""
    if not mark:
        return name
    stem, dot, extension = name.rpartition(".")
    return f"{stem}-{mark}{dot}{extension}"


class Output(Protocol):
    """An output that is being made. Readers do not see it, or do not take it for complete, before the end.

    The order of calls, of one process that makes an output (`begin`):

    1. `kept(part)` for each part: what is returned is finished, and not made again.
    2. For each other part: `check_space`; `write` opens each of its large files any number of times, `head` completes
       each with its first bytes, which depend on all others; then `keep(part, notes)`.
    3. `put` for small files, in any order.
    4. The end of the `with` block publishes: all becomes visible at once, or the marker is written last. If the block
       fails, what was kept stays for the next attempt, or nothing does (`Work.is_resumable`).

    Several processes make the parts (`begin_part`: 1 and 2, each for its own), and one publishes (`begin` with
    `gathers`: 1, 3 and 4). Parts may be made twice, also at the same time: the files are the same.

    A local folder that one process makes has no parts. `earlier` is this folder then, with the unfinished files of an
    earlier attempt, and its own notes of them.

    Methods raise OSError if a request or a system call fails, and FormatError if what is here under a given name is not
    a regular file of this user.
    """

    @property
    def mark(self) -> str:
        """What the names of weight files carry; see `marked`. Usually empty."""

    @property
    def location(self) -> str:
        """The path or URL for messages."""

    @property
    def earlier(self) -> LocalOutput | None:
        """What an earlier attempt has left, to be read again; None: only parts that were kept count."""

    def check_space(self, nbytes: int, part_nbytes: int | None = None) -> None:
        """Check that there is space for `nbytes` in all, of which a part has `part_nbytes`; None: there is one part.

        Raises:
            PlanError: there is less space.
        """

    def write(self, name: str, nbytes: int) -> WritableFile:
        """Open a file of known length for writing. If it is not here yet, create it and allocate its space.

        Raises:
            OSError: there is not enough space.
        """

    def head(self, name: str, head: bytes, nbytes: int) -> None:
        """Write the first bytes of a file of `nbytes` after all others, and close it."""

    def put(self, name: str, pieces: Iterable[bytes], mode: int | None = None) -> None:
        """Write a new file whole.

        Args:
            mode: the file's permissions before the umask; None: those of all other files.
        """

    def kept(self, part: str) -> bytes | None:
        """The notes of a part that is finished, with all of its files; None if it is not."""

    def keep(self, part: str, notes: bytes) -> None:
        """A part is finished: its files are those that were completed since the last call."""
