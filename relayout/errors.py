"""The two families of errors that relayout raises. Failures of the operating system are `OSError`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from os import PathLike
from reprlib import Repr


class RelayoutError(Exception):
    """Base of both families. The text is one line: file, tensor, what was found, what was expected.

    Programs match on `code` and the other fields, not on the text. The text names options as the command line has them
    (`--force`); a function has them as arguments of that name (`force=True`).

    Example:
        >>> import relayout
        >>> try:
        ...     relayout.load("llama-3.1-8b-tp8", rank=8)
        ... except relayout.RelayoutError as error:
        ...     print(error.code)
        option
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
        """The file or folder as the caller named it, or the name of a part of a file."""
        self.tensor = tensor
        """The tensor's name."""
        self.offset = offset
        """Absolute byte offset in the file, if known."""
        self.code = code
        """The kind of error: one of the codes listed in the docstring of the class."""

    def __str__(self) -> str:
        parts = [] if self.path is None else [str(self.path)]
        if self.tensor is not None:
            parts.append(f"tensor {self.tensor!r}" if len(self.tensor) <= 4096 else f"tensor {self.tensor[:64]!r}...")
        return ": ".join([*parts, self.what])


class FormatError(RelayoutError):
    """A file violates its format.

    Codes: `truncated` (shorter than declared), `syntax` (not UTF-8, JSON, TOML or zstd), `field` (a field is missing
    or has a wrong type or value), `coverage` (holes, overlaps, trailing bytes), `limit` (exceeds a size or depth
    limit), `version` (unknown format version), `missing` (a file or tensor), `unsafe` (a link or path that leaves the
    folder, or not a regular file), `owner` (belongs to another rank or conversion), `digest` (bytes have changed),
    `signature` (not signed as the trust policy wants), `mismatch` (two files disagree), `invalid` (all else).
    """


class PlanError(RelayoutError, ValueError):
    """The request is invalid, or cannot be carried out on this checkpoint: what Python calls a ValueError.

    Codes: `option` (an argument has an invalid value), `no_plan` (for the model), `no_rule` (for a tensor),
    `indivisible` (at this degree), `config` (config.json lacks a size or contradicts the tensors), `unsupported` (a
    method, dtype or system), `limit` (exceeds a limit), `exists` (the output exists), `busy` (another process uses
    it), `space` (not enough space), `missing` (a file, tensor or rank), `invalid` (all else).
    """


@contextmanager
def about(
    *, path: str | PathLike[str] | None = None, tensor: str | None = None, part: str | None = None
) -> Iterator[None]:
    """Add `path` and `tensor` to errors of the block that lack them; put `part` before the text."""
    try:
        yield
    except RelayoutError as error:
        error.path = path if error.path is None else error.path
        error.tensor = tensor if error.tensor is None else error.tensor
        error.what = error.what if part is None else f"{part}: {error.what}"
        raise


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown word: the known one that is most like it, if one is."""
    from difflib import get_close_matches  # Only for errors.

    # Few mistypes change the first letter, and without it much is alike that nobody meant.
    words = list(known)
    of_letter = [each for each in words if each[:1].lower() == word[:1].lower()]
    similar = get_close_matches(word, of_letter, 1) or get_close_matches(word, words, 1, 0.9)
    return f"; did you mean {similar[0]!r}?" if similar else ""


def how_to_install(extra: str) -> str:
    """The end of a message about a package that is not installed: the command that installs it with relayout."""
    return f"pip install '.[{extra}]' in a checkout of relayout"


def shown(value: object) -> str:
    """The `repr` of an untrusted value for a message, limited in length and depth."""
    return _SHORT.repr(value)


_SHORT = Repr()
_SHORT.maxlevel = 4
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 8
_SHORT.maxstring = _SHORT.maxother = 200
_SHORT.maxlong = 40


def escape_controls(text: str) -> str:
    """The text with control characters and line breaks escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
