"""Checkpoints that strangers might send: each of vectors/*.toml is refused in one line, and leaves no trace."""

from __future__ import annotations

import argparse
import json
import re
import resource
import shutil
import signal
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import pytest
from support import prestarted
from support.profile import IS_LONG
from support.tools import built_command
from support.vector_edits import (
    BASES,
    FOLDER,
    INDEX,
    MANIFEST,
    NAMES,
    RECORD,
    TABLES,
    base,
    changed_files,
    file_of,
    laid_out,
    vectors,
)
from vectors import export

import relayout
from relayout.cli.app import main
from relayout.errors import FormatError, PlanError
from relayout.loader.diagnose import diagnose

VECTORS = vectors()
PARSERS = {
    *("header", "index", "config", "manifest", "table", "record", "plan", "rank_file", "paths", "chunks", "digests"),
    "whole",
}
FIELDS = {
    *("name", "base", "edit", "stale", "made", "command", "exit", "reason", "says", "python", "error", "is_bomb"),
}
MEMORY_NBYTES = 3 * 2**30
"""Address space of a process that is given a bomb."""
MAX_LINE = 2000
"""Characters of an error, but for the path of the checkpoint."""
VARIABLES = ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES", "TERM")


COMMANDS = argparse.ArgumentParser(exit_on_error=False)
for argument in ("name", "path"):
    COMMANDS.add_argument(argument)
COMMANDS.add_argument("how", nargs="*")
COMMANDS.add_argument("-o", dest="output")
COMMANDS.add_argument("--plan")
for option in ("--tp", "--rank"):
    COMMANDS.add_argument(option, type=int)


class Run(Protocol):
    """Runs the command to its end."""

    def __call__(self, words: list[str], *, limited: bool = False) -> tuple[int, str, str]: ...


def named(only: Callable[[dict[str, Any]], bool] = lambda vector: True) -> Any:
    return [pytest.param(vector, id=vector["name"]) for vector in VECTORS if only(vector)]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """In this process, or `limited` in one of its own: exit code, stdout, stderr."""

    def run_it(words: list[str], *, limited: bool = False) -> tuple[int, str, str]:
        if limited:
            done = prestarted.run(*words, limits={resource.RLIMIT_AS: MEMORY_NBYTES})
            return done.returncode, done.stdout, done.stderr
        monkeypatch.setattr(sys, "argv", ["relayout", *words])
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        code = end.value.code or 0
        assert isinstance(code, int)
        return code, *capfd.readouterr()

    monkeypatch.setattr("relayout.cli.app.app", built_command())
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield run_it
    for number, handler in before.items():
        signal.signal(number, handler)


def seen(place: Path) -> set[str]:
    """Everything there is, hidden or not."""
    return {path.relative_to(place).as_posix() for path in place.rglob("*")}


def words_of(command: str, folder: Path, out: Path) -> list[str]:
    return [word.format(path=folder, out=out) for word in command.split()]


def check_line(text: str, folder: Path) -> str:
    """The line of a refusal. A command's is followed by the next command. Neither steers a terminal or is a flood."""
    assert "Traceback" not in text
    assert text.endswith("\n"), text[-200:]
    lines = text[:-1].split("\n")
    is_printed = lines[0].startswith("relayout: ")
    assert [line.startswith("relayout: next: ") for line in lines] == [False, True][: 1 + is_printed], text[:2000]
    for line in lines:
        assert line.isprintable(), ascii(line[:2000])
        assert len(line.replace(str(folder), "")) <= MAX_LINE, f"{len(line)} characters: {line[:200]}"
    return lines[0]


def kinds() -> list[Any]:
    """The first vector of each kind: parser, command and exit code. All bombs: each needs a process of its own."""
    first: dict[tuple[str, str, int], dict[str, Any]] = {}
    for vector in VECTORS:
        first.setdefault((vector["name"].split("/")[0], vector["command"], vector.get("exit", 2)), vector)
    chosen = {vector["name"] for vector in first.values()}
    return named(lambda vector: vector["name"] in chosen or vector.get("is_bomb"))


@pytest.mark.parametrize("vector", kinds())
def test_the_command_refuses_each_kind_in_one_line_and_writes_nothing(
    vector: dict[str, Any], run: Run, tmp_path: Path
) -> None:
    folder, out = laid_out(vector, tmp_path), tmp_path / "out"
    before = seen(tmp_path)
    code, stdout, stderr = run(words_of(vector["command"], folder, out), limited=vector.get("is_bomb", False))
    if vector.get("exit", 2) == 1:  # A verification that found a difference: told on stdout.
        assert (code, stderr) == (1, "")
        assert re.search(vector["says"], stdout), stdout
    else:
        assert code == 2, (code, stdout[-500:], stderr[-500:])
        assert re.search(vector["says"], check_line(stderr, folder)), stderr[:2000]
        assert stdout == ""
    assert seen(tmp_path) == before


def call(words: list[str]) -> None:
    """What a command line calls, or `load PATH`."""
    arguments = vars(COMMANDS.parse_args(words))
    name, path, how = arguments.pop("name"), arguments.pop("path"), arguments.pop("how")
    options = {option: value for option, value in arguments.items() if value is not None}
    match how:
        case [rank, *_] if name == "load":
            if "of" in how:
                options["tp"] = int(how[2])
            relayout.load(path, int(rank), verify="verify" in how, **options)
        case [] if name == "verify":
            report = relayout.verify(path)
            if not report.ok:
                raise FormatError("\n".join(map(str, report.differences)))
        case [] if name == "doctor":
            diagnose(path, **options)
        case []:
            getattr(relayout, name)(path, **options)
        case _:
            raise AssertionError(words)


