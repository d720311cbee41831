"""A file that was opened is closed, whatever fails between the opening and its first use."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.local_stores import staging_folder

import relayout
from relayout.errors import FormatError
from relayout.publish import folder as publish_folder
from relayout.publish import output as publish_output
from relayout.storage import system
from relayout.storage.local import store
from relayout.storage.local.descriptors import OpenFolder

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="descriptors cannot be counted")

ERRORS = [OSError(errno.ESTALE, "stale"), MemoryError(), KeyboardInterrupt()]


def open_below(folder: Path) -> list[str]:
    paths = (os.path.realpath(file) for file in Path("/proc/self/fd").iterdir())
    return [path for path in paths if path.startswith(str(folder))]


def failing(error: BaseException) -> Callable[..., Any]:
    def fail(*arguments: object, **options: object) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_file_of_an_output_is_closed_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(store, "allocate", failing(error))
    with OpenFolder(tmp_path) as folder, pytest.raises(type(error)):
        store.OutputFile(folder, "file", 100)
    assert open_below(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_an_output_that_a_backup_links_is_refused_closed_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    backup, true_allocate = tmp_path / "backup", store.allocate

    def linked(fd: int, nbytes: int) -> None:
        true_allocate(fd, nbytes)
        backup.hardlink_to(tmp_path / "out" / "file")

    monkeypatch.setattr(store, "allocate", linked)
    with OpenFolder(tmp_path / "out") as folder, pytest.raises(FormatError, match="several hard links"):
        store.OutputFile(folder, "file", 100)
    assert open_below(tmp_path) == []
    assert {*tmp_path.rglob("*")} == {tmp_path / "out", backup}
    assert backup.stat().st_size == 100


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    ("where", "name"), [(publish_folder, "_check_ours"), (OpenFolder, "names"), (publish_output, "restrict")]
)
def test_the_folder_beside_an_output_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: object, name: str, error: BaseException
) -> None:
    # Left by an earlier attempt.
    (tmp_path / ".out.relayout-partial" / "work-of-a-test" / "output").mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setattr(where, name, failing(error))
        for output in ("out", "other"):
            with pytest.raises((type(error), AssertionError)), staging_folder(tmp_path / output):
                raise AssertionError("it did not fail")
    assert open_below(tmp_path) == []


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_file_that_is_partly_in_the_page_cache_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    (tmp_path / "model").mkdir()
    save_file({"w": np.arange(2**20, dtype=np.int32)}, tmp_path / "model" / "model.safetensors")
    relayout.convert(tmp_path / "model", tmp_path / "out")
    before = open_below(tmp_path)
    monkeypatch.setattr(os.path, "sameopenfile", failing(error))
    monkeypatch.setattr("relayout.loader.backends.files.resident_nbytes", lambda *_: 1)
    with pytest.raises(type(error)):
        relayout.load(tmp_path / "out", 0)
    assert open_below(tmp_path) == before


class Interrupted:
    """A C library whose calls a signal interrupts."""

    def __init__(self, times: int) -> None:
        self.times, self.num_calls = times, 0

    def fallocate(self, *_: object) -> int:
        self.num_calls += 1
        system.ctypes.set_errno(errno.EINTR)
        return 0 if self.num_calls > self.times else -1


def test_a_call_that_a_signal_interrupts_is_made_again_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, always = Interrupted(1), Interrupted(10**9)
    with (tmp_path / "file").open("wb") as file:
        monkeypatch.setattr(system, "libc", lambda: library)
        system.allocate(file.fileno(), 100)
        assert library.num_calls == 2
        monkeypatch.setattr(system, "libc", lambda: always)
        with pytest.raises(InterruptedError):
            system.allocate(file.fileno(), 100)
