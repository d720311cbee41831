"""The output of a step: what changed since the last one goes into a delta, and all of it into a folder, or both.

What is kept of a step is memory, which `changing` brings from one step to the next.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from relayout.conversion.changes import UNCHANGED, write_pieces
from relayout.core.digests import digest_hex
from relayout.core.extents import BLOCK, Extent, align_up, split
from relayout.core.workers import each
from relayout.format.delta import NEW, OLD, DeltaFile, DeltaManifest, dump_delta, encode
from relayout.format.index import DIGESTED_NBYTES, MANIFEST_NAME, VERSION, num_chunks
from relayout.format.manifest import content_of, parse_manifest
from relayout.publish.output import Output
from relayout.storage.local.descriptors import with_path
from relayout.storage.stores import WritableFile
from relayout.storage.system import allocate, in_huge_pages

Bytes = npt.NDArray[np.uint8]

_WRITTEN_NBYTES = 2**23
"""What one thread writes at a time to a folder."""

Key = TypeVar("Key", bound=Hashable)


@dataclass(slots=True)
class KeptStep:
    """The last step that was published, as far as this process has to do with it."""

    keep_in: Path | None = None
    """A folder on a local drive for the bytes of tensors; None: host memory."""
    content: str | None = None
    """Digest of relayout.json; None: what is kept is of no step that all have published."""
    manifest: bytes = b""
    """relayout.json as stored, of the process that publishes; as are the tables and what is beside the weights."""
    tables: Mapping[str, bytes] = field(default_factory=dict)
    """The tables of its ranks as stored, by name."""
    side_files: Mapping[str, str] = field(default_factory=dict)
    """Digests of the files beside the weights, by name."""
    is_there: bool = False
    """Whether there is memory for what follows."""
    files: Mapping[str, Bytes] = field(default_factory=dict)
    """The bytes of the weight files that this process writes, by name."""
    sources: Mapping[int, Bytes] = field(default_factory=dict)
    """The whole tensors of which it takes the digest, if it does not hold them whole."""
    parts: Mapping[int, Bytes] = field(default_factory=dict)
    """What it held of tensors that others write."""
    chunks: dict[str, list[bytes]] = field(default_factory=dict)
    """Digests of the chunks of these files."""
    slices: dict[tuple[int, int], str] = field(default_factory=dict)
    """Digests of the slices in these files, by tensor and position."""
    source_digests: dict[int, str] = field(default_factory=dict)
    """Digests of whole tensors."""

    def forget(self) -> None:
        """Keep nothing: the next step cannot be a delta."""
        empty = KeptStep(self.keep_in)
        for one in fields(self):
            setattr(self, one.name, getattr(empty, one.name))

    def memories(self, sizes: Mapping[Key, int]) -> dict[Key, Bytes]:
        """New memory of so many bytes for each, which begins at a page."""
        starts = list(accumulate((align_up(nbytes, BLOCK) for nbytes in sizes.values()), initial=0))
        memory = self._memory(starts.pop())
        return {key: memory[start : start + sizes[key]] for key, start in zip(sizes, starts, strict=True)}

    def _memory(self, nbytes: int) -> Bytes:
        if self.keep_in is None or not nbytes:
            return np.frombuffer(in_huge_pages(nbytes), np.uint8)
        # Without a name: it goes with its mapping.
        with with_path(self.keep_in), tempfile.TemporaryFile(dir=self.keep_in) as file:
            allocate(file.fileno(), nbytes)  # Else a full drive is a signal that ends the process.
            return np.memmap(file, np.uint8, "r+", shape=(nbytes,))


class StepOutput:
    """An `Output` (see there) over those of a step's delta and of its folder.

    Weight files are not written to it: `head` takes them as they are kept, and what was noted by `changed`.
    """

    mark = ""

    def __init__(
        self, kept: KeptStep, side_files: Sequence[str], threads: int, *, delta: Output | None, full: Output | None
    ) -> None:
        """Take what is kept of the step before, which becomes this one.

        Args:
            side_files: names of the files beside the weights.
            threads: that write to the folder.
            delta: is given what changed; None: no delta is made.
            full: is given everything; None: no folder is made.
        """
        self._kept, self._delta, self._full = kept, delta, full
        self._threads = threads
        self._side_names = frozenset(side_files)
        self._pieces: dict[str, list[tuple[int, bytes]]] = {}
        """What changed of each file, but for its header."""
        self._small: dict[str, bytes] = {}
        self._side_files: dict[str, str] = {}
        self._changed_side_files: list[str] = []
        self.changes: dict[str, DeltaFile] = {}
        """What the delta has of each weight file, by name."""
        self.delta_nbytes = 0
        """Bytes of what changed in all weight files, as the delta has it; in the end."""

    @property
    def makes_delta(self) -> bool:
        """Whether what changed is written."""
        return self._delta is not None

    @property
    def makes_folder(self) -> bool:
        """Whether everything is written."""
        return self._full is not None

    def check_space(self, nbytes: int, part_nbytes: int | None = None) -> None:
        if self._full is not None:
            self._full.check_space(nbytes, part_nbytes)

    def write(self, name: str, nbytes: int) -> WritableFile:
        raise AssertionError(f"{name}: what is kept is changed where it is")

    def changed(self, name: str, piece: int, encoded: bytes) -> None:
        """Note what `encode` makes of a piece of a weight file, in rising order."""
        self._pieces.setdefault(name, []).append((piece, encoded))

    def head(self, name: str, head: bytes, nbytes: int) -> None:
        image, first = self._kept.files[name], np.frombuffer(head, np.uint8)
        xor = image[: len(head)] ^ first
        image[: len(head)] = first
        if self._full is not None:
            self._write(self._full, name, image, len(head))
            self._full.head(name, head, nbytes)
        if self._delta is not None:
            changes = [(0, encode(xor, [(xor.nbytes, 1)])), *self._pieces.pop(name, [])]
            if len(changes) == 1 and not changes[0][1]:
                self.changes[name] = UNCHANGED
            else:
                num_pieces = 1 + num_chunks(len(head), nbytes, DIGESTED_NBYTES)
                self.changes[name] = write_pieces(self._delta, name, num_pieces, changes)

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
            self._full.put(name, [content], mode)
        if name in self._side_names:
            self._side_files[name] = digest_hex(content)
            if self._kept.side_files.get(name) == self._side_files[name]:
                return
            self._changed_side_files.append(name)
        else:
            self._small[name] = content
        if self._delta is not None:
            self._delta.put(NEW + name, [content], mode)
        if name == MANIFEST_NAME:  # It is the last.
            self._complete(content)

    def kept(self, part: str) -> bytes | None:
        """The notes of a part that is finished; what it changed is counted as this output's."""
        found = None if self._full is None else self._full.kept(part)
        if self._full is not None and found is None:
            return None
        if self._delta is not None:
            found = self._delta.kept(part)
            changes = {} if found is None else json.loads(found)
            self.changes |= {name: DeltaFile(nbytes, digest) for name, (nbytes, digest) in changes.items()}
        return found

    def keep(self, part: str, notes: bytes) -> None:
        """A part is finished; the notes of a delta's are what it has of each file."""
        if self._full is not None:
            self._full.keep(part, notes)
        if self._delta is not None:
            changes = {name: (one.nbytes, one.index_digest) for name, one in self.changes.items()}
            self._delta.keep(part, json.dumps(changes).encode())

    def _complete(self, blob: bytes) -> None:
        """Write the rest of the delta when all of the step is written, and keep its small files.

        Args:
            blob: the manifest of the step.
        """
        manifest = parse_manifest(blob, MANIFEST_NAME)
        if self._delta is not None:
            for name, content in self._kept.tables.items():
                self._delta.put(OLD + name, [content])
            self._delta.put(OLD + MANIFEST_NAME, [self._kept.manifest])
            changed = tuple(self.changes[file.name] for file in manifest.files)
            self.delta_nbytes = sum(one.nbytes for one in changed)
            made = DeltaManifest(
                generator=f"relayout {VERSION}",
                base=content_of(self._kept.manifest),
                makes=content_of(blob),
                files=changed,
                side_files=tuple(self._changed_side_files),
            )
            self._delta.put(MANIFEST_NAME, [dump_delta(made)])
        self._kept.manifest, self._kept.side_files = blob, self._side_files
        self._kept.tables = {entry.table: self._small[entry.table] for entry in manifest.holders.values()}
