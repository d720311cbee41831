"""The publisher of stores without rename: files are uploaded while they are written, and become objects at the end.

Until then there is nothing under the output's prefix. What an attempt has begun and completed is recorded under a
hidden prefix beside it, `.OUT.relayout-partial/` (`records`), and the next attempt continues from there. Only the
holder of the output's lease publishes, and discards what others have recorded (`lease`, `erasing`).

No object is ever overwritten: each is created on condition that it does not exist. The marker is the last.

Parts of an output of several processes have a record each, with the uploads of all their files. They need no lease:
each process touches only what it has begun itself.
"""

from __future__ import annotations

import errno
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain

from relayout.core.digests import digest_hex
from relayout.errors import FormatError, PlanError
from relayout.storage.cloud.client import NotCompleted
from relayout.storage.cloud.output import records
from relayout.storage.cloud.output.erasing import Eraser
from relayout.storage.cloud.output.lease import Lease
from relayout.storage.cloud.output.prefix import OutputPrefix, bare, check_vacant, in_parallel
from relayout.storage.cloud.output.records import Begun, Complete, Notes, Proof, Publishing, Unit
from relayout.storage.cloud.upload import Upload
from relayout.storage.protocols import LIVE, Closable, ReadableFile, Replaceable, RequestError, kept_note

_SMALL_NBYTES = 2**20
"""Files up to this size are kept in memory and written whole."""


@contextmanager
def staged(output: OutputPrefix, older: Replaceable, *, replace: bool, shared: str | None) -> Iterator[CloudStaging]:
    """Stage and publish an output. If another process writes it, this is found out before anything is changed."""
    what = "convert" if shared is None else "commit"
    with Lease(output, what) as lease:
        check_vacant(output, older, force=replace)  # Another process may have published meanwhile.
        staging = CloudStaging(output, older, lease, replace=replace)
        staging.read_published()
        if shared is None:
            staging.take_over()
        elif shared.startswith(LIVE):
            staging.await_parts(shared)
        else:
            staging.gather(shared)
        try:
            yield staging
            staging.publish()
        except BaseException as error:
            staging.give_up(error)
            raise


@contextmanager
def part_staged(
    output: OutputPrefix, older: Replaceable, shared: str, part: str, *, replace: bool
) -> Iterator[CloudStaging]:
    """Stage a part of an output, and record it."""
    staging = PartStaging(output, older, shared, part, replace=replace)
    try:
        yield staging
        staging.complete()
    except BaseException as error:
        staging.give_up(error)
        if isinstance(error, RequestError):
            staging.check_incomplete()  # The process that publishes aborts the uploads of others.
        raise


