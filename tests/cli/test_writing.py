"""The commands that write: what they print, where they write, and when nothing is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.command_runs import NORMS, RANK_NBYTES, Run, one_object, run, weights
from support.trees import tree


def test_a_damaged_copy_is_called_so_and_is_replaced_only_when_it_is_asked_for(here: Run, work: Path) -> None:
    assert here("convert", "model", "--tp", "2", "-o", "whole", cwd=work).returncode == 0
    assert here("copy", "whole", "copied", cwd=work).returncode == 0
    file = work / "copied" / "model-rank-1-part-0.safetensors"
    before = file.read_bytes()
    file.write_bytes(before[:-1000])
    result = here("copy", "whole", "copied", "--if-missing", cwd=work)
    assert result.returncode == 2
    assert re.search(
        r"already holds a damaged conversion .*rank-1-part-0\.safetensors: .* bytes long, exp", result.stderr
    )
    assert file.read_bytes() == before[:-1000]
    assert here("copy", "whole", "copied", "--if-missing", "--force", cwd=work).returncode == 0
    assert file.read_bytes() == before
    file.write_bytes(before[:-1000] + bytes(1000))
    quiet = here("verify", "-q", "copied", cwd=work)
    assert quiet.returncode == 1
    assert "model-rank-1-part-0.safetensors" in quiet.stdout
    assert here("verify", "-q", "whole", cwd=work).stdout == ""


def test_the_degree_may_be_written_as_vllm_has_it(here: Run, work: Path) -> None:
    assert one_object(here("convert", "model", "-tp", "2", "--dry-run", "--json", cwd=work))["num_ranks"] == 2


def test_what_is_printed_after_a_conversion_adds_up(here: Run, work: Path) -> None:
    done = here("convert", "model", "--tp", "2", cwd=work)
    assert (done.returncode, done.stderr) == (0, "")
    assert "model-tp2: 12 tensors for 2 ranks in 2 files" in done.stdout
    assert f"each rank {RANK_NBYTES / 1000:.1f} kB" in done.stdout
    # A rate of some kilobytes must not be told as 0.00 GB/s.
    assert re.search(r" s \([1-9][\d.]* (kB|MB|GB)/s\), peak memory", done.stdout)


@pytest.mark.parametrize(
    ("cwd", "source", "output"),
    [
        (".", "model", "model-tp1"),
        (".", "model/", "model-tp1"),
        ("model", ".", "model-tp1"),
        ("model/sub", "..", "model-tp1"),
    ],
)
def test_the_default_output_lies_beside_the_source(here: Run, work: Path, cwd: str, source: str, output: str) -> None:
    (work / "model" / "sub").mkdir()
    before = set(tree(work))
    done = here("convert", source, "--tp", "1", cwd=work / cwd)
    assert (done.returncode, done.stderr) == (0, "")
    new = set(tree(work)) - before
    assert f"{output}/relayout.json" in new
    assert all(f"{path}/".startswith(f"{output}/") for path in new)


@pytest.mark.parametrize("command", ["convert model", "copy model-tp2 copied"])
def test_if_missing_what_is_there_is_success_and_what_is_another_an_error(here: Run, work: Path, command: str) -> None:
    here("convert", "model", "--tp", "2", cwd=work)
    options = [*command.split(), *(["--tp", "2"] if "convert" in command else []), "--if-missing"]
    assert here(*options, cwd=work).returncode == 0
    before = tree(work)
    again = here(*options, cwd=work)
    assert (again.returncode, again.stderr, tree(work)) == (0, "", before)
    assert "already there, all files with their lengths" in again.stdout
    assert one_object(here(*options, "--json", cwd=work))["already_there"]
    other = here(*options, "--ranks", "1", cwd=work)
    assert (other.returncode, tree(work)) == (2, before)
    assert "--force replaces" in other.stderr


def test_convert_speaks_json(work: Path) -> None:
    found = one_object(run("convert", "model", "--tp", "2", "--json", cwd=work))
    files = [work / "model-tp2" / f"model-rank-{rank}-part-0.safetensors" for rank in range(2)]
    assert found["output"] == "model-tp2"
    assert (found["num_ranks"], found["num_tensors"], found["num_files"]) == (2, 12, 2)
    assert found["source_nbytes"] == sum(array.nbytes for array in weights().values())
    assert found["rank_nbytes"] == [RANK_NBYTES] * 2
    assert found["replicated_nbytes"] == sum(weights()[name].nbytes for name in NORMS)
    assert found["written_nbytes"] == sum(file.stat().st_size for file in files)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_dry_run_writes_nothing(work: Path, as_json: bool) -> None:
    before = tree(work)
    done = run("convert", "model", "--tp", "2", "--dry-run", *(["--json"] if as_json else []), cwd=work)
    assert (done.returncode, done.stderr) == (0, "")
    assert tree(work) == before
    if as_json:
        found = one_object(done)
        assert (found["plan"], found["num_ranks"], found["num_tensors"]) == ("builtin:llama", 2, 12)
        cuts = {group["pattern"]: (group["cut"], group["rank_shapes"]) for group in found["groups"]}
        assert cuts["model.layers.*.mlp.down_proj.weight"] == ("dim 1", [[64, 50]])
        assert cuts["model.layers.*.self_attn.q_proj.weight"] == ("dim 0", [[32, 64]])
        assert cuts["model.norm.weight"] == ("whole", [[64]])
    else:
        assert re.search(r"model\.layers\.\*\.mlp\.down_proj\.weight +1 +F16 +64x100 +dim 1 +64x50", done.stdout)
        assert "nothing was written" in done.stdout


def test_a_dry_run_foretells_the_conversion(here: Run, work: Path) -> None:
    planned = one_object(here("convert", "model", "--tp", "2", "--dry-run", "--json", cwd=work))
    done = one_object(here("convert", "model", "--tp", "2", "--json", cwd=work))
    shared = planned.keys() & done.keys()
    assert {"output", "num_files", "written_nbytes", "rank_nbytes", "replicated_nbytes"} <= shared
    assert {key: planned[key] for key in shared} == {key: done[key] for key in shared}
