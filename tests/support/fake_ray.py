"""As much of ray as `relayout.clusters.on_ray` uses, with a thread for a worker."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
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

    util = SimpleNamespace(
        scheduling_strategies=SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node, soft: (node, soft))
    )

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "driver's")

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

        def decorate(what: Any) -> Any:
            if isinstance(what, type):
                return SimpleNamespace(remote=lambda: _Actor(what()))
            return SimpleNamespace(remote=lambda *args: self._workers.submit(self._run, what, options, args))

        return decorate

    def _run(self, what: Callable[..., Any], options: dict[str, Any], args: tuple[Any, ...]) -> Any:
        for tried in range(options["max_retries"] + 1):
            if self.lost:
                self.lost -= 1
                continue
            try:
                sent = [one if isinstance(one, _Actor) else pickle.loads(pickle.dumps(one)) for one in args]
                return pickle.loads(pickle.dumps(what(*sent)))
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

    def get(self, one: Future[Any], timeout: float | None = None) -> Any:
        return one.result(timeout)

    def cancel(self, one: Future[Any], *, force: bool) -> None:
        self.cancelled.append(one)
        one.cancel()


class _Actor:
    """Calls are made at once, in the caller's thread."""

    def __init__(self, instance: Any) -> None:
        self._instance = instance

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Future[Any]:
            done: Future[Any] = Future()
            done.set_result(getattr(self._instance, name)(*args))
            return done

        return SimpleNamespace(remote=call)
