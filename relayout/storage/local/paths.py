"""Resolves names inside a checkpoint folder. Names and links in it are untrusted."""

from __future__ import annotations

import os
import re
from pathlib import Path

from relayout.errors import FormatError

FOLLOW_LINKS = "RELAYOUT_FOLLOW_LINKS"
"""Environment variable: "1" permits links to any file, for folders that a person assembled from links."""

_REPOSITORY = re.compile(r"(models|datasets|spaces)--")
_SHARED_BLOB = re.compile(r"([0-9a-f]{2})/\1[0-9a-f]{62}")


def resolve_inside(folder: Path, name: str) -> Path:
    """The path of a file in a checkpoint folder, which need not exist.

    FormatError: a link in it leads out of the checkpoint.
    """
    path = folder / name
    if not is_inside(folder, path):
        raise FormatError(
            f"a symbolic link that leads out of the checkpoint, to {os.path.realpath(path)}:"
            f" replace it by the file, or set {FOLLOW_LINKS}=1 if you trust it",
            path=path,
            code="unsafe",
        )
    return path


def is_inside(folder: Path, path: Path) -> bool:
    """Whether a path, with symbolic links resolved, is inside a checkpoint folder.

    The files of a snapshot in a Hugging Face cache are links to blobs of its repository (huggingface_hub 2.4,
    `file_download.py`: `models--ORG--NAME/snapshots/REVISION/FILE -> ../../blobs/HASH`). Those may be links to blobs
    that all repositories of the cache share (`utils/_shared_blobs.py`: `blobs/HA/HASH`). Both count as inside.
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


def older_folder(path: Path) -> Path:
    """The temporary name of a folder that --force replaces, if the two names cannot be exchanged atomically."""
    return path.parent / f".{path.name}.relayout-old"


def recovery_advice(path: Path) -> str:
    """Advice for a missing `path`: where its older folder is, if --force was interrupted between two renames."""
    old = older_folder(path)
    return f"; an interrupted replacement left the older folder at {old}: rename it back" if old.is_dir() else ""
