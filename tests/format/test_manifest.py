"""relayout.format.index and .manifest: the arena simulated on byte arrays, the sidecar's JSON, and lies in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from relayout.core.extents import Transfer
from relayout.core.slices import Slice
from relayout.errors import FormatError
from relayout.format.arena import Arena, plan_arena
from relayout.format.index import IndexedFile, Kind, Manifest, RankEntry, RankTable, Read
from relayout.format.manifest import compress, decompress, dump_manifest, parse_manifest
from relayout.format.rank_table import dump_table, parse_table

Bytes = npt.NDArray[np.uint8]
Files = list[tuple[int, list[int], list[int]]]
Tree = dict[str, Any]
BLOCK = 4096

CONVERSION = "0123456789abcdef0123456789abcdef"
WHERE = "relayout.json"


def digest(blob: bytes) -> str:
    return xxhash.xxh3_128(blob).hexdigest()


# The arena.


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


def contents(files: Files) -> list[Bytes]:
    """The files' bytes, which depend on their position."""
    return [
        (((np.arange(start + sum(sizes), dtype=np.uint64) + 1) * (2654435761 + number)) >> 9).astype(np.uint8)
        for number, (start, _, sizes) in enumerate(files)
    ]


def simulate(arena: Arena, stored: list[Bytes]) -> tuple[Bytes, npt.NDArray[np.int64]]:
    """The arena's bytes when all reads are done, and how often each was written."""
    memory, times = np.zeros(arena.nbytes, np.uint8), np.zeros(arena.nbytes, np.int64)
    for read in arena.reads:
        one = read.transfer
        for run in range(one.count):
            source, target = one.source + run * one.source_stride, one.target + run * one.target_stride
            assert source + one.nbytes <= len(stored[read.file])
            assert target + one.nbytes <= arena.nbytes
            memory[target : target + one.nbytes] = stored[read.file][source : source + one.nbytes]
            times[target : target + one.nbytes] += 1
    return memory, times


@given(files=rank_files())
@example(files=[(4096, [4096], [0])])
@example(files=[(512, [512, 528], [16, 5]), (512, [512], [5])])
def test_reads_bring_each_tensor_to_its_place_in_the_arena_and_nothing_else(files: Files) -> None:
    arena = plan_arena(files)
    stored = contents(files)
    memory, times = simulate(arena, stored)
    tensors = np.zeros(arena.nbytes, np.int64)
    for number, (_, offsets, sizes) in enumerate(files):
        for offset, nbytes, place in zip(offsets, sizes, arena.offsets[number], strict=True):
            assert place % 16 == 0
            assert place + nbytes <= arena.nbytes
            tensors[place : place + nbytes] += 1
            np.testing.assert_array_equal(memory[place : place + nbytes], stored[number][offset : offset + nbytes])
    assert tensors.max(initial=0) <= 1  # Tensors do not overlap,
    np.testing.assert_array_equal(times, tensors)  # and are what is read.


