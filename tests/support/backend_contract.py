"""Every backend and the kinds of memory that it fills: the laws of `relayout.testing`, with a fake device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from support.fake_cuda import FakeCuFile, Lanes
from support.loader_fixtures import Array, nothing_left_behind

from relayout.loader.backends.base import Backend, Options, ReadJob
from relayout.loader.backends.cuda import DeviceBackend
from relayout.loader.sources.rank import StoredFile
from relayout.testing.backends import SMALL, Ground, Region, check_fill, lay_out


@dataclass
class Target:
    """A backend, and the kind of memory that it is to fill."""

    name: str
    kind: str
    stored: tuple[StoredFile, ...]
    contents: list[Array]
    lanes: Lanes
    cufile: FakeCuFile = field(default_factory=FakeCuFile)

    @property
    def backend(self) -> Backend[Any]:
        if self.name not in ("pinned", "gds", "cufile-compat"):
            return Options(backend=self.name).backend_for(self.stored)
        self.cufile.compat = self.name == "cufile-compat"
        return DeviceBackend("cpu", self.lanes.make, None if self.name == "pinned" else self.cufile)

    def lay_out(self, pieces: Sequence[Region]) -> Ground:
        """Memory for the pieces, full of one byte, and what it should hold in the end."""
        return lay_out(self.backend, pieces, self.contents, is_wrapped=self.kind != "arena")

    def fill(self, ground: Ground, pieces: Sequence[Region], **options: Any) -> ReadJob:
        """What brings the pieces where the memory has them."""
        return ground.job(self.stored, pieces, **options)

    def check(self, pieces: Sequence[Region], **options: Any) -> None:
        """Fill the pieces, and look at everything that a fill promises."""
        with nothing_left_behind():
            check_fill(self.backend, self.stored, self.contents, pieces, is_wrapped=self.kind != "arena", **options)
            assert self.lanes.in_flight == 0
            self.cufile.assert_restored()
        assert self.lanes.pinned <= options.get("budget", SMALL).memory
        self.lanes.forget()
