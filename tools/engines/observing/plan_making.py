"""Writes built-in plans from what was observed of an engine; `plan_table.py` says which."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from support.observed_slices import Checkpoint
from support.plan_comparing import BESIDE, differences

from relayout.core.arguments import collapse_numbers, depends_on_numbers
from relayout.observe.fitting import SIZES, Example, fit
from relayout.plans import family as families
from relayout.plans.division import Sizes
from relayout.plans.family import Family, Rule, SizeSource, as_toml, builtin_families, language_config

BUILTIN = Path(families.__file__).parent / "builtin"

HELD_OUT = (6, 16)
"""Degrees that no rule is looked for with, and that all rules must be right at."""

DEFAULTS = "As transformers 5.24 has them in the config classes."
"""Where the defaults come from; `tests/plans/test_config_defaults.py` compares them."""


@dataclass(frozen=True)
class Wanted:
    """A plan to make."""

    title: str
    """What it is for: the first line of the file."""
    names: tuple[str, ...]
    """Of architectures that were observed, without `ForCausalLM`; `/` stands for `ForConditionalGeneration`."""
    extends: str = ""
    """A built-in plan, whose rules are used where they say what was observed."""
    language_prefixes: tuple[str, ...] = ()


def full_name(name: str) -> str:
    """Of an architecture."""
    return f"{name[:-1]}ForConditionalGeneration" if name.endswith("/") else f"{name}ForCausalLM"


def write(table: Mapping[str, Wanted], checkpoints: Sequence[Checkpoint]) -> None:
    """All plans of the table, in its order: one may extend another that is before it.

    Raises:
        SystemExit: a plan cannot be made.
    """
    for name, wanted in table.items():
        (BUILTIN / f"{name}.toml").write_text(text_of(name, wanted, checkpoints_of(wanted, checkpoints)))
        for cached in (families.builtin_families, families._builtin, families._builtin_texts):
            cached.cache_clear()


def checkpoints_of(wanted: Wanted, checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Those of its architectures, in their order."""
    return [checkpoint for name in wanted.names for checkpoint in checkpoints if checkpoint.name == full_name(name)]


def _defaults(name: str) -> Mapping[str, Mapping[str, int]]:
    """The rows of defaults of the plan file. They are facts about transformers, which no engine shows."""
    path = BUILTIN / f"{name}.toml"
    rows: Mapping[str, Mapping[str, int]] = tomllib.loads(path.read_text()).get("defaults", {}) if path.exists() else {}
    return rows


def text_of(name: str, wanted: Wanted, checkpoints: Sequence[Checkpoint]) -> str:
    """The plan file of a name. Its table of defaults is kept.

    Raises:
        SystemExit: nothing was observed, or a tensor has no rule.
    """
    if not checkpoints:
        raise SystemExit(f"{wanted.title}: nothing was observed of {', '.join(wanted.names)}")
    base = next((family for family in builtin_families() if family.name == wanted.extends), None)
    prefixes = wanted.language_prefixes or (base.prefixes if base else ())
    checkpoints = [_without_prefixes(checkpoint, prefixes) for checkpoint in checkpoints]
    wrong = {
        difference.pattern
        for checkpoint in checkpoints
        for difference in (differences(base, checkpoint) if base else ())
    }
    left = [checkpoint.only(wrong) if base else checkpoint for checkpoint in checkpoints]
    fitted = fit([Example(checkpoint, checkpoint.observed) for checkpoint in left], HELD_OUT)
    missing = {pattern: why for pattern, why in fitted.unmatched.items() if not BESIDE.match(pattern)}
    if missing:
        raise SystemExit(f"{wanted.title}: {missing}")
    used = {size for rule in fitted.family.rules for size in (*rule.units, *rule.widths, rule.interleaved)}
    used |= set() if base else fitted.family.sizes.keys() & {families.HEAD_DIM}
    used |= (
        {families.EXPERTS}
        if any(".experts." in tensor.name for checkpoint in checkpoints for tensor in checkpoint.tensors)
        else set()
    )
    known = base.sizes if base else {}
    family = replace(
        fitted.family,
        model_types=tuple(dict.fromkeys(str(checkpoint.model_type) for checkpoint in checkpoints)),
        prefixes=wanted.language_prefixes,
        sizes=dict(_sizes(fitted.family, used, known, checkpoints)),
        defaults=_defaults(name),
        rules=tuple(_shortened(fitted.family.rules, base)),
        **_experts(fitted.family, base, checkpoints),
    )
    engines = sorted({checkpoint.engine.partition(" ")[2] for checkpoint in checkpoints})
    version = checkpoints[0].engine.partition(" ")[0]
    degrees = sorted({degree for checkpoint in checkpoints for degree in checkpoint.observed})
    observed = f"Observed from vLLM {version} ({', '.join(engines)}) at {', '.join(map(str, degrees))} ranks."
    text = as_toml(family, f"{wanted.title}.", observed, extends=wanted.extends)
    return text.replace("[defaults]\n", f"[defaults]  # {DEFAULTS}\n")


