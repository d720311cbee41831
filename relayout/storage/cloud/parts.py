"""Parts of an output that several processes assemble in an object store, see `Store.stage_part`.

Each attempt at a part has uploads of its own, to the objects that the files will be. When all parts of all of them are
sent, it records them, and then the part's notes, below the hidden prefix. Uploads of other attempts at the same part do
not count then; whoever publishes aborts them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict

from relayout.errors import PlanError
from relayout.storage.cloud.staging import NOTES, CloudStaging, Complete, Place
from relayout.storage.protocols import Closable, Notes


class PartStaging(CloudStaging):
    """The uploads of one attempt at a part."""

    def __init__(self, place: Place, marker: str) -> None:
        super().__init__(place, marker)
        self.held: dict[str, _Held] = {}
        """The notes of this attempt, which are stored last."""

    def _take_over(self) -> None:
        """Nothing: other attempts are left alone."""

    def write_head(self, name: str, head: bytes, nbytes: int) -> None:
        """See `Staging.write_head`."""
        self.write_file(name, nbytes, is_new=name not in self._uploads).write(0, memoryview(head))
        self._complete[name] = Complete.of(name, self._uploads.pop(name))

    def put(self, name: str, pieces: Iterable[bytes], mode: int | None = None) -> None:
        """See `Staging.put`."""
        self._check_new(name)
        upload = self._uploads[name] = self._upload(name)
        upload.append(pieces)
        self._complete[name] = Complete.of(name, self._uploads.pop(name))

    def open_notes(self, name: str, *, is_new: bool) -> Notes:
        """See `Staging.open_notes`."""
        return self.held.setdefault(name, _Held())

    def add(self, part: str) -> None:
        """Record the files, and then the notes of the part."""
        place = self._place
        records = {self._record(name): json.dumps(asdict(one)).encode() for name, one in self._complete.items()}
        self._in_parallel(lambda name: place.put(name, records[name], create=False), records)
        place.put(f"{place.kept}{NOTES}{part}/0", bytes(self.held[part].text), create=False)

    def abort(self) -> None:
        """Abort all uploads of this attempt."""
        for name, upload in self._uploads.items():
            self._multipart.abort(self._place.full(name), upload.id)
        for name, one in self._complete.items():
            self._multipart.abort(self._place.full(name), one.upload)


class _Held(Closable):
    """Notes in memory."""

    def __init__(self) -> None:
        self.text = bytearray()

    def append(self, text: bytes) -> None:
        """See `Notes.append`."""
        self.text += text

    def close(self) -> None:
        """Do nothing: they are stored when the part is added."""


@contextmanager
def staged_part(place: Place, marker: str, part: str, *, replace: bool) -> Iterator[PartStaging]:
    """See `Store.stage_part`."""
    _check_not_published(place, marker, replace)
    staging = PartStaging(place, marker)
    is_added = False
    try:
        yield staging
        if part in staging.held:
            _check_not_published(place, marker, replace)
            staging.add(part)
            is_added = True
    except OSError:
        _check_not_published(place, marker, replace)  # Whoever publishes aborts the uploads of all others.
        raise
    finally:
        if not is_added:
            with suppress(OSError):  # Whoever publishes aborts what is left.
                staging.abort()


def _check_not_published(place: Place, marker: str, replace: bool) -> None:
    if not replace and place.client.stat(place.full(marker)) is not None:
        raise PlanError("is complete already; --force replaces it", path=str(place), code="exists")
