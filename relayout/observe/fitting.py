"""Finds rules of the plan language for slices that were observed at several degrees. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import Any

from relayout.core.patterns import collapse_numbers
from relayout.core.slices import Slice
from relayout.errors import PlanError
from relayout.observe.taken import completed, joined
from relayout.plans.division import Sizes, divide, language_config
from relayout.plans.family import (
    EVEN,
    EXPERTS,
    HEAD_DIM,
    KV_HEADS,
    RAGGED,
    STATE_GROUPS,
    VOCABULARY,
    Family,
    Rule,
    SizeSource,
    dump_rules,
)
from relayout.plans.plan import PlannedCheckpoint, PlannedTensor

Observed = Mapping[int, Sequence[tuple[Slice, ...]]]
"""By degree: for each tensor, in the checkpoint's order, the slice of each rank."""


@dataclass(frozen=True, slots=True)
class Example:
    """A checkpoint, and what was observed of it."""

    checkpoint: PlannedCheckpoint
    observed: Observed


_Member = tuple[int, int]
"""Numbers of an example and of a tensor in it."""

SIZES: dict[str, tuple[str, ...]] = {
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    KV_HEADS: ("num_key_value_heads", "num_attention_heads", "n_head", "n_heads"),
    HEAD_DIM: ("head_dim",),
    EXPERTS: ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
    "key_heads": ("linear_num_key_heads",),
    "value_heads": ("linear_num_value_heads",),
    "key_dim": ("linear_key_head_dim",),
    "value_dim": ("linear_value_head_dim",),
    "state_heads": ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads"),
    "state_dim": ("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim"),
    STATE_GROUPS: ("mamba_n_groups", "mamba_ngroups", "n_groups"),
    "state": ("mamba_d_state", "ssm_state_size", "state_size"),
}
"""Names of sizes, and the keys of config.json that have them."""

_PRODUCTS = (
    "key_heads * key_dim, key_heads * key_dim, value_heads * value_dim",
    "key_heads * key_dim, key_heads * key_dim, value_heads * value_dim, value_heads * value_dim",
    "state_heads * state_dim, state_groups * state, state_groups * state",
    "state_heads * state_dim, state_heads * state_dim, state_groups * state, state_groups * state, state_heads * one",
)
"""What linear attention and Mamba 2 fuse: the projection of each, and its convolution."""

_LINEAR = re.compile(r"linear_attn|delta_net")
_STATE_SPACE = re.compile(r"(^|[._])(mamba|ssm|mixer)\.(?![qkvo]_proj)")
_BESIDE = re.compile(
    r"(^|[._])(visual|vision|vit|image|audio|speech|sound|video|qformer|connector|projectors?)([._]|$)"
    r"|^(model\.)?encoder\."
)
"""In names of the parts beside the language model, whose heads are not those of its attention."""

_FIRST = ("weight", "q_proj", "gate_proj", "q_norm", "input_layernorm")
"""Words that a person would write before others."""

_WIDTH = 120
"""Of a line."""

_ATTENTION = re.compile(r"attn|attention")
_EMBEDDING = re.compile(
    r"embed_tokens|word_embeddings|embed_(in|out)\b|lm_head|\bwte\b|\bhead\b|(^|\.)(embeddings|output)\.weight"
)
_EXPERT = re.compile(r"\.experts\.\d+\.")
_STACKED = re.compile(r"\.experts\.[a-z]|\.block_sparse_moe\.(input|output)_linear\.")


@dataclass(frozen=True, slots=True)
class Fitted:
    """A plan that fits, and what does not."""

    family: Family
    unfitted: Mapping[str, str]
    """Patterns of tensors that no rule fits, and what is known of them."""


def fit(examples: Sequence[Example], held_out: Iterable[int] = ()) -> Fitted:
    """Rules that give what was observed at all degrees; each must also give what was at the held out ones.

    Rules are looked for without these, and one that they refute is not replaced by another: it did not say what the
    engine does. Where no rule fits, what was observed of one example is listed; of several nothing is.

    Args:
        examples: of one model type, with other numbers in config.json: they refute what fits one by chance.
        held_out: degrees.
    """
    fitted = _fit(_Fitter(examples, frozenset(held_out)))
    if not fitted.unfitted:
        return fitted
    # In some models heads have several sizes, so that none can be asked for.
    other = _fit(_Fitter(examples, frozenset(held_out), without=HEAD_DIM))
    return min(fitted, other, key=lambda one: len(one.unfitted))


