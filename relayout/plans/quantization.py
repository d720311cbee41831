"""Quantized weights: cuts the tensors that store one weight at the places where the weight is cut. Pure.

A scheme maps the rows (outputs) and columns (inputs) of a quantized weight to dimensions of each tensor that stores it.
A cut of the weight is scaled to each tensor. It must not divide a block or group that shares a scale, or a word that
packs several values. The layouts are those that vLLM 0.33 reads (vllm/model_executor/parameter.py and
layers/quantization/).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod
from typing import Any

from relayout.core.slices import Range
from relayout.errors import PlanError, shown

Axes = tuple[int | None, int | None]
"""The dimensions of a tensor for the weight's rows and columns. None: the tensor has no such dimension."""

_NEITHER: Axes = (None, None)

_ACT_ORDER = "the inputs of a group are scattered over all columns, so ranks would share scales"

INPUT_SCALES = frozenset({"input_scale", "input_global_scale"})
"""Suffixes of activation scales. Engines may read them for all experts on every rank (vLLM 0.33
ep_weight_filter.py)."""

_OF_WEIGHTS = frozenset({"scale", "weight_scale", "weight_scale_inv", "weight_zero_point"})
"""Suffixes of tensors that may have a single element for a whole weight. Every rank holds that element."""

_OF_GROUPS = _OF_WEIGHTS | {"scales", "qzeros"}
"""Suffixes of tensors that may have a single element for a whole row. Each rank with a part of the row holds it."""

_CACHE_SCALES = frozenset({"kv_scale", "prob_scale", "output_scale"}) | {
    f"{tensor}_{what}" for tensor in "qkv" for what in ("scale", "zero_point")
}
"""Suffixes of scales and zero points of the attention cache, in any module. They have one element, or one per head.
vLLM 0.33 uses the maximum over the heads that share a KV head (`compressed_tensors.py`,
CompressedTensorsKVCacheMethod)."""

_REFUSED = {
    "bitsandbytes": "its 4-bit and 8-bit weights are packed flat, across rows",
    "gguf": "its blocks are not stored as tensors",
    "torchao": "its tensors are flattened objects",
    "quanto": "its packed tensors have no rows",
    "aqlm": "its codebooks have no rows",
    "vptq": "its codebooks have no rows",
    "quip": "its weights are rotated across columns",
    "higgs": "its weights are rotated across columns",
    "hqq": "its weights are packed flat, across rows",
}

_OWN_LOADERS = ("bitsandbytes", "gguf")
"""Methods with loaders of their own in vLLM. Observing vLLM's default loader therefore finds nothing."""