@given(files=rank_files())
def test_the_bulk_of_a_file_can_be_read_directly_in_whole_blocks(files: Files) -> None:
    arena = plan_arena(files)
    assert arena.nbytes % BLOCK == 0
    blocks = [
        set(range(read.transfer.target // BLOCK, (read.transfer.target_end - 1) // BLOCK + 1)) for read in arena.reads
    ]
    expected_reads = 0
    for number, (data_start, _, sizes) in enumerate(files):
        bulk_nbytes = sum(size for size in sizes if size % 16 == 0)
        odd = [size for size in sizes if size % 16]
        expected_reads += bool(bulk_nbytes) + len(list(groupby(odd)))
        if bulk_nbytes:
            [at] = [
                i for i, read in enumerate(arena.reads) if (read.file, read.transfer.source) == (number, data_start)
            ]
            bulk = arena.reads[at].transfer
            assert (bulk.nbytes, bulk.count) == (bulk_nbytes, 1)
            assert (bulk.target - bulk.source) % BLOCK == 0
            assert not any(blocks[at] & other for i, other in enumerate(blocks) if i != at)
    assert len(arena.reads) == expected_reads


@given(files=rank_files())
def test_the_arena_is_little_larger_than_its_tensors(files: Files) -> None:
    nbytes = sum(sum(sizes) for _, _, sizes in files)
    num_odd = sum(size % 16 != 0 for _, _, sizes in files for size in sizes)
    # For each file: a start congruent with the file's, and the end of the bulk rounded up; then whole blocks.
    assert plan_arena(files).nbytes <= nbytes + 15 * num_odd + 3 * BLOCK * len(files) + BLOCK


def test_an_arena_by_hand() -> None:
    files: Files = [(512, [512, 1024, 1040, 1045], [512, 16, 5, 5]), (4096, [4096, 8192], [4096, 3])]
    assert plan_arena(files) == Arena(
        nbytes=16384,
        reads=(
            Read(0, Transfer(512, 512, 528)),
            Read(0, Transfer(1040, 4096, 5, 2, 5, 16)),
            Read(1, Transfer(4096, 8192, 4096)),
            Read(1, Transfer(8192, 12288, 3)),
        ),
        offsets=((512, 1024, 4096, 4112), (8192, 12288)),
    )


# The sidecar: one rank whose file holds 4096 + 48 bytes of bulk and three tensors of 6 bytes.

TABLE = RankTable(
    rank=0,
    kinds=[
        Kind("BF16", (32, 64), (64, 64), Slice.along(0, ((0, 32),))),
        Kind("F32", (3, 4), (3, 8), Slice.along(1, ((0, 2), (4, 2)))),
        Kind("I16", (3,), (3,), Slice()),
        Kind("F16", (3, 1), (3, 1), Slice()),
    ],
    kind_of=[0, 1, 2, 2, 3],
    names=["größe", "b", "c", "d", "scale"],
    files=[0, 0, 0, 0, 0],
    offsets=[512, 4608, 4656, 4662, 4668],
    arena_offsets=[512, 4608, 8192, 8208, 8224],
    digests=[digest(name.encode()) for name in ("größe", "b", "c", "d", "scale")],
)
STORED_TABLE = dump_table(TABLE)


def entry_of(rank: int, stored_table: bytes) -> RankEntry:
    return RankEntry(
        table=f"relayout.rank-{rank}.json.zst",
        table_digest=digest(stored_table),
        num_tensors=5,
        nbytes=4162,
        files=(rank,),
        arena_nbytes=12288,
        reads=(Read(0, Transfer(512, 512, 4144)), Read(0, Transfer(4656, 8192, 6, 3, 6, 16))),
    )


def indexed(name: str, nbytes: int, data_start: int) -> IndexedFile:
    return IndexedFile(name, nbytes, data_start, digest(b"content"), digest(b"header"), digest(b"chunks"))


MANIFEST = Manifest(
    generator="relayout 9.9",
    conversion=CONVERSION,
    model_type="llama",
    plan="file:größe.toml",
    expert_parallel=True,
    alignment=512,
    dcp=False,
    record_digest=digest(b"record"),
    source_nbytes=8514,
    hub_index_digest=None,
    chunk_nbytes=2**20,
    files=tuple(indexed(f"model-rank-{rank}-part-0.safetensors", 4674, 512) for rank in range(2)),
    ranks=(
        entry_of(0, STORED_TABLE),
        entry_of(1, STORED_TABLE),
    ),
)


def signed(top: Tree) -> bytes:
    """A manifest as FORMAT.md says: `self_digest`, the last field, is that of all bytes before it."""
    top.pop("self_digest", None)
    before = json.dumps(top, ensure_ascii=False).encode().removesuffix(b"}") + b", "
    return before + f'"self_digest":"{digest(before)}"}}'.encode()


def manifest_tree() -> Tree:
    tree: Tree = json.loads(dump_manifest(MANIFEST))
    return tree


def table_tree() -> Tree:
    tree: Tree = json.loads(zstandard.ZstdDecompressor().decompressobj().decompress(STORED_TABLE))
    return tree


def parse_stored(stored: bytes, rank: int = 0) -> RankTable:
    """Parse a stored table under a manifest that names its digest."""
    entry = replace(MANIFEST.ranks[rank], table_digest=digest(stored))
    ranks = tuple(entry if i == rank else other for i, other in enumerate(MANIFEST.ranks))
    return parse_table(stored, replace(MANIFEST, ranks=ranks), rank, "table")


def stored(top: Any) -> bytes:
    return zstandard.ZstdCompressor().compress(json.dumps(top, ensure_ascii=False).encode())


def test_a_manifest_is_json_as_the_format_says() -> None:
    blob = dump_manifest(MANIFEST)
    top = json.loads(blob)
    before, key, rest = blob.partition(b'"self_digest"')
    assert (key, rest) == (b'"self_digest"', f': "{digest(before)}"\n}}\n'.encode())
    assert list(top)[-1] == "self_digest"
    assert top["files"] == [
        {
            "name": f"model-rank-{rank}-part-0.safetensors",
            "nbytes": 4674,
            "data_start": 512,
            "content": digest(b"content"),
            "header_digest": digest(b"header"),
            "chunks_digest": digest(b"chunks"),
        }
        for rank in range(2)
    ]
    assert top["ranks"][0] == {
        "table": "relayout.rank-0.json.zst",
        "table_digest": digest(STORED_TABLE),
        "num_tensors": 5,
        "nbytes": 4162,
        "files": [0],
        "arena_nbytes": 12288,
        "reads": [
            {"file": 0, "offset": 512, "nbytes": 4144, "arena_offset": 512},
            {"file": 0, "offset": 4656, "nbytes": 6, "arena_offset": 8192, "count": 3, "stride": 6, "arena_stride": 16},
        ],
    }
    assert {name: value for name, value in top.items() if name not in ("files", "ranks", "self_digest")} == {
        "relayout": 1,
        "requires": [],
        "generator": "relayout 9.9",
        "conversion": CONVERSION,
        "digest": "xxh3_128",
        "model_type": "llama",
        "hub_index_digest": None,
        "plan": "file:größe.toml",
        "expert_parallel": True,
        "num_ranks": 2,
        "alignment": 512,
        "dcp": False,
        "source": {"record_digest": digest(b"record"), "nbytes": 8514},
        "chunk_nbytes": 2**20,
        "whole": None,
    }
    assert "größe" in blob.decode()
    assert blob.endswith(b"}\n")


@pytest.mark.parametrize(
    "manifest",
    [
        MANIFEST,
        replace(MANIFEST, model_type=None, dcp=True),
        replace(MANIFEST, files=tuple(replace(file, sha256="5" * 64) for file in MANIFEST.files)),
    ],
    ids=["a model type", "none, and dcp", "SHA-256"],
)
def test_a_manifest_survives_a_round_trip(manifest: Manifest) -> None:
    assert parse_manifest(dump_manifest(manifest), WHERE) == manifest


@given(files=rank_files())
def test_the_reads_of_any_arena_survive_a_round_trip(files: Files) -> None:
    arena = plan_arena(files)
    entry = replace(
        MANIFEST.ranks[0],
        num_tensors=sum(len(sizes) for _, _, sizes in files),
        nbytes=sum(sum(sizes) for _, _, sizes in files),
        files=tuple(range(len(files))),
        arena_nbytes=arena.nbytes,
        reads=arena.reads,
    )
    parts = (
        indexed(f"part-{number}.safetensors", start + sum(sizes), start)
        for number, (start, _, sizes) in enumerate(files)
    )
    manifest = replace(MANIFEST, files=tuple(parts), ranks=(entry,))
    assert parse_manifest(dump_manifest(manifest), WHERE) == manifest


def test_a_table_is_json_as_the_format_says() -> None:
    assert table_tree() == {
        "relayout": 1,
        "kinds": {
            "dtype": ["BF16", "F32", "I16", "F16"],
            "shape": [[32, 64], [3, 4], [3], [3, 1]],
            "source_shape": [[64, 64], [3, 8], None, None],
            "slice": [{"0": [[0, 32]]}, {"1": [[0, 2], [4, 2]]}, {}, {}],
        },
        "name": ["größe", "b", "c", "d", "scale"],
        "kind": [0, 1, 2, 2, 3],
        "file": [0, 0, 0, 0, 0],
        "offset": [512, 4608, 4656, 4662, 4668],
        "arena_offset": [512, 4608, 8192, 8208, 8224],
        "digest": list(TABLE.digests),
    }


@pytest.mark.parametrize("rank", [0, 1])
def test_a_table_survives_a_round_trip(rank: int) -> None:
    found = parse_table(dump_table(replace(TABLE, rank=rank)), MANIFEST, rank, "table")
    assert [list(getattr(found, name)) for name in RankTable.__slots__ if name != "rank"] == [
        list(getattr(TABLE, name)) for name in RankTable.__slots__ if name != "rank"
    ]
    assert found.rank == rank


def test_what_is_compressed_is_one_zstd_frame_and_comes_back() -> None:
    text = b"0123456789" * 1000
    assert zstandard.ZstdDecompressor().decompressobj().decompress(compress(text)) == text
    assert decompress(zstandard.ZstdCompressor(level=1).compress(text), "x") == text


# Lies.

Lie = Callable[[Tree], object]


def rank_lie(**fields: Any) -> Lie:
    return lambda top: top["ranks"][0].update(fields)


def read_lie(number: int, **fields: int) -> Lie:
    return lambda top: top["ranks"][0]["reads"][number].update(fields)


def file_lie(**fields: Any) -> Lie:
    return lambda top: top["files"][0].update(fields)


def extra_read(**fields: int) -> Lie:
    """One more read, whose bytes are counted."""

    def lie(top: Tree) -> None:
        top["ranks"][0]["reads"].append(fields)
        top["ranks"][0]["nbytes"] += fields["nbytes"]

    return lie


def read_again(top: Tree) -> None:
    """Fill a larger arena with the same bytes: a small file could take any memory."""
    extra_read(file=0, offset=512, nbytes=4144, arena_offset=12288)(top)
    top["ranks"][0]["arena_nbytes"] = 12288 + 4144


MANIFEST_LIES: dict[str, tuple[Lie, str]] = {
    "a later version": (lambda top: top.update(relayout=2), "format version 2, this relayout reads 1"),
    "no version": (lambda top: top.pop("relayout"), "format version None"),
    "a version in words": (lambda top: top.update(relayout="1"), "format version '1'"),
    "no model type": (lambda top: top.pop("model_type"), "'model_type' is missing or not a string or null"),
    "a flag that is none": (lambda top: top.update(dcp=1), "'dcp' is missing or not true or false"),
    "no hub index": (lambda top: top.pop("hub_index_digest"), "'hub_index_digest' is missing or not a string or null"),
    "no requirements": (lambda top: top.pop("requires"), "'requires' is missing or not a list of strings"),
    "requirements that are no list": (lambda top: top.update(requires="x"), "'requires' is missing or not a list"),
    "requirements that are no names": (lambda top: top.update(requires=[1]), "'requires' is missing or not a list"),
    "requirements that are not known": (
        lambda top: top.update(requires=["zz", "encryption"]),
        "requires 'encryption', 'zz', which this relayout does not know: use a newer one",
    ),
    "another digest algorithm": (lambda top: top.update(digest="sha256"), "digest algorithm 'sha256'"),
    "fewer ranks than num_ranks": (lambda top: top["ranks"].pop(), "1 entries in 'ranks', num_ranks is 2"),
    "more ranks than num_ranks": (lambda top: top.update(num_ranks=1), "2 entries in 'ranks', num_ranks is 1"),
    "no rank at all": (lambda top: top.update(num_ranks=0, ranks=[]), "0 entries in 'ranks'"),
    "ranks that are no objects": (lambda top: top.update(ranks=[0, 1]), "'ranks' is missing or not a list of objects"),
    "no ranks": (lambda top: top.pop("ranks"), "'ranks' is missing"),
    "ranks in another order": (
        lambda top: top["ranks"].reverse(),
        "rank 0: table 'relayout.rank-1.json.zst', expected",
    ),
    "a table in another folder": (rank_lie(table="../relayout.rank-0.json.zst"), "rank 0: table '../relayout.rank-0"),
    "a conversion that is no digest": (
        lambda top: top.update(conversion="F" * 32),
        "'conversion' is 'FFF.*, no digest",
    ),
    "chunks of no power of two": (lambda top: top.update(chunk_nbytes=2**20 + 1), "chunk_nbytes 1048577, expected a"),
    "chunks that are too small": (lambda top: top.update(chunk_nbytes=2**15), "chunk_nbytes 32768, expected a power"),
    "a content that is no digest": (file_lie(content="0" * 33), "'content' is '0.*, no digest"),
    "a file without chunks": (lambda top: top["files"][0].pop("chunks_digest"), "'chunks_digest' is missing"),
    "a SHA-256 that is none": (file_lie(sha256="0" * 32), "'sha256' is '0.*, no digest"),
    "no conversion": (lambda top: top.pop("conversion"), "'conversion' is missing or not a string"),
    "a plan that is no name": (lambda top: top.update(plan=None), "'plan' is missing or not a string"),
    "a negative alignment": (lambda top: top.update(alignment=-1), "'alignment' is missing or not a size"),
    "no source": (lambda top: top.pop("source"), "'source' is missing or not an object"),
    "a source without digest": (lambda top: top["source"].pop("record_digest"), "'record_digest' is missing"),
    "a count of tensors that is none": (rank_lie(num_tensors=True), "'num_tensors' is missing or not a size"),
    "an arena of a float": (rank_lie(arena_nbytes=12288.0), "'arena_nbytes' is missing or not a size"),
    "an arena beyond 53 bits": (rank_lie(arena_nbytes=2**53), "'arena_nbytes' is missing or not a size"),
    "an arena that is too small": (rank_lie(arena_nbytes=8229), "reads end at byte 8230 of an arena of 8229"),
    "a file in another folder": (file_lie(name="../x.safetensors"), "'../x.safetensors' is not the name of"),
    "an absolute file": (file_lie(name="/x.safetensors"), "'/x.safetensors' is not the name of"),
    "a file in a folder below": (file_lie(name="a/x.safetensors"), "'a/x.safetensors' is not the name of"),
    "a file with a backslash": (file_lie(name="a\\x.safetensors"), "is not the name of"),
    "a file with a NUL": (file_lie(name="x\0.safetensors"), "is not the name of"),
    "a hidden file": (file_lie(name=".x.safetensors"), "'.x.safetensors' is not the name of"),
    "a file of another kind": (file_lie(name="x.bin"), "'x.bin' is not the name of"),
    "a file with a line break": (file_lie(name="x.safetensors\n"), "is not the name of"),
    "a file without name": (lambda top: top["files"][0].pop("name"), "'name' is missing"),
    "a file that is shorter than its reads": (
        file_lie(nbytes=4673),
        "read 1: bytes 4656 to 4674 of .*, whose data section is 512 to 4673",
    ),
    "a read of no file": (read_lie(0, file=1), "rank 0: read 0: file 1 of 1"),
    "a read of a negative file": (read_lie(0, file=-1), "'file' is missing or not a size"),
    "a read outside its file": (
        read_lie(0, offset=4000),
        "read 0: bytes 4000 to 8144 of model-rank-0.*, whose data section is 512 to 4674",
    ),
    "a read of the header": (read_lie(0, offset=511), "read 0: bytes 511 to 4655 of .*, whose data section is 512 to"),
    "strided runs outside their file": (read_lie(1, stride=7), "read 1: bytes 4656 to 4676 of .*, whose data section"),
    "a read outside the arena": (read_lie(1, arena_offset=12272), "reads end at byte 12310 of an arena of 12288"),
    "a read far outside the arena": (read_lie(1, arena_offset=2**53 - 1), "reads end at byte .* of an arena of"),
    "runs outside the arena": (read_lie(1, arena_stride=2**40), "reads end at byte .* of an arena of 12288"),
    "more runs than the file has": (read_lie(1, count=2**52), "read 1: bytes .* of model-rank-0"),
    "one run with strides": (read_lie(1, count=1), "a read of 1 runs, expected 2 or more"),
    "strides without runs": (lambda top: top["ranks"][0]["reads"][1].pop("count"), "'count' is missing"),
    "reads that fall in the arena": (
        lambda top: top["ranks"][0]["reads"].reverse(),
        "read 1: starts at byte 512 of the arena, the read before it ends at 8230",
    ),
    "an empty read": (read_lie(0, nbytes=0), "read 0: reads nothing"),
    "a read without runs": (read_lie(1, count=0), "a read of 0 runs, expected 2 or more"),
    "a read of a negative length": (read_lie(0, nbytes=-1), "'nbytes' is missing or not a size"),
    "runs that overlap in the arena": (read_lie(1, arena_stride=5), "read 1: runs of 6 bytes overlap"),
    "runs that overlap in the file": (read_lie(1, stride=0), "read 1: runs of 6 bytes overlap"),
    "runs without stride": (lambda top: top["ranks"][0]["reads"][1].pop("stride"), "'stride' is missing"),
    "reads that overlap": (
        read_lie(1, arena_offset=4655),
        "read 1: starts at byte 4655 of the arena, the read before it ends at 4656",
    ),
    "a read twice": (
        extra_read(file=0, offset=512, nbytes=4144, arena_offset=512),
        "read 2: starts at byte 512 of the arena, the read before it ends at 8230",
    ),
    "bytes read again and again": (
        read_again,
        "rank 0: reads of 8306 bytes of model-rank-0-part-0.safetensors, which has 4162",
    ),
    "a read within another": (
        extra_read(file=0, offset=512, nbytes=1, arena_offset=600),
        "read 2: starts at byte 600 of the arena, the read before it ends at 8230",
    ),
    "a read across the runs of another": (
        extra_read(file=0, offset=512, nbytes=16, arena_offset=8200),
        "read 2: starts at byte 8200 of the arena, the read before it ends at 8230",
    ),
    "a read too few": (lambda top: top["ranks"][0]["reads"].pop(), r"rank 0: .*\b4162\b"),
    "a read that ends too early": (read_lie(0, nbytes=4128), r"rank 0: .*\b4162\b"),
    "a run too few": (read_lie(1, count=2), r"rank 0: .*\b4162\b"),
}


@pytest.mark.parametrize(("lie", "message"), MANIFEST_LIES.values(), ids=MANIFEST_LIES)
def test_a_lie_in_a_manifest_is_refused(lie: Lie, message: str) -> None:
    top = manifest_tree()
    parse_manifest(signed(top), WHERE)
    lie(top)
    with pytest.raises(FormatError, match=f"^relayout.json: .*{message}"):
        parse_manifest(signed(top), WHERE)


def test_an_edited_manifest_is_refused() -> None:
    blob = dump_manifest(MANIFEST)
    edited = blob.replace(b'"alignment": 512', b'"alignment": 513')
    assert edited != blob
    with pytest.raises(FormatError, match=r"^relayout.json: its self_digest is .* not that of its bytes"):
        parse_manifest(edited, WHERE)
    top = manifest_tree()
    del top["self_digest"]
    with pytest.raises(FormatError, match=r"^relayout.json: its self_digest is None"):
        parse_manifest(json.dumps(top).encode(), WHERE)


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (b"", "not valid JSON"),
        (b"[]", "a JSON list, expected an object"),
        (b"\xff\xfe{}", "not UTF-8 at byte 0"),
        (dump_manifest(MANIFEST)[:-3], "not valid JSON"),
        (b'{"relayout":1,"relayout":1}', "name 'relayout' occurs twice"),
        (b'{"relayout":NaN}', "NaN is no JSON number"),
    ],
)
def test_a_manifest_that_is_no_json_object_is_refused(blob: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=f"^relayout.json: {message}"):
        parse_manifest(blob, WHERE)


