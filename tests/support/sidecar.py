"""A manifest and a rank table in memory, files of a rank at random, and deltas that are forged in a folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard
from blake3 import blake3
from hypothesis import strategies as st

from relayout.core.extents import Transfer
from relayout.core.slices import Slice
from relayout.format.index import IndexedFile, Manifest, RankEntry, RankTable, Read, TensorKind
from relayout.format.manifest import sealed
from relayout.format.rank_table import dump_table

Bytes = npt.NDArray[np.uint8]
Files = list[tuple[int, list[int], list[int]]]


def digest(blob: bytes) -> str:
    return xxhash.xxh3_128(blob).hexdigest()


def proof(blob: bytes) -> str:
    return blake3(blob).hexdigest()


def order_in_file(nbytes: int) -> tuple[int, int]:
    """FORMAT.md, section 6, with the alignment at 4096: by falling power of two; below 16 by falling size."""
    power = next(power for power in (1 << i for i in range(12, -1, -1)) if nbytes % power == 0)
    return (-power, -nbytes if power < 16 else 0)


@st.composite
def rank_files(draw: st.DrawFn) -> Files:
    """(data start, offsets, sizes) of a rank's files, as a layout makes them."""
    size = st.one_of(
        st.integers(0, 40),
        st.sampled_from([16, 48, 512, 4096, 8192, 4095, 4097, 4112, 12288]),
        st.integers(0, 12).map(lambda i: 3 << i),
    )
    sizes = sorted(draw(st.lists(size, max_size=25)), key=order_in_file)
    borders = sorted(draw(st.lists(st.integers(0, len(sizes)), max_size=2)))
    files: Files = []
    for start, end in zip([0, *borders], [*borders, len(sizes)], strict=True):
        data_start = draw(st.sampled_from([1536, 2560, 4096, 4608, 65536]))  # Room for 25 entries.
        part = sizes[start:end]
        files.append((data_start, [data_start + sum(part[:i]) for i in range(len(part))], part))
    return files


TABLE = RankTable(
    rank=0,
    kinds=[
        TensorKind("BF16", 16, (32, 64), (64, 64), Slice.along(0, ((0, 32),))),
        TensorKind("F32", 32, (3, 4), (3, 8), Slice.along(1, ((0, 2), (4, 2)))),
        TensorKind("I16", 16, (3,), (3,), Slice()),
        TensorKind("F16", 16, (3, 1), (3, 1), Slice()),
    ],
    kind_of=[0, 1, 2, 2, 3],
    names=["größe", "b", "c", "d", "scale"],
    files=[0, 0, 0, 0, 0],
    offsets=[512, 4608, 4656, 4662, 4668],
    arena_offsets=[512, 4608, 8192, 8208, 8224],
)
"""One file: 4096 + 48 bytes of bulk, and three tensors of 6 bytes."""

STORED_TABLE = dump_table(TABLE)


def entry_of(rank: int, stored_table: bytes) -> RankEntry:
    return RankEntry(
        table=f"relayout.rank-{rank}.json.zst",
        table_digest=proof(stored_table),
        digests_digest=proof(b"digests"),
        num_tensors=5,
        nbytes=4162,
        files=(rank,),
        arena_nbytes=12288,
        reads=(Read(0, Transfer(512, 512, 4144)), Read(0, Transfer(4656, 8192, 6, 3, 6, 16))),
    )


def indexed(name: str, nbytes: int, data_start: int) -> IndexedFile:
    return IndexedFile(name, nbytes, data_start, digest(b"content"), proof(b"header"), proof(b"chunks"))


