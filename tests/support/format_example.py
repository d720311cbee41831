"""The example of FORMAT.md, written by its rules alone: a folder of two ranks, from a source of four tensors.

Knows nothing of relayout, so that it proves both the document and what relayout writes. Tables and record are zstd
frames of one raw block, which need no compressor and are always the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from blake3 import blake3

NUM_RANKS, ALIGNMENT, CHUNK_NBYTES, ITEM = 2, 4096, 2**20, 2
MAX_PART_NBYTES = 48 * 10**9
CONFIG = '{"model_type":"example","num_attention_heads":4,"num_key_value_heads":2}\n'
PLAN = """\
[sizes]
heads = "num_attention_heads"
kv_heads = "num_key_value_heads"

[cut]
"**.qkv_proj.weight" = { dim = 0, by = ["heads", "kv_heads", "kv_heads"] }
"**.gate.bias" = "whole"
"norm.weight" = "whole"
"""
QKV = ({"0": [[0, 8], [16, 4], [24, 4]]}, {"0": [[8, 8], [20, 4], [28, 4]]})
"""Of each rank: its share of q, of k and of v."""
SHAPES = {
    "layers.0.gate.bias": [3],
    "layers.0.qkv_proj.weight": [32, 8],
    "layers.1.gate.bias": [3],
    "norm.weight": [8],
}
"""In model order. All are BF16."""
FILE_ORDER = ("layers.0.qkv_proj.weight", "norm.weight", "layers.0.gate.bias", "layers.1.gate.bias")

Slice = Mapping[str, Any]


def digest(blob: bytes) -> str:
    return xxhash.xxh3_128(blob).hexdigest()


def blake3_hex(blob: bytes) -> str:
    return blake3(blob).hexdigest()


def compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def frame(text: str) -> bytes:
    """A zstd frame of one raw block (RFC 8878, 3.1.1): one segment, a content size of 4 bytes."""
    blob = text.encode()
    assert len(blob) < 2**17
    return b"\x28\xb5\x2f\xfd\xa0" + len(blob).to_bytes(4, "little") + (len(blob) << 3 | 1).to_bytes(3, "little") + blob


def source_array(name: str) -> npt.NDArray[np.uint16]:
    """A source tensor as 16-bit integers: byte i of its stored bytes is i modulo 251."""
    shape = SHAPES[name]
    blob = bytes(i % 251 for i in range(ITEM * int(np.prod(shape))))
    return np.frombuffer(blob, np.uint16).reshape(shape)


def part_of(name: str, rank: int) -> Slice:
    return QKV[rank] if "qkv" in name else {}


def slice_array(name: str, rank: int) -> npt.NDArray[np.uint16]:
    array = source_array(name)
    for axis, ranges in part_of(name, rank).items():
        indices = np.concatenate([np.arange(start, start + length) for start, length in ranges])
        array = np.take(array, indices, int(axis))
    return array


def header(entries: Sequence[tuple[str, list[int], int]], metadata: Mapping[str, str], alignment: int) -> bytes:
    """Length and header of a file, from names, shapes and sizes."""
    ends = list(accumulate(nbytes for _, _, nbytes in entries))
    top: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for (name, shape, nbytes), end in zip(entries, ends, strict=True):
        top[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end - nbytes, end]}
    text = compact(top).encode()
    padded = -(-(8 + len(text)) // alignment) * alignment - 8
    return padded.to_bytes(8, "little") + text.ljust(padded)


def content_rows(rank: int) -> list[list[Any]]:
    return [
        [name, "BF16", SHAPES[name], part_of(name, rank), digest(slice_array(name, rank).tobytes())]
        for name in FILE_ORDER
    ]


def rank_file(rank: int) -> tuple[bytes, bytes]:
    """Everything before the data section, and the data section."""
    arrays = [(name, slice_array(name, rank)) for name in FILE_ORDER]
    head = compact({"format": 1, "tensors_digest": digest(compact(content_rows(rank)).encode())})
    entries = [(name, list(array.shape), array.nbytes) for name, array in arrays]
    metadata = {"relayout": head, "format": "pt"}
    return header(entries, metadata, ALIGNMENT), b"".join(array.tobytes() for _, array in arrays)


def table(rank: int) -> dict[str, Any]:
    return {
        "relayout": 1,
        "kinds": {
            "dtype": ["BF16", "BF16", "BF16"],
            "bits": [16, 16, 16],
            "shape": [[16, 8], [8], [3]],
            "source_shape": [[32, 8], None, None],
            "slice": [QKV[rank], {}, {}],
        },
        "name": list(FILE_ORDER),
        "kind": [0, 1, 2, 2],
        "file": [0, 0, 0, 0],
        "offset": [4096, 4352, 4368, 4374],
        "arena_offset": [0, 256, 4096, 4112],
    }


def source_file() -> tuple[bytes, bytes]:
    entries = [(name, shape, source_array(name).nbytes) for name, shape in SHAPES.items()]
    return header(entries, {"format": "pt"}, 8), b"".join(source_array(name).tobytes() for name in SHAPES)


def record() -> dict[str, Any]:
    before, data = source_file()
    sizes = [source_array(name).nbytes for name in SHAPES]
    return {
        "relayout": 1,
        "num_ranks": 2,
        "plan": {
            "name": "example.toml",
            "origin": "file",
            "rules": {
                "sizes": {"heads": ["num_attention_heads"], "kv_heads": ["num_key_value_heads"]},
                "cut": {
                    "**.qkv_proj.weight": {"dim": 0, "by": ["heads", "kv_heads", "kv_heads"]},
                    "**.gate.bias": "whole",
                    "norm.weight": "whole",
                },
            },
        },
        "expert_parallel": False,
        "alignment": ALIGNMENT,
        "max_part_nbytes": MAX_PART_NBYTES,
        "dcp": False,
        "layout": "ranks",
        "files": {
            "name": ["model.safetensors"],
            "nbytes": [len(before) + len(data)],
            "header": [before[8:].decode()],
        },
        "index": None,
        "side_files": {
            "name": ["config.json"],
            "nbytes": [len(CONFIG)],
            "digest": [blake3_hex(CONFIG.encode())],
            "mode": [0o644],
        },
        "cuts": [[{}, {}], list(QKV)],
        "tensors": {
            "name": list(SHAPES),
            "dtype": ["BF16"] * 4,
            "shape": list(SHAPES.values()),
            "file": [0, 0, 0, 0],
            "offset": [len(before) + end - nbytes for nbytes, end in zip(sizes, accumulate(sizes), strict=True)],
            "cut": [0, 1, 0, 0],
        },
    }


def conversion_text() -> str:
    """What the digest `conversion` is taken of."""
    cuts = {name: [part_of(name, rank) for rank in range(NUM_RANKS)] for name in SHAPES}
    rows = [[name, "BF16", SHAPES[name], digest(source_array(name).tobytes()), cuts[name]] for name in SHAPES]
    return compact({"num_ranks": NUM_RANKS, "tensors": rows})


def manifest() -> dict[str, Any]:
    """All but `self_digest`, which is taken of the text."""
    files, ranks = [], []
    for rank in range(NUM_RANKS):
        before, data = rank_file(rank)
        files.append(
            {
                "name": f"model-rank-{rank}-part-0.safetensors",
                "nbytes": len(before) + len(data),
                "data_start": len(before),
                "tensors_digest": digest(compact(content_rows(rank)).encode()),
                "header_digest": blake3_hex(before),
                "chunks_digest": blake3_hex(chunks(rank)),
            }
        )
        ranks.append(
            {
                "table": f"relayout.rank-{rank}.json.zst",
                "table_digest": blake3_hex(frame(compact(table(rank)))),
                "digests_digest": blake3_hex(digests(rank)),
                "num_tensors": 4,
                "nbytes": 284,
                "files": [rank],
                "arena_nbytes": 8192,
                "reads": [
                    {"file": 0, "offset": 4096, "nbytes": 272, "arena_offset": 0},
                    {"file": 0, "offset": 4368, "nbytes": 6, "arena_offset": 4096}
                    | {"count": 2, "stride": 6, "arena_stride": 16},
                ],
            }
        )
    return {
        "relayout": 1,
        "requires": [],
        "generator": "relayout 0.1.0",
        "conversion": digest(conversion_text().encode()),
        "model_type": "example",
        "plan": "file:example.toml",
        "expert_parallel": False,
        "num_ranks": NUM_RANKS,
        "alignment": ALIGNMENT,
        "dcp": False,
        "source": {
            "record_digest": blake3_hex(frame(compact(record()))),
            "digests_digest": blake3_hex(source_digests()),
            "num_tensors": 4,
            "nbytes": 540,
        },
        "hub_index_digest": blake3_hex(hub_index()),
        "chunk_nbytes": CHUNK_NBYTES,
        "files": files,
        "ranks": ranks,
        "whole": None,
    }


def digests(rank: int) -> bytes:
    """The rank's part of relayout.digests."""
    return b"".join(bytes.fromhex(row[4]) for row in content_rows(rank))


