"""Quantized checkpoints: the numbers that a rank's slices mean are the slice of the numbers that the source means.

All forms are compared by their plans, which numpy applies to the source; bytes for those of `OF_EACH_KIND`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints import Tensors
from support.conversions import OF_EACH_KIND, Conversions, grouped, held_by, reference_tensors
from support.engine_oracle import Array, IndivisibleError, expected, owners, split_cut
from support.families import Entry, Sizes
from support.loader_fixtures import whole_tensors
from support.local_stores import read_source
from support.models import as_integers, read_tensors
from support.planning import make_source, try_plan
from support.quantized import (
    EXPERT_QUANTIZED,
    QUANTIZED,
    REFUSED_FORMS,
    Method,
    Quantized,
    awq,
    compressed,
    gptq,
    weights_of,
    write_quantized,
)
from support.rebuilding import assert_ranks_give_back

import relayout
from relayout.checkpoint.source import SourceCheckpoint
from relayout.core.arguments import collapse_numbers
from relayout.errors import PlanError
from relayout.plans.plan import Plan
from relayout.plans.planner import plan_for

DEGREES = range(2, 17)


def module_of(entry: Entry, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """The tensors that store one weight between them, by the last part of their names."""
    module = entry.name.removesuffix("weight")
    return {name.removeprefix(module): tensor for name, tensor in tensors.items() if name.startswith(module)}


def is_at_borders(held: Array, unit: int, dim: int) -> bool:
    """Whether what is held of an axis is runs from border to border of units; the last unit may be partial."""
    if not held.size:
        return True
    breaks = np.flatnonzero(np.diff(held) != 1)
    starts = [held[0], *held[breaks + 1]]
    ends = [*(held[breaks] + 1), held[-1] + 1]
    return all(start % unit == 0 for start in starts) and all(end % unit == 0 or end == dim for end in ends)


def may_split_blocks(entry: Entry, method: Method) -> bool:
    """FP8 experts may be cut inside a block of scales, which every rank then holds whole.

    So does vLLM 0.33 (`fused_moe/oracle/fp8.py`, `refine_fp8_moe_block_shape`).
    """
    return "weight_block_size" in method.form.config and method.form.borders != (1, 32) and ".experts." in entry.name


def fits(quantized: Quantized, num_ranks: int, *, owned: bool = False) -> bool:
    """Whether an engine can divide every tensor, and no cut falls inside a block, group or word."""
    sizes = quantized.all_sizes()
    kinds = {(entry.cut, entry.shape, id(quantized.method_of(entry))): entry for entry in quantized.entries()}
    for entry in kinds.values():
        method = quantized.method_of(entry)
        if owned and ".experts." in entry.name:
            continue
        kind, axis = split_cut(entry.cut)
        if kind == "whole":
            continue
        try:
            parts = expected(kind, np.arange(entry.shape[axis]), num_ranks, sizes)
        except IndivisibleError:
            return False
        unit = method.form.borders[axis] if method and not may_split_blocks(entry, method) else 1
        if not all(is_at_borders(part, unit, entry.shape[axis]) for part in parts):
            return False
    return True


@cache
def fitting(name: str) -> list[int]:
    return [degree for degree in DEGREES if fits(QUANTIZED[name], degree)]


def assert_same_numbers(entry: Entry, method: Method, whole: Tensors, held: list[Tensors], sizes: Sizes) -> None:
    numbers = method.numbers(module_of(entry, whole))
    scale = next((name for name in ("weight_scale_inv", "scale") if name in module_of(entry, whole)), "")
    assert numbers.shape == entry.shape
    kind, dim = split_cut(entry.cut)
    for rank, wanted in enumerate(expected(entry.cut, numbers, len(held), sizes)):
        stored = module_of(entry, held[rank])
        places = expected(kind, np.arange(entry.shape[dim]), len(held), sizes)[rank]
        unit = method.form.borders[dim]
        if may_split_blocks(entry, method) and not is_at_borders(places, unit, entry.shape[dim]):
            assert stored[scale].shape == module_of(entry, whole)[scale].shape
            # The rank's part at its place in a weight of zeros: that is where its scales are.
            at = torch.from_numpy(places)
            padded = torch.zeros(entry.shape, dtype=torch.uint8)
            padded.index_copy_(dim, at, stored["weight"].view(torch.uint8))
            placed = {**stored, "weight": padded.view(stored["weight"].dtype)}
            found = method.numbers(placed).take(at.numpy(), axis=dim)
        else:
            found = method.numbers(stored)
        np.testing.assert_array_equal(found, wanted, err_msg=f"{entry.name} ({entry.cut}), rank {rank}")
    bias = entry.name.replace(".weight", ".bias")
    if bias in whole:
        for rank, wanted in enumerate(expected(bias_cut(entry), as_integers(whole[bias]), len(held), sizes)):
            np.testing.assert_array_equal(as_integers(held[rank][bias]), wanted, err_msg=f"{bias}, rank {rank}")


def bias_cut(entry: Entry) -> str:
    """A bias is cut like the rows, and whole where the columns are cut."""
    kind, axis = split_cut(entry.cut)
    return "whole" if axis else kind


@pytest.mark.parametrize("name", grouped([*QUANTIZED]))
def test_a_ranks_slices_mean_the_slice_of_what_the_source_means(name: str, conversions: Conversions) -> None:
    quantized = QUANTIZED[name]
    source, whole = read_source(conversions.source(name)), reference_tensors(conversions.source(name))
    entries = {collapse_numbers(entry.name): entry for entry in quantized.entries()}.values()
    assert sum(quantized.method_of(entry) is not None for entry in entries) >= 3
    shared = [key for key in whole if key.endswith(("_shape", "_global_scale", "k_scale", "v_scale", "_scale_2"))]
    shared += [key for key in whole if key.endswith("input_scale")]
    tp = max(degree for degree in fitting(name) if degree <= 8)
    plan = plan_for(source, tp)
    held = [held_by(rank, plan, source, whole) for rank in range(tp)]
    for entry in entries:
        if method := quantized.method_of(entry):
            assert_same_numbers(entry, method, whole, held, quantized.all_sizes())
            continue
        wanted = expected(entry.cut, as_integers(whole[entry.name]), tp, quantized.all_sizes())
        for rank, array in enumerate(wanted):
            np.testing.assert_array_equal(as_integers(held[rank][entry.name]), array, err_msg=entry.name)
    for key in shared:
        assert all(torch.equal(tensors[key], whole[key]) for tensors in held), key


@pytest.mark.parametrize("name", grouped([name for name in OF_EACH_KIND if name in QUANTIZED]))
def test_all_ranks_together_give_back_every_byte_of_the_source(name: str, conversions: Conversions) -> None:
    tp = conversions.largest(name)
    assert_ranks_give_back(conversions.at(name, tp), read_tensors(conversions.source(name)), tp)


@pytest.mark.parametrize("name", grouped([*QUANTIZED]))
def test_each_degree_that_cuts_no_block_group_or_word_is_accepted_and_a_refusal_names_tensor_axis_size_and_these(
    name: str, conversions: Conversions
) -> None:
    source, accepted = read_source(conversions.source(name)), fitting(name)
    assert 2 in accepted
    shapes = {tensor.name: tensor.shape for tensor in source.tensors}
    refused = next(degree for degree in (3, 16) if degree not in accepted)
    with pytest.raises(PlanError) as caught:
        plan_for(source, refused)
    parts = re.search(
        r"tensor '(?P<name>[^']+)': dim (?P<axis>[01]) of (?P<kind>a quantized weight )?(?P<shape>\[[\d, ]+\]).*"
        r" \(this checkpoint can be divided among (?P<degrees>[\d, ]+) ranks?\)$",
        str(caught.value),
    )
    assert parts, caught.value
    shape = shapes[parts["name"]]
    if parts["kind"]:
        module = parts["name"].rpartition(".")[0]
        [shape] = [entry.shape for entry in QUANTIZED[name].entries() if entry.name == f"{module}.weight"]
    assert parts["shape"] == str(list(shape))
    assert [int(degree) for degree in parts["degrees"].split(", ") if int(degree) <= 16] == [1, *accepted]


# Cuts that no checkpoint above asks for.


def of_module(config: Mapping[str, Any], **tensors: tuple[str, tuple[int, ...]]) -> SourceCheckpoint:
    """A checkpoint of one quantized weight."""
    module = "model.layers.0.mlp.down_proj."
    source = make_source({module + name: shape for name, (_, shape) in tensors.items()}, model_type="llama")
    typed = [replace(tensor, dtype=tensors[tensor.name.removeprefix(module)][0]) for tensor in source.tensors]
    return replace(source, tensors=tuple(typed), config={**source.config, "quantization_config": config})


def gptq_tensors(columns: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    groups = -(-columns // 128)
    return {
        "qweight": ("I32", (columns // 8, 64)),
        "qzeros": ("I32", (groups, 8)),
        "scales": ("F16", (groups, 64)),
        "g_idx": ("I32", (columns,)),
    }


BLOCKS = weights_of(8, "float", "block")
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
GROUPS = {256: {2}, 192: set(), 384: {3}, 512: {2, 4}}
"""Columns, in groups of 128, and the degrees at which ranks have whole groups."""


@pytest.mark.parametrize("method", [gptq(4, 128), awq(128)], ids=["gptq", "awq"])
def test_experts_are_cut_inside_a_group_where_vllm_can_halve_it_and_ranks_have_all_its_scales(
    method: Method, tmp_path: Path
) -> None:
    quantized = Quantized(method, "qwen3_moe", {"D": 128, "H": 256, "M": 384})
    source = write_quantized(quantized, tmp_path / "source")
    whole = reference_tensors(source)
    down = [name for name in whole if re.search(r"\.experts\.\d+\.down_proj\.", name)]
    assert {name.rpartition(".")[2] for name in down} >= {"qweight", "scales", "qzeros"}
    for tp in (2, 4):  # 192 and 96 columns: groups of 64 and 32.
        relayout.convert(source, tmp_path / f"tp{tp}", tp=tp)
        for rank in range(tp):
            held = whole_tensors(tmp_path / f"tp{tp}", f"model-rank-{rank}-*")
            for name in down:
                suffix = name.rpartition(".")[2]
                num_rows = len(whole[name]) // tp
                cut = whole[name][rank * num_rows : (rank + 1) * num_rows]
                assert torch.equal(held[name], cut if suffix in ("qweight", "g_idx") else whole[name]), name
    with pytest.raises(PlanError, match="the cut at 48 of 384 falls inside 128 values stored together"):
        relayout.convert(source, tmp_path / "tp8", tp=8)  # 48 columns: no group of 32 or more divides them.
    dense = write_quantized(Quantized(method, "qwen3_moe", {"D": 96, "H": 256, "M": 384}), tmp_path / "dense")
    with pytest.raises(PlanError, match=r"o_proj.*falls inside 128 values"):
        relayout.convert(dense, tmp_path / "dense-tp4", tp=4)


@pytest.mark.parametrize("columns", GROUPS)
def test_a_cut_inside_a_group_is_refused_even_where_the_number_of_groups_divides(columns: int) -> None:
    packed: dict[str, tuple[str, tuple[int, ...]]] = {
        "weight_packed": ("I32", (64, columns // 8)),
        "weight_scale": ("BF16", (64, -(-columns // 128))),
        "weight_shape": ("I64", (2,)),
    }
    of_groups = compressed("pack-quantized", weights_of(4, "int", "group", group_size=128))
    for source in (of_module(GPTQ, **gptq_tensors(columns)), of_module(of_groups, **packed)):
        assert {degree for degree in DEGREES if isinstance(try_plan(source, degree), Plan)} == GROUPS[columns]


@pytest.mark.parametrize(("columns", "fitting"), [(256, {2}), (192, set()), (320, set()), (1024, {2, 4, 8})])
def test_a_cut_inside_a_block_is_refused_where_the_last_block_is_partial(columns: int, fitting: set[int]) -> None:
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    shape = (1, -(-columns // 128))
    source = of_module(config, weight=("F8_E4M3", (64, columns)), weight_scale_inv=("F32", shape))
    assert {degree for degree in DEGREES if isinstance(try_plan(source, degree), Plan)} == fitting


MIXTURES: dict[str, tuple[dict[str, Any], dict[str, dict[str, tuple[str, tuple[int, ...]]]]]] = {
    "channels beside blocks": (
        {
            **compressed("float-quantized", {}),
            "config_groups": {
                "group_0": {"targets": ["re:.*self_attn.*"], "weights": weights_of(8, "float", "channel")},
                "group_1": {"targets": ["re:.*mlp.*"], "weights": {**BLOCKS, "block_structure": [128, 128]}},
            },
        },
        {
            "o_proj": {"weight": ("F8_E4M3", (256, 512)), "weight_scale": ("BF16", (256, 1))},
            "down_proj": {"weight": ("F8_E4M3", (256, 512)), "weight_scale": ("BF16", (2, 4))},
        },
    ),
    "modelopt": (
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"o": {"quant_algo": "FP8"}, "d": {"quant_algo": "NVFP4", "group_size": 16}},
        },
        {
            "o_proj": {"weight": ("F8_E4M3", (256, 512)), "weight_scale": ("F32", ()), "input_scale": ("F32", ())},
            "down_proj": {
                "weight": ("U8", (256, 256)),
                "weight_scale": ("F8_E4M3", (256, 32)),
                "weight_scale_2": ("F32", ()),
                "input_scale": ("F32", ()),
            },
        },
    ),
}
"""Config, and the tensors of two weights of 256 rows and 512 columns."""


@pytest.mark.parametrize("name", MIXTURES)
def test_weights_of_one_checkpoint_may_be_stored_in_several_ways(name: str) -> None:
    config, modules = MIXTURES[name]
    prefixes = {"o_proj": "model.layers.0.self_attn.o_proj.", "down_proj": "model.layers.0.mlp.down_proj."}
    stored = {f"{prefixes[module]}{key}": one for module, each in modules.items() for key, one in each.items()}
    source = make_source({key: shape for key, (_, shape) in stored.items()}, model_type="llama", hidden_size=512)
    typed = tuple(replace(tensor, dtype=stored[tensor.name][0]) for tensor in source.tensors)
    source = replace(source, tensors=typed, config={**source.config, "quantization_config": config})
    plan = plan_for(source, 4)
    held = {one.name: plan.cut(t).slices[1].ranges_along(1) for t, one in enumerate(source.tensors)}
    # Columns are cut, and what has as many, or fewer by groups or blocks: the second quarter of each.
    for key, (_, shape) in stored.items():
        columns = shape[1] if len(shape) == 2 else 1
        assert held[key] == (None if columns == 1 else ((columns // 4, columns // 4),)), key


def test_a_dynamic_rule_that_asks_for_act_order_is_refused_as_if_all_weights_had_it() -> None:
    """GPTQModel's exceptions from the rest of the configuration (vLLM gptq_utils.py raises too)."""
    plan_for(of_module({**GPTQ, "dynamic": {"-:.*o_proj": {}}}, **gptq_tensors(256)), 2)
    with pytest.raises(PlanError, match=r"desc_act.*--tp 1"):
        plan_for(of_module({**GPTQ, "dynamic": {"+:.*down_proj": {"desc_act": True}}}, **gptq_tensors(256)), 2)


