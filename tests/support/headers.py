"""Headers of safetensors files: good ones to start from, and bad ones that a reader must refuse."""

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


TEXT = json.dumps({"a": entry()})


def deep(depth: int) -> str:
    """A header whose entry holds an ignored list: `depth` levels in all, counted as serde_json does."""
    return TEXT[:-2] + ',"x":' + "[" * (depth - 2) + "]" * (depth - 2) + "}}"


def with_number(number: str) -> str:
    return TEXT[:-2] + f',"x":{number}' + "}}"


REFUSED: dict[str, tuple[Any, bytes, str]] = {
    "NUL padding": (TEXT + "\0\0", b"abcd", "not valid JSON: Extra data"),
    "no JSON": ("", b"", "not valid JSON"),
    "a byte order mark": ("\ufeff" + TEXT, b"abcd", "not valid JSON"),
    "UTF-16": (TEXT.encode("utf-16-le"), b"abcd", "not valid JSON"),
    "UTF-16 with a byte order mark": (TEXT.encode("utf-16"), b"abcd", "not UTF-8 at byte 8"),
    "broken UTF-8": (b'{"\xff": ' + TEXT[6:].encode(), b"abcd", "not UTF-8 at byte 10"),
    "a surrogate in UTF-8": (b'{"\xed\xa0\x80": ' + TEXT[6:].encode(), b"abcd", "not UTF-8 at byte 10"),
    "half of a surrogate pair in a name": (TEXT.replace('"a"', '"\\ud800"'), b"abcd", "half of a surrogate pair"),
    "half of a surrogate pair in metadata": ('{"__metadata__":{"k":"\\udc00"}}', b"", "half of a surrogate pair"),
    "half of a surrogate pair in an ignored field": (with_number('"\\ud800"'), b"abcd", "half of a surrogate pair"),
    "a list": ([], b"", "header is a JSON list, expected an object"),
    "a string": ('"a"', b"", "header is a JSON str, expected an object"),
    "null": ("null", b"", "header is a JSON NoneType, expected an object"),
    "128 levels": (deep(128), b"abcd", "nested too deeply"),
    "500 levels": (deep(500), b"abcd", "nested too deeply"),
    "100000 levels": (deep(100_000), b"abcd", "nested too deeply"),
    "100000 levels without end": ("[" * 100_000, b"", "nested too deeply"),
    "NaN": (with_number("NaN"), b"abcd", "NaN is no JSON number"),
    "Infinity": (with_number("-Infinity"), b"abcd", "-Infinity is no JSON number"),
    "a float beyond the largest": (with_number("1e999"), b"abcd", "number"),
    "an integer beyond the largest float": (with_number("9" * 400), b"abcd", "number"),
    "a hole": ({"a": entry(0, 4), "b": entry(8, 12)}, b"0123456789ab", "'b': starts at byte 8 .* expected 4: leaves a"),
    "a hole before the first": ({"a": entry(4, 8)}, b"01234567", "'a': starts at byte 4 .* expected 0: leaves a hole"),
    "an overlap": ({"a": entry(0, 4), "b": entry(2, 6)}, b"012345", "'b': starts at byte 2 .* expected 4: overlaps"),
    "an aliased range": ({"a": entry(0, 4), "b": entry(0, 4)}, b"0123", "'b': starts at byte 0 .* expected 4: overlap"),
    "an empty tensor within another": (
        {"a": entry(0, 4), "b": entry(2, 2, [0])},
        b"0123",
        "'b': starts at byte 2 .* expected 4: overlaps",
    ),
    "trailing bytes": ({"a": entry()}, b"01234", "cover 4 bytes, the data section has 5: trailing bytes"),
    "data without tensors": ("{}", b"0", "cover 0 bytes, the data section has 1: trailing bytes"),
    "fewer bytes than the shape needs": ({"a": entry(0, 4, [2])}, b"0123", r"hold 4 bytes, shape \[2\] of F32 needs 8"),
    "more bytes than the shape needs": ({"a": entry(0, 8, [1])}, b"01234567", "hold 8 bytes, shape .* needs 4"),
    "an end before the start": ({"a": entry(4, 0, [1])}, b"0123", "hold -4 bytes"),
    "an unknown dtype": ({"a": entry(dtype="F31")}, b"0123", "tensor 'a': unknown dtype 'F31'"),
    "a dtype in lower case": ({"a": entry(dtype="f32")}, b"0123", "tensor 'a': unknown dtype 'f32'"),
    "a dtype that is no string": ({"a": entry(dtype=["F32"])}, b"0123", "tensor 'a': unknown dtype"),
    "a null dtype": ({"a": entry(dtype=None)}, b"0123", "tensor 'a': unknown dtype None"),
    "a shape that overflows": ({"a": entry(0, 0, [2**63, 2])}, b"", r"overflows 64 bits"),
    "a shape that overflows before its zero": ({"a": entry(0, 0, [2**32, 2**32, 0])}, b"", "overflows 64 bits"),
    "a shape whose bits overflow": ({"a": entry(0, 0, [2**59])}, b"", r"of F32 overflows 64 bits"),
    "a 4-bit shape with half a byte": ({"a": entry(0, 1, [3], "F4")}, b"0", "does not fill whole bytes"),
    "a 6-bit shape with part of a byte": ({"a": entry(0, 2, [2], "F6_E2M3")}, b"01", "does not fill whole bytes"),
    "a missing dtype": ({"a": {"shape": [], "data_offsets": [0, 0]}}, b"", "tensor 'a': 'dtype' is missing"),
    "a missing shape": ({"a": {"dtype": "U8", "data_offsets": [0, 0]}}, b"", "tensor 'a': 'shape' is missing"),
    "missing offsets": ({"a": {"dtype": "U8", "shape": []}}, b"0", "tensor 'a': 'data_offsets' is missing"),
    "an entry that is no object": ({"a": [1]}, b"", "tensor 'a': expected an object, found list"),
    "a null entry": ({"a": None}, b"", "tensor 'a': expected an object, found NoneType"),
    "three offsets": ({"a": {**entry(), "data_offsets": [0, 4, 4]}}, b"0123", "not a pair of sizes"),
    "offsets in an object": ({"a": {**entry(), "data_offsets": {"0": 4}}}, b"0123", "not a pair of sizes"),
    "a shape in an object": ({"a": entry(shape={})}, b"0123", "shape {} is not a list of sizes"),
    "a null shape": ({"a": entry(shape=None)}, b"0123", "is not a list of sizes"),
    "a tensor name that occurs twice": (TEXT[:-1] + "," + TEXT[1:], b"abcd", "name 'a' occurs twice"),
    "a tensor name that occurs twice, once escaped": (
        TEXT[:-1] + "," + TEXT[1:].replace('"a"', '"\\u0061"'),
        b"abcd",
        "name 'a' occurs twice",
    ),
    "two __metadata__": ('{"__metadata__":{},"__metadata__":{}}', b"", "name '__metadata__' occurs twice"),
    "a metadata key that occurs twice": ('{"__metadata__":{"a":"1","a":"2"}}', b"", "name 'a' occurs twice"),
    "a field that occurs twice": (TEXT[:-2] + ',"dtype":"F32"}}', b"abcd", "name 'dtype' occurs twice"),
    "an ignored field that occurs twice": (TEXT[:-2] + ',"x":1,"x":2}}', b"abcd", "name 'x' occurs twice"),
    "an entry written as a list": ({"a": ["U8", [1], [0, 1]]}, b"0", "tensor 'a': expected an object, found list"),
    "a dtype written as an object": ({"a": entry(dtype={"F32": None})}, b"0123", "tensor 'a': unknown dtype"),
    "nested metadata": ('{"__metadata__":{"a":{"b":"c"}}}', b"", "__metadata__ must map strings to strings"),
    "a number in metadata": ('{"__metadata__":{"a":1}}', b"", "__metadata__ must map strings to strings"),
    "null in metadata": ('{"__metadata__":{"a":null}}', b"", "__metadata__ must map strings to strings"),
    "a list of metadata": ('{"__metadata__":[]}', b"", "__metadata__ must map strings to strings"),
    "a string of metadata": ('{"__metadata__":"pt"}', b"", "__metadata__ must map strings to strings"),
}


STRICTER = {  # Than the reference reader, which takes these.
    "a tensor name that occurs twice",
    "a tensor name that occurs twice, once escaped",
    "a metadata key that occurs twice",
    "an ignored field that occurs twice",
    "an entry written as a list",
    "a dtype written as an object",
}