@dataclass(frozen=True, slots=True)
class Values:
    """Storage form of the values of a weight."""

    bits: int
    """Bits per value."""
    group: int | None = None
    """Number of columns that share a scale. None: all columns of a row share one."""
    block: tuple[int, int] = (1, 1)
    """Rows and columns of a block that shares a scale. (1, 1): no blocks. The last block may be partial."""

    def shared(self, axis: int) -> int | None:
        """Return the number of rows (axis 0) or columns (axis 1) that share a scale.

        None: rows have separate scales (axis 0), or all columns of a row share one (axis 1).
        """
        return self.block[axis] if self.block != (1, 1) else self.group if axis else None


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Shape and storage of a quantized weight, counted in values."""

    rows: int
    columns: int
    values: Values
    """Storage form of its values."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """Storage of weights by a quantization method."""

    name: str
    tensors: Mapping[str, Axes]
    """Last part of a tensor's name -> its dimensions for the weight's rows and columns."""
    rows_of: tuple[str, ...] = ()
    """Tensors with one element per row of the weight along their row dimension. The first one that exists is used."""
    columns_of: tuple[str, ...] = ()
    """Tensors that determine the number of columns: one element per column, or per word of packed columns."""
    scales: tuple[str, ...] = ()
    """Tensors with one element per block, or per group of columns of a row. The first one that exists is compared."""
    packed: frozenset[str] = frozenset()
    """Tensors in which one I32 packs the values of several columns."""
    values: tuple[Values, ...] = (Values(8),)
    """Possible storage forms of values in this checkpoint."""

    def weights(self, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[QuantizedWeight, ...]:
        """Return the possible forms of the weight that these tensors store.

        Usually one form. Several if the shapes do not distinguish the storage forms of the checkpoint. Empty if the
        tensors do not store a quantized matrix.

        Args:
            tensors: last part of the tensor's name -> dtype, shape.
        """
        weights: dict[QuantizedWeight, None] = {}
        for values in self.values:
            rows = self._size(0, self.rows_of, tensors, values.bits)
            columns = self._size(1, self.columns_of, tensors, values.bits)
            if rows is not None and columns is not None and self._fits((rows, columns), values, tensors):
                weights[QuantizedWeight(rows, columns, values)] = None
        return tuple(weights)

    def _fits(self, size: tuple[int, int], values: Values, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bool:
        """Return True if the number of scales equals the number of blocks, or of groups of columns for each row."""
        scale = next((name for name in self.scales if name in tensors), None)
        if scale is None:
            return True
        shape = tensors[scale][1]
        found = [1 if (axis := self._axis(scale, which, shape)) is None else shape[axis] for which in (0, 1)]
        groups = [-(-size[which] // (values.shared(which) or (1, max(size[1], 1))[which])) for which in (0, 1)]
        return found == groups or (prod(shape) == 1 and values.block == (1, 1) and groups[1] == 1)

    def _axis(self, suffix: str, which: int, shape: tuple[int, ...]) -> int | None:
        """Return a tensor's dimension for the weight's rows (0) or columns (1); None if it has no such dimension."""
        axis = self.tensors[suffix][which]
        if self.name == "modelopt" and len(shape) == 4 and suffix in self.scales:
            axis = 2 * which  # Scales of blocks: [rows, 1, columns, 1] (vLLM 0.33 `modelopt.py`, KFp8Block128).
        return None if axis is None or axis >= len(shape) else axis

    def _size(
        self, which: int, names: Sequence[str], tensors: Mapping[str, tuple[str, tuple[int, ...]]], bits: int
    ) -> int | None:
        for suffix in names:
            dtype, shape = tensors.get(suffix, ("", ()))
            axis = self._axis(suffix, which, shape)
            if axis is None:
                continue
            if bits == 4 and dtype.startswith(("F8", "F16", "F32", "BF16") if suffix == "weight" else "F8"):
                return None  # Each element is one value, so the weight is not 4-bit.
            if which and dtype == "I32" and suffix in self.packed:
                return shape[axis] * 32 // bits
            return shape[axis] * 2 if which and bits == 4 and dtype in ("U8", "I8") else shape[axis]
        return None

    def carry(
        self,
        axis: int,
        suffix: str,
        shape: tuple[int, ...],
        weight: QuantizedWeight,
        ranges: Sequence[tuple[Range, ...]],
        *,
        may_split_blocks: bool = False,
    ) -> tuple[int, list[tuple[Range, ...]]] | None:
        """Scale a cut of the weight to one of its tensors.

        Args:
            axis: dimension of the weight: 0 for rows, 1 for columns.
            suffix: last part of the tensor's name.
            shape: shape of the tensor.
            weight: the weight that the tensors store.
            ranges: for each rank its ranges (start, length) of the weight's values along `axis`.
            may_split_blocks: True if a border may fall inside a block or group that shares a scale; every rank then
                holds all scales.

        Returns:
            The tensor's dimension and, for each rank, ranges of its elements. None: every rank holds the whole tensor.
        """
        own = self._axis(suffix, axis, shape)
        if own is None:
            return None
        size, dim = shape[own], (weight.rows, weight.columns)[axis]
        shared = weight.values.shared(axis)
        if (
            size == 1
            and shared is None
            and (suffix in _OF_GROUPS if axis else suffix in _OF_WEIGHTS and prod(shape) == 1)
        ):
            return None
        values, elements = _values_per_elements(dim, shape, own, shared, weight.values.bits)
        if may_split_blocks and suffix in _OF_GROUPS and shared is not None and (values, elements) == (shared, 1):
            borders = {at for parts in ranges for start, length in parts for at in (start, start + length)}
            part = 1 if weight.values.block != (1, 1) else _smallest_group(shared)
            if any(at % shared and at != dim for at in borders) and not any(at % part for at in borders):
                return None

        def border(at: int) -> int:
            element, rest = divmod(at * elements, values)
            if rest and at != dim:
                together = Fraction(values, elements)
                raise PlanError(
                    f"the cut at {at} of {dim} falls inside {together} values stored together", code="indivisible"
                )
            return size if at == dim else element

        return own, [
            tuple((border(start), border(start + length) - border(start)) for start, length in parts)
            for parts in ranges
        ]


def is_cache_scale(suffix: str, shape: tuple[int, ...]) -> bool:
    """Return True if this suffix and shape are those of an attention cache scale, which every rank holds whole."""
    return suffix in _CACHE_SCALES and prod(shape[1:]) == 1


def _smallest_group(group: int) -> int:
    """Return the smallest group that vLLM uses for an expert's columns: it halves down to 32 (`moe_wna16.py`)."""
    while group % 2 == 0 and group >= 64:
        group //= 2
    return group


