"""Reads config.json, and what other files of a checkpoint say of how it is quantised."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relayout.errors import FormatError
from relayout.fields import decode
from relayout.files import read_small
from relayout.header import MAX_DEPTH, depth, refuse_surrogates
from relayout.members import member

_MAX_CONFIG_NBYTES = 16 * 2**20
_QUANTISATION_FILES = {
    "hf_quant_config.json": ("modelopt", "quantization"),
    "quantize_config.json": ("gptq", None),
    "quant_config.json": ("awq", None),
}
"""Where tools have written what is quantization_config elsewhere: the method, and the key it hangs under."""


def read_config(folder: Path) -> Mapping[str, Any]:
    """config.json, with what other files of the folder say of quantisation.

    Raises:
        FormatError: one of them is no JSON object.
    """
    config = _read_object(folder, "config.json")
    nested = config.get("text_config")
    inside = nested.get("quantization_config") if isinstance(nested, dict) else None
    quantisation = config.get("quantization_config") or config.get("compression_config") or inside
    for name, (method, key) in _QUANTISATION_FILES.items():
        if not quantisation:
            parsed = _read_object(folder, name)
            own = parsed.get(key) if key else parsed
            quantisation = {"quant_method": method} | own if isinstance(own, dict) and own else None
    return config | {"quantization_config": quantisation} if quantisation else config


def _read_object(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object, or an empty one where there is no such file."""
    if not os.path.lexists(folder / name):
        return {}
    path = member(folder, name)
    return parse_config(read_small(path, _MAX_CONFIG_NBYTES), str(path))


def parse_config(blob: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object as laxly as transformers does: with NaN, and the last of two equal keys.

    Raises:
        FormatError: it is none.
    """
    text = decode(blob, where)
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:  # A JSONDecodeError, or what it leaves to Python.
        raise FormatError(f"{where}: not valid JSON: {error}") from None
    refuse_surrogates(text, parsed, where)
    if depth(parsed) > MAX_DEPTH:
        raise FormatError(f"{where}: JSON nested too deeply")
    if not isinstance(parsed, dict):
        raise FormatError(f"{where}: a JSON {type(parsed).__name__}, expected an object")
    return parsed
