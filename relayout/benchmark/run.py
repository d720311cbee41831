"""Runs loaders in turns, each load in fresh processes: one per rank, all started together and monitored.

Such a process is `python -m` this module, with a job as its argument. It writes "ready", waits for a line, loads,
writes its measurements, waits for a line, and writes the digest of all bytes. All processes have finished loading
before any process computes a digest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import re
import select
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import IO, TYPE_CHECKING

from relayout.benchmark.loaders import Loader, LoadJob, plan_rank, shards_of
from relayout.benchmark.machine import NotPrepared, cpu_seconds, device_nbytes, num_cpus, prepare, total_nbytes
from relayout.benchmark.samples import drive_number, sampling
from relayout.benchmark.verdict import Measurement, RankLoads, Timing
from relayout.checkpoint.converted import read_manifest
from relayout.core.digests import xxh3_hex
from relayout.core.workers import PIPE, Child, start_child
from relayout.format.index import Manifest
from relayout.storage.stores import find_store
from relayout.storage.system import available_nbytes, peak_nbytes, proc_nbytes

if TYPE_CHECKING:
    import torch

# Settings in the caller's environment must not change the result.
_SETTINGS = re.compile("RUNAI_|FASTSAFETENSORS_|INSTANTTENSOR_|SAFETENSORS_|RELAYOUT_|OMP_|MKL_|GLOO_|NCCL_")
_TORCHRUN = re.compile("(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)$|MASTER_(ADDR|PORT)$")

_LEAST_RUNS = 2
"""Smallest number of runs of each loader: a single run has no spread."""
_PROCESS_NBYTES = 400 * 10**6
"""Memory of a process without tensors, in bytes: Python and torch."""

LogLine = Callable[[str], None]
Running = tuple[Child, IO[bytes]]
"""A process, and the file that contains its messages."""


class LoaderDied(Exception):
    """Raised if a loader did not finish."""


def load_together(
    jobs: Sequence[LoadJob], loader: Loader, ready: Callable[[], None], *, limit: float, drive: str | None = None
) -> Measurement:
    """Load the jobs' ranks at once, each in a fresh process.

    Args:
        jobs: one job for each rank.
        ready: called when all processes are ready, just before they load.
        limit: seconds that each step may take.
        drive: the number of the drive to sample during the load, see `samples.drive_number`; None: no drive.
    """
    kills = _oom_kills()
    with contextlib.ExitStack() as stack:
        running: list[Running] = []
        port = _free_port()
        for rank, job in enumerate(jobs):
            errors = stack.enter_context(tempfile.TemporaryFile())
            process = _start(job, _environment(loader, rank, len(jobs), port), errors)
            stack.callback(_end, process)
            running.append((process, errors))
        _lines(running, limit, kills)
        try:
            ready()
        except NotPrepared as error:
            raise LoaderDied(f"not run: {error}") from None
        busy, cpus = cpu_seconds()
        began = time.monotonic()
        with sampling(drive) as samples:
            _log_line(running)
            measured = [json.loads(line) for line in _lines(running, limit, kills)]
        elapsed, busy = time.monotonic() - began, cpu_seconds()[0] - busy
        _log_line(running)
        digests = tuple(json.loads(line) for line in _lines(running, limit, kills))
    own = sum(rank["cpu_seconds"] for rank in measured)
    on_host = jobs[0].device == "cpu"
    return Measurement(
        seconds=max(rank["ended"] for rank in measured) - min(rank["started"] for rank in measured),
        cpu_seconds=own,
        nbytes=sum(rank["nbytes"] for rank in measured),
        drive_nbytes=sum(rank["drive_nbytes"] for rank in measured),
        peak_minus_needed_nbytes=max(rank["peak_nbytes"] - rank["nbytes"] * on_host for rank in measured),
        other_load=min(1.0, max(0.0, busy - own) / max(1e-9, elapsed * cpus)),
        digests=digests,
        drive=tuple(samples),
    )


def _environment(loader: Loader, rank: int, count: int, port: int) -> Mapping[str, str]:
    kept = {key: value for key, value in os.environ.items() if not _SETTINGS.match(key) and not _TORCHRUN.match(key)}
    if count > 1:  # As in torchrun, except for the number of threads: torchrun sets it to 1 on any machine.
        kept |= {"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        kept |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
        kept |= {"OMP_NUM_THREADS": str(max(1, num_cpus() // count))}
    if loader.group:
        kept["GLOO_SOCKET_IFNAME"] = "lo"
    return {**kept, **loader.environment}


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _start(job: LoadJob, environment: Mapping[str, str], errors: IO[bytes]) -> Child:
    """Start a process that prepares to load; its messages are written to a file."""
    argument, streams = json.dumps(dataclasses.asdict(job)), {"stdin": PIPE, "stdout": PIPE, "stderr": errors}
    return start_child(
        "relayout.benchmark.run", argument, environment=environment, within=job.within, **streams, bufsize=0
    )


def _end(process: Child) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        assert stream
        stream.close()


def _log_line(running: Sequence[Running]) -> None:
    """Let each process continue with its next step."""
    for process, _ in running:
        assert process.stdin
        with contextlib.suppress(BrokenPipeError):  # If the process has ended, `_lines` reports that.
            process.stdin.write(b"go\n")


def _lines(running: Sequence[Running], limit: float, kills: int) -> list[bytes]:
    """Wait for the next line of each process, and return the lines."""
    deadline = time.monotonic() + limit
    lines: dict[int, bytes] = {}
    waiting: dict[IO[bytes] | None, int] = {process.stdout: rank for rank, (process, _) in enumerate(running)}
    while waiting:
        ready, _, _ = select.select(
            [stream for stream in waiting if stream], [], [], max(0, deadline - time.monotonic())
        )
        if not ready:
            raise LoaderDied(f"no answer after {limit:.0f} s")
        for stream in ready:
            rank = waiting.pop(stream)
            lines[rank] = stream.readline()
            if not lines[rank]:
                raise _death(*running[rank], kills)
    return [lines[rank] for rank in range(len(running))]


def _death(process: Child, errors: IO[bytes], kills: int) -> LoaderDied:
    status = process.wait()
    errors.seek(0)
    messages = errors.read().decode(errors="replace").strip().splitlines() or [""]
    if status < 0:
        return LoaderDied(f"killed by signal {-status}" + (" (out of memory)" if _oom_kills() > kills else ""))
    return LoaderDied(f"exit status {status}: {messages[-1][:200]}")


def _oom_kills() -> int:
    """Return the number of processes that the kernel has killed for lack of memory since it started."""
    match = re.search(r"^oom_kill (\d+)", Path("/proc/vmstat").read_text(), re.MULTILINE)
    return int(match[1]) if match else 0


@dataclass(frozen=True, slots=True)
class Folders:
    """The checkpoint to measure, plain and converted. At least one of the two exists."""

    source: Path | None
    converted: Path | None
    tp: int

    @property
    def source_files(self) -> list[Path]:
        """Weight files of the plain folder."""
        return [] if self.source is None else list(map(Path, shards_of(str(self.source))))

    @property
    def manifest(self) -> Manifest | None:
        """The manifest of the converted folder, or None."""
        return None if self.converted is None else read_manifest(find_store(self.converted))

    def rank_files(self, ranks: Sequence[int]) -> list[Path]:
        """Return the files of these ranks in the converted folder; all files if it has another degree."""
        manifest = self.manifest
        if self.converted is None or manifest is None:
            return []
        holders = ranks if manifest.num_ranks == self.tp else manifest.holders
        indices = dict.fromkeys(index for holder in holders for index in manifest.holders[holder].files)
        return [self.converted / manifest.files[index].name for index in indices]

    @property
    def every_file(self) -> list[Path]:
        """All weight files of both folders."""
        return [*self.source_files, *self.rank_files(range(self.tp))]


@dataclass(frozen=True, slots=True)
class RankGroup:
    """A set of ranks that several loaders load at once, from one state of the page cache."""

    folders: Folders
    loaders: dict[str, Loader]
    ranks: Sequence[int]
    state: str
    expected: Sequence[str] | None
    """Digest of each rank's tensors in the converted folder's tables. None: without such a folder."""
    registry: str = "relayout.benchmark.loaders"
    """Name of the module with the loaders in its `LOADERS`."""
    devices: Sequence[str] = ("cpu",)
    """Devices that ranks are loaded to, in rotation."""
    limit: float = 900.0
    """Longest time of one load, in seconds."""
    touched_nbytes: int = 0
    """Bytes of memory to touch before each load, if that is more than twice the size of the tensors."""
    idle_seconds: float = 0.0
    """Idle seconds before each load, in which the host of a virtual machine may reclaim free memory."""

    @property
    def title(self) -> str:
        tp = self.folders.tp
        return "whole model" if tp == 1 else f"all {tp} ranks at once" if len(self.ranks) > 1 else f"one rank of {tp}"

    def _files(self, loader: Loader) -> list[Path]:
        return self.folders.rank_files(self.ranks) if loader.reads_converted else self.folders.source_files

    def too_large(self) -> str | None:
        """Return the reason to skip the loads if they need more memory than available, or None."""
        available, tensors = available_nbytes(), self._tensors_nbytes * 11 // 10
        needed = _PROCESS_NBYTES * len(self.ranks)
        if self.devices[0] == "cpu":
            needed += tensors
        elif (of_device := self._too_large_for_device(tensors)) is not None:
            return of_device
        if self.state == "warm":
            needed += max(total_nbytes(self._files(loader)) for loader in self.loaders.values())
        if needed <= available:
            return None
        cached = " with the files in the page cache" if self.state == "warm" else ""
        return (
            f"{self.title}, {self.state}: needs {needed / 1e9:.1f} GB of memory{cached},"
            f" {available / 1e9:.1f} GB are available"
        )

    def _too_large_for_device(self, tensors: int) -> str | None:
        num_ranks = -(-len(self.ranks) // len(self.devices))
        needed, size = tensors * num_ranks // len(self.ranks), device_nbytes(self.devices[0])
        if needed <= size:
            return None
        what = f"needs {needed / 1e9:.1f} GB of the memory of {self.devices[0]}, which has {size / 1e9:.1f} GB"
        return f"{self.title}, {self.state}: {what}"

    @property
    def _tensors_nbytes(self) -> int:
        """Approximate bytes of the tensors of all these ranks."""
        folders = self.folders
        if folders.source is None:
            return total_nbytes(folders.rank_files(self.ranks))
        return -(-total_nbytes(folders.source_files) * len(self.ranks) // folders.tp)

    @property
    def names(self) -> list[str]:
        """Names of the loaders that can load these ranks."""
        return [name for name, loader in self.loaders.items() if len(self.ranks) > 1 or not loader.group]

    def measure(
        self,
        runs: int,
        log_line: LogLine,
        found: Callable[[RankLoads], None],
        *,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Run each loader `runs` times, in turns; each turn begins with another loader.

        Args:
            tell: called with a line of text after each load.
            found: called with the results, even if an exception ends the measurement.
            is_over: returns True if optional turns are to be left out from now on.
        """
        names = self.names
        measured: dict[str, list[Measurement]] = {name: [] for name in names}
        failures: dict[str, str] = {}
        try:
            for run in range(runs):
                if run >= _LEAST_RUNS and is_over():
                    break
                turn = run % len(names)
                for name in names[turn:] + names[:turn]:
                    if name not in failures:
                        log_line(self._tried(name, measured, failures))
        finally:
            found(self._loads(measured, failures))

    def _tried(self, name: str, measured: dict[str, list[Measurement]], failures: dict[str, str]) -> str:
        """Load once, and return a line about the result."""
        try:
            measured[name].append(self._load(name))
        except LoaderDied as died:
            failures[name] = str(died)
        said = failures.get(name) or f"{measured[name][-1].seconds:.2f} s"
        return f"{self.title}, {self.state}: {self.loaders[name].title}: {said}"

    def _loads(self, measured: Mapping[str, list[Measurement]], failures: Mapping[str, str]) -> RankLoads:
        return RankLoads(
            title=self.title,
            num_ranks=len(self.ranks),
            state=self.state,
            timings=tuple(
                Timing(name, self.loaders[name].title, self.loaders[name].family, tuple(runs), failures.get(name))
                for name, runs in measured.items()
            ),
            expected=None if self.expected is None else tuple(self.expected[rank] for rank in self.ranks),
        )

    def _load(self, name: str) -> Measurement:
        loader, folders, count = self.loaders[name], self.folders, len(self.ranks)
        memory = available_nbytes() // 2 // count
        source, converted = (str(folder or "") for folder in (folders.source, folders.converted))
        jobs = [
            LoadJob(self.registry, name, source, converted, folders.tp, rank, count, memory, device)
            for rank, device in zip(self.ranks, cycle(self.devices), strict=False)
        ]

        def ready() -> None:
            needed = 0 if self.idle_seconds else max(self.touched_nbytes, 2 * self._tensors_nbytes)
            prepare(self._files(loader), folders.every_file, cold=self.state == "cold", needed_nbytes=needed)
            time.sleep(self.idle_seconds)

        files = self._files(loader)
        drive = drive_number(files[0]) if files and self.state == "cold" else None
        return load_together(jobs, loader, ready, limit=self.limit, drive=drive)


