"""Docstrings as mkdocstrings wants them; it is loaded by mkdocs.yml."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """A section `Example:` has doctests, as those that griffe calls `Examples:`."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
