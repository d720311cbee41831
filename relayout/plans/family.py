"""Plans as data: the rules that cut the tensors of a model family, read and written. PLANS.md describes the language.

A plan is text in TOML (a plan file), or an object with the same keys in the source record of a converted checkpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache
from importlib import resources
from itertools import groupby
from pathlib import Path
from textwrap import wrap
from typing import Any

from relayout.core.arguments import (
    MAX_PATTERNS,
    compile_glob,
    depends_on_later_numbers,
    depends_on_numbers,
    invalid_because,
    slow_because,
)
from relayout.errors import FormatError, PlanError, about, did_you_mean, escape_controls, shown
from relayout.format.fields import parse_toml
from relayout.storage.local.store import read_small

EVEN, VOCABULARY, RAGGED, HASH_COLUMNS = "even", "vocabulary", "ragged", "hash_columns"
UNITS = frozenset({EVEN, VOCABULARY, RAGGED, HASH_COLUMNS})
"""Units without a size. Any other unit is the name of a size, which gives the number of groups (such as heads)."""

KV_HEADS, STATE_GROUPS = "kv_heads", "state_groups"
SHARED = frozenset({KV_HEADS, STATE_GROUPS})
"""Units that neighboring ranks share if there are more ranks than units. Sizes named `*_kv_heads` are shared, too."""

HEAD_DIM = "head_dim"
"""Name of the size "elements per head". Dimensions that are cut by heads are checked against it."""
_HEADS = re.compile(r"(|.*?_)(kv_)?heads")
"""Matches the units that are heads. Group 1 is the prefix of layers that have a head size of their own."""

EXPERTS = "experts"
"""Name of the size "number of experts"."""

HASH_VOCABULARY, MAX_NGRAM, HASH_HEADS = "hash_vocabulary", "max_ngram", "hash_heads"
"""Names of the sizes that determine the number of rows in each column of a hash table (`division.hash_columns`)."""

BUILTIN, FILE, TRANSFORMERS = "builtin", "file", "transformers"
"""Origins of plans with rules: built into relayout, a plan file, the transformers package."""

ENGINES: Mapping[str, str] = {"vllm": "vLLM", "sglang": "SGLang"}
"""Engines that plans can be observed from: package name -> name in messages. The package name is the origin of
observed plans, and the module `relayout.observe.PACKAGE` does the observing."""

MAX_PLAN_NBYTES = 2**18
"""Largest size of a plan file, in bytes."""
_MAX_NUMBER = 2**53 - 1
"""Largest number in a plan. Some JSON readers do not represent larger integers exactly."""
_KEYS = frozenset(
    {"model_types", "quantization", "language_prefixes", "transposed", "layers", "sizes", "defaults", "cut", "experts"}
)
_LAYERS = re.compile(r"<(\w+)>")
"""Matches the name of a set of layers in a pattern."""
_MAX_LAYERS = 10_000
_WORDS = 40
"""Largest number of layer numbers in one pattern."""


@dataclass(frozen=True, slots=True)
class SizeSource:
    """One place in config.json to find a size, or the size itself."""

    use: str | int
    """A key of config.json, a quotient of two keys "A / B", or the size itself."""
    when: str | None = None
    """A key of config.json: the source applies only if its value is `equals`. None: the source always applies."""
    equals: str | int | bool = True
    """The value of `when` at which the source applies."""


@dataclass(frozen=True, slots=True)
class LayerSet:
    """A set of layers that is selected by a list in config.json."""

    key: str
    """Key of the list in config.json."""
    equals: str | int | bool | None = None
    """The value that marks selected layers in a list with one entry per layer. None: the list has layer numbers."""

    def numbers(self, config: Mapping[str, Any]) -> list[int]:
        """Return the numbers of the layers in ascending order; empty if config.json does not have the list."""
        listed = look_up(self.key, language_config(config), config)
        if not isinstance(listed, list):
            return []
        if self.equals is None:
            return sorted({number for number in listed if type(number) is int and 0 <= number < _MAX_LAYERS})
        return [number for number, value in enumerate(listed[:_MAX_LAYERS]) if value == self.equals]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule that cuts all tensors that match a pattern."""

    pattern: str
    """A pattern for tensor names, see `core.arguments`."""
    dim: int | None
    """The dimension that is cut. None: every rank holds the whole tensor."""
    units: tuple[str, ...] = ()
    """Units that the dimension is divided into. Several units: the dimension is fused from one part per unit."""
    widths: tuple[str, ...] = ()
    """For each unit, the name of the size that is its number of elements. (): all units have equally many elements."""
    interleaved: str | None = None
    """Name of the size that is the number of groups in a fused dimension. Each group contains a share of every part.
    None: no groups."""
    block: int = 1
    """Number of consecutive elements that must stay together; used with the unit `RAGGED`."""
    or_whole: bool = False
    """True if every rank holds the whole tensor at degrees that cannot divide the dimension."""
    whole_unless: str | None = None
    """Name of a size that the degree must divide, else every rank holds the whole tensor. None: any degree."""
    is_squeezed: bool = False
    """True if `dim` counts only dimensions with more than one element, like the shape after `squeeze`."""
    is_table: bool = False
    """True if a rank's rows are stored as one run. If the pattern contains `#`, tensors that differ only in that number
    form one table: their rows are concatenated in the order of the numbers and cut as one tensor."""


