"""Runs a peer once: a process for each rank, started together, watched, and told apart by how it ended."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from bench.drive import cached_share, forget, meminfo, remember, total_nbytes, touch_memory
from bench.job import Job, Peer

# Settings of the machine's owner must not decide how a peer does.
_PEERS_OWN = re.compile(
    "RUNAI_|FASTSAFETENSORS_|INSTANTTENSOR_|FLASHPACK_|SAFETENSORS_|RELAYOUT_|OMP_|MKL_|GLOO_|NCCL_"
)
_TORCHRUN = re.compile("(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)$|MASTER_(ADDR|PORT)$")


@dataclass(frozen=True)
class Folders:
    """What there is to load."""

    source: Path
    converted: Path
    """`source`, converted for the degree that is measured."""
    packed: Path
    """The folder of FlashPack's copy of `source`; empty where that takes no part."""

    @property
    def every(self) -> list[Path]:
        """All of them."""
        return [self.source, self.converted, self.packed]

    def read_by(self, peer: Peer) -> Path:
        """The one that a peer reads."""
        return {"relayout": self.converted, "plain preadv": self.converted, "FlashPack": self.packed}.get(
            peer.family, self.source
        )


Running = tuple[subprocess.Popen[bytes], IO[bytes]]
"""A process, and the file that its messages go to."""


class Died(Exception):
    """A peer did not come through."""

    def __init__(self, how: str, of_memory: bool = False) -> None:
        super().__init__(how)
        self.of_memory = of_memory


def run_peer(
    name: str, peer: Peer, folders: Folders, tp: int, ranks: list[int], *, cold: bool, limit: float, verify: bool = True
) -> dict[str, float]:
    """Load the ranks at once; seconds from the first start to the last end, and what it took.

    Peaks are of resident memory of the host, mapped pages of files included: for a GPU none of it is needed.

    Raises:
        Died: a process died, had no answer after `limit` seconds, or a byte was wrong; or the page cache would not be
            as it should.
    """
    jobs = [_job(name, peer, folders, tp, rank, number, len(ranks), verify) for number, rank in enumerate(ranks)]
    measured = run_jobs(jobs, peer, limit, partial(_prepare, folders, peer, cold))
    nbytes = sum(one["nbytes"] for one in measured)
    return {
        "seconds": max(one["ended"] for one in measured) - min(one["started"] for one in measured),
        "cpu_seconds": sum(one["cpu_seconds"] for one in measured),
        "peak_over_needed": max(one["peak_nbytes"] / one["nbytes"] for one in measured),
        "peak_minus_needed_nbytes": max(
            one["peak_nbytes"] - (one["nbytes"] if peer.device == "cpu" else 0) for one in measured
        ),
        "drive_over_needed": sum(one["drive_nbytes"] for one in measured) / nbytes,
        "nbytes": nbytes,
    }


def run_jobs(
    jobs: list[Job],
    peer: Peer,
    limit: float,
    prepare: Callable[[], object],
    loaded: Callable[[], object] = lambda: None,
) -> list[dict[str, float]]:
    """Load at once, each job in a process of its own; what each of them measured.

    Args:
        prepare: called when all are ready.
        loaded: called when all have loaded, before their bytes are verified.

    Raises:
        Died: a process died, had no answer after `limit` seconds, or a byte was wrong.
    """
    kills = _oom_kills()
    with contextlib.ExitStack() as stack:
        running: list[Running] = []
        for number, job in enumerate(jobs):
            errors = stack.enter_context(tempfile.TemporaryFile())
            process = _start(job, _environment(peer, number, len(jobs)), errors)
            stack.callback(_end, process)
            running.append((process, errors))
        _lines(running, limit, kills)
        prepare()
        _tell(running, b"go\n")
        measured = [json.loads(line) for line in _lines(running, limit, kills)]
        loaded()
        # Nobody verifies while another still loads.
        _tell(running, b"verify\n")
        if not all(json.loads(line) for line in _lines(running, limit, kills)):
            raise Died("loaded wrong bytes")
    return measured


