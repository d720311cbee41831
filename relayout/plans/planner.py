"""Finds the plan of a checkpoint: by its family, by a plan file, or by the rules that a conversion has recorded.

A family's rules cut each tensor as the engines do. A quantized weight is stored as several tensors, which are cut at
the places where the weight is cut. This module reads no files other than plan files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import lcm
from pathlib import Path
from typing import Literal, get_args

from relayout.core.arguments import collapse_later_numbers, collapse_numbers
from relayout.core.slices import WHOLE, Cut, Range, Slice, num_bytes, number_cuts
from relayout.core.tables import PlannedTensor, tables_of
from relayout.errors import FormatError, PlanError, about, shown
from relayout.format.manifest import SOURCE_RECORD_NAME
from relayout.format.source_record import SourceRecord
from relayout.plans.division import ExpertOwners, Sizes, checked_cut, divide, part_of
from relayout.plans.family import (
    BUILTIN,
    ENGINES,
    FILE,
    TRANSFORMERS,
    Family,
    Rule,
    builtin_families,
    find_family,
    parse_rules,
    read_family,
)
from relayout.plans.plan import Plan, PlannedCheckpoint
from relayout.plans.quantization import QuantizedWeight, Scheme, find_scheme, is_cache_scale

MAX_RANKS = 1024

Unmatched = Literal["error", "replicate"]
"""Treatment of tensors that no rule matches."""

_TRIED_DEGREE = 2
"""Degree at which other plans are tried. It does not depend on the requested degree."""

_MOST_UNMATCHED = 0.25
"""Largest share of the bytes that the plan of transformers may have no rules for."""

_DEGREES_TO_TRY = 64
"""Degrees up to this number are tried for error messages, or up to twice the requested degree if that is more."""


def plan_for(
    checkpoint: PlannedCheckpoint,
    num_ranks: int,
    plan: str | Path | None = None,
    *,
    expert_parallel: bool = False,
    unmatched: Unmatched | None = None,
) -> Plan:
    """Choose a plan file or the built-in plan for the checkpoint's model type, and apply its rules.

    A single rank holds everything; its plan contains rules for other degrees if there are any.

    Args:
        checkpoint: its tensors and config.json.
        num_ranks: the tensor-parallel degree.
        plan: a plan file, the name of a built-in plan, or "transformers" for that package's plan; None: the built-in
            plan for the model type.
        expert_parallel: True if each expert is held whole by one rank, in contiguous blocks (vLLM's linear placement).
        unmatched: treatment of tensors that no rule matches: "error", or "replicate" to hold them whole on every rank.
            None: "error". Exception: the plan of transformers lists only tensors that are cut, so None means
            "replicate" for it, unless more than a quarter of the bytes has no rule.
    """
    with about(path=str(checkpoint.root)):
        if unmatched not in (None, *get_args(Unmatched)):
            expected = " or ".join(map(repr, get_args(Unmatched)))
            raise PlanError(f"unmatched: {unmatched!r}, expected {expected}", code="option")
        check_degree(num_ranks)
        try:
            family = _choose(checkpoint, plan, num_ranks)
        except PlanError:
            if num_ranks > 1 or plan not in (None, TRANSFORMERS):
                raise
            family = None
        return plan_by(checkpoint, num_ranks, family, expert_parallel=expert_parallel, unmatched=unmatched)


def plan_by(
    checkpoint: PlannedCheckpoint,
    num_ranks: int,
    family: Family | None,
    *,
    expert_parallel: bool = False,
    unmatched: Unmatched | None = None,
) -> Plan:
    """Apply a family's rules to a checkpoint of plain or quantized weights; options as for `plan_for`.

    Args:
        family: the rules. None is allowed only for one rank.
    """
    with about(path=str(checkpoint.root)):
        check_degree(num_ranks)
        family = None if family is None else family.resolved(checkpoint.config)
        if num_ranks == 1:
            name, cuts = "none" if family is None else family.full_name, [Cut((WHOLE,))] * len(checkpoint.tensors)
            tables = () if family is None else _whole_tables(checkpoint, family)
            return Plan(name, 1, *number_cuts(cuts), family=family, tables=tables)
        assert family is not None, "more than one rank needs rules"
        if unmatched is not None:
            return _make_plan(checkpoint, num_ranks, family, expert_parallel, unmatched)
        if family.origin != TRANSFORMERS:
            return _make_plan(checkpoint, num_ranks, family, expert_parallel, "error")
        plan = _make_plan(checkpoint, num_ranks, family, expert_parallel, "replicate")
        _check_share(checkpoint, plan)
        return plan


def _whole_tables(checkpoint: PlannedCheckpoint, family: Family) -> tuple[tuple[int, ...], ...]:
    """Return the tables of a checkpoint that is not cut; empty if some shards of a table are missing.

    Such a checkpoint is converted without its tables.
    """
    try:
        return _CutKindFinder(checkpoint, family, None).members_of_tables
    except PlanError:
        return ()


def _check_share(checkpoint: PlannedCheckpoint, plan: Plan) -> None:
    """Raise PlanError if tensors that no rule matches are more than `_MOST_UNMATCHED` of the bytes.

    Every rank would hold them whole. The plan of transformers lists only modules of classes that transformers can cut:
    for models built from other classes it lists few or no modules.
    """
    sizes = {tensor.name: num_bytes(tensor.dtype, tensor.shape) or 0 for tensor in checkpoint.tensors}
    unmatched, all_bytes = sum(sizes[name] for name in plan.unmatched), sum(sizes.values())
    if unmatched > _MOST_UNMATCHED * all_bytes:
        what = f"plan {plan.name!r} has no rule for {100 * unmatched / all_bytes:.0f} % of the bytes"
        others = "add rules (--plan FILE), or hold these whole on every rank (--unmatched replicate)"
        raise PlanError(f"{what}, such as {plan.unmatched[0]}: {others}", code="no_rule")


def check_degree(num_ranks: int) -> None:
    """Raise PlanError unless the number of ranks is within the limits."""
    if not 1 <= num_ranks <= MAX_RANKS:
        raise PlanError(f"tp: {num_ranks}, expected 1 to {MAX_RANKS}", code="option")


def _make_plan(
    checkpoint: PlannedCheckpoint, num_ranks: int, family: Family, expert_parallel: bool, unmatched: Unmatched
) -> Plan:
    scheme = _scheme(checkpoint)
    sizes = Sizes(family.sizes, checkpoint.config, family.defaults_of(checkpoint.config))
    whole = Cut((WHOLE,) * num_ranks)
    finder = _CutKindFinder(checkpoint, family, scheme)
    experts = ExpertOwners(family, sizes, whole)
    kinds: dict[_CutKind, str] = {}
    column: list[_CutKind | Cut] = []
    unmatched_names = []
    has_experts = False
    for tensor in checkpoint.tensors:
        owned = None
        if expert_parallel:
            with about(tensor=tensor.name):
                owned = experts.owners(tensor)
        if owned is not None:
            has_experts = True
            column.append(owned)
            continue
        kind = finder.find(tensor)
        if kind is None:
            unmatched_names.append(tensor.name)
        else:
            kinds.setdefault(kind, tensor.name)
        column.append(kind or whole)
    if unmatched_names and unmatched == "error":
        others = f" (nor {len(unmatched_names) - 1} others)" if len(unmatched_names) > 1 else ""
        raise PlanError(
            f"no rule of plan {family.full_name!r} matches it{others}: add a rule (--plan FILE; "
            "`relayout plans check SRC` lists all of these), or hold such tensors whole on every rank"
            " (--unmatched replicate)",
            tensor=unmatched_names[0],
            code="no_rule",
        )
    if expert_parallel and not has_experts:
        raise PlanError(
            f"no tensor matches the experts of plan {family.full_name!r}, which --expert-parallel needs",
            code="no_rule",
        )
    cuts = _apply(kinds, sizes, num_ranks, scheme)
    numbered = number_cuts(cuts[kind] if isinstance(kind, _CutKind) else kind for kind in column)
    left, tables = tuple(unmatched_names), finder.members_of_tables
    return Plan(family.full_name, num_ranks, *numbered, expert_parallel, left, family=family, tables=tables)


def _scheme(checkpoint: PlannedCheckpoint) -> Scheme | None:
    """Return the quantization scheme of the checkpoint's weights; None if they are not quantized."""
    quantization = checkpoint.config.get("quantization_config")
    return find_scheme(quantization) if isinstance(quantization, Mapping) else None


def _choose(checkpoint: PlannedCheckpoint, plan: str | Path | None, num_ranks: int) -> Family:
    if plan is None:
        scheme = _scheme(checkpoint)
        try:
            return find_family(checkpoint.model_type, None if scheme is None else scheme.name)
        except PlanError as error:
            if num_ranks > 1:
                error.amend(what=_advice(checkpoint, error.what))
            raise
    if plan == TRANSFORMERS:
        # This import loads the transformers package.
        from relayout.plans.transformers import transformers_family

        return transformers_family(checkpoint.model_type, checkpoint.config)
    family, model_type = read_family(Path(plan)), checkpoint.model_type
    # A built-in plan is accepted for any model type: the caller named it because no plan has this model type.
    if family.origin != BUILTIN and family.model_types and model_type not in family.model_types:
        raise PlanError(
            f"the plan is for model_types {', '.join(family.model_types)}, config.json has {shown(model_type)};"
            " without the line model_types it applies to any",
            path=plan,
            code="no_plan",
        )
    return family


def _advice(checkpoint: PlannedCheckpoint, what: str) -> str:
    """Return the reason for the lack of a built-in plan, with the options that remain."""
    if "_diffusers_version" in checkpoint.config:
        component = shown(checkpoint.config.get("_class_name"))
        return f"a component of a diffusers pipeline ({component}), for which there are no plans: use --tp 1"
    if not checkpoint.config:
        return (
            "config.json is missing or empty, expected one with model_type and the model's sizes: download it into this"
            " folder, or use --tp 1, which needs no plan"
        )
    fitting = matching_plans(checkpoint)
    count = len(checkpoint.tensors)
    what_matches = "the only tensor" if count == 1 else f"all {count} tensors"
    known = [f"--plan {name} matches {what_matches}: check that the model is built so" for name in fitting[:1]]
    others = [f"{', '.join(fitting[1:])} match too, with other slices"] if fitting[1:] else []
    packages = "--plan vllm, --plan sglang or --plan transformers"
    ways = f"supply your own with --plan FILE, try {packages} where these are installed"
    found = [*known, *others, f"or {ways}"] if known else [f"no built-in plan matches all tensors: {ways}"]
    return f"{what}; {'; '.join(found)}, or use --tp 1, which needs no plan"


def matching_plans(checkpoint: PlannedCheckpoint) -> list[str]:
    """Return names of built-in plans that match all tensors and can be applied; one name per distinct result.

    The plans are tried at degree 2 instead of the requested degree. If the model's sizes do not allow the requested
    degree, only a less suitable plan might fit at that degree. The plan for the most model types comes first. Plans
    that cut no tensor are omitted.
    """
    try:
        scheme = _scheme(checkpoint)
    except PlanError:
        return []
    few = list({(collapse_numbers(one.name), one.dtype, one.shape): one for one in checkpoint.tensors}.values())
    found: dict[tuple[Cut, ...], str] = {}
    for family in sorted(builtin_families(), key=lambda family: (-len(family.model_types), family.name)):
        if family.quantization not in (None, None if scheme is None else scheme.name):
            continue
        try:
            if not all(map(_CutKindFinder(checkpoint, family, scheme).find, few)):  # Quick check first.
                continue
            plan = _make_plan(checkpoint, _TRIED_DEGREE, family, False, "error")
        except PlanError:
            continue
        cuts = tuple(plan.cut(t) for t in range(len(checkpoint.tensors)))
        if any(not part.is_whole for cut in plan.cuts for part in cut.slices):
            found.setdefault(cuts, family.name)
    return list(found.values())


def without_rule(checkpoint: PlannedCheckpoint, family: Family | None) -> list[tuple[PlannedTensor, str]]:
    """Return the tensors that no rule matches, each with the name that a rule must match.

    For a scale of a quantized weight, that is the name of the weight.

    Args:
        family: the rules; None for no rules.
    """
    scheme = _scheme(checkpoint)
    finder = _CutKindFinder(checkpoint, family or Family("none", FILE), scheme)
    missing = []
    for tensor in checkpoint.tensors:
        if finder.find(tensor) is None:
            module, _, suffix = tensor.name.rpartition(".")
            is_stored = scheme is not None and suffix in scheme.tensors
            missing.append((tensor, f"{module}.weight" if is_stored else tensor.name))
    return missing


@dataclass(frozen=True, slots=True)
class _CutKind:
    """The properties that determine the cut of a tensor. Tensors of equal kind have the same cut."""

    rule: Rule
    dtype: str
    shape: tuple[int, ...]
    weights: tuple[QuantizedWeight, ...] = ()
    """Possible forms of the quantized weight that this tensor is part of. (): it is not part of one."""
    suffix: str = ""
    """Last part of the tensor's name, if it is part of a quantized weight."""
    is_expert: bool = False
    """True if the weight belongs to experts. For experts, engines accept slices that end inside a block or group of
    scales (vLLM 0.33 `fused_moe/oracle/fp8.py`, `refine_fp8_moe_block_shape`; `quantization/moe_wna16.py`). For other
    layers they raise an error."""
    is_stacked: bool = False
    """True if the tensor is a stack of weights: dim 0 counts the weights (such as experts), then rows and columns."""
    in_table: tuple[int, int] | None = None
    """Number of the table's rows before this shard, and number of all rows. None: not a shard of a table."""

    def apply(self, sizes: Sizes, num_ranks: int, scheme: Scheme | None) -> Cut:
        """Return the cut of the tensors of this kind."""
        try:
            return self._cut(sizes, num_ranks, scheme)
        except PlanError as error:
            if not self.rule.or_whole or error.code != "indivisible":
                raise
            return Cut((WHOLE,) * num_ranks)

    def can_be_cut(self, sizes: Sizes, num_ranks: int, scheme: Scheme | None) -> bool:
        """Return True if `apply` raises no error."""
        try:
            self.apply(sizes, num_ranks, scheme)
        except PlanError:
            return False
        return True

    def _cut(self, sizes: Sizes, num_ranks: int, scheme: Scheme | None) -> Cut:
        dim, divided = self.rule.dim, self.rule.whole_unless
        if dim is None or (divided is not None and sizes.get(divided) % num_ranks):
            return Cut((WHOLE,) * num_ranks)
        if scheme is not None and self.weights:
            errors = []
            for weight in self.weights:
                try:
                    return self._carry(scheme, weight, dim, sizes, num_ranks)
                except PlanError as error:
                    errors.append(error)
            raise errors[0]
        if self.rule.is_squeezed:
            axes = [axis for axis, size in enumerate(self.shape) if size != 1]
            dim = axes[dim] if dim < len(axes) else len(self.shape)
        with about(part=f"dim {dim} of {list(self.shape)}"):
            ranges = self._divide(dim, self.shape, sizes, num_ranks)
        return checked_cut(self.dtype, self.shape, tuple(Slice.along(dim, parts) for parts in ranges))

    def _carry(self, scheme: Scheme, weight: QuantizedWeight, dim: int, sizes: Sizes, num_ranks: int) -> Cut:
        """Return the cut of this tensor, derived from the cut of the quantized weight that it is part of."""
        stack = int(self.is_stacked)
        shape = (*self.shape[:stack], weight.rows, weight.columns)
        with about(part=f"dim {dim} of a quantized weight {list(shape)}"):
            cut = self._divide(dim, shape, sizes, num_ranks, weight.values.block[dim - stack] if dim >= stack else 1)
            if dim < stack:
                raise PlanError("a stack of quantized weights, whose entries no rule can divide", code="unsupported")
            may_split = self.is_expert and scheme.name in ("fp8", "gptq", "awq")
            inner = self.shape[stack:]
            carried = scheme.carry(dim - stack, self.suffix, inner, weight, cut, may_split_blocks=may_split)
        if carried is None:
            return Cut((WHOLE,) * num_ranks)
        own, ranges = carried
        return checked_cut(self.dtype, self.shape, tuple(Slice.along(own + stack, parts) for parts in ranges))

    def _divide(
        self, dim: int, shape: tuple[int, ...], sizes: Sizes, num_ranks: int, block: int = 1
    ) -> list[tuple[Range, ...]]:
        """Divide a dimension; a ragged cut keeps `block` values together, because they share a scale."""
        if dim >= len(shape):
            raise PlanError(f"the dimension does not exist, but rule {self.rule.pattern!r} divides it", code="no_rule")
        rule = replace(self.rule, block=lcm(self.rule.block, block))
        if self.in_table is None:
            return divide(rule, shape[dim], sizes, num_ranks)
        before, num_rows = self.in_table
        return [part_of(parts, before, shape[dim]) for parts in divide(rule, num_rows, sizes, num_ranks)]


class _CutKindFinder:
    """Finds the kind of each tensor. Where rules allow, names that differ only in numbers are looked up once."""

    def __init__(self, checkpoint: PlannedCheckpoint, family: Family, scheme: Scheme | None) -> None:
        self._family = family = family.resolved(checkpoint.config)
        self._scheme = scheme
        self._key: Callable[[str], str] = str
        """Returns the part of a name that rules depend on."""
        if not family.depends_on_later_numbers:
            self._key = collapse_later_numbers if family.depends_on_numbers else collapse_numbers
        self._rules: dict[str, Rule | None] = {}
        self._experts: dict[str, bool] = {}
        self._modules: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
        """For each quantized module: last part of the tensor name -> dtype, shape."""
        self._weights: dict[str, tuple[QuantizedWeight, ...]] = {}
        """For each quantized module: the possible forms of its weight."""
        if scheme is not None:
            for tensor in checkpoint.tensors:
                module, _, suffix = tensor.name.rpartition(".")
                if suffix in scheme.tensors:
                    self._modules.setdefault(module, {})[suffix] = (tensor.dtype, tensor.shape)
        has_tables = any(rule.is_table for rule in family.rules)
        self.tables = tables_of(checkpoint.tensors, self._pattern_of_table) if has_tables else []
        self._table_of: dict[str, tuple[int, int]] = {}
        """For each shard of a table: number of the table's rows before it, and number of all rows."""
        for table in self.tables:
            if len(table.members) > 1:
                starts = zip(table.members, table.starts, strict=True)
                self._table_of |= {checkpoint.tensors[t].name: (start, table.num_rows) for t, start in starts}

    @property
    def members_of_tables(self) -> tuple[tuple[int, ...], ...]:
        """For each table, the positions of its tensors in the checkpoint, in the order of rows."""
        return tuple(table.members for table in self.tables)

    def _pattern_of_table(self, name: str) -> str | None:
        rule = self._rule(name, is_quantized=False)
        return rule.pattern if rule is not None and rule.is_table else None

    def find(self, tensor: PlannedTensor) -> _CutKind | None:
        """Return the kind of the tensor, or None if no rule matches it."""
        module, _, suffix = tensor.name.rpartition(".")
        stored = self._modules.get(module, {})
        is_quantized = len(stored) > 1
        if self._scheme is not None and suffix in stored and is_quantized:
            rule = self._rule(f"{module}.weight", is_quantized)
            is_stacked = {len(shape) for _, shape in stored.values()}.isdisjoint({2, 4})
            if module not in self._weights:
                inner = {one: (dtype, shape[is_stacked:]) for one, (dtype, shape) in stored.items()}
                self._weights[module] = self._scheme.weights(inner)
            weights = self._weights[module]
            if rule is not None and weights:
                if self._family.is_transposed and rule.dim in (0, 1):
                    rule = replace(rule, dim=1 - rule.dim)
                is_expert = self._is_expert(tensor.name)
                in_table = self._table_of.get(f"{module}.weight")
                return _CutKind(rule, tensor.dtype, tensor.shape, weights, suffix, is_expert, is_stacked, in_table)
        rule = self._rule(tensor.name, is_quantized)
        if rule is None and suffix == "bias" and is_quantized:
            # Some tools add a bias, mostly zeros, to every quantized layer. It is cut like the rows.
            rule = self._rule(f"{module}.weight", is_quantized)
            is_rows = rule is not None and rule.dim == (1 if self._family.is_transposed else 0)
            rule = replace(rule, dim=0) if rule is not None and is_rows else Rule(tensor.name, None)
        if rule is None and self._scheme is not None and is_cache_scale(suffix, tensor.shape):
            rule = Rule(tensor.name, None)
        in_table = self._table_of.get(tensor.name)
        return None if rule is None else _CutKind(rule, tensor.dtype, tensor.shape, in_table=in_table)

    def _is_expert(self, name: str) -> bool:
        key = self._key(name)
        if key not in self._experts:
            self._experts[key] = self._family.expert(name) is not None or self._family.stacks_experts(name)
        return self._experts[key]

    def _rule(self, name: str, is_quantized: bool) -> Rule | None:
        """Return the first rule that matches the name.

        A rule with `or_whole` is replaced by "whole" for quantized modules. Otherwise, the fallback would apply to each
        tensor separately, and a weight could be cut inside a block of scales that every rank holds whole.
        """
        key = self._key(name)
        if key not in self._rules:
            self._rules[key] = self._family.rule(name)
        rule = self._rules[key]
        return Rule(rule.pattern, None) if is_quantized and rule is not None and rule.or_whole else rule


def _apply(kinds: Mapping[_CutKind, str], sizes: Sizes, num_ranks: int, scheme: Scheme | None) -> dict[_CutKind, Cut]:
    """Return the cut of each kind; `kinds` maps each kind to the name of one of its tensors, for errors."""
    cuts = {}
    try:
        for kind, name in kinds.items():
            with about(tensor=name):
                cuts[kind] = kind.apply(sizes, num_ranks, scheme)
    except PlanError as error:
        degrees = list(range(1, min(MAX_RANKS, max(_DEGREES_TO_TRY, 2 * num_ranks)) + 1))
        for other in (kind, *kinds):  # First the kind that failed: it leaves few degrees to try with the other kinds.
            degrees = [degree for degree in degrees if degree == 1 or other.can_be_cut(sizes, degree, scheme)]
        ranks = "rank" if len(degrees) == 1 else "ranks"
        error.amend(what=f"{error.what} (this checkpoint can be divided among {', '.join(map(str, degrees))} {ranks})")
        raise
    return cuts


def recorded_plan(checkpoint: PlannedCheckpoint, record: SourceRecord, num_ranks: int) -> Plan:
    """Return the plan for another degree, by the rules of a source record.

    Args:
        checkpoint: the record's tensors, and the folder's config.json.
        record: a source record with rules, which are not needed for one rank.
        num_ranks: the degree.
    """
    if num_ranks == 1:
        return plan_by(checkpoint, 1, None)
    return _apply_recorded(verified_rules(checkpoint, record), checkpoint, record, num_ranks)


def recorded_rules(root: object, record: SourceRecord) -> Family:
    """Return the rules of a source record, which also contain the patterns for tensors of experts.

    Args:
        root: the folder, for messages.
        record: the source record.
    """
    where = str(root)
    if record.plan is None:
        raise PlanError(
            "converted without a plan, so it can be loaded whole or at its own degree only, with all experts:"
            " convert it again, with --plan FILE",
            path=where,
            code="no_plan",
        )
    if record.plan.origin in ENGINES:
        engine = ENGINES[record.plan.origin]
        raise PlanError(
            f"its slices were observed from {engine} {record.plan.name} at {record.options.num_ranks}"
            " ranks, so it can be loaded whole or at that degree only, with all experts: convert it again",
            path=where,
            code="no_plan",
        )
    rules = f"{where}/{SOURCE_RECORD_NAME}: plan"
    return parse_rules(record.plan.rules, rules, record.plan.name, record.plan.origin)


def verified_rules(checkpoint: PlannedCheckpoint, record: SourceRecord) -> Family:
    """Return the rules of a source record, after checking that they reproduce the stored cuts at its own degree."""
    options, where = record.options, str(checkpoint.root)
    family = recorded_rules(where, record)
    plan = _apply_recorded(family, checkpoint, record, options.num_ranks)
    pairs = set(zip(plan.cut_of, record.cut_of, strict=True))
    if any(plan.cuts[planned] != record.cuts[recorded] for planned, recorded in pairs):
        raise FormatError(
            f"plan {options.plan!r} does not reproduce the stored slices: config.json has changed, or another"
            " version of relayout converted the source; it can only be loaded at its own degree,"
            f" {options.num_ranks}",
            path=where,
            code="mismatch",
        )
    return family


def _apply_recorded(family: Family, checkpoint: PlannedCheckpoint, record: SourceRecord, num_ranks: int) -> Plan:
    # A conversion to one rank does not check that each tensor has a rule.
    unmatched: Unmatched | None = None if record.options.num_ranks == 1 else "replicate"
    expert_parallel = record.options.expert_parallel
    return plan_by(checkpoint, num_ranks, family, expert_parallel=expert_parallel, unmatched=unmatched)
