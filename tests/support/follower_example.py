"""A follower by the rules of FORMAT.md alone, section 16: the files of one rank, at any step of a root in a folder.

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
from blake3 import blake3

NAME = re.compile("(full|delta)-[0-9]{9,16}-[0-9a-f]{8}")


def digest(blob: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(blob)


def proof(blob: bytes) -> str:
    return blake3(blob).hexdigest()


def check(condition: bool) -> None:
    if not condition:
        raise ValueError("not what the index of steps says, or damaged")


class Follower:
    def __init__(self, root: Path, rank: int, decoded: Callable[[bytes], bytes]) -> None:
        self.root, self.rank, self.decoded = root, rank, decoded
        self.content = ""
        self.files: dict[str, bytearray] = {}

    def go(self, step: int | None = None) -> list[str]:
        """Go to a step, or to the newest; returns the names of what was read."""
        blob = (self.root / "steps.json").read_bytes()
        index = json.loads(blob)
        check((index["relayout"], index["version"], index["requires"]) == ("steps", 1, []))
        check(list(index)[-1] == "self_digest")
        check(index["self_digest"] == proof(blob[: blob.rindex(b'"self_digest"')]))
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
        manifest = json.loads(blob)
        for number in manifest["ranks"][self.rank]["files"]:
            name = manifest["files"][number]["name"]
            self.files[name] = bytearray((folder / name).read_bytes())
        self.prove(folder, blob)

    def change(self, delta: Path) -> None:
        manifest = json.loads((delta / "relayout.json").read_bytes())
        blob = (delta / "new/relayout.json").read_bytes()
        check((manifest["base"], manifest["makes"]) == (self.content, proof(blob)))
        new = json.loads(blob)
        for number in new["ranks"][self.rank]["files"]:
            file, stored = new["files"][number], manifest["files"][number]
            if stored["nbytes"]:
                self.change_file(file, stored, (delta / (file["name"] + ".delta")).read_bytes(), new["chunk_nbytes"])
        self.prove(delta / "new", blob)

    def change_file(self, file: dict[str, Any], stored: dict[str, Any], blob: bytes, chunk_nbytes: int) -> None:
        target, starts = self.files[file["name"]], [0, *range(file["data_start"], file["nbytes"], chunk_nbytes)]
        index = blob[len(blob) - 24 * len(starts) :]
        check(len(blob) == stored["nbytes"] and proof(index) == stored["index_digest"])
        place = 0
        for start, entry in zip(starts, (index[at : at + 24] for at in range(0, len(index), 24)), strict=True):
            piece = blob[place : place + int.from_bytes(entry[:8], "little")]
            place += len(piece)
            if piece:
                check(digest(piece) == entry[8:].hex())
                xor = np.frombuffer(self.decoded(piece), np.uint8)
                target[start : start + xor.size] = (np.frombuffer(target, np.uint8, xor.size, start) ^ xor).tobytes()

    def prove(self, folder: Path, blob: bytes) -> None:
        """Compare the rank's files with the digests of a manifest, of which this then has the content."""
        manifest, proofs, place = json.loads(blob), (folder / "relayout.chunks").read_bytes(), 0
        for file in manifest["files"]:
            starts = range(file["data_start"], file["nbytes"], manifest["chunk_nbytes"])
            part, place = proofs[place : place + 32 * len(starts)], place + 32 * len(starts)
            if (held := self.files.get(file["name"])) is not None:
                check(proof(part) == file["chunks_digest"] and len(held) == file["nbytes"])
                check(proof(held[: file["data_start"]]) == file["header_digest"])
                chunks = [held[start : start + manifest["chunk_nbytes"]] for start in starts]
                check(b"".join(bytes.fromhex(proof(chunk)) for chunk in chunks) == part)
        self.content = proof(blob)
