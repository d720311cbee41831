"""The model families: names, shapes and cuts of their tensors as the hub's checkpoints have them, sizes as variables.

One table for every checkpoint that is made here: small ones of the tests, and full-size ones from the published
config.json (`hub_models.py`). A family is a table: the name of each tensor, its shape in sizes, and how it is cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Sizes = dict[str, int]
Template = Mapping[str, Any]
Stored = tuple[str, str, tuple[int, ...]]
"""Name, dtype, shape."""

SMALL: Sizes = {
    "H": 128,  # hidden
    "A": 8,  # attention heads
    "K": 2,  # KV heads
    "D": 16,  # elements of a head
    "I": 256,  # of an MLP
    "V": 1000,  # vocabulary: no multiple of 64
    "P": 64,  # positions
    "L": 2,  # layers
    "F": 0,  # of which the first have no experts
    "E": 8,  # experts
    "M": 64,  # of an expert's MLP
    "S": 128,  # of a shared expert's MLP
}
"""The sizes of a test's checkpoint, where the family does not say others."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor as the table has it."""

    name: str
    shape: tuple[int, ...]
    cut: str
    """`kind`, or `kind@axis`: see `expected` in tests/support/engine_oracle.py."""
    expert: int | None
    """Which expert it is of, where each has tensors of its own."""

    @property
    def stacked(self) -> bool:
        """Whether its axis 0 counts the experts."""
        return ".experts." in self.name and self.expert is None

    @property
    def is_linear(self) -> bool:
        """Whether quantization tools store it in their own way: the linear layers but for the first and last."""
        return re.search(r"((?<!eh)_proj(_with_mqa)?|\.w[123])\.weight$", self.name) is not None


