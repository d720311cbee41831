"""Stores in memory: what requests that fail, lie or take long do to a store, and to what is done with checkpoints."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save

import relayout
from relayout.commands.differences import Report
from relayout.errors import FormatError
from relayout.storage.in_memory import Bucket, Fault, bucket
from relayout.storage.protocols import Kind
from relayout.storage.stores import find_store

MIB = 2**20
TENSORS = {
    f"layers.{number}.weight": np.random.default_rng(number).integers(0, 256, MIB + number, np.uint8)
    for number in range(8)
}


def broken() -> OSError:
    return OSError(errno.EIO, os.strerror(errno.EIO), "memory://lost")


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Bucket]:
    """A bucket with a model and its conversion."""
    made = bucket(tmp_path.name)
    made.put("model/model.safetensors", save(TENSORS, {"format": "pt"}))
    made.put("model/config.json", b'{"model_type": "x"}')
    relayout.convert(f"memory://{made.name}/model", f"memory://{made.name}/out")
    made.requests.clear()
    yield made
    made.clear()


def url(shelf: Bucket, name: str) -> str:
    return f"memory://{shelf.name}/{name}"


CALLS: dict[str, Callable[[Bucket], object]] = {
    "load": lambda shelf: relayout.load(url(shelf, "out"), 0),
    "load plain": lambda shelf: relayout.load(url(shelf, "model"), 0, tp=1),
    "load proved": lambda shelf: relayout.load(url(shelf, "out"), 0, verify=True),
    "iter_load": lambda shelf: list(relayout.iter_load(url(shelf, "out"), 0, memory=8 * MIB)),
    "open": lambda shelf: relayout.open(url(shelf, "out"), 0).get_tensor("layers.3.weight"),
    "safe_open": lambda shelf: relayout.safe_open(url(shelf, "out")).get_tensor("layers.3.weight"),
    "verify": lambda shelf: relayout.verify(url(shelf, "out")),
    "verify source": lambda shelf: relayout.verify(url(shelf, "out"), source=url(shelf, "model")),
    "restore": lambda shelf: relayout.restore(url(shelf, "out"), url(shelf, "back")),
    "convert": lambda shelf: relayout.convert(url(shelf, "model"), url(shelf, "again")),
}


def refused(result: object) -> object:
    """`verify` does not stop at what it finds."""
    if isinstance(result, Report) and not result.ok:
        raise FormatError(result.differences[0].what)
    return result


def with_weights(name: str) -> Fault:
    """A fault of reads of weights, once some have passed."""
    return Fault("read", "*/*.safetensors", after=4 if name in ("convert", "load plain", "verify source") else 1)


@pytest.mark.parametrize("name", CALLS)
def test_a_read_that_fails_is_the_error_of_the_call_and_the_next_call_works(shelf: Bucket, name: str) -> None:
    fault = with_weights(name)
    fault.error = broken
    before = shelf.names("")
    shelf.faults.append(fault)
    with pytest.raises(OSError, match="Input/output error") as caught:
        CALLS[name](shelf)
    assert fault.times == 0
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, "memory://lost")
    assert shelf.names("") == before, "nothing was published"
    CALLS[name](shelf)


@pytest.mark.parametrize("name", CALLS)
def test_short_reads_are_gone_on_with(shelf: Bucket, name: str) -> None:
    shelf.faults.append(Fault("read", times=None, nbytes=70_001))
    CALLS[name](shelf)
    assert shelf.requests["read"] > 10


@pytest.mark.parametrize("name", CALLS)
def test_a_read_that_brings_nothing_is_an_error_and_no_endless_loop(shelf: Bucket, name: str) -> None:
    fault = with_weights(name)
    fault.nbytes = 0
    shelf.faults.append(fault)
    with pytest.raises(OSError, match=r"a read at byte \d+ returned no bytes"):
        CALLS[name](shelf)


@pytest.mark.parametrize("name", CALLS)
def test_an_object_that_is_replaced_while_it_is_read_is_told_and_never_mixed_in(shelf: Bucket, name: str) -> None:
    is_source = name in ("convert", "load plain", "verify source")
    victim = next(one for one in shelf.names("model" if is_source else "out") if one.endswith(".safetensors"))
    content = shelf.find(victim)
    assert content is not None
    fault = Fault("read", victim, after=1, act=lambda: shelf.put(victim, content.content[::-1]))
    shelf.faults.append(fault)
    before = shelf.names("")
    found: list[object] = []
    with pytest.raises(FormatError, match=r"was replaced while it was read|has changed since it was last checked"):
        found.append(refused(CALLS[name](shelf)))
    assert (fault.times, found) == (0, [])
    assert shelf.names("") == before


def test_slow_requests_are_slow_together(shelf: Bucket) -> None:
    shelf.faults.append(Fault("read", "*.safetensors", times=None, seconds=0.05))
    started = time.monotonic()
    found = relayout.load(url(shelf, "model"), 0, tp=1, threads=8)
    seconds = time.monotonic() - started
    assert {name: tensor.numpy().tobytes() for name, tensor in found.items()} == {
        name: array.tobytes() for name, array in TENSORS.items()
    }
    assert 0.05 <= seconds < 0.05 * shelf.requests["read"]


def test_a_rank_reads_its_own_bytes_once_and_little_else(shelf: Bucket) -> None:
    shelf.read_nbytes = 0
    relayout.load(url(shelf, "out"), 0)
    stored = sum(array.nbytes for array in TENSORS.values())
    assert stored <= shelf.read_nbytes < stored + 50_000


# Outputs.


def test_an_output_that_cannot_be_written_is_none_and_is_gone_on_with(shelf: Bucket) -> None:
    fault = Fault("write", "again/*", after=3, error=broken)
    shelf.faults.append(fault)
    with pytest.raises(OSError, match="Input/output error") as caught:
        relayout.convert(url(shelf, "model"), url(shelf, "again"), threads=1)
    assert any("the same command goes on" in note for note in caught.value.__notes__)
    assert find_store(url(shelf, "again")).kind() is Kind.NOTHING
    summary = relayout.convert(url(shelf, "model"), url(shelf, "again"), threads=1)
    assert summary.resumed_nbytes > 0
    assert relayout.verify(url(shelf, "again"), source=url(shelf, "model")).ok


@pytest.mark.parametrize("after", range(4))
def test_an_output_that_fails_while_it_is_published_is_none(shelf: Bucket, after: int) -> None:
    # What is written then: each file whole. Before, rank files are written piece by piece.
    relayout.convert(url(shelf, "model"), url(shelf, "clean"), threads=1)
    pieces = shelf.requests["write"] - len(shelf.names("clean"))
    shelf.faults.append(Fault("write", "again/*", after=pieces + after, error=broken))
    with pytest.raises(OSError, match="Input/output error"):
        relayout.convert(url(shelf, "model"), url(shelf, "again"), threads=1)
    assert shelf.names("again") == []
    assert relayout.convert(url(shelf, "model"), url(shelf, "again"), threads=1).resumed_nbytes > 0
    assert relayout.verify(url(shelf, "again")).ok


def test_the_manifest_is_written_last(shelf: Bucket) -> None:
    seen: list[list[str]] = []
    shelf.faults.append(Fault("write", "again/relayout.json", act=lambda: seen.append(shelf.names("again"))))
    relayout.convert(url(shelf, "model"), url(shelf, "again"))
    assert [sorted([*names, "again/relayout.json"]) for names in seen] == [shelf.names("again")]


def test_of_two_that_publish_at_once_the_first_wins(shelf: Bucket) -> None:
    theirs = b"of another process"
    shelf.faults.append(Fault("write", "again/relayout.json", act=lambda: shelf.put("again/relayout.json", theirs)))
    with pytest.raises(FileExistsError):
        relayout.convert(url(shelf, "model"), url(shelf, "again"))
    found = shelf.find("again/relayout.json")
    assert found is not None
    assert found.content == theirs


def test_a_source_that_is_replaced_while_it_is_converted_is_told(shelf: Bucket) -> None:
    name = "model/config.json"
    shelf.faults.append(Fault("read", name, after=1, act=lambda: shelf.put(name, b'{"model_type": "y"}')))
    with pytest.raises(FormatError, match=r"config\.json: (was replaced|has changed)"):
        relayout.convert(url(shelf, "model"), url(shelf, "again"))
    assert find_store(url(shelf, "again")).kind() is Kind.NOTHING


# Buckets.


def test_threads_put_and_delete_without_losing_anything() -> None:
    shelf = Bucket("alone")

    def work(first: int) -> None:
        for number in range(first, 800, 8):
            shelf.put(f"x/{number}", b"1")
            if number % 3:
                shelf.delete(f"x/{number}")

    threads = [threading.Thread(target=work, args=(first,)) for first in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shelf.names("x") == sorted(f"x/{number}" for number in range(0, 800, 3))


def test_buckets_are_found_by_name_and_outlive_their_stores() -> None:
    bucket("kept").put("a/b", b"1")
    assert bucket("kept") is bucket("kept")
    assert find_store("memory://kept/a").read("b", 1) == b"1"
    bucket("kept").clear()
    assert find_store("memory://kept/a").kind() is Kind.NOTHING


def test_faults_strike_what_they_are_about_so_often_as_they_say() -> None:
    shelf = Bucket("alone")
    shelf.faults += [Fault("read", "a*", after=1, times=2, nbytes=5), Fault("read", "*b", times=None, nbytes=3)]
    limits = [shelf.request(*one) for one in [("read", "ab")] * 4 + [("read", "c"), ("stat", "ab"), ("read", "a")]]
    assert limits == [3, 3, 3, 3, None, None, None]
    assert shelf.requests == {"read": 6, "stat": 1}


def test_a_forked_child_can_use_what_a_thread_of_its_parent_held() -> None:
    shelf = bucket("forked")
    shelf.put("a", b"1")
    shelf.after_fork()
    with shelf._lock:
        child = os.fork()
        if not child:
            os._exit(0 if shelf.names("") == ["a"] else 1)
    assert os.waitpid(child, 0)[1] == 0
    shelf.clear()


def test_tensors_of_a_store_in_memory_are_their_own(shelf: Bucket) -> None:
    first, second = (relayout.load(url(shelf, "out"), 0)["layers.0.weight"] for _ in range(2))
    first.zero_()
    assert not torch.equal(first, second)
    assert relayout.verify(url(shelf, "out")).ok
