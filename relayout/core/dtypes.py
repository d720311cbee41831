"""The element types of the safetensors format (reference: safetensors 0.8.0, `src/tensor.rs`, enum `Dtype`)."""

from __future__ import annotations

from math import prod

BITS: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Bits of one element, by the name used in file headers."""


def num_bytes(dtype: str, shape: tuple[int, ...]) -> int | None:
    """Bytes of a dense tensor; None if its bits are not a multiple of 8 (possible for dtypes below 8 bits)."""
    bits = prod(shape) * BITS[dtype]
    return bits // 8 if bits % 8 == 0 else None
