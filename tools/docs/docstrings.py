"""Docstrings and signatures as mkdocstrings wants them; it is loaded by mkdocs.yml."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """A section `Example:` has doctests, as those that griffe calls `Examples:`."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)


class Options(griffe.Extension):
    """A signature shows each option of `**options`, with its default, as the decorator `takes` does at run time."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        for decorator in func.decorators:
            if decorator.callable_path == "relayout.core.arguments.takes":
                options, parsed = (func.modules_collection[one.canonical_path] for one in decorator.value.arguments)
                fields = {name: one for name, one in parsed.all_members.items() if name in options.all_members}
                shown = [
                    griffe.Parameter(
                        name, annotation=one.annotation, kind=griffe.ParameterKind.keyword_only, default=one.value
                    )
                    for name, one in fields.items()
                ]
                own = [one for one in func.parameters if one.kind is not griffe.ParameterKind.var_keyword]
                first = [one for one in own if one.kind is not griffe.ParameterKind.keyword_only]
                func.parameters = griffe.Parameters(*first, *shown, *(one for one in own if one not in first))
