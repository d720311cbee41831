"""Drafts a plan for a model without one, from the plan of transformers and from the names in the built-in plans. Pure.

A draft is a start for a person. Each rule says where it is from. What no source knows is held whole by every rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import TypeAlias

from relayout.core.patterns import collapse_numbers
from relayout.errors import PlanError
from relayout.plans.division import Sizes
from relayout.plans.family import (
    BUILTIN,
    EVEN,
    FILE,
    HEAD_DIM,
    KV_HEADS,
    RAGGED,
    VOCABULARY,
    Family,
    Rule,
    SizeSource,
    builtin_families,
    parse_family,
)
from relayout.plans.plan import PlannedCheckpoint
from relayout.plans.plan_text import as_toml, rule_text
from relayout.plans.planner import plan_by, without_rule
from relayout.plans.transformers import transformers_family

_DEGREE = 2
"""Rules that cannot be applied at this degree are replaced by "whole"."""
_MAX_WORDS = 64
"""The most names without braces that a pattern is expanded to."""
_KEYS_OR_VALUES = re.compile(r"(?:^|_)(?:q?kv?|v|keys?|values?)(?:_|$)")
_UNITS = {EVEN, VOCABULARY, RAGGED}
_Kind: TypeAlias = tuple[str, int, tuple[int, ...], str]
"""Pattern, number of tensors, shape and wanted name of the first of them."""
_NO_RULES = Family("none", FILE)


@dataclass(frozen=True, slots=True)
class KindWithoutRule:
    """Tensors whose names differ only in numbers, and that no rule matches."""

    pattern: str
    """What a rule must match: the name with `*` for numbers; of a quantized weight's scales, that of the weight."""
    count: int
    shape: tuple[int, ...]
    """Of the first of them."""
    example: str
    """Name of the first of them."""
    rule: str
    """What the draft does with them, in the language of plans."""
    origin: str
    """Where that is from."""
    num_heads: int | None = None
    """Heads that config.json declares for these keys or values, which the draft cuts evenly, by no head; None: it does
    not."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A plan that cuts a checkpoint at some degree, and the kinds that it adds rules for."""

    text: str
    """The plan file."""
    family: Family
    """The same, parsed."""
    kinds: tuple[KindWithoutRule, ...]


@dataclass(frozen=True, slots=True)
class _Choice:
    """A rule for a kind."""

    rule: Rule
    origin: str
    family: Family | None
    """Whose sizes the rule counts; None: it counts no sizes."""


def draft_plan(checkpoint: PlannedCheckpoint, family: Family | None) -> Draft | None:
    """A plan in which every tensor has a rule; None if every tensor has one in `family`.

    Args:
        family: the plan that the checkpoint has; None: none.

    Raises:
        PlanError: the checkpoint is quantized by a method whose tensors cannot be cut, or no draft can be made.
    """
    missing = _kinds(checkpoint, family or _NO_RULES)
    if not missing:
        return None
    base = family if family is not None else _most_similar(checkpoint)
    needed = missing if family is not None or base is None else _kinds(checkpoint, base)
    theirs = _transformers(checkpoint)
    choices = {
        pattern: rule
        for module in _modules(needed).values()
        for pattern, rule in _rules_for(module, checkpoint, theirs).items()
    }
    text, parsed = _applicable(checkpoint, base, choices, is_own=family is not None)
    rules = {rule.pattern: rule for rule in parsed.rules}
    heads = Sizes({KV_HEADS: (SizeSource("num_key_value_heads"),)}, checkpoint.config).find(KV_HEADS)
    kinds = []
    for pattern, count, shape, example in missing:
        rule = rules.get(pattern) or parsed.rule(example)
        assert rule is not None
        origin = choices[pattern].origin if pattern in choices else f"as in {base.name}" if base else ""
        num_heads = heads if pattern in choices and _is_cut_through_heads(example, rule) else None
        kinds.append(KindWithoutRule(pattern, count, shape, example, rule_text(rule), origin, num_heads))
    return Draft(text, parsed, tuple(kinds))


def _is_cut_through_heads(name: str, rule: Rule) -> bool:
    """Whether keys or values, by their name, are cut at elements: at some degrees a rank gets a part of a head."""
    module = name.rpartition(".")[0].rpartition(".")[2]
    return set(rule.units) == {EVEN} and _KEYS_OR_VALUES.search(module) is not None


