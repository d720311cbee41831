"""Outputs are absent or complete, and beside them is nothing, or what the same conversion goes on from."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.interruptions import claims_in, finished_parts, interrupted_before_the_end
from support.local_stores import check_output, staging_folder
from support.mounts import mounted, mounted_tmpfs
from support.patience import PATIENCE
from support.rights import drop_superuser_rights
from support.trees import content

from relayout.commands.convert import convert
from relayout.commands.restore import restore
from relayout.conversion.run import FileSink
from relayout.errors import PlanError
from relayout.publish import folder as local_staging
from relayout.publish.folder import staging_part
from relayout.publish.output import OutputSpec, check_space
from relayout.storage.local import descriptors
from relayout.storage.local import store as local_store
from relayout.storage.local.descriptors import OpenFolder
from relayout.storage.local.store import OutputFile

W = np.arange(1, 4097, dtype=np.uint16)

HOLD = """
import sys
from pathlib import Path

from relayout.publish.folder import staging_folder
from relayout.publish.output import OutputSpec

with staging_folder(Path(sys.argv[1]), OutputSpec(what="a test", fingerprint="of-a-test")) as staging:
    folder = staging.folder.path
    (folder / "mine").write_text("first")
    print("held", flush=True)
    sys.stdin.read()
"""


def listing(folder: Path) -> list[str]:
    """Everything below a folder, hidden or not."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def write_source(folder: Path, num_tensors: int = 1, nbytes: int = W.nbytes) -> Path:
    """A checkpoint of uint16 tensors, no two alike."""
    folder.mkdir()
    values = np.arange(1, nbytes // 2 + 1).astype(np.uint16)
    save_file({f"w.{n}": values + np.uint16(n) for n in range(num_tensors)}, folder / "model.safetensors")
    return folder


def kept_tensors(error: BaseException, out: Path) -> set[int]:
    """What a conversion that failed has kept; it says so, and its threads have closed all its files."""
    place = out.with_name(f".{out.name}.relayout-partial")
    note = f"finished work is kept in {place}; the same command resumes it"
    assert getattr(error, "__notes__", None) == [note]
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(".")] == [place.name]
    if sys.platform.startswith("linux"):
        opened = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        assert [path for path in opened if path.is_relative_to(place)] == []
    kept = claims_in(place)
    assert kept
    return kept


