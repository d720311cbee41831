"""tools/examples: what Slurm and Kubernetes run there makes, as plain processes, the folder that one run makes."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml
from support.loader_fixtures import MIB, mlp_model
from support.patience import PATIENCE

import relayout
from relayout.cache.conversions import CachedConversion
from relayout.engines.first_start import ConversionRequest, first_start
from relayout.engines.rank_weights import EngineOptions

pytestmark = pytest.mark.documents

ROOT = Path(__file__).parents[2]
EXAMPLES, GUIDES = ROOT / "tools" / "examples", ROOT / "docs" / "guides"
NUM_TASKS = 3


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint, and what one run makes of it."""
    models = tmp_path_factory.mktemp("models")
    mlp_model(models / "llama")
    relayout.convert(models / "llama", models / "expected", tp=4, max_part_nbytes=MIB // 4)
    return models


def start(command: Sequence[str], env: Mapping[str, str], folder: Path) -> subprocess.Popen[str]:
    """A process, as the scheduler would start one on another node; its `relayout` is this one."""
    bin_folder = folder / "bin"
    if not bin_folder.exists():
        bin_folder.mkdir()
        (bin_folder / "relayout").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m relayout "$@"\n')
        (bin_folder / "relayout").chmod(0o755)
    path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(
        command,
        env={**os.environ, "PATH": path, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit code, and what it said."""
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out + err


def assert_same_folder(converted: Path, expected: Path) -> None:
    assert {file.name: file.read_bytes() for file in converted.iterdir()} == {
        file.name: file.read_bytes() for file in expected.iterdir()
    }
    assert not list(converted.parent.glob(".*"))


def test_the_array_script_of_slurm(models: Path, tmp_path: Path) -> None:
    script = str(EXAMPLES / "slurm_array.sh")
    words = [str(models / "llama"), "-o", str(tmp_path / "out"), "--tp", "4", "--max-part-size", str(MIB // 4)]
    tasks = [
        {"SLURM_ARRAY_TASK_ID": str(number), "SLURM_ARRAY_TASK_COUNT": str(NUM_TASKS)} for number in range(NUM_TASKS)
    ]
    code, said = ended(start(["bash", script, *words], tasks[1], tmp_path))
    assert code == 0, said
    code, said = ended(start(["bash", script, *words], {}, tmp_path))
    assert code == 2
    assert "units are not done: 0, 2, 3" in said
    running = [start(["bash", script, *words], task, tmp_path) for task in tasks]
    for code, said in map(ended, running):
        assert code == 0, said
        assert "unit " in said
    code, said = ended(start(["bash", script, *words], {}, tmp_path))
    assert code == 0, said
    assert_same_folder(tmp_path / "out", models / "expected")


def test_the_jobs_of_kubernetes(models: Path, tmp_path: Path) -> None:
    text = (EXAMPLES / "kubernetes" / "convert-many" / "jobs.yaml").read_text()
    units, commit = yaml.safe_load_all(text)
    assert units["spec"]["completionMode"] == "Indexed"
    assert f"/{units['spec']['completions']}" in str(units["spec"]["template"])

    def command(job: dict[str, dict[str, dict[str, dict[str, list[dict[str, list[str]]]]]]]) -> list[str]:
        spec = job["spec"]["template"]["spec"]
        [container] = spec.get("initContainers", spec["containers"])
        [line] = container["args"]
        line = line.replace("/models/llama-tp8", str(tmp_path / "out")).replace("/models/llama ", f"{models}/llama ")
        line = line.replace("--tp 8", "--tp 4").replace("4GB", str(MIB // 4)).replace("/31", f"/{NUM_TASKS}")
        return [*container["command"], line]

    running = [start(command(units), {"JOB_COMPLETION_INDEX": str(index)}, tmp_path) for index in range(NUM_TASKS)]
    for code, said in map(ended, running):
        assert code == 0, said
    code, said = ended(start(command(commit), {}, tmp_path))
    assert code == 0, said
    assert_same_folder(tmp_path / "out", models / "expected")


def test_what_is_converted_in_advance_is_what_the_engine_looks_for(models: Path, tmp_path: Path) -> None:
    """By the command of the guide to vLLM."""
    source, cache = str(models / "llama"), str(tmp_path / "cache")
    [line] = re.findall(r"^relayout (cache add .*)$", (GUIDES / "VLLM.md").read_text(), re.MULTILINE)
    paths = {"MODEL": source, "/nvme/relayout": cache, "8": "4"}
    words = [paths.get(word, word) for word in line.split()]
    for _ in range(2):  # What starts again finds it done.
        code, said = ended(start(["relayout", *words], {}, tmp_path))
        assert code == 0, said
    options = EngineOptions(cache=cache)
    wanted = ConversionRequest(source, 4)
    found = first_start(wanted, options, "vLLM loads it itself", logging.getLogger("vllm.relayout"))
    assert isinstance(found, CachedConversion)
    assert not found.entry.was_filled
