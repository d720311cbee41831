"""Resuming a conversion that was interrupted: what an earlier attempt has noted, and what of it is true."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import astuple

from relayout.conversion.journal import Fingerprint, TensorDigests, Written, read_journal
from relayout.conversion.layout import Conversion, RankFile
from relayout.core.digests import digest_hex
from relayout.core.extents import Extent
from relayout.errors import FormatError, PlanError
from relayout.format.index import FORMAT_VERSION
from relayout.format.manifest import compact_json
from relayout.format.slices import dump_slice
from relayout.storage.hashing import HashedFile, hash_files
from relayout.storage.protocols import Staging


def fingerprint_of(conversion: Conversion) -> Fingerprint:
    """The fingerprint of a conversion, with the source as it is now.

    Raises:
        FormatError: a source file is missing.
    """
    checkpoint, plan = conversion.source, conversion.plan
    files = []
    for file in checkpoint.files:
        status = checkpoint.folder.stat(file.name)
        if status is None:
            raise FormatError("is missing", path=checkpoint.folder.location(file.name), code="missing")
        name = os.fsencode(file.name).hex()  # It need not be UTF-8.
        files.append([name, status.nbytes, status.version, digest_hex(file.header)])
    # One tensor may lie in several files: the index says which counts.
    tensors = [[tensor.name, tensor.file, tensor.extent.offset, tensor.extent.nbytes] for tensor in checkpoint.tensors]
    index = None if checkpoint.index is None else digest_hex(checkpoint.index[1])
    cuts = [list(map(dump_slice, cut.slices)) for cut in plan.cuts]
    chosen = [*astuple(conversion.options), conversion.digest.value]
    options = [FORMAT_VERSION, *chosen, plan.cut_of, cuts, conversion.ranks]
    return Fingerprint(digest_hex(compact_json([files, tensors, index])), digest_hex(compact_json(options)))


def changed(conversion: Conversion) -> FormatError:
    """The error for a source of which the fingerprint is another than before it was read."""
    return FormatError("has changed while it was read", path=str(conversion.source.root), code="mismatch")


def read_progress(staging: Staging, fingerprint: Fingerprint, *, force: bool) -> Written:
    """What an earlier attempt at the same conversion has noted. An attempt at another is deleted, or refused.

    Raises:
        PlanError: the place holds an attempt at another conversion, and `force` is not set.
    """
    journal = read_journal(staging)
    if journal is not None and (journal[1].tensors or journal[1].chunks):
        earlier, written = journal
        if earlier == fingerprint:
            return written
        if not force:
            change = "the source has changed since" if earlier.options == fingerprint.options else "with other options"
            what = f"holds an interrupted attempt, {change}; --force discards it and starts again"
            raise PlanError(what, path=staging.location, code="exists")
    staging.clear()
    return Written()


def verified_progress(staging: Staging, written: Written, conversion: Conversion, threads: int) -> Written:
    """The tensors whose stored bytes have the noted digests, and the files that hold only such tensors.

    What cannot be resumed is deleted: what is no rank file of this layout, and in a store that cannot read unpublished
    files, each file that is not complete.

    Raises:
        OSError: a read failed.
    """
    if not written.tensors:
        return Written()
    files, width = conversion.layout.files, conversion.digest.nbytes
    index_of = {file.name: index for index, file in enumerate(files)}
    stored = set(staging.names())
    for name in stored - index_of.keys():
        staging.remove(name)
    fitting = {
        t: digests
        for t, digests in written.tensors.items()
        if 0 <= t < len(conversion.cut) and len(digests.slices) == len(conversion.cut[t].cut.distinct)
    }
    wrong: set[int] = set()
    for index, file in enumerate(files):
        if staging.can_read:
            wrong |= _wrong(staging, file, fitting, conversion, threads)
        elif file.name not in stored or index not in written.chunks:
            wrong.update(file.tensors)
    verified = {t: digests for t, digests in fitting.items() if t not in wrong}
    chunks = {
        index: digests
        for index, digests in written.chunks.items()
        if 0 <= index < len(files)
        and len(digests) == width * files[index].num_chunks
        and all(t in verified or not conversion.cut[t].rank_nbytes(files[index].holder) for t in files[index].tensors)
    }
    if not staging.can_read:
        for name in stored & index_of.keys():
            if index_of[name] not in chunks:
                staging.remove(name)
    return Written(verified, chunks)


def _wrong(
    staging: Staging, file: RankFile, noted: Mapping[int, TensorDigests], conversion: Conversion, threads: int
) -> set[int]:
    """The noted tensors whose slice in this rank file has another digest. A file that cannot be read is deleted."""
    rows = [
        (t, Extent(offset, conversion.cut[t].rank_nbytes(file.holder)))
        for t, offset in zip(file.tensors, file.offsets, strict=True)
        if t in noted
    ]
    try:
        stored = HashedFile(lambda: staging.open(file.name, file.nbytes), [extent for _, extent in rows])
        [digests] = hash_files([stored], threads)
    except (FormatError, OSError) as error:
        if not isinstance(error, FormatError | FileNotFoundError | PermissionError) and error.errno != errno.EIO:
            raise
        staging.remove(file.name)  # Missing or unreadable: to be written again.
        return {t for t, _ in rows}
    return {
        t
        for (t, _), digest in zip(rows, digests, strict=True)
        if noted[t].slices[conversion.cut[t].cut.which[file.holder]] != digest
    }
