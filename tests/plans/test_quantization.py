"""relayout.plans.quantization: which tensors store a weight between them, and where they are cut when the weight is.

The quantization_config of each method is as checkpoints on the hub have it, some of it left out where it is long.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.local_stores import read_source

from relayout.errors import FormatError, PlanError
from relayout.plans.quantization import QuantizedWeight, Values, find_scheme, is_cache_scale

Stored = dict[str, tuple[str, tuple[int, ...]]]

# deepseek-ai/DeepSeek-V3, neuralmagic/Meta-Llama-3-8B-Instruct-FP8.
FP8_BLOCKS = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
# deepseek-ai/DeepSeek-V4-Flash, with experts in FP4; its form by ModelOpt has them in NVFP4.
DEEPSEEK_V4 = {**FP8_BLOCKS, "scale_fmt": "ue8m0"}
FP8 = {"activation_scheme": "static", "ignored_layers": ["lm_head"], "quant_method": "fp8"}
# Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4, TheBloke/Llama-2-7B-GPTQ.
GPTQ = {
    "bits": 4, "damp_percent": 0.01, "dataset": None, "desc_act": False, "exllama_config": {"version": 1},
    "group_size": 128, "modules_in_block_to_quantize": None, "quant_method": "gptq", "sym": True, "tokenizer": None,
    "true_sequential": True, "use_exllama": True,
}  # fmt: skip
ACT_ORDER = {
    "bits": 4, "group_size": 128, "damp_percent": 0.01, "desc_act": True, "sym": True, "true_sequential": True,
    "model_name_or_path": None, "model_file_base_name": "model", "quant_method": "gptq",
}  # fmt: skip
# Qwen/Qwen2.5-7B-Instruct-AWQ.
AWQ = {
    "bits": 4, "group_size": 128, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm",
    "zero_point": True,
}  # fmt: skip
# nvidia/DeepSeek-R1-FP4 (hf_quant_config.json).
MODELOPT_NVFP4 = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
# openai/gpt-oss-120b.
MXFP4 = {"modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"], "quant_method": "mxfp4"}


def compressed(stored: Any, *weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    """As RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic, -quantized.w8a8, -quantized.w4a16, -NVFP4 and others."""
    common = {"actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "observer": "minmax",
              "observer_kwargs": {}, "symmetric": True}  # fmt: skip
    groups = {
        f"group_{n}": {"input_activations": None, "output_activations": None, "targets": ["Linear"],
                       "weights": {**common, **own}}
        for n, own in enumerate(weights)
    }  # fmt: skip
    return {
        "config_groups": groups, "format": stored, "global_compression_ratio": 1.2, "ignore": ["lm_head"],
        "kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "compressed", **more,
    }  # fmt: skip


CHANNEL = {"num_bits": 8, "strategy": "channel", "type": "float"}
INT4 = {"num_bits": 4, "strategy": "group", "type": "int", "group_size": 128}
FLOAT4 = {"num_bits": 4, "strategy": "tensor_group", "type": "float", "group_size": 16}
BLOCKS = {"num_bits": 8, "strategy": "block", "type": "float", "block_structure": [128, 128]}


# amd/Llama-3.1-8B-Instruct-FP8-KV and others of Quark.
FP8_ROWS = {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0, "is_dynamic": False, "symmetric": True}
# Intel/Qwen2.5-7B-Instruct-int4-AutoRound and others.
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "packing_format": "auto_round:auto_gptq"}


def quark(weight: Any, **layers: Any) -> dict[str, Any]:
    return {
        "quant_method": "quark", "global_quant_config": {"weight": weight, "input_tensors": None, "bias": None},
        "layer_quant_config": {name: {"weight": of_layer} for name, of_layer in layers.items()},
        "layer_type_quant_config": {}, "exclude": ["lm_head"], "export": {"kv_cache_group": []},
    }  # fmt: skip


def mixed_precision(*layers: dict[str, Any]) -> dict[str, Any]:
    """As nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4."""
    named = {f"model.layers.{n}": layer for n, layer in enumerate(layers)}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": named}


# Which scheme; test_quantized_checkpoints.py has the usual configurations.


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({**GPTQ, "checkpoint_format": "gptq_v2", "quant_method": "gptqmodel"}, "gptq"),
        # Act-order with one group is no order of groups.
        ({**ACT_ORDER, "group_size": -1}, "gptq"),
        ({**AWQ, "version": "GEMM"}, "awq"),
        (compressed("pack-quantized", {**INT4, "actorder": "weight"}), "compressed-tensors"),
        (compressed("pack-quantized", {**INT4, "actorder": "static"}), "compressed-tensors"),
        (compressed("float-quantized", CHANNEL, sparsity_config={"format": "dense"}), "compressed-tensors"),
        ({"quant_method": "modelopt_fp4", **MODELOPT_NVFP4}, "modelopt"),
        ({"quant_method": "modelopt", "producer": {}, "quantization": MODELOPT_NVFP4}, "modelopt"),
        (MXFP4, "mxfp4"),
        ({**AUTO_ROUND, "extra_config": {"lm_head": {"bits": 16}}}, "gptq"),
        ({**AUTO_ROUND, "quant_method": "intel/auto-round", "packing_format": "auto_round:auto_awq"}, "awq"),
        (quark([FP8_ROWS], lm_head=None), "quark"),
    ],
)
def test_the_scheme_is_that_of_the_method(config: dict[str, Any], name: str) -> None:
    assert find_scheme(config).name == name


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "bitsandbytes, .*flat"),
        ({"quant_method": "BITSANDBYTES_4bit"}, "bitsandbytes-4bit, .*flat"),
        ({"quant_method": "gguf"}, "gguf, .*blocks are not stored as tensors"),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4"}}}, "torchao, .*flattened"),
        (quark({"dtype": "int4"}), r"quark \('int4' None\), .*fp8"),
        (quark(FP8_ROWS, lm_head=[FP8_ROWS, {"dtype": "int4"}]), r"quark \(\[.*fp8"),
        ({**AUTO_ROUND, "packing_format": "auto_round:llm_compressor"}, r"auto-round \('auto_round:ll.*integers"),
        ({**AUTO_ROUND, "data_type": "mx_fp"}, r"auto-round \('auto_round:auto_gptq'\), .*integers"),
        (
            {**AUTO_ROUND, "packing_format": "auto_round:auto_awq", "extra_config": {"lm_head": {"bits": 8}}},
            r"auto-round \('auto_round:auto_awq'\), .*same bits",
        ),
        ({"quant_method": "hqq", "quant_config": {}}, "hqq, .*packed flat"),
        ({"quant_method": "aqlm", "nbits_per_codebook": 16}, "aqlm, .*codebooks"),
        ({"quant_method": "vptq"}, "vptq, .*codebooks"),
        ({"quant_method": "quip_sharp"}, "quip-sharp, .*rotated"),
        ({"quant_method": "higgs"}, "higgs, .*rotated"),
        ({"quant_method": "quanto", "weights": "int8"}, "quanto, .*no rows"),
        ({"quant_method": "squeezellm", "wbits": 4}, "squeezellm, .*relayout does not know how it stores them"),
        ({"bits": 4}, "method unknown, .*relayout does not know how it stores them"),
        (ACT_ORDER, r"GPTQ with act-order \(desc_act\), .*scattered"),
        # GPTQModel: exceptions for some layers.
        ({**GPTQ, "dynamic": {"-:lm_head": {}, "+:.*down": {"desc_act": True}}}, r"GPTQ with act-order \(desc_act\)"),
        ({**GPTQ, "is_marlin_format": True}, "GPTQ in marlin format, .*one kernel"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "GPTQ in marlin format, .*one kernel"),
        ({**AWQ, "version": "gemv"}, "AWQ in gemv format, .*only the gemm format"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors, .*no config_groups"),
        (compressed("pack-quantized"), "compressed-tensors, .*no config_groups"),
        (compressed("marlin-24", INT4), "compressed-tensors, format marlin-24, .*not know how it stores them"),
        (compressed("pack-quantized", {**INT4, "actorder": "group"}), r"compressed-tensors with act-order \(ac"),
        (compressed("pack-quantized", {**INT4, "actorder": "dynamic"}), r"compressed-tensors with act-order \(ac"),
        (compressed("pack-quantized", {**INT4, "actorder": True}), r"compressed-tensors with act-order \(ac"),
        (compressed(["pack-quantized"], INT4), "compressed-tensors, format .*not know how it stores them"),
        (compressed("float-quantized", CHANNEL, sparsity_config={"format": "sparse-bitmask"}), "compressed-tensors, s"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, r"modelopt \(W4A8_AWQ\), .*FP8, .*NVFP4"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, r"modelopt \(MIXED_PRECISION\), .*knows"),
        (mixed_precision({"quant_algo": "FP8"}, {"quant_algo": "Q4_K"}), r"modelopt \(Q4_K\), .*knows"),
        ({"quant_method": "modelopt"}, r"modelopt \(no quant_algo\), "),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused_with_the_reason(config: dict[str, Any], message: str) -> None:
    with pytest.raises(
        PlanError, match=f"^weights are quantized by {message}.*use --tp 1, which keeps tensors whole$"
    ) as caught:
        find_scheme(config)
    # vLLM has loaders of its own for some, which are not observed.
    assert ("--plan vllm" in str(caught.value)) == (
        not re.match("(?i)bitsandbytes|gguf", config.get("quant_method", ""))
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**GPTQ, "bits": "4"}, "bits is '4', expected a number of bits"),
        ({key: value for key, value in GPTQ.items() if key != "bits"}, "bits is None, expected a number of bits"),
        ({**AWQ, "bits": 0}, "bits is 0, expected a number of bits"),
        ({**AWQ, "bits": True}, "bits is True, expected a number of bits"),
        (compressed("pack-quantized", {**INT4, "num_bits": 32}), "num_bits is 32, expected a number of bits"),
        ({**FP8_BLOCKS, "weight_block_size": [128]}, r"block \[128\], expected \[rows, columns\]"),
        ({**FP8_BLOCKS, "weight_block_size": [128, 0]}, r"block \[128, 0\], expected \[rows, columns\]"),
        ({**FP8_BLOCKS, "weight_block_size": 128}, r"block 128, expected \[rows, columns\]"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=f"^quantization_config: {message}$"):
        find_scheme(config)


# What tensors store between them: a weight of 64 rows (outputs) and 256 columns (inputs).

SHAPE = ("I64", (2,))
STORED: dict[str, tuple[dict[str, Any], Stored, Values]] = {
    "gptq without g_idx": (
        GPTQ, {"qweight": ("I32", (32, 64)), "qzeros": ("I32", (2, 8)), "scales": ("F16", (2, 64))}, Values(4, 128),
    ),
    "awq": (AWQ, {"qweight": ("I32", (256, 8)), "qzeros": ("I32", (2, 8)), "scales": ("F16", (2, 64))}, Values(4, 128)),
    # The second of two config groups: 8 bits in one group.
    "mixed": (
        compressed("pack-quantized", INT4, {**INT4, "num_bits": 8, "strategy": "channel", "group_size": None}),
        {"weight_packed": ("I32", (64, 64)), "weight_scale": ("BF16", (64, 1)), "weight_shape": SHAPE}, Values(8),
    ),
    "nvfp4": (
        compressed("nvfp4-pack-quantized", FLOAT4),
        {"weight_packed": ("U8", (64, 128)), "weight_scale": ("F8_E4M3", (64, 16)),
         "weight_global_scale": ("F32", (1,)), "input_global_scale": ("F32", (1,))}, Values(4, 16),
    ),
    "modelopt nvfp4": (
        {"quant_method": "modelopt", **MODELOPT_NVFP4},
        {"weight": ("U8", (64, 128)), "weight_scale": ("F8_E4M3", (64, 16)), "weight_scale_2": ("F32", ()),
         "input_scale": ("F32", ())}, Values(4, 16),
    ),
    "quark_fp8": (
        quark(FP8_ROWS), {"weight": ("F8_E4M3", (64, 256)), "weight_scale": ("F32", (64,))}, Values(8),
    ),
    "quark_mxfp4": (
        quark({"dtype": "fp4", "qscheme": "per_group", "group_size": 32}),
        {"weight": ("U8", (64, 128)), "weight_scale": ("U8", (64, 8))}, Values(4, 32),
    ),
}  # fmt: skip


BESIDE_FP8: dict[str, tuple[dict[str, Any], Stored, Values]] = {
    "fp8": (
        DEEPSEEK_V4, {"weight": ("F8_E4M3", (64, 256)), "scale": ("F8_E8M0", (1, 2))}, Values(8, block=(128, 128)),
    ),
    "fp4": (DEEPSEEK_V4, {"weight": ("I8", (64, 128)), "scale": ("F8_E8M0", (64, 8))}, Values(4, 32)),
    "nvfp4": (
        {**DEEPSEEK_V4, "quant_method": "deepseek_v4_fp8", "moe_quant_algo": "NVFP4"},
        STORED["modelopt nvfp4"][1], Values(4, 16),
    ),
    "as DeepSeek V3": (
        FP8_BLOCKS, {"weight": ("F8_E4M3", (64, 256)), "weight_scale_inv": ("F32", (1, 2))},
        Values(8, block=(128, 128)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BESIDE_FP8)
def test_experts_in_four_bits_are_told_from_layers_in_fp8(name: str) -> None:
    config, stored, values = BESIDE_FP8[name]
    assert stored.keys() <= find_scheme(config).tensors.keys()
    assert find_scheme(config).weights(stored) == (QuantizedWeight(64, 256, values),)


@pytest.mark.parametrize("name", STORED)
def test_tensors_tell_the_weight_that_they_store(name: str) -> None:
    config, stored, values = STORED[name]
    assert stored.keys() <= find_scheme(config).tensors.keys()
    assert QuantizedWeight(64, 256, values) in find_scheme(config).weights(stored)


@pytest.mark.parametrize(
    ("config", "stored"),
    [
        (FP8, {"weight_scale": ("F32", ()), "input_scale": ("F32", ())}),
        (FP8, {"weight": ("F8_E4M3", (64,)), "weight_scale": ("F32", ())}),
        (GPTQ, {"g_idx": ("I32", (256,)), "qzeros": ("I32", (2, 8))}),
        (compressed("pack-quantized", INT4), {"weight_scale": ("BF16", (64, 2)), "weight_shape": SHAPE}),
    ],
)
def test_tensors_that_store_no_matrix_are_no_weight(config: dict[str, Any], stored: Stored) -> None:
    assert find_scheme(config).weights(stored) == ()


def test_the_mxfp4_of_gpt_oss_is_left_to_its_plan() -> None:
    assert find_scheme(MXFP4).tensors == {}


@pytest.mark.parametrize(
    ("suffix", "shape", "expected"),
    [
        *((f"{tensor}_{what}", (8, 1, 1), True) for tensor in "qkv" for what in ("scale", "zero_point")),
        *(("k_scale", (), True), ("v_scale", (1,), True), ("k_scale", (8,), True), ("k_scale", (8, 2), False)),
        *(("weight_scale", (), False), ("weight_zero_point", (), False)),
    ],
)
def test_a_scale_of_the_cache_is_known_by_name_and_shape(suffix: str, shape: tuple[int, ...], expected: bool) -> None:
    assert is_cache_scale(suffix, shape) == expected


# Where tensors are cut with the weight: test_quantized_checkpoints.py has the rest.


def test_of_a_weight_that_the_last_ranks_hold_nothing_of_they_hold_no_scales() -> None:
    weight = QuantizedWeight(300, 512, find_scheme(FP8_BLOCKS).values[0])
    found = find_scheme(FP8_BLOCKS).carry(0, "weight_scale_inv", (3, 4), weight, [((0, 300),), ((300, 0),)])
    assert found == (0, [((0, 3),), ((3, 0),)])


GROUPED: dict[str, tuple[dict[str, Any], Stored, tuple[int, int], str, int]] = {
    # Three groups of columns, the last one half full: AutoGPTQ makes ceil(columns / group_size) of them.
    "gptq": (
        GPTQ,
        {"qweight": ("I32", (40, 64)), "qzeros": ("I32", (3, 8)), "scales": ("F16", (3, 64)), "g_idx": ("I32", (320,))},
        (64, 320), "scales", 128,
    ),
    "w4a16": (
        compressed("pack-quantized", INT4),
        {"weight_packed": ("I32", (64, 40)), "weight_scale": ("BF16", (64, 3)), "weight_shape": SHAPE},
        (64, 320), "weight_scale", 128,
    ),
    # ModelOpt leaves group_size out where it is 16, as vLLM and SGLang take it to be.
    "modelopt nvfp4 without group_size": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        STORED["modelopt nvfp4"][1], (64, 256), "weight_scale", 16,
    ),
    # Blocks of 64 rows and 128 columns, the last of them partial both ways.
    "fp8 blocks that are no squares": (
        {**FP8_BLOCKS, "weight_block_size": [64, 128]},
        {"weight": ("F8_E4M3", (96, 320)), "weight_scale_inv": ("F32", (2, 3))},
        (96, 320), "weight_scale_inv", 128,
    ),
}  # fmt: skip
"""Config, tensors, the weight's rows and columns, the scales' tensor, and how many columns share one."""


@pytest.mark.parametrize("name", GROUPED)
def test_a_rank_holds_the_scales_of_its_columns(name: str) -> None:
    config, stored, size, suffix, group = GROUPED[name]
    [weight] = find_scheme(config).weights(stored)
    assert (weight.rows, weight.columns) == size
    ranges = [((0, 128),), ((128, 128),), ((256, size[1] - 256),)]
    scale_of = np.arange(size[1]) // group
    expected = []
    for [(start, length)] in ranges:
        held = np.unique(scale_of[start : start + length])
        expected.append((int(held[0]) if len(held) else 256 // group, len(held)))
    found = find_scheme(config).carry(1, suffix, stored[suffix][1], weight, ranges)
    assert found == (find_scheme(config).tensors[suffix][1], [(one,) for one in expected])
    assert sum(length for _, length in expected) == stored[suffix][1][found[0]]


@pytest.mark.parametrize("num_groups", [2, 4])
def test_with_other_scales_than_groups_of_columns_it_is_no_such_weight(num_groups: int) -> None:
    config, stored, *_ = GROUPED["gptq"]
    assert find_scheme(config).weights({**stored, "scales": ("F16", (num_groups, 64))}) == ()


@pytest.mark.parametrize(("shape", "fits"), [((), True), ((1,), True), ((2,), False), ((64,), True)])
def test_one_scale_is_of_all_rows_and_any_other_number_of_each_row(shape: tuple[int, ...], fits: bool) -> None:
    config, stored, values = STORED["quark_fp8"]
    found = find_scheme(config).weights({**stored, "weight_scale": ("F32", shape)})
    assert (QuantizedWeight(64, 256, values) in found) == fits


@pytest.mark.parametrize(
    ("config", "axis", "suffix", "shape", "size", "at", "message"),
    [
        (FP8_BLOCKS, 1, "weight_scale_inv", (2, 3), (256, 300), 150, "150 of 300 falls inside 128 values"),
        (FP8_BLOCKS, 0, "weight_scale_inv", (1, 2), (64, 256), 32, "32 of 64 falls inside 128 values"),
        (GPTQ, 1, "scales", (1, 64), (64, 128), 64, "64 of 128 falls inside 128 values"),
        ({**GPTQ, "bits": 3}, 1, "qweight", (24, 64), (64, 256), 16, "16 of 256 falls inside 32/3 values"),
        (STORED["nvfp4"][0], 1, "weight_packed", (64, 128), (64, 256), 3, "3 of 256 falls inside 2 values"),
        # One word that holds all rows, or all columns.
        (AWQ, 0, "qweight", (256, 1), (8, 256), 4, "4 of 8 falls inside 8 values"),
        (GPTQ, 0, "qzeros", (2, 1), (8, 256), 4, "4 of 8 falls inside 8 values"),
        ({**GPTQ, "group_size": -1}, 1, "qweight", (1, 64), (64, 8), 4, "4 of 8 falls inside 8 values"),
        (compressed("pack-quantized", INT4), 0, "weight_zero_point", (1, 2), (8, 256), 4,
         "4 of 8 falls inside 8 values"),
    ],
)  # fmt: skip
def test_a_border_inside_a_block_group_or_word_is_refused(
    config: dict[str, Any], axis: int, suffix: str, shape: tuple[int, ...], size: tuple[int, int], at: int, message: str
) -> None:
    weight, dim = QuantizedWeight(*size, find_scheme(config).values[0]), size[axis]
    with pytest.raises(PlanError, match=f"^the cut at {message} stored together$"):
        find_scheme(config).carry(axis, suffix, shape, weight, [((0, at),), ((at, dim - at),)])


# Where quantization_config may be.


def checkpoint(folder: Path, config: dict[str, Any], **files: Any) -> Path:
    save_file({"w": np.zeros(2, np.uint8)}, folder / "model.safetensors")
    for name, value in {"config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


PRODUCER = {"name": "modelopt", "version": "0.15.1"}
# TheBloke/Llama-2-7B-AWQ and older ones of AutoAWQ.
AUTO_AWQ = {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM", "modules_to_not_convert": None}
AUTO_GPTQ = {key: value for key, value in ACT_ORDER.items() if key != "quant_method"}


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        ({}, {}, None),
        ({"quantization_config": FP8}, {}, FP8),
        ({"compression_config": FP8}, {}, FP8),
        ({"text_config": {"quantization_config": FP8}}, {}, FP8),
        ({"quantization_config": None, "compression_config": FP8}, {}, FP8),
        ({"quantization_config": FP8, "text_config": {"quantization_config": AWQ}}, {}, FP8),
        ({"text_config": None}, {}, None),
        (
            {}, {"hf_quant_config": {"producer": PRODUCER, "quantization": MODELOPT_NVFP4}},
            {"quant_method": "modelopt", **MODELOPT_NVFP4},
        ),
        ({}, {"quantize_config": AUTO_GPTQ}, {"quant_method": "gptq", **AUTO_GPTQ}),
        ({}, {"quant_config": AUTO_AWQ}, {"quant_method": "awq", **AUTO_AWQ}),
        # A file that names its method.
        ({}, {"quantize_config": {**AUTO_GPTQ, "quant_method": "awq"}}, {**AUTO_GPTQ, "quant_method": "awq"}),
        # config.json counts before other files, and a file that says nothing does not count.
        ({"quantization_config": FP8}, {"quantize_config": AUTO_GPTQ, "quant_config": AUTO_AWQ}, FP8),
        ({}, {"hf_quant_config": {"producer": PRODUCER}, "quantize_config": {}}, None),
        (
            {}, {"hf_quant_config": {"quantization": None}, "quant_config": AUTO_AWQ},
            {"quant_method": "awq", **AUTO_AWQ},
        ),
    ],
)  # fmt: skip
def test_the_quantization_config_is_found(
    config: dict[str, Any], files: dict[str, Any], expected: dict[str, Any] | None, tmp_path: Path
) -> None:
    found = read_source(checkpoint(tmp_path, {"model_type": "llama", **config}, **files))
    assert found.config.get("quantization_config") == expected
    assert found.model_type == "llama"


def test_what_older_tools_wrote_is_a_scheme_too(tmp_path: Path) -> None:
    found = read_source(checkpoint(tmp_path, {}, quant_config=AUTO_AWQ)).config["quantization_config"]
    stored = STORED["awq"][1]
    assert find_scheme(found).weights(stored) == (QuantizedWeight(64, 256, Values(4, 128)),)


@pytest.mark.parametrize("name", ["hf_quant_config", "quantize_config", "quant_config"])
def test_a_broken_file_of_quantization_is_refused(name: str, tmp_path: Path) -> None:
    (checkpoint(tmp_path, {}) / f"{name}.json").write_text("{")
    with pytest.raises(FormatError, match=f"{name}.json: not valid JSON"):
        read_source(tmp_path)
