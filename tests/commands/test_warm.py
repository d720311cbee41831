"""`warm`: files are in the page cache afterwards, what is there is not read again, and a limit is a limit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.page_cache import drop, write_cold
from typer.testing import CliRunner

import relayout
from relayout.cli.app import app
from relayout.errors import FormatError, PlanError


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    """A converted folder, none of whose files is in the page cache."""
    relayout.convert(llama, tmp_path / "model", tp=2)
    write_cold(tmp_path / "probe", 1 << 20)  # Skips where that cannot be had.
    for file in (tmp_path / "model").glob("*.safetensors"):
        drop(file)
    return tmp_path / "model"


def test_all_files_are_in_the_page_cache_afterwards_and_are_not_read_again(folder: Path) -> None:
    sizes = {file.name: file.stat().st_size for file in folder.glob("*.safetensors")}
    reported: list[tuple[int, int]] = []
    done = relayout.warm(folder, threads=1, progress=lambda *one: reported.append(one))
    assert {file.name: file.nbytes for file in done.files} == sizes
    assert [file.before_nbytes for file in done.files] == [0, 0]
    assert {file.name: file.after_nbytes for file in done.files} == sizes
    assert (done.read_nbytes, done.left_nbytes) == (sum(sizes.values()), 0)
    assert reported[-1] == (sum(sizes.values()), sum(sizes.values()))
    again = relayout.warm(folder)
    assert again.read_nbytes == 0
    assert {file.name: file.before_nbytes for file in again.files} == sizes


def test_one_rank_is_brought_alone(folder: Path) -> None:
    done = relayout.warm(folder, rank=1)
    assert [file.name for file in done.files] == ["model-rank-1-part-0.safetensors"]
    [brought], [other] = relayout.explain(folder, 1).files, relayout.explain(folder, 0).files
    assert (brought.resident_nbytes, other.resident_nbytes) == (brought.nbytes, 0)


def test_a_limit_leaves_the_rest_on_the_drive(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relayout.commands.warm._REQUEST_NBYTES", 65536)
    total = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    done = relayout.warm(folder, memory="256KiB", threads=2)
    assert 0 < done.read_nbytes <= 4 * 65536  # The kernel reads ahead.
    assert done.left_nbytes == total - 4 * 65536
    # Side by side: the first chunks of both ranks.
    assert all(file.after_nbytes and file.after_nbytes >= 2 * 65536 for file in done.files)


def test_all_shards_of_a_plain_checkpoint_are_brought(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path / "plain")
    done = relayout.warm(tmp_path / "plain")
    assert {file.name for file in done.files} == {file.name for file in llama.glob("*.safetensors")}
    assert len(done.files) > 1
    with pytest.raises(PlanError, match="plain: not converted, so it has no ranks"):
        relayout.warm(tmp_path / "plain", rank=0)


def test_what_is_wrong_is_said(folder: Path) -> None:
    with pytest.raises(PlanError, match="rank 2, expected 0 to 1"):
        relayout.warm(folder, rank=2)
    with pytest.raises(PlanError, match="'much' is not a size"):
        relayout.warm(folder, memory="much")
    (folder / "model-rank-1-part-0.safetensors").unlink()
    with pytest.raises(FormatError, match=r"model-rank-1-part-0\.safetensors: is missing"):
        relayout.warm(folder)


def test_the_command_tells_what_was_resident_before_and_after(folder: Path) -> None:
    shown = CliRunner().invoke(app, ["warm", str(folder), "--rank", "0"])
    assert shown.exit_code == 0, shown.output
    for word in ("model-rank-0-part-0.safetensors", "0.0 %", "100.0 %", "B/s)"):
        assert word in shown.output
    found = json.loads(CliRunner().invoke(app, ["warm", str(folder), "--rank", "0", "--json"]).stdout)
    assert found["read_nbytes"] == 0
    assert found["files"][0]["before_nbytes"] == found["files"][0]["nbytes"]
    few = CliRunner().invoke(app, ["warm", str(folder), "--memory", "0"])
    assert "over the memory limit" in few.output
