"""Finds the plan of a checkpoint: by rules, or as the installed vLLM cuts. A plan is a value, whoever has found it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from relayout.checkpoint.source import SourceCheckpoint
from relayout.errors import PlanError
from relayout.plans.family import VLLM
from relayout.plans.plan import Plan
from relayout.plans.planner import Unmatched, plan_for


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
        expert_parallel, unmatched: as for `planner.plan_for`.
        trust_remote_code: whether vLLM may run Python files of the checkpoint.

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
    if plan == VLLM:
        if num_ranks == 1:  # Which holds everything: no reason to start vLLM.
            return plan_for(checkpoint, 1)
        from relayout.observe.observation import observed_plan

        return observed_plan(
            checkpoint, num_ranks, expert_parallel=expert_parallel, trust_remote_code=trust_remote_code
        )
    named = Path(plan) if isinstance(plan, os.PathLike) else plan
    return plan_for(checkpoint, num_ranks, named, expert_parallel=expert_parallel, unmatched=unmatched)
