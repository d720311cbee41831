"""What config.json leaves out is what transformers' config class has by default, for each plan and model type.

Expected sizes are those of a class that has read a config.json without some of the keys. Engines build their models
from these classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from support.planning import all_slices, make_source
from transformers import CONFIG_MAPPING

from relayout.plans.division import Sizes
from relayout.plans.family import Family, builtin_families, dump_rules, parse_rules
from relayout.plans.planner import plan_by, plan_for

OWN_CLASS = {
    *("kimi_k2", "kimi_k3", "deepseek_v41", "RefinedWeb", "RefinedWebModel"),
    *("inkling_model", "mimo_v2", "minimax_m3", "minimax_m3_text", "bailing_moe", "bailing_moe_v2"),
}
"""Model types of which transformers has no class."""

FORMULAS = {"falcon_h1": "state_dim", "granitemoehybrid": "state_dim", "bailing_hybrid": "head_dim"}
"""Sizes whose default is a formula of other keys: a plan has no value for them, and does not guess."""

TYPES = [(family, name) for family in builtin_families() for name in family.model_types if name not in OWN_CLASS]


def wrapped(model_type: str, text: dict[str, Any]) -> dict[str, Any]:
    """A config.json whose language model has these keys."""
    parts = CONFIG_MAPPING[model_type].sub_configs
    if "thinker_config" in parts:
        return {"model_type": model_type, "thinker_config": {"text_config": text}}
    return {"model_type": model_type, **({"text_config": text} if "text_config" in parts else text)}


def language_model(config: Any) -> Any:
    thinker = getattr(config, "thinker_config", None)
    language = config.get_text_config() if thinker is None else thinker.text_config
    language.allow_global_per_layer_attribute_access = True  # Else keys that some layers have otherwise raise.
    return language


def keys_of(family: Family) -> list[str]:
    words = [source.use for sources in family.sizes.values() for source in sources if isinstance(source.use, str)]
    return list(dict.fromkeys(part.strip() for word in words for part in word.split("/")))


def left_out(values: dict[str, int]) -> Iterator[dict[str, int]]:
    """All keys, all but each, each, and none; those that are there have other values than by default."""
    yield {}
    larger = {key: 2 * value for key, value in values.items()}
    for key, value in larger.items():
        yield {key: value}
        yield {other: value for other, value in larger.items() if other != key}
    yield larger


@pytest.mark.parametrize(("family", "model_type"), TYPES, ids=[f"{family.name}, {name}" for family, name in TYPES])
def test_sizes_that_config_json_leaves_out_are_those_of_the_class(family: Family, model_type: str) -> None:
    config_class, keys = CONFIG_MAPPING[model_type], keys_of(family)
    whole = language_model(config_class())
    values = {key: getattr(whole, key, None) for key in keys}
    names = [{"model_type": whole.model_type}, {}] if whole.model_type != model_type else [{}]
    num_compared = 0
    for name in names:
        for some in left_out({key: value for key, value in values.items() if type(value) is int}):
            config = wrapped(model_type, name | some)
            try:
                language = language_model(config_class.from_dict(wrapped(model_type, name | some)))
            except (ValueError, KeyError, StrictDataclassError):
                continue  # The class refuses such numbers, or a language model whose type is not named.
            # Aliases are attributes only, and flags are in the dict only.
            complete = language.to_dict() | {key: getattr(language, key, None) for key in keys}
            expected = Sizes(family.sizes, complete | {"model_type": model_type})
            found = Sizes(family.sizes, config, family.defaults_of(config))
            sizes = family.sizes.keys() - {FORMULAS.get(model_type)}
            assert {size: found.find(size) for size in sizes} == {size: expected.find(size) for size in sizes}, config
            num_compared += 1
    assert num_compared


@pytest.mark.parametrize(
    "config", [{"model_type": "mistral"}, {"model_type": "odd", "text_config": {"model_type": "mistral"}}]
)
def test_the_plan_of_transformers_has_the_defaults_of_its_class_too(config: dict[str, Any]) -> None:
    source = make_source({"model.layers.0.self_attn.k_proj.weight": (1024, 8)}, **config)
    [parts] = all_slices(plan_for(source, 16, "transformers"))
    assert [part.ranges_along(0) for part in parts] == [((rank // 2 * 128, 128),) for rank in range(16)]


def test_a_record_has_the_defaults_that_its_plan_has_used() -> None:
    place = "language_model.model.layers.0.self_attn."
    shapes = {
        f"{place}q_proj.weight": (4096, 2),
        f"{place}k_proj.weight": (4096, 2),
        f"{place}o_proj.weight": (2, 4096),
    }
    source = make_source(shapes, model_type="qwen2_audio", text_config={"model_type": "qwen2", "hidden_size": 4096})
    plan = plan_for(source, 2)
    assert plan.family is not None
    rules = dump_rules(plan.family)
    assert rules["defaults"] == {"qwen2": {"num_attention_heads": 32, "num_key_value_heads": 32}}
    recorded = plan_by(source, 4, parse_rules(rules, "record", "qwen2_audio", "builtin"))
    assert all_slices(recorded) == all_slices(plan_for(source, 4))
