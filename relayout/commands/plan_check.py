"""`plans check`: which tensors of a checkpoint have no rule."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from relayout.checkpoint.source import read_source
from relayout.core.arguments import collapse_numbers
from relayout.errors import PlanError
from relayout.plans.family import TRANSFORMERS, VLLM
from relayout.plans.planner import matching_plans, plan_for, without_rule
from relayout.reporting import Result
from relayout.storage.stores import find_input

_TRIED_DEGREE = 2
"""The degree at which other plans are tried: whether a degree divides the tensors is another question."""


@dataclass(frozen=True, slots=True)
class KindWithoutRule:
    """Tensors whose names differ only in numbers, and that no rule matches."""

    pattern: str
    """What a rule must match: the name with `*` for numbers; of a quantized weight's scales, that of the weight."""
    count: int
    shape: tuple[int, ...]
    """The shape of the first of them."""
    example: str
    """Name of the first of them."""


@dataclass(frozen=True, slots=True, repr=False)
class PlanCheck(Result):
    """What `check_plan` found."""

    path: str
    model_type: str | None
    plan: str | None
    """Full name of the plan that was checked; None if there is none for this checkpoint."""
    num_tensors: int
    kinds: tuple[KindWithoutRule, ...]
    """Tensors without a rule, by kind; all are, if there is no plan."""
    matching: tuple[str, ...]
    """Names of built-in plans whose rules match every tensor, if the checked one's do not."""

    @property
    def ok(self) -> bool:
        """Whether every tensor has a rule."""
        return not self.kinds


def check_plan(path: str | os.PathLike[str], *, plan: str | os.PathLike[str] | None = None) -> PlanCheck:
    """Find the tensors of a plain checkpoint that no rule matches. Reads headers only.

    Args:
        path: a checkpoint folder, Hugging Face snapshot, or .safetensors file.
        plan: a plan file, the name of a built-in plan, or "transformers"; None: the built-in plan for the model type,
            if there is one.

    Raises:
        FormatError: the checkpoint or the plan file is damaged.
        PlanError: `path` is not a checkpoint, its weights are quantized in a way that cannot be cut, or the plan is for
            other model types.
    """
    if plan == VLLM:
        raise PlanError("a plan observed from vLLM has no rules to check", code="option")
    checkpoint = read_source(find_input(path))
    chosen = plan if plan is None or plan == TRANSFORMERS else Path(plan)
    family = plan_for(checkpoint, 1, chosen).family
    kinds: dict[str, KindWithoutRule] = {}
    for tensor, wanted in without_rule(checkpoint, family):
        # Characters that mean something in patterns cannot be written otherwise.
        pattern = re.sub(r"[{}#]", "*", collapse_numbers(wanted))
        first = kinds.get(pattern, KindWithoutRule(pattern, 0, tensor.shape, tensor.name))
        kinds[pattern] = KindWithoutRule(pattern, first.count + 1, first.shape, first.example)
    return PlanCheck(
        path=str(checkpoint.root),
        model_type=checkpoint.model_type,
        plan=None if family is None else family.full_name,
        num_tensors=len(checkpoint.tensors),
        kinds=tuple(kinds.values()),
        matching=tuple(matching_plans(checkpoint, _TRIED_DEGREE)) if kinds else (),
    )