def _values_per_elements(dim: int, shape: tuple[int, ...], own: int, shared: int | None, bits: int) -> tuple[int, int]:
    """Return (v, e): v of the weight's `dim` values correspond to e elements along dimension `own` of a tensor.

    Either v values share a scale (the last group may be smaller), or all `dim` values are packed in words.
    """
    size = shape[own]
    if shared is not None and size == -(-dim // shared):
        return shared, 1
    if size and dim and (dim % size == 0 or dim * bits == size * 32):
        return dim, size
    raise PlanError(f"cannot map {dim} values onto a tensor of shape {list(shape)}", code="indivisible")


def find_scheme(config: Mapping[str, Any]) -> Scheme:
    """Return the scheme for a `quantization_config`, or raise PlanError for unsupported methods."""
    method = str(config.get("quant_method", "")).lower().replace("_", "-")
    if method in ("fp8", "fbgemm-fp8", "deepseek-v4-fp8"):
        return _fp8(config)
    if method in ("gptq", "gptqmodel"):
        return _gptq(config)
    if method == "awq":
        return _awq(config)
    if method == "compressed-tensors":
        return _compressed_tensors(config)
    if method.startswith("modelopt"):
        return _modelopt(config)
    if method == "quark":
        return _quark(config)
    if method.removeprefix("intel/") == "auto-round":
        return _auto_round(config)
    if method == "mxfp4":
        # gpt_oss: blocks and scales have their own names, and the plan has rules for them.
        return Scheme("mxfp4", {})
    family = next((name for name in _REFUSED if method.startswith(name)), None)
    why = _REFUSED[family] if family else "relayout does not know how it stores them"
    raise _refusal(method or "method unknown", why)


def _refusal(method: str, why: str) -> PlanError:
    is_observed = not method.startswith(_OWN_LOADERS)
    way = "try --plan vllm or --plan sglang, if the engine loads this form, or " if is_observed else ""
    what = f"weights are quantized by {method}, which no rule can divide: {why}"
    return PlanError(f"{what}; {way}use --tp 1, which keeps tensors whole", code="unsupported")


_PLAIN = ("weight",)


def _fp8(config: Mapping[str, Any]) -> Scheme:
    """Return the scheme of FP8. DeepSeek V4 stores experts in FP4 or NVFP4 in addition.

    Its scales are called `scale`, those of NVFP4 `weight_scale` (vLLM 0.33 `models/deepseek_v4/quant_config.py`). No
    key identifies the experts in FP4: `expert_dtype` may be missing, and draft layers may have another form.
    """
    tensors: Mapping[str, Axes] = {
        "weight": (0, 1),
        "scale": (0, 1),
        "weight_scale": (0, 1),
        "weight_scale_inv": (0, 1),
        "weight_scale_2": _NEITHER,
        "input_scale": _NEITHER,
        "input_scale_ub": _NEITHER,
        "activation_scale": _NEITHER,
    }
    values = [Values(8, block=_block(config.get("weight_block_size"))), Values(4, 32)]
    has_nvfp4 = str(config.get("moe_quant_algo")).upper() == "NVFP4"
    scales = ("scale", *["weight_scale"] * has_nvfp4)
    return Scheme("fp8", tensors, _PLAIN, _PLAIN, scales, values=(*values, *[Values(4, 16)] * has_nvfp4))


_PACKED_INPUTS: Mapping[str, Axes] = {"qweight": (1, 0), "scales": (1, 0), "qzeros": (1, 0), "g_idx": (None, 0)}


def _gptq(config: Mapping[str, Any]) -> Scheme:
    dynamic = config.get("dynamic")  # GPTQModel: different settings for some layers.
    exceptions = dynamic.values() if isinstance(dynamic, Mapping) else ()
    layers = [config, *({**config, **layer} for layer in exceptions if isinstance(layer, Mapping))]
    values = {Values(_number(layer, "bits"), _group(layer.get("group_size"))): None for layer in layers}
    if any(layer.get("desc_act") and _group(layer.get("group_size")) is not None for layer in layers):
        raise _refusal("GPTQ with act-order (desc_act)", _ACT_ORDER)
    stored = "marlin" if config.get("is_marlin_format") else config.get("checkpoint_format", "gptq")
    if stored not in ("gptq", "gptq_v2"):
        raise _refusal(f"GPTQ in {stored} format", "it is packed for one kernel, across rows and columns")
    return Scheme(
        "gptq",
        _PACKED_INPUTS,
        rows_of=("scales", "qweight"),
        columns_of=("g_idx", "qweight"),
        scales=("scales",),
        packed=frozenset({"qweight"}),
        values=tuple(values),
    )


def _awq(config: Mapping[str, Any]) -> Scheme:
    bits = _number(config, "bits" if "bits" in config else "w_bit")
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        raise _refusal(f"AWQ in {version} format", "only the gemm format stores rows and columns in order")
    values = Values(bits, _group(config.get("group_size", config.get("q_group_size"))))
    tensors = {name: axes for name, axes in _PACKED_INPUTS.items() if name != "g_idx"}
    return Scheme("awq", tensors, ("scales",), ("qweight",), ("scales",), values=(values,))


_COMPRESSED_FORMATS = frozenset(
    {
        "dense",
        "pack-quantized",
        "float-quantized",
        "int-quantized",
        "naive-quantized",
        "nvfp4-pack-quantized",
        "mxfp4-pack-quantized",
        "mxfp8-quantized",
        "mixed-precision",
    }
)


_COMPRESSED_TENSORS: Mapping[str, Axes] = {
    "weight": (0, 1),
    "weight_packed": (0, 1),
    "weight_scale": (0, 1),
    "weight_zero_point": (0, 1),
    "weight_g_idx": (None, 0),
    "weight_shape": _NEITHER,
    "weight_global_scale": _NEITHER,
    "input_global_scale": _NEITHER,
    "input_scale": _NEITHER,
    "input_zero_point": _NEITHER,
}


def _compressed_tensors(config: Mapping[str, Any]) -> Scheme:
    groups, sparsity = config.get("config_groups"), config.get("sparsity_config")
    sparse = sparsity.get("format") if isinstance(sparsity, Mapping) else None
    if sparse not in (None, "dense"):
        raise _refusal(f"compressed-tensors, sparsity format {sparse}", "its values are packed flat, row by row")
    if not isinstance(groups, dict) or not groups:
        raise _refusal("compressed-tensors", "its config has no config_groups")
    stored = [
        _compressed_layers(group, config.get("format"))
        for group in groups.values()
        if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping)
    ]
    return Scheme(
        "compressed-tensors",
        _COMPRESSED_TENSORS,
        rows_of=("weight_packed", "weight"),
        columns_of=("weight_packed", "weight"),
        scales=("weight_scale",),
        packed=frozenset({"weight_packed"}),
        values=tuple(dict.fromkeys(stored)) or (Values(8),),
    )


