"""Going on with a conversion that was interrupted: what an earlier attempt claims, and what of it is true."""

from __future__ import annotations

import errno
import os
from collections.abc import Container, Mapping
from dataclasses import astuple

from relayout.conversion.journal import Claims, TensorDigests, Undertaking, read_journal
from relayout.conversion.layout import Conversion, RankFile
from relayout.core.digests import DIGEST_NBYTES, digest_hex
from relayout.core.extents import Extent
from relayout.errors import FormatError, PlanError
from relayout.format.chunks import DIGESTED_NBYTES, num_chunks
from relayout.format.index import FORMAT_VERSION
from relayout.format.manifest import compact_json
from relayout.format.slices import dump_slice
from relayout.storage.hashing import HashedFile, hash_files
from relayout.storage.protocols import Staging


def undertaking_of(conversion: Conversion) -> Undertaking:
    """What a conversion is of, as the source is now, and to.

    Raises:
        FormatError: a source file is gone.
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
    options = [
        FORMAT_VERSION,
        *astuple(conversion.options),
        plan.cut_of,
        [list(map(dump_slice, cut.slices)) for cut in plan.cuts],
    ]
    source = [files, tensors, index]
    return Undertaking(digest_hex(compact_json(source)), digest_hex(compact_json(options)))


def claims_of(staging: Staging, undertaking: Undertaking, *, force: bool) -> Claims:
    """What an earlier attempt at the same says it has done. Of anything else nothing is left, or it is refused.

    Raises:
        PlanError: the place holds an attempt at something else, and is not to be cleared by `force`.
    """
    found = read_journal(staging)
    if found is not None and found[0] == undertaking and found[1].tensors:
        return found[1]
    if found is not None and found[1].tensors and not force:
        what = "the source has changed since" if found[0].options == undertaking.options else "with other options"
        raise PlanError(
            f"holds an interrupted conversion, {what}; --force discards it and starts afresh",
            path=staging.location,
            code="exists",
        )
    staging.clear()
    return Claims()


def still_true(staging: Staging, claims: Claims, conversion: Conversion, threads: int) -> Claims:
    """The claimed tensors whose stored bytes have the claimed digests, and the files that hold only such ones.

    What cannot be gone on with is deleted: what is no rank file, and in a store that cannot read what is not published,
    each file that is not complete.

    Raises:
        OSError: a read failed.
    """
    if not claims.tensors:
        return Claims()
    files = {file.name: number for number, file in enumerate(conversion.layout.files)}
    there = staging.names()
    for name in set(there) - files.keys():
        staging.remove(name)
    fitting = {t: digests for t, digests in claims.tensors.items() if _fits(t, digests, conversion)}
    wrong: set[int] = set()
    complete = {files[name] for name in there if name in files} & claims.chunks.keys()
    for number, file in enumerate(conversion.layout.files):
        if staging.can_read:
            wrong |= _wrong(staging, file, fitting, conversion, threads)
        elif number not in complete:
            wrong.update(file.tensors)
    true = {t: digests for t, digests in fitting.items() if t not in wrong}
    chunks = {n: chunks for n, chunks in claims.chunks.items() if _fit(n, chunks, true, conversion)}
    if not staging.can_read:
        for name in there:
            if name in files and files[name] not in chunks:
                staging.remove(name)
    return Claims(true, chunks)


def _fits(t: int, digests: TensorDigests, conversion: Conversion) -> bool:
    return 0 <= t < len(conversion.cut) and len(digests.slices) == len(conversion.cut[t].cut.distinct)


def _fit(number: int, chunks: bytes, true: Container[int], conversion: Conversion) -> bool:
    """Whether digests of chunks are of a file of which all is true."""
    if not 0 <= number < len(conversion.layout.files):
        return False
    file = conversion.layout.files[number]
    if len(chunks) != DIGEST_NBYTES * num_chunks(file.data_start, file.nbytes, DIGESTED_NBYTES):
        return False
    return all(t in true or not conversion.cut[t].rank_nbytes(file.holder) for t in file.tensors)


def _wrong(
    staging: Staging, file: RankFile, claims: Mapping[int, TensorDigests], conversion: Conversion, threads: int
) -> set[int]:
    """The claimed tensors whose slice is not in this rank file as it should be."""
    rows = []
    for t, offset in zip(file.tensors, file.offsets, strict=True):
        if t in claims:
            rows.append((t, Extent(offset, conversion.cut[t].rank_nbytes(file.holder))))
    try:
        stored = HashedFile(lambda: staging.open(file.name, file.nbytes), [extent for _, extent in rows])
        [digests] = hash_files([stored], threads)
    except (FormatError, OSError) as error:
        if not isinstance(error, FormatError | FileNotFoundError | PermissionError) and error.errno != errno.EIO:
            raise
        staging.remove(file.name)  # Missing, or what cannot be read: to be written again.
        return {t for t, _ in rows}
    held = (conversion.cut[t].cut.which[file.holder] for t, _ in rows)
    return {t for (t, _), which, digest in zip(rows, held, digests, strict=True) if claims[t].slices[which] != digest}
