"""The sidecar index of a converted checkpoint: the manifest and the rank tables. Pure; FORMAT.md is normative.

The manifest is small and says at once which bytes a rank needs and where they go in memory: a rank is a list of reads
that fill an arena. The rank table, which can be large, says which tensor lies where in the arena.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash
import zstandard

from relayout.dtypes import BITS, num_bytes
from relayout.errors import FormatError
from relayout.extents import BLOCK, Transfer, align_up, natural_alignment
from relayout.header import strict_json
from relayout.slicing import Slice

MANIFEST_NAME = "relayout.json"
SOURCE_RECORD_NAME = "relayout.source.json.zst"
FORMAT_VERSION = 1
DIGEST = "xxh3_128"
"""The algorithm of every digest: detects damage and stale copies, not forgery."""

ARENA_ALIGNMENT = 16
"""Bytes. Every tensor starts at a multiple of this in the arena."""

MAX_MANIFEST_NBYTES = 64 * 2**20
MAX_TABLE_NBYTES = 2**30
"""Limit of a table's JSON, uncompressed."""

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\.safetensors\Z")


@dataclass(frozen=True, slots=True)
class Read:
    """Bytes of one rank file and where in the arena they go."""

    file: int
    """Position in the rank's list of files."""
    transfer: Transfer
    """From the file (absolute offsets) to the arena."""


@dataclass(frozen=True, slots=True)
class IndexedFile:
    """A file that holds bytes of a rank."""

    name: str
    """File name in the checkpoint folder."""
    nbytes: int
    """Length of the whole file."""
    data_start: int
    """Absolute offset of its data section."""


