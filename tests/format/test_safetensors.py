"""relayout.format.safetensors against the stock package: what it writes we read, what we write or accept it reads."""

from __future__ import annotations

import json
from math import prod
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.bits import pattern
from support.headers import entry, file_of

from relayout.core.slices import BITS
from relayout.errors import FormatError, PlanError
from relayout.format.safetensors import (
    Header,
    TensorEntry,
    build_header,
    header_nbytes,
    parse_header,
)

ALIGNMENTS = [512, 4096, 65536]
METADATA = {"format": "pt", "größe": "日本 🦙", 'quote"d': "back\\slash\nnewline"}
NAMES = ["", "a", "model.layers.0.mlp.up_proj.weight", "größe", "🦙", 'quo"te', "back\\slash", "new\nline", "\x7f", "‮"]


TEXT = json.dumps({"a": entry()})


def deep(depth: int) -> str:
    """A header whose entry holds an ignored list: `depth` levels in all, counted as serde_json does."""
    return TEXT[:-2] + ',"x":' + "[" * (depth - 2) + "]" * (depth - 2) + "}}"


def with_number(number: str) -> str:
    return TEXT[:-2] + f',"x":{number}' + "}}"


def parse(blob: bytes) -> Header:
    return parse_header(blob, len(blob), "x.safetensors")


def stock(blob: bytes) -> dict[str, tuple[str, list[int], bytes]]:
    """(dtype, shape, bytes) of each tensor, by the reference reader."""
    return {name: (one["dtype"], one["shape"], bytes(one["data"])) for name, one in safetensors.deserialize(blob)}


def ours(blob: bytes) -> dict[str, tuple[str, list[int], bytes]]:
    header = parse(blob)
    data = blob[header.data_start :]
    assert header.data_nbytes == len(data)
    return {
        one.name: (one.dtype, list(one.shape), data[one.offset : one.offset + one.nbytes]) for one in header.tensors
    }


# What the stock package writes.

TORCH_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
}


@pytest.mark.parametrize(("torch_name", "name"), TORCH_DTYPES.items())
def test_a_file_written_by_the_torch_writer_is_read(torch_name: str, name: str) -> None:
    dtype: torch.dtype = getattr(torch, torch_name)
    raw = torch.arange(1, 1 + 12 * dtype.itemsize, dtype=torch.uint8) & (1 if name == "BOOL" else 0xFF)
    blob = safetensors.torch.save({"w": raw.view(dtype).reshape(3, 4)}, {"format": "pt"})
    assert ours(blob) == stock(blob) == {"w": (name, [3, 4], raw.numpy().tobytes())}
    assert parse(blob).metadata == {"format": "pt"}


def test_a_four_bit_tensor_has_its_logical_shape() -> None:
    raw = torch.arange(1, 13, dtype=torch.uint8).reshape(3, 4)
    blob = safetensors.torch.save({"w": raw.view(torch.float4_e2m1fn_x2)})
    assert ours(blob) == stock(blob) == {"w": ("F4", [3, 8], raw.numpy().tobytes())}


def test_scalars_empty_tensors_and_any_name_are_read() -> None:
    arrays: dict[str, Any] = {name: np.arange(1, 2 + i, dtype=np.int16) for i, name in enumerate(NAMES)}
    arrays |= {"scalar": np.array(7.5), "none": np.zeros((3, 0, 2), np.float32), "nothing": np.zeros(0, np.int8)}
    blob = safetensors.numpy.save(arrays, METADATA)
    header = parse(blob)
    assert ours(blob) == stock(blob)
    assert {one.name: one.shape for one in header.tensors} == {name: array.shape for name, array in arrays.items()}
    assert header.metadata == METADATA
    ends = [(one.offset, one.offset + one.nbytes) for one in header.tensors]
    assert ends == sorted(ends)


def test_a_file_without_tensors_is_read() -> None:
    blob = safetensors.numpy.save({})
    assert parse(blob) == Header((), {}, len(blob), 0)
    assert parse(file_of("{}")).tensors == ()


# What we write.


