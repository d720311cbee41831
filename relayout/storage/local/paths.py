"""Which files are a checkpoint's own: the names in it and the links in it come from strangers."""

from __future__ import annotations

import os
import re
from pathlib import Path

from relayout.errors import FormatError

FOLLOW_LINKS = "RELAYOUT_FOLLOW_LINKS"
"""Environment variable: "1" lets links lead anywhere, for folders that were put together of links by a person."""

_REPOSITORY = re.compile(r"(models|datasets|spaces)--")
_SHARED_BLOB = re.compile(r"([0-9a-f]{2})/\1[0-9a-f]{62}")


def member(folder: Path, name: str) -> Path:
    """The path of a checkpoint's file, which need not exist.

    Raises:
        FormatError: a symbolic link on the way leads out of the checkpoint.
    """
    path = folder / name
    if not is_member(folder, path):
        raise FormatError(
            f"a symbolic link that leads out of the checkpoint, to {os.path.realpath(path)}:"
            f" put the file in its place, or set {FOLLOW_LINKS}=1, if you trust it",
            path=path,
            code="unsafe",
        )
    return path


def is_member(folder: Path, path: Path) -> bool:
    """Whether a path in a checkpoint's folder, symbolic links resolved, still is in it.

    A snapshot in a Hugging Face cache, or a folder in it, has its files in blobs outside: in those of its repository
    (huggingface_hub 2.4, `file_download.py`: `models--ORG--NAME/snapshots/REVISION/FILE -> ../../blobs/HASH`), which
    may be links to blobs that all repositories of the cache share (`utils/_shared_blobs.py`: `blobs/HA/HASH`).
    """
    home = Path(os.path.realpath(folder))
    real = Path(os.path.realpath(path))
    if real.is_relative_to(home):
        return True
    if os.environ.get(FOLLOW_LINKS) == "1":
        return True
    repository = next((parent.parent for parent in home.parents if parent.name == "snapshots"), None)
    if repository is None or not _REPOSITORY.match(repository.name):
        return False
    own, shared = (Path(os.path.realpath(folder / "blobs")) for folder in (repository, repository.parent))
    return real.parent == own or (
        real.is_relative_to(shared) and _SHARED_BLOB.fullmatch(real.relative_to(shared).as_posix()) is not None
    )
