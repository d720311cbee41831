"""The output of a step: a delta with the changes since the last step, a folder with everything, or both.

Data retained for one step is kept in memory, which `changing` updates from one step to the next.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from relayout.conversion.changes import EncodedPiece, write_pieces
from relayout.core.digests import blake3_hex
from relayout.core.extents import BLOCK, Extent, align_up, split
from relayout.core.workers import each
from relayout.format.delta import (
    CHANGED_DIGESTS_NAME,
    NEW,
    NEW_MANIFEST_NAME,
    DeltaFile,
    DeltaManifest,
    dump_changed_digests,
    dump_delta,
    encode,
    layout_difference,
)
from relayout.format.index import CHUNKS_NAME, DIGESTS_NAME, MANIFEST_NAME, SIGNATURE_NAME, VERSION, digest_extents
from relayout.format.manifest import MAX_MANIFEST_NBYTES, compress, content_of, parse_manifest
from relayout.format.steps_index import DELTA, FULL
from relayout.publish.output import Output
from relayout.storage.local.descriptors import with_path
from relayout.storage.stores import WritableFile
from relayout.storage.system import allocate, in_huge_pages

Bytes = npt.NDArray[np.uint8]

_WRITTEN_NBYTES = 2**23
"""Bytes that one thread writes at a time to a folder."""

Key = TypeVar("Key", bound=Hashable)


@dataclass(slots=True)
class RetainedStep:
    """Data retained for the last published step, as far as this process needs it."""

    keep_in: Path | None = None
    """A folder on a local drive for the bytes of tensors; None: host memory."""
    content: str | None = None
    """Digest of relayout.json; None: the retained data belongs to no step that all members have published."""
    manifest: bytes = b""
    """relayout.json as stored. This field, `small` and `digests` are kept by the publishing process only."""
    small: Mapping[str, str] = field(default_factory=dict)
    """BLAKE3 digests of all files other than weight files, by name."""
    digests: bytes = b""
    """relayout.digests as stored."""
    is_there: bool = False
    """True once the memory of the following fields is allocated."""
    files: Mapping[str, Bytes] = field(default_factory=dict)
    """The bytes of the weight files that this process writes, by name."""
    sources: Mapping[int, Bytes] = field(default_factory=dict)
    """The whole tensors that this process digests and does not hold whole, by position."""
    parts: Mapping[int, Bytes] = field(default_factory=dict)
    """Copies of the parts that this process holds of tensors that other members write, by position."""
    chunks: dict[str, list[bytes]] = field(default_factory=dict)
    """Digests of the chunks of `files`, by name."""
    slices: dict[tuple[int, int], str] = field(default_factory=dict)
    """Digests of the slices in `files`, by tensor and position."""
    source_digests: dict[int, str] = field(default_factory=dict)
    """Digests of whole tensors."""

    def forget(self) -> None:
        """Drop all data: the next step cannot be a delta."""
        empty = RetainedStep(self.keep_in)
        for one in fields(self):
            setattr(self, one.name, getattr(empty, one.name))

    def memories(self, sizes: Mapping[Key, int]) -> dict[Key, Bytes]:
        """Return new page-aligned memory of the given number of bytes for each key."""
        starts = list(accumulate((align_up(nbytes, BLOCK) for nbytes in sizes.values()), initial=0))
        memory = self._memory(starts.pop())
        return {key: memory[start : start + sizes[key]] for key, start in zip(sizes, starts, strict=True)}

    def _memory(self, nbytes: int) -> Bytes:
        if self.keep_in is None or not nbytes:
            return np.frombuffer(in_huge_pages(nbytes), np.uint8)
        # Without a name: it is deleted with its mapping.
        with with_path(self.keep_in), tempfile.TemporaryFile(dir=self.keep_in) as file:
            allocate(file.fileno(), nbytes)  # Otherwise a full drive is a signal that ends the process.
            return np.memmap(file, np.uint8, "r+", shape=(nbytes,))


class StepOutput:
    """An `Output` (see there) that combines the outputs of a step's delta and of its folder.

    Weight files are not written to it: `head` takes their bytes from `RetainedStep`, and their changes from `changed`.
    """

    suffix = ""

    def __init__(
        self,
        kept: RetainedStep,
        files: Sequence[str],
        threads: int,
        *,
        delta: Output | None,
        full: Output | None,
        sign: Callable[[str, bytes], bytes] | None,
    ) -> None:
        """Take the data retained for the previous step. It is updated in place to this step.

        Args:
            files: names of all weight files, in the order of the manifest.
            threads: number of threads that write to the folder.
            delta: receives the changes; None: no delta is written.
            full: receives everything; None: no folder is written.
            sign: returns model.sig of `DELTA` or `FULL`, from relayout.json as stored; None: they are not signed.
        """
        self._kept, self._delta, self._full = kept, delta, full
        self._threads, self._sign = threads, sign
        self._number_of = {name: number for number, name in enumerate(files)}
        self._pieces: dict[str, list[EncodedPiece]] = {}
        """The changes of each file, except its header."""
        self._small: dict[str, str] = {}
        self._digests = b""
        self._others: list[str] = []
        """The changed files other than weight files."""
        self.changes: dict[str, DeltaFile | None] = {}
        """The delta's entry for each weight file, by name; None: the file did not change."""
        self.delta_nbytes = 0
        """Bytes of the delta, once it is complete."""

    @property
    def makes_delta(self) -> bool:
        """True if a delta is written."""
        return self._delta is not None

    @property
    def makes_folder(self) -> bool:
        """True if a folder is written."""
        return self._full is not None

    def check_space(self, nbytes: int, part_nbytes: int | None = None) -> None:
        if self._full is not None:
            self._full.check_space(nbytes, part_nbytes)

    def write(self, name: str, nbytes: int) -> WritableFile:
        raise AssertionError(f"{name}: what is kept is changed where it is")

    def changed(self, name: str, piece: EncodedPiece) -> None:
        """Note a change of a weight file, in ascending order."""
        self._pieces.setdefault(name, []).append(piece)

    def head(self, name: str, head: bytes, nbytes: int) -> None:
        image, first = self._kept.files[name], np.frombuffer(head, np.uint8)
        xor = image[: len(head)] ^ first
        image[: len(head)] = first
        if self._full is not None:
            self._write(self._full, name, image, len(head))
            self._full.head(name, head, nbytes)
        if self._delta is not None:
            header = EncodedPiece(0, encode(xor, [(xor.nbytes, 1)]), blake3_hex(head))
            pieces = [header, *self._pieces.pop(name, [])]
            self.changes[name] = write_pieces(self._delta, name, self._number_of[name], pieces)

    def _write(self, full: Output, name: str, image: Bytes, start: int) -> None:
        """Write the data section of a file."""
        address = image.ctypes.data
        if start == len(image):
            return
        with full.write(name, len(image)) as file:

            def write(part: Extent) -> None:
                file.write(part.offset, image[part.offset : part.end].data, (address + part.offset) % BLOCK)

            each(write, list(split(Extent(start, len(image) - start), _WRITTEN_NBYTES)), self._threads)

    def put(self, name: str, pieces: Iterable[bytes], mode: int | None = None) -> None:
        content = b"".join(pieces)
        if self._full is not None:
            if name == MANIFEST_NAME and self._sign is not None:
                self._full.put(SIGNATURE_NAME, [self._sign(FULL, content)])
            self._full.put(name, [content], mode)
        if name == MANIFEST_NAME:  # It is the last.
            self._complete(content)
        elif name == DIGESTS_NAME:
            self._digests = content
        elif name != CHUNKS_NAME:
            self._small[name] = blake3_hex(content)
            if self._delta is not None and self._kept.small.get(name) != self._small[name]:
                self._others.append(name)
                self._put(NEW + name, content, mode)

    def _put(self, name: str, content: bytes, mode: int | None = None) -> None:
        """Write a file of the delta."""
        assert self._delta is not None
        self._delta.put(name, [content], mode)
        self.delta_nbytes += len(content)

    def kept(self, part: str) -> bytes | None:
        """Return the notes of a finished part; add its changes to those of this output."""
        found = None if self._full is None else self._full.kept(part)
        if self._full is not None and found is None:
            return None
        if self._delta is not None:
            found = self._delta.kept(part)
            changes = {} if found is None else json.loads(found)
            self.changes |= {name: None if one is None else DeltaFile(*one) for name, one in changes.items()}
        return found

    def keep(self, part: str, notes: bytes) -> None:
        """Record that a part is finished; the notes of a delta are its entries for each file."""
        if self._full is not None:
            self._full.keep(part, notes)
        if self._delta is not None:
            changes = {name: None if one is None else astuple(one) for name, one in self.changes.items()}
            self._delta.keep(part, json.dumps(changes).encode())

    def _complete(self, blob: bytes) -> None:
        """Write the rest of the delta after all else of the step, and retain the digests of small files.

        Args:
            blob: the manifest of the step.
        """
        kept = self._kept
        if self._delta is not None:
            old, new = (parse_manifest(side, MANIFEST_NAME) for side in (kept.manifest, blob))
            difference = layout_difference(old, new)
            assert difference is None, difference
            stored, parts = [], []
            for place in digest_extents(new):
                sides = (side[place.offset : place.end] for side in (kept.digests, self._digests))
                changed, part = dump_changed_digests(*sides)
                stored.append(changed)
                parts.append(part)
            if any(stored):
                self._put(CHANGED_DIGESTS_NAME, b"".join(stored))
            self._put(NEW_MANIFEST_NAME, compress(blob, MAX_MANIFEST_NBYTES))
            made = DeltaManifest(
                generator=f"relayout {VERSION}",
                base=content_of(kept.manifest),
                makes=content_of(blob),
                files=tuple(one for file in new.files if (one := self.changes[file.name]) is not None),
                digests=tuple(parts),
                others=tuple(self._others),
            )
            self.delta_nbytes += sum(one.nbytes for one in made.files)
            stored_manifest = dump_delta(made)
            if self._sign is not None:
                self._put(SIGNATURE_NAME, self._sign(DELTA, stored_manifest))
            self._put(MANIFEST_NAME, stored_manifest)
        kept.manifest, kept.small, kept.digests = blob, self._small, self._digests
