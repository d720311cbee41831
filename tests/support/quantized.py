"""Quantized checkpoints: how each method stores a weight, under the names and with the configuration that the hub has.

A method turns one weight [rows, columns] into tensors of random bits, and turns such tensors back into numbers, by the
definition of its format: so that the numbers in a rank's slice can be compared with a slice of the numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.checkpoints import Entry, Family, Sizes, Tensors, write
from support.engine_oracle import Array
from support.families import FAMILIES

F8, F32, F16, BF16 = torch.float8_e4m3fn, torch.float32, torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Method:
    """How weights are stored."""

    config: Mapping[str, Any]
    """quantization_config."""
    store: Callable[[int, int], Tensors]
    """The tensors of a weight of so many rows and columns, by the last part of their names."""
    numbers: Callable[[Tensors], Array]
    """The weight that such tensors mean."""
    units: tuple[int, int] = (1, 1)
    """Rows and columns that lie together, so that a cut must not fall between them."""
    cache_scales: tuple[str, ...] = ()
    """Names of scales of the attention cache."""
    config_file: str = "config.json"
    """Where the configuration is: there, or beside it under a key of its own."""


@dataclass(frozen=True)
class Quantized:
    """A checkpoint of a family, with a method."""

    method: Method
    family: str = "llama"
    sizes: Mapping[str, int] = field(default_factory=dict)

    def all_sizes(self) -> Sizes:
        """By default one layer, of whose matrices eight ranks can hold blocks of 128."""
        ours = {"L": 1, "A": 8, "K": 2, "D": 128, "H": 128, "I": 1024, "E": 4, "M": 512, "V": 200}
        return self.base.all_sizes(**{**ours, **self.sizes})

    @property
    def base(self) -> Family:
        """The family."""
        return FAMILIES[self.family]

    def entries(self) -> list[Entry]:
        """Its tensors, as if they were not quantized."""
        return self.base.entries(self.all_sizes())


def is_quantized(entry: Entry) -> bool:
    """Whether quantization tools store this tensor in their own way: the linear layers but for the first and last."""
    return re.search(r"((?<!eh)_proj(_with_mqa)?|\.w[123])\.weight$", entry.name) is not None


def write_quantized(quantized: Quantized, folder: Path) -> Path:
    """Write the checkpoint into a new folder."""
    torch.manual_seed(0)
    method, tensors = quantized.method, {}
    for entry in quantized.entries():
        module = entry.name.removesuffix("weight")
        if is_quantized(entry):
            rows, columns = entry.shape
            stored = {f"{module}{suffix}": tensor for suffix, tensor in method.store(rows, columns).items()}
        else:
            stored = {entry.name: torch.randn(entry.shape).to(quantized.base.dtype(entry.name))}
        tensors |= stored
    for layer in range(quantized.all_sizes()["L"]):
        for name in method.cache_scales:
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.rand(()) + 0.5
    sizes = quantized.all_sizes()
    config = quantized.base.config(sizes)
    if sizes["D"] * sizes["A"] != sizes["H"] and not config["model_type"].startswith(("deepseek", "kimi")):
        config = {**config, "head_dim": sizes["D"]}
    if method.config_file == "config.json":
        return write(folder, tensors, {**config, "quantization_config": method.config})
    write(folder, tensors, config)
    (folder / method.config_file).write_text(json.dumps(method.config))
    return folder


# Bits and numbers.


def words(*shape: int) -> torch.Tensor:
    """Random bits, 32 at a time."""
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


def nibbles(*shape: int) -> torch.Tensor:
    """Random bits, 8 at a time."""
    return torch.randint(256, shape, dtype=torch.uint8)


def floats8(*shape: int) -> torch.Tensor:
    """Random numbers of 8 bits."""
    return (torch.randn(shape) * 8).to(F8)


def scales(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    """Random positive numbers."""
    return (torch.rand(shape) + 0.25).to(dtype)


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


def fp8(config: Mapping[str, Any], scale: Callable[[int, int], Tensors], **more: Any) -> Method:
    """A weight of 8 bits per number, and a scale for all of it, or for each row, that numpy's broadcasting applies."""

    def numbers(tensors: Tensors) -> Array:
        [name] = tensors.keys() & {"weight_scale"}
        return number(tensors["weight"]) * number(tensors[name])

    return Method(
        config, lambda rows, columns: {"weight": floats8(rows, columns), **scale(rows, columns)}, numbers, **more
    )


