"""The checkpoints that are loaded: all model families and quantized forms of the tests, and their conversions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from support.checkpoints import write_family
from support.families import EXPERT_FAMILIES, FAMILIES
from support.quantized import EXPERT_QUANTIZED, QUANTIZED, Quantized, awq, gptq, write_quantized

import relayout
from engines.hub_counts import DEGREES as HUB_DEGREES
from engines.hub_counts import HUB
from engines.observing import small_models

DEGREES = (2, 4)

DRAFTS = ("deepseek_v3", "glm4_moe", "qwen3_next")
"""Families whose checkpoints have a draft model (MTP)."""

_WIDE: dict[str, dict[str, int]] = {
    family: {"KL": 512, "R": 64, "N": 128, "D": 128} for family in ("deepseek_v2", "deepseek_v2_lite", "deepseek_v3")
}
"""The sizes of attention that vLLM has kernels for on a CPU; elsewhere heads of 32 elements, the fewest that it has."""

WHOLE_IN_SGLANG = ("gemma3", "gemma3_text", "gemma4", "Gemma-3-1B", "Gemma-3-27B", "Qwen2.5-VL-3B")
"""Those of which SGLang's ranks need more than vLLM's, so that whole tensors are read: the embedding of Gemma 3 and 4
(Gemma3TextScaledWordEmbedding is an nn.Embedding); the vision part's MLPs of 3420, which it pads to a multiple of 8
before it cuts them (`qwen2_5_vl.py`, SGLang 0.5.23)."""

NOT_IN_SGLANG = ("dots3_note", "gemma4_text", "gemma4_unified", "inkling", "mistral4", "qwen4_exp")
"""Families whose small checkpoints SGLang's classes do not read.

Those of Gemma 4 ask for more of config.json. Those of Dots 3 Note, Inkling and Qwen4-Exp load the multimodal model
only. SGLang has no class of Mistral 4: its own load by the classes of transformers skips experts that are stacked, with
a warning (`srt/models/transformers.py`, TransformersFusedMoE), and leaves them as they were allocated, which relayout
makes an error.
"""

WHOLE_IN_TOKENSPEED = ("kimi_k25", "int4_kimi_k25", "nvfp4_kimi_k25")
"""Those of which TokenSpeed's ranks need more than vLLM's: the MLPs of Kimi K2.5's vision part, whole on each rank
(`models/moonvit.py`, TokenSpeed 0.1.1)."""

IN_TOKENSPEED = (
    *("llama", "qwen2", "qwen2_tied", "qwen3", "qwen3_moe", "deepseek_v3", "kimi_k2"),
    *("fp8_blocks", "fp8_blocks_moe", "fp8_blocks_deepseek", *WHOLE_IN_TOKENSPEED),
)
"""Families and forms that TokenSpeed's classes are compared with. It has more; others want more of a GPU, or refuse the
small checkpoint, such as one with scales of the KV cache."""

SPLIT = "fp8_blocks_moe_split"
"""Experts with 192 or 96 rows for each rank, in blocks of 128 that share a scale."""

SPLIT_AWQ = "awq_moe_split"
"""Experts cut inside a group, of which vLLM rearranges whole tensors."""

RERANKER, BGE_M3 = "qwen3_reranker", "bge_m3"
"""Of vLLM: a score that is made of rows of `lm_head`; layers that are in files of their own."""

_SPLIT_GROUPS = {"D": 128, "M": 384, "H": 256}
"""Experts of 192 or 96 columns for each rank, in groups of 128 that share a scale."""
_SIZES = {"gpt_oss": {"K": 4}, "gpt_oss_mxfp4": {"K": 4}, "cohere": {"K": 4}}
"""Where vLLM has no KV heads that ranks share: as many as there are ranks."""

_LATENT = {"KL": 64, "QL": 64, "N": 32, "R": 16, "B": 32, "M": 256, "S": 256}

_CONFIG: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"moe_layer_freq": 1, "scoring_func": "softmax"},
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
    "gemma2": {"hidden_act": "gelu_pytorch_tanh"},
    "kimi_k2": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
    "qwen3_next": {"full_attention_interval": 4},
    "llama4_text": {"interleave_moe_layer_step": 2},
    "bailing_hybrid": {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "layer_group_size": 2,
        "no_kda_lora": True,
        "use_bias": False,
    },
    "minimax_m3_vl_text": {"hidden_act": "swigluoai", "n_shared_experts": 1},
    "minimax_m3_vl_vision": {"position_embedding_type": "rope", "rope_mode": "3d", "vision_segment_max_frames": 4},
}
"""By model type: what config.json of the hub's models says and relayout does not ask for."""