@dataclass(frozen=True, slots=True)
class Family:
    """A plan, merged with the plan that it extends."""

    name: str
    """Name of the built-in plan or of the file, or the model type."""
    origin: str
    """`BUILTIN`, `FILE`, `TRANSFORMERS`, or a key of `ENGINES` for a plan observed from that engine, without rules."""
    _: KW_ONLY
    model_types: tuple[str, ...] = ()
    """Values of `model_type` in config.json that the plan applies to."""
    quantization: str | None = None
    """The only `quant_method` that the plan applies to. None: any method."""
    prefixes: tuple[str, ...] = ()
    """Prefixes that may be removed from a name that no rule matches, longest first."""
    sizes: Mapping[str, tuple[SizeSource, ...]] = field(default_factory=dict)
    """Sizes that the rules use, and their sources. The first source that has a value is used."""
    layers: Mapping[str, LayerSet] = field(default_factory=dict)
    """Sets of layers by name. Patterns contain the names in `<>`. A resolved family has no sets of layers."""
    defaults: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Model type of the language model -> values of keys that its config.json may omit."""
    rules: tuple[Rule, ...] = ()
    """Rules for cutting tensors. The first rule that matches a tensor is used."""
    experts_each: tuple[str, ...] = ()
    """Patterns of tensors that belong to one expert. The expert's number is at `#`."""
    experts_stacked: tuple[str, ...] = ()
    """Patterns of tensors with one entry for each expert along dim 0."""
    is_transposed: bool = False
    """True if weights are stored [in, out]. Dim 0 of a rule is then dim 1 of a quantized weight."""

    @property
    def full_name(self) -> str:
        """The origin and the name, as `ORIGIN:NAME`."""
        return f"{self.origin}:{self.name}"

    def defaults_of(self, config: Mapping[str, Any]) -> Mapping[str, int]:
        """Return the default values of the keys that this config.json omits."""
        given = {*config, *language_config(config)}
        return {key: value for key, value in self.defaults.get(language_type(config), {}).items() if key not in given}

    def resolved(self, config: Mapping[str, Any]) -> Family:
        """Return the family as a conversion records it for this config.json.

        In the result, patterns contain layer numbers instead of sets of layers, and sizes that were paths into
        config.json are numbers. Defaults are restricted to the keys that this config.json omits.

        Raises:
            PlanError: config.json selects more layers than a plan may name.
        """
        row = self.defaults_of(config)
        family = replace(
            self,
            defaults={language_type(config): row} if row else {},
            sizes={size: tuple(_without_paths(sources, config)) or sources for size, sources in self.sizes.items()},
        )
        if not self.layers:
            return family
        numbers = {name: layers.numbers(config) for name, layers in self.layers.items()}

        def expanded(patterns: Sequence[str]) -> tuple[str, ...]:
            return tuple(one for pattern in patterns for one in _with_numbers(pattern, numbers))

        rules: dict[str, Rule] = {}
        for rule in self.rules:
            for pattern in expanded([rule.pattern]):
                rules.setdefault(pattern, replace(rule, pattern=pattern))
        family = replace(
            family,
            layers={},
            rules=tuple(rules.values()),
            experts_each=expanded(self.experts_each),
            experts_stacked=expanded(self.experts_stacked),
        )
        if len(family.patterns) > MAX_PATTERNS:
            what = f"{len(family.patterns)} patterns for the layers of config.json, limit {MAX_PATTERNS}"
            raise PlanError(what, code="limit")
        return family

    @property
    def patterns(self) -> tuple[str, ...]:
        """All patterns for tensor names."""
        return (*(rule.pattern for rule in self.rules), *self.experts_each, *self.experts_stacked)

    @property
    def depends_on_numbers(self) -> bool:
        """True if names that differ only in numbers may have different rules."""
        return any(map(depends_on_numbers, (*(rule.pattern for rule in self.rules), *self.prefixes)))

    @property
    def depends_on_later_numbers(self) -> bool:
        """True if names that differ only in numbers after their first number may have different rules."""
        in_prefixes = any(map(depends_on_numbers, self.prefixes))
        return in_prefixes or any(depends_on_later_numbers(rule.pattern) for rule in self.rules)

    def rule(self, name: str) -> Rule | None:
        """Return the rule for the tensor `name`, or None if no rule matches."""
        found = self._find([rule.pattern for rule in self.rules], name)
        return None if found is None else self.rules[found[0]]

    def expert(self, name: str) -> int | None:
        """Return the number of the expert that the tensor `name` belongs to, or None."""
        found = self._find(self.experts_each, name)
        return None if found is None else int(found[1][1])

    def stacks_experts(self, name: str) -> bool:
        """Return True if the tensor `name` has one entry for each expert along dim 0."""
        return self._find(self.experts_stacked, name) is not None

    def _find(self, patterns: Sequence[str], name: str) -> tuple[int, re.Match[str]] | None:
        """Return the index of the first pattern that matches the name, and the match.

        If no pattern matches the full name, the name without its prefix is tried.
        """
        prefix = next((prefix for prefix in self.prefixes if name.startswith(prefix)), "")
        for candidate in (name, name.removeprefix(prefix)) if prefix else (name,):
            for index, pattern in enumerate(patterns):
                if match := compile_glob(pattern).match(candidate):
                    return index, match
        return None


