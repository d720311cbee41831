"""The command as a person runs it: what it prints, its exit codes, and what it leaves behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support import prestarted
from support.bits import flip
from support.command_runs import CONFIG, Run, assert_one_line, assert_refused, one_object, run, write_model
from support.patience import PATIENCE
from support.rights import drop_superuser_rights
from support.terminals import ENVIRONMENT, terminal
from support.tools import built_command
from support.trees import tree
from typer.testing import CliRunner

import relayout
from relayout.cli.app import app
from relayout.errors import PlanError
from relayout.format.index import FORMAT_VERSION

RELAYOUT = [sys.executable, "-m", "relayout"]


def put(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("convert nothing --tp 1", r"nothing: no such file or folder"),
        ("convert no\nsuch\x1b[31m\x07thing --tp 1", r"no.+such.+thing: no such file or folder"),
        ("verify nothing", r"nothing: no such file or folder"),
        ("inspect modle", r"modle: no such file or folder; did you mean 'model'\?"),
        (
            "verify model --ranks 0",
            r"model: not a converted folder \(relayout\.json is missing\); relayout convert makes one",
        ),
        ("restore model -o back", r"model: not a converted folder"),
        ("plans show lama", r"no built-in plan 'lama'; did you mean 'llama'\?"),
        ("convert model --tp 2 --plan builtin:lama", r"no built-in plan 'lama'; did you mean 'llama'\?"),
        (
            "convert model/model.safetensors --tp 2",
            r"a single file: name the folder to write with -o OUT, or convert the",
        ),
        ("inspect model --rank 0", r"model: not converted, so it has no ranks: omit --rank"),
        ("inspect modle --rank 0", r"modle: no such file or folder; did you mean 'model'\?"),
        ("warm modle --rank 0", r"modle: no such file or folder; did you mean 'model'\?"),
        ("report modle", r"modle: no such file or folder; did you mean 'model'\?"),
        ("report model", r"model: not converted: set --tp N, the number of ranks"),
        ("doctor modle --rank 2", r"modle: no such file or folder; did you mean 'model'\?"),
        ("doctor model --rank 2", r"model: not converted, so it has no rank 2: set --tp N"),
        (
            "convert / --tp 2",
            r" /: the root folder has no parent folder for the output: name the folder to write with -o",
        ),
        ("convert model --tp 0", r"tp: 0, expected 1 to"),
        ("doctor model --tp 0", r"tp: 0, expected 1 or more"),
        (
            "convert model --tp 1 --expert-parallel",
            r"model: expert_parallel: one rank holds all experts: omit --expert",
        ),
        ("convert model --align 3000 --tp 1", r"align: 3000 bytes, expected a power of two"),
        (f"convert model --tp 1 --memory {'9' * 5000}", r"is too large, expected at most 9223372036854775807 bytes"),
        ("convert model --max-part-size 0 --tp 1", r"part size of 0 bytes"),
        ("convert model --tp 1 --threads 0", "threads: 0, expected 1 or more"),
        ("convert model --tp 1 --memory 1MiB", "memory: 1048576 bytes, expected 2097152"),
        (
            "convert model --max-part-size lots --tp 1",
            r"max_part_nbytes \(--max-part-size\): 'lots' is not a size; write",
        ),
        ("convert s3:/bucket/model --tp 2", r"s3:/bucket/model: a URL has two slashes: s3://bucket/model"),
        ("inspect HF:/org/model", r"a URL has two slashes: HF://org/model"),
        ("convert model --tp 2 -o gs:/bucket/out", r"gs:/bucket/out: a URL has two slashes: gs://bucket/out"),
        ("inspect mother", r"mother: no such file or folder"),
        ("convert model --tp 1 -o .", r"is inside the source folder, or contains it"),
    ],
)
def test_bad_arguments_are_one_line_and_leave_nothing_behind(here: Run, work: Path, args: str, says: str) -> None:
    assert_refused(here, work, args.split(" "), says)


def test_of_a_copy_that_is_incomplete_each_command_says_so(here: Run, work: Path) -> None:
    assert here("convert", "model", "--tp", "2", "-o", "whole", cwd=work).returncode == 0
    copied = work / "copied"
    shutil.copytree(work / "whole", copied)
    (copied / "relayout.json").unlink()
    for command in ("inspect copied", "verify copied", "convert copied --tp 2 -o out"):
        result = here(*command.split(), cwd=work)
        assert result.returncode == 2
        assert "copied/relayout.json: is missing next to rank files: copy the complete converted" in result.stderr
    (work / ".later.relayout-partial").mkdir()
    later = here("verify", "later", cwd=work)
    assert ".later.relayout-partial next to it belongs to a command that is writing it" in later.stderr


# What is wrong with checkpoints, plans and outputs, the tests of each tell: here is how it is said.
@pytest.mark.parametrize(
    ("trouble", "args", "says"),
    [
        (
            lambda work: os.truncate(work / "model" / "model.safetensors", 1000),
            "convert model --tp 1",
            r"model/model\.safetensors: .*truncated",
        ),
        (
            lambda work: put(work / "out" / "precious", "mine"),
            "convert model --tp 1 -o out",
            r"out: is not empty: holds 'precious', and no relayout\.json: not an output of .*; choose another output",
        ),
        (
            lambda work: put(work / "pickled" / "pytorch_model.bin", "pickle"),
            "inspect pickled",
            r"pickled: contains no safetensors file; found pytorch_model\.bin: .*save_pretrained",
        ),
        (
            lambda work: put(work / "quantized" / "model.Q4_K_M.gguf", "GGUF"),
            "convert quantized --tp 1",
            r"contains no safetensors file; found model\.Q4_K_M\.gguf: .*from_pretrained\(gguf_file=.*save_pret",
        ),
        (
            lambda work: (work / "link").symlink_to("model"),
            "convert link --tp 1 -o model --force",
            r"model: is the source itself",
        ),
        (
            lambda work: put(work / "mine.toml", "[cut\n"),
            "convert model --tp 2 --plan mine.toml",
            r"mine\.toml: not valid TOML",
        ),
        (
            lambda work: relayout.convert(work / "model", work / "out", tp=2),
            "inspect out --rank 2",
            r"rank 2, expected 0 to 1",
        ),
        (
            lambda work: (work / "plan.toml").symlink_to("nowhere"),
            "plans observe model",
            r"plan\.toml: exists; choose another -o",
        ),
        (
            lambda work: put(work / "notes", "mine"),
            "report model --tp 2 -o notes",
            r"notes: exists and is not a relayout",
        ),
        (lambda work: put(work / "other" / "notes.txt", "x"), "report other", r"other: contains no safetensors file"),
        (lambda work: put(work / "other" / "notes.txt", "x"), "doctor other --rank 2", r"contains no safetensors file"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing_behind(
    here: Run, work: Path, trouble: Callable[[Path], object], args: str, says: str
) -> None:
    trouble(work)
    assert_refused(here, work, args.split(), says)


def test_a_process_of_its_own_refuses_the_same(here: Run, work: Path) -> None:
    refused = ("verify", "model", "--ranks", "0")
    ours, theirs = here(*refused, cwd=work), run(*refused, cwd=work)
    assert ours.returncode == 2
    assert (ours.returncode, ours.stdout, ours.stderr) == (theirs.returncode, theirs.stdout, theirs.stderr)


def test_without_a_stderr_the_exit_codes_are_the_same(work: Path) -> None:
    # A daemon may have closed it; Python then has None for it.
    script = "import os, sys; os.close(2); sys.stderr = None; from relayout.__main__ import main; main()"
    for source, code in (("model", 0), ("nothing", 2)):
        assert (
            prestarted.run("convert", source, "--tp", "1", script=script, cwd=work, env=ENVIRONMENT).returncode == code
        )
    assert (work / "model-tp1" / "relayout.json").is_file()


def run_unread(
    *args: str, cwd: Path, stderr: bool = False, script: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command with a stdout, or also a stderr, whose reader has gone."""
    ours, theirs = os.pipe()
    os.close(ours)
    given = {} if script is None else {"script": script}
    done = prestarted.run(*args, cwd=cwd, env=ENVIRONMENT, stdout=theirs, stderr=theirs if stderr else None, **given)
    os.close(theirs)
    return done


