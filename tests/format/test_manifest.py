"""relayout.format.index and .manifest: the arena simulated on byte arrays, the sidecar's JSON, and lies in it."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
import zstandard
from blake3 import blake3
from hypothesis import example, given
from hypothesis import strategies as st

from relayout.core.extents import Transfer
from relayout.core.slices import Slice
from relayout.errors import FormatError
from relayout.format.index import ArenaLayout, IndexedFile, Manifest, RankEntry, RankTable, Read, TensorKind, plan_arena
from relayout.format.manifest import decompress, dump_manifest, parse_manifest
from relayout.format.rank_table import dump_table, parse_table

Bytes = npt.NDArray[np.uint8]
Files = list[tuple[int, list[int], list[int]]]
Tree = dict[str, Any]
BLOCK = 4096

WHERE = "relayout.json"


def digest(blob: bytes) -> str:
    return xxhash.xxh3_128(blob).hexdigest()


def proof(blob: bytes) -> str:
    return blake3(blob).hexdigest()


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


def simulate(arena: ArenaLayout, stored: list[Bytes]) -> tuple[Bytes, npt.NDArray[np.int64]]:
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
    assert plan_arena(files) == ArenaLayout(
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
        TensorKind("BF16", (32, 64), (64, 64), Slice.along(0, ((0, 32),))),
        TensorKind("F32", (3, 4), (3, 8), Slice.along(1, ((0, 2), (4, 2)))),
        TensorKind("I16", (3,), (3,), Slice()),
        TensorKind("F16", (3, 1), (3, 1), Slice()),
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
        table_digest=proof(stored_table),
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
    source_nbytes=8514,
    hub_index_digest=None,
    chunk_nbytes=2**20,
    files=tuple(indexed(f"model-rank-{rank}-part-0.safetensors", 4674, 512) for rank in range(2)),
    ranks=(
        entry_of(0, STORED_TABLE),
        entry_of(1, STORED_TABLE),
    ),
)


def table_tree() -> Tree:
    tree: Tree = json.loads(zstandard.ZstdDecompressor().decompressobj().decompress(STORED_TABLE))
    return tree


def parse_stored(stored: bytes, rank: int = 0) -> RankTable:
    """Parse a stored table under a manifest that names its digest."""
    entry = replace(MANIFEST.ranks[rank], table_digest=proof(stored))
    ranks = tuple(entry if i == rank else other for i, other in enumerate(MANIFEST.ranks))
    return parse_table(stored, replace(MANIFEST, ranks=ranks), rank, "table")


def stored(top: Any) -> bytes:
    return zstandard.ZstdCompressor().compress(json.dumps(top, ensure_ascii=False).encode())


@pytest.mark.parametrize(
    "manifest",
    [
        MANIFEST,
        replace(MANIFEST, model_type=None, dcp=True),
        MANIFEST.only([1]),
        replace(MANIFEST.only([0]), conversion=None),
    ],
    ids=["a model type", "none, and dcp", "one rank", "one rank, and no conversion"],
)
def test_a_manifest_survives_a_round_trip(manifest: Manifest) -> None:
    assert parse_manifest(dump_manifest(manifest), WHERE) == manifest


def test_a_manifest_of_some_ranks_has_null_for_the_others() -> None:
    """Rank 1 has two files, one of which rank 2 has, too."""
    first, second = MANIFEST.files
    third = replace(first, name="model-shared.safetensors")
    ranks = [(0,), (2, 1), (2,)]
    entries = tuple(replace(entry_of(rank, STORED_TABLE), files=files) for rank, files in enumerate(ranks))
    manifest = replace(MANIFEST, files=(first, second, third), ranks=entries)
    names = {
        (0, 1, 2): [["model-rank-0-part-0"], ["model-shared", "model-rank-1-part-0"], ["model-shared"]],
        (1, 2): [None, ["model-shared", "model-rank-1-part-0"], ["model-shared"]],
        (2,): [None, None, ["model-shared"]],
        (0,): [["model-rank-0-part-0"], None, None],
    }
    for some, expected in names.items():
        top = json.loads(dump_manifest(manifest.only(some)))
        files = [file["name"].removesuffix(".safetensors") for file in top["files"]]
        found = [None if entry is None else [files[index] for index in entry["files"]] for entry in top["ranks"]]
        assert found == expected
        assert set(files) == {name for entry in found if entry is not None for name in entry}
        assert (top["num_ranks"], top["conversion"]) == (3, MANIFEST.conversion)
        assert manifest.only(some).present == some


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


@pytest.mark.parametrize("rank", [0, 1])
def test_a_table_survives_a_round_trip(rank: int) -> None:
    found = parse_table(dump_table(replace(TABLE, rank=rank)), MANIFEST, rank, "table")
    assert [list(getattr(found, name)) for name in RankTable.__slots__ if name != "rank"] == [
        list(getattr(TABLE, name)) for name in RankTable.__slots__ if name != "rank"
    ]
    assert found.rank == rank


# Lies. Those that one edit of a file can tell are in vectors/.


def parse_small_tensors(reads: tuple[Read, ...], nbytes: int, **columns: list[int]) -> RankTable:
    """Parse a table of just the three tensors of 6 bytes, with other reads, and the columns replaced."""
    top = {name: value[2:] if isinstance(value, list) else value for name, value in table_tree().items()}
    blob = stored({**top, **columns})
    entry = replace(MANIFEST.ranks[0], table_digest=proof(blob), num_tensors=3, nbytes=nbytes, reads=reads)
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
        two = replace(entry, files=(0, 2), table_digest=proof(blob))
        manifest = replace(MANIFEST, files=(*MANIFEST.files, other), ranks=(two, MANIFEST.ranks[1]))
        return parse_table(blob, manifest, 0, "table")

    assert parse(0).files == TABLE.files
    with pytest.raises(FormatError, match=r"^table: tensor 'scale': no read in the manifest covers it .arena .* 8224"):
        parse(1)


def test_what_expands_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relayout.format.manifest.MAX_TABLE_NBYTES", 1000)
    assert decompress(zstandard.ZstdCompressor().compress(b"7" * 1000), "x") == b"7" * 1000
    with pytest.raises(FormatError, match=r"^x: expands to more than 1000 bytes"):
        decompress(zstandard.ZstdCompressor().compress(b"7" * 1001), "x")