def language_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the object in config.json for the language model of a multimodal model; empty if it does not exist."""
    thinker = config.get("thinker_config")
    nested = (thinker if isinstance(thinker, Mapping) else config).get("text_config")
    return nested if isinstance(nested, Mapping) else {}


def look_up(key: str, *configs: Mapping[str, Any]) -> Any:
    """Return the value of `key` from the first object where it exists and is not null; None otherwise."""
    return next((config[key] for config in configs if config.get(key) is not None), None)


def _without_paths(sources: Sequence[SizeSource], config: Mapping[str, Any]) -> Iterator[SizeSource]:
    """Yield the sources, with paths into config.json replaced by the numbers found there.

    Paths that lead to no number are omitted.
    """
    for source in sources:
        if not isinstance(source.use, str) or "." not in source.use:
            yield source
        elif (value := _follow(source.use.split("."), language_config(config), config)) is not None:
            yield replace(source, use=value)


def _follow(path: Sequence[str], *objects: Any) -> int | None:
    """Return the first positive integer at the path in any of the objects; `*` in the path matches any key."""
    for value in objects:
        if not path:
            if type(value) is int and 0 < value <= _MAX_NUMBER:
                return value
        elif isinstance(value, Mapping):
            inner = value.values() if path[0] == "*" else [value.get(path[0])]
            found = _follow(path[1:], *inner)
            if found is not None:
                return found
    return None


def is_shared(unit: str) -> bool:
    """Return True if neighboring ranks share this unit when there are more ranks than units."""
    return unit in SHARED or unit.endswith(f"_{KV_HEADS}")


def head_dim_of(unit: str) -> str | None:
    """Return the name of the size "elements per head" if the unit is heads; None for other units."""
    heads = _HEADS.fullmatch(unit)
    return None if heads is None else f"{heads[1]}{HEAD_DIM}"


def _with_numbers(pattern: str, layers: Mapping[str, Sequence[int]]) -> list[str]:
    """Replace the name of a set of layers in a pattern by layer numbers.

    Several patterns are returned, so that each one has few alternatives and matches quickly.
    """
    found = _LAYERS.search(pattern)
    if found is None:
        return [pattern]
    # Words of equal length: no word is a prefix of another one.
    by_length = groupby(map(str, layers[found[1]]), key=len)
    parts = [
        words[i : i + _WORDS] for words in (list(group) for _, group in by_length) for i in range(0, len(words), _WORDS)
    ]
    return [f"{pattern[: found.start()]}{{{','.join(words)}}}{pattern[found.end() :]}" for words in parts]


def language_type(config: Mapping[str, Any]) -> str:
    """Return the model type of the language model; else that of the whole model; else an empty string."""
    types = (language_config(config).get("model_type"), config.get("model_type"))
    return next((value for value in types if isinstance(value, str)), "")


@cache
def builtin_families() -> tuple[Family, ...]:
    """Return the built-in plans, sorted by name."""
    return tuple(_builtin(name) for name in sorted(_builtin_texts()))


def builtin_text(name: str) -> str:
    """Return the text of a built-in plan file."""
    texts = _builtin_texts()
    if name not in texts:
        known = f"; `relayout plans list` lists {len(texts)}"
        raise PlanError(f"no built-in plan {name!r}{did_you_mean(name, texts) or known}", code="no_plan")
    return texts[name]


def read_family(path: Path) -> Family:
    """Read a plan file, or the built-in plan with this name if no such file exists (`--plan`).

    Args:
        path: path of a file, or NAME, or builtin:NAME.
    """
    prefix, _, name = str(path).rpartition(":")
    if prefix == BUILTIN or (str(path) in _builtin_texts() and not path.is_file()):
        builtin_text(name)
        return _builtin(name)
    if str(path) == path.stem and not path.exists():
        builtin_text(str(path))  # Raises an error that suggests a similar name.
    blob = read_small(path, MAX_PLAN_NBYTES)
    try:
        text = blob.decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"not UTF-8 at byte {error.start}", path=path, code="syntax") from None
    return parse_family(text, str(path), escape_controls(path.name))


def find_family(model_type: str | None, quantization: str | None = None) -> Family:
    """Return the built-in plan for a model type; a plan for only this quantization has precedence."""
    families = [_builtin(name) for name, text in sorted(_builtin_texts().items()) if _may_be_for(text, model_type)]
    for wanted in dict.fromkeys((quantization, None)):
        for family in families:
            if model_type in family.model_types and family.quantization == wanted:
                return family
    what = (
        "config.json has no model_type"
        if model_type is None
        else f"no built-in plan for model type {shown(model_type)}"
    )
    raise PlanError(what, code="no_plan")


def _may_be_for(text: str, model_type: str | None) -> bool:
    """Return False if a built-in plan cannot apply to a model type; parsing all plans instead would take 70 ms.

    All built-in plans begin with the key `model_types`.
    """
    return f'"{model_type}"' in text.partition("\nmodel_types = [")[2].partition("]")[0]


def parse_family(text: str, where: str, name: str) -> Family:
    """Parse a plan file; `name` becomes the family's name, and `where` is the path in errors."""
    with about(path=where):
        return _parse_text(text, name, FILE, ())


