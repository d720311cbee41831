"""A registry of plan providers. A plan is a value, which no longer depends on its provider."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from relayout.checkpoint.source import SourceCheckpoint
from relayout.errors import PlanError
from relayout.plans.family import BUILTIN, FILE, TRANSFORMERS, VLLM
from relayout.plans.plan import Plan
from relayout.plans.planner import Unmatched, plan_for


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is asked of a provider."""

    checkpoint: SourceCheckpoint
    num_ranks: int
    plan: str | Path | None = None
    """As the person named it; None: the built-in plan of the model type."""
    expert_parallel: bool = False
    unmatched: Unmatched | None = None
    """See `planner.plan_for`."""
    trust_remote_code: bool = False
    """Whether an engine may run Python files of the checkpoint."""


class Provider(Protocol):
    """Finds plans in one way."""

    def __call__(self, request: PlanRequest) -> Plan:
        """The plan.

        Raises:
            FormatError: what holds the plan is damaged.
            PlanError: there is none.
        """


def _by_rules(request: PlanRequest) -> Plan:
    return plan_for(
        request.checkpoint,
        request.num_ranks,
        request.plan,
        expert_parallel=request.expert_parallel,
        unmatched=request.unmatched,
    )


def _observed(request: PlanRequest) -> Plan:
    if request.num_ranks == 1:  # Which holds everything: no reason to start vLLM.
        return plan_for(request.checkpoint, 1)
    from relayout.observe.observation import observed_plan

    return observed_plan(
        request.checkpoint,
        request.num_ranks,
        expert_parallel=request.expert_parallel,
        trust_remote_code=request.trust_remote_code,
    )


PROVIDERS: Mapping[str, Provider] = {
    BUILTIN: _by_rules,
    FILE: _by_rules,
    TRANSFORMERS: _by_rules,
    VLLM: _observed,
}
"""By the origin of the plans that they find."""


def observer() -> tuple[str, Callable[[SourceCheckpoint, int], Plan]]:
    """What observes a plan where no built-in one is for a model, the installed vLLM, and its name with the version.

    Raises:
        ImportError: vLLM is not installed.
    """
    import vllm

    return f"vllm {vllm.__version__}", lambda checkpoint, num_ranks: find_plan(checkpoint, num_ranks, VLLM)


def find_plan(
    checkpoint: SourceCheckpoint,
    num_ranks: int,
    plan: Plan | str | os.PathLike[str] | None = None,
    *,
    expert_parallel: bool = False,
    unmatched: Unmatched | None = None,
    trust_remote_code: bool = False,
) -> Plan:
    """The plan of a checkpoint.

    Args:
        plan: a plan that was found for this checkpoint before; a plan file; "transformers" or "vllm"; None: the
            built-in plan for the model type.
        num_ranks, expert_parallel, unmatched, trust_remote_code: as in `PlanRequest`.

    Raises:
        FormatError: the plan file is not valid.
        PlanError: there is no plan, or it is of another checkpoint or degree.
    """
    if isinstance(plan, Plan):
        if (plan.num_ranks, len(plan.cut_of)) != (num_ranks, len(checkpoint.tensors)):
            what = f"the plan is for {plan.num_ranks} ranks and {len(plan.cut_of)} tensors"
            expected = f"expected {num_ranks} and {len(checkpoint.tensors)}"
            raise PlanError(f"{what}, {expected}", path=str(checkpoint.root), code="no_plan")
        return plan
    origin = BUILTIN if plan is None else str(plan) if plan in (TRANSFORMERS, VLLM) else FILE
    named = Path(plan) if plan is not None and origin == FILE else None if plan is None else str(plan)
    return PROVIDERS[origin](PlanRequest(checkpoint, num_ranks, named, expert_parallel, unmatched, trust_remote_code))