def assert_nothing_hidden(out: Path) -> None:
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(".")] == []


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.fixture
def small_drive(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    with mounted_tmpfs(tmp_path / "drive", "8m") as place:
        yield place


def test_what_an_earlier_attempt_left_of_no_finished_part_is_deleted(tmp_path: Path) -> None:
    place = tmp_path / ".out.relayout-partial" / "work-of-a-test"
    (place / "output" / "sub").mkdir(parents=True)
    (place / "output" / "sub" / "file").write_text("old")
    (place / "output" / "sub").chmod(0o500)
    (place / "output" / "part").write_text("finished")
    with staging_folder(tmp_path / "out") as staging:
        assert listing(staging.place.path) == ["output"]
        staging.head("part", b"head", 4)
        staging.keep("first", b"notes")
        place.joinpath("output", "rest").write_text("of no part")
        assert staging.kept("first") == b"notes"
    assert listing(tmp_path) == ["out", "out/part", "out/rest"]


def test_a_relative_output_stays_where_it_was_meant_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with staging_folder(Path("out")):
        monkeypatch.chdir(tmp_path / "there")
    assert listing(tmp_path) == ["here", "here/out", "there"]


def test_the_second_of_two_writers_is_refused_with_the_first_ones_pid(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        before = listing(tmp_path)
        refused = pytest.raises(PlanError, match=rf"out: is being written by another relayout \(process {first.pid}, ")
        with refused, staging_folder(out):
            pytest.fail("two processes are writing the same output")
        assert listing(tmp_path) == before
        with staging_folder(tmp_path / "other") as staging:
            folder = staging.folder.path
            (folder / "file").write_text("not refused")
        first.communicate(timeout=PATIENCE)
    assert listing(tmp_path) == ["other", "other/file", "out", "out/mine"]
    assert (out / "mine").read_text() == "first"


def test_a_lock_file_that_nobody_holds_is_no_lock(tmp_path: Path) -> None:
    # Process 1 is always alive: its number alone proves nothing.
    (tmp_path / ".out.relayout-lock").write_text("process 1, writing it since 12:00:00")
    with staging_folder(tmp_path / "out"):
        pass
    assert listing(tmp_path) == ["out"]


def test_a_lock_that_is_taken_while_its_file_goes_away_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Between open and flock, the holder ends and unlinks the file: a lock on that file would protect nobody.
    true_flock = fcntl.flock
    path = tmp_path / ".out.relayout-lock"
    locked: list[int] = []

    def flock(fd: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX:
            if not locked:
                path.unlink()
            locked.append(fd)
        true_flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with staging_folder(tmp_path / "out"):
        assert len(locked) == 2
        assert path.read_text().startswith(f"process {os.getpid()}, writing it since ")
    assert listing(tmp_path) == ["out"]


@pytest.mark.parametrize(
    ("source_folder", "shards", "mask", "folder_mode", "file_mode"),
    [
        (0o777, (0o666, 0o644), 0o022, 0o755, 0o644),
        (0o777, (0o666, 0o666), 0o027, 0o750, 0o640),
        (0o700, (0o600, 0o600), 0o022, 0o700, 0o600),
        (0o750, (0o640, 0o644), 0o000, 0o750, 0o640),
        (0o777, (0o664, 0o604), 0o000, 0o777, 0o604),
        (0o555, (0o444, 0o444), 0o022, 0o755, 0o644),
    ],
)
@pytest.mark.parametrize("again", [False, True])
def test_what_is_written_is_no_more_open_than_what_it_is_made_of_and_the_umask(
    tmp_path: Path,
    source_folder: int,
    shards: tuple[int, int],
    mask: int,
    folder_mode: int,
    file_mode: int,
    again: bool,
) -> None:
    source = tmp_path / "model"
    source.mkdir()
    for number, mode in enumerate(shards):
        save_file({f"w.{number}": W + np.uint16(number)}, source / f"model-{number}.safetensors")
        (source / f"model-{number}.safetensors").chmod(mode)
    source.chmod(source_folder)
    if again:  # What an interrupted attempt has left was open to all.
        with umask(0), interrupted_before_the_end():
            convert(source, tmp_path / "out")
        for path in (tmp_path / ".out.relayout-partial").rglob("*"):
            path.chmod(0o777 if path.is_dir() else 0o666)
    with umask(mask):
        summary = convert(source, tmp_path / "out")
        restore(tmp_path / "out", tmp_path / "back")
    assert (summary.resumed_nbytes > 0) == again
    assert summary.is_private == (file_mode & 0o044 == 0)
    written = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert {"model-rank-0-part-0.safetensors", "relayout.json", "relayout.source.json.zst"} <= set(written)
    assert ((tmp_path / "out").stat().st_mode & 0o777, set(written.values())) == (folder_mode, {file_mode})
    restored = {path.stat().st_mode & 0o777 for path in (tmp_path / "back").iterdir()}
    assert ((tmp_path / "back").stat().st_mode & 0o777, restored) == (folder_mode, {file_mode})


def test_nobody_else_can_look_into_what_is_not_done_yet(tmp_path: Path) -> None:
    source = write_source(tmp_path / "model")
    (source / "model.safetensors").chmod(0o644)
    with umask(0), interrupted_before_the_end():
        convert(source, tmp_path / "out")
    assert (tmp_path / ".out.relayout-partial").stat().st_mode & 0o777 == 0o700


def test_of_threads_that_come_to_the_same_file_none_finds_it_half_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The one that has made it, and got no space for it, is slow to tell; the others want to write to it as well.
    source = write_source(tmp_path / "model", num_tensors=12, nbytes=2**20)
    true_put = FileSink.put

    def allocate(fd: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def put(*args: Any) -> None:
        try:
            true_put(*args)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                time.sleep(0.2)
            raise

    monkeypatch.setattr(local_store, "allocate", allocate)
    monkeypatch.setattr(FileSink, "put", put)
    with pytest.raises(OSError, match="No space left"):
        convert(source, tmp_path / "out")
    assert listing(tmp_path) == ["model", "model/model.safetensors"]


@pytest.mark.parametrize("nbytes", [5000, 2**20])
def test_a_drive_that_fills_up_with_a_file_of_pieces_names_the_file(small_drive: Path, nbytes: int) -> None:
    with (
        pytest.raises(OSError, match="No space left") as caught,
        staging_folder(small_drive / "out") as staging,
    ):
        staging.put("pieces", [bytes(nbytes)] * (2**24 // nbytes))
    assert str(caught.value.filename).endswith("/output/pieces")
    assert listing(small_drive) == []


def test_side_files_count_in_the_space_that_is_needed(tmp_path: Path, small_drive: Path) -> None:
    source = write_source(tmp_path / "model")
    (source / "tokenizer.model").write_bytes(np.arange(2 * 2**20, dtype=np.uint64).tobytes())
    with pytest.raises(PlanError, match="B are free there"):
        convert(source, small_drive / "out")
    assert listing(small_drive) == []


def test_an_empty_output_folder_is_used(tmp_path: Path) -> None:
    source = write_source(tmp_path / "model")
    (tmp_path / "out").mkdir()
    convert(source, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]
    stored = load_file(tmp_path / "out" / "model-rank-0-part-0.safetensors")
    np.testing.assert_array_equal(stored["w.0"], W)


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("model", "is the source itself"),
        ("model/out", "is inside the source folder, or contains it"),
        ("model/sub/out", "is inside the source folder, or contains it"),
        ("", "is inside the source folder, or contains it"),
        ("link", "is the source itself"),
        ("link/out", "is inside the source folder, or contains it"),
        ("x/../model", "is the source itself"),
        ("nowhere/out", "its parent folder does not exist"),
        ("file", "exists and is not a folder"),
        ("file/out", "its parent folder does not exist"),
        ("full", "is not empty: holds 'sub', and no relayout.json: not an output"),
        *((f"to-{name}", "exists and is not a folder") for name in ("nothing", "empty", "file", "converted")),
    ],
)
def test_an_output_that_would_lose_something_is_refused(tmp_path: Path, output: str, says: str) -> None:
    (tmp_path / "model" / "sub").mkdir(parents=True)
    (tmp_path / "x").mkdir()
    (tmp_path / "full" / "sub").mkdir(parents=True)
    (tmp_path / "file").write_text("precious")
    (tmp_path / "converted").mkdir()
    (tmp_path / "converted" / "relayout.json").write_text("{}")
    (tmp_path / "link").symlink_to("model")
    (tmp_path / "empty").mkdir()
    for name in ("nothing", "empty", "file", "converted"):
        (tmp_path / f"to-{name}").symlink_to(name)
    before = listing(tmp_path)
    for force in (False, True):
        with pytest.raises(PlanError, match=says):
            check_output(tmp_path / "model", tmp_path / output, force=force)
    assert listing(tmp_path) == before


def test_links_and_empty_folders_that_relayout_did_not_make_are_named_and_nothing_is_touched(tmp_path: Path) -> None:
    source, out = write_source(tmp_path / "model"), tmp_path / "out"
    convert(source, out)
    (out / "link").symlink_to("../model")
    (out / "sub").mkdir()
    before = content(tmp_path), listing(tmp_path)
    with pytest.raises(PlanError, match=r"did not write, so .*: 'link', 'sub'$") as caught:
        convert(source, out, force=True)
    assert caught.value.path == str(out)
    assert (content(tmp_path), listing(tmp_path)) == before


def test_what_is_put_into_the_older_folder_while_it_is_replaced_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = write_source(tmp_path / "model"), tmp_path / "out"
    convert(source, out)
    true_exchange = local_staging.exchange

    def exchange(*args: Any) -> bool:
        (out / "precious").write_text("mine")
        return true_exchange(*args)

    monkeypatch.setattr(local_staging, "exchange", exchange)
    convert(source, out, force=True, align=512)
    kept = tmp_path / ".out.relayout-partial" / "done"
    assert content(kept) == {"precious": b"mine"}
    monkeypatch.undo()
    with pytest.raises(PlanError, match="done: holds files that relayout did not write; move them away"):
        convert(source, out, force=True)
    assert content(kept) == {"precious": b"mine"}
    (kept / "precious").rename(tmp_path / "precious")
    convert(source, out, force=True)
    assert_nothing_hidden(out)


def test_a_folder_is_deleted_whole_while_others_delete_what_is_theirs_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the members of a group do whose save has failed."""
    for name in ("attempt-1", "attempt-2", "output"):
        (tmp_path / "place" / name).mkdir(parents=True)
        (tmp_path / "place" / name / "file").write_bytes(b"1")
    true_status = OpenFolder.status

    def status(folder: OpenFolder, name: str) -> os.stat_result | None:
        found = true_status(folder, name)
        if folder.path.name == "attempt-1":
            (folder.path / name).unlink()
        elif name == "attempt-2":
            shutil.rmtree(folder.path / name)
        return found

    monkeypatch.setattr(OpenFolder, "status", status)
    with OpenFolder(tmp_path) as folder:
        folder.remove("place")
    assert listing(tmp_path) == []


def test_a_staged_file_that_is_deleted_meanwhile_is_not_made_again_without_its_bytes(tmp_path: Path) -> None:
    with staging_folder(tmp_path / "out") as staging:
        staging.write("gone", 100).close()
        (staging.folder.path / "gone").unlink()
        with pytest.raises(FileNotFoundError, match="gone"):
            staging.write("gone", 100)
        with pytest.raises(FileNotFoundError, match="gone"):
            staging.head("gone", b"head", 100)
        staging.remove("gone")
        staging.write("gone", 100).close()
    assert (tmp_path / "out" / "gone").stat().st_size == 100


@pytest.mark.parametrize("kind", ["a hard link", "a text", "a folder"])
def test_a_lock_file_that_is_something_else_is_never_truncated(tmp_path: Path, kind: str) -> None:
    lock, precious = tmp_path / ".out.relayout-lock", tmp_path / "precious"
    precious.write_text("process 1, writing it since 12:00:00")
    if kind == "a hard link":
        lock.hardlink_to(precious)
    elif kind == "a text":
        lock.write_text("7 things to do\n")
    else:
        lock.mkdir()
    before = content(tmp_path)
    with (
        pytest.raises(PlanError, match=r"out.relayout-lock: (is not a regular file|exists and is not relayout's lock)"),
        staging_folder(tmp_path / "out"),
    ):
        pass
    assert content(tmp_path) == before


def test_an_error_about_an_output_names_what_was_typed() -> None:
    with pytest.raises(OSError, match="/proc") as caught, staging_folder(Path("/proc/out")):
        pass
    assert caught.value.filename == "/proc/out"


def test_all_is_on_the_drive_before_the_output_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file as it is then, every folder with the names in it, and the note of what is replaced."""
    source, out = write_source(tmp_path / "model", num_tensors=3), tmp_path / "out"
    (source / "sub").mkdir()
    (source / "sub" / "README.md").write_text("a side file")
    synced: dict[int, object] = {}
    published: list[set[str]] = []

    def state(path: Path) -> object:
        return {inside.name for inside in path.iterdir()} if path.is_dir() else path.read_bytes()

    def fsync(fd: int) -> None:
        synced[os.fstat(fd).st_ino] = state(Path(f"/proc/self/fd/{fd}"))

    def checked(function: Callable[..., Any]) -> Callable[..., Any]:
        def renamed(folder: OpenFolder, name: str, target: OpenFolder, new_name: str) -> Any:
            if new_name == out.name:
                made = {folder.path / name, *(folder.path / name).rglob("*")}
                made |= {folder.path / "replaced"} if out.exists() else set()
                assert [path for path in made if synced.get(path.stat().st_ino) != state(path)] == []
                published.append(
                    {str(path.relative_to(folder.path / name)) for path in made if path.parent != folder.path}
                )
            return function(folder, name, target, new_name)

        return renamed

    monkeypatch.setattr(os, "fsync", fsync)
    for name in ("rename", "exchange"):
        monkeypatch.setattr(local_staging, name, checked(getattr(local_staging, name)))
    convert(source, out)
    convert(source, out, force=True)
    names = {path.relative_to(out).as_posix() for path in out.rglob("*")}
    assert published == [names, names]
    assert synced[tmp_path.stat().st_ino] == {"model", "out", ".out.relayout-lock", ".out.relayout-partial"}


@pytest.mark.parametrize("name", [".out.relayout-partial", ".out.relayout-partial/output.bak", ".out.relayout-old"])
@pytest.mark.parametrize("kind", ["a folder", "a file", "a link"])
def test_what_others_have_put_beside_an_output_under_our_names_stays(tmp_path: Path, name: str, kind: str) -> None:
    source, out = write_source(tmp_path / "model"), tmp_path / "out"
    convert(source, out)
    elsewhere, there = tmp_path / "elsewhere", tmp_path / name
    (elsewhere / "thesis").mkdir(parents=True)
    (elsewhere / "thesis" / "precious").write_text("mine")
    there.parent.mkdir(exist_ok=True)
    if kind == "a file":
        there.write_text("mine")
    elif kind == "a link":
        there.symlink_to(elsewhere)
    else:
        shutil.copytree(elsewhere, there)
    before = content(elsewhere), listing(there)
    with suppress(PlanError):
        convert(source, out, force=True)
    (out / "config.json").unlink(missing_ok=True)
    with suppress(PlanError):
        convert(source, out)
    assert (content(elsewhere), listing(there)) == before
    assert there.is_symlink() == (kind == "a link")


def test_a_strangers_folder_with_the_name_of_a_replaced_one_does_not_become_the_output(tmp_path: Path) -> None:
    """As force takes back what a process left that was killed between two renames."""
    source, out, there = write_source(tmp_path / "model"), tmp_path / "out", tmp_path / ".out.relayout-old"
    there.mkdir()
    (there / "precious").write_text("mine")
    with pytest.raises(PlanError, match="not an output of relayout"):
        convert(source, out, force=True)
    assert (there / "precious").read_text() == "mine"
    assert not out.exists()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("can_exchange", [True, False])
def test_if_the_last_rename_fails_the_old_folder_is_still_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException], can_exchange: bool
) -> None:
    source, out = write_source(tmp_path / "model"), tmp_path / "out"
    convert(source, out)
    before = content(out)
    convert(source, tmp_path / "expected", align=512)
    true_rename = os.rename
    failed: list[str] = []

    def rename(old: str, new: str, **options: int) -> None:
        if new == "out" and not failed:
            failed.append(old)
            raise kind(errno.EIO, "now")
        true_rename(old, new, **options)

    def exchange(*args: Any) -> bool:
        if can_exchange:
            failed.append("exchange")
            raise kind(errno.EIO, "now")
        return False

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        patch.setattr(descriptors, "exchange_names", exchange)
        with pytest.raises(kind, match="now") as caught:
            convert(source, out, force=True, align=512)
    assert failed == ["exchange" if can_exchange else "done"]
    assert content(out) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.relayout-partial", "expected", "model", "out"]
    assert kept_tensors(caught.value, out) == {0}
    assert convert(source, out, force=True, align=512).resumed_nbytes == W.nbytes
    assert content(out) == content(tmp_path / "expected")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["expected", "model", "out"]


@pytest.mark.parametrize("moment", ["while the first comes up", "before the second"])
def test_an_interruption_while_threads_are_being_started_leaves_no_threads_and_keeps_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    # Ctrl-C reaches the main thread anywhere: also when some workers run already, and others do not exist yet.
    source = write_source(tmp_path / "model", num_tensors=16, nbytes=2**21)
    true_start = threading.Thread.start
    started: list[threading.Thread] = []

    def start(thread: threading.Thread) -> None:
        if not finished_parts(tmp_path / ".out.relayout-partial"):
            true_start(thread)
            return
        is_second = bool(started)
        if not is_second:
            started.append(thread)
            true_start(thread)
        if is_second or moment == "while the first comes up":
            raise KeyboardInterrupt("now")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(KeyboardInterrupt, match="now") as caught:
            convert(source, tmp_path / "out", max_part_nbytes=2**22)
    running = [thread for thread in started if thread.is_alive()]
    for thread in running:
        thread.join()
    assert running == []
    kept = kept_tensors(caught.value, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.relayout-partial", "model"]
    assert convert(source, tmp_path / "out", max_part_nbytes=2**22).resumed_nbytes == len(kept) * 2**21
    convert(source, tmp_path / "expected", max_part_nbytes=2**22)
    assert content(tmp_path / "out") == content(tmp_path / "expected")
    assert_nothing_hidden(tmp_path / "out")


def test_an_interruption_waits_for_what_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Python 3.9 to 3.12 takes a thread for ended if a signal interrupts join() on it (bpo-45274, as it was mended):
    # a second join() returns at once, and the thread goes on writing into a folder that is being deleted.
    source = write_source(tmp_path / "model")
    true_write = OutputFile.write
    writing = threading.Event()
    written = threading.Event()

    def write_slowly(*args: Any) -> None:
        writing.set()
        time.sleep(0.2)  # The main thread comes to wait for this one.
        signal.pthread_kill(main_thread, signal.SIGALRM)
        time.sleep(0.4)
        true_write(*args)
        written.set()

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt("now")

    main_thread = threading.get_ident()
    convert(source, tmp_path / "expected")
    monkeypatch.setattr(OutputFile, "write", write_slowly)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt, match="now"):
            convert(source, tmp_path / "out")
        ended_first = written.is_set()
    finally:
        signal.signal(signal.SIGALRM, before)
        written.wait(PATIENCE)  # Or the thread would meet the next test.
    assert writing.is_set()
    assert ended_first, "the conversion came to an end before its own writes"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["expected", "model"]
    monkeypatch.undo()
    convert(source, tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "expected")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["expected", "model", "out"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="drops the superuser's rights by Linux's prctl")
def test_force_on_a_read_only_folder_leaves_nothing_beside_it(tmp_path: Path) -> None:
    # People take write permission from finished models. A folder may be renamed without it, but not emptied.
    source = write_source(tmp_path / "model")
    out = tmp_path / "out"
    convert(source, out)
    script = "import sys, relayout; relayout.convert(sys.argv[1], sys.argv[2], force=True)"
    try:
        for _ in range(2):
            out.chmod(0o555)
            subprocess.run(
                [sys.executable, "-c", script, str(source), str(out)],
                preexec_fn=drop_superuser_rights,
                capture_output=True,
            )
            assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]
    finally:
        for path in tmp_path.iterdir():
            path.chmod(0o755)
        shutil.rmtree(tmp_path / ".out.relayout-old", ignore_errors=True)


def test_a_mount_of_the_same_file_system_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    # As containers have them. Python's is_mount does not see it, and rename(2) only fails at the end.
    source, out = write_source(tmp_path / "model"), tmp_path / "out"
    (tmp_path / "elsewhere").mkdir()
    with mounted(out, "--bind", str(tmp_path / "elsewhere")):
        for force in (False, True):
            with pytest.raises(PlanError, match="out: is a mount point, which cannot be replaced; choose a folder in"):
                convert(source, out, force=force)
        assert listing(tmp_path) == ["elsewhere", "model", "model/model.safetensors", "out"]
        convert(source, out / "in it")
    assert (tmp_path / "elsewhere" / "in it" / "relayout.json").is_file()


@pytest.fixture
def overlay(tmp_path: Path) -> Iterator[Path]:
    """A container's file system: what it was made from lies in a lower layer."""
    for name in ("lower", "upper", "work", "drive"):
        (tmp_path / name).mkdir()
    with mounted_tmpfs(tmp_path / "drive", "16m") as drive:  # An overlay cannot lie upon another one.
        for name in ("lower", "upper", "work"):
            (drive / name).mkdir()
        convert(write_source(tmp_path / "model"), drive / "lower" / "converted")
        (drive / "lower" / "empty").mkdir()
        layers = f"lowerdir={drive}/lower,upperdir={drive}/upper,workdir={drive}/work,redirect_dir=off"
        with mounted(tmp_path / "overlay", "-t", "overlay", "-o", layers, "overlay") as place:
            yield place


def test_a_folder_of_a_lower_layer_is_refused_before_anything_is_written(tmp_path: Path, overlay: Path) -> None:
    before = content(overlay)
    with pytest.raises(PlanError, match="converted: is in a lower layer of an overlay file system"):
        convert(tmp_path / "model", overlay / "converted", force=True, align=512)
    assert content(overlay) == before
    assert_nothing_hidden(overlay / "converted")


@pytest.mark.parametrize("name", ["empty", "new"])
def test_on_an_overlay_an_empty_folder_is_used_and_an_own_one_replaced(
    tmp_path: Path, overlay: Path, name: str
) -> None:
    for align in (4096, 512):
        convert(tmp_path / "model", overlay / name, align=align, force=align == 512)
        convert(tmp_path / "model", tmp_path / "expected", align=align, force=True)
        assert content(overlay / name) == content(tmp_path / "expected")
        assert_nothing_hidden(overlay / name)


@pytest.mark.parametrize("output", [".", "..", "../here"])
def test_the_working_directory_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str) -> None:
    # Whoever stands in it would go on standing in a folder that has no name any more.
    source = write_source(tmp_path / "model")
    (tmp_path / "there" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "there" / "here")
    with pytest.raises(PlanError, match=f"{re.escape(output)}: is or contains the working directory"):
        convert(source, output)
    assert listing(tmp_path / "there") == ["here"]