def parse_rules(rules: Mapping[str, Any], where: str, name: str, origin: str) -> Family:
    """Parse an object with the keys of a plan file, such as the result of `dump_rules`; `extends` is not allowed."""
    with about(path=where):
        return _checked(_parse_keys(rules, name, origin))


def dump_rules(family: Family) -> dict[str, Any]:
    """Return an object with the keys of a plan file, for `parse_rules`. The order of entries in `cut` matters."""
    top = {
        "model_types": list(family.model_types),
        "quantization": family.quantization,
        "language_prefixes": list(family.prefixes),
        "transposed": family.is_transposed,
        "layers": {name: _dump_layers(layers) for name, layers in family.layers.items()},
        "sizes": {size: list(map(_dump_source, sources)) for size, sources in family.sizes.items()},
        "defaults": {model_type: dict(row) for model_type, row in family.defaults.items()},
        "cut": {rule.pattern: _dump_rule(rule) for rule in family.rules},
        "experts": _without_defaults({"each": list(family.experts_each), "stacked": list(family.experts_stacked)}),
    }
    return _without_defaults(top)


def _without_defaults(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if value not in (None, False, [], {})}


def _dump_layers(layers: LayerSet) -> object:
    return {"key": layers.key} | ({} if layers.equals is None else {"is": layers.equals})


def _dump_source(source: SizeSource) -> object:
    return source.use if source.when is None else {"when": source.when, "is": source.equals, "use": source.use}


