"""The suites that every store must pass, on real servers: SeaweedFS (S3) and azurite (Azure), started on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from support import azurite, seaweedfs, store_contract

pytestmark = pytest.mark.slow
SERVERS = {"seaweedfs": seaweedfs, "azurite": azurite}
ROOT = Path(__file__).parents[2]
SUITES = (
    "tests/storage/test_stores.py",
    "tests/commands/test_every_store.py",
    "tests/loader/test_group_from_store.py",
    "tests/train/test_publisher.py",
    "tests/train/test_follower.py",
    "tests/train/test_comparing.py",
    "tests/train/test_listing.py",
    "tests/testing/test_stores.py",
)


@pytest.mark.parametrize("name", SERVERS)
def test_a_real_server_passes_the_suites_of_stores(name: str, tmp_path: Path) -> None:
    if (why := SERVERS[name].absence()) is not None:
        pytest.skip(why)
    with ExitStack() as stack:
        if name == "seaweedfs":
            weed = stack.enter_context(seaweedfs.running(tmp_path))
            weed.make_bucket(store_contract.BUCKET)
            environment = weed.environment | {seaweedfs.METRICS: weed.metrics}
        else:
            blobs = stack.enter_context(azurite.running(tmp_path))
            blobs.make_container(store_contract.BUCKET)
            environment = blobs.environment
        environment |= {store_contract.REAL_STORES: name}
        command = [sys.executable, "-m", "pytest", *SUITES]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:]
    assert " passed" in done.stdout
