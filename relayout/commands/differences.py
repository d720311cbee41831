"""What `verify` finds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from relayout.core.extents import Extent
from relayout.errors import FormatError
from relayout.results import Result

Culprit: TypeAlias = Literal["folder", "source", "either"]
"""What is wrong: the converted folder; the source that was named, while the folder agrees with its own digests and with
its record of what it was converted from; or one of the two, as too little was read to tell which."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One error that `verify` found."""

    file: str
    tensor: str | None
    start: int | None
    """Absolute file offset of the first affected byte; None if unknown."""
    end: int | None
    """Absolute file offset after the last affected byte."""
    what: str
    culprit: Culprit = "folder"

    def __str__(self) -> str:
        place = "" if self.start is None else f", bytes {self.start} to {self.end}"
        tensor = "" if self.tensor is None else f": tensor {self.tensor!r}"
        return f"{self.file}{tensor}{place}: {self.what}"


@dataclass(slots=True)
class Report(Result):
    """What `verify` found."""

    num_ranks: int
    """The tensor-parallel degree."""
    ranks: tuple[int, ...]
    """That the folder has, and that were checked."""
    num_tensors: int = 0
    """Slices of these ranks whose bytes were hashed."""
    nbytes: int = 0
    """Bytes of files that were read and hashed."""
    compared_with_source: bool = False
    differences: list[Difference] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether there are no differences."""
        return not self.differences

    @property
    def culprit(self) -> Culprit | None:
        """What is wrong; None if nothing is. One tensor that proves another source explains what could be either."""
        found = {difference.culprit for difference in self.differences}
        order: tuple[Culprit, ...] = ("folder", "source", "either")
        return next((culprit for culprit in order if culprit in found), None)

    def as_json(self) -> dict[str, object]:
        return Result.as_json(self) | {"ok": self.ok, "culprit": self.culprit}

    def add(
        self,
        file: str,
        what: str,
        tensor: str | None = None,
        extent: Extent | None = None,
        culprit: Culprit = "folder",
    ) -> None:
        """Add a difference."""
        start, end = (None, None) if extent is None else (extent.offset, extent.end)
        self.differences.append(Difference(file, tensor, start, end, what, culprit))

    @contextmanager
    def errors_of(self, file: str, culprit: Culprit = "folder") -> Iterator[None]:
        """Add an error of the block as a difference of the file, and end the block."""
        try:
            yield
        except FormatError as error:
            self.add_error(file, error, culprit)

    def add_error(self, file: str, error: Exception, culprit: Culprit = "folder") -> None:
        """Add an error as a difference of the file, which is named once."""
        if isinstance(error, FormatError) and f"/{error.path}".endswith(f"/{file}"):
            self.add(file, error.what, error.tensor, culprit=culprit)
        else:
            self.add(file, str(error), culprit=culprit)