def _dump_rule(rule: Rule) -> object:
    if rule.dim is None:
        return "whole"
    by = [" * ".join(words) for words in zip(rule.units, *([rule.widths] if rule.widths else []), strict=True)]
    grouped = {} if rule.interleaved is None else {"interleaved": rule.interleaved}
    blocks = {} if rule.block == 1 else {"block": rule.block}
    otherwise = {"or": "whole"} if rule.or_whole else {}
    unless = {} if rule.whole_unless is None else {"whole_unless": rule.whole_unless}
    squeezed = {"squeeze": True} if rule.is_squeezed else {}
    table = {"table": True} if rule.is_table else {}
    return {"dim": rule.dim, "by": by, **grouped, **blocks, **otherwise, **unless, **squeezed, **table}


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
    with about(path=f"{name}.toml"):
        return _parse_text(_builtin_texts()[name], name, BUILTIN, (*extended_by, name))


def _parse_text(text: str, name: str, origin: str, extended_by: tuple[str, ...]) -> Family:
    top = parse_toml(text)
    _check_keys(top, _KEYS | {"extends"}, "")
    extends = top.pop("extends", None)
    family = _parse_keys(top, name, origin)
    if extends is not None:
        family = _extended(family, extends, extended_by)
    return _checked(family)


def _parse_keys(top: Mapping[str, Any], name: str, origin: str) -> Family:
    _check_keys(top, _KEYS, "")
    layers, sizes, defaults, cut, experts = (
        _table(top, key) for key in ("layers", "sizes", "defaults", "cut", "experts")
    )
    _check_keys(experts, frozenset({"each", "stacked"}), "experts: ")
    quantization, transposed = top.get("quantization"), top.get("transposed", False)
    if not isinstance(quantization, str | None):
        raise FormatError(f"quantization: {shown(quantization)}, expected the name of a method", code="field")
    if not isinstance(transposed, bool):
        raise FormatError(f"transposed: {shown(transposed)}, expected true or false", code="field")
    prefixes = _strings(top.get("language_prefixes", []), "language_prefixes")
    return Family(
        name,
        origin,
        model_types=_strings(top.get("model_types", []), "model_types"),
        quantization=quantization,
        prefixes=tuple(sorted(prefixes, key=len, reverse=True)),
        layers={name: _parse_layers(name, value) for name, value in layers.items()},
        sizes={size: _parse_sources(size, value) for size, value in sizes.items()},
        defaults={model_type: _parse_defaults(model_type, row) for model_type, row in defaults.items()},
        rules=tuple(_parse_rule(pattern, value) for pattern, value in cut.items()),
        experts_each=_strings(experts.get("each", []), "experts.each"),
        experts_stacked=_strings(experts.get("stacked", []), "experts.stacked"),
        is_transposed=transposed,
    )


def _check_keys(table: Mapping[str, Any], known: frozenset[str], what: str) -> None:
    if unknown := table.keys() - known:
        raise FormatError(f"{what}unknown key {shown(min(unknown))}, expected {', '.join(sorted(known))}", code="field")


def _checked(family: Family) -> Family:
    """Return the family unchanged; raise FormatError unless it is a complete and valid plan."""
    if not family.rules:
        raise FormatError("the plan has no rules, expected a table [cut]", code="field")
    if len(family.patterns) > MAX_PATTERNS:
        raise FormatError(f"{len(family.patterns)} patterns, limit {MAX_PATTERNS}", code="limit")
    for pattern in family.patterns:
        names = _LAYERS.findall(pattern)
        if len(names) > 1 or not family.layers.keys() >= set(names):
            known = f"one of {', '.join(sorted(family.layers))}" if family.layers else "no set of layers"
            raise FormatError(f"invalid pattern {shown(pattern)}: expected {known} in <>", code="field")
        if reason := invalid_because(pattern) or slow_because(pattern):
            raise FormatError(f"invalid pattern {shown(pattern)}: {reason}", code="field")
    for pattern in family.experts_each:
        if compile_glob(pattern).groups != 1:
            raise FormatError(f"experts.each: {shown(pattern)}, expected exactly one '#'", code="field")
    _check_units(family)
    return family


