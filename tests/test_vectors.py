"""Checkpoints that strangers might send: each vector of vectors.toml is refused in one line, and leaves no trace."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest
import safetensors

sys.path.append(str(Path(__file__).parent.parent / "tools"))

from vectors import CONFIG, INDEX, file_of, stock_verdict

import relayout
from relayout.cli.app import main
from relayout.errors import FormatError, PlanError

FOLDER = Path(__file__).parent / "vectors"
LIST = tomllib.loads((FOLDER / "vectors.toml").read_text(encoding="utf-8"))
VECTORS: list[dict[str, Any]] = LIST["vector"]
PARSERS = {"header", "index", "config", "manifest", "table", "record", "plan", "rank_file", "paths"}
MEMORY_NBYTES = 3 * 2**30
"""Address space of a process that is given a bomb."""
SECONDS = 60
MAX_LINE = 2000
"""Characters of an error, but for the path of the checkpoint."""
VARIABLES = ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES", "TERM")


class Run(Protocol):
    """Runs the command to its end."""

    def __call__(self, words: list[str], *, limited: bool = False) -> tuple[int, str, str]: ...


def named(only: Callable[[dict[str, Any]], bool] = lambda one: True) -> Any:
    return [pytest.param(one, id=one["name"]) for one in VECTORS if only(one)]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """In this process, or `limited` in one of its own: exit code, stdout, stderr."""

    def run_it(words: list[str], *, limited: bool = False) -> tuple[int, str, str]:
        if limited:
            done = subprocess.run(
                [sys.executable, "-m", "relayout", *words],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                timeout=SECONDS,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY_NBYTES, MEMORY_NBYTES)),
            )
            return done.returncode, done.stdout, done.stderr
        monkeypatch.setattr(sys, "argv", ["relayout", *words])
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        code = end.value.code or 0
        assert isinstance(code, int)
        return code, *capfd.readouterr()

    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield run_it
    for number, handler in before.items():
        signal.signal(number, handler)


def laid_out(vector: Mapping[str, Any], place: Path) -> Path:
    """The vector's checkpoint: the base, what replaces or joins it, and what git cannot store."""
    folder = place / "checkpoint"
    shutil.copytree(FOLDER / "base" / vector["base"], folder)
    if (FOLDER / vector["name"]).exists():
        shutil.copytree(FOLDER / vector["name"], folder, dirs_exist_ok=True)
    for name, kind in vector.get("made", {}).items():
        make(folder / name, kind, place)
    return folder


def make(path: Path, kind: str, place: Path) -> None:
    """Put a thing in the place of a file: `fifo`, `socket`, `folder`, `nothing`, `hole NBYTES`, or `link TARGET`.

    A link's target may be {self}, the link, or {outside}, a copy of the file that lies outside of the checkpoint.
    """
    outside = place / "outside" / path.name
    if "{outside}" in kind:
        outside.parent.mkdir()
        shutil.copyfile(path, outside)
    path.unlink(missing_ok=True)
    match kind.split():
        case ["fifo"]:
            os.mkfifo(path)
        case ["folder"]:
            path.mkdir()
        case ["nothing"]:
            pass
        case ["hole", nbytes]:
            path.touch()
            os.truncate(path, int(nbytes))
        case ["socket"]:
            # The name of a socket has about 100 bytes at most.
            here = os.open(path.parent, os.O_RDONLY)
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(f"/proc/self/fd/{here}/{path.name}")
            os.close(here)
        case ["link", target]:
            path.symlink_to(target.format(self=path.name, outside=outside))
        case _:
            raise AssertionError(kind)


def seen(place: Path) -> set[str]:
    """Everything there is, hidden or not."""
    return {path.relative_to(place).as_posix() for path in place.rglob("*")}


def words_of(vector: Mapping[str, Any], folder: Path, out: Path) -> list[str]:
    return [word.format(path=folder, out=out) for word in vector["command"].split()]


def check_line(text: str, folder: Path) -> str:
    """The one line of a refusal, which steers no terminal and is no flood."""
    assert "Traceback" not in text
    assert text.endswith("\n"), text[-200:]
    lines = text[:-1].split("\n")
    assert len(lines) == 1, text[:2000]
    assert lines[0].isprintable(), ascii(lines[0][:2000])
    assert len(lines[0].replace(str(folder), "")) <= MAX_LINE, f"{len(lines[0])} characters: {lines[0][:200]}"
    return lines[0]


@pytest.mark.parametrize("vector", named())
def test_a_vector_is_refused_and_nothing_is_written(vector: dict[str, Any], run: Run, tmp_path: Path) -> None:
    folder, out = laid_out(vector, tmp_path), tmp_path / "out"
    before = seen(tmp_path)
    code, stdout, stderr = run(words_of(vector, folder, out), limited=vector.get("is_bomb", False))
    if vector.get("exit", 2) == 1:  # A verification that found a difference: told on stdout.
        assert (code, stderr) == (1, "")
        assert re.search(vector["says"], stdout), stdout
    else:
        assert code == 2, (code, stdout[-500:], stderr[-500:])
        assert re.search(vector["says"], check_line(stderr, folder)), stderr[:2000]
        assert stdout == ""
    assert seen(tmp_path) == before


