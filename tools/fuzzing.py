"""What is fuzzed: each parser as a function of bytes, behind whatever stands in front of it, and what it promises.

Any bytes either parse or raise the parser's own errors, and what has parsed is as the code behind it relies on, by
checks of another make. Digests, lengths and compression are made truthful first, so that mutations get past them.
"""

from __future__ import annotations

import json
import random
import tomllib
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cache
from itertools import chain, pairwise
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors
from support.vector_edits import BASES, changed_files, vectors
from zstandard import ZstdDecompressor, ZstdError

from relayout.checkpoint.folder import parse_config
from relayout.checkpoint.source import SourceCheckpoint, SourceTensor, parse_index
from relayout.conversion.sidecar import recorded_source, stored_conversion
from relayout.core.digests import blake3_hex
from relayout.core.extents import Extent
from relayout.core.slices import BITS, Slice
from relayout.errors import FormatError, PlanError
from relayout.format.delta import (
    ChangedDigests,
    DeltaFile,
    DeltaManifest,
    dump_delta,
    encode,
    parse_changed_digests,
    parse_delta,
    xor_into,
)
from relayout.format.delta import parse_index as parse_delta_index
from relayout.format.fields import parse_object
from relayout.format.index import IndexedFile, Manifest
from relayout.format.manifest import compact_json, compress, parse_manifest, sealed
from relayout.format.rank_table import parse_table
from relayout.format.safetensors import LENGTH_NBYTES, json_text, parse_header
from relayout.format.source_record import parse_record
from relayout.plans.family import dump_rules, parse_family, parse_rules
from relayout.plans.plan import Plan
from relayout.plans.planner import plan_by, plan_for
from relayout.storage.local.store import LocalStore

Numbers = npt.NDArray[np.int64]

MAX_INPUT_NBYTES = 2**16
ROOT = Path(__file__).parent.parent
_GUARD = 64
"""Bytes before and behind memory that is changed."""
_MAX_DATA_NBYTES = 2**20
"""Length of the data section of a made-up file."""
_STRICTER = (
    *("occurs twice", "expected an object, found list", "unknown dtype {"),
    *("characters, limit", "axes, limit", "brackets in"),
)
"""What is refused, though the reference reader takes it (SECURITY.md)."""
_AS_STORED = b"\1"
"""First byte of an input that is taken as it is, digest aside; any other is what gets a truthful prefix."""


@dataclass(frozen=True, slots=True)
class Target:
    """A parser."""

    files: str
    """Pattern of the names of its files in the vectors."""
    run: Callable[[bytes], None]
    """Raises what is a finding: an error that the parser does not promise, or an AssertionError."""
    to_input: Callable[[bytes], bytes | None] = lambda blob: blob
    """From a file to an input; None: it is too large for one."""
    mutate: Callable[[bytes, random.Random], bytes] = lambda data, rng: mutate_json(data, rng)
    """Changes an input in a way that bytes alone would rarely change."""

    first: str = "*"
    """Pattern of the place, BASE/NAME, of the one that is as it should be."""
    made: Callable[[], list[bytes]] | None = None
    """Makes the seeds, where the vectors have none."""

    def seeds(self) -> list[bytes]:
        """The inputs that the vectors give; the first is the good one."""
        if self.made is not None:
            return self.made()
        corpus = sorted(_corpus(), key=lambda file: not fnmatch(file[0], self.first))
        inputs = (self.to_input(blob) for name, blob in corpus if fnmatch(name.rpartition("/")[2], self.files))
        return [blob for blob in inputs if blob is not None and len(blob) <= MAX_INPUT_NBYTES]


@cache
def _corpus() -> list[tuple[str, bytes]]:
    """Files that somebody might send, first of the bases, then of the vectors, each with something wrong with it."""
    good = [(str(path.relative_to(BASES)), path.read_bytes()) for path in sorted(BASES.rglob("*")) if path.is_file()]
    return good + [file for vector in vectors() for file in changed_files(vector).items()]