def _fit(fitter: _Fitter) -> Fitted:
    rules: list[Rule] = []
    unfitted: dict[str, str] = {}
    examples = fitter.examples
    for pattern, members in fitter.groups().items():
        for narrowed, some in fitter.alike(pattern, members):
            rule, why = fitter.rule(narrowed, some)
            if rule is not None:
                rules.append(rule)
                continue
            unfitted[narrowed] = why
            if len(examples) == 1:
                rules += _explicit(narrowed, [t for _, t in some], examples[0])
    rules.sort(key=lambda rule: rule.pattern.count("*"))  # The first that matches counts.
    used = {size for rule in rules for size in (*rule.units, *rule.widths, rule.interleaved)}
    used |= {HEAD_DIM} if used & {"heads", KV_HEADS} else set()
    tensors = [tensor for example in examples for tensor in example.checkpoint.tensors]
    each = {collapse_but_experts(tensor.name) for tensor in tensors if _EXPERT.search(tensor.name)}
    each = {_EXPERT.sub(".experts.#.", name).rpartition("#.")[0] + "#.**" for name in each}
    stacked = {
        collapse_numbers(tensor.name) for tensor in tensors if len(tensor.shape) > 1 and _STACKED.search(tensor.name)
    }
    used |= {EXPERTS} if each or stacked else set()
    model_types = dict.fromkeys(example.checkpoint.model_type for example in examples)
    family = Family(
        str(examples[0].checkpoint.model_type),
        "file",
        model_types=tuple(one for one in model_types if one is not None),
        sizes={size: sources for size, sources in fitter.sources.items() if size in used},
        rules=tuple(_merged(rules)),
        experts_each=tuple(sorted(each)),
        experts_stacked=tuple(sorted(stacked)),
    )
    return Fitted(family, unfitted)


def collapse_but_experts(name: str) -> str:
    """The name with numbers replaced, but for the expert's."""
    return ".experts.".join(
        collapse_numbers(part) if i == 0 else part for i, part in enumerate(name.split(".experts.", 1))
    )


def as_toml(fitted: Fitted, *comments: str, extends: str = "") -> str:
    """The text of a plan file.

    Args:
        fitted: the rules.
        comments: the first lines.
        extends: the built-in plan whose rules come behind these.
    """
    rules = dump_rules(fitted.family)
    lines = [f"# {line}" for comment in comments for line in wrap(comment, _WIDTH - 2)]
    if fitted.unfitted:
        lines.append("# No rule was found for these, whose slices are listed:")
        lines += [f"#   {pattern}: {why}" for pattern, why in fitted.unfitted.items()]
    top = {"model_types": rules.get("model_types"), "extends": extends}
    top["language_prefixes"] = rules.get("language_prefixes")
    lines += [f"{key} = {_toml(value)}" for key, value in top.items() if value]
    for table in ("sizes", "cut", "experts"):
        entries = rules.get(table, {})
        if entries:
            lines += ["", f"[{table}]"]
            lines += [
                _short_lines(f"{key if table != 'cut' else _toml(key)} = {_toml(_short(value))}")
                for key, value in entries.items()
            ]
    return "\n".join(lines) + "\n"


def _short_lines(line: str) -> str:
    """The line, or if it is too long its list on lines of its own."""
    before, bracket, rest = line.rpartition("[") if len(line) > _WIDTH else (line, "", "")
    values, _, after = rest.rpartition("]")
    if not bracket or "=" in values:
        return line
    # Words that belong together are kept so: no break in a string.
    inside = wrap(f"{values},".replace(", ", ",\n").replace(" ", "\0").replace("\n", " "), _WIDTH - 4)
    return f"{before}[\n" + "".join(f"    {one}\n".replace("\0", " ") for one in inside) + f"]{after}"


def _short(value: Any) -> Any:
    """Lists of one as that one."""
    if isinstance(value, list) and len(value) == 1:
        return _short(value[0])
    return {key: _short(one) for key, one in value.items()} if isinstance(value, dict) else value


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(one)}" for key, one in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return str(value).lower() if isinstance(value, bool) else str(value)


