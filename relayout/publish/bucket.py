"""The publisher of buckets: files are written to local scratch and uploaded whole; the marker is written last.

All objects of an output lie below its prefix. While the output is unfinished, these include the claim (see `claim`) and
the records of finished parts, `.relayout/...`. A part is finished when its record exists, which is written after its
files. Any process with the same work resumes from the finished parts.

**Publishing.** First, all files are written except the marker, the file that makes the output readable. Then a listing
must show all objects that were sent, and no others except those that the claim took over. Then the marker is created if
none exists, or replaces the version of the older marker. From then on the output is complete. Afterwards, the rest of
the older output, the records and the claim are deleted. An older output can be read until its first small file is
replaced, shortly before its marker is replaced.

An unfinished upload of a killed process is not an object. Its deletion is left to the bucket (lifecycle rules).
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import tempfile
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

from relayout.core.digests import xxh3_hex
from relayout.core.workers import Stopped
from relayout.errors import FormatError, PlanError, RelayoutError, readable, shown
from relayout.publish.claim import (
    CLAIM,
    HIDDEN,
    MAX_NBYTES,
    Claim,
    Prefix,
    Sent,
    bare,
    check_vacant,
    claim_prefix,
    in_parallel,
    is_version,
    read_claim,
    release,
)
from relayout.publish.output import LocalOutput, OutputKind, OutputSpec, check_space, first_of, kept_note
from relayout.storage.cloud.part_copies import PartCopies
from relayout.storage.cloud.store import CloudStore, Version, WritableClient
from relayout.storage.local.descriptors import FileLock, OpenFolder, take_lock
from relayout.storage.local.store import OutputFile
from relayout.storage.stores import Modes, RequestError, Store

_SMALL_NBYTES = 2**20
"""Maximum bytes of a file that is kept in memory."""
_WHOLE_NBYTES = 2**28
"""Maximum bytes of a file that is created by one request, from memory, if its name is fixed by the work."""
_NUM_STREAMS = 16
"""Number of parts of files that are sent at the same time."""
_NUM_FILES = 4
"""Number of files that are sent at the same time."""


@dataclass(frozen=True, slots=True)
class BucketPublisher:
    """The publisher for a prefix of a bucket; see `publishers.StorePublisher`."""

    prefix: Prefix

    @staticmethod
    def of(store: Store) -> BucketPublisher:
        """Return the publisher of a store. PlanError: the store is read-only, or is a whole bucket."""
        if not isinstance(store, CloudStore) or not isinstance(store.client, WritableClient):
            what = "relayout cannot write to this store: choose another output"
            raise PlanError(what, path=str(store), code="unsupported")
        if not store.prefix:
            what = f"the whole bucket cannot be an output: name a prefix in it, such as {store}/model"
            raise PlanError(what, path=str(store), code="option")
        return BucketPublisher(Prefix(store.client, store.prefix, store))

    def check(self, source: Store, older: OutputKind, *, force: bool) -> None:
        own, other = f"{self.prefix}/", f"{source}/"
        if own == other:
            raise PlanError("is the source itself; choose another prefix", path=str(self.prefix), code="exists")
        if own.startswith(other) or other.startswith(own):
            what = "is inside the source, or contains it; choose another prefix"
            raise PlanError(what, path=str(self.prefix), code="exists")
        if self.prefix.client.stat(self.prefix.prefix) is not None:
            raise PlanError("exists and is not a folder", path=str(self.prefix), code="exists")
        check_vacant(self.prefix, older, read_claim(self.prefix)[0], force=force)

    def begin(
        self, older: OutputKind, work: OutputSpec, *, force: bool, gathers: bool = False
    ) -> AbstractContextManager[BucketOutput]:
        return begin(self.prefix, older, work, force=force, gathers=gathers)

    def begin_part(self, older: OutputKind, work: OutputSpec, *, force: bool) -> AbstractContextManager[BucketOutput]:
        return begin(self.prefix, older, work, force=force, publishes=False)

    def replace(self, name: str, expected: bytes | None, content: bytes) -> None:
        self.prefix.replace(name, expected, content)

    def add(self, name: str, content: bytes) -> None:
        self.prefix.put(name, content, replaced=True)

    def remove(self, older: OutputKind) -> None:
        remove_output(self.prefix, older)


@contextmanager
def begin(
    prefix: Prefix, older: OutputKind, work: OutputSpec, *, force: bool, publishes: bool = True, gathers: bool = False
) -> Iterator[BucketOutput]:
    """Claim a prefix, and yield the output there, which is published at the end if `publishes`.

    Args:
        gathers: True if other processes write all parts. If the work is resumable, they must have claimed the prefix
            for it before.
    """
    with scratch_folder(work.scratch) as scratch, OpenFolder(scratch) as place:
        claim, made = claim_prefix(prefix, older, work, force=force, is_new=not (gathers and work.is_resumable))
        if not work.weights and older.marker in claim.older:
            prefix.delete([older.marker])  # Its files are replaced from now on.
            made = None  # The older output is lost, so the claim cannot be given up any more.
        files = LocalOutput(scratch, place, Modes())
        try:
            output = BucketOutput(prefix, older.marker, claim, files, work.copies, publishes=publishes)
        except BaseException:
            files.folder.close()
            raise
        try:
            yield output
            if publishes:
                output.publish()
            else:
                output.wait()
        except BaseException as error:
            if work.is_resumable and isinstance(error, Exception):
                with suppress(Exception):
                    output.wait()  # Keep a complete part.
            output.stop()
            if work.is_resumable:
                if output.has_parts:
                    error.add_note(kept_note(str(prefix), error))
                if made is not None and not output.has_sent:
                    with suppress(OSError, RelayoutError):
                        made.give_up(prefix)
            elif publishes:
                output.discard(error, others_may_write=gathers)
            raise
        finally:
            output.stop()
            files.folder.close()


def remove_output(prefix: Prefix, older: OutputKind) -> None:
    """Delete an output and the remains of an unfinished one; see `StorePublisher.remove`.

    Only objects named by a claim, or by the records of the output, are deleted. Their names are written to a claim
    before the first deletion, so that a killed deletion can be resumed.
    """
    claim, version = read_claim(prefix)
    there = prefix.objects().keys()
    if not there:
        return
    named = check_vacant(prefix, older, claim, force=True)
    if claim is None:
        noted = Claim("a deletion", "", "", (), tuple(sorted(named)), is_released=True)
        prefix.put(CLAIM, noted.dump(), replaced=version)
    hidden = {name for name in there if name.startswith(HIDDEN)}
    prefix.delete(sorted(((named | hidden) - {CLAIM}) & there))
    prefix.delete([CLAIM])


@dataclass(frozen=True, slots=True)
class Part:
    """The record of a finished part."""

    files: Mapping[str, Sent]
    notes: bytes

    def dump(self) -> bytes:
        """Return the record's content. PlanError: it would be too large to be read again."""
        files = {name: asdict(sent) for name, sent in self.files.items()}
        content = json.dumps({"relayout": "part", "files": files, "notes": self.notes.decode("latin-1")}).encode()
        return readable(content, MAX_NBYTES, "the record of a part")

    @staticmethod
    def parse(content: bytes, where: str) -> Part:
        """Return the record from its content. FormatError: the object is not a record."""
        try:
            value = json.loads(content.decode())
            if value["relayout"] != "part":
                raise ValueError("not the record of a part")
            files = {name: Sent(**sent) for name, sent in value["files"].items()}
            return Part(files, value["notes"].encode("latin-1"))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            what = f"not a record of relayout, or of another version ({shown(str(error))[1:-1]}): delete this object"
            raise FormatError(what, path=where, code="field") from None


