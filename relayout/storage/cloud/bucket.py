"""The client of a bucket of S3, GCS or Azure, by obstore."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from relayout.core.extents import align_up
from relayout.errors import FormatError
from relayout.storage.cloud import connect
from relayout.storage.cloud.failures import replaced as was_replaced
from relayout.storage.cloud.failures import request, translated
from relayout.storage.cloud.store import CLOUD_COST, Body, CloudStore, Version, check_url
from relayout.storage.stores import FileStat, RequestCost, RequestError, if_there

if TYPE_CHECKING:
    from obstore import Bytes, GetResult, ObjectMeta
    from obstore.store import ObjectStore

PART_NBYTES = 8 * 2**20
"""Bytes of one part of an upload with up to `_MAX_PARTS` parts. Providers require at least 5 MiB."""
_MAX_PARTS = 9000
"""Maximum number of parts of one upload. Providers accept 10,000 or more."""


def offer(url: str) -> CloudStore:
    """Return the store of a prefix of a bucket."""
    check_url(url)
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.rstrip("/").partition("/")
    return CloudStore(BucketClient.of(f"{scheme.lower()}://{bucket}"), prefix)


@dataclass(frozen=True, slots=True, repr=False)
class BucketClient:
    """A bucket of S3, GCS or Azure. It is pickled as its URL; unpickling looks up the credentials again."""

    root: str
    store: ObjectStore
    """obstore's store of the bucket. Its names are full object names."""
    uploaders: list[ObjectStore] = field(default_factory=list, compare=False)
    """Contains the store for uploads, once it was created."""
    cost: ClassVar[RequestCost] = CLOUD_COST

    @classmethod
    def of(cls, root: str) -> BucketClient:
        """Return the client without making a request."""
        return cls(root, connect.make_store(root))

    def __reduce__(self) -> tuple[object, ...]:
        return BucketClient.of, (self.root,)

    def __repr__(self) -> str:
        return f"BucketClient({self.root!r})"

    def get(self, name: str, start: int, end: int | None, version: str | None) -> Body:
        location = f"{self.root}/{name}"
        options: dict[str, Any] = {} if end is None else {"range": (start, end)}
        if version is not None and is_comparable(version):
            options["if_match"] = version
        requested = None if end is None else (start, end)
        result = request(lambda: self.store.get(name, options=options), location, requested)  # type: ignore[arg-type]
        stat, part = self._stat_of(result.meta), result.range
        check_answer(stat, part, start, end, version, location)
        return Body(
            stat,
            location,
            part,
            _pieces(result, location, part),
            lambda offset: self.get(name, offset, part[1], stat.version),
            _version(result.meta),
        )

    def stat(self, name: str) -> FileStat | None:
        return if_there(lambda: self._stat_of(request(lambda: self.store.head(name), f"{self.root}/{name}")))

    def _stat_of(self, meta: ObjectMeta) -> FileStat:
        """Return obstore's metadata of an object. Without an ETag, its modification time is the version."""
        tag = meta["e_tag"]
        vouched = f"{self.root}/{meta['path']} {tag}" if tag and is_comparable(tag) else None
        return FileStat(meta["size"], tag or f"{meta['last_modified'].isoformat()} {meta['size']}", vouched=vouched)

    def list_objects(self, prefix: str) -> Iterator[tuple[str, str]]:
        location, last, begins = f"{self.root}/{prefix}", None, set()
        pages: Iterator[Sequence[ObjectMeta]] | None = None

        def next_page() -> Sequence[ObjectMeta] | None:
            nonlocal pages
            try:
                pages = pages or iter(self.store.list(prefix or None, offset=last))
                return next(pages, None)
            except BaseException:
                pages = None  # A failed iterator cannot continue.
                raise

        while page := request(next_page, location):
            if page[0]["path"] in begins:
                raise FormatError("the listing of the store repeats names", path=location, code="invalid")
            begins.add(page[0]["path"])
            for meta in page:
                last = meta["path"]
                yield last, self._stat_of(meta).version

    def put(self, name: str, content: bytes, replaced: Version | Literal[True] | None = True) -> Version:
        location = f"{self.root}/{name}"
        mode: Any = "overwrite" if replaced is True else replaced or "create"
        put = partial(self.store.put, name, content, mode=mode, use_multipart=False)
        try:
            return _version(request(put, location))
        except FormatError:
            raise FileExistsError(errno.EEXIST, "was replaced or deleted by another process", location) from None

    def delete(self, names: Sequence[str]) -> None:
        try:
            request(lambda: self.store.delete(list(names)), self.root)
        except FormatError as error:
            if error.code != "missing":
                raise
            if len(names) > 1:  # Azure reports a missing object as an error, and may not have deleted the rest.
                for name in names:
                    self.delete([name])

    def upload(self, name: str, file: Path, num_streams: int, check: Callable[[], None]) -> Version:
        """Send the parts by obstore, which repeats each failed part for as long as `failures` does."""
        location, nbytes = f"{self.root}/{name}", file.stat().st_size
        part_nbytes = align_up(max(PART_NBYTES, -(-nbytes // _MAX_PARTS)), 2**20)
        if nbytes <= part_nbytes:
            return self.put(name, file.read_bytes())

        def send() -> Any:
            with file.open("rb", buffering=0) as stream:
                pieces = _checked(partial(stream.read, part_nbytes), check)
                return self._uploader.put(name, pieces, chunk_size=part_nbytes, max_concurrency=num_streams)

        try:
            return _version(request(send, location))
        except FormatError:  # The missing object is the upload.
            what = "its upload no longer exists: aborted by another process or a lifecycle rule; convert again"
            raise RequestError(errno.EIO, what, location) from None

    @property
    def _uploader(self) -> ObjectStore:
        """obstore's store with the settings for large requests. All uploads share its connections."""
        if not self.uploaders:
            self.uploaders.append(connect.make_store(self.root, for_uploads=True))
        return self.uploaders[0]


def _checked(read: Callable[[], bytes], check: Callable[[], None]) -> Iterator[bytes]:
    """Yield the results of `read` until it returns nothing."""
    while piece := read():
        check()
        yield piece


def _version(meta: Any) -> Version:
    return {key: meta[key] for key in ("e_tag", "version") if meta[key] is not None}


def check_answer(
    stat: FileStat, part: tuple[int, int], start: int, end: int | None, version: str | None, location: str
) -> None:
    """Check that an answer has the requested version and range."""
    if version is not None and stat.version != version:  # Some servers ignore If-Match.
        raise was_replaced(location)
    if part != (start, stat.nbytes if end is None else min(end, stat.nbytes)):
        what = f"requested bytes {start} to {end}, got {part[0]} to {part[1]}: the server does not serve ranges"
        raise RequestError(errno.EPROTO, what, location)


def _pieces(result: GetResult, location: str, part: tuple[int, int]) -> Iterator[Bytes | bytes]:
    pieces = iter(result.stream(min_chunk_size=1))  # Larger ones would be lost in part when the connection breaks.
    while (piece := translated(lambda: next(pieces, None), location, part)) is not None:
        yield piece


def is_comparable(version: str) -> bool:
    """Return True if a version is an ETag that servers compare: weak ones never match (RFC 9110, section 13.1.1)."""
    return version.startswith('"')
