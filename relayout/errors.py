"""The two families of error that relayout raises itself; failures of the operating system stay `OSError`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from reprlib import Repr


class RelayoutError(Exception):
    """Base of both families. Its text is one line: file, tensor, what was found, what was expected.

    Programs match on `code` and the other fields, not on the text.
    """

    def __init__(
        self,
        what: str,
        *,
        path: str | PathLike[str] | None = None,
        tensor: str | None = None,
        offset: int | None = None,
        code: str = "invalid",
    ) -> None:
        super().__init__(what)
        self.what = what
        """The text without file and tensor."""
        self.path = path
        """The file or folder, as the caller named it, or the name of a part of a file."""
        self.tensor = tensor
        """The tensor's name."""
        self.offset = offset
        """Absolute offset in the file in bytes, where one is known."""
        self.code = code
        """The kind of error: one of those that the class lists."""

    def __str__(self) -> str:
        parts = [] if self.path is None else [str(self.path)]
        if self.tensor is not None:
            parts.append(f"tensor {self.tensor!r}" if len(self.tensor) <= 4096 else f"tensor {self.tensor[:64]!r}...")
        return ": ".join([*parts, self.what])


class FormatError(RelayoutError):
    """A file is not what its format says it must be.

    Codes: `truncated` (shorter than it says), `syntax` (not UTF-8, JSON, TOML or zstd), `field` (a field is missing
    or has another type or value), `coverage` (holes, overlaps, trailing bytes), `limit` (larger or deeper than is
    read), `version` (of another version), `missing` (a file or tensor), `unsafe` (a link or path that leads out, no
    regular file), `owner` (a file of another rank or conversion), `digest` (bytes have changed), `mismatch` (two
    files disagree), `invalid`.
    """


class PlanError(RelayoutError):
    """The request cannot be carried out on this checkpoint, or makes no sense.

    Codes: `option` (an argument's value), `no_plan`, `no_rule` (for a tensor), `indivisible` (at this degree),
    `config` (config.json lacks a size or contradicts the tensors), `unsupported` (a method, dtype or system that
    cannot be used), `limit`, `exists` (something is in the way), `busy` (another process is at work there), `space`,
    `missing`, `invalid`.
    """


@contextmanager
def about(
    *, path: str | PathLike[str] | None = None, tensor: str | None = None, part: str | None = None
) -> Iterator[None]:
    """Let errors of the block that name no file or tensor name these; `part` goes before the text."""
    try:
        yield
    except RelayoutError as error:
        error.path = path if error.path is None else error.path
        error.tensor = tensor if error.tensor is None else error.tensor
        error.what = error.what if part is None else f"{part}: {error.what}"
        raise


def shown(value: object) -> str:
    """A value that somebody else wrote, for a message: short, whatever its length and depth."""
    return _SHORT.repr(value)


_SHORT = Repr()
_SHORT.maxlevel = 4
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 8
_SHORT.maxstring = _SHORT.maxother = 200
_SHORT.maxlong = 40


def printable(text: str) -> str:
    """The text with everything that could steer a terminal, or break the line, written as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
