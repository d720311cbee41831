"""Checkpoints and plans that could be cut wrong in silence, or take all memory: each came out of a review."""

from __future__ import annotations

from typing import Any

import pytest
from support.planning import all_slices, make_source

from relayout.core.slices import Slice
from relayout.errors import FormatError, PlanError
from relayout.plans.family import parse_family
from relayout.plans.planner import plan_by, plan_for

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}


def test_quantized_weights_of_a_transposed_family_are_cut_the_other_way() -> None:
    """GPT-2 stores [in, out]; what GPTQ makes of it has outputs along axis 1 as everywhere."""
    module = "transformer.h.0.mlp.c_fc"
    shapes = {
        f"{module}.qweight": (192 // 8, 768),
        f"{module}.scales": (192 // 32, 768),
        f"{module}.qzeros": (192 // 32, 768 // 8),
        f"{module}.g_idx": (192,),
        f"{module}.bias": (768,),
        "transformer.h.0.mlp.c_proj.qweight": (768 // 8, 192),
        "transformer.h.0.mlp.c_proj.scales": (768 // 32, 192),
        "transformer.h.0.mlp.c_proj.bias": (192,),
    }
    source = make_source(shapes, stored_as="I32", model_type="gpt2", n_head=3, n_embd=192, quantization_config=GPTQ)
    plan = plan_for(source, 2)
    cuts = {
        tensor.name.removeprefix("transformer.h.0.mlp."): parts[1]
        for tensor, parts in zip(source.tensors, all_slices(plan), strict=True)
    }
    assert cuts == {
        "c_fc.qweight": Slice.along(1, ((384, 384),)),
        "c_fc.scales": Slice.along(1, ((384, 384),)),
        "c_fc.qzeros": Slice.along(1, ((48, 48),)),
        "c_fc.g_idx": Slice(),
        "c_fc.bias": Slice.along(0, ((384, 384),)),
        "c_proj.qweight": Slice.along(0, ((48, 48),)),
        "c_proj.scales": Slice.along(0, ((12, 12),)),
        "c_proj.bias": Slice(),
    }


def test_kv_heads_that_config_json_leaves_out_are_those_of_the_class_and_null_is_one_for_each_head() -> None:
    """transformers' MistralConfig: 8 by default, and None becomes the number of heads."""
    name = "model.layers.0.self_attn.k_proj.weight"
    mistral = {"model_type": "mistral", "num_attention_heads": 32, "hidden_size": 4096}
    [parts] = all_slices(plan_for(make_source({name: (1024, 4096)}, **mistral), 16))
    assert [part.ranges_along(0) for part in parts] == [((rank // 2 * 128, 128),) for rank in range(16)]
    without = {**mistral, "num_key_value_heads": None}
    with pytest.raises(PlanError, match=r"1024 elements, but config.json declares 32 heads of 128 elements"):
        plan_for(make_source({name: (1024, 4096)}, **without), 16)
    [parts] = all_slices(plan_for(make_source({name: (4096, 4096)}, **without), 16))
    assert [part.ranges_along(0) for part in parts] == [((rank * 256, 256),) for rank in range(16)]


def test_no_head_is_cut_in_two_where_its_size_is_unknown() -> None:
    """2,048 rows are 8 heads of 256 elements, if hidden_size is 8,192; as 32 heads, a rank of 16 would hold a half."""
    place = "model.layers.0.self_attn."
    shapes = {f"{place}q_proj.weight": (8192, 64), f"{place}k_proj.weight": (2048, 64)}
    only_heads = {"num_attention_heads": 32}
    _, parts = all_slices(plan_for(make_source(shapes, model_type="qwen2_5_vl", **only_heads), 16))
    assert [part.ranges_along(0) for part in parts] == [((rank // 2 * 256, 256),) for rank in range(16)]
    with pytest.raises(
        PlanError, match=r"size 'head_dim' is unknown: config.json has no positive integer head_dim or h"
    ):
        plan_for(make_source(shapes, model_type="odd", **only_heads), 16, "llama")


def test_a_plan_that_does_not_compute_the_size_of_a_head_checks_it_where_config_json_has_it() -> None:
    text = '[sizes]\nheads = "n"\nhead_dim = "d"\n[cut]\nw = { dim = 0, by = "heads" }'
    family = parse_family(text, "mine.toml", "mine")
    assert plan_by(make_source({"w": (64, 2)}, n=4), 2, family).num_ranks == 2
    with pytest.raises(PlanError, match=r"64 elements, but config.json declares 4 heads of 8 elements"):
        plan_by(make_source({"w": (64, 2)}, n=4, d=8), 2, family)


@pytest.mark.parametrize(
    ("config", "kv_heads"),
    [
        ({}, 1),
        ({"multi_query": True}, 1),
        ({"multi_query": True, "n_head_kv": 8}, 1),
        ({"multi_query": False}, 8),
        ({"new_decoder_architecture": True, "num_kv_heads": 2}, 2),
        ({"model_type": "RefinedWeb", "n_head_kv": 2}, 2),
    ],
)
def test_falcon_has_the_kv_heads_that_its_code_gives_it(config: dict[str, Any], kv_heads: int) -> None:
    """transformers' FalconConfig and vLLM's RWConfig: multi_query is the default."""
    rows = (8 + 2 * kv_heads) * 16
    shapes = {"transformer.h.0.self_attention.query_key_value.weight": (rows, 128)}
    whole = {"model_type": "falcon", "num_attention_heads": 8, "hidden_size": 128} | config
    [parts] = all_slices(plan_for(make_source(shapes, **whole), 2))
    assert [part.shape((rows, 128)) for part in parts] == [((4 + 2 * max(1, kv_heads // 2)) * 16, 128)] * 2
    with pytest.raises(PlanError, match="heads of 16 elements"):
        plan_for(make_source({next(iter(shapes)): (rows + 64, 128)}, **whole), 2)


def test_a_fused_tensor_without_elements_is_held_by_every_rank() -> None:
    source = make_source({"model.layers.0.mlp.gate_up_proj.weight": (0, 64)}, model_type="phi3")
    [parts] = all_slices(plan_for(source, 2))
    assert all(part.is_held and part.shape((0, 64)) == (0, 64) for part in parts)


def test_stacked_experts_that_config_json_counts_otherwise_are_refused() -> None:
    source = make_source(
        {"model.layers.0.mlp.experts.gate_up_proj": (6, 64, 32)}, model_type="mixtral", num_local_experts=8
    )
    with pytest.raises(PlanError, match=r"6 experts along dim 0, but config.json declares 8"):
        plan_for(source, 2, expert_parallel=True)


def test_a_huge_number_of_experts_takes_no_memory() -> None:
    shapes = {"model.layers.0.block_sparse_moe.experts.999999999.w1.weight": (8, 8)}
    source = make_source(shapes, model_type="mixtral", num_local_experts=10**15)
    [parts] = all_slices(plan_for(source, 4, expert_parallel=True))
    assert [part.is_held for part in parts] == [True, False, False, False]


def test_a_tensor_in_too_many_pieces_is_refused() -> None:
    source = make_source(
        {"h.0.self_attention.query_key_value.bias": (3 * 2**18,)}, model_type="bloom", n_head=2**18, n_embed=2**18
    )
    with pytest.raises(PlanError, match=r"262144 groups of 3 parts are too many ranges"):
        plan_for(source, 2)


def test_a_number_too_long_to_be_printed_is_refused() -> None:
    """Python prints no more than 4300 digits, and reads any number of hexadecimal ones."""
    with pytest.raises(FormatError, match=r"^mine.toml: not valid TOML: an integer of more than 64 bits"):
        parse_family("[cut]\n'w' = 0x" + "f" * 200_000, "mine.toml", "mine")


def test_with_the_plan_of_transformers_too_what_it_does_not_name_can_be_an_error() -> None:
    source = make_source({"model.norm.weight": (8,)}, model_type="helium")
    assert plan_for(source, 2, "transformers", unmatched="replicate").unmatched == ("model.norm.weight",)
    with pytest.raises(PlanError, match="no rule of plan 'transformers:helium' matches it"):
        plan_for(source, 2, "transformers", unmatched="error")


def test_scales_of_a_weight_without_rows_are_refused() -> None:
    module = "model.layers.0.mlp.up_proj"
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    shapes = {f"{module}.weight": (0, 64), f"{module}.weight_scale_inv": (1, 1)}
    with pytest.raises(PlanError, match=r"cannot map 0 values onto a tensor of shape \[1, 1\]"):
        plan_for(make_source(shapes, model_type="llama", quantization_config=quantization), 2)


def test_weights_stored_in_several_ways_are_told_apart_where_the_plan_allows_just_one() -> None:
    """Four bits in groups of 128 and eight in groups of 64 may have the same shapes, for other columns."""

    def group(bits: int, size: int) -> dict[str, Any]:
        weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": size}
        return {"targets": ["Linear"], "weights": weights}

    module = "model.layers.0.self_attn.o_proj"
    source = make_source(
        {f"{module}.weight_packed": (128, 64), f"{module}.weight_scale": (128, 4)},
        stored_as="I32",
        model_type="llama",
        num_attention_heads=4,
        head_dim=64,
        quantization_config={
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"a": group(4, 128), "b": group(8, 64)},
        },
    )
    plan = plan_for(source, 2)
    assert [parts[1] for parts in all_slices(plan)] == [Slice.along(1, ((32, 32),)), Slice.along(1, ((2, 2),))]
