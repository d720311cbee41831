"""A conversion on a Ray cluster: each unit is a task.

    python relayout_on_ray.py llama-3.1-8b -o llama-3.1-8b-tp8 --tp 8 --address auto

Programs call `convert`, with a copy of this file, or its folder on PYTHONPATH. It is an example for Ray 2.49 and later
(tested with 2.60.0), and not part of the package. Every node needs ray and the dependencies of relayout.

Only jobs and records pass through Ray: no tensors, no secrets. Every node must reach source and output by the same path
or URL. A task that fails with an OSError, or whose node is lost, is retried elsewhere. The resource `relayout_io` of a
node limits how many units it converts at the same time.
"""

from __future__ import annotations

import argparse
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
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import relayout
from relayout.conversion.jobs import UnitJob, UnitRecord, commit_jobs, run_job, unit_jobs
from relayout.conversion.layout import Conversion
from relayout.conversion.run import DEFAULT_MEMORY, DEFAULT_THREADS, Summary
from relayout.errors import PlanError, RelayoutError
from relayout.reporting import Progress, reporting

IO_RESOURCE = "relayout_io"
"""The resource of a node that says how many tasks may read and write there at the same time."""

_MAX_RETRIES = 5
_CANCEL_SECONDS = 10.0
"""How long tasks may take to clean up when the driver is interrupted."""

_WAIT_SECONDS = 1.0
"""Seconds after which an interruption is noticed."""

_CONNECT_SECONDS = 10.0
_ADDRESS = re.compile(r"auto|local|(ray://)?(?P<host>[\w.-]+|\[[0-9A-Fa-f:]+\]):(?P<port>[0-9]{1,5})", re.ASCII)
_MISSING_MODULE = re.compile(r"No module named '([\w.]+)'")


def convert(
    planned: Conversion,
    *,
    address: str = "auto",
    force: bool = False,
    threads: int = DEFAULT_THREADS,
    memory: int | str = DEFAULT_MEMORY,
    scratch: str | os.PathLike[str] | None = None,
    progress: Progress = None,
) -> Summary:
    """Carry out a conversion on a Ray cluster. After an interruption the same call goes on, on any number of nodes.

    Args:
        planned: by `relayout.plan_conversion`. Paths must mean the same on every node.
        force: as for `relayout.convert`.
        address: of the cluster, "HOST:PORT" or "ray://HOST:PORT"; "auto": what RAY_ADDRESS says, or else that of this
            machine; "local": starts one. Not used if this process is connected to one.
        progress: as for `relayout.convert`, of units that are done.
        threads, memory, scratch: of each task.

    Raises:
        FormatError, PlanError, OSError: as `relayout.convert`, wherever it happened; or ray is not installed.
    """
    started = time.monotonic()
    jobs = unit_jobs(planned, force=force)
    with _cluster(address, threads) as cluster:
        what = f"converting {len(jobs)} units on {cluster.num_nodes} nodes"
        with reporting(progress, what, sum(job.source_nbytes for job in jobs)) as report:
            records = cluster.run(jobs, {"threads": threads, "memory": memory, "scratch": scratch}, report)
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

    def run(
        self, jobs: Sequence[UnitJob], options: Mapping[str, Any], report: Callable[[int], None]
    ) -> list[UnitRecord]:
        """Carry out all jobs, each in a task; `report` is called with the source bytes of those that are done.

        Raises:
            the error of the first task that failed for good.
        """
        task = self.ray.remote(max_retries=_MAX_RETRIES, retry_exceptions=[OSError], **self.needs)(run_job)
        left = [task.remote(job, **options) for job in jobs]
        records: list[UnitRecord] = []
        try:
            while left:
                ended, left = self.ray.wait(left, timeout=_WAIT_SECONDS)
                records += map(self._result, ended)
                report(sum(record.source_nbytes for record in records))
        except BaseException:
            self._cancel(left)
            raise
        return records

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


@contextmanager
def _cluster(address: str, threads: int) -> Iterator[_Cluster]:
    """The cluster that this process is connected to; or connect to one.

    Raises:
        PlanError: ray is not installed, or `address` is invalid.
        OSError: there is no cluster at this address.
    """
    try:
        import ray
    except ImportError:
        raise PlanError("ray is not installed: pip install 'ray>=2.49'", code="unsupported") from None
    is_ours = not ray.is_initialized()
    if is_ours:
        if address == "auto":
            address = os.environ.get("RAY_ADDRESS") or address
        _check_address(address)
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
    """Check that an address is one and accepts connections: ray itself would try for a quarter of an hour."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="SRC", help="a checkpoint folder, or its URL, that every node can read")
    parser.add_argument("-o", "--output", metavar="OUT", required=True, help="the folder or prefix to write")
    parser.add_argument("--tp", type=int, required=True, help="number of tensor-parallel ranks")
    parser.add_argument("--plan", help="as for `relayout convert`; 'vllm' is observed once, before the first task")
    parser.add_argument("--max-part-size", metavar="SIZE", default="4GB", help="sets the number of units")
    parser.add_argument("--address", default="auto", help="HOST:PORT, ray://HOST:PORT, auto (RAY_ADDRESS) or local")
    parser.add_argument("--threads", type=int, default=DEFAULT_THREADS, help="threads of each task")
    parser.add_argument("--memory", metavar="SIZE", default=DEFAULT_MEMORY, help="memory limit of these threads")
    parser.add_argument("--force", action="store_true", help="replace an older output that relayout wrote")
    given = parser.parse_args()
    try:
        planned = relayout.plan_conversion(
            given.source, given.output, tp=given.tp, plan=given.plan, max_part_nbytes=given.max_part_size
        )
        done = convert(
            planned,
            address=given.address,
            force=given.force,
            threads=given.threads,
            memory=given.memory,
            progress=True,
        )
    except (RelayoutError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    print(f"{done.output}: {done.num_ranks} ranks, {done.written_nbytes} bytes in {done.seconds:.1f} s")


if __name__ == "__main__":
    main()