def serve(job: LoadJob, loader: Loader) -> None:
    """Serve the protocol of this module on stdin and stdout, then end the process."""
    with contextlib.suppress(OSError):  # If memory runs out, the kernel must kill this process and no other.
        Path("/proc/self/oom_score_adj").write_text("1000")
    # Text that libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for module in ("torch", *loader.modules):
        importlib.import_module(module)
    import torch

    if job.device.startswith("cuda"):
        torch.cuda.set_device(job.device)
        torch.empty(1, device=job.device)  # Creates the device's context before timing starts.
    if loader.group:
        torch.distributed.init_process_group("gloo")
    if not loader.reads_converted:
        plan_rank(job)
    answers.write("ready\n")
    _wait()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # Resets the peak of resident memory.
    resident, drive, cpu = proc_nbytes("self/status", "VmRSS") or 0, _drive_nbytes(), time.process_time()
    started = time.monotonic()
    tensors = loader.load(job)
    if job.device.startswith("cuda"):
        torch.cuda.synchronize()
    ended = time.monotonic()
    measured = {
        "started": started,
        "ended": ended,
        "cpu_seconds": time.process_time() - cpu,
        "peak_nbytes": peak_nbytes() - resident,
        "drive_nbytes": _drive_nbytes() - drive,
        "nbytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
    }
    answers.write(json.dumps(measured) + "\n")
    _wait()
    answers.write(json.dumps(digest_of_tensors(tensors)) + "\n")
    answers.flush()
    os._exit(0)  # Cleanup by libraries is not measured, and must not fail the run.


