"""Outputs in an object store: files are uploaded while they are written, and become objects when all are complete.

Until then there is nothing under the output's prefix. What an interrupted attempt has completed is recorded under a
hidden prefix beside it, `.OUT.relayout-partial/`: uploads whose parts are all there, and notes. The next attempt goes
on from there, and aborts all other uploads to the output.

No object is ever overwritten: each is created on condition that there is none. The marker is the last.

Parts of an output that several processes make have a record each, with the uploads of all their files.
"""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from relayout.core.digests import digest_hex
from relayout.errors import FormatError, PlanError
from relayout.storage.cloud.client import BucketClient
from relayout.storage.cloud.failures import request
from relayout.storage.cloud.multipart import Outcome
from relayout.storage.cloud.providers import multipart_of
from relayout.storage.cloud.upload import Upload, digest_of
from relayout.storage.protocols import Closable, ReadableFile, RequestError, Store, check_vacant

_SMALL_NBYTES = 2**20
"""Files up to this size are kept in memory and written whole."""
_NUM_REQUESTS = 16
"""Small requests at the same time."""
_COMPLETE, _NOTES, _PARTS, _PUBLISHING = "complete/", "notes/", "parts/", "publishing"
"""Names of what is recorded, below the hidden prefix."""

_CONFLICT_DELAYS = (0.2, 0.5, 1.0, 2.0, 4.0, 0.0)
"""Seconds after each attempt to complete an upload, while others have requests for its name under way."""

_busy: set[str] = set()
_busy_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class _Complete:
    """An upload of which every part was sent."""

    name: str
    """Of the file, in the output."""
    nbytes: int
    upload: str
    tags: tuple[str, ...]
    proof: str
    """Digest of the object's first `proof_nbytes` bytes, by which it can be recognized."""
    proof_nbytes: int

    @staticmethod
    def of(name: str, upload: Upload) -> _Complete:
        tags = tuple(upload.tags())
        assert upload.nbytes is not None
        return _Complete(name, upload.nbytes, upload.id, tags, upload.proof, upload.proof_nbytes)

    @staticmethod
    def from_json(found: dict[str, Any]) -> _Complete | None:
        """None: it is of another version of relayout."""
        try:
            return _Complete(**{**found, "tags": tuple(found.get("tags", ()))})
        except TypeError:
            return None


@dataclass(frozen=True, slots=True)
class _Part:
    """What one process has added to an output that several make."""

    files: Sequence[_Complete]
    small: Mapping[str, bytes]
    notes: bytes

    def as_json(self) -> bytes:
        small = {name: content.decode("latin-1") for name, content in self.small.items()}
        files = [asdict(one) for one in self.files]
        return json.dumps({"files": files, "small": small, "notes": self.notes.decode("latin-1")}).encode()

    @staticmethod
    def from_json(content: bytes) -> _Part:
        found = json.loads(content)
        files = [one for one in map(_Complete.from_json, found["files"]) if one is not None]
        small = {name: text.encode("latin-1") for name, text in found["small"].items()}
        return _Part(files, small, found["notes"].encode("latin-1"))


