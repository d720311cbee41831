"""A plan is a value: which slice of each tensor each rank holds, whoever found it. It can be sent as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from relayout.core.slices import Cut
from relayout.errors import FormatError
from relayout.format.slices import dump_slice, parse_slice
from relayout.plans.family import VLLM, Family, dump_rules, parse_rules


class PlannedTensor(Protocol):
    """What planning asks of a tensor."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class PlannedCheckpoint(Protocol):
    """What planning asks of a checkpoint. `TensorList` has no more than that."""

    @property
    def root(self) -> Any:
        """Its path in errors."""

    @property
    def tensors(self) -> Sequence[PlannedTensor]: ...
    @property
    def config(self) -> Mapping[str, Any]:
        """The content of config.json; empty if there is no such file."""

    @property
    def model_type(self) -> str | None:
        """`model_type` of config.json, or None."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Name, dtype and shape of a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorList:
    """The tensors of a checkpoint that is not at hand."""

    root: str
    tensors: Sequence[PlannedTensor]
    config: Mapping[str, Any]

    @property
    def model_type(self) -> str | None:
        """`model_type` of config.json."""
        value = self.config.get("model_type")
        return value if isinstance(value, str) else None


@dataclass(frozen=True, slots=True)
class Plan:
    """Which slice of each tensor each rank holds."""

    name: str
    """Full name of the family; "none": there is none, which only one rank can do without."""
    num_ranks: int
    cuts: tuple[Cut, ...]
    """The distinct cuts, in order of the first tensor that has them."""
    cut_of: tuple[int, ...]
    """For each tensor of the checkpoint, in its order: position in `cuts`."""
    expert_parallel: bool = False
    """Whether experts are owned whole."""
    unmatched: tuple[str, ...] = ()
    """Tensors that no rule matches; every rank holds them whole."""
    unused: tuple[str, ...] = ()
    """Tensors that the observed engine does not take; large ones are held in equal blocks of rows, others whole."""
    family: Family | None = None
    """The rules by which other degrees are cut as well."""

    def cut(self, t: int) -> Cut:
        """The cut of the tensor at position `t`."""
        return self.cuts[self.cut_of[t]]

    def as_json(self) -> dict[str, Any]:
        """What `from_json` takes."""
        family = self.family
        return {
            "name": self.name,
            "num_ranks": self.num_ranks,
            "cuts": [list(map(dump_slice, cut.slices)) for cut in self.cuts],
            "cut_of": list(self.cut_of),
            "expert_parallel": self.expert_parallel,
            "unmatched": list(self.unmatched),
            "unused": list(self.unused),
            "rules": None if family is None else dump_rules(family),
        }

    @staticmethod
    def from_json(plan: Mapping[str, Any]) -> Plan:
        """The plan of what `as_json` returned.

        Raises:
            FormatError: it is invalid.
        """
        where = "plan"
        try:
            origin, _, name = plan["name"].partition(":")
            cuts = tuple(Cut(tuple(parse_slice(part) for part in cut)) for cut in plan["cuts"])
            cut_of = tuple(plan["cut_of"])
            if not all(type(index) is int and 0 <= index < len(cuts) for index in cut_of):
                raise FormatError("cut_of is not a list of positions in cuts", path=where, code="field")
            rules = plan["rules"]
            # Slices that were observed have no rules.
            family = Family(name, VLLM) if origin == VLLM else rules and parse_rules(rules, where, name, origin)
            return Plan(
                plan["name"],
                plan["num_ranks"],
                cuts,
                cut_of,
                plan["expert_parallel"],
                tuple(plan["unmatched"]),
                tuple(plan["unused"]),
                family,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise FormatError(f"is not the JSON of a plan: {error!r}", path=where, code="field") from None
