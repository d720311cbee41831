"""Counts the modules in which a function runs, for each call path of a user or an engine.

Beside them: the lines of the functions that run, and the pairs of modules that call each other both ways. Modules that
are only imported do not count. Each walk is made in a process of its own, with a small Llama; the store is
the tests' server of S3, and vLLM the tests' stub for it.
"""

from __future__ import annotations

import argparse
import inspect
import io
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).parents[1]
PRODUCT = tuple(f"{ROOT / name}{os.sep}" for name in ("relayout", "loader"))
SIZE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 128}
TP, RANK = 2, 1


def convert(folder: Path) -> None:
    """`relayout convert` of a plain folder."""
    sys.argv = ["relayout", "convert", str(folder / "model"), "--tp", str(TP), "-o", str(folder / "out")]
    with redirect_stdout(io.StringIO()):
        runpy.run_module("relayout", run_name="__main__")


def load(folder: Path) -> None:
    """`relayout.load` of one rank of a converted folder."""
    import relayout

    relayout.load(folder / "out", RANK)


def iter_load(folder: Path) -> None:
    """`relayout.iter_load` of the same."""
    import relayout

    for _ in relayout.iter_load(folder / "out", RANK):
        pass


def load_s3(folder: Path) -> None:
    """`relayout.load` of a URL, for the first time with a cache."""
    from support import s3_server

    import relayout

    with s3_server.running() as server:
        os.environ.update(s3_server.environment(server))
        for file in (folder / "out").iterdir():
            server.put("models", f"out/{file.name}", file.read_bytes())
        relayout.load("s3://models/out", RANK, cache=folder / "cache")


def verify(folder: Path) -> None:
    """`relayout.verify` against the source."""
    import relayout

    assert relayout.verify(folder / "out", source=folder / "model").ok


def vllm(folder: Path) -> None:
    """A worker of vLLM starts from a converted folder."""
    import pytest
    from support.conversions import reference_tensors
    from support.fake_vllm import Model, install

    with pytest.MonkeyPatch.context() as patch:
        install(patch).load(folder / "out", Model(reference_tensors(folder / "model"), RANK, TP))


def publish(folder: Path) -> None:
    """`Publisher.publish` of a step behind the first, by one process."""
    import relayout

    source = folder / "model"
    with _unseen():
        weights = relayout.load(source, 0, tp=1)
        publisher = relayout.Publisher(folder / "steps", config=source / "config.json", tp=TP)
        publisher.publish(weights, 1)
    for name in list(weights)[:3]:
        weights[name] = weights[name] + 1
    publisher.publish(weights, 2)


@contextmanager
def _unseen() -> Iterator[None]:
    """Count nothing within the block."""
    note = sys.getprofile()
    sys.setprofile(None)
    threading.setprofile(None)
    try:
        yield
    finally:
        threading.setprofile(note)
        sys.setprofile(note)


WALKS: dict[str, Callable[[Path], None]] = {
    walk.__name__: walk for walk in (convert, load, iter_load, load_s3, verify, vllm, publish)
}


@dataclass(frozen=True, slots=True)
class Walk:
    """What ran in a walk, on any thread."""

    rooms: list[str]
    num_lines: int
    """Lines of the functions that ran."""
    both_ways: list[tuple[str, str]]
    """Pairs of modules that call each other."""


def walked(walk: Callable[[Path], None], folder: Path) -> Walk:
    """Make a walk, and return what ran."""
    lines: dict[CodeType, int] = {}
    calls: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, found: object) -> None:
        code, to = frame.f_code, _room_of(frame.f_code)
        # The body of a class or a module is no function, and a comprehension is a part of one.
        if event != "call" or to is None or not code.co_flags & inspect.CO_NEWLOCALS or code.co_name.startswith("<"):
            return
        if code not in lines:
            lines[code] = max((line for *_, line in code.co_lines() if line), default=0) - code.co_firstlineno + 1
        caller = frame.f_back
        while caller is not None and _room_of(caller.f_code) is None:
            caller = caller.f_back
        if caller is not None and (source := _room_of(caller.f_code)) is not None:
            calls.add((source, to))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        walk(folder)
    except SystemExit as ended:
        if ended.code:
            raise
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    both_ways = sorted((one, other) for one, other in calls if one < other and (other, one) in calls)
    return Walk(sorted({str(_room_of(code)) for code in lines}), sum(lines.values()), both_ways)


@cache
def _room_of(code: CodeType) -> str | None:
    """Return the module of a function of the product, or None."""
    file = os.path.realpath(code.co_filename)
    is_room = file.startswith(PRODUCT) and not file.endswith("__init__.py")
    return os.path.relpath(file, ROOT) if is_room else None


def make_model(folder: Path) -> None:
    """A small Llama of random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(**SIZE, **heads)).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(prog="rooms", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-v", "--verbose", action="store_true", help="print the modules and pairs, too")
    parser.add_argument("--walk", choices=WALKS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.walk:
        print(json.dumps(asdict(walked(WALKS[given.walk], given.folder))))
        return
    print("rooms  lines  both ways")
    with tempfile.TemporaryDirectory(prefix="relayout-rooms-") as folder:
        make_model(Path(folder) / "model")
        for name, walk in WALKS.items():
            words = [sys.executable, "-m", "rooms", "--walk", name, "--folder", folder]
            printed = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, timeout=600).stdout
            found = json.loads(printed.splitlines()[-1])
            rooms, both_ways = found["rooms"], found["both_ways"]
            print(f"{len(rooms):5}  {found['num_lines']:5}  {len(both_ways):9}  {name:9}  {walk.__doc__}")
            if given.verbose:
                print(*rooms, *(" <> ".join(pair) for pair in both_ways), sep="\n       ", end="\n\n")


if __name__ == "__main__":
    main()