@dataclass(frozen=True, slots=True)
class Place:
    """Where an output is made."""

    client: BucketClient
    prefix: str

    def __str__(self) -> str:
        return f"{self.client.root}/{self.prefix}" if self.prefix else self.client.root

    def full(self, name: str) -> str:
        """A file's object name in the bucket."""
        return f"{self.prefix}/{name}" if self.prefix else name

    @property
    def hidden(self) -> str:
        """The hidden prefix, with a slash at the end."""
        above, slash, name = self.prefix.rpartition("/")
        return f"{above}{slash}.{name}.relayout-partial/" if name else ".relayout-partial/"

    def hidden_names(self, below: str = "") -> list[str]:
        """Full names of what is hidden."""
        return sorted(self.client.names((self.hidden + below).rstrip("/")))

    def names(self) -> list[str]:
        """The output's files."""
        full = self.client.names(self.prefix)
        names = (name.removeprefix(self.prefix).lstrip("/") for name in full)
        return [name for name in names if not any(part.startswith(".") for part in name.split("/"))]

    def published(self, marker: str) -> list[str]:
        """The files of an attempt that ended while it published them: without marker, they are no output."""
        if self.client.stat(self.full(marker)) is not None:
            return []
        content = self.read(self.hidden + _PUBLISHING)
        return [] if content is None else [str(name) for name in json.loads(content)]

    def read(self, full: str) -> bytes | None:
        """A small object; None if it does not exist."""
        try:
            return self.client.get(full, 0, None, None).content()
        except FormatError as error:
            if error.code == "missing":
                return None
            raise

    def put(self, full: str, content: bytes, *, create: bool) -> None:
        """Write a small object; with `create`, only if there is none.

        Raises:
            FileExistsError: there is another one.
        """
        mode: Any = "create" if create else "overwrite"
        put = partial(self.client.store.put, full, content, mode=mode, use_multipart=False)
        where = f"{self.client.root}/{full}"
        try:
            request(put, where)
        except (FileExistsError, RequestError):
            # The answer to a first request may have been lost.
            if not create or self.read(full) != content:
                raise

    def delete(self, full: Sequence[str]) -> None:
        """Delete objects that exist, or have existed."""
        if full:
            request(lambda: self.client.store.delete(list(full)), str(self))


def check_output(place: Place, source: Store, marker: str, *, force: bool) -> None:
    """See `Store.check_output`."""
    mine, other = f"{place}/", f"{source}/"
    if mine == other:
        raise PlanError("is the source itself; choose another prefix with -o", path=str(place), code="exists")
    if mine.startswith(other) or other.startswith(mine):
        what = "is inside the source, or contains it; choose another prefix with -o"
        raise PlanError(what, path=str(place), code="exists")
    if place.prefix and place.client.stat(place.prefix) is not None:
        raise PlanError("exists and is not a folder", path=str(place), code="exists")
    names = set(place.names())
    if names and marker not in names:
        names -= set(place.published(marker))
    check_vacant(str(place), marker, is_empty=not names, has_marker=marker in names, force=force)


@contextmanager
def staged(place: Place, marker: str, *, replace: bool, shared: str | None) -> Iterator[CloudStaging]:
    """See `Store.stage`. Another process that writes the same output is noticed when it publishes: the first wins."""
    with _busy_lock:
        if str(place) in _busy:
            raise PlanError("is being written by another conversion", path=str(place), code="busy")
        _busy.add(str(place))
    try:
        staging = CloudStaging(place, marker)
        if shared is None:
            staging.take_over(replace=replace)
        else:
            staging.gather(shared)
        try:
            yield staging
            staging.publish(replace=replace)
        except BaseException as error:
            staging.give_up(error)
            raise
    finally:
        with _busy_lock:
            _busy.discard(str(place))