def column_lie(name: str, row: int, value: Any) -> Lie:
    return lambda top: top[name].__setitem__(row, value)


def kind_lie(name: str, kind: int, value: Any) -> Lie:
    return lambda top: top["kinds"][name].__setitem__(kind, value)


TABLE_LIES: dict[str, tuple[Lie, str]] = {
    "a name too few": (lambda top: top["name"].pop(), "'name' is missing or not a list of 5 items"),
    "an offset too many": (lambda top: top["offset"].append(512), "'offset' is missing or not a list of 5 items"),
    "a missing column": (lambda top: top.pop("kind"), "'kind' is missing or not a list of 5 items"),
    "missing kinds": (lambda top: top.pop("kinds"), "'kinds' is missing or not an object"),
    "kinds without slices": (lambda top: top["kinds"].pop("slice"), "'slice' is missing or not a list of 4 items"),
    "kinds without dtypes": (lambda top: top["kinds"].pop("dtype"), "'dtype' is missing or not a list"),
    "a shape for no kind": (
        lambda top: top["kinds"]["shape"].append([3]),
        "'shape' is missing or not a list of 4 items",
    ),
    "a kind that is not there": (column_lie("kind", 1, 4), "kind 4 of 4"),
    "a kind that is none": (column_lie("kind", 1, None), "'kind' is missing or not a list of int"),
    "another kind": (column_lie("kind", 1, 0), "tensor 'b': ends outside its file, at byte 8704"),
    "a tensor too few": (
        lambda top: [column.pop() for column in top.values() if isinstance(column, list)],
        "is missing or not a list of 5 items",
    ),
    "a name that is none": (column_lie("name", 0, 7), "'name' is missing or not a list of str"),
    "a name twice": (column_lie("name", 3, "c"), "a tensor name occurs twice"),
    "an unknown dtype": (kind_lie("dtype", 0, "F7"), r"'F7' \[32, 64\] is no stored tensor"),
    "half a byte": (lambda top: top["kinds"].update(dtype=["F4"] * 4), r"tensor 'c': 'F4' \[3\] is no stored tensor"),
    "a larger shape": (kind_lie("shape", 2, [4]), "tensor 'c': no read in the manifest covers it"),
    "a smaller shape": (kind_lie("shape", 2, [2]), "tensors of 4158 bytes, relayout.json says 4162"),
    "a shape that is no list": (kind_lie("shape", 2, 3), "'shape' is missing or not a list of list"),
    "a negative shape": (kind_lie("shape", 2, [-3]), r"\[-3\] is no shape"),
    "a shape of a float": (kind_lie("shape", 3, [3.0, 1]), r"\[3.0, 1\] is no shape"),
    "a shape of a float beside an equal one": (kind_lie("shape", 2, [3.0]), r"\[3.0\] is no shape"),
    "a shape of true": (kind_lie("shape", 3, [3, True]), r"\[3, True\] is no shape"),
    "a nested shape": (kind_lie("shape", 2, [[3]]), r"\[\[3\]\] is no shape"),
    "a shape of objects": (kind_lie("shape", 2, [{}]), r"\[{}\] is no shape"),
    "a file that is not there": (column_lie("file", 4, 1), "tensor 'scale': file 1 of 1"),
    "a file of true": (column_lie("file", 0, True), "'file' is missing or not a list of int"),
    "a negative offset": (column_lie("offset", 0, -1), "'offset' is missing or not a list of sizes"),
    "an offset beyond 53 bits": (column_lie("offset", 0, 2**53), "'offset' is missing or not a list of sizes"),
    "a tensor outside its file": (column_lie("offset", 4, 4669), "tensor 'scale': ends outside its file, at byte 4675"),
    "another tensor's bytes": (
        lambda top: top["offset"].__setitem__(slice(2, 4), [4662, 4656]),
        "tensor 'c': is not in file order",
    ),
    "bytes of the file's header": (column_lie("offset", 0, 511), "tensor 'größe': begins in the header, at byte 511"),
    "a place that nothing is read to": (
        column_lie("arena_offset", 4, 4656),
        "tensor 'scale': no read in the manifest covers it",
    ),
    "a place before everything that is read": (
        column_lie("arena_offset", 4, 0),
        "tensor 'scale': no read in the manifest",
    ),
    "a place behind the last run": (
        column_lie("arena_offset", 4, 8240),
        "tensor 'scale': no read in the manifest covers it",
    ),
    "a tensor outside the arena": (
        column_lie("arena_offset", 4, 12288),
        "tensor 'scale': 6 bytes at 12288 of an arena of 12288",
    ),
    "a tensor across the arena's end": (
        column_lie("arena_offset", 0, 8208),
        "tensor 'größe': 4096 bytes at 8208 of an arena of 12288",
    ),
    "a tensor at an odd address": (column_lie("arena_offset", 2, 8200), "tensor 'c': 6 bytes at 8200 of an arena"),
    "a digest that is none": (column_lie("digest", 0, None), "'digest' is missing or not a list of str"),
    "a slice that is none": (kind_lie("slice", 0, [0]), "'slice' is missing or not a list of dict"),
    "a slice without ranges": (kind_lie("slice", 0, {"0": 5}), r"\{'0': 5\} is no slice"),
    "a slice of three numbers": (kind_lie("slice", 0, {"0": [[0, 32, 1]]}), "is no range"),
    "a slice from a negative start": (kind_lie("slice", 0, {"0": [[-1, 32]]}), "is no range"),
    "a slice of a float": (kind_lie("slice", 0, {"0": [[0, 32.0]]}), "is no range"),
    "a slice along true": (kind_lie("slice", 0, {"true": [[0, 32]]}), "are no dims"),
    "a slice of too many ranges": (
        kind_lie("slice", 0, {"0": [[0, 1]] * (2**16 + 1)}),
        "a slice of 65537 ranges along one dim, limit 65536",
    ),
    "a source shape that is none": (kind_lie("source_shape", 0, [-64, 64]), r"\[-64, 64\] is no shape"),
    "a nested source shape": (kind_lie("source_shape", 0, [[64], 64]), r"\[\[64\], 64\] is no shape"),
}


