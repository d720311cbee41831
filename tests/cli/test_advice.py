"""The next command after an error fits the error and the command line."""

from __future__ import annotations

import errno
import signal
from pathlib import Path

import pytest

from relayout.cli.advice import next_step
from relayout.cli.signals import SignalReceived
from relayout.errors import FormatError, MissingPathError, PlanError


@pytest.mark.parametrize(
    ("error", "argv", "expected"),
    [
        (
            PlanError("threads: 0, expected 1 or more", code="option"),
            "convert m --threads 0",
            "relayout convert --help",
        ),
        (PlanError("no entry", code="option"), "cache remove x", "relayout cache remove --help"),
        (PlanError("no command", code="option"), "--verbose", "relayout --help"),
        (PlanError("no such command 'load'"), "load m", "relayout --help"),
        (PlanError("no such command 'frob'"), "plans frob", "relayout plans --help"),
        (
            PlanError("no such command 'convrt'; did you mean 'convert'?"),
            "convrt m --tp 2",
            "relayout convert m --tp 2",
        ),
        (
            PlanError("no built-in plan 'lama'; did you mean 'llama'?", path="model"),
            "convert model --plan lama",
            "relayout convert model --plan llama",
        ),
        (
            MissingPathError("no such file or folder; did you mean 'model'?", path="a b/modle"),
            "inspect|a b/modle",
            "relayout inspect 'a b/model'",
        ),
        (
            PlanError("already converted: omit --tp", path="m", code="option"),
            "inspect m --tp 4 -v",
            "relayout inspect m -v",
        ),
        (
            PlanError("no rule: (`relayout plans check SRC` lists all)", path="a b", code="no_rule"),
            "convert|a b",
            "relayout plans check 'a b'",
        ),
        (
            PlanError("needs x: pip install '.[hub]' in a checkout", code="unsupported"),
            "inspect hf://a/b",
            "pip install '.[hub]'",
        ),
        (PlanError("100 elements", path="m", code="indivisible"), "convert m --tp 3", "relayout inspect m"),
        (PlanError("no plan", path="m", code="no_plan"), "convert m --tp 3", "relayout plans list"),
        (PlanError("is being written", path="m", code="busy"), "convert m --tp 3", "ps -ef | grep relayout"),
        (FormatError("damaged", path="m/a.safetensors", code="digest"), "copy m n", "relayout verify m"),
        (
            FormatError("not a converted folder; relayout convert makes one", path="m"),
            "restore m",
            "relayout inspect m",
        ),
        (FormatError("not signed", path="m", code="signature"), "copy m n", "relayout sign --help"),
        (
            FormatError("not valid TOML", path="p.toml", code="syntax"),
            "convert m --plan p.toml",
            "relayout plans show llama",
        ),
        (FormatError("version 9", path="m/relayout.json", code="version"), "inspect m", "install a newer relayout"),
        (SignalReceived(signal.SIGINT), "convert m --tp 2", "run the same command again"),
        (MemoryError(), "convert m --tp 2", "free -h"),
        (OSError(errno.EIO, "I/O error", "m/a"), "verify m", "dmesg | tail"),
        (OSError(errno.EACCES, "denied", "https://host/m"), "verify m", "curl -I https://host/m"),
        (OSError(errno.EACCES, "denied", "s3://bucket/m"), "verify m", "aws s3 ls s3://bucket/m/"),
        (OSError(errno.EACCES, "denied", "gs://bucket/m"), "verify m", "relayout doctor gs://bucket/m"),
        (OSError(errno.EPIPE, "broken"), "verify m", "relayout verify --help"),
    ],
    ids=str,
)
def test_the_next_command_fits_the_error(error: BaseException, argv: str, expected: str) -> None:
    assert next_step(error, argv.split("|" if "|" in argv else " ")) == expected


def test_a_path_that_does_not_exist_leads_to_its_nearest_parent(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    missing = MissingPathError("no such file or folder", path=str(tmp_path / "models" / "none" / "deep"))
    assert next_step(missing, ["inspect", "x"]) == f"ls -la {tmp_path}/models"
    full = PlanError("too few", path=str(tmp_path / "models" / "out"), code="space")
    assert next_step(full, ["convert", "x"]) == f"df -h {tmp_path}/models"
    denied = PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "models" / "out"))
    assert next_step(denied, ["convert", "x"]) == f"ls -ld {tmp_path}/models"


def test_of_a_failed_verify_the_files_are_listed(tmp_path: Path) -> None:
    damaged = FormatError("not valid JSON", path=str(tmp_path / "relayout.json"), code="syntax")
    assert next_step(damaged, ["verify", str(tmp_path)]) == f"ls -la {tmp_path}"
    assert next_step(damaged, ["inspect", str(tmp_path)]) == f"relayout verify {tmp_path}"


def test_without_arguments_the_help_of_all_commands_is_next() -> None:
    assert next_step(PlanError("no command", code="option"), []) == "relayout --help"
