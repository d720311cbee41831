"""Copy steps carried out: digests in whatever order threads work, and rank files whose bytes reach the drive."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from safetensors.numpy import save_file
from support.loader_fixtures import open_files
from support.local_stores import read_manifest, read_record, read_source, read_table
from support.models import Array
from support.planning import conversion_of, plan_of

import relayout
from relayout.checkpoint.converted import read_digests, read_source_digests
from relayout.checkpoint.source import SourceCheckpoint
from relayout.conversion.copy_plan import SOURCE, CopyPlan, TensorDigests, TensorHashes, run_copy_steps
from relayout.conversion.sidecar import digests_of_all
from relayout.core.slices import Slice
from relayout.core.workers import Stop
from relayout.plans.plan import Plan
from relayout.publish import output
from relayout.storage.local import store as local_store
from relayout.storage.local.store import LocalStore

MIB = 2**20
digest = xxhash.xxh3_128_hexdigest


def random_bytes(*shape: int) -> Array:
    return np.random.default_rng(shape).integers(0, 256, shape, dtype=np.uint8)


def write(folder: Path, arrays: dict[str, Array]) -> Path:
    folder.mkdir()
    save_file(arrays, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Array]]:
    """Tensors that are copied in several chunks each, where little memory is given."""
    arrays = {f"{number}": random_bytes(4, MIB + 3 * number) for number in range(8)}
    return write(tmp_path_factory.mktemp("large") / "model", arrays), arrays


def test_digests_of_tensors_in_several_chunks_are_of_their_bytes_in_order(
    large: tuple[Path, dict[str, Array]], tmp_path: Path
) -> None:
    source, arrays = large
    relayout.convert(source, tmp_path / "out", threads=8, memory=16 * MIB)
    expected = {name: digest(array.tobytes()) for name, array in arrays.items()}
    manifest = read_manifest(tmp_path / "out")
    record, table = read_record(tmp_path / "out", manifest), read_table(tmp_path / "out", manifest, 0)
    store = LocalStore(tmp_path / "out")
    assert dict(zip(record.names, read_source_digests(store, manifest), strict=True)) == expected
    assert dict(zip(table.names, read_digests(store, manifest, 0), strict=True)) == expected


NUM_TENSORS, NUM_PARTS = 20, 4


def in_parts(folder: Path, num_tensors: int, num_parts: int) -> tuple[SourceCheckpoint, Plan, Array]:
    """Tensors of one row for each of so many ranks, and what they hold."""
    values = random_bytes(num_tensors, num_parts, 8)
    write(folder, {f"{t}": values[t] for t in range(num_tensors)})
    slices = tuple(Slice.along(0, ((part, 1),)) for part in range(num_parts))
    return read_source(folder), plan_of("x", num_parts, (slices,) * num_tensors), values


class Slow(dict[int, dict[int, str]]):
    """Lets another thread go on between a look and what follows from it."""

    def pop(self, *args: Any) -> Any:
        found = super().pop(*args)
        time.sleep(0.001)
        return found


def test_each_tensor_is_complete_once_whichever_threads_hash_its_slices(tmp_path: Path) -> None:
    source, plan, values = in_parts(tmp_path / "model", NUM_TENSORS, NUM_PARTS)
    found: list[tuple[int, TensorDigests]] = []
    hashes = TensorHashes(conversion_of(source, plan, 4096), Stop())
    hashes._partial = Slow()
    together = threading.Barrier(NUM_PARTS + 1)

    def hash_slices(which: int) -> None:
        for t in range(NUM_TENSORS):
            together.wait()
            blob = values[t] if which == SOURCE else values[t][which]
            found.extend(hashes.add([(t, which, 0, memoryview(blob.tobytes()))]).items())

    with ThreadPoolExecutor(NUM_PARTS + 1) as threads:
        list(threads.map(hash_slices, (SOURCE, *range(NUM_PARTS))))
    assert len(found) == NUM_TENSORS
    assert dict(found) == {
        t: TensorDigests(digest(one.tobytes()), tuple(digest(row.tobytes()) for row in one))
        for t, one in enumerate(values)
    }


def test_a_tensor_of_which_bytes_were_not_hashed_has_no_digest(tmp_path: Path) -> None:
    arrays = {"a": random_bytes(3, 5), "b": random_bytes(7), "empty": random_bytes(0, 2)}
    source = read_source(write(tmp_path / "model", arrays))
    plan = plan_of("x", 1, ((Slice(),),) * 3)
    conversion = conversion_of(source, plan, 4096)
    passed = run_copy_steps(conversion, CopyPlan(conversion).steps(0), None, threads=2)
    expected = [TensorDigests(digest(one), (digest(one),)) for one in arrays.values()]
    assert digests_of_all(conversion, passed) == expected
    del passed[1]
    with pytest.raises(AssertionError, match="tensor 'b': was not hashed to its end"):
        digests_of_all(conversion, passed)


def test_bytes_that_do_not_reach_the_drive_fail_the_conversion(
    large: tuple[Path, dict[str, Array]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells it once, to who had the file open when it was written: later syncs, of others, succeed."""
    descriptors = set()
    true_fsync = os.fsync

    class Noted(local_store.OutputFile):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            descriptors.add(self._fd)

    def fsync(fd: int) -> None:
        if fd in descriptors:
            descriptors.remove(fd)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        true_fsync(fd)

    monkeypatch.setattr(output, "OutputFile", Noted)
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match=r"Input/output error: '.*model-rank-0-part-0.safetensors'") as caught:
        relayout.convert(large[0], tmp_path / "out")
    assert caught.value.errno == errno.EIO
    assert not (tmp_path / "out").exists()
    assert not any("model-rank-0" in path for path in open_files().values())


def path_of(fd: int) -> str:
    return str(Path(f"/proc/self/fd/{fd}").readlink())


def test_nearly_all_bytes_are_written_directly(
    large: tuple[Path, dict[str, Array]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors that start anywhere in a block are put together in memory that starts there as well."""
    if not hasattr(os, "O_DIRECT"):
        pytest.skip("takes O_DIRECT")
    written: list[tuple[int, bool]] = []
    true_pwrite = os.pwrite

    def pwrite(fd: int, view: memoryview, offset: int) -> int:
        done = true_pwrite(fd, view, offset)
        if "model-rank-0" in path_of(fd):
            written.append((done, bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)))
        return done

    monkeypatch.setattr(os, "pwrite", pwrite)
    relayout.convert(large[0], tmp_path / "out", memory=16 * MIB)
    total = sum(nbytes for nbytes, _ in written)
    assert total == sum(array.nbytes for array in large[1].values())
    directly = sum(nbytes for nbytes, is_direct in written if is_direct)
    if not directly:
        pytest.skip("the file system refuses direct writes")
    assert directly > 0.98 * total


def test_what_is_read_of_the_source_through_the_page_cache_is_taken_out_of_it(
    large: tuple[Path, dict[str, Array]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(os, "posix_fadvise"):
        pytest.skip("this system cannot be told to empty its page cache")
    source = large[0] / "model.safetensors"
    taken = np.zeros(source.stat().st_size, bool)

    def advise(fd: int, offset: int, nbytes: int, advice: int) -> None:
        if path_of(fd) == str(source) and advice == os.POSIX_FADV_DONTNEED:
            taken[offset : offset + nbytes] = True

    monkeypatch.setattr(local_store, "_O_DIRECT", None)
    monkeypatch.setattr(os, "posix_fadvise", advise)
    relayout.convert(large[0], tmp_path / "out", memory=16 * MIB)
    assert taken.all()