@pytest.mark.parametrize(
    "args", ["inspect out", "inspect out --json", "plans show llama", "convert model --tp 1 --dry-run", "--help"]
)
def test_a_command_that_only_prints_ends_without_a_word_when_its_reader_does(converted: Path, args: str) -> None:
    # As in `relayout inspect out | head -1`: a shell makes 141 of it.
    done = run_unread(*args.split(), cwd=converted)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


@pytest.mark.parametrize(("as_json", "stderr"), [([], True), (["--json"], False), (["--json"], True)])
def test_work_is_carried_out_and_its_exit_code_is_its_own_whoever_reads_of_it(
    work: Path, as_json: list[str], stderr: bool
) -> None:
    # As in `relayout convert model | true`: with pipefail a script would take another code for a failure.
    script = (
        "from relayout import __main__; from relayout.cli import command;"
        " command._SECONDS_BETWEEN_EVENTS = 0; __main__.main()"
    )
    for args in ("convert model --tp 1 -o out", "verify out", "restore out -o back"):
        done = run_unread(*args.split(), *as_json, cwd=work, stderr=stderr, script=script)
        assert done.returncode == 0, done.stderr
        assert stderr or all(line.startswith('{"event": ') for line in done.stderr.splitlines())
    assert relayout.verify(work / "out", source=work / "back").ok
    flip(work / "out" / "model-rank-0-part-0.safetensors", -1)
    assert run_unread("verify", "out", *as_json, cwd=work, stderr=stderr).returncode == 1
    assert run_unread("convert", "model", "--tp", "1", "-o", "out", *as_json, cwd=work, stderr=stderr).returncode == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no file that is always full")
