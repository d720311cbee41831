"""The two families of errors that relayout raises. Failures of the operating system are `OSError`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from errno import ENOENT
from os import PathLike
from reprlib import Repr
from typing import Generic, Literal, TypeAlias, TypeVar

FormatCode: TypeAlias = Literal[
    "truncated",
    "syntax",
    "field",
    "coverage",
    "limit",
    "version",
    "missing",
    "unsafe",
    "owner",
    "digest",
    "signature",
    "mismatch",
    "invalid",
]
PlanCode: TypeAlias = Literal[
    "option",
    "no_plan",
    "no_rule",
    "indivisible",
    "config",
    "unsupported",
    "limit",
    "exists",
    "busy",
    "space",
    "missing",
    "mismatch",
    "invalid",
]
Code: TypeAlias = FormatCode | PlanCode
"""The kinds of errors: names that programs can match on. They are listed here only; mypy checks each use."""
_Code = TypeVar("_Code", FormatCode, PlanCode)

FORMAT_CODES: Mapping[FormatCode, str] = {
    "truncated": "shorter than declared",
    "syntax": "not UTF-8, JSON, TOML or zstd",
    "field": "a field is missing, or has a wrong type or value",
    "coverage": "holes, overlaps, or bytes behind the end",
    "limit": "exceeds a size or depth limit",
    "version": "an unknown version of the format",
    "missing": "a file or tensor is missing",
    "unsafe": "a link or path that leaves the folder, or no regular file",
    "owner": "belongs to another rank or conversion",
    "digest": "bytes have changed",
    "signature": "not signed as the trust policy requires",
    "mismatch": "two files disagree",
    "invalid": "all else",
}
"""Descriptions of the codes of `FormatError`."""

PLAN_CODES: Mapping[PlanCode, str] = {
    "option": "an argument has an invalid value",
    "no_plan": "there is no plan for the model",
    "no_rule": "the plan has no rule for a tensor",
    "indivisible": "a tensor cannot be divided at this degree",
    "config": "config.json lacks a size, or contradicts the tensors",
    "unsupported": "a method, dtype or system that is not supported, or a package that is not installed",
    "limit": "exceeds a limit",
    "exists": "the output exists",
    "busy": "another process uses it",
    "space": "not enough space",
    "missing": "a file, tensor or rank is missing",
    "mismatch": "the members of a group, or two arguments, contradict each other",
    "invalid": "all else",
}
"""Descriptions of the codes of `PlanError`."""

Where: TypeAlias = str | PathLike[str] | None
"""The path in an error: a file or folder as the caller named it, or the name of a part of a file."""


class RelayoutError(Exception):
    """Base of both families. The text is one line: file, tensor, what was found, what was expected.

    Programs match on `code` and the other fields, not on the text. The text names options as on the command line
    (`--force`). Functions have arguments with the same names (`force=True`).

    Example:
        >>> import relayout
        >>> try:
        ...     relayout.load("llama-3.1-8b-tp8", rank=8)
        ... except relayout.RelayoutError as error:
        ...     print(error.code)
        option
    """

    what: str
    """The text without file and tensor name."""
    path: Where = None
    """The file or folder as the caller named it, or the name of a part of a file."""
    tensor: str | None = None
    """Name of the tensor."""
    offset: int | None = None
    """Absolute byte offset in the file, if known."""
    code: Code = "invalid"
    """The kind of error: a key of `relayout.errors.FORMAT_CODES` or `PLAN_CODES`."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what

    @property
    def text(self) -> str:
        """The text without the file."""
        if self.tensor is None:
            return self.what
        name = f"{self.tensor!r}" if len(self.tensor) <= 4096 else f"{self.tensor[:64]!r}..."
        return f"tensor {name}: {self.what}"

    def __str__(self) -> str:
        return self.text if self.path is None else f"{self.path}: {self.text}"

    def amend(
        self,
        *,
        what: str | None = None,
        path: Where = None,
        tensor: str | None = None,
        code: Literal["missing"] | None = None,
    ) -> None:
        """Replace the given fields before the error is raised again: the caller has more exact values."""
        self.what = self.what if what is None else what
        self.path = self.path if path is None else path
        self.tensor = self.tensor if tensor is None else tensor
        self.code = self.code if code is None else code