class _Fitter:
    """Tries the rules of the language, the most telling ones first."""

    def __init__(self, examples: Sequence[Example], held_out: frozenset[int], without: str = "") -> None:
        self.examples = examples
        self._held_out = held_out
        self.sources = {size: tuple(map(SizeSource, keys)) for size, keys in SIZES.items()}
        self.sources["one"] = (SizeSource(1),)
        self.sources.pop(without, None)
        numbers = [_numbers(example.checkpoint.config) for example in examples]
        known = {key for keys in SIZES.values() for key in keys}
        for key, value in sorted(numbers[0].items()):
            if type(value) is int and value > 1 and key not in known and re.search(r"head|group|expert|num_|n_", key):
                self.sources[key] = (SizeSource(key),)
        self._sizes = [Sizes(self.sources, example.checkpoint.config) for example in examples]
        self._vocabularies = [one.get("vocab_size") for one in numbers]

    def groups(self) -> dict[str, list[_Member]]:
        """The tensors whose names differ in numbers only."""
        groups: dict[str, list[_Member]] = {}
        for e, example in enumerate(self.examples):
            for t, tensor in enumerate(example.checkpoint.tensors):
                groups.setdefault(collapse_numbers(tensor.name), []).append((e, t))
        return groups

    def alike(self, pattern: str, members: Sequence[_Member]) -> Iterator[tuple[str, list[_Member]]]:
        """Tensors of a pattern by the axes that they are cut along; each lot with a pattern of its own."""
        lots: dict[tuple[int, ...], list[_Member]] = {}
        untaken: list[_Member] = []
        for member in members:
            parts = [part for _, slices in self._seen(member) for part in slices]
            axes = tuple(sorted({axis for part in parts for axis in part.axes}))
            (lots.setdefault(axes, []) if parts else untaken).append(member)
        if untaken:  # Any rule will do for them.
            lots.setdefault(next(iter(lots), ()), []).extend(untaken)
        numbers = [{_first_number(self._tensor(one).name) for one in lot} for lot in lots.values()]
        if len(set().union(*numbers)) < sum(map(len, numbers)) or len(lots) == 1:  # No number tells the lots apart.
            yield pattern, list(members)
            return
        for lot, its in zip(lots.values(), numbers, strict=True):
            words = ",".join(map(str, sorted(number for number in its if number is not None)))
            yield pattern.replace("*", f"{{{words}}}" if len(its) > 1 else words, 1), lot

    def rule(self, pattern: str, members: Sequence[_Member]) -> tuple[Rule | None, str]:
        """The rule that gives what was observed of all these tensors; else None, and why not."""
        parts = [part for member in members for _, slices in self._seen(member) for part in slices]
        axes = {axis for part in parts for axis in part.axes}
        if len({part.is_held for part in parts}) > 1:
            return None, "some ranks do not take it"
        if not axes:
            return Rule(pattern, None), ""
        if len(axes) > 1:
            return None, f"it is cut along dims {sorted(axes)}"
        [axis] = axes
        for candidate in self._candidates(pattern, axis, members):
            wrong = self._wrong(candidate, members)
            if wrong and min(wrong) in self._held_out and wrong <= self._held_out:
                return None, f"{_said(candidate)} is not so at {min(wrong)} ranks"
            if not wrong:
                return replace(candidate, or_whole=_BESIDE.search(pattern) is not None), ""
        return None, f"it is cut along dim {axis} as no rule says"

    def _wrong(self, rule: Rule, members: Sequence[_Member]) -> set[int]:
        """The degrees at which it does not give what was observed: the held out ones, or one that was not."""
        wrong = set()
        for member in members:
            for degree, slices in self._seen(member):
                if not self._gives(rule, member, degree, slices):
                    wrong.add(degree)
                    if degree not in self._held_out:
                        return wrong
        return wrong

    def _seen(self, member: _Member) -> Iterator[tuple[int, tuple[Slice, ...]]]:
        """At each degree at which a rank takes it."""
        e, t = member
        seen = ((degree, by_rank[t]) for degree, by_rank in self.examples[e].observed.items())
        return ((degree, slices) for degree, slices in seen if any(part.is_held for part in slices))

    def _tensor(self, member: _Member) -> PlannedTensor:
        return self.examples[member[0]].checkpoint.tensors[member[1]]

    def _gives(self, rule: Rule, member: _Member, degree: int, slices: tuple[Slice, ...]) -> bool:
        assert rule.dim is not None
        size = self._tensor(member).shape[rule.dim]
        try:
            ranges = divide(rule, size, self._sizes[member[0]], degree)
        except PlanError:
            return False
        taken = (part.ranges_along(rule.dim) for part in slices)
        return all(
            joined(one) == (((0, size),) if other is None else joined(other))
            for one, other in zip(ranges, taken, strict=True)
        )

    def _candidates(self, pattern: str, axis: int, members: Sequence[_Member]) -> Iterator[Rule]:
        is_attention, is_kv = _ATTENTION.search(pattern), re.search(r"\b[kv]_|[._][kv](_proj)?\.|key|value", pattern)
        units = [KV_HEADS, "heads"] if is_kv else ["heads", KV_HEADS]
        units = [EVEN, *units] if not is_attention else [*units, EVEN]
        if _LINEAR.search(pattern):
            units = ["key_heads", "value_heads", EVEN]
        if _BESIDE.search(pattern) or _STATE_SPACE.search(pattern):
            units = [EVEN]
        is_vocabulary = all(self._tensor(one).shape[axis] == self._vocabularies[one[0]] for one in members)
        if is_vocabulary or _EMBEDDING.search(pattern):
            units.insert(0, VOCABULARY)
        for unit in dict.fromkeys([*units, VOCABULARY]):
            yield Rule(pattern, axis, (unit,))
        for count in (2, 3, 4):
            yield Rule(pattern, axis, (EVEN,) * count)
        if _BESIDE.search(pattern):
            return
        for parts in (("heads", KV_HEADS, KV_HEADS), (KV_HEADS, KV_HEADS), ("heads", "heads", KV_HEADS, KV_HEADS)):
            yield Rule(pattern, axis, parts)
            yield Rule(pattern, axis, parts, (), KV_HEADS)
        for products in _PRODUCTS:
            split = [product.split(" * ") for product in products.split(", ")]
            yield Rule(pattern, axis, tuple(unit for unit, _ in split), tuple(width for _, width in split))
        for unit in self.sources:
            if unit not in (HEAD_DIM, "one", "heads", KV_HEADS):
                yield Rule(pattern, axis, (unit,))
        for block in (1, 16, 32, 64, 128, 256):
            yield Rule(pattern, axis, (RAGGED,), block=block)


