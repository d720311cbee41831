"""What a rank holds, against transformers' own tensor parallelism in real processes (gloo, CPU).

Logits of models made of slices: tests/train/train/test_transformers.py, tests/repository/test_examples.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file
from support import prestarted
from support.conversions import held_by, reference_tensors
from support.local_stores import read_source
from support.models import Array, as_integers, save_pretrained
from support.transformers_worker import as_in_memory

from relayout.plans.planner import plan_for

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="gloo processes are forked; transformers refuses MPS"),
    pytest.mark.xdist_group("transformers"),  # Its processes are started once.
]

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 1024,  # A multiple of 64 for each rank: padded as the engines do, or not, it is cut at the same rows.
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "attention_bias": True,
    "mlp_bias": True,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_group": 1, "topk_group": 1}
LATENT = {
    "num_key_value_heads": 8,
    "head_dim": 8,  # In the configuration of latent attention, that of the rotary part.
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "attention_bias": False,
    "mlp_bias": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "cohere": {"use_qk_norm": True},
    "starcoder2": {},
    "phi3": {"head_dim": 16},
    "glm4": {},
    "gpt_neox": {"head_dim": 16},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 96},
    "deepseek_v2": ROUTED | LATENT | {"first_k_dense_replace": 1},
    "deepseek_v3": ROUTED | LATENT | {"first_k_dense_replace": 1},
    "llama4_text": {"num_local_experts": 4, "intermediate_size_mlp": 256, "interleave_moe_layer_step": 2},
    "qwen3_next": EXPERTS
    | {
        "shared_expert_intermediate_size": 96,
        "full_attention_interval": 2,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
    },
    "seed_oss": {"attention_out_bias": True},
    "arcee": {"attention_bias": True, "mlp_bias": True},
    "dots1": ROUTED | {"n_shared_experts": 1, "first_k_dense_replace": 1},
}
"""One of each structure. What ranks hold of all families by vLLM, test_observed_families.py compares."""


def whole_in_transformers(mine: Array, theirs: Array, source: Array, rank: int, tp: int) -> None:
    """relayout cuts what transformers gives to every rank."""
    np.testing.assert_array_equal(theirs, source)
    assert mine.size * tp == source.size


def one_block_in_transformers(mine: Array, theirs: Array, source: Array, rank: int, tp: int) -> None:
    """relayout cuts each part of a fused tensor; transformers cuts across them, and gathers them in each forward."""
    np.testing.assert_array_equal(theirs, np.split(source, tp)[rank])
    assert mine.shape == theirs.shape
    assert not np.array_equal(mine, theirs)


def rows_in_transformers(mine: Array, theirs: Array, source: Array, rank: int, tp: int) -> None:
    """relayout cuts by columns what transformers cuts by rows."""
    np.testing.assert_array_equal(theirs, np.split(source, tp)[rank])
    np.testing.assert_array_equal(mine, np.split(source, tp, axis=1)[rank])


_NAMES_EMBED_IN = Version(version("transformers")) >= Version("5.24")

Differences = dict[str, Callable[[Array, Array, Array, int, int], None]]
"""Patterns of names in memory, and what is so of the tensors that match."""

# Where transformers goes another way than the engines, whose rules relayout has.
DIFFERENCES: dict[str, Differences] = {
    # A norm of [heads, head_dim] over each head, with weights of its own.
    "cohere": {"*.self_attn.[qk]_norm.weight": whole_in_transformers},
    "phi3": {
        "*.self_attn.qkv_proj.weight": one_block_in_transformers,
        "*.mlp.gate_up_proj.weight": one_block_in_transformers,
    },
    "glm4": {"*.mlp.gate_up_proj.weight": one_block_in_transformers},
    # transformers adds embeddings to a plan by their name, embed_tokens; since 5.24 this plan names them.
    "gpt_neox": {} if _NAMES_EMBED_IN else {"gpt_neox.embed_in.weight": whole_in_transformers},
    # The plan names mlp.gate_proj, but not mlp.shared_expert.gate_proj.
    "qwen2_moe": {"*.mlp.shared_expert.*_proj.weight": whole_in_transformers},
    "qwen3_next": {
        # Around the recurrence, which each rank does for all heads, both projections are cut by their output.
        "*.linear_attn.out_proj.weight": rows_in_transformers,
        "*.linear_attn.conv1d.weight": whole_in_transformers,
        "*.linear_attn.A_log": whole_in_transformers,
        "*.linear_attn.dt_bias": whole_in_transformers,
    },
    # This plan has no attention.
    "deepseek_v3": {
        "*.self_attn.q_b_proj.weight": whole_in_transformers,
        "*.self_attn.kv_b_proj.weight": whole_in_transformers,
        "*.self_attn.o_proj.weight": whole_in_transformers,
    },
}
DEGREES = {family: 4 if family in ("llama", *DIFFERENCES) else 2 for family in FAMILIES}
"""At 4 ranks, where there is more to see than at 2."""
WITHOUT_OURS = {"dots1"}
"""Types for which there is no built-in plan."""
# The same by `--plan transformers`, which is to have none.
DIFFERENCES_BY_THEIR_PLAN: dict[str, Differences] = {
    "gpt_neox": DIFFERENCES["gpt_neox"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of all families, and what transformers' processes held of them (see the worker)."""
    from transformers import CONFIG_MAPPING

    folder = tmp_path_factory.mktemp("transformers_tp")
    for family in FAMILIES:
        save_pretrained(folder / "source" / family, CONFIG_MAPPING[family](**SIZES | FAMILIES[family]))
    done = prestarted.run(
        folder,
        *(f"{tp}/{family}" for family, tp in DEGREES.items()),
        script="from support import transformers_worker; transformers_worker.write_shards()",
        imports=prestarted.TRANSFORMERS,
        env=prestarted.ONE_THREAD,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize(
    ("family", "plan"),
    [
        (family, plan)
        for family in FAMILIES
        for plan in (None, "transformers")
        if plan is not None or family not in WITHOUT_OURS
    ],
)
def test_each_rank_holds_the_shards_of_transformers(folder: Path, family: str, plan: str | None) -> None:
    """Every tensor of every rank equals transformers' shard, but for the differences, which are all there."""
    tp = DEGREES[family]
    differences = (DIFFERENCES if plan is None else DIFFERENCES_BY_THEIR_PLAN).get(family, {})
    source = read_source(folder / "source" / family)
    stored = reference_tensors(folder / "source" / family)
    whole, planned = as_in_memory(stored), plan_for(source, tp, plan)
    differing, num_cut = set(), 0
    for rank in range(tp):
        held = as_in_memory(held_by(rank, planned, source, stored))
        shards = load_file(folder / "shards" / f"tp{tp}" / family / f"rank-{rank}.safetensors")
        assert held.keys() == shards.keys()
        for name, shard in shards.items():
            mine, theirs, all_of_it = bits(held[name], shard.dtype), as_integers(shard), bits(whole[name], shard.dtype)
            if pattern := next((pattern for pattern in differences if fnmatchcase(name, pattern)), None):
                differences[pattern](mine, theirs, all_of_it, rank, tp)
                differing.add(pattern)
            else:
                np.testing.assert_array_equal(mine, theirs, err_msg=f"{name}, rank {rank}")
                num_cut += theirs.shape != all_of_it.shape
    assert differing == differences.keys()
    assert num_cut > 0


def bits(tensor: torch.Tensor, dtype: torch.dtype) -> Array:
    """Its bits in the dtype in which transformers keeps it, which may be a wider one than the checkpoint's."""
    assert torch.promote_types(tensor.dtype, dtype) == dtype
    return as_integers(tensor.to(dtype))