@pytest.mark.filterwarnings("ignore:.*a plain checkpoint")
@pytest.mark.parametrize("vector", named(lambda vector: not vector.get("is_bomb")))
def test_a_vector_is_refused_and_nothing_is_written(vector: dict[str, Any], tmp_path: Path) -> None:
    """By its command, and by the functions that it lists: every day by one of these, in turn."""
    folder, out = laid_out(vector, tmp_path), tmp_path / "out"
    before = seen(tmp_path)
    words = words_of(vector["command"], folder, out)
    with pytest.raises((FormatError, PlanError), match=vector["says"]) as caught:
        call(words)
    for line in str(caught.value).split("\n") if vector.get("exit") == 1 else [str(caught.value)]:
        check_line(f"{line}\n", folder)
    expected = {"FormatError": FormatError, "PlanError": PlanError}[vector.get("error", "FormatError")]
    functions = vector.get("python", [])
    turn = VECTORS.index(vector) % max(1, len(functions))
    for what in functions if IS_LONG else functions[turn : turn + 1]:
        name, *how = what.split()
        with pytest.raises(expected):
            call([name, words[1], *how, *(["-o", str(out)] if name == "restore" else [])])
    assert seen(tmp_path) == before


@cache
def changed_by_name() -> dict[str, dict[str, bytes]]:
    return {one["name"]: changed_files(one) for one in VECTORS}


def test_the_lists_are_whole() -> None:
    names = [one["name"] for one in VECTORS]
    assert len(names) == len(set(names)) >= 80
    assert {path.stem for path in FOLDER.glob("*.toml")} == PARSERS
    for path in FOLDER.glob("*.toml"):
        listed = tomllib.loads(path.read_text(encoding="utf-8"))["vector"]
        assert {one["name"].split("/")[0] for one in listed} == {path.stem}
    assert {one["base"] for one in VECTORS} == set(NAMES)
    for one in VECTORS:
        assert one.keys() <= FIELDS, one["name"]
        assert set(one.get("stale", [])) <= {"record", "tables"}, one["name"]
        assert one["reason"]
        re.compile(one["says"])


def test_each_vector_differs_from_its_base_and_from_all_others() -> None:
    found = set()
    for one in VECTORS:
        files, made = changed_by_name()[one["name"]], one.get("made", {})
        assert files or made, one["name"]
        assert {edit["file"] for edit in one.get("edit", [])} <= files.keys(), one["name"]
        found.add(repr((one["base"], files, made, one["command"])))
    assert len(found) == len(VECTORS)


@pytest.mark.parametrize("file", [MANIFEST, *TABLES, RECORD])
def test_an_edit_of_what_nobody_reads_leaves_a_valid_checkpoint(file: str, run: Run, tmp_path: Path) -> None:
    vector = {"base": "converted", "edit": [{"file": file, "set": "/x", "value": "1"}]}
    assert {file, MANIFEST} <= changed_files(vector).keys()
    code, _, stderr = run(["verify", str(laid_out(vector, tmp_path)), "--source", str(BASES / "plain")])
    assert (code, stderr) == (0, "")


def test_an_export_holds_each_vector(tmp_path: Path) -> None:
    export(tmp_path / "all.zip")
    with zipfile.ZipFile(tmp_path / "all.zip") as archive:
        listed = json.loads(archive.read("vectors.json"))
        assert [one["name"] for one in listed] == [one["name"] for one in VECTORS]
        assert all(one.keys() >= {"base", "command", "reason", "says"} for one in listed)
        for name in NAMES:
            for file, blob in base(name).items():
                assert archive.read(f"base/{name}/{file}") == blob
        for one in VECTORS:
            for file, blob in changed_by_name()[one["name"]].items():
                assert archive.read(f"{one['name']}/{file}") == blob


def test_the_bases_are_valid(run: Run, tmp_path: Path) -> None:
    plain, converted, out = BASES / "plain", BASES / "converted", tmp_path / "out"
    plan = str(BASES / "plan.toml")
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


# Too large to be stored. Each is done or refused, in little memory and time.


def many_tensors() -> bytes:
    """A valid header of 50,000 tensors."""
    entries = (f'"t.{i}.weight":{{"dtype":"I8","shape":[1],"data_offsets":[{i},{i + 1}]}}' for i in range(50_000))
    return file_of(("{" + ",".join(entries) + "}").encode(), bytes(50_000))


NESTED = b"[" * 100 + b"]" * 100 + b","
"""Each of its lists would take 48 times its bytes."""
HEAVY: dict[str, tuple[str, Callable[[], bytes]]] = {
    "50,000 tensors": ("hostile.safetensors", many_tensors),
    "a name of 40 million dots": (
        "hostile.safetensors",
        lambda: file_of(b'{"' + b"." * 40_000_000 + b'":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}}', b"x"),
    ),
    "a header of lists": ("hostile.safetensors", lambda: file_of(b'{"x":[' + NESTED * 490_000 + b"0]}")),
    "an index of lists": (INDEX, lambda: b'{"x":[' + NESTED * 330_000 + b'0],"weight_map":{}}'),
}


@pytest.mark.parametrize("name", HEAVY)
def test_a_bomb_is_done_or_refused(name: str, run: Run, tmp_path: Path) -> None:
    folder, out = tmp_path / "checkpoint", tmp_path / "out"
    shutil.copytree(BASES / "plain", folder)
    file, content = HEAVY[name]
    (folder / file).write_bytes(content())
    source = folder if file == INDEX else folder / file
    code, _, stderr = run(["inspect", str(source)], limited=True)
    assert code in (0, 2), stderr[:2000]
    if code:
        assert check_line(stderr, folder).startswith(f"relayout: error: {folder}/{file}")
    assert not out.exists()
