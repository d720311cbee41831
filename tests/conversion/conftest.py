"""Conversions of these tests wait for no drive."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def no_drive() -> Iterator[None]:
    """`os.fsync` does nothing: no test here loses power. What is flushed, and when, is seen by other means."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield
