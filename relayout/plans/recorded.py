"""The plan of a converted folder at its own degree and at others, by the rules in its source record alone."""

from __future__ import annotations

from relayout.errors import FormatError, PlanError
from relayout.format.manifest import SOURCE_RECORD_NAME
from relayout.format.source_record import SourceRecord
from relayout.plans.family import VLLM, Family, parse_rules
from relayout.plans.plan import Plan, PlannedCheckpoint
from relayout.plans.planner import Unmatched, plan_by


def recorded_plan(checkpoint: PlannedCheckpoint, record: SourceRecord, num_ranks: int) -> Plan:
    """Who holds what at another degree.

    Args:
        checkpoint: the record's tensors, and the folder's config.json.
        record: has the rules; one rank needs none.
        num_ranks: the degree.

    Raises:
        FormatError: the rules are damaged, or do not cut the tensors as the record says.
        PlanError: there are no rules, or they cannot be applied at this degree.
    """
    if num_ranks == 1:
        return plan_by(checkpoint, 1, None)
    return _apply(proven_rules(checkpoint, record), checkpoint, record, num_ranks)


def proven_rules(checkpoint: PlannedCheckpoint, record: SourceRecord) -> Family:
    """The rules of a record, which cut the tensors at its own degree as they are cut; arguments and errors as above."""
    options, where = record.options, str(checkpoint.root)
    if record.plan is None:
        raise PlanError(
            "converted without a plan, so it can be loaded whole or at its own degree only:"
            " convert it again, with --plan FILE",
            path=where,
            code="no_plan",
        )
    if record.plan.origin == VLLM:
        raise PlanError(
            f"its slices were observed from vLLM {record.plan.name} at {options.num_ranks} ranks, so it can be"
            " loaded whole or at that degree only: convert it again",
            path=where,
            code="no_plan",
        )
    rules = f"{where}/{SOURCE_RECORD_NAME}: plan"
    family = parse_rules(record.plan.rules, rules, record.plan.name, record.plan.origin)
    plan = _apply(family, checkpoint, record, options.num_ranks)
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


def _apply(family: Family, checkpoint: PlannedCheckpoint, record: SourceRecord, num_ranks: int) -> Plan:
    # A conversion to one rank has not asked whether each tensor has a rule.
    unmatched: Unmatched | None = None if record.options.num_ranks == 1 else "replicate"
    expert_parallel = record.options.expert_parallel
    return plan_by(checkpoint, num_ranks, family, expert_parallel=expert_parallel, unmatched=unmatched)
