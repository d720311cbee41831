"""The members of a torch.distributed group: what one raises, all raise."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

from relayout.errors import FormatError, PlanError, RelayoutError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class _Reason:
    """An error that can be sent to other processes."""

    family: str
    """"format", "plan", "os", "memory" or "other"."""
    what: str
    path: str | None = None
    tensor: str | None = None
    offset: int | None = None
    code: str = "invalid"
    errno: int = errno.EIO
    """Of the operating system."""

    @staticmethod
    def of(error: BaseException) -> _Reason:
        """The reason of an error."""
        if isinstance(error, RelayoutError):
            family = "format" if isinstance(error, FormatError) else "plan"
            path = None if error.path is None else str(error.path)
            return _Reason(family, error.what, path, error.tensor, error.offset, error.code)
        if isinstance(error, OSError):
            path = None if error.filename is None else str(error.filename)
            return _Reason("os", error.strerror or str(error), path, errno=error.errno or errno.EIO)
        if isinstance(error, MemoryError):
            return _Reason("memory", str(error))
        if isinstance(error, GeneratorExit):
            return _Reason("other", "it stopped before the last tensor")
        return _Reason("other", f"{type(error).__name__}: {error}")

    def error(self, member: int) -> Exception:
        """The error as another member raises it."""
        what = f"member {member} of the group failed: {self.what}"
        if self.family in ("format", "plan"):
            kind = FormatError if self.family == "format" else PlanError
            return kind(what, path=self.path, tensor=self.tensor, offset=self.offset, code=self.code)
        if self.family == "os":
            return OSError(self.errno, what, self.path)
        return MemoryError(what) if self.family == "memory" else RuntimeError(what)


class Group:
    """A process group with this process in it. All members make the same calls in the same order. Not thread-safe."""

    def __init__(self, group: ProcessGroup) -> None:
        """Take part in a group.

        Raises:
            PlanError: this process is no member of it.
        """
        import torch.distributed as dist

        self._group = group
        if not dist.is_initialized() or dist.get_rank(group) < 0:
            raise PlanError("group: this process is not a member", code="option")
        self.index: int = dist.get_rank(group)
        """Of this member, from 0."""
        self.num_members: int = dist.get_world_size(group)
        self._process = os.getpid()
        """A fork is no member."""
        self.is_broken = False
        """Whether a collective call failed: the group can no longer be used, and it may still write to memory."""
        self.is_over = False
        """Whether no member waits for this one any more: the load is done, or all know that it has failed."""

    def all_gather(self, value: Value) -> list[Value]:
        """The value of each member. The values are small.

        Raises:
            OSError: a member is gone.
            the error of another member that failed outside of `collective`.
        """
        values = self._gather(value)
        for member, reason in enumerate(values):
            if isinstance(reason, _Reason):
                self.is_over = True
                raise reason.error(member)
        return cast("list[Value]", values)

    def _gather(self, value: object) -> list[object]:
        import torch.distributed as dist

        values: list[object] = [None] * self.num_members
        with self._unbroken():
            dist.all_gather_object(values, value, group=self._group)
        return values

    @contextmanager
    def collective(self) -> Iterator[None]:
        """A block that all members carry out: at its end, they wait for each other, and one that failed fails all.

        Raises:
            the error of the block; or another member's, with its number.
        """
        failed: BaseException | None = None
        try:
            yield
        except BaseException as error:
            if self.is_broken:
                raise
            failed = error
        try:
            try:
                reasons = self._gather(None if failed is None else _Reason.of(failed))
            except OSError as gone:
                raise failed or gone from None
            self.is_over = any(reasons)
            if failed is not None:
                raise failed
            for member, reason in enumerate(reasons):
                if isinstance(reason, _Reason):
                    raise reason.error(member)
        finally:
            del failed  # Breaks the cycle of error, traceback and this frame.

    def fail(self, error: BaseException) -> None:
        """End an unfinished load by an error outside of `collective`: all others raise it in their next block."""
        if not self.is_over and not self.is_broken and os.getpid() == self._process:
            self.is_over = True
            with suppress(OSError):  # The others are gone.
                self._gather(_Reason.of(error))

    def broadcast(self, portions: list[tuple[int, torch.Tensor]]) -> None:
        """Broadcast portions of memory, given as (member, memory), from the member that has each to all others.

        On a device, work that is queued on the current stream from then on sees the bytes.

        Raises:
            OSError: a member is gone.
        """
        import torch.distributed as dist

        with self._unbroken():
            started = [
                dist.broadcast(memory, dist.get_global_rank(self._group, member), group=self._group, async_op=True)
                for member, memory in portions
            ]
            for work in started:
                work.wait()

    def exchange(
        self, sent: torch.Tensor, sent_sizes: list[int], received: torch.Tensor, received_sizes: list[int]
    ) -> None:
        """Send consecutive parts of host memory to the members, one to each, and receive theirs.

        Args:
            sent_sizes: bytes of each part; those of `received_sizes` are what the other members send to this one.

        Raises:
            OSError: a member is gone.
        """
        import torch.distributed as dist

        with self._unbroken():
            dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=self._group)

    @contextmanager
    def _unbroken(self) -> Iterator[None]:
        broken, self.is_broken = self.is_broken, True  # Whatever happens inside, an interruption too.
        try:
            yield
            self.is_broken = broken
        except RuntimeError as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise OSError(errno.ECONNABORTED, f"the group is broken, a member may be gone: {reason}") from error
