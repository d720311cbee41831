"""Plan files: how the tensors of a model family are cut, as data. FORMAT.md describes the file format."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from relayout.core.patterns import compile_glob, invalid_because, names_numbers
from relayout.errors import FormatError, PlanError, shown
from relayout.storage.local.files import read_small

EVEN, VOCABULARY, RAGGED = "even", "vocabulary", "ragged"
"""Units that need no size; any other unit is the name of a size: the number of groups, such as heads."""

KV_HEADS = "kv_heads"
"""The unit that neighboring ranks share where there are more ranks than units."""

HEAD_DIM = "head_dim"
"""The size that a dimension cut by heads is checked against."""

EXPERTS = "experts"
"""The size that counts the experts."""

_MAX_PLAN_NBYTES = 2**18
_TOP_KEYS = frozenset(
    {"model_types", "quantization", "extends", "language_prefixes", "transposed", "sizes", "cut", "experts"}
)
_MODEL_TYPES = re.compile(r"^model_types *= *\[[^]]*]", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class SizeSource:
    """Where a size may be found."""

    use: str | int
    """A key of config.json, two of them as "A / B", or the size itself."""
    when: str | None = None
    """A key of config.json on which it depends whether this source counts."""
    equals: str | int | bool = True
    """What must stand there."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How the tensors that a pattern names are cut."""

    pattern: str
    """For `patterns.compile_glob`."""
    dim: int | None
    """The tensor dimension that is cut; None: every rank holds the whole tensor."""
    units: tuple[str, ...] = ()
    """What the dimension is divided by; more than one: it is fused from as many parts, each divided by its own."""
    widths: tuple[str, ...] = ()
    """For each unit, the size that says how many elements one of them has; (): as many as its size gives each."""
    interleaved: str | None = None
    """The unit that groups a fused dimension, each group with its share of each part; None: part after part."""
    block: int = 1
    """Elements that stay together, where the unit is `RAGGED`."""


@dataclass(frozen=True, slots=True)
class Family:
    """One plan file, with what it extends."""

    name: str
    """The built-in name, or the file's."""
    model_types: tuple[str, ...]
    """Values of `model_type` in config.json that this file is for."""
    quantization: str | None
    """The only `quant_method` that this file is for; None: it does not matter."""
    prefixes: tuple[str, ...]
    """What may be taken off a name that no rule matches, longest first."""
    sizes: Mapping[str, tuple[SizeSource, ...]]
    """Sizes that rules need, and where to look for them; the first that is there counts."""
    rules: tuple[Rule, ...]
    """In order; the first that matches a tensor counts."""
    experts_each: tuple[str, ...]
    """Patterns of tensors that belong to one expert, whose number is at `#`."""
    experts_stacked: tuple[str, ...]
    """Patterns of tensors whose dim 0 counts the experts."""
    is_transposed: bool = False
    """Whether weights are stored [in, out], so that dim 0 of a rule is dim 1 of a quantized weight."""

    @property
    def tells_numbers_apart(self) -> bool:
        """Whether names that differ in numbers only may have different rules."""
        return any(map(names_numbers, (*(rule.pattern for rule in self.rules), *self.prefixes)))

    def rule(self, name: str) -> Rule | None:
        """The rule for the tensor `name`."""
        for candidate in self._candidates(name):
            for rule in self.rules:
                if compile_glob(rule.pattern).match(candidate):
                    return rule
        return None

    def expert(self, name: str) -> int | None:
        """The number of the one expert that the tensor `name` belongs to."""
        for candidate in self._candidates(name):
            for pattern in self.experts_each:
                if match := compile_glob(pattern).match(candidate):
                    return int(match[1])
        return None

    def stacks_experts(self, name: str) -> bool:
        """Whether dim 0 of the tensor `name` counts the experts."""
        return any(
            compile_glob(pattern).match(candidate)
            for candidate in self._candidates(name)
            for pattern in self.experts_stacked
        )

    def _candidates(self, name: str) -> Iterator[str]:
        yield name
        prefix = next((prefix for prefix in self.prefixes if name.startswith(prefix)), None)
        if prefix is not None:
            yield name.removeprefix(prefix)


@cache
def builtin_families() -> tuple[Family, ...]:
    """The plan files that come with relayout, by name."""
    return tuple(_builtin(name) for name in sorted(_builtin_texts()))


def builtin_text(name: str) -> str:
    """A built-in plan file, as it is written.

    Raises:
        PlanError: there is none of this name.
    """
    texts = _builtin_texts()
    if name not in texts:
        raise PlanError(f"no built-in plan {name!r}, there are: {', '.join(sorted(texts))}", code="no_plan")
    return texts[name]


