"""Resuming an interrupted conversion: units that are finished, and only these, are not copied again."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.bits import flip
from support.interruptions import claims_in
from support.planning import slice_nbytes

import relayout
from relayout.checkpoint.source import identity_of, read_source
from relayout.commands.convert import convert
from relayout.conversion.layout import Conversion
from relayout.conversion.planning import plan_conversion
from relayout.conversion.resume import differences_from_conversion, fingerprint_of
from relayout.conversion.run import FileSink, Summary, carry_out, is_carried_out
from relayout.core.extents import BLOCK
from relayout.errors import FormatError, PlanError
from relayout.publish import output
from relayout.storage.local import store as local_store
from relayout.storage.local.store import InputFile, LocalStore, OutputFile

PARTIAL = ".out.relayout-partial"
FILE = "model-rank-1-part-0.safetensors"
"""A file of the first unit."""
LARGE, SMALL = 8, 12
LARGE_NBYTES = 300 * 2**10
SMALL_NBYTES = 1000
TOTAL_NBYTES = LARGE * LARGE_NBYTES + SMALL * SMALL_NBYTES
PUTS = 2
"""Of one large tensor: one for each rank."""
PART_NBYTES = 2 * LARGE_NBYTES // 2 + 4 * BLOCK
"""A unit has two large tensors, half of each for a rank, or all small ones."""

PLAN = """
[cut]
"large.*" = { dim = 0, by = "even" }
"small.*" = "whole"
"none" = "whole"
"""

Intervals = dict[str, list[tuple[int, int]]]


def write_source(folder: Path, seed: int = 0, *, first: str = "large.0") -> Path:
    """Large tensors that two ranks share, small ones that each holds, and an empty one; in two files."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(seed)
    large = [rng.integers(1, 2**16, (LARGE_NBYTES // 256, 128)).astype(np.uint16) for _ in range(LARGE)]
    small = [rng.integers(1, 2**16, SMALL_NBYTES // 2).astype(np.uint16) for _ in range(SMALL)]
    tensors = {f"large.{n}": tensor for n, tensor in enumerate(large)}
    tensors[first] = tensors.pop("large.0")
    save_file(tensors, folder / "model-1.safetensors")
    rest = {f"small.{n}": tensor for n, tensor in enumerate(small)} | {"none": np.zeros((0, 4), np.uint16)}
    save_file(rest, folder / "model-2.safetensors")
    (folder / "config.json").write_text('{"a": 1}')
    return folder


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder with a source, a plan, and its undisturbed conversion."""
    place = tmp_path / "work"
    place.mkdir()
    write_source(tmp_path / "model")
    (tmp_path / "plan.toml").write_text(PLAN)
    convert(tmp_path / "model", tmp_path / "expected", tp=2, plan=tmp_path / "plan.toml", max_part_nbytes=PART_NBYTES)
    return place


def source_of(work: Path) -> Path:
    return work.parent / "model"


def planned(work: Path, **options: Any) -> Conversion:
    given = {"tp": 2, "plan": work.parent / "plan.toml", "max_part_nbytes": PART_NBYTES, **options}
    return plan_conversion(source_of(work), work / "out", **given)


def go(work: Path, *, force: bool = False, **options: Any) -> Summary:
    """The command, once more."""
    return carry_out(planned(work, **options), force=force, threads=1)


class Stopped(OSError):
    """What a conversion is interrupted with."""


@contextmanager
def stopping_at(put: int) -> Iterator[None]:
    """The drive fails at the write of this number."""
    true_put = FileSink.put
    count = 0

    def counted(*args: Any) -> None:
        nonlocal count
        count += 1
        if count > put:
            raise Stopped(errno.EIO, "stopped")
        true_put(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSink, "put", counted)
        yield


DONE = 4


def interrupt(work: Path, *, force: bool = False, **options: Any) -> set[int]:
    """Leave a conversion behind that has done two units of two tensors, and a half; returns the tensors' positions."""
    with stopping_at(DONE * PUTS + 1), pytest.raises(Stopped) as caught:
        go(work, force=force, **options)
    note = f"finished work is kept in {work / PARTIAL}; the same command resumes it"
    assert caught.value.__notes__ == [note]
    assert [path.name for path in work.iterdir() if path.name.startswith(".")] == [PARTIAL]
    done = claims_in(work / PARTIAL)
    assert len(done) == DONE
    return done


def staged(work: Path) -> Path:
    """The folder in which the output is assembled."""
    [place] = (work / PARTIAL).glob("work-*")
    return place


def content(folder: Path) -> dict[str, bytes | str | None]:
    """Everything below a folder: a file's bytes, a link's target."""
    return {
        path.relative_to(folder).as_posix(): (
            f"-> {path.readlink()}" if path.is_symlink() else path.read_bytes() if path.is_file() else None
        )
        for path in sorted(folder.rglob("*"))
    }


def nbytes_of(plan: Conversion, tensors: set[int]) -> int:
    return sum(plan.source.tensors[t].extent.nbytes for t in tensors)


def merged(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    result: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


@contextmanager
def spying() -> Iterator[tuple[Intervals, Intervals]]:
    """The bytes that are read, and those that are written to rank files, by file name, as (start, end)."""
    read: Intervals = {}
    written: Intervals = {}
    true_read, true_write = InputFile.read, OutputFile.write

    def spy_read(self: InputFile, offset: int, view: memoryview) -> None:
        if self.path.suffix == ".safetensors" and offset % BLOCK == 0 == view.nbytes % BLOCK:  # No header.
            read.setdefault(self.path.name, []).append((offset, offset + view.nbytes))
        true_read(self, offset, view)

    def spy_write(self: OutputFile, offset: int, view: memoryview, address: int) -> None:
        written.setdefault(self.path.name, []).append((offset, offset + view.nbytes))
        true_write(self, offset, view, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InputFile, "read", spy_read)
        patch.setattr(OutputFile, "write", spy_write)
        yield read, written


def places_of(plan: Conversion, tensors: set[int]) -> Intervals:
    """Where in rank files these tensors are stored."""
    result: Intervals = {}
    for file in plan.layout.files:
        for t, offset in zip(file.tensors, file.offsets, strict=True):
            tensor = plan.source.tensors[t]
            nbytes = slice_nbytes(tensor.dtype, tensor.shape, plan.plan.cut(t).slices[file.holder])
            if t in tensors and nbytes:
                result.setdefault(file.name, []).append((offset, offset + nbytes))
    return result


def assert_goes_on(work: Path, resumed: set[int], **options: Any) -> None:
    """The same command ends, copies just the tensors that are not resumed, and leaves what an undisturbed run does."""
    plan = planned(work, **options)
    others = {t for t, tensor in enumerate(plan.source.tensors) if tensor.extent.nbytes} - resumed
    compared = {min(resumed)} if resumed else set()  # The first of the largest, with what was noted of it.
    with spying() as (read, written):
        summary = go(work, **options)
    assert summary.resumed_nbytes == nbytes_of(plan, resumed)
    assert {name: merged(found) for name, found in written.items()} == {
        name: merged(found) for name, found in places_of(plan, others).items()
    }
    for number, file in enumerate(plan.source.files):
        extents = [plan.source.tensors[t].extent for t in others | compared if plan.source.tensors[t].file == number]
        blocks = [(one.offset // BLOCK * BLOCK, -(-one.end // BLOCK) * BLOCK) for one in extents]
        assert merged(read.get(file.name, [])) == merged(blocks)
    assert content(work / "out") == content(work.parent / "expected")
    assert [path.name for path in work.iterdir()] == ["out"]


def test_an_undisturbed_conversion_resumes_nothing(work: Path) -> None:
    assert_goes_on(work, set())


def test_if_no_tensor_is_done_nothing_is_left(work: Path) -> None:
    with stopping_at(1), pytest.raises(Stopped) as caught:
        go(work)
    assert not hasattr(caught.value, "__notes__")
    assert list(work.iterdir()) == []


def test_other_threads_and_other_memory_go_on_with_the_same_and_progress_starts_with_what_is_done(work: Path) -> None:
    interrupt(work)
    seen: list[tuple[int, int]] = []
    done = carry_out(planned(work), threads=3, memory=2**23, progress=lambda *args: seen.append(args))
    assert done.resumed_nbytes == DONE * LARGE_NBYTES
    assert min(seen)[0] >= DONE * LARGE_NBYTES
    assert seen[-1] == (TOTAL_NBYTES, TOTAL_NBYTES)
    assert content(work / "out") == content(work.parent / "expected")


def test_a_side_file_goes_along_as_it_is_now(work: Path) -> None:
    interrupt(work)
    (source_of(work) / "config.json").write_text('{"b": 2}')
    assert go(work).resumed_nbytes == DONE * LARGE_NBYTES
    assert (work / "out" / "config.json").read_text() == '{"b": 2}'


# What may have become of the partial folder. Each returns the tensors that are no longer there as they were.
Damage = Callable[[Path, set[int]], set[int]]


def nothing(work: Path, done: set[int]) -> set[int]:
    return set()


def of_unit(work: Path, unit: int) -> set[int]:
    return set(planned(work).layout.units[unit])


def first_byte(work: Path, done: set[int], file: str = FILE) -> set[int]:
    [(start, _), *_] = places_of(planned(work), done)[file]
    flip(staged(work) / "output" / file, start)
    return of_unit(work, 0)


def first_byte_in_another_file(work: Path, done: set[int]) -> set[int]:
    first_byte(work, done, "model-rank-0-part-1.safetensors")
    return of_unit(work, 1)


def header_bytes(work: Path, done: set[int]) -> set[int]:
    flip(staged(work) / "output" / FILE, 0)
    return of_unit(work, 0)


def record_claims_the_next_unit(work: Path, done: set[int]) -> set[int]:
    # It names no file of it.
    records = staged(work)
    record = json.loads((records / "part-unit-1").read_bytes())
    (records / "part-unit-2").write_text(json.dumps(record))
    return set()


def strange_files(work: Path, done: set[int]) -> set[int]:
    folder = staged(work) / "output"
    (folder / "sub").mkdir()
    (folder / "sub" / "file").write_text("what is this?")
    (folder / "config.json").write_text("half a fi")
    (folder / "relayout.json").write_text("{")
    (folder / "relayout.rank-0.json.zst").write_text("")
    (folder / "link").symlink_to(work.parent)
    (folder / "model-rank-2-part-0.safetensors").write_text("of no rank")
    return set()


def record_of(file: Path) -> Path:
    return file.parent.parent / "part-unit-0"


LOST: dict[str, Callable[[Path, Path], object]] = {
    "deleted": lambda file, outside: file.unlink(),
    "shorter": lambda file, outside: os.truncate(file, file.stat().st_size - 1),
    "longer": lambda file, outside: os.truncate(file, file.stat().st_size + 1),
    "zeroed": lambda file, outside: file.write_bytes(bytes(file.stat().st_size)),
    "a link": lambda file, outside: (file.rename(outside), file.symlink_to(outside)),
    "another name": lambda file, outside: os.link(file, outside),  # What is written here would be written there.
    "a folder": lambda file, outside: (file.unlink(), (file / "sub").mkdir(parents=True), (file / "sub" / "x").touch()),
    "a fifo": lambda file, outside: (file.unlink(), os.mkfifo(file)),
    "without a record": lambda file, outside: record_of(file).unlink(),
    "a record that is a link": lambda file, outside: (
        record_of(file).rename(outside),
        record_of(file).symlink_to(outside),
    ),
    "a record with another name": lambda file, outside: os.link(record_of(file), outside),
    "a record that is a folder": lambda file, outside: (record_of(file).unlink(), record_of(file).mkdir()),
    "a torn record": lambda file, outside: os.truncate(record_of(file), record_of(file).stat().st_size // 2),
}
"""What makes the record of the first unit wrong. The other path is outside of all folders."""

ALL_LOST: dict[str, Callable[[Path, Path], object]] = {
    "without a folder": lambda folder, outside: shutil.rmtree(folder),
    "in a link": lambda folder, outside: (folder.rename(outside), folder.symlink_to(outside)),
}


def assert_believed(work: Path, claims: set[int]) -> None:
    """Only these are, and nothing outside is written to."""
    outside = work.parent / "outside"
    before = content(outside) if outside.is_dir() else outside.read_bytes() if outside.exists() else None
    assert_goes_on(work, claims)
    assert (content(outside) if outside.is_dir() else outside.read_bytes() if outside.exists() else None) == before
    assert {path.lstat().st_nlink for path in (work / "out").iterdir()} == {1}
    assert not any(path.is_symlink() for path in (work / "out").rglob("*"))


@pytest.mark.parametrize(
    "damage",
    [nothing, first_byte, first_byte_in_another_file, header_bytes, record_claims_the_next_unit, strange_files],
)
def test_only_the_rest_is_copied_and_only_what_is_true_is_believed(work: Path, damage: Damage) -> None:
    done = interrupt(work)
    assert_believed(work, done - damage(work, done))


@pytest.mark.parametrize("change", LOST)
def test_a_unit_is_made_again_whose_file_or_record_is_not_as_it_was(work: Path, change: str) -> None:
    done = interrupt(work)
    LOST[change](staged(work) / "output" / FILE, work.parent / "outside")
    assert_believed(work, done - of_unit(work, 0))


@pytest.mark.parametrize("change", ALL_LOST)
def test_all_is_made_again_if_the_folder_is_gone(work: Path, change: str) -> None:
    interrupt(work)
    ALL_LOST[change](staged(work) / "output", work.parent / "outside")
    assert_believed(work, set())


def test_files_are_on_the_drive_before_there_is_a_record_of_them(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, str]] = []
    true_fsync, true_rename = os.fsync, os.rename

    def fsync(fd: int) -> None:
        events.append(("sync", Path(f"/proc/self/fd/{fd}").readlink().name))
        true_fsync(fd)

    def rename(old: str, new: str, **options: Any) -> None:
        events.append(("rename", new))
        true_rename(old, new, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        patch.setattr(os, "rename", rename)
        go(work)
    for unit in range(3):
        at = events.index(("rename", f"part-unit-{unit}"))
        before = [event for event in events[:at] if event[0] == "sync"]
        assert {("sync", f"model-rank-{rank}-part-{unit}.safetensors") for rank in (0, 1)} <= set(before)
        assert before[-2] == ("sync", "output")  # The names; then the record itself.


@pytest.mark.skipif(os.geteuid() != 0, reason="only a superuser can give files away")
@pytest.mark.parametrize("part", ["output", f"output/{FILE}", "part-unit-0"])
def test_what_belongs_to_somebody_else_is_not_believed(work: Path, part: str) -> None:
    done = interrupt(work)
    os.chown(staged(work) / part, 12345, 12345)
    assert_goes_on(work, set() if part == "output" else done - of_unit(work, 0))
    assert {path.stat().st_uid for path in (work / "out", *(work / "out").iterdir())} == {0}


# What may have become of the source.


def same_size(source: Path) -> None:
    before = (source / "model-1.safetensors").stat()
    write_source(source, seed=1)
    after = (source / "model-1.safetensors").stat()
    assert (before.st_size, before.st_mtime_ns) == (after.st_size, before.st_mtime_ns)
    os.utime(source / "model-1.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    os.utime(source / "model-2.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))


def one_byte_more(source: Path) -> None:
    path = source / "model-2.safetensors"
    before = path.stat()
    blob = path.read_bytes()
    header = int.from_bytes(blob[:8], "little")
    path.write_bytes((header + 8).to_bytes(8, "little") + blob[8 : 8 + header] + b" " * 8 + blob[8 + header :])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def other_header(source: Path) -> None:
    times = {path: path.stat() for path in source.iterdir()}
    write_source(source, first="large.9")
    for path, status in times.items():
        assert path.stat().st_size == status.st_size
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def file_renamed(source: Path) -> None:
    (source / "model-1.safetensors").rename(source / "model-0.safetensors")


@pytest.mark.parametrize(
    ("change", "options"),
    [
        *((change, {}) for change in (same_size, one_byte_more, other_header, file_renamed)),
        *(
            (None, options)
            for options in ({"tp": 1}, {"tp": 4}, {"align": 512}, {"max_part_nbytes": 2**20}, {"tp": 1, "plan": None})
        ),
    ],
)
def test_another_source_or_other_options_are_refused_and_force_starts_afresh(
    work: Path, change: Callable[[Path], None] | None, options: dict[str, Any]
) -> None:
    interrupt(work)
    if change is not None:
        change(source_of(work))
    before = content(work)
    for _ in range(2):
        says = rf"^{work / PARTIAL}: holds an interrupted attempt, with other options or of another source; --force dis"
        with pytest.raises(PlanError, match=says):
            go(work, **options)
        assert content(work) == before  # So that the right ones go on with it.
    assert go(work, force=True, **options).resumed_nbytes == 0
    shutil.rmtree(work.parent / "expected")
    given = {"tp": 2, "plan": work.parent / "plan.toml", "max_part_nbytes": PART_NBYTES, **options}
    convert(source_of(work), work.parent / "expected", **given)
    assert content(work / "out") == content(work.parent / "expected")
    assert [path.name for path in work.iterdir()] == ["out"]


def test_what_is_refused_costs_nothing_that_is_done(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = interrupt(work)
    for unfinished in (staged(work) / "output").glob("*-part-2.safetensors"):
        unfinished.unlink()
    before = content(work)
    with pytest.raises(PlanError, match="threads: 0, expected 1 or more"):
        carry_out(planned(work), threads=0)
    assert content(work) == before
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda path: os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255)))
        with pytest.raises(PlanError, match="are free there"):
            go(work)
    assert content(work) == before
    (work / "out").mkdir()
    (work / "out" / "precious").write_text("mine")
    with pytest.raises(PlanError, match="is not empty"):
        go(work)
    shutil.rmtree(work / "out")
    assert content(work) == before
    assert_goes_on(work, done)


def test_a_forced_conversion_that_is_interrupted_keeps_the_old_folder_and_goes_on(work: Path) -> None:
    go(work, align=512)
    old = content(work / "out")
    interrupt(work, force=True)
    assert content(work / "out") == old
    with pytest.raises(PlanError, match="already holds a complete conversion"):
        go(work)
    assert content(work / "out") == old
    assert go(work, force=True).resumed_nbytes == DONE * LARGE_NBYTES
    assert content(work / "out") == content(work.parent / "expected")
    assert [path.name for path in work.iterdir()] == ["out"]


def test_rules_that_two_tensors_have_exchanged_and_another_axis_are_other_options(work: Path) -> None:
    """The first two plans have the same distinct cuts in one order; the third cuts the same tensors otherwise."""
    plans = []
    for number, (second, dim) in enumerate([(2, 0), (3, 0), (2, 1)]):
        path = work.parent / str(number) / "plan.toml"
        path.parent.mkdir()
        path.write_text(f'[cut]\n"large.{{0,{second}}}" = {{ dim = {dim}, by = "even" }}\n"**" = "whole"\n')
        plans.append(planned(work, plan=path))
    assert plans[0].plan.cuts == plans[1].plan.cuts
    assert plans[0].plan.cut_of == plans[2].plan.cut_of
    assert plans[0].options == plans[1].options == plans[2].options
    assert len({fingerprint_of(plan, "").options for plan in plans}) == 3


def test_a_source_that_changes_while_it_is_read_is_noticed(work: Path) -> None:
    path = source_of(work) / "model-2.safetensors"
    status = path.stat()

    def change(done: int, total: int) -> None:
        if done == total:  # Each file has been opened, which notices it, too.
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))

    with pytest.raises(FormatError, match="model: has changed while it was read"):
        carry_out(planned(work), threads=1, progress=change)
    assert not (work / "out").exists()
    units = planned(work).layout.units
    assert go(work).resumed_nbytes == nbytes_of(planned(work), {t for unit in units[:-1] for t in unit})
    assert content(work / "out") == content(work.parent / "expected")
    assert [one.name for one in work.iterdir()] == ["out"]


@pytest.mark.parametrize("is_told", [False, True])
@pytest.mark.parametrize("changes", ["nothing", "one tensor", "all"])
def test_what_was_noted_is_compared_with_the_source_again(
    work: Path, monkeypatch: pytest.MonkeyPatch, changes: str, is_told: bool
) -> None:
    """A source of the same names, lengths and samples; its times may tell that it is another, or not."""
    monkeypatch.setattr("relayout.checkpoint.source.samples_of", lambda *_: {})
    if not is_told:
        monkeypatch.setattr("relayout.checkpoint.source.location_of", lambda path: [str(path)])
    done = interrupt(work)
    times = {path: path.stat().st_mtime_ns for path in source_of(work).iterdir()}
    if changes == "all":
        write_source(source_of(work), seed=1)
    elif changes == "one tensor":  # The last of those that are finished.
        extent = planned(work).source.tensors[max(done)].extent
        flip(source_of(work) / "model-1.safetensors", extent.offset + 7)
    for path, time in times.items():
        os.utime(path, ns=(time + is_told, time + is_told))
    found = changes == "all" or (changes == "one tensor" and is_told)  # Else one tensor of each shard is compared.
    assert go(work).resumed_nbytes == (0 if found else DONE * LARGE_NBYTES)
    if found or changes == "nothing":
        assert relayout.verify(work / "out", source=source_of(work)).ok


def test_what_is_finished_needs_no_more_space(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(output, "check_space", lambda folder, output, nbytes: asked.append(nbytes))
    interrupt(work)
    there = sum(path.stat().st_size for path in (staged(work) / "output").glob("*-part-[01].*"))
    go(work)
    assert there > DONE * LARGE_NBYTES
    assert asked == [asked[0], asked[0] - there]
    assert asked[0] > planned(work).layout.nbytes


def test_an_index_that_now_names_another_file_for_a_tensor_is_a_changed_source(tmp_path: Path) -> None:
    """Two shards hold a tensor of one name and shape: files and headers stay the same, and the bytes do not."""
    source = tmp_path / "model"
    source.mkdir()
    for number in (1, 2):
        save_file({"w": np.full(4096, number, np.float32)}, source / f"model-{number}.safetensors")
    save_file({"x": np.arange(4096, dtype=np.float32)}, source / "model-3.safetensors")
    found = []
    for number in (1, 2):
        names = {"w": f"model-{number}.safetensors", "x": "model-3.safetensors"}
        (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
        found.append(identity_of(read_source(LocalStore(source))))
    assert found[0].content != found[1].content


def test_what_cannot_be_brought_from_the_page_cache_to_the_drive_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "model"
    source.mkdir()
    save_file({"w": np.arange(2**20, dtype=np.float32)}, source / "model.safetensors")

    def failing(*_: object, wait: bool) -> None:
        if wait:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(local_store, "_O_DIRECT", None)
    monkeypatch.setattr(local_store, "_MAX_PENDING", 0)
    monkeypatch.setattr(local_store, "sync_range", failing)
    with pytest.raises(OSError, match=r"Input/output error: .*model-rank-0-part-0.safetensors"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Whether a finished output is what would be made.

OTHERWISE: list[dict[str, Any]] = [
    {"tp": 1},
    {"layout": "whole"},
    {"align": 512},
    {"max_part_nbytes": 10**6},
    {"ranks": "1"},
    {"unmatched": "replicate", "plan": "builtin:llama"},
]


def test_an_output_is_known_by_its_source_and_options_wherever_they_lie(work: Path) -> None:
    assert not is_carried_out(planned(work))
    go(work)
    assert is_carried_out(planned(work))
    assert [options for options in OTHERWISE if is_carried_out(planned(work, **options))] == []
    moved = work.rename(work.with_name("moved"))
    shutil.copytree(source_of(moved), moved / "copy")
    given = {"tp": 2, "plan": moved.parent / "plan.toml", "max_part_nbytes": PART_NBYTES}
    assert is_carried_out(plan_conversion(moved / "copy", moved / "out", **given))


@pytest.mark.parametrize("layout", ["ranks", "whole"])
def test_a_model_of_equal_names_lengths_and_times_is_another(work: Path, layout: str) -> None:
    go(work, layout=layout)
    for shard in source_of(work).glob("*.safetensors"):
        stored, status = shard.read_bytes(), shard.stat()
        start = 8 + int.from_bytes(stored[:8], "little")
        for name, entry in json.loads(stored[8:start]).items():
            first, end = (start + offset for offset in entry["data_offsets"])
            if first < end:  # A fine-tune that changed one tensor.
                shard.write_bytes(stored[:first] + bytes(255 - byte for byte in stored[first:end]) + stored[end:])
                os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
                assert not is_carried_out(planned(work, layout=layout)), name
        shard.write_bytes(stored)
    assert is_carried_out(planned(work, layout=layout))
    (source_of(work) / "config.json").write_text('{"a": 2}')
    assert not is_carried_out(planned(work, layout=layout))


def told(work: Path, **options: Any) -> list[str] | None:
    return differences_from_conversion(planned(work, **options), threads=2)


def test_how_another_output_differs_is_told(work: Path) -> None:
    go(work)
    out = work / "out"
    assert told(work) == []
    assert told(work, align=512) == ["alignment is 4096, expected 512"]
    assert told(work, ranks="1") == ["it has ranks 0-1, expected ranks 1"]
    assert (told(work, tp=1) or [])[0] == "TP is 2, expected 1"
    config = (source_of(work) / "config.json").read_bytes()
    (source_of(work) / "config.json").write_text('{"a": 2}')
    assert told(work) == [f"{out}/config.json: differs from the source's"]
    (source_of(work) / "config.json").write_bytes(config)
    [shard, *_] = sorted(source_of(work).glob("*.safetensors"))
    stored = shard.read_bytes()
    start = 8 + int.from_bytes(stored[:8], "little")
    shard.write_bytes(stored[:start] + bytes(255 - byte for byte in stored[start:]))
    assert told(work) == [f"{shard.name} has other tensors than the one that was converted"]
    shard.write_bytes(stored)
    (out / "relayout.chunks").unlink()
    assert told(work) is None


@pytest.mark.parametrize("damage", [os.unlink, lambda path: os.truncate(path, path.stat().st_size // 2)])
def test_an_output_that_lacks_anything_is_not_there(work: Path, damage: Callable[[Path], None]) -> None:
    go(work)
    for file in sorted((work / "out").iterdir()):
        stored = file.read_bytes()
        damage(file)
        assert not is_carried_out(planned(work)), file.name
        file.write_bytes(stored)
    assert is_carried_out(planned(work))
