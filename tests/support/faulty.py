"""Loads from files that fail, by every way and call, one after the other in a process under `faults.c`.

Run as a program, it prints what came of each, as JSON; test_load_faults.py looks at it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.loader_fixtures import (
    BLOCK,
    DEVICE,
    MIB,
    OWN,
    Holdings,
    extents,
    fake_device,
    holdings,
    other_threads,
    whole_tensors,
)

import relayout

PART = "model-rank-0-part-2.safetensors"
"""The file that fails."""
CUT = 500_001
"""Bytes that are left of it when it is cut: the end lies in a block."""
LARGE = 3 * MIB
"""Mappings of so many bytes are memory of tensors: arenas."""
IN_FLIGHT = 12 * MIB
"""Some batches, of which each has an arena of a huge page and more."""
QUIET = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(MIB), "PYTHONMALLOC": "malloc"}
"""For the environment: one heap for all that is small, and a mapping, always, for what is not."""
Tensors = dict[str, torch.Tensor]


@cache
def stored(folder: Path, pattern: str) -> Tensors:
    """What the files hold, while they are good."""
    return {name: tensor.clone() for name, tensor in whole_tensors(folder, pattern).items()}


def load_some(folder: Path, backend: str, found: Tensors) -> None:
    names = ["**_proj.weight", "**layernorm**"]
    found |= relayout.load(folder, 0, backend=backend, names=names)


def load_into(folder: Path, backend: str, found: Tensors) -> None:
    """Into tensors of which one has its columns together, and must be filled by way of other memory."""
    given = {name: torch.empty_like(tensor) for name, tensor in stored(folder, "model-rank-0-*").items()}
    through = "model.layers.1.mlp.down_proj.weight"
    given[through] = torch.empty_like(given[through].t().contiguous()).t()
    found |= relayout.load(folder, 0, backend=backend, into=given)


def iterate(folder: Path, backend: str, found: Tensors) -> None:
    # Not in a loop of this function's: its frame, which an error knows, would keep the last tensor.
    found.update(relayout.iter_load(folder, 0, backend=backend, memory=IN_FLIGHT))


def open_rank(folder: Path, backend: str, found: Tensors) -> None:
    with relayout.open(folder, 0) as opened:
        for name in opened.keys():  # noqa: SIM118 (it is no mapping)
            found[name] = opened.get_tensor(name)


def open_whole(folder: Path, backend: str, found: Tensors) -> None:
    with relayout.safe_open(folder) as opened:
        for name in opened.keys():  # noqa: SIM118 (it is no mapping)
            found[name] = opened.get_tensor(name)


CALLS: Mapping[str, Callable[[Path, str, Tensors], None]] = {
    "load": lambda folder, backend, found: found.update(relayout.load(folder, 0, backend=backend)),
    "load names": load_some,
    "load verify": lambda folder, backend, found: found.update(relayout.load(folder, 0, backend=backend, verify=True)),
    "load into": load_into,
    "load tp": lambda folder, backend, found: found.update(relayout.load(folder, 0, backend=backend, tp=1)),
    "iter_load": iterate,
    "open": open_rank,
    "safe_open": open_whole,
}
TRIALS = [
    *((way, "load") for way in OWN if way not in ("direct", "pinned")),
    *(("auto", call) for call in CALLS if call not in ("load", "load names")),
    ("gds", "iter_load"),
]
"""Every call by one backend, and every backend that has code of its own for a call; "direct" and "pinned" are parts of
"auto" and "gds". What each backend does about its files alone, into either kind of memory, test_backends.py tests."""


class Faults:
    """What `faults.c`, below this process, lets go wrong."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)

    def set(self, *rules: str) -> None:
        self._library.set_faults("\n".join(rules).encode())

    @contextmanager
    def acting(self, act: Callable[[], object] | None) -> Iterator[None]:
        """Call `act` as soon as a call is held, and let it go on."""
        is_over = threading.Event()

        def run() -> None:
            while not self._library.held_faults() and not is_over.is_set():
                time.sleep(0.0005)
            if act is not None and self._library.held_faults():
                act()
            self._library.release_faults()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