def read_family(path: Path) -> Family:
    """Read a person's own plan file (`--plan FILE`).

    Raises:
        FormatError: it cannot be read or is no plan file.
    """
    blob = read_small(path, _MAX_PLAN_NBYTES)
    try:
        text = blob.decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"not UTF-8 at byte {error.start}", path=path, code="syntax") from None
    return parse_family(text, str(path), path.name)


def find_family(model_type: str | None, quantization: str | None = None) -> Family:
    """The built-in plan for a model type; one for just this quantization before others.

    Raises:
        PlanError: there is none.
    """
    families = [_builtin(name) for name, text in sorted(_builtin_texts().items()) if _may_be_for(text, model_type)]
    for wanted in dict.fromkeys((quantization, None)):
        for family in families:
            if model_type in family.model_types and family.quantization == wanted:
                return family
    what = (
        "config.json names no model_type"
        if model_type is None
        else f"no built-in plan for model type {shown(model_type)}"
    )
    raise PlanError(
        f"{what} (`relayout plans` lists them): supply one with --plan FILE, try --plan transformers,"
        " or use --tp 1, which needs none",
        code="no_plan",
    )


def _may_be_for(text: str, model_type: str | None) -> bool:
    """Whether a plan file may be for a model type: told by one of its lines, as parsing all plans takes a while."""
    found = _MODEL_TYPES.search(text)
    try:
        return found is None or model_type in tomllib.loads(found[0])["model_types"]
    except tomllib.TOMLDecodeError:  # More than the pattern knows.
        return True


def parse_family(text: str, where: str, name: str) -> Family:
    """Parse a plan file; `name` is what the family shall be called, `where` names the file in messages.

    Raises:
        FormatError: it is not one.
    """
    return _parse_family(text, where, name, ())


@cache
def _builtin_texts() -> Mapping[str, str]:
    folder = resources.files("relayout.plans") / "builtin"
    return {
        item.name.removesuffix(".toml"): item.read_text("utf-8")
        for item in folder.iterdir()
        if item.name.endswith(".toml")
    }


@cache
def _builtin(name: str, extended_by: tuple[str, ...] = ()) -> Family:
    return _parse_family(_builtin_texts()[name], f"{name}.toml", name, (*extended_by, name))


def _parse_family(text: str, where: str, name: str, extended_by: tuple[str, ...]) -> Family:
    try:
        top = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not valid TOML: {error}", path=where, code="syntax") from None
    unknown = top.keys() - _TOP_KEYS
    if unknown:
        raise FormatError(
            f"unknown key {shown(min(unknown))}, expected {', '.join(sorted(_TOP_KEYS))}", path=where, code="field"
        )
    sizes, cut, experts = (_table(top, key, where) for key in ("sizes", "cut", "experts"))
    unknown = experts.keys() - {"each", "stacked"}
    if unknown:
        raise FormatError(
            f"experts: unknown key {shown(min(unknown))}, expected each, stacked", path=where, code="field"
        )
    quantization = top.get("quantization")
    if not isinstance(quantization, str | None):
        raise FormatError(
            f"quantization {shown(quantization)}, expected the name of a method", path=where, code="field"
        )
    transposed = top.get("transposed", False)
    if not isinstance(transposed, bool):
        raise FormatError(f"transposed {shown(transposed)}, expected true or false", path=where, code="field")
    family = Family(
        name,
        _strings(top.get("model_types", []), "model_types", where),
        quantization,
        tuple(sorted(_strings(top.get("language_prefixes", []), "language_prefixes", where), key=len, reverse=True)),
        {size: _parse_sources(size, value, where) for size, value in sizes.items()},
        tuple(_parse_rule(pattern, value, where) for pattern, value in cut.items()),
        _strings(experts.get("each", []), "experts.each", where),
        _strings(experts.get("stacked", []), "experts.stacked", where),
        transposed,
    )
    for pattern in (*(rule.pattern for rule in family.rules), *family.experts_each, *family.experts_stacked):
        if reason := invalid_because(pattern):
            raise FormatError(f"invalid pattern {shown(pattern)}: {reason}", path=where, code="field")
    for pattern in family.experts_each:
        if compile_glob(pattern).groups != 1:
            raise FormatError(f"experts.each: {shown(pattern)} has not just one '#'", path=where, code="field")
    extends = top.get("extends")
    if extends is not None:
        family = _extended(family, extends, where, extended_by)
    if not family.rules:
        raise FormatError("a plan has a table [cut] with rules", path=where, code="field")
    _check_units(family, where)
    return family


