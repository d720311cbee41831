"""No command runs code of the folder in which it is started, which may be an untrusted checkpoint."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer.main
from safetensors.numpy import save_file
from support.patience import PATIENCE
from support.signing import make_keys
from support.traps import caught_in, set_traps

import relayout
from relayout.cli import app
from relayout.core import workers
from relayout.core.workers import PIPE, start_child, wait_for_child
from relayout.errors import PlanError
from relayout.observe import observation

# As the installed command: the script's own folder comes first, not the working folder. One process runs all, and has
# imported nothing before. Of the many loads that `bench` measures one is as the first.
MAIN = """
import os, sys
from relayout.__main__ import main

def load_once(*args, **options):
    load_together(*args, **options)
    raise SystemExit

while len(sys.argv) > 1:
    end = sys.argv.index(";")
    left, sys.argv[1:] = sys.argv[end + 1:], sys.argv[1:end]
    name, code = sys.argv[1], 0
    os.dup2(os.open(f"../{name}.stderr", os.O_CREAT | os.O_WRONLY), 2)
    if name == "bench":
        from relayout.benchmark import run
        load_together, run.load_together = run.load_together, load_once
    try:
        main()
    except SystemExit as ended:
        code = ended.code or 0
    if os.path.exists("../caught"):
        os.rename("../caught", f"../{name}.caught")
    with open(f"../{name}.code", "w") as file:
        file.write(str(code))
    sys.argv[1:] = left
"""
COMMANDS = {
    "convert": ["convert", ".", "-o", "../observed", "--tp", "2", "--plan", "vllm"],
    "plans": ["plans", "check", "."],
    "inspect": ["inspect", "."],
    "verify": ["verify", "../out", "--source", "."],
    "sign": ["sign", "../signed", "--key", "../signer.key"],
    "restore": ["restore", "../out", "-o", "../restored"],
    "copy": ["copy", "../out", "../copied", "--ranks", "0"],
    "files": ["files", "../out"],
    "delta": ["delta", "../out", "../out", "-o", "../delta"],
    "apply": ["apply", "../out", "../same", "-o", "../applied"],
    "steps": ["steps", "../steps", "--check", "--prune"],
    "doctor": ["doctor", "."],
    "warm": ["warm", "../out"],
    "cache": ["cache", "list", "--folder", ".."],
    "bench": ["bench", ".", "--tp", "2", "--runs", "1", "-y"],
    "report": ["report", ".", "--tp", "2", "-o", "../page.html"],
}
SAYS = {"convert": "vLLM cannot be imported"}
"""What the child has said, if vLLM is not installed: it has looked for it."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("place")
    model = place / "model"
    model.mkdir()
    save_file({"model.embed_tokens.weight": np.arange(64, dtype=np.float32).reshape(8, 8)}, model / "model.safetensors")
    (model / "config.json").write_text('{"model_type": "llama", "num_attention_heads": 2, "hidden_size": 8}')
    relayout.convert(model, place / "out", tp=2)
    relayout.convert(model, place / "signed", tp=2)
    make_keys(place)
    relayout.delta(place / "out", place / "out", place / "same")
    relayout.Publisher(place / "steps").publish({"x": torch.ones(4)}, 1)
    set_traps(model, place / "caught")
    (place / "main.py").write_text(MAIN)
    return place


