"""Parts of uploads that a server copies: each byte is planned once, and proven by MD5, whatever the server does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import s3_server
from support.s3_server import Answer, Request, Server, error, md5

from relayout.core.extents import Extent
from relayout.core.workers import Stopped
from relayout.storage.cloud import connect, part_copies
from relayout.storage.cloud.part_copies import CopySource, PartCopies, UploadPart, is_possible, plan_parts, versions_in
from relayout.storage.stores import find_store

MIB = 2**20
LEAST = 5 * MIB
OLD = "s3://models/v1/old weights+ü.bin"
KEY = OLD.removeprefix("s3://models/")
PARTS = {"name": "weights", "full": "v2/weights", "root": "s3://models"}


def of_old(start: int, end: int, offset: int = 0, url: str = OLD, version: str = '"1"') -> CopySource:
    return CopySource(Extent(start, end - start), url, offset, version)


def described(parts: list[UploadPart]) -> list[tuple[float, float, int | None]]:
    """Start and end in MiB, and the offset in the object."""
    return [
        (p.extent.offset / MIB, p.extent.end / MIB, None if p.source is None else p.source.offset // MIB) for p in parts
    ]


# The plan.


def test_parts_are_copied_where_there_are_places_and_sent_elsewhere() -> None:
    parts = plan_parts(40 * MIB, [of_old(8 * MIB, 24 * MIB, 100 * MIB), of_old(30 * MIB, 36 * MIB, 7 * MIB)])
    sent = [(part.extent.offset // MIB, part.extent.end // MIB) for part in parts if part.source is None]
    assert sent == [(0, 8), (24, 30), (36, 40)]
    copied = [part for part in parts if part.source is not None]
    thirds = [8 * MIB + 16 * MIB * third // 3 for third in range(3)]
    assert [part.extent.offset for part in copied] == [*thirds, 30 * MIB]
    assert [part.extent.end for part in copied][2:] == [24 * MIB, 36 * MIB]


def test_a_short_gap_takes_bytes_of_the_place_after_it() -> None:
    parts = plan_parts(16 * MIB, [of_old(MIB, 16 * MIB, MIB)])
    assert described(parts) == [(0, 5, None), (5, 10.5, 5), (10.5, 16, 10)]


def test_a_place_that_is_too_short_is_sent_unless_it_ends_the_file() -> None:
    parts = plan_parts(12 * MIB, [of_old(6 * MIB, 10 * MIB)])
    assert all(part.source is None for part in parts)
    assert described(plan_parts(12 * MIB, [of_old(10 * MIB, 12 * MIB)])) == [(0, 5, None), (5, 10, None), (10, 12, 0)]


def test_neighbors_in_both_files_are_one_place() -> None:
    parts = plan_parts(8 * MIB, [of_old(0, 3 * MIB), of_old(3 * MIB, 8 * MIB, 3 * MIB)])
    assert described(parts) == [(0, 8, 0)]
    others = [of_old(3 * MIB, 8 * MIB, 4 * MIB), of_old(3 * MIB, 8 * MIB, 3 * MIB, "s3://models/other")]
    for other in others:
        parts = plan_parts(8 * MIB, [of_old(0, 3 * MIB), other])
        assert all(part.source is None or part.source.url == other.url for part in parts)
        assert parts[0].source is None


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 200), st.lists(st.integers(0, 200), max_size=12, unique=True), st.data())
def test_a_plan_has_each_byte_once_in_parts_that_a_server_accepts(
    size: int, edges: list[int], data: st.DataObject
) -> None:
    """Units of 512 KiB. The object has each place at an offset of its own, so that a wrong offset is seen."""
    edges = sorted(edge for edge in edges if edge <= size)
    sources = [
        of_old(low * MIB // 2, high * MIB // 2, data.draw(st.integers(0, 1000)) * MIB + 3, f"s3://models/{low}")
        for low, high in zip(edges[::2], edges[1::2], strict=False)
    ]
    nbytes = size * MIB // 2 + 1
    parts = plan_parts(nbytes, sources)
    ends = [0, *(part.extent.end for part in parts)]
    assert [part.extent.offset for part in parts] == ends[:-1]
    assert ends[-1] == nbytes
    assert all(part.extent.nbytes >= LEAST for part in parts[:-1])
    assert all(part.extent.nbytes < 2 * LEAST for part in parts)
    for part in parts:
        if part.source is not None:
            (found,) = [one for one in sources if one.url == part.source.url]
            assert part.source.extent == part.extent
            assert found.extent.offset <= part.extent.offset < part.extent.end <= found.extent.end
            assert part.source.offset - found.offset == part.extent.offset - found.extent.offset
    long = [one for one in sources if one.extent.nbytes >= 2 * LEAST]
    assert {one.url for one in long} <= {part.source.url for part in parts if part.source}


def test_the_largest_file_has_no_more_parts_than_a_server_accepts() -> None:
    """5 TB, alternately copied and sent."""
    nbytes = 5 * 10**12
    step = 600 * MIB
    sources = [of_old(at, at + step, at) for at in range(step, nbytes - step, 2 * step)]
    parts = plan_parts(nbytes, sources)
    assert 5000 < len(parts) <= 10_000
    assert max(part.extent.nbytes for part in parts) <= 5 * 2**30


# Uploads.


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(connect, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(part_copies, "_NUM_ATTEMPTS", 1)
    with s3_server.running() as server:
        for name, value in s3_server.environment(server).items():
            monkeypatch.setenv(name, value)
        server.checks_parts = server.checks_keys = True
        yield server


def weights(nbytes: int, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


@pytest.fixture
def old(server: Server) -> bytes:
    content = weights(12 * MIB, 1)
    server.put("models", KEY, content)
    return content


@pytest.fixture
def file(old: bytes, tmp_path: Path) -> Path:
    """Of the older object from 1 MiB on, with 6 MiB before, and some bytes after."""
    path = tmp_path / "weights"
    path.write_bytes(weights(6 * MIB, 2) + old[MIB:] + b"end")
    return path


def listed(url: str = OLD) -> str:
    return versions_in(find_store(url.rpartition("/")[0]))[url.rpartition("/")[2]]


def copies() -> PartCopies:
    """With the one place that is right."""
    right = of_old(6 * MIB, 17 * MIB, MIB, version=listed())
    return PartCopies(lambda name: {"weights": [right]}[name])


def upload(made: PartCopies, file: Path, check: Callable[[], None] = lambda: None) -> None:
    version = made.upload(PARTS["root"], PARTS["full"], PARTS["name"], file, 4, check)
    assert version is not None
    stat = find_store("s3://models/v2").stat("weights")
    assert stat is not None
    assert stat.version == version["e_tag"]


def bodies(server: Server) -> int:
    """Bytes of parts that were sent."""
    return sum(len(one.body) for one in server.requests if one.method == "PUT" and one.status == 200)


def is_copy(request: Request) -> bool:
    return "x-amz-copy-source" in request.headers


def test_what_the_server_has_is_copied_there_and_only_the_rest_is_sent(server: Server, file: Path) -> None:
    made = copies()
    upload(made, file)
    assert server.objects["models", "v2/weights"].content == file.read_bytes()
    assert made.nbytes == server.copied_nbytes == 11 * MIB
    assert bodies(server) == 6 * MIB + 3
    assert server.objects["models", KEY].content[MIB:] == file.read_bytes()[6 * MIB : -3]
    asked = [one for one in server.requests if is_copy(one)]
    assert {one.headers["x-amz-copy-source-if-match"] for one in asked} == {listed()}
    assert not server.uploads


def test_without_a_place_nothing_is_sent_by_it(server: Server, file: Path) -> None:
    for sources in ([], [of_old(0, MIB)]):
        made = PartCopies(lambda name, sources=sources: sources)  # type: ignore[misc]
        server.requests.clear()
        assert made.upload("s3://models", "v2/weights", "weights", file, 4, lambda: None) is None
        assert server.requests == []


def another(server: Server, request: Request) -> Answer:
    """An object of somebody else has taken the place of the older one."""
    server.put("models", KEY, weights(12 * MIB, 3))
    return s3_server.answer(server, request)


def ignorant(server: Server, request: Request) -> Answer:
    """Of another range, but says honestly what it has stored."""
    request.headers["x-amz-copy-source-range"] = "bytes=0-5767167"
    return s3_server.answer(server, request)


def careless(server: Server, request: Request) -> Answer:
    """The object was replaced, and the condition is ignored."""
    del request.headers["x-amz-copy-source-if-match"]
    return another(server, request)


def copied(tag: str) -> Callable[[Server, Request], Answer]:
    """Says that it has copied, with this ETag, and has not."""
    body = f"<CopyPartResult>{tag and f'<ETag>{escape(tag)}</ETag>'}</CopyPartResult>"
    return lambda server, request: Answer(200, body.encode(), {"Content-Type": "application/xml"})


LIES: dict[str, Callable[[Server, Request], Answer]] = {
    "replaced": another,
    "another range": ignorant,
    "no condition": careless,
    "no tag": copied(""),
    "a tag of several parts": copied(f'"{md5(b"x")}-2"'),
    "no XML": lambda server, request: Answer(200, b"copied, trust me"),
    "an error in the body": lambda server, request: Answer(200, b"<Error><Code>InternalError</Code></Error>"),
    "not implemented": lambda server, request: error(501, "NotImplemented"),
    "not allowed": lambda server, request: error(403, "AccessDenied"),
    "gone": lambda server, request: error(404, "NoSuchKey"),
}


@pytest.mark.parametrize("what", LIES)
def test_whatever_the_server_does_the_object_is_the_file(
    server: Server, file: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = copies()
    server.interfere = lambda request: LIES[what](server, request) if is_copy(request) else None
    with caplog.at_level(logging.WARNING, "relayout"):
        upload(made, file)
    assert server.objects["models", "v2/weights"].content == file.read_bytes()
    assert made.nbytes == 0
    (warning,) = caplog.messages
    assert "copied by the server, but sent: " in warning
    assert OLD in warning
    server.requests.clear()
    assert made.upload("s3://models", "v2/weights", "weights", file, 4, lambda: None) is None
    assert server.requests == []


@pytest.mark.parametrize("status", [301, 307])
def test_a_redirect_of_a_named_endpoint_is_not_followed(server: Server, file: Path, status: int) -> None:
    headers = {"Location": f"{server.url}/stolen/weights", "x-amz-bucket-region": "eu-west-1"}

    def redirect(request: Request) -> Answer | None:
        return Answer(status, error(status, "PermanentRedirect").body, headers) if is_copy(request) else None

    server.interfere = redirect
    upload(copies(), file)
    assert server.objects["models", "v2/weights"].content == file.read_bytes()
    assert {request.bucket for request in server.requests} == {"models"}


def test_a_source_with_one_wrong_bit_is_sent(server: Server, old: bytes, file: Path) -> None:
    server.put("models", KEY, old[: 7 * MIB] + bytes([old[7 * MIB] ^ 1]) + old[7 * MIB + 1 :])
    made = copies()
    upload(made, file)
    assert server.objects["models", "v2/weights"].content == file.read_bytes()
    assert made.nbytes < 11 * MIB


def test_an_upload_that_is_stopped_is_aborted_and_no_other(server: Server, file: Path) -> None:
    server.uploads["theirs"] = "models", "v2/weights", {}

    parts = iter(range(2))

    def stop() -> None:
        if next(parts, None) is None:
            raise Stopped("the output was given up")

    with pytest.raises(Stopped):
        upload(copies(), file, stop)
    assert list(server.uploads) == ["theirs"]
    assert ("models", "v2/weights") not in server.objects


def ends(request: Request) -> bool:
    return request.method == "POST" and "uploadId" in request.query


REFUSALS: dict[str, Callable[[Request], bool]] = {
    "begin": lambda request: "uploads" in request.query,
    "send": lambda request: "partNumber" in request.query and not is_copy(request),
    "end": ends,  # As R2 does, if parts have several sizes.
}


@pytest.mark.parametrize("what", REFUSALS)
def test_an_upload_that_the_service_refuses_is_left_to_the_caller(
    server: Server, file: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "All of a secret of the server"
    server.interfere = lambda request: error(400, secret) if REFUSALS[what](request) else None
    made = copies()
    with caplog.at_level(logging.WARNING, "relayout"):
        assert made.upload("s3://models", "v2/weights", "weights", file, 4, lambda: None) is None
    assert "s3://models/v2/weights" in caplog.text
    assert "secret" not in caplog.text
    assert not server.uploads
    server.requests.clear()
    assert made.upload("s3://models", "v2/weights", "weights", file, 4, lambda: None) is None
    assert server.requests == []


# Where it is possible.


def test_only_buckets_of_s3_are_copied_by_their_server(server: Server, tmp_path: Path) -> None:
    here, bucket, other = find_store(tmp_path), find_store("s3://models/a"), find_store("s3://others")
    assert is_possible(bucket, other)
    assert is_possible(bucket, bucket)
    assert not is_possible(here, bucket)
    assert not is_possible(bucket, here)
    assert not is_possible(find_store("https://example.com/a"), bucket)


def test_a_missing_package_is_named(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = find_store("s3://models/a")
    monkeypatch.setattr(part_copies, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING, "relayout"):
        assert not is_possible(bucket, bucket)
    assert "pip install boto3" in caplog.text