def _extended(family: Family, extends: Any, extended_by: tuple[str, ...]) -> Family:
    """Return the family merged with the plan that it extends; its own sizes, rules and experts have precedence."""
    if not isinstance(extends, str) or extends not in _builtin_texts():
        raise FormatError(f"extends {shown(extends)}, which is not a built-in plan", code="field")
    if extends in extended_by:
        raise FormatError(f"extends {shown(extends)}, which extends this plan", code="field")
    base = _builtin(extends, extended_by)
    own = {rule.pattern for rule in family.rules}
    return replace(
        family,
        prefixes=family.prefixes or base.prefixes,
        layers={**base.layers, **family.layers},
        sizes={**base.sizes, **family.sizes},
        defaults={**base.defaults, **family.defaults},
        rules=(*family.rules, *(rule for rule in base.rules if rule.pattern not in own)),
        experts_each=family.experts_each or base.experts_each,
        experts_stacked=family.experts_stacked or base.experts_stacked,
        is_transposed=family.is_transposed or base.is_transposed,
    )


def _parse_sources(size: str, value: Any) -> tuple[SizeSource, ...]:
    if size in UNITS:
        raise FormatError(f"sizes.{size}: the name is reserved for a unit", code="field")
    sources = []
    for source in value if isinstance(value, list) else [value]:
        table = source if isinstance(source, dict) else {"use": source}
        use, when, equals = table.get("use"), table.get("when"), table.get("is", True)
        is_size = isinstance(use, str) or (type(use) is int and 0 < use <= _MAX_NUMBER)
        is_known = isinstance(when, str | None) and equals is not None and _is_value(equals)
        if not is_size or not is_known or table.keys() - {"use", "when", "is"} or ("is" in table and when is None):
            raise FormatError(
                f"sizes.{size}: {shown(source)}, expected a key of config.json, a positive integer, or "
                "{ when = KEY, is = VALUE, use = KEY or integer }",
                code="field",
            )
        sources.append(SizeSource(use, when, equals))  # type: ignore[arg-type]  # is_size: `use` is str or int.
    return tuple(sources)


def _parse_layers(name: str, value: Any) -> LayerSet:
    table = value if isinstance(value, dict) else {}
    key, equals = table.get("key"), table.get("is")
    if not isinstance(key, str) or not _is_value(equals) or table.keys() - {"key", "is"} or not name.isidentifier():
        what = f"layers.{shown(name)}: {shown(value)}, expected a name with {{ key = KEY, is = VALUE }}"
        raise FormatError(what, code="field")
    return LayerSet(key, equals)


def _is_value(value: Any) -> bool:
    return value is None or isinstance(value, str) or (isinstance(value, int) and abs(value) <= _MAX_NUMBER)


def _parse_defaults(model_type: str, row: Any) -> Mapping[str, int]:
    if not isinstance(row, dict) or not all(type(value) is int and 0 < value <= _MAX_NUMBER for value in row.values()):
        what = f"defaults.{shown(model_type)}: {shown(row)}, expected keys of config.json with positive integers"
        raise FormatError(what, code="field")
    return row


def _parse_rule(pattern: str, value: Any) -> Rule:
    if value == "whole":
        return Rule(pattern, None)
    rest = dict(value) if isinstance(value, dict) else {}
    what = f"cut {shown(pattern)}: {shown(value)}"
    dim, by = rest.pop("dim", None), rest.pop("by", None)
    parts = by if isinstance(by, list) else [by]
    if (
        type(dim) is not int
        or not 0 <= dim <= _MAX_NUMBER
        or not parts
        or not all(isinstance(part, str) for part in parts)
    ):
        raise FormatError(f'{what}, expected "whole" or {{ dim = N, by = UNIT }}', code="field")
    split = [tuple(word.strip() for word in part.split("*")) for part in parts]
    units, widths = tuple(words[0] for words in split), tuple(words[1] for words in split if len(words) == 2)
    if any(len(words) > 2 for words in split) or len(widths) not in (0, len(units)):
        raise FormatError(f"{what}: either all parts or no part may be UNIT * WIDTH", code="field")
    interleaved, block, otherwise = rest.pop("interleaved", None), rest.pop("block", 1), rest.pop("or", None)
    whole_unless, is_squeezed = rest.pop("whole_unless", None), rest.pop("squeeze", False)
    is_table = rest.pop("table", False)
    if rest:
        raise FormatError(f"{what}: unknown key {shown(min(rest))}", code="field")
    if otherwise not in (None, "whole"):
        raise FormatError(f'{what}: or must be "whole"', code="field")
    if not isinstance(whole_unless, str | None) or type(is_squeezed) is not bool:
        raise FormatError(f"{what}: whole_unless must be the name of a size, and squeeze true or false", code="field")
    if not isinstance(interleaved, str | None) or (interleaved is not None and len(units) == 1):
        raise FormatError(f"{what}: interleaved must be the name of a size, and by a list of units", code="field")
    if type(block) is not int or not 1 <= block <= _MAX_NUMBER or (block > 1 and units != (RAGGED,)):
        raise FormatError(f"{what}: block must be a positive integer, and the unit {RAGGED!r}", code="field")
    if len(units) > 1 and ((UNITS - {EVEN}) & set(units) or (EVEN in units and set(units) != {EVEN})):
        raise FormatError(f"{what}: parts must be either all {EVEN!r} or all names of sizes", code="field")
    if widths and (interleaved or UNITS & set(units)):
        raise FormatError(f"{what}: UNIT * WIDTH needs names of sizes, and excludes interleaved", code="field")
    if type(is_table) is not bool or (is_table and (dim or len(units) > 1 or widths or is_squeezed)):
        raise FormatError(f"{what}: table must be true or false, and needs dim 0 and one unit", code="field")
    if is_table and pattern.count("#") > 1:
        raise FormatError(f"{what}: a table has at most one '#' in its pattern", code="field")
    is_whole = otherwise is not None
    return Rule(pattern, dim, units, widths, interleaved, block, is_whole, whole_unless, is_squeezed, is_table)


