"""A real registry on loopback, and another client: Debian's `docker-registry` and `skopeo`, where installed."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_SECONDS = 60.0
_CONFIGURATION = """\
version: 0.1
log: {{level: error, accesslog: {{disabled: true}}}}
storage: {{filesystem: {{rootdirectory: {root}}}, delete: {{enabled: true}}}}
http: {{addr: "127.0.0.1:{port}", secret: of-tests-only}}
"""


@dataclass(frozen=True)
class DockerRegistry:
    """A registry that runs, the reference implementation (distribution/distribution)."""

    host: str
    folder: Path
    process: subprocess.Popen[bytes]

    def url(self, repository: str, tag: str) -> str:
        return f"oci+http://{self.host}/{repository}:{tag}"

    def stored_nbytes(self) -> int:
        """Bytes of all blobs that it has."""
        return sum(path.stat().st_size for path in self.folder.glob("**/blobs/sha256/*/*/data"))


def absence(*programs: str) -> str | None:
    """Why tests with these programs cannot run; None: they can."""
    missing = [name for name in programs if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


@contextmanager
def running(folder: Path) -> Iterator[DockerRegistry]:
    """A registry that keeps its blobs in a folder, until the end of the block."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folder.mkdir()
    configuration = folder / "config.yml"
    configuration.write_text(_CONFIGURATION.format(root=folder / "data", port=port))
    with (folder / "log").open("wb") as log:
        command = ["docker-registry", "serve", str(configuration)]
        environment = os.environ | {"GOMEMLIMIT": "512MiB", "OTEL_TRACES_EXPORTER": "none"}
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        end = time.monotonic() + _SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert process.poll() is None, (folder / "log").read_text()[-2000:]
                assert time.monotonic() < end, "the registry does not answer"
                time.sleep(0.05)
        yield DockerRegistry(f"127.0.0.1:{port}", folder, process)
    finally:
        process.terminate()
        process.wait(_SECONDS)


def skopeo(*arguments: str) -> str:
    """What skopeo prints."""
    done = subprocess.run(["skopeo", *arguments], capture_output=True, text=True, timeout=_SECONDS)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