@pytest.mark.parametrize("args", ["--help", "convert model --tp 1 -o again", "inspect out --json"])
def test_an_output_that_cannot_be_written_is_an_io_failure(converted: Path, tmp_path: Path, args: str) -> None:
    place = shutil.copytree(converted, tmp_path / "converted")
    with Path("/dev/full").open("w") as full:
        # A process of its own: what matters is also how Python ends.
        command = [*RELAYOUT, *args.split()]
        done = subprocess.run(command, cwd=place, env=ENVIRONMENT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 3
    lines = done.stderr.removeprefix("relayout: error: ").splitlines()
    said = json.loads(done.stderr)["message"] if "--json" in args else lines[0]
    assert said.strip().removeprefix("standard output: ") == "No space left on device"
    assert (place / "again" / "relayout.json").exists() == ("again" in args), "what it tells of is done"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("convert", "missing argument 'SRC'"),
        ("convert model --dry-run", "missing option '--tp' / '-tp'; `relayout inspect SRC` lists .* at each degree"),
        ("convert model --tp", "option '--tp' requires an argument"),
        ("convert model --tp two", "'--tp' / '-tp': expected a whole number, such as 8"),
        ("convert model -o out --tp=2.5", "'--tp' / '-tp': expected a whole number, such as 8"),
        ("convert model --layout wide", "'--layout': 'wide' is not one of 'ranks', 'whole'"),
        ("convert model --fast", r"no such option: --fast \(Possible options: .*\)"),
        ("convert model --tpp 4", r"no such option: --tpp \(Possible options: .*--tp.*\)"),
        ("convert model -z", "no such option: -z"),
        ("frobnicate", "no such command 'frobnicate'"),
        ("cache keep", "no such command 'keep'"),
        ("conver", r"no such command 'conver'; did you mean 'convert'\?"),
        ("convert model out --tp 1", r"got unexpected extra argument.* \(out\)"),
        ("restore model out", r"missing option '--output' / '-o'"),
        ("inspect model model", r"got unexpected extra argument.* \(model\)"),
        ("--tp 4 convert model", r"no such option: --tp \(Possible options: .*\)"),
    ],
)
def test_wrong_usage_is_one_line(here: Run, work: Path, args: str, says: str) -> None:
    assert_refused(here, work, args.split(), f"^relayout: error: {says}$")


