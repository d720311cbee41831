"""The two families of error that relayout raises itself; failures of the operating system stay `OSError`."""

from __future__ import annotations

from reprlib import Repr


class RelayoutError(Exception):
    """Base of both families. The message is one line: where, what was found, what was expected."""


class FormatError(RelayoutError):
    """A file is not what its format says it must be."""


class PlanError(RelayoutError):
    """The request cannot be carried out on this checkpoint, or makes no sense."""


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