def _shortened(rules: Sequence[Rule], base: Family | None) -> Iterator[Rule]:
    """What is held whole beside the language model has one rule for each part, behind all others."""
    parts = {}
    for rule in rules:
        match = BESIDE.match(rule.pattern)
        is_whole = rule.dim is None or depends_on_numbers(rule.pattern)  # To tell numbers apart takes long.
        part = _optional_model(f"{match[0]}.**") if match and match[0] != rule.pattern else ""
        if is_whole and part and (base is None or part not in base.patterns):
            parts[part] = Rule(part, None)
        elif is_whole and not _is_whole_by(base, rule.pattern):
            yield Rule(_optional_model(collapse_numbers(rule.pattern)), None)
        elif not is_whole:
            yield replace(rule, pattern=_optional_model(rule.pattern))
    yield from parts.values()


def _is_whole_by(base: Family | None, pattern: str) -> bool:
    name = re.sub(r"\{([^,}]*)[^}]*\}", r"\1", pattern).replace("*", "0")
    rule = base.rule(name) if base else None
    return rule is not None and rule.dim is None


def _optional_model(pattern: str) -> str:
    """With or without what a checkpoint of the model alone, without a head, leaves out."""
    return re.sub(r"^(model\.|(?=(visual|vision_tower|multi_modal_projector)\.))", "{model.,}", pattern)


def _without_prefixes(checkpoint: Checkpoint, prefixes: Sequence[str]) -> Checkpoint:
    longest = sorted(prefixes, key=len, reverse=True)

    def name_of(name: str) -> str:
        rest = name.removeprefix(next((prefix for prefix in longest if name.startswith(prefix)), ""))
        return f"model.{rest}" if prefixes and re.match(r"(layers|embed_tokens|norm|visual)\.", rest) else rest

    return replace(checkpoint, tensors=[tensor._replace(name=name_of(tensor.name)) for tensor in checkpoint.tensors])


def _sizes(
    family: Family, used: set[str | None], known: Mapping[str, Sequence[SizeSource]], checkpoints: Sequence[Checkpoint]
) -> Iterator[tuple[str, tuple[SizeSource, ...]]]:
    """Those that rules need and a plan does not know, with the keys only that some config.json has."""
    all_sources = {size: tuple(map(SizeSource, keys)) for size, keys in SIZES.items()} | dict(family.sizes)
    configs = [{**checkpoint.config, **language_config(checkpoint.config)} for checkpoint in checkpoints]
    for size, sources in all_sources.items():
        there = tuple(
            source for source in sources if not isinstance(source.use, str) or any(source.use in c for c in configs)
        )
        values = [(Sizes({size: there}, config).find(size), Sizes(known, config).find(size)) for config in configs]
        if size in used and any(own not in (None, theirs) for own, theirs in values):
            yield size, there


def _experts(family: Family, base: Family | None, checkpoints: Sequence[Checkpoint]) -> Mapping[str, tuple[str, ...]]:
    """The tables of experts, but for those that the base knows."""
    tensors = [tensor for checkpoint in checkpoints for tensor in checkpoint.tensors]
    stacks = [tensor.name for tensor in tensors if ".experts." in tensor.name and len(tensor.shape) > 1]
    names = [name for name in stacks if not BESIDE.match(name)]
    if base and all(base.expert(name) is not None or base.stacks_experts(name) for name in names):
        return {"experts_each": (), "experts_stacked": ()}
    return {
        "experts_each": tuple(map(_optional_model, family.experts_each)),
        "experts_stacked": tuple(map(_optional_model, family.experts_stacked)),
    }
