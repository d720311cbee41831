"""Where steps are published in tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import s3_server, store_contract


@pytest.fixture(params=["folder", "bucket", *filter(None, [os.environ.get(store_contract.REAL_STORES)])])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A place for steps in which nothing is yet: a folder, or a prefix of a bucket of the test server or a real one."""
    if request.param == "folder":
        yield str(tmp_path / "steps")
    elif request.param == "bucket":
        with pytest.MonkeyPatch.context() as patch:
            for name, value in s3_server.environment(s3_server.shared()).items():
                patch.setenv(name, value)
            yield f"s3://{tmp_path.name}/steps"
        objects = s3_server.shared().objects
        for bucket, key in [*objects]:  # Another test may have a folder of the same name later.
            if bucket == tmp_path.name:
                del objects[bucket, key]
    else:
        yield f"{store_contract.REAL[request.param]}/{os.urandom(8).hex()}"
