"""The commands that read: what they print for people and for programs, and what they call damaged."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.bits import flip
from support.command_runs import NORMS, Run, assert_refused, one_object, run, weights
from support.downloads import SHARD, Downloads, downloads, rot
from support.trees import tree

import relayout
from relayout.cli.reading import gitignore_pattern

__all__ = ["downloads"]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ("model", {"converted": False, "model_type": "llama", "num_files": 1, "num_tensors": 12, "ranks": []}),
        ("model/model.safetensors", {"converted": False, "model_type": "llama", "num_files": 1, "num_tensors": 12}),
        ("out", {"converted": True, "model_type": "llama", "num_files": 2, "num_tensors": 12}),
        ("out --rank 1", {"converted": True, "num_files": 1, "num_tensors": 12}),
    ],
)
def test_inspect_speaks_json(here: Run, converted: Path, args: str, expected: dict[str, Any]) -> None:
    before = tree(converted)
    found = one_object(here("inspect", *args.split(), "--json", cwd=converted))
    assert {key: found[key] for key in expected} == expected
    whole = sum(array.nbytes for array in weights().values())
    norms = sum(weights()[name].nbytes for name in NORMS)
    nbytes = {"out": whole + norms, "out --rank 1": (whole + norms) // 2}.get(args, whole)
    assert found["nbytes"] == nbytes
    assert tree(converted) == before


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("model", r"model: plain checkpoint, model type llama, 12 tensors, .* in 1 file\n"),
        ("model", r"\n +2 +\S+ kB +\S+ kB \(\d\.\dx\) +\S+ kB \(\d\.\dx\) +1\.\d\dx +1\.\d\dx"),
        ("model/model.safetensors", r"model/model\.safetensors: plain checkpoint, model type llama, 12 tensors"),
        ("out", r"out: converted checkpoint, model type llama, plan builtin:llama, 12 tensors, .* in 2 files\n"),
        ("out", r"model\.layers\.\*\.mlp\.down_proj\.weight +1 +F16 +64x50 +dim 1: 0 to 50 of 100"),
        ("out --rank 1", r"\n +1 +12 +\S+ kB +1 +\d"),
        (
            "out --rank 1",
            r"\ntensors of rank 1 .*\n(.*\n)+model\.layers\.\*\.mlp\.down_proj\.weight.* 50 to 100 of 100",
        ),
        (
            "model",
            r"\nnote cannot be divided among 8, 16 ranks; for 8: tensor '\S+': dim 1 .* multiple of 8 \(.* 4 ranks\)\n",
        ),
        ("model --tp 2", r"\na rank of 2 would read \S+ kB to get (\S+) kB; after convert --tp 2: \1 kB in one read"),
        (
            "model --tp 3",
            r"\nnote cannot be divided among 3 ranks: tensor .* \(this checkpoint .* among 1, 2, 4 ranks\)\n",
        ),
    ],
)
def test_inspect_prints_for_people(here: Run, converted: Path, args: str, says: str) -> None:
    done = here("inspect", *args.split(), cwd=converted)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(says, done.stdout), done.stdout


@pytest.mark.parametrize("path", ["model", "./model", "out"])
def test_a_path_alone_is_inspected_and_the_next_command_is_one_that_runs(here: Run, converted: Path, path: str) -> None:
    done = here(path, cwd=converted)
    assert (done.returncode, done.stdout) == (0, here("inspect", path, cwd=converted).stdout)
    following = done.stdout.splitlines()[-1].removeprefix("next ")
    if path == "out":
        assert following == "vllm serve out -tp 2 --load-format relayout"
    else:
        assert here(*following.removeprefix("relayout ").split(), "--dry-run", cwd=converted).returncode == 0


def test_the_name_of_a_command_is_the_command_even_where_a_folder_has_it(here: Run, converted: Path) -> None:
    (converted / "plans").mkdir()
    assert "llama" in here("plans", "list", cwd=converted).stdout
    assert here("./plans", cwd=converted).returncode == 2


def test_inspect_tells_what_a_rank_would_read_in_vain(here: Run, converted: Path) -> None:
    rows = one_object(here("inspect", "model", "--json", cwd=converted))["amplification"]
    nbytes = {name: array.nbytes for name, array in weights().items()}
    columns = sum(nbytes[name] for name in nbytes if name.endswith(("down_proj.weight", "o_proj.weight")))
    norms = sum(nbytes[name] for name in NORMS)
    [two] = [row for row in rows if row["tp"] == 2]
    assert two["needed_nbytes"] == (sum(nbytes.values()) + norms) // 2
    assert two["row_reader_nbytes"] == two["needed_nbytes"] + columns // 2
    assert two["whole_nbytes"] == sum(nbytes.values())
    assert two["ranks_layout_nbytes"] == 2 * two["needed_nbytes"]
    assert two["whole_layout_nbytes"] == sum(nbytes.values()) + columns
    for layout in ("ranks", "whole"):
        out = converted / layout
        relayout.convert(converted / "model", out, tp=2, layout=layout)
        files = json.loads((out / "relayout.json").read_text())["files"]
        assert sum(file["nbytes"] - file["data_start"] for file in files) == two[f"{layout}_layout_nbytes"]
    [eight] = [row for row in rows if row["tp"] == 8]
    assert eight["needed_nbytes"] is None
    assert "not a multiple of 8" in eight["reason"]


def test_verify_passes_what_is_whole(converted: Path) -> None:
    before = tree(converted)
    done = run("verify", "out", cwd=converted)
    assert (done.returncode, done.stderr) == (0, "")
    assert "verified 24 slices of 2 ranks" in done.stdout
    found = one_object(run("verify", "out", "--source", "model", "--json", cwd=converted))
    assert (found["ok"], found["compared_with_source"], found["num_tensors"]) == (True, True, 24)
    assert found["differences"] == []
    assert tree(converted) == before


def test_verify_names_a_missing_file_once_and_counts_none_of_its_slices(
    here: Run, converted: Path, tmp_path: Path
) -> None:
    shutil.copytree(converted / "out", tmp_path / "out")
    (tmp_path / "out" / "model-rank-1-part-0.safetensors").unlink()
    done = here("verify", "out", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.startswith("1 difference: 12 slices of 2 ranks, ")
    assert "\ndiffers model-rank-1-part-0.safetensors: cannot be read: No such file or directory\n" in done.stdout


def test_verify_of_a_download_begins_with_the_answer(here: Run, downloads: Downloads, tmp_path: Path) -> None:
    done = here("verify", str(downloads.snapshot), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"verified {downloads.snapshot}: 2 shards, every byte, by hub cache (sha256)\n")
    shutil.copytree(downloads.snapshot, tmp_path / "plain")
    plain = here("verify", "plain", cwd=tmp_path)
    assert (plain.returncode, plain.stderr) == (0, "")
    assert plain.stdout.startswith("no digest known plain: of its shards: headers and index agree")
    assert "verified" not in plain.stdout
    rot((downloads.snapshot / SHARD).resolve())
    damaged = here("verify", "--quiet", str(downloads.snapshot), cwd=tmp_path)
    assert damaged.returncode == 1
    assert damaged.stdout.startswith("1 difference: ")
    assert f"\ndiffers {SHARD}: sha256 is " in damaged.stdout
    found = one_object(here("verify", str(downloads.snapshot), "--json", cwd=tmp_path), code=1)
    assert (found["ok"], found["is_verified"], [one["file"] for one in found["differences"]]) == (False, False, [SHARD])
    assert {one["name"] for one in found["verified"]} == {path.name for path in downloads.local.glob("[!.]*")} - {SHARD}


@pytest.mark.parametrize(("nbytes", "says"), [(None, "is missing"), (5000, "5000 bytes long")])
def test_what_lacks_a_file_or_its_end_is_not_shown(
    here: Run, converted: Path, tmp_path: Path, nbytes: int | None, says: str
) -> None:
    shutil.copytree(converted / "out", tmp_path / "out")
    file = tmp_path / "out" / "model-rank-1-part-0.safetensors"
    file.unlink() if nbytes is None else os.truncate(file, nbytes)
    for args in ("inspect out", "inspect out --rank 1", "report out"):
        assert_refused(here, tmp_path, args.split(), rf"out/model-rank-1-part-0\.safetensors: .*{says}")
    assert here("inspect", "out", "--rank", "0", cwd=tmp_path).returncode == 0


def test_verify_names_file_tensor_and_bytes_of_one_flipped_bit(here: Run, converted: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    shutil.copytree(converted / "out", tmp_path / "out")
    file = "model-rank-1-part-0.safetensors"
    blob = (tmp_path / "out" / file).read_bytes()
    header_nbytes = 8 + int.from_bytes(blob[:8], "little")
    start, end = (header_nbytes + offset for offset in json.loads(blob[8:header_nbytes])[name]["data_offsets"])
    flip(tmp_path / "out" / file, (start + end) // 2)
    done = run("verify", "out", "--source", converted / "model", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert " hashed, not compared with the source because of what differs\n" in done.stdout
    [line] = [line for line in done.stdout.splitlines() if line.startswith("differs")]
    assert f"{file}: tensor '{name}', bytes {start} to {end}: " in line
    assert done.stdout.endswith(
        "\nnext copy these files again from where they are intact, or convert again with --force\n"
    )
    found = one_object(here("verify", "out", "--json", cwd=tmp_path), code=1)
    assert found["ok"] is False
    [difference] = found["differences"]
    assert [difference[key] for key in ("file", "tensor", "start", "end")] == [file, name, start, end]


def test_patterns_for_the_csi_driver_leave_out_what_other_ranks_need(converted: Path, tmp_path: Path) -> None:
    """The driver reads patterns as .gitignore does (modelpack/model-csi-driver, pkg/service/model.go). So does git."""
    printed = run("files", "out", "--ranks", "1", "--format", "csi", cwd=converted).stdout
    folder = tmp_path / "repository"
    subprocess.run(["git", "init", "-q", folder], check=True)
    (folder / ".gitignore").write_text("".join(f"{pattern}\n" for pattern in json.loads(printed)))
    names = sorted(file["name"] for file in one_object(run("files", "out", "--json", cwd=converted))["files"])
    checked = subprocess.run(
        ["git", "-C", folder, "check-ignore", "--stdin"], input="\n".join(names), capture_output=True, text=True
    )
    excluded = set(checked.stdout.split())
    assert excluded
    assert sorted(set(names) - excluded) == sorted(run("files", "out", "--ranks", "1", cwd=converted).stdout.split())


@pytest.mark.parametrize("name", ["a*b?", "[x]", "!important", "#note", "back\\slash", "a b "])
def test_a_pattern_matches_its_own_name_alone(name: str, tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / ".gitignore").write_text(f"{gitignore_pattern(name)}\n")
    command = ["git", "-C", tmp_path, "check-ignore", "-z", "--stdin"]
    others = [name, f"{name}x", "x", "axbx", "important", "note", "backslash"]
    checked = subprocess.run(command, input="\0".join(others).encode(), capture_output=True)
    assert checked.stdout.decode() == f"{name}\0"


def test_patterns_and_nul_are_not_for_each_other(here: Run, work: Path) -> None:
    assert_refused(here, work, ["files", "out", "--null", "--format", "csi"], "--null cannot be combined")