def _kinds(checkpoint: PlannedCheckpoint, family: Family) -> list[_Kind]:
    """The kinds that no rule matches."""
    kinds: dict[str, list[tuple[tuple[int, ...], str]]] = {}
    for tensor, wanted in without_rule(checkpoint, family):
        kinds.setdefault(_pattern_of(wanted), []).append((tensor.shape, wanted))
    return [(pattern, len(tensors), *tensors[0]) for pattern, tensors in kinds.items()]


def _most_similar(checkpoint: PlannedCheckpoint) -> Family | None:
    """The built-in plan that matches most kinds of tensors, if it matches more than half of them."""
    names = {collapse_numbers(tensor.name): tensor.name for tensor in checkpoint.tensors}.values()
    matched = {family.name: sum(family.rule(name) is not None for name in names) for family in builtin_families()}
    best = max(builtin_families(), key=lambda family: (matched[family.name], -len(family.rules)))
    return best if 2 * matched[best.name] > len(names) else None


def _transformers(checkpoint: PlannedCheckpoint) -> Family | None:
    try:
        return transformers_family(checkpoint.model_type, checkpoint.config)
    except PlanError:  # Not installed, or it has none.
        return None


def _modules(kinds: Sequence[_Kind]) -> dict[str, list[_Kind]]:
    """The kinds of each module, such as all of an attention block, by the module's name."""
    modules: dict[str, list[_Kind]] = {}
    for kind in kinds:
        modules.setdefault(kind[0].rpartition(".")[0].rpartition(".")[0], []).append(kind)
    return modules


def _rules_for(module: Sequence[_Kind], checkpoint: PlannedCheckpoint, theirs: Family | None) -> dict[str, _Choice]:
    """The rules for the kinds of one module, each by the first source that knows one."""
    choices: dict[str, _Choice] = {}
    for pattern, _, _, name in module:
        if theirs is not None and (rule := theirs.rule(name)) is not None:
            choices[pattern] = _Choice(replace(rule, pattern=pattern, or_whole=False), "transformers", theirs)
    while rest := [kind for kind in module if kind[0] not in choices]:  # What one plan does not know, another may.
        alike = max((_alike(rest, length, checkpoint) for length in (3, 2)), key=len)  # The longer, if equal.
        if not alike:
            break
        choices |= alike
    for pattern, _, shape, _ in rest:
        why = (
            "one dimension"
            if len(shape) < 2
            else "UNKNOWN name: whole on every rank until you have checked your engine"
        )
        choices[pattern] = _Choice(Rule(pattern, None), why, None)
    return choices


def _alike(module: Sequence[_Kind], length: int, checkpoint: PlannedCheckpoint) -> dict[str, _Choice]:
    """Rules for as many kinds of a module as the modules of built-in plans know that know most, by the most of these.

    Rules from several plans do not fit together: one may cut heads where another cuts evenly.

    Args:
        length: how many of the last parts of names must be equal.
    """
    known: dict[tuple[str, str], dict[str, tuple[str, Family, Rule]]] = {}
    for pattern, _, shape, name in module:
        tail = tuple(collapse_numbers(name).split(".")[-length:])
        for family, rule, parent in _rules_by_tail().get(tail, ()):
            if _fits(family, rule, shape, checkpoint):
                known.setdefault((family.name, parent), {}).setdefault(pattern, (".".join(tail), family, rule))
    most = max(map(len, known.values()), default=0)
    voters: dict[str, list[tuple[str, str]]] = {}
    for voter, rules in known.items():
        if len(rules) == most:
            vote = str([(pattern, rule_text(rule)) for pattern, (_, _, rule) in rules.items()])
            voters.setdefault(vote, []).append(voter)
    chosen = max(voters.values(), key=len, default=[])
    names = sorted({name for name, _ in chosen})
    more = f" and {len(names) - 2} others" if len(names) > 2 else ""
    return {
        pattern: _Choice(
            replace(rule, pattern=pattern, or_whole=False), f"{tail} as in {', '.join(names[:2])}{more}", family
        )
        for pattern, (tail, family, rule) in (known[chosen[0]].items() if chosen else ())
    }


def _fits(family: Family, rule: Rule, shape: tuple[int, ...], checkpoint: PlannedCheckpoint) -> bool:
    """Whether config.json has the sizes that a rule counts, and the tensor has the dimension."""
    sizes = Sizes(family.sizes, checkpoint.config)
    return (rule.dim is None or rule.dim < max(2, len(shape))) and all(
        sizes.find(size) is not None for size in _counted(rule)
    )


