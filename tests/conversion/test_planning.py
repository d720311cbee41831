"""relayout.preview: what a planned conversion will do, in sums made by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import pytest
from support.planning import Shapes, conversion_of, make_source

from relayout.checkpoint.source import SourceCheckpoint
from relayout.conversion.planning import PlannedGroup, Preview, preview
from relayout.core.extents import Extent
from relayout.errors import PlanError
from relayout.plans.planner import plan_for


def stored(shapes: Shapes, config: Mapping[str, Any]) -> SourceCheckpoint:
    """A checkpoint of BF16 tensors with extents of their true lengths."""
    source = make_source(shapes, **config)
    sized = (replace(tensor, extent=Extent(0, 2 * prod(tensor.shape))) for tensor in source.tensors)
    return replace(source, tensors=tuple(sized), skipped=("pytorch_model.bin: weights",))


def previewed(
    shapes: Shapes, num_ranks: int, config: Mapping[str, Any], alignment: int = 512, **options: Any
) -> Preview:
    source = stored(shapes, config)
    plan = plan_for(source, num_ranks, **options)
    return preview(conversion_of(source, plan, alignment))


def cuts_of(found: Preview) -> dict[str, str]:
    return {group.pattern: group.cut for group in found.groups}


LLAMA = {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
BLOOM = {"model_type": "bloom", "n_head": 4, "n_embed": 8}
LAYER = "model.layers.{}."


def test_the_sums_of_a_small_llama() -> None:
    """Two layers of q 64 x 32 and k 16 x 32, a norm of 32, and a vocabulary of 100: 64 rows and 36."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (100, 32), "model.norm.weight": (32,)}
    for number in range(2):
        shapes[f"{LAYER.format(number)}self_attn.q_proj.weight"] = (64, 32)
        shapes[f"{LAYER.format(number)}self_attn.k_proj.weight"] = (16, 32)
    found = previewed(shapes, 2, LLAMA)
    ranks = [64 * 64 + 64 + 2 * (2048 + 512), 36 * 64 + 64 + 2 * (2048 + 512)]
    assert (found.source, found.output, found.plan) == ("checkpoint", "out", "builtin:llama")
    assert (found.num_ranks, found.alignment, found.num_tensors, found.num_files) == (2, 512, 6, 2)
    assert (found.expert_parallel, found.unmatched, found.left_out) == (False, (), ("pytorch_model.bin: weights",))
    assert found.source_nbytes == 100 * 64 + 64 + 2 * (4096 + 1024)
    assert found.rank_nbytes == tuple(ranks)
    assert found.rank_tensors == (6, 6)
    assert found.replicated_nbytes == 64  # The norm.
    assert found.balance == pytest.approx(sum(ranks) / (2 * ranks[0]))
    # No multiples of 512: the norms, and of the vocabulary the 36 rows of the second rank.
    assert found.tail_nbytes == 2 * 64 + (64 + 36) * 64
    # Files are headers, each padded to the alignment, and these bytes.
    assert found.written_nbytes > sum(ranks)
    assert (found.written_nbytes - sum(ranks)) % 512 == 0
    assert found.groups == (
        PlannedGroup("model.embed_tokens.weight", 1, "BF16", (100, 32), "dim 0", ((64, 32), (36, 32)), 4096),
        PlannedGroup("model.norm.weight", 1, "BF16", (32,), "whole", ((32,),), 64),
        PlannedGroup("model.layers.*.self_attn.q_proj.weight", 2, "BF16", (64, 32), "dim 0", ((32, 32),), 2 * 2048),
        PlannedGroup("model.layers.*.self_attn.k_proj.weight", 2, "BF16", (16, 32), "dim 0", ((8, 32),), 2 * 512),
    )


