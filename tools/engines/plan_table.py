"""The built-in plans that are made from what was observed, and the model types that others were found to fit."""

from __future__ import annotations

from engines.plan_making import Wanted

TABLE: dict[str, Wanted] = {
    "afmoe": Wanted(
        "Arcee Trinity (AFMoE): gated attention, norms before and after each block, experts",
        ("AfmoeForCausalLM",),
        "glm4_moe",
    ),
    "apertus": Wanted(
        "Apertus: an MLP without gate and with a learned activation (xIELU)", ("ApertusForCausalLM",), "qwen3"
    ),
    "ernie4_5_moe": Wanted("ERNIE 4.5 with experts", ("Ernie4_5_MoeForCausalLM",), "glm4_moe"),
    "falcon_mamba": Wanted("Falcon Mamba", ("FalconMambaForCausalLM",)),
    "falcon_h1": Wanted("Falcon H1", ("FalconH1ForCausalLM",), "llama"),
}