@contextmanager
def part_staged(place: Place, marker: str, shared: str, part: str, *, replace: bool) -> Iterator[CloudStaging]:
    """See `Store.stage_part`."""
    staging = CloudStaging(place, marker, part=part)
    record = f"{place.hidden}{_PARTS}{shared}/{part}"
    found = place.read(record)
    if found is not None:
        staging.add_part(part, _Part.from_json(found), with_files=False)
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

    def __init__(self, place: Place, marker: str, *, part: str | None = None) -> None:
        """Begin with nothing. Of a `part` nothing is recorded before it is complete."""
        self._place = place
        self._part = part
        self._marker = marker
        self._multipart = multipart_of(place.client)
        self.is_kept = False
        self.advice: str | None = None
        self._small: dict[str, bytes] = {}
        self._uploads: dict[str, Upload] = {}
        """Files of which bytes are missing."""
        self._complete: dict[str, _Complete] = {}
        self._recorded: set[str] = set()
        """Complete files that count for the next attempt, too."""
        self._created: list[str] = []
        """Objects that this attempt has created."""
        self._published: list[str] = []
        """Files that an attempt was publishing when it ended."""
        self._notes: dict[str, _Notes] = {}
        self._part_notes: dict[str, bytes] = {}

    def take_over(self, *, replace: bool) -> None:
        """Go on from what an earlier attempt has completed, and abort what it has not.

        Raises:
            PlanError: there are parts, and `replace` is not set.
        """
        place, hidden = self._place, self._place.hidden_names()
        if any(name.startswith(place.hidden + _PARTS) for name in hidden) and not replace:
            what = "holds units that other processes convert: --commit publishes, --force discards them"
            raise PlanError(what, path=str(place), code="exists")
        records = [name for name in hidden if name.startswith(place.hidden + _COMPLETE)]
        for content in self._in_parallel(place.read, records):
            one = _Complete.from_json(json.loads(content or b"{}"))
            if one is not None:
                self._complete[one.name] = one
        self._recorded = set(self._complete)
        self._abort_others()
        self._unpublish()
        if not self._complete:  # Notes alone say nothing.
            place.delete(hidden)

    def gather(self, shared: str) -> None:
        """Take all parts of this name.

        Raises:
            PlanError: there are none.
        """
        prefix = f"{_PARTS}{shared}/"
        names = self._place.hidden_names(prefix)
        if not names:
            raise PlanError("no unit of this conversion is done", path=str(self._place), code="missing")
        for name, content in zip(names, self._in_parallel(self._place.read, names), strict=True):
            part = name.removeprefix(self._place.hidden + prefix)
            self.add_part(part, _Part.from_json(content), with_files=True)
        self._recorded = set(self._complete)
        self._unpublish()
        self.is_kept = True

    def add_part(self, part: str, added: _Part, *, with_files: bool) -> None:
        """Let the notes of a part be read, and its files belong to the output."""
        self._part_notes[part] = added.notes
        if with_files:
            self._complete |= {one.name: one for one in added.files}
            self._small |= added.small

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
        part = _Part(list(self._complete.values()), self._small, self._notes[self._part].text)
        try:
            self._place.put(record, part.as_json(), create=True)
        except FileExistsError:
            self._discard()

    def check_incomplete(self) -> None:
        """Check that the output is not published yet.

        Raises:
            PlanError: it is.
        """
        if self._place.client.stat(self._place.full(self._marker)) is not None:
            raise PlanError("is complete already; --force replaces it", path=str(self._place), code="exists")

    def _abort_others(self) -> None:
        """Abort all uploads to the output but those that are complete."""
        place = self._place
        known = {(place.full(one.name), one.upload) for one in self._complete.values()}
        for name, upload in self._multipart.unfinished(f"{place.prefix}/" if place.prefix else ""):
            if (name, upload) not in known:
                self._multipart.abort(name, upload)

    def _unpublish(self) -> None:
        """Delete what an attempt that ended while it published has left, but for uploads that became objects."""
        place = self._place
        self._published = place.published(self._marker)
        done = [one.name for one in self._objects()] if self._published else []
        place.delete([place.full(name) for name in self._published if name not in done])

    def _discard(self) -> None:
        """Give up all files of this process."""
        for name in self.names():
            if name not in self._recorded:
                self.remove(name)

    @property
    def where(self) -> str:
        """See `Staging.where`."""
        return f"{self._place.client.root}/{self._place.hidden.rstrip('/')}"

    def clear(self) -> None:
        """See `Staging.clear`."""
        for name in self.names():
            self.remove(name)
        self._place.delete(self._place.hidden_names())

    def allocated_nbytes(self) -> int:
        """See `Staging.allocated_nbytes`."""
        return sum(one.nbytes for one in self._complete.values())

    def check_space(self, nbytes: int) -> None:
        """See `Staging.check_space`: accepts any size."""

    def names(self) -> list[str]:
        """See `Staging.names`."""
        return sorted({*self._small, *self._uploads, *self._complete})

    def remove(self, name: str) -> None:
        """See `Staging.remove`."""
        self._small.pop(name, None)
        for one in (self._uploads.pop(name, None), self._complete.pop(name, None)):
            if isinstance(one, Upload):
                self._multipart.abort(one.name, one.id)
            elif one is not None:
                self._multipart.abort(self._place.full(name), one.upload)
                objects = [self._place.full(name)] if name in self._published else []
                records = [self._record(name)] if name in self._recorded and not self._part_notes else []
                self._recorded.discard(name)
                self._place.delete([*records, *objects])

    def open(self, name: str, nbytes: int) -> ReadableFile:
        """See `Staging.open`: always fails."""
        raise OSError(errno.ENOTSUP, "an upload cannot be read before it is published", f"{self._place}/{name}")

    def write_file(self, name: str, nbytes: int, *, is_new: bool) -> Upload:
        """See `Staging.write_file`."""
        if is_new:
            self._check_new(name)
            self._uploads[name] = self._upload(name, nbytes)
        return self._uploads[name]

    def write_head(self, name: str, head: bytes, nbytes: int) -> None:
        """See `Staging.write_head`. From here on the file counts for the next attempt."""
        if name in self._complete:
            return
        upload = self.write_file(name, nbytes, is_new=name not in self._uploads)
        upload.write(0, memoryview(head))
        done = _Complete.of(name, upload)
        if self._part is None:
            for notes in self._notes.values():  # They tell what is in the file.
                notes.close()
            self._place.put(self._record(name), json.dumps(asdict(done)).encode(), create=False)
            self._recorded.add(name)
        self._complete[name] = done
        del self._uploads[name]

    def put(self, name: str, pieces: Iterable[bytes], mode: int | None = None) -> None:
        """See `Staging.put`."""
        self._check_new(name)
        begun, rest = bytearray(), iter(pieces)
        for piece in rest:
            begun += piece
            if len(begun) > _SMALL_NBYTES and name != self._marker:
                upload = self._uploads[name] = self._upload(name)
                upload.append(_chained(bytes(begun), rest))
                self._complete[name] = _Complete.of(name, upload)
                del self._uploads[name]
                return
        self._small[name] = bytes(begun)

    def read_notes(self, name: str) -> bytes | None:
        """See `Staging.read_notes`."""
        if self._part_notes or self._part is not None:
            return self._part_notes.get(name)
        found = self._place.hidden_names(_NOTES + name)
        return b"".join(self._place.read(one) or b"" for one in found) if found else None

    def open_notes(self, name: str, *, is_new: bool) -> _Notes:
        """See `Staging.open_notes`."""
        found = [] if self._part is not None else self._place.hidden_names(_NOTES + name)
        if is_new:
            self._place.delete(found)
        first = f"{self._place.hidden}{_NOTES}{name}/"
        self._notes[name] = _Notes(None if self._part is not None else self._place, first, 0 if is_new else len(found))
        return self._notes[name]

    def _upload(self, name: str, nbytes: int | None = None) -> Upload:
        return Upload(self._multipart, self._place.full(name), f"{self._place}/{name}", nbytes)

    def _check_new(self, name: str) -> None:
        if name in self._small or name in self._uploads or name in self._complete:
            raise FileExistsError(errno.EEXIST, "exists", f"{self._place}/{name}")

    def _record(self, name: str) -> str:
        return f"{self._place.hidden}{_COMPLETE}{digest_hex(name.encode())}"

    def publish(self, *, replace: bool) -> None:
        """Let all files become objects, the marker last. With `replace`, delete those of the older output before.

        Raises:
            FileExistsError: something else has been created there.
            RequestError: a request failed.
        """
        place, marker = self._place, self._place.full(self._marker)
        if self._uploads:
            next(iter(self._uploads.values())).tags()  # Says what is missing.
        older: set[str] = set()
        if place.client.stat(marker) is not None:
            if not replace:
                self.is_kept = False
                raise FileExistsError(errno.EEXIST, "something else has been created here", str(place))
            older = set(place.names()) - {one.name for one in self._objects()}
        # If this process ends now, the next attempt knows what is no output any more, or not yet.
        place.put(place.hidden + _PUBLISHING, json.dumps(sorted({*self.names(), *older})).encode(), create=False)
        if older:
            place.delete([marker])
            place.delete([place.full(name) for name in older - {self._marker}])
        try:
            self._in_parallel(self._create, self._small.keys() - {self._marker})
            self._in_parallel(self._finish, self._complete.values())
            if self._marker in self._small:
                self._create(self._marker)
        except FileExistsError:
            self.is_kept = False  # Nobody can go on with this.
            raise
        with suppress(OSError):  # The output is complete.
            self._complete.clear()
            self._abort_others()
            place.delete(place.hidden_names())

    def _create(self, name: str) -> None:
        self._place.put(self._place.full(name), self._small[name], create=True)
        self._created.append(name)

    def _finish(self, one: _Complete) -> None:
        """Let an upload become an object."""
        full = self._place.full(one.name)
        for delay in _CONFLICT_DELAYS:
            outcome = self._multipart.complete(full, one.upload, one.tags)
            if outcome is not Outcome.CONFLICT:
                break
            time.sleep(delay)
        where = f"{self._place.client.root}/{full}"
        if outcome is not Outcome.DONE and not self._is_object(one):
            if outcome is Outcome.EXISTS:
                raise FileExistsError(errno.EEXIST, "another object has been created here", where)
            if outcome is Outcome.CONFLICT:
                what = "other requests for it are under way, again and again: the same command goes on from here"
                raise RequestError(errno.EAGAIN, what, where)
            self.is_kept = False
            what = "its upload is gone: another process, or a rule of the bucket, has aborted it; convert again"
            raise RequestError(errno.EIO, what, where)
        if outcome is Outcome.EXISTS:
            self._multipart.abort(full, one.upload)
        self._created.append(one.name)

    def _objects(self) -> list[_Complete]:
        """The uploads that have become objects already."""
        complete = list(self._complete.values())
        are_objects = self._in_parallel(self._is_object, complete)
        return [one for one, is_object in zip(complete, are_objects, strict=True) if is_object]

    def _is_object(self, one: _Complete) -> bool:
        """Whether an upload has become an object already."""
        client, full = self._place.client, self._place.full(one.name)
        status = client.stat(full)
        if status is None or status.nbytes != one.nbytes:
            return False
        first = client.get(full, 0, one.proof_nbytes, None).content()
        return digest_of(first) == one.proof

    def give_up(self, error: BaseException) -> None:
        """Delete what the next attempt cannot use; of what it can, nothing if it shall not be kept."""
        try:
            self._discard()
            if self._part is not None:
                return
            if self.is_kept and self._recorded:
                if self.advice is not None:
                    error.add_note(self.advice)
                return
            self._place.delete([self._place.full(name) for name in self._created])
            self.clear()
        except OSError:
            error.add_note(f"unfinished uploads are left below {self._place}: the same command aborts them")

    def _in_parallel(self, call: Any, items: Iterable[Any]) -> list[Any]:
        with ThreadPoolExecutor(_NUM_REQUESTS) as pool:
            return list(pool.map(call, items))


class _Notes(Closable):
    """See `protocols.Notes`. They are stored when a file is complete, and at the end; those of a part, with it."""

    def __init__(self, place: Place | None, prefix: str, number: int) -> None:
        """`number` counts objects below the prefix, each with some of the notes. Without a place, none is made."""
        self._place = place
        self._prefix = prefix
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
            if self._text and self._place is not None:
                self._place.put(f"{self._prefix}{self._number:08}", bytes(self._text), create=False)
                self._number += 1
                self._text.clear()


def _chained(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from rest
