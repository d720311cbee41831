"""Converts the tensor-parallel plan of the transformers package for a model type to a family.

`base_model_tp_plan` lists modules and the cut of each (transformers 5.23, `distributed/tensor_parallel.py`). It has no
rules for embeddings and heads, and uses the names of modules in memory. This module adds rules for embeddings, heads,
and tensors that checkpoints store under other names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from relayout.errors import PlanError
from relayout.plans.family import (
    EVEN,
    EXPERTS,
    KV_HEADS,
    TRANSFORMERS,
    VOCABULARY,
    Family,
    Rule,
    SizeSource,
    language_type,
)

_BASES = "{model.,transformer.,gpt_neox.,}"

_COLWISE = frozenset({"colwise", "colwise_rep", "colwise_gather_output"})
_ROWWISE = frozenset({"rowwise", "rowwise_rep", "rowwise_split_input"})

_UNITS = {
    **dict.fromkeys(("q_proj", "q_b_proj", "kv_b_proj", "query_key_value", "o_proj"), "heads"),
    **dict.fromkeys(("k_proj", "v_proj"), KV_HEADS),
}
"""Modules that are cut by whole heads. All other modules are cut evenly."""

_EXPERTS_AXES = {
    "gate_up_proj": {"packed_colwise": 1, "packed_rowwise": 2},
    "down_proj": {"rowwise": 2, "colwise": 1},
}
"""For stacked tensors of all experts: style of the plan -> dimension that is cut."""

_EXPERTS_STORED = {"gate_up_proj": "{gate_proj,up_proj,w1,w3}", "down_proj": "{down_proj,w2}"}

_SIZES = {
    "heads": (SizeSource("num_attention_heads"),),
    KV_HEADS: (SizeSource("num_key_value_heads"), SizeSource("num_attention_heads")),
    EXPERTS: (SizeSource("num_experts"), SizeSource("n_routed_experts"), SizeSource("num_local_experts")),
}

_DEFAULTS = ("num_attention_heads", "num_key_value_heads")
"""Keys that config.json may omit if the config class has a default."""


def transformers_family(model_type: str | None, config: Mapping[str, Any]) -> Family:
    """Return the plan of transformers for a model type, or for the model type of its `text_config`."""
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError as error:
        raise PlanError(
            f"--plan transformers: the package cannot be imported ({error}): pip install transformers", code="no_plan"
        ) from None
    nested = config.get("text_config")
    types = [model_type, nested.get("model_type") if isinstance(nested, Mapping) else None]
    for name in types:
        config_class = CONFIG_MAPPING[name] if isinstance(name, str) and name in CONFIG_MAPPING else None
        subtypes = (getattr(config_class, "sub_configs", None) or {}).get("text_config")
        for candidate in (config_class, subtypes):
            plan = getattr(candidate, "base_model_tp_plan", None)
            if isinstance(plan, dict) and any("layers" in module for module in plan):
                defaults = {key: getattr(candidate, key, None) for key in _DEFAULTS}
                row = {key: value for key, value in defaults.items() if type(value) is int}
                return _family(str(name), plan, {language_type(config): row})
    raise PlanError(
        f"--plan transformers: the package has no tensor-parallel plan for model type {model_type!r}", code="no_plan"
    )


def _family(name: str, plan: Mapping[str, str], defaults: Mapping[str, Mapping[str, int]]) -> Family:
    rules = [rule for module, style in plan.items() for rule in _rules(module, style)]
    rules += [
        Rule(f"{_BASES}{{embed_tokens,wte,embed_in}}.weight", 0, (VOCABULARY,)),
        Rule("{lm_head,embed_out}.{weight,bias}", 0, (VOCABULARY,)),
    ]
    different: dict[str, Rule] = {}
    for rule in rules:
        different.setdefault(rule.pattern, rule)  # The first rule for a pattern has precedence.
    experts = [module.removesuffix(".gate_up_proj") for module in plan if module.endswith(".experts.gate_up_proj")]
    return Family(
        name,
        TRANSFORMERS,
        prefixes=("model.language_model.", "language_model."),
        sizes=_SIZES,
        defaults=defaults,
        rules=tuple(different.values()),
        experts_each=tuple(f"{_BASES}{_older(module)}.#.**" for module in experts),
        experts_stacked=tuple(f"{_BASES}{_older(module)}.{{gate_up_proj,down_proj}}" for module in experts),
    )


def _rules(module: str, style: str) -> Iterator[Rule]:
    stem, _, last = module.rpartition(".")
    if stem.endswith(".experts") and last in _EXPERTS_AXES:
        # One tensor in memory. Checkpoints mostly have one tensor per expert, some of them under an older name.
        places, axis = f"{_BASES}{_older(stem)}", _EXPERTS_AXES[last].get(style)
        if axis is None:
            return
        fused, stored, units = last == "gate_up_proj", _EXPERTS_STORED[last], (EVEN,)
        yield Rule(f"{places}.*.{stored}.weight", 0 if fused else 1, units)
        yield Rule(f"{places}.{last}", axis, units * 2 if fused else units)
        return
    pattern, units = f"{_BASES}{module}", (_UNITS.get(last, EVEN),)
    if style in _COLWISE:
        yield Rule(f"{pattern}.{{weight,bias}}", 0, units)
    elif style in _ROWWISE:
        yield Rule(f"{pattern}.weight", 1, units)
        yield Rule(f"{pattern}.bias", None)
    elif style == "packed_colwise":
        yield Rule(f"{pattern}.{{weight,bias}}", 0, (EVEN, EVEN))


def _older(stem: str) -> str:
    """Return a pattern that also matches the name in Mixtral checkpoints (transformers `conversion_mapping.py`)."""
    return stem.replace(".mlp.", ".{mlp,block_sparse_moe}.")