def _header(data: bytes) -> None:
    """Beside the reference reader, which may be laxer only where SECURITY.md says so, and never stricter."""
    if data[:1] == _AS_STORED:
        file = data[1:]
    else:
        file = len(data[1:]).to_bytes(LENGTH_NBYTES, "little") + data[1:]
        file += bytes(_claimed_nbytes(data[1:]))
    try:
        reference = {
            name: (item["dtype"], tuple(item["shape"]), len(item["data"]))
            for name, item in safetensors.deserialize(file)
        }
    except safetensors.SafetensorError as error:
        reference, refused = None, str(error)
    try:
        declared = LENGTH_NBYTES + int.from_bytes(file[:LENGTH_NBYTES], "little")
        header = parse_header(file[:declared], len(file), "x")
    except FormatError as error:
        if reference is not None and not any(word in str(error) for word in _STRICTER):
            raise AssertionError(f"the reference takes it: {error}") from None
        return
    assert reference is not None, f"the reference refuses it: {refused}"
    parsed = {tensor.name: (tensor.dtype, tensor.shape, tensor.nbytes) for tensor in header.tensors}
    assert parsed == reference
    assert sum(tensor.nbytes for tensor in header.tensors) == header.data_nbytes == len(file) - header.data_start


def _claimed_nbytes(text: bytes) -> int:
    """Where a header says that the last tensor ends, as far as that is little."""
    try:
        top = json.loads(text)
        ends = [entry["data_offsets"][1] for entry in top.values() if "data_offsets" in entry]
    except (ValueError, RecursionError, AttributeError, TypeError, LookupError):
        return 0
    return max((end for end in ends if type(end) is int and 0 <= end <= _MAX_DATA_NBYTES), default=0)


def _index(data: bytes) -> None:
    try:
        weight_map = parse_index(data, "x")
    except FormatError:
        return
    assert weight_map
    assert all(_is_plain(file) and file.endswith(".safetensors") for file in weight_map.values())


def _config(data: bytes) -> None:
    """With a plan: its numbers and words go there."""
    try:
        config = parse_config(data, "x")
        config = {"model_type": "llama"} | config
        quantized = config.get("quantization_config") is not None
        source = _model(config, quantized=quantized)
        _check_plan(source, plan_for(source, 2, unmatched="replicate"))
    except (FormatError, PlanError):
        return
    json_text(config).encode()


