"""Conversions as tasks of a Ray cluster.

Only jobs, records and numbers pass through Ray: no tensors, no secrets. Every node must reach source and output by the
same path or URL. A task that fails by an OSError, or whose node is lost, is retried elsewhere; what it left does not
count. The resource `relayout_io` of a node limits how many units it converts at the same time.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack

import relayout
from relayout.commands.convert import PlanOptions, plan_conversion
from relayout.conversion.copy import DEFAULT_MEMORY, DEFAULT_THREADS
from relayout.conversion.jobs import UnitRecord, commit_jobs, run_job, unit_jobs
from relayout.conversion.run import Summary
from relayout.errors import PlanError, RelayoutError
from relayout.progress import Progress, reporting

IO_RESOURCE = "relayout_io"
"""Of a node: how many tasks may read and write there at the same time."""

_MAX_RETRIES = 5
_CANCEL_SECONDS = 10.0
"""How long tasks may take to clean up when the driver is interrupted."""

_REPORT_SECONDS = 1.0
"""Between two reports of a task's progress."""

_CONNECT_SECONDS = 10.0
_ADDRESS = re.compile(r"auto|local|(ray://)?(?P<host>[\w.-]+|\[[0-9A-Fa-f:]+\]):(?P<port>[0-9]{1,5})", re.ASCII)
_MISSING_MODULE = re.compile(r"No module named '([\w.]+)'")

Work = Callable[..., UnitRecord]
"""What a task does. Its argument `progress` is a function to call with (bytes done, total bytes)."""


def convert(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    address: str | None = None,
    force: bool = False,
    threads: int = DEFAULT_THREADS,
    memory: int | str = DEFAULT_MEMORY,
    progress: Progress = None,
    **options: Unpack[PlanOptions],
) -> Summary:
    """Convert on a Ray cluster. After an interruption the same call goes on, on any number of nodes.

    Args:
        source, output, force, progress, options: as for `relayout.convert`.
        address: of the cluster; None: what RAY_ADDRESS says, or else a cluster of this machine alone.
        threads, memory: of each task.

    Raises:
        FormatError, PlanError, OSError: as `relayout.convert`, wherever it happened; or ray is not installed.
    """
    started = time.monotonic()
    jobs = unit_jobs(plan_conversion(source, output, **options), force=force)
    works = [partial(run_job, job, threads=threads, memory=memory) for job in jobs]
    with _cluster(address, threads) as cluster:
        what = f"converting {len(jobs)} units on {cluster.num_nodes} nodes"
        with reporting(progress, what, sum(job.source_nbytes for job in jobs)) as report:
            records = cluster.run(works, report)
    summary = commit_jobs(jobs)
    return replace(
        summary,
        resumed_nbytes=sum(record.source_nbytes - record.read_nbytes for record in records),
        seconds=time.monotonic() - started,
        peak_nbytes=max(record.peak_nbytes for record in records),
    )


@dataclass(frozen=True, slots=True)
class _Cluster:
    """A Ray cluster."""

    ray: Any
    """The module."""
    needs: Mapping[str, Any]
    """Resources that a task needs of its node."""
    num_nodes: int

    def run(self, works: Sequence[Work], report: Callable[[int], None]) -> list[UnitRecord]:
        """Carry out all works, each in a task; `report` is called with the bytes that are done in all.

        Raises:
            the error of the first task that failed for good.
        """
        ray = self.ray
        task = ray.remote(max_retries=_MAX_RETRIES, retry_exceptions=[OSError], **self.needs)(_task)
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )  # On the node of the driver, which lives as long.
        counts = ray.remote(num_cpus=0, max_restarts=0, scheduling_strategy=here)(_Counts).remote()
        left = {task.remote(work, index, counts): index for index, work in enumerate(works)}
        results: dict[int, UnitRecord] = {}
        try:
            while left:
                ended, _ = ray.wait(list(left), timeout=_REPORT_SECONDS)
                for reference in ended:
                    results[left[reference]] = self._result(reference)
                    del left[reference]
                with suppress(ray.exceptions.RayError):  # It is about progress only.
                    report(ray.get(counts.total.remote(), timeout=_REPORT_SECONDS))
        except BaseException:
            self._cancel(list(left))
            raise
        return [results[index] for index in range(len(works))]

    def _result(self, reference: Any) -> Any:
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            missing = _MISSING_MODULE.search(str(error.cause))
            if isinstance(error.cause, OSError | RelayoutError) or missing is None:
                raise error.cause from None
            what = f"a node of the Ray cluster lacks the package {missing[1]}: install what relayout needs on all nodes"
            raise PlanError(what, code="unsupported") from None
        except self.ray.exceptions.RayError as error:
            reason = str(error).partition("\n")[0]
            raise OSError(errno.EIO, f"a task of the Ray cluster was lost {_MAX_RETRIES + 1} times: {reason}") from None

    def _cancel(self, tasks: Sequence[Any]) -> None:
        """End tasks; those that run clean up."""
        for is_forced in (False, True):
            for reference in tasks:
                with suppress(self.ray.exceptions.RayError, ValueError):
                    self.ray.cancel(reference, force=is_forced)
            if tasks:
                _, tasks = self.ray.wait(list(tasks), num_returns=len(tasks), timeout=_CANCEL_SECONDS)