class CloudStaging:
    """Uploads that become objects when they are published. Without `replace`, methods raise PlanError where they would
    discard what other processes have done.
    """

    can_read = False

    def __init__(self, output: OutputPrefix, older: Replaceable, lease: Lease | None, *, replace: bool) -> None:
        """Begin with nothing. Without a lease, as of a part, nothing is claimed for the next attempt."""
        self._output = output
        self._older = older
        self._marker = older.marker
        self._lease = lease
        self._replace = replace
        self._backend = output.client.uploads()
        self._erase = Eraser(output, self._backend.abort, self._check)
        self._small: dict[str, bytes] = {}
        self._uploads: dict[str, Upload] = {}
        """Files of which bytes are missing."""
        self._complete: dict[str, Complete] = {}
        self._records: dict[str, str] = {}
        """The record that claims a complete file for the next attempt, by the file's name."""
        self._created: dict[str, set[str]] = {}
        """Files whose objects this attempt has created, and their versions, as far as the store reports them."""
        self._published = Publishing({}, {})
        """What is recorded of publishing, by this attempt or an earlier one."""
        self._notes: dict[str, _Notes] = {}
        self._part_notes: dict[str, bytes] = {}
        self._has_begun = False
        """Whether anything was changed in the bucket."""
        self._awaited: str | None = None
        """The name of parts that are still to come."""
        self._has_parts = False
        """Whether the files are those of parts, which others have recorded."""
        self._begun = records.UPLOADS
        """How names of records of uploads begin."""

    @property
    def location(self) -> str:
        return self._output.hidden_location

    def _check(self) -> None:
        if self._lease is not None:
            self._lease.check()

    def read_published(self) -> None:
        """Read what an attempt that ended while it published has created."""
        self._published = self._output.read(records.PUBLISHING, Publishing) or self._published

    def take_over(self) -> None:
        """Read what an earlier attempt has completed. Changes nothing."""
        output = self._output
        if self._has_units():
            done = len(output.read_all(records.UNITS, Unit))
            output.read_all(records.UNIT_UPLOADS, Begun)
            what = f"--force discards {done} units that other processes have converted, and those in progress"
            warnings.warn(f"{output}: {what}", stacklevel=4)
        for name, file in output.read_all(records.COMPLETE, Complete).items():
            if name != _claim(file.name):
                raise FormatError("is not the record that its name implies", path=f"{self.location}/{name}")
            self._complete[file.name], self._records[file.name] = file, name

    def _has_units(self) -> bool:
        """Whether there are units, complete or not. Those of a `LIVE` name are left of processes that had the lease."""
        names = self._output.record_names(records.UNITS) + self._output.record_names(records.UNIT_UPLOADS)
        units = [name for name in names if not name.partition("/")[2].startswith(LIVE)]
        if units and not self._replace:
            what = "holds units of other processes: --commit publishes them, --force discards them"
            raise PlanError(what, path=str(self._output), code="exists")
        return bool(units)

    def refuse_conversion(self) -> None:
        """Raise PlanError if there is an interrupted conversion without units, whose uploads would be lost."""
        if not self._replace and self._output.record_names(records.COMPLETE):
            what = "holds an interrupted conversion without units; --force discards it"
            raise PlanError(what, path=self.location, code="exists")

    def gather(self, shared: str) -> None:
        """Take all parts of this name, of which there must be some."""
        self.refuse_conversion()
        prefix = f"{records.UNITS}{shared}/"
        units = self._output.read_all(prefix, Unit)
        if not units:
            raise PlanError("no unit of this conversion is done", path=self.location, code="missing")
        for name, unit in units.items():
            self._part_notes[name.removeprefix(prefix)] = unit.notes.encode("latin-1")
            self._complete |= {file.name: file for file in unit.files}
            self._small |= {name: text.encode("latin-1") for name, text in unit.small.items()}
            self._records |= {file.name: name for file in unit.files}
        self._has_parts = True

    def await_parts(self, shared: str) -> None:
        """Make room for parts of this name. Those of other such names are left of processes that had the lease."""
        self.refuse_conversion()
        self._has_units()
        self._awaited = shared
        self.clear()

    def take_parts(self) -> None:
        if self._awaited is not None:
            self.gather(self._awaited)
            self._has_parts = False  # Nobody else could publish them.

    def _check_written(self) -> None:
        for upload in self._uploads.values():
            upload.tags()  # Raises if bytes are missing.

    def _abort_incomplete(self) -> None:
        """Abort the uploads that earlier attempts have recorded, and not completed."""
        known = {(file.name, file.upload) for file in self._complete.values()}
        left = {
            name: upload
            for name, upload in self._output.read_all(records.UPLOADS, Begun).items()
            if (upload.name, upload.upload) not in known
        }
        self._erase.uploads(left.values())
        self._erase.records(left)

    def _discard(self) -> None:
        """Give up the files that this attempt has begun, and that no record claims for the next."""
        for name in self.names():
            if name not in self._records:
                self.remove(name)

    def clear(self) -> None:
        """What was being published stays recorded: its objects exist."""
        self._has_begun = True
        self._erase.attempt(published=False)
        self._notes.clear()
        for files in (self._small, self._uploads, self._complete, self._records):
            files.clear()

    def check_space(self, nbytes: int) -> None:
        """Any size is accepted."""

    def names(self) -> list[str]:
        return sorted({*self._small, *self._uploads, *self._complete})

    def remove(self, name: str) -> None:
        self._small.pop(name, None)
        upload, complete = self._uploads.pop(name, None), self._complete.pop(name, None)
        claim = self._records.pop(name, None)
        if claim is not None and claim.startswith(records.COMPLETE):
            self._erase.records([claim])
        for upload_id in ([upload.id] if upload else []) + ([complete.upload] if complete else []):
            begun = Begun(name, upload_id)
            self._erase.uploads([begun])
            self._erase.records([self._begun + begun.key])

    def open(self, name: str, nbytes: int) -> ReadableFile:
        """Always fails."""
        raise OSError(errno.ENOTSUP, "an upload cannot be read before it is published", self._output.location(name))

    def write_file(self, name: str, nbytes: int) -> Upload:
        if name not in self._uploads:
            self._check_new(name)
            self._begin(name, nbytes)
        return self._uploads[name]

    def write_head(self, name: str, head: bytes, nbytes: int) -> None:
        """After this the file counts for the next attempt."""
        if name in self._complete:
            return
        upload = self.write_file(name, nbytes)
        upload.write(0, memoryview(head))
        file = Complete.of(name, upload)
        if self._lease is not None:
            for notes in self._notes.values():  # They describe the file.
                notes.close()
            self.write_record(_claim(name), file)
            self._records[name] = _claim(name)
        self._complete[name] = file
        del self._uploads[name]

    def put(self, name: str, pieces: Iterable[bytes], mode: int | None = None) -> None:
        self._check_new(name)
        begun, rest = bytearray(), iter(pieces)
        for piece in rest:
            begun += piece
            if len(begun) > _SMALL_NBYTES and name != self._marker:
                upload = self._begin(name)
                upload.append(chain([bytes(begun)], rest))
                self._complete[name] = Complete.of(name, upload)
                del self._uploads[name]
                return
        self._small[name] = bytes(begun)

    def read_notes(self, name: str) -> bytes | None:
        if self._part_notes:
            return self._part_notes.get(name)
        if not self._complete:  # Notes alone prove nothing.
            return None
        texts = self._output.read_all(f"{records.NOTES}{name}", Notes)
        return b"".join(notes.text.encode("latin-1") for notes in texts.values()) if texts else None

    def open_notes(self, name: str, header: bytes | None) -> _Notes:
        """The caller continues from what is there, and writes from now on."""
        self._has_begun = True
        earlier = self._output.read_all(f"{records.NOTES}{name}", Notes)
        if header is not None:
            self._erase.records(earlier)
        self._abort_incomplete()
        self._notes[name] = _Notes(self, name, header, 0 if header is not None else len(earlier))
        return self._notes[name]

    def write_record(self, name: str, record: object) -> None:
        """Write a record, by the right of the lease."""
        self._check()
        self._output.write(name, record)

    def _begin(self, name: str, nbytes: int | None = None) -> Upload:
        """Begin an upload, and record it before it has a part: only recorded uploads are ever aborted."""
        self._check()
        self._has_begun = True
        upload = Upload(self._backend, self._output.full(name), self._output.location(name), nbytes)
        self._uploads[name] = upload
        begun = Begun(name, upload.id)
        self._output.write(self._begun + begun.key, begun)
        return upload

    def _check_new(self, name: str) -> None:
        if name in self._small or name in self._uploads or name in self._complete:
            raise FileExistsError(errno.EEXIST, "exists", self._output.location(name))

    def publish(self) -> None:
        """Create the objects of all files, the marker last. With `replace`, first delete those of the older output.

        Raises:
            PlanError: something is there that may not be deleted.
            FileExistsError: another process has created or replaced an object there.
        """
        self._check_written()
        self._has_begun = True
        proofs = {name: file.proof for name, file in self._complete.items()}
        proofs |= {name: Proof(len(text), digest_hex(text), len(text)) for name, text in self._small.items()}
        done = self._make_room(proofs)
        in_parallel(self._create, self._small.keys() - done.keys() - {self._marker})
        in_parallel(self._finish, [file for name, file in self._complete.items() if name not in done])
        self._check_unchanged({name: proof for name, proof in proofs.items() if name != self._marker}, done)
        if self._marker in self._small and self._marker not in done:
            self._create(self._marker)
        try:
            self._erase.attempt(published=True)
        except (OSError, FormatError, PlanError) as error:  # The output is complete.
            warnings.warn(f"{self._output}: complete, but records are left in {self.location}: {error}", stacklevel=4)

    def _make_room(self, proofs: dict[str, Proof]) -> dict[str, str]:
        """Delete what is in the way, by proof. Return the versions of files whose objects exist already."""
        output = self._output
        there = output.objects()
        done = output.proven(proofs, there)
        if done != proofs.keys():
            done -= {self._marker}  # It must not exist before all others do.
        left = {name: version for name, version in there.items() if name not in done}
        old = set() if self._marker in there else output.published(self._published, left)
        rest = left.keys() - old
        if self._replace and self._marker in there and rest:
            old = rest & self._older.check(output.store, there, force=True)
        elif occupied := sorted(rest & proofs.keys()):
            raise FileExistsError(errno.EEXIST, "another object has been created here", output.location(occupied[0]))
        # If this process ends now, the record tells the next attempt which objects are not part of an output.
        versions = {name: there[name] for name in old}
        self._published = Publishing(proofs, versions)
        self.write_record(records.PUBLISHING, self._published)
        marker = {name: version for name, version in versions.items() if name == self._marker}
        self._erase.objects(marker)
        self._erase.objects({name: version for name, version in versions.items() if name not in marker})
        return {name: there[name] for name in done}

    def _create(self, name: str) -> None:
        self._check()
        version, is_ours = self._output.put(self._output.full(name), self._small[name])
        if is_ours:
            self._created[name] = set(version.values())

    def _finish(self, file: Complete) -> None:
        """Let an upload become an object."""
        self._check()
        full = self._output.full(file.name)
        version = self._backend.complete(full, file.upload, file.tags)
        if not isinstance(version, NotCompleted):
            self._created[file.name] = {version}
        elif self._output.proves(file.name, file.proof):
            return  # The answer to an earlier request was lost, or another process has created the same.
        elif version is NotCompleted.EXISTS:
            location = self._output.location(file.name)
            raise FileExistsError(errno.EEXIST, "another object has been created here", location)
        else:
            claim = self._records.pop(file.name, None)
            if claim is not None:  # What it claims is not true.
                self._erase.records([claim])
            what = "its upload no longer exists: aborted by another process or a lifecycle rule; convert again"
            raise RequestError(errno.EIO, what, self._output.location(file.name))

    def _check_unchanged(self, proofs: Mapping[str, Proof], done: Mapping[str, str]) -> None:
        """Check, by one listing, that all objects are those that were created or proven. Other versions are proven.

        Raises:
            FileExistsError: another process has replaced or deleted an object.
        """
        there = self._output.objects()
        created = self._created_in(there)
        changed = {name for name in proofs if name not in created and done.get(name) != there.get(name, "")}
        if wrong := sorted(changed - self._output.proven(proofs, changed & there.keys())):
            what = "was replaced or deleted by another process before the output was complete"
            raise FileExistsError(errno.EEXIST, what, self._output.location(wrong[0]))

    def _created_in(self, there: Mapping[str, str]) -> set[str]:
        """The objects of a listing that still have the version that this attempt has created."""
        return {
            name
            for name, versions in self._created.items()
            if name in there and bare(there[name]) in {bare(version) for version in versions} - {""}
        }

    def give_up(self, error: BaseException) -> None:
        """Delete what this attempt has created and the next cannot use, unless another process has taken over."""
        if not self._has_begun:
            return
        try:
            self._discard()
            if self._lease is None:
                return
            if self._records and (self._has_parts or any(notes.are_kept for notes in self._notes.values())):
                if self._notes:
                    error.add_note(kept_note(self.location))
                return
            self._delete_created()
            self.clear()
        except (OSError, PlanError, FormatError):
            error.add_note(f"records of unfinished uploads are left in {self.location}: the same command aborts them")

    def _delete_created(self) -> None:
        """Delete the objects that this attempt has created, if no manifest can name them.

        The proof is the version at creation, or the content where the store reports another one.
        """
        output = self._output
        there = output.objects()
        if self._marker not in there or self._marker in self._created:
            ours = self._created_in(there)
            ours |= output.proven(self._published.files, (self._created.keys() & there.keys()) - ours)
            self._erase.objects({name: there[name] for name in ours})
            if not (self._published.files.keys() | self._published.older) & output.objects().keys():
                self._erase.records([records.PUBLISHING])


