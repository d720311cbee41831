"""Rewrites tests/vectors: checkpoints that strangers might send, each wrong in one place, and the list of them.

    python tools/vectors.py

The two base checkpoints and the plan are made anew as well, so run it when the format's version changes. A vector is a
few files that replace, or join, those of its base. Digests in front of what is wrong are truthful, so that the check is
reached that the vector is meant for.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import safetensors
import transformers
import xxhash
import zstandard

import relayout

FOLDER = Path(__file__).parent.parent / "tests" / "vectors"
INDEX, CONFIG, MANIFEST = "model.safetensors.index.json", "config.json", "relayout.json"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
RANK_FILES = ["model-rank-0-part-0.safetensors", "model-rank-1-part-0.safetensors"]
TABLES, RECORD = ["relayout.rank-0.json.zst", "relayout.rank-1.json.zst"], "relayout.source.json.zst"
HOSTILE = "hostile.safetensors"

Edits = Mapping[str, Any]
"""Path in an object, its parts divided by "/" -> the new value, a function of the old one, or GONE."""
GONE: Any = object()


@dataclass(frozen=True)
class Vector:
    """One hostile checkpoint; all but `files` goes into the list."""

    name: str
    base: str
    command: str
    """Words of the command line; {path} is the checkpoint, {out} a folder to make."""
    reason: str
    says: str
    """A pattern that the one line of error matches."""
    python: tuple[str, ...]
    """Calls that refuse it as well."""
    error: str = "FormatError"
    """What they raise."""
    exit: int = 2
    is_bomb: bool = False
    """Whether it is run by itself, with little memory and time."""
    made: Mapping[str, str] = field(default_factory=dict)
    """What git cannot store: name -> what it is, see `tests/test_vectors.py`."""
    files: Mapping[str, bytes] = field(default_factory=dict)


VECTORS: list[Vector] = []


# What vectors are made of.


def digest(blob: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(blob)


def compact(top: Any) -> bytes:
    return json.dumps(top, ensure_ascii=False, separators=(",", ":")).encode()


def zstd(text: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=19).compress(text)


def zstd_frame(*blocks: bytes, window_log: int = 17) -> bytes:
    """A frame by hand: the header with a window of 2**window_log bytes, then blocks."""
    return b"\x28\xb5\x2f\xfd\x00" + bytes([(window_log - 10) << 3]) + b"".join(blocks)


def zstd_block(content: bytes, times: int | None = None, *, last: bool = False) -> bytes:
    """A block of bytes as they are, or of one byte so many times."""
    size, kind = (len(content), 0) if times is None else (times, 1)
    return (size << 3 | kind << 1 | last).to_bytes(3, "little") + content


def edited(top: Any, edits: Edits) -> Any:
    """A copy of an object, changed."""
    top = deepcopy(top)
    for path, value in edits.items():
        place = top
        *way, last = path.split("/")
        for part in way:
            place = place[int(part) if isinstance(place, list) else part]
        key = int(last) if isinstance(place, list) else last
        if value is GONE:
            del place[key]
        else:
            place[key] = value(place[key]) if callable(value) else value
    return top


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def file_of(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file; the header is JSON text, its bytes, or what to dump."""
    if not isinstance(header, bytes | str):
        header = json.dumps(header)
    text = header if isinstance(header, bytes) else header.encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(start: Any = 0, end: Any = 4, shape: Any = (1,), dtype: Any = "F32", **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end], **more}


# The bases.

CONFIGURATION = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 70,
    "max_position_embeddings": 64,
}
LAYER = "model.layers.0."
TENSORS: list[dict[str, tuple[str, list[int]]]] = [
    {
        "model.embed_tokens.weight": ("BF16", [70, 16]),
        f"{LAYER}input_layernorm.weight": ("F32", [16]),
        f"{LAYER}self_attn.q_proj.weight": ("F32", [16, 16]),
        f"{LAYER}self_attn.q_proj.bias": ("I8", [16]),
        f"{LAYER}self_attn.k_proj.weight": ("I8", [8, 16]),
        f"{LAYER}self_attn.k_proj.bias": ("I8", [8]),
        f"{LAYER}self_attn.v_proj.weight": ("BF16", [8, 16]),
        f"{LAYER}self_attn.v_proj.bias": ("I8", [8]),
        f"{LAYER}self_attn.o_proj.weight": ("BF16", [16, 16]),
    },
    {
        f"{LAYER}post_attention_layernorm.weight": ("F32", [16]),
        f"{LAYER}mlp.gate_proj.weight": ("I8", [24, 16]),
        f"{LAYER}mlp.up_proj.weight": ("I8", [24, 16]),
        f"{LAYER}mlp.down_proj.weight": ("F32", [16, 24]),
        "model.norm.weight": ("F32", [16]),
        "lm_head.weight": ("BF16", [70, 16]),
    },
]
PLAN = """\
model_types = ["llama"]
extends = "llama"

[sizes]
ffn = "intermediate_size"

[cut]
"model.layers.*.mlp.{gate,up}_proj.weight" = { rows = "ffn" }
"model.layers.*.mlp.down_proj.weight" = { columns = "ffn" }
"""


def shard(tensors: Mapping[str, tuple[str, list[int]]], seed: int) -> bytes:
    """A file of these tensors, of bytes that depend on their places."""
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start = end
        end += {"F32": 4, "BF16": 2, "I8": 1}[dtype] * shape[0] * (shape[1] if len(shape) > 1 else 1)
        head[name] = entry(start, end, shape, dtype)
    text = compact(head)
    return file_of(text + b" " * (-len(text) % 8), bytes((seed + 7 * i) % 127 for i in range(end)))


@cache
def plain() -> dict[str, bytes]:
    """The files of the plain base."""
    shards = {name: shard(tensors, seed) for seed, (name, tensors) in enumerate(zip(SHARDS, TENSORS, strict=True))}
    weight_map = {name: file for file, tensors in zip(SHARDS, TENSORS, strict=True) for name in tensors}
    index = {"metadata": {"total_size": sum(map(len, shards.values()))}, "weight_map": weight_map}
    return {
        **shards,
        INDEX: json.dumps(index, indent=2).encode() + b"\n",
        CONFIG: json.dumps(CONFIGURATION, indent=2).encode() + b"\n",
    }


@cache
def converted() -> dict[str, bytes]:
    """The files of its conversion for two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / "plain", Path(folder) / "converted"
        write(source, plain())
        relayout.convert(source, output, tp=2, align=512)
        return {path.relative_to(output).as_posix(): path.read_bytes() for path in output.rglob("*") if path.is_file()}


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, blob in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(blob)


class Opened:
    """The converted base with its sidecar as objects to be changed."""

    def __init__(self) -> None:
        self.files = dict(converted())
        self.manifest = json.loads(self.files[MANIFEST])
        self.tables = [json.loads(zstandard.decompress(self.files[name])) for name in TABLES]
        self.record = json.loads(zstandard.decompress(self.files[RECORD]))
        self.raw: dict[str, bytes] = {}
        """Tables or the record as they shall be stored, whatever is in them."""

    def closed(self) -> dict[str, bytes]:
        """The files that differ from the base's, with truthful digests."""
        base = Opened()
        if compact(self.record) != compact(base.record) or RECORD in self.raw:
            self._close_record(self.raw.get(RECORD))
        for rank, name in enumerate(TABLES):
            if compact(self.tables[rank]) != compact(base.tables[rank]) or name in self.raw:
                self.files[name] = self.raw.get(name) or zstd(compact(self.tables[rank]))
                self.manifest["ranks"][rank]["table_digest"] = digest(self.files[name])
        self.files[MANIFEST] = manifest_text(self.manifest)
        return {name: blob for name, blob in self.files.items() if blob != converted()[name]}

    def _close_record(self, stored: bytes | None) -> None:
        """Give the conversion its new name, everywhere."""
        old = self.manifest["conversion"]
        text = compact(self.record) if stored is None else readable(stored)
        new = digest(text)
        self.files[RECORD] = zstd(text) if stored is None else stored
        self.manifest |= {"conversion": new}
        self.manifest["source"]["record_digest"] = digest(self.files[RECORD])
        for rank, name in enumerate(RANK_FILES):
            self.tables[rank]["conversion"] = new
            [file] = self.manifest["ranks"][rank]["files"]
            head, data = self.files[name][: file["data_start"]], self.files[name][file["data_start"] :]
            head = head.replace(old.encode(), new.encode())
            self.files[name] = head + data
            file["header_digest"] = digest(head)


def readable(stored: bytes) -> bytes:
    """What a reader gets of a frame that may not be whole; nothing of one that is none."""
    try:
        return zstandard.ZstdDecompressor(max_window_size=2**27).decompressobj().decompress(stored)
    except zstandard.ZstdError:
        return b""


def manifest_text(top: Mapping[str, Any]) -> bytes:
    """A manifest with its digest."""
    top = {key: value for key, value in top.items() if key != "self_digest"}
    top["self_digest"] = digest(compact(top))
    return (json.dumps(top, indent=2, ensure_ascii=False) + "\n").encode()


# One function for each parser that adds a vector.


def header(name: str, reason: str, says: str, blob: bytes, **more: Any) -> None:
    """A whole .safetensors file."""
    VECTORS.append(
        Vector(
            f"header/{name}",
            "plain",
            f"convert {{path}}/{HOSTILE} -o {{out}}",
            reason,
            rf"/hostile\.safetensors: {says}",
            ("load 0 of 1",),
            files={HOSTILE: blob},
            **more,
        )
    )


def tensor(name: str, reason: str, says: str, one: Any, data: bytes = b"abcd") -> None:
    """A file of one tensor, given by its entry."""
    header(name, reason, f"tensor 'a': {says}", file_of({"a": one}, data))


def index(name: str, reason: str, says: str, text: Any, *, file: str = INDEX, **more: Any) -> None:
    """Another index.json, as text, bytes, or edits."""
    files = more.pop("files", {})
    if isinstance(text, dict):
        text = json.dumps(edited(json.loads(plain()[INDEX]), text), indent=2)
    blob = text if isinstance(text, bytes) else text.encode()
    VECTORS.append(
        Vector(
            f"index/{name}",
            "plain",
            "convert {path} --tp 2 -o {out}",
            reason,
            rf"/{file.replace('.', chr(92) + '.')}: {says}",
            ("load 0 of 2",),
            files={INDEX: blob, **files},
            **more,
        )
    )


def config(name: str, reason: str, says: str, text: Any, **more: Any) -> None:
    """Another config.json, as text, bytes, or edits. Edits make requests that cannot be carried out."""
    is_request = isinstance(text, dict)
    if is_request:
        text = json.dumps(edited(CONFIGURATION, text), indent=2)
    blob = text if isinstance(text, bytes) else text.encode()
    VECTORS.append(
        Vector(
            f"config/{name}",
            "plain",
            "convert {path} --tp 2 -o {out}",
            reason,
            says if is_request else rf"/config\.json: {says}",
            ("load 0 of 2",),
            error="PlanError" if is_request else "FormatError",
            files={CONFIG: blob},
            **more,
        )
    )


READERS = ("load 0", "restore", "verify")


def manifest(name: str, reason: str, says: str, change: Edits | Callable[[str], str], **more: Any) -> None:
    """Another relayout.json: edits of the object, with a truthful digest behind them, or a change of the text."""
    if callable(change):
        blob = change(converted()[MANIFEST].decode()).encode("utf-8", "surrogatepass")
    else:
        blob = manifest_text(edited(json.loads(converted()[MANIFEST]), change))
    VECTORS.append(
        Vector(
            f"manifest/{name}",
            "converted",
            more.pop("command", "inspect {path}"),
            reason,
            more.pop("where", r"/relayout\.json: ") + says,
            more.pop("python", READERS),
            files={MANIFEST: blob},
            **more,
        )
    )


def table(name: str, reason: str, says: str, change: Edits | bytes, also: Edits | None = None, **more: Any) -> None:
    """Another table of rank 0: edits, or what is stored. `also` edits the manifest."""
    opened = Opened()
    if isinstance(change, bytes):
        opened.raw[TABLES[0]] = change
    else:
        opened.tables[0] = edited(opened.tables[0], change)
    opened.manifest = edited(opened.manifest, also or {})
    VECTORS.append(
        Vector(
            f"table/{name}",
            "converted",
            "inspect {path} --rank 0",
            reason,
            more.pop("where", r"/relayout\.rank-0\.json\.zst: ") + says,
            READERS,
            files=opened.closed(),
            **more,
        )
    )


def record(name: str, reason: str, says: str, change: Edits | bytes, where: str = RECORD, **more: Any) -> None:
    """Another source record: edits, or what is stored."""
    opened = Opened()
    if isinstance(change, bytes):
        opened.raw[RECORD] = change
    else:
        opened.record = edited(opened.record, change)
    python = more.pop("python", ("restore", "load 0 of 1", "verify"))
    files = {**opened.closed(), **more.pop("files", {})}
    VECTORS.append(
        Vector(
            f"record/{name}",
            "converted",
            "restore {path} -o {out}",
            reason,
            rf"{where.replace('.', chr(92) + '.')}: {says}",
            python,
            files=files,
            **more,
        )
    )


def plan(name: str, reason: str, says: str, text: str | bytes, **more: Any) -> None:
    """Another plan file."""
    blob = text if isinstance(text, bytes) else text.encode()
    VECTORS.append(
        Vector(
            f"plan/{name}",
            "plain",
            "convert {path} --tp 2 --plan {path}/plan.toml -o {out}",
            reason,
            more.pop("where", r"/plan\.toml: ") + says,
            (),
            files={"plan.toml": blob, **more.pop("files", {})},
            **more,
        )
    )