class ScratchOutput:
    """Base of outputs in remote stores: files are written in local scratch, and threads send them."""

    def __init__(self, scratch: LocalOutput, num_senders: int, name: str) -> None:
        """Take the scratch. `name` is the prefix of the names of the sending threads."""
        self._scratch = scratch
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._sender = ThreadPoolExecutor(num_senders, name)

    def check_space(self, nbytes: int, part_nbytes: int | None = None) -> None:
        check_scratch(self._scratch.place.path, nbytes, part_nbytes)

    def write(self, name: str, nbytes: int) -> OutputFile:
        return self._scratch.write(name, nbytes)

    def stop(self) -> None:
        """Send nothing more."""
        self._is_over.set()
        self._sender.shutdown(wait=True, cancel_futures=True)

    def _check_going_on(self) -> None:
        """Raise Stopped if the output was given up."""
        if self._is_over.is_set():
            raise Stopped("the output was given up")


class BucketOutput(ScratchOutput):
    """An output below a prefix, as written by one process; see `Output`."""

    def __init__(
        self,
        prefix: Prefix,
        marker: str,
        claim: Claim,
        files: LocalOutput,
        copies: PartCopies | None = None,
        *,
        publishes: bool = True,
    ) -> None:
        super().__init__(files, 1, "relayout-upload")
        self._prefix = prefix
        self._copies = copies
        self._publishes = publishes
        """True if this process publishes the output. Otherwise all files that it writes belong to parts."""
        self._marker = marker
        self._claim = claim
        self.suffix = claim.suffix
        self._older = prefix.load(marker, MAX_NBYTES) if marker in claim.older else None
        """Content and version of the older output's marker. None: no older output is replaced."""
        self._parts: dict[str, Part] = {}
        """Finished parts."""
        self._listed: dict[str, str] | None = None
        """Objects and versions at the time of the first search for finished parts."""
        self._complete: dict[str, Sent] = {}
        """Complete files in scratch that do not belong to a part yet."""
        self._small: dict[str, bytes] = {}
        self._sent: dict[str, Sent] = {}
        """Files that this process has sent, except files of finished parts."""
        self.has_sent = False
        """True if this process may have sent a file: it may exist, or may come to exist."""
        self._is_lost = False
        """True if other processes have completed the output, or have taken over its prefix."""
        self._sending: Future[None] | None = None
        """The upload of the last part, during which the next part is written."""

    @property
    def has_parts(self) -> bool:
        """True if the next attempt can resume from finished parts."""
        return bool(self._parts) and not self._is_lost

    def head(self, name: str, head: bytes, nbytes: int) -> None:
        self._scratch.head(name, head, nbytes)
        with self._lock:
            self._complete[name] = Sent(nbytes, "", xxh3_hex(head), len(head))

    def put(self, name: str, pieces: Iterable[bytes], mode: int | None = None) -> None:
        begun, rest = bytearray(), iter(pieces)
        for piece in rest:
            begun += piece
            if len(begun) > _SMALL_NBYTES and name != self._marker:
                self._scratch.put(name, chain([bytes(begun)], rest))
                self._send_large(name)
                return
        if self._publishes:
            self._small[name] = bytes(begun)
        else:
            self._create(name, bytes(begun))

    def _send_large(self, name: str) -> None:
        """Send a file with a name that is fixed by the work."""
        file = self._scratch.folder.path / name
        self._check()
        if file.stat().st_size <= _WHOLE_NBYTES:
            self._create(name, file.read_bytes())
        else:
            with file.open("rb") as stream:
                start = stream.read(_SMALL_NBYTES)
            self._sent[name] = self._upload(name, Sent(file.stat().st_size, "", xxh3_hex(start), len(start)), 1)
        self._scratch.remove(name)

    # Parts.

    def kept(self, part: str) -> bytes | None:
        name = self._claim.records + part
        loaded = self._prefix.load(name, MAX_NBYTES)
        if loaded is None:
            return None
        found = Part.parse(loaded[0], self._prefix.location(name))
        if self._listed is None:
            self._listed = self._prefix.objects()
        changed = {
            one: sent for one, sent in found.files.items() if not is_version(sent.version, self._listed.get(one))
        }
        if not all(in_parallel(lambda file: self._prefix.is_stored(*file), changed.items())):
            return None
        self._parts[part] = found
        return found.notes

    def keep(self, part: str, notes: bytes) -> None:
        """Send the files, and then the record, in the background. Later calls raise the errors."""
        with self._lock:
            files, self._complete = self._complete, {}
            sent: dict[str, Sent] = {}
            if not self._publishes:
                sent, self._sent = self._sent, {}
            if self._sending is not None:
                self._sending.result()
            self._sending = self._sender.submit(self._send, part, files, sent, notes)

    def wait(self) -> None:
        """Return when all parts are sent."""
        with self._lock:
            if self._sending is not None:
                self._sending.result()

    def _send(self, part: str, files: Mapping[str, Sent], others: Mapping[str, Sent], notes: bytes) -> None:
        """Send the files of a part, and then its record.

        Args:
            others: files of the part that `put` has already sent.
        """
        self._check()
        num_files = max(1, min(_NUM_FILES, len(files)))
        sent = in_parallel(lambda file: self._upload(*file, num_files), files.items(), num_files)
        record = Part({**dict(zip(files, sent, strict=True)), **others}, notes)
        self._check()
        name = self._claim.records + part
        try:
            self._prefix.put(name, record.dump())
        except FileExistsError:  # Another process also finished it, or a recorded file is gone.
            loaded = self._prefix.load(name, MAX_NBYTES)
            self._prefix.put(name, record.dump(), replaced=None if loaded is None else loaded[1])
        self._parts[part] = record

    def _upload(self, name: str, file: Sent, num_files: int) -> Sent:
        """Send a file from scratch, and delete it there."""
        path, full, client = self._scratch.folder.path / name, self._prefix.full(name), self._prefix.client
        num_streams, version = _NUM_STREAMS // num_files, None
        self.has_sent = True
        try:
            if self._copies is not None:
                version = self._copies.upload(client.root, full, name, path, num_streams, self._check_going_on)
            if version is None:
                version = client.upload(full, path, num_streams, self._check_going_on)
        except RequestError:
            if not self._prefix.is_stored(name, file):  # The answer may have been lost.
                raise
            version = {}
        os.truncate(path, 0)  # The file may still be open.
        self._scratch.remove(name)
        return Sent(file.nbytes, _version_of(version), file.digest, file.digest_nbytes)

    def _check(self) -> None:
        """Raise PlanError unless the prefix is still claimed by this work."""
        found, _ = read_claim(self._prefix)
        if found is not None and found.is_of(self._claim):
            return
        self._is_lost = True
        if found is None and self._prefix.client.stat(self._prefix.full(self._marker)) is not None:
            what = "was completed by another process meanwhile"
        else:
            what = "was taken over by another process: this one stops"
        raise PlanError(what, path=str(self._prefix), code="exists" if found is None else "busy")

    # Publishing.

    def publish(self) -> None:
        """Write the remaining files, and the marker last."""
        self.wait()
        if self._complete:
            self.keep("rest", b"")
            self.wait()
        self._check()
        marker = self._small.pop(self._marker, None)
        self._check_there(is_whole=False)
        in_parallel(lambda name: self._create(name, self._small[name]), self._small)
        self._check_there(is_whole=True)
        self._check()
        if marker is not None:
            self._create(self._marker, marker)
        try:
            self._clean_up()
        except (OSError, RelayoutError) as error:  # The output is complete.
            warnings.warn(f"{self._prefix}: complete, but other objects are left there: {error}", stacklevel=4)

    @property
    def _written(self) -> dict[str, Sent]:
        """All files that were sent, including those of other processes."""
        return {name: sent for part in self._parts.values() for name, sent in part.files.items()} | self._sent

    def _create(self, name: str, content: bytes) -> None:
        """Write a file with a fixed name: create it, or replace an object that the claim took over."""
        sent = Sent(len(content), "", xxh3_hex(content), len(content))
        self.has_sent = True
        try:
            version = self._prefix.put(name, content)
        except FileExistsError:
            # This work's own objects are equal, except small ones that have changed in the source meanwhile.
            if name not in self._claim.older and (name == self._marker or name not in self._claim.names):
                raise
            # Read the version before the claim: a process that takes over after that replaces this version.
            loaded = self._older if name == self._marker else self._prefix.load(name, MAX_NBYTES)
            self._check()
            version = self._prefix.put(name, content, replaced=None if loaded is None else loaded[1])
        self._sent[name] = Sent(sent.nbytes, _version_of(version), sent.digest, sent.digest_nbytes)

    def _check_there(self, *, is_whole: bool) -> None:
        """Check by a listing that all sent files exist, and no others; small files only once all are written."""
        there, written = self._prefix.objects(), self._written
        hidden = {name for name in there if name.startswith(HIDDEN)}
        may_be = {*written, *self._claim.older, *hidden, *([] if is_whole else self._claim.names)}
        if self._marker in there.keys() & set(self._claim.names) - set(self._claim.older):
            self._is_lost = True
            raise PlanError("was completed by another process meanwhile", path=str(self._prefix), code="exists")
        if self._older is not None and not is_version(_version_of(self._older[1]), there.get(self._marker)):
            what = "was replaced or deleted by another process"
            raise FileExistsError(errno.EEXIST, what, self._prefix.location(self._marker))
        if foreign := there.keys() - may_be:
            what = f"holds files that this work did not write: {first_of(foreign)}; delete them, and go on"
            raise PlanError(what, path=str(self._prefix), code="exists")
        changed = [name for name, sent in written.items() if not is_version(sent.version, there.get(name))]
        proven = in_parallel(lambda name: name in there and self._prefix.is_stored(name, written[name]), changed)
        if wrong := [name for name, is_verified in zip(changed, proven, strict=True) if not is_verified]:
            what = "was replaced or deleted by another process before the output was complete"
            raise FileExistsError(errno.EEXIST, what, self._prefix.location(min(wrong)))

    def _clean_up(self) -> None:
        """Delete the remains of the older output, the records, and the claim.

        Only these objects are deleted: files that the claim took over from the older output and that this output does
        not contain; records with this work's fingerprint and mark; and the claim, if it is still of this work.
        """
        there = self._prefix.objects().keys()
        own = {*self._written, self._marker}
        records = {self._claim.records + part for part in self._parts}
        self._prefix.delete(sorted((records | set(self._claim.older) - own) & there))
        found, _ = read_claim(self._prefix)
        if found is not None and found.is_of(self._claim):
            self._prefix.delete([CLAIM])

    def discard(self, error: BaseException, *, others_may_write: bool) -> None:
        """Delete this work's objects, and give up the claim.

        Objects that replaced files of an older output are kept: the next work that takes over replaces them. If other
        processes may still write, the claim is kept and recorded as released, so that the next work gets its own mark.
        """
        try:
            self._check()
            there = self._prefix.objects().keys()
            own = set(self._claim.names) - set(self._claim.older)
            records = {name for name in there if name.startswith(self._claim.records)}
            self._prefix.delete(sorted((own | records) & there))
            release(self._prefix, self._claim)
            if not others_may_write:
                self._prefix.delete([CLAIM])
        except (OSError, RelayoutError):
            error.add_note(f"files are left in {self._prefix}/, which the same command with --force replaces")


