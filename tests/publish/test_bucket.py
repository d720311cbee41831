"""Outputs in an object store: each byte is sent once, nothing shows before the end, and faults leave no half output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support import s3_server
from support.lying_server import (
    Interference,
    at,
    dropped,
    failing_late,
    is_completion,
    is_part,
    lost,
    puts,
    refused,
)
from support.models import llama_files
from support.s3_server import Request, Server

import relayout
from relayout.conversion.jobs import unit_jobs
from relayout.errors import PlanError
from relayout.storage.cloud import bucket, connect, failures

pytest.importorskip("obstore", reason="the client of object stores")

HIDDEN = 256
OPTIONS = {"tp": 2, "max_part_nbytes": 2_500_000}
SOURCE, OUT = "s3://models/llama", "s3://models/out"
MIB = 2**20
Files = dict[str, bytes]


MODEL = llama_files(HIDDEN, head_dim=32, mlp=1024, layers=5, vocabulary=2048) | {
    "tokenizer.json": np.random.default_rng(3).integers(0, 256, 5 * MIB // 2, np.uint8).tobytes(),
    "empty.txt": b"",
}
"""12 MB: two ranks of three files each, of some parts of 1 MiB."""
SHARDS_NBYTES = sum(len(blob) for name, blob in MODEL.items() if name.endswith(".safetensors"))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """What a conversion on the drive makes."""
    folder = tmp_path_factory.mktemp("uploads")
    (folder / "llama").mkdir()
    for name, blob in MODEL.items():
        (folder / "llama" / name).write_bytes(blob)
        (folder / "llama" / name).chmod(0o644)
    relayout.convert(folder / "llama", folder / "out", **OPTIONS)
    return {path.name: path.read_bytes() for path in (folder / "out").iterdir()}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    """A server with the model; retries and parts are short."""
    monkeypatch.setattr(connect, "RETRY_SECONDS", 1.5)
    monkeypatch.setattr(connect, "UPLOAD_SECONDS", 5.0)
    monkeypatch.setattr(failures, "FIRST_DELAY_SECONDS", 0.05)
    monkeypatch.setattr(bucket, "PART_NBYTES", MIB)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with s3_server.running() as server:
        for name, value in s3_server.environment(server).items():
            monkeypatch.setenv(name, value)
        for name, blob in MODEL.items():
            server.put("models", f"llama/{name}", blob)
        server.checks_keys = True
        yield server


def convert(**options: object) -> relayout.Summary:
    return relayout.convert(SOURCE, OUT, **(OPTIONS | options))


def there(server: Server) -> Files:
    """The output's objects."""
    prefix = "out/"
    return {
        name.removeprefix(prefix): server.objects["models", name].content for name in server.names("models", prefix)
    }


def nothing_is_left(server: Server) -> bool:
    """Neither unfinished uploads nor hidden objects."""
    return not server.uploads and server.names("models", "out/.") == []


def sent(server: Server) -> int:
    """Source bytes that the server has sent."""
    return sum(one.sent_nbytes for one in server.requests if one.method == "GET" and ".safetensors" in one.key)


def test_a_conversion_reads_and_sends_each_byte_once_and_makes_the_bytes_of_a_local_one(
    server: Server, expected: Files, tmp_path: Path
) -> None:
    done = convert()
    assert there(server) == expected
    assert nothing_is_left(server)
    assert done.num_files == 6
    opened = [one for one in server.requests if ".safetensors" in one.key and (one.range or (1, 0))[0] == 0]
    assert SHARDS_NBYTES <= sent(server) <= SHARDS_NBYTES + 2**16 * len(opened), (
        "beside the first bytes of each opening"
    )
    assert len(opened) <= 8
    written = [one for one in server.requests if one.method == "PUT" and "/." not in one.key]
    assert sum(len(one.body) for one in written) == sum(map(len, expected.values()))
    assert max(len(one.body) for one in written if is_part(one)) == MIB
    assert not list(tmp_path.glob("relayout-scratch-*"))


def test_google_takes_the_same_requests_with_other_headers(
    server: Server, expected: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "a-token")
    monkeypatch.setenv("GOOGLE_BASE_URL", server.url)
    server.checks_keys = False
    relayout.convert("gs://models/llama", "gs://models/out", **OPTIONS)
    assert there(server) == expected
    assert {one.headers["authorization"] for one in server.requests} == {"Bearer a-token"}
    small = [one for one in server.requests if one.method == "PUT" and not one.query and "model-rank" not in one.key]
    assert len(small) > 8
    assert {one.headers["x-goog-if-generation-match"] for one in small} == {"0"}
    assert nothing_is_left(server)


def one_after_the_other(*interferences: Interference) -> Interference:
    """The first of them that does something with a request."""
    return lambda request: next((answer for each in interferences if (answer := each(request)) is not None), None)


def test_what_passes_changes_nothing(server: Server, expected: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "RETRY_SECONDS", 20.0)  # Some request may meet several of these.
    faults = [
        refused(is_part, 503, "SlowDown", times=4),
        dropped(is_part, times=3),
        lost(server, is_part, times=2),
        refused(is_completion, 500, "InternalError", times=2),
        failing_late(is_completion, times=1),
        dropped(is_completion, times=2),
        lost(server, is_completion, times=2),
        lost(server, puts("relayout.json")),
        dropped(lambda one: one.method == "GET" and ".safetensors" in one.key, after=4),
    ]
    server.interfere = one_after_the_other(*faults)
    convert()
    assert there(server) == expected
    assert nothing_is_left(server)


