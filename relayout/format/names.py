"""Names of files that others chose: which of them lead to a place of their own in a folder. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from relayout.errors import FormatError, shown

_MAX_PATH_LENGTH, _MAX_PART_NBYTES = 4095, 255
"""Linux has no longer paths, and file systems no longer names."""


def is_plain_path(name: str) -> bool:
    """Whether a name, with "/" between its parts, can be that of a file in a folder, everywhere."""
    parts = name.split("/")
    return not (
        {"", ".", ".."} & set(parts)
        or any(character < " " or "\x7f" <= character < "\xa0" for character in name)
        or len(name) > _MAX_PATH_LENGTH
        or max(len(part.encode(errors="surrogateescape")) for part in parts) > _MAX_PART_NBYTES
    )


def check_path(name: str) -> None:
    """Check that a name leads to a place in the folder. `where` names what has it.

    Raises:
        FormatError: it leads elsewhere, or nowhere.
    """
    # No hidden ones, which a conversion does not take along either: they may steer other programs.
    if not is_plain_path(name) or any(part.startswith(".") for part in name.split("/")):
        raise FormatError(f"{shown(name)} is not the name of a file inside the checkpoint", code="unsafe")


def check_apart(names: Iterable[str]) -> None:
    """Check that no two files want one place, as files or as folders.

    Raises:
        FormatError: two do.
    """
    for path, next_path in pairwise(sorted(f"{name}/" for name in names)):
        if next_path.startswith(path):
            raise FormatError(f"{shown(path[:-1])} is used for two files or folders", code="field")
