"""The tensor-parallel plan: which slice of each tensor each rank holds. Pure, but for reading a plan file.

A family's rules say how each tensor is cut, so that an engine finds in a rank's files what it would have cut out
itself; tensors that store a quantized weight between them are cut where the weight is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from relayout.core.patterns import collapse_numbers
from relayout.core.slices import NOT_HELD, WHOLE, Cut, Range, Slice, number_cuts
from relayout.errors import FormatError, PlanError, about, shown
from relayout.plans.division import Sizes, divide, owner, owner_ranges
from relayout.plans.family import EXPERTS, Family, Rule, find_family, read_family
from relayout.plans.quantization import INPUT_SCALES, Scheme, Weight, find_scheme

MAX_RANKS = 1024

TRANSFORMERS = "transformers"
"""Given as a plan: the one that the transformers package has for the model type."""

Unmatched = Literal["error", "replicate"]
"""What becomes of tensors that no rule names."""

_DEGREES_TO_TRY = range(1, 65)


class PlannedTensor(Protocol):
    """A tensor, as far as a plan is concerned."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class PlannedCheckpoint(Protocol):
    """A checkpoint, as far as a plan is concerned."""

    @property
    def root(self) -> Any:
        """What messages call it."""

    @property
    def tensors(self) -> Sequence[PlannedTensor]: ...
    @property
    def config(self) -> Mapping[str, Any]:
        """config.json."""

    @property
    def config_error(self) -> str | None:
        """Why nothing can be planned by config.json, though it is there."""

    @property
    def model_type(self) -> str | None:
        """Of config.json."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Who holds what."""

    name: str
    """The family whose rules were used; "none" at one rank."""
    num_ranks: int
    cuts: tuple[Cut, ...]
    """The different cuts, in the order in which tensors first have them."""
    cut_of: tuple[int, ...]
    """For each tensor of the catalogue, in its order: position in `cuts`."""
    expert_parallel: bool = False
    """Whether experts are owned whole."""
    unmatched: tuple[str, ...] = ()
    """Tensors that no rule names, and that every rank holds whole."""

    def cut(self, t: int) -> Cut:
        """How a tensor is cut."""
        return self.cuts[self.cut_of[t]]


def plan_for(
    catalogue: PlannedCheckpoint,
    num_ranks: int,
    plan: str | Path | None = None,
    *,
    expert_parallel: bool = False,
    unmatched: Unmatched | None = None,
) -> Plan:
    """Choose the rules, a person's own or the built-in ones for the checkpoint's model type, and apply them.

    Args:
        catalogue: what is stored.
        num_ranks: the tensor-parallel degree.
        plan: a plan file, or the word "transformers" for that package's plan; None: the built-in one.
        expert_parallel: experts are owned whole, in contiguous blocks over the ranks (vLLM's linear placement).
        unmatched: "error", or "replicate" to let every rank hold whole what no rule names. None: "error", but
            "replicate" with the plan of transformers, which names just what is cut.

    Raises:
        FormatError: `plan` is no plan file, or config.json begins with a byte order mark.
        PlanError: there are no rules for this checkpoint, or they cannot be applied at this degree.
    """
    if not 1 <= num_ranks <= MAX_RANKS:
        raise PlanError(f"{num_ranks} ranks, expected 1 to {MAX_RANKS}", code="option")
    if unmatched not in (None, *get_args(Unmatched)):
        raise PlanError(f"unmatched={unmatched!r}, expected one of {', '.join(get_args(Unmatched))}", code="option")
    if num_ranks > 1 and catalogue.config_error is not None:
        raise FormatError(catalogue.config_error, code="syntax")
    own = _own_family(Path(plan), catalogue.model_type) if plan is not None and plan != TRANSFORMERS else None
    if num_ranks == 1:
        return Plan("none", 1, *number_cuts([Cut((WHOLE,))] * len(catalogue.tensors)))
    quantization = catalogue.config.get("quantization_config")
    with about(path=catalogue.root):
        scheme = find_scheme(quantization) if isinstance(quantization, Mapping) else None
    if own is not None:
        family = own
    elif plan is not None:
        # Needed for this only, and heavy.
        from relayout.plans.transformers import transformers_family

        family = transformers_family(catalogue.model_type, catalogue.config)
        unmatched = unmatched or "replicate"
    else:
        family = find_family(catalogue.model_type, None if scheme is None else scheme.name)
    return make_plan(
        catalogue, num_ranks, family, scheme, expert_parallel=expert_parallel, unmatched=unmatched or "error"
    )


def _own_family(path: Path, model_type: str | None) -> Family:
    family = read_family(path)
    if family.model_types and model_type not in family.model_types:
        raise PlanError(
            f"is for model_types {', '.join(family.model_types)}, config.json says {shown(model_type)}:"
            " the line may be left out",
            path=path,
            code="no_plan",
        )
    return family


