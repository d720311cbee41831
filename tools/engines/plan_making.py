"""Writes built-in plans from what was observed of an engine; `plan_table.py` says which."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from engines.observed_slices import Checkpoint
from engines.plan_comparing import differences
from relayout.core.patterns import collapse_numbers
from relayout.observe.fitting import Example, as_toml, fit
from relayout.plans.family import Family, builtin_families

HELD_OUT = (6, 16)
"""Degrees that no rule is looked for with, and that all rules must be right at."""


@dataclass(frozen=True)
class Wanted:
    """A plan to make."""

    title: str
    """What it is for: the first line of the file."""
    names: tuple[str, ...]
    """Of architectures that were observed."""
    extends: str = ""
    """A built-in plan, whose rules are used where they say what was observed."""
    language_prefixes: tuple[str, ...] = ()


def text_of(wanted: Wanted, checkpoints: Sequence[Checkpoint]) -> str:
    """The plan file.

    Raises:
        SystemExit: a tensor has no rule.
    """
    base = next((one for one in builtin_families() if one.name == wanted.extends), None)
    prefixes = wanted.language_prefixes or (base.prefixes if base else ())
    checkpoints = [_without_prefixes(one, prefixes) for one in checkpoints]
    left = [checkpoint if base is None else _left_by(base, checkpoint) for checkpoint in checkpoints]
    fitted = fit([Example(one, one.observed) for one in left], HELD_OUT)
    if fitted.unfitted:
        raise SystemExit(f"{wanted.title}: {dict(fitted.unfitted)}")
    model_types = tuple(dict.fromkeys(str(one.model_type) for one in checkpoints))
    family = replace(
        fitted.family,
        model_types=model_types,
        prefixes=wanted.language_prefixes,
        rules=tuple(replace(rule, pattern=_optional_model(rule.pattern)) for rule in fitted.family.rules),
        **_experts(fitted.family, base, checkpoints),
    )
    if base is not None:
        used = {size for rule in family.rules for size in (*rule.units, *rule.widths, rule.interleaved)}
        own = {size: sources for size, sources in family.sizes.items() if size in used and size not in base.sizes}
        family = replace(family, sizes=own)
    engines = sorted({one.engine.partition(" ")[2] for one in checkpoints})
    version = checkpoints[0].engine.partition(" ")[0]
    degrees = sorted({degree for one in checkpoints for degree in one.observed})
    said = f"Observed from vLLM {version} ({', '.join(engines)}) at {', '.join(map(str, degrees))} ranks."
    return as_toml(replace(fitted, family=family), wanted.title, said, extends=wanted.extends)


def _optional_model(pattern: str) -> str:
    """With or without what a checkpoint of the model alone, without a head, leaves out."""
    return re.sub(r"^model\.", "{model.,}", pattern)


def _without_prefixes(checkpoint: Checkpoint, prefixes: Sequence[str]) -> Checkpoint:
    longest = sorted(prefixes, key=len, reverse=True)

    def name_of(name: str) -> str:
        return name.removeprefix(next((one for one in longest if name.startswith(one)), ""))

    return replace(checkpoint, tensors=[one._replace(name=name_of(one.name)) for one in checkpoint.tensors])


def _left_by(base: Family, checkpoint: Checkpoint) -> Checkpoint:
    """The tensors that a plan cuts otherwise than was observed, or not at all."""
    patterns = {one.pattern for one in differences(base, checkpoint)}
    kept = [t for t, tensor in enumerate(checkpoint.tensors) if collapse_numbers(tensor.name) in patterns]
    return replace(
        checkpoint,
        tensors=[checkpoint.tensors[t] for t in kept],
        observed={degree: [slices[t] for t in kept] for degree, slices in checkpoint.observed.items()},
    )


def _experts(family: Family, base: Family | None, checkpoints: Sequence[Checkpoint]) -> Mapping[str, tuple[str, ...]]:
    """The tables of experts, but for those that the base knows."""
    names = [tensor.name for one in checkpoints for tensor in one.tensors if re.search(r"\.experts\.", tensor.name)]
    if base and all(base.expert(name) is not None or base.stacks_experts(name) for name in names):
        return {"experts_each": (), "experts_stacked": ()}
    return {
        "experts_each": tuple(map(_optional_model, family.experts_each)),
        "experts_stacked": tuple(map(_optional_model, family.experts_stacked)),
    }
