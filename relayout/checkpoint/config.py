"""Reads config.json and the files in which tools declare quantization."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relayout.errors import FormatError, about
from relayout.format.fields import decode
from relayout.format.safetensors import check_depth, refuse_surrogates
from relayout.storage.protocols import Store

_MAX_CONFIG_NBYTES = 16 * 2**20
CONFIG_NAME = "config.json"
_QUANTIZATION_FILES = {
    "hf_quant_config.json": ("modelopt", "quantization"),
    "quantize_config.json": ("gptq", None),
    "quant_config.json": ("awq", None),
}
"""Files that hold a quantization_config instead of config.json: (quantization method, key or None for the whole)."""


@dataclass(frozen=True, slots=True)
class Config:
    """The model configuration of a checkpoint folder."""

    content: Mapping[str, Any]
    """config.json, completed by quantization_config from other files; empty if there is no config.json."""
    names: tuple[str, ...]
    """Names of the files that were read."""


def find_config(folder: Store) -> Config:
    """Read the configuration. FormatError: a file is not a JSON object."""
    names: list[str] = []
    config = _read_object(folder, CONFIG_NAME, names)
    nested = config.get("text_config")
    inside = nested.get("quantization_config") if isinstance(nested, dict) else None
    quantization = config.get("quantization_config") or config.get("compression_config") or inside
    for name, (method, key) in _QUANTIZATION_FILES.items():
        if not quantization:
            parsed = _read_object(folder, name, names)
            own = parsed.get(key) if key else parsed
            quantization = {"quant_method": method} | own if isinstance(own, dict) and own else None
    return Config(config | {"quantization_config": quantization} if quantization else config, tuple(names))


def _read_object(folder: Store, name: str, names: list[str]) -> dict[str, Any]:
    """Parse a JSON object; empty if the file does not exist."""
    if folder.stat(name) is None:
        return {}
    names.append(name)
    return parse_config(folder.read(name, _MAX_CONFIG_NBYTES), folder.location(name))


def parse_config(blob: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object as leniently as transformers: NaN is accepted, and the last of equal keys counts.

    Raises:
        FormatError: the bytes are not a JSON object.
    """
    with about(path=where):
        text = decode(blob)
        check_depth(text)
        try:
            parsed = json.loads(text)
        except ValueError as error:  # ValueError: a JSONDecodeError, or an integer with too many digits.
            raise FormatError(f"not valid JSON: {error}", code="syntax") from None
        refuse_surrogates(text, parsed)
        if not isinstance(parsed, dict):
            raise FormatError(f"a JSON {type(parsed).__name__}, expected an object", code="field")
        return parsed