def test_the_root_of_all_folders_is_no_output(tmp_path: Path) -> None:
    convert(write_source(tmp_path / "model"), tmp_path / "out")
    with pytest.raises(PlanError, match="/: "):
        convert(tmp_path / "model", "/")
    with pytest.raises(PlanError, match="/: "):
        restore(tmp_path / "out", "/", force=True)


def test_what_is_missing_is_told_in_the_unit_of_the_rest_and_rounded_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=419_389_519, f_frsize=1))
    for needed, says in (
        (984_000_000, r"needs 984\.0 MB, 419\.\d MB are free there \(564\.\d MB too few\)$"),
        (419_389_520, r"needs 419\.4 MB, 419\.\d MB are free there \([\d.]+ (bytes?|kB) too few\)$"),
    ):
        with pytest.raises(PlanError, match=says):
            check_space(tmp_path, tmp_path / "out", needed)
    check_space(tmp_path, tmp_path / "out", 419_389_519)


def test_a_force_that_was_killed_between_the_exchange_and_the_end_leaves_nothing_in_the_end(tmp_path: Path) -> None:
    source, out = write_source(tmp_path / "model"), tmp_path / "out"
    convert(source, out)
    shutil.copytree(out, tmp_path / ".out.relayout-partial" / "done")
    (tmp_path / ".out.relayout-partial" / "work-1").mkdir()
    (tmp_path / ".out.relayout-partial" / "work-1" / "part-unit-0").write_text("of what is done")
    before = content(out)
    with pytest.raises(PlanError, match="already holds"):
        convert(source, out)
    assert content(out) == before
    assert_nothing_hidden(out)