# Expert parallel.


@pytest.mark.parametrize("name", grouped(EXPERT_QUANTIZED))
def test_with_expert_parallel_an_owner_has_all_tensors_of_its_experts_and_others_the_scales_of_their_inputs_only(
    name: str, conversions: Conversions
) -> None:
    """Engines take the greatest input scale of all experts (vLLM model_loader/ep_weight_filter.py)."""
    quantized, tp = QUANTIZED[name], 4
    assert fits(quantized, tp, owned=True)
    source, whole = read_source(conversions.source(name)), reference_tensors(conversions.source(name))
    plan = plan_for(source, tp, expert_parallel=True)
    held = [held_by(rank, plan, source, whole) for rank in range(tp)]
    owner = owners(quantized.all_sizes()["E"], tp)
    for entry in quantized.entries():
        if entry.expert is None:
            method = quantized.method_of(entry)
            if method and "layers.0." in entry.name:
                assert_same_numbers(entry, method, whole, held, quantized.all_sizes())
            continue
        stored = module_of(entry, whole)
        for rank, tensors in enumerate(held):
            own = module_of(entry, tensors)
            kept = stored if rank == owner[entry.expert] else stored.keys() & {"input_scale", "input_global_scale"}
            assert own.keys() == set(kept), entry.name
            for suffix, tensor in own.items():
                np.testing.assert_array_equal(as_integers(tensor), as_integers(stored[suffix]), err_msg=entry.name)


# Forms that cannot be cut.


@pytest.mark.parametrize("name", REFUSED_FORMS)
def test_a_form_that_cannot_be_cut_is_refused_by_name_with_the_reason_and_converted_for_one_rank(
    name: str, tmp_path: Path
) -> None:
    method = Method(REFUSED_FORMS[name], lambda _: np.zeros((0, 0)))
    source = write_quantized(Quantized(method, sizes={"D": 16, "I": 256, "H": 128}), tmp_path / "source")
    word = name.partition(" ")[0]
    with pytest.raises(PlanError, match=rf"quantized by .*{word}.* which no rule can divide: \w.*; .*--tp 1\b"):
        relayout.convert(source, tmp_path / "out", tp=2)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    relayout.convert(source, tmp_path / "out", tp=1)
    assert_ranks_give_back(tmp_path / "out", read_tensors(source), 1)