class Trial:
    """One way and call, tried with every fault."""

    def __init__(self, folder: Path, foreign: Path, way: str, call: str, others: int) -> None:
        self.file = folder / PART
        self.good = self.file.read_bytes()
        self.foreign = foreign
        is_whole = call in ("load tp", "safe_open")
        self.expected = (
            stored(folder.parent / "source", "*.safetensors") if is_whole else stored(folder, "model-rank-0-*")
        )
        self.faults = Faults()
        self.folder, self.way, self.call = folder, way, call
        self.others = others
        self.backend = "auto" if way in DEVICE else way
        # Of a tensor of which each rank has some rows, which lie together at every degree.
        self.start = next(start for name, (start, _) in extents(self.file).items() if "up_proj" in name)
        self.end = len(self.good)
        assert self.end % BLOCK
        self.again()
        gc.collect()
        self.held = holdings(LARGE, others)

    def again(self, call: str | None = None) -> list[Any]:
        """Load once more: what is wrong, and of which kind."""
        found: Tensors = {}
        try:
            CALLS[call or self.call](self.folder, self.backend, found)
        except Exception as error:
            return [type(error).__name__, str(error)]
        return [self.same(found) and (len(found) == len(self.expected) or self.call == "load names")]

    def same(self, found: Tensors) -> bool:
        return all(
            tensor.dtype == self.expected[name].dtype
            and tensor.shape == self.expected[name].shape
            and torch.equal(
                tensor.contiguous().view(-1).view(torch.uint8),
                self.expected[name].contiguous().view(-1).view(torch.uint8),
            )
            for name, tensor in found.items()
        )

    def go(self, *rules: str, act: Callable[[], object] | None = None) -> dict[str, Any]:
        """Let it go wrong, and see what is left while the error is still at hand."""
        gc.collect()
        found: Tensors = {}
        kept: BaseException | None = None
        self.faults.set(*rules)
        with self.faults.acting(act):
            try:
                CALLS[self.call](self.folder, self.backend, found)
            except BaseException as error:
                kept = error
        self.faults.set()
        result: dict[str, Any] = {"same": self.same(found), "num": len(found)}
        found.clear()
        result["left"] = self.left()
        if kept is not None:
            result |= {"error": type(kept).__name__, "text": str(kept)}
            if isinstance(kept, OSError):
                result |= {"errno": kept.errno, "filename": kept.filename}
        return result

    def abandoned(self) -> list[int]:
        """What iterations leave that nobody ends: some closed, some collected as garbage."""
        for number in range(10):
            iterator: Any = relayout.iter_load(self.folder, 0, backend=self.backend, memory=IN_FLIGHT)
            for _ in range(number % 5):
                next(iterator)
            if number % 2:
                iterator.close()
            else:
                cycle = [iterator]
                cycle.append(cycle)
                del cycle
            del iterator
            gc.collect()
        return self.left()

    def left(self) -> list[int]:
        """What there is more of than before, and stays: memory may be given back a little later than threads end."""
        end = time.monotonic() + 5
        while any(more := grown(self.held, holdings(LARGE, self.others))) and time.monotonic() < end:
            time.sleep(0.05)
        return more

    def repair(self) -> None:
        beside = self.file.with_name("beside")
        beside.write_bytes(self.good)
        beside.rename(self.file)

    def outcomes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Every fault by name, and what came of it."""
        part = f"read|{PART}"
        middle, last = self.start + 100_000, self.end - 100
        hold = f"{part}|@{last}-{self.end}|hold"
        torn = ["read|model-rank|@0-1|short|9"] if self.way == "buffered" else []  # The header comes in pieces.
        for what, start, end in (("whole blocks", middle, middle + 1), ("the last block", last, self.end)):
            yield f"an error in {what}", self.go(f"{part}|@{start}-{end}|eio") | {"fails at": end - 1}
        yield (
            "short and interrupted reads",
            self.go("read|model-rank|/3|short|5000", "read|model-rank|/5|eintr", *torn),
        )
        yield "cut", self.go(hold, act=partial(os.truncate, self.file, CUT))
        yield "cut, once more", {"again": self.again()}
        self.repair()
        yield "replaced", self.go(hold, act=partial(replace, self.folder, self.foreign))
        yield "replaced, once more", {"again": self.again()}
        self.repair()
        yield "unlinked", self.go(hold, act=self.file.unlink)
        yield "unlinked, once more", {"again": self.again()}
        self.repair()
        yield "repaired", {"again": self.again()}
        if self.call == "iter_load":
            yield "abandoned", {"left": self.abandoned()}


def replace(folder: Path, foreign: Path) -> None:
    """Put the same part of another conversion, of the same length, in the place of one that is loaded from."""
    beside = Path(shutil.copy(foreign / PART, folder / "beside"))
    assert beside.stat().st_size == (folder / PART).stat().st_size
    beside.rename(folder / PART)


def grown(before: Holdings, after: Holdings) -> list[int]:
    """What there is more of: descriptors, threads, mappings of files, and large mappings' bytes."""
    return [
        after.descriptors - before.descriptors,
        after.threads - before.threads,
        after.mapped_files - before.mapped_files,
        more
        if (more := after.large - before.large) >= LARGE
        else 0,  # Less is a small mapping that was merged with one.
    ]


@contextmanager
def device(way: str) -> Iterator[None]:
    """The fake device, where the way leads there; nothing may be left on it."""
    if way not in DEVICE:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        for _ in fake_device(patch, way):
            yield


def main(folder: Path, foreign: Path) -> None:
    torch.set_num_threads(1)
    threading.stack_size(2**19)  # Less than what is counted.
    gc.freeze()  # What has been imported is not looked at again and again.
    found = {}
    others = other_threads()
    for way, call in TRIALS:
        with device(way):
            for name, outcome in Trial(folder, foreign, way, call, others).outcomes():
                found[f"{way}: {call}: {name}"] = outcome
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
