"""The store of a local folder, which may be a snapshot in a Hugging Face cache, or of one file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from relayout.errors import FormatError, did_you_mean
from relayout.storage.local.files import InputFile, check_regular, read_small, stat_of
from relayout.storage.local.paths import is_inside, resolve_inside
from relayout.storage.protocols import LOCAL_COST, Access, Entry, FileStat, Kind, Modes, RequestCost, Store

if TYPE_CHECKING:
    from relayout.storage.local.staging import LocalStaging

# `staging` is imported where it is used: a load writes nothing.


@dataclass(frozen=True, slots=True)
class LocalStore:
    """See `protocols.Store`."""

    folder: Path
    """The path as given; of a store for one file, that file."""
    named: str | None = None
    """A file in the folder that the user named explicitly; it may be a link to any file."""

    cost: ClassVar[RequestCost] = LOCAL_COST

    def __str__(self) -> str:
        return str(self.folder)

    def where(self, name: str) -> str:
        """See `Store.where`."""
        return str(self.folder / name)

    def path(self, name: str) -> Path:
        """See `Store.path`."""
        return self.folder / name

    def kind(self) -> Kind:
        """See `Store.kind`."""
        if self.folder.is_dir():
            return Kind.FOLDER
        if self.folder.is_file():
            return Kind.FILE
        return Kind.OTHER if os.path.lexists(self.folder) else Kind.NOTHING

    def absence(self) -> str:
        """See `Store.absence`."""
        from relayout.storage.local.staging import recovery_advice

        advice = recovery_advice(self.folder) or _similar(self.folder)
        return f"no such file or folder{advice}"

    def parent(self) -> tuple[Store, str]:
        """See `Store.parent`."""
        return LocalStore(self.folder.parent, self.folder.name), self.folder.name

    def snapshot(self) -> LocalStore:
        """See `Store.snapshot`."""
        return self

    def folder_mode(self) -> int:
        """See `Store.folder_mode`."""
        return self.folder.stat().st_mode & 0o777

    def walk(self) -> Iterator[Entry]:
        """See `Store.walk`."""
        yield from self._walk("")

    def _walk(self, prefix: str) -> Iterator[Entry]:
        with os.scandir(self.folder / prefix) as entries:
            for entry in entries:
                name = prefix + entry.name
                if entry.name.startswith("."):
                    continue
                if not _is_utf8(entry.name):
                    yield Entry(name, "its name is not UTF-8")
                elif entry.is_dir(follow_symlinks=False):
                    yield Entry(name, is_folder=True)
                    yield from self._walk(name + "/")
                elif entry.is_symlink() and not is_inside(self.folder, self.folder / name):
                    yield Entry(name, "a link that leads out of the checkpoint")
                elif not (self.folder / name).is_file():  # Also False for a cycle of links.
                    what = "a link to a folder, or a broken link" if entry.is_symlink() else "not a regular file"
                    yield Entry(name, what)
                else:
                    yield Entry(name, is_readable=os.access(self.folder / name, os.R_OK))

    def stat(self, name: str) -> FileStat | None:
        """See `Store.stat`."""
        path = self._resolve(name)
        try:
            status = check_regular(path)
        except FileNotFoundError:
            if path.is_symlink():
                raise FormatError("cannot be read: broken symbolic link", path=path, code="missing") from None
            return None
        return stat_of(status)

    def read(self, name: str, limit: int) -> bytes:
        """See `Store.read`."""
        return read_small(self._resolve(name), limit)

    def open(
        self, name: str, nbytes: int | None = None, *, access: Access = Access.BUFFERED, version: str | None = None
    ) -> InputFile:
        """See `Store.open`."""
        return InputFile(self._resolve(name), nbytes, access=access, version=version)

    def _resolve(self, name: str) -> Path:
        return self.folder / name if name == self.named else resolve_inside(self.folder, name)

    def check_output(self, source: Store, marker: str, *, force: bool) -> None:
        """See `Store.check_output`."""
        from relayout.storage.local.staging import check_output, remove_leftovers

        remove_leftovers(self.folder)
        check_output(source.path(""), self.folder, marker, force=force)

    def stage(
        self, marker: str, *, replace: bool, modes: Modes, shared: str | None = None
    ) -> AbstractContextManager[LocalStaging]:
        """See `Store.stage`."""
        from relayout.storage.local.staging import staging_folder

        return staging_folder(self.folder, marker, replace=replace, modes=modes, shared=shared)

    def stage_part(
        self, marker: str, shared: str, part: str, *, replace: bool, modes: Modes
    ) -> AbstractContextManager[LocalStaging]:
        """See `Store.stage_part`."""
        from relayout.storage.local.parts import staging_part

        return staging_part(self.folder, marker, shared, part, replace=replace, modes=modes)


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _similar(path: Path) -> str:
    """The end of a message about a path that does not exist: a name beside it that is like it."""
    try:
        return did_you_mean(path.name, [entry.name for entry in path.parent.iterdir() if entry.name[0] != "."])
    except OSError:
        return ""