MANIFEST = Manifest(
    generator="relayout 9.9",
    conversion="0123456789abcdef0123456789abcdef",
    model_type="llama",
    plan="file:größe.toml",
    expert_parallel=True,
    alignment=512,
    dcp=False,
    record_digest=proof(b"record"),
    source_digests_digest=proof(b"digests"),
    num_source_tensors=5,
    source_nbytes=8514,
    hub_index_digest=None,
    chunk_nbytes=2**20,
    files=tuple(indexed(f"model-rank-{rank}-part-0.safetensors", 4674, 512) for rank in range(2)),
    ranks=(
        entry_of(0, STORED_TABLE),
        entry_of(1, STORED_TABLE),
    ),
)

# Deltas of somebody who makes all proofs true again.

Top = dict[str, Any]
Piece = tuple[int, bytes, str]
"""Of a piece that changed its number, what is stored, and the proof of it in the result."""
RESULT = "new/relayout.json.zst"


def forge(manifest: Path, change: Callable[[Top], object]) -> Top:
    """Change a relayout.json, and seal it again; returns what it is then."""
    top: Top = json.loads(manifest.read_bytes())
    change(top)
    del top["self_digest"]
    manifest.write_bytes(sealed(top))
    return top


def forge_result(delta: Path, change: Callable[[Top], object]) -> None:
    """Change the manifest of what a delta makes, and say in its own that this is what it makes."""
    top: Top = json.loads(zstandard.ZstdDecompressor().decompress((delta / RESULT).read_bytes()))
    change(top)
    del top["self_digest"]
    blob = sealed(top)
    (delta / RESULT).write_bytes(zstandard.compress(blob))
    forge(delta / "relayout.json", lambda made: made.update(makes=proof(blob)))


def pieces_of(stored: bytes, num_pieces: int) -> list[Piece]:
    """The pieces in a file of what changed."""
    place, found = 0, []
    for at in range(len(stored) - 80 * num_pieces, len(stored), 80):
        number, nbytes = (int.from_bytes(stored[at + skipped :][:8], "little") for skipped in (0, 8))
        found.append((number, stored[place : place + nbytes], stored[at + 48 : at + 80].hex()))
        place += nbytes
    return found


def forge_pieces(delta: Path, number: int, change: Callable[[list[Piece]], object]) -> None:
    """Change the pieces that a delta has of a weight file, by its number."""
    result = json.loads(zstandard.ZstdDecompressor().decompress((delta / RESULT).read_bytes()))
    path = delta / f"{result['files'][number]['name']}.delta"

    def replace_entry(top: Top) -> None:
        [entry] = (entry for entry in top["files"] if entry["file"] == number)
        pieces = pieces_of(path.read_bytes(), entry["num_pieces"])
        change(pieces)
        rows = [(piece, len(stored), proof(stored), content) for piece, stored, content in pieces]
        index = b"".join(
            piece.to_bytes(8, "little") + nbytes.to_bytes(8, "little") + bytes.fromhex(stored + content)
            for piece, nbytes, stored, content in rows
        )
        path.write_bytes(b"".join(stored for _, stored, _ in pieces) + index)
        entry |= {"nbytes": path.stat().st_size, "num_pieces": len(pieces), "index_digest": proof(index)}

    forge(delta / "relayout.json", replace_entry)


def forge_digests(delta: Path, position: int, change: Callable[[list[tuple[int, bytes]]], object]) -> None:
    """Change the digests that changed of one part of relayout.digests."""
    path = delta / "relayout.digests.delta"

    def replace_part(top: Top) -> None:
        stored, parts = path.read_bytes(), []
        for part in top["digests"]:
            length = 24 * part["count"]
            parts.append(stored[:length])
            stored = stored[length:]
        found = parts[position]
        rows = [
            (int.from_bytes(found[at : at + 8], "little"), found[at + 8 : at + 24]) for at in range(0, len(found), 24)
        ]
        change(rows)
        parts[position] = b"".join(row.to_bytes(8, "little") + digest for row, digest in rows)
        top["digests"][position] = {"count": len(rows), "digest": proof(parts[position])}
        path.write_bytes(b"".join(parts))

    forge(delta / "relayout.json", replace_part)
