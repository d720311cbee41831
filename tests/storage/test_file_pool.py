"""Many files, few descriptors: by the pool alone, and by the commands in a process that may open few."""

from __future__ import annotations

import json
import resource
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support import prestarted
from support.models import read_tensors
from support.patience import PATIENCE

from relayout.storage import reading
from relayout.storage.reading import OpenFiles

LIMIT = 3


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_MAX_OPEN_FILES", LIMIT)


class Place:
    """Where files are opened; it notes whatever must not be."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.open: Counter[str] = Counter()
        self.opened: list[str] = []
        self.closed: list[str] = []
        self.most = 0
        self.wrong: list[str] = []
        self.failing: set[str] = set()

    def open_file(self, key: str) -> Opened:
        if key == "missing":
            raise OSError(f"{key} is missing")
        with self.lock:
            self.open[key] += 1
            self.opened.append(key)
            self.most = max(self.most, self.open.total())
            if self.open[key] > 1:
                self.wrong.append(f"{key} is open twice")
        return Opened(self, key)


class Opened:
    def __init__(self, place: Place, key: str) -> None:
        self.place, self.key = place, key
        self.num_users = 0
        self.is_open = True

    def read(self) -> None:
        with self.place.lock:
            self.num_users += 1
        for _ in range(20):
            if not self.is_open:
                self.place.wrong.append(f"{self.key} is closed under its reader")
        with self.place.lock:
            self.num_users -= 1

    def close(self) -> None:
        with self.place.lock:
            self.is_open = False
            self.place.open[self.key] -= 1
            self.place.closed.append(self.key)
            if self.num_users:
                self.place.wrong.append(f"{self.key} is closed while it is used")
        if self.key in self.place.failing:
            raise OSError(f"{self.key} cannot be closed")


@pytest.fixture
def place() -> Place:
    return Place()


@pytest.fixture
def often() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def use(files: OpenFiles[str, Opened], *keys: str) -> None:
    for key in keys:
        with files.use(key) as file:
            file.read()


def start(files: OpenFiles[str, Opened], *keys: str) -> threading.Thread:
    thread = threading.Thread(target=use, args=(files, *keys), daemon=True)
    thread.start()
    return thread


def finish(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "waits for ever"


@pytest.mark.parametrize("num_threads", [2, 8])
def test_a_file_in_use_stays_open_whatever_other_threads_want(place: Place, often: None, num_threads: int) -> None:
    with OpenFiles(place.open_file) as files:
        wanted = [[f"{(7 * n + 3 * step * n + step) % 10}" for step in range(300)] for n in range(num_threads)]
        finish(*(start(files, *keys) for keys in wanted))
    assert place.wrong == []
    assert place.most == LIMIT
    assert len(place.opened) > 10
    assert sorted(place.opened) == sorted(place.closed)


def test_the_idle_file_that_was_used_least_recently_is_closed(place: Place) -> None:
    files = OpenFiles(place.open_file)
    use(files, *"abcabdae")
    assert (place.opened, place.closed) == (list("abcde"), list("cb"))
    with files.use("d"):
        use(files, *"fgh")
    assert place.closed == list("cbaef")
    files.close()
    assert sorted(place.closed) == sorted(place.opened)


def test_a_file_that_cannot_be_opened_is_an_error_and_takes_no_room(place: Place) -> None:
    files = OpenFiles(place.open_file)
    for _ in range(2 * LIMIT):
        with pytest.raises(OSError, match="missing is missing"):
            use(files, "missing")
    use(files, *"abc")
    assert place.closed == []


def test_a_file_that_cannot_be_closed_is_an_error_and_the_others_are_closed(place: Place) -> None:
    files = OpenFiles(place.open_file)
    use(files, *"abc")
    place.failing = {"a", "c"}
    with pytest.raises(OSError, match="a cannot be closed"):
        use(files, "d")
    use(files, "d")
    with pytest.raises(OSError, match="c cannot be closed"):
        files.close()
    assert place.open.total() == 0


def test_an_error_of_a_user_leaves_the_file_idle(place: Place) -> None:
    files = OpenFiles(place.open_file)
    with pytest.raises(ValueError, match="mine"), files.use("a"):
        raise ValueError("mine")
    use(files, *"bcd")
    assert place.closed == ["a"]


@pytest.mark.parametrize("what", ["open", "close"])
def test_while_a_file_is_opened_or_closed_others_are_used(
    place: Place, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing waits for the drive; what others do meanwhile must not."""
    started, go_on = threading.Event(), threading.Event()
    true_open, true_close = place.open_file, Opened.close

    def slow_open(key: str) -> Opened:
        if (what, key) == ("open", "d"):
            started.set()
            assert go_on.wait(PATIENCE)
        return true_open(key)

    def slow_close(self: Opened) -> None:
        if (what, self.key) == ("close", "a"):
            started.set()
            assert go_on.wait(PATIENCE)
        true_close(self)

    monkeypatch.setattr(Opened, "close", slow_close)
    files = OpenFiles(slow_open)
    use(files, *"abc")
    other = start(files, "d")
    assert started.wait(PATIENCE)
    again = start(files, "d" if what == "open" else "a")
    finish(start(files, *"bcbc"))
    go_on.set()
    finish(other, again)
    files.close()
    assert place.wrong == []
    assert place.most == LIMIT
    assert sorted(place.opened) == sorted(place.closed)