def digest_of(rows: Iterable[tuple[str, tuple[int, ...], str]]) -> str:
    """Return one digest of a rank's tensors, given as (name, shape, digest of the bytes) in any order."""
    return xxh3_hex(json.dumps(sorted((name, list(shape), digest) for name, shape, digest in rows)).encode())


def digest_of_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return `digest_of` for tensors in memory."""
    return digest_of((name, tuple(tensor.shape), _digest(name, tensor)) for name, tensor in tensors.items())


def _digest(name: str, tensor: torch.Tensor) -> str:
    import torch

    if not tensor.is_contiguous():
        raise SystemExit(f"{name} was loaded as a view that is not contiguous")
    return xxh3_hex(tensor.flatten().view(torch.uint8).cpu().numpy().data)


def _wait() -> None:
    if not sys.stdin.readline():
        raise SystemExit("the benchmark has ended")


def _drive_nbytes() -> int:
    """Return the bytes that drives have read for this process; 0 if the kernel does not count them."""
    with contextlib.suppress(OSError):
        match = re.search(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)
        return int(match[1]) if match else 0
    return 0


def main() -> None:
    """Run the job in the command line argument."""
    job = LoadJob(**json.loads(sys.argv[1]))
    serve(job, importlib.import_module(job.registry).LOADERS[job.loader])


if __name__ == "__main__":
    main()
