"""What small checkpoints of some architectures need beside a configuration's defaults with small numbers.

Sources are vLLM's loaders and configuration classes, and what config.json has on the hub.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

H, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS, VOCABULARY, EXPERTS = 256, 8, 4, 32, 512, 4, 1024, 8
"""The small numbers."""


@dataclass(frozen=True, slots=True)
class Made:
    """How the checkpoint of an architecture is made."""

    values: Mapping[str, Any] = field(default_factory=dict)
    """Of the configuration, where sizes depend on each other in other ways, or defaults are of no model."""
    said: Mapping[str, Any] = field(default_factory=dict)
    """What config.json says on the hub, and transformers does not write. None: what it writes, and the hub does not."""
    names: tuple[tuple[str, str], ...] = ()
    """Patterns of the names that transformers writes, and the names on the hub, for `re.sub`; all are applied. What
    the hub does not have gets an empty name."""
    by: str = ""
    """The class of transformers that makes it, if that has another name."""
    code: bool = False
    """Whether the hub's checkpoint has Python that reads its config.json, which vLLM's class is made for."""
    flat: bool = False
    """Whether config.json has on the hub what it says of the text part beside its parts, not in one."""
    files: Mapping[str, Any] = field(default_factory=dict)
    """JSON files beside config.json that vLLM's class reads."""
    file: str = "model.safetensors"
    """Name of the file of weights on the hub."""
    folder: str = ""
    """Where vLLM looks for the weights, if not beside config.json."""
    transposed: str = ""
    """Pattern of the tensors, by their names on the hub, whose last two axes are the other way round there."""


_NOAUX = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}

ARCHITECTURES: dict[str, Made] = {
    "AfmoeForCausalLM": Made(
        said={"score_func": "sigmoid", "route_norm": True, "route_scale": 1.0, "n_group": 1, "topk_group": 1}
    ),
    "DeepseekV32ForCausalLM": Made(said=_NOAUX),
    "DeepseekV3ForCausalLM": Made(said=_NOAUX),
    "FalconForCausalLM": Made(values={"ffn_hidden_size": 4 * H}),
    "GlmMoeDsaForCausalLM": Made(said=_NOAUX),
    "HYV3ForCausalLM": Made(said={"first_k_dense_replace": 1}),
}
"""In the order of their names."""
