"""Counts the modules in which a function runs, for each call path of a user or an engine.

Modules that are only imported do not count. Each walk is made in a process of its own, with a small Llama; the store is
the tests' server of S3, and vLLM the tests' stand-in for it.
"""

from __future__ import annotations

import argparse
import inspect
import io
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import FrameType

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
    from support.conversions import stock_tensors
    from support.fake_vllm import Model, install

    with pytest.MonkeyPatch.context() as patch:
        install(patch).load(folder / "out", Model(stock_tensors(folder / "model"), RANK, TP))


WALKS: dict[str, Callable[[Path], None]] = {
    walk.__name__: walk for walk in (convert, load, iter_load, load_s3, verify, vllm)
}


def rooms_of(walk: Callable[[Path], None], folder: Path) -> list[str]:
    """The modules in which a function runs while a walk is made, on any thread."""
    entered: set[str] = set()

    def note(frame: FrameType, event: str, found: object) -> None:
        # The body of a class or a module is no function.
        if event == "call" and frame.f_code.co_flags & inspect.CO_NEWLOCALS:
            file = os.path.realpath(frame.f_code.co_filename)
            if file.startswith(PRODUCT) and not file.endswith("__init__.py"):
                entered.add(os.path.relpath(file, ROOT))

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
    return sorted(entered)


def make_model(folder: Path) -> None:
    """A small Llama of random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(**SIZE, **heads)).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(prog="rooms", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-v", "--verbose", action="store_true", help="print the modules, too")
    parser.add_argument("--walk", choices=WALKS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.walk:
        print(*rooms_of(WALKS[given.walk], given.folder), sep="\n")
        return
    with tempfile.TemporaryDirectory(prefix="relayout-rooms-") as folder:
        make_model(Path(folder) / "model")
        for name, walk in WALKS.items():
            words = [sys.executable, "-m", "rooms", "--walk", name, "--folder", folder]
            entered = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, timeout=600).stdout.split()
            print(f"{len(entered):3}  {name:9}  {walk.__doc__}")
            if given.verbose:
                print(*entered, sep="\n       ", end="\n\n")


if __name__ == "__main__":
    main()