def make_plan(
    catalogue: PlannedCheckpoint,
    num_ranks: int,
    family: Family,
    scheme: Scheme | None = None,
    *,
    expert_parallel: bool = False,
    unmatched: Unmatched = "error",
) -> Plan:
    """Apply a family's rules to a checkpoint.

    Raises:
        PlanError: a tensor has no rule, or its rule cannot be applied at this degree.
    """
    sizes = Sizes(family.sizes, catalogue.config)
    whole = Cut((WHOLE,) * num_ranks)
    finder = _KindFinder(catalogue, family, scheme)
    experts = _Experts(family, sizes, num_ranks) if expert_parallel else None
    kinds: dict[_Kind, str] = {}
    column: list[_Kind | Cut] = []
    without = []
    for tensor in catalogue.tensors:
        owned = None if experts is None else experts.owners(tensor)
        kind = finder.find(tensor) if owned is None else None
        if kind is not None:
            kinds.setdefault(kind, tensor.name)
        elif owned is None:
            without.append(tensor.name)
        column.append(kind or owned or whole)
    if without and unmatched == "error":
        others = f" (nor {len(without) - 1} others)" if len(without) > 1 else ""
        raise PlanError(
            f"no rule of plan {family.name!r} names it{others}: write one"
            " (--plan FILE), or let every rank hold such tensors whole (--unmatched replicate)",
            path=catalogue.root,
            tensor=without[0],
            code="no_rule",
        )
    if experts is not None and not experts.found:
        raise PlanError(
            f"plan {family.name!r} names no tensor of experts that a rank could own",
            path=catalogue.root,
            code="no_rule",
        )
    cuts = _apply(kinds, sizes, num_ranks, scheme)
    numbered = number_cuts(cuts[one] if isinstance(one, _Kind) else one for one in column)
    return Plan(family.name, num_ranks, *numbered, expert_parallel, tuple(without))


@dataclass(frozen=True, slots=True)
class _Kind:
    """What decides how a tensor is cut: those of equal kinds are cut alike."""

    rule: Rule
    dtype: str
    shape: tuple[int, ...]
    weights: tuple[Weight, ...] = ()
    """Where the tensor is one of several that store a quantized weight between them: what that weight may be."""
    suffix: str = ""
    """Last part of such a tensor's name."""
    is_expert: bool = False
    """Whether the weight is of one expert. Engines load FP8 experts of which a rank's share ends inside a block of
    scales (vLLM 0.33 `fused_moe/oracle/fp8.py`, `refine_fp8_moe_block_shape`), and refuse other such layers."""

    def apply(self, sizes: Sizes, num_ranks: int, scheme: Scheme | None) -> Cut:
        """The cut of the tensors of this kind."""
        dim = self.rule.dim
        if dim is None:
            return Cut((WHOLE,) * num_ranks)
        if scheme is not None and self.weights:
            errors = []
            for weight in self.weights:
                try:
                    return self._carry(scheme, weight, dim, sizes, num_ranks)
                except PlanError as error:
                    errors.append(error)
            raise errors[0]
        with about(part=f"dim {dim} of {list(self.shape)}"):
            ranges = self._divide(dim, self.shape, sizes, num_ranks)
        return _checked(self.dtype, self.shape, tuple(Slice(dim, parts) for parts in ranges))

    def _carry(self, scheme: Scheme, weight: Weight, dim: int, sizes: Sizes, num_ranks: int) -> Cut:
        """The cut, if the tensor is one of those that store this weight."""
        shape = (weight.rows, weight.columns)
        with about(part=f"dim {dim} of a quantized weight {list(shape)}"):
            cut = self._divide(dim, shape, sizes, num_ranks)
            carried = scheme.carry(
                dim, self.suffix, self.shape, weight, cut, may_split_blocks=self.is_expert and scheme.name == "fp8"
            )
        if carried is None:
            return Cut((WHOLE,) * num_ranks)
        own, ranges = carried
        return _checked(self.dtype, self.shape, tuple(Slice(own, parts) for parts in ranges))

    def _divide(self, dim: int, shape: tuple[int, ...], sizes: Sizes, num_ranks: int) -> list[tuple[Range, ...]]:
        if dim >= len(shape):
            raise PlanError(f"there is no such dimension, which {self.rule.pattern!r} cuts", code="no_rule")
        return divide(self.rule, shape[dim], sizes, num_ranks)


def _checked(dtype: str, shape: tuple[int, ...], slices: tuple[Slice, ...]) -> Cut:
    """The cut, if its slices can be made of whole bytes.

    Raises:
        PlanError: they cannot.
    """
    cut = Cut(slices)
    _ = cut.tensor(dtype, shape).transfers
    return cut