def _version_of(version: Version) -> str:
    """Return the version as a listing reports it; empty if the store did not report one."""
    return bare(version.get("e_tag") or version.get("version") or "")


def check_scratch(place: Path, nbytes: int, part_nbytes: int | None) -> None:
    """Raise PlanError unless scratch has space: for two parts, as one is sent while the next is written."""
    needed = nbytes if part_nbytes is None else min(nbytes, 2 * part_nbytes)
    advice = (
        ", for files on their way to a bucket: name another folder (--scratch, or TMPDIR), or let parts be smaller"
        " (--max-part-size)"
    )
    check_space(place, place.parent.parent, needed, advice)


_PREFIX = "relayout-scratch-"
_LOCK = "relayout.lock"
_TRIES = 100


@contextmanager
def scratch_folder(place: str | Path | None) -> Iterator[Path]:
    """Yield a new private folder, which is deleted at the end; delete such folders of killed processes.

    Args:
        place: the parent folder. None: the system's folder of temporary files (TMPDIR).
    """
    parent = Path(tempfile.gettempdir() if place is None else place).resolve()
    if not parent.is_dir():
        raise PlanError("no such folder, for files on their way to a bucket", path=parent, code="missing")
    _remove_left(parent)
    folder, lock = _new_scratch(parent)
    try:
        with lock:
            (folder / "files").mkdir(stat.S_IRWXU)
            yield folder / "files"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _new_scratch(parent: Path) -> tuple[Path, FileLock]:
    """Create and lock a private folder; retry if another process deletes it before it is locked. Return both."""
    for _ in range(_TRIES):
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        try:
            lock = take_lock(folder / _LOCK, mode=0o600)
        except FileNotFoundError:
            continue
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        if lock is not None:
            return folder, lock
    raise PlanError("folders for files on their way to a bucket are deleted again and again", path=parent, code="busy")


def _remove_left(parent: Path) -> None:
    """Delete the folders that killed processes of this user left.

    A folder is deleted only if it has the prefix of `scratch_folder`, belongs to this user, and is not locked by a
    process (which holds the lock until it ends) or is empty (its process was killed before it created the lock).
    """
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError, PlanError):
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            try:
                lock = take_lock(folder / _LOCK, create=False)
            except FileNotFoundError:
                folder.rmdir()
                continue
            if lock is not None:
                with lock:
                    shutil.rmtree(folder, ignore_errors=True)
