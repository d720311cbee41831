"""What makes two plain checkpoints the same: their bytes. Fine-tunes share names, lengths and headers, often times too.

A file's content is proven by what its store vouches for (`FileStat.vouched`), else by samples: blocks of its tensors,
which are read. Samples prove nothing about the bytes between them, so that on one machine the place of each local file
belongs to the identity, too. `STORES.md` says what is proven by that, and what it costs.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import xxhash

from relayout.checkpoint.source import SourceCheckpoint, SourceTensor
from relayout.core.arguments import collapse_numbers
from relayout.core.digests import digest_hex
from relayout.core.extents import BLOCK, Extent
from relayout.core.workers import each
from relayout.errors import FormatError
from relayout.format.manifest import compact_json
from relayout.storage.local.mounts import filesystem_of
from relayout.storage.protocols import FileStat, Store

_NUM_BLOCKS = 4
"""How many blocks of a large tensor are read: one in each third, at an offset that its name decides, and the last."""
_WHOLE_NBYTES = _NUM_BLOCKS * BLOCK
"""Tensors up to this size are read whole."""
_MAX_SAMPLES = 16_384
_MAX_REMOTE_SAMPLES = 512
"""How many are read from a server, to which each is a request."""
_RUN = 16
"""Samples that one thread reads in a row."""
_NUM_THREADS = 8
_MADE_UP_INODES = ("fuse", "vfat", "exfat", "msdos")
"""File systems that number their files anew at each mount, or while they are mounted."""


@dataclass(frozen=True, slots=True)
class SourceIdentity:
    """Which checkpoint this is."""

    content: str
    """Digest of names, lengths, headers, index, and what proves the bytes. Copies on other machines have the same."""
    place: str
    """Digest of path, inode, length and times (of modification, and of the inode's change) of each local file."""

    @property
    def here(self) -> str:
        """Digest of both: the identity of what is kept on this machine."""
        return digest_hex(compact_json([self.content, self.place]))


def identity_of(checkpoint: SourceCheckpoint) -> SourceIdentity:
    """The identity of a checkpoint, with its files as they are now.

    Raises:
        FormatError: a file is missing, or was truncated.
        OSError: a read failed.
    """
    folder, files = checkpoint.folder, checkpoint.files
    statuses = [_status(folder, file.name) for file in files]
    places = [place_of(path) if (path := folder.path(file.name)) else None for file in files]
    # A file of another length than its header says has another content in any case.
    unknown = [i for i, one in enumerate(statuses) if one.vouched is None and one.nbytes == files[i].nbytes]
    sampled = _hashed(checkpoint, samples_of(checkpoint, unknown))
    contents = []
    for i, (file, status) in enumerate(zip(files, statuses, strict=True)):
        name = os.fsencode(file.name).hex()  # It need not be UTF-8.
        proof: object = status.vouched or sampled.get(i)
        if status.vouched is None and places[i] is None:
            # A server's word on a file's time proves nothing, but another word means another file.
            proof = [proof, folder.location(file.name), status.version]
        contents.append([name, status.nbytes, digest_hex(file.header), proof])
    # One tensor may lie in several files: the index says which counts.
    tensors = [[tensor.name, tensor.file, tensor.extent.offset, tensor.extent.nbytes] for tensor in checkpoint.tensors]
    index = None if checkpoint.index is None else digest_hex(checkpoint.index[1])
    content = digest_hex(compact_json([contents, tensors, index]))
    return SourceIdentity(content, digest_hex(compact_json(places)))


def place_of(path: Path) -> list[object]:
    """What tells a local file from all others on this machine.

    Device numbers are left out: those of network and overlay file systems are others after each mount.
    """
    status = path.stat()
    real = Path(os.path.realpath(path))
    inode = None if _kind_at(real.parent, status.st_dev).startswith(_MADE_UP_INODES) else status.st_ino
    return [os.fsencode(real).hex(), inode, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


@lru_cache(maxsize=64)
def _kind_at(folder: Path, device: int) -> str:
    """The kind of the file system of a folder, as long as the same device is mounted there."""
    return filesystem_of(folder).kind


def samples_of(checkpoint: SourceCheckpoint, files: Collection[int]) -> dict[int, list[Extent]]:
    """What is read of each of these files, in rising order. The same for all checkpoints with equal headers.

    Each kind of tensors (names that differ in numbers only) gets an equal share of the samples, and what it does not
    use the larger kinds have. Of a kind with more tensors than its share, their names decide which are left out.
    """
    wanted, kinds = set(files), defaultdict[str, list[tuple[int, SourceTensor]]](list)
    for tensor in checkpoint.tensors:
        if tensor.file in wanted and tensor.extent.nbytes:
            kinds[collapse_numbers(tensor.name)].append((_seed(tensor.name), tensor))
    left = _MAX_REMOTE_SAMPLES if checkpoint.folder.cost.is_remote else _MAX_SAMPLES
    samples: dict[int, list[Extent]] = {index: [] for index in files}
    for done, members in enumerate(sorted(kinds.values(), key=len)):
        members.sort(key=lambda member: member[0])
        share = min(len(members) * _NUM_BLOCKS, left // (len(kinds) - done))
        for number in range(share):
            seed, tensor = members[number % len(members)]
            samples[tensor.file].extend(_block(tensor.extent, seed, number // len(members)))
        left -= share
    return {index: sorted(extents) for index, extents in samples.items()}


def _seed(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogatepass"))


def _block(extent: Extent, seed: int, number: int) -> Iterator[Extent]:
    """The block of this number of a tensor; none if a lower number has all of it."""
    if extent.nbytes <= _WHOLE_NBYTES:
        if number == 0:
            yield extent
    elif number == _NUM_BLOCKS - 1:
        yield Extent(extent.end - BLOCK, BLOCK)
    else:
        third = extent.nbytes // (_NUM_BLOCKS - 1)
        yield Extent(extent.offset + number * third + (seed >> 16 * number) % (third - BLOCK), BLOCK)


def _hashed(checkpoint: SourceCheckpoint, samples: Mapping[int, Sequence[Extent]]) -> dict[int, str]:
    """The digest of each file's samples."""
    runs = [
        (index, extents[first : first + _RUN])
        for index, extents in samples.items()
        for first in range(0, len(extents), _RUN)
    ]

    def read(run: tuple[int, Sequence[Extent]]) -> bytes:
        index, extents = run
        file, digest, buffer = checkpoint.files[index], xxhash.xxh3_128(), bytearray(_WHOLE_NBYTES)
        with checkpoint.folder.open(file.name, file.nbytes) as opened:
            for extent in extents:
                view = memoryview(buffer)[: extent.nbytes]
                opened.read(extent.offset, view)
                digest.update(view)
        return digest.digest()

    digests: dict[int, bytes] = dict.fromkeys(samples, b"")
    for (index, _), digest in zip(runs, each(read, runs, _NUM_THREADS), strict=True):
        digests[index] += digest
    return {index: digest_hex(found) for index, found in digests.items()}


def _status(folder: Store, name: str) -> FileStat:
    status = folder.stat(name)
    if status is None:
        raise FormatError("is missing", path=folder.location(name), code="missing")
    return status