@st.composite
def entries(draw: st.DrawFn) -> list[TensorEntry]:
    """Tensors that lie one behind the other."""
    names = draw(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=6, unique=True))
    found = []
    offset = 0
    for name in names:
        if name == "__metadata__":
            continue
        dtype = draw(st.sampled_from(sorted(BITS)))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        if prod(shape) * BITS[dtype] % 8:
            shape.append(4)
        nbytes = prod(shape) * BITS[dtype] // 8
        found.append(TensorEntry(name, dtype, tuple(shape), offset, nbytes))
        offset += nbytes
    # A zero-size tensor comes before the one at the same offset.
    return sorted(found, key=lambda one: (one.offset, one.nbytes))


metadata_dicts = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"])), st.text(st.characters(exclude_categories=["Cs"])), max_size=3
)


@given(tensors=entries(), metadata=metadata_dicts, alignment=st.sampled_from(ALIGNMENTS))
def test_the_stock_reader_reads_what_we_write(
    tensors: list[TensorEntry], metadata: dict[str, str], alignment: int
) -> None:
    head = build_header(tensors, metadata, alignment)
    data = pattern(sum(one.nbytes for one in tensors)).tobytes()
    blob = head + data
    assert len(head) % alignment == 0
    assert int.from_bytes(head[:8], "little") == len(head) - 8
    assert head[8:].rstrip(b" ").endswith(b"}")
    # In the order of the file.
    assert list(json.loads(head[8:])) == ["__metadata__"] * bool(metadata) + [one.name for one in tensors]
    assert stock(blob) == {
        one.name: (one.dtype, list(one.shape), data[one.offset : one.offset + one.nbytes]) for one in tensors
    }
    assert parse(blob) == Header(tuple(tensors), metadata, len(head), len(data))


@pytest.mark.parametrize("spare", [0, 1, 511])
def test_padding_is_shorter_than_the_alignment(spare: int) -> None:
    def length(name: str) -> int:
        return len(build_header([TensorEntry(name, "U8", (1,), 0, 1)], {}, 1))

    name = "n" * (1024 - spare - length(""))
    assert length(name) == 1024 - spare
    head = build_header([TensorEntry(name, "U8", (1,), 0, 1)], {}, 512)
    assert len(head) == 1024
    assert len(head) - len(head.rstrip(b" ")) == spare
    assert stock(head + b"\x07") == {name: ("U8", [1], b"\x07")}


def test_a_header_above_the_limit_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [TensorEntry("a" * 450, "U8", (1,), 0, 1)]
    nbytes = len(build_header(tensors, {}, 512)) - 8
    monkeypatch.setattr("relayout.format.safetensors.MAX_HEADER_NBYTES", nbytes)
    build_header(tensors, {}, 512)
    monkeypatch.setattr("relayout.format.safetensors.MAX_HEADER_NBYTES", nbytes - 1)
    with pytest.raises(PlanError, match=f"a header of {nbytes} bytes, limit {nbytes - 1}"):
        build_header(tensors, {}, 512)


# Headers that others damaged, or wrote with ill will. test_fuzz.py changes valid ones, vectors/ has those with a name.


ODD_TOKENS = ["NaN", "-Infinity", "-0", "-0.0", "1e2", "1e999", "9" * 25, "9" * 400, "0.5", "01", "+1", '"\\ud800"']
ODD_TOKENS += ['"\\ud83d\\ude00"', '"\\u0041"', '"\t"', "'a'", "tru", "", "[" * 130 + "]" * 130, "[" * 40 + "]" * 40]


def check_no_laxer(blob: bytes) -> None:
    """What we do not refuse with a FormatError, the stock reader reads, and as we do."""
    refusal, found = "", None
    try:
        found = ours(blob)
    except FormatError as error:
        refusal = str(error)
    assert refusal.startswith("x.safetensors: ") if found is None else stock(blob) == found


JSON_TEXTS = st.one_of(
    st.sampled_from(ODD_TOKENS),
    st.from_regex(r"-?[0-9]{1,3}(\.[0-9]{1,3})?([eE][+-]?[0-9]{1,3})?", fullmatch=True),
    st.from_regex(r"[-+0-9.eE]{1,6}", fullmatch=True),
    st.from_regex(r'"(\\u[dD][89a-fA-F][0-9a-f]{2}|\\.|[^"\\]){0,4}"', fullmatch=True),
    st.integers(120, 135).flatmap(lambda depth: st.sampled_from(["[" * depth + "]" * depth, '{"x":' * depth])),
    st.recursive(
        st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=5,
    ).map(json.dumps),
)