_WITH_CODE = ("bailing_hybrid", "bailing_moe_v2", "step3p5")
"""Model types whose configuration the hub has as Python, where engines would take that of transformers or none."""

_KIMI_TOWER = {"VH": 256, "VA": 16, "VI": 512}
_KIMI = {**_LATENT, **_KIMI_TOWER}
ON_DEVICES: Mapping[str, Mapping[str, int]] = {
    "bailing_hybrid": {},
    "bailing_moe": {},
    "deepseek_v4": {"H": 256, "M": 256, "S": 256, "QL": 128},
    "deepseek_v41": {"M": 256, "S": 256, "QL": 128, "VH": 128, "VA": 8, "VI": 256},
    "dots3_note": {},
    "glm5_next": {},
    "inkling": {},
    "kimi_k25": _KIMI,
    "kimi_k25_old": _KIMI,
    "kimi_k3": {**_LATENT, "RH": 128, "VH": 192, "VI": 768, "VQ": 384},
    "kimi_linear": _LATENT,
    "longcat_flash": {},
    "mimo_v2": {},
    "minimax_m3": {},
    "mistral4": {},
    "qwen4_exp": {},
    "step3p5": {},
}
"""Families whose classes want a GPU, and sizes with which 16 ranks can be built. They are built with the stubs of
the observation."""

_FP8_LATENT = {"H": 256, "A": 32, "QL": 256, "I": 2048, "M": 2048, "S": 2048}
"""As DeepSeek V3 has them: of each matrix, 16 ranks hold whole blocks, and two matrices that become one do, too."""
_FP8_V4 = {"A": 16, "G": 16, "M": 1024, "S": 1024}
"""The same, but for shared experts: they have 8 blocks, and vLLM fills up with zeros for 16 ranks."""
FORMS_ON_DEVICES: Mapping[str, Mapping[str, int]] = {
    "fp8_blocks_deepseek": _FP8_LATENT,
    "fp8_blocks_kimi": _FP8_LATENT,
    "fp8_blocks_longcat": _FP8_LATENT,
    "fp8_blocks_mimo": {"A": 64, "K": 4, "I": 2048, "M": 2048, "H": 256},
    "fp8_deepseek_v4": _FP8_V4,
    "fp8_fp4_deepseek_v4": _FP8_V4,
    # SGLang has kernels for four streams of 4096 elements.
    "fp8_fp4_deepseek_v41": {**_FP8_V4, "H": 4096, "M": 512, "S": 512},
    "fp8_nvfp4_deepseek_v4": _FP8_V4,
    "int4_kimi_k25": _KIMI_TOWER,
    "mxfp4_kimi_k3": {"G": 16},
    "nvfp4_kimi_k25": _KIMI_TOWER,
    "nvfp4_kimi_k25_old": _KIMI_TOWER,
}
"""Quantized forms of such families, and FP8 of others whose kernels are for GPUs alone."""

DEGREES_ON_DEVICES = (2, 4, 8, 16)

FORMS = {
    **QUANTIZED,
    **{
        name: replace(QUANTIZED[name], sizes={**QUANTIZED[name].sizes, "E": max(DEGREES_ON_DEVICES), **sizes})
        for name, sizes in FORMS_ON_DEVICES.items()
    },
    SPLIT: replace(QUANTIZED["fp8_blocks_moe"], sizes={"M": 384}),
    "gptq_4bit_moe_split": Quantized(gptq(4, 128), "qwen3_moe", _SPLIT_GROUPS),
    SPLIT_AWQ: Quantized(awq(128), "qwen3_moe", _SPLIT_GROUPS),
}