@pytest.mark.parametrize(
    ("group", "line"), [("", "convert  Rewrite a checkpoint for N "), ("cache", "clear   Remove all ")]
)
def test_a_group_without_a_command_shows_its_help(here: Run, work: Path, group: str, line: str) -> None:
    done = here(*group.split(), cwd=work)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"\n  {line}" in done.stderr


def test_wrong_usage_is_one_object_for_programs(here: Run, work: Path) -> None:
    done = here("convert", "model", "--tp", "two", "--json", cwd=work)
    assert (done.returncode, done.stdout) == (2, "")
    event = json.loads(done.stderr)
    assert (event["event"], event["code"], event["exit_code"]) == ("error", "option", 2)
    assert event["message"].startswith("'--tp' / '-tp': ")


SEVERAL = """
import io, json, os, sys
from contextlib import redirect_stderr, redirect_stdout
from relayout.cli.app import main
for place, words in json.loads(sys.argv.pop()):
    os.chdir(place)
    sys.argv[1:] = words
    with redirect_stdout(io.StringIO()) as stdout, redirect_stderr(io.StringIO()) as stderr:
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    print(json.dumps([code, stdout.getvalue(), stderr.getvalue()]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="drops the superuser's rights by Linux's prctl")
def test_what_cannot_be_read_or_written_is_one_line_and_leaves_nothing_behind(tmp_path: Path) -> None:
    cases = [
        (
            "model/model.safetensors",
            "convert model --tp 1",
            2,
            r"model\.safetensors: cannot be read: Permission denied",
        ),
        ("model/config.json", "convert model --tp 1", 2, r"config\.json: cannot be read: Permission denied"),
        ("model", "convert model --tp 1", 2, r"model.*: cannot be read: Permission denied"),
        ("model", "convert model/model.safetensors --tp 1", 2, r"model\.safetensors: .*Permission denied"),
        ("mine.toml", "convert model --tp 2 --plan mine.toml", 2, r"mine\.toml: cannot be read: Permission denied"),
        ("model/model.safetensors", "inspect model", 2, r"model\.safetensors: cannot be read: Permission denied"),
        ("model/tokenizer.json", "convert model --tp 1", 2, r"tokenizer\.json: .*Permission denied"),
        (".", "convert model --tp 1", 3, "Permission denied"),
    ]
    places = [tmp_path / str(number) for number in range(len(cases))]
    for place, (victim, *_) in zip(places, cases, strict=True):
        place.mkdir()
        write_model(place / "model")
        (place / "mine.toml").write_text('[cut]\n"*" = "whole"\n')
        (place / victim).chmod(0o555 if victim == "." else 0)
    before = tree(tmp_path)
    jobs = [(str(place), args.split()) for place, (_, args, *_) in zip(places, cases, strict=True)]
    ran = subprocess.run(  # The rights go when a program starts.
        [sys.executable, "-c", SEVERAL, json.dumps(jobs)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE,
        preexec_fn=drop_superuser_rights,
    )
    after = tree(tmp_path)
    for place, (victim, *_) in zip(places, cases, strict=True):
        (place / victim).chmod(0o755)
    assert after == before
    assert len(ran.stdout.splitlines()) == len(cases)
    for line, (_, args, code, says) in zip(ran.stdout.splitlines(), cases, strict=True):
        assert_one_line(subprocess.CompletedProcess(args, *json.loads(line)), code, says)


def test_with_json_an_error_is_one_object_on_stderr(here: Run, work: Path) -> None:
    before = tree(work)
    done = here("convert", "nothing", "--tp", "1", "--json", cwd=work)
    assert (done.returncode, done.stdout, tree(work)) == (2, "", before)
    event = json.loads(done.stderr)
    assert event["message"].startswith("nothing: no such file or folder")
    del event["message"]
    assert event.pop("next").startswith("ls -la ")
    assert event == {
        "event": "error",
        "exit_code": 2,
        "code": "missing",
        "path": "nothing",
        "tensor": None,
        "offset": None,
    }


@pytest.mark.parametrize("command", ["convert model --tp 1", "verify out"])
def test_progress_is_silent_in_a_pipe(here: Run, work: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    relayout.convert(work / "model", work / "out", tp=2)
    done = here(*command.split(), cwd=work)
    assert (done.returncode, done.stderr) == (0, "")


def seen_on_a_terminal(args: list[str], cwd: Path) -> tuple[str, str]:
    """What the command writes to stdout, a pipe, and to stderr, a terminal."""
    with terminal() as (theirs, read):
        done = prestarted.run(*args, cwd=cwd, env=ENVIRONMENT, stderr=theirs)
        seen = read()
    assert done.returncode == 0, seen
    return done.stdout, seen


@pytest.mark.parametrize(("command", "word"), [("convert model --tp 1", "converting"), ("verify out", "verifying")])
def test_progress_is_shown_on_a_terminal(work: Path, command: str, word: str) -> None:
    relayout.convert(work / "model", work / "out", tp=2)
    stdout, seen = seen_on_a_terminal(command.split(), work)
    assert word in seen
    assert word not in stdout
    assert seen.count("\x1b[?25h") == seen.count("\x1b[?25l") > 0, "the cursor is hidden, and comes back"


def test_with_json_a_terminal_sees_nothing(work: Path) -> None:
    stdout, seen = seen_on_a_terminal(["convert", "model", "--tp", "1", "--json"], work)
    assert (json.loads(stdout)["num_tensors"], seen) == (12, "")


def test_the_versions_are_those_of_package_and_format(tmp_path: Path) -> None:
    done = run("--version", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        f"relayout {relayout.__version__}, format {FORMAT_VERSION}\n",
        "",
    )


def command_names() -> list[str]:
    return list(built_command().commands)


def test_help_lists_each_command_once_in_one_of_four_panels(here: Run, work: Path) -> None:
    shown = here("--help", cwd=work).stdout.split("--help ")[1].split("First steps")[0]
    panels = dict(re.findall(r"^(\w+):\n((?:  .*\n)+)", shown, re.MULTILINE))
    assert list(panels) == ["Convert", "Distribute", "Update", "Inspect"]
    listed = re.findall(r"^  (\w+) ", "".join(panels.values()), re.MULTILINE)
    assert sorted(listed) == sorted(command_names())


def test_help_mentions_every_command(tmp_path: Path) -> None:
    assert {"convert", "inspect", "verify"} <= set(command_names())
    for flag in ("--help", "-h"):
        done = run(flag, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert [name for name in command_names() if not re.search(rf"\b{name}\b", done.stdout)] == []


def test_the_installed_script_is_the_same_command(work: Path) -> None:
    script = shutil.which("relayout", path=Path(sys.executable).parent)
    if script is None:
        pytest.skip("relayout is not installed as a script beside this Python")
    done = subprocess.run([script, "inspect", "nothing"], cwd=work, capture_output=True, text=True, env=ENVIRONMENT)
    assert_one_line(done, 2, "nothing: no such file or folder")


HOSTILE = "evil\n\x1b]0;title\x07\x1b[31m\u202e[bold]name[/bold]"


@pytest.mark.parametrize("args", ["inspect odd-tp1", "convert odd --tp 1 --dry-run", "convert odd --tp 1 -o out"])
def test_names_from_a_file_never_steer_the_terminal(here: Run, work: Path, args: str) -> None:
    odd = write_model(work / "odd", CONFIG | {"model_type": f"{HOSTILE} type"})
    save_file({HOSTILE: np.arange(1, 9, dtype=np.uint8)}, odd / "model.safetensors")
    relayout.convert(odd)
    done = here(*args.split(), cwd=work)
    assert (done.returncode, done.stderr) == (0, "")
    assert {character for character in done.stdout if not character.isprintable()} == {"\n"}
    if "-o" not in args:
        assert "[bold]name[/bold]" in done.stdout


def test_a_long_name_is_printed_whole_in_a_pipe(here: Run, work: Path) -> None:
    name = "model." + "very_" * 200 + "long"
    odd = write_model(work / "odd")
    save_file({name: np.arange(1, 9, dtype=np.uint8)}, odd / "model.safetensors")
    done = here("inspect", "odd", cwd=work)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(rf"{name} +1 +U8 +8 +8 bytes", done.stdout)


@pytest.mark.parametrize("what", ["source", "side file"])
def test_a_file_name_that_is_no_utf_8_causes_no_traceback(work: Path, what: str) -> None:
    name = os.fsdecode(b"m\xff")
    try:
        if what == "source":
            (work / "model").rename(work / name)
        else:
            (work / "model" / name).write_text("hello")
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    before = tree(work)
    source = name if what == "source" else "model"
    done = run("convert", source, "--tp", "1", "--json", cwd=work)
    assert "Traceback" not in done.stderr
    if done.returncode:
        assert_one_line(done, 2, "UTF-8")
        assert tree(work) == before
    else:
        found = one_object(done)
        assert (work / f"{source}-tp1" / "relayout.json").is_file()
        if what == "side file" and not (work / "model-tp1" / name).exists():
            assert any(word.startswith(name) for word in found["left_out"])


def test_a_shard_whose_name_is_no_utf_8_is_refused_in_any_encoding(work: Path) -> None:
    try:
        (work / "model" / "model.safetensors").rename(work / "model" / os.fsdecode(b"m\xff.safetensors"))
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    says = r"model: the file name b'm\\xff\.safetensors' is not UTF-8; rename the file"
    environment = ENVIRONMENT | {"PYTHONIOENCODING": "ascii:strict"}  # The encoding is chosen when Python starts.
    done = subprocess.run(
        [*RELAYOUT, "inspect", "model"], cwd=work, capture_output=True, text=True, env=environment, timeout=PATIENCE
    )
    assert_one_line(done, 2, says)


def test_a_model_without_tensors_can_be_converted_and_verified(here: Run, work: Path) -> None:
    (work / "none").mkdir()
    save_file({}, work / "none" / "model.safetensors")
    for args in (["convert", "none", "--tp", "1"], ["verify", "none-tp1", "--source", "none"], ["inspect", "none-tp1"]):
        done = here(*args, cwd=work)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_warning_is_one_line_without_the_place_that_gave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def warn(*args: object, **options: object) -> None:
        warnings.warn("s3://b/x: no answer;\x1b retrying", stacklevel=1)
        raise PlanError("no")

    monkeypatch.setattr(relayout, "inspect", warn)
    plain = "relayout: warning: s3://b/x: no answer;\\x1b retrying\n"
    for more, said in {"": plain, "--quiet": "", "--json": '{"event": "warning", "message": "s3://b/x: '}.items():
        printed = CliRunner().invoke(app, ["inspect", "model", *more.split()]).stderr
        assert printed.startswith(said)
        assert "UserWarning" not in printed