def _plan(data: bytes) -> None:
    try:
        family = parse_family(data.decode("utf-8", "replace"), "x", "x")
    except FormatError:
        return
    recorded = parse_object(compact_json(dump_rules(family)), "x")
    assert parse_rules(recorded, "x", family.name, family.origin) == family
    source = _model({"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 2})
    for expert_parallel in (False, True):
        try:
            plan = plan_by(source, 2, family, expert_parallel=expert_parallel, unmatched="replicate")
        except PlanError:
            continue
        _check_plan(source, plan)


@cache
def _shapes(quantized: bool) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    plain = {
        "model.embed_tokens.weight": ("BF16", (200, 64)),
        "model.norm.weight": ("BF16", (64,)),
        "model.layers.0.self_attn.q_proj.weight": ("BF16", (64, 64)),
        "model.layers.0.self_attn.k_proj.weight": ("BF16", (32, 64)),
        "model.layers.0.self_attn.o_proj.weight": ("BF16", (64, 64)),
        "model.layers.0.mlp.down_proj.weight": ("BF16", (64, 128)),
        "model.layers.0.mlp.experts.1.up_proj.weight": ("BF16", (128, 64)),
    }
    packed = {
        "model.layers.1.self_attn.q_proj.qweight": ("I32", (8, 64)),
        "model.layers.1.self_attn.q_proj.qzeros": ("I32", (2, 8)),
        "model.layers.1.self_attn.q_proj.scales": ("F16", (2, 64)),
        "model.layers.1.self_attn.q_proj.g_idx": ("I32", (64,)),
        "model.layers.1.mlp.down_proj.weight": ("F8_E4M3", (64, 128)),
        "model.layers.1.mlp.down_proj.weight_scale": ("F32", (64, 1)),
        "model.layers.1.mlp.up_proj.weight": ("F8_E4M3", (256, 128)),
        "model.layers.1.mlp.up_proj.weight_scale_inv": ("F32", (2, 1)),
        "model.layers.1.mlp.gate_proj.weight_packed": ("I32", (128, 8)),
        "model.layers.1.mlp.gate_proj.weight_scale": ("BF16", (128, 2)),
        "model.layers.1.mlp.gate_proj.weight_shape": ("I64", (2,)),
    }
    return plain | packed if quantized else plain


def _model(config: Mapping[str, Any], *, quantized: bool = False) -> SourceCheckpoint:
    """A checkpoint of which nothing is stored."""
    tensors = tuple(
        SourceTensor(name, dtype, shape, 0, Extent(0, prod(shape) * BITS[dtype] // 8))
        for name, (dtype, shape) in _shapes(quantized).items()
    )
    return SourceCheckpoint(LocalStore(Path("x")), (), tensors, {}, config)


def _check_plan(source: SourceCheckpoint, plan: Plan) -> None:
    """Slices lie inside their tensors; the ranks hold all of each between them."""
    for tensor, cut in zip(source.tensors, plan.cut_of, strict=True):
        held = np.zeros(tensor.shape, bool)
        for part in plan.cuts[cut].distinct:
            if part.ranges is None:
                held[...] = True
            for start, length in part.ranges or ():
                assert start + length <= tensor.shape[part.axis]
                held[(slice(None),) * part.axis + (slice(start, start + length),)] = True
        assert held.all(), tensor.name


def _signed(data: bytes) -> bytes:
    """A manifest with its digest."""
    top = _object(data)
    if top is None:
        return data
    top.pop("self_digest", None)
    return sealed(top)


def _manifest(data: bytes) -> None:
    try:
        manifest = parse_manifest(_signed(data), "x")
    except FormatError:
        return
    for holder, entry in manifest.holders.items():
        files = manifest.holder_files(holder)
        assert _is_plain(entry.table)
        assert all(_is_plain(file.name) and file.name.endswith((".safetensors", ".slices")) for file in files)
        total, places = 0, []
        for read in entry.reads:
            move = read.transfer
            total += move.nbytes * move.count
            assert move.nbytes > 0
            assert move.source + (move.count - 1) * move.source_stride + move.nbytes <= files[read.file].nbytes
            places.append((move.target, move.target + (move.count - 1) * move.target_stride + move.nbytes))
            assert move.count == 1 or min(move.source_stride, move.target_stride) >= move.nbytes
        assert total == entry.nbytes
        assert entry.arena_nbytes <= 1.4 * sum(file.nbytes for file in files) + 8192 * (len(files) + 1)
        ends = [0, *(end for _, end in places), entry.arena_nbytes]
        assert all(start >= end for (start, _), end in zip(places, ends, strict=False))
        assert ends == sorted(ends)


def _table(base: str, holder: int) -> Callable[[bytes], None]:
    """The table of one holder of a base."""

    def run(data: bytes) -> None:
        stored = data[1:] if data[:1] == _AS_STORED else compress(data)
        manifest = _base_manifest(base)
        entry = replace(manifest.holders[holder], table_digest=blake3_hex(stored))
        ranks = tuple(entry if holder == rank else other for rank, other in enumerate(manifest.ranks))
        whole = entry if holder == manifest.num_ranks else manifest.whole
        try:
            table = parse_table(stored, replace(manifest, ranks=ranks, whole=whole), holder, "x")
        except FormatError:
            return
        brought, held = _brought(base, holder), np.zeros(entry.arena_nbytes, int)
        order = []
        for row, kind in enumerate(table.kinds[index] for index in table.kind_of):
            json_text(table.names[row]).encode()
            assert 1 <= kind.bits <= 1024
            assert BITS.get(kind.dtype, kind.bits) == kind.bits
            nbytes, rest = divmod(prod(kind.shape) * kind.bits, 8)
            assert (table.sizes[row], rest) == (nbytes, 0)
            number, offset, place = entry.files[table.files[row]], table.offsets[row], table.arena_offsets[row]
            assert manifest.files[number].data_start <= offset <= manifest.files[number].nbytes - nbytes
            assert place % 16 == 0
            assert place + nbytes <= entry.arena_nbytes
            held[place : place + nbytes] += 1
            assert kind.part.shape(kind.source_shape) == kind.shape
            inside = np.arange(nbytes)
            if number in manifest.shared and holder < manifest.num_ranks:
                inside = _bytes_in_whole(kind.part, kind.source_shape, kind.bits)
            offsets = offset + inside - inside[:1]
            assert (brought[place : place + nbytes] == np.stack([np.full(nbytes, number), offsets], 1)).all()
            order.append((table.files[row], offset, nbytes > 0))
        assert held.max(initial=0) <= 1
        assert order == sorted(order)

    return run


@cache
def _brought(base: str, holder: int) -> Numbers:
    """Of each byte of a holder's arena: the file and the offset that it is read from; -1: nothing."""
    entry = _base_manifest(base).holders[holder]
    brought = np.full((entry.arena_nbytes, 2), -1)
    for read in entry.reads:
        for run in read.transfer.runs():
            brought[run.target : run.target_end, 0] = entry.files[read.file]
            brought[run.target : run.target_end, 1] = np.arange(run.source, run.source_end)
    return brought


def _bytes_in_whole(part: Slice, source_shape: tuple[int, ...], bits: int) -> Numbers:
    """The bytes of a slice in its whole tensor, in the order of the slice."""
    held = np.arange(prod(source_shape) * bits).reshape(*source_shape, bits)
    for axis, ranges in part.by_axis or ():
        held = held.take(np.array([start + i for start, length in ranges for i in range(length)], int), axis)
    return held.reshape(-1)[::8] // 8


def _record(data: bytes) -> None:
    """With what `restore` makes of it, up to the first byte that is read or written."""
    manifest = _base_manifest("converted")
    try:
        record = parse_record(data, 2, "x")
        names = [file.name for file in (*record.files, *record.side_files)] + list((record.index or ())[:1])
        assert len(set(names)) == len(names)
        assert all(_stays_inside(name) for name in names)
        source = recorded_source(LocalStore(Path("x")), record)
        stored_conversion(LocalStore(Path("x")), manifest, _base_tables(), record, source)
        if record.plan is not None:
            parse_rules(record.plan.rules, "x", record.plan.name, record.plan.origin)
    except FormatError:
        return
    for file in source.files:
        extents = sorted(tensor.extent for tensor in source.tensors if source.files[tensor.file] == file)
        assert sum(extent.nbytes for extent in extents) == file.nbytes - file.data_start
        assert all(extent.end <= file.nbytes for extent in extents)


def _delta(data: bytes) -> None:
    try:
        manifest = parse_delta(_signed(data), "x")
    except FormatError:
        return
    assert all(file.nbytes >= 80 * file.num_pieces > 0 for file in manifest.files)
    places = [file.index_extent for file in manifest.files]
    assert all(place.end == file.nbytes for place, file in zip(places, manifest.files, strict=True))
    numbers = [file.number for file in manifest.files]
    assert numbers == sorted(set(numbers)) == list(manifest.by_number)
    ends = [0, *(place.end for place in manifest.digest_extents)]
    assert [place.offset for place in manifest.digest_extents] == ends[:-1]
    assert ends[-1] == sum(24 * part.count for part in manifest.digests)
    assert all(_stays_inside(name) for name in manifest.others)
    assert len(set(manifest.others)) == len(manifest.others)


def _deltas() -> list[bytes]:
    files = (DeltaFile(0, 100, 1, blake3_hex(b"a")), DeltaFile(3, 999, 9, blake3_hex(b"")))
    digests = (ChangedDigests(2, blake3_hex(b"a")), ChangedDigests(0, blake3_hex(b"")))
    others = [tuple(f"sub/{side}.json" for side in range(number)) for number in range(10)]
    return [
        dump_delta(DeltaManifest("x", blake3_hex(b"b"), blake3_hex(b"c"), files, digests, names)) for names in others
    ]


_CHUNK_NBYTES = 2**16


def _delta_index(data: bytes) -> None:
    """Of a file's length and of its pieces that changed: their numbers, and the bytes that are stored of them."""
    top = _object(data) or {}
    try:
        start, nbytes = int(top["data_start"]), int(top["nbytes"])
        pieces = [(int(number), int(stored)) for number, stored in top["pieces"]]
        rows = b"".join(
            number.to_bytes(8, "little") + stored.to_bytes(8, "little") + bytes(64) for number, stored in pieces
        )
    except (LookupError, ValueError, TypeError, OverflowError):
        return
    if not 8 <= start <= nbytes <= 2**50:
        return
    file = IndexedFile("x.safetensors", nbytes, start, "", "00" * 32, "")
    stored = DeltaFile(0, len(rows) + sum(length for _, length in pieces), len(pieces), blake3_hex(rows))
    is_right = _rise([number for number, _ in pieces])
    for number, length in pieces:
        begin = start + (number - 1) * _CHUNK_NBYTES
        piece_nbytes = min(_CHUNK_NBYTES, nbytes - begin) if number else start
        is_right = is_right and piece_nbytes > 0 and 1 <= length <= 32 * piece_nbytes + 256
    try:
        index = parse_delta_index(rows, stored, file, _CHUNK_NBYTES)
    except FormatError:
        assert not is_right
        return
    assert is_right
    assert index.numbers.tolist() == [number for number, _ in pieces]
    places = [index.place(range(row, row + 1)) for row in range(len(pieces))]
    assert [place.nbytes for place in places] == [length for _, length in pieces]
    starts = [*(place.offset for place in places), stored.nbytes - len(rows)]
    assert starts == [0, *(place.end for place in places)]


def _rise(numbers: Sequence[int]) -> bool:
    return all(first < second for first, second in pairwise(numbers))


def _indexes() -> list[bytes]:
    tops = [
        {"data_start": 512, "nbytes": 2**20 + 7, "pieces": [[0, 9], *([3 * row, 99 * row] for row in range(1, number))]}
        for number in range(1, 7)
    ]
    last: dict[str, Any] = {
        "data_start": 8,
        "nbytes": 8 + _CHUNK_NBYTES + 1,
        "pieces": [[0, 512], [1, 32 * _CHUNK_NBYTES], [2, 288]],
    }
    longer = [last | {"pieces": [*last["pieces"][:row], [row, 2**22]]} for row in range(3)]
    return [json.dumps(top).encode() for top in (*tops, last, *longer)]


def _changed_digests(data: bytes) -> None:
    """Of how many digests there are, and of the rows that changed."""
    top = _object(data) or {}
    try:
        count, numbers = int(top["count"]), list(map(int, top["rows"]))
        blob = b"".join(row.to_bytes(8, "little") + row.to_bytes(16, "big") for row in numbers)
    except (LookupError, ValueError, TypeError, OverflowError):
        return
    part = ChangedDigests(len(numbers), blake3_hex(blob))
    try:
        rows, digests = parse_changed_digests(blob, part, count)
    except FormatError:
        assert not _rise(numbers) or max(numbers, default=-1) >= count or count < 0
        return
    assert _rise(numbers)
    assert all(0 <= row < count for row in numbers)
    assert rows.tolist() == [int.from_bytes(bytes(digest), "big") for digest in digests] == numbers


def _rows() -> list[bytes]:
    return [json.dumps({"count": 5 * number, "rows": [*range(0, 5 * number, 4)]}).encode() for number in range(10)]


def _change(data: bytes) -> None:
    """What is stored of a piece, as its runs and the bytes in its frame; beside the decoder in FORMAT.md."""
    top = _object(data) or {}
    try:
        runs = [list(map(int, run)) for run in top["runs"]]
        stored = np.array([len(runs), *chain.from_iterable(runs)], "<u4").tobytes() + compress(bytes(list(top["body"])))
        nbytes = sum(run[0] for run in runs)
    except (LookupError, TypeError, ValueError, OverflowError):
        stored, nbytes = data, 1000
    if not 0 <= nbytes <= _MAX_DATA_NBYTES or not stored:
        return
    memory = bytearray(nbytes + 2 * _GUARD)
    try:
        xor_into(stored, memoryview(memory)[_GUARD : _GUARD + nbytes])
    except FormatError:
        assert not any(memory[:_GUARD] + memory[_GUARD + nbytes :])
        return
    # The decoder in FORMAT.md is for pieces, all of which have bytes.
    assert memory == bytes(_GUARD) + (_decoder()(stored) if nbytes else b"") + bytes(_GUARD)


@cache
def _decoder() -> Callable[[bytes], bytes]:
    names: dict[str, Any] = {}
    text = (ROOT / "docs" / "FORMAT.md").read_text("utf-8")
    for title in ("12. Reading a rank", "15. Deltas"):  # The second one goes on with the names of the first.
        exec(text.partition(f"\n## {title}\n")[2].partition("```python\n")[2].partition("```")[0], names)
    return lambda stored: names["decoded"](stored).tobytes()


def _changes() -> list[bytes]:
    made, random = [], np.random.default_rng(0)
    for share in (0.002, 0.05, 0.1, 0.5, 1):
        for runs in ([(600, 2)], [(300, 2), (7, 1), (320, 8), (40, 4)]):
            nbytes = sum(run[0] for run in runs)
            stored = encode(random.integers(1, 256, nbytes, np.uint8) * (random.random(nbytes) < share), runs)
            words = np.frombuffer(stored, "<u4", 1 + 4 * len(runs))[1:].reshape(-1, 4).tolist()
            body = list(ZstdDecompressor().decompress(stored[4 + 16 * len(runs) :]))
            made.append(json.dumps({"runs": words, "body": body}).encode())
    return made


@cache
def _base_manifest(base: str) -> Manifest:
    return parse_manifest((BASES / base / "relayout.json").read_bytes(), base)


@cache
def _base_tables() -> dict[int, Any]:
    manifest = _base_manifest("converted")
    return {
        rank: parse_table((BASES / "converted" / entry.table).read_bytes(), manifest, rank, "base")
        for rank, entry in manifest.holders.items()
    }


def _is_plain(name: str) -> bool:
    """Whether it names a file beside the one that it is in, on any system."""
    return not set(name) & set("/\\\0") and name not in ("", ".", "..")


def _stays_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\0" not in name and str(path) not in ("", ".")


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        top = json.loads(data.decode())
        json_text(top).encode()
    except (ValueError, RecursionError):
        return None
    return top if isinstance(top, dict) else None


_HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 15, 16, 4095, 4096, 4097, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64),
    *(-(2**63), 10**30, 1.0, -0.0, 1.5, 1e300, "", "0", "1", ".", "..", "../x", "/etc/passwd", "a/b", "a\\b", "\0"),
    *("x.safetensors", "relayout.json", "\x1b[31m", "\ud800", "é", "F32", "BF16", "F4", "whole", "a" * 300),
    *(["compression"], {"0": [[0, 1]]}, {"0": []}, {"1": [[0, 4]]}, {"0": [[0, 4]], "1": [[8, 8]]}, {"00": [[0, 1]]}),
    *([], [0], [[0, 1]], [0, [[0, 1]]], [0, []], [1, [[0, 1], [1, 1]]], [2**62, 2**62], {}, {"a": 1}),
)


def mutate_json(data: bytes, rng: random.Random) -> bytes:
    """Change some values, names or the order in a JSON text; rarely, the text."""
    mark, text = (data[:1], data[1:]) if data[:1] in (b"\0", _AS_STORED) else (b"", data)
    try:
        top = json.loads(text)
    except (ValueError, RecursionError):
        return data
    holder = [top]
    try:
        for _ in range(1 + int(rng.expovariate(1))):
            _change_one(holder, rng)
        text = json.dumps(holder[0], ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    except RecursionError:
        return data
    if rng.random() < 0.1:
        old, new = rng.choice(
            [(b"0", b"-0"), (b"1", b"1e0"), (b"2", b"NaN"), (b"{", b"{{"), (b'"', b'"\\u0000'), (b",", b",,")]
        )
        text = text.replace(old, new, 1)
    return mark + text


def _change_one(holder: list[Any], rng: random.Random) -> None:
    """Walk to some place, and change what is there."""
    parent: Any = holder
    while True:
        keys = list(parent) if isinstance(parent, dict) else range(len(parent))
        if not keys:
            return
        key = rng.choice(keys)
        value = parent[key]
        if not isinstance(value, (dict, list)) or not value or rng.random() < 0.15:
            break
        parent = value
    action = rng.random()
    if action < 0.3:
        parent[key] = deepcopy(rng.choice(_HOSTILE))
    elif action < 0.55 and type(value) is int:
        parent[key] = rng.choice(
            [value + 1, value - 1, -value, 2 * value, value // 2, value + 16, value + 4096, str(value)]
        )
    elif action < 0.7:
        other = rng.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        parent[key], parent[other] = parent[other], parent[key]
    elif action < 0.8 and parent is not holder:
        del parent[key]
    elif isinstance(parent, dict):
        parent[rng.choice([*parent, "new", "", "__metadata__", "\x1b", "a.b"])] = deepcopy(value)
    elif parent is not holder:
        parent.insert(rng.randrange(len(parent) + 1), deepcopy(value))
    else:
        for _ in range(rng.choice([1, 10, 130, 2000])):
            parent[key] = [parent[key]]


def mutate_plan(data: bytes, rng: random.Random) -> bytes:
    """As `mutate_json`, in a plan file."""
    try:
        text = json.dumps(tomllib.loads(data.decode("utf-8", "replace")), default=str)
        top = json.loads(mutate_json(text.encode(), rng))
        tables = {key: value for key, value in top.items() if isinstance(value, dict)}
        lines = [f"{json.dumps(key)} = {_toml(value)}" for key, value in top.items() if key not in tables]
        for name, table in tables.items():
            lines += [f"[{json.dumps(name)}]", *(f"{json.dumps(key)} = {_toml(value)}" for key, value in table.items())]
    except (ValueError, AttributeError, RecursionError):
        return data
    return "\n".join(lines).encode()


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(key)} = {_toml(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return "nan" if value is None else json.dumps(value)


def _of_header(blob: bytes) -> bytes:
    length = int.from_bytes(blob[:LENGTH_NBYTES], "little")
    text = blob[LENGTH_NBYTES : LENGTH_NBYTES + length]
    return b"\0" + text if len(text) == length > 0 else _AS_STORED + blob


def _of_table(blob: bytes) -> bytes | None:
    """What is in a zstd frame, or the frame, if it is none."""
    try:
        with ZstdDecompressor().stream_reader(blob) as reader:
            return reader.read(MAX_INPUT_NBYTES + 1)
    except ZstdError:
        return _AS_STORED + blob


TARGETS: Mapping[str, Target] = {
    "header": Target("*.safetensors", _header, _of_header),
    "index": Target("*.index.json", _index),
    "config": Target("*config.json", _config),
    "manifest": Target("relayout.json", _manifest),
    "table": Target("relayout.rank-*.json.zst", _table("converted", 0), _of_table),
    "table_beside_whole": Target("relayout.rank-*.json.zst", _table("whole", 0), _of_table, first="whole/*"),
    "whole": Target("relayout.*.json.zst", _table("whole", 2), _of_table, first="*relayout.whole.json.zst"),
    "record": Target("relayout.source.json.zst", _record, _of_table),
    "delta": Target("", _delta, made=_deltas),
    "delta_index": Target("", _delta_index, made=_indexes),
    "changed_digests": Target("", _changed_digests, made=_rows),
    "change": Target("", _change, made=_changes),
    "plan": Target("plan*.toml", _plan, mutate=mutate_plan),
}
