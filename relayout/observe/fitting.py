"""Finds rules of the plan language for slices that were observed at several degrees. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from relayout.core.arguments import collapse_numbers
from relayout.core.slices import Range, Slice, joined
from relayout.core.tables import PlannedTensor
from relayout.errors import PlanError
from relayout.plans.division import Sizes, divide
from relayout.plans.family import (
    EVEN,
    EXPERTS,
    FILE,
    HEAD_DIM,
    KV_HEADS,
    RAGGED,
    STATE_GROUPS,
    VOCABULARY,
    Family,
    Rule,
    SizeSource,
    as_toml,
    language_config,
)
from relayout.plans.plan import PlannedCheckpoint


@dataclass(frozen=True, slots=True)
class Example:
    """A checkpoint, and the slices that were observed for it."""

    checkpoint: PlannedCheckpoint
    observed: Mapping[int, Sequence[tuple[Slice, ...]]]
    """Degree -> for each tensor in the checkpoint's order: the slice of each rank."""


@dataclass(frozen=True, slots=True)
class _Observed:
    """A tensor of an example, with its observed slices."""

    tensor: PlannedTensor
    example: int
    """The index of the example."""
    slices: Mapping[int, tuple[Slice, ...]]
    """Degree -> the slice of each rank."""
    loaded: Mapping[int, tuple[Slice, ...]]
    """The entries of `slices` for degrees at which at least one rank loads the tensor."""


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
"""Name of a size -> keys of config.json that may contain it."""

_PRODUCTS = (
    "key_heads * key_dim, key_heads * key_dim, value_heads * value_dim",
    "key_heads * key_dim, key_heads * key_dim, value_heads * value_dim, value_heads * value_dim",
    "state_heads * state_dim, state_groups * state, state_groups * state",
    "state_heads * state_dim, state_heads * state_dim, state_groups * state, state_groups * state, state_heads * one",
)
"""Parts of fused projections and convolutions in linear attention and Mamba 2."""

_LINEAR = re.compile(r"linear_attn|delta_net")
_STATE_SPACE = re.compile(r"(^|[._])(mamba|ssm|mixer)\.(?![qkvo]_proj)")
_BESIDE = re.compile(
    r"(^|[._])(visual|vision|vit|image|audio|speech|sound|video|qformer|connector|projectors?)([._]|$)"
    r"|^(model\.)?encoder\."
)
"""Matches names of parts outside the language model. Their heads differ from those of its attention."""

_FIRST = ("weight", "q_proj", "gate_proj", "q_norm", "input_layernorm")
"""Words that a person would write first in a pattern."""

_MAX_WORDS = 60
"""Largest number of characters for the words in braces in a pattern."""

_ATTENTION = re.compile(r"attn|attention|mixer\.[qkvo]_proj")
_EMBEDDING = re.compile(
    r"embed_tokens|word_embeddings|embed_(in|out)\b|lm_head|\bwte\b|\bhead\b|(^|\.)(embeddings|output)\.weight"
)
_EACH = re.compile(r"(.*\.experts\.)\*\..*")
_STACKED = re.compile(r"\.experts\.[a-z]|\.block_sparse_moe\.(input|output)_linear\.")


def elements_along(part: Slice, axis: int, size: int) -> tuple[Range, ...]:
    """Return the ranges that a slice has along an axis of this size, in ascending order."""
    ranges = part.ranges_along(axis)
    return joined(((0, size),) if ranges is None else ranges)


@dataclass(frozen=True, slots=True)
class FittedPlan:
    """A plan that fits, and the tensors without a fitting rule."""

    family: Family
    unmatched: Mapping[str, str]
    """Pattern of tensors that no rule fits -> reason. Every rank holds these tensors whole."""

    def as_toml(self, *comments: str) -> str:
        """Return the text of a plan file with these comments."""
        listed = [f"  {pattern}: {why}" for pattern, why in self.unmatched.items()]
        heading = ["No rule was found for these, which every rank holds whole:"] if listed else []
        return as_toml(self.family, *comments, *heading, *listed)


def fit(examples: Sequence[Example], held_out: Iterable[int] = ()) -> FittedPlan:
    """Return rules that reproduce the observed slices at all degrees.

    Rules are derived without the held-out degrees. A rule that the held-out degrees contradict is not replaced by
    another rule, because it did not describe the engine's behaviour. If no rule fits, every rank holds the tensors
    whole.

    Args:
        examples: checkpoints of one model type with different numbers in config.json. More examples exclude more rules
            that fit one of them by chance.
        held_out: degrees that are only used to check rules.
    """
    fitted = _Fitter(examples, frozenset(held_out)).fit()
    if not fitted.unmatched:
        return fitted
    # In some models heads have several sizes, so the head size cannot be looked up.
    other = _Fitter(examples, frozenset(held_out), without=HEAD_DIM).fit()
    return min(fitted, other, key=lambda each: len(each.unmatched))


