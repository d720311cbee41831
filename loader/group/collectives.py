"""The members of a torch.distributed group: what one raises, all raise."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import copy
from datetime import timedelta
from logging import getLogger
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakKeyDictionary

from relayout.core.arguments import ranks_text
from relayout.errors import PlanError, RelayoutError, shown

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, Work

Value = TypeVar("Value")

_QUIET_SECONDS = 3.0
"""How long members may be late without a word, and how long the words of others that wait may take to come."""
_TAG = 0x72656C61
"""Tells messages of loads from those of the application in the same group, which have the tag 0 by default."""
_CONNECT_SECONDS = 8.0
"""The time for gloo to connect members that have all called. It waits so long for their addresses, and five times as
long for each connection: if a member is killed meanwhile, the others wait for less than a minute."""


def _as_of(member: int, error: BaseException) -> Exception:
    """An error of a member, as all others raise it: of the same family, with the same fields."""
    by = f"member {member} of the group failed: "
    if isinstance(error, RelayoutError):
        again = copy(error)
        again.amend(what=by + error.what, path=None if error.path is None else str(error.path))
        return again
    if isinstance(error, OSError):
        path = None if error.filename is None else str(error.filename)
        return OSError(error.errno or errno.EIO, by + (error.strerror or str(error)), path)
    if isinstance(error, MemoryError):
        return MemoryError(f"{by}{error}")
    stopped = isinstance(error, GeneratorExit)
    return RuntimeError(by + ("it stopped before the last tensor" if stopped else f"{type(error).__name__}: {error}"))


def _raise_first(values: list[object]) -> None:
    """Raise the first error of some values, without keeping it in a frame: its traceback has the frame, and buffers."""
    index = next((index for index, value in enumerate(values) if isinstance(value, Exception)), None)
    if index is not None:
        raise cast("Exception", values.pop(index))


def _started(work: Work | None) -> Work:
    assert work is not None  # None: this process is no member.
    return work


_on_host: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()
"""Groups of the same processes as others', for messages from host memory. They live as long: see `Group.apart`."""


