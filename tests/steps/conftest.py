"""Where steps are published in tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import s3_server


@pytest.fixture(params=["folder", "bucket"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A place for steps in which nothing is yet: a folder, or a prefix of a bucket."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_server.environment(s3_server.shared()).items():
            patch.setenv(name, value)
        yield str(tmp_path / "steps") if request.param == "folder" else f"s3://{tmp_path.name}/steps"
    objects = s3_server.shared().objects
    for bucket, key in [*objects]:  # Another test may have a folder of the same name later.
        if bucket == tmp_path.name:
            del objects[bucket, key]
