"""What is done of a conversion: whether its output is there, or what an interrupted attempt has noted of it.

An attempt notes finished tensors and files in its journal: lines, each with a digest of itself in front. When all of a
file is written, a line has the digests of its chunks. A line that was torn by a dying process or machine is ignored.
What a line says of slices is not believed either: who resumes reads the written bytes again and compares their digests
(`verified_progress`), so that nothing need be forced to the drive before it is noted. The digests of source tensors and
of chunks are taken from the lines. The notes of a finished part of an output are such a text, too (`part_notes`).
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import partial
from itertools import chain
from typing import Any

import xxhash

from relayout.checkpoint.converted import check_intact, read_manifest, read_record
from relayout.checkpoint.source import SourceIdentity, SourceTensor, is_unchanged, max_samples
from relayout.conversion.layout import Conversion, RankFile
from relayout.conversion.sidecar import find_other_files, read_side_file, source_record
from relayout.conversion.steps import TensorDigests, Written
from relayout.core.arguments import ranks_text
from relayout.core.digests import PROOF_NBYTES, digest_hex
from relayout.core.extents import BLOCK, Extent, Transfer
from relayout.core.workers import each
from relayout.errors import FormatError, PlanError, shown
from relayout.format.fields import dump_slice
from relayout.format.index import FORMAT_VERSION, MANIFEST_NAME, Manifest
from relayout.format.manifest import SOURCE_RECORD_NAME, compact_json
from relayout.format.safetensors import json_text
from relayout.format.source_record import SourceRecord, dump_record
from relayout.publish.output import LocalOutput
from relayout.storage.reading import HashedFile, hash_files
from relayout.storage.stores import Access, Closable, Kind

JOURNAL_NAME = "relayout.journal"

_SEPARATOR = b" "
_HEX = re.compile("([0-9a-f]{2})*")
_CHUNKS = "chunks"
"""First item of the line of a file that is complete."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What two attempts must have in common for one to resume the other."""

    source: str
    """What `SourceIdentity` says: its `here` for attempts on one machine, its `content` for those that machines
    share."""
    options: str
    """Digest of everything else that decides which bytes are written."""


class Journal(Closable):
    """Appends to a journal. Thread-safe."""

    def __init__(self, folder: LocalOutput, fingerprint: Fingerprint, *, append: bool) -> None:
        """Continue the journal of an output, or begin a new one in place of what may be there."""
        header = None if append else _line([fingerprint.source, fingerprint.options])
        self._notes = folder.open_notes(JOURNAL_NAME, header)
        if append:
            self._notes.append(b"\n")  # Behind a torn line, too, a new one starts.

    def add(self, written: Written) -> None:
        """Note what is written."""
        self._notes.append(_lines(written))

    def close(self) -> None:
        self._notes.close()


def part_notes(fingerprint: Fingerprint, written: Written) -> bytes:
    """The journal of just this, as the notes of a part; `parse_journal` reads it."""
    return _line([fingerprint.source, fingerprint.options]) + _lines(written)


def _lines(written: Written) -> bytes:
    tensors: Iterable[list[object]] = (
        [tensor, digests.source, *digests.slices] for tensor, digests in written.tensors.items()
    )
    files: Iterable[list[object]] = ([_CHUNKS, file, digests.hex()] for file, digests in written.chunks.items())
    return b"".join(map(_line, [*tensors, *files]))


def read_journal(folder: LocalOutput) -> tuple[Fingerprint, Written] | None:
    """What a journal says is written, and of which conversion; None if this user has no journal there."""
    text = folder.read_notes(JOURNAL_NAME)
    return None if text is None else parse_journal(text)


def parse_journal(text: bytes) -> tuple[Fingerprint, Written] | None:
    """Parse the content of the notes into fingerprint and progress."""
    lines = text.split(b"\n")
    first = _parsed(lines[0])
    if not (len(first) == 2 and _are_texts(first)):
        return None
    tensors, chunks = {}, {}
    for line in lines[1:]:
        match _parsed(line):
            case [tensor, str() | None as source, *slices] if type(tensor) is int and slices and _are_texts(slices):
                tensors[tensor] = TensorDigests(source, tuple(slices))
            case [kind, file, str(digests)] if kind == _CHUNKS and type(file) is int and _HEX.fullmatch(digests):
                chunks[file] = bytes.fromhex(digests)
    return Fingerprint(*first), Written(tensors, chunks)