def call(what: str, path: Path, out: Path) -> None:
    """One of the calls of a vector's `python`."""
    match what.split():
        case ["load", rank]:
            relayout.load(path, int(rank))
        case ["load", rank, "of", tp]:
            relayout.load(path, int(rank), tp=int(tp))
        case ["restore"]:
            relayout.restore(path, out)
        case ["inspect"]:
            relayout.inspect(path)
        case ["verify"]:
            report = relayout.verify(path)
            if not report.ok:
                raise FormatError(str(report.differences[0]))
        case _:
            raise AssertionError(what)


@pytest.mark.filterwarnings("ignore:.*a plain checkpoint")
@pytest.mark.parametrize("vector", named(lambda one: one.get("python") and not one.get("is_bomb")))
def test_python_refuses_a_vector(vector: dict[str, Any], tmp_path: Path) -> None:
    folder, out = laid_out(vector, tmp_path), tmp_path / "out"
    target = Path(words_of(vector, folder, out)[1])
    errors = {"FormatError": FormatError, "PlanError": PlanError}[vector.get("error", "FormatError")]
    before = seen(tmp_path)
    for what in vector["python"]:
        try:
            call(what, target, out)
        except errors:
            continue
        pytest.fail(f"{what}: no error")
    assert seen(tmp_path) == before


def test_the_list_is_that_of_the_folders() -> None:
    names = [one["name"] for one in VECTORS]
    stored = {path.parent.relative_to(FOLDER) for path in FOLDER.rglob("*") if path.is_file()}
    found = {"/".join(path.parts[:2]) for path in stored if path.parts and path.parts[0] != "base"}
    assert len(names) == len(set(names)) >= 80
    assert found == {one["name"] for one in VECTORS if (FOLDER / one["name"]).exists()}
    assert [one["name"] for one in VECTORS if one["name"] not in found and not one.get("made")] == []
    assert {name.split("/")[0] for name in names} == PARSERS
    assert {one["base"] for one in VECTORS} == {"plain", "converted"}
    for one in VECTORS:
        assert one["reason"]
        re.compile(one["says"])


def test_the_bases_are_valid(run: Run, tmp_path: Path) -> None:
    plain, converted, out = FOLDER / "base" / "plain", FOLDER / "base" / "converted", tmp_path / "out"
    plan = str(FOLDER / "base" / "plan.toml")
    for words in (
        ["inspect", str(plain)],
        ["convert", str(plain), "--tp", "2", "-o", str(out)],
        ["convert", str(plain), "--tp", "2", "--plan", plan, "-o", str(tmp_path / "by-plan")],
        ["inspect", str(converted)],
        ["verify", str(converted), "--source", str(plain)],
        ["restore", str(converted), "-o", str(tmp_path / "restored")],
    ):
        code, _, stderr = run(words)
        assert (code, stderr) == (0, ""), words
    for rank in range(2):
        stored, anew = relayout.load(converted, rank), relayout.load(out, rank)
        assert stored.keys() == anew.keys()
        assert all(bool((stored[name] == anew[name]).all()) for name in stored)
    for path in plain.iterdir():
        assert (tmp_path / "restored" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("vector", named(lambda one: one["stock"] != "none"))
def test_the_stock_readers_verdict_is_as_listed(vector: dict[str, Any]) -> None:
    folder = FOLDER / vector["name"]
    found = stock_verdict(vector["name"], folder, [path.name for path in folder.iterdir()])
    if vector["name"].startswith(("header/", "rank_file/")) and safetensors.__version__ != LIST["safetensors"]:
        # Another version has other words.
        assert found.split(":")[0] == vector["stock"].split(":")[0]
    else:
        assert found == vector["stock"]


# Too large to be stored. Each is done or refused, in little memory and time.


def many_tensors() -> bytes:
    """A valid header of 50,000 tensors."""
    entries = (f'"t.{i}.weight":{{"dtype":"I8","shape":[1],"data_offsets":[{i},{i + 1}]}}' for i in range(50_000))
    return file_of("{" + ",".join(entries) + "}", bytes(50_000))


HEAVY: dict[str, tuple[str, Callable[[], bytes]]] = {
    "50,000 tensors": ("hostile.safetensors", many_tensors),
    "a name of 40 million dots": (
        "hostile.safetensors",
        lambda: file_of(b'{"' + b"." * 40_000_000 + b'":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}}', b"x"),
    ),
    "a header of brackets": ("hostile.safetensors", lambda: file_of(b"[" * 99_999_999)),
    "a header of lists": ("hostile.safetensors", lambda: file_of(b'{"x":[' + b"[]," * 33_000_000 + b"[]]}")),
    "an index of objects": (INDEX, lambda: b'{"x":[' + b"{}," * 20_000_000 + b'{}],"weight_map":{}}'),
    "a config of lists": (CONFIG, lambda: b'{"x":[' + b"[]," * 5_000_000 + b"[]]}"),
}


@pytest.mark.parametrize("name", HEAVY)
def test_a_bomb_is_done_or_refused(name: str, run: Run, tmp_path: Path) -> None:
    folder, out = tmp_path / "checkpoint", tmp_path / "out"
    shutil.copytree(FOLDER / "base" / "plain", folder)
    file, content = HEAVY[name]
    (folder / file).write_bytes(content())
    source = folder / file if file not in (CONFIG, INDEX) else folder
    code, _, stderr = run(["inspect", str(source)], limited=True)
    assert code in (0, 2), stderr[:2000]
    if code:
        assert check_line(stderr, folder).startswith(f"relayout: error: {folder}/{file}")
    assert not out.exists()
