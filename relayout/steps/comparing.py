"""The output of a step: what changed since the last one goes into a delta, and all of it into a folder, or both.

A step is converted as any checkpoint is. What is written passes through here: the bytes of each weight file are
assembled in memory, compared with those of the step before, and kept for the next one.
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from relayout.conversion.changes import UNCHANGED, FileVersion, element_widths, write_changes
from relayout.core.digests import digest_hex
from relayout.core.extents import Extent
from relayout.core.workers import each
from relayout.format.delta import NEW, OLD, DeltaFile, DeltaManifest, dump_delta
from relayout.format.index import DIGESTED_NBYTES, MANIFEST_NAME, VERSION, IndexedFile, chunks_of
from relayout.format.manifest import parse_manifest
from relayout.format.safetensors import parse_header
from relayout.publish.output import Output
from relayout.storage.local.descriptors import with_path
from relayout.storage.stores import Closable, WritableFile
from relayout.storage.system import allocate

Bytes = npt.NDArray[np.uint8]


@dataclass(slots=True)
class KeptStep:
    """The last step that was published, as far as this process has written it."""

    keep_in: Path | None = None
    """A folder on a local drive for the bytes of weight files; None: host memory."""
    content: str | None = None
    """Digest of relayout.json; None: nothing is kept, or what is kept is of no step that all have published."""
    manifest: bytes = b""
    """relayout.json as stored, of the process that publishes; as are the tables and what is beside the weights."""
    tables: Mapping[str, bytes] = field(default_factory=dict)
    """The tables of its ranks as stored, by name."""
    side_files: Mapping[str, str] = field(default_factory=dict)
    """Digests of the files beside the weights, by name."""
    files: dict[str, Bytes] = field(default_factory=dict)
    """The bytes of the weight files that this process writes, by name."""

    def forget(self) -> None:
        """Keep nothing: the next step cannot be a delta."""
        self.content, self.manifest, self.tables, self.side_files = None, b"", {}, {}
        self.files.clear()

    def memory(self, nbytes: int) -> Bytes:
        """New memory for a file.

        Raises:
            OSError, MemoryError: there is not enough.
        """
        if self.keep_in is None or not nbytes:
            return np.empty(nbytes, np.uint8)
        # Without a name: it goes with its mapping.
        with with_path(self.keep_in), tempfile.TemporaryFile(dir=self.keep_in) as file:
            allocate(file.fileno(), nbytes)  # Else a full drive is a signal that ends the process.
            return np.memmap(file, np.uint8, "r+", shape=(nbytes,))


class StepOutput:
    """An `Output` (see there) over those of a step's delta and of its folder."""

    mark = ""

    def __init__(
        self, kept: KeptStep, side_files: Sequence[str], threads: int, *, delta: Output | None, full: Output | None
    ) -> None:
        """Take what is kept of the step before, whose files are replaced by those of this one while they are written.

        Args:
            side_files: names of the files beside the weights.
            threads: that compare.
            delta: is given what changed; None: no delta is made.
            full: is given everything; None: no folder is made.
        """
        self._kept, self._delta, self._full = kept, delta, full
        self._threads = threads
        self._side_names = frozenset(side_files)
        self._lock = threading.Lock()
        self._files: dict[str, Bytes] = {}
        """Files that are being written."""
        self._small: dict[str, bytes] = {}
        self._side_files: dict[str, str] = {}
        self._changed_side_files: list[str] = []
        self.changes: dict[str, DeltaFile] = {}
        """What the delta has of each weight file, by name."""
        self.delta_nbytes = 0
        """Bytes of what changed in all weight files, as the delta has it; in the end."""

    def check_space(self, nbytes: int, part_nbytes: int | None = None) -> None:
        if self._full is not None:
            self._full.check_space(nbytes, part_nbytes)

    def write(self, name: str, nbytes: int) -> WritableFile:
        below = None if self._full is None else self._full.write(name, nbytes)
        return _TeeFile(self._memory(name, nbytes), below)

    def _memory(self, name: str, nbytes: int) -> Bytes:
        with self._lock:
            if name not in self._files:
                self._files[name] = self._kept.memory(nbytes)
            return self._files[name]

    def head(self, name: str, head: bytes, nbytes: int) -> None:
        """Complete a file: compare it with that of the step before, and keep it in place of that."""
        memory = self._memory(name, nbytes)
        memory[: len(head)] = np.frombuffer(head, np.uint8)
        if self._full is not None:
            self._full.head(name, head, nbytes)
        if self._delta is not None:
            self.changes[name] = self._compare(self._delta, name, memory, len(head))
        with self._lock:
            self._kept.files[name] = self._files.pop(name)

    def _compare(self, delta: Output, name: str, new: Bytes, data_start: int) -> DeltaFile:
        old = self._kept.files[name]
        assert old.nbytes == new.nbytes
        chunks = list(chunks_of(data_start, new.nbytes, DIGESTED_NBYTES))

        def differs(chunk: Extent) -> bool:
            return not np.array_equal(old[chunk.offset : chunk.end], new[chunk.offset : chunk.end])

        heads = old[:data_start].tobytes(), new[:data_start].tobytes()
        differing = [number for number, found in enumerate(each(differs, chunks, self._threads)) if found]
        if not differing and heads[0] == heads[1]:
            return UNCHANGED
        versions = [
            FileVersion(head, lambda _, place, __, side=side: side[place.offset : place.end].data)  # type: ignore[misc]
            for head, side in zip(heads, (old, new), strict=True)
        ]
        file = IndexedFile(name, new.nbytes, data_start, "", "", "")
        widths = element_widths(parse_header(heads[1], new.nbytes, name))
        pair = (versions[0], versions[1])
        return write_changes(delta, file, DIGESTED_NBYTES, pair, differing, widths, threads=self._threads)

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
                base=digest_hex(self._kept.manifest),
                makes=digest_hex(blob),
                files=changed,
                side_files=tuple(self._changed_side_files),
            )
            self._delta.put(MANIFEST_NAME, [dump_delta(made)])
        self._kept.manifest, self._kept.side_files = blob, self._side_files
        self._kept.tables = {entry.table: self._small[entry.table] for entry in manifest.holders.values()}


class _TeeFile(Closable):
    """A weight file that is written into memory, and into a file of a folder, if there is one. Thread-safe."""

    def __init__(self, memory: Bytes, below: WritableFile | None) -> None:
        self._memory, self._below = memory, below

    def write(self, offset: int, view: memoryview, address: int = 0) -> None:
        self._memory[offset : offset + view.nbytes] = np.frombuffer(view, np.uint8)
        if self._below is not None:
            self._below.write(offset, view, address)

    def close(self) -> None:
        if self._below is not None:
            self._below.close()
