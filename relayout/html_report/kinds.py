"""Kinds of tensors, by the names that model families use. Pure; only for colors and sums."""

from __future__ import annotations

import re
from functools import lru_cache

KINDS = (
    "embedding, head",
    "attention in (q, k, v)",
    "attention out",
    "MLP in (gate, up)",
    "MLP out (down)",
    "experts in",
    "experts out",
    "scales, zeros",
    "norms, biases, other",
)

_SCALES = re.compile(r"scale|zero|qzeros|g_idx|(^|\.)scales$|weight_shape|_scale_inv")
_EMBEDDING = re.compile(r"embed|(^|\.)wte|(^|\.)wpe|lm_head|shared_head\.head")
_EXPERT = re.compile(r"(^|\.)(experts|shared_experts?)(\.|_|$)")
_OUT = re.compile(r"(o_proj|out_proj|down_proj|c_proj|fc2|(^|\.)w2|(^|\.)wo|dense_4h_to_h|\.dense)(\.|_|$)")
_ATTENTION = re.compile(r"attn|attention|self_attn|mixer")
_MLP = re.compile(
    r"mlp|feed_forward|ffn|fc1|fc2|gate_proj|up_proj|down_proj|(^|\.)w[123]\.|dense_h_to_4h|dense_4h_to_h"
)


@lru_cache(maxsize=4096)
def kind_of(pattern: str, num_axes: int) -> int:
    """The kind of tensors of this name, whose numbers may be collapsed: position in `KINDS`."""
    last = pattern.rpartition(".")[2]
    if _SCALES.search(last):
        return 7
    if _EXPERT.search(pattern) and num_axes > 1 and last != "bias":
        return 6 if _OUT.search(pattern) else 5
    if num_axes < 2 or "norm" in pattern or "router" in pattern or pattern.endswith(".gate.weight"):
        return 8
    if _EMBEDDING.search(pattern):
        return 0
    if _MLP.search(pattern):
        return 4 if _OUT.search(pattern) else 3
    if _ATTENTION.search(pattern):
        return 2 if _OUT.search(pattern) else 1
    return 8
