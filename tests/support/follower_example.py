"""A follower by the rules of FORMAT.md alone, sections 15 and 16: the files of one rank, at any step of a root.

Knows nothing of relayout. The function that decodes a piece is that of section 15, which the tests take from there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zstandard
from blake3 import blake3

NAME = re.compile("(full|delta)-[0-9]{9,16}-[0-9a-f]{8}")
OF_DIGESTS = {"tensors_digest", "header_digest", "chunks_digest", "digests_digest"}
"""What may differ in the entries of files and ranks from step to step."""

Top = dict[str, Any]


def blake3_hex(blob: bytes | bytearray) -> str:
    return blake3(blob).hexdigest()


def check(condition: bool) -> None:
    if not condition:
        raise ValueError("not what the index of steps says, or damaged")


def sealed(blob: bytes, **expected: object) -> Top:
    """What is in the JSON of an index or a manifest, which has these fields and is its own proof."""
    top: Top = json.loads(blob)
    check(all(top[name] == value for name, value in expected.items()) and list(top)[-1] == "self_digest")
    check(top["self_digest"] == blake3_hex(blob[: blob.rindex(b'"self_digest"')]))
    return top


def expanded(blob: bytes) -> bytes:
    """What is in the one zstd frame that a file is."""
    frame = zstandard.ZstdDecompressor(max_window_size=2**27).decompressobj()
    try:
        content = frame.decompress(blob)
    except zstandard.ZstdError as error:
        raise ValueError("no zstd frame") from error
    check(frame.eof and not frame.unused_data)
    return content


def number(blob: bytes, at: int) -> int:
    return int.from_bytes(blob[at : at + 8], "little")


class Follower:
    def __init__(self, root: Path, rank: int, decoded: Callable[[bytes], Any]) -> None:
        self.root, self.rank, self.decoded = root, rank, decoded
        self.content = ""
        self.files: dict[str, bytearray] = {}
        self.manifest: Top = {}
        self.chunks: dict[str, bytearray] = {}
        """The part of relayout.chunks of each file."""
        self.digests = bytearray()
        """The rank's part of relayout.digests."""

    def go(self, step: int | None = None) -> list[str]:
        """Go to a step, or to the newest; returns the names of what was read."""
        index = sealed((self.root / "steps.json").read_bytes(), relayout="steps", version=1, requires=[])
        entries = index["steps"]
        end = max(i for i, entry in enumerate(entries) if step in (None, entry["step"]))
        begin = max([i for i in range(end + 1) if entries[i]["content"] == self.content], default=-1)
        if begin < 0 or any(entry["delta"] is None for entry in entries[begin + 1 : end + 1]):
            begin = max(i for i in range(end + 1) if entries[i]["full"] is not None)
            way = [entries[begin]["full"]["name"]]
        else:
            way = []
        way += [entry["delta"]["name"] for entry in entries[begin + 1 : end + 1]]
        for name in way:
            check(NAME.fullmatch(name) is not None)
            (self.take if name.startswith("full") else self.change)(self.root / name)
        check(self.content == entries[end]["content"])
        return way

    def take(self, folder: Path) -> None:
        blob = (folder / "relayout.json").read_bytes()
        manifest = sealed(blob, relayout=1, requires=[])
        names = [manifest["files"][one]["name"] for one in manifest["ranks"][self.rank]["files"]]
        self.files = {name: bytearray((folder / name).read_bytes()) for name in names}
        proofs, place = (folder / "relayout.chunks").read_bytes(), 0
        for file in manifest["files"]:
            end = place + 32 * (len(starts_of(file, manifest["chunk_nbytes"])) - 1)
            self.chunks[file["name"]], place = bytearray(proofs[place:end]), end
        counts = [0 if entry is None else entry["num_tensors"] for entry in manifest["ranks"]]
        start, nbytes = 16 * sum(counts[: self.rank]), 16 * counts[self.rank]
        self.digests = bytearray((folder / "relayout.digests").read_bytes()[start : start + nbytes])
        self.prove(manifest, blob)

    def change(self, delta: Path) -> None:
        manifest = sealed((delta / "relayout.json").read_bytes(), relayout=1, requires=["delta"], encoding=1)
        blob = expanded((delta / "new/relayout.json.zst").read_bytes())
        check((manifest["base"], manifest["makes"]) == (self.content, blake3_hex(blob)))
        new = sealed(blob, relayout=1, requires=[])
        check(layout_of(new) == layout_of(self.manifest))
        numbers = [entry["file"] for entry in manifest["files"]]
        check(numbers == sorted(set(numbers)))
        for entry in manifest["files"]:
            if entry["file"] in new["ranks"][self.rank]["files"]:
                file = new["files"][entry["file"]]
                self.change_file(file, entry, (delta / (file["name"] + ".delta")).read_bytes(), new["chunk_nbytes"])
        self.change_digests(delta, manifest["digests"], new)
        self.prove(new, blob)

    def change_file(self, file: Top, entry: Top, blob: bytes, chunk_nbytes: int) -> None:
        target, starts = self.files[file["name"]], starts_of(file, chunk_nbytes)
        check(entry["num_pieces"] > 0 and len(blob) == entry["nbytes"])
        index, place, before = blob[len(blob) - 80 * entry["num_pieces"] :], 0, -1
        check(blake3_hex(index) == entry["index_digest"])
        for at in range(0, len(index), 80):
            piece, nbytes = number(index, at), number(index, at + 8)
            check(before < piece < len(starts))
            start, end = starts[piece], [*starts[1:], file["nbytes"]][piece]
            check(0 < nbytes <= 32 * (end - start) + 256)
            stored, place, before = blob[place : place + nbytes], place + nbytes, piece
            check(blake3_hex(stored) == index[at + 16 : at + 48].hex())
            xor = np.frombuffer(self.decoded(stored), np.uint8)
            check(len(xor) == end - start)
            target[start:end] = (np.frombuffer(target, np.uint8, len(xor), start) ^ xor).tobytes()
            check(blake3_hex(target[start:end]) == index[at + 48 : at + 80].hex())
            if piece:
                self.chunks[file["name"]][32 * (piece - 1) : 32 * piece] = index[at + 48 : at + 80]
        check(place + len(index) == len(blob))

    def change_digests(self, delta: Path, parts: list[Top], new: Top) -> None:
        holders = [entry for entry in (*new["ranks"], new["whole"]) if entry is not None]
        check(len(parts) == len(holders) + 1)
        position = holders.index(new["ranks"][self.rank])
        start, nbytes = 24 * sum(part["count"] for part in parts[:position]), 24 * parts[position]["count"]
        rows = (delta / "relayout.digests.delta").read_bytes()[start : start + nbytes] if nbytes else b""
        check(blake3_hex(rows) == parts[position]["digest"])
        before = -1
        for at in range(0, nbytes, 24):
            row = number(rows, at)
            check(before < row < new["ranks"][self.rank]["num_tensors"])
            self.digests[16 * row : 16 * row + 16], before = rows[at + 8 : at + 24], row

    def prove(self, manifest: Top, blob: bytes) -> None:
        """Compare the rank's files with the proofs of a manifest, of which this then has the content."""
        found = b""
        for one in manifest["ranks"][self.rank]["files"]:
            file = manifest["files"][one]
            held, starts = self.files[file["name"]], starts_of(file, manifest["chunk_nbytes"])[1:]
            part = self.chunks[file["name"]]
            check(blake3_hex(part) == file["chunks_digest"] and len(held) == file["nbytes"])
            check(blake3_hex(held[: file["data_start"]]) == file["header_digest"])
            chunks = [held[start : start + manifest["chunk_nbytes"]] for start in starts]
            check(b"".join(bytes.fromhex(blake3_hex(chunk)) for chunk in chunks) == part)
            found += digests_in(held, file["data_start"])
        check(found == self.digests and blake3_hex(found) == manifest["ranks"][self.rank]["digests_digest"])
        self.manifest, self.content = manifest, blake3_hex(blob)


def starts_of(file: Top, chunk_nbytes: int) -> list[int]:
    """Where each piece of a file begins: the header, and the chunks."""
    return [0, *range(file["data_start"], file["nbytes"], chunk_nbytes)]


def digests_in(held: bytearray, start: int) -> bytes:
    """The digests of the tensors of a file, in file order."""
    header = json.loads(held[8:start])
    places = sorted(entry["data_offsets"] for name, entry in header.items() if name != "__metadata__")
    return b"".join(xxhash.xxh3_128_digest(held[start + begin : start + end]) for begin, end in places)


def layout_of(manifest: Top) -> Any:
    """What a delta does not change."""
    entries = [*manifest["files"], *manifest["ranks"], manifest["whole"]]
    rest = [entry and {name: value for name, value in entry.items() if name not in OF_DIGESTS} for entry in entries]
    return manifest["num_ranks"], manifest["chunk_nbytes"], manifest["source"]["num_tensors"], rest
