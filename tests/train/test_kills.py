"""Publishers that are killed, while followers read: each step that is seen is whole, and none is lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from support import prestarted, s3_server
from support.profile import sample
from support.s3_server import Answer, Request
from support.steps import assert_is_step, outputs_of, weights_of
from support.steps_worker import KILLED_OPTIONS, KILLED_STEPS

import relayout

pytestmark = pytest.mark.xdist_group("group")

LAST = 20
"""The step of the publisher that goes on."""
NUM_CALLS, NUM_REQUESTS = 440, 150
"""Fewer than a publisher makes that is not killed: 480 and 162."""
SECONDS = 4.0
"""What such a publisher takes on a real server."""


class Polling:
    """A follower that asks for the newest step all the time, and compares what it has with what was published."""

    def __init__(self, root: str) -> None:
        self._follower, self._is_over = relayout.Follower(root, 0), threading.Event()
        self.seen: list[int] = []
        self.errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._poll)

    def _poll(self) -> None:
        while not self._is_over.wait(0.001):
            try:
                step = self._follower.update()
                if step is not None:
                    self.seen.append(step)
                    assert_is_step(self._follower.tensors, weights_of(step), 0)
            except relayout.PlanError as error:
                if "has no steps yet" not in str(error):
                    self.errors.append(error)
            except BaseException as error:
                self.errors.append(error)

    def __enter__(self) -> Polling:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


@contextmanager
def killing(folder: Path, number: int) -> Iterator[None]:
    """Kill the process of FOLDER/pid at a request that writes: every other one is carried out all the same."""
    server, num_left = s3_server.shared(), number

    def interfere(request: Request) -> Answer | None:
        nonlocal num_left
        if request.method in ("PUT", "POST", "DELETE") and request.bucket == folder.name:
            num_left -= 1
            if num_left == -1:
                with suppress(ProcessLookupError):
                    os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
                if number % 2:
                    raise ConnectionError("the request was never made")
        return None

    server.interfere = interfere
    try:
        yield
    finally:
        server.interfere = lambda request: None


@contextmanager
def killing_later(folder: Path, number: int) -> Iterator[None]:
    """Kill the process of FOLDER/pid after some time, which is about what its work takes for the largest number."""

    def kill() -> None:
        while not (folder / "pid").exists():
            time.sleep(0.01)
        time.sleep(SECONDS * number / 50)
        with suppress(ProcessLookupError):
            os.kill(int((folder / "pid").read_text() or 0), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    yield
    thread.join()


@pytest.mark.parametrize("number", sample([*range(50)], [2, 21, 37]))
def test_a_step_that_was_published_stays_and_no_half_of_one_is_seen(root: str, tmp_path: Path, number: int) -> None:
    is_bucket, is_server = root.startswith("s3://"), root.startswith(f"s3://{tmp_path.name}/")
    calls = -1 if is_bucket else number * NUM_CALLS // 50
    variables = {**prestarted.ONE_THREAD, **(s3_server.environment(s3_server.shared()) if is_server else {})}
    killed = killing(tmp_path, number * NUM_REQUESTS // 50) if is_server or not is_bucket else None
    script = "from support.steps_worker import is_killed; is_killed()"
    with Polling(root) as polling, killed or killing_later(tmp_path, number):
        done = prestarted.run(tmp_path, root, calls, script=script, imports=prestarted.GROUP, env=variables)
    assert done.returncode == -signal.SIGKILL or (killed is None and done.returncode == 0), done.stderr
    returned = [int(line) for line in (tmp_path / "returned").read_text().split()]
    assert returned == [*KILLED_STEPS][: len(returned)]
    entries = relayout.Steps(root).entries()
    assert [entry.step for entry in entries[-1:]] in ([*returned[-1:]], [len(returned) + 1])
    for entry in entries:
        late = relayout.Follower(root, 1)
        late.update(entry.step)
        assert_is_step(late.tensors, weights_of(entry.step), 1)
    assert polling.errors == []
    assert polling.seen == sorted(set(polling.seen))
    publisher = relayout.Publisher(root, **KILLED_OPTIONS)
    assert publisher.publish(weights_of(LAST), LAST).full is not None
    follower = relayout.Follower(root, 0)
    assert follower.update() == LAST
    assert_is_step(follower.tensors, weights_of(LAST), 0)
    relayout.Steps(root).prune(grace_seconds=0)
    entries = relayout.Steps(root).entries()
    named = {one.name for entry in entries for one in (entry.full, entry.delta) if one is not None}
    assert outputs_of(root) == {*named, "steps.json"}