@dataclass(frozen=True)
class Family:
    """The checkpoints of one architecture."""

    table: str
    template: Template
    """config.json: values, and the sizes as strings like "{H}"."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Where those of a test's checkpoint differ from `SMALL`."""
    author: str = "transformers"
    """Of a test's checkpoint; or "hand"."""
    rename: Mapping[str, str] = field(default_factory=dict)
    """Patterns in transformers' names, and what the hub has. Tensors that the hub does not have get an empty name."""
    dtype: str = "BF16"
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """Patterns of tensors that are stored in another one."""
    num_shards: int = 1

    def all_sizes(self, **sizes: int) -> Sizes:
        """The sizes of a test's checkpoint, or with some of them others."""
        return {**SMALL, **self.sizes, **sizes}

    def config(self, sizes: Sizes) -> dict[str, Any]:
        """The parts of config.json that depend on the sizes, and what else tells the architecture."""
        return _filled(self.template, sizes)

    def sizes_of(self, config: Mapping[str, Any]) -> Sizes:
        """The sizes that a published config.json has."""
        named = {value[1:-1]: config[key] for key, value in self.template.items() if _is_size(value) and key in config}
        sizes = {"K": named["A"], "D": named["H"] // named["A"], "F": 0, **named}
        return {"S": config["n_shared_experts"] * sizes["M"], **sizes} if "n_shared_experts" in config else sizes

    def dtype_of(self, name: str) -> str:
        """What the tensor is stored in."""
        return next((dtype for pattern, dtype in self.dtypes.items() if re.search(pattern, name)), self.dtype)

    def entries(self, sizes: Sizes) -> list[Entry]:
        """Every tensor of the table."""
        return list(_entries(self.table, sizes))


@dataclass(frozen=True)
class Form:
    """How a quantization tool stores the weight of a linear layer of R rows and C columns."""

    config: Mapping[str, Any]
    """quantization_config."""
    table: str
    """For each tensor the last part of its name, dtype and shape."""
    borders: tuple[int, int] = (1, 1)
    """Rows and columns that lie together, so that a cut must not fall between them."""
    config_file: str = "config.json"
    """Where the configuration is: there, or beside it under a key of its own."""

    def stored(self, shape: tuple[int, ...]) -> list[Stored]:
        """The tensors of a weight, by the last part of their names."""
        rows, columns = shape
        lines = (line.split() for line in lines_of(self.table))
        return [(name, dtype, _shape(dims, {"R": rows, "C": columns})) for name, dtype, *dims in lines]


def _shape(dims: list[str], sizes: Sizes) -> tuple[int, ...]:
    return tuple(eval(dim, {"ceil": lambda size, unit: -(-size // unit)}, dict(sizes)) for dim in dims)


def _entries(table: str, sizes: Sizes) -> Iterator[Entry]:
    counts = {
        "all": range(sizes["L"]),
        "first": range(sizes["F"]),
        "rest": range(sizes["F"], sizes["L"]),
        "next": range(sizes["L"], sizes["L"] + 1),
        "expert": range(sizes.get("E", 0)),
    }
    for line in lines_of(table):
        pattern, *dims, cut = line.split()
        shape = _shape(dims, sizes)
        names = [(pattern, -1)]
        for placeholder, numbers in counts.items():
            if f"{{{placeholder}}}" in pattern:
                names = [(name.replace(f"{{{placeholder}}}", str(n)), n) for name, _ in names for n in numbers]
        for name, number in names:
            yield Entry(name, shape, cut, number if "{expert}" in pattern else None)


def lines_of(table: str) -> list[str]:
    """The table's lines."""
    return [line.strip() for line in table.splitlines() if line.strip()]


def _is_size(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"\{[A-Z]+\}", value) is not None


def _filled(value: Any, sizes: Sizes) -> Any:
    if isinstance(value, Mapping):
        return {key: _filled(item, sizes) for key, item in value.items()}
    if isinstance(value, str) and value.startswith("{"):
        return eval(value.strip("{}"), {}, dict(sizes))
    return value


def layers(table: str, prefix: str = "model.layers.{all}.") -> str:
    """The table of what is in each layer, with the layers' prefix."""
    return "".join(f"{prefix}{line}\n" for line in lines_of(table))


# What families are made of.

EMBEDDING = "model.embed_tokens.weight V H vocabulary\n"
HEAD = "lm_head.weight V H vocabulary\n"
TOP = EMBEDDING + HEAD + "model.norm.weight H whole\n"
TIED = EMBEDDING + "model.norm.weight H whole\n"
QKV = """
self_attn.q_proj.weight A*D H heads
self_attn.k_proj.weight K*D H kv
self_attn.v_proj.weight K*D H kv
"""
O_PROJ = "self_attn.o_proj.weight H A*D heads@1\n"
QKV_BIAS = """
self_attn.q_proj.bias A*D heads
self_attn.k_proj.bias K*D kv
self_attn.v_proj.bias K*D kv
"""
QK_NORM = """
self_attn.q_norm.weight D whole
self_attn.k_norm.weight D whole
"""
FULL_QK_NORM = """
self_attn.q_norm.weight A*D whole
self_attn.k_norm.weight K*D whole
"""
NORMS = """
input_layernorm.weight H whole
post_attention_layernorm.weight H whole
"""
GEMMA_NORMS = NORMS + "pre_feedforward_layernorm.weight H whole\npost_feedforward_layernorm.weight H whole\n"
OLMO_NORMS = "post_attention_layernorm.weight H whole\npost_feedforward_layernorm.weight H whole\n"


def mlp(prefix: str = "mlp.", size: str = "I", names: str = "gate_proj up_proj down_proj") -> str:
    """A gated MLP."""
    gate, up, down = names.split()
    rows = "".join(f"{prefix}{name}.weight {size} H even\n" for name in (gate, up))
    return f"{rows}{prefix}{down}.weight H {size} even@1\n"


EXPERTS = mlp("mlp.experts.{expert}.", "M")
ROUTER = "mlp.gate.weight E H whole\n"
LLAMA = TOP + layers(QKV + O_PROJ + NORMS + mlp())
FUSED_GATE_UP = "mlp.gate_up_proj.weight 2*I H even|even\nmlp.down_proj.weight H I even@1\n"


def norms(*names: str) -> str:
    """LayerNorms: with a bias."""
    return "".join(f"{name}.weight H whole\n{name}.bias H whole\n" for name in names)


def linears(table: str) -> str:
    """For each weight a bias too: cut like the rows, whole where the columns are cut."""
    result = ""
    for line in lines_of(table):
        name, rows, _, cut = line.split()
        result += line + f"\n{name.replace('.weight', '.bias')} {rows} {'whole' if cut.endswith('@1') else cut}\n"
    return result


def attention_of(qkv: str, prefix: str) -> str:
    """Layers of the old kind, with biases: attention with q, k, v in one, and an MLP without gate."""
    return linears(
        f"{prefix}query_key_value.weight 3*H H {qkv}\n{prefix}dense.weight H H heads@1\n"
        "mlp.dense_h_to_4h.weight 4*H H even\nmlp.dense_4h_to_h.weight H 4*H even@1\n"
    )


GPT2_LAYER = (
    norms("ln_1", "ln_2")
    + """
attn.c_attn.weight H 3*H q|k|v@1
attn.c_attn.bias 3*H q|k|v
attn.c_proj.weight H H heads
attn.c_proj.bias H whole
mlp.c_fc.weight H 4*H even@1
mlp.c_fc.bias 4*H even
mlp.c_proj.weight 4*H H even
mlp.c_proj.bias H whole
"""
)
GPT2 = "wte.weight V H vocabulary\nwpe.weight P H whole\n" + norms("ln_f")
BLOOM_LAYER = norms("input_layernorm", "post_attention_layernorm") + attention_of("grouped", "self_attention.")
BLOOM = "word_embeddings.weight V H vocabulary\n" + norms("word_embeddings_layernorm", "ln_f")
NEOX_LAYER = (
    norms("input_layernorm", "post_attention_layernorm")
    + attention_of("heads", "attention.").replace(" 4*H", " I")  # By transformers, as in vLLM 0.33.
    + "attention.bias 1 1 P P whole\nattention.masked_bias whole\nattention.rotary_emb.inv_freq D//4 whole\n"
)
FALCON_TOP = "transformer.word_embeddings.weight V H vocabulary\nlm_head.weight V H vocabulary\n" + layers(
    norms("ln_f"), "transformer."
)
FALCON_LINEARS = """
self_attention.query_key_value.weight (A+2*K)*D H grouped
self_attention.dense.weight H A*D heads@1
mlp.dense_h_to_4h.weight 4*H H even
mlp.dense_4h_to_h.weight H 4*H even@1
"""
MLA = """
self_attn.q_a_proj.weight QL H whole
self_attn.q_a_layernorm.weight QL whole
self_attn.q_b_proj.weight A*(N+R) QL heads
self_attn.kv_a_proj_with_mqa.weight KL+R H whole
self_attn.kv_a_layernorm.weight KL whole
self_attn.kv_b_proj.weight A*(N+D) KL heads
self_attn.o_proj.weight H A*D heads@1
"""
DEEPSEEK_MOE = ROUTER + EXPERTS + mlp("mlp.shared_experts.", "S")
CORRECTION = "mlp.gate.e_score_correction_bias E whole\n"
MTP = """
embed_tokens.weight V H vocabulary
enorm.weight H whole
hnorm.weight H whole
eh_proj.weight H 2*H whole
shared_head.norm.weight H whole
shared_head.head.weight V H vocabulary
"""
FIRST, REST, NEXT = "model.layers.{first}.", "model.layers.{rest}.", "model.layers.{next}."
DEEPSEEK = (
    TOP + layers(MLA + NORMS) + layers(mlp(), FIRST) + layers(DEEPSEEK_MOE, REST)
)  # fmt: skip
LLAMA4 = (
    TOP
    + layers(QKV + O_PROJ + NORMS)
    + layers(mlp("feed_forward.", "2*I"), FIRST)
    + layers(
        """
        feed_forward.router.weight E H whole
        feed_forward.experts.gate_up_proj E H 2*I even|even@2
        feed_forward.experts.down_proj E I H even@1
        """
        + mlp("feed_forward.shared_expert."),
        REST,
    )
)
GPT_OSS_ATTENTION = (
    QKV + O_PROJ + QKV_BIAS + "self_attn.o_proj.bias H whole\nself_attn.sinks A heads\n" + NORMS
    + "mlp.router.weight E H whole\nmlp.router.bias E whole\n"
)  # fmt: skip
QWEN3_NEXT_MOE = ROUTER + EXPERTS + mlp("mlp.shared_expert.", "S") + "mlp.shared_expert_gate.weight 1 H whole\n" + NORMS
QWEN3_NEXT_ATTENTION = "self_attn.q_proj.weight 2*A*D H heads\n" + QKV.split("\n", 2)[2] + O_PROJ + QK_NORM
QWEN3_NEXT_LINEAR = """
linear_attn.in_proj_qkvz.weight 2*G*B+2*W*U H linear
linear_attn.in_proj_ba.weight 2*W H linear
linear_attn.conv1d.weight 2*G*B+W*U 1 4 key|key|value
linear_attn.dt_bias W linear
linear_attn.A_log W linear
linear_attn.norm.weight U whole
linear_attn.out_proj.weight H W*U linear@1
"""


def moonvit(qkv: str, *, is_biased: bool) -> str:
    """The vision part of Kimi: a tower of two blocks, which ranks cut if they divide its heads, and a projector.

    Args:
        qkv: the size of q, of k and of v.
        is_biased: whether layers and norms have biases.
    """
    linear = linears if is_biased else str
    kinds = ("weight", "bias") if is_biased else ("weight",)
    block = linear(
        f"wqkv.weight 3*{qkv} VH tower|tower|tower\nwo.weight VH {qkv} tower@1\n"
        "mlp.fc0.weight VI VH tower\nmlp.fc1.weight VH VI tower@1\n"
    )
    block += "".join(f"{norm}.{kind} VH whole\n" for norm in ("norm0", "norm1") for kind in kinds)
    tower = "patch_embed.proj.weight VH 3 14 14 whole\npatch_embed.pos_emb.weight 8 8 VH whole\n"
    tower += "patch_embed.proj.bias VH whole\n" * is_biased
    tower += "".join(f"encoder.final_layernorm.{kind} VH whole\n" for kind in kinds)
    tower += "".join(layers(block, f"encoder.blocks.{number}.") for number in (0, 1))
    projector = linear("proj.0.weight 4*VH 4*VH whole\nproj.2.weight H 4*VH whole\n")
    return nested(tower, "vision_tower.") + nested(projector, "mm_projector.")


def nested(table: str, prefix: str = "language_model.") -> str:
    """The same with a prefix, as in the checkpoint of a multimodal model."""
    return "".join(f"{prefix}{line}\n" for line in lines_of(table))


KIMI_K25 = nested(DEEPSEEK + layers(CORRECTION, REST)) + moonvit("VH", is_biased=True) + (
    "mm_projector.pre_norm.weight VH whole\nmm_projector.pre_norm.bias VH whole\n"
)  # fmt: skip
KIMI_DELTA = """
self_attn.q_proj.weight G*B H even
self_attn.k_proj.weight G*B H linear
self_attn.v_proj.weight G*B H linear
self_attn.b_proj.weight G H linear
self_attn.f_a_proj.weight B H whole
self_attn.f_b_proj.weight G*B B linear
self_attn.q_conv1d.weight G*B 1 4 linear
self_attn.k_conv1d.weight G*B 1 4 linear
self_attn.v_conv1d.weight G*B 1 4 linear
self_attn.A_log G linear
self_attn.dt_bias G*B linear
self_attn.o_norm.weight B whole
self_attn.o_proj.weight H G*B even@1
"""
KIMI_LINEAR_MOE = (
    "block_sparse_moe.gate.weight E H whole\nblock_sparse_moe.gate.e_score_correction_bias E whole\n"
    + mlp("block_sparse_moe.shared_experts.", "S")
)  # fmt: skip
KIMI_LINEAR_EXPERTS = mlp("block_sparse_moe.experts.{expert}.", "M", "w1 w3 w2")
KIMI_LINEAR = (  # Of three layers the last has latent attention, here without q_a_proj.
    TOP
    + layers(NORMS)
    + layers(KIMI_DELTA + "self_attn.g_a_proj.weight B H whole\nself_attn.g_b_proj.weight G*B B linear", FIRST)
    + layers(
        KIMI_DELTA + "self_attn.g_a_proj.weight B H whole\nself_attn.g_b_proj.weight G*B B linear", "model.layers.1."
    )
    + layers(
        re.sub(r".*q_a_.*\n", "", MLA).replace("q_b_proj.weight A*(N+R) QL", "q_proj.weight A*(N+R) H"),
        "model.layers.2.",
    )
    + layers(mlp(), FIRST)
    + layers(KIMI_LINEAR_MOE + KIMI_LINEAR_EXPERTS, REST)
)
KIMI_RESIDUALS = """
self_attention_res_norm.weight H whole
self_attention_res_proj.weight 1 H whole
mlp_res_norm.weight H whole
mlp_res_proj.weight 1 H whole
"""
KIMI_K3_GATE = "self_attn.g_proj.weight A*D H even\n"
KIMI_K3_MOE = (
    KIMI_LINEAR_MOE
    + KIMI_LINEAR_EXPERTS.replace(" H", " RH")
    + """
block_sparse_moe.routed_expert_down_proj.weight RH H whole
block_sparse_moe.routed_expert_up_proj.weight H RH whole
block_sparse_moe.routed_expert_norm.weight RH whole
"""
)
KIMI_K3 = (
    nested(
        TOP
        + "model.output_attn_res_norm.weight H whole\nmodel.output_attn_res_proj.weight 1 H whole\n"
        + layers(NORMS + KIMI_RESIDUALS)
        + layers(KIMI_DELTA + "self_attn.g_proj.weight G*B H even", FIRST)
        + layers(KIMI_DELTA + "self_attn.g_proj.weight G*B H even", "model.layers.1.")
        + layers(MLA + KIMI_K3_GATE, "model.layers.2.")
        + layers(mlp(), FIRST)
        + layers(KIMI_K3_MOE, REST)
        + layers(MTP + MLA + KIMI_K3_GATE + NORMS + KIMI_K3_MOE, NEXT)
    )
    + moonvit("VQ", is_biased=False)
    + "mm_projector.post_norm.weight H whole\n"
)
DEEPSEEK_V4_ATTENTION = """
hc_attn_fn (2+X)*X X*H whole
hc_attn_base (2+X)*X whole
hc_attn_scale 3 whole
hc_ffn_fn (2+X)*X X*H whole
hc_ffn_base (2+X)*X whole
hc_ffn_scale 3 whole
attn_norm.weight H whole
ffn_norm.weight H whole
attn.attn_sink A heads
attn.wq_a.weight QL H whole
attn.q_norm.weight QL whole
attn.wq_b.weight A*HD QL heads
attn.wkv.weight HD H whole
attn.kv_norm.weight HD whole
attn.wo_a.weight G*OL A*HD//G groups
attn.wo_b.weight H G*OL groups@1
"""


def compressor(ratio: int, head_dim: str, prefix: str = "attn.") -> str:
    """What joins the keys of DeepSeek V4; those of 4 tokens overlap."""
    width = f"2*{head_dim}" if ratio == 4 else head_dim
    lines = (f"wkv.weight {width} H", f"wgate.weight {width} H", f"norm.weight {head_dim}", f"ape {ratio} {width}")
    return "".join(f"{prefix}compressor.{line} whole\n" for line in lines)


DEEPSEEK_V4_INDEXER = "attn.indexer.wq_b.weight IH*ID QL whole\nattn.indexer.weights_proj.weight IH H whole\n"
DEEPSEEK_V4_MOE = (
    "ffn.gate.weight E H whole\n"
    + mlp("ffn.experts.{expert}.", "M", "w1 w3 w2")
    + mlp("ffn.shared_experts.", "S", "w1 w3 w2").replace("even", "ragged:1")
)  # fmt: skip
DEEPSEEK_V4_TOP = "embed.weight V H vocabulary\nhead.weight V H vocabulary\nnorm.weight H whole\n"
HC_HEAD = "hc_head_fn X X*H whole\nhc_head_base X whole\nhc_head_scale 1 whole\n"
DEEPSEEK_V4_MTP = """
emb.tok_emb.weight V H vocabulary
head.weight V H vocabulary
enorm.weight H whole
hnorm.weight H whole
norm.weight H whole
e_proj.weight H H whole
h_proj.weight H H whole
"""
DEEPSEEK_V4 = (
    DEEPSEEK_V4_TOP
    + HC_HEAD
    + layers(DEEPSEEK_V4_ATTENTION + DEEPSEEK_V4_MOE, "layers.{all}.")
    + layers("ffn.gate.tid2eid V 2 whole", "layers.{first}.")
    + layers("ffn.gate.bias E whole", "layers.{rest}.")
    + layers(compressor(128, "HD"), "layers.1.")
    + layers(compressor(4, "HD") + DEEPSEEK_V4_INDEXER + compressor(4, "ID", "attn.indexer."), "layers.2.")
    + layers(DEEPSEEK_V4_MTP + HC_HEAD + DEEPSEEK_V4_ATTENTION + DEEPSEEK_V4_MOE + "ffn.gate.bias E whole", "mtp.0.")
)
DEEPSEEK_VISION = (
    linears("patch_embed.proj.weight VH 588 whole")
    + "norm.weight VH whole\n"
    + "".join(
        layers(
            "norm1.weight VH whole\nnorm2.weight VH whole\n"
            + linears("attn.wqkv.weight 3*VH VH tower|tower|tower\nattn.wo.weight VH VH tower@1")
            + "mlp.w1.weight 2*VI VH tower|tower\nmlp.w2.weight VH VI tower@1\n",
            f"blocks.{number}.",
        )
        for number in (0, 1)
    )
)
DEEPSEEK_V41 = (
    DEEPSEEK_V4_TOP
    + layers(DEEPSEEK_V4_ATTENTION + DEEPSEEK_V4_MOE, "layers.{all}.")
    + layers("ffn.gate.bias E whole\nffn.gate.bias_vl E whole", "layers.{all}.")
    + layers("".join(line + "\n" for line in lines_of(compressor(2, "HD")) if ".ape" not in line), "layers.1.")
    + layers(DEEPSEEK_V4_INDEXER, "layers.1.")
    + layers("attn.indexer.wk.weight ID HD whole\nattn.indexer.k_norm.weight ID whole", "layers.1.")
    + layers(DEEPSEEK_V4_INDEXER, "layers.3.")
    + layers(
        """
        engram.embed.weight 8968 64 hash:500/16/0
        engram.embed.scale 8968 2 hash:500/16/0
        engram.wkv.weight (X+1)*H 1024 even
        engram.q_weight X H whole
        engram.k_weight X H whole
        """,
        "layers.1.",
    )
    + layers(
        DEEPSEEK_V4_ATTENTION + DEEPSEEK_V4_MOE + "ffn.gate.bias E whole\nffn.gate.bias_vl E whole\n"
        + "main_proj.weight H 2*H whole\nmain_norm.weight H whole\nnorm.weight H whole\n"
        + "markov_head.embed.weight V 16 whole\nmarkov_head.head.weight V 16 whole\n"
        + "confidence_head.proj.weight 1 H+16 whole\n",
        "mtp.0.",
    )
    + nested(DEEPSEEK_VISION, "vision.")
    + linears("aligner.w1.weight H 9*VH tower\naligner.w2.weight H H tower@1")
    + "image_start H whole\nimage_end H whole\nimage_newline H whole\n"
)  # fmt: skip


# Configurations.


def _sized(model_type: str, **more: Any) -> dict[str, Any]:
    """config.json under the usual names."""
    return {
        "model_type": model_type,
        "hidden_size": "{H}",
        "intermediate_size": "{I}",
        "num_hidden_layers": "{L}",
        "num_attention_heads": "{A}",
        "num_key_value_heads": "{K}",
        "vocab_size": "{V}",
        "max_position_embeddings": "{P}",
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }


def _wrapped(model_type: str, text: Template, **more: Any) -> dict[str, Any]:
    return {"model_type": model_type, "text_config": text, **more}


HEAD_DIM = {"head_dim": "{D}"}
MOE = {"num_experts": "{E}", "num_experts_per_tok": 2, "moe_intermediate_size": "{M}"}
DEEPSEEK_CONFIG = {
    "n_routed_experts": "{E}",
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": "{M}",
    "first_k_dense_replace": "{F}",
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": "{QL}",
    "kv_lora_rank": "{KL}",
    "qk_nope_head_dim": "{N}",
    "qk_rope_head_dim": "{R}",
    "v_head_dim": "{D}",
    "num_key_value_heads": "{A}",
}
MLA_SIZES = {"QL": 48, "KL": 32, "N": 16, "R": 8, "F": 1, "S": 64}
TOWER_CONFIG = {
    **{"patch_size": 14, "init_pos_emb_height": 8, "init_pos_emb_width": 8, "init_pos_emb_time": 4},
    **{"merge_kernel_size": [2, 2], "text_hidden_size": "{H}"},
}
TOWER_SIZES = {
    **{"hidden_size": "{VH}", "intermediate_size": "{VI}", "num_attention_heads": "{VA}", "num_hidden_layers": 2},
}
HUB_TOWER_SIZES = {f"vt_{key}": value for key, value in TOWER_SIZES.items()}
KIMI_K25_VISION = {
    **{"model_type": "kimi_k25_vision", **TOWER_CONFIG, **TOWER_SIZES, **HUB_TOWER_SIZES, "mm_hidden_size": "{VH}"},
    **{"pos_emb_type": "divided_fixed", "video_attn_type": "spatial_temporal", "merge_type": "sd2_tpool"},
    **{"pos_emb_height": 8, "pos_emb_width": 8, "pos_emb_time": 4, "mm_projector_type": "patchmerger"},
    **{"projector_hidden_act": "gelu", "projector_ln_eps": 1e-5},
}
NOAUX = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
KIMI_LINEAR_CONFIG = {
    **{"moe_intermediate_size": "{M}", "num_experts": "{E}", "num_experts_per_token": 2, "num_shared_experts": 1},
    **{"first_k_dense_replace": "{F}", "moe_layer_freq": 1, "moe_renormalize": True, "use_grouped_topk": True},
    **{"moe_router_activation_func": "sigmoid", "num_expert_group": 1, "topk_group": 1, "mla_use_nope": True},
    **{"kv_lora_rank": "{KL}", "qk_nope_head_dim": "{N}", "qk_rope_head_dim": "{R}", "v_head_dim": "{D}"},
    **{"num_key_value_heads": "{A}", "routed_scaling_factor": 2.4, "rope_theta": 10000.0, "rms_norm_eps": 1e-5},
    **{"head_dim": "{N+R}", "hidden_act": "silu", "tie_word_embeddings": False},
}
DELTA_CONFIG = {
    **{"kda_layers": [1, 2], "full_attn_layers": [3], "num_heads": "{G}", "head_dim": "{B}"},
    "short_conv_kernel_size": 4,
}
DEEPSEEK_V4_CONFIG = {
    **{"head_dim": "{HD}", "q_lora_rank": "{QL}", "qk_rope_head_dim": 64, "qk_nope_head_dim": "{HD-64}"},
    **{"num_key_value_heads": 1, "o_groups": "{G}", "o_lora_rank": "{OL}", "sliding_window": 128},
    **{"index_n_heads": "{IH}", "index_head_dim": "{ID}", "index_topk": 512, "hc_mult": "{X}"},
    **{"hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "moe_intermediate_size": "{M}", "n_routed_experts": "{E}"},
    **{"n_shared_experts": 1, "num_experts_per_tok": 2, "norm_topk_prob": True, "routed_scaling_factor": 1.5},
    **{"scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "swiglu_limit": 10.0, "rms_norm_eps": 1e-6},
    **{"rope_theta": 10000.0, "compress_rope_theta": 160000.0, "hidden_act": "silu", "tie_word_embeddings": False},
    **{"n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1, "intermediate_size": "{M}"},
    "rope_scaling": {
        **{"type": "yarn", "rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 1024},
        **{"beta_fast": 32, "beta_slow": 1},
    },
}
DEEPSEEK_V4_SIZES = {"QL": 64, "HD": 512, "OL": 32, "IH": 8, "ID": 128, "X": 4, "G": 8, "S": 64, "F": 1}
LLAMA4_CONFIG = {
    "num_local_experts": "{E}",
    "intermediate_size_mlp": "{2*I}",
    "interleave_moe_layer_step": 1,
    "moe_layers": [1],
    **HEAD_DIM,
}
VISION = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
FALCON_CONFIG = {"new_decoder_architecture": False, "multi_query": False, "parallel_attn": True, "bias": False}
ONE_SIZE = {"K": 8, "D": 16}  # Families without KV heads of their own, and H = A * D.
QWEN2_5_VL = _wrapped(
    "qwen2_5_vl",
    _sized("qwen2_5_vl_text"),
    vision_config={
        "hidden_size": 64, "intermediate_size": 96, "depth": 1, "num_heads": 4, "out_hidden_size": 128,
        "patch_size": 14, "fullatt_block_indexes": [0],
    },
    tie_word_embeddings=False,
)  # fmt: skip

FAMILIES: dict[str, Family] = {
    "llama": Family(LLAMA, _sized("llama"), num_shards=3),
    "llama_old": Family(
        LLAMA + layers("self_attn.rotary_emb.inv_freq D//2 whole"),
        _sized("llama"),
        dtypes={"inv_freq": "F32"},
    ),
    "mistral": Family(LLAMA, _sized("mistral", **HEAD_DIM), {"D": 32}),
    "ministral": Family(LLAMA, _sized("ministral", **HEAD_DIM, layer_types=["sliding_attention"] * 2)),
    "qwen2": Family(LLAMA + layers(QKV_BIAS), _sized("qwen2")),
    "qwen2_tied": Family(TIED + LLAMA[len(TOP) :] + layers(QKV_BIAS), _sized("qwen2", tie_word_embeddings=True)),
    "qwen3": Family(LLAMA + layers(QK_NORM), _sized("qwen3", **HEAD_DIM), {"D": 32}),
    "gemma": Family(TIED + LLAMA[len(TOP) :], _sized("gemma", **HEAD_DIM), {"D": 32, "K": 1}),
    "gemma2": Family(TIED + layers(QKV + O_PROJ + GEMMA_NORMS + mlp()), _sized("gemma2", **HEAD_DIM), {"D": 32}),
    "gemma3_text": Family(
        TIED + layers(QKV + O_PROJ + QK_NORM + GEMMA_NORMS + mlp()), _sized("gemma3_text", **HEAD_DIM), {"D": 32}
    ),
    "olmo": Family(EMBEDDING + HEAD + layers(QKV + O_PROJ + mlp()), _sized("olmo")),
    "granite": Family(LLAMA, _sized("granite")),
    "smollm3": Family(TIED + LLAMA[len(TOP) :], _sized("smollm3")),
    "olmo2": Family(TOP + layers(QKV + O_PROJ + FULL_QK_NORM + OLMO_NORMS + mlp()), _sized("olmo2")),
    "olmo3": Family(TOP + layers(QKV + O_PROJ + FULL_QK_NORM + OLMO_NORMS + mlp()), _sized("olmo3")),
    "cohere": Family(
        TIED
        + layers(QKV + O_PROJ + "input_layernorm.weight H whole\n" + mlp())
        + layers("self_attn.q_norm.weight A D heads\nself_attn.k_norm.weight K D kv"),
        _sized("cohere", use_qk_norm=True),
    ),
    "cohere2": Family(
        TIED + layers(QKV + O_PROJ + "input_layernorm.weight H whole\n" + mlp()), _sized("cohere2", **HEAD_DIM)
    ),
    "starcoder2": Family(
        EMBEDDING
        + norms("model.norm")
        + layers(linears(QKV + O_PROJ + "mlp.c_fc.weight I H even\nmlp.c_proj.weight H I even@1"))
        + layers(norms("input_layernorm", "post_attention_layernorm")),
        _sized("starcoder2"),
    ),
    "phi": Family(
        EMBEDDING
        + linears(HEAD)
        + norms("model.final_layernorm")
        + layers(norms("input_layernorm"))
        + layers(linears(QKV + O_PROJ.replace("o_proj", "dense")))
        + layers(linears("mlp.fc1.weight I H even\nmlp.fc2.weight H I even@1")),
        _sized("phi"),
    ),
    "phi3": Family(
        TOP + layers(NORMS + "self_attn.qkv_proj.weight (A+2*K)*D H q|k|v\n" + O_PROJ + FUSED_GATE_UP),
        _sized("phi3"),
        num_shards=2,
    ),
    "glm": Family(  # By transformers, as in vLLM 0.33: straight through both halves.
        TOP + layers(NORMS + QKV + QKV_BIAS + O_PROJ + FUSED_GATE_UP.replace("even|even", "even")),
        _sized("glm", **HEAD_DIM, attention_bias=True),
    ),
    "glm4": Family(
        TOP
        + layers(NORMS + QKV + QKV_BIAS + O_PROJ + FUSED_GATE_UP)
        + layers("post_self_attn_layernorm.weight H whole\npost_mlp_layernorm.weight H whole"),
        _sized("glm4", **HEAD_DIM, attention_bias=True),
    ),
    "gpt_neox": Family(
        "gpt_neox.embed_in.weight V H vocabulary\nembed_out.weight V H vocabulary\n"
        + norms("gpt_neox.final_layer_norm")
        + layers(NEOX_LAYER, "gpt_neox.layers.{all}."),
        _sized("gpt_neox", tie_word_embeddings=False),
        ONE_SIZE,
        dtypes={r"attention\.bias": "BOOL", "inv_freq": "F32"},
    ),
    "gpt2": Family(
        layers(GPT2, "transformer.") + layers(GPT2_LAYER, "transformer.h.{all}."),
        {"model_type": "gpt2", "n_embd": "{H}", "n_head": "{A}", "n_layer": "{L}", "n_positions": "{P}",
         "vocab_size": "{V}"},
        ONE_SIZE,
    ),
    "bloom": Family(
        layers(BLOOM, "transformer.") + layers(BLOOM_LAYER, "transformer.h.{all}."),
        {"model_type": "bloom", "n_embed": "{H}", "num_attention_heads": "{A}", "n_layer": "{L}", "vocab_size": "{V}"},
        ONE_SIZE,
    ),
    "falcon_7b": Family(
        FALCON_TOP + layers(norms("input_layernorm") + FALCON_LINEARS, "transformer.h.{all}."),
        _sized("falcon", **{**FALCON_CONFIG, "multi_query": True}),
        {"A": 71, "K": 1, "D": 2, "H": 142, "V": 128},
    ),
    "falcon_mq": Family(
        FALCON_TOP + layers(norms("input_layernorm") + FALCON_LINEARS, "transformer.h.{all}."),
        _sized("falcon", **{**FALCON_CONFIG, "multi_query": True}),
        {"K": 1},
    ),
    "falcon_40b": Family(
        FALCON_TOP + layers(norms("ln_attn", "ln_mlp") + FALCON_LINEARS, "transformer.h.{all}."),
        _sized("falcon", **{**FALCON_CONFIG, "new_decoder_architecture": True, "num_kv_heads": "{K}"}),
        num_shards=2,
    ),
    "falcon_rw": Family(
        FALCON_TOP
        + layers(
            norms("input_layernorm", "post_attention_layernorm") + attention_of("grouped", "self_attention."),
            "transformer.h.{all}.",
        ),
        _sized("falcon", **{**FALCON_CONFIG, "parallel_attn": False, "bias": True, "alibi": True}),
        ONE_SIZE,
    ),
    "opt": Family(
        layers("embed_tokens.weight V H vocabulary\nembed_positions.weight P+2 H whole", "model.decoder.")
        + norms("model.decoder.final_layer_norm")
        + layers(
            linears(
                QKV + "self_attn.out_proj.weight H H heads@1\nfc1.weight I H even\nfc2.weight H I even@1"
            )
            + norms("self_attn_layer_norm", "final_layer_norm"),
            "model.decoder.layers.{all}.",
        ),
        _sized("opt", ffn_dim="{I}", word_embed_proj_dim="{H}"),
        ONE_SIZE,
    ),
    "mixtral": Family(
        TOP
        + layers(QKV + O_PROJ + NORMS + "block_sparse_moe.gate.weight E H whole\n")
        + layers(mlp("block_sparse_moe.experts.{expert}.", "I", "w1 w3 w2")),
        _sized("mixtral", num_local_experts="{E}"),
        num_shards=4,
    ),
    "qwen2_moe": Family(
        TOP + layers(QKV + QKV_BIAS + O_PROJ + NORMS + ROUTER + EXPERTS + mlp("mlp.shared_expert.", "S"))
        + layers("mlp.shared_expert_gate.weight 1 H whole"),
        _sized("qwen2_moe", **MOE, shared_expert_intermediate_size="{S}"),
    ),
    "qwen3_moe": Family(
        TOP + layers(QKV + QK_NORM + O_PROJ + NORMS + ROUTER + EXPERTS), _sized("qwen3_moe", **MOE, **HEAD_DIM)
    ),
    "olmoe": Family(
        TOP + layers(QKV + FULL_QK_NORM + O_PROJ + NORMS + ROUTER + EXPERTS),
        _sized("olmoe", num_experts="{E}", num_experts_per_tok=2, intermediate_size="{M}"),
    ),
    "glm4_moe": Family(
        TOP
        + layers(QKV + QKV_BIAS + QK_NORM + O_PROJ + NORMS)
        + layers(mlp(), FIRST)
        + layers(ROUTER + CORRECTION + EXPERTS + mlp("mlp.shared_experts.", "M"), REST)
        + layers(MTP + QKV + QKV_BIAS + QK_NORM + O_PROJ + NORMS + ROUTER + CORRECTION + EXPERTS, NEXT)
        + layers(mlp("mlp.shared_experts.", "M"), NEXT),
        _sized(
            "glm4_moe", n_routed_experts="{E}", n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1,
            moe_intermediate_size="{M}", first_k_dense_replace="{F}", use_qk_norm=True, attention_bias=True, **HEAD_DIM,
            num_nextn_predict_layers=1,
        ),
        {"F": 1},
        dtypes={"correction_bias": "F32"},
    ),
    "deepseek_v2": Family(
        DEEPSEEK, _sized("deepseek_v2", **DEEPSEEK_CONFIG), {**MLA_SIZES, "S": 64}
    ),
    "deepseek_v2_lite": Family(
        re.sub(r".*q_a_.*\n", "", DEEPSEEK).replace("q_b_proj.weight A*(N+R) QL", "q_proj.weight A*(N+R) H"),
        _sized("deepseek_v2", **{**DEEPSEEK_CONFIG, "q_lora_rank": None, "n_shared_experts": 2}),
        {**MLA_SIZES, "S": 128},
    ),
    "deepseek_v3": Family(
        DEEPSEEK + layers(CORRECTION, REST) + layers(MTP + MLA + NORMS + DEEPSEEK_MOE + CORRECTION, NEXT),
        _sized("deepseek_v3", **DEEPSEEK_CONFIG, num_nextn_predict_layers=1),
        MLA_SIZES,
        dtypes={"correction_bias": "F32"},
        num_shards=3,
    ),
    "kimi_k2": Family(
        DEEPSEEK + layers(CORRECTION, REST),
        _sized("kimi_k2", **DEEPSEEK_CONFIG, num_nextn_predict_layers=0),
        {**MLA_SIZES, "E": 12},
        author="hand",
        dtypes={"correction_bias": "F32"},
    ),
    "kimi_k25": Family(
        KIMI_K25,
        _wrapped(
            "kimi_k25",
            _sized(
                "kimi_k2", **DEEPSEEK_CONFIG, **NOAUX, architectures=["DeepseekV3ForCausalLM"],
                num_nextn_predict_layers=0, routed_scaling_factor=2.8, norm_topk_prob=True,
            ),
            architectures=["KimiK25ForConditionalGeneration"],
            vision_config=KIMI_K25_VISION,
            media_placeholder_token_id=900,
            pad_token_id=0,
        ),
        {**MLA_SIZES, "VH": 64, "VA": 4, "VI": 96},
        author="hand",
        dtypes={"correction_bias": "F32"},
        num_shards=2,
    ),
    "kimi_linear": Family(
        KIMI_LINEAR,
        _sized(
            "kimi_linear", **KIMI_LINEAR_CONFIG, architectures=["KimiLinearForCausalLM"], q_lora_rank=None,
            linear_attn_config=DELTA_CONFIG, num_nextn_predict_layers=0,
        ),
        {**MLA_SIZES, "L": 3, "G": 8, "B": 16},
        author="hand",
        dtypes={"correction_bias|A_log|dt_bias": "F32"},
    ),
    "kimi_k3": Family(
        KIMI_K3,
        _wrapped(
            "kimi_k3",
            _sized(
                "kimi_linear",
                **{**KIMI_LINEAR_CONFIG, "hidden_act": "situ"},
                architectures=["KimiLinearForCausalLM"],
                q_lora_rank="{QL}",
                linear_attn_config={**DELTA_CONFIG, "use_full_rank_gate": True, "gate_lower_bound": -5.0},
                activation_situ_beta=1.0,
                activation_situ_linear_beta=0.5,
                mla_use_output_gate=True,
                attn_res_block_size=2,
                latent_moe_use_norm=True,
                routed_expert_hidden_size="{RH}",
                num_nextn_predict_layers=1,
            ),
            architectures=["KimiK3ForConditionalGeneration"],
            vision_config={
                "model_type": "kimi_k3_vision", **TOWER_CONFIG, **HUB_TOWER_SIZES, "qkv_hidden_size": "{VQ}"
            },
            media_placeholder_token_id=900,
            pad_token_id=0,
        ),
        {**MLA_SIZES, "L": 3, "G": 8, "B": 16, "RH": 96, "VH": 64, "VA": 12, "VI": 288, "VQ": 192},
        author="hand",
        dtypes={"correction_bias|A_log|dt_bias": "F32"},
        num_shards=2,
    ),
    "deepseek_v4": Family(
        DEEPSEEK_V4,
        _sized(
            "deepseek_v4",
            **DEEPSEEK_V4_CONFIG,
            architectures=["DeepseekV4ForCausalLM"],
            compress_ratios=[0, 128, 4, 0],
            layer_types=["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
            mlp_layer_types=["hash_moe", "moe", "moe"],
            num_hash_layers=1,
            compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        ),
        {**DEEPSEEK_V4_SIZES, "L": 3},
        author="hand",
        dtypes={"hc_|attn_sink|ape|gate.bias": "F32", "tid2eid": "I64"},
        num_shards=2,
    ),
    "deepseek_v41": Family(
        DEEPSEEK_V41,
        _wrapped(
            "deepseek_v41",
            _sized(
                "deepseek_v41_text",
                **DEEPSEEK_V4_CONFIG,
                compress_ratios=[0, 2, 2, 2, 0],
                kv_source_layer_ids=[1],
                index_source_layer_ids=[1, 3],
                engram_layer_ids=[1],
                engram_num_embeddings=[8968],
                engram_max_ngram_size=3,
                engram_vocab_size=500,
                engram_n_heads=8,
                engram_head_dim=64,
                engram_compressed_vocab_size=900,
                engram_pad_token_id=2,
                image_token_id=990,
                dspark_target_layer_ids=[1, 2],
                dspark_markov_rank=16,
            ),
            architectures=["DeepseekV41ForCausalLM"],
            vision_config={
                **TOWER_SIZES, "patch_size": 14, "downsample_ratio": 3, "rope_theta": 10000.0,
                "max_image_tokens": 1024, "min_pixels": 295936, "max_wh_ratio": None,
            },
            image_token_id=990,
            tie_word_embeddings=False,
        ),
        {**DEEPSEEK_V4_SIZES, "L": 4, "VH": 64, "VA": 4, "VI": 96},
        author="hand",
        dtypes={
            "hc_|attn_sink|gate.bias|image_": "F32",
            "engram.embed.weight": "F8_E4M3",
            "engram.embed.scale": "F8_E8M0",
        },
        num_shards=2,
    ),
    "llama4_text": Family(LLAMA4, _sized("llama4_text", **LLAMA4_CONFIG), {"F": 1}),
    "gpt_oss": Family(
        TOP
        + layers(GPT_OSS_ATTENTION)
        + layers(
            """
            mlp.experts.gate_up_proj E H 2*I ragged:2@2
            mlp.experts.gate_up_proj_bias E 2*I ragged:2@1
            mlp.experts.down_proj E I H ragged:1@1
            mlp.experts.down_proj_bias E H whole
            """
        ),
        _sized("gpt_oss", num_local_experts="{E}", num_experts_per_tok=2, **HEAD_DIM),
    ),
    "gpt_oss_mxfp4": Family(
        TOP
        + layers(GPT_OSS_ATTENTION)
        + layers(
            """
            mlp.experts.gate_up_proj_blocks E 2*I H//32 16 ragged:64@1
            mlp.experts.gate_up_proj_scales E 2*I H//32 ragged:64@1
            mlp.experts.gate_up_proj_bias E 2*I ragged:64@1
            mlp.experts.down_proj_blocks E H I//32 16 ragged:1@2
            mlp.experts.down_proj_scales E H I//32 ragged:1@2
            mlp.experts.down_proj_bias E H whole
            """
        ),
        _sized(
            "gpt_oss", num_local_experts="{E}", num_experts_per_tok=2, **HEAD_DIM,
            quantization_config={
                "quant_method": "mxfp4",
                "modules_to_not_convert": [
                    "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"
                ],
            },
        ),
        {"I": 288, "H": 96, "D": 16},  # 9 blocks of 32: no degree but 3 and 9 divides them.
        author="hand",
        dtypes={"_blocks|_scales": "U8"},
        num_shards=2,
    ),
    "qwen3_next": Family(
        TOP
        + layers(QWEN3_NEXT_MOE)
        + layers(QWEN3_NEXT_LINEAR, FIRST)
        + layers(QWEN3_NEXT_ATTENTION, REST)
        + layers(QWEN3_NEXT_MOE + QWEN3_NEXT_ATTENTION, "mtp.layers.0.")
        + layers(
            "fc.weight H 2*H even\nnorm.weight H whole\npre_fc_norm_embedding.weight H whole\n"
            "pre_fc_norm_hidden.weight H whole", "mtp."
        ),
        _sized(
            "qwen3_next", **MOE, **HEAD_DIM, shared_expert_intermediate_size="{S}", linear_num_key_heads="{G}",
            linear_num_value_heads="{W}", linear_key_head_dim="{B}", linear_value_head_dim="{U}",
            layer_types=["linear_attention"] * 3 + ["full_attention"],
        ),
        {"L": 4, "F": 3, "S": 64, "G": 8, "W": 16, "B": 8, "U": 12},
        dtypes={"A_log": "F32"},
    ),
    "llama4": Family(
        nested(LLAMA4),
        _wrapped(
            "llama4",
            _sized("llama4_text", **LLAMA4_CONFIG),
            vision_config={
                **VISION, "intermediate_size": 256, "num_attention_heads": 4, "vision_output_dim": 64,
                "projector_input_dim": 64, "projector_output_dim": 64,
            },
        ),
        {"F": 1},
    ),
    "mllama": Family(
        nested(
            TOP.replace("tokens.weight V", "tokens.weight V+8")
            + layers(NORMS + mlp())
            + layers(QKV + O_PROJ, FIRST)
            + layers(
                (QKV + O_PROJ + QK_NORM).replace("self_attn", "cross_attn")
                + "cross_attn_attn_gate 1 whole\ncross_attn_mlp_gate 1 whole\n", REST
            )
        ),
        _wrapped(
            "mllama",
            _sized("mllama_text_model", cross_attention_layers=[2], tie_word_embeddings=False),
            vision_config={
                **VISION, "num_global_layers": 1, "attention_heads": 4, "vision_output_dim": 128,
                "intermediate_layers_indices": [0], "max_num_tiles": 2,
                "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
            },
        ),
        {"L": 3, "F": 2},
    ),
    "qwen2_5_vl": Family(LLAMA + layers(QKV_BIAS), QWEN2_5_VL),
    "qwen2_5_vl_new": Family(  # As transformers 4.52 to 4.57 wrote it.
        (LLAMA + layers(QKV_BIAS)).replace("model.", "model.language_model."),
        QWEN2_5_VL,
        rename={r"^model\.": "model.language_model.", r"^visual\.": "model.visual."},
    ),
    "llava": Family(
        nested(LLAMA),
        _wrapped(
            "llava",
            _sized("llama"),
            vision_config={**VISION, "model_type": "clip_vision_model", "num_attention_heads": 4},
        ),
    ),
    "mistral3": Family(
        nested(LLAMA),
        _wrapped(
            "mistral3",
            _sized("mistral", **HEAD_DIM),
            vision_config={**VISION, "model_type": "pixtral", "num_attention_heads": 4, "head_dim": 16},
        ),
        {"D": 32},
    ),
    "gemma3": Family(
        nested(TIED + layers(QKV + O_PROJ + QK_NORM + GEMMA_NORMS + mlp())),
        _wrapped(
            "gemma3",
            _sized("gemma3_text", **HEAD_DIM),
            vision_config={**VISION, "num_attention_heads": 4, "vision_use_head": False},
            mm_tokens_per_image=4,
        ),
        {"D": 32},
        rename={r"^vision_tower\.": "vision_tower.vision_model."},
    ),
}  # fmt: skip
FAMILIES["kimi_k25_old"] = replace(  # As the first files in NVFP4.
    FAMILIES["kimi_k25"], table=KIMI_K25.replace("language_model.model.layers.", "language_model.layers.")
)
FAMILIES["gpt2_hub"] = Family(
    GPT2 + layers(GPT2_LAYER + "attn.bias 1 1 P P whole", "h.{all}."),
    FAMILIES["gpt2"].template,
    ONE_SIZE,
    rename={r"^transformer\.": ""},
    dtype="F32",
)
FAMILIES["bloom_hub"] = Family(
    BLOOM + layers(BLOOM_LAYER, "h.{all}."),
    FAMILIES["bloom"].template,
    ONE_SIZE,
    rename={r"^transformer\.": ""},
    dtype="F16",
)
# Families whose layers differ in their numbers or sizes of heads: `heads:2` and `kv:2` are cuts by twice as many.

GEMMA4_SLIDING = QKV.replace("K*D H kv", "2*K*D H kv:2") + O_PROJ + QK_NORM
GEMMA4_FULL = """
self_attn.q_proj.weight A*2*D H heads
self_attn.k_proj.weight K*2*D H kv
self_attn.o_proj.weight H A*2*D heads@1
self_attn.q_norm.weight 2*D whole
self_attn.k_norm.weight 2*D whole
"""
GEMMA4_LAYER = GEMMA_NORMS + mlp() + "layer_scalar 1 whole\n"
GEMMA4 = TIED + layers(GEMMA4_LAYER) + layers(GEMMA4_SLIDING, FIRST) + layers(GEMMA4_FULL, REST)
GEMMA4_EXPERTS = """
pre_feedforward_layernorm_2.weight H whole
post_feedforward_layernorm_1.weight H whole
post_feedforward_layernorm_2.weight H whole
router.proj.weight E H whole
router.scale H whole
router.per_expert_scale E whole
experts.gate_up_proj E 2*M H even|even@1
experts.down_proj E H M even@2
"""
GEMMA4_PER_LAYER = """
per_layer_input_gate.weight 16 H whole
per_layer_projection.weight H 16 whole
post_per_layer_input_norm.weight H whole
"""
GEMMA4_CONFIG = {
    **{"num_key_value_heads": "{2*K}", "head_dim": "{D}", "global_head_dim": "{2*D}", "sliding_window": 16},
    "layer_types": ["sliding_attention", "full_attention"],
}
GEMMA4_FEWER = {"attention_k_eq_v": True, "num_global_key_value_heads": "{K}"}
GEMMA4_MOE = {"enable_moe_block": True, "num_experts": "{E}", "top_k_experts": 2, "moe_intermediate_size": "{M}"}
HYPER_CONNECTIONS = """
hc_norm.weight 4*H whole
input_mix_weight_down.weight 16 4*H whole
input_mix_weight_up.weight 4*H 16 whole
"""
BLOCK_CONNECTIONS = HYPER_CONNECTIONS + "block_inject_weight.weight 4 4*H whole\n"
QWEN4_LINEAR = """
linear_attn.in_proj_qkv.weight 2*G*B+W*U H key|key|value
linear_attn.in_proj_z.weight W*U H linear
linear_attn.in_proj_a.weight W H linear
linear_attn.in_proj_b.weight W H linear
""" + "\n".join(lines_of(QWEN3_NEXT_LINEAR)[2:])
QWEN4_LAYER = (
    layers(BLOCK_CONNECTIONS, "attn_hyper_connection.")
    + layers(BLOCK_CONNECTIONS, "mlp_hyper_connection.")
    + QWEN3_NEXT_MOE[: -len(NORMS)]
)
INDEXED = """
self_attn.indexer.index_qk_proj.weight 5*D H whole
self_attn.indexer.q_layernorm.weight D whole
self_attn.indexer.k_layernorm.weight D whole
"""
NGRAMS = """
ple.key_proj.weight 4*H 128 whole
ple.value_proj.weight H 128 whole
ple.conv1d.weight 4*H 1 4 whole
ple.norm_conv.weight 4*H whole
ple.norm_key.weight 4*H whole
ple.norm_query.weight 4*H whole
ple.ple_embedding.layer_multipliers 3 whole
ple.ple_embedding.ngram_heads_offsets 16 whole
ple.ple_embedding.ngram_heads_vocab_sizes 16 whole
""" + "".join(f"ple.ple_embedding.ngram_embedding.shard_{shard}.weight 224 8 shard:{shard}/4\n" for shard in range(4))
DELTA = """
self_attn.q_proj.weight 2*A*D H heads:2
self_attn.k_proj.weight 2*A*D H heads:2
self_attn.v_proj.weight 2*A*D H heads:2
self_attn.q_conv1d.weight 2*A*D 1 4 heads:2
self_attn.k_conv1d.weight 2*A*D 1 4 heads:2
self_attn.v_conv1d.weight 2*A*D 1 4 heads:2
self_attn.b_proj.weight 2*A H heads:2
self_attn.f_a_proj.weight D H whole
self_attn.f_b_proj.weight 2*A*D D heads:2
self_attn.g_a_proj.weight D H whole
self_attn.g_b_proj.weight 2*A*D D heads:2
self_attn.A_log 2*A heads:2
self_attn.dt_bias 2*A*D heads:2
self_attn.o_norm.weight D whole
self_attn.o_proj.weight H 2*A*D heads:2@1
"""
POOLED_INDEXER = """
self_attn.indexer.wq_b.weight 64 QL whole
self_attn.indexer.wk.weight 16 H whole
self_attn.indexer.weights_proj.weight 4 H whole
self_attn.indexer.k_norm.weight 16 whole
self_attn.indexer.k_norm.bias 16 whole
self_attn.indexer.index_kpool_compress_ape 16 16 whole
self_attn.indexer.index_kpool_compress_gate 16 H whole
"""
RESIDUAL_STREAMS = """
hc_attn_fn 24 4*H whole
hc_attn_base 24 whole
hc_attn_scale 3 whole
hc_ffn_fn 24 4*H whole
hc_ffn_base 24 whole
hc_ffn_scale 3 whole
"""
MINIMAX_M3 = (
    TOP
    + layers(QKV + O_PROJ + QK_NORM + NORMS)
    + layers(mlp(), FIRST)
    + layers(
        """
        self_attn.index_q_proj.weight K*D H kv
        self_attn.index_k_proj.weight D H whole
        self_attn.index_q_norm.weight D whole
        self_attn.index_k_norm.weight D whole
        block_sparse_moe.gate.weight E H whole
        block_sparse_moe.e_score_correction_bias E whole
        """
        + mlp("block_sparse_moe.experts.{expert}.", "M", "w1 w3 w2")
        + mlp("block_sparse_moe.shared_experts.", "M"),
        REST,
    )
)
STEP_FULL = QKV + O_PROJ + QK_NORM + "self_attn.g_proj.weight A H heads\n"
STEP_SLIDING = (
    """
self_attn.q_proj.weight 2*A*D H heads:2
self_attn.k_proj.weight K*D H kv
self_attn.v_proj.weight K*D H kv
self_attn.o_proj.weight H 2*A*D heads:2@1
self_attn.g_proj.weight 2*A H heads:2
"""
    + QK_NORM
)
STEP_EXPERTS = """
moe.gate.weight E H whole
moe.router_bias E whole
moe.gate_proj.weight E M H even@1
moe.up_proj.weight E M H even@1
moe.down_proj.weight E H M even@2
""" + mlp("share_expert.", "S")
MIMO_FULL = """
self_attn.q_proj.weight A*D H heads
self_attn.k_proj.weight K*D H kv
self_attn.v_proj.weight K*U H kv
self_attn.o_proj.weight H A*U heads@1
"""
MIMO_SLIDING = """
self_attn.q_proj.weight A*D H heads
self_attn.k_proj.weight 2*K*D H kv:2
self_attn.v_proj.weight 2*K*U H kv:2
self_attn.o_proj.weight H A*U heads@1
self_attn.attention_sink_bias A heads
"""
LONGCAT_HALF = (
    re.sub(r"self_attn\.", "self_attn.{half}.", MLA)
    + mlp("mlps.{half}.")
    + """
input_layernorm.{half}.weight H whole
post_attention_layernorm.{half}.weight H whole
"""
)
LONGCAT_LAYER = (
    "".join(LONGCAT_HALF.replace("{half}", half) for half in "01")
    + EXPERTS
    + """
mlp.router.classifier.weight E+4 H whole
mlp.router.e_score_correction_bias E+4 whole
"""
)


def inkling_attention(times: str) -> str:
    """The attention of a layer with so many times as many KV heads."""
    kv = f"kv:{times}"
    return f"""
    attn.wq_du.weight A*D H heads
    attn.wr_du.weight A*4 H heads
    attn.wk_dv.weight {times}*K*D H {kv}
    attn.wv_dv.weight {times}*K*D H {kv}
    attn.k_sconv.weight {times}*K*D 1 4 {kv}
    attn.v_sconv.weight {times}*K*D 1 4 {kv}
    attn.wo_ud.weight H A*D heads@1
    attn.q_norm.weight D whole
    attn.k_norm.weight D whole
    attn.rel_logits_proj.proj 4 32 whole
    attn_sconv.weight H 1 4 even
    mlp_sconv.weight H 1 4 even
    attn_norm.weight H whole
    mlp_norm.weight H whole
    """


INKLING_DENSE = "mlp.w13_dn.weight 2*I H even\nmlp.w2_md.weight H I even@1\nmlp.global_scale 1 whole\n"
INKLING_EXPERTS = """
mlp.gate.weight E+2 H whole
mlp.gate.bias E whole
mlp.gate.global_scale 1 whole
mlp.experts.w13_weight E 2*M H even@1
mlp.experts.w2_weight E H M even@2
mlp.shared_experts.shared_w13_weight 2 2*M H even@1
mlp.shared_experts.shared_w2_weight 2 H M even@2
"""
INKLING = (
    "model.llm.embed.weight V H whole\nmodel.llm.unembed.weight V H vocabulary\nmodel.llm.norm.weight H whole\n"
    "model.llm.embed_norm.weight H whole\n"
    + layers(inkling_attention("2") + INKLING_DENSE, "model.llm.layers.{first}.")
    + layers(inkling_attention("1") + INKLING_EXPERTS, "model.llm.layers.{rest}.")
)
BAILING_DELTA = (
    "\n".join(line for line in lines_of(DELTA) if "_a_proj" not in line and "o_norm" not in line)
    .replace("2*A", "A")
    .replace("heads:2", "heads")
    .replace("self_attn", "attention")
    .replace("o_proj", "dense")
    .replace("f_b_proj.weight A*D D", "f_proj.weight A*D H")
    .replace("g_b_proj.weight A*D D", "g_proj.weight A*D H")
    + "\nattention.o_norm.weight D whole\n"
)
BAILING = (
    TOP.replace("embed_tokens", "word_embeddings")
    + layers(NORMS)
    + layers(mlp(), FIRST)
    + layers(ROUTER + "mlp.gate.expert_bias E whole\n" + EXPERTS + mlp("mlp.shared_experts.", "M"), REST)
)
DOTS_FULL = "self_attn.k_rope_only_layernorm.weight R whole\n" + "\n".join(lines_of(POOLED_INDEXER)[:5]) + "\n"
ONE_OF_EACH = {"F": 1}
"""Two layers: of one kind, and of another."""
FAMILIES |= {
    "gemma4_text": Family(
        GEMMA4.replace("K*2*D H kv", "2*K*2*D H kv:2")
        + layers("self_attn.v_proj.weight 2*K*2*D H kv:2", REST)
        + layers(GEMMA4_PER_LAYER)
        + "model.embed_tokens_per_layer.weight V L*16 vocabulary\nmodel.per_layer_projection_norm.weight 16 whole\n"
        "model.per_layer_model_projection.weight L*16 H even\n",
        _sized("gemma4_text", **GEMMA4_CONFIG, hidden_size_per_layer_input=16, vocab_size_per_layer_input="{V}"),
        ONE_OF_EACH,
    ),
    "gemma4": Family(
        (GEMMA4 + layers(GEMMA4_EXPERTS)).replace("model.", "model.language_model."),
        _wrapped(
            "gemma4",
            _sized("gemma4_text", **GEMMA4_CONFIG, **GEMMA4_FEWER, **GEMMA4_MOE, hidden_size_per_layer_input=0),
            vision_config={**VISION, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
            audio_config=None,
        ),
        ONE_OF_EACH,
    ),
    "gemma4_unified": Family(
        GEMMA4.replace("model.", "model.language_model."),
        _wrapped(
            "gemma4_unified",
            _sized("gemma4_unified_text", **GEMMA4_CONFIG, **GEMMA4_FEWER),
            vision_config={
                **{"mm_embed_dim": 64, "mm_posemb_size": 32, "output_proj_dims": 64, "patch_size": 4},
                "pooling_kernel_size": 2,
            },
            audio_config=None,
        ),
        ONE_OF_EACH,
    ),
    "qwen4_exp": Family(
        EMBEDDING
        + HEAD
        + layers(HYPER_CONNECTIONS, "model.hyper_connection_mixer.")
        + layers(QWEN4_LAYER)
        + layers(QWEN4_LINEAR + NGRAMS, FIRST)
        + layers(QWEN3_NEXT_ATTENTION + INDEXED, REST),
        _sized(
            "qwen4_exp_text", **MOE, **HEAD_DIM, shared_expert_intermediate_size="{S}", linear_num_key_heads="{G}",
            linear_num_value_heads="{W}", linear_key_head_dim="{B}", linear_value_head_dim="{U}",
            layer_types=["linear_attention", "indexed_attention"], indexer_n_heads=4, indexer_kv_heads=1,
            indexer_head_dim="{D}", indexer_budget=64, indexer_compress_ratio=16, hc_lowrank=16,
            output_gate_type="silu",
            ngram_vocab_size_base=20, split_ngram_parts=4, ple_embed_dim=128, ple_layer_ids=[1],
        ),
        {"F": 1, "S": 64, "G": 8, "W": 16, "B": 8, "U": 12},
        dtypes={"layer_multipliers|ngram_heads": "I64"},
    ),
    "glm5_next": Family(
        (
            TOP
            + layers(NORMS + RESIDUAL_STREAMS)
            + layers(DELTA + mlp(), FIRST)
            + layers(MLA + POOLED_INDEXER + DEEPSEEK_MOE + CORRECTION, REST)
        ).replace("model.", "model.language_model."),
        _wrapped(
            "glm5_next",
            _sized(
                "glm5_next_text", **DEEPSEEK_CONFIG, head_dim=0, qk_head_dim="{N}", linear_num_heads="{2*A}",
                linear_head_dim="{D}", layer_types=["linear_attention", "indexed_attention"],
                mlp_layer_types=["dense", "sparse"], indexer_types=["full", "full"], index_head_dim=16, index_n_heads=4,
                mhc=True, mla_use_nope=True, indexer_rope_interleave=True, topk_method="noaux_tc",
                scoring_func="sigmoid", index_kpool_compress=True,
            ),
            vision_config={
                **VISION, "depth": 1, "num_heads": 16, "out_hidden_size": "{H}", "projection_intermediate_size": 96,
            },
        ),
        {**MLA_SIZES, "R": 0},
        dtypes={"correction_bias|A_log|dt_bias|conv1d|hc_.*_(base|scale)|mlp.gate.weight": "F32"},
    ),
    "minimax_m3": Family(
        nested(MINIMAX_M3),
        _wrapped(
            "minimax_m3_vl",
            _sized(
                "minimax_m3_vl_text", **HEAD_DIM, num_local_experts="{E}", num_experts_per_tok=2,
                intermediate_size="{M}", dense_intermediate_size="{I}", shared_intermediate_size="{M}",
                index_n_heads="{K}", index_head_dim="{D}", rotary_dim=8, mlp_layer_types=["dense", "sparse"],
                layer_types=["full_attention", "minimax_m3_sparse"], hidden_act="swigluoai", moe_layer_freq=[0, 1],
                scoring_func="sigmoid", use_routing_bias=True, qk_norm_type="per_head",
            ),
            vision_config={
                **VISION, "num_attention_heads": 16, "hidden_size": 192,
                "img_token_compression_config": {"spatial_merge_size": 2, "temporal_patch_size": 2},
            },
            architectures=["MiniMaxM3SparseForConditionalGeneration"],
            projector_hidden_size="{H}",
            merged_hidden_size=256,
        ),
        ONE_OF_EACH,
    ),
    "step3p5": Family(
        TOP + layers(NORMS) + layers(STEP_FULL + mlp(), FIRST) + layers(STEP_SLIDING + STEP_EXPERTS, REST),
        _sized(
            "step3p5", **HEAD_DIM, num_attention_groups="{K}", moe_num_experts="{E}",
            attention_other_setting={
                "attention_type": "sliding_attention", "num_attention_heads": "{2*A}", "num_attention_groups": "{K}",
                "head_dim": "{D}",
            },
            layer_types=["full_attention", "sliding_attention"], moe_layers_enum="1", moe_top_k=2, use_moe=True,
            moe_intermediate_size="{M}", share_expert_dim="{S}", use_head_wise_attn_gate=True, need_fp32_gate=True,
            use_moe_router_bias=True, norm_expert_weight=True, rope_theta=[10000.0] * 2, sliding_window=16,
            moe_router_scaling_factor=3.0, moe_router_activation="sigmoid",
            partial_rotary_factors=[0.5, 1.0], swiglu_limits=[0.0] * 2, swiglu_limits_shared=[0.0] * 2,
            architectures=["Step3p5ForCausalLM"],
        ),
        ONE_OF_EACH,
        author="hand",
    ),
    "mimo_v2": Family(
        TOP
        + layers(NORMS)
        + layers(MIMO_FULL + mlp(), FIRST)
        + layers(MIMO_SLIDING + ROUTER + CORRECTION + EXPERTS, REST),
        _sized(
            "mimo_v2_flash", **HEAD_DIM, v_head_dim="{U}", n_routed_experts="{E}", hybrid_layer_pattern=[0, 1],
            swa_num_attention_heads="{A}", swa_num_key_value_heads="{2*K}", swa_head_dim="{D}", swa_v_head_dim="{U}",
            moe_layer_freq=[0, 1], layernorm_epsilon=1e-5, sliding_window_size=16, add_swa_attention_sink_bias=True,
            moe_intermediate_size="{M}", num_experts_per_tok=2, n_group=1, topk_group=1, topk_method="noaux_tc",
            scoring_func="sigmoid",
        ),
        {**ONE_OF_EACH, "U": 8},
        author="hand",
        dtypes={"correction_bias|sink_bias": "F32"},
    ),
    "longcat_flash": Family(
        TOP + layers(LONGCAT_LAYER),
        _sized(
            "longcat_flash", **{**DEEPSEEK_CONFIG, "n_shared_experts": None, "first_k_dense_replace": None},
            ffn_hidden_size="{I}", expert_ffn_hidden_size="{M}", num_layers="{L}", zero_expert_num=4, moe_topk=2,
            qk_head_dim="{N+R}", head_dim="{R}", mla_scale_q_lora=True, mla_scale_kv_lora=True,
            zero_expert_type="identity", num_hidden_layers="{2*L}", rope_theta=1e7,
            rope_scaling={"rope_type": "default", "rope_theta": 1e7},
        ),
        MLA_SIZES,
        author="hand",
    ),
    "inkling": Family(
        INKLING,
        _sized(
            "inkling_model", **HEAD_DIM, n_routed_experts="{E}", n_shared_experts=2, moe_intermediate_size="{M}",
            swa_num_attention_heads="{A}", swa_num_key_value_heads="{2*K}", swa_head_dim="{D}", local_layer_ids=[0],
            architectures=["InklingForCausalLM"], d_rel=4, rel_extent=32, num_experts_per_tok=2, sliding_window_size=32,
            intermediate_size="{M}", dense_intermediate_size="{I}", dense_mlp_idx=1, use_gate_bias=True,
            use_global_scale=True, use_embed_norm=True, use_sconv=True, sconv_kernel_size=4, shared_expert_sink=True,
        ),
        ONE_OF_EACH,
        author="hand",
        dtypes={"sconv": "F32"},
    ),
    "dots3_note": Family(
        TOP
        + layers(NORMS)
        + layers(MLA + "self_attn.g_proj.weight A H whole\n" + DOTS_FULL + mlp(), FIRST)
        + layers(MLA.replace(" A*", " 2*A*").replace("heads", "heads:2"), REST)
        + layers("self_attn.g_proj.weight 2*A H whole", REST)
        + layers(DEEPSEEK_MOE + CORRECTION, REST),
        _sized(
            "dots3_note", **DEEPSEEK_CONFIG, swa_num_attention_heads="{2*A}", swa_num_key_value_heads="{2*A}",
            swa_q_lora_rank="{QL}", swa_kv_lora_rank="{KL}", swa_qk_nope_head_dim="{N}", swa_qk_rope_head_dim="{R}",
            swa_v_head_dim="{D}", swa_head_dim="{N+R}", index_head_dim=16, index_n_heads=4,
            layer_types=["full_attention", "sliding_attention"],
        ),
        MLA_SIZES,
        author="hand",
        dtypes={"correction_bias": "F32"},
    ),
    "bailing_moe": Family(
        BAILING
        + layers("attention.query_key_value.weight (A+2*K)*D H q|k|v\nattention.dense.weight H A*D heads@1")
        + layers("attention.query_layernorm.weight D whole\nattention.key_layernorm.weight D whole"),
        _sized(
            "bailing_moe_v2", **MOE, **HEAD_DIM, architectures=["BailingMoeV2ForCausalLM"], first_k_dense_replace=1,
            num_shared_experts=1, score_function="sigmoid", moe_router_enable_expert_bias=True, use_qk_norm=True,
            use_rmsnorm=True, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5, use_bias=False,
            use_qkv_bias=False,
            hidden_act="silu", rms_norm_eps=1e-6, partial_rotary_factor=0.5,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=False, embedding_dropout=0.0, num_nextn_predict_layers=0,
        ),
        ONE_OF_EACH,
        author="hand",
        dtypes={"expert_bias": "F32"},
    ),
    "bailing_hybrid": Family(
        BAILING
        + layers(BAILING_DELTA, FIRST)
        + layers(MLA.replace("o_proj", "dense").replace("self_attn", "attention"), REST)
        + layers("attention.g_proj.weight A H heads", REST),
        _sized(
            "bailing_hybrid", **{**DEEPSEEK_CONFIG, "n_routed_experts": None}, num_local_experts="{E}",
            head_dim="{D}", layer_types=["linear_attention", "full_attention"], mlp_layer_types=["dense", "sparse"],
        ),
        MLA_SIZES,
        dtypes={"expert_bias|A_log|dt_bias": "F32"},
    ),
    "mistral4": Family(
        TOP
        + layers(MLA + NORMS)
        + layers(
            ROUTER
            + mlp("mlp.shared_experts.", "S")
            + "mlp.experts.gate_up_proj E 2*M H even|even@1\nmlp.experts.down_proj E H M even@2\n"
        ),
        _sized(
            "mistral4", **{**DEEPSEEK_CONFIG, "first_k_dense_replace": 0}, architectures=["Mistral4ForCausalLM"],
            qk_head_dim="{N+R}", head_dim="{R}",
        ),
        MLA_SIZES,
        author="hand",
    ),
}  # fmt: skip
NOT_OBSERVED = {"bailing_hybrid", "bailing_moe", "mllama"}
"""Plans that were written by hand, and nobody has seen how an engine cuts. vLLM 0.33 does not load mllama, and
transformers has no class of Bailing that it knows."""
MULTIMODAL = [name for name, family in FAMILIES.items() if "text_config" in family.template]
EXPERT_FAMILIES = [name for name, family in FAMILIES.items() if ".experts." in family.table]
BESIDE_THE_LANGUAGE_MODEL = re.compile(
    r"(model\.)?(visual|vision_tower|vision_model|vision_embedder|vision|multi_modal_projector|mm_projector|aligner"
    r"|embed_vision|patch_merge_mlp)\."
)

FP8_BLOCKS = Form(
    {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "weight F8_E4M3 R C\nweight_scale_inv F32 ceil(R,128) ceil(C,128)",
    (128, 128),
)