@pytest.mark.parametrize(("lie", "message"), TABLE_LIES.values(), ids=TABLE_LIES)
def test_a_lie_in_a_table_is_refused(lie: Lie, message: str) -> None:
    top = table_tree()
    parse_stored(stored(top))
    lie(top)
    with pytest.raises(FormatError, match=f"^table: .*{message}"):
        parse_stored(stored(top))


def parse_small_tensors(reads: tuple[Read, ...], nbytes: int, **columns: list[int]) -> RankTable:
    """Parse a table of just the three tensors of 6 bytes, with other reads, and the columns replaced."""
    top = {name: value[2:] if isinstance(value, list) else value for name, value in table_tree().items()}
    blob = stored({**top, **columns})
    entry = replace(MANIFEST.ranks[0], table_digest=digest(blob), num_tensors=3, nbytes=nbytes, reads=reads)
    return parse_table(blob, replace(MANIFEST, ranks=(entry, MANIFEST.ranks[1])), 0, "table")


STRIDED = Read(0, Transfer(4656, 8192, 6, 3, 6, 16))


def test_tensors_are_not_believed_to_come_from_nowhere() -> None:
    assert parse_small_tensors((STRIDED,), 18).names == ["c", "d", "scale"]
    with pytest.raises(FormatError, match=r"^table: tensor 'c': no read in the manifest covers it"):
        parse_small_tensors((), 18)


