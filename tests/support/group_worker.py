"""Four processes that load as one torch.distributed group, one case after the other, and what each of them saw.

`main` with `FOLDER` in sys.argv: FOLDER/out is a conversion for two ranks. Each process writes FOLDER/member-N.json.
They are forked from one that has imported everything, and that has put the files into a toy store: each then has its
own, which counts the bytes that it reads, and whose requests can be made to fail in one process alone.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from support import prestarted
from support.toy_store import Fault, shelf

from relayout.storage.stores import REGISTRY

NUM_MEMBERS = 4
URL = "toy://group/out"
FILES = "*.safetensors"
PIECE_NBYTES = 2**19


def digests(tensors: dict[str, Any]) -> dict[str, str]:
    """What identifies each tensor."""
    import torch

    return {
        name: f"{tensor.dtype} {list(tensor.shape)} "
        + hashlib.sha1(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }


def failure() -> Exception:
    return OSError(errno.EIO, "the drive is on fire", "model")


def forked(work: Callable[[int], None], num_members: int = NUM_MEMBERS) -> list[int]:
    """Exit codes of processes that are forked to do some work, given their numbers."""
    pids = []
    for number in range(num_members):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                work(number)
                code = 0
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(code)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def join(folder: Path, number: int, num_members: int = NUM_MEMBERS) -> None:
    """Become a member of the group; `folder` is for it alone."""
    import datetime

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=number,
        world_size=num_members,
        timeout=datetime.timedelta(seconds=120),
    )


def seen_by_members(folder: Path, script: str, *arguments: str) -> list[Any]:
    """Run a script that forks the members, given their folder; what each of them wrote there."""
    done = prestarted.run(folder, *arguments, script=script, imports=prestarted.GROUP, env=prestarted.ONE_THREAD)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"member-{number}.json").read_text()) for number in range(NUM_MEMBERS)]


def load_together(folder: Path, **case: Any) -> list[dict[str, str]]:
    """What each member has after a load, see `from_store`; `folder` is for this one alone."""
    script = "from support.group_worker import from_store; from_store()"
    return seen_by_members(folder, script, json.dumps(case))


class Seen:
    """What a member saw, case by case; also in its file."""

    def __init__(self, folder: Path, number: int) -> None:
        self.cases: dict[str, Any] = {}
        self._file = folder / f"member-{number}.json"
        self._number = number
        self._mine = shelf("group")

    def case(self, name: str, load: Callable[..., dict[str, Any]], *args: Any, **options: Any) -> None:
        """Load, and note the tensors or the error, what was read of the shelf, and the time; then remove all faults."""
        before, started = self._mine.read_nbytes, time.monotonic()
        result: dict[str, Any] = {}
        try:
            result["tensors"] = digests(load(*args, **options))
        except Exception as error:
            result |= {"kind": type(error).__name__, "error": str(error), "code": getattr(error, "code", None)}
        result |= {"nbytes": self._mine.read_nbytes - before, "seconds": time.monotonic() - started}
        self._mine.faults.clear()
        self.cases[name] = result
        self._file.write_text(json.dumps(self.cases))

    def fault_of(self, member: int, **how: Any) -> None:
        """Have reads of weights fail in the next case of one member."""
        if self._number == member:
            self._mine.faults.append(Fault("read", FILES, **how))


def main() -> None:
    folder = Path(sys.argv[1])
    REGISTRY["toy"] = "support.toy_store"
    for file in (folder / "out").iterdir():
        shelf("group").write(f"out/{file.name}", file.read_bytes())
    codes = forked(partial(_member, folder))
    assert codes == [0, 0, 0, -signal.SIGKILL], codes


def one_is_missing() -> None:
    """`FOLDER`: a group with a short timeout, of which the members 1 and 2 never call."""
    folder = Path(sys.argv[1])
    codes = forked(partial(_one_is_missing, folder))
    assert codes == [0, 0, 0, 0], codes


def _one_is_missing(folder: Path, number: int) -> None:
    import datetime

    import torch.distributed as dist

    from relayout.loader.api import load
    from relayout.loader.group import collectives

    collectives._QUIET_SECONDS = 0.2
    join(folder, number)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("relayout").addHandler(handler)
    group = dist.new_group(range(NUM_MEMBERS), timeout=datetime.timedelta(seconds=3))
    seen = Seen(folder, number)
    seen.case("all call", load, str(folder / "out"), 1, group=group)
    if number in (0, 3):
        seen.case("some never call", load, str(folder / "out"), 1, group=group)
    else:
        time.sleep(6)
    seen.cases["said"] = said
    (folder / f"member-{number}.json").write_text(json.dumps(seen.cases))


def from_store() -> None:
    """One load by four processes: `FOLDER CASE`, the latter `{"path": ..., "rank": ..., "by": "load", ...}` as JSON.

    Without a rank, each loads that of its own number. "environment" are more variables. With "message", the application
    has sent one from the first member to the second before they load, which receives it afterwards.
    """
    folder, case = Path(sys.argv[1]), json.loads(sys.argv[2])
    os.environ.update(case.pop("environment", {}))
    codes = forked(partial(_load_from_store, folder, case))
    assert codes == [0, 0, 0, 0], codes


def _load_from_store(folder: Path, case: dict[str, Any], number: int) -> None:
    import torch
    import torch.distributed as dist

    from relayout.loader import api

    dist.set_debug_level_from_env()
    join(folder, number)
    load, has_message = getattr(api, case.pop("by", "load")), case.pop("message", False)
    case.setdefault("rank", number)
    message, received = torch.arange(1000), torch.zeros(1000, dtype=torch.int64)
    sent = dist.isend(message, dst=1) if has_message and number == 0 else None
    found = digests(dict(load(group=dist.group.WORLD, **case)))
    if has_message and number == 1:
        dist.recv(received, src=0)
        assert torch.equal(received, message)
    if sent is not None:
        sent.wait()
    dist.all_reduce(message)  # The application goes on with its group.
    (folder / f"member-{number}.json").write_text(json.dumps(found))


def _member(folder: Path, number: int) -> None:
    import torch.distributed as dist

    from relayout.loader.api import iter_load, load
    from relayout.loader.backends.host import HostArena
    from relayout.loader.group import sharing
    from relayout.loader.group.collectives import Group
    from relayout.loader.group.plan import assign_reads

    join(folder, number)
    sharing.assign_reads = partial(assign_reads, most_nbytes=PIECE_NBYTES)  # type: ignore[assignment]
    mine, out, member = shelf("group"), str(folder / "out"), Seen(folder, number)
    seen, fault_of = member.cases, member.fault_of

    def stream(path: str, rank: int, most: int | None = None, forks: bool = False, **options: Any) -> dict[str, Any]:
        """Tensors one by one; `most` of them at most. A child that is forked on the way closes its iterator."""
        tensors = iter_load(path, rank, **options)
        found = dict([next(tensors)])
        if forks:
            child = os.fork()
            if not child:
                tensors.close()  # type: ignore[attr-defined]
                os._exit(0)
            assert not os.waitpid(child, 0)[1]
        found |= {name: tensor.clone() for name, tensor in islice(tensors, most)}
        tensors.close()  # type: ignore[attr-defined]
        return found

    def case(
        name: str, path: str = URL, rank: int = 1, by: Callable[..., dict[str, Any]] = load, **options: Any
    ) -> None:
        member.case(name, by, path, rank, group=dist.group.WORLD, **options)

    def failing(*_: object, **__: object) -> None:
        raise failure()

    done: list[tuple[int, int]] = []
    for backend in ("direct", "buffered"):
        case(backend, out, backend=backend)
    case("store", progress=lambda *told: done.append(told))
    seen["progress"] = done
    case("verified", verify=True)
    case("some, verified", names="**.mlp.**", verify=True)
    case("one rank, verified", rank=0, tp=1, verify=True)
    case("four ranks", rank=2, tp=4)
    case("some", names="**.0.mlp.**")
    case("another rank", rank=number // 3)
    case("verified by one", verify=number == 0)
    case("another conversion", str(folder / "foreign") if number == 2 else out)
    case("plain", str(folder / "source"), tp=2, by=stream)
    case("no such rank", rank=7 if number == 1 else 1)
    case("bad option", threads=0 if number == 3 else None)
    case("bad progress", progress="a bar" if number == 2 else None)
    fault_of(2, after=4, times=None, error=failure)
    case("a read fails")
    done = []
    memory = f"{6 + 6 * number}MiB"  # Alone, they would cut other batches: of one tensor each, or of several.
    case("streamed", by=stream, forks=True, memory=memory, progress=lambda *told: done.append(told))
    seen["streamed"]["progress"] = done
    case("streamed, verified", by=stream, verify=True, memory=memory)
    case("streamed, directly", out, by=stream, backend="direct")
    case("streamed, four ranks", rank=2, by=stream, tp=4)
    case("streamed, some", by=stream, names="**.0.mlp.**")
    case("streamed, another rank", rank=number // 3, by=stream)
    case("streamed, other names", by=stream, names=f"**.{number // 3}.mlp.**")
    case("streamed, verified by one", by=stream, verify=number == 0)
    case("streamed, bad option", by=stream, memory="1" if number == 1 else None)
    check_same = sharing.check_same
    if number == 2:
        sharing.check_same = failing  # type: ignore[assignment]
    case("fails between blocks", by=stream)
    sharing.check_same = check_same
    case("stopped early", by=stream, memory=memory, most=2 if number == 1 else None)
    fault_of(2, after=4, times=None, error=failure)
    case("a streamed read fails", by=stream, memory=memory)
    name = next(name for name in mine.names("out") if "rank-1-part" in name)
    good = mine.objects[name][0]
    half = len(good) // 2  # In a chunk that one member reads.
    mine.write(name, good[:half] + bytes([good[half] ^ 1]) + good[half + 1 :])
    case("damaged", verify=True)
    case("streamed, damaged", by=stream, memory=memory, verify=True)
    mine.write(name, good)
    signed, trust = str(folder / "signed"), str(folder / "signer.toml")
    for name, options in {"": {}, ", some": {"names": "**.0.mlp.**"}, ", four ranks": {"rank": 2, "tp": 4}}.items():
        case(f"trusted{name}", signed, trust=trust, **options)
        case(f"streamed, trusted{name}", signed, trust=trust, by=stream, memory=memory, **options)
    broadcast = Group.broadcast

    def lie(group: Group, portions: list[tuple[int, Any]]) -> None:
        for owner, sent in portions:
            if owner == number == 2:
                sent[len(sent) // 2] ^= 1
        broadcast(group, portions)

    Group.broadcast = lie  # type: ignore[method-assign]
    case("a member lies", signed, trust=trust)
    case("streamed, a member lies", signed, trust=trust, by=stream)
    case("streamed in small batches, a member lies", signed, trust=trust, by=stream, memory=memory)
    case("a member lies, and is believed", signed)
    Group.broadcast = broadcast  # type: ignore[method-assign]
    case("trusted by one", signed, trust=trust if number == 0 else None, verify=number > 0)
    case("afterwards", verify=True)
    discarded: list[bool] = []
    HostArena.discard = lambda self: discarded.append(True)  # type: ignore[method-assign]
    fault_of(2, after=4, times=None, error=failure)
    case("fails, all alive")
    seen["fails, all alive"]["discarded"] = bool(discarded)
    discarded.clear()
    fault_of(3, after=4, act=lambda: os.kill(os.getpid(), signal.SIGKILL))
    case("killed")
    seen["killed"]["discarded"] = bool(discarded)
    (folder / f"member-{number}.json").write_text(json.dumps(seen))
