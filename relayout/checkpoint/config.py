"""Reads config.json, and what other files of a checkpoint say of how it is quantized."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relayout.errors import FormatError
from relayout.format.fields import decode
from relayout.format.safetensors import MAX_DEPTH, depth, refuse_surrogates
from relayout.storage.protocols import Store

_MAX_CONFIG_NBYTES = 16 * 2**20
_QUANTIZATION_FILES = {
    "hf_quant_config.json": ("modelopt", "quantization"),
    "quantize_config.json": ("gptq", None),
    "quant_config.json": ("awq", None),
}
"""Where tools have written what is quantization_config elsewhere: the method, and the key it hangs under."""


class ByteOrderMarkError(FormatError):
    """A file that begins with a byte order mark, which transformers refuses, as its JSON parser does."""


@dataclass(frozen=True, slots=True)
class Config:
    """What a checkpoint's folder says of the model."""

    content: Mapping[str, Any]
    """config.json, with what other files say of quantization; empty where there is none."""
    names: tuple[str, ...]
    """The files that were read for it."""
    error: str | None
    """Why nothing can be planned by it, though there is one: a byte order mark."""


def find_config(folder: Store) -> Config:
    """As `read_config`, for those who may do without.

    Raises:
        FormatError: a file is no JSON object, and that not just for a byte order mark.
    """
    names: list[str] = []
    try:
        return Config(_read(folder, names), tuple(names), None)
    except ByteOrderMarkError as error:
        return Config({}, tuple(names), str(error))


def read_config(folder: Store) -> Mapping[str, Any]:
    """config.json, with what other files of the folder say of quantization.

    Raises:
        FormatError: one of them is no JSON object.
    """
    return _read(folder, [])


def _read(folder: Store, names: list[str]) -> Mapping[str, Any]:
    """As `read_config`; `names` gets those of the files that are there."""
    config = _read_object(folder, "config.json", names)
    nested = config.get("text_config")
    inside = nested.get("quantization_config") if isinstance(nested, dict) else None
    quantization = config.get("quantization_config") or config.get("compression_config") or inside
    for name, (method, key) in _QUANTIZATION_FILES.items():
        if not quantization:
            parsed = _read_object(folder, name, names)
            own = parsed.get(key) if key else parsed
            quantization = {"quant_method": method} | own if isinstance(own, dict) and own else None
    return config | {"quantization_config": quantization} if quantization else config


def _read_object(folder: Store, name: str, names: list[str]) -> dict[str, Any]:
    """A JSON object, or an empty one where there is no such file."""
    if folder.stat(name) is None:
        return {}
    names.append(name)
    return parse_config(folder.read(name, _MAX_CONFIG_NBYTES), folder.where(name))


def parse_config(blob: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object as laxly as transformers does: with NaN, and the last of two equal keys.

    Raises:
        FormatError: it is none.
    """
    text = decode(blob, where)
    if text.startswith("\ufeff"):
        raise ByteOrderMarkError(
            f"{where}: not valid JSON: begins with a byte order mark, which transformers refuses too: save it without"
        )
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:  # A JSONDecodeError, or what it leaves to Python.
        raise FormatError(f"not valid JSON: {error}", path=where, code="syntax") from None
    refuse_surrogates(text, parsed, where)
    if depth(parsed) > MAX_DEPTH:
        raise FormatError("JSON nested too deeply", path=where, code="limit")
    if not isinstance(parsed, dict):
        raise FormatError(f"a JSON {type(parsed).__name__}, expected an object", path=where, code="field")
    return parsed
