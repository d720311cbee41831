"""Outputs in an object store: files are uploaded while they are written, and become objects when all are complete.

Until then there is nothing under the output's prefix. What an attempt has begun and completed is recorded under a
hidden prefix beside it, `.OUT.relayout-partial/` (`records`), and the next attempt goes on from there. Only the holder
of the output's lease publishes, and discards what others have recorded (`lease`, `erasing`).

No object is ever overwritten: each is created on condition that there is none. The marker is the last.

Parts of an output that several processes make have a record each, with the uploads of all their files. They need no
lease: each process touches nothing but what it has itself begun.
"""

from __future__ import annotations

import errno
import random
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from relayout.core.digests import digest_hex
from relayout.errors import FormatError, PlanError
from relayout.storage.cloud import connect
from relayout.storage.cloud.multipart import Outcome
from relayout.storage.cloud.output import lease as leases
from relayout.storage.cloud.output import records
from relayout.storage.cloud.output.erasing import Eraser
from relayout.storage.cloud.output.lease import Lease
from relayout.storage.cloud.output.place import Place, check_vacant, in_parallel
from relayout.storage.cloud.output.records import Begun, Complete, Notes, Proof, Publishing, Unit
from relayout.storage.cloud.providers import multipart_of
from relayout.storage.cloud.upload import Upload
from relayout.storage.protocols import Closable, ReadableFile, Replaceable, RequestError

_SMALL_NBYTES = 2**20
"""Files up to this size are kept in memory and written whole."""
_MAX_DELAY_SECONDS = 8.0


@contextmanager
def staged(place: Place, older: Replaceable, *, replace: bool, shared: str | None) -> Iterator[CloudStaging]:
    """See `Store.stage`. Another process that writes the same output is found out before anything is changed."""
    what = "convert" if shared is None else "commit"
    with Lease(place, what) as lease:
        check_vacant(place, older, force=replace)  # Somebody may have published meanwhile.
        staging = CloudStaging(place, older, lease)
        staging.read_published()
        if shared is None:
            staging.take_over(replace=replace)
        else:
            staging.gather(shared, replace=replace)
        try:
            yield staging
            staging.publish(replace=replace)
        except BaseException as error:
            staging.give_up(error)
            raise


@contextmanager
def part_staged(place: Place, older: Replaceable, shared: str, part: str, *, replace: bool) -> Iterator[CloudStaging]:
    """See `Store.stage_part`."""
    staging = CloudStaging(place, older, None, shared, part)
    if not replace:
        staging.refuse_conversion()
    record = f"{records.UNITS}{shared}/{part}"
    found = place.read(record, Unit)
    if found is not None:
        staging.add_part(part, found, with_files=False)
    try:
        yield staging
        staging.complete_part(record, replace=replace)
    except BaseException as error:
        staging.give_up(error)
        if isinstance(error, RequestError) and not replace:
            staging.check_incomplete()  # Who publishes aborts the uploads of others.
        raise


