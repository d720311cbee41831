"""Quantized checkpoints: how each method stores a weight, under the names and with the configuration that the hub has.

A method turns one weight [rows, columns] into tensors of random bits, and turns such tensors back into numbers, by the
definition of its format: so that the numbers in a rank's slice can be compared with a slice of the numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.checkpoints import DTYPES, Tensors, typed, write
from support.engine_oracle import Array
from support.families import FAMILIES, FP8_BLOCKS, Entry, Family, Form, Sizes


@dataclass(frozen=True)
class Method:
    """How weights are stored, and what they mean."""

    form: Form
    numbers: Callable[[Tensors], Array]
    """The weight that such tensors mean."""
    cache_scales: tuple[str, ...] = ()
    """Names of scales of the attention cache."""
    is_per_head: bool = False
    """Whether these are of one element for each head."""


@dataclass(frozen=True)
class Quantized:
    """A checkpoint of a family, with a method."""

    method: Method
    family: str = "llama"
    sizes: Mapping[str, int] = field(default_factory=dict)
    pattern: str = ""
    """In the names of the weights that are stored so; empty: all linear layers."""
    of_experts: Method | None = None
    """How those of experts are stored, if in another way."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """What config.json says beside `quantization_config`."""

    def method_of(self, entry: Entry) -> Method | None:
        """How a tensor is stored; None: as it is."""
        if not (re.search(self.pattern, entry.name) if self.pattern else entry.is_linear):
            return None
        return self.of_experts if self.of_experts and ".experts." in entry.name else self.method

    def all_sizes(self) -> Sizes:
        """By default one layer, of whose matrices eight ranks can hold blocks of 128."""
        ours = {"L": 1, "A": 8, "K": 2, "D": 128, "H": 128, "I": 1024, "E": 4, "M": 512, "V": 200}
        return self.base.all_sizes(**{**ours, **self.sizes})

    @property
    def base(self) -> Family:
        """The family."""
        return FAMILIES[self.family]

    def entries(self) -> list[Entry]:
        """Its tensors, as if they were not quantized. Ragged cuts do not separate what lies together."""
        return list(map(self._in_blocks, self.base.entries(self.all_sizes())))

    def _in_blocks(self, entry: Entry) -> Entry:
        kind, _, axis = entry.cut.partition("@")
        method = self.method_of(entry)
        if kind != "ragged:1" or method is None:
            return entry
        return replace(entry, cut=f"ragged:{method.form.borders[int(axis or 0)]}@{axis or 0}")


def write_quantized(quantized: Quantized, folder: Path) -> Path:
    """Write the checkpoint into a new folder."""
    torch.manual_seed(0)
    method = quantized.method
    tensors: Tensors = {}
    for entry in quantized.entries():
        module = entry.name.removesuffix("weight")
        if stored := quantized.method_of(entry):
            tensors |= {module + suffix: tensor for suffix, tensor in random_weight(stored, entry.shape).items()}
        else:
            tensors[entry.name] = typed(torch.randn(entry.shape), DTYPES[quantized.base.dtype_of(entry.name)])
    for layer in range(quantized.all_sizes()["L"]):
        for name in method.cache_scales:
            heads = quantized.all_sizes()["A" if name.startswith("q") else "K"]
            shape = (heads, 1, 1) if method.is_per_head else ()
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.rand(shape) + 0.5
    sizes = quantized.all_sizes()
    config = {**quantized.base.config(sizes), **quantized.config}
    has_head_dim = "head_dim" in config or config["model_type"].startswith(("deepseek", "kimi"))
    if sizes["D"] * sizes["A"] != sizes["H"] and not has_head_dim:
        config = {**config, "head_dim": sizes["D"]}
    form = method.form
    if form.config_file == "config.json":
        return write(folder, tensors, {**config, "quantization_config": form.config})
    write(folder, tensors, config)
    (folder / form.config_file).write_text(json.dumps(form.config))
    return folder


# Bits and numbers.


def random_weight(method: Method, shape: tuple[int, ...]) -> Tensors:
    """The tensors of a weight: random bits, random positive numbers for scales."""
    tensors = {name: random(name, dtype, dims) for name, dtype, dims in method.form.stored(shape)}
    if "g_idx" in tensors:
        config, columns = method.form.config, shape[1]
        of_column = torch.arange(columns) // (config["group_size"] if config["group_size"] > 0 else columns)
        tensors["g_idx"] = of_column[torch.randperm(columns) if config["desc_act"] else slice(None)].to(torch.int32)
    if "weight_shape" in tensors:
        tensors["weight_shape"] = torch.tensor(shape)
    return tensors


def random(name: str, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor that is stored under a name that ends so."""
    if (name, dtype) == ("weight", "F8_E4M3"):
        return (torch.randn(shape) * 8).to(DTYPES[dtype])
    if (name, dtype) == ("weight_scale", "U8"):  # Exponents.
        return torch.randint(120, 134, shape, dtype=torch.uint8)
    if dtype in ("U8", "I8"):
        return torch.randint(256, shape, dtype=torch.uint8).view(DTYPES[dtype])
    if dtype == "I32":
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)
    return (torch.rand(shape) + 0.25).to(DTYPES[dtype])