def _extended(family: Family, extends: Any, where: str, extended_by: tuple[str, ...]) -> Family:
    """The family with sizes, rules and experts of the plan that it extends behind its own."""
    if not isinstance(extends, str) or extends not in _builtin_texts():
        raise FormatError(f"extends {shown(extends)}, which is no built-in plan", path=where, code="field")
    if extends in extended_by:
        raise FormatError(f"extends {shown(extends)}, which extends it", path=where, code="field")
    base = _builtin(extends, extended_by)
    own = {rule.pattern for rule in family.rules}
    return replace(
        family,
        prefixes=family.prefixes or base.prefixes,
        sizes={**base.sizes, **family.sizes},
        rules=(*family.rules, *(rule for rule in base.rules if rule.pattern not in own)),
        experts_each=family.experts_each or base.experts_each,
        experts_stacked=family.experts_stacked or base.experts_stacked,
        is_transposed=family.is_transposed or base.is_transposed,
    )


def _parse_sources(size: str, value: Any, where: str) -> tuple[SizeSource, ...]:
    if size in (EVEN, VOCABULARY, RAGGED):
        raise FormatError(f"sizes.{size}: this unit has a meaning of its own", path=where, code="field")
    sources = []
    for source in value if isinstance(value, list) else [value]:
        table = source if isinstance(source, dict) else {"use": source}
        use, when, equals = table.get("use"), table.get("when"), table.get("is", True)
        is_size = isinstance(use, str) or (type(use) is int and use > 0)
        is_known = isinstance(when, str | None) and isinstance(equals, str | int)
        if not is_size or not is_known or table.keys() - {"use", "when", "is"} or ("is" in table and when is None):
            raise FormatError(
                f"sizes.{size}: {shown(source)} is no key of config.json, no positive number, and no {{ "
                "when = KEY, is = VALUE, use = KEY or number }",
                path=where,
                code="field",
            )
        sources.append(SizeSource(use, when, equals))  # type: ignore[arg-type]  # is_size: it is str or int.
    return tuple(sources)


def _parse_rule(pattern: str, value: Any, where: str) -> Rule:
    if value == "whole":
        return Rule(pattern, None)
    rest = dict(value) if isinstance(value, dict) else {}
    what = f"cut {shown(pattern)}: {shown(value)}"
    dim, by = rest.pop("dim", None), rest.pop("by", None)
    parts = by if isinstance(by, list) else [by]
    if type(dim) is not int or dim < 0 or not parts or not all(isinstance(part, str) for part in parts):
        raise FormatError(f'{what} is not "whole" or {{ dim = N, by = UNIT }}', path=where, code="field")
    split = [tuple(word.strip() for word in part.split("*")) for part in parts]
    units, widths = tuple(words[0] for words in split), tuple(words[1] for words in split if len(words) == 2)
    if any(len(words) > 2 for words in split) or len(widths) not in (0, len(units)):
        raise FormatError(f"{what}: UNIT * WIDTH is for all parts or for none", path=where, code="field")
    interleaved, block = rest.pop("interleaved", None), rest.pop("block", 1)
    if rest:
        raise FormatError(f"{what}: unknown key {shown(min(rest))}", path=where, code="field")
    if not isinstance(interleaved, str | None) or (interleaved is not None and len(units) == 1):
        raise FormatError(
            f"{what}: interleaved is for a list of units, and names the unit of a group", path=where, code="field"
        )
    if type(block) is not int or block < 1 or (block > 1 and units != (RAGGED,)):
        raise FormatError(
            f"{what}: block is a positive number of elements, for the unit {RAGGED!r}", path=where, code="field"
        )
    if len(units) > 1 and ({VOCABULARY, RAGGED} & set(units) or (EVEN in units and set(units) != {EVEN})):
        raise FormatError(f"{what}: parts are either all {EVEN!r} or all counted by sizes", path=where, code="field")
    if widths and (interleaved or {EVEN, VOCABULARY, RAGGED} & set(units)):
        raise FormatError(
            f"{what}: UNIT * WIDTH is for units counted by sizes, and not interleaved", path=where, code="field"
        )
    return Rule(pattern, dim, units, widths, interleaved, block)


def _check_units(family: Family, where: str) -> None:
    sizes = set(family.sizes)
    for rule in family.rules:
        counted = [*rule.widths, *([] if rule.interleaved is None else [rule.interleaved])]
        for names, known in ((rule.units, sizes | {EVEN, VOCABULARY, RAGGED}), (counted, sizes)):
            for unit in set(names) - known:
                raise FormatError(
                    f"cut {shown(rule.pattern)}: unit {shown(unit)}, expected {', '.join(sorted(known))}",
                    path=where,
                    code="field",
                )


def _table(top: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    table = top.get(key, {})
    if not isinstance(table, dict):
        raise FormatError(f"{key} is not a table", path=where, code="field")
    return table


def _strings(value: Any, what: str, where: str) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
        raise FormatError(f"{what} is not a string or a list of strings", path=where, code="field")
    return tuple(values)