def test_an_output_that_is_published_is_complete_though_its_lock_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    true_unlink = os.unlink

    def unlink(name: str, *, dir_fd: int | None = None) -> None:
        if str(name).endswith("-lock"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        true_unlink(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", unlink)
    with staging_folder(tmp_path / "out") as staging:
        (staging.folder.path / "file").write_text("complete")
    monkeypatch.undo()
    assert "its lock cannot be removed" in caplog.text
    assert listing(tmp_path) == [".out.relayout-lock", "out", "out/file"]
    local_staging.remove_leftovers(tmp_path / "out")
    assert listing(tmp_path) == ["out", "out/file"]


def test_a_lock_that_has_replaced_that_of_a_writer_is_not_removed_by_it(tmp_path: Path) -> None:
    lock = tmp_path / ".out.relayout-lock"
    with staging_folder(tmp_path / "out"):
        lock.unlink()
        lock.write_text("process 1, writing it since 12:00:00")
    assert listing(tmp_path) == [".out.relayout-lock", "out"]


def test_units_of_other_work_outlive_a_commit_that_fails(tmp_path: Path) -> None:
    out, ours, theirs = (
        tmp_path / "out",
        OutputSpec(what="ours", fingerprint="1"),
        OutputSpec(what="theirs", fingerprint="2"),
    )
    for work in (ours, theirs):
        with staging_part(out, "marker", work, replace=False) as staging:
            staging.head("file", b"head", 4)
            staging.keep("unit-0", b"notes")
    (tmp_path / ".out.relayout-partial" / "work-1" / "part-unit-0").unlink()

    def fail() -> None:
        with local_staging.staging_folder(out, ours, gathers=True) as staging:
            raise KeyError(staging.kept("unit-0"))

    with pytest.raises(KeyError, match="None"):
        fail()
    with local_staging.staging_folder(out, theirs, gathers=True) as staging:
        assert staging.kept("unit-0") == b"notes"
    assert listing(tmp_path) == ["out", "out/file"]