def source_digests() -> bytes:
    """The last part of relayout.digests."""
    return b"".join(bytes.fromhex(digest(source_array(name).tobytes())) for name in SHAPES)


def hub_index() -> bytes:
    """It names a file that is not there."""
    of = dict.fromkeys(SHAPES, "model-rank-0-part-0.safetensors")
    of["relayout: this folder has slices of tensors only"] = (
        "this-folder-is-converted-for-2-ranks-and-needs-relayout.safetensors"
    )
    return (json.dumps({"metadata": {"total_size": 540}, "weight_map": of}, indent=2) + "\n").encode()


def chunks(rank: int) -> bytes:
    """The file's part of relayout.chunks: it has one chunk."""
    return blake3(rank_file(rank)[1]).digest()


def write_source(root: Path) -> tuple[Path, Path]:
    """The source folder, and the plan file."""
    (root / "source").mkdir()
    (root / "source" / "model.safetensors").write_bytes(b"".join(source_file()))
    (root / "source" / "config.json").write_text(CONFIG)
    (root / "source" / "config.json").chmod(0o644)
    (root / "example.toml").write_text(PLAN)
    return root / "source", root / "example.toml"


def write_folder(folder: Path, manifest_text: bytes) -> Path:
    """The converted folder, with this manifest."""
    folder.mkdir()
    for rank in range(NUM_RANKS):
        (folder / f"model-rank-{rank}-part-0.safetensors").write_bytes(b"".join(rank_file(rank)))
        (folder / f"relayout.rank-{rank}.json.zst").write_bytes(frame(compact(table(rank))))
    (folder / "relayout.chunks").write_bytes(b"".join(map(chunks, range(NUM_RANKS))))
    (folder / "relayout.digests").write_bytes(b"".join([*map(digests, range(NUM_RANKS)), source_digests()]))
    (folder / "relayout.source.json.zst").write_bytes(frame(compact(record())))
    (folder / "model.safetensors.index.json").write_bytes(hub_index())
    (folder / "config.json").write_text(CONFIG)
    (folder / "relayout.json").write_bytes(manifest_text)
    return folder
