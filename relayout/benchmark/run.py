"""Runs a loader once: a fresh process for each rank, all started together and watched.

Such a process is `python -m` this module, with a job as its argument. It says "ready", waits for a line, loads, answers
with what it measured, waits for a line, and answers with the digest of all bytes. No process computes a digest while
another still loads.
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
from pathlib import Path
from typing import IO, TYPE_CHECKING

from relayout.benchmark.loaders import Loader, LoadJob, plan_rank
from relayout.benchmark.machine import NotPrepared, cpu_seconds, num_cpus
from relayout.core.digests import digest_hex
from relayout.core.workers import PIPE, Child, start_child
from relayout.storage.system import peak_nbytes, proc_nbytes

if TYPE_CHECKING:
    import torch

# Settings in the environment must not change the result.
_SETTINGS = re.compile("RUNAI_|FASTSAFETENSORS_|INSTANTTENSOR_|SAFETENSORS_|RELAYOUT_|OMP_|MKL_|GLOO_|NCCL_")
_TORCHRUN = re.compile("(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)$|MASTER_(ADDR|PORT)$")

Running = tuple[Child, IO[bytes]]
"""A process, and the file with its messages."""


class Died(Exception):
    """A loader did not finish."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One load of some ranks at once. Peaks are of resident host memory, mapped pages of files included."""

    seconds: float
    """Seconds from the first start to the last end."""
    cpu_seconds: float
    """Processor time of all ranks."""
    nbytes: int
    """Bytes of all ranks' tensors."""
    drive_nbytes: int
    """Bytes that drives read for these processes."""
    peak_minus_needed_nbytes: int
    """Peak memory of a rank minus the bytes of its tensors; the largest of all ranks. With tensors on a GPU, all host
    memory counts."""
    other_load: float
    """Share of the machine's processors that other processes used meanwhile."""
    digests: tuple[str, ...]
    """The digest of each rank's tensors, see `digest_of`."""