def test_names_that_differ_in_numbers_are_one_group_only_where_shape_and_dtype_are_equal() -> None:
    shapes = {f"{LAYER.format(number)}mlp.up_proj.weight": (8 * (1 + number // 2), 4) for number in range(3)}
    found = previewed(shapes, 2, LLAMA)
    pattern = "model.layers.*.mlp.up_proj.weight"
    assert [(group.pattern, group.count, group.shape, group.rank_nbytes) for group in found.groups] == [
        (pattern, 2, (8, 4), 2 * 32),
        (pattern, 1, (16, 4), 64),
    ]


@pytest.mark.parametrize(
    ("name", "shape", "config", "num_ranks", "cut"),
    [
        ("model.layers.0.mlp.up_proj.weight", (8, 4), LLAMA, 2, "dim 0"),
        ("model.layers.0.mlp.down_proj.weight", (4, 8), LLAMA, 2, "dim 1"),
        ("model.norm.weight", (8,), LLAMA, 2, "whole"),
        ("model.layers.0.self_attn.k_proj.weight", (16, 4), LLAMA, 2, "dim 0"),
        ("model.layers.0.self_attn.k_proj.weight", (16, 4), LLAMA, 8, "dim 0, each part in 4 ranks"),
        ("model.layers.0.mlp.experts.down_proj", (2, 4, 8), {"model_type": "mixtral"}, 2, "dim 2"),
        ("model.layers.0.mlp.experts.gate_up_proj", (2, 8, 4), {"model_type": "mixtral"}, 2, "dim 1, 2 ranges"),
        ("h.0.attn.c_attn.weight", (4, 48), {"model_type": "gpt2", "n_head": 4, "n_embd": 16}, 2, "dim 1, 3 ranges"),
        # Of BLOOM's 4 heads, q k v each, a rank has 2: none of its 6 ranges touch.
        ("h.0.self_attention.query_key_value.bias", (24,), BLOOM, 2, "dim 0, 6 ranges"),
        # Ranks that hold nothing share nothing.
        ("lm_head.weight", (10, 4), LLAMA, 4, "dim 0"),
        ("model.layers.0.mlp.up_proj.weight", (0, 4), LLAMA, 4, "whole"),
    ],
)
def test_cuts_are_told_in_words(
    name: str, shape: tuple[int, ...], config: dict[str, Any], num_ranks: int, cut: str
) -> None:
    assert cuts_of(previewed({name: shape}, num_ranks, config)) == {name.replace(".0.", ".*."): cut}


EXPERT = "model.layers.{}.block_sparse_moe.experts.{}.w1.weight"


def test_experts_are_owned() -> None:
    """Three experts of 8 x 4 in each of two layers: the first rank owns two of each, the second one."""
    shapes: dict[str, tuple[int, ...]] = {EXPERT.format(layer, n): (8, 4) for layer in range(2) for n in range(3)}
    shapes["model.norm.weight"] = (4,)
    found = previewed(shapes, 2, {"model_type": "mixtral", "num_local_experts": 3}, expert_parallel=True)
    assert found.expert_parallel
    assert found.rank_tensors == (5, 3)
    assert found.rank_nbytes == (4 * 64 + 8, 2 * 64 + 8)
    assert found.balance == pytest.approx((264 + 136) / (2 * 264))
    assert found.replicated_nbytes == 8
    owned, norm = found.groups
    assert owned == PlannedGroup(
        EXPERT.format("*", "*"), 6, "BF16", (8, 4), "whole, in one rank", ((8, 4),), 4 * 64
    )  # fmt: skip
    assert norm.cut == "whole"


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_experts_in_one_tensor_are_owned_by_rows(num_ranks: int) -> None:
    """Of 4 experts no two ranks hold the same, even if some of 8 hold none."""
    shapes = {"model.layers.0.mlp.experts.down_proj": (4, 2, 2)}
    found = previewed(shapes, num_ranks, {"model_type": "mixtral", "num_local_experts": 4}, expert_parallel=True)
    assert cuts_of(found) == {"model.layers.*.mlp.experts.down_proj": "dim 0"}
    assert found.replicated_nbytes == 0


def test_tensors_that_no_rule_names_are_listed() -> None:
    found = previewed({"strange": (3,), "model.norm.weight": (4,)}, 2, LLAMA, unmatched="replicate")
    assert found.unmatched == ("strange",)
    assert cuts_of(found) == {"strange": "whole", "model.norm.weight": "whole"}
    assert found.replicated_nbytes == 6 + 8


def test_one_rank_holds_everything_in_balance() -> None:
    found = previewed({"strange": (300,), "other": (256,)}, 1, {})
    assert (found.plan, found.balance, found.rank_nbytes, found.replicated_nbytes) == ("none", 1.0, (1112,), 0)
    assert found.tail_nbytes == 600


def test_a_checkpoint_of_no_bytes_is_previewed() -> None:
    found = previewed({"model.norm.weight": (0,)}, 2, LLAMA)
    assert (found.rank_nbytes, found.source_nbytes, found.balance) == ((0, 0), 0, 0.0)


def test_only_what_was_planned_is_previewed() -> None:
    with pytest.raises(PlanError, match=r"^conversion: 'model', expected what plan_conversion returns$"):
        preview("model")  # type: ignore[arg-type]