@dataclass(frozen=True, slots=True)
class RankEntry:
    """What the manifest says of one rank."""

    table: str
    """File name of the rank table."""
    table_digest: str
    """Digest of the table's JSON, uncompressed, in hex."""
    num_tensors: int
    nbytes: int
    """Bytes of all the rank's tensors."""
    files: tuple[IndexedFile, ...]
    arena_nbytes: int
    reads: tuple[Read, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """relayout.json."""

    generator: str
    """Program and version that wrote it."""
    conversion: str
    """Digest of the source record: names this conversion. Each rank file's header repeats it."""
    model_type: str | None
    plan: str
    alignment: int
    dcp: bool
    """Whether PyTorch DCP can read the rank files as one model."""
    source_nbytes: int
    """Bytes of all source tensors."""
    ranks: tuple[RankEntry, ...]

    @property
    def num_ranks(self) -> int:
        """The tensor-parallel degree."""
        return len(self.ranks)


@dataclass(frozen=True, slots=True)
class RankTable:
    """The tensors of one rank, in columns of equal length, in file order."""

    rank: int
    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    """Of the slices, in elements."""
    files: Sequence[int]
    """Position in the rank's list of files."""
    offsets: Sequence[int]
    """Absolute file offset."""
    arena_offsets: Sequence[int]
    """Byte offset in the arena."""
    digests: Sequence[str]
    """Of the stored bytes."""
    source_shapes: Sequence[tuple[int, ...]]
    """Of the whole tensors."""
    slices: Sequence[Slice]
    """Which part of the whole tensor each is."""


@dataclass(frozen=True, slots=True)
class Arena:
    """Where a rank's bytes lie in memory."""

    nbytes: int
    reads: tuple[Read, ...]
    offsets: tuple[tuple[int, ...], ...]
    """For each file: the arena offset of each of its slices, in file order."""


def plan_arena(files: Sequence[tuple[int, Sequence[int], Sequence[int]]]) -> Arena:
    """Lay out the arena for files given as (data start, offsets, sizes) of their slices in file order.

    The bulk of a file is one read, congruent with its file offset modulo a block, so that it can go directly to its
    place, with whole blocks of the arena to itself. Slices whose size is not a multiple of 16 bytes, which would lie
    at odd addresses, are spread out to multiples of 16, one strided read for each run of equal sizes.
    """
    reads: list[Read] = []
    columns = []
    end = 0
    for number, (data_start, offsets, sizes) in enumerate(files):
        column: list[int] = []
        bulk = align_up(end, BLOCK) + data_start % BLOCK
        for offset, nbytes in zip(offsets, sizes, strict=True):
            if natural_alignment(nbytes, ARENA_ALIGNMENT) < ARENA_ALIGNMENT:
                break
            column.append(bulk + offset - data_start)
            end = column[-1] + nbytes
        if column and end > bulk:
            reads.append(Read(number, Transfer(data_start, bulk, end - bulk)))
        odd = list(zip(offsets, sizes, strict=True))[len(column) :]
        end = align_up(end, BLOCK)
        while odd:
            offset, nbytes = odd[0]
            count = next((i for i, (_, other) in enumerate(odd) if other != nbytes), len(odd))
            pitch = align_up(nbytes, ARENA_ALIGNMENT)
            strides = (nbytes, pitch) if count > 1 else (0, 0)
            reads.append(Read(number, Transfer(offset, end, nbytes, count, *strides)))
            column.extend(end + i * pitch for i in range(count))
            end += count * pitch
            odd = odd[count:]
        columns.append(tuple(column))
    return Arena(align_up(end, BLOCK), tuple(reads), tuple(columns))


def table_name(rank: int) -> str:
    """File name of a rank's table."""
    return f"relayout.rank-{rank}.json.zst"


def digest_hex(blob: bytes) -> str:
    """Digest of some bytes."""
    return xxhash.xxh3_128_hexdigest(blob)


def compress(text: bytes) -> bytes:
    """What is stored of a table or record."""
    return zstandard.ZstdCompressor(level=10).compress(text)


def decompress(blob: bytes, where: str) -> bytes:
    """The inverse of `compress`, bounded.

    Raises:
        FormatError: not a zstd frame, or larger than a table may be.
    """
    try:
        with zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(blob) as reader:
            text = reader.read(MAX_TABLE_NBYTES + 1)
    except zstandard.ZstdError as error:
        raise FormatError(f"{where}: not a zstd frame: {error}") from None
    if len(text) > MAX_TABLE_NBYTES:
        raise FormatError(f"{where}: expands to more than {MAX_TABLE_NBYTES} bytes")
    return text


def dump_manifest(manifest: Manifest) -> bytes:
    """Serialise relayout.json: indented, for people."""
    top = {
        "relayout": FORMAT_VERSION,
        "generator": manifest.generator,
        "conversion": manifest.conversion,
        "digest": DIGEST,
        "model_type": manifest.model_type,
        "plan": manifest.plan,
        "num_ranks": manifest.num_ranks,
        "alignment": manifest.alignment,
        "dcp": manifest.dcp,
        "source": {"record": SOURCE_RECORD_NAME, "nbytes": manifest.source_nbytes},
        "ranks": [
            {
                "table": entry.table,
                "table_digest": entry.table_digest,
                "num_tensors": entry.num_tensors,
                "nbytes": entry.nbytes,
                "files": [
                    {"name": file.name, "nbytes": file.nbytes, "data_start": file.data_start} for file in entry.files
                ],
                "arena_nbytes": entry.arena_nbytes,
                "reads": [_dump_read(read) for read in entry.reads],
            }
            for entry in manifest.ranks
        ],
    }
    return (json.dumps(top, indent=2, ensure_ascii=False) + "\n").encode()


def parse_manifest(blob: bytes, where: str) -> Manifest:
    """Parse relayout.json, and prove that its reads stay inside files and arena and do not overlap there.

    Raises:
        FormatError: it is not what FORMAT.md demands.
    """
    top = parse_object(blob, where)
    version = top.get("relayout")
    if version != FORMAT_VERSION:
        raise FormatError(f"{where}: format version {version!r}, this relayout reads {FORMAT_VERSION}")
    if top.get("digest") != DIGEST:
        raise FormatError(f"{where}: digest algorithm {top.get('digest')!r}, expected {DIGEST!r}")
    fields = Fields(top, where)
    ranks = fields.objects("ranks")
    if len(ranks) != fields.size("num_ranks") or not ranks:
        raise FormatError(f"{where}: {len(ranks)} entries in 'ranks', num_ranks is {top['num_ranks']}")
    model_type = top.get("model_type")
    return Manifest(
        generator=fields.text("generator"),
        conversion=fields.text("conversion"),
        model_type=model_type if isinstance(model_type, str) else None,
        plan=fields.text("plan"),
        alignment=fields.size("alignment"),
        dcp=top.get("dcp") is True,
        source_nbytes=Fields(fields.object("source"), where).size("nbytes"),
        ranks=tuple(_parse_rank(entry, rank, where) for rank, entry in enumerate(ranks)),
    )


def dump_table(table: RankTable, conversion: str) -> bytes:
    """Serialise a rank table, uncompressed."""
    top = {
        "relayout": FORMAT_VERSION,
        "conversion": conversion,
        "rank": table.rank,
        "name": table.names,
        "dtype": table.dtypes,
        "shape": table.shapes,
        "file": table.files,
        "offset": table.offsets,
        "arena_offset": table.arena_offsets,
        "digest": table.digests,
        "source_shape": [
            None if part.is_whole else shape for shape, part in zip(table.source_shapes, table.slices, strict=True)
        ],
        "slice": [None if part.is_whole else [part.axis, part.ranges] for part in table.slices],
    }
    return json.dumps(top, ensure_ascii=False, separators=(",", ":")).encode()


def parse_table(text: bytes, manifest: Manifest, rank: int, where: str) -> RankTable:
    """Parse a rank table, given uncompressed, and prove that its tensors lie inside files and arena.

    Raises:
        FormatError: it is damaged, of another rank or conversion, or not what FORMAT.md demands.
    """
    entry = manifest.ranks[rank]
    if digest_hex(text) != entry.table_digest:
        raise FormatError(f"{where}: digest differs from the one in {MANIFEST_NAME}: damaged, or of another conversion")
    top = parse_object(text, where)
    if (top.get("conversion"), top.get("rank")) != (manifest.conversion, rank):
        raise FormatError(f"{where}: is of rank {top.get('rank')!r} of conversion {top.get('conversion')!r}")
    fields = Fields(top, where)
    count = entry.num_tensors
    table = RankTable(
        rank=rank,
        names=fields.column("name", str, count),
        dtypes=fields.column("dtype", str, count),
        shapes=_shapes(fields.column("shape", list, count), where),
        files=fields.column("file", int, count),
        offsets=fields.column("offset", int, count),
        arena_offsets=fields.column("arena_offset", int, count),
        digests=fields.column("digest", str, count),
        source_shapes=(),
        slices=(),
    )
    slices = tuple(_parse_slice(value, where) for value in fields.column("slice", (list, type(None)), count))
    whole = fields.column("source_shape", (list, type(None)), count)
    source_shapes = [shape if value is None else value for shape, value in zip(table.shapes, whole, strict=True)]
    _check_table(table, entry, where)
    return RankTable(
        **{name: getattr(table, name) for name in RankTable.__slots__ if name not in ("source_shapes", "slices")},
        source_shapes=_shapes(source_shapes, where),
        slices=slices,
    )


def parse_object(blob: bytes, where: str) -> dict[str, Any]:
    """Parse one JSON object in UTF-8.

    Raises:
        FormatError: it is none.
    """
    try:
        text = blob.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{where}: not UTF-8 at byte {error.start}") from None
    top = strict_json(text, where)
    if not isinstance(top, dict):
        raise FormatError(f"{where}: a JSON {type(top).__name__}, expected an object")
    return top


@dataclass(frozen=True, slots=True)
class Fields:
    """Typed access to a parsed JSON object; every method raises FormatError where the field is not as asked."""

    top: Mapping[str, Any]
    where: str

    def text(self, name: str) -> str:
        """A string."""
        value = self.top.get(name)
        return value if isinstance(value, str) else self._refuse(name, "a string")

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number, 0 or more, below 2**63."""
        value = self.top.get(name, default)
        return value if type(value) is int and 0 <= value < 2**63 else self._refuse(name, "a size")

    def object(self, name: str) -> Mapping[str, Any]:
        """An object."""
        value = self.top.get(name)
        return value if isinstance(value, dict) else self._refuse(name, "an object")

    def objects(self, name: str) -> list[Mapping[str, Any]]:
        """A list of objects."""
        value = self.top.get(name)
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            self._refuse(name, "a list of objects")
        return value  # type: ignore[no-any-return]

    def column(self, name: str, kind: type | tuple[type, ...], count: int) -> list[Any]:
        """A list of `count` items of one kind; whole numbers are sizes."""
        value = self.top.get(name)
        if not isinstance(value, list) or len(value) != count:
            return self._refuse(name, f"a list of {count} items")
        kinds = set(map(type, value))
        if not kinds <= set(kind if isinstance(kind, tuple) else (kind,)):
            return self._refuse(name, f"a list of {kind}")
        if kind is int and value and not (min(value) >= 0 and max(value) < 2**63):
            return self._refuse(name, "a list of sizes")
        return value

    def _refuse(self, name: str, expected: str) -> Any:
        raise FormatError(f"{self.where}: {name!r} is missing or not {expected}")


def _dump_read(read: Read) -> dict[str, int]:
    transfer = read.transfer
    row = {
        "file": read.file,
        "offset": transfer.source,
        "nbytes": transfer.nbytes,
        "arena_offset": transfer.target,
    }
    if transfer.count > 1:
        row |= {
            "count": transfer.count,
            "stride": transfer.source_stride,
            "arena_stride": transfer.target_stride,
        }
    return row


def _parse_read(row: Mapping[str, Any], where: str) -> Read:
    fields = Fields(row, where)
    count = fields.size("count", 1)
    return Read(
        fields.size("file"),
        Transfer(
            source=fields.size("offset"),
            target=fields.size("arena_offset"),
            nbytes=fields.size("nbytes"),
            count=count,
            source_stride=fields.size("stride") if count > 1 else 0,
            target_stride=fields.size("arena_stride") if count > 1 else 0,
        ),
    )


def _parse_rank(entry: Mapping[str, Any], rank: int, where: str) -> RankEntry:
    where = f"{where}: rank {rank}"
    fields = Fields(entry, where)
    if fields.text("table") != table_name(rank):
        raise FormatError(f"{where}: table {fields.text('table')!r}, expected {table_name(rank)!r}")
    files = []
    for row in fields.objects("files"):
        file = Fields(row, where)
        if not _FILE_NAME.match(file.text("name")):
            raise FormatError(f"{where}: {file.text('name')!r} is not the name of a .safetensors file")
        files.append(IndexedFile(file.text("name"), file.size("nbytes"), file.size("data_start")))
    parsed = RankEntry(
        table=fields.text("table"),
        table_digest=fields.text("table_digest"),
        num_tensors=fields.size("num_tensors"),
        nbytes=fields.size("nbytes"),
        files=tuple(files),
        arena_nbytes=fields.size("arena_nbytes"),
        reads=tuple(_parse_read(row, where) for row in fields.objects("reads")),
    )
    _check_reads(parsed, where)
    return parsed


def _check_reads(entry: RankEntry, where: str) -> None:
    for number, read in enumerate(entry.reads):
        transfer = read.transfer
        what = f"{where}: read {number}"
        if read.file >= len(entry.files):
            raise FormatError(f"{what}: file {read.file} of {len(entry.files)}")
        if transfer.nbytes == 0 or transfer.count == 0:
            raise FormatError(f"{what}: reads nothing")
        if transfer.count > 1 and min(transfer.source_stride, transfer.target_stride) < transfer.nbytes:
            raise FormatError(f"{what}: runs of {transfer.nbytes} bytes overlap")
        file = entry.files[read.file]
        if transfer.source_end > file.nbytes:
            raise FormatError(f"{what}: ends at byte {transfer.source_end} of {file.name}, which has {file.nbytes}")
        if transfer.target_end > entry.arena_nbytes:
            raise FormatError(f"{what}: ends at byte {transfer.target_end} of an arena of {entry.arena_nbytes}")
    end = 0
    for read in sorted(entry.reads, key=lambda read: read.transfer.target):
        if read.transfer.target < end:
            raise FormatError(f"{where}: reads overlap at byte {read.transfer.target} of the arena")
        end = read.transfer.target_end


def _check_table(table: RankTable, entry: RankEntry, where: str) -> None:
    if len(set(table.names)) != len(table.names):
        raise FormatError(f"{where}: a tensor name occurs twice")
    total = 0
    for name, dtype, shape, file, offset, arena_offset in zip(
        table.names, table.dtypes, table.shapes, table.files, table.offsets, table.arena_offsets, strict=True
    ):
        nbytes = num_bytes(dtype, shape) if dtype in BITS else None
        if nbytes is None:
            raise FormatError(f"{where}: tensor {name!r}: {dtype!r} {list(shape)} is no stored tensor")
        if file >= len(entry.files) or offset + nbytes > entry.files[file].nbytes:
            raise FormatError(f"{where}: tensor {name!r}: ends outside its file, at byte {offset + nbytes}")
        if arena_offset % ARENA_ALIGNMENT or arena_offset + nbytes > entry.arena_nbytes:
            raise FormatError(
                f"{where}: tensor {name!r}: {nbytes} bytes at {arena_offset} of an arena of {entry.arena_nbytes}"
            )
        total += nbytes
    if total != entry.nbytes:
        raise FormatError(f"{where}: tensors of {total} bytes, {MANIFEST_NAME} says {entry.nbytes}")


def _shapes(values: Iterable[Any], where: str) -> list[tuple[int, ...]]:
    shapes = list(map(tuple, values))
    for shape in set(shapes):
        if not all(type(dim) is int and 0 <= dim < 2**63 for dim in shape):
            raise FormatError(f"{where}: {list(shape)} is no shape")
    return shapes


def _parse_slice(value: Any, where: str) -> Slice:
    if value is None:
        return Slice()
    try:
        axis, ranges = value
        parsed = Slice(axis, tuple((start, length) for start, length in ranges))
    except (TypeError, ValueError):
        raise FormatError(f"{where}: {value!r} is no slice") from None
    numbers = (axis, *(number for pair in parsed.ranges or () for number in pair))
    if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise FormatError(f"{where}: {value!r} is no slice")
    return parsed