def load_together(jobs: Sequence[LoadJob], loader: Loader, prepare: Callable[[], None], *, limit: float) -> Measured:
    """Load the jobs' ranks at once, each in a fresh process.

    Args:
        jobs: one for each rank.
        prepare: called when all processes are ready, just before they load.
        limit: seconds that a step may take.

    Raises:
        Died: a process died, had no answer after `limit` seconds, or `prepare` raised NotPrepared.
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
            prepare()
        except NotPrepared as error:
            raise Died(f"not run: {error}") from None
        busy, cpus = cpu_seconds()
        began = time.monotonic()
        _tell(running)
        measured = [json.loads(line) for line in _lines(running, limit, kills)]
        elapsed, busy = time.monotonic() - began, cpu_seconds()[0] - busy
        _tell(running)
        digests = tuple(json.loads(line) for line in _lines(running, limit, kills))
    own = sum(rank["cpu_seconds"] for rank in measured)
    on_host = jobs[0].device == "cpu"
    return Measured(
        seconds=max(rank["ended"] for rank in measured) - min(rank["started"] for rank in measured),
        cpu_seconds=own,
        nbytes=sum(rank["nbytes"] for rank in measured),
        drive_nbytes=sum(rank["drive_nbytes"] for rank in measured),
        peak_minus_needed_nbytes=max(rank["peak_nbytes"] - rank["nbytes"] * on_host for rank in measured),
        other_load=min(1.0, max(0.0, busy - own) / max(1e-9, elapsed * cpus)),
        digests=digests,
    )


def _environment(loader: Loader, rank: int, count: int, port: int) -> Mapping[str, str]:
    kept = {key: value for key, value in os.environ.items() if not _SETTINGS.match(key) and not _TORCHRUN.match(key)}
    if count > 1:  # As torchrun does, except for the threads, of which it allows one on any number of processors.
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
    """A process that gets ready to load; its messages go to a file."""
    argument = json.dumps(dataclasses.asdict(job))
    return start_child(
        "relayout.benchmark.run", argument, environment=environment, stdin=PIPE, stdout=PIPE, stderr=errors, bufsize=0
    )


def _end(process: Child) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        assert stream
        stream.close()


def _tell(running: Sequence[Running]) -> None:
    """Let each process take its next step."""
    for process, _ in running:
        assert process.stdin
        with contextlib.suppress(BrokenPipeError):  # If it has ended, waiting for its answer reports that.
            process.stdin.write(b"go\n")


def _lines(running: Sequence[Running], limit: float, kills: int) -> list[bytes]:
    """Wait for the next line of each process."""
    deadline = time.monotonic() + limit
    lines: dict[int, bytes] = {}
    waiting: dict[IO[bytes] | None, int] = {process.stdout: rank for rank, (process, _) in enumerate(running)}
    while waiting:
        ready, _, _ = select.select(
            [stream for stream in waiting if stream], [], [], max(0, deadline - time.monotonic())
        )
        if not ready:
            raise Died(f"no answer after {limit:.0f} s")
        for stream in ready:
            rank = waiting.pop(stream)
            lines[rank] = stream.readline()
            if not lines[rank]:
                raise _death(*running[rank], kills)
    return [lines[rank] for rank in range(len(running))]


def _death(process: Child, errors: IO[bytes], kills: int) -> Died:
    status = process.wait()
    errors.seek(0)
    messages = errors.read().decode(errors="replace").strip().splitlines() or [""]
    if status < 0:
        return Died(f"killed by signal {-status}" + (" (out of memory)" if _oom_kills() > kills else ""))
    return Died(f"exit status {status}: {messages[-1][:200]}")


def _oom_kills() -> int:
    """How many processes the kernel has killed for memory since it started."""
    match = re.search(r"^oom_kill (\d+)", Path("/proc/vmstat").read_text(), re.MULTILINE)
    return int(match[1]) if match else 0


def serve(job: LoadJob, loader: Loader) -> None:
    """Speak the protocol on stdin and stdout, and end the process."""
    with contextlib.suppress(OSError):  # If memory runs out, this process must end, and no other.
        Path("/proc/self/oom_score_adj").write_text("1000")
    # What libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for module in ("torch", *loader.modules):
        importlib.import_module(module)
    import torch

    if job.device.startswith("cuda"):
        torch.cuda.set_device(job.device)
        torch.empty(1, device=job.device)  # The device's context exists before the clock starts.
    if loader.group:
        torch.distributed.init_process_group("gloo")
    if not loader.reads_converted:
        plan_rank(job)
    answers.write("ready\n")
    _wait()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # The peak of resident memory is counted from here.
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
    os._exit(0)  # What a library does at its end is not measured, and must not fail the run.


def digest_of(rows: Iterable[tuple[str, tuple[int, ...], str]]) -> str:
    """One digest of a rank's tensors, given as (name, shape, digest of the bytes) in any order."""
    return digest_hex(json.dumps(sorted((name, list(shape), digest) for name, shape, digest in rows)).encode())


def digest_of_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """`digest_of` of tensors in memory."""
    return digest_of((name, tuple(tensor.shape), _digest(name, tensor)) for name, tensor in tensors.items())


def _digest(name: str, tensor: torch.Tensor) -> str:
    import torch

    if not tensor.is_contiguous():
        raise SystemExit(f"{name} was loaded as a view that is not contiguous")
    return digest_hex(tensor.flatten().view(torch.uint8).cpu().numpy().data)


def _wait() -> None:
    if not sys.stdin.readline():
        raise SystemExit("the benchmark has ended")


def _drive_nbytes() -> int:
    """Bytes that drives have read for this process; 0 if the kernel does not count them."""
    with contextlib.suppress(OSError):
        match = re.search(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)
        return int(match[1]) if match else 0
    return 0


def main() -> None:
    """Run the job in the arguments."""
    job = LoadJob(**json.loads(sys.argv[1]))
    serve(job, importlib.import_module(job.registry).LOADERS[job.loader])


if __name__ == "__main__":
    main()