def test_a_tensor_where_a_run_before_the_first_would_be_is_refused() -> None:
    with pytest.raises(FormatError, match=r"^table: tensor 'c': no read in the manifest covers it"):
        parse_small_tensors((STRIDED,), 18, offset=[4650, 4656, 4662], arena_offset=[8176, 8192, 8208])


def test_a_tensor_that_no_single_read_brings_is_refused() -> None:
    halves = (Read(0, Transfer(4656, 8192, 3)), Read(0, Transfer(4659, 8195, 3)))
    with pytest.raises(FormatError, match=r"^table: tensor 'c': no read in the manifest covers it"):
        parse_small_tensors((*halves, Read(0, Transfer(4662, 8208, 6, 2, 6, 16))), 18)


def test_a_tensor_that_begins_in_the_last_bytes_of_another_is_refused() -> None:
    """By as little as arena offsets can differ, and brought so by its read."""
    top = table_tree()
    top["offset"][1] -= 16
    top["arena_offset"][1] -= 16
    with pytest.raises(FormatError, match=r"^table: tensors 'größe' and 'b' overlap in the arena"):
        parse_stored(stored(top))


def test_a_tensor_that_a_read_of_another_file_brings_is_refused() -> None:
    """The other file exists, and is long enough."""
    entry = MANIFEST.ranks[0]
    other = indexed("model-rank-0-part-1.safetensors", 4674, 512)

    def parse(number: int) -> RankTable:
        top = table_tree()
        top["file"][4] = number
        blob = stored(top)
        two = replace(entry, files=(0, 2), table_digest=digest(blob))
        manifest = replace(MANIFEST, files=(*MANIFEST.files, other), ranks=(two, MANIFEST.ranks[1]))
        return parse_table(blob, manifest, 0, "table")

    assert parse(0).files == TABLE.files
    with pytest.raises(FormatError, match=r"^table: tensor 'scale': no read in the manifest covers it .arena .* 8224"):
        parse(1)