class _Family(RelayoutError, Generic[_Code]):
    """Base of one family. Its constructor accepts the codes of this family only."""

    def __init__(
        self,
        what: str,
        *,
        path: Where = None,
        tensor: str | None = None,
        offset: int | None = None,
        code: _Code = "invalid",
    ) -> None:
        super().__init__(what)
        self.what, self.path, self.tensor, self.offset = what, path, tensor, offset
        self.code: _Code = code


class FormatError(_Family[FormatCode]):
    """A file violates its format. `relayout.errors.FORMAT_CODES` lists the codes."""


class PlanError(_Family[PlanCode], ValueError):
    """The request is invalid, or cannot be carried out on this checkpoint. A subclass of ValueError.

    `relayout.errors.PLAN_CODES` lists the codes.
    """


class MissingPathError(PlanError, FileNotFoundError):
    """The path that the caller named does not exist. Also a FileNotFoundError, as raised by Python's `open`."""

    def __init__(self, what: str, *, path: Where) -> None:
        super().__init__(what, path=path, code="missing")

    @property
    def errno(self) -> int:  # type: ignore[override]
        """ENOENT, as for every FileNotFoundError."""
        return ENOENT

    @property
    def strerror(self) -> str:  # type: ignore[override]
        """The text without the path."""
        return self.what

    @property
    def filename(self) -> str | None:
        """The path as text."""
        return None if self.path is None else str(self.path)

    def __reduce__(self) -> tuple[object, ...]:
        return _missing_path, (self.what, self.path), self.__dict__


def _missing_path(what: str, path: Where) -> MissingPathError:
    return MissingPathError(what, path=path)


@contextmanager
def about(*, path: Where = None, tensor: str | None = None, part: str | None = None) -> Iterator[None]:
    """Add `path` and `tensor` to errors of the block that lack them; put `part` before the text."""
    try:
        yield
    except RelayoutError as error:
        error.amend(
            what=None if part is None else f"{part}: {error.what}",
            path=path if error.path is None else None,
            tensor=tensor if error.tensor is None else None,
        )
        raise


def warn(what: str) -> None:
    """Warn at the innermost calling line outside of relayout, at any depth inside relayout."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "relayout":
        frame = frame.f_back
    scope = frame.f_globals
    registry, module = scope.setdefault("__warningregistry__", {}), scope.get("__name__")
    warnings.warn_explicit(what, UserWarning, frame.f_code.co_filename, frame.f_lineno, module, registry)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown word: the most similar known word, if one is similar."""
    from difflib import get_close_matches  # Only for errors.

    # Few typing errors change the first letter. Words with another first letter must be very similar.
    words = list(known)
    of_letter = [each for each in words if each[:1].lower() == word[:1].lower()]
    similar = get_close_matches(word, of_letter, 1) or get_close_matches(word, words, 1, 0.9)
    return f"; did you mean {similar[0]!r}?" if similar else ""


def and_others(found: Sequence[object]) -> str:
    """Return the first item and the number of further items, for a message."""
    return f"{found[0]}, and {len(found) - 1} more" if len(found) > 1 else str(found[0])


def how_to_install(extra: str) -> str:
    """Return the end of a message about a missing package: the command that installs it with relayout."""
    return f"pip install '.[{extra}]' in a checkout of relayout"


def shown(value: object) -> str:
    """Return the `repr` of an untrusted value for a message, limited in length and depth."""
    return _SHORT.repr(value)


_SHORT = Repr()
_SHORT.maxlevel = 4
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 8
_SHORT.maxstring = _SHORT.maxother = 200
_SHORT.maxlong = 40


def escape_controls(text: str) -> str:
    """Return the text with control characters and line breaks escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def readable(content: bytes, limit: int, what: str) -> bytes:
    """Return the content of a file to be written, after a check of its length.

    Raises:
        PlanError: the content has more than `limit` bytes, the maximum that readers of the file accept.
    """
    if len(content) > limit:
        raise PlanError(f"{what} of {len(content):,} bytes: readers accept {limit:,} and refuse more", code="limit")
    return content