class _Fitter:
    """Tries candidate rules of the plan language, the most specific ones first."""

    def __init__(self, examples: Sequence[Example], held_out: frozenset[int], without: str = "") -> None:
        self._examples = examples
        self._held_out = held_out
        self._sources = {size: tuple(map(SizeSource, keys)) for size, keys in SIZES.items()}
        self._sources["one"] = (SizeSource(1),)
        self._sources.pop(without, None)
        configs = [{**example.checkpoint.config, **language_config(example.checkpoint.config)} for example in examples]
        known = {key for keys in SIZES.values() for key in keys}
        for key, value in sorted(configs[0].items()):
            if type(value) is int and value > 1 and key not in known and re.search(r"head|group|expert|num_|n_", key):
                self._sources[key] = (SizeSource(key),)
        self._sizes = [Sizes(self._sources, example.checkpoint.config) for example in examples]
        self._vocabularies = [config.get("vocab_size") for config in configs]

    def fit(self) -> FittedPlan:
        """Return a plan, with the tensors that no rule fits."""
        rules: list[Rule] = []
        unmatched: dict[str, str] = {}
        for group_pattern, group in self._groups().items():
            for pattern, tensors in _cut_alike(group_pattern, group):
                rule, why = self._rule(pattern, tensors)
                if rule is None:
                    unmatched[pattern] = why
                rules.append(rule or Rule(pattern, None))
        rules.sort(key=lambda rule: rule.pattern.count("*"))  # The first matching rule has precedence.
        patterns = {
            (collapse_numbers(tensor.name), len(tensor.shape))
            for example in self._examples
            for tensor in example.checkpoint.tensors
        }
        each = {f"{match[1]}#.**" for pattern, _ in patterns if (match := _EACH.match(pattern))}
        stacked = {pattern for pattern, num_axes in patterns if num_axes > 1 and _STACKED.search(pattern)}
        used = {size for rule in rules for size in (*rule.units, *rule.widths, rule.interleaved)}
        used |= {HEAD_DIM} if used & {"heads", KV_HEADS} else set()
        used |= {EXPERTS} if each or stacked else set()
        model_types = dict.fromkeys(example.checkpoint.model_type for example in self._examples)
        family = Family(
            str(self._examples[0].checkpoint.model_type),
            FILE,
            model_types=tuple(name for name in model_types if name is not None),
            sizes={size: sources for size, sources in self._sources.items() if size in used},
            rules=tuple(_merged(rules)),
            experts_each=tuple(sorted(each)),
            experts_stacked=tuple(sorted(stacked)),
        )
        return FittedPlan(family, unmatched)

    def _groups(self) -> dict[str, list[_Observed]]:
        """Return the tensors, grouped by names that differ only in numbers."""
        groups: dict[str, list[_Observed]] = {}
        for e, example in enumerate(self._examples):
            for t, tensor in enumerate(example.checkpoint.tensors):
                slices = {degree: by_rank[t] for degree, by_rank in example.observed.items()}
                loaded = {degree: cut for degree, cut in slices.items() if any(part.is_held for part in cut)}
                groups.setdefault(collapse_numbers(tensor.name), []).append(_Observed(tensor, e, slices, loaded))
        return groups

    def _rule(self, pattern: str, tensors: Sequence[_Observed]) -> tuple[Rule | None, str]:
        """Return the rule that reproduces the observed slices of all these tensors; else None, and the reason."""
        parts = _parts(tensors)
        axes = {axis for part in parts for axis in part.axes}
        if len({part.is_held for part in parts}) > 1:
            return None, "some ranks do not load it"
        if not axes:
            return Rule(pattern, None), ""
        if len(axes) > 1:
            return None, f"it is sliced along dims {sorted(axes)}"
        [axis] = axes
        seen = [(tensor, degree) for tensor in tensors for degree in tensor.loaded]
        derived_from = [(tensor, degree) for tensor, degree in seen if degree not in self._held_out]
        held_out = [(tensor, degree) for tensor, degree in seen if degree in self._held_out]
        for candidate in self._candidates(pattern, axis, tensors):
            if not all(self._gives(candidate, tensor, degree) for tensor, degree in derived_from):
                continue
            wrong = {degree for tensor, degree in held_out if not self._gives(candidate, tensor, degree)}
            if wrong:
                return None, f"dim {axis} by {' + '.join(candidate.units)} does not hold at {min(wrong)} ranks"
            return replace(candidate, or_whole=_BESIDE.search(pattern) is not None), ""
        return None, f"no rule describes how it is sliced along dim {axis}"

    def _gives(self, rule: Rule, observed: _Observed, degree: int) -> bool:
        """Return True if the rule reproduces the observed slices of a tensor at this degree."""
        assert rule.dim is not None
        size = observed.tensor.shape[rule.dim]
        try:
            ranges = divide(rule, size, self._sizes[observed.example], degree)
        except PlanError:
            return False
        return all(
            joined(own) == elements_along(part, rule.dim, size)
            for own, part in zip(ranges, observed.loaded[degree], strict=True)
        )

    def _candidates(self, pattern: str, axis: int, tensors: Sequence[_Observed]) -> Iterator[Rule]:
        is_attention, is_kv = _ATTENTION.search(pattern), re.search(r"\b[kv]_|[._][kv](_proj)?\.|key|value", pattern)
        units = [KV_HEADS, "heads"] if is_kv else ["heads", KV_HEADS]
        units = [EVEN, *units] if not is_attention else [*units, EVEN]
        if _LINEAR.search(pattern):
            units = ["key_heads", "value_heads", EVEN]
        if _BESIDE.search(pattern) or _STATE_SPACE.search(pattern):
            units = [EVEN]
        is_vocabulary = all(each.tensor.shape[axis] == self._vocabularies[each.example] for each in tensors)
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
        for unit in self._sources:
            if unit not in (HEAD_DIM, "one", "heads", KV_HEADS):
                yield Rule(pattern, axis, (unit,))
        for block in (1, 16, 32, 64, 128, 256):
            yield Rule(pattern, axis, (RAGGED,), block=block)


