"""The store of a local folder, which may be a snapshot in a Hugging Face cache, or of one file."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from relayout.errors import FormatError, did_you_mean
from relayout.storage.local.files import InputFile, check_regular, read_small, stat_of
from relayout.storage.local.open_folder import is_inside, recovery_advice, resolve_inside
from relayout.storage.protocols import (
    LOCAL_COST,
    Access,
    Entry,
    FileStat,
    Kind,
    RequestCost,
    Store,
)


@dataclass(frozen=True, slots=True)
class LocalStore:
    folder: Path
    """The path as given; of a store for one file, that file."""
    named: str | None = None
    """A file in the folder that the user named explicitly; it may be a link to any file."""

    cost: ClassVar[RequestCost] = LOCAL_COST

    def __str__(self) -> str:
        return str(self.folder)

    def location(self, name: str) -> str:
        return str(self.folder / name)

    def path(self, name: str) -> Path:
        return self.folder / name

    def kind(self) -> Kind:
        if self.folder.is_dir():
            return Kind.FOLDER
        if self.folder.is_file():
            return Kind.FILE
        return Kind.OTHER if os.path.lexists(self.folder) else Kind.NOTHING

    def not_found_message(self) -> str:
        advice = recovery_advice(self.folder) or _similar(self.folder)
        return f"no such file or folder{advice}"

    def parent(self) -> tuple[Store, str]:
        return LocalStore(self.folder.parent, self.folder.name), self.folder.name

    def snapshot(self) -> LocalStore:
        return self

    def walk(self) -> Iterator[Entry]:
        for name, entry in entries(self.folder):
            if not _is_utf8(entry.name):
                yield Entry(name, "its name is not UTF-8")
            elif entry.is_dir(follow_symlinks=False):
                yield Entry(name, is_folder=True)
            elif entry.is_symlink() and not is_inside(self.folder, self.folder / name):
                yield Entry(name, "a link that leads out of the checkpoint")
            elif not (self.folder / name).is_file():  # Also False for a cycle of links.
                what = "a link to a folder, or a broken link" if entry.is_symlink() else "not a regular file"
                yield Entry(name, what)
            else:
                yield Entry(name, is_readable=os.access(self.folder / name, os.R_OK))

    def stat(self, name: str) -> FileStat | None:
        path = self._resolve(name)
        try:
            status = check_regular(path)
        except FileNotFoundError:
            if path.is_symlink():
                raise FormatError("cannot be read: broken symbolic link", path=path, code="missing") from None
            return None
        return stat_of(status)

    def read(self, name: str, limit: int) -> bytes:
        return read_small(self._resolve(name), limit)

    def open(
        self, name: str, nbytes: int | None = None, *, access: Access = Access.BUFFERED, version: str | None = None
    ) -> InputFile:
        return InputFile(self._resolve(name), nbytes, access=access, version=version)

    def _resolve(self, name: str) -> Path:
        return self.folder / name if name == self.named else resolve_inside(self.folder, name)


def entries(folder: Path, *, hidden: bool = False) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Every entry below a folder, by its relative name; `hidden`: also those whose names begin with a dot."""
    pending = [""]
    while pending:
        prefix = pending.pop()
        try:
            with os.scandir(folder / prefix) as entries:
                listed = [entry for entry in entries if hidden or not entry.name.startswith(".")]
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            raise FormatError("holds folders nested too deep", path=folder, code="limit") from None
        for entry in listed:
            yield prefix + entry.name, entry
            if entry.is_dir(follow_symlinks=False) and _is_utf8(entry.name):
                pending.append(f"{prefix}{entry.name}/")


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