def unpacked(packed: torch.Tensor, bits: int, axis: int) -> Array:
    """Values packed along an axis into 32-bit words, the first into the lowest bits, across words if need be."""
    rows = np.moveaxis(packed.numpy(), axis, -1)
    stream = np.unpackbits(np.ascontiguousarray(rows).view(np.uint8), axis=-1, bitorder="little")
    values = stream.reshape(*rows.shape[:-1], -1, bits) @ (1 << np.arange(bits))
    return np.moveaxis(values, -1, axis)


def number(tensor: torch.Tensor) -> Array:
    """As a float64 array."""
    result: Array = tensor.to(torch.float32).numpy().astype(np.float64)
    return result


def spread(small: Array, shape: tuple[int, ...], block: tuple[int, int]) -> Array:
    """Each element repeated over its block; the last blocks may be partial."""
    assert small.shape == tuple(-(-dim // size) for dim, size in zip(shape, block, strict=True))
    return small.repeat(block[0], 0).repeat(block[1], 1)[: shape[0], : shape[1]]


# FP8 and INT8.


def scaled(
    config: Mapping[str, Any], scales: str, cache_scales: tuple[str, ...] = (), dtype: str = "F8_E4M3"
) -> Method:
    """A weight of 8 bits per number, and a scale for all of it, or for each row, that numpy's broadcasting applies."""

    def numbers(tensors: Tensors) -> Array:
        scale = number(tensors["weight_scale"])
        return number(tensors["weight"]) * (scale.reshape(-1, 1) if scale.ndim == 1 else scale)

    return Method(Form(config, f"weight {dtype} R C\n{scales}"), numbers, cache_scales)


def scaled_rows(kind: str, dtype: str, scale: str) -> Method:
    """As compressed-tensors has it, with a scale for each row."""
    config = compressed(f"{kind}-quantized", weights_of(8, kind, "channel"), {**DYNAMIC, "type": kind})
    return scaled(config, f"weight_scale {scale} R 1", dtype=dtype)


def fp8_blocks(form: Form, name: str) -> Method:
    """A scale for each block of 128 x 128."""

    def numbers(tensors: Tensors) -> Array:
        weight, scales = number(tensors["weight"]), number(tensors[name])
        return weight * spread(scales[:, 0, :, 0] if scales.ndim == 4 else scales, weight.shape, (128, 128))

    return Method(form, numbers)


def compressed(form: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The quantization_config of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed",
    }  # fmt: skip


def weights_of(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    """What compressed-tensors says of the weights."""
    given = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False}
    return {**given, "group_size": None, "block_structure": None, "actorder": None, "observer": "minmax", **more}


# GPTQ and AWQ: words, with the columns along axis 0.


def gptq(bits: int, group: int, *, bias: bool = False, **more: Any) -> Method:
    """AutoGPTQ's format; until 0.7 it wrote a bias beside every weight, of zeros where the model has none."""
    size = "C" if group < 0 else group
    table = f"""
        qweight I32 C*{bits}//32 R
        qzeros I32 C//{size} R*{bits}//32
        scales F16 C//{size} R
        g_idx I32 C
    """

    def numbers(tensors: Tensors) -> Array:
        groups = tensors["g_idx"].numpy() - int(tensors["g_idx"].min())
        zeros = unpacked(tensors["qzeros"], bits, 1) + 1
        values = unpacked(tensors["qweight"], bits, 0) - zeros[groups]
        return (values * number(tensors["scales"])[groups]).T

    config = {
        "quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": True, "lm_head": False,
        "damp_percent": 0.01, "static_groups": False, "true_sequential": True, "checkpoint_format": "gptq", **more,
    }  # fmt: skip
    borders = {4: 8, 8: 4, 3: 32}[bits], max(group, 32 if bits == 3 else 32 // bits)
    return Method(Form(config, table + "bias F16 R" * bias, borders), numbers)


_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def awq(group: int = 128) -> Method:
    """The gemm format: eight rows in a word, in an order of their own."""

    def rows_of(packed: torch.Tensor) -> Array:
        stored = unpacked(packed, 4, 1)
        in_order = np.empty_like(stored).reshape(len(stored), -1, 8)
        in_order[..., _AWQ_ORDER] = stored.reshape(len(stored), -1, 8)
        return in_order.reshape(stored.shape)

    def numbers(tensors: Tensors) -> Array:
        values, zeros = rows_of(tensors["qweight"]), rows_of(tensors["qzeros"])
        groups = np.arange(len(values)) // group
        assert len(values) == len(zeros) * group
        return ((values - zeros[groups]) * number(tensors["scales"])[groups]).T

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm",
              "modules_to_not_convert": None}  # fmt: skip
    table = f"qweight I32 C R//8\nqzeros I32 C//{group} R//8\nscales F16 C//{group} R"
    return Method(Form(config, table, (8, group)), numbers)


# compressed-tensors and ModelOpt: rows along axis 0.


def packed_integers(bits: int, group: int | None, symmetric: bool = True) -> Method:
    """pack-quantized: words along the columns; zero points in words along the rows."""

    num_groups = f"C//{group}" if group else "1"
    table = f"weight_packed I32 R C*{bits}//32\nweight_scale BF16 R {num_groups}\nweight_shape I64 2\n"
    if not symmetric:
        table += f"weight_zero_point I32 R*{bits}//32 {num_groups}"

    def numbers(tensors: Tensors) -> Array:
        values = unpacked(tensors["weight_packed"], bits, 1)
        block = (1, group or values.shape[1])
        scales = spread(number(tensors["weight_scale"]), values.shape, block)
        if symmetric:
            return (values - 2 ** (bits - 1)) * scales
        return (values - spread(unpacked(tensors["weight_zero_point"], bits, 0), values.shape, block)) * scales

    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    weights = {**weights_of(bits, "int", ""), **strategy, "symmetric": symmetric}
    per_word = 32 // bits
    borders = 1 if symmetric else per_word, max(group or 0, per_word)
    return Method(Form(compressed("pack-quantized", weights), table, borders), numbers)


_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_E2M1 = np.concatenate([_E2M1, -_E2M1])


def fp4(config: Mapping[str, Any], group: int, names: str, config_file: str = "config.json") -> Method:
    """Two numbers in a byte along the columns, a scale for each `group`, one for all, and one for the inputs."""
    packed, scale, *others = names.split()
    one = "1" if "global" in names else ""
    table = f"{packed} U8 R C//2\n{scale} {'U8' if group == 32 else 'F8_E4M3'} R C//{group}\n"
    table += "".join(f"{name} F32 {one}\n" for name in others)

    def numbers(tensors: Tensors) -> Array:
        stored = tensors[packed].numpy()
        values = _E2M1[np.stack([stored & 15, stored >> 4], -1).reshape(len(stored), -1)]
        one = tensors[scale]
        by_group = 2.0 ** (number(one) - 127) if one.dtype == torch.uint8 else number(one)
        whole = number(tensors[others[0]]) if others else 1.0
        return values * spread(by_group, values.shape, (1, group)) * whole

    cache = ("k_proj.k_scale", "v_proj.v_scale") if "modelopt" in str(config) or config_file != "config.json" else ()
    return Method(Form(config, table, (1, group), config_file), numbers, cache_scales=cache)


def fp4_beside_fp8(config: Mapping[str, Any]) -> Method:
    """As experts of DeepSeek V4: two numbers in a byte along the columns, an exponent for each 32."""

    def numbers(tensors: Tensors) -> Array:
        stored = tensors["weight"].view(torch.uint8).numpy()
        values = _E2M1[np.stack([stored & 15, stored >> 4], -1).reshape(len(stored), -1)]
        return values * spread(number(tensors["scale"]), values.shape, (1, 32))

    return Method(Form(config, "weight I8 R C//2\nscale F8_E8M0 R C//32", (1, 32)), numbers)


def of_experts_only(method: Method, ignore: str, **more: Any) -> Method:
    """The method, whose configuration names what it leaves as it is; without scales of the attention cache."""
    config = {**method.form.config, "ignore": ignore.split(), **more}
    return replace(method, form=replace(method.form, config=config), cache_scales=())


MODELOPT = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
MODELOPT_NAMES = "weight weight_scale weight_scale_2 input_scale"
FP8_IN_BLOCKS = fp8_blocks(FP8_BLOCKS, "weight_scale_inv")
NVFP4 = fp4(
    compressed("nvfp4-pack-quantized", weights_of(4, "float", "tensor_group", group_size=16)),
    16,
    "weight_packed weight_scale weight_global_scale input_global_scale",
)
NVFP4_MODELOPT = fp4({"quant_method": "modelopt", **MODELOPT}, 16, MODELOPT_NAMES)
DYNAMIC = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
MLA_BLOCKS = {"L": 2, "H": 192, "N": 128, "R": 64, "KL": 128, "QL": 192, "S": 512}


def quark(weight: Mapping[str, Any], inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The quantization_config of AMD Quark."""
    return {
        "quant_method": "quark", "global_quant_config": {"weight": weight, "input_tensors": inputs, "bias": None},
        "layer_quant_config": {}, "layer_type_quant_config": {}, "exclude": ["lm_head"],
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
    }  # fmt: skip


QUARK_INPUTS = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "symmetric": True}
QUARK_ROWS = {**QUARK_INPUTS, "qscheme": "per_channel", "ch_axis": 0}
QUARK_GROUPS = {**QUARK_ROWS, "dtype": "fp4", "qscheme": "per_group", "group_size": 32, "ch_axis": -1,
                "scale_format": "e8m0"}  # fmt: skip


MXFP8 = weights_of(8, "float", "group", group_size=32, scale_dtype="torch.uint8")


def mxfp8(config: Mapping[str, Any]) -> Method:
    """A number in a byte, and an exponent for each 32 columns."""

    def numbers(tensors: Tensors) -> Array:
        values = number(tensors["weight"])
        return values * spread(2.0 ** (number(tensors["weight_scale"]) - 127), values.shape, (1, 32))

    return Method(Form(config, "weight F8_E4M3 R C\nweight_scale U8 R C//32", (1, 32)), numbers)


_NARROW = {"H": 96, "D": 16, "I": 240}
EXPERTS = r"\.experts\."
NOT_KIMI = "re:.*self_attn.* re:.*shared_experts.* re:.*routed_expert_.* re:.*mlp.(gate|up|gate_up|down)_proj.*"
NOT_KIMI += " re:.*lm_head.* re:.*res_proj re:vision_tower.* re:mm_projector.* re:.*eh_proj"
NOT_KIMI_MODELOPT = "*self_attn* *shared_experts* *mlp.gate *lm_head vision_tower* mm_projector* *layers.0.*"
MODELOPT_GROUP = {
    "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
    "input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
    "targets": ["Linear"],
}
KIMI = {**MLA_BLOCKS, "H": 256, "A": 16, "M": 512, "S": 512, "I": 512, "D": 32, "QL": 64, "KL": 64, "N": 32, "R": 16}
DEEPSEEK_V4_LAYERS = (
    r"\.attn\.(wq_a|wkv|wq_b|wo_a|wo_b|indexer\.wq_b)\.weight$|\.ffn\.(shared_)?experts\."
    r"|\.(e_proj|h_proj|main_proj|engram\.wkv)\.weight$"
)
DEEPSEEK_V4_FP8 = {
    **{"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "scale_fmt": "ue8m0",
}
DEEPSEEK_V4 = {"H": 256, "A": 8, "M": 512, "S": 512, "OL": 128, "QL": 128, "L": 3}


def deepseek_v4_fp8(scale: str = "F8_E8M0", **config: Any) -> Method:
    """The linear layers of DeepSeek V4."""
    table = f"weight F8_E4M3 R C\nscale {scale} ceil(R,128) ceil(C,128)"
    return fp8_blocks(Form({**DEEPSEEK_V4_FP8, **config}, table, (128, 128)), "scale")


QUANTIZED: dict[str, Quantized] = {
    "fp8_tensor": Quantized(
        scaled(
            {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
            "weight_scale F32\ninput_scale F32",
            ("k_scale", "v_scale"),
        ),
        sizes=_NARROW,
    ),
    "fp8_tensor_compressed": Quantized(
        scaled(
            compressed("float-quantized", weights_of(8, "float", "tensor"), weights_of(8, "float", "tensor")),
            "weight_scale BF16 1\ninput_scale BF16 1",
            ("k_scale", "v_scale"),
        ),
        sizes=_NARROW,
    ),
    "fp8_tensor_modelopt": Quantized(
        scaled(
            {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
            "weight_scale F32\ninput_scale F32",
            ("k_proj.k_scale", "v_proj.v_scale"),
        ),
        "qwen3_moe",
        {"H": 96, "D": 16, "M": 48},
    ),
    "fp8_channel": Quantized(scaled_rows("float", "F8_E4M3", "BF16"), sizes=_NARROW),
    "fp8_channel_fused": Quantized(scaled_rows("float", "F8_E4M3", "BF16"), "phi3", {"H": 96, "D": 12, "I": 240}),
    "fp8_fbgemm": Quantized(
        scaled(
            {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
            "weight_scale F32 R 1",
        ),
        sizes=_NARROW,
    ),
    "fp8_blocks": Quantized(FP8_IN_BLOCKS, "qwen3", {"H": 192}),
    "fp8_blocks_fused": Quantized(FP8_IN_BLOCKS, "phi3", {"H": 1024}),
    "fp8_blocks_moe": Quantized(FP8_IN_BLOCKS, "qwen3_moe", {"M": 768}),  # As Qwen3-30B-A3B has: 6 blocks.
    "fp8_blocks_deepseek": Quantized(FP8_IN_BLOCKS, "deepseek_v3", MLA_BLOCKS),
    "fp8_blocks_kimi": Quantized(FP8_IN_BLOCKS, "kimi_k2", {**MLA_BLOCKS, "A": 16}),
    "fp8_blocks_longcat": Quantized(
        of_experts_only(FP8_IN_BLOCKS, "model.layers.*.mlp.router.classifier", modules_to_not_convert=["lm_head"]),
        "longcat_flash", {**MLA_BLOCKS, "L": 1, "QL": 256},
    ),
    "fp8_blocks_mimo": Quantized(  # As MiMo V2 Flash has: heads of 192 and 128 elements, and outputs in BF16.
        of_experts_only(
            FP8_IN_BLOCKS, "", ignored_layers=[f"model.layers.{layer}.self_attn.o_proj" for layer in (0, 1)]
        ),
        "mimo_v2", {"L": 2, "D": 192, "U": 128, "A": 8, "K": 8},
        r"(q|k|v|gate|up|down)_proj\.weight$",
    ),
    "fp8_blocks_compressed": Quantized(
        fp8_blocks(
            Form(
                compressed("float-quantized", weights_of(8, "float", "block", block_structure=[128, 128]), DYNAMIC),
                "weight F8_E4M3 R C\nweight_scale BF16 ceil(R,128) ceil(C,128)",
                (128, 128),
            ),
            "weight_scale",
        )
    ),
    "fp8_cache_heads": Quantized(
        replace(
            scaled(
                compressed("float-quantized", weights_of(8, "float", "channel"), DYNAMIC)
                | {"kv_cache_scheme": weights_of(8, "float", "attn_head")},
                "weight_scale BF16 R 1",
                tuple(f"{tensor}_{what}" for tensor in "qkv" for what in ("scale", "zero_point")),
            ),
            is_per_head=True,
        ),
        sizes=_NARROW,
    ),
    "fp8_rows_modelopt": Quantized(
        scaled({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "weight_scale F32 R"),
        sizes=_NARROW,
    ),
    "fp8_blocks_modelopt": Quantized(
        fp8_blocks(
            Form(
                {**MODELOPT, "quant_method": "modelopt", "quant_algo": "FP8_PB_WO"},
                "weight F8_E4M3 R C\nweight_scale F32 ceil(R,128) 1 ceil(C,128) 1",
                (128, 128),
            ),
            "weight_scale",
        )
    ),
    "fp8_quark": Quantized(
        scaled(quark(QUARK_ROWS, QUARK_INPUTS), "weight_scale F32 R\ninput_scale F32"),
        sizes=_NARROW,
    ),
    "mxfp4_quark": Quantized(
        fp4(quark(QUARK_GROUPS), 32, "weight weight_scale"), sizes={"D": 32, "H": 64, "I": 512}
    ),
    "mxfp8": Quantized(
        mxfp8(compressed("mxfp8-quantized", MXFP8, MXFP8 | {"dynamic": True})),
        sizes={"D": 32, "H": 64, "I": 512},
    ),
    "mxfp8_modelopt": Quantized(
        mxfp8({**MODELOPT, "quant_method": "modelopt", "quant_algo": "MXFP8"}), sizes={"D": 32, "H": 64, "I": 512}
    ),
    "int8_channel": Quantized(scaled_rows("int", "I8", "F32"), sizes=_NARROW),
    "gptq_4bit": Quantized(gptq(4, 128), sizes={"H": 256}),
    "gptq_auto_round": Quantized(
        gptq(4, 128, quant_method="auto-round", packing_format="auto_round:auto_gptq", data_type="int"),
        sizes={"H": 256},
    ),
    "gptq_4bit_moe": Quantized(gptq(4, 32), "qwen3_moe", {"M": 128}),
    "gptq_4bit_biases": Quantized(gptq(4, 32, bias=True), sizes={"D": 32, "I": 256}),
    "gptq_4bit_biases_moe": Quantized(gptq(4, 32, bias=True), "mixtral", {"D": 32, "I": 256}),
    "gptq_4bit_biases_fused": Quantized(gptq(4, 32, bias=True), "phi3", {"H": 256, "D": 32, "I": 256}),
    "gptq_4bit_per_row": Quantized(gptq(4, -1), sizes={"D": 16, "I": 256}),
    "gptq_4bit_act_order_per_row": Quantized(gptq(4, -1, desc_act=True), sizes={"D": 16, "I": 256}),
    "gptq_8bit": Quantized(gptq(8, 128)),
    "gptq_3bit": Quantized(gptq(3, 128), sizes={"K": 8}),
    "gptq_3bit_small_groups": Quantized(gptq(3, 32), sizes={"D": 32, "I": 320}),
    "awq": Quantized(awq(), sizes={"H": 256}),
    "awq_fused": Quantized(awq(), "phi3", {"H": 1024}),
    "awq_moe": Quantized(awq(32), "mixtral", {"I": 256, "D": 32}),
    "int4_groups": Quantized(packed_integers(4, 128), sizes={"H": 256}),
    "int4_groups_asymmetric": Quantized(packed_integers(4, 64, symmetric=False), sizes={"D": 64, "I": 512}),
    "int4_groups_fused": Quantized(packed_integers(4, 32), "phi3", {"H": 256, "D": 32, "I": 256}),
    "int4_channel": Quantized(packed_integers(4, None), sizes={"D": 16, "I": 320}),
    "int4_channel_asymmetric": Quantized(packed_integers(4, None, symmetric=False), sizes={"D": 16, "I": 320}),
    "int8_groups": Quantized(packed_integers(8, 32), sizes={"D": 32, "I": 256}),
    "nvfp4": Quantized(NVFP4, sizes={"D": 16, "I": 256}),
    "nvfp4_moe": Quantized(NVFP4, "qwen3_moe", {"D": 32, "M": 96}),
    "nvfp4_modelopt": Quantized(NVFP4_MODELOPT, sizes={"D": 16, "I": 128}),
    "nvfp4_modelopt_moe": Quantized(NVFP4_MODELOPT, "qwen3_moe", {"D": 32, "M": 96}),
    "nvfp4_modelopt_file": Quantized(
        fp4({"producer": {"name": "modelopt", "version": "0.33.0"}, "quantization": MODELOPT}, 16, MODELOPT_NAMES,
            "hf_quant_config.json"),
        sizes={"D": 16, "I": 160},
    ),
    "mxfp4": Quantized(
        fp4(
            compressed("mxfp4-pack-quantized", weights_of(4, "float", "group", group_size=32)), 32,
            "weight_packed weight_scale",
        ),
        sizes={"D": 32, "I": 256},
    ),
    "int4_kimi_k25": Quantized(
        of_experts_only(packed_integers(4, 32), NOT_KIMI), "kimi_k25", {**KIMI, "L": 2}, EXPERTS
    ),
    "nvfp4_kimi_k25": Quantized(
        of_experts_only(NVFP4_MODELOPT, NOT_KIMI_MODELOPT, config_groups={"group_0": MODELOPT_GROUP}),
        "kimi_k25", {**KIMI, "L": 2}, EXPERTS,
    ),
    "nvfp4_kimi_k25_old": Quantized(
        of_experts_only(NVFP4_MODELOPT, NOT_KIMI_MODELOPT, config_groups={"group_0": MODELOPT_GROUP}),
        "kimi_k25_old", {**KIMI, "L": 2}, EXPERTS,
    ),
    "mxfp4_kimi_k3": Quantized(
        of_experts_only(
            fp4(
                compressed(
                    "mxfp4-pack-quantized", weights_of(4, "float", "group", group_size=32, scale_dtype="torch.uint8")
                ),
                32, "weight_packed weight_scale",
            ),
            NOT_KIMI,
        ),
        "kimi_k3", {**KIMI, "L": 3, "RH": 128, "VA": 12, "VH": 192, "VI": 288, "VQ": 192}, EXPERTS,
    ),
    "fp8_fp4_deepseek_v4": Quantized(
        deepseek_v4_fp8(), "deepseek_v4", DEEPSEEK_V4, DEEPSEEK_V4_LAYERS, fp4_beside_fp8(DEEPSEEK_V4_FP8)
    ),
    "fp8_deepseek_v4": Quantized(
        deepseek_v4_fp8("F32"), "deepseek_v4", DEEPSEEK_V4, DEEPSEEK_V4_LAYERS, config={"expert_dtype": "fp8"}
    ),
    "fp8_nvfp4_deepseek_v4": Quantized(
        deepseek_v4_fp8(moe_quant_algo="NVFP4"), "deepseek_v4", DEEPSEEK_V4, DEEPSEEK_V4_LAYERS,
        replace(NVFP4_MODELOPT, cache_scales=()),
    ),
    "fp8_fp4_deepseek_v41": Quantized(
        deepseek_v4_fp8(), "deepseek_v41", {**DEEPSEEK_V4, "H": 512, "L": 4}, DEEPSEEK_V4_LAYERS,
        fp4_beside_fp8(DEEPSEEK_V4_FP8),
    ),
}  # fmt: skip
EXPERT_QUANTIZED = [name for name, quantized in QUANTIZED.items() if ".experts." in quantized.base.table]


# What cannot be cut.


REFUSED_FORMS = {
    "desc_act": gptq(4, 32, desc_act=True).form,
    "bitsandbytes 4 bit": Form(
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        """
        weight U8 R*C//2 1
        weight.absmax U8 R*C//64
        weight.quant_map F32 16
        weight.nested_absmax F32 R*C//64//256+1
        weight.nested_quant_map F32 256
        weight.quant_state.bitsandbytes__nf4 U8 80
        """,
    ),
}