def test_a_table_whose_digest_the_manifest_does_not_name_is_refused() -> None:
    for blob in (stored(table_tree()), STORED_TABLE + b"\0", STORED_TABLE[:-1], b""):
        with pytest.raises(FormatError, match=r"^table: digest differs from the one in relayout.json"):
            parse_table(blob, MANIFEST, 0, "table")


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (b"", "the zstd frame does not end"),
        (b"no zstd frame", "not a zstd frame"),
        (b"\x28\xb5\x2f\xfd" + b"\xff" * 40, "not a zstd frame"),
        (STORED_TABLE[:-20], "the zstd frame does not end"),
        (STORED_TABLE + b"x", "1 bytes behind the zstd frame"),
        (STORED_TABLE + bytes(5000), "5000 bytes behind the zstd frame"),
        (STORED_TABLE[:40] + b"\xff" * 8 + STORED_TABLE[48:], "not"),
        (stored([]), "a JSON list, expected an object"),
        (zstandard.ZstdCompressor().compress(b"\xff"), "not UTF-8 at byte 0"),
        (zstandard.ZstdCompressor().compress(b'{"rank":0,"rank":0}'), "name 'rank' occurs twice"),
    ],
)
def test_a_stored_table_that_is_no_compressed_json_is_refused(blob: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=f"^table: {message}"):
        parse_stored(blob)