def rank_file(name: str, reason: str, says: str, files: Mapping[str, bytes], command: str, **more: Any) -> None:
    """Rank files that are not those that the sidecar tells of."""
    VECTORS.append(
        Vector(
            f"rank_file/{name}",
            "converted",
            command,
            reason,
            says,
            more.pop("python", ("load 0", "verify")),
            files=files,
            **more,
        )
    )


SIZED: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "index": ("plain", "convert {path} -o {out}", ("load 0 of 1",)),
    "config": ("plain", "convert {path} -o {out}", ("load 0 of 1",)),
    "plan": ("plain", "convert {path} --plan {path}/plan.toml -o {out}", ()),
    "manifest": ("converted", "inspect {path}", READERS),
    "table": ("converted", "inspect {path}", READERS),
    "record": ("converted", "restore {path} -o {out}", ("restore", "verify")),
}


def sized(parser: str, name: str, limit: int) -> Vector:
    """A file that is one byte larger than may be, and all hole."""
    base, command, python = SIZED[parser]
    return Vector(
        f"{parser}/too-large",
        base,
        command,
        "would be read whole before anything of it is known",
        rf"/{name.replace('.', chr(92) + '.')}: {limit + 1} bytes, limit ",
        python,
        made={name: f"hole {limit + 1}"},
    )


def path(name: str, reason: str, says: str, base: str, made: Mapping[str, str], **more: Any) -> None:
    """Something that is no file in a file's place."""
    command = "convert {path} --tp 2 -o {out}" if base == "plain" else "restore {path} -o {out}"
    VECTORS.append(
        Vector(
            f"paths/{name}",
            base,
            more.pop("command", command),
            reason,
            says,
            more.pop("python", ("load 0 of 2",) if base == "plain" else ("restore", "verify")),
            made=made,
            **more,
        )
    )


# The vectors.


def headers() -> None:
    good = entry()
    text = json.dumps({"a": good})

    header("empty", "there is nothing, not even a length", "0 bytes, shorter than", b"")
    header("seven-bytes", "the length itself is cut off", "7 bytes, shorter than", b"\x02\0\0\0\0\0\0")
    header("length-zero", "no JSON at all", "not valid JSON", file_of(b""))
    header(
        "length-2-to-64",
        "a reader would allocate 16 EiB",
        r"header length 18446744073709551615 at byte 0, limit",
        file_of(text, b"abcd", 2**64 - 1),
    )
    header(
        "length-2-to-63",
        "negative, for a reader with signed numbers",
        r"header length 9223372036854775808 at byte 0",
        file_of(text, b"abcd", 2**63),
    )
    header(
        "length-above-limit",
        "one byte more than the reference reader takes",
        "header length 100000001 at byte 0",
        file_of(text, b"abcd", 100_000_001),
    )
    header(
        "length-beyond-file",
        "the header would end behind the file",
        r"header ends at byte 100000008, the file at byte",
        file_of(text, b"abcd", 100_000_000),
    )
    header(
        "length-one-beyond",
        "the header ends one byte behind the file",
        r"header ends at byte \d+, the file at byte \d+",
        file_of(text, b"", len(text) + 1),
    )
    header(
        "length-into-data",
        "the data would be read as JSON",
        "not valid JSON: Extra data at character",
        file_of(text, b"abcd", len(text) + 4),
    )
    header(
        "length-cuts-json", "the header stops in the middle", "not valid JSON", file_of(text, b"abcd", len(text) - 1)
    )
    header("spaces-only", "padding without a header", "not valid JSON: Expecting value", file_of(b" " * 64))
    header("zeros", "a sparse file's hole in place of the JSON", "not valid JSON", file_of(b"\0" * 64))
    header(
        "pickle",
        "a pickle under another name: must not be run",
        "header length",
        b"\x80\x04\x95\x10\0\0\0\0\0\0\0\x8c\x02os.",
    )

    header(
        "not-utf-8",
        "a name that is no text",
        "header is not UTF-8 at byte 10",
        file_of(b'{"\xff":' + text[5:].encode(), b"abcd"),
    )
    header(
        "overlong-utf-8",
        "'/' written in two bytes: slips past checks of names",
        "header is not UTF-8 at byte 10",
        file_of(b'{"\xc0\xaf":' + text[5:].encode(), b"abcd"),
    )
    header(
        "surrogate-in-utf-8",
        "half of a pair, encoded: no text",
        "header is not UTF-8 at byte 10",
        file_of(b'{"\xed\xa0\x80":' + text[5:].encode(), b"abcd"),
    )
    header(
        "utf-16", "Python's json would guess the encoding", "not valid JSON", file_of(text.encode("utf-16-le"), b"abcd")
    )
    header(
        "utf-16-with-bom",
        "as above, with a byte order mark",
        "header is not UTF-8 at byte 8",
        file_of(text.encode("utf-16"), b"abcd"),
    )
    header("utf-32", "as above, four bytes each", "not valid JSON", file_of(text.encode("utf-32-le"), b"abcd"))
    header(
        "utf-8-bom", "some readers skip it, some do not", "not valid JSON", file_of(text.encode("utf-8-sig"), b"abcd")
    )

    for name, wrong in {"list": "[]", "string": '"a"', "number": "1", "null": "null", "true": "true"}.items():
        header(f"top-{name}", "a header is an object", "header is a JSON .*expected an object", file_of(wrong))
    header("trailing-comma", "JavaScript, not JSON", "not valid JSON", file_of(text[:-1] + ",}", b"abcd"))
    header(
        "trailing-object", "two headers: which one counts?", "not valid JSON: Extra data", file_of(text + text, b"abcd")
    )
    header(
        "trailing-nul",
        "a C string's end: what follows is hidden",
        "not valid JSON: Extra data",
        file_of(text + "\0", b"abcd"),
    )
    header("comment", "no JSON", "not valid JSON", file_of(text + "//", b"abcd"))
    header("single-quotes", "Python, not JSON", "not valid JSON", file_of(text.replace('"', "'"), b"abcd"))
    header(
        "control-character",
        "a line feed in a name, unescaped",
        "not valid JSON: Invalid control character",
        file_of(text.replace('"a"', '"a\nb"'), b"abcd"),
    )
    header(
        "escape-unknown",
        r"'\x' is no JSON escape",
        r"not valid JSON: Invalid \\+escape",
        file_of(text.replace('"a"', '"\\x41"'), b"abcd"),
    )
    header(
        "lone-surrogate",
        "a name that cannot be written or printed",
        "a string holds half of a surrogate pair",
        file_of(text.replace('"a"', '"\\ud800"'), b"abcd"),
    )
    header(
        "lone-surrogate-in-metadata",
        "as above, where it would be copied to the output",
        "a string holds half of a surrogate pair",
        file_of('{"__metadata__":{"k":"\\udc00"},' + text[1:], b"abcd"),
    )
    for name, number in {"nan": "NaN", "infinity": "-Infinity", "1e999": "1e999", "400-digits": "9" * 400}.items():
        what = "a number is out of range" if number[0] in "19" else f"{number} is no JSON number"
        header(
            f"number-{name}",
            "no number of JSON or of this machine",
            what,
            file_of(text[:-2] + f',"x":{number}}}}}', b"abcd"),
        )
    header(
        "number-5000-digits",
        "Python refuses to read it, with an error of its own kind",
        "a number is out of range",
        file_of(text[:-2] + f',"x":{"7" * 5000}}}}}', b"abcd"),
    )
    header(
        "number-leading-zero", "octal for some", "not valid JSON", file_of(text.replace("[0, 4]", "[00, 4]"), b"abcd")
    )
    header(
        "nested-128",
        "one level more than the reference reader takes",
        "tensor 'a': JSON nested too deeply",
        file_of(text[:-2] + f',"x":{nested(126)}}}}}', b"abcd"),
    )
    header(
        "nested-20000",
        "a recursive parser overflows its stack",
        "JSON nested too deeply",
        file_of(text[:-2] + f',"x":{nested(20_000)}}}}}', b"abcd"),
    )
    header(
        "nested-objects",
        "as above, with objects",
        "JSON nested too deeply",
        file_of('{"a":' * 20_000 + "1" + "}" * 20_000),
    )
    header("nested-open", "as above, never closed", "JSON nested too deeply", file_of("[" * 20_000))
    header(
        "nested-700-and-escape",
        "near the end of the stack, and read a second time for an escape",
        "tensor 'a': JSON nested too deeply",
        file_of(text[:-2] + f',"y":"\\u0041","x":{nested(700)}}}}}', b"abcd"),
    )

    header(
        "duplicate-tensor",
        "the last would win in silence",
        "name 'a' occurs twice",
        file_of(text[:-1] + "," + text[1:], b"abcd"),
    )
    header(
        "duplicate-tensor-escaped",
        "as above, written differently",
        "name 'a' occurs twice",
        file_of(text[:-1] + "," + text[1:].replace('"a"', '"\\u0061"'), b"abcd"),
    )
    header(
        "duplicate-metadata",
        "two sets of metadata",
        "name '__metadata__' occurs twice",
        file_of('{"__metadata__":{},"__metadata__":{},' + text[1:], b"abcd"),
    )
    header(
        "duplicate-metadata-key",
        "the last would win in silence",
        "name 'k' occurs twice",
        file_of('{"__metadata__":{"k":"1","k":"2"},' + text[1:], b"abcd"),
    )
    header(
        "duplicate-in-entry",
        "two dtypes: one for the checker, one for the reader",
        "name 'dtype' occurs twice",
        file_of('{"a": {"dtype": "I8", ' + text[7:], b"abcd"),
    )
    header(
        "duplicate-in-ignored",
        "in a field that nobody reads",
        "name 'y' occurs twice",
        file_of(text[:-2] + ',"x":{"y":1,"y":2}}}', b"abcd"),
    )

    for name, wrong in {"list": ["pt"], "string": "pt", "number": 1, "false": False}.items():
        header(
            f"metadata-{name}",
            "metadata maps strings to strings",
            "__metadata__ must map strings to strings",
            file_of({"__metadata__": wrong, "a": good}, b"abcd"),
        )
    for name, wrong in {"number": 1, "null": None, "object": {}}.items():
        header(
            f"metadata-value-{name}",
            "metadata maps strings to strings",
            "__metadata__ must map strings to strings",
            file_of({"__metadata__": {"k": wrong}, "a": good}, b"abcd"),
        )

    tensor(
        "entry-list",
        "the reference parser takes the fields in order",
        "expected an object, found list",
        ["F32", [1], [0, 4]],
    )
    tensor("entry-null", "no entry", "expected an object, found NoneType", None)
    tensor("entry-number", "no entry", "expected an object, found int", 4)
    for key in ("dtype", "shape", "data_offsets"):
        tensor(
            f"missing-{key.replace('_', '-')}",
            "an entry has all three",
            f"'{key}' is missing",
            {k: v for k, v in good.items() if k != key},
        )
    dtypes = {
        "unknown": "F31",
        "lower-case": "f32",
        "number": 4,
        "null": None,
        "object": {"F32": None},
        "list": ["F32"],
        "empty": "",
    }
    for name, wrong in dtypes.items():
        tensor(f"dtype-{name}", "no element type of the format", "unknown dtype", entry(dtype=wrong))
    tensor("dtype-nul", "cut off at the NUL it would be F32", r"unknown dtype 'F32\\x00'", entry(dtype="F32\0"))
    shapes = {
        "negative": [-1],
        "float": [1.0],
        "string": ["1"],
        "bool": [True],
        "null": [None],
        "nested": [[1]],
        "minus-zero": [-0.0],
    }
    for name, wrong in shapes.items():
        tensor(
            f"shape-{name}", "sizes are whole numbers from 0 on", "shape .* is not a list of sizes", entry(shape=wrong)
        )
    for name, wrong in {"number": 1, "object": {}, "none": None, "text": "1"}.items():
        tensor(f"shape-is-{name}", "a shape is a list", "shape .* is not a list of sizes", entry(shape=wrong))
    tensor("shape-2-to-64", "0 in 64 bits", "shape .* is not a list of sizes", entry(0, 0, [2**64]), b"")
    tensor(
        "shape-overflows",
        "0 elements in 64 bits: the check passes, the tensor is huge",
        "shape .* overflows 64 bits",
        entry(0, 0, [2**32, 2**32]),
        b"",
    )
    tensor(
        "shape-overflows-to-4",
        "4 bytes in 64 bits, as its data",
        "shape .* overflows 64 bits",
        entry(0, 4, [2**62 + 1], "F32"),
    )
    tensor(
        "shape-overflows-with-item-size",
        "fits as elements, not as bytes",
        "shape .* of F32 overflows 64 bits",
        entry(0, 0, [2**62]),
        b"",
    )
    tensor(
        "shape-overflows-before-zero",
        "the product passes 64 bits on its way to 0",
        "shape .* overflows 64 bits",
        entry(0, 0, [2**32, 2**32, 0]),
        b"",
    )
    tensor(
        "shape-of-many-axes",
        "a product of many large numbers: of more of them it takes minutes",
        "(shape .* overflows 64 bits|.* axes)",
        entry(0, 0, [2**62] * 2_000),
        b"",
    )
    tensor(
        "shape-not-its-bytes",
        "a view past the end of the data",
        r"data_offsets \[0, 4\] hold 4 bytes, shape \[2\] of F32 needs 8",
        entry(0, 4, [2]),
    )
    tensor(
        "shape-smaller-than-bytes", "bytes that belong to nothing", ".*hold 4 bytes, .* needs 1", entry(0, 4, [1], "I8")
    )
    offsets = {
        "negative": [-4, 0],
        "float": [0.0, 4.0],
        "string": ["0", "4"],
        "bool": [False, 4],
        "one": [4],
        "three": [0, 4, 4],
        "none": [],
        "null": [None, 4],
        "object": {"0": 4},
        "number": 4,
        "2-to-64": [0, 2**64],
        "2-to-64-start": [2**64 - 4 + 4, 4],
    }
    for name, wrong in offsets.items():
        tensor(
            f"offsets-{name}",
            "offsets are a pair of sizes",
            "data_offsets .* is not a pair of sizes",
            {**good, "data_offsets": wrong},
        )
    tensor("offsets-reversed", "negative length", r"data_offsets \[4, 0\] hold -4 bytes", entry(4, 0))
    tensor(
        "offsets-reversed-wrap",
        "the length of 4, in 64 bits that wrap around",
        "data_offsets .* hold -",
        entry(2**64 - 1, 3),
    )
    tensor(
        "offsets-beyond-file",
        "a read behind the file's end",
        "ends at byte 4000000000 of the data section, which has 4",
        entry(0, 4_000_000_000, [1_000_000_000]),
    )
    tensor(
        "offsets-end-2-to-61",
        "the end overflows when the data's start is added, in bits",
        "ends at byte 2305843009213693951 of the data section",
        entry(0, 2**61 - 1, [2**61 - 1], "I8"),
    )
    tensor(
        "hole-in-front",
        "bytes that belong to nothing: hidden data",
        "starts at byte 4 .* expected 0: leaves a hole",
        entry(4, 8),
        b"abcdefgh",
    )
    header(
        "hole",
        "as above, between two tensors",
        "tensor 'b': starts at byte 8 .* expected 4: leaves a hole",
        file_of({"a": good, "b": entry(8, 12)}, b"0123456789ab"),
    )
    header(
        "overlap",
        "one tensor's bytes are another's",
        "tensor 'b': starts at byte 2 .* expected 4: overlaps",
        file_of({"a": good, "b": entry(2, 6)}, b"012345"),
    )
    header(
        "alias",
        "as above, all of them: a small file of a huge model",
        "tensor 'b': starts at byte 0 .* expected 4: overlaps",
        file_of({"a": good, "b": good}, b"0123"),
    )
    header(
        "empty-tensor-inside",
        "no bytes, but inside another tensor's",
        "tensor 'b': starts at byte 2 .* overlaps",
        file_of({"a": good, "b": entry(2, 2, [0])}, b"0123"),
    )
    header(
        "trailing-data",
        "another file appended: a polyglot",
        "the tensors cover 4 bytes, the data section has 10: trailing bytes",
        file_of(text, b"abcdPK\5\6\0\0"),
    )
    header(
        "data-without-tensors",
        "as above, with nothing but that",
        "the tensors cover 0 bytes, the data section has 4",
        file_of("{}", b"abcd"),
    )
    header(
        "truncated",
        "half of the data is missing",
        "tensor 'a': ends at byte 4 of the data section, which has 2",
        file_of(text, b"ab"),
    )
    tensor(
        "half-byte",
        "three 4-bit elements do not fill bytes",
        r"shape \[3\] of F4 does not fill whole bytes",
        entry(0, 2, [3], "F4"),
        b"ab",
    )
    tensor(
        "part-of-a-byte",
        "two 6-bit elements do not fill bytes",
        ".* does not fill whole bytes",
        entry(0, 2, [2], "F6_E2M3"),
        b"ab",
    )
    header(
        "terminal-escape",
        "the name would clear the terminal, and print what it likes",
        r"tensor '\\+x1b\[2J\\+x1b\]0;",
        file_of({"\x1b[2J\x1b]0;done\x07": entry(dtype="?")}, b"abcd"),
    )
    header(
        "line-break",
        "the name would forge a second line",
        r"tensor '\\+n(relayout)",
        file_of({"\nrelayout: done": entry(dtype="?")}, b"abcd"),
    )
    header(
        "bidi",
        "the name would turn the line around",
        r"tensor '\\+u202e",
        file_of({"\u202egpj.exe": entry(dtype="?")}, b"abcd"),
    )
    header(
        "c1-control",
        "8-bit controls steer terminals too",
        r"tensor '\\+x9b2J",
        file_of({"\x9b2J": entry(dtype="?")}, b"abcd"),
    )
    header(
        "long-name",
        "a line of ten thousand characters in the log",
        "tensor 'aaa.{0,1000}$",
        file_of({"a" * 10_000: entry(dtype="?")}, b"abcd"),
    )
    header(
        "long-dtype",
        "as above",
        "tensor 'a': unknown dtype .{0,1000}$",
        file_of({"a": entry(dtype="F" * 10_000)}, b"abcd"),
    )


