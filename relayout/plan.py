"""The tensor-parallel plan: which slice of each tensor each rank holds. Pure, but for reading a plan file.

The rules are those of the engines (vLLM 0.33 `model_executor/layers/linear.py` and `vocab_parallel_embedding.py`,
SGLang 0.5 for a vocabulary that does not divide), so that an engine finds in a rank's files what it would have cut
out itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relayout.catalogue import Catalogue
from relayout.errors import PlanError
from relayout.extents import align_up
from relayout.families import Family, Rule, find_family, read_family
from relayout.slicing import WHOLE, Slice

VOCABULARY_MULTIPLE = 64
"""Engines pad the vocabulary to a multiple of this before they divide it (vLLM DEFAULT_VOCAB_PADDING_SIZE)."""

MAX_RANKS = 1024


@dataclass(frozen=True, slots=True)
class Plan:
    """Who holds what."""

    name: str
    """The family whose rules were used; "none" at one rank."""
    num_ranks: int
    slices: tuple[tuple[Slice, ...], ...]
    """For each tensor of the catalogue, in its order: the slice of each rank."""


def plan_for(catalogue: Catalogue, num_ranks: int, plan_file: Path | None = None) -> Plan:
    """Choose the rules, a person's own or the built-in ones for the checkpoint's model type, and apply them.

    Raises:
        FormatError: `plan_file` is no plan file.
        PlanError: there are no rules for this checkpoint, or they cannot be applied at this degree.
    """
    _check_degree(num_ranks)
    if num_ranks == 1 and plan_file is None:
        return make_plan(catalogue, num_ranks, None)
    if plan_file is not None:
        return make_plan(catalogue, num_ranks, read_family(plan_file))
    family = find_family(catalogue.model_type)
    quantisation = catalogue.config.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else quantisation
        raise PlanError(
            f"{catalogue.root}: weights are quantised ({method}); plan {family.name!r} cuts unquantised ones only:"
            " use --tp 1, or supply a plan with --plan FILE"
        )
    return make_plan(catalogue, num_ranks, family)


def make_plan(catalogue: Catalogue, num_ranks: int, family: Family | None) -> Plan:
    """Apply a family's rules to a checkpoint. `family` is needed, and used, only for more than one rank.

    Raises:
        PlanError: a tensor has no rule, or its rule cannot be applied at this degree.
    """
    _check_degree(num_ranks)
    if num_ranks == 1:
        return Plan("none", 1, ((WHOLE,),) * len(catalogue.tensors))
    assert family is not None
    cutter = _Cutter(family, catalogue.config, num_ranks)
    return Plan(family.name, num_ranks, tuple(cutter.cut(tensor.name, tensor.shape) for tensor in catalogue.tensors))


def _check_degree(num_ranks: int) -> None:
    if not 1 <= num_ranks <= MAX_RANKS:
        raise PlanError(f"{num_ranks} ranks, expected 1 to {MAX_RANKS}")


class _Cutter:
    """Applies rules, one computation for all tensors with the same rule and shape."""

    def __init__(self, family: Family, config: Mapping[str, Any], num_ranks: int) -> None:
        self.family = family
        self.config = config
        self.num_ranks = num_ranks
        self.known: dict[tuple[Rule, tuple[int, ...]], tuple[Slice, ...]] = {}

    def cut(self, name: str, shape: tuple[int, ...]) -> tuple[Slice, ...]:
        rule = self.family.rule(name)
        if rule is None:
            raise PlanError(f"tensor {name!r}: no rule of plan {self.family.name!r} names it")
        key = (rule, shape)
        if key not in self.known:
            self.known[key] = self._slices(rule, name, shape)
        return self.known[key]

    def _slices(self, rule: Rule, name: str, shape: tuple[int, ...]) -> tuple[Slice, ...]:
        if rule.axis is None:
            return (WHOLE,) * self.num_ranks
        if rule.axis >= len(shape):
            raise PlanError(
                f"tensor {name!r}: shape {list(shape)} has no axis {rule.axis}, which {rule.pattern!r} cuts"
            )
        where = f"tensor {name!r}: axis {rule.axis} of {list(shape)}"
        dim = shape[rule.axis]
        match rule.unit:
            case "vocabulary":
                ranges = vocabulary_ranges(dim, self.num_ranks)
            case "even":
                ranges = even_ranges(dim, dim, self.num_ranks, where)
            case unit:
                count = self._size(unit, where)
                self._check_heads(dim, count, where)
                ranges = even_ranges(dim, count, self.num_ranks, where, replicate=unit == "kv_heads")
        return tuple(Slice(rule.axis, (part,)) for part in ranges)

    def _size(self, unit: str, where: str) -> int:
        keys = self.family.sizes.get(unit, ())
        for key in keys:
            value = self.config.get(key)
            if type(value) is int and value > 0:
                return value
        wanted = " or ".join(keys) or f"a key for {unit!r} in [sizes] of the plan"
        raise PlanError(f"{where}: cut by {unit}, but config.json has no positive {wanted}")

    def _check_heads(self, dim: int, count: int, where: str) -> None:
        head_dims = [self.config.get(key) for key in self.family.sizes.get("head_dim", ())]
        head_dim = next((value for value in head_dims if type(value) is int), None)
        if dim % count or (head_dim is not None and dim != count * head_dim):
            by = "" if head_dim is None else f" of {head_dim} elements"
            raise PlanError(f"{where}: {dim} elements are not {count} heads{by}, which config.json declares")


def even_ranges(dim: int, count: int, num_ranks: int, where: str, *, replicate: bool = False) -> list[tuple[int, int]]:
    """Divide `count` groups of `dim // count` elements among the ranks: (start, length) of each rank.

    With `replicate`, more ranks than groups share them: each group goes to as many neighbouring ranks
    (vLLM 0.33 QKVParallelLinear: KV head `rank // (num_ranks // count)`).

    Raises:
        PlanError: it does not come out even; `where` names tensor and axis.
    """
    group = dim // count if count else 0
    if replicate and num_ranks > count > 0:
        if num_ranks % count == 0:
            share = num_ranks // count
            return [(rank // share * group, group) for rank in range(num_ranks)]
    elif count % num_ranks == 0:
        length = count // num_ranks * group
        return [(rank * length, length) for rank in range(num_ranks)]
    what = f"{count} elements" if group <= 1 else f"{count} heads of {group} elements"
    fitting = [n for n in range(1, 65) if count % n == 0 or (replicate and count and n % count == 0)]
    raise PlanError(
        f"{where} has {what}, not a multiple of {num_ranks}"
        f" (degrees that fit this tensor: {', '.join(map(str, fitting))})"
    )


def vocabulary_ranges(dim: int, num_ranks: int) -> list[tuple[int, int]]:
    """Divide vocabulary rows as engines do: padded to a multiple of 64 for the split, stored unpadded.

    Where the padded size does not divide, it is padded to a multiple of 64 x ranks (SGLang 0.5
    `vocab_parallel_embedding.py`; vLLM refuses). The last ranks may hold fewer rows, or none.
    """
    padded = align_up(dim, VOCABULARY_MULTIPLE)
    if padded % num_ranks:
        padded = align_up(dim, VOCABULARY_MULTIPLE * num_ranks)
    share = padded // num_ranks
    starts = [min(rank * share, dim) for rank in range(num_ranks)]
    return [(start, min(share, dim - start)) for start in starts]
