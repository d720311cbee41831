"""Azurite, Microsoft's emulator of Azure Blob Storage, on loopback: npm package `azurite`."""

from __future__ import annotations

import base64
import hashlib
import hmac
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path

from support.seaweedfs import free_ports, wait_for

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Known to everybody: those of every emulator."""


@dataclass(frozen=True)
class Azurite:
    """A server that runs."""

    url: str

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which any client of Azure finds the server."""
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
            "AZURE_STORAGE_ENDPOINT": f"{self.url}/{ACCOUNT}",
        }

    def make_container(self, name: str) -> None:
        """Make a container."""
        own = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
        signed = "\n".join(["PUT", *[""] * 11, *(f"{key}:{own[key]}" for key in sorted(own))])
        signed += f"\n/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
        digest = base64.b64encode(hmac.digest(base64.b64decode(KEY), signed.encode(), hashlib.sha256)).decode()
        headers = own | {"Authorization": f"SharedKey {ACCOUNT}:{digest}", "Content-Length": "0"}
        url = f"{self.url}/{ACCOUNT}/{name}?restype=container"
        request = urllib.request.Request(url, method="PUT", headers=headers)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30):
            pass


def absence() -> str | None:
    """Why it cannot be started; None if it can."""
    return None if shutil.which("azurite-blob") else "azurite is not installed: npm install azurite"


@contextmanager
def running(folder: Path) -> Iterator[Azurite]:
    """A server with its data in a folder, killed at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    [port] = free_ports(1)
    command = ["azurite-blob", "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder / "data")]
    command += ["--skipApiVersionCheck", "--silent", "--disableTelemetry"]
    with ExitStack() as stack:
        log = stack.enter_context(open(folder / "log", "wb"))
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        stack.callback(process.wait)
        stack.callback(process.kill)
        server = Azurite(f"http://127.0.0.1:{port}")
        wait_for(server.url, process, folder / "log")
        yield server