class Group:
    """A process group with this process in it. All members make the same calls in the same order. Not thread-safe."""

    def __init__(self, group: ProcessGroup) -> None:
        """Take part in a group.

        Raises:
            PlanError: this process is no member of it, or it is no group.
        """
        import torch.distributed as dist

        is_outside = isinstance(group, type(dist.GroupMember.NON_GROUP_MEMBER))  # What torch gives to outsiders.
        if not is_outside and not isinstance(group, dist.ProcessGroup):
            what = f"group: {shown(group)}, expected a torch.distributed group, such as torch.distributed.group.WORLD"
            raise PlanError(what, code="option")
        if is_outside or not dist.is_initialized() or dist.get_rank(group) < 0:
            raise PlanError("group: this process is not a member", code="option")
        self._group = group
        self.index: int = dist.get_rank(group)
        """The number of this member, from 0."""
        self.num_members: int = dist.get_world_size(group)
        self._process = os.getpid()
        """A fork is no member."""
        self.is_broken = False
        """Whether a collective call failed: the group can no longer be used, and it may still write to memory."""
        self._number: int | None = None
        """The number of this call among all of this member in the group; None: it has not met the others yet."""
        self._num_calls = 0
        """How many calls this member has made in which it waits for the others."""
        self.is_over = False
        """Whether no member waits for this one any more: the load is done, or all know that it has failed."""

    def all_gather(self, value: Value) -> list[Value]:
        """The value of each member. The values are small.

        Raises:
            OSError: a member is gone.
            the error of another member that failed outside of `collective`.
        """
        values = self._gather(value)
        self.is_over |= any(isinstance(value, Exception) for value in values)
        _raise_first(values)
        return cast("list[Value]", values)

    def _gather(self, value: object) -> list[object]:
        import torch.distributed as dist

        values: list[object] = [None] * self.num_members
        with self._naming_missing(), self._naming_late():
            dist.all_gather_object(values, value, group=self._group)
        return values

    def apart(self) -> ProcessGroup:
        """A new group of the same processes, for messages from host memory that meet none of this one's.

        Raises:
            OSError: a member is gone, or has not called within the timeout of the group, or of torch.distributed.
        """
        import torch.distributed as dist
        from torch.distributed.constants import default_pg_timeout as usual

        ranks = dist.get_process_group_ranks(self._group)
        with self._naming_missing():
            # A late member is waited for here; to connect, all are there.
            connecting = timedelta(seconds=_CONNECT_SECONDS) if self._all_called(usual) else usual
            made = cast("ProcessGroup", dist.new_group(ranks, connecting, "gloo", use_local_synchronization=True))
        made.set_timeout(usual)
        return made

    @staticmethod
    def on_host(group: ProcessGroup) -> Group:
        """The group, or one of the same processes if it sends nothing from host memory, as over NCCL alone.

        Raises:
            PlanError, OSError: as `Group`, and `apart`.
        """
        taken = Group(group)
        if taken.has_gloo:
            return taken
        if group not in _on_host:
            _on_host[group] = taken.apart()
        return Group(_on_host[group])

    def _all_called(self, limit: timedelta) -> bool:
        """Wait until all members have called: by a message of each to each, by which gloo tells at once who is gone.

        Without gloo, by the store, up to a limit.

        Returns:
            False: nobody can tell.
        """
        import torch

        if self.has_gloo:
            hello = torch.zeros(self.num_members, dtype=torch.uint8)
            self.exchange(hello, [1] * self.num_members, torch.empty_like(hello), [1] * self.num_members)
            return True
        if (store := self._store) is None:
            return False
        store.wait([self._key(member) for member in range(self.num_members)], limit)
        return True

    @property
    def has_gloo(self) -> bool:
        """Whether messages from host memory go by gloo."""
        import torch

        with suppress(AttributeError, RuntimeError):
            return bool(self._group._get_backend(torch.device("cpu")).name() == "gloo")
        return False

    @contextmanager
    def _naming_missing(self) -> Iterator[None]:
        """A call that all members make: an error names those that have not come to it."""
        if self._number is None:
            self._meet()
        try:
            with self._unbroken():
                yield
        except OSError as error:
            if missing := self._missing():
                what = f"{error.strerror}; of {self.num_members} members these have not called: {ranks_text(missing)}"
                raise OSError(error.errno, what) from error
            raise

    def _meet(self) -> None:
        """Say in the group's store that this member has called, and name those in the log that do not for some seconds.

        They are then waited for as the group waits for anything, up to its timeout.
        """
        self._number = 0
        if (store := self._store) is None:
            return
        with suppress(RuntimeError):  # Of a store that is gone, the collective call will tell.
            self._number = store.add(f"relayout/{self.index}", 1)
            store.set(self._key(self.index), "")
            with suppress(RuntimeError):
                store.wait([self._key(member) for member in range(self.num_members)], timedelta(seconds=_QUIET_SECONDS))
                return
        if missing := self._missing():
            what = "relayout: member %d of a group waits for the members %s, which have not called, up to its timeout"
            getLogger("relayout").warning(what, self.index, ranks_text(missing))

    @contextmanager
    def _naming_late(self) -> Iterator[None]:
        """A call that all members make: the log names those that have not come to it for some seconds.

        Who waits says so in the group's store, at which call, and only then: whoever has not said it is waited for. It
        works, or stands still: nobody can tell, so that it is waited for as the group waits for anything.
        """
        self._num_calls += 1
        number, is_over = self._num_calls, threading.Event()

        def watch() -> None:
            with suppress(RuntimeError):  # Of a store that is gone, the collective call will tell.
                if (store := self._store) is None or not self._number or is_over.wait(_QUIET_SECONDS):
                    return
                store.set(f"{self._key(self.index)}/{number}", "")
                if is_over.wait(2 * _QUIET_SECONDS):
                    return
                called = set(range(self.num_members)) - set(self._missing())  # The others have been named.
                late = [member for member in sorted(called) if not store.check([f"{self._key(member)}/{number}"])]
                if late and not is_over.is_set():
                    what = "relayout: member %d of a group waits for the members %s, up to its timeout"
                    getLogger("relayout").warning(what, self.index, ranks_text(late))

        watcher = threading.Thread(target=watch, name="relayout-late", daemon=True)
        with suppress(RuntimeError):  # Too many threads: nothing is said.
            watcher.start()
        try:
            yield
        finally:
            is_over.set()

    def _missing(self) -> list[int]:
        """The members that have not called; none, if nobody knows."""
        with suppress(RuntimeError):
            if self._store is not None and self._number:
                return [member for member in range(self.num_members) if not self._store.check([self._key(member)])]
        return []

    def _key(self, member: int) -> str:
        return f"relayout/{member}/{self._number}"

    @property
    def _store(self) -> Any:
        """The store by which the members have found each other; None: it is not known."""
        from torch.distributed import distributed_c10d

        with suppress(AttributeError, KeyError, RuntimeError, ValueError):
            return distributed_c10d._get_process_group_store(self._group)
        return None

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
                errors = self._gather(None if failed is None else _as_of(self.index, failed))
            except OSError as gone:
                raise failed or gone from None
            self.is_over = any(errors)
            if failed is not None:
                raise failed
            _raise_first(errors)
        finally:
            del failed  # Breaks the cycle of error, traceback and this frame.

    def fail(self, error: BaseException) -> None:
        """End an unfinished load by an error outside of `collective`: all others raise it in their next block."""
        if not self.is_over and not self.is_broken and os.getpid() == self._process:
            self.is_over = True
            with suppress(OSError):  # The others are gone.
                self._gather(_as_of(self.index, error))

    def broadcast(self, portions: list[tuple[int, torch.Tensor]]) -> None:
        """Send portions of memory, given as (member, memory), from the member that has each to all others.

        On a device, work that is queued on the current stream from then on sees the bytes.

        Raises:
            OSError: a member is gone.
        """
        import torch.distributed as dist

        with self._unbroken():
            on_host = all(memory.device.type == "cpu" for _, memory in portions)
            # There, members check that they have begun equally many operations, which messages are not.
            is_checked = dist.get_debug_level() == dist.DebugLevel.DETAIL  # type: ignore[attr-defined]
            if self.has_gloo and on_host and not is_checked:
                started = [work for member, memory in portions for work in self._send(member, memory)]
            else:
                started = [
                    dist.broadcast(memory, dist.get_global_rank(self._group, member), group=self._group, async_op=True)
                    for member, memory in portions
                ]
            for work in started:
                work.wait()

    def _send(self, member: int, memory: torch.Tensor) -> list[Work]:
        """Start to send what a member has to each other one.

        A broadcast of gloo passes bytes on from member to member, and leaves links idle: eight members behind links of
        one rate took 1.5 times as long by broadcasts (`tools/run bench clients`).
        """
        import torch.distributed as dist

        if member != self.index:
            return [_started(dist.irecv(memory, group=self._group, group_src=member, tag=_TAG))]
        others = [other for other in range(self.num_members) if other != member]
        return [_started(dist.isend(memory, group=self._group, group_dst=other, tag=_TAG)) for other in others]

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

        with self._unbroken(), self._naming_late():
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


class Alone(Group):
    """This process, without others: a group of one, which needs no torch.distributed."""

    def __init__(self) -> None:
        self.index, self.num_members = 0, 1
        self.is_broken = self.is_over = False
        self._process = os.getpid()

    def _gather(self, value: object) -> list[object]:
        return [value]

    def exchange(
        self, sent: torch.Tensor, sent_sizes: list[int], received: torch.Tensor, received_sizes: list[int]
    ) -> None:
        received.copy_(sent)