@given(value=JSON_TEXTS)
def test_an_ignored_field_is_no_loophole(value: str) -> None:
    blob = file_of((TEXT[:-2] + f',"x":{value}' + "}}").encode("utf-8", "surrogatepass"), b"abcd")
    check_no_laxer(blob)


@given(tensors=entries(), metadata=metadata_dicts, spaces=st.text(" \n\t\r", max_size=3), data=st.data())
def test_a_valid_header_is_accepted_with_its_keys_in_any_order(
    tensors: list[TensorEntry], metadata: dict[str, str], spaces: str, data: st.DataObject
) -> None:
    def shuffled(top: dict[str, Any]) -> dict[str, Any]:
        return dict(data.draw(st.permutations(list(top.items()))))

    top = {one.name: shuffled(entry(one.offset, one.offset + one.nbytes, one.shape, one.dtype)) for one in tensors}
    text = spaces + json.dumps(shuffled({**top, "__metadata__": metadata})) + spaces
    blob = file_of(text, pattern(sum(one.nbytes for one in tensors)).tobytes())
    assert ours(blob) == stock(blob)
    assert len(ours(blob)) == len(tensors)


@given(blob=st.one_of(st.binary(max_size=64), st.binary(max_size=64).map(file_of)))
def test_any_bytes_parse_or_raise_format_error(blob: bytes) -> None:
    check_no_laxer(blob)


def test_a_header_of_just_the_limit_is_no_longer_than_the_limit() -> None:
    limit = 100_000_000
    assert header_nbytes(limit.to_bytes(8, "little"), 8 + limit) == limit


ACCEPTED: dict[str, tuple[str, bytes]] = {
    "white space in front": (" \n\t\r" + TEXT, b"abcd"),
    "newlines as padding": (TEXT + "\n" * 17, b"abcd"),
    "every kind of white space as padding": (TEXT + " \n\t\r", b"abcd"),
    "a field that nobody knows": (TEXT[:-2] + ',"x":{"y":[1,-2.5,null,"z"]}}}', b"abcd"),
    "null metadata": (TEXT[:-1] + ',"__metadata__":null}', b"abcd"),
    "empty metadata": (TEXT[:-1] + ',"__metadata__":{}}', b"abcd"),
    "metadata at the end": (TEXT[:-1] + ',"__metadata__":{"k":"v"}}', b"abcd"),
    "keys against the order of offsets": (json.dumps({"b": entry(4, 8), "a": entry()}), b"abcdefgh"),
    "a header length that is no multiple of 8, and a tensor at an odd address": (TEXT + " ", b"abcd"),
    "empty tensors at every border": (
        json.dumps({"a": entry(), "b": entry(0, 0, [0]), "c": entry(4, 4, [2, 0]), "d": entry(4, 4, [0])}),
        b"abcd",
    ),
    "a shape whose zero comes before the overflow": (json.dumps({"a": entry(0, 0, [0, 2**63, 2**63])}), b""),
    "a 6-bit tensor": (json.dumps({"a": entry(0, 3, [2, 2], "F6_E3M2")}), b"abc"),
    "a surrogate pair in two escapes": (TEXT.replace('"a"', '"\\ud83e\\udd99"'), b"abcd"),
    "127 levels": (deep(127), b"abcd"),
    "a number that is nearly too large": (with_number("1e308"), b"abcd"),
}


@pytest.mark.parametrize(("text", "data"), ACCEPTED.values(), ids=ACCEPTED)
def test_an_unusual_header_is_accepted(text: str, data: bytes) -> None:
    blob = file_of(text, data)
    found = ours(blob)
    assert found
    assert found == stock(blob)


def test_tensors_come_in_offset_order_with_empty_ones_first() -> None:
    header = {"b": entry(4, 8), "a": entry(0, 4), "c": entry(4, 4, [0])}
    assert [one.name for one in parse(file_of(header, b"abcdefgh")).tensors] == ["a", "c", "b"]
