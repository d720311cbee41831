"""Parts of an output that several processes, also of several machines, assemble on a shared file system.

The folder beside OUT has a subfolder for each name that parts share, and in it a private one for each attempt at a
part. When all files of a part are on the drive, they are renamed to the assembled output, and its notes last. So files
of a lost process never count as a part, and of two attempts at the same part the second replaces each file by an equal
one.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from relayout.errors import PlanError
from relayout.publish.folder import lock_of, open_left, place_of, subfolder
from relayout.publish.local_output import FOLDER, LocalOutput, read_notes
from relayout.storage.local.files import sync_and_drop_pages
from relayout.storage.local.lock_file import user_of_new_files
from relayout.storage.local.open_folder import OpenFolder, rename
from relayout.storage.protocols import Modes

_TRIES = 100


class LocalPart(LocalOutput):
    """The staging folder of one attempt at parts."""

    def __init__(self, output: Path, place: OpenFolder, modes: Modes, whole: OpenFolder) -> None:
        """`whole` is where parts are assembled."""
        super().__init__(output, place, modes)
        self._whole = whole

    @property
    def earlier(self) -> None:
        """Nothing: what an attempt has left beside finished parts does not count."""

    def kept(self, part: str) -> bytes | None:
        return read_notes(self._whole, part)

    def keep(self, part: str, notes: bytes) -> None:
        """Add the files, and then the notes of the part. This fails if the output was published meanwhile."""
        self.open_notes(part, notes).close()
        with subfolder(self._whole, FOLDER, self.modes.folder) as target:
            for name in self.names():
                rename(self.folder, name, target, name)
            os.fsync(target.fd)
        sync_and_drop_pages(self.place, part)
        rename(self.place, part, self._whole, part)
        os.fsync(self._whole.fd)


@contextmanager
def staging_part(output: Path, marker: str, shared: str, *, replace: bool, modes: Modes) -> Iterator[LocalPart]:
    """Yield a private folder for one attempt at parts, in the one whose name (`folder.shared_folder`) all parts share.

    Raises:
        PlanError: the output exists already, and `replace` is not set.
    """
    output = output.resolve()
    attempt = f"attempt-{os.urandom(8).hex()}"
    with OpenFolder(output.parent) as parent:
        _check_not_published(output, marker, replace)
        with _assembly(parent, output, shared, attempt) as whole:
            try:
                with whole.subfolder(attempt) as folder:
                    staging = LocalPart(output, folder, modes, whole)
                    try:
                        yield staging
                    except FileNotFoundError:
                        _check_not_published(output, marker, replace)
                        raise
                    finally:
                        staging.folder.close()
            finally:
                with suppress(OSError):
                    whole.remove(attempt)
                # Nothing is left where nothing was added, or all was published. These fail where there is anything.
                place = place_of(output).name
                with suppress(OSError):
                    os.rmdir(f"{place}/{shared}", dir_fd=parent.fd)
                    os.rmdir(place, dir_fd=parent.fd)


def _check_not_published(output: Path, marker: str, replace: bool) -> None:
    if not replace and (output / marker).is_file():
        raise PlanError("is complete already; --force replaces it", path=output, code="exists")


def _assembly(parent: OpenFolder, output: Path, shared: str, attempt: str) -> OpenFolder:
    """Where parts are assembled, with a new folder for an attempt; several processes may make it at the same time."""
    user = user_of_new_files(parent, lock_of(output).name)
    for _ in range(_TRIES):
        with suppress(FileExistsError):
            parent.make(place_of(output).name, stat.S_IRWXU)
        try:
            with open_left(parent, output, user) or parent.subfolder(place_of(output).name) as place:
                whole = subfolder(place, shared)
            whole.make(attempt, stat.S_IRWXU)
            return whole
        except FileNotFoundError:
            continue  # Another process has just found it empty, and removed it.
    raise PlanError("is removed repeatedly by another process", path=place_of(output), code="busy")
