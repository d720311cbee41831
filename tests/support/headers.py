"""Headers of safetensors files to start from; those that a reader must refuse are in tests/format/vectors."""

from __future__ import annotations

import json
from typing import Any


def file_of(header: Any, data: bytes = b"") -> bytes:
    """A file with a truthful header length; `header` is JSON text, its bytes, or what to dump."""
    if not isinstance(header, bytes | str):
        header = json.dumps(header)
    text = header if isinstance(header, bytes) else header.encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(start: int = 0, end: int = 4, shape: Any = (1,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
