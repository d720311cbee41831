"""Python processes that need not start: each is a fork of one that has imported what it takes, and waits.

A child is as good as a process of its own: it has its own environment, folder, streams, session and signals, runs from
the beginning of `relayout`'s command or of a script, and ends as an interpreter does. It costs a tenth. What happens
while Python starts and imports is tested with processes that really start.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from support.patience import PATIENCE
from support.tools import PYTHONPATH

_OF_ONE_CHILD = ("AWS_", "FAULTS", "PYTEST_CURRENT_TEST")
"""The beginnings of variables that nothing looks at while it is imported."""
COMMANDS = (
    "relayout.cli.app,relayout.cli.render,relayout.conversion.run,relayout.commands.verify,relayout.commands.restore,"
    "relayout.publish.folder"
)
"""What the commands import."""
LOADER = f"{COMMANDS},torch,relayout.loader.api,relayout.loader.diagnose,relayout.loader.sources.reshard"
"""What a load and `relayout doctor` import."""
GROUP = (
    f"{LOADER},torch.distributed,relayout.loader.group.exchange,relayout.engines.global_tensor,"
    "torch.distributed.tensor,relayout.train.save,support.group_worker,support.replicas_worker,support.updates_worker,"
    "support.sglang_updates_worker,relayout.loader.sharded,support.sharded_worker,support.saving_worker,support.steps_worker,relayout.train.publisher,"
    "support.fake_vllm,support.conversions"
)
"""What the members of a process group import. Tests that have some are in one group of pytest-xdist, "group"."""
TRANSFORMERS = (
    "torch.distributed.tensor,torch.multiprocessing,transformers.distributed,relayout.train.transformers,"
    "transformers.models.llama.modeling_llama"
)
"""What tensor-parallel processes import. Tests that have some are in one group of pytest-xdist, "transformers"."""
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
"""The environment of such processes."""
_COMMAND = "from relayout.__main__ import main; main()"


def run(
    *words: object,
    script: str = _COMMAND,
    imports: str = COMMANDS,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    limits: Mapping[int, int] | None = None,
) -> subprocess.CompletedProcess[str]:
    """`relayout WORDS`, or a script with these words behind `sys.argv[0]`, to its end; as of `subprocess.run`.

    What it prints is in the result, but for what goes to a descriptor that is given. `limits` are those of
    `resource.setrlimit`.

    Raises:
        subprocess.TimeoutExpired: it did not end; it and its children of the same session are killed.
    """
    wanted = dict(os.environ if env is None else env)
    own = {name: wanted.pop(name) for name in [*wanted] if name.startswith(_OF_ONE_CHILD)}
    argv = [str(word) for word in words]
    request = {
        "script": script,
        "argv": argv,
        "cwd": str(cwd or Path.cwd()),
        "env": own,
        "limits": [*(limits or {}).items()],
    }
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(os.devnull, "rb") as nothing:
        streams = (
            nothing.fileno(),
            out.fileno() if stdout is None else stdout,
            err.fileno() if stderr is None else stderr,
        )
        code = _parent_of(frozenset(wanted.items()), imports).ask(request, streams)
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode(errors="surrogateescape"))
    return subprocess.CompletedProcess([script, *argv], code, *texts)


def heed_all_signals() -> None:
    """A process inherits what is ignored: Ctrl-C in a shell script's background job, SIGTERM below some runners."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@dataclass(frozen=True)
class _Parent:
    """The process that waits, as seen from here."""

    process: subprocess.Popen[bytes]
    connection: socket.socket

    def ask(self, request: Mapping[str, Any], streams: Sequence[int]) -> int:
        """Have it fork a child; returns its exit code, as of subprocess."""
        self.connection.settimeout(PATIENCE)
        blob = json.dumps(request).encode()
        socket.send_fds(self.connection, [len(blob).to_bytes(4, "little")], list(streams))
        self.connection.sendall(blob)
        pid = self._number()
        try:
            return self._number()
        except TimeoutError:
            os.killpg(pid, signal.SIGKILL)
            self._number()
            raise subprocess.TimeoutExpired(request["script"], PATIENCE) from None

    def end(self) -> None:
        """Let it end, and wait for it."""
        self.connection.close()
        self.process.wait()

    def _number(self) -> int:
        return int.from_bytes(_received(self.connection, 4), "little", signed=True)


@cache
def _parent_of(environment: frozenset[tuple[str, str]], imports: str) -> _Parent:
    """One for each environment; it ends when this process does."""
    ours, its = socket.socketpair()
    env = dict(environment)
    env["PYTHONPATH"] = os.pathsep.join([PYTHONPATH, *filter(None, [env.get("PYTHONPATH")])])
    with its:
        process = subprocess.Popen(
            [sys.executable, "-m", "support.prestarted", str(its.fileno()), imports],
            env=env,
            pass_fds=[its.fileno()],
            stdin=subprocess.DEVNULL,
            preexec_fn=heed_all_signals,
        )
    parent = _Parent(process, ours)
    atexit.register(parent.end)
    return parent


def _received(connection: socket.socket, nbytes: int) -> bytes:
    blob = b""
    while len(blob) < nbytes:
        more = connection.recv(nbytes - len(blob))
        if not more:
            raise EOFError
        blob += more
    return blob


# In the process that waits, and its children.


def _wait_for_requests(connection: socket.socket) -> dict[str, Any]:
    """Returns in each child, with its request; never in the process that waits."""
    while True:
        size, fds, *_ = socket.recv_fds(connection, 4, 3)
        if not size:
            os._exit(0)
        request: dict[str, Any] = json.loads(_received(connection, int.from_bytes(size, "little")))
        pid = os.fork()
        if not pid:
            connection.close()
            _become(request, fds)
            return request
        for fd in fds:
            os.close(fd)
        connection.sendall(pid.to_bytes(4, "little", signed=True))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        connection.sendall(code.to_bytes(4, "little", signed=True))


def _become(request: Mapping[str, Any], fds: Sequence[int]) -> None:
    os.setsid()
    os.chdir(request["cwd"])
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", errors="backslashreplace")  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    os.environ.update(request["env"])
    sys.path[0] = request["cwd"]
    if "LD_PRELOAD" in os.environ:
        ctypes.CDLL(None).begin_faults()
    for kind, limit in request["limits"]:
        resource.setrlimit(kind, (limit, limit))


def _main() -> None:
    for name in sys.argv[2].split(","):
        __import__(name)
    if "relayout.cli.app" in sys.modules:
        # Some modules are imported when a command runs (typer's, if there is pydantic, take a quarter of a second).
        with suppress(Exception, SystemExit), redirect_stderr(io.StringIO()):
            sys.modules["relayout.cli.app"].app(["convert", os.devnull, "--tp", "2"], standalone_mode=False)
    gc.collect()
    gc.freeze()  # At its end a child would look at each object, and have a copy of it: most of a second with torch.
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        request = _wait_for_requests(connection)
    sys.argv = ["relayout" if request["script"] == _COMMAND else "-c", *request["argv"]]
    exec(compile(request["script"], "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    _main()