def _are_texts(items: Sequence[object]) -> bool:
    return all(isinstance(item, str) for item in items)


def _line(items: Sequence[object]) -> bytes:
    text = json_text(items).encode()
    return xxhash.xxh3_64_hexdigest(text).encode() + _SEPARATOR + text + b"\n"


def _parsed(line: bytes) -> list[Any]:
    digest, _, text = line.partition(_SEPARATOR)
    if xxhash.xxh3_64_hexdigest(text).encode() != digest:
        return []
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return parsed if isinstance(parsed, list) else []


_AGAIN_NBYTES = 64 * 2**20
_RUN = 64
"""Samples that one thread compares in a row."""


def fingerprint_of(conversion: Conversion, source: str) -> Fingerprint:
    """The fingerprint of a conversion.

    Args:
        source: of its source, `SourceIdentity.here`; `SourceIdentity.content` for what machines share.
    """
    plan = conversion.plan
    cuts = [list(map(dump_slice, cut.slices)) for cut in plan.cuts]
    options = [FORMAT_VERSION, *astuple(conversion.options), plan.cut_of, cuts, conversion.ranks]
    return Fingerprint(source, digest_hex(compact_json(options)))


def check_unchanged(conversion: Conversion, before: SourceIdentity) -> None:
    """Raise FormatError unless the source is still what it was before it was read; for the proof see `is_unchanged`."""
    if not is_unchanged(conversion.source, before):
        raise FormatError("has changed while it was read", path=str(conversion.source.root), code="mismatch")


def changed_shards(conversion: Conversion, noted: Written, threads: int) -> list[str]:
    """The files of the source that no longer have the noted digests: of each, one noted tensor is read again.

    That is the largest one up to 64 MiB, or the smallest one.
    """
    source = conversion.source
    again: dict[int, int] = {}
    for t, digests in sorted(noted.tensors.items(), key=lambda item: (_rank_of(source.tensors, item[0]), item[0])):
        if 0 <= t < len(source.tensors) and digests.source is not None and source.tensors[t].extent.nbytes:
            again.setdefault(source.tensors[t].file, t)
    files = [source.files[index] for index in again]
    open_one = partial(source.folder.open, access=Access.ONCE)
    opens = [partial(open_one, file.name, file.nbytes, version=file.version) for file in files]
    extents = [[source.tensors[t].extent] for t in again.values()]
    found = hash_files([HashedFile(*one) for one in zip(opens, extents, strict=True)], threads)
    expected = [[noted.tensors[t].source] for t in again.values()]
    return [file.name for file, one, other in zip(files, found, expected, strict=True) if one != other]


def differences_from_conversion(conversion: Conversion, threads: int) -> list[str] | None:
    """How the output differs from what this conversion would make; None: it is not there, or damaged.

    If there are no differences, this proves that: all its files are there (`check_intact`); its record is the one that
    this source, plan and options have, with the names, lengths and headers of shards, the index, and the digests of
    side files; of each shard a whole tensor has the digest that is recorded; and of each slice, the first, middle and
    last bytes are those of the source. Of very many slices, or from a server, not all are compared.
    """
    output, source = conversion.output, conversion.source
    if output.kind() is not Kind.FOLDER:
        return None
    sides = [read_side_file(source.folder, name) for name in source.side_files]
    try:
        check_intact(output)
        manifest = read_manifest(output)
        record = read_record(output, manifest)
    except FormatError:  # Whoever is to replace it says so, see `describe_output`.
        return None
    if others := _other_fields(conversion, manifest, record) or find_other_files(output, sides):
        return others
    if dump_record(record) != dump_record(source_record(conversion, record.digests, sides)):
        return [f"{output.location(SOURCE_RECORD_NAME)}: differs from the record of this conversion"]
    files = [(file.nbytes, file.data_start) for file in conversion.layout.files]
    if [(file.nbytes, file.data_start) for file in manifest.files] != files:
        return [f"{output.location(MANIFEST_NAME)}: lists files of other lengths"]
    conversion = conversion.named([file.name for file in manifest.files])
    noted = Written({t: TensorDigests(digest, ()) for t, digest in enumerate(record.digests)})
    if changed := changed_shards(conversion, noted, threads):
        return [f"{name} has other tensors than the one that was converted" for name in changed]
    return _other_samples(conversion, threads)