def _said(rule: Rule) -> str:
    return f"dim {rule.dim} by {' + '.join(rule.units)}"


def _numbers(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**config, **language_config(config)}


def _explicit(pattern: str, members: Sequence[int], example: Example) -> Iterator[Rule]:
    """What was observed, and what no rank takes: one rule for all tensors, or for each lot one of its names."""
    lots: dict[tuple[tuple[int, tuple[Slice, ...]], ...], list[str]] = {}
    for t in members:
        tensor = example.checkpoint.tensors[t]
        seen = tuple((degree, completed(by_rank[t], tensor.shape)) for degree, by_rank in example.observed.items())
        lots.setdefault(seen, []).append(tensor.name)
    for slices, names in lots.items():
        for one in [pattern] if len(lots) == 1 else names:
            yield Rule(one, None, slices=slices)


def _first_number(name: str) -> int | None:
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


def _merged(rules: Sequence[Rule]) -> list[Rule]:
    """Rules that differ in one of the last two words of their patterns only, as one."""
    return _together(_together(rules, 2), 1)


def _together(rules: Sequence[Rule], place: int) -> list[Rule]:
    """Rules that differ only in the word at this place from the end of the pattern, as one."""
    lots: dict[tuple[Any, ...], list[str]] = {}
    for rule in rules:
        words = rule.pattern.split(".")
        there = len(words) - place
        word = words[there] if there > 0 and not re.search(r"[*{#]", words[there]) else None
        before, after = (words, []) if word is None else (words[:there], words[there + 1 :])
        lots.setdefault((tuple(before), tuple(after), replace(rule, pattern="")), []).append(word or "")
    return [
        replace(rule, pattern=".".join([*before, *([_one_of(some)] if any(some) else []), *after]))
        for (before, after, rule), words in lots.items()
        for some in _few(words)
    ]


def _few(words: Sequence[str]) -> Iterator[list[str]]:
    """Lots that are short enough for a line."""
    lot: list[str] = []
    for word in words:
        if lot and len(",".join([*lot, word])) > _WIDTH // 2:
            yield lot
            lot = []
        lot.append(word)
    yield lot


def _one_of(words: Sequence[str]) -> str:
    """A pattern for them: `{q,k,v}_proj`."""
    if len(words) == 1:
        return words[0]
    words = sorted(words, key=lambda word: word not in _FIRST)
    tail = next((tail for tail in _tails(words[0]) if all(word.endswith(tail) for word in words)), "")
    return f"{{{','.join(word.removesuffix(tail) for word in words)}}}{tail}"


def _tails(word: str) -> Iterator[str]:
    """From each underscore on, the longest first."""
    return (word[i:] for i, letter in enumerate(word) if letter == "_" and i)
