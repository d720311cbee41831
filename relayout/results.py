"""What all results have in common: an object for JSON, and a short `repr`."""

from __future__ import annotations

from dataclasses import asdict, fields
from reprlib import Repr
from typing import Any, cast

_SHORT = Repr()
_SHORT.maxtuple = _SHORT.maxlist = _SHORT.maxdict = 3
_SHORT.maxstring = _SHORT.maxother = 160


class Result:
    """Base of the dataclasses that functions of relayout return. They have `repr=False`, for this class's own."""

    __slots__ = ()

    def __repr__(self) -> str:
        """All fields, of which long ones are shortened."""
        named = (f"{field.name}={_SHORT.repr(getattr(self, field.name))}" for field in fields(cast(Any, self)))
        return f"{type(self).__name__}({', '.join(named)})"

    def as_json(self) -> dict[str, object]:
        """What `--json` prints: fields, nested ones as objects and lists."""
        return asdict(cast(Any, self))
