"""Compares what plans say with what was observed of an engine."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from support.observed_slices import Checkpoint

from relayout.core.arguments import collapse_numbers
from relayout.core.slices import Slice, joined
from relayout.errors import PlanError
from relayout.observe.fitting import elements_along
from relayout.observe.observation import same_elements
from relayout.plans.family import Family, find_family
from relayout.plans.planner import plan_by, without_rule

BESIDE = re.compile(
    r"(model\.)?(visual|vision_tower|vision_model|audio_tower|multi_modal_projector|connector|encoder|projector|qformer"
    r"|merger|talker|token2wav|code2wav|mlp_AR|mlp1|image_newline|language_projection|(embed|layerwise|spatial)_(vision|audio|projectors)"
    r"|vision_(embedder|adapter|projection)|resampler_model|whisper_encoder|vq_adaptor)\b"
)
"""The first words of names of what is beside the language model."""


@dataclass(frozen=True)
class Difference:
    """Of one kind of tensor."""

    pattern: str
    what: str
    """`no rule`, `more` than the engine loads, or `other`; or why the plan cannot be applied."""
    degree: int = 0
    dims: tuple[int, ...] = ()
    """Along which the engine cuts."""


def differences(family: Family, checkpoint: Checkpoint) -> Iterator[Difference]:
    """The first of each kind of tensor; those that the engine does not load are not compared."""
    left = {collapse_numbers(tensor.name): t for t, tensor in reversed(list(enumerate(checkpoint.tensors)))}
    for tensor, _ in without_rule(checkpoint, family):
        pattern = collapse_numbers(tensor.name)
        if left.pop(pattern, None) is not None:
            yield Difference(pattern, "no rule")
    for degree in checkpoint.observed:
        yield from _at(degree, family, checkpoint, left)


def _at(degree: int, family: Family, checkpoint: Checkpoint, left: dict[str, int]) -> Iterator[Difference]:
    """At a degree; kinds that differ are taken from those that are left."""
    compared = checkpoint.only(left.keys())
    try:
        plan = plan_by(compared, degree, family)
    except PlanError as error:
        pattern = collapse_numbers(error.tensor or "")
        yield Difference(pattern, f"refused: {error.what}", degree)
        if left.pop(pattern, None) is not None:
            yield from _at(degree, family, checkpoint, left)
        return
    for t, (tensor, slices) in enumerate(zip(compared.tensors, compared.observed[degree], strict=True)):
        pattern = collapse_numbers(tensor.name)
        if pattern in left and not is_same(plan.cut(t).slices, slices, tensor.shape):
            del left[pattern]
            dims = tuple(sorted({axis for part in slices for axis in part.axes}))
            is_more = all(_contains(*pair, tensor.shape) for pair in zip(plan.cut(t).slices, slices, strict=True))
            yield Difference(pattern, "more" if is_more else "other", degree, dims)


def differences_of_chosen(checkpoint: Checkpoint) -> list[Difference]:
    """Of the built-in plan that a conversion would choose.

    Raises:
        PlanError: there is none.
    """
    method = checkpoint.config.get("quantization_config", {}).get("quant_method")
    return list(differences(find_family(checkpoint.model_type, method), checkpoint))


def is_same(held: Sequence[Slice], loaded: Sequence[Slice], shape: Sequence[int]) -> bool:
    """Return True if ranks hold what an engine loads, or if it loads nothing. An empty slice is the same as none."""
    return not any(part.is_held for part in loaded) or same_elements(
        _without_empty(held, shape), _without_empty(loaded, shape), shape
    )


def _without_empty(parts: Sequence[Slice], shape: Sequence[int]) -> list[Slice]:
    """Replace empty slices by `Slice(None)`: rules and observations say both of a rank that has no elements."""
    return [part if part.is_held and 0 not in part.shape(tuple(shape)) else Slice(None) for part in parts]


def _contains(held: Slice, loaded: Slice, shape: Sequence[int]) -> bool:
    if not loaded.is_held:
        return True
    along = [(elements_along(held, axis, size), elements_along(loaded, axis, size)) for axis, size in enumerate(shape)]
    return held.is_held and all(joined((*own, *other)) == own for own, other in along)