def _parts(tensors: Iterable[_Observed]) -> list[Slice]:
    """Return all slices that ranks load."""
    return [part for each in tensors for cut in each.loaded.values() for part in cut]


def _cut_alike(pattern: str, tensors: Sequence[_Observed]) -> Iterator[tuple[str, list[_Observed]]]:
    """Divide the tensors of a pattern by the axes that they are cut along; yield each group with its own pattern.

    If the first number in their names does not distinguish the groups, the tensors are not divided.
    """
    lots: dict[tuple[int, ...], list[_Observed]] = {}
    unused: list[_Observed] = []
    for each in tensors:
        axes = tuple(sorted({axis for part in _parts([each]) for axis in part.axes}))
        (lots.setdefault(axes, []) if each.loaded else unused).append(each)
    if unused:  # Any rule fits tensors that are not loaded.
        lots.setdefault(next(iter(lots), ()), []).extend(unused)
    indices = [{_first_number(each.tensor.name) for each in lot} for lot in lots.values()]
    if len(set().union(*indices)) < sum(map(len, indices)) or len(lots) == 1:  # The groups share a number.
        yield pattern, list(tensors)
        return
    for lot, own in zip(lots.values(), indices, strict=True):
        words = ",".join(map(str, sorted(index for index in own if index is not None)))
        yield pattern.replace("*", f"{{{words}}}" if len(own) > 1 else words, 1), lot


def _first_number(name: str) -> int | None:
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


def _merged(rules: Sequence[Rule]) -> list[Rule]:
    """Merge rules with patterns that differ only in one of the last two words."""
    return _merged_at(_merged_at(rules, 2), 1)


def _merged_at(rules: Sequence[Rule], place: int) -> list[Rule]:
    """Merge rules with patterns that differ only in the word at this position, counted from the end."""
    lots: dict[tuple[Any, ...], list[str]] = {}
    for rule in rules:
        words = rule.pattern.split(".")
        index = len(words) - place
        word = words[index] if index > 0 and not re.search(r"[*{#]", words[index]) else None
        before, after = (words, []) if word is None else (words[:index], words[index + 1 :])
        lots.setdefault((tuple(before), tuple(after), replace(rule, pattern="")), []).append(word or "")
    return [
        replace(rule, pattern=".".join([*before, *([_alternatives(lot)] if any(lot) else []), *after]))
        for (before, after, rule), words in lots.items()
        for lot in _short_lots(words)
    ]


def _short_lots(words: Sequence[str]) -> Iterator[list[str]]:
    """Divide words into groups that are short enough for a line."""
    lot: list[str] = []
    for word in words:
        if lot and len(",".join([*lot, word])) > _MAX_WORDS:
            yield lot
            lot = []
        lot.append(word)
    yield lot


def _alternatives(words: Sequence[str]) -> str:
    """Return a pattern that matches any of the words, such as `{q,k,v}_proj`."""
    if len(words) == 1:
        return words[0]
    words = sorted(words, key=lambda word: word not in _FIRST)
    tails = (words[0][i:] for i, letter in enumerate(words[0]) if letter == "_" and i)
    tail = next((tail for tail in tails if all(word.endswith(tail) for word in words)), "")
    return f"{{{','.join(word.removesuffix(tail) for word in words)}}}{tail}"