def test_what_expands_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relayout.format.manifest.MAX_TABLE_NBYTES", 1000)
    assert decompress(zstandard.ZstdCompressor().compress(b"7" * 1000), "x") == b"7" * 1000
    with pytest.raises(FormatError, match=r"^x: expands to more than 1000 bytes"):
        decompress(zstandard.ZstdCompressor().compress(b"7" * 1001), "x")


ODD_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 70),
    st.sampled_from([4096, 8192, 2**62, 2**63, 2**64, 0.5, 1e300, "", "x", "F32"]),
    st.builds(list),
    st.builds(dict),
    st.lists(st.integers(0, 5), max_size=3),
    st.lists(st.lists(st.integers(0, 5), max_size=2), max_size=2),
)


def damage(draw: st.DrawFn, tree: Any) -> None:
    """Replace, drop or repeat one value somewhere in a JSON tree."""
    node = tree
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = draw(st.sampled_from(keys))
        if not isinstance(node[key], dict | list) or not node[key] or draw(st.integers(0, 4)) == 0:
            break
        node = node[key]
    match draw(st.sampled_from(["replace", "drop", "repeat"])):
        case "replace":
            node[key] = draw(ODD_VALUES)
        case "drop":
            del node[key]
        case "repeat" if isinstance(node, list):
            node.append(node[key])