def _task(work: Work, index: int, counts: Any) -> UnitRecord:
    """What a task runs, on any node."""
    reported = 0.0

    def report(done: int, total: int) -> None:
        nonlocal reported
        if done == total or time.monotonic() - reported >= _REPORT_SECONDS:
            reported = time.monotonic()
            counts.set.remote(index, done)

    return work(progress=report)


class _Counts:
    """An actor that counts the bytes that are done."""

    def __init__(self) -> None:
        self._done: dict[int, int] = {}

    def set(self, index: int, done: int) -> None:
        """Set a work's bytes. One that was retried counts from where it was: progress never goes back."""
        self._done[index] = max(done, self._done.get(index, 0))

    def total(self) -> int:
        """Bytes of all works."""
        return sum(self._done.values())


@contextmanager
def _cluster(address: str | None, threads: int) -> Iterator[_Cluster]:
    """The cluster that this process is connected to; or connect to one.

    Raises:
        PlanError: ray is not installed, or `address` is invalid.
        OSError: there is no cluster at this address.
    """
    try:
        import ray
    except ImportError:
        raise PlanError("ray is not installed: install the extra 'ray'", code="unsupported") from None
    is_ours = not ray.is_initialized()
    if is_ours:
        _check_address(address or os.environ.get("RAY_ADDRESS") or "auto")
        with _own_signals(), TemporaryDirectory() as empty:
            # Without a `working_dir`, ray lets tasks import from the working folder of this process.
            # The package as it is here: tasks run the same code.
            ship = {"working_dir": empty, "py_modules": [str(Path(relayout.__file__).parent)]}
            try:
                ray.init(address=address, runtime_env=ship, log_to_driver=False, logging_level=logging.ERROR)
            except (ConnectionError, ray.exceptions.RayError) as error:
                raise OSError(errno.ECONNREFUSED, f"no Ray cluster: {str(error).partition(chr(10))[0]}") from None
    try:
        yield _connected(ray, threads)
    finally:
        if is_ours:
            ray.shutdown()


def _connected(ray: Any, threads: int) -> _Cluster:
    """The nodes that are there now, and what a task needs of one."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    if any(IO_RESOURCE in node for node in nodes):
        return _Cluster(ray, {"num_cpus": 1, "resources": {IO_RESOURCE: 1}}, len(nodes))
    return _Cluster(ray, {"num_cpus": max(1, min([threads, *(int(node["CPU"]) for node in nodes)]))}, len(nodes))


def _check_address(address: str) -> None:
    """Check that the address accepts connections: ray itself would try for a quarter of an hour.

    Raises:
        PlanError: it is not the address of a cluster.
        OSError: nothing answers.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None:
        what = "not the address of a Ray cluster: expected HOST:PORT, ray://HOST:PORT, auto or local"
        raise PlanError(what, path=address, code="option")
    if match["host"] is not None:
        try:
            socket.create_connection((match["host"].strip("[]"), int(match["port"])), _CONNECT_SECONDS).close()
        except (OSError, OverflowError) as error:
            what = f"no Ray cluster at this address: {error.__class__.__name__}"
            raise OSError(errno.ECONNREFUSED, what, address) from None


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep this process's signal handlers, which ray replaces."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM) if is_main}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
