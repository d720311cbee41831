"""Determines the finished part of a conversion: an existing output, and the notes of finished units.

A unit is a part of the output (`publish.output`), which proves that its files are unchanged. The notes contain the
digests of its tensors and of the chunks of its files. They are copied to the index, and prove that the source is
unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from itertools import chain

from relayout.checkpoint.converted import check_intact, read_manifest, read_record, read_source_digests
from relayout.checkpoint.source import SourceIdentity, SourceTensor, is_unchanged, max_samples
from relayout.conversion.copy_plan import TensorDigests, WrittenDigests
from relayout.conversion.layout import Conversion
from relayout.conversion.sidecar import find_other_files, read_side_file, source_record
from relayout.core.arguments import ranks_text
from relayout.core.digests import xxh3_hex
from relayout.core.extents import BLOCK, Transfer
from relayout.core.workers import each
from relayout.errors import FormatError, shown
from relayout.format.fields import dump_slice
from relayout.format.index import FORMAT_VERSION, MANIFEST_NAME, Manifest
from relayout.format.manifest import SOURCE_RECORD_NAME, compact_json
from relayout.format.source_record import SourceRecord, dump_record
from relayout.storage.reading import HashedFile, hash_files
from relayout.storage.stores import Access, Kind


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The values that two attempts must have in common for one to resume the other."""

    source: str
    """`SourceIdentity.content`, or, for data that only this machine keeps, `SourceIdentity.here`."""
    options: str
    """Digest of everything else that decides which bytes are written."""


def dump_notes(fingerprint: Fingerprint, here: str, written: WrittenDigests) -> bytes:
    """Return the notes of a finished unit; `parse_notes` reads them.

    Args:
        here: the identity of the source on this machine, `SourceIdentity.here`.
    """
    return compact_json(
        {
            "fingerprint": astuple(fingerprint),
            "here": here,
            "tensors": [[tensor, digests.source, *digests.slices] for tensor, digests in written.tensors.items()],
            "files": [[file, digests.hex()] for file, digests in written.chunks.items()],
        }
    )


def parse_notes(notes: bytes) -> tuple[Fingerprint, str, WrittenDigests] | None:
    """Parse the result of `dump_notes`; return None if the bytes are not notes of this version."""
    try:
        value = json.loads(notes)
        tensors = {int(t): TensorDigests(source, tuple(slices)) for t, source, *slices in value["tensors"]}
        chunks = {int(file): bytes.fromhex(digests) for file, digests in value["files"]}
        return Fingerprint(*value["fingerprint"]), value["here"], WrittenDigests(tensors, chunks)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


_AGAIN_NBYTES = 64 * 2**20
_RUN = 64
"""Samples that one thread compares in a row."""


def fingerprint_of(conversion: Conversion, source: str) -> Fingerprint:
    """Return the fingerprint of a conversion.

    Args:
        source: see `Fingerprint.source`.
    """
    plan = conversion.plan
    cuts = [list(map(dump_slice, cut.slices)) for cut in plan.cuts]
    options = [FORMAT_VERSION, *astuple(conversion.options), plan.cut_of, cuts, conversion.ranks]
    return Fingerprint(source, xxh3_hex(compact_json(options)))


def check_unchanged(conversion: Conversion, before: SourceIdentity) -> None:
    """Raise FormatError unless the source is unchanged since its identity was taken (see `is_unchanged`)."""
    if not is_unchanged(conversion.source, before):
        raise FormatError("has changed while it was read", path=str(conversion.source.root), code="mismatch")


def changed_shards(conversion: Conversion, noted: WrittenDigests, threads: int) -> list[str]:
    """Return the source files that no longer have the noted digests: one noted tensor of each file is read again.

    The chosen tensor is the largest one up to 64 MiB, or else the smallest.
    """
    source = conversion.source
    again: dict[int, int] = {}
    for t in sorted(noted.tensors, key=lambda t: (_rank_of(source.tensors, t), t)):
        if 0 <= t < len(source.tensors) and noted.tensors[t].source is not None and source.tensors[t].extent.nbytes:
            again.setdefault(source.tensors[t].file, t)
    changed = _changed_tensors(conversion, noted, again.values(), threads)
    return [source.files[source.tensors[t].file].name for t in changed]


def is_unchanged_since(conversion: Conversion, noted: WrittenDigests, threads: int) -> bool:
    """Return True if the source, read again, has the digests of all noted tensors; False if one is unknown."""
    if any(digests.source is None for digests in noted.tensors.values()):
        return False
    return not _changed_tensors(conversion, noted, noted.tensors, threads)


def _changed_tensors(conversion: Conversion, noted: WrittenDigests, again: Iterable[int], threads: int) -> list[int]:
    """Return the tensors in `again` with source bytes that no longer have the noted digest."""
    source = conversion.source
    of_files: dict[int, list[int]] = {}
    for t in sorted(again, key=lambda t: source.tensors[t].extent):
        of_files.setdefault(source.tensors[t].file, []).append(t)
    open_one = partial(source.folder.open, access=Access.ONCE)
    stored = [
        HashedFile(
            partial(
                open_one, source.files[index].name, source.files[index].nbytes, version=source.files[index].version
            ),
            [source.tensors[t].extent for t in tensors],
        )
        for index, tensors in of_files.items()
    ]
    return [
        t
        for tensors, digests in zip(of_files.values(), hash_files(stored, threads), strict=True)
        for t, digest in zip(tensors, digests, strict=True)
        if noted.tensors[t].source != digest
    ]


