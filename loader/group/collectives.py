"""Messages among the members of a torch.distributed group; an error of one member is raised by all.

Work that can fail in one member alone must not leave the others waiting. So each exchange of messages begins with a
small one, in which each member can send an error instead of its value. A member that fails, at whatever point, sends
its error as its next message, and all others receive the error as theirs:

- Between two messages, `Group.fail` sends any error. The caller of an operation calls it for each error.
- In a block of `Group.collective`, no member sends anything. The end of the block is a message. Bytes that the block
  passes to `exchange` or `broadcast` follow as part of this message, and only if the block has failed in no member.
- The last message of an operation is marked as such. Errors after it are raised by this member alone.

A message that has begun is completed, because the rest of a half-sent message would be received as the next one. So a
message runs in a separate thread. Ctrl-C, or an exception of another signal handler, is raised when the message has
ended, and is then sent like any other error. Members compare the sequence number and kind of each message, so that
different orders of operations are an error.

torch's timeout of the group limits each wait for a message, not an operation. Over gloo, a member that is killed is
detected at once. A member that hangs looks like one that works for longer than the timeout: both end the wait.
"""

from __future__ import annotations

import errno
import os
import pickle
import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from datetime import timedelta
from functools import partial
from logging import getLogger
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakKeyDictionary, WeakSet

from relayout.core.arguments import ranks_text
from relayout.errors import PlanError, RelayoutError, shown

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, Work

Value = TypeVar("Value")
Send = Callable[[], None]
"""Function that sends and receives the content of a message."""

_QUIET_SECONDS = 3.0
"""Seconds after which late members are named in the log.

It is also the time allowed for the notes of other waiting members to arrive in the group's store.
"""
_TAG = 0x72656C61
"""Tag that separates messages of loads from those of the application in the same group, which have tag 0 by default."""
_STORE_SECONDS = 5.0
"""Seconds to wait for the group's rendezvous store: the process that serves it may hang."""
_CONNECT_SECONDS = 8.0
"""Seconds for gloo to connect members that have all called.

gloo waits this long for their addresses, and five times as long for each connection. If a member is killed meanwhile,
the others wait for less than a minute.
"""


def _as_of(member: int, error: BaseException) -> Exception:
    """Return the error that other members raise for an error of one member: the same family, with the same fields."""
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
    """Raise the first error among some values, and remove it from the list.

    An error that stays in a frame of its traceback would keep the frame's buffers alive.
    """
    index = next((index for index, value in enumerate(values) if isinstance(value, Exception)), None)
    if index is not None:
        raise cast("Exception", values.pop(index))


_KINDS = ("value", "block", "error")
"""The kinds of a message: a value of each member, the end of a block, or an error outside of a block."""


def _check_same_call(heads: Sequence[tuple[int, str]]) -> None:
    """Raise PlanError unless the messages of all members have the same sequence number and kind."""
    if len(set(heads)) > 1:
        who = [f"{kind} {number} of member {member}" for member, (number, kind) in enumerate(heads)]
        what = f"group: the members do not make the same calls: {', '.join(who)} came together"
        raise PlanError(f"{what}; begin loads, saves and steps in the same order in all of them", code="option")


def _started(work: Work | None) -> Work:
    assert work is not None  # None: this process is not a member.
    return work


_on_host: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()
"""For each group, a group of the same processes for messages from host memory.

An entry lives as long as the original group: see `Group.apart`.
"""


_left: WeakSet[ProcessGroup] = WeakSet()
"""Groups in which this process has left a message before its end.

The next message would receive the rest of the unfinished one.
"""


