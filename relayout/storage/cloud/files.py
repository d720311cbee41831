"""Files of a remote store: one version of an object, read by ranges straight into the memory that is given."""

from __future__ import annotations

from functools import partial

from relayout.errors import FormatError
from relayout.storage.cloud.client import Client
from relayout.storage.head_file import HeadFile
from relayout.storage.protocols import RequestError

HEAD_NBYTES = 64 * 2**10
"""What opening a file brings of it: its first request tells length and version, and has the header of most files."""
STAT_NBYTES = 4 * 2**10
"""The same of a file that is only to be known: which file it is. A new connection brings this in one round trip."""


def open_object(client: Client, name: str, location: str, version: str | None, head_nbytes: int) -> HeadFile:
    """Open an object by one request for its first bytes; for errors see `Client.get`. The file stays at one version."""
    try:
        body = client.get(name, 0, head_nbytes, version)
        return HeadFile(body.content(), body.stat, partial(_fill, client, name, body.stat.version))
    except FormatError as error:
        if error.code == "mismatch":
            raise FormatError("has changed since it was last checked", path=location, code="mismatch") from None
        raise
    except RequestError as error:
        stat = client.stat(name) if error.status == 416 else None
        if stat is None or stat.nbytes:
            raise
        return HeadFile(b"", stat)  # No range of an object without bytes can be asked for.


def _fill(client: Client, name: str, version: str, offset: int, view: memoryview) -> None:
    client.get(name, offset, offset + view.nbytes, version).fill(view)