@dataclass(frozen=True)
class Case:
    """A checkpoint, and how it is loaded."""

    family: str
    """Or quantized form, or model of the hub."""
    expert: bool = False
    """Experts are owned whole."""
    draft: bool = False
    """The draft model in it."""
    moe_backend: str = "auto"
    """vLLM's kernel for experts."""
    strict: bool = True
    """The engine cuts every tensor as the folder does."""
    stages: int = 1
    """Of the pipeline."""

    @property
    def degrees(self) -> tuple[int, ...]:
        if self.family in HUB:
            return HUB_DEGREES
        if self.is_on_device:
            return DEGREES_ON_DEVICES
        return (1,) if self.family == BGE_M3 else DEGREES

    @property
    def settings(self) -> dict[str, Any]:
        """More of vLLM's."""
        return {"runner": "pooling"} if self.family in (RERANKER, BGE_M3) else {}

    @property
    def name(self) -> str:
        parts = [self.family] + ["experts owned"] * self.expert + ["draft model"] * self.draft
        parts += [f"{self.stages} stages"] * (self.stages > 1)
        return " ".join(parts + ["for " + self.moe_backend] * (self.moe_backend != "auto"))

    @property
    def is_on_device(self) -> bool:
        return self.family in (*ON_DEVICES, *FORMS_ON_DEVICES)

    @property
    def is_quantized(self) -> bool:
        return self.family in FORMS or "mxfp4" in self.family or (self.family in HUB and HUB[self.family].is_quantized)


@dataclass(frozen=True)
class Run:
    """A whole engine, of the ranks that there are on a machine of two cores."""

    family: str
    tp: int = 2
    expert: bool = False
    """Experts are owned whole."""
    stages: int = 1
    """Of the pipeline."""

    @property
    def name(self) -> str:
        parts = [self.family, f"tp {self.tp}"]
        parts += ["experts owned"] * self.expert + [f"{self.stages} stages"] * (self.stages > 1)
        return ", ".join(parts)

    @property
    def settings(self) -> dict[str, Any]:
        """Of `vllm.LLM`."""
        return {
            "tensor_parallel_size": self.tp,
            "pipeline_parallel_size": self.stages,
            "enable_expert_parallel": self.expert,
        }


RUNS = (
    *map(Run, ("qwen2_tied", "gemma2", "phi3", "gpt_oss", "falcon_40b", "deepseek_v2", "qwen3_moe", "llama")),
    Run("qwen3_moe", expert=True),
    Run("llama", tp=1, stages=2),
    *(Run(family, tp=1) for family in ("llama", "qwen2_tied", "deepseek_v2")),
)
"""What tokens are generated with."""


def all_cases() -> Iterator[Case]:
    for family in (*FAMILIES, *FORMS):
        # The engines cut the newest vision towers and embeddings each in its own way.
        strict = family not in (SPLIT_AWQ, *ON_DEVICES, *FORMS_ON_DEVICES)
        yield Case(family, strict=strict)
        if family in (*EXPERT_FAMILIES, *EXPERT_QUANTIZED):
            yield Case(family, expert=True, strict=strict)
        if family in DRAFTS:
            yield Case(family, draft=True)
    yield from (Case(RERANKER), Case(BGE_M3))
    yield from (Case(family, stages=2) for family in ("llama", "qwen3_moe", "mistral3"))
    # This kernel wants whole blocks, so that vLLM gives the first ranks more of an expert than the last.
    yield Case(SPLIT, moe_backend="cutlass", strict=False)


def hub_cases() -> Iterator[Case]:
    """Models of the hub; with experts owned, too, where not every rank owns as many."""
    for name, model in HUB.items():
        yield Case(name)
        if model.experts % max(HUB_DEGREES):
            yield Case(name, expert=True)


def source_of(family: str, work: Path, *, wide: bool = False) -> Path:
    """The checkpoint; a wide one has heads that vLLM can run on a CPU."""
    folder = work / (f"{family}-wide" if wide else family)
    if not (folder / "complete").exists():
        folder.mkdir(parents=True, exist_ok=True)
        if family == RERANKER:
            write_family(FAMILIES["qwen3"], folder)
            _write_reranker(folder)
        elif family == BGE_M3:
            _write_bge_m3(folder)
        elif family in HUB:
            HUB[family].write(folder)
        elif family in ON_DEVICES:
            write_wide(family, folder)
        elif family in FAMILIES:
            made, sizes = (
                FAMILIES[family],
                _SIZES.get(family, {}) | ({"H": 256, **_WIDE.get(family, {"D": 32})} if wide else {}),
            )
            write_family(replace(made, sizes={**made.sizes, **sizes}), folder)
        else:
            write_quantized(FORMS[family], folder)
        if family not in HUB or HUB[family].family:
            complete_config(folder / "config.json")
        (folder / "complete").touch()
    return folder


