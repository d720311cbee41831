"""Puts a source's tensors together again from converted rank files, and a converted folder from one that is not so."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard
from support.local_stores import read_manifest, read_table
from support.models import read_tensors

from relayout.checkpoint.converted import read_source_digests
from relayout.core.digests import blake3_hex, pack_digests
from relayout.core.slices import Slice
from relayout.errors import FormatError
from relayout.format.manifest import SOURCE_RECORD_NAME, compress, decompress, dump_manifest
from relayout.format.source_record import conversion_digest, parse_record
from relayout.storage.local.store import LocalStore

Array = npt.NDArray[Any]


def indices(part: Slice) -> Array:
    """The indices along the slice's axis, in the order in which they are held."""
    assert part.ranges is not None
    return np.concatenate([np.arange(0), *(np.arange(start, start + length) for start, length in part.ranges)])


def ranks_of(out: Path) -> Iterator[tuple[int, dict[str, tuple[Slice, Array]]]]:
    """Each rank and what it holds: the slice by its table, the bytes by stock safetensors."""
    manifest = read_manifest(out)
    for rank in range(manifest.num_ranks):
        table = read_table(out, manifest, rank)
        stored = read_tensors(out, f"model-rank-{rank}-part-*.safetensors")
        assert stored.keys() == set(table.names)
        yield rank, {name: (part, stored[name]) for name, part in zip(table.names, table.slices, strict=True)}


def assert_ranks_give_back(out: Path, whole: Mapping[str, Array], num_ranks: int) -> None:
    """Every element of every tensor is held, with the source's bytes, by every rank that holds it."""
    rebuilt = {name: np.zeros_like(array) for name, array in whole.items()}
    covered = {name: np.zeros(array.shape, bool) for name, array in whole.items()}
    last = -1
    for last, held in ranks_of(out):
        assert held.keys() <= whole.keys()
        for name, (part, stored) in held.items():
            where = f"{name}, rank {last}"
            if part.ranges is None:
                np.testing.assert_array_equal(stored, whole[name], err_msg=where)
                rebuilt[name][...], covered[name][...] = stored, True
                continue
            array, seen = (np.moveaxis(one[name], part.axis, 0) for one in (rebuilt, covered))
            mine, rows = np.moveaxis(stored, part.axis, 0), indices(part)
            assert len(mine) == len(rows), where
            assert np.array_equal(array[rows][seen[rows]], mine[seen[rows]]), f"{where}: ranks differ"
            array[rows], seen[rows] = mine, True
    assert last == num_ranks - 1
    for name, array in whole.items():
        assert covered[name].all(), f"{name}: elements that no rank holds"
        np.testing.assert_array_equal(rebuilt[name], array, err_msg=name)


def rebuild(
    folder: Path,
    change_record: Callable[[dict[str, Any]], None] = lambda record: None,
    change_header: Callable[[bytes], bytes] = lambda header: header,
    change_digests: Callable[[list[str | None]], None] = lambda digests: None,
) -> None:
    """Change the source record, the header of each rank file, or digests of the source, and sign all that hangs on it.

    As a faulty writer would, or a forger: the digests are right, whatever they are of.
    """
    manifest = read_manifest(folder)
    record = json.loads(decompress((folder / SOURCE_RECORD_NAME).read_bytes(), "here"))
    change_record(record)
    text = json.dumps(record).encode()
    stored = compress(text)
    (folder / SOURCE_RECORD_NAME).write_bytes(stored)
    files = []
    for file in manifest.files:
        with (folder / file.name).open("r+b") as stream:
            found = stream.read(file.data_start)
            header = change_header(found)
            assert len(header) == len(found)
            stream.seek(0)
            stream.write(header)
        files.append(replace(file, header_digest=blake3_hex(header)))
    digests = read_source_digests(LocalStore(folder), manifest)
    change_digests(digests)
    packed, part = (folder / "relayout.digests").read_bytes(), pack_digests(digests)
    (folder / "relayout.digests").write_bytes(packed[: len(packed) - len(part)] + part)
    manifest = replace(manifest, source_digests_digest=blake3_hex(part))
    changed = replace(manifest, record_digest=blake3_hex(stored), files=tuple(files))
    with suppress(FormatError):  # What is no record names no conversion.
        found = parse_record(text, manifest.num_ranks, "here")
        changed = replace(changed, conversion=conversion_digest(found, digests))
    (folder / "relayout.json").write_bytes(dump_manifest(changed))


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change relayout.json, and sign it anew (FORMAT.md, section 3)."""
    path = folder / "relayout.json"
    top = json.loads(path.read_text())
    change(top)
    del top["self_digest"]
    before = json.dumps(top, indent=1).removesuffix("\n}").encode() + b", "
    path.write_bytes(before + f'"self_digest": "{blake3_hex(before)}"}}'.encode())


def edit_table(folder: Path, change: Callable[[dict[str, Any]], object], rank: int = 1) -> None:
    """Change the table of a rank, and sign it anew (section 5)."""
    path = folder / f"relayout.rank-{rank}.json.zst"
    top = json.loads(zstandard.ZstdDecompressor().decompressobj().decompress(path.read_bytes()))
    change(top)
    stored = zstandard.ZstdCompressor().compress(json.dumps(top).encode())
    path.write_bytes(stored)
    signed = {"table_digest": blake3_hex(stored)}
    edit_manifest(folder, lambda manifest: manifest["ranks"][rank].update(signed))
