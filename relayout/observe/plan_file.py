"""Writes what was observed of an engine as a plan file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from relayout.checkpoint.source import SourceCheckpoint, read_source
from relayout.core.arguments import compile_glob
from relayout.core.slices import Slice
from relayout.errors import PlanError
from relayout.observe.elements import completed, same_elements
from relayout.observe.fitting import Example, fit
from relayout.observe.observation import Observation, observe
from relayout.plans.family import Family, parse_family
from relayout.plans.planner import plan_by
from relayout.results import Result
from relayout.storage.local.open_folder import write_file
from relayout.storage.stores import find_input

DEGREES = range(2, 17)
"""That are tried; vLLM refuses those that do not divide the heads."""


@dataclass(frozen=True, slots=True)
class ObservedPlan(Result):
    """A plan file that was written."""

    output: str
    engine: str
    """The version of vLLM, and its class."""
    degrees: tuple[int, ...]
    """At which its ranks were observed."""
    held_out: tuple[int, ...]
    """The degrees that no rule was derived from; all rules agree with them."""
    num_rules: int
    unmatched: tuple[str, ...]
    """Patterns of tensors that no rule fits, each with the reason; every rank holds them whole."""


def observe_plan(
    source: str | os.PathLike[str], output: str | os.PathLike[str], *, trust_remote_code: bool = False
) -> ObservedPlan:
    """Observe the installed vLLM at each degree up to 16, and write rules that say the same as a plan file.

    Args:
        source: a checkpoint; its headers and config.json are read.
        output: the file to make.
        trust_remote_code: run Python files of the source.

    Raises:
        FormatError: the source is damaged.
        PlanError: `output` exists, or vLLM cannot be observed at any degree.
    """
    file = Path(output)
    if os.path.lexists(file):
        raise PlanError("exists; choose another -o", path=file, code="exists")
    checkpoint = read_source(find_input(source))
    results = observe(checkpoint, DEGREES, trust_remote_code=trust_remote_code)
    observations = {
        degree: result for degree, result in zip(DEGREES, results, strict=True) if isinstance(result, Observation)
    }
    if not observations:
        raise next(result for result in results if isinstance(result, PlanError))
    degrees = tuple(observations)
    held_out = degrees[-2:-1] if len(degrees) > 2 else degrees[1:]
    loaded = {degree: observation.loaded_slices for degree, observation in observations.items()}
    fitted = fit([Example(checkpoint, loaded)], held_out)
    engine = observations[degrees[0]].engine
    text = fitted.as_toml(f"Observed from vLLM {engine} at {', '.join(map(str, degrees))} ranks.")
    _check(checkpoint, parse_family(text, str(file), file.name), loaded, fitted.unmatched)
    write_file(file, text.encode(), replace=False)
    unmatched = tuple(f"{pattern}: {why}" for pattern, why in fitted.unmatched.items())
    return ObservedPlan(str(file), engine, degrees, held_out, len(fitted.family.rules), unmatched)


def _check(
    checkpoint: SourceCheckpoint,
    family: Family,
    loaded: Mapping[int, Sequence[tuple[Slice, ...]]],
    unmatched: Iterable[str],
) -> None:
    """Apply the plan as a conversion does. What no rule fits is held whole, which is enough for any engine.

    Raises:
        PlanError: it does not give what was observed.
    """
    patterns = list(map(compile_glob, unmatched))
    fitting = [t for t, tensor in enumerate(checkpoint.tensors) if not any(p.match(tensor.name) for p in patterns)]
    for degree, slices in loaded.items():
        plan = plan_by(checkpoint, degree, family)
        for t in fitting:
            tensor = checkpoint.tensors[t]
            if any(part.is_held for part in slices[t]) and not same_elements(
                plan.cut(t).slices, completed(slices[t], tensor.shape), tensor.shape
            ):
                what = f"the derived rules do not reproduce the observed cut at {degree} ranks"
                raise PlanError(what, tensor=tensor.name, code="unsupported")
