"""The laws of backends: the example and those of the host keep them; one that breaks a law is told which."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples import own_backend
from examples.own_backend import Reader, ToyBackend
from support.loader_fixtures import HOST

from relayout.loader.backends.base import Backend, Options
from relayout.loader.requests import Request
from relayout.testing import ConformanceError
from relayout.testing.backends import BackendConformance, write_files


class TestBackends(BackendConformance):
    """Those of the package that fill memory of the host."""

    @pytest.fixture(params=HOST)
    def backend(self, request: pytest.FixtureRequest) -> Backend[Any]:
        return Options(backend=request.param).backend_for([])


class TestOwnBackend(BackendConformance):
    """The example."""

    @pytest.fixture
    def backend(self) -> Backend[Any]:
        return ToyBackend()


def backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = own_backend.copy_runs
    monkeypatch.setattr(
        own_backend, "copy_runs", lambda source, span, one: copy(memoryview(bytes(source)[::-1]), span, one)
    )


def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reader, "read", lambda self, state, request: request.nbytes)


def told_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Reader.read

    def twice(self: Reader, state: None, request: Request) -> int:
        read(self, state, request)
        return read(self, state, request)

    monkeypatch.setattr(Reader, "read", twice)


WRONG = {
    backwards: "bytes differ, first at",
    nothing_told: "bytes differ, first at",
    told_twice: "on_arrival was not told each byte once",
}


@pytest.mark.parametrize("break_it", WRONG, ids=lambda one: one.__name__)
def test_who_breaks_a_law_is_told_which(
    break_it: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write_files(tmp_path)
    contents = [np.fromfile(path, np.uint8) for path in paths]
    break_it(monkeypatch)
    requirement = re.compile(
        f"this law does not hold: A job brings the bytes of each read .*{WRONG[break_it]}", re.DOTALL
    )
    with pytest.raises(ConformanceError, match=requirement):
        BackendConformance().test_bytes_arrive_where_they_belong(ToyBackend(), paths, contents, "odd offsets", False)
