"""Files of a remote store: one version of an object, read by ranges straight into the memory that is given."""

from __future__ import annotations

from typing import ClassVar

from relayout.errors import FormatError
from relayout.storage.cloud.client import Client
from relayout.storage.protocols import Closable, FileStat, RequestError

HEAD_NBYTES = 64 * 2**10
"""What opening a file brings of it: its first request tells length and version, and has the header of most files."""
STAT_NBYTES = 4 * 2**10
"""The same of a file that is only to be known: which file it is. A new connection brings this in one round trip."""


class CloudFile(Closable):
    """One version of an object; see `protocols.ReadableFile`. It holds no connection, and nothing to close."""

    alignment: ClassVar[int] = 1

    def __init__(
        self, client: Client, name: str, location: str, *, version: str | None = None, head_nbytes: int = HEAD_NBYTES
    ) -> None:
        """Open the object by one request for its first bytes; for errors see `Client.get`."""
        self._client = client
        self._name = name
        self._where = location
        try:
            stat = self._first(version, head_nbytes)
        except FormatError as error:
            if error.code == "mismatch":
                raise FormatError("has changed since it was last checked", path=location, code="mismatch") from None
            raise
        self.nbytes = stat.nbytes
        self.version = stat.version

    def _first(self, version: str | None, head_nbytes: int) -> FileStat:
        """Length and version of the object; keeps its first bytes."""
        try:
            body = self._client.get(self._name, 0, head_nbytes, version)
        except RequestError as error:
            stat = self._client.stat(self._name) if error.status == 416 else None
            if stat is None or stat.nbytes:
                raise
            self._head = b""  # No range of an object without bytes can be asked for.
            return stat
        self._head = body.content()
        return body.stat

    def fileno(self) -> None:
        return

    def read(self, offset: int, view: memoryview) -> None:
        view = view[: max(0, self.nbytes - offset)]
        known = memoryview(self._head)[offset : offset + view.nbytes]
        view[: known.nbytes] = known
        rest = view[known.nbytes :]
        if rest.nbytes:
            start = offset + known.nbytes
            self._client.get(self._name, start, start + rest.nbytes, self.version).fill(rest)

    def close(self) -> None:
        """Do nothing."""