def run(place: Path, script: str, *args: str) -> subprocess.CompletedProcess[str]:
    """In the folder of traps, which has also come into the environment by relative names."""
    return subprocess.run(
        [sys.executable, str(place / script), *args],
        cwd=place / "model",
        env={**os.environ, "PYTHONSTARTUP": "json.py"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@pytest.fixture(scope="module")
def ran(place: Path) -> Path:
    """Where every command has left its exit code, its stderr, and what it ran of the folder."""
    run(place, "main.py", *(word for words in COMMANDS.values() for word in (*words, ";")))
    return place


def test_the_traps_are_ones(place: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "json.tool"], cwd=place / "model", check=False, stderr=PIPE)
    assert done.returncode != 0
    assert "json" in caught_in(place / "caught")
    (place / "caught").unlink()


def test_every_command_is_tried() -> None:
    group: Any = typer.main.get_command(app.app)
    assert set(COMMANDS) == set(group.commands)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs_nothing_of_the_folder_in_which_it_is_started(ran: Path, command: str) -> None:
    assert caught_in(ran / f"{command}.caught") == []
    stderr = (ran / f"{command}.stderr").read_text()
    assert (ran / f"{command}.code").read_text() == "0" or SAYS[command] in stderr, stderr


@pytest.mark.parametrize("inherited", [[], ["-I", "-E", "-s"], ["-E"], ["-s"]])
def test_a_child_is_as_isolated_as_its_parent(inherited: list[str]) -> None:
    flags = inherited[:1]  # The first means the others.
    script = "from relayout.core.workers import _inherited_flags as flags; print(*flags())"
    done = subprocess.run([sys.executable, *flags, "-c", script], stdout=PIPE, text=True, check=True)
    assert done.stdout.split() == inherited


def test_a_child_has_the_folders_that_the_environment_names_but_none_that_is_relative_or_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, packages = tmp_path / "here", tmp_path / "packages"
    here.mkdir()
    packages.mkdir()
    (packages / "shows_its_path.py").write_text("import os, sys; print(sys.path, dict(os.environ))")
    monkeypatch.chdir(here)
    (tmp_path / "link").symlink_to(here)
    monkeypatch.setenv("PYTHONPATH", f".::{here}:{tmp_path / 'link'}:sub:{packages}:../here")
    monkeypatch.setenv("PYTHONSTARTUP", "x.py")
    child = start_child("shows_its_path", stdout=PIPE)
    path, _, environment = child.communicate(timeout=PATIENCE)[0].decode().partition("] ")
    assert str(packages) in path
    assert str(here) not in path
    assert "'link'" not in path
    assert "''" not in path
    found = ast.literal_eval(environment)
    assert (found["PYTHONPATH"], found["PYTHONSAFEPATH"]) == (str(packages), "1")
    assert "PYTHONSTARTUP" not in found


def test_children_are_started_by_one_module_and_credential_helpers_by_another() -> None:
    root = Path(relayout.__file__).parent
    files = [path for folder in (root, root.parent / "loader") for path in folder.rglob("*.py")]
    starters = (
        "import subprocess",
        "from subprocess",
        "sys.executable",
        "os.system",
        "os.exec",
        "os.spawn",
        "os.popen",
    )
    found = {path.relative_to(root).as_posix() for path in files if any(one in path.read_text() for one in starters)}
    # A credential helper is a program that the user's own Docker configuration names, as for `docker pull`.
    # `bench` measures the drive with fio, if fio is installed.
    assert found == {"benchmark/machine.py", "core/workers.py", "storage/web/registry_auth.py"}


STUCK = """
import os, sys, time
forked = os.fork()
if forked:
    with open(os.environ["FORKED"], "w") as file:
        file.write(str(forked))
    print("vLLM is imported", flush=True)
time.sleep(600)
"""


def test_a_process_that_observes_and_says_nothing_more_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    monkeypatch.setenv("FORKED", str(tmp_path / "forked"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    started = []

    def start(module: str, *args: str, **streams: Any) -> workers.Child:
        started.append(start_child("stuck", **streams))
        return started[0]

    monkeypatch.setattr(observation, "start_child", start)
    monkeypatch.setattr(observation, "_SILENCE_SECONDS", 1)
    monkeypatch.setattr(workers, "_LOG_POLL_SECONDS", 0.05)
    with pytest.raises(PlanError, match="observes vLLM wrote nothing for 1 s: vLLM is imported"):
        observation.run_in_child([{"engine": "vllm"}])
    forked = Path(f"/proc/{(tmp_path / 'forked').read_text()}/stat")
    assert started[0].returncode == -9
    ends = time.monotonic() + 30
    while forked.exists() and forked.read_text().split()[2] not in "ZX":  # A signal takes its time.
        assert time.monotonic() < ends
        time.sleep(0.05)


def test_a_child_that_speaks_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "speaks.py").write_text(
        "import time\nfor n in range(8): print(n, flush=True); time.sleep(0.2)\nexit(3)"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(workers, "_LOG_POLL_SECONDS", 0.05)
    log = tmp_path / "log"
    with log.open("wb") as output:
        assert wait_for_child(start_child("speaks", stdout=output), log, 1) == 3