def other_option(name: str, found: object, expected: object) -> str:
    """How an output differs from a wanted one in a field of the manifest, for a person."""
    return f"{'TP' if name == 'num_ranks' else name} is {shown(found)}, expected {shown(expected)}"


def _other_fields(conversion: Conversion, manifest: Manifest, record: SourceRecord) -> list[str]:
    """The options and shards of a record that differ from those of a conversion, each by its name."""
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
    """The tensors of which samples in the output are not what the source has in their places."""
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
    """The first, middle and last bytes of each slice in a file: tensor, file, and whence in the tensor they came."""
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
    """A tensor's place among those that may be read again."""
    nbytes = tensors[t].extent.nbytes if 0 <= t < len(tensors) else 0
    return nbytes if nbytes > _AGAIN_NBYTES else -nbytes


def refuse_attempt(folder: LocalOutput, *, force: bool) -> None:
    """Refuse to discard an interrupted conversion without `force`."""
    journal = read_journal(folder)
    if journal is not None and (journal[1].tensors or journal[1].chunks) and not force:
        raise PlanError("holds an interrupted attempt; --force discards it", path=folder.location, code="exists")


def read_progress(
    folder: LocalOutput,
    fingerprint: Fingerprint,
    *,
    force: bool,
    changed: Callable[[Written], Sequence[str]] = lambda _: (),
) -> Written:
    """What an earlier attempt at the same conversion has noted. An attempt at another is deleted, or refused.

    Args:
        changed: the files of the source of which something else is noted.

    Raises:
        PlanError: the place holds an attempt at another conversion, and `force` is not set.
    """
    journal = read_journal(folder)
    if journal is not None and (journal[1].tensors or journal[1].chunks):
        earlier, written = journal
        if earlier == fingerprint and not changed(written):
            return written
        if not force:
            change = "the source has changed since" if earlier.options == fingerprint.options else "with other options"
            what = f"holds an interrupted attempt, {change}; --force discards it and starts again"
            raise PlanError(what, path=folder.location, code="exists")
    folder.clear()
    return Written()


def verified_progress(folder: LocalOutput, written: Written, conversion: Conversion, threads: int) -> Written:
    """The tensors whose stored bytes have the noted digests, and the files that hold only such tensors.

    What is no rank file of this layout is deleted.
    """
    if not written.tensors:
        return Written()
    files = conversion.layout.files
    for name in set(folder.names()) - {file.name for file in files}:
        folder.remove(name)
    fitting = {
        t: digests
        for t, digests in written.tensors.items()
        if 0 <= t < len(conversion.cut) and len(digests.slices) == len(conversion.cut[t].cut.distinct)
    }
    wrong: set[int] = set()
    for file in files:
        wrong |= _wrong(folder, file, fitting, conversion, threads)
    verified = {t: digests for t, digests in fitting.items() if t not in wrong}
    chunks = {
        index: digests
        for index, digests in written.chunks.items()
        if 0 <= index < len(files)
        and len(digests) == PROOF_NBYTES * files[index].num_chunks
        and all(t in verified or not conversion.cut[t].rank_nbytes(files[index].holder) for t in files[index].tensors)
    }
    return Written(verified, chunks)


def _wrong(
    folder: LocalOutput, file: RankFile, noted: Mapping[int, TensorDigests], conversion: Conversion, threads: int
) -> set[int]:
    """The noted tensors whose slice in this rank file has another digest. A file that cannot be read is deleted."""
    rows = [
        (t, Extent(offset, conversion.cut[t].rank_nbytes(file.holder)))
        for t, offset in zip(file.tensors, file.offsets, strict=True)
        if t in noted
    ]
    try:
        stored = HashedFile(lambda: folder.open(file.name, file.nbytes), [extent for _, extent in rows])
        [digests] = hash_files([stored], threads)
    except (FormatError, OSError) as error:
        if not isinstance(error, FormatError | FileNotFoundError | PermissionError) and error.errno != errno.EIO:
            raise
        folder.remove(file.name)  # Missing or unreadable: to be written again.
        return {t for t, _ in rows}
    return {
        t
        for (t, _), digest in zip(rows, digests, strict=True)
        if noted[t].slices[conversion.cut[t].cut.which[file.holder]] != digest
    }
