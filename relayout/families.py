"""Plan files: how the tensors of a model family are cut, as data. FORMAT.md describes the file format."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from relayout.errors import FormatError, PlanError
from relayout.files import read_small
from relayout.globs import compile_glob

UNITS = ("even", "heads", "kv_heads", "vocabulary")
"""What an axis may be divided by."""

_MAX_PLAN_NBYTES = 2**20
_SIZES = frozenset({"heads", "kv_heads", "head_dim"})
_AXES = {"rows": 0, "columns": 1}


@dataclass(frozen=True, slots=True)
class Rule:
    """How the tensors that a pattern names are cut."""

    pattern: str
    """For `globs.compile_glob`."""
    axis: int | None
    """The axis that is cut; None: every rank holds the whole tensor."""
    unit: str
    """One of `UNITS`; "even" where `axis` is None."""

    def matches(self, name: str) -> bool:
        """Whether this rule is about the tensor `name`."""
        return compile_glob(self.pattern).match(name) is not None


@dataclass(frozen=True, slots=True)
class Family:
    """One plan file."""

    name: str
    """The built-in name, or the file's."""
    model_types: tuple[str, ...]
    """Values of `model_type` in config.json that this file is for."""
    sizes: Mapping[str, tuple[str, ...]]
    """A size that rules need, and the keys of config.json that may hold it, first match wins."""
    rules: tuple[Rule, ...]
    """In the file's order; the first that matches a tensor counts."""

    def rule(self, name: str) -> Rule | None:
        """The rule for the tensor `name`."""
        return next((rule for rule in self.rules if rule.matches(name)), None)


@cache
def builtin_families() -> tuple[Family, ...]:
    """The plan files that come with relayout, by name."""
    folder = resources.files("relayout") / "plans"
    files = sorted((item for item in folder.iterdir() if item.name.endswith(".toml")), key=lambda item: item.name)
    return tuple(parse_family(item.read_text("utf-8"), item.name, item.name.removesuffix(".toml")) for item in files)


def read_family(path: Path) -> Family:
    """Read a person's own plan file (`--plan FILE`).

    Raises:
        FormatError: it cannot be read or is no plan file.
    """
    blob = read_small(path, _MAX_PLAN_NBYTES)
    try:
        text = blob.decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not UTF-8 at byte {error.start}") from None
    return parse_family(text, str(path), path.name)


def find_family(model_type: str | None) -> Family:
    """The built-in plan for a model type.

    Raises:
        PlanError: there is none.
    """
    families = builtin_families()
    for family in families:
        if model_type in family.model_types:
            return family
    known = ", ".join(sorted({known for family in families for known in family.model_types}))
    what = (
        "config.json names no model_type" if model_type is None else f"no built-in plan for model type {model_type!r}"
    )
    raise PlanError(f"{what}: supply one with --plan FILE, or use --tp 1, which needs none (built in: {known})")


def parse_family(text: str, where: str, name: str) -> Family:
    """Parse a plan file; `name` is what the family shall be called, `where` names the file in messages.

    Raises:
        FormatError: it is not one.
    """
    try:
        top = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise FormatError(f"{where}: not valid TOML: {error}") from None
    unknown = top.keys() - {"model_types", "sizes", "cut"}
    if unknown:
        raise FormatError(f"{where}: unknown key {min(unknown)!r}, expected model_types, sizes, cut")
    sizes, cut = top.get("sizes", {}), top.get("cut")
    if not isinstance(sizes, dict) or not isinstance(cut, dict) or not cut:
        raise FormatError(f"{where}: a plan has a table [cut] with rules, and may have a table [sizes]")
    unknown = sizes.keys() - _SIZES
    if unknown:
        raise FormatError(f"{where}: unknown size {min(unknown)!r}, expected {', '.join(sorted(_SIZES))}")
    return Family(
        name,
        _strings(top.get("model_types", []), "model_types", where),
        {name: _strings(keys, f"sizes.{name}", where) for name, keys in sizes.items()},
        tuple(_parse_rule(pattern, value, where) for pattern, value in cut.items()),
    )


def _parse_rule(pattern: str, value: Any, where: str) -> Rule:
    if value == "whole":
        return Rule(pattern, None, "even")
    if isinstance(value, dict) and len(value) == 1:
        [(axis, unit)] = value.items()
        if axis in _AXES and unit in UNITS:
            return Rule(pattern, _AXES[axis], unit)
    raise FormatError(f'{where}: cut {pattern!r}: {value!r} is not "whole" or {{ rows|columns = {"|".join(UNITS)} }}')


def _strings(value: Any, what: str, where: str) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
        raise FormatError(f"{where}: {what} is not a string or a list of strings")
    return tuple(values)