NUM_SHARDS = 52
SHARD = "model-{:05}-of-00052.safetensors"
ROWS, COLUMNS = 16, 64


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer in each of 52 shards."""
    folder = tmp_path_factory.mktemp("sharded") / "model"
    folder.mkdir()
    weight_map = {}
    for number in range(NUM_SHARDS):
        name = f"model.layers.{number}.mlp.down_proj.weight"
        values = np.arange(number, number + ROWS * COLUMNS, dtype=np.uint32).reshape(ROWS, COLUMNS)
        weight_map[name] = SHARD.format(number + 1)
        save_file({name: values}, folder / weight_map[name])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def relayout(*args: object, limit: int, script: str = "from relayout.cli.app import main; main()") -> str:
    """Run the command line in a process that may open so few files; what it said on stderr."""
    done = prestarted.run(*args, script=script, limits={resource.RLIMIT_NOFILE: limit})
    assert done.returncode in (0, 3), done.stderr
    return f"{done.returncode} {done.stderr}" if done.returncode else ""


def test_more_files_than_may_be_open_are_converted_verified_and_restored(sharded: Path, tmp_path: Path) -> None:
    """Shards of the source, and files of the output."""
    out, back, limit = tmp_path / "out", tmp_path / "back", 40
    options = ["--threads", "8", "--max-part-size", "2kB"]
    assert relayout("convert", sharded, "--tp", "4", "-o", out, *options, limit=limit) == ""
    assert len(list(out.glob("*.safetensors"))) > limit
    for rank in range(4):
        held = read_tensors(out, f"model-rank-{rank}-part-*.safetensors")
        assert len(held) == NUM_SHARDS
        for number in range(NUM_SHARDS):
            whole = np.arange(number, number + ROWS * COLUMNS, dtype=np.int32).reshape(ROWS, COLUMNS)
            expected = whole[:, rank * COLUMNS // 4 : (rank + 1) * COLUMNS // 4]
            np.testing.assert_array_equal(held[f"model.layers.{number}.mlp.down_proj.weight"], expected)
    assert relayout("verify", out, limit=limit) == ""
    assert relayout("verify", out, "--source", sharded, limit=limit) == ""
    assert relayout("restore", out, "-o", back, limit=limit) == ""
    files = sorted(path.name for path in sharded.iterdir())
    assert sorted(path.name for path in back.iterdir()) == files
    assert all((back / name).read_bytes() == (sharded / name).read_bytes() for name in files)


def test_a_process_that_may_open_no_more_files_is_told_what_to_raise(sharded: Path, tmp_path: Path) -> None:
    use_up = """
import os
from relayout.conversion import planning as conversion
from relayout.cli.app import main

plan_conversion = conversion.plan_conversion

def plan_without_descriptors(*args, **options):
    while os.dup(0) < 99:
        pass
    return plan_conversion(*args, **options)

conversion.plan_conversion = plan_without_descriptors
main()
"""
    said = relayout("convert", sharded, "--tp", "4", "-o", tmp_path / "out", limit=100, script=use_up)
    assert said.startswith("3 relayout: error: ")
    assert "Too many open files; this process may open 100 files: raise that with ulimit -n" in said