class CloudStaging:
    """Uploads that become objects when they are published; see `protocols.Staging`."""

    can_read = False

    def __init__(
        self, place: Place, older: Replaceable, lease: Lease | None, shared: str = "", part: str | None = None
    ) -> None:
        """Begin with nothing. Of a `part` nothing is claimed before it is complete; it has no lease."""
        self._place = place
        self._older = older
        self._marker = older.marker
        self._lease = lease
        self._part = part
        self._multipart = multipart_of(place.client)
        self._erase = Eraser(place, self._multipart.abort, self._check)
        self.is_kept = False
        self.advice: str | None = None
        self._small: dict[str, bytes] = {}
        self._uploads: dict[str, Upload] = {}
        """Files of which bytes are missing."""
        self._complete: dict[str, Complete] = {}
        self._records: dict[str, str] = {}
        """The record that claims a complete file for the next attempt, by the file's name."""
        self._created: set[str] = set()
        """Files whose objects this attempt has created, and nobody else."""
        self._published = Publishing({}, {})
        """What is recorded of publishing, by this attempt or an earlier one."""
        self._notes: dict[str, _Notes] = {}
        self._part_notes: dict[str, bytes] = {}
        self._has_begun = False
        """Whether anything was changed in the bucket."""
        self._begun = records.UPLOADS if part is None else f"{records.UNIT_UPLOADS}{shared}/"

    def _check(self) -> None:
        if self._lease is not None:
            self._lease.check()

    def read_published(self) -> None:
        """Learn what an attempt that ended while it published has created.

        Raises:
            FormatError: its record is none.
        """
        self._published = self._place.read(records.PUBLISHING, Publishing) or self._published

    def take_over(self, *, replace: bool) -> None:
        """Learn what an earlier attempt has completed. Changes nothing.

        Raises:
            PlanError: there are units, and `replace` is not set.
            FormatError: an object has the name of a record, and is none.
        """
        place = self._place
        units = [name for name in place.record_names() if name.startswith((records.UNITS, records.UNIT_UPLOADS))]
        if units and not replace:
            what = "holds units that other processes convert: --commit publishes, --force discards them"
            raise PlanError(what, path=str(place), code="exists")
        if units:
            done = len(place.read_all(records.UNITS, Unit))
            place.read_all(records.UNIT_UPLOADS, Begun)
            what = f"--force discards {done} units that other processes have converted, and what they convert now"
            warnings.warn(f"{place}: {what}", stacklevel=4)
        for name, one in place.read_all(records.COMPLETE, Complete).items():
            if name != _claim(one.name):
                raise FormatError("is not the record that its name says", path=f"{place.where_hidden}/{name}")
            self._complete[one.name], self._records[one.name] = one, name

    def refuse_conversion(self) -> None:
        """Check that no interrupted conversion without units would lose what it has published already.

        Raises:
            PlanError: it would.
        """
        if self._place.record_names(records.COMPLETE):
            what = "holds an interrupted conversion without units; --force discards it"
            raise PlanError(what, path=self.where, code="exists")

    def gather(self, shared: str, *, replace: bool) -> None:
        """Take all parts of this name.

        Raises:
            PlanError: there are none; or there is another conversion, and `replace` is not set.
        """
        if not replace:
            self.refuse_conversion()
        prefix = f"{records.UNITS}{shared}/"
        found = self._place.read_all(prefix, Unit)
        if not found:
            raise PlanError("no unit of this conversion is done", path=str(self._place), code="missing")
        for name, unit in found.items():
            self.add_part(name.removeprefix(prefix), unit, with_files=True)
            self._records |= {one.name: name for one in unit.files}
        self.is_kept = True

    def add_part(self, part: str, added: Unit, *, with_files: bool) -> None:
        """Let the notes of a part be read, and its files belong to the output."""
        self._part_notes[part] = added.notes.encode("latin-1")
        if with_files:
            self._complete |= {one.name: one for one in added.files}
            self._small |= {name: text.encode("latin-1") for name, text in added.small.items()}

    def complete_part(self, record: str, *, replace: bool) -> None:
        """Record the part, if it has notes. If somebody else has done so, that one counts.

        Raises:
            PlanError: the output is complete, and `replace` is not set.
        """
        assert self._part is not None
        if self._part not in self._notes:
            return self._discard()
        if not replace:
            self.check_incomplete()
        for upload in self._uploads.values():
            upload.tags()  # Says what is missing.
        small = {name: content.decode("latin-1") for name, content in self._small.items()}
        unit = Unit(tuple(self._complete.values()), small, self._notes[self._part].text.decode("latin-1"))
        try:
            self._place.create(self._place.hidden + record, records.dump(unit))
        except FileExistsError:
            self._discard()

    def check_incomplete(self) -> None:
        """Check that the output is not published yet.

        Raises:
            PlanError: it is.
        """
        if self._place.client.stat(self._place.full(self._marker)) is not None:
            raise PlanError("is complete already; --force replaces it", path=str(self._place), code="exists")

    def _abort_incomplete(self) -> None:
        """Abort the uploads that earlier attempts have recorded, and not completed."""
        known = {(one.name, one.upload) for one in self._complete.values()}
        left = {
            name: one
            for name, one in self._place.read_all(records.UPLOADS, Begun).items()
            if (one.name, one.upload) not in known
        }
        self._erase.uploads(left.values())
        self._erase.records(left)

    def _discard(self) -> None:
        """Give up the files that this attempt has begun, and that nothing claims for the next."""
        for name in self.names():
            if name not in self._records:
                self.remove(name)

    @property
    def where(self) -> str:
        """See `Staging.where`."""
        return self._place.where_hidden

    def clear(self) -> None:
        """See `Staging.clear`. What was being published stays known: its objects are there."""
        self._has_begun = True
        self._erase.attempt(published=False)
        for held in (self._small, self._uploads, self._complete, self._records):
            held.clear()

    def allocated_nbytes(self) -> int:
        """See `Staging.allocated_nbytes`."""
        return sum(one.proof.nbytes for one in self._complete.values())

    def check_space(self, nbytes: int) -> None:
        """See `Staging.check_space`: accepts any size."""

    def names(self) -> list[str]:
        """See `Staging.names`."""
        return sorted({*self._small, *self._uploads, *self._complete})

    def remove(self, name: str) -> None:
        """See `Staging.remove`."""
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
        """See `Staging.open`: always fails."""
        raise OSError(errno.ENOTSUP, "an upload cannot be read before it is published", f"{self._place}/{name}")

    def write_file(self, name: str, nbytes: int, *, is_new: bool) -> Upload:
        """See `Staging.write_file`."""
        if is_new:
            self._check_new(name)
            self._begin(name, nbytes)
        return self._uploads[name]

    def write_head(self, name: str, head: bytes, nbytes: int) -> None:
        """See `Staging.write_head`. From here on the file counts for the next attempt."""
        if name in self._complete:
            return
        upload = self.write_file(name, nbytes, is_new=name not in self._uploads)
        upload.write(0, memoryview(head))
        done = Complete.of(name, upload)
        if self._part is None:
            for notes in self._notes.values():  # They tell what is in the file.
                notes.close()
            self._check()
            self._place.write(_claim(name), done)
            self._records[name] = _claim(name)
        self._complete[name] = done
        del self._uploads[name]

    def put(self, name: str, pieces: Iterable[bytes], mode: int | None = None) -> None:
        """See `Staging.put`."""
        self._check_new(name)
        begun, rest = bytearray(), iter(pieces)
        for piece in rest:
            begun += piece
            if len(begun) > _SMALL_NBYTES and name != self._marker:
                upload = self._begin(name)
                upload.append(_chained(bytes(begun), rest))
                self._complete[name] = Complete.of(name, upload)
                del self._uploads[name]
                return
        self._small[name] = bytes(begun)

    def read_notes(self, name: str) -> bytes | None:
        """See `Staging.read_notes`."""
        if self._part_notes or self._part is not None:
            return self._part_notes.get(name)
        if not self._complete:  # Notes alone say nothing.
            return None
        found = self._place.read_all(f"{records.NOTES}{name}", Notes)
        return b"".join(one.text.encode("latin-1") for one in found.values()) if found else None

    def open_notes(self, name: str, *, is_new: bool) -> _Notes:
        """See `Staging.open_notes`. Whoever does so goes on from what is there, and writes from here on."""
        if self._part is not None:
            self._notes[name] = _Notes(None, name, 0)
            return self._notes[name]
        self._has_begun = True
        found = self._place.read_all(f"{records.NOTES}{name}", Notes)
        if is_new:
            self._erase.records(found)
        self._abort_incomplete()
        self._notes[name] = _Notes(self, name, 0 if is_new else len(found))
        return self._notes[name]

    def write_record(self, name: str, record: object) -> None:
        """Write a record, by the right of the lease."""
        self._check()
        self._place.write(name, record)

    def _begin(self, name: str, nbytes: int | None = None) -> Upload:
        """Begin an upload, and record it before it has a part: only what is recorded is ever aborted."""
        self._check()
        self._has_begun = True
        upload = Upload(self._multipart, self._place.full(name), f"{self._place}/{name}", nbytes)
        self._uploads[name] = upload
        begun = Begun(name, upload.id)
        self._place.write(self._begun + begun.key, begun)
        return upload

    def _check_new(self, name: str) -> None:
        if name in self._small or name in self._uploads or name in self._complete:
            raise FileExistsError(errno.EEXIST, "exists", f"{self._place}/{name}")

    def publish(self, *, replace: bool) -> None:
        """Let all files become objects, the marker last. With `replace`, delete those of the older output before.

        Raises:
            PlanError: something is there that may not be deleted.
            FileExistsError: something else has been created there.
            RequestError: a request failed.
        """
        if self._uploads:
            next(iter(self._uploads.values())).tags()  # Says what is missing.
        self._has_begun = True
        made = {name: one.proof for name, one in self._complete.items()}
        made |= {name: _proof_of(content) for name, content in self._small.items()}
        done = self._make_room(made, replace)
        in_parallel(self._create, self._small.keys() - done - {self._marker})
        in_parallel(self._finish, [one for name, one in self._complete.items() if name not in done])
        if self._marker in self._small and self._marker not in done:
            self._create(self._marker)
        try:
            self._erase.attempt(published=True)
        except (OSError, FormatError, PlanError) as error:  # The output is complete.
            warnings.warn(f"{self._place}: complete; left in {self.where}: {error}", stacklevel=4)

    def _make_room(self, made: dict[str, Proof], replace: bool) -> set[str]:
        """Delete what is in the way, by proof, and return which files are objects already."""
        place = self._place
        there = place.objects()
        done = place.proven(made, there)
        if done != made.keys():
            done -= {self._marker}  # It must not be there before all else is.
        left = {name: version for name, version in there.items() if name not in done}
        old = set() if self._marker in there else place.published(self._published, left)
        rest = left.keys() - old
        if replace and self._marker in there and rest:
            old = rest & self._older.check(place.store, there, force=True)
        elif taken := sorted(rest & made.keys()):
            where = f"{place}/{taken[0]}"
            raise FileExistsError(errno.EEXIST, "something else has been created here", where)
        # If this process ends now, the next attempt knows what is no output any more, or not yet.
        versions = {name: there[name] for name in old}
        self._published = Publishing(made, versions)
        self.write_record(records.PUBLISHING, self._published)
        marker = {name: version for name, version in versions.items() if name == self._marker}
        self._erase.objects(marker)
        self._erase.objects({name: version for name, version in versions.items() if name not in marker})
        return done

    def _create(self, name: str) -> None:
        self._check()
        if self._place.create(self._place.full(name), self._small[name]):
            self._created.add(name)

    def _finish(self, one: Complete) -> None:
        """Let an upload become an object."""
        place, full = self._place, self._place.full(one.name)
        outcome = self._completed(full, one)
        where = f"{place.client.root}/{full}"
        if outcome is Outcome.DONE:
            self._created.add(one.name)
        elif place.proves(one.name, one.proof):
            return  # The answer to an earlier request was lost, or somebody has created the same.
        elif outcome is Outcome.EXISTS:
            raise FileExistsError(errno.EEXIST, "another object has been created here", where)
        else:
            claim = self._records.pop(one.name, None)
            if claim is not None:  # What it claims is not so.
                self._erase.records([claim])
            what = "its upload is gone: another process, or a rule of the bucket, has aborted it; convert again"
            raise RequestError(errno.EIO, what, where)

    def _completed(self, full: str, one: Complete) -> Outcome:
        """Complete an upload; as long as the store is busy with a conflicting request, again."""
        end, delay = leases.monotonic() + connect.RETRY_SECONDS, 0.1
        while True:
            self._check()
            outcome = self._multipart.complete(full, one.upload, one.tags)
            if outcome is not Outcome.CONFLICT:
                return outcome
            if leases.monotonic() + delay > end:
                what = "the store is busy with other requests for this object, again and again: convert again later"
                raise RequestError(errno.EAGAIN, what, f"{self._place.client.root}/{full}", 409)
            leases.sleep(delay * random.uniform(0.5, 1))
            delay = min(2 * delay, _MAX_DELAY_SECONDS)

    def give_up(self, error: BaseException) -> None:
        """Delete what this attempt has made and the next cannot use, unless another process has taken over."""
        if not self._has_begun:
            return
        try:
            self._discard()
            if self._part is not None:
                return
            if self.is_kept and self._records:
                if self.advice is not None:
                    error.add_note(self.advice)
                return
            self._delete_created()
            self.clear()
        except (OSError, PlanError, FormatError):
            error.add_note(f"records of unfinished uploads are left in {self.where}: the same command aborts them")

    def _delete_created(self) -> None:
        """Delete the objects that nobody but this attempt has created, if no manifest can name them."""
        place = self._place
        there = place.objects()
        if self._marker not in there or self._marker in self._created:
            self._erase.objects({name: there[name] for name in self._created & there.keys()})
            if not (self._published.made.keys() | self._published.older) & place.objects().keys():
                self._erase.records([records.PUBLISHING])


class _Notes(Closable):
    """See `protocols.Notes`. They are stored when a file is complete, and at the end; those of a part, with it."""

    def __init__(self, staging: CloudStaging | None, name: str, number: int) -> None:
        """`number` counts records of this name, each with some of the notes. Without a staging, none is made."""
        self._staging = staging
        self._name = name
        self._number = number
        self._text = bytearray()
        self._lock = threading.Lock()

    @property
    def text(self) -> bytes:
        """What is not stored yet."""
        return bytes(self._text)

    def append(self, text: bytes) -> None:
        """See `Notes.append`."""
        with self._lock:
            self._text += text

    def close(self) -> None:
        """Store what was appended; it may go on."""
        with self._lock:
            if self._text and self._staging is not None:
                record = Notes(self._text.decode("latin-1"))
                self._staging.write_record(f"{records.NOTES}{self._name}/{self._number:08}", record)
                self._number += 1
                self._text.clear()


def _claim(name: str) -> str:
    """The name of the record of a complete file."""
    return records.COMPLETE + digest_hex(name.encode())


def _proof_of(content: bytes) -> Proof:
    return Proof(len(content), digest_hex(content), len(content))


def _chained(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from rest