def fp8_blocks(config: Mapping[str, Any], name: str, dtype: torch.dtype = F32) -> Method:
    """A scale for each block of 128 x 128."""

    def store(rows: int, columns: int) -> Tensors:
        return {"weight": floats8(rows, columns), name: scales(-(-rows // 128), -(-columns // 128), dtype=dtype)}

    def numbers(tensors: Tensors) -> Array:
        weight = number(tensors["weight"])
        return weight * spread(number(tensors[name]), weight.shape, (128, 128))

    return Method(config, store, numbers, (128, 128))


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

    def store(rows: int, columns: int) -> Tensors:
        size = columns if group < 0 else group
        return {
            "qweight": words(columns * bits // 32, rows),
            "qzeros": words(columns // size, rows * bits // 32),
            "scales": scales(columns // size, rows, dtype=F16),
            "g_idx": (torch.arange(columns) // size).to(torch.int32),
            **({"bias": scales(rows, dtype=F16)} if bias else {}),
        }

    def numbers(tensors: Tensors) -> Array:
        groups = tensors["g_idx"].numpy() - int(tensors["g_idx"].min())
        zeros = unpacked(tensors["qzeros"], bits, 1) + 1
        values = unpacked(tensors["qweight"], bits, 0) - zeros[groups]
        return (values * number(tensors["scales"])[groups]).T

    config = {
        "quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": True, "lm_head": False,
        "damp_percent": 0.01, "static_groups": False, "true_sequential": True, "checkpoint_format": "gptq", **more,
    }  # fmt: skip
    return Method(config, store, numbers, ({4: 8, 8: 4, 3: 32}[bits], max(group, 32 if bits == 3 else 32 // bits)))


_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def awq(group: int = 128) -> Method:
    """The gemm format: eight rows in a word, in an order of their own."""

    def rows_of(packed: torch.Tensor) -> Array:
        stored = unpacked(packed, 4, 1)
        in_order = np.empty_like(stored).reshape(len(stored), -1, 8)
        in_order[..., _AWQ_ORDER] = stored.reshape(len(stored), -1, 8)
        return in_order.reshape(stored.shape)

    def store(rows: int, columns: int) -> Tensors:
        return {
            "qweight": words(columns, rows // 8),
            "qzeros": words(columns // group, rows // 8),
            "scales": scales(columns // group, rows, dtype=F16),
        }

    def numbers(tensors: Tensors) -> Array:
        values, zeros = rows_of(tensors["qweight"]), rows_of(tensors["qzeros"])
        groups = np.arange(len(values)) // group
        assert len(values) == len(zeros) * group
        return ((values - zeros[groups]) * number(tensors["scales"])[groups]).T

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm",
              "modules_to_not_convert": None}  # fmt: skip
    return Method(config, store, numbers, (8, group))


# compressed-tensors and ModelOpt: rows along axis 0.


def packed_integers(bits: int, group: int | None, symmetric: bool = True) -> Method:
    """pack-quantized: words along the columns; zero points in words along the rows."""

    def store(rows: int, columns: int) -> Tensors:
        num_groups = columns // group if group else 1
        tensors = {
            "weight_packed": words(rows, columns * bits // 32),
            "weight_scale": scales(rows, num_groups, dtype=BF16),
            "weight_shape": torch.tensor([rows, columns]),
        }
        return tensors if symmetric else {**tensors, "weight_zero_point": words(rows * bits // 32, num_groups)}

    def numbers(tensors: Tensors) -> Array:
        values = unpacked(tensors["weight_packed"], bits, 1)
        block = (1, group or values.shape[1])
        middle = 2 ** (bits - 1)
        if not symmetric:
            zeros = unpacked(tensors["weight_zero_point"], bits, 0)
            return (values - spread(zeros, values.shape, block)) * spread(
                number(tensors["weight_scale"]), values.shape, block
            )
        return (values - middle) * spread(number(tensors["weight_scale"]), values.shape, block)

    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    weights = {**weights_of(bits, "int", ""), **strategy, "symmetric": symmetric}
    per_word = 32 // bits
    return Method(
        compressed("pack-quantized", weights), store, numbers,
        (1 if symmetric else per_word, max(group or 0, per_word)),
    )  # fmt: skip


_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_E2M1 = np.concatenate([_E2M1, -_E2M1])


def fp4(config: Mapping[str, Any], group: int, names: str, config_file: str = "config.json") -> Method:
    """Two numbers in a byte along the columns, a scale for each `group`, one for all, and one for the inputs."""
    packed, scale, *others = names.split()

    def store(rows: int, columns: int) -> Tensors:
        shape = (rows, columns // group)
        scale_bits = torch.randint(120, 134, shape, dtype=torch.uint8) if group == 32 else scales(*shape).to(F8)
        shared = {name: scales(1) if "global" in name else scales() for name in others}
        return {packed: nibbles(rows, columns // 2), scale: scale_bits, **shared}

    def numbers(tensors: Tensors) -> Array:
        stored = tensors[packed].numpy()
        values = _E2M1[np.stack([stored & 15, stored >> 4], -1).reshape(len(stored), -1)]
        one = tensors[scale]
        by_group = 2.0 ** (number(one) - 127) if one.dtype == torch.uint8 else number(one)
        whole = number(tensors[others[0]]) if others else 1.0
        return values * spread(by_group, values.shape, (1, group)) * whole

    cache = ("k_proj.k_scale", "v_proj.v_scale") if "modelopt" in str(config) or config_file != "config.json" else ()
    return Method(config, store, numbers, (1, group), cache, config_file)


MODELOPT = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
MODELOPT_NAMES = "weight weight_scale weight_scale_2 input_scale"
FP8_BLOCK_CONFIG = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
}  # fmt: skip
FP8_BLOCKS = fp8_blocks(FP8_BLOCK_CONFIG, "weight_scale_inv")
NVFP4 = fp4(
    compressed("nvfp4-pack-quantized", weights_of(4, "float", "tensor_group", group_size=16)),
    16,
    "weight_packed weight_scale weight_global_scale input_global_scale",
)
NVFP4_MODELOPT = fp4({"quant_method": "modelopt", **MODELOPT}, 16, MODELOPT_NAMES)
DYNAMIC = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
MLA_BLOCKS = {"L": 2, "H": 192, "N": 128, "R": 64, "KL": 128, "QL": 192, "S": 512}

QUANTIZED: dict[str, Quantized] = {
    "fp8_tensor": Quantized(
        fp8(
            {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
            lambda _rows, _columns: {"weight_scale": scales(), "input_scale": scales()},
            cache_scales=("k_scale", "v_scale"),
        ),
        sizes={"H": 96, "D": 16, "I": 240},
    ),
    "fp8_tensor_compressed": Quantized(
        fp8(
            compressed("float-quantized", weights_of(8, "float", "tensor"), weights_of(8, "float", "tensor")),
            lambda _rows, _columns: {"weight_scale": scales(1, dtype=BF16), "input_scale": scales(1, dtype=BF16)},
            cache_scales=("k_scale", "v_scale"),
        ),
        sizes={"H": 96, "D": 16, "I": 240},
    ),
    "fp8_tensor_modelopt": Quantized(
        fp8(
            {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
            lambda _rows, _columns: {"weight_scale": scales(), "input_scale": scales()},
            cache_scales=("k_proj.k_scale", "v_proj.v_scale"),
        ),
        "qwen3_moe",
        {"H": 96, "D": 16, "M": 48},
    ),
    "fp8_channel": Quantized(
        fp8(
            compressed("float-quantized", weights_of(8, "float", "channel"), DYNAMIC),
            lambda rows, _columns: {"weight_scale": scales(rows, 1, dtype=BF16)},
        ),
        sizes={"H": 96, "D": 16, "I": 240},
    ),
    "fp8_channel_fused": Quantized(
        fp8(
            compressed("float-quantized", weights_of(8, "float", "channel"), DYNAMIC),
            lambda rows, _columns: {"weight_scale": scales(rows, 1, dtype=BF16)},
        ),
        "phi3",
        {"H": 96, "D": 12, "I": 240},
    ),
    "fp8_fbgemm": Quantized(
        fp8(
            {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
            lambda rows, _columns: {"weight_scale": scales(rows, 1)},
        ),
        sizes={"H": 96, "D": 16, "I": 240},
    ),
    "fp8_blocks": Quantized(FP8_BLOCKS, "qwen3", {"H": 192}),
    "fp8_blocks_fused": Quantized(FP8_BLOCKS, "phi3", {"H": 1024}),
    "fp8_blocks_moe": Quantized(FP8_BLOCKS, "qwen3_moe"),
    "fp8_blocks_deepseek": Quantized(FP8_BLOCKS, "deepseek_v3", MLA_BLOCKS),
    "fp8_blocks_kimi": Quantized(FP8_BLOCKS, "kimi_k2", {**MLA_BLOCKS, "A": 16}),
    "fp8_blocks_compressed": Quantized(
        fp8_blocks(
            compressed("float-quantized", weights_of(8, "float", "block", block_structure=[128, 128]), DYNAMIC),
            "weight_scale",
            BF16,
        )
    ),
    "int8_channel": Quantized(
        Method(
            compressed("int-quantized", weights_of(8, "int", "channel"), {**DYNAMIC, "type": "int"}),
            lambda rows, columns: {"weight": nibbles(rows, columns).to(torch.int8), "weight_scale": scales(rows, 1)},
            lambda tensors: number(tensors["weight"]) * number(tensors["weight_scale"]),
        ),
        sizes={"H": 96, "D": 16, "I": 240},
    ),
    "gptq_4bit": Quantized(gptq(4, 128), sizes={"H": 256}),
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
}  # fmt: skip
EXPERT_QUANTIZED = [name for name, quantized in QUANTIZED.items() if ".experts." in quantized.base.table]


# What cannot be cut.


def refused_forms() -> dict[str, tuple[Mapping[str, Any], Callable[[int, int], Tensors]]]:
    """Their quantization_config, and how they store a weight."""

    def bitsandbytes4(rows: int, columns: int) -> Tensors:
        return {
            "weight": nibbles(rows * columns // 2, 1),
            "weight.absmax": nibbles(rows * columns // 64),
            "weight.quant_map": torch.randn(16),
            "weight.nested_absmax": torch.rand(rows * columns // 64 // 256 + 1),
            "weight.nested_quant_map": torch.randn(256),
            "weight.quant_state.bitsandbytes__nf4": nibbles(80),
        }

    def bitsandbytes8(rows: int, columns: int) -> Tensors:
        bits = nibbles(rows, columns).view(torch.int8)
        return {"weight": bits, "SCB": torch.rand(rows), "weight_format": nibbles()}

    def act_order(rows: int, columns: int) -> Tensors:
        tensors = gptq(4, 32).store(rows, columns)
        return {**tensors, "g_idx": tensors["g_idx"][torch.randperm(columns)]}

    def marlin(rows: int, columns: int) -> Tensors:
        return {"B": words(columns // 16, rows * 2), "s": scales(columns // 32, rows, dtype=F16)}

    def plain(rows: int, columns: int) -> Tensors:
        return {"weight": floats8(rows, columns), "weight_scale": scales()}

    torchao = {"_type": "Int4WeightOnlyConfig", "_version": 1, "_data": {"group_size": 128}}
    return {
        "desc_act": (gptq(4, 32, desc_act=True).config, act_order),
        "marlin": ({**gptq(4, 32).config, "checkpoint_format": "marlin", "is_marlin_format": True}, marlin),
        "bitsandbytes 4 bit": (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, bitsandbytes4
        ),
        "bitsandbytes 8 bit": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, bitsandbytes8),
        "quark": ({"quant_method": "quark", "global_quant_config": {}, "export": {"kv_cache_group": []}}, plain),
        "torchao": (
            {"quant_method": "torchao", "quant_type": {"default": torchao}},
            lambda rows, columns: {"_weight_qdata": nibbles(rows, columns // 2), "_weight_scale": scales(rows, 1)},
        ),
        "gguf": ({"quant_method": "gguf"}, lambda rows, columns: {"weight": nibbles(rows, columns // 32 * 18)}),
        "squeezellm": ({"quant_method": "squeezellm", "wbits": 4}, plain),
    }  # fmt: skip
