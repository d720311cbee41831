"""Subjects of commits: what a reader of the log takes for an imperative, and what is refused."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import subjects
from support.tools import run_tool


@pytest.mark.parametrize(
    "message",
    [
        "Fix deadlock in simulated bucket tests\n\nTwo writers waited for each other.\n",
        "Embed the index",
        "Process folders of one part",
        "Focus on one rank",
        "Read rows of a table\n\n# Please enter the commit message\n",
        f"Add {68 * 'x'}",
        "Merge branch 'face'",
        'Revert "the tests of stores"',
        "fixup! Add a store",
    ],
)
def test_imperatives_are_taken(message: str) -> None:
    assert list(subjects.faults(message)) == []


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        (f"Add {69 * 'x'}", "73 characters, expected at most 72"),
        ("Added a store", "begins with 'Added'"),
        ("Adding a store", "begins with 'Adding'"),
        ("Adds a store", "begins with 'Adds'"),
        ("The store of buckets", "begins with 'The'"),
        ("What a store does", "begins with 'What'"),
        ("store: add", "without a capital letter"),
        ("", "without a capital letter"),
        ("Add a store.", "ends with '.'"),
        ("Add a store\nbecause it is missing", "no empty line"),
    ],
)
def test_other_forms_are_refused(message: str, fault: str) -> None:
    [found] = subjects.faults(message)
    assert fault in found


def test_the_tool_reads_a_range_or_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main"]
    for words in (["init", "-q"], *(["commit", "-q", "--allow-empty", "-m", text] for text in ("Add a", "adds b"))):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    assert list(subjects.messages("HEAD~1..HEAD").values()) == ["adds b"]
    with pytest.raises(SystemExit, match="nowhere"):
        subjects.messages("nowhere..HEAD")
    (tmp_path / "message").write_text("adds b\n")
    done = run_tool("subjects", "--message", str(tmp_path / "message"))
    assert (done.returncode, done.stderr) == (1, "")
    assert "'adds b': begins without a capital letter" in done.stdout
