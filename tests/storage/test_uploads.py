"""Outputs in an object store: each byte is sent once, nothing shows before the end, and faults leave no half output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
from safetensors.numpy import save
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
from support.s3_server import Server

import relayout
from relayout.conversion.jobs import unit_jobs
from relayout.errors import PlanError
from relayout.storage.cloud import connect, failures, upload
from relayout.storage.cloud.bucket import BucketClient
from relayout.storage.cloud.upload import Upload
from relayout.storage.protocols import RequestError

pytest.importorskip("obstore", reason="the client of object stores")
pytest.importorskip("boto3", reason="sends parts of uploads")

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
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server with the model; retries and parts are short."""
    monkeypatch.setattr(connect, "RETRY_SECONDS", 1.5)
    monkeypatch.setattr(failures, "FIRST_DELAY_SECONDS", 0.05)
    monkeypatch.setattr(upload, "PART_NBYTES", MIB)
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
    return not server.uploads and server.names("models", ".out.relayout-partial") == []


def sent(server: Server) -> int:
    """Source bytes that the server has sent."""
    return sum(one.sent_nbytes for one in server.requests if one.method == "GET" and ".safetensors" in one.key)


def test_a_conversion_reads_and_sends_each_byte_once_and_makes_the_bytes_of_a_local_one(
    server: Server, expected: Files
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
    parts = [one for one in server.requests if is_part(one)]
    large = [len(blob) for name, blob in expected.items() if len(blob) > MIB or "model-rank" in name]
    assert sum(len(one.body) for one in parts) == sum(large)
    assert max(len(one.body) for one in parts) == MIB


def test_parts_that_are_not_full_count_as_memory(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, memory = 2, 6 * MIB
    tensor = np.random.default_rng(4).integers(0, 2**16, (HIDDEN, 32 * 1024), np.uint16)
    server.put("models", "wide/model.safetensors", save({"model.layers.0.mlp.down_proj.weight": tensor}))
    server.put("models", "wide/config.json", MODEL["config.json"])
    files: list[Upload] = []
    waiting: list[int] = []
    send = Upload._send

    def look(file: Upload, number: int, body: memoryview) -> None:
        files.append(file)
        pending = (part for one in set(files) for number, part in list(one._parts.items()) if number)
        waiting.append(sum(part.memory.nbytes - part.num_left for part in pending))
        send(file, number, body)

    monkeypatch.setattr(Upload, "_send", look)
    relayout.convert("s3://models/wide", OUT, tp=2, threads=threads, memory=memory)
    ranges = [one.range for one in server.requests if one.method == "GET" and ".safetensors" in one.key]
    largest = max(end - start for start, end in filter(None, ranges))
    assert memory // 3 // threads * 0.7 < largest <= memory // 3 // threads + 4096, "read, put together, and waiting"
    assert max(waiting) <= memory // 3 + len(set(files)) * MIB, "beside one part of each file"
    assert not any(one._parts for one in files)


def test_google_takes_the_same_requests_with_other_headers(
    server: Server, expected: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "a-token")
    monkeypatch.setenv("GOOGLE_BASE_URL", server.url)
    server.checks_keys = False
    relayout.convert("gs://models/llama", "gs://models/out", **OPTIONS)
    assert there(server) == expected
    assert {one.headers["authorization"] for one in server.requests} == {"Bearer a-token"}
    made = [one for one in server.requests if is_completion(one) or (one.method == "PUT" and not one.query)]
    made = [one for one in made if one.key.startswith("out/")]
    assert {one.headers["x-goog-if-generation-match"] for one in made} == {"0"}
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
        refused(is_completion, 409, "ConditionalRequestConflict", times=2),
        failing_late(is_completion, times=2),
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
    assert there(server) == {}
    assert nothing_is_left(server)
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


def test_after_a_kill_the_same_command_goes_on(server: Server, expected: Files) -> None:
    """At any request: test_schedules.py."""
    with subprocess.Popen([*COMMAND, "--threads", "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        server.interfere = at(is_completion, lambda: os.kill(child.pid, signal.SIGKILL), after=3)
        child.wait()
    assert child.returncode == -signal.SIGKILL
    server.interfere = lambda request: None
    assert "relayout.json" not in there(server)
    done = convert()
    assert there(server) == expected
    assert nothing_is_left(server)
    assert done.resumed_nbytes > 0


def test_what_is_complete_is_neither_read_nor_sent_again(server: Server, expected: Files) -> None:
    server.interfere = refused(is_completion, 403, "AccessDenied", times=10**9)
    with pytest.raises(OSError, match="access denied") as caught:
        convert()
    assert caught.value.__notes__ == [
        "finished work is kept in s3://models/.out.relayout-partial; the same command resumes it"
    ]
    server.interfere = lambda request: None
    assert "relayout.json" not in there(server)
    before = len(server.requests)
    done = convert()
    assert done.resumed_nbytes == done.source_nbytes
    again = server.requests[before:]
    assert [one.key for one in again if is_part(one)] == ["out/tokenizer.json"] * 3
    # Samples of all tensors, and one finished tensor of each shard, tell that the source is the same.
    assert sum(one.sent_nbytes for one in again if "llama/model-0" in one.key) < SHARDS_NBYTES // 5
    assert there(server) == expected


def test_without_credentials_the_message_says_so(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    uploads = BucketClient.of("s3://models").uploads()
    with pytest.raises(RequestError, match=r"no credentials found.*s3://models/out/x"):
        uploads.begin("out/x")


# Parts.


class Kept:
    """Takes parts, and keeps them."""

    def __init__(self) -> None:
        self.parts: dict[int, bytes] = {}
        self.order: list[int] = []

    def begin(self, name: str) -> str:
        return "id"

    def send(self, name: str, upload: str, index: int, body: memoryview) -> str:
        assert index not in self.parts
        self.parts[index] = bytes(body)
        self.order.append(index)
        return f"tag {index}"

    def complete(self, name: str, upload: str, tags: Sequence[str]) -> str:
        return ""

    def abort(self, name: str, upload: str) -> None:
        pass


@pytest.mark.parametrize("nbytes", [1, MIB - 1, MIB, MIB + 1, 5 * MIB + 77])
def test_writes_in_any_order_make_whole_parts(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(upload, "PART_NBYTES", MIB)
    random = np.random.default_rng(nbytes)
    blob = random.integers(0, 256, nbytes, np.uint8).tobytes()
    borders = sorted({0, nbytes, *random.integers(0, nbytes, 12).tolist()})
    extents = list(pairwise(borders))
    random.shuffle(extents)
    kept = Kept()
    file = Upload(kept, "x", "s3://b/x", nbytes)
    for number, (start, end) in enumerate(extents):
        memory = bytearray(blob[start:end])
        if number:
            with pytest.raises(OSError, match="s3://b/x"):
                file.tags()
        file.write(start, memoryview(memory))
        memory[:] = bytes(len(memory))  # The caller uses it again.
    assert b"".join(kept.parts[number] for number in sorted(kept.parts)) == blob
    assert {len(part) for part in list(kept.parts.values())[:-1]} <= {MIB, nbytes % MIB}
    assert file.tags() == [f"tag {number}" for number in sorted(kept.parts)]
    assert not file._parts, "what was sent takes no memory"


class Interrupted(upload._Part):
    """A part at which other threads get their turn whenever it is asked what is missing."""

    @property
    def num_left(self) -> int:
        found = self._left
        time.sleep(0)
        return found

    @num_left.setter
    def num_left(self, nbytes: int) -> None:
        self._left = nbytes


def test_threads_that_fill_one_part_together_lose_no_byte_and_send_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "PART_NBYTES", MIB)
    monkeypatch.setattr(upload, "_Part", Interrupted)
    blob = np.random.default_rng(5).integers(0, 256, 2 * MIB, np.uint8).tobytes()
    kept = Kept()
    file = Upload(kept, "x", "s3://b/x", len(blob))
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for start in range(0, len(blob), 4096):
                pool.submit(file.write, start, memoryview(blob)[start : start + 4096])
    finally:
        sys.setswitchinterval(before)
    assert sorted(kept.order) == [0, 1]
    assert kept.parts[0] + kept.parts[1] == blob