@st.composite
def damaged(draw: st.DrawFn, tree: Callable[[], Tree]) -> Tree:
    top = tree()
    for _ in range(draw(st.integers(1, 3))):
        damage(draw, top)
    return top


@given(top=damaged(manifest_tree))
def test_any_manifest_parses_or_raises_format_error_and_never_leaves_file_or_arena(top: Tree) -> None:
    try:
        manifest = parse_manifest(signed(top), WHERE)
    except FormatError:
        return
    for rank, entry in enumerate(manifest.ranks):
        files = manifest.holder_files(rank)
        for read in entry.reads:
            assert 0 <= read.transfer.source < read.transfer.source_end <= files[read.file].nbytes
            assert 0 <= read.transfer.target < read.transfer.target_end <= entry.arena_nbytes


@given(top=damaged(table_tree))
def test_any_table_parses_or_raises_format_error_and_never_leaves_file_or_arena(top: Tree) -> None:
    try:
        table = parse_stored(stored(top))
    except FormatError:
        return
    sizes = {"BF16": 2, "F32": 4, "I16": 2, "F16": 2}
    entry = MANIFEST.ranks[0]
    for dtype, shape, file, offset, place in zip(
        table.dtypes, table.shapes, table.files, table.offsets, table.arena_offsets, strict=True
    ):
        assert all(type(dim) is int for dim in shape)
        nbytes = int(np.prod(shape, dtype=object)) * sizes[dtype]
        assert 0 <= offset <= offset + nbytes <= MANIFEST.holder_files(0)[file].nbytes
        assert 0 <= place <= place + nbytes <= entry.arena_nbytes