def _compressed_layers(group: Mapping[str, Any], default: Any) -> Values:
    """Return the storage form of values in a config group."""
    weights, stored = group["weights"], group.get("format") or default or "dense"
    if not isinstance(stored, str) or stored not in _COMPRESSED_FORMATS:
        raise _refusal(f"compressed-tensors, format {stored}", "relayout does not know how it stores them")
    strategy = weights.get("strategy")
    is_grouped = strategy in ("group", "tensor_group")
    if is_grouped and weights.get("actorder") in ("group", "dynamic", True):
        raise _refusal("compressed-tensors with act-order (actorder)", _ACT_ORDER)
    return Values(
        _number(weights, "num_bits"),
        _group(weights.get("group_size")) if is_grouped else None,
        _block(weights.get("block_structure") if strategy == "block" else None),
    )


_MODELOPT = {
    "FP8": Values(8),
    "FP8_PER_CHANNEL_PER_TOKEN": Values(8),
    "FP8_PB_WO": Values(8, block=(128, 128)),
    "FP8_BLOCK_SCALES": Values(8, block=(128, 128)),
    "MXFP8": Values(8, 32),
    "NVFP4": Values(4, 16),
    "W4A16_NVFP4": Values(4, 16),
}
"""Storage form of values by `quant_algo` (vLLM 0.33 `modelopt.py`, LINEAR_ALGOS)."""


