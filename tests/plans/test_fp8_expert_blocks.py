"""Experts stored in FP8 with a scale for each block of 128 x 128, at degrees that end a rank's share inside a block."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.planning import make_source, slices_of
from support.rebuilding import indices

from relayout.core.slices import Slice
from relayout.errors import PlanError
from relayout.plans.planner import plan_for

BLOCK, HIDDEN = 128, 256
QUANTIZATION = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
EXPERT = "model.layers.0.mlp.experts.3"


def planned(shapes: dict[str, tuple[int, ...]], num_ranks: int, **config: Any) -> dict[str, tuple[Slice, ...]]:
    source = make_source(
        shapes, stored_as="F8_E4M3", model_type="qwen3_moe", num_experts=8, quantization_config=QUANTIZATION, **config
    )
    return slices_of(plan_for(source, num_ranks), shapes)


def experts(size: int) -> dict[str, tuple[int, ...]]:
    """The tensors of an expert of that intermediate size."""
    up, down = (size, HIDDEN), (HIDDEN, size)
    weights = {f"{EXPERT}.gate_proj": up, f"{EXPERT}.up_proj": up, f"{EXPERT}.down_proj": down}
    return {
        f"{name}.{suffix}": shape if suffix == "weight" else (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
        for name, shape in weights.items()
        for suffix in ("weight", "weight_scale_inv")
    }


@pytest.mark.parametrize(
    ("size", "num_ranks"),
    [
        (768, 4),  # Qwen3-30B-A3B-FP8: 192 rows for each rank.
        (1536, 8),  # Qwen3-235B-A22B-FP8.
        (384, 2),
    ],
)
def test_weights_are_cut_evenly_and_scales_are_held_whole(size: int, num_ranks: int) -> None:
    shapes = experts(size)
    found = planned(shapes, num_ranks)
    rng = np.random.default_rng(0)
    for name, dim in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
        weight, scale = f"{EXPERT}.{name}.weight", f"{EXPERT}.{name}.weight_scale_inv"
        stored, scales = rng.integers(0, 256, shapes[weight]), rng.random(shapes[scale])
        meant = stored * np.kron(scales, np.ones((BLOCK, BLOCK)))
        for rank in range(num_ranks):
            assert found[scale][rank].is_whole
            part = found[weight][rank]
            held = stored.take(indices(part), axis=dim)
            assert held.shape[dim] == size // num_ranks
            # The rank finds the scale of an element by where the element is in the whole weight.
            start = rank * size // num_ranks
            spread = np.kron(scales, np.ones((BLOCK, BLOCK))).take(range(start, start + held.shape[dim]), axis=dim)
            np.testing.assert_array_equal(held * spread, np.split(meant, num_ranks, axis=dim)[rank])


def test_where_blocks_divide_scales_are_cut_with_the_weight() -> None:
    found = planned(experts(768), 2)
    assert found[f"{EXPERT}.up_proj.weight_scale_inv"] == (Slice.along(0, ((0, 3),)), Slice.along(0, ((3, 3),)))
    assert found[f"{EXPERT}.down_proj.weight_scale_inv"] == (Slice.along(1, ((0, 3),)), Slice.along(1, ((3, 3),)))


def test_dense_layers_with_a_border_inside_a_block_are_refused() -> None:
    shapes = {name.replace(".experts.3", ""): shape for name, shape in experts(768).items()}
    with pytest.raises(PlanError, match=r"mlp.*: the cut at 192 of 768 falls inside 128 values") as caught:
        planned(shapes, 4)
    assert caught.value.code == "indivisible"
