"""Members of a group of which one fails at each message of each operation, and what all of them then do.

In sys.argv is FOLDER, to which `prepare` has written what they need. Each process writes what it saw to
FOLDER/member-N.json. After each failure, all members do the same operation again.

- `main` with `FOLDER MEMBERS EVERY SEED OPERATION...`: one member fails before, or in, one message of EVERY.
- `causes` with `FOLDER MEMBERS OPERATIONS`: the second one fails for each of `CAUSES`, in so many operations at most.
- `killed` with `FOLDER MEMBERS OPERATION MESSAGE`: the last one is killed in a message.
- `rules` with `FOLDER MEMBERS`: they break the rules of messages, and take turns.
"""

from __future__ import annotations

import errno
import faulthandler
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from support.group_worker import forked, join
from support.steps import CONFIG, weights_of

HANG_SECONDS = 60
"""An operation that takes longer than this waits for somebody."""
WAYS = ("error", "interruption", "signal")
"""How a member fails: by an error before a message, by a KeyboardInterrupt before it, by Ctrl-C while it is sent."""
EXIT_CODE = 9
ON_FIRE = "the drive is on fire"


def prepare(folder: Path) -> None:
    """Write a checkpoint, its conversion for two ranks, and another one with a file that ends too early."""
    from safetensors.torch import save_file

    import relayout

    (folder / "outputs").mkdir()
    (folder / "source").mkdir()
    save_file(weights_of(0), folder / "source" / "model.safetensors")
    (folder / "source" / "config.json").write_text(json.dumps(CONFIG))
    relayout.convert(folder / "source", folder / "out", tp=2)
    for name in ("source", "out"):
        shutil.copytree(folder / name, folder / f"{name}-cut")
        for file in (folder / f"{name}-cut").glob("*.safetensors"):
            os.truncate(file, file.stat().st_size - 4096)


def main() -> None:
    import torch.distributed.fsdp  # noqa: F401 (once, before the members are forked)

    folder, num_members, every, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    codes = forked(partial(_fails_at_messages, folder, num_members, every, seed, sys.argv[5:]), num_members)
    assert codes == [0] * num_members, codes


def causes() -> None:
    import torch.distributed.fsdp  # noqa: F401

    folder, num_members = Path(sys.argv[1]), int(sys.argv[2])
    codes = forked(partial(_fails_by_causes, folder, num_members, int(sys.argv[3])), num_members)
    assert codes == [0] * num_members, codes


def killed() -> None:
    folder, num_members, operation, message = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    codes = forked(partial(_is_killed, folder, num_members, operation, message), num_members)
    assert codes == [0] * (num_members - 1) + [EXIT_CODE], codes


def rules() -> None:
    folder = Path(sys.argv[1])
    codes = forked(partial(_keeps_rules, folder), 2)
    assert codes == [0, 0], codes