def differences_from_conversion(conversion: Conversion, threads: int) -> list[str] | None:
    """Return the differences between the output and this conversion; None: the output does not exist, or is damaged.

    An empty list proves all of the following. All files of the output exist (`check_intact`). Its record is the one of
    this source, plan and options, with the names, lengths and headers of shards, the index, and the digests of side
    files. In each shard one whole tensor has the recorded digest. The first, middle and last bytes of each slice equal
    those of the source. If there are very many slices, or a server is involved, only a sample of the slices is
    compared.
    """
    output, source = conversion.output, conversion.source
    if output.kind() is not Kind.FOLDER:
        return None
    sides = [read_side_file(source.folder, name) for name in source.side_files]
    try:
        check_intact(output)
        manifest = read_manifest(output)
        record, digests = read_record(output, manifest), read_source_digests(output, manifest)
    except FormatError:  # When the output is replaced, `describe_output` reports the damage.
        return None
    if others := _other_fields(conversion, manifest, record) or find_other_files(output, sides):
        return others
    # The digests that verified the source are not part of the converted content.
    if dump_record(replace(record, verified=())) != dump_record(source_record(conversion, sides)):
        return [f"{output.location(SOURCE_RECORD_NAME)}: differs from the record of this conversion"]
    files = [(file.nbytes, file.data_start) for file in conversion.layout.files]
    if [(file.nbytes, file.data_start) for file in manifest.files] != files:
        return [f"{output.location(MANIFEST_NAME)}: lists files of other lengths"]
    conversion = conversion.named([file.name for file in manifest.files])
    noted = WrittenDigests({t: TensorDigests(digest, ()) for t, digest in enumerate(digests)})
    if changed := changed_shards(conversion, noted, threads):
        return [f"{name} has other tensors than the one that was converted" for name in changed]
    return _other_samples(conversion, threads)


def other_option(name: str, found: object, expected: object) -> str:
    """Return a message about one manifest field that differs between an output and the requested one."""
    return f"{'TP' if name == 'num_ranks' else name} is {shown(found)}, expected {shown(expected)}"


def _other_fields(conversion: Conversion, manifest: Manifest, record: SourceRecord) -> list[str]:
    """Return the options and shards of a record that differ from those of a conversion, each by its name."""
    source, options = conversion.source, asdict(conversion.options)
    differences = [
        other_option(name, found, options[name])
        for name, found in asdict(record.options).items()
        if found != options[name]
    ]
    if conversion.options.num_ranks == manifest.num_ranks and manifest.present != conversion.ranks:
        differences.append(
            f"it has ranks {ranks_text(manifest.present)}, expected ranks {ranks_text(conversion.ranks)}"
        )
    there = {file.name: (file.nbytes, file.header) for file in record.files}
    for file in source.files:
        if file.name not in there:
            differences.append(f"it was made without {file.name}")
        elif there[file.name] != (file.nbytes, file.header):
            differences.append(f"{file.name} has other tensors than the one that was converted")
    ours = {file.name for file in source.files}
    return differences + [f"it was made of {name}, too" for name in there if name not in ours]


def _other_samples(conversion: Conversion, threads: int) -> list[str]:
    """Return messages about tensors with samples in the output that differ from the source."""
    source, output = conversion.source, conversion.output
    samples = [sample for index in range(len(conversion.layout.files)) for sample in _samples(conversion, index)]
    samples = samples[:: -(-len(samples) // max_samples(source.folder, output)) or 1]

    def others(first: int) -> list[str]:
        found = []
        ours, theirs = bytearray(BLOCK), bytearray(BLOCK)
        for t, index, part in samples[first : first + _RUN]:
            shard, file = source.files[source.tensors[t].file], conversion.layout.files[index]
            with source.folder.open(shard.name, shard.nbytes) as opened:
                opened.read(source.tensors[t].extent.offset + part.source, memoryview(theirs)[: part.nbytes])
            with output.open(file.name, file.nbytes) as opened:
                opened.read(part.target, memoryview(ours)[: part.nbytes])
            if ours[: part.nbytes] != theirs[: part.nbytes]:
                found.append(f"{output.location(file.name)}: tensor {source.tensors[t].name!r} differs from the source")
        return found

    return [*dict.fromkeys(chain.from_iterable(each(others, range(0, len(samples), _RUN), threads)))]


def _samples(conversion: Conversion, index: int) -> Iterator[tuple[int, int, Transfer]]:
    """Yield the first, middle and last bytes of each slice in a file: tensor, file, and offsets in tensor and file."""
    file = conversion.layout.files[index]
    for t, offset in zip(file.tensors, file.offsets, strict=True):
        transfers = conversion.cut[t].rank_transfers(file.holder)
        for part in range(3) if transfers else ():
            transfer = transfers[(len(transfers) - 1) * part // 2]
            nbytes, run = min(transfer.nbytes, BLOCK), (transfer.count - 1) * part // 2
            skipped = (transfer.nbytes - nbytes) * part // 2
            start = transfer.source + run * transfer.source_stride + skipped
            yield t, index, Transfer(start, offset + transfer.target + run * transfer.target_stride + skipped, nbytes)


def _rank_of(tensors: Sequence[SourceTensor], t: int) -> int:
    """Return a sort key: the tensor with the lowest key is read again."""
    nbytes = tensors[t].extent.nbytes if 0 <= t < len(tensors) else 0
    return nbytes if nbytes > _AGAIN_NBYTES else -nbytes
