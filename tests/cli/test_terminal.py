"""The command in a terminal of 80 columns: no line is longer, no word is cut; and without color, dumb, or in ASCII."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support import prestarted
from support.bits import flip
from support.hub_models import MODELS
from support.patience import PATIENCE
from support.terminals import ENVIRONMENT, terminal
from support.tools import built_command
from typer.testing import CliRunner

import relayout
from relayout.cli.app import app

pytestmark = pytest.mark.documents

WIDTH = 80
ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> Path:
    """A small model with its conversions, and a large one with long names, as a sparse file."""
    place = tmp_path_factory.mktemp("terminal")
    shutil.copytree(llama, place / "llama")
    (place / "llama" / "tokenizer.bin").write_text("left out")
    relayout.convert(place / "llama", place / "out", tp=8)
    shutil.copytree(place / "out", place / "damaged")
    flip(place / "damaged" / "model-rank-3-part-0.safetensors", -1)
    MODELS["gpt-oss-20b"].write(place / "gpt-oss-20b")
    return place


def in_terminal(command: str, cwd: Path, environment: Mapping[str, str] | None = None) -> tuple[int, str]:
    """The exit code, and what the command prints to a terminal."""
    env = ENVIRONMENT | {"TERM": "xterm-256color"} | dict(environment or {})
    imports = prestarted.LOADER if command.startswith("doctor") else prestarted.COMMANDS
    with terminal(WIDTH) as (theirs, read):
        done = prestarted.run(*command.split(), cwd=cwd, env=env, imports=imports, stdout=theirs, stderr=theirs)
        return done.returncode, read()


def is_word_of(word: str, known: set[str]) -> bool:
    """Whether a word is printed whole, or shortened in the middle."""
    if word in known or set(word) == {"-"}:
        return True
    parts = [(word[: found.start()], word[found.end() :]) for found in re.finditer(r"(?=\.\.\.)", word)]
    parts = [(start, end.removeprefix("...")) for start, end in parts]
    return any(one.startswith(start) and one.endswith(end) for start, end in parts for one in known)


GROUP = built_command()
WORDS = [name for name, one in GROUP.commands.items() if not hasattr(one, "commands")]
WORDS += [f"{name} {word}" for name, one in GROUP.commands.items() for word in getattr(one, "commands", ())]
"""Of all commands."""
COMMANDS = {
    "inspect llama": 0,
    "inspect gpt-oss-20b": 0,
    "inspect out": 0,
    "inspect out --rank 3": 0,
    "convert llama --tp 8 -o again": 0,
    "convert llama --tp 8 -o again --dry-run": 0,
    "convert gpt-oss-20b --tp 8 --dry-run": 0,
    "verify out": 0,
    "verify out --source llama": 0,
    "verify damaged": 1,
    "restore out -o back": 0,
    "doctor out": 0,
    "doctor gpt-oss-20b --tp 8": 0,
    "warm out": 0,
    "plans list": 0,
    "convert llama --tp 3 -o again": 2,
    "inspect llam": 2,
    **dict.fromkeys((f"{words} --help".strip() for words in ["", *WORDS]), 0),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_at_80_columns_no_line_is_longer_and_no_word_is_cut(command: str, folder: Path) -> None:
    for made in ("again", "back"):
        shutil.rmtree(folder / made, ignore_errors=True)
    code, text = in_terminal(command, folder)
    assert code == COMMANDS[command], text
    lines = ESCAPES.sub("", text).replace("\r", "\n").splitlines()
    assert max(map(len, lines)) <= WIDTH, [line for line in lines if len(line) > WIDTH]
    for made in ("again", "back"):
        shutil.rmtree(folder / made, ignore_errors=True)
    # A pipe has no width. Words of letters are the same there: times and rates are not.
    piped = prestarted.run(*command.split(), cwd=folder, env=ENVIRONMENT, imports=prestarted.LOADER)
    known = {word for line in (piped.stdout + piped.stderr).splitlines() for word in line.split()}
    seen = {word for line in lines for word in line.split() if re.fullmatch(r"[A-Za-z_.*/'`:-]{2,}", word)}
    of_progress = {
        "reading",
        "headers",
        "of",
        "llama",
        "llam",
        "out",
        "converting",
        "verifying",
        "restoring",
        "warming",
        "comparing",
        "with",
        "the",
        "source",
        "-:--:--",
    }
    of_progress |= {"GB", "MB", "kB", "bytes", "MB/s", "GB/s", "kB/s"}
    assert [word for word in seen - of_progress if not is_word_of(word, known)] == []
    assert len(seen) > 3


def test_the_answer_comes_first(folder: Path) -> None:
    _, text = in_terminal("inspect gpt-oss-20b", folder)
    first = " ".join(ESCAPES.sub("", text).split("\n\n")[0].split())
    assert re.search(r"a rank of 8 would read \S+ GB to get \S+ GB; after convert --tp 8: \S+ GB in one read", first)
    _, text = in_terminal("inspect out", folder)
    first = " ".join(ESCAPES.sub("", text).split("\n\n")[0].split())
    assert re.search(r"each rank gets \S+ kB to \S+ kB in \d reads? readable", first)


def test_without_color_there_is_none(folder: Path) -> None:
    colored = in_terminal("verify damaged", folder)[1]
    plain = in_terminal("verify damaged", folder, {"NO_COLOR": "1"})[1]
    assert re.search(r"\x1b\[[0-9;]*31m", colored)
    assert not re.search(r"\x1b\[[0-9;]*[34][0-9]", plain)


@pytest.mark.parametrize("command", ["verify out", "inspect gpt-oss-20b", "convert llama --tp 3", "--help"])
def test_a_dumb_terminal_gets_no_escape_sequences(command: str, folder: Path) -> None:
    _, text = in_terminal(command, folder, {"TERM": "dumb"})
    assert "\x1b" not in text
    assert len(text) > 20


@pytest.mark.parametrize(
    "command", ["inspect odd", "inspect odd-tp1", "convert odd --tp 1 --dry-run", "verify odd-tp1"]
)
def test_names_that_the_encoding_lacks_are_escaped(command: str, tmp_path: Path) -> None:
    (tmp_path / "odd").mkdir()
    save_file({"größe.重み": np.arange(1, 9, dtype=np.uint8)}, tmp_path / "odd" / "model.safetensors")
    relayout.convert(tmp_path / "odd")
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(  # The encoding is chosen when Python starts.
        [sys.executable, "-m", "relayout", *command.split()],
        cwd=tmp_path,
        env=ENVIRONMENT | ascii_only,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stderr) == (0, "")
    if "verify" not in command:
        assert r"gr\xf6\xdfe.\u91cd\u307f" in done.stdout


def test_a_conversion_says_at_once_what_it_does(folder: Path) -> None:
    code, text = in_terminal("convert llama --tp 2 -o first", folder)
    assert code == 0
    assert ESCAPES.sub("", text).lstrip().startswith("reading the headers of llama")
    in_a_pipe = prestarted.run(*["convert", "llama", "--tp", "2", "-o", "second"], cwd=folder, env=ENVIRONMENT)
    assert in_a_pipe.stderr == ""


def test_a_pipe_is_as_wide_as_columns_says(folder: Path) -> None:
    done = prestarted.run("inspect", "gpt-oss-20b", cwd=folder, env=ENVIRONMENT | {"COLUMNS": "72"})
    assert max(map(len, done.stdout.splitlines())) <= 72


def test_quiet_work_prints_nothing_and_verbose_work_tells_its_phases(folder: Path) -> None:
    for command in (
        "convert llama --tp 2 -o again",
        "verify again --source llama",
        "warm again",
        "restore again -o back",
        "inspect again",
        "files again",
        *("plans list", "plans show llama", "plans check llama"),
    ):
        done = prestarted.run(*command.split(), "--quiet", cwd=folder, env=ENVIRONMENT)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), command
    done = prestarted.run(*["verify", "again", "--source", "llama", "--verbose"], cwd=folder, env=ENVIRONMENT)
    assert re.fullmatch(r"comparing with the source: \S+ of \S+ MB in \d+ s\n", done.stderr)
    for made in ("again", "back"):
        shutil.rmtree(folder / made)


def test_verbose_prints_every_row(tmp_path: Path) -> None:
    (tmp_path / "many").mkdir()
    tensors = {f"kind_{chr(97 + i // 26)}{chr(97 + i % 26)}": np.arange(i + 1, dtype=np.uint8) for i in range(70)}
    save_file(tensors, tmp_path / "many" / "model.safetensors")
    short = prestarted.run("inspect", "many", cwd=tmp_path, env=ENVIRONMENT).stdout
    assert "... and 10 more groups; --verbose prints all\n" in short
    long = prestarted.run("inspect", "many", "--verbose", cwd=tmp_path, env=ENVIRONMENT).stdout
    assert long.count("kind_") == 70 > short.count("kind_")


@pytest.mark.parametrize("command", ["", *WORDS])
def test_the_examples_of_a_help_text_are_commands_that_exist(command: str) -> None:
    text = CliRunner().invoke(app, [*command.split(), "--help"]).output
    found = re.findall(r"^ {4}relayout ((?:(?:plans|cache) )?[a-z]+)(.*)$", text, re.MULTILINE)
    assert found
    for example, arguments in found:
        assert example in WORDS
        help_text = CliRunner().invoke(app, [*example.split(), "--help"]).output
        assert set(re.findall(r"--?[a-z][a-z-]*", re.sub(r"\S*\w-\S+", "", arguments))) <= set(
            re.findall(r"--?[a-z][a-z-]*", help_text)
        )