class Messages:
    """Counts the messages of this process, and fails at one of them."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def failing(self, at: int | None, way: str) -> Iterator[None]:
        """Fail at a message of the block in some way; None: at none."""
        from relayout.loader.group.collectives import Group

        gather, gathered = Group._gather, Group._gathered
        is_first = False

        def before(group: Group, *given: Any, **options: Any) -> Any:
            nonlocal is_first
            is_first = self.count == at
            self.count += 1
            if is_first and way == "error":
                raise OSError(errno.EIO, ON_FIRE)
            if is_first and way == "interruption":
                raise KeyboardInterrupt
            return gather(group, *given, **options)

        def within(group: Group, *given: Any) -> Any:
            nonlocal is_first
            if is_first and way == "signal":
                is_first = False
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.05)
            if is_first and way == "exit":
                os._exit(EXIT_CODE)
            return gathered(group, *given)

        self.count = 0
        with patch.object(Group, "_gather", before), patch.object(Group, "_gathered", within):
            yield


class Member:
    """What a member does, and what it saw of it."""

    def __init__(self, folder: Path, number: int, num_members: int) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        join(folder, number, num_members)
        self.folder, self.number, self.num_members = folder, number, num_members
        self.mesh = init_device_mesh("cpu", (num_members,))
        self.group: Any = dist.group.WORLD
        self.path: str | None = None
        """Where this member loads from, if that is elsewhere than for the others."""
        self.options: dict[str, Any] = {}
        """Options that only this member has."""
        self.seen: list[dict[str, Any]] = []
        self.outputs = 0
        self.publisher: Any = None

    def output(self) -> Path:
        return self.folder / "outputs" / f"out-{self.outputs}"

    def sharded(self, whole: dict[str, Any]) -> dict[str, Any]:
        from torch.distributed.tensor import Shard, distribute_tensor

        return {name: distribute_tensor(one, self.mesh, [Shard(0)], src_data_rank=None) for name, one in whole.items()}

    # Operations, and whether what they have made, or filled, is right.

    def save(self, **options: Any) -> None:
        import relayout

        given: dict[str, Any] = {"config": CONFIG, "tp": 2, "group": self.group, **options, **self.options}
        tensors = given.pop("tensors", None) or weights_of(0)
        done = relayout.save(tensors, self.output(), **given)
        if given.get("background"):
            done.result()  # type: ignore[union-attr]

    def save_shards(self) -> None:
        self.save(tensors=self.sharded(weights_of(0)), max_part_nbytes="40KB")

    def save_background(self) -> None:
        self.save(background=True)

    def save_first(self) -> None:
        """The first save of a group."""
        import torch.distributed as dist

        self.save(group=dist.new_group(range(self.num_members)))

    def save_pretrained(self) -> None:
        from support.saving_worker import model_of
        from torch.distributed.fsdp import fully_shard

        import relayout

        model = model_of("llama")
        fully_shard(model, mesh=self.mesh)
        relayout.transformers.save_pretrained(model, self.output(), **{"tp": 2, **self.options})

    def publish_full(self) -> None:
        import relayout

        options = {"config": CONFIG, "tp": 2, "group": self.group, "max_part_nbytes": "40KB", **self.options}
        step = options.pop("step", 1)
        self.publisher = relayout.Publisher(self.output(), **options)
        self.publisher.publish(self.sharded(weights_of(1)), step)

    def publish_delta(self) -> None:
        self.publisher.publish(self.sharded(weights_of(2)), self.options.get("step", 2))

    def fill(self, source: str = "source") -> None:
        import relayout
        from relayout.loader import sharded

        into = self.sharded({name: one.clone().view(dtype=one.dtype) for name, one in weights_of(3).items()})
        # As if members were on machines of their own: on one, they need no messages.
        with patch.object(sharded, "page_cache_of", lambda store: str(self.number)):
            path = self.path or str(self.folder / source)
            relayout.load(path, into=into, **{"group": self.group, **self.options})
        expected = self.sharded(weights_of(0))
        assert all(self._same(into[name].to_local(), expected[name].to_local()) for name in expected)

    def fill_converted(self) -> None:
        self.fill("out")

    def load(self, source: str = "out", rank: int = 1, **options: Any) -> None:
        import relayout

        path = self.path or str(self.folder / source)
        found = relayout.load(path, **{"rank": rank, "group": self.group, **options, **self.options})
        expected = relayout.load(self.folder / "out", rank)
        assert found.keys() == expected.keys()
        assert all(self._same(one, expected[name]) for name, one in found.items())

    def load_plain(self) -> None:
        self.load("source", self.number % 2, tp=2)

    def iter_load(self) -> None:
        import relayout

        path = self.path or str(self.folder / "out")
        given: dict[str, Any] = {"rank": 1, "group": self.group, "memory": "2MiB", **self.options}
        found = {name: one.clone() for name, one in relayout.iter_load(path, **given)}
        expected = relayout.load(self.folder / "out", 1)
        assert all(self._same(one, expected[name]) for name, one in found.items())

    @staticmethod
    def _same(one: Any, other: Any) -> bool:
        import torch

        return torch.equal(one.contiguous().view(torch.int16), other.contiguous().view(torch.int16))

    def call(self, operation: str) -> None:
        getattr(self, operation)()

    def attempt(
        self, operation: str, what: str, fails: Callable[[], AbstractContextManager[object]], **more: int
    ) -> None:
        """Let an operation fail, and do it again."""
        import torch.distributed as dist

        self.outputs += 1
        if operation == "publish_delta":
            self.call("publish_full")
        dist.barrier()
        seen: dict[str, Any] = {"operation": operation, "what": what, "error": None, **more}
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        started = time.monotonic()
        try:
            with fails():
                self.call(operation)
        except (Exception, KeyboardInterrupt) as error:
            seen["error"] = f"{type(error).__name__}: {error}"
        seen["seconds"] = time.monotonic() - started
        faulthandler.cancel_dump_traceback_later()
        self.path, self.options = None, {}
        dist.barrier()
        seen["left"] = self.left(operation)
        dist.barrier()
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        self.outputs += operation != "publish_delta"
        self.call(operation)
        faulthandler.cancel_dump_traceback_later()
        dist.barrier()
        seen["again"] = self.left(operation) or "nothing"
        if self.number == 0:
            for one in (self.folder / "outputs").iterdir():
                shutil.rmtree(one) if one.is_dir() else one.unlink()
        dist.barrier()
        self.seen.append(seen)
        (self.folder / f"member-{self.number}.json").write_text(json.dumps(self.seen))

    def left(self, operation: str) -> str:
        """What there is of an output: nothing, "complete", or what is wrong with it."""
        import relayout

        output = self.output()
        names = sorted(path.name for path in output.parent.iterdir())
        hidden = [name for name in names if name.startswith(".") and not name.endswith("-lock")]
        if self.number or "load" in operation or "fill" in operation:
            return ""
        if hidden:
            return f"hidden: {hidden}"
        if not output.exists():
            return ""
        if "publish" in operation:
            entries = relayout.Steps(str(output)).entries()
            for entry in entries:
                follower = relayout.Follower(str(output), 0)
                follower.update(entry.step)
            return "complete" if entries else ""
        return "complete" if relayout.verify(output).ok else "damaged"


def _fails_at_messages(
    folder: Path, num_members: int, every: int, seed: int, operations: list[str], number: int
) -> None:
    member, messages = Member(folder, number, num_members), Messages()
    for operation in operations:
        member.outputs += 1
        if operation == "publish_delta":
            member.call("publish_full")
        for _ in range(2):  # The first save of a group has a message more.
            member.outputs += operation != "publish_delta"
            with messages.failing(None, ""):
                member.call(operation)
        count = messages.count
        for place, at in enumerate(range(count)):
            ways = [WAYS[(place + seed) % len(WAYS)]] if every > 1 else WAYS
            if operation == "save_background":  # Ctrl-C ends the wait for its result.
                ways = [way for way in ways if way != "signal"]
            for way in ways if not (place + seed) % every else ():
                victim = (num_members - 1, 0)[(place // len(WAYS)) % 2]
                fails = partial(messages.failing, at, way) if number == victim else nullcontext
                member.attempt(operation, f"{way}, member {victim}", fails, at=at + 1, of=count)


def _is_killed(folder: Path, num_members: int, operation: str, message: int, number: int) -> None:
    member, messages = Member(folder, number, num_members), Messages()
    member.call("publish_full" if operation == "publish_delta" else operation)
    member.outputs += operation != "publish_delta"
    import torch.distributed as dist

    dist.barrier()
    seen: dict[str, Any] = {"operation": operation, "what": f"killed at message {message + 1}", "error": None}
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    started = time.monotonic()
    try:
        with messages.failing(message, "exit") if number == num_members - 1 else nullcontext():
            member.call(operation)
    except Exception as error:
        seen["error"] = f"{type(error).__name__}: {error}"
    seen |= {"seconds": time.monotonic() - started, "again": "nothing"}
    faulthandler.cancel_dump_traceback_later()
    (folder / f"member-{number}.json").write_text(json.dumps([seen]))
    os._exit(0 if number < num_members - 1 else EXIT_CODE)


def _raising(name: str, error: Callable[[], BaseException]) -> Callable[[Member], AbstractContextManager[object]]:
    return lambda member: patch(name, side_effect=lambda *_, **__: (_ for _ in ()).throw(error()))


def _options(**options: Any) -> Callable[[Member], AbstractContextManager[object]]:
    def fails(member: Member) -> AbstractContextManager[object]:
        member.options = options
        return nullcontext()

    return fails


def _path(name: str) -> Callable[[Member], AbstractContextManager[object]]:
    def fails(member: Member) -> AbstractContextManager[object]:
        member.path = str(member.folder / name)
        return nullcontext()

    return fails


def _fire() -> OSError:
    return OSError(errno.EIO, ON_FIRE)


SAVES = ("save", "save_shards", "save_background", "save_pretrained")
PUBLISHES = ("publish_full", "publish_delta")
LOADS = ("load", "load_plain", "iter_load", "fill", "fill_converted")
PLAN_OF_NONE = "/nowhere/plan.toml"
CAUSES: list[tuple[str, tuple[str, ...], Callable[[Member], AbstractContextManager[object]]]] = [
    ("its plan is missing", SAVES[:3], _options(plan=PLAN_OF_NONE)),
    ("another degree", SAVES, _options(tp=1)),
    ("memory is no number", SAVES, _options(memory="much")),
    ("threads is no number", SAVES, _options(threads="many")),
    ("no such dtype", SAVES, _options(dtype=3)),
    ("another output", SAVES[:1], _options(max_shard_size="50KB")),
    ("another step", PUBLISHES, _options(step=7)),
    ("no such step", PUBLISHES, _options(step=-1)),
    ("planning fails", (*SAVES, *PUBLISHES), _raising("relayout.train.save.checkpoint_of", _fire)),
    ("planning is interrupted", SAVES, _raising("relayout.train.save.checkpoint_of", KeyboardInterrupt)),
    ("digests fail", SAVES[:1], _raising("relayout.loader.held.HeldTensor.digest", _fire)),
    ("copying fails", SAVES[1:2], _raising("relayout.loader.held.HeldTensor.copy", _fire)),
    ("writing fails", (*SAVES, "publish_full"), _raising("os.pwrite", _fire)),
    ("comparing fails", PUBLISHES[1:], _raising("relayout.loader.held.HeldTensor.bytes_of", _fire)),
    ("noting fails", SAVES, _raising("relayout.publish.output.LocalOutput.keep", _fire)),
    ("no such rank", ("load", "load_plain", "iter_load"), _options(rank=7)),
    ("another rank", ("load", "iter_load"), _options(rank=0)),
    ("threads is 0", LOADS, _options(threads=0)),
    ("other names", LOADS, _options(names="**.mlp.**")),
    ("no such backend", LOADS, _options(backend="fast")),
    ("another backend", ("fill", "fill_converted"), _options(backend="direct")),
    ("verified", ("load", "iter_load", "fill_converted"), _options(verify=True)),
    ("its folder is missing", LOADS, _path("nothing")),
    ("its files end too early", ("load", "iter_load", "fill_converted"), _path("out-cut")),
    ("its file ends too early", ("load_plain", "fill"), _path("source-cut")),
    ("memory is full", LOADS[3:], _raising("relayout.loader.backends.host.reserve", MemoryError)),
]
"""Why the second member fails: the name, in which operations, and what it does."""


def _fails_by_causes(folder: Path, num_members: int, most: int, number: int) -> None:
    member = Member(folder, number, num_members)
    for operation in (*SAVES, *PUBLISHES, *LOADS):
        for what, operations, fails in CAUSES:
            if operation in operations[:most]:
                is_me = number == 1  # It writes files, also of three members for two ranks.
                member.attempt(operation, what, partial(fails, member) if is_me else nullcontext)


class _Rules:
    """Members that do what leaves others waiting where nobody looks."""

    def __init__(self, folder: Path, number: int) -> None:
        self.member, self.folder, self.found = Member(folder, number, 2), folder, dict[str, Any]()

    def case(self, name: str, call: Callable[[], Any]) -> None:
        """Note what a call returns or raises."""
        try:
            self.found[name] = call()
        except (Exception, KeyboardInterrupt) as error:
            self.found[name] = f"{type(error).__name__}: {error}"

    def save(self, name: str, value: int, **options: Any) -> Any:
        import relayout

        tensors = {key: one + value for key, one in weights_of(0).items()}
        given = {"config": CONFIG, "tp": 2, "group": self.member.group, **options}
        done = relayout.save(tensors, self.folder / name, **given)
        return done if given.get("background") else None

    def break_rules(self) -> None:
        from relayout.loader.group.collectives import Group

        world, number = self.member.group, self.member.number

        def in_block(message: Callable[[Group], Any]) -> Any:
            group = Group(world)
            with group.collective():
                return message(group)

        def nested(group: Group) -> None:
            with group.collective():
                pass

        nothing: Any = None
        self.case("a message in a block", lambda: in_block(lambda group: group.all_gather(1)))
        self.case("a block in a block", lambda: in_block(nested))
        self.case("an exchange outside", lambda: Group(world).exchange(nothing, nothing, nothing, nothing))
        self.case("a broadcast outside", lambda: Group(world).broadcast([]))
        self.case("other calls", lambda: in_block(lambda _: None) if number else Group(world).all_gather(1))
        self.case("afterwards", lambda: Group(world).all_gather(number))

    def take_turns(self) -> None:
        """Save in the foreground of a thread, which the first member's progress holds up, and then behind that."""
        is_running, is_second = threading.Event(), threading.Event()

        def report(done: int, total: int) -> None:
            is_running.set()
            is_second.wait(HANG_SECONDS)

        progress = None if self.member.number else report
        thread = threading.Thread(target=self.case, args=["first", lambda: self.save("first", 1, progress=progress)])
        thread.start()
        if not self.member.number:
            assert is_running.wait(HANG_SECONDS)
            (self.folder / "running").touch()
        while not (self.folder / "running").exists():
            time.sleep(0.01)
        future = self.save("second", 2, background=True)
        time.sleep(0.5)  # It would send its messages now.
        is_second.set()
        self.case("second", lambda: future.result() and None)
        thread.join()

    def interrupt_a_wait(self) -> None:
        """Save behind one that the first member's progress holds up until the other has pressed Ctrl-C."""
        from relayout.train import save as saving

        interrupted = self.folder / "interrupted"

        def report(done: int, total: int) -> None:
            while not interrupted.exists():
                time.sleep(0.01)

        first = self.save("held", 8, background=True, progress=None if self.member.number else report)
        line = saving._lines[self.member.group]
        before = line._last

        def interrupt() -> None:
            while line._last is before:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGINT)

        if self.member.number:
            threading.Thread(target=interrupt).start()
        self.case("waits in line", lambda: self.save("interrupted-save", 8))
        interrupted.touch()
        self.case("held up", lambda: first.result() and None)
        self.case("after a wait", lambda: self.save("after", 8))

    def change_orders(self) -> None:
        import relayout

        number, world = self.member.number, self.member.group
        orders = [("one", "two"), ("two", "one")]
        futures = {name: self.save(name, 3, background=True) for name in orders[number]}
        for name, future in futures.items():
            self.case(f"other order, {name}", future.result)
        publisher = relayout.Publisher(self.folder / "steps", config=CONFIG, tp=2, group=world)
        future = self.save("three", 4, background=True) if not number else None
        self.case("a step, not a save", lambda: publisher.publish(weights_of(0), 1))
        self.case("a save, not a step", (future or self.save("three", 4, background=True)).result)
        self.case("in progress", lambda: self.save("outside", 6, progress=lambda *_: self.save("inside", 6)))
        self.case("saved at last", lambda: self.save("last", 5))

    def stand_still(self) -> None:
        import torch.distributed as dist

        from relayout.loader.group.collectives import Group

        (self.folder / f"pid-{self.member.number}").write_text(str(os.getpid()))
        group = dist.new_group([0, 1], timeout=timedelta(seconds=3))
        self.save("short", 7, group=group)
        gathered = Group._gathered if not self.member.number else _stands_still(Group._gathered)
        with patch.object(Group, "_gathered", gathered):
            self.case("stands still", lambda: self.save("still", 7, group=group))
        if not self.member.number:
            os.kill(int((self.folder / "pid-1").read_text()), signal.SIGCONT)


def _keeps_rules(folder: Path, number: int) -> None:
    rules = _Rules(folder, number)
    faulthandler.dump_traceback_later(2 * HANG_SECONDS, exit=True)
    rules.break_rules()
    rules.take_turns()
    rules.interrupt_a_wait()
    rules.change_orders()
    rules.stand_still()
    (folder / f"member-{number}.json").write_text(json.dumps(rules.found))


def _stands_still(gathered: Callable[..., Any]) -> Callable[..., Any]:
    """What stops this process at a second message; another one lets it go on."""
    count = 0

    def stop(*given: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        return gathered(*given)

    return stop
