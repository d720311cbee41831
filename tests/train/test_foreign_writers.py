"""A writer by the text of FORMAT.md, section 16, and relayout's own publish to one root at the same time.

The writer knows nothing of relayout: the functions `begin` and `end` are those of the document.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import pytest
from blake3 import blake3
from support import s3_server

from relayout.errors import PlanError
from relayout.format.steps_index import PublishedStep, Retention, Stored, step_name
from relayout.train.repository import StepRepository

DOCUMENT = (Path(__file__).parents[2] / "docs" / "FORMAT.md").read_text()
CODE = re.search(r"^## 16\. .*?^```python\n(def begin.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
NUM_ROUNDS = int(os.environ.get("RELAYOUT_RACES", "25"))
"""Steps that each of the two publishes."""
KEEP = Retention(10**6, 0)
EMPTY: dict[str, Any] = {"relayout": "steps", "version": 1, "requires": [], "steps": [], "pending": [], "retired": []}

Index = dict[str, Any]
Move = Callable[[Callable[[Index], Any]], Any]
"""Replaces the index by what a function makes of it, on condition of what it was; returns what that returned."""


def dumped(index: Index) -> bytes:
    text = json.dumps({key: value for key, value in index.items() if key != "self_digest"})
    before = text.removesuffix("}").encode() + b", "
    return before + b'"self_digest": "' + blake3(before).hexdigest().encode() + b'"}'


def in_folder(root: Path) -> Move:
    """Rule 5, in a folder."""

    def locked(name: str, flags: int = 0) -> int:
        while True:
            fd = os.open(root / name, os.O_RDWR | flags, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), (root / name).stat()):
                    return fd
            os.close(fd)

    def move(change: Callable[[Index], Any]) -> Any:
        held = [locked(".steps.json.relayout-lock", os.O_CREAT)]
        try:
            index = json.loads(json.dumps(EMPTY))
            with suppress(FileNotFoundError):
                held.append(locked("steps.json"))
                index = json.loads((root / "steps.json").read_bytes())
            found = change(index)
            with (root / ".steps.json.relayout-new").open("wb") as file:
                file.write(dumped(index))
                file.flush()
                os.fsync(file.fileno())
            (root / ".steps.json.relayout-new").rename(root / "steps.json")
            folder = os.open(root, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
            return found
        finally:
            for fd in held:
                os.close(fd)

    return move


def in_bucket(url: str) -> Move:
    """Rule 5, in a bucket."""

    def move(change: Callable[[Index], Any]) -> Any:
        while True:
            index, condition = json.loads(json.dumps(EMPTY)), {"If-None-Match": "*"}
            with suppress(urllib.error.HTTPError), urllib.request.urlopen(url) as answer:
                index, condition = json.loads(answer.read()), {"If-Match": answer.headers["ETag"]}
            found = change(index)
            put = urllib.request.Request(url, dumped(index), condition, method="PUT")
            try:
                with urllib.request.urlopen(put):
                    return found
            except urllib.error.HTTPError as error:
                if error.code not in (409, 412):
                    raise

    return move


def publish_by_the_text(move: Move) -> list[str]:
    """Publish steps; returns the names that were acknowledged."""
    assert CODE
    rules: dict[str, Any] = {}
    exec(CODE[1], rules)
    done = []
    for step in range(NUM_ROUNDS):
        name = f"full-{step:09d}-{os.urandom(4).hex()}"
        full = {"name": name, "nbytes": 1}
        entry = {"step": step, "content": blake3(name.encode()).hexdigest(), "full": full, "delta": None, "time": 1}
        move(lambda index, name=name: rules["begin"](index, [name], 1, 3600))
        if move(lambda index, entry=entry: rules["end"](index, entry, 0, 1)):
            done.append(name)
    return done


def publish(root: str) -> list[str]:
    """Publish steps as a `relayout.Publisher` moves the index; returns the names that were acknowledged."""
    place, done = StepRepository.at(root), []
    for step in range(NUM_ROUNDS):
        name = step_name("full", step, os.urandom(4).hex())
        entry = PublishedStep(step, blake3(name.encode()).hexdigest(), Stored(name, 1), None, 1)

        def end(index: Any, name: str = name, entry: PublishedStep = entry) -> Any:
            if set(index.pending) != {name}:
                return index.abandoned([name], 1)
            return index.published(entry, KEEP)

        try:
            place.move(lambda index, name=name: index.announced([name], 1, 3600))
            if name in place.move(end).names:
                done.append(name)
        except PlanError as error:  # It gives up where others are always faster.
            assert error.code == "busy"  # noqa: PT017 (whatever else it is fails the test)
    return done


def assert_nothing_is_lost(root: str, acknowledged: list[str]) -> None:
    index = StepRepository.at(root).read()
    assert len(acknowledged) > NUM_ROUNDS / 10
    assert sorted(index.names) == sorted(acknowledged)
    assert not index.names & {one.name for one in index.retired}


def test_no_publication_is_lost_in_a_folder(tmp_path: Path) -> None:
    """The other writer is a process of its own: locks of one process would not exclude each other."""
    root = tmp_path / "steps"
    root.mkdir()
    StepRepository.at(root).move(lambda index: index.announced([], 1, 3600))
    command = [sys.executable, __file__, str(root)]
    with Popen(command, stdout=PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}) as other:
        mine = publish(str(root))
        told, _ = other.communicate(timeout=120)
    assert other.returncode == 0
    assert_nothing_is_lost(str(root), [*mine, *json.loads(told)])


def test_no_publication_is_lost_in_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = s3_server.shared()
    for name, value in s3_server.environment(server).items():
        monkeypatch.setenv(name, value)
    theirs: list[str] = []
    move = in_bucket(f"{server.url}/{tmp_path.name}/steps/steps.json")
    other = threading.Thread(target=lambda: theirs.extend(publish_by_the_text(move)))
    other.start()
    mine = publish(f"s3://{tmp_path.name}/steps")
    other.join(120)
    assert not other.is_alive()
    assert_nothing_is_lost(f"s3://{tmp_path.name}/steps", [*mine, *theirs])


if __name__ == "__main__":
    print(json.dumps(publish_by_the_text(in_folder(Path(sys.argv[1])))))
