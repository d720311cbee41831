"""relayout.conversion.hashing: a conversion compares its source with the digests that are known, and records them."""

from __future__ import annotations

import hashlib
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from support.downloads import SHARD, Downloads, downloads, rot
from support.local_stores import read_manifest, read_record

import relayout
from relayout.cli import render
from relayout.cli.command import Line
from relayout.conversion import hashing, run
from relayout.conversion.hashing import SourceHashing
from relayout.conversion.run import carry_out
from relayout.errors import FormatError
from relayout.format.source_record import FileDigest
from relayout.storage.reading import HashedFile

__all__ = ["downloads"]


def shards_of(folder: Path, by: str) -> tuple[FileDigest, ...]:
    """The digests of shards, by hashlib."""
    files = sorted(folder.glob("*.safetensors"))
    return tuple(FileDigest(one.name, f"sha256:{hashlib.sha256(one.read_bytes()).hexdigest()}", by) for one in files)


@pytest.mark.parametrize("by", ["hub cache", "hub download", "SHA256SUMS"])
def test_a_conversion_records_by_what_its_source_was_verified(downloads: Downloads, tmp_path: Path, by: str) -> None:
    folder = {"hub cache": downloads.snapshot, "hub download": downloads.local}.get(by, tmp_path / "plain")
    if by == "SHA256SUMS":
        shutil.copytree(downloads.snapshot, folder)
        lines = (f"{one.digest.removeprefix('sha256:')}  {one.name}\n" for one in shards_of(folder, by))
        (folder / "SHA256SUMS").write_text("".join(lines))
    out = tmp_path / "out"
    summary = relayout.convert(folder, out, tp=2, max_part_nbytes=30_000)
    assert summary.verified == shards_of(folder, by)
    assert len(summary.verified) == summary.num_shards == 2
    assert read_record(out, read_manifest(out)).verified == summary.verified
    assert Line(f"source verified: 2 shards, by {by} (sha256)") in list(render.summary(summary))
    assert relayout.verify(out, source=folder).ok
    relayout.restore(out, tmp_path / "restored")
    assert (tmp_path / "restored" / SHARD).read_bytes() == (folder / SHARD).read_bytes()


def test_the_weights_are_those_of_a_conversion_without_digests(downloads: Downloads, tmp_path: Path) -> None:
    shutil.copytree(downloads.snapshot, tmp_path / "plain")
    with_digests, without = tmp_path / "with", tmp_path / "without"
    relayout.convert(downloads.snapshot, with_digests, tp=2)
    assert relayout.convert(tmp_path / "plain", without, tp=2).verified == ()
    assert read_record(without, read_manifest(without)).verified == ()
    files = {path.name for path in without.iterdir()}
    assert {path.name for path in with_digests.iterdir()} == files
    differing = {name for name in files if (with_digests / name).read_bytes() != (without / name).read_bytes()}
    assert differing == {"relayout.json", "relayout.source.json.zst"}
    # By what it was verified is not what a conversion is: it is already there.
    for folder, out in ((downloads.snapshot, without), (tmp_path / "plain", with_digests)):
        assert relayout.is_carried_out(relayout.plan_conversion(folder, out, tp=2))


@pytest.mark.parametrize("offset", [-1, -20_000, 100])
def test_a_source_with_a_flipped_bit_is_not_published(downloads: Downloads, tmp_path: Path, offset: int) -> None:
    blob = (downloads.snapshot / SHARD).resolve()
    rot(blob, offset)
    with pytest.raises(FormatError, match=SHARD) as caught:
        relayout.convert(downloads.snapshot, tmp_path / "out", tp=2)
    assert not (tmp_path / "out").exists()
    if offset < 0:
        assert f"sha256 is {hashlib.sha256(blob.read_bytes()).hexdigest()}, {blob.name} by hub cache" in str(
            caught.value
        )
        with pytest.raises(FormatError, match="by hub cache"):  # What is resumed is compared, too.
            relayout.convert(downloads.snapshot, tmp_path / "out", tp=2)
    rot(blob, offset)
    assert len(relayout.convert(downloads.snapshot, tmp_path / "out", tp=2, force=True).verified) == 2
    assert relayout.verify(tmp_path / "out", source=downloads.snapshot).ok


def test_what_is_resumed_is_verified_too(downloads: Downloads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("relayout.conversion.run.write_sidecar", fail)
        with pytest.raises(OSError, match="No space"):
            relayout.convert(downloads.snapshot, tmp_path / "out", tp=2, max_part_nbytes=30_000)
    summary = relayout.convert(downloads.snapshot, tmp_path / "out", tp=2, max_part_nbytes=30_000)
    assert summary.resumed_nbytes > 0
    assert summary.verified == shards_of(downloads.snapshot, "hub cache")


def test_bytes_that_two_reads_have_otherwise_are_an_error(
    downloads: Downloads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is intact, and what was converted of it is not: a bit has flipped on the way to memory."""
    to_hash, path = hashing.to_hash, (downloads.snapshot / SHARD).resolve()
    copied = threading.Event()

    def late(*args: Any, **options: Any) -> HashedFile:
        assert copied.wait(60)
        return to_hash(*args, **options)

    def write_units(making: Any, *args: Any) -> None:
        rot(path)
        make_units(making, *args)
        rot(path)
        copied.set()

    make_units = run._UnitMaker.make_units
    monkeypatch.setattr(hashing, "to_hash", late)
    monkeypatch.setattr(run._UnitMaker, "make_units", write_units)
    monkeypatch.setattr(run, "check_unchanged", lambda *_: None)  # Which would see the new times.
    with pytest.raises(FormatError, match="two reads of it differ") as caught:
        relayout.convert(downloads.snapshot, tmp_path / "out", tp=2)
    assert caught.value.path == str(downloads.snapshot / SHARD)
    assert not (tmp_path / "out").exists()


def test_only_what_a_conversion_reads_anyway_is_hashed(downloads: Downloads, tmp_path: Path) -> None:
    some = relayout.convert(downloads.snapshot, tmp_path / "some", tp=2, ranks=[1])
    assert some.verified == ()
    assert relayout.convert(downloads.snapshot, tmp_path / "all", tp=2).verified != ()


def test_an_error_of_the_hashing_stops_a_conversion_between_units(
    downloads: Downloads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = relayout.plan_conversion(downloads.snapshot, tmp_path / "out", tp=2, max_part_nbytes=10_000)
    assert len(plan.layout.units) > 2

    def fail(*_: object, **__: object) -> object:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(hashing, "hash_files", fail)
    with SourceHashing(plan, 2) as comparing:
        assert comparing._thread is not None
        comparing._thread.join()
        with pytest.raises(OSError, match="Input/output error"):
            comparing.check()
    with pytest.raises(OSError, match="Input/output error"):
        carry_out(plan)
    assert not (tmp_path / "out").exists()


def test_an_interrupted_conversion_ends_the_hashing(downloads: Downloads, tmp_path: Path) -> None:
    plan = relayout.plan_conversion(downloads.snapshot, tmp_path / "out", tp=2)

    def interrupt() -> None:
        with SourceHashing(plan, 2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert not [thread for thread in threading.enumerate() if thread.name == "relayout-source"]