class PartStaging(CloudStaging):
    """The uploads of a part, which is recorded as a whole when it is complete."""

    def __init__(self, output: OutputPrefix, older: Replaceable, shared: str, part: str, *, replace: bool) -> None:
        super().__init__(output, older, None, replace=replace)
        self.refuse_conversion()
        self._begun = f"{records.UNIT_UPLOADS}{shared}/"
        self._part = part
        self._record = f"{records.UNITS}{shared}/{part}"
        done = output.read(self._record, Unit)
        self._done = None if done is None else done.notes.encode("latin-1")

    def read_notes(self, name: str) -> bytes | None:
        return self._done if name == self._part else None

    def open_notes(self, name: str, header: bytes | None) -> _Notes:
        self._notes[name] = _Notes(None, name, header, 0)
        return self._notes[name]

    def complete(self) -> None:
        """Record the part, if it has notes. If another process has recorded it already, that record counts."""
        if self._part not in self._notes:
            return self._discard()
        self.check_incomplete()
        self._check_written()
        small = {name: content.decode("latin-1") for name, content in self._small.items()}
        unit = Unit(tuple(self._complete.values()), small, self._notes[self._part].text.decode("latin-1"))
        try:
            self._output.put(self._output.hidden + self._record, records.dump(unit))
        except FileExistsError:
            self._discard()

    def check_incomplete(self) -> None:
        """Raise PlanError if the output is published."""
        if not self._replace and self._output.client.stat(self._output.full(self._marker)) is not None:
            raise PlanError("is complete already; --force replaces it", path=str(self._output), code="exists")


class _Notes(Closable):
    """Notes that are stored when a file is complete, and at the end; those of a part, with its record."""

    def __init__(self, staging: CloudStaging | None, name: str, header: bytes | None, count: int) -> None:
        """Continue `count` records of this name, each with some of the notes. Without a staging, nothing is stored."""
        self._staging = staging
        self._name = name
        self._count = count
        self._text = bytearray(header or b"")
        self._lock = threading.Lock()
        self.are_kept = header is None
        """Whether there is anything behind the header."""

    @property
    def text(self) -> bytes:
        """What is not stored yet."""
        return bytes(self._text)

    def append(self, text: bytes) -> None:
        with self._lock:
            self._text += text
            self.are_kept = True

    def close(self) -> None:
        """Store what was appended. More may be appended later."""
        with self._lock:
            if self._text and self._staging is not None:
                record = Notes(self._text.decode("latin-1"))
                self._staging.write_record(f"{records.NOTES}{self._name}/{self._count:08}", record)
                self._count += 1
                self._text.clear()


def _claim(name: str) -> str:
    """The name of the record of a complete file."""
    return records.COMPLETE + digest_hex(name.encode())