def _modelopt(config: Mapping[str, Any]) -> Scheme:
    nested = config.get("quantization")
    config = nested if "quant_algo" not in config and isinstance(nested, Mapping) else config
    layers = config.get("quantized_layers")
    is_mixed = str(config.get("quant_algo")).upper() == "MIXED_PRECISION"
    stored = [config]
    if is_mixed and isinstance(layers, Mapping):
        stored = [layer for layer in layers.values() if isinstance(layer, Mapping)]
    tensors: Mapping[str, Axes] = {
        "weight": (0, 1),
        "weight_scale": (0, 1),
        "weight_scale_2": _NEITHER,
        "input_scale": _NEITHER,
    }
    values = tuple(dict.fromkeys(_modelopt_values(layer) for layer in stored)) or (Values(8),)
    return Scheme("modelopt", tensors, _PLAIN, _PLAIN, ("weight_scale",), values=values)


def _modelopt_values(layer: Mapping[str, Any]) -> Values:
    algorithm = str(layer.get("quant_algo") or "").upper()
    values = _MODELOPT.get(algorithm)
    if values is None:
        known = ", ".join(sorted(_MODELOPT))
        raise _refusal(f"modelopt ({algorithm or 'no quant_algo'})", f"relayout knows {known}")
    return replace(values, group=_group(layer.get("group_size", values.group))) if values.bits == 4 else values


def _quark(config: Mapping[str, Any]) -> Scheme:
    layers = config.get("layer_quant_config"), config.get("layer_type_quant_config")
    exceptions = [layer for table in layers if isinstance(table, Mapping) for layer in table.values()]
    configs = [layer for layer in (config.get("global_quant_config"), *exceptions) if isinstance(layer, Mapping)]
    weights = [layer["weight"] for layer in configs if layer.get("weight") is not None]
    tensors: Mapping[str, Axes] = {"weight": (0, 1), "weight_scale": (0, 1), "input_scale": _NEITHER}
    values = tuple(dict.fromkeys(map(_quark_values, weights))) or (Values(8),)
    return Scheme("quark", tensors, _PLAIN, _PLAIN, ("weight_scale",), values=values)


def _quark_values(weight: Any) -> Values:
    """Return the storage form of values (vLLM 0.33 `quark/schemes/`: quark_w8a8_fp8.py, quark_ocp_mx.py)."""
    if isinstance(weight, list) and len(weight) == 1:
        [weight] = weight
    kind = (weight.get("dtype"), weight.get("qscheme")) if isinstance(weight, Mapping) else (weight, None)
    if kind in (("fp8_e4m3", "per_tensor"), ("fp8_e4m3", "per_channel")) and weight.get("ch_axis") in (None, 0):
        return Values(8)
    if kind == ("fp4", "per_group") and weight.get("group_size") == 32:
        return Values(4, 32)
    words = " ".join(shown(word) for word in kind)
    raise _refusal(f"quark ({words})", "relayout knows fp8_e4m3 per tensor and channel, and fp4 per group of 32")


def _auto_round(config: Mapping[str, Any]) -> Scheme:
    """Return the scheme of GPTQ or AWQ: auto-round uses their packing (vLLM 0.33 `inc/schemes/inc_wna16_scheme.py`)."""
    packing, exceptions = config.get("packing_format", "auto_round:auto_gptq"), config.get("extra_config")
    layers = exceptions.values() if isinstance(exceptions, Mapping) else ()
    others = [layer for layer in layers if isinstance(layer, Mapping) and layer.get("bits") not in (16, 32)]
    if config.get("data_type", "int") == "int" and packing == "auto_round:auto_gptq":
        return _gptq({**config, "desc_act": False, "dynamic": {str(n): layer for n, layer in enumerate(others)}})
    if config.get("data_type", "int") == "int" and packing == "auto_round:auto_awq" and not others:
        return _awq({**config, "version": "gemm"})
    why = "relayout knows integers packed as by GPTQ, or by AWQ with the same bits and groups in all layers"
    raise _refusal(f"auto-round ({shown(packing)})", why)


def _group(size: Any) -> int | None:
    return size if type(size) is int and size > 0 else None


def _block(value: Any) -> tuple[int, int]:
    if value is None:
        return (1, 1)
    if isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value):
        return (value[0], value[1])
    raise PlanError(f"quantization_config: block {shown(value)}, expected [rows, columns]", code="config")


def _number(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or not 1 <= value <= 16:
        raise PlanError(f"quantization_config: {key} is {shown(value)}, expected a number of bits", code="config")
    return value
