"""As much of ray as `tools/examples/relayout_on_ray.py` uses, with a thread for a worker."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: BaseException) -> None:
        self.cause = cause


class FakeRay:
    """In place of the module."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self) -> None:
        self._workers = ThreadPoolExecutor(1)
        self.resources: list[dict[str, float]] = [{"CPU": 1.0}]
        """Of each node."""
        self.asked: list[dict[str, Any]] = []
        """What tasks need of a node."""
        self.inits: list[dict[str, Any]] = []
        self.working_files: list[str] | None = None
        """Names of the files that tasks have in their working folder; None: those of the driver's."""
        self.cancelled: list[Any] = []
        self.is_up = False
        self.lost = 0
        """So many tasks are lost with their nodes before they begin."""

    def is_initialized(self) -> bool:
        return self.is_up

    def init(self, **options: Any) -> None:
        self.inits.append(options)
        working_dir = options["runtime_env"].get("working_dir")
        self.working_files = None if working_dir is None else [path.name for path in Path(working_dir).iterdir()]
        self.is_up = True

    def shutdown(self) -> None:
        self.is_up = False

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": node} for node in self.resources]

    def remote(self, **options: Any) -> Callable[[Any], Any]:
        self.asked.append(options)

        def submit(what: Callable[..., Any], *args: Any, **more: Any) -> Future[Any]:
            return self._workers.submit(self._run, what, options, (args, more))

        return lambda what: SimpleNamespace(remote=partial(submit, what))

    def _run(self, what: Callable[..., Any], options: dict[str, Any], given: tuple[Any, Any]) -> Any:
        for tried in range(options["max_retries"] + 1):
            if self.lost:
                self.lost -= 1
                continue
            try:
                args, more = pickle.loads(pickle.dumps(given))
                return pickle.loads(pickle.dumps(what(*args, **more)))
            except BaseException as error:
                if tried == options["max_retries"] or not isinstance(error, tuple(options["retry_exceptions"])):
                    raise RayTaskError(copy.copy(error)) from None
        raise RayError("Task failed because the node it was running on is dead\nmore of it")

    def wait(
        self, tasks: list[Any], *, num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[Any], list[Any]]:
        deadline = time.monotonic() + (timeout or 0)
        while sum(task.done() for task in tasks) < num_returns and time.monotonic() < deadline:
            wait_for(tasks, 0.01)
        done = [task for task in tasks if task.done()][:num_returns]
        return done, [task for task in tasks if task not in done]

    def get(self, one: Future[Any]) -> Any:
        return one.result()

    def cancel(self, one: Future[Any], *, force: bool) -> None:
        self.cancelled.append(one)
        one.cancel()
