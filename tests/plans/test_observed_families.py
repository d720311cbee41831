"""Each built-in plan gives ranks what vLLM's own classes take, as `tools/run engines --step plans` has observed it.

No vLLM is needed here: what its ranks take of small checkpoints, of several sizes each, is in observed.jsonl.xz.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from support.families import FAMILIES, NOT_OBSERVED
from support.observed_slices import Checkpoint, read
from support.plan_comparing import BESIDE, differences, differences_of_chosen

from relayout.core.slices import Slice
from relayout.errors import PlanError
from relayout.plans.family import builtin_families, find_family, language_config
from relayout.plans.planner import plan_by

OBSERVED: defaultdict[str, list[Checkpoint]] = defaultdict(list)
for observed in read(Path(__file__).parent / "observed.jsonl.xz"):
    OBSERVED[observed.name].append(observed)

WITHOUT_PLAN = {
    "DiffusionGemmaForBlockDiffusion",
    "FalconMambaForCausalLM",
    "Molmo2ForConditionalGeneration",
    "Zamba2ForCausalLM",
}
"""Some rules are not known, or what the hub's models have was not observed, such as the untied head of Falcon Mamba."""


def test_what_was_observed_is_of_many_architectures_and_degrees() -> None:
    degrees = {degree for checkpoints in OBSERVED.values() for one in checkpoints for degree in one.observed}
    assert degrees == {2, 4, 6, 8, 16}
    assert len(OBSERVED) > 140
    assert all(any(len(set(slices)) > 1 for slices in one.observed[2]) for each in OBSERVED.values() for one in each)


@pytest.mark.parametrize("name", sorted(OBSERVED.keys() - WITHOUT_PLAN))
def test_ranks_hold_what_vllm_takes(name: str) -> None:
    for checkpoint in OBSERVED[name]:
        wrong = differences_of_chosen(checkpoint)
        # Of parts beside the language model ranks may hold more: a plan has no numbers for them.
        others = [one for one in wrong if one.what != "more" or not BESIDE.search(one.pattern)]
        assert others == [], checkpoint.root


@pytest.mark.parametrize("name", sorted(WITHOUT_PLAN))
def test_some_have_no_plan(name: str) -> None:
    with pytest.raises(PlanError, match="no built-in plan for model type"):
        differences_of_chosen(OBSERVED[name][0])


FEW_KV_HEADS = [one for checkpoints in OBSERVED.values() for one in checkpoints if one.root.endswith("few KV heads")]
"""They have 12 heads."""
WITHOUT_HEADS = {"MambaForCausalLM", "JambaForCausalLM", "LagunaForCausalLM"}
"""No attention, none in the layers that were made, and numbers of heads that are a list in config.json."""


@pytest.mark.parametrize(
    "checkpoint",
    [one for one in FEW_KV_HEADS if one.name not in WITHOUT_PLAN | WITHOUT_HEADS],
    ids=lambda one: one.name,
)
def test_no_head_is_cut(checkpoint: Checkpoint) -> None:
    assert 12 in (checkpoint.config | language_config(checkpoint.config)).values()
    method = checkpoint.config.get("quantization_config", {}).get("quant_method")
    with pytest.raises(PlanError, match=r"not a multiple of 8|8 ranks"):
        plan_by(checkpoint, 8, find_family(checkpoint.model_type, method))


def test_all_plans_were_observed() -> None:
    types = {one.model_type for checkpoints in OBSERVED.values() for one in checkpoints}
    unseen = {family.name for family in builtin_families() if not types & set(family.model_types)}
    says = "observe these with vLLM (tools/run engines --step plans), or correct NOT_OBSERVED"
    assert unseen == NOT_OBSERVED, f"{says}: {unseen ^ NOT_OBSERVED}"
    assert not (missing := NOT_OBSERVED.difference(FAMILIES)), f"tests/support/families.py has no shapes of {missing}"


def test_the_document_of_models_names_the_plans_that_were_not_observed() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "MODELS.md").read_text()
    [names] = re.findall(r"sharding, all but ([`\w, ]+), at up to 16 ranks", text.replace("\n", " "))
    assert set(re.findall(r"`(\w+)`", names)) == NOT_OBSERVED


def test_a_wrong_slice_and_a_tensor_without_a_rule_are_seen() -> None:
    [checkpoint] = [one for one in OBSERVED["Qwen3MoeForCausalLM"] if "few" in one.root]
    family = find_family("qwen3_moe")
    assert list(differences(family, checkpoint)) == []
    for word, what in {"o_proj": "other", "experts.0.up_proj": "other", "q_norm": "more"}.items():
        t = next(t for t, tensor in enumerate(checkpoint.tensors) if word in tensor.name)
        changed = {degree: list(slices) for degree, slices in checkpoint.observed.items()}
        half = Slice.along(0, ((0, 16),))
        changed[4][t] = changed[4][t][::-1] if what == "other" else (half, *changed[4][t][1:])
        [found] = differences(family, replace(checkpoint, observed=changed))
        assert (found.what, found.degree) == (what, 4)
    assert [one.what for one in differences(find_family("qwen3"), checkpoint)][:1] == ["no rule"]
