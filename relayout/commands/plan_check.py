"""`plans --check`: which tensors of a checkpoint have no rule, and a draft of a plan that has one for each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import util
from pathlib import Path

from relayout.checkpoint.source import SourceCheckpoint, read_source
from relayout.commands.inspect import DEGREES
from relayout.errors import PlanError
from relayout.plans.draft import KindWithoutRule, draft_plan
from relayout.plans.family import TRANSFORMERS, VLLM, Family
from relayout.plans.planner import plan_by, plan_for, refusal
from relayout.results import Result
from relayout.storage.stores import find_input


@dataclass(frozen=True, slots=True)
class PlanCheck(Result):
    """What `check_plan` found."""

    path: str
    model_type: str | None
    plan: str | None
    """Full name of the plan that was checked; None if there is none for this checkpoint."""
    num_tensors: int
    kinds: tuple[KindWithoutRule, ...]
    """Tensors without a rule, by kind."""
    draft: str | None
    """A plan file with a rule for every tensor; None if not needed or not possible."""
    draft_error: str | None
    """Why there is no draft although some tensors have no rule."""
    degrees: dict[int, str | None]
    """Why the plan, or else the draft, cannot be applied at these degrees; None if it can."""
    has_vllm: bool
    """Whether vLLM is installed here, which could be asked for a plan."""

    @property
    def ok(self) -> bool:
        """Whether every tensor has a rule."""
        return not self.kinds and self.draft_error is None


def check_plan(path: str | os.PathLike[str], *, plan: str | os.PathLike[str] | None = None) -> PlanCheck:
    """Find the tensors of a plain checkpoint that no rule matches, and draft a plan for them. Reads headers only.

    Args:
        path: a checkpoint folder, Hugging Face snapshot, or .safetensors file.
        plan: a plan file, the name of a built-in plan, or "transformers"; None: the built-in plan for the model type,
            if there is one.

    Raises:
        FormatError: the checkpoint or the plan file is damaged.
        PlanError: `path` is not a checkpoint, or the plan is for other model types.
    """
    if plan == VLLM:
        raise PlanError("a plan observed from vLLM has no rules to check", code="option")
    checkpoint = read_source(find_input(path))
    chosen = plan if plan is None or plan == TRANSFORMERS else Path(plan)
    family = plan_for(checkpoint, 1, chosen).family
    draft, error = None, None
    try:
        draft = draft_plan(checkpoint, family)
    except PlanError as failed:
        error = str(failed)
    rules, kinds = (family, ()) if draft is None else (draft.family, draft.kinds)
    return PlanCheck(
        path=str(checkpoint.root),
        model_type=checkpoint.model_type,
        plan=None if family is None else family.full_name,
        num_tensors=len(checkpoint.tensors),
        kinds=kinds,
        draft=None if draft is None else draft.text,
        draft_error=error,
        degrees={} if rules is None else {degree: _refusal(checkpoint, degree, rules, kinds) for degree in DEGREES},
        has_vllm=util.find_spec("vllm") is not None,
    )


def _refusal(checkpoint: SourceCheckpoint, degree: int, family: Family, kinds: Sequence[KindWithoutRule]) -> str | None:
    """The reason that the rules cannot be applied at a degree, or None."""
    cut = next((kind for kind in kinds if kind.num_heads is not None and kind.num_heads % degree), None)
    if cut is not None:
        return f"tensor {cut.example!r}: an even cut would divide {cut.num_heads} heads unevenly"
    try:
        plan_by(checkpoint, degree, family, unmatched="error")
    except PlanError as error:
        return refusal(error)
    return None
