"""A server and clients on this machine, each in a network of its own, joined by a switch.

Each host has a namespace for its network and one for its mounts. Its link is a pair of virtual interfaces, whose ends
let bytes pass at the link's rate (token buckets, `tc tbf`). All of it ends with the processes that hold the namespaces.
Takes a superuser of Linux.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "eth0"
"""What each host calls its own end of its link."""
_BURST_NBYTES = 256 * 1024
_QUEUE = "100ms"
"""How long a packet may wait for a link that is full; it is dropped if it would wait for longer."""
_SECONDS = 600
"""A command on a host may take so long."""
_HOLD = ["unshare", "--net", "--mount", "--propagation", "private", "cat"]
"""A process that holds namespaces until the end of its input, which comes with the end of this process."""
_BOUND = ["setpriv", "--pdeathsig", "KILL", "prlimit", f"--data={4 * 2**30}"]
"""Ends a program with this process, and limits its memory."""


@dataclass(frozen=True, slots=True)
class Host:
    """A host of the network."""

    address: str
    holder: subprocess.Popen[bytes]

    @property
    def within(self) -> tuple[str, ...]:
        """The words before a command that runs on this host. The command keeps the process id."""
        return ("nsenter", f"--target={self.holder.pid}", "--net", "--mount")

    @property
    def root(self) -> Path:
        """The files as this host sees them."""
        return Path(f"/proc/{self.holder.pid}/root")

    def run(self, *words: object) -> str:
        """Run a command on this host, and return what it says.

        Raises:
            RuntimeError: it failed.
        """
        command = [*self.within, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS)
        if done.returncode:
            raise RuntimeError(f"{words[0]}: exit status {done.returncode}: {(done.stdout + done.stderr)[-500:]}")
        return done.stdout

    def received_nbytes(self) -> int:
        """Bytes that have come over its link, with the headers of the protocols."""
        return self._counters()[0]

    def sent_nbytes(self) -> int:
        """Bytes that it has sent over its link, with the headers of the protocols."""
        return self._counters()[8]

    def _counters(self) -> list[int]:
        lines = Path(f"/proc/{self.holder.pid}/net/dev").read_text()
        match = re.search(rf"^ *{INTERFACE}:(.*)", lines, re.MULTILINE)
        assert match, lines
        return list(map(int, match[1].split()))

    def cpu_seconds(self) -> dict[int, float]:
        """Processor time that its processes have used, by process id."""
        found, own = {}, _network_of(self.holder.pid)
        for folder in Path("/proc").glob("[0-9]*"):
            pid = int(folder.name)
            if (seconds := _cpu_seconds(pid)) is not None and _network_of(pid) == own:
                found[pid] = seconds
        return found


def _network_of(pid: int) -> str | None:
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:  # It has ended.
        return None


def _cpu_seconds(pid: int) -> float | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def absence() -> str | None:
    """Why there can be no such network here; None if there can."""
    if missing := [
        name for name in ("unshare", "nsenter", "setpriv", "prlimit", "ip", "tc") if shutil.which(name) is None
    ]:
        return f"not installed: {', '.join(missing)}"
    try:
        with network([None, 1e9]):
            return None
    except (RuntimeError, OSError) as error:
        return f"no network namespaces, or no token buckets: {error}"


@contextmanager
def network(rates: Sequence[float | None]) -> Iterator[list[Host]]:
    """Hosts that reach each other, one for each rate: bytes per second of its link, each way; None: no limit."""
    with ExitStack() as stack:
        switch, *hosts = (_host(stack, f"10.77.0.{number}") for number in range(len(rates) + 1))
        switch.run("ip", "link", "add", "bridge", "type", "bridge")
        switch.run("ip", "link", "set", "bridge", "up")
        for number, (host, rate) in enumerate(zip(hosts, rates, strict=True), 1):
            _connect(switch, host, f"port{number}", rate)
        yield hosts


@contextmanager
def started(
    host: Host, words: Sequence[object], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A program that runs on a host, with limited memory, at most as long as this process; it writes to a log."""
    command = [*_BOUND, *host.within, *map(str, words)]
    with (
        log.open("ab") as file,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def _host(stack: ExitStack, address: str) -> Host:
    pipe = subprocess.PIPE
    # A signal to this process's group is not for them: they are needed to unmount.
    holder = subprocess.Popen(_HOLD, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True)
    stack.enter_context(holder)
    stack.callback(holder.kill)
    assert holder.stdin
    assert holder.stdout
    assert holder.stderr
    with suppress(BrokenPipeError):
        holder.stdin.write(b"?")
    if not holder.stdout.read(1):  # The namespaces are there when it answers.
        raise RuntimeError(holder.stderr.read().decode().strip())
    return Host(address, holder)


def _connect(switch: Host, host: Host, port: str, rate: float | None) -> None:
    end = ("type", "veth", "peer", "name", INTERFACE, "netns", host.holder.pid)
    switch.run("ip", "link", "add", port, *end)
    switch.run("ip", "link", "set", port, "master", "bridge", "up")
    host.run("ip", "address", "add", f"{host.address}/24", "dev", INTERFACE)
    for interface in ("lo", INTERFACE):
        host.run("ip", "link", "set", interface, "up")
    if rate is not None:
        for one, interface in ((switch, port), (host, INTERFACE)):
            bucket = ("tbf", "rate", f"{8 * rate:.0f}bit", "burst", _BURST_NBYTES, "latency", _QUEUE)
            one.run("tc", "qdisc", "add", "dev", interface, "root", *bucket)
