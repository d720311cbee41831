"""Tensors in columns, and the choice of some of them by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from relayout.core.arguments import compile_glob, invalid_because
from relayout.core.slices import Slice, num_bytes
from relayout.errors import PlanError, did_you_mean
from relayout.format.index import Read
from relayout.loader.sources.stored import StoredFile

Value = TypeVar("Value")
Names: TypeAlias = Sequence[str] | str | None
"""Patterns of names, or a single one; None: all."""


@dataclass(frozen=True, slots=True)
class TensorColumns:
    """Tensors of one rank, in columns of equal length, in file order. A column that nobody needs is empty."""

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    """Of the slices, in elements."""
    files: tuple[StoredFile, ...] = ()
    """That `reads` are of."""
    reads: Sequence[tuple[Read, ...]] = ()
    """Targets are relative to the tensor's first byte; an empty tensor has no reads."""
    digests: Sequence[str] | None = None
    """Of the stored bytes; None if there are none, as in a plain checkpoint."""
    offsets: Sequence[int] = ()
    """Of the first bytes in an arena, multiples of `ARENA_ALIGNMENT`."""
    parts: Sequence[Slice] = ()
    """Which part of the whole tensor each is."""
    source_shapes: Sequence[tuple[int, ...]] = ()
    """Of the whole tensors, in elements."""

    def sizes(self) -> list[int]:
        """Bytes of each tensor."""
        if self.reads:
            return [sum(read.transfer.total_nbytes for read in reads) for reads in self.reads]
        return [num_bytes(dtype, shape) or 0 for dtype, shape in zip(self.dtypes, self.shapes, strict=True)]

    def rows(self, rows: Sequence[int]) -> TensorColumns:
        """Some of the tensors, and only the files that they need."""
        reads = _picked(self.reads, rows)
        needed = sorted({read.file for tensor in reads for read in tensor})
        position = {file: index for index, file in enumerate(needed)}
        return TensorColumns(
            _picked(self.names, rows),
            _picked(self.dtypes, rows),
            _picked(self.shapes, rows),
            tuple(self.files[file] for file in needed),
            [tuple(Read(position[read.file], read.transfer) for read in tensor) for tensor in reads],
            None if self.digests is None else _picked(self.digests, rows),
            _picked(self.offsets, rows),
            _picked(self.parts, rows),
            _picked(self.source_shapes, rows),
        )

    def matching(self, names: Names) -> TensorColumns:
        """Those whose names match; for errors see `select`."""
        return self if names is None else self.rows(select(self.names, names))

    def at(self, offsets: Sequence[int]) -> TensorColumns:
        """The same tensors at these offsets of an arena."""
        return replace(self, offsets=offsets)


def _picked(column: Sequence[Value], rows: Sequence[int]) -> Sequence[Value]:
    return [column[row] for row in rows] if column else ()


def select(names: Sequence[str], patterns: Sequence[str] | str) -> list[int]:
    """The rows of the names that match, or equal, at least one of the patterns (see `core.patterns`).

    Raises:
        PlanError: a pattern is invalid, or matches no name.
    """
    row_of = {name: row for row, name in enumerate(names)}
    selected: set[int] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        rows = [row_of[pattern]] if pattern in row_of else []
        reason = invalid_because(pattern)
        if reason is None and any(character in pattern for character in "*#{"):
            match = compile_glob(pattern).match
            rows += [row for row, name in enumerate(names) if match(name)]
        if not rows:
            hint = "" if "*" in pattern else did_you_mean(pattern, names)
            if "*" in pattern.replace("**", ""):
                hint = "; * is text without a dot, ** any text"
            raise PlanError(
                f"names: invalid pattern {pattern!r}: {reason}"
                if reason
                else f"names: no tensor matches {pattern!r} (there are {len(names)}){hint}",
                code="option",
            )
        selected.update(rows)
    return sorted(selected)