def test_expired_credentials_are_one_clear_error_and_leave_nothing_to_see(server: Server, expected: Files) -> None:
    server.interfere = refused(is_part, 403, "ExpiredToken", times=1000, after=2)
    with pytest.raises(OSError, match=r"access denied: .*ExpiredToken.*s3://models/out/model-rank-") as caught:
        convert()
    assert s3_server.SECRET_KEY not in f"{caught.value!r} {caught.value.__cause__!r} {caught.value.__context__!r}"
    assert "relayout.json" not in there(server)
    server.interfere = lambda request: None
    convert()
    assert there(server) == expected


def test_a_whole_bucket_is_no_output(server: Server) -> None:
    convert()
    before = dict(server.objects)
    server.uploads["theirs"] = "models", "anything", {}
    for call in (
        lambda: relayout.convert(SOURCE, "s3://models", tp=2),
        lambda: relayout.convert(SOURCE, "s3://models/", tp=2, force=True),
        lambda: relayout.restore(OUT, "s3://models"),
        lambda: relayout.copy(OUT, "s3://models"),
        lambda: unit_jobs(relayout.plan_conversion(SOURCE, "s3://models", tp=2)),
    ):
        with pytest.raises(PlanError) as caught:
            call()
        what = "the whole bucket cannot be an output: name a prefix in it, such as s3://models/model"
        assert (str(caught.value), caught.value.code) == (f"s3://models: {what}", "option")
        assert server.objects == before
        assert "theirs" in server.uploads


COMMAND = [sys.executable, "-m", "relayout", "convert", SOURCE, "-o", OUT, "--tp", "2", "--max-part-size", "2500000"]


def is_file(request: Request) -> bool:
    return request.method == "PUT" and "model-rank" in request.key


def test_after_a_kill_the_same_command_goes_on(server: Server, expected: Files) -> None:
    """At any request: test_claim.py."""
    with subprocess.Popen([*COMMAND, "--threads", "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        server.interfere = at(is_file, lambda: os.kill(child.pid, signal.SIGKILL), after=3)
        child.wait()
    assert child.returncode == -signal.SIGKILL
    server.interfere = lambda request: None
    assert "relayout.json" not in there(server)
    done = convert()
    assert there(server) == expected
    assert nothing_is_left(server)
    assert done.resumed_nbytes > 0


def test_what_is_complete_is_neither_read_nor_sent_again(server: Server, expected: Files) -> None:
    server.interfere = refused(puts("relayout.chunks"), 403, "AccessDenied", times=10**9)
    with pytest.raises(OSError, match="access denied") as caught:
        convert()
    assert caught.value.__notes__ == ["finished work is kept in s3://models/out; the same command resumes it"]
    server.interfere = lambda request: None
    assert "relayout.json" not in there(server)
    before = len(server.requests)
    done = convert()
    assert done.resumed_nbytes == done.source_nbytes
    again = server.requests[before:]
    assert not [one.key for one in again if "model-rank" in one.key and one.method in ("PUT", "POST")]
    # Samples of all tensors, and one finished tensor of each shard, tell that the source is the same.
    assert sum(one.sent_nbytes for one in again if "llama/model-0" in one.key) < SHARDS_NBYTES // 5
    assert there(server) == expected


MOMENTS = 20 if "RELAYOUT_SCHEDULES" in os.environ else 4


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_after_a_kill_at_any_time_the_output_is_that_of_a_local_conversion(
    server: Server, expected: Files, tmp_path: Path, moment: int
) -> None:
    """Of requests: test_claim.py."""
    with subprocess.Popen([*COMMAND, "--threads", "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        server.interfere = at(
            lambda one: one.method in ("PUT", "POST"),
            lambda: os.kill(child.pid, signal.SIGKILL),
            after=moment * 20 // MOMENTS,
        )
        child.wait()
    assert child.returncode in (0, -signal.SIGKILL)
    server.interfere = lambda request: None
    if "relayout.json" not in there(server):  # Else records may be left.
        convert()
        assert server.names("models", "out/.") == []
    assert {name: blob for name, blob in there(server).items() if name[0] != "."} == expected
    assert child.returncode
    convert(force=True)
    assert not list(tmp_path.glob("relayout-scratch-*")), "what a killed process left is deleted by the next"


def test_scratch_that_is_too_small_is_named_before_anything_is_sent(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "small").mkdir()
    known = os.statvfs

    def full(path: str) -> os.statvfs_result:
        found = known(path)
        return os.statvfs_result((*found[:4], 1, *found[5:]))

    monkeypatch.setattr(os, "statvfs", full)
    says = r"small: needs [\d.]+ \w+, [\d.]+ \w+ are free there .* to a bucket: .*--scratch.*--max-part-size"
    with pytest.raises(PlanError, match=says):
        convert(scratch=tmp_path / "small")
    assert [name for name in there(server) if not name.startswith(".")] == []
    with pytest.raises(PlanError, match="nowhere: no such folder, for files on their way to a bucket"):
        convert(scratch=tmp_path / "nowhere")