class _KindFinder:
    """Finds what decides how each tensor is cut; names that differ in numbers only are looked up once."""

    def __init__(self, catalogue: PlannedCheckpoint, family: Family, scheme: Scheme | None) -> None:
        self._family = family
        self._scheme = scheme
        self._collapse = not family.tells_numbers_apart
        self._rules: dict[str, Rule | None] = {}
        self._experts: dict[str, bool] = {}
        self._modules: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
        """Of each quantized module: last part of the name -> dtype, shape."""
        self._weights: dict[str, tuple[Weight, ...]] = {}
        """What they store between them."""
        if scheme is not None:
            for tensor in catalogue.tensors:
                module, _, suffix = tensor.name.rpartition(".")
                if suffix in scheme.tensors:
                    self._modules.setdefault(module, {})[suffix] = (tensor.dtype, tensor.shape)

    def find(self, tensor: PlannedTensor) -> _Kind | None:
        """None: no rule names the tensor."""
        module, _, suffix = tensor.name.rpartition(".")
        stored = self._modules.get(module, {})
        if self._scheme is not None and suffix in stored and len(stored) > 1:
            rule = self._rule(f"{module}.weight")
            if module not in self._weights:
                self._weights[module] = self._scheme.weights(stored)
            weights = self._weights[module]
            if rule is not None and weights:
                if self._family.is_transposed and rule.dim in (0, 1):
                    rule = replace(rule, dim=1 - rule.dim)
                return _Kind(rule, tensor.dtype, tensor.shape, weights, suffix, self._is_expert(tensor.name))
        rule = self._rule(tensor.name)
        if rule is None and suffix == "bias" and len(stored) > 1:
            # Some tools give every quantized layer a bias, of zeros mostly; it goes with the rows.
            rule = self._rule(f"{module}.weight")
            is_rows = rule is not None and rule.dim == (1 if self._family.is_transposed else 0)
            rule = replace(rule, dim=0) if rule is not None and is_rows else Rule(tensor.name, None)
        if rule is None and self._scheme is not None and self._scheme.is_cache_scale(suffix, tensor.shape):
            rule = Rule(tensor.name, None)
        return None if rule is None else _Kind(rule, tensor.dtype, tensor.shape)

    def _is_expert(self, name: str) -> bool:
        key = self._key(name)
        if key not in self._experts:
            self._experts[key] = self._family.expert(name) is not None
        return self._experts[key]

    def _key(self, name: str) -> str:
        return collapse_numbers(name) if self._collapse else name

    def _rule(self, name: str) -> Rule | None:
        key = self._key(name)
        if key not in self._rules:
            self._rules[key] = self._family.rule(name)
        return self._rules[key]


class _Experts:
    """Which rank owns which expert."""

    def __init__(self, family: Family, sizes: Sizes, num_ranks: int) -> None:
        self._family = family
        self._sizes = sizes
        self._num_ranks = num_ranks
        self._whole = Cut((WHOLE,) * num_ranks)
        self._owned: dict[int, Cut] = {}
        self.found = False
        """Whether any tensor belongs to an expert."""

    def owners(self, tensor: PlannedTensor) -> Cut | None:
        """The cut; None: the tensor belongs to no expert.

        Raises:
            PlanError: config.json does not say how many experts there are, or there are more.
        """
        with about(tensor=tensor.name):
            return self._owners(tensor)

    def _owners(self, tensor: PlannedTensor) -> Cut | None:
        expert = self._family.expert(tensor.name)
        if expert is not None:
            self.found = True
            if tensor.name.rpartition(".")[2] in INPUT_SCALES:
                return self._whole
            count = self._sizes.get(EXPERTS)
            if expert >= count:
                raise PlanError(f"config.json declares {count} experts, counted from 0", code="config")
            return self._owned_by(owner(expert, count, self._num_ranks))
        if tensor.shape and self._family.stacks_experts(tensor.name):
            self.found = True
            declared = self._sizes.find(EXPERTS)
            if declared not in (None, tensor.shape[0]):
                raise PlanError(
                    f"{tensor.shape[0]} experts along dim 0, config.json declares {declared}", code="config"
                )
            slices = tuple(Slice(0, (part,)) for part in owner_ranges(tensor.shape[0], self._num_ranks))
            return _checked(tensor.dtype, tensor.shape, slices)
        return None

    def _owned_by(self, rank: int) -> Cut:
        if rank not in self._owned:
            self._owned[rank] = Cut(tuple(WHOLE if one == rank else NOT_HELD for one in range(self._num_ranks)))
        return self._owned[rank]


def _apply(kinds: Mapping[_Kind, str], sizes: Sizes, num_ranks: int, scheme: Scheme | None) -> dict[_Kind, Cut]:
    """The cut for each kind, given with the name of a tensor that it is for.

    Raises:
        PlanError: one cannot be made; the message ends with the degrees at which all can.
    """

    def applied(degree: int) -> dict[_Kind, Cut]:
        cuts = {}
        for kind, name in kinds.items():
            with about(tensor=name):
                cuts[kind] = kind.apply(sizes, degree, scheme)
        return cuts

    def fits(degree: int) -> bool:
        try:
            return bool(applied(degree))
        except PlanError:
            return False

    try:
        return applied(num_ranks)
    except PlanError as error:
        degrees = ", ".join(str(degree) for degree in _DEGREES_TO_TRY if degree == 1 or fits(degree))
        error.what += f" (this checkpoint can be cut for --tp {degrees})"
        raise