class _Message:
    """A message that is carried out in a separate thread, at most once."""

    def __init__(self, send: Send) -> None:
        self._send: Send | None = send
        self._begun = threading.Lock()
        self._error: BaseException | None = None
        self.is_done = threading.Event()

    def start(self) -> None:
        """Begin the message; in this thread, if no other thread can be started."""
        try:
            threading.Thread(target=self.carry_out, name="relayout-message", daemon=True).start()
        except RuntimeError:
            self.carry_out()

    def carry_out(self) -> None:
        """Send, and keep any error for `result`."""
        if self._begun.acquire(blocking=False):
            try:
                assert self._send is not None
                self._send()
            except BaseException as error:
                self._error = error
            finally:
                self._send = None  # It references the memory that is sent.
                self.is_done.set()

    def settle(self) -> None:
        """Wait for the end of the message if it has begun; otherwise, prevent it from beginning."""
        if not self._begun.acquire(blocking=False):
            self.is_done.wait()

    def result(self) -> None:
        """Raise the error of the message, if it had one."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # Breaks the cycle of error, traceback and this frame.


class Group:
    """A group with this process as a member. All members make the same calls in the same order. Not thread-safe."""

    def __init__(self, group: ProcessGroup) -> None:
        """Take part in a group."""
        import torch.distributed as dist

        is_outside = isinstance(group, type(dist.GroupMember.NON_GROUP_MEMBER))  # torch's non-member value.
        if not is_outside and not isinstance(group, dist.ProcessGroup):
            what = f"group: {shown(group)}, expected a torch.distributed group, such as torch.distributed.group.WORLD"
            raise PlanError(what, code="option")
        if is_outside or not dist.is_initialized() or dist.get_rank(group) < 0:
            raise PlanError("group: this process is not a member", code="option")
        if group in _left:
            what = "the group is broken: this process has left it in the middle of a message; make another group"
            raise OSError(errno.ECONNABORTED, what)
        self._group = group
        self.index: int = dist.get_rank(group)
        """The number of this member, from 0."""
        self.num_members: int = dist.get_world_size(group)
        self._process = os.getpid()
        """Process ID of the member. A forked child is not a member."""
        self.is_broken = False
        """True if a collective call failed: the group can no longer be used, and may still write to memory."""
        self._number: int | None = None
        """The number of this call among this member's calls in the group; None: it has not met the others yet."""
        self._num_messages = 0
        """Number of messages that this member has sent in this operation."""
        self._unfinished: _Message | None = None
        """The message that is being sent, or that was interrupted while this member waited for it."""
        self._is_inside = False
        """True while this member is in a block of `collective`."""
        self._at_end: list[tuple[Send, bool]] = []
        """Messages to send at the end of the block, each with True if only this thread can send it."""
        self.is_over = False
        """True if no member waits for this one any more: the load is done, or all members have received its error."""

    def all_gather(self, value: Value, *, is_last: bool = False) -> list[Value]:
        """Return the value of each member. The values are small.

        Args:
            is_last: no message follows in this operation.
        """
        values = self._gather(value, "value", is_last=is_last)
        _raise_first(values)
        return cast("list[Value]", values)

    def _gather(
        self, value: object, kind: str, at_end: Sequence[tuple[Send, bool]] = (), *, is_last: bool = False
    ) -> list[object]:
        """Return the value of each member. If none is an error, the sends of `at_end` follow in the same message."""
        assert not self._is_inside, "a message of all members in a block that a member may leave by an error of its own"
        blob = b"" if value is None else pickle.dumps(value)
        values: list[object] = []

        def send() -> None:
            self._num_messages += 1
            with self._unbroken():
                found = self._gathered((self._num_messages, kind), blob)
            values.extend(pickle.loads(one) if one else None for _, one in found)
            has_failed = any(isinstance(one, Exception) for one in values)
            self.is_over = has_failed or is_last
            if not has_failed:
                _check_same_call([head for head, _ in found])
                for more, _ in at_end:
                    with self._unbroken():
                        more()

        with self._naming_missing():
            self._carry_out(send, here=not self.has_gloo or any(is_here for _, is_here in at_end))
        return values

    def _gathered(self, head: tuple[int, str], blob: bytes) -> list[tuple[tuple[int, str], bytes]]:
        """Return sequence number, kind and content of each member's message. Non-empty contents follow the heads.

        Each member sends directly to each other member. gloo's own gather passes contents on from member to member: if
        a member is killed, only its neighbors would detect it at once.
        """
        import torch
        import torch.distributed as dist

        if not self.has_gloo:  # Only torch can choose the device from which another backend sends.
            objects: list[Any] = [None] * self.num_members
            dist.all_gather_object(objects, (head, blob), group=self._group)
            return objects
        number, kind = head
        mine = torch.tensor([[number, _KINDS.index(kind), len(blob)]] * self.num_members, device="cpu")
        found = torch.empty_like(mine)
        dist.all_to_all_single(found, mine, group=self._group)
        heads = cast("list[tuple[int, int, int]]", found.tolist())
        blobs = [torch.zeros(nbytes, dtype=torch.uint8, device="cpu") for *_, nbytes in heads]
        blobs[self.index].numpy()[:] = memoryview(blob)
        self._send_to_all([(member, one) for member, one in enumerate(blobs) if len(one)])
        calls = [(one, _KINDS[which]) for one, which, _ in heads]
        return list(zip(calls, [one.numpy().tobytes() for one in blobs], strict=True))

    def _carry_out(self, send: Send, *, here: bool) -> None:
        """Send a message, after any message that was interrupted while this member waited for it.

        Args:
            here: send in this thread, because its current device and stream are used. An interruption then breaks the
                group.
        """
        self._settle()
        message, interruption = _Message(send), cast("BaseException | None", None)
        self._unfinished = message
        if here:
            watcher = threading.Timer(_QUIET_SECONDS, self._name_late, [message])
            watcher.daemon = True
            with suppress(RuntimeError):  # Too many threads: late members are not named.
                watcher.start()
            message.carry_out()
            watcher.cancel()
        else:
            message.start()
        while not message.is_done.is_set():
            try:
                if not message.is_done.wait(_QUIET_SECONDS):
                    with suppress(RuntimeError):
                        threading.Thread(target=self._name_late, args=[message], daemon=True).start()
                    # In a loop: Python handles a signal that comes just before a wait only when the wait has ended.
                    while not message.is_done.wait(_QUIET_SECONDS):
                        pass
            except BaseException as error:
                if interruption is not None:
                    self._leave()
                    raise
                interruption = error
                what = "relayout: interrupted: waits up to %s to tell the other members; again leaves the group at once"
                getLogger("relayout").warning(what, self._limit)
        self._unfinished = None
        try:
            message.result()
            if interruption is not None:
                raise interruption
        finally:
            del interruption  # Breaks the cycle of error, traceback and this frame.

    def is_quiet(self) -> bool:
        """Wait for an interrupted message, and return True if no message writes to memory any more."""
        if not self.is_broken:
            self._settle()
        return not self.is_broken

    def _settle(self) -> None:
        if self._unfinished is not None and os.getpid() == self._process:
            try:
                self._unfinished.settle()
            except BaseException:
                self._leave()
                raise
            self._unfinished = None

    def _leave(self) -> None:
        """Mark the group as unusable: a message that this member no longer waits for is still being sent."""
        self.is_broken = True
        _left.add(self._group)

    def apart(self, kept: MutableMapping[ProcessGroup, ProcessGroup]) -> ProcessGroup:
        """Return a group of the same processes for messages from host memory, separate from this group's messages.

        It has the same timeout. All members create it, unless `kept` contains it; it is added to `kept` before any
        member sends another message.
        """
        import torch.distributed as dist

        ranks = dist.get_process_group_ranks(self._group)

        def connect() -> None:
            with self._unbroken():
                made = cast("ProcessGroup", dist.new_group(ranks, connecting, "gloo", use_local_synchronization=True))
            kept[self._group] = made

        if self._group not in kept:
            with self._naming_missing(), self.sharing_errors():
                # Late members are waited for here, so that all members are present when they connect.
                connecting = timedelta(seconds=_CONNECT_SECONDS) if self._all_called() else self.timeout
                self._carry_out(connect, here=False)
        kept[self._group].set_timeout(self.timeout)
        return kept[self._group]

    @property
    def timeout(self) -> timedelta:
        """The longest wait for a message: the timeout of the group's host-memory backend, or else the group's."""
        import torch
        from torch.distributed.constants import default_pg_timeout

        for device in (torch.device("cpu"), *self._group._device_types):
            with suppress(AttributeError, RuntimeError):
                timeout: timedelta = self._group._get_backend(device).options._timeout
                return timeout
        return default_pg_timeout

    @property
    def _limit(self) -> str:
        return f"{self.timeout.total_seconds():g} s"

    @staticmethod
    def on_host(group: ProcessGroup) -> Group:
        """Return the group, or another one of the same processes if it cannot send from host memory (NCCL alone)."""
        taken = Group(group)
        if taken.has_gloo:
            return taken
        return Group(taken.apart(_on_host))

    def _all_called(self) -> bool:
        """Wait for each member's first call, up to the timeout. Over gloo, a member that is gone is detected at once.

        Returns:
            False if it cannot be determined.
        """
        if self.has_gloo:
            self.all_gather(None, is_last=True)
            return True
        if (store := self._store) is None:
            return False
        with self._unbroken():
            store.wait([self._key(member) for member in range(self.num_members)], self.timeout)
        return True

    @property
    def has_gloo(self) -> bool:
        """True if messages from host memory use gloo."""
        import torch

        with suppress(AttributeError, RuntimeError):
            return bool(self._group._get_backend(torch.device("cpu")).name() == "gloo")
        return False

    @contextmanager
    def _naming_missing(self) -> Iterator[None]:
        """Run a call that all members make; if it fails, add to the error which members have not called yet."""
        if self._number is None:
            self._meet()
        try:
            yield
        except OSError as error:
            if (missing := self._missing()) and "have not called" not in str(error.strerror):
                what = f"{error.strerror}; of {self.num_members} members these have not called: {ranks_text(missing)}"
                raise OSError(error.errno, what) from error
            raise

    def _meet(self) -> None:
        """Record this member's first call in the group's store; after some seconds, log members without a record.

        Missing members are then waited for like in any other wait, up to the group's timeout.
        """
        self._number = 0

        def call(store: Any) -> int:
            number = store.add(f"relayout/{self.index}", 1)
            store.set(f"relayout/{self.index}/{number}", "")
            return int(number)

        def wait(store: Any) -> bool:
            store.wait([self._key(member) for member in range(self.num_members)], timedelta(seconds=_QUIET_SECONDS))
            return True

        self._number = self._ask(call) or 0
        if self._number and not self._ask(wait) and (missing := self._missing()):
            who = f"the members {ranks_text(missing)}, which have not called"
            what = "relayout: member %d of a group waits for %s, up to its timeout of %s"
            getLogger("relayout").warning(what, self.index, who, self._limit)

    def _name_late(self, message: _Message) -> None:
        """Log the members that have not reached a message after some seconds.

        Only a member that has to wait records the message in the group's store. Members without a record have not
        reached the message. They may be working or hanging, which cannot be determined, so they are waited for up to
        the group's timeout.
        """
        number = self._num_messages
        if not self._number or message.is_done.is_set():
            return
        self._ask(lambda store: store.set(f"{self._key(self.index)}/{number}", ""))
        if message.is_done.wait(2 * _QUIET_SECONDS):
            return
        called = sorted(set(range(self.num_members)) - set(self._missing()))  # The missing ones were named.
        late = self._ask(lambda store: [one for one in called if not store.check([f"{self._key(one)}/{number}"])])
        if late and not message.is_done.is_set():
            what = "relayout: member %d of a group waits for the members %s, up to its timeout of %s"
            getLogger("relayout").warning(what, self.index, ranks_text(late), self._limit)

    def _missing(self) -> list[int]:
        """Return the members without a first call yet; an empty list if that cannot be determined."""
        members = range(self.num_members)
        ask: Callable[[Any], list[int]] = lambda store: [one for one in members if not store.check([self._key(one)])]  # noqa: E731
        return (self._ask(ask) if self._number else None) or []

    def _ask(self, ask: Callable[[Any], Value]) -> Value | None:
        """Return the answer of the group's store; None if the store is not known, is gone, or its process hangs."""
        answers: list[Value] = []

        def answer() -> None:
            with suppress(RuntimeError):  # If the store is gone, the message itself raises an error.
                if (store := self._store) is not None:
                    answers.append(ask(store))

        asker = threading.Thread(target=answer, name="relayout-store", daemon=True)
        with suppress(RuntimeError):  # Too many threads.
            asker.start()
            asker.join(_STORE_SECONDS)
        return answers[0] if answers else None

    def _key(self, member: int) -> str:
        return f"relayout/{member}/{self._number}"

    @property
    def _store(self) -> Any:
        """The torch.distributed store by which the members met (rendezvous); None if it is unknown."""
        from torch.distributed import distributed_c10d

        with suppress(AttributeError, KeyError, RuntimeError, ValueError):
            return distributed_c10d._get_process_group_store(self._group)
        return None

    @contextmanager
    def collective(self, *, is_last: bool = False) -> Iterator[None]:
        """Run a block that all members carry out: all wait at its end, and an error of one member fails all.

        Args:
            is_last: no message follows in this operation.
        """
        assert not self._is_inside, "a block in a block"
        failed: BaseException | None = None
        try:
            try:
                self._is_inside = True
                yield
            finally:
                self._is_inside = False
        except BaseException as error:
            if self.is_broken:
                raise
            failed = error
        try:
            at_end, self._at_end = self._at_end, []
            try:
                mine = None if failed is None else _as_of(self.index, failed)
                errors = self._gather(mine, "block", at_end, is_last=is_last)
            except OSError as gone:
                raise failed or gone from None
            if failed is not None:
                raise failed
            _raise_first(errors)
        finally:
            del failed  # Breaks the cycle of error, traceback and this frame.

    @contextmanager
    def sharing_errors(self) -> Iterator[None]:
        """Run an operation: an error outside of `collective` is raised by all other members, at their next message."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """End an unfinished operation by an error outside of `collective`; all others raise it at the next message."""
        self._is_inside, self._at_end = False, []  # An interruption may come before the block itself resets these.
        if self.is_quiet() and not self.is_over and os.getpid() == self._process:
            self.is_over = True
            with suppress(OSError):  # The others are gone.
                self._gather(_as_of(self.index, error), "error")

    def broadcast(self, portions: list[tuple[int, torch.Tensor]]) -> None:
        """Send portions of memory, given as (member, memory), each from its member to all others.

        Call this in a block of `collective`; the portions are sent at its end. On a device, work that is queued on the
        current stream after the block sees the bytes.
        """
        assert self._is_inside, "a broadcast outside of a block, which some members may never reach"
        on_host = all(memory.device.type == "cpu" for _, memory in portions)
        self._at_end.append((partial(self._send_to_all, portions), not on_host))

    def _send_to_all(self, portions: list[tuple[int, torch.Tensor]]) -> None:
        import torch.distributed as dist

        on_host = all(memory.device.type == "cpu" for _, memory in portions)
        # In this mode, torch checks that all members have begun equally many operations, which is not so for messages.
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
        """Start to send a member's memory to each other member, or to receive it.

        A broadcast of gloo passes bytes on from member to member, and leaves links idle: with eight members behind
        links of equal rate, broadcasts took 1.5 times as long (`tools/run bench clients`).
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

        Call this in a block of `collective`; the parts are sent at its end.

        Args:
            sent_sizes: bytes of each part to send. `received_sizes` has the bytes that each member sends to this one.
        """
        assert self._is_inside, "an exchange outside of a block, which some members may never reach"
        self._at_end.append((partial(self._all_to_all, sent, sent_sizes, received, received_sizes), False))

    def _all_to_all(
        self, sent: torch.Tensor, sent_sizes: list[int], received: torch.Tensor, received_sizes: list[int]
    ) -> None:
        import torch.distributed as dist

        dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=self._group)

    @contextmanager
    def _unbroken(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.is_broken = True
            if not isinstance(error, RuntimeError):
                raise
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            late = f", or later than the group's timeout of {self._limit}" if "imed out" in reason else ""
            raise OSError(errno.ECONNABORTED, f"the group is broken, a member may be gone{late}: {reason}") from error


class Alone(Group):
    """A group of only this process, which does not need torch.distributed."""

    def __init__(self) -> None:
        self.index, self.num_members = 0, 1
        self.is_broken = self.is_over = self._is_inside = False
        self._process = os.getpid()
        self._at_end, self._unfinished = [], None

    def _gather(
        self, value: object, kind: str, at_end: Sequence[tuple[Send, bool]] = (), *, is_last: bool = False
    ) -> list[object]:
        for send, _ in at_end:
            send()
        return [value]

    def _all_to_all(
        self, sent: torch.Tensor, sent_sizes: list[int], received: torch.Tensor, received_sizes: list[int]
    ) -> None:
        received.copy_(sent)