def _check_units(family: Family) -> None:
    sizes = set(family.sizes)
    for rule in family.rules:
        counted = [*rule.widths, *(size for size in (rule.interleaved, rule.whole_unless) if size is not None)]
        counted += [HASH_VOCABULARY, MAX_NGRAM, HASH_HEADS] if HASH_COLUMNS in rule.units else []
        for names, known in ((rule.units, sizes | UNITS), (counted, sizes)):
            for unit in set(names) - known:
                raise FormatError(
                    f"cut {shown(rule.pattern)}: unit {shown(unit)}, expected {', '.join(sorted(known))}", code="field"
                )


def _table(top: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    table = top.get(key, {})
    if not isinstance(table, dict):
        raise FormatError(f"{key}: {shown(top[key])}, expected a table", code="field")
    return table


def _strings(value: Any, what: str) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
        raise FormatError(f"{what}: {shown(value)}, expected a string or a list of strings", code="field")
    return tuple(values)


_WIDTH = 120
"""Longest line of a plan file, in characters."""


def as_toml(family: Family, *comments: str, extends: str = "") -> str:
    """Return the text of a plan file.

    Args:
        comments: text of the comment lines at the beginning.
        extends: the built-in plan that this plan extends; "" for none.
    """
    rules = dump_rules(family)
    lines = [f"# {line}" for comment in comments for line in wrap(comment, _WIDTH - 2)]
    top = {"model_types": rules.get("model_types"), "extends": extends}
    top["language_prefixes"] = rules.get("language_prefixes")
    lines += [f"{key} = {_toml(value)}" for key, value in top.items() if value]
    for table in ("layers", "sizes", "defaults", "cut", "experts"):
        entries = rules.get(table, {})
        if entries:
            lines += ["", f"[{table}]"]
        for key, value in entries.items():
            lines.append(_short_lines(f"{_toml(key) if table == 'cut' else key} = ", _toml(_short(value))))
    return "\n".join(lines) + "\n"


def _short_lines(before: str, value: str) -> str:
    """Return `before` and `value` in one line, or with the last list of the value wrapped if that is too long."""
    opening, bracket, rest = value.rpartition("[") if len(before + value) > _WIDTH else (value, "", "")
    values, _, closing = rest.rpartition("]")
    if not bracket or "=" in values:
        return before + value
    # NUL replaces spaces temporarily, so that `wrap` breaks only after commas and never inside a string.
    inside = wrap(f"{values},".replace(", ", ",\n").replace(" ", "\0").replace("\n", " "), _WIDTH - 4)
    return f"{before}{opening}[\n" + "".join(f"    {part}\n".replace("\0", " ") for part in inside) + f"]{closing}"


def _short(value: Any) -> Any:
    """Replace lists of one element by that element, also inside objects and lists of one element."""
    if isinstance(value, list) and len(value) == 1:
        return _short(value[0])
    return {key: _short(item) for key, item in value.items()} if isinstance(value, dict) else value


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    # As in JSON, except for DEL, which TOML requires to be escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
