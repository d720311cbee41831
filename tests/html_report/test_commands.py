"""The command `report`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from relayout.cli.app import app

pytestmark = pytest.mark.documents


def test_the_command_tells_what_it_wrote(folder: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(folder), "-o", str(tmp_path / "page.html")])
    assert done.exit_code == 0, done.output
    assert "converted checkpoint, " in done.stdout
    as_json = CliRunner().invoke(app, ["report", str(folder), "-o", str(tmp_path / "page.html"), "--json"])
    assert json.loads(as_json.stdout)["num_ranks"] == 4