def _prepare(folders: Folders, peer: Peer, cold: bool) -> None:
    """Make the page cache cold or warm, and see that it is."""
    mine = [folders.read_by(peer)]
    for _ in range(3):  # Who else needs memory at this moment takes pages from the cache.
        if cold:
            forget(folders.every)
        else:
            remember(mine)
        # As much as a peer may take that keeps all of the model, a copy of it, and pages of the cache.
        touch_memory(3 * total_nbytes(folders.source))
        share = cached_share(folders.every if cold else mine)
        if share < 0.001 if cold else share > 0.99:
            return
    raise Died(f"not run: {100 * share:.1f} % of its files in the page cache")


def _job(name: str, peer: Peer, folders: Folders, tp: int, rank: int, number: int, num: int, verify: bool) -> Job:
    return Job(
        peer=name,
        source=str(folders.source),
        converted=str(folders.converted),
        packed=str(folders.packed / "model.flashpack"),
        tp=tp,
        rank=rank,
        num_processes=num,
        memory_nbytes=meminfo("MemAvailable") // 2 // num,
        device=peer.device if peer.device == "cpu" else f"cuda:{number % _num_gpus()}",
        verify=verify,
    )


def _num_gpus() -> int:
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return len(visible.split(",")) if visible else len(listed.stdout.splitlines())


def _environment(peer: Peer, number: int, num: int) -> dict[str, str]:
    environment = {
        key: value for key, value in os.environ.items() if not _PEERS_OWN.match(key) and not _TORCHRUN.match(key)
    }
    if num > 1:  # As torchrun does, but for the threads, which it sets to 1 at any number of cores.
        environment |= {"RANK": str(number), "WORLD_SIZE": str(num), "MASTER_ADDR": "127.0.0.1"}
        environment |= {"LOCAL_RANK": str(number), "LOCAL_WORLD_SIZE": str(num), "MASTER_PORT": str(_port(number))}
        environment |= {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // num))}
    if peer.group:
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    return environment | peer.environment


_ports: list[int] = [0]


def _port(number: int) -> int:
    """A free port, one for all processes of a run."""
    if number == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            _ports[0] = free.getsockname()[1]
    return _ports[0]


def _start(job: Job, environment: dict[str, str], errors: IO[bytes]) -> subprocess.Popen[bytes]:
    """A process that gets ready to load; its messages go to a file."""
    command = [sys.executable, "-m", "bench.peer", json.dumps(dataclasses.asdict(job))]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, bufsize=0, env=environment
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        assert stream
        stream.close()


def _tell(running: list[Running], line: bytes) -> None:
    for process, _ in running:
        assert process.stdin
        with contextlib.suppress(BrokenPipeError):  # That it is gone shows when its answer is waited for.
            process.stdin.write(line)


def _lines(running: list[Running], limit: float, kills: int) -> list[bytes]:
    """The next line of each process, in whatever order they come.

    Raises:
        Died: one ended instead, or none came in time.
    """
    deadline = time.monotonic() + limit
    lines: dict[int, bytes] = {}
    waiting = {process.stdout: number for number, (process, _) in enumerate(running)}
    while waiting:
        ready, _, _ = select.select(list(waiting), [], [], max(0, deadline - time.monotonic()))
        if not ready:
            raise Died(f"no answer after {limit:.0f} s")
        for stream in ready:
            assert stream
            number = waiting.pop(stream)
            lines[number] = stream.readline()
            if not lines[number]:
                raise _death(*running[number], kills)
    return [lines[number] for number in range(len(running))]


def _death(process: subprocess.Popen[bytes], errors: IO[bytes], kills: int) -> Died:
    status = process.wait()
    errors.seek(0)
    said = errors.read().decode(errors="replace").strip().splitlines()
    last = said[-1][:200] if said else ""
    if status < 0:
        of_memory = _oom_kills() > kills
        return Died(f"killed by signal {-status}" + (" (out of memory)" if of_memory else ""), of_memory)
    return Died(f"exit status {status}: {last}", re.search("memory|bad_alloc", last, re.IGNORECASE) is not None)


def _oom_kills() -> int:
    """How many processes the kernel has killed for memory since it started."""
    found = re.search(r"^oom_kill (\d+)", Path("/proc/vmstat").read_text(), re.MULTILINE)
    return int(found[1]) if found else 0