def write_wide(name: str, folder: Path) -> None:
    """A checkpoint of families.py with 16 heads, and 4 KV heads where it has any."""
    family = FAMILIES[name]
    kv_heads = {8: 16, 1: 1}.get(family.sizes.get("K", 2), 4)
    sizes = {"A": 16, "K": kv_heads, "H": 512, "D": 32, "E": 16, "G": 16, "W": 32}
    write_family(replace(family, sizes={**family.sizes, **sizes, **ON_DEVICES.get(name, {})}), folder)


def _write_reranker(folder: Path) -> None:
    """Beside the weights: which words the score is of, and a tokenizer that knows their numbers."""
    score = {"architectures": ["Qwen3ForSequenceClassification"], "is_original_qwen3_reranker": True}
    config = json.loads((folder / "config.json").read_text()) | score | {"classifier_from_token": ["no", "yes"]}
    (folder / "config.json").write_text(json.dumps(config))
    _write_tokenizer(folder)


def _write_bge_m3(folder: Path) -> None:
    import torch
    from transformers import XLMRobertaConfig, XLMRobertaModel

    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 66}
    config = XLMRobertaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4, type_vocab_size=1)
    model = XLMRobertaModel(config, add_pooling_layer=False)
    model.save_pretrained(folder)
    hub = {"architectures": ["BgeM3EmbeddingModel"], "position_embedding_type": "absolute"}
    complete = json.loads((folder / "config.json").read_text()) | hub
    (folder / "config.json").write_text(json.dumps(complete))
    for name, rows in (("sparse_linear", 1), ("colbert_linear", 128)):
        torch.save({"weight": torch.randn(rows, 128), "bias": torch.randn(rows)}, folder / f"{name}.pt")
    _write_tokenizer(folder)


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    Tokenizer(WordLevel({"<unk>": 0, "no": 5, "yes": 200}, unk_token="<unk>")).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def complete_config(file: Path) -> None:
    """Let config.json say what engines want to know."""
    config = json.loads(file.read_text())
    config = {"architectures": [_architecture(config)], **config}
    for part in (config, config.get("text_config", {}), config.get("vision_config", {})):
        part.update(_CONFIG.get(part.get("model_type", ""), {}))
        if part.get("model_type") == "longcat_flash":
            del part["num_hidden_layers"]  # The hub has num_layers, of which the engines make two numbers.
        if part.get("model_type") == "bailing_hybrid":
            part["head_dim"] = part["linear_head_dim"]  # Transformers has that of the rotary embedding there.
        if part.get("model_type") == "minimax_m3_vl_text":
            part["sparse_attention_config"] = _sparse_attention(part)
            part["moe_layer_freq"] = [int(kind == "sparse") for kind in part["mlp_layer_types"]]
    if config["model_type"] in _WITH_CODE:
        small_models.write_code(file.parent, config)
    file.write_text(json.dumps(config))


def _sparse_attention(config: dict[str, Any]) -> dict[str, Any]:
    """The object that MiniMax M3 has on the hub; transformers has its values as keys of their own."""
    is_sparse = [int(kind == "minimax_m3_sparse") for kind in config["layer_types"]]
    return {
        **{"use_sparse_attention": True, "sparse_attention_freq": is_sparse, "sparse_disable_index_value": is_sparse},
        **{"sparse_num_index_heads": config["index_n_heads"], "sparse_index_dim": config["index_head_dim"]},
        **{"sparse_topk_blocks": 16, "sparse_block_size": 128, "sparse_score_type": "max"},
        **{"sparse_init_block": 0, "sparse_local_block": 1},
    }


def converted_of(source: Path, tp: int, *, expert: bool = False) -> Path:
    """Its conversion.

    Raises:
        PlanError: it cannot be cut so.
    """
    folder = source.with_name(f"{source.name}-tp{tp}" + ("-expert" if expert else ""))
    relayout.convert(source, folder, tp=tp, expert_parallel=expert and tp > 1, force=True)  # By the program of today.
    return folder


def _architecture(config: dict[str, Any]) -> str:
    """The class that a checkpoint of the hub names."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known: dict[str, Any] = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "kimi_k2": "DeepseekV3ForCausalLM"}
    name = known.get(config["model_type"], "")
    return name if isinstance(name, str) else str(name[0])