def indexes() -> None:
    VECTORS.append(sized("index", INDEX, 2**28))

    first = "weight_map/model.norm.weight"
    names = {
        "absolute": "/etc/passwd.safetensors",
        "parent": "../secret.safetensors",
        "folder": "sub/model.safetensors",
        "backslash": "..\\secret.safetensors",
        "nul": "model\0.safetensors",
        "empty": "",
        "no-suffix": "model.bin",
        "suffix-only": "/.safetensors",
        "pickle": "pytorch_model.bin",
        "newline-end": SHARDS[0] + "\n",
        "url": "https://example.org/a.safetensors",
    }
    for name, wrong in names.items():
        index(
            f"file-{name}",
            "a path out of the folder, or to something else",
            "tensor 'model.norm.weight': .* is not the name of a .safetensors file",
            {first: wrong},
        )
    for name, wrong in {"number": 1, "null": None, "list": [SHARDS[0]], "object": {}}.items():
        index(
            f"file-{name}",
            "a file name is a string",
            "tensor 'model.norm.weight': .* is not the name of a .safetensors file",
            {first: wrong},
        )
    index(
        "file-missing",
        "the checkpoint is not whole",
        "cannot be read: No such file",
        {first: "model-00003-of-00003.safetensors"},
        file="model-00003-of-00003.safetensors",
    )
    index(
        "file-name-too-long",
        "no file system has it",
        "cannot be read: File name too long",
        {first: "a" * 300 + ".safetensors"},
        file="a" * 300 + ".safetensors",
    )
    index(
        "file-escape",
        "the name would steer the terminal",
        r"cannot be read: No such file",
        {first: "\x1b[2J.safetensors"},
        file=r"\\x1b\[2J.safetensors",
    )
    index(
        "tensor-not-there",
        "a tensor that no file has",
        "tensor 'ghost': named by the index, not in the file",
        {"weight_map/ghost": SHARDS[0]},
        file=SHARDS[0],
    )
    index(
        "tensor-in-other-file",
        "the index contradicts the files",
        "tensor 'model.norm.weight': named by the index, not in the file",
        {first: SHARDS[0]},
        file=SHARDS[0],
    )
    maps = {"list": [], "string": "a", "null": None, "number": 5, "empty": {}}
    for name, wrong in maps.items():
        index(f"map-{name}", "no map of tensors", "'weight_map' is (missing|empty)", {"weight_map": wrong})
    index("map-missing", "no map of tensors", "'weight_map' is missing", {"weight_map": GONE})
    index("top-list", "an index is an object", "a JSON list, expected an object", "[]")
    index("empty", "an empty file", "not valid JSON", "")
    text = plain()[INDEX].decode()
    index("truncated", "half of an index", "not valid JSON", text[: len(text) // 2])
    index(
        "duplicate-tensor",
        "the last would win in silence",
        "name 'model.norm.weight' occurs twice",
        text.replace('"weight_map": {', f'"weight_map": {{"model.norm.weight": "{SHARDS[0]}",'),
    )
    index(
        "duplicate-map",
        "as above, the whole map",
        "name 'weight_map' occurs twice",
        text.replace('"weight_map"', '"weight_map": {}, "weight_map"'),
    )
    index("utf-16", "Python's json would guess the encoding of bytes", "not UTF-8 at byte 0", text.encode("utf-16"))
    index("utf-8-bom", "some readers skip it, some do not", "not valid JSON", text.encode("utf-8-sig"))
    index(
        "not-utf-8",
        "a name that is no text",
        r"not UTF-8 at byte \d+",
        text.encode().replace(b"model.norm.weight", b"model.norm.w\xffight"),
    )
    index("nan", "no JSON", "NaN is no JSON number", {"metadata/total_size": float("nan")})
    index(
        "1e999",
        "beyond the largest float",
        "a number is out of range",
        text.replace('"total_size": ', '"total_size": 1e999, "x": '),
    )
    index(
        "lone-surrogate",
        "a name that cannot be printed",
        "a string holds half of a surrogate pair",
        text.replace("model.norm.weight", "\\ud800"),
    )
    index(
        "nested",
        "a recursive parser overflows its stack",
        "JSON nested too deeply",
        text.replace('"metadata"', f'"x": {nested(20_000)}, "metadata"'),
    )
    other = "other.safetensors"
    two = {other: shard({"model.norm.weight": ("F32", [16])}, 9)}
    VECTORS.append(
        Vector(
            "index/tensor-in-two-files",
            "plain",
            "convert {path} --tp 2 -o {out}",
            "with no index (a folder lies in its place), nothing says which counts",
            r"/[^/]*\.safetensors: tensor 'model.norm.weight' is in [^/]*\.safetensors as well",
            ("load 0 of 2",),
            made={INDEX: "nothing"},
            files=two,
        )
    )


def configs() -> None:
    VECTORS.append(sized("config", CONFIG, 2**24))

    text = plain()[CONFIG].decode()
    for name, wrong in {"list": "[]", "string": '"llama"', "null": "null", "number": "1"}.items():
        config(f"top-{name}", "a config is an object", "a JSON .*expected an object", wrong)
    config("empty", "an empty file", "not valid JSON", "")
    config("truncated", "half of a config", "not valid JSON", text[: len(text) // 2])
    config("utf-16", "Python's json would guess the encoding of bytes", "not UTF-8 at byte 0", text.encode("utf-16"))
    config("utf-8-bom", "some readers skip it, some do not", "not valid JSON", text.encode("utf-8-sig"))
    config(
        "not-utf-8", "a value that is no text", r"not UTF-8 at byte \d+", text.encode().replace(b"llama", b"ll\xffma")
    )
    config(
        "nested",
        "a recursive parser overflows its stack",
        "not valid JSON",
        text.replace("{", f'{{"x": {nested(20_000)},', 1),
    )
    config(
        "number-5000-digits",
        "Python refuses to read it, with an error of its own kind",
        "not valid JSON",
        text.replace('"hidden_size": 16', f'"hidden_size": {"7" * 5000}'),
    )
    config(
        "lone-surrogate",
        "a model type that cannot be printed",
        "a string holds half of a surrogate pair",
        text.replace('"llama"', '"\\ud800"'),
    )

    q = r"tensor 'model.layers.0.self_attn.[a-z]_proj.(weight|bias)': axis [01] of .* heads"

    for name, wrong in {
        "float": 4.0,
        "string": "4",
        "zero": 0,
        "negative": -4,
        "bool": True,
        "null": None,
        "list": [4],
        "nan": float("nan"),
        "2-to-64": 2**64,
    }.items():
        config(f"heads-{name}", "a number of heads that is none", q + ".*config.json", {"num_attention_heads": wrong})
    config("heads-huge", "ranges for each of 2**62 heads", q + ".*config.json", {"num_attention_heads": 2**62})
    config("heads-three", "heads that the weights do not have", q + ".*config.json", {"num_attention_heads": 3})
    config("heads-missing", "nothing says how many heads there are", q + ".*config.json", {"num_attention_heads": GONE})
    k = r"tensor 'model.layers.0.self_attn.[kv]_proj.(weight|bias)': axis 0 of \[8"
    for name, wrong in {"string": "2", "zero": 0, "float": 2.0, "bool": True, "huge": 2**62}.items():
        config(
            f"kv-heads-{name}", "a number of KV heads that is none", k + ".*config.json", {"num_key_value_heads": wrong}
        )
    config(
        "model-type-unknown",
        "no rules: nothing may be guessed",
        "no built-in plan for model type 'llama2'",
        {"model_type": "llama2"},
    )
    config("model-type-list", "an unhashable model type", "config.json names no model_type", {"model_type": ["llama"]})
    config("model-type-object", "as above", "config.json names no model_type", {"model_type": {"a": 1}})
    config(
        "model-type-escape",
        "the name would steer the terminal",
        r"no built-in plan for model type '\\+x1b\[2J'",
        {"model_type": "\x1b[2J"},
    )
    config(
        "model-type-long",
        "a line of ten thousand characters in the log",
        "no built-in plan for model type .{0,1000}$",
        {"model_type": "a" * 10_000},
    )
    config(
        "text-config-empty",
        "a nested config that has nothing, and hides nothing",
        q,
        {"text_config": {"num_attention_heads": 5}},
    )
    quantisation = "quantization_config"
    config(
        "quantisation-unknown",
        "weights that nobody knows how to cut",
        "weights are quantised by mystery",
        {quantisation: {"quant_method": "mystery"}},
    )
    config(
        "quantisation-method-list",
        "no name of a method",
        r"weights are quantised by \['fp8'\]",
        {quantisation: {"quant_method": ["fp8"]}},
    )
    for name, wrong in {
        "zero": [0, 128],
        "string": "128",
        "one": [128],
        "float": [1.5, 2],
        "huge": [2**62, "x"],
    }.items():
        config(
            f"quantisation-block-{name}",
            "no block",
            "quantization_config: .* is no block of rows and columns",
            {quantisation: {"quant_method": "fp8", "weight_block_size": wrong}},
        )
    for name, wrong in {"zero": 0, "negative": -4, "string": "4", "float": 4.0, "huge": 10**30, "bool": True}.items():
        config(
            f"quantisation-bits-{name}",
            "a division by it",
            "quantization_config: bits is .*expected a number of bits",
            {quantisation: {"quant_method": "gptq", "bits": wrong}},
        )
    config(
        "quantisation-groups-list",
        "no groups",
        "its config has no config_groups",
        {quantisation: {"quant_method": "compressed-tensors", "config_groups": [1]}},
    )


def manifests() -> None:
    VECTORS.append(sized("manifest", MANIFEST, 2**26))

    for name, wrong in {"2": 2, "0": 0, "text": "1", "true": True, "float": 1.0, "null": None, "list": [1]}.items():
        manifest(
            f"version-{name}",
            "a version that is not known: its fields may mean anything",
            "format version",
            {"relayout": wrong},
        )
    manifest("version-missing", "no manifest of relayout at all", "format version None", {"relayout": GONE})
    fields = {
        "generator": "a string",
        "conversion": "a string",
        "plan": "a string",
        "num_ranks": "a size",
        "alignment": "a size",
        "source": "an object",
        "ranks": "a list of objects",
        "source/record_digest": "a string",
        "source/nbytes": "a size",
    }
    for key, kind in fields.items():
        name = key.split("/")[-1]
        manifest(
            f"missing-{key.replace('/', '-').replace('_', '-')}",
            "a field that every manifest has",
            f"'{name}' is missing or not {kind}",
            {key: GONE},
        )
    for key in ("table", "table_digest", "num_tensors", "nbytes", "files", "arena_nbytes", "reads"):
        manifest(
            f"missing-rank-{key.replace('_', '-')}",
            "a field that every rank has",
            f"rank 1: '{key}' is missing or not",
            {f"ranks/1/{key}": GONE},
        )
    for key in ("name", "nbytes", "data_start", "header_digest"):
        manifest(
            f"missing-file-{key.replace('_', '-')}",
            "a field that every file has",
            f"rank 0: '{key}' is missing or not",
            {f"ranks/0/files/0/{key}": GONE},
        )
    for key in ("file", "offset", "nbytes", "arena_offset"):
        manifest(
            f"missing-read-{key.replace('_', '-')}",
            "a field that every read has",
            f"rank 0: '{key}' is missing or not a size",
            {f"ranks/0/reads/0/{key}": GONE},
        )
    manifest(
        "self-digest-wrong",
        "edited by hand",
        "its self_digest is .*damaged or edited",
        lambda text: text.replace('"alignment": 512', '"alignment": 1024'),
    )
    manifest(
        "self-digest-missing",
        "not whole, or not of relayout",
        "its self_digest is None",
        lambda text: text[: text.rindex(",")] + "}",
    )
    manifest(
        "self-digest-number",
        "no digest",
        "its self_digest is 5",
        lambda text: text[: text.rindex(",")] + ',"self_digest":5}',
    )
    manifest(
        "digest-unknown",
        "digests of another algorithm: all would seem wrong, or none be checked",
        "digest algorithm 'crc32', expected 'xxh3_128'",
        {"digest": "crc32"},
    )
    manifest("digest-missing", "as above", "digest algorithm None", {"digest": GONE})
    manifest("empty", "an empty file", "not valid JSON", lambda text: "")
    manifest("truncated", "half of a manifest", "not valid JSON", lambda text: text[: len(text) // 2])
    manifest("top-list", "a manifest is an object", "a JSON list, expected an object", lambda text: f"[{text}]")
    manifest(
        "duplicate-key",
        "one for the checker, one for the reader",
        "name 'num_ranks' occurs twice",
        lambda text: text.replace('"num_ranks"', '"num_ranks": 1, "num_ranks"', 1),
    )
    manifest(
        "duplicate-key-in-read",
        "as above",
        "name 'offset' occurs twice",
        lambda text: text.replace('"offset"', '"offset": 0, "offset"', 1),
    )
    manifest(
        "nan", "no JSON", "NaN is no JSON number", lambda text: text.replace('"alignment": 512', '"alignment": NaN')
    )
    manifest(
        "infinity",
        "no JSON",
        "Infinity is no JSON number",
        lambda text: text.replace('"alignment": 512', '"alignment": Infinity'),
    )
    manifest(
        "lone-surrogate",
        "a name that cannot be printed or digested",
        "a string holds half of a surrogate pair",
        lambda text: text.replace('"llama"', '"\\ud800"', 1),
    )
    manifest(
        "surrogate-in-utf-8",
        "as above, encoded",
        r"not UTF-8 at byte \d+",
        lambda text: text.replace('"llama"', '"\ud800"', 1),
    )
    manifest(
        "nested",
        "a recursive parser overflows its stack",
        "JSON nested too deeply",
        lambda text: text.replace("{", f'{{"x": {nested(20_000)},', 1),
    )
    manifest(
        "utf-16",
        "Python's json would guess the encoding of bytes",
        "not valid JSON",
        lambda text: text.encode("utf-16-le").decode("latin-1"),
    )

    manifest("ranks-none", "a model of no ranks", "0 entries in 'ranks', num_ranks is 0", {"ranks": [], "num_ranks": 0})
    manifest(
        "ranks-fewer",
        "num_ranks says more ranks than there are",
        "2 entries in 'ranks', num_ranks is 3",
        {"num_ranks": 3},
    )
    manifest(
        "ranks-one-gone",
        "a rank's part of the model is missing",
        "1 entries in 'ranks', num_ranks is 2",
        {"ranks/1": GONE},
    )
    manifest(
        "ranks-huge",
        "a loop over 2**62 ranks",
        "2 entries in 'ranks', num_ranks is 4611686018427387904",
        {"num_ranks": 2**62},
    )
    for name, wrong in {"true": True, "float": 2.0, "text": "2", "negative": -2, "2-to-63": 2**63}.items():
        manifest(
            f"num-ranks-{name}", "no number of ranks", "'num_ranks' is missing or not a size", {"num_ranks": wrong}
        )
    manifest("rank-list", "a rank is an object", "'ranks' is missing or not a list of objects", {"ranks/1": []})
    manifest(
        "ranks-object",
        "ranks are a list",
        "'ranks' is missing or not a list of objects",
        {"ranks": lambda old: {"0": old[0], "1": old[1]}},
    )
    for name, wrong in {"zero": 0, "three": 3, "above-limit": 2**40, "one": 1}.items():
        manifest(
            f"alignment-{name}",
            "no alignment of the format: a division by it, or addresses at odd places",
            "alignment",
            {"alignment": wrong},
        )
    for name, wrong in {"text": "512", "float": 512.0, "negative": -512, "true": True}.items():
        manifest(f"alignment-{name}", "no size", "'alignment' is missing or not a size", {"alignment": wrong})

    names = {
        "parent": "../secret.safetensors",
        "absolute": "/etc/secret.safetensors",
        "folder": "sub/model.safetensors",
        "hidden": ".model.safetensors",
        "no-suffix": "model.bin",
        "empty": "",
        "nul": "model\0.safetensors",
        "newline": "model.safetensors\n",
        "escape": "\x1b[2J.safetensors",
        "backslash": "..\\a.safetensors",
        "dash": "-rf.safetensors",
        "unicode": "mo\u0500del.safetensors",
    }
    for name, wrong in names.items():
        manifest(
            f"file-name-{name}",
            "a path out of the folder, or no rank file",
            "rank 0: .* is not the name of a .safetensors file",
            {"ranks/0/files/0/name": wrong},
        )
    manifest(
        "file-name-too-long",
        "no file system has it",
        "rank 0: .* is not the name of a .safetensors file",
        {"ranks/0/files/0/name": "a" * 300 + ".safetensors"},
    )
    later: Any = {"command": "restore {path} -o {out}", "python": ("load 0", "restore", "verify"), "where": "/"}
    manifest(
        "file-name-other-rank",
        "another rank's file for this rank's",
        r"model-rank-1-part-0\.safetensors: ",
        {"ranks/0/files/0/name": RANK_FILES[1]},
        **later,
    )
    tables = {
        "other": TABLES[1],
        "parent": "../" + TABLES[0],
        "absolute": "/tmp/" + TABLES[0],
        "record": RECORD,
        "empty": "",
    }
    for name, wrong in tables.items():
        manifest(
            f"table-name-{name}",
            "another file for this rank's table",
            "rank 0: table .*expected 'relayout.rank-0.json.zst'",
            {"ranks/0/table": wrong},
        )
    for key in ("nbytes", "arena_nbytes", "num_tensors"):
        for name, wrong in {
            "negative": -1,
            "float": 1.0,
            "text": "1",
            "true": True,
            "2-to-63": 2**63,
            "null": None,
        }.items():
            manifest(
                f"rank-{key.replace('_', '-')}-{name}",
                "no size",
                f"rank 0: '{key}' is missing or not a size",
                {f"ranks/0/{key}": wrong},
            )
    for key in ("offset", "nbytes", "arena_offset", "file"):
        for name, wrong in {"negative": -1, "float": 1.0, "text": "1", "2-to-63": 2**63}.items():
            manifest(
                f"read-{key.replace('_', '-')}-{name}",
                "no size",
                f"rank 0: '{key}' is missing or not a size",
                {f"ranks/0/reads/0/{key}": wrong},
            )
    manifest(
        "read-count-float",
        "no number of runs",
        "rank 0: 'count' is missing or not a size",
        {"ranks/0/reads/2/count": 2.0},
    )
    manifest(
        "read-no-stride",
        "runs without a distance",
        "rank 0: 'stride' is missing or not a size",
        {"ranks/0/reads/2/stride": GONE},
    )
    manifest(
        "read-beyond-file",
        "bytes that no file has",
        r"rank 0: read 0: ends at byte \d+ of model-rank-0-part-0.safetensors, which has",
        {"ranks/0/reads/0/offset": 2**40},
    )
    manifest(
        "read-ends-2-to-64",
        "the end overflows 64 bits",
        r"rank 0: read 0: ends at byte \d+ of model-rank-0",
        {"ranks/0/reads/0/offset": 2**63 - 1},
    )
    manifest(
        "read-beyond-arena",
        "writes behind the memory that was allocated",
        r"rank 0: read 0: ends at byte \d+ of an arena of",
        {"ranks/0/reads/0/arena_offset": 2**40},
    )
    manifest(
        "read-one-beyond-arena",
        "as above, by one byte",
        r"rank 0: read 2: ends at byte \d+ of an arena of",
        {"ranks/0/arena_nbytes": arena_end() - 1},
    )
    manifest(
        "read-last-run-beyond-arena",
        "only the last of its runs leaves the arena",
        r"rank 0: read 2: ends at byte \d+ of an arena",
        {"ranks/0/reads/2/arena_stride": 2**40},
    )
    manifest(
        "read-last-run-beyond-file",
        "only the last of its runs leaves the file",
        r"rank 0: read 2: ends at byte \d+ of model-rank-0",
        {"ranks/0/reads/2/stride": 2**40},
    )
    manifest(
        "read-count-overflows",
        "count * stride is 0 in 64 bits",
        r"rank 0: read 2: (ends at byte|runs of)",
        {"ranks/0/reads/2/count": 2**60, "ranks/0/reads/2/stride": 16, "ranks/0/reads/2/arena_stride": 16},
    )
    manifest("read-count-zero", "a read of nothing", "rank 0: read 2: reads nothing", {"ranks/0/reads/2/count": 0})
    manifest("read-nbytes-zero", "a read of nothing", "rank 0: read 0: reads nothing", {"ranks/0/reads/0/nbytes": 0})
    manifest(
        "read-stride-small",
        "runs that overlap in the file",
        r"rank 0: read 2: runs of \d+ bytes overlap",
        {"ranks/0/reads/2/stride": 1},
    )
    manifest(
        "read-arena-stride-zero",
        "all runs at one place of the arena",
        r"rank 0: read 2: runs of \d+ bytes overlap",
        {"ranks/0/reads/2/arena_stride": 0},
    )
    manifest(
        "read-file-out-of-range",
        "a file that is not in the list",
        "rank 0: read 0: file 1 of 1",
        {"ranks/0/reads/0/file": 1},
    )
    manifest(
        "read-overlaps-in-arena",
        "the order of arrival would decide",
        r"rank 0: reads overlap at byte \d+ of the arena",
        {"ranks/0/reads/1/arena_offset": 4096},
    )
    manifest(
        "reads-missing",
        "tensors whose bytes nobody brings: memory as it was found",
        r"rank 0: reads of \d+ bytes, tensors of \d+",
        {"ranks/0/reads/1": GONE},
    )
    manifest(
        "reads-none", "as above, of all tensors", r"rank 0: reads of 0 bytes, tensors of \d+", {"ranks/0/reads": []}
    )
    manifest(
        "reads-fewer-bytes",
        "as above, one byte",
        r"rank 0: reads of \d+ bytes, tensors of \d+",
        {"ranks/0/reads/0/nbytes": lambda old: old - 1},
    )
    manifest(
        "arena-huge",
        "memory of 4 EiB for a small model",
        r"rank 0: an arena of 4611686018427387904 bytes for tensors of \d+",
        {"ranks/0/arena_nbytes": 2**62},
    )
    manifest(
        "arena-for-tensors-nowhere",
        "memory of 64 GiB for tensors that no header names",
        r"rank 0: 4294967296 tensors in headers of \d+ bytes",
        {"ranks/0/arena_nbytes": 2**36, "ranks/0/num_tensors": 2**32},
    )
    manifest(
        "data-start-beyond-file",
        "a header that no file has, and room in it for any number of tensors",
        "rank 0: .*: no header of a file ends at byte 1099511627776",
        {"ranks/0/files/0/data_start": 2**40},
    )
    manifest(
        "arena-one-above-limit",
        "more memory than padding explains",
        r"rank 0: an arena of \d+ bytes for tensors of \d+",
        {"ranks/0/arena_nbytes": lambda old: arena_limit() + 1},
    )
    manifest("files-none", "reads from no file", "rank 0: read 0: file 0 of 0", {"ranks/0/files": []})
    manifest(
        "hub-index-digest-number", "no digest", "'hub_index_digest' is missing or not a string", {"hub_index_digest": 5}
    )
    bomb = {
        "ranks/0/files/0/nbytes": 2**45,
        "ranks/0/arena_nbytes": 2**44 + 8192,
        "ranks/0/nbytes": 2**44,
        "ranks/0/num_tensors": 1,
        "ranks/0/reads": [{"file": 0, "offset": 8192, "nbytes": 2**44, "arena_offset": 0}],
    }
    manifest(
        "arena-of-16-tib",
        "a file that claims 32 TiB: memory for it is asked for before a look at the file",
        r"(relayout\.rank-0\.json\.zst|model-rank-0-part-0\.safetensors): ",
        bomb,
        **later,
    )


def _rank() -> dict[str, Any]:
    return json.loads(converted()[MANIFEST])["ranks"][0]


def arena_end() -> int:
    return max(
        one["arena_offset"] + one["nbytes"] + (one.get("count", 1) - 1) * one.get("arena_stride", 0)
        for one in _rank()["reads"]
    )


def arena_limit() -> int:
    return _rank()["nbytes"] + 16 * _rank()["num_tensors"] + 8192 * (len(_rank()["files"]) + 1)


def tables() -> None:
    stored = converted()[TABLES[0]]
    text = zstandard.decompress(stored)
    good = json.loads(text)
    count = len(good["name"])

    # Of what is stored.
    opened = Opened()
    VECTORS.append(
        Vector(
            "table/digest-wrong",
            "converted",
            "inspect {path} --rank 0",
            "a table of another conversion, or a damaged one",
            r"/relayout\.rank-0\.json\.zst: digest differs from the one in relayout.json",
            READERS,
            files={TABLES[0]: zstd(text + b" ")},
        )
    )
    VECTORS.append(
        Vector(
            "table/digest-of-other-rank",
            "converted",
            "inspect {path} --rank 0",
            "the other rank's table under this name",
            r"/relayout\.rank-0\.json\.zst: digest differs from the one in relayout.json",
            READERS,
            files={TABLES[0]: opened.files[TABLES[1]]},
        )
    )
    table("empty", "no frame", "", b"\n")
    table("not-zstd", "the JSON as it is", "not a zstd frame", text)
    table("gzip", "another compression", "not a zstd frame", b"\x1f\x8b\x08\0\0\0\0\0\0\3KLJ\6\0\xc2A$5\3\0\0\0")
    table("frame-truncated", "half of the frame", "", stored[: len(stored) // 2])
    table(
        "frame-without-end",
        "the last block is missing: what is there might be whole JSON",
        "",
        zstd_frame(zstd_block(text)),
    )
    table("frame-damaged", "a block of a kind that does not exist", "not a zstd frame", zstd_frame(b"\x07\0\0"))
    table("frame-trailing", "bytes behind the frame, which other readers may take for more", "", stored + b"garbage")
    table("frame-two", "a second frame: one reader takes the first, another both", "", stored + stored)
    table(
        "frame-skippable",
        "a skippable frame in front, where anything may be hidden",
        "",
        b"\x50\x2a\x4d\x18\4\0\0\0abcd" + stored,
    )
    table(
        "window-2-gib",
        "a window of 2 GiB for a few bytes",
        "not a zstd frame: .*",
        zstd_frame(zstd_block(text, last=True), window_log=31),
        is_bomb=True,
    )
    table(
        "window-256-gib",
        "a window that no machine has",
        "not a zstd frame: .*",
        zstd_frame(zstd_block(text, last=True), window_log=38),
        is_bomb=True,
    )
    zeros = zstd_block(b" ", 2**17)
    table(
        "bomb",
        "36 KB that expand to 1 GiB",
        r"expands to more than \d+ bytes",
        zstd_frame(*[zeros] * (2**13 + 1), zstd_block(b"", last=True)),
        is_bomb=True,
    )
    fcs = b"\x28\xb5\x2f\xfd\xe0" + (2**60).to_bytes(8, "little") + zstd_block(text, last=True)
    table(
        "content-size-lies",
        "a frame that claims 2**60 bytes: memory for them would be asked for",
        "",
        fcs,
        is_bomb=True,
    )
    lists = zstd(b'{"x":[' + b"[]," * (80 * 2**20) + b"[]]}")
    table("bomb-of-lists", "240 MiB of JSON, below the limit, that become 80 million objects", "", lists, is_bomb=True)
    table(
        "dictionary",
        "a frame for which a dictionary is needed",
        "not a zstd frame",
        b"\x28\xb5\x2f\xfd\x23\x05\x00\x00\x00\x05" + zstd_block(b"[1,2]", last=True),
    )

    # Of the text.
    table("top-list", "a table is an object", "a JSON list, expected an object", zstd(b"[]"))
    table(
        "not-utf-8", "a name that is no text", r"not UTF-8 at byte \d+", zstd(text.replace(b"lm_head", b"lm_h\xffad"))
    )
    table(
        "utf-16",
        "Python's json would guess the encoding of bytes",
        "not (UTF-8|valid JSON)",
        zstd(text.decode().encode("utf-16")),
    )
    table(
        "duplicate-key",
        "one column for the checker, one for the reader",
        "name 'offset' occurs twice",
        zstd(text.replace(b'"offset"', b'"offset":[],"offset"')),
    )
    table("nested", "a recursive parser overflows its stack", "JSON nested too deeply", zstd(b"[" * 200_000))
    table("trailing", "a second object", "not valid JSON: Extra data", zstd(text + text))
    table("nan", "no JSON", "NaN is no JSON number", zstd(text.replace(b'"rank":0', b'"rank":NaN')))

    # Of the object.
    table("rank-other", "another rank's table, with a truthful digest", "is of rank 1 of conversion", {"rank": 1})
    for name, wrong in {"text": "0", "float": 0.0, "false": False, "missing": GONE}.items():
        table(f"rank-{name}", "no number of a rank", "(is of rank|'rank')", {"rank": wrong})
    table(
        "conversion-other",
        "a table of another conversion, with a truthful digest",
        "is of rank 0 of conversion '00",
        {"conversion": "0" * 32},
    )
    for name, wrong in {"2": 2, "true": True, "missing": GONE}.items():
        table(
            f"version-{name}",
            "a version that is not known: its fields may mean anything",
            "format version",
            {"relayout": wrong},
        )
    for key in ("kinds", "name", "kind", "file", "offset", "arena_offset", "digest"):
        table(
            f"missing-{key.replace('_', '-')}",
            "a column that every table has",
            f"'{key}' is missing or not",
            {key: GONE},
        )
    for key in ("dtype", "shape", "source_shape", "slice"):
        table(
            f"missing-kinds-{key.replace('_', '-')}",
            "a column of every kind",
            f"'{key}' is missing or not",
            {f"kinds/{key}": GONE},
        )
    for key in ("name", "kind", "file", "offset", "arena_offset", "digest"):
        table(
            f"short-{key.replace('_', '-')}",
            "columns of different lengths",
            f"'{key}' is missing or not a list of {count} items",
            {f"{key}/0": GONE},
        )
        table(
            f"long-{key.replace('_', '-')}",
            "columns of different lengths",
            f"'{key}' is missing or not a list of {count} items",
            {key: lambda old: [*old, old[0]]},
        )
    for key in ("shape", "source_shape", "slice"):
        table(
            f"short-kinds-{key.replace('_', '-')}",
            "columns of different lengths",
            f"'{key}' is missing or not a list of",
            {f"kinds/{key}/0": GONE},
        )
    for key in ("kind", "file", "offset", "arena_offset"):
        for name, wrong in {"float": 0.0, "text": "0", "false": False, "null": None}.items():
            table(
                f"{key.replace('_', '-')}-{name}",
                "no whole number",
                f"'{key}' is missing or not a list of int",
                {f"{key}/3": wrong},
            )
        for name, wrong in {"negative": -1, "2-to-63": 2**63, "2-to-64": 2**64}.items():
            table(
                f"{key.replace('_', '-')}-{name}",
                "no size",
                f"'{key}' is missing or not a list of (sizes|int)",
                {f"{key}/3": wrong},
            )
    table(
        "count-other",
        "the manifest says one tensor more",
        f"'kind' is missing or not a list of {count + 1} items",
        {},
        {"ranks/0/num_tensors": count + 1},
    )
    table(
        "count-huge",
        "columns for 2**62 tensors would be made",
        r"rank 0: 4611686018427387904 tensors in headers of \d+ bytes",
        {},
        {"ranks/0/num_tensors": 2**62},
        where=r"/relayout\.json: ",
        is_bomb=True,
    )
    table("kind-out-of-range", "a kind that does not exist", "kind 10 of 10", {"kind/0": 10})
    table(
        "kinds-none",
        "tensors of no kind",
        r"kind \d+ of 0",
        {"kinds": {"dtype": [], "shape": [], "source_shape": [], "slice": []}},
    )
    table("name-twice", "one of the two would be lost", "a tensor name occurs twice", {"name/1": "lm_head.weight"})
    table("name-number", "a name is a string", "'name' is missing or not a list of str", {"name/1": 1})
    table("digest-number", "a digest is a string", "'digest' is missing or not a list of str", {"digest/1": 1})
    first = "tensor 'lm_head.weight': "
    for name, wrong in {"unknown": "BF17", "lower-case": "bf16", "empty": ""}.items():
        table(
            f"dtype-{name}", "no element type of the format", first + ".* is no stored tensor", {"kinds/dtype/0": wrong}
        )
    table("dtype-list", "an unhashable dtype", "'dtype' is missing or not a list of str", {"kinds/dtype/0": []})
    table("dtype-wider", "a view twice as long as its bytes", "tensors? .*", {"kinds/dtype/0": "F32"})
    table(
        "dtype-half-byte",
        "elements that do not fill bytes",
        ".* is no stored tensor",
        {"kinds/dtype/5": "F4", "kinds/shape/5": [3]},
    )
    for name, wrong in {
        "negative": [-1, 16],
        "float": [64.0, 16],
        "text": ["64", 16],
        "2-to-63": [2**63],
        "nested": [[64], 16],
        "true": [True, 16],
    }.items():
        table(f"shape-{name}", "no shape", ".* is no shape", {"kinds/shape/5": wrong})
    whole = {"kinds/source_shape/0": None, "kinds/slice/0": None}
    table(
        "shape-huge",
        "a view of 2**126 elements",
        first + ".* is no stored tensor",
        {**whole, "kinds/shape/0": [2**62, 2**62]},
    )
    table(
        "shape-overflows-to-its-size",
        "2**64 + 2048 bytes: 2048 in 64 bits",
        first + ".* is no stored tensor",
        {**whole, "kinds/shape/0": [2**63 - 1, 2]},
    )
    table(
        "shape-of-many-axes",
        "a product of 300,000 numbers of 62 bits takes minutes",
        ".{0,1000}$",
        {**whole, "kinds/shape/0": [2**62] * 300_000},
        is_bomb=True,
    )
    table("shape-larger", "a view past the tensor's bytes", "(tensor|tensors) ", {**whole, "kinds/shape/0": [65, 16]})
    table(
        "shape-smaller",
        "bytes that belong to nothing",
        r"tensors of \d+ bytes, relayout.json says \d+",
        {**whole, "kinds/shape/0": [63, 16]},
    )
    table(
        "shape-not-of-slice",
        "a slice of other rows than the tensor has",
        r"\[64, 16\] is not slice",
        {"kinds/slice/0": [0, [[0, 63]]]},
    )
    table(
        "slice-outside",
        "rows that the whole tensor does not have",
        r"\[64, 16\] is not slice",
        {"kinds/slice/0": [0, [[7, 64]]]},
    )
    table(
        "slice-axis-outside",
        "an axis that the tensor does not have",
        r"\[64, 16\] is not slice",
        {"kinds/slice/0": [2, [[0, 64]]]},
    )
    table(
        "slice-of-nothing",
        "a tensor that the rank does not hold, in its table",
        r"\[64, 16\] is not slice",
        {"kinds/slice/0": [0, []]},
    )
    slices = {
        "axis-negative": [-1, [[0, 64]]],
        "axis-float": [0.0, [[0, 64]]],
        "axis-true": [True, [[0, 64]]],
        "negative": [0, [[-1, 64]]],
        "float": [0, [[0, 64.0]]],
        "text": [0, [["0", 64]]],
        "three": [0, [[0, 64, 1]]],
        "one": [0, [[64]]],
        "flat": [0, [0, 64]],
        "no-ranges": [0],
        "ranges-null": [0, None],
        "2-to-63": [0, [[2**63, 1]]],
        "object": [0, {"ab": 1}],
        "four": [0, [[0, 64]], 0, 0],
    }
    for name, wrong in slices.items():
        table(f"slice-{name}", "no slice", ".* is no slice", {"kinds/slice/0": wrong})
    table("slice-is-text", "a slice is a list", "'slice' is missing or not a list of", {"kinds/slice/0": "ab"})
    table(
        "source-shape-other",
        "the slice is not one of that tensor",
        r"\[64, 16\] is not slice",
        {"kinds/source_shape/0": [70, 17]},
    )
    table(
        "offset-outside",
        "a read behind the file's end",
        first + r"ends outside its file, at byte \d+",
        {"offset/0": 2**62},
    )
    table(
        "offset-2-to-63-less-1",
        "the end overflows 64 bits",
        first + r"ends outside its file, at byte \d+",
        {"offset/0": 2**63 - 1},
    )
    table("file-out-of-range", "a file that is not in the list", first + "ends outside its file", {"file/0": 1})
    table(
        "arena-outside",
        "a view behind the memory that was allocated",
        first + r"\d+ bytes at \d+ of an arena of \d+",
        {"arena_offset/0": 2**62},
    )
    table(
        "arena-end-outside",
        "as above, by a few bytes",
        first + r"\d+ bytes at \d+ of an arena of \d+",
        {"arena_offset/0": 16384 - 2048 + 16},
    )
    table(
        "arena-odd",
        "an address that kernels do not take",
        r"tensor .*: \d+ bytes at 12289 of an arena",
        {"arena_offset/12": 12289},
    )
    table(
        "arena-overlap",
        "two tensors share memory: writing one changes the other",
        "tensors .* overlap in the arena",
        {"arena_offset/1": 2560, "offset/1": 2560},
    )
    table(
        "not-brought",
        "no read brings it: memory as it was found",
        "tensor '.*': no read brings its bytes",
        {"arena_offset/12": 12288 + 16 * 5},
    )
    table(
        "not-brought-from-there",
        "other bytes than those that the table names",
        first + "no read brings its bytes",
        {"offset/0": 2576},
    )
    table(
        "swapped-places",
        "two tensors of one size have each other's bytes",
        "tensor '.*': no read brings its bytes",
        {"arena_offset/0": 4608, "arena_offset/1": 2560},
    )
    rank = _rank()
    bulk, shift = rank["reads"][0], 16384
    rows = sum(offset < bulk["offset"] + bulk["nbytes"] for offset in good["offset"])
    table(
        "read-twice",
        "the same bytes of a file to two places of the arena: memory without end from a small folder",
        "",
        {
            "name": lambda old: [*old, *(f"{name}2" for name in old[:rows])],
            "arena_offset": lambda old: [*old, *(offset + shift for offset in old[:rows])],
            **{key: lambda old: [*old, *old[:rows]] for key in ("kind", "file", "offset", "digest")},
        },
        {
            "ranks/0/reads": lambda old: [*old, {**bulk, "arena_offset": bulk["arena_offset"] + shift}],
            "ranks/0/nbytes": rank["nbytes"] + bulk["nbytes"],
            "ranks/0/num_tensors": count + rows,
            "ranks/0/arena_nbytes": shift + 12288,
        },
        where="rank 0",
    )
    VECTORS.append(sized("table", TABLES[0], 2**28))


def records() -> None:
    VECTORS.append(sized("record", RECORD, 2**28))

    stored = converted()[RECORD]
    text = zstandard.decompress(stored)
    number = len(json.loads(text)["tensors"]["name"])

    # Of what is stored.
    VECTORS.append(
        Vector(
            "record/digest-wrong",
            "converted",
            "restore {path} -o {out}",
            "a record of another conversion, or a damaged one",
            r"/relayout\.source\.json\.zst: digest differs from the one that the manifest names",
            ("restore", "load 0 of 1", "verify"),
            files={RECORD: zstd(text + b" ")},
        )
    )
    again = json.loads(converted()[MANIFEST])
    again["source"]["record_digest"] = digest(zstd(text + b" "))
    VECTORS.append(
        Vector(
            "record/conversion-wrong",
            "converted",
            "restore {path} -o {out}",
            "the record of another conversion, with a truthful digest of the file",
            r"/relayout\.source\.json\.zst: digest differs from the one that the manifest names",
            ("restore", "load 0 of 1", "verify"),
            files={RECORD: zstd(text + b" "), MANIFEST: manifest_text(again)},
        )
    )
    record("not-zstd", "the JSON as it is", "not a zstd frame", text)
    record("frame-truncated", "half of the frame", "", stored[: len(stored) // 2])
    record("frame-trailing", "bytes behind the frame, which other readers may take for more", "", stored + b"garbage")
    record("frame-two", "a second frame: one reader takes the first, another both", "", stored + stored)
    record(
        "bomb",
        "36 KB that expand to 1 GiB",
        r"expands to more than \d+ bytes",
        zstd_frame(*[zstd_block(b" ", 2**17)] * (2**13 + 1), zstd_block(b"", last=True)),
        is_bomb=True,
    )
    record("top-list", "a record is an object", "a JSON list, expected an object", zstd(b"[]"))
    record(
        "duplicate-key",
        "one for the checker, one for the reader",
        "name 'cuts' occurs twice",
        zstd(text.replace(b'"cuts"', b'"cuts":[],"cuts"')),
    )
    record("nested", "a recursive parser overflows its stack", "JSON nested too deeply", zstd(b"[" * 200_000))

    # Of the object.
    for name, wrong in {"2": 2, "true": True, "missing": GONE}.items():
        record(
            f"version-{name}",
            "a version that is not known: its fields may mean anything",
            "format version",
            {"relayout": wrong},
        )
    record("num-ranks-other", "options that are not those of the manifest", "is of 3 ranks", {"num_ranks": 3})
    for key in ("files", "side_files", "tensors"):
        record(
            f"missing-{key.replace('_', '-')}",
            "a part that every record has",
            f"'{key}' is missing or not an object",
            {key: GONE},
        )
        record(
            f"list-{key.replace('_', '-')}",
            "a part that is an object of columns",
            f"'{key}' is missing or not an object",
            {key: []},
        )
    for key in ("dtype", "shape", "file", "offset", "digest", "cut"):
        record(
            f"missing-tensors-{key}",
            "a column of every tensor",
            f"'{key}' is missing or not a list of {number} items",
            {f"tensors/{key}": GONE},
        )
        record(
            f"short-tensors-{key}",
            "columns of different lengths",
            f"'{key}' is missing or not a list of {number} items",
            {f"tensors/{key}/0": GONE},
        )
    for key in ("nbytes", "header"):
        record(
            f"missing-files-{key}",
            "a column of every file",
            f"'{key}' is missing or not a list of 2 items",
            {f"files/{key}": GONE},
        )
    for key in ("nbytes", "digest", "mode"):
        record(
            f"missing-side-files-{key}",
            "a column of every side file",
            f"'{key}' is missing or not a list of 1 items",
            {f"side_files/{key}": GONE},
        )
    names = {
        "parent": "../escaped",
        "parent-inside": "a/../../escaped",
        "absolute": "/tmp/escaped",
        "dot": ".",
        "dots": "..",
        "empty": "",
        "nul": "a\0b",
        "double-slash": "a//b",
        "slash-end": "a/",
    }
    for name, wrong in names.items():
        record(
            f"shard-name-{name}",
            "a path out of the folder, or to no file",
            ".* is no name of a file in the checkpoint",
            {"files/name/0": wrong},
        )
        record(
            f"index-name-{name}",
            "a path out of the folder, or to no file",
            ".* is no name of a file in the checkpoint",
            {"index/name": wrong},
        )
        record(
            f"side-file-name-{name}",
            "a path out of the folder, or to no file",
            ".* is no name of a file in the checkpoint",
            {"side_files/name/0": wrong},
        )
    for name, wrong in {"number": 1, "null": None, "list": []}.items():
        record(
            f"shard-name-{name}",
            "a name is a string",
            "'name' is missing or not a list of str",
            {"files/name/0": wrong},
        )
        record(f"index-name-{name}", "a name is a string", "'name' is missing or not a string", {"index/name": wrong})
    record("shard-name-twice", "two shards at one place", ".* is the name of two things", {"files/name/0": SHARDS[1]})
    record(
        "side-file-is-shard",
        "a side file in a shard's place",
        ".* is the name of two things",
        {"side_files/name/0": SHARDS[0]},
    )
    record(
        "side-file-is-index",
        "a side file in the index's place",
        ".* is the name of two things",
        {"side_files/name/0": INDEX},
    )
    record(
        "side-file-in-shard",
        "a shard would have to be a folder",
        ".* is the name of two things",
        {"side_files/name/0": SHARDS[0] + "/a"},
    )
    record(
        "shard-is-manifest",
        "the folder that is restored would pass for a converted one",
        ".*relayout.json",
        {"files/name/0": MANIFEST},
        where="",
        python=("restore",),
    )
    record(
        "index-is-manifest",
        "as above, with any text",
        ".*relayout.json",
        {"index/name": MANIFEST},
        where="",
        python=("restore",),
    )
    record(
        "side-file-is-manifest",
        "as above, a copy of the converted folder's own",
        ".*relayout.json",
        {"side_files/name/0": MANIFEST},
        where="",
        python=("restore",),
    )
    record(
        "side-file-below-manifest",
        "a folder of that name would pass for a manifest",
        ".*relayout.json/x' would make a converted folder of the source",
        {"side_files/name/0": f"{MANIFEST}/x"},
    )
    record(
        "side-file-is-table",
        "a file of the converted folder, that the source did not have",
        ".*relayout.rank-1.json.zst",
        side(TABLES[1]),
        where="",
        python=("restore",),
    )
    record(
        "index-hidden",
        "commands for whoever runs git in the folder that is restored",
        ".*/config",
        {"index/name": ".git/config", "index/text": "[core]\n\tfsmonitor = rm -rf ~\n"},
        where="",
        python=("restore",),
    )
    record(
        "side-file-hidden",
        "a conversion never takes hidden files along",
        ".*bashrc",
        side(".bashrc", b"rm -rf ~\n"),
        files={".bashrc": b"rm -rf ~\n"},
        where="",
        python=("restore",),
    )
    record("shard-hidden", "as above", ".*config", {"files/name/0": ".git/config"}, where="", python=("restore",))
    record(
        "name-escape",
        "the name would steer the terminal",
        r"'\\+x1b\[2J'",
        {"files/name/0": "\x1b[2J", "side_files/name/0": "\x1b[2J"},
    )
    record(
        "name-surrogate",
        "a name that cannot be written",
        "a string holds half of a surrogate pair",
        zstd(text.replace(b'"config.json"', b'"\\ud800"')),
    )
    record(
        "name-too-long",
        "no file system has it",
        ".* is no name of a file in the checkpoint",
        {"side_files/name/0": "a" * 300},
    )
    record(
        "name-deep",
        "each of its folders has a name as long",
        ".* is no name of a file in the checkpoint",
        {"side_files/name/0": "a/" * 60_000 + "a"},
        is_bomb=True,
    )
    record(
        "side-file-missing",
        "a file that the folder does not have",
        "cannot be read: No such file",
        {"side_files/name/0": "tokenizer.json"},
        where="/tokenizer.json",
        python=("restore", "verify"),
    )
    record(
        "side-file-digest",
        "not the file that was copied",
        "differs from the file that was copied",
        {"side_files/digest/0": "0" * 32},
        where="/config.json",
        python=("restore", "verify"),
    )
    record(
        "side-file-longer",
        "as above",
        "differs from the file that was copied",
        {"side_files/nbytes/0": 2**16},
        where="/config.json",
        python=("restore", "verify"),
    )
    for key, name, wrong in (
        ("mode", "negative", -1),
        ("mode", "text", "644"),
        ("nbytes", "float", 1.0),
        ("nbytes", "negative", -1),
    ):
        record(
            f"side-file-{key}-{name}", "no size", f"'{key}' is missing or not a list of", {f"side_files/{key}/0": wrong}
        )
    record("index-list", "an index is a name and a text", "'index' is missing or not an object", {"index": []})
    record("index-text-number", "an index is a name and a text", "'text' is missing or not a string", {"index/text": 5})
    cuts = {
        "missing": GONE,
        "object": {},
        "short": [],
        "number": 5,
        "null": None,
    }
    for name, wrong in cuts.items():
        record(
            f"cuts-{name}", "no cuts", "('cuts' is missing or not a list of 2 slices each|cut 6 of 0)", {"cuts": wrong}
        )
    rows = {"one-rank": [None], "three-ranks": [None] * 3, "null": None, "object": {"a": None, "b": None}, "text": "ab"}
    for name, wrong in rows.items():
        record(
            f"cut-{name}",
            "a slice for each rank",
            "'cuts' is missing or not a list of 2 slices each",
            {"cuts/0": wrong},
        )
    for name, wrong in {
        "number": 5,
        "text": "ab",
        "negative": [-1, [[0, 1]]],
        "float": [0, [[0.0, 1]]],
        "three": [0, [[0, 1, 2]]],
    }.items():
        record(f"slice-{name}", "no slice", ".* is no slice", {"cuts/0/0": wrong})
    record(
        "slice-outside",
        "rows that the tensor does not have",
        r"tensor '.*': \[70, 16\] has no slice",
        {"cuts/0/0": [0, [[7, 64]]]},
    )
    record(
        "slice-axis-outside",
        "an axis that the tensor does not have",
        r"tensor '.*': \[70, 16\] has no slice",
        {"cuts/0/0": [2, [[0, 64]]]},
    )
    record(
        "slice-2-to-62",
        "an end beyond 64 bits",
        r"tensor '.*': \[70, 16\] has no slice",
        {"cuts/0/0": [0, [[2**62, 2**62], [2**62, 2**62]]]},
    )
    record("cut-out-of-range", "a cut that does not exist", "cut 7 of 7", {"tensors/cut/0": 7})
    record("file-out-of-range", "a file that does not exist", "file 2 of 2", {"tensors/file/0": 2})
    for name, wrong in {"float": 0.0, "negative": -1, "2-to-63": 2**63, "true": True}.items():
        record(f"offset-{name}", "no size", "'offset' is missing or not a list of", {"tensors/offset/0": wrong})
    record(
        "offset-outside",
        "bytes written behind the end of a shard",
        "tensor 'lm_head.weight': .* is not in its file",
        {"tensors/offset/0": 2**62},
    )
    record(
        "dtype-unknown",
        "no element type of the format",
        "tensor 'lm_head.weight': 'BF17' .* is not in its file",
        {"tensors/dtype/0": "BF17"},
    )
    for name, wrong in {"negative": [-70, 16], "float": [70.0, 16], "text": ["70", 16]}.items():
        record(f"shape-{name}", "no shape", ".* is no shape", {"tensors/shape/0": wrong})
    record(
        "shape-huge",
        "a tensor of 2**124 elements",
        "tensor 'lm_head.weight': .* is not in its file",
        {"tensors/shape/0": [2**62, 2**62]},
    )
    record(
        "shape-of-many-axes",
        "a product of 300,000 numbers of 62 bits takes minutes",
        ".{0,1000}$",
        {"tensors/shape/0": [2**62] * 300_000},
        is_bomb=True,
    )
    record(
        "shape-other",
        "not the tensor that the ranks hold",
        ".*lm_head.weight",
        {"tensors/shape/0": [16, 70]},
        where="",
        python=("restore", "verify"),
    )
    record(
        "name-twice",
        "one of the two would be lost",
        "a tensor name occurs twice",
        {"tensors/name/0": "model.norm.weight"},
    )
    record(
        "tensor-unknown",
        "a tensor that no shard's header has",
        ".*('ghost'|'lm_head.weight')",
        {"tensors/name/0": "ghost"},
        where="",
        python=("restore", "load 0 of 1", "verify"),
    )
    record(
        "tensor-digest",
        "not the bytes that the source had",
        "tensor 'lm_head.weight': the stored bytes are damaged",
        {"tensors/digest/0": "0" * 32},
        where="",
        python=("restore",),
    )
    lies = {
        "header-empty": ("", "not valid JSON"),
        "header-no-json": ("abc", "not valid JSON"),
        "header-list": ("[]", "header is a JSON list"),
        "header-other": (
            '{"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}}',
            "the data section has",
        ),
        "header-nested": ("[" * 20_000, "JSON nested too deeply"),
    }
    for name, (wrong, says) in lies.items():
        record(
            name,
            "a shard's header that lies: what is restored would be no checkpoint",
            f"header of model-00001-of-00002.safetensors: .*({says})",
            {"files/header/0": wrong, "files/nbytes/0": 50_000},
            where="",
            python=("restore",),
        )
    record("header-number", "a header is a text", "'header' is missing or not a list of str", {"files/header/0": 5})
    record(
        "header-swapped",
        "each shard has the other's header",
        "header of model-00001-of-00002.safetensors",
        {"files/header": lambda old: old[::-1]},
        where="",
        python=("restore",),
    )
    record(
        "header-moves",
        "tensors at other places than they are written to",
        ".*model-00001-of-00002.safetensors",
        {"files/header/0": lambda old: old + " " * 8, "files/nbytes/0": lambda old: old + 8},
        where="",
        python=("restore",),
    )
    record(
        "shard-huge",
        "a gigabyte would be allocated",
        "header of model-00001-of-00002.safetensors: the tensors cover",
        {"files/nbytes/0": 2**30},
        where="",
        python=("restore",),
    )
    record(
        "tensors-overlap",
        "two tensors at one place: the last to be written wins",
        ".*(lm_head|embed_tokens).weight",
        {"tensors/offset/1": lambda old: old + 16},
        where="",
        python=("restore",),
    )
    record("files-none", "tensors of no file", r"file \d+ of 0", {"files": {"name": [], "nbytes": [], "header": []}})


def side(name: str, content: bytes | None = None) -> Edits:
    """A side file that really lies in the folder."""
    content = converted()[name] if content is None else content
    return {"side_files/name/0": name, "side_files/nbytes/0": len(content), "side_files/digest/0": digest(content)}


def plans() -> None:
    rule = '[cut]\n"**" = "whole"\n'
    plan("empty", "no rules at all", r"a plan has a table \[cut\] with rules", "")
    plan("not-toml", "JSON", "not valid TOML", json.dumps({"cut": {}}))
    plan("not-utf-8", "no text", r"not UTF-8 at byte \d+", b'extends = "ll\xffma"\n')
    plan("utf-16", "no UTF-8", "not UTF-8 at byte 0", PLAN.encode("utf-16"))
    plan("utf-8-bom", "some readers skip it, some do not", "not valid TOML", PLAN.encode("utf-8-sig"))
    plan("nul", "a control character", "not valid TOML", PLAN + "\0")
    plan("truncated", "half of a plan", "not valid TOML", PLAN[: len(PLAN) - 20])
    plan("duplicate-key", "one of the two would win in silence", "not valid TOML", rule + '"**" = { rows = "even" }\n')
    plan("duplicate-table", "as above", "not valid TOML", rule + rule)
    plan(
        "nested-lists",
        "a recursive parser overflows its stack",
        "(not valid TOML|nested too deeply)",
        f"model_types = {nested(20_000)}\n",
    )
    plan(
        "nested-tables",
        "as above",
        "(not valid TOML|nested too deeply|unknown key)",
        "x = " + "{a=" * 20_000 + "1" + "}" * 20_000,
    )
    plan("nested-keys", "a key of twenty thousand parts", "", "a." * 20_000 + "b = 1\n", is_bomb=True)
    plan(
        "nested-keys-behind-separators",
        "the same in what only Python takes for many lines",
        "a line with more than 256 dots",
        ("a." * 250 + '"\u2028".') * 200 + "b = 1\n",
        is_bomb=True,
    )
    plan(
        "number-5000-digits",
        "Python refuses to read it, with an error of its own kind",
        "not valid TOML",
        f"x = {'7' * 5000}\n",
    )
    VECTORS.append(sized("plan", "plan.toml", 2**18))

    plan("unknown-key", "a misspelt key would be ignored in silence", "unknown key 'cuts', expected", rule + "[cuts]\n")
    plan(
        "unknown-key-escape",
        "the name would steer the terminal",
        r"unknown key '\\+x1b\[2J'",
        rule + '["\\u001b[2J"]\n',
    )
    plan("cut-is-list", "rules are a table", "cut is not a table", "cut = []\n")
    plan("sizes-text", "sizes are a table", "sizes is not a table", 'sizes = "heads"\n' + rule)
    plan("experts-number", "experts are a table", "experts is not a table", "experts = 8\n" + rule)
    plan(
        "experts-unknown-key",
        "a misspelt key would be ignored in silence",
        "experts: unknown key 'every'",
        rule + '[experts]\nevery = "#"\n',
    )
    for name, wrong in {"unknown": '"lama"', "number": "1", "list": '["llama"]', "path": '"../plans/llama"'}.items():
        plan(
            f"extends-{name}", "no built-in plan", "extends .*which is no built-in plan", f"extends = {wrong}\n" + rule
        )
    plan(
        "extends-itself",
        "a plan that extends itself, without end",
        "extends 'plan.toml', which is no built-in plan",
        'extends = "plan.toml"\n' + rule,
    )
    units = {
        "unit-unknown": ('{ rows = "tails" }', "unit 'tails', expected"),
        "unit-number": ("{ rows = 4 }", 'is not "whole"'),
        "unit-empty": ('{ rows = "" }', "unit '', expected"),
        "units-none": ("{ rows = [] }", 'is not "whole"'),
        "word": ('"part"', 'is not "whole"'),
        "number": ("1", 'is not "whole"'),
        "list": ('["whole"]', 'is not "whole"'),
        "empty": ("{}", 'is not "whole"'),
        "true": ("true", 'is not "whole"'),
        "axis-negative": ('{ axis = -1, by = "even" }', 'is not "whole"'),
        "axis-float": ('{ axis = 0.0, by = "even" }', 'is not "whole"'),
        "axis-true": ('{ axis = true, by = "even" }', 'is not "whole"'),
        "axis-without-by": ("{ axis = 0 }", 'is not "whole"'),
        "both-axes": ('{ rows = "even", columns = "even" }', "unknown key 'columns'"),
        "block-zero": ('{ rows = "ragged", block = 0 }', "block is a positive number"),
        "block-of-even": ('{ rows = "even", block = 2 }', "block is a positive number"),
        "widths-three": ('{ rows = "a * b * c" }', "is for all parts or for none"),
        "interleaved-one": ('{ rows = "even", interleaved = "heads" }', "interleaved is for a list of units"),
        "mixed": ('{ rows = ["even", "vocabulary"] }', "parts are either all"),
        "nan": ("nan", 'is not "whole"'),
        "date": ("1979-05-27", 'is not "whole"'),
    }
    for name, (value, says) in units.items():
        plan(f"cut-{name}", "no cut", rf"cut '\*\*'.*{says}", f'[cut]\n"**" = {value}\n')
    plan(
        "axis-huge",
        "an axis that no tensor has",
        "axis 4611686018427387904 of .* there is no such axis",
        f'[cut]\n"**" = {{ axis = {2**62}, by = "even" }}\n',
        where="tensor '.*': ",
    )
    plan(
        "block-huge",
        "no tensor has such blocks",
        "has 70 elements, not a multiple of 4611686018427387904",
        f'[cut]\n"**" = {{ rows = "ragged", block = {2**62} }}\n',
        where="tensor '.*': .*",
    )
    for name, pattern in {
        "nested": "a{b,{c}}",
        "open": "a{b",
        "closed": "a}b",
        "glob-inside": "{*}",
        "number-inside": "{#}",
    }.items():
        plan(f"braces-{name}", "no pattern", ".* is no pattern", f'[cut]\n"{pattern}" = "whole"\n')
    plan(
        "experts-without-number",
        "whose expert is it?",
        "experts.each: .* has not just one '#'",
        rule + '[experts]\neach = "**"\n',
    )
    plan(
        "experts-two-numbers",
        "which of them is the expert?",
        "experts.each: .* has not just one '#'",
        rule + '[experts]\neach = "#.#"\n',
    )
    sizes = {
        "zero": "0",
        "negative": "-4",
        "float": "4.0",
        "true": "true",
        "nested": "[[4]]",
        "empty-table": "{}",
        "is-without-when": '{ use = "a", is = 1 }',
        "unknown-key": '{ use = "a", if = "b" }',
        "when-number": '{ use = "a", when = 1 }',
    }
    for name, wrong in sizes.items():
        plan(
            f"size-{name}", "no size", "sizes.heads: .* is no key of config.json", f"[sizes]\nheads = {wrong}\n" + rule
        )
    plan(
        "size-even",
        "a unit with a meaning of its own",
        "sizes.even: this unit has a meaning of its own",
        "[sizes]\neven = 4\n" + rule,
    )
    plan(
        "size-huge",
        "more heads than a number of 64 bits",
        "tensor '.*': .*",
        f'[sizes]\nheads = {10**40}\n[cut]\n"**" = {{ rows = "heads" }}\n',
        where="",
    )
    plan(
        "size-divided-by-itself",
        "a key of config.json that is no number",
        "needs heads, but config.json has no positive",
        '[sizes]\nheads = "model_type / vocab_size"\n[cut]\n"**" = { rows = "heads" }\n',
        where="tensor '.*': .*",
    )
    plan(
        "model-types-other",
        "a plan for other models",
        "is for model_types gpt2, config.json says 'llama'",
        'model_types = ["gpt2"]\n' + rule,
    )
    plan(
        "model-types-number",
        "names are strings",
        "model_types is not a string or a list of strings",
        "model_types = [1]\n" + rule,
    )
    plan(
        "prefixes-number",
        "names are strings",
        "language_prefixes is not a string or a list of strings",
        "language_prefixes = 1\n" + rule,
    )
    plan(
        "transposed-text",
        "neither true nor false",
        "transposed 'yes', expected true or false",
        'transposed = "yes"\n' + rule,
    )
    plan(
        "quantisation-list",
        "no name of a method",
        "quantisation .*expected the name of a method",
        "quantisation = []\n" + rule,
    )
    for name, pattern, tensor_name in (
        ("stars", "**e" * 12 + "X", "e" * 200),
        ("braces", "{e,ee}" * 60 + "X", "e" * 90),
        ("numbers", "#" * 30 + "X", "7" * 90),
    ):
        weight_map = {tensor_name: SHARDS[0]}
        files = {
            SHARDS[0]: shard({tensor_name: ("I8", [4])}, 3),
            INDEX: json.dumps({"weight_map": weight_map}).encode(),
        }
        plan(
            f"backtracking-{name}",
            "a pattern that takes a regular expression years",
            ".*plan.toml",
            f'[cut]\n"{pattern}" = "whole"\n',
            where="",
            is_bomb=True,
            files=files,
        )


def rank_files() -> None:
    zero, one = (converted()[name] for name in RANK_FILES)
    start = json.loads(converted()[MANIFEST])["ranks"][0]["files"][0]["data_start"]
    restore, verify = "restore {path} -o {out}", "verify {path}"
    told: Any = {"exit": 1, "python": ("verify",)}

    rank_file(
        "swapped",
        "each rank would load the other's slices",
        r"/model-rank-[01]-part-0\.safetensors: ",
        {RANK_FILES[0]: one, RANK_FILES[1]: zero},
        restore,
        python=("load 0", "restore", "verify"),
    )
    rank_file(
        "twice-rank-0",
        "one rank has the other's slices",
        r"/model-rank-1-part-0\.safetensors: ",
        {RANK_FILES[1]: zero},
        restore,
        python=("load 1", "restore", "verify"),
    )
    conversion = json.loads(converted()[MANIFEST])["conversion"].encode()
    other = zero.replace(conversion, b"0" * 32)
    rank_file(
        "of-other-conversion",
        "a file of another model, of the same length",
        r"model-rank-0-part-0\.safetensors: its header is not of rank 0, part 0, of this conversion",
        {RANK_FILES[0]: other},
        verify,
        exit=1,
    )
    renamed = zero.replace(rb"\"rank\":0", rb"\"rank\":1")
    rank_file(
        "of-other-rank",
        "the file says so itself",
        r"model-rank-0-part-0\.safetensors: its header is not of rank 0, part 0, of this conversion",
        {RANK_FILES[0]: renamed},
        verify,
        exit=1,
    )
    rank_file(
        "truncated",
        "the end is missing",
        r"/model-rank-0-part-0\.safetensors: \d+ bytes long, expected \d+",
        {RANK_FILES[0]: zero[:-1]},
        restore,
        python=("load 0", "restore", "verify"),
    )
    rank_file(
        "truncated-to-header",
        "all data is missing",
        r"/model-rank-0-part-0\.safetensors: \d+ bytes long, expected \d+",
        {RANK_FILES[0]: zero[:start]},
        restore,
        python=("load 0", "restore", "verify"),
    )
    rank_file(
        "empty",
        "nothing is there",
        r"/model-rank-0-part-0\.safetensors: 0 bytes long, expected \d+",
        {RANK_FILES[0]: b""},
        restore,
        python=("load 0", "restore", "verify"),
    )
    rank_file(
        "grown",
        "bytes behind the end",
        r"/model-rank-0-part-0\.safetensors: \d+ bytes long, expected \d+",
        {RANK_FILES[0]: zero + b"\0"},
        restore,
        python=("load 0", "restore", "verify"),
    )
    rank_file(
        "plain-shard",
        "a shard of the source in its place",
        r"/model-rank-0-part-0\.safetensors: \d+ bytes long, expected \d+",
        {RANK_FILES[0]: plain()[SHARDS[0]]},
        restore,
        python=("load 0", "restore", "verify"),
    )
    swapped_dtype = zero.replace(b'"dtype":"BF16"', b'"dtype":"F16" ', 1)
    rank_file(
        "header-dtype",
        "the same bytes as another type: stock readers and relayout would differ",
        r"model-rank-0-part-0\.safetensors",
        {RANK_FILES[0]: swapped_dtype},
        verify,
        **told,
    )
    rank_file(
        "header-names-swapped",
        "stock readers would take one tensor for the other",
        r"model-rank-0-part-0\.safetensors",
        {RANK_FILES[0]: zero.replace(b'"lm_head.weight"', b'"lm_h\xc3\xa4d.weight"', 1)[: len(zero)]},
        verify,
        **told,
    )
    moved = (int.from_bytes(zero[:8], "little") - 512).to_bytes(8, "little") + zero[8:]
    rank_file(
        "data-start-moved",
        "the data section would start 512 bytes earlier",
        r"model-rank-0-part-0\.safetensors.*not valid JSON",
        {RANK_FILES[0]: moved},
        verify,
        **told,
    )
    huge = (2**63).to_bytes(8, "little") + zero[8:]
    rank_file(
        "header-length-huge",
        "stock readers cannot read it at all",
        r"model-rank-0-part-0\.safetensors.*header length 9223372036854775808",
        {RANK_FILES[0]: huge},
        verify,
        **told,
    )
    spaces = zero[: start - 1] + b"x" + zero[start:]
    rank_file(
        "header-padding",
        "bytes hidden in the padding",
        r"model-rank-0-part-0\.safetensors.*not valid JSON",
        {RANK_FILES[0]: spaces},
        verify,
        **told,
    )
    tabs = zero[: start - 1] + b"\n" + zero[start:]
    rank_file(
        "header-white-space",
        "not the header that was written, if of the same meaning",
        r"model-rank-0-part-0\.safetensors.*header differs from the one that was written",
        {RANK_FILES[0]: tabs},
        verify,
        **told,
    )
    flipped = zero[:start] + bytes([zero[start] ^ 1]) + zero[start + 1 :]
    rank_file(
        "data-flipped",
        "one bit of a weight",
        r"model-rank-0-part-0\.safetensors.*lm_head.weight.*digest differs",
        {RANK_FILES[0]: flipped},
        verify,
        **told,
    )
    rank_file(
        "extra",
        "a file that stock loaders would take for a part of the model",
        r"extra\.safetensors.*is not part of this conversion",
        {"extra.safetensors": plain()[SHARDS[0]]},
        verify,
        **told,
    )
    opened = Opened()
    opened.tables[0]["name"][:2] = opened.tables[0]["name"][1::-1]
    rank_file(
        "table-names-swapped",
        "a table that gives two tensors of one shape each other's names",
        r"model-rank-0-part-0\.safetensors.*lm_head.weight",
        opened.closed(),
        verify,
        **told,
    )


def paths() -> None:
    no_file = "(not a regular file|cannot be read: )"
    leaves = "(leads out of|not a regular file)"
    for kind in ("fifo", "socket", "folder", "link nowhere", "link {self}"):
        name = kind.split()[0] if kind != "link {self}" else "loop"
        name = "dangling" if kind == "link nowhere" else name
        why = {
            "fifo": "opening it waits for ever",
            "socket": "it cannot be opened",
            "folder": "it cannot be read",
            "dangling": "nothing is there",
            "loop": "a link to itself",
        }[name]
        for place, base in (
            (SHARDS[0], "plain"),
            (CONFIG, "plain"),
            (INDEX, "plain"),
            (MANIFEST, "converted"),
            (TABLES[0], "converted"),
            (RECORD, "converted"),
            (RANK_FILES[0], "converted"),
        ):
            if place == MANIFEST and name in ("dangling", "loop"):
                continue  # Then it is no converted folder.
            what = {
                SHARDS[0]: "shard",
                CONFIG: "config",
                INDEX: "index",
                MANIFEST: "manifest",
                TABLES[0]: "table",
                RECORD: "record",
                RANK_FILES[0]: "rank-file",
            }[place]
            python: tuple[str, ...] = (
                ("load 0 of 2",)
                if base == "plain"
                else ("restore", "verify")
                if place == RECORD
                else ("load 0", "restore", "verify")
            )
            says = f"/{place.replace('.', chr(92) + '.')}: " + ("" if place == RANK_FILES[0] else no_file)
            path(f"{name}-{what}", why, says, base, {place: kind}, python=python)
    path(
        "fifo-plan",
        "opening it waits for ever",
        rf"/plan\.toml: {no_file}",
        "plain",
        {"plan.toml": "fifo"},
        command="convert {path} --plan {path}/plan.toml --tp 2 -o {out}",
        python=(),
    )
    path(
        "device-plan",
        "bytes without end",
        rf"/plan\.toml: {leaves}",
        "plain",
        {"plan.toml": "link /dev/zero"},
        command="convert {path} --plan {path}/plan.toml --tp 2 -o {out}",
        python=(),
    )
    path(
        "fifo-as-checkpoint",
        "opening it waits for ever",
        r"x\.safetensors: not a regular file",
        "plain",
        {"x.safetensors": "fifo"},
        command="convert {path}/x.safetensors -o {out}",
        python=("load 0 of 1",),
    )
    path(
        "device-as-checkpoint",
        "bytes without end",
        r"x\.safetensors: not a regular file",
        "plain",
        {"x.safetensors": "link /dev/zero"},
        command="convert {path}/x.safetensors -o {out}",
        python=("load 0 of 1",),
    )
    outside = {"hostname": "/etc/hostname", "zero": "/dev/zero", "proc": "/proc/self/environ", "copy": "{outside}"}
    for name, target in outside.items():
        for place, base in (
            (SHARDS[0], "plain"),
            (CONFIG, "plain"),
            (INDEX, "plain"),
            (MANIFEST, "converted"),
            (TABLES[0], "converted"),
            (RECORD, "converted"),
            (RANK_FILES[0], "converted"),
        ):
            if name in ("proc", "copy") and place not in (SHARDS[0], CONFIG, RANK_FILES[0]):
                continue
            what = {
                SHARDS[0]: "shard",
                CONFIG: "config",
                INDEX: "index",
                MANIFEST: "manifest",
                TABLES[0]: "table",
                RECORD: "record",
                RANK_FILES[0]: "rank-file",
            }[place]
            python = (
                ("load 0 of 2",)
                if base == "plain"
                else ("restore", "verify")
                if place == RECORD
                else ("load 0", "restore", "verify")
            )
            path(
                f"link-to-{name}-{what}",
                "a file of this machine would be read, copied or uploaded",
                f"/{place.replace('.', chr(92) + '.')}: .*{leaves}",
                base,
                {place: f"link {target}"},
                python=python,
            )


# What others say of them.


def stock_verdict(name: str, folder: Path, files: Sequence[str]) -> str:
    """What the reader that most people use makes of a vector: "takes", or "refuses: why"; "none": it is not for that.

    safetensors for its own files (`safe_open` and `deserialize`), transformers for index.json and config.json.
    """
    parser = name.partition("/")[0]
    if parser in ("header", "rank_file"):
        found = [stock_file_verdict(folder / file) for file in sorted(files) if file.endswith(".safetensors")]
        return next((one for one in found if one != "takes"), "takes") if found else "none"
    if parser == "index" and INDEX in files:
        from transformers.utils.hub import get_checkpoint_shard_files

        return verdict_of(lambda: get_checkpoint_shard_files(str(folder), str(folder / INDEX)))
    if parser == "config":
        from transformers import PreTrainedConfig

        return verdict_of(lambda: PreTrainedConfig.get_config_dict(str(folder)))
    return "none"


def stock_file_verdict(path: Path) -> str:
    """What safetensors says of a file."""

    def opened() -> None:
        with safetensors.safe_open(path, framework="np") as file:
            file.keys()

    message = ""
    try:
        safetensors.deserialize(path.read_bytes())
    except safetensors.SafetensorError as error:
        message = str(error).removeprefix("Error while deserializing: ")
    one, other = message == "", verdict_of(opened) == "takes"
    assert one == other, f"{path}: safe_open and deserialize disagree"
    # Which of two tensors at one place it names is chance.
    return f"refuses: {message.partition(' `')[0][:60]}" if message else "takes"


def verdict_of(call: Callable[[], object]) -> str:
    """The verdict of a reader in Python: whatever it raises is a refusal."""
    try:
        call()
    except Exception as error:
        return f"refuses: {type(error).__name__}"
    return "takes"


def quoted(value: Any) -> str:
    """A value as TOML."""
    match value:
        case str() if "\\" in value and "'" not in value and value.isprintable():
            return f"'{value}'"
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case tuple():
            return f"[{', '.join(map(quoted, value))}]"
        case dict():
            return f"{{ {', '.join(f'{quoted(key)} = {quoted(one)}' for key, one in value.items())} }}"
        case _:
            return json.dumps(value)


def listed() -> str:
    """The list of all vectors."""
    parts = [
        "# Written by tools/vectors.py.",
        "",
        f"safetensors = {quoted(safetensors.__version__)} # Whose messages these are.",
        f"transformers = {quoted(transformers.__version__)}",
    ]
    for one in VECTORS:
        rows = {"name": one.name, "base": one.base, "command": one.command, "reason": one.reason, "says": one.says}
        rows |= {"exit": one.exit} if one.exit != 2 else {}
        rows |= {"python": one.python} if one.python else {}
        rows |= {"error": one.error} if one.error != "FormatError" else {}
        rows |= {"is_bomb": True} if one.is_bomb else {}
        rows |= {"made": one.made} if one.made else {}
        rows["stock"] = "none"
        if one.files and not one.is_bomb:
            with tempfile.TemporaryDirectory() as place:
                write(Path(place), {**(plain() if one.base == "plain" else converted()), **one.files})
                rows["stock"] = stock_verdict(one.name, Path(place), list(one.files))
        parts += ["", "[[vector]]", *(f"{key} = {quoted(value)}" for key, value in rows.items())]
    return "\n".join(parts) + "\n"


def main() -> None:
    transformers.logging.set_verbosity_error()
    for parser in ("header", "index", "config", "manifest", "table", "record", "plan", "rank_file", "paths", "base"):
        shutil.rmtree(FOLDER / parser, ignore_errors=True)
    write(FOLDER / "base" / "plain", plain())
    write(FOLDER / "base" / "converted", converted())
    write(FOLDER / "base", {"plan.toml": PLAN.encode()})
    write(FOLDER, {".gitattributes": b"* -text\n"})
    for add in (headers, indexes, configs, manifests, tables, records, plans, rank_files, paths):
        add()
    for one in VECTORS:
        write(FOLDER / one.name, one.files)
    (FOLDER / "vectors.toml").write_text(listed(), encoding="utf-8")


if __name__ == "__main__":
    main()