def _counted(rule: Rule) -> list[str]:
    """The sizes that a rule needs."""
    return [size for size in (*rule.units, *rule.widths, rule.interleaved) if size is not None and size not in _UNITS]


@cache
def _rules_by_tail() -> dict[tuple[str, ...], list[tuple[Family, Rule, str]]]:
    """The rules of the built-in plans, each with its module, by the last two or three parts of the names they match."""
    by_tail: dict[tuple[str, ...], list[tuple[Family, Rule, str]]] = {}
    for family in builtin_families():
        if family.is_transposed or family.quantization is not None:
            continue  # Their dimensions mean something else.
        for rule in family.rules:
            for name in _expanded(rule.pattern):
                parts = name.replace("**", "*").split(".")
                for length in (3, 2):
                    if len(parts) >= length:
                        by_tail.setdefault(tuple(parts[-length:]), []).append((family, rule, ".".join(parts[:-2])))
    return by_tail


def _expanded(pattern: str) -> Iterator[str]:
    """The pattern with each choice of the words in braces."""
    pieces = re.split(r"\{([^{}]*)\}", pattern)
    choices = [piece.split(",") if n % 2 else [piece] for n, piece in enumerate(pieces)]
    for index, words in enumerate(product(*choices)):
        if index == _MAX_WORDS:
            return
        yield "".join(words)


def _applicable(
    checkpoint: PlannedCheckpoint, base: Family | None, choices: dict[str, _Choice], *, is_own: bool
) -> tuple[str, Family]:
    """The text of the draft and its rules. Rules that cannot be applied are replaced by "whole".

    Args:
        is_own: `base` is the plan of this model type. Its rules stay, whatever the degree.

    Raises:
        PlanError: that was not enough.
    """
    while True:  # Each round makes one more kind whole.
        text = _text(checkpoint, base, choices)
        parsed = parse_family(text, "the draft", "draft")
        try:
            plan_by(checkpoint, _DEGREE, parsed)
            return text, parsed
        except PlanError as error:
            pattern = _failing(error, parsed)
            if is_own and pattern not in choices and error.code in ("indivisible", "config"):
                return text, parsed
            if pattern is None or (pattern in choices and choices[pattern].rule.dim is None):
                error.what = f"no draft can be made: {error.what}"
                raise
            reason = error.what.partition(" (this checkpoint")[0]
            why = f"whole, as it cannot be cut at {_DEGREE} ranks: {reason}"
            choices[pattern] = _Choice(Rule(pattern, None), why, None)


def _failing(error: PlanError, rules: Family) -> str | None:
    """The pattern of the kind for which a plan could not be made; None: the error is about no tensor."""
    if error.tensor is None:
        return None
    # The rule of a weight's scales is that of the weight.
    names = error.tensor, f"{error.tensor.rpartition('.')[0]}.weight"
    name = next((candidate for candidate in names if rules.rule(candidate) is not None), error.tensor)
    return _pattern_of(name)


def _pattern_of(name: str) -> str:
    # Characters that mean something in patterns cannot be written otherwise.
    return re.sub(r"[{}#]", "*", collapse_numbers(name))


def _text(checkpoint: PlannedCheckpoint, base: Family | None, choices: dict[str, _Choice]) -> str:
    """A plan file: the base's name, the sizes that the rules count, and the rules, each with its origin."""
    if base is not None and base.origin != BUILTIN:
        raise PlanError("a draft adds rules to a built-in plan only; add them to your own by hand", code="unsupported")
    sizes: dict[str, dict[SizeSource, None]] = {}
    for choice in choices.values():
        counted = _counted(choice.rule)
        known = {} if choice.family is None else choice.family.sizes
        for size in [*counted, HEAD_DIM] if {"heads", KV_HEADS} & set(counted) else counted:
            if size in known and (base is None or size not in base.sizes):
                sizes.setdefault(size, {}).update(dict.fromkeys(known[size]))
    rules = [choice.rule for choice in choices.values()]
    family = Family(
        "",
        FILE,
        model_types=() if checkpoint.model_type is None else (checkpoint.model_type,),
        sizes={size: tuple(sources) for size, sources in sizes.items()},
        # The first that matches counts: those with fewer wildcards first.
        rules=tuple(sorted(rules, key=lambda rule: rule.pattern.count("*"))),
    )
    return as_toml(
        family,
        "A draft: compare it with the code of your engine before you trust it.",
        extends=base.name if base else "",
        origins={pattern: choice.origin for pattern, choice in choices.items()},
    )
