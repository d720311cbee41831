"""What runs elsewhere, in public workflows and images, names what is here, and may do no more than it must."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from engines.environments import ENGINES
from release import PYTHONS
from support.patience import PATIENCE
from support.profile import PROFILE

ROOT = Path(__file__).parents[2]
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")}
JOBS = [(flow, name, job) for flow, one in WORKFLOWS.items() for name, job in one["jobs"].items()]
STEPS = [(job, step) for _, _, job in JOBS for step in job["steps"]]
DOCKERFILE = ROOT / ".github" / "container" / "Dockerfile"


def test_only_the_job_that_publishes_may_write_and_actions_are_of_known_owners() -> None:
    for workflow, name, job in JOBS:
        granted = job.get("permissions", WORKFLOWS[workflow]["permissions"])
        assert name == "publish" or set(granted.values()) <= {"read"}
        assert "secrets." not in str(job)
        assert "github.event." not in str(job)
    for _, step in STEPS:
        assert re.match(r"actions/|pypa/", step.get("uses", "actions/")), step
        # A tag can be moved; a commit cannot. Dependabot raises it, and the comment with the release.
        assert re.search(r"@[0-9a-f]{40}$", step.get("uses", f"@{40 * '0'}")), step
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"].keys() <= {"persist-credentials", "fetch-depth"}
            assert step["with"]["persist-credentials"] is False


def test_each_action_has_the_release_of_its_commit_as_a_comment_and_one_commit_everywhere() -> None:
    texts = "".join(path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml"))
    used = re.findall(r"uses: ([\w./-]+)@(\S+)(.*)", texts)
    assert len(used) > 20
    assert [one for one in used if not re.fullmatch(r" # v\d+\.\d+\.\d+", one[2])] == []
    assert len(set(used)) == len({name for name, *_ in used})


def test_workflows_run_what_is_here() -> None:
    scripts = [step["run"] for _, step in STEPS if "run" in step]
    for script in scripts:
        assert subprocess.run(["bash", "-n"], input=script, text=True, timeout=PATIENCE).returncode == 0
        for path in re.findall(r"(?<![\w/.])(?:tools|tests|\.github)/[\w./]+", script):
            assert (ROOT / path).exists(), path
    assert len(scripts) > 6
    assert WORKFLOWS["tests"]["jobs"]["tests"]["strategy"]["matrix"]["python"] == list(PYTHONS)
    assert set(WORKFLOWS["nightly"]["jobs"]["engines"]["strategy"]["matrix"]["engine"]) == set(ENGINES)


def test_hooks_run_the_linters_that_are_pinned() -> None:
    pinned = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["test"]
    [local] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    needed = [one for hook in local["hooks"] for one in hook.get("additional_dependencies", [])]
    assert {one.partition("==")[0] for one in needed} == {"codespell", "ruff", "zizmor"}
    assert set(needed) <= set(pinned)
    assert not any(".venv" in hook["entry"] for hook in local["hooks"])
    linters = (ROOT / "tools" / "test").read_text()
    assert all(f"\n{hook['entry'].removesuffix(' --force-exclude')}" in linters for hook in local["hooks"][:-1])


def stages() -> dict[str, list[list[str]]]:
    """The instructions of each stage of the Dockerfile, in words; RUN as one."""
    found: dict[str, list[list[str]]] = {}
    for line in re.sub(r"#.*\n|\\\n", "", DOCKERFILE.read_text()).splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            found[rest.split(" AS ")[1]] = current = []
        elif word and word != "ARG":
            current.append([word, rest] if word == "RUN" else line.split())
    return found


def test_no_image_runs_as_root() -> None:
    users = {name: [words[1] for words in stage if words[0] == "USER"][-1:] for name, stage in stages().items()}
    assert users == {"build": [], "convert": ["2001"], "serve": ["2001"]}


@pytest.mark.documents
@pytest.mark.skipif(PROFILE != "long", reason="installs from package registries")
def test_the_steps_of_the_image_for_jobs_in_a_fresh_environment(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    bin_folder = tmp_path / "venv" / "bin"
    (bin_folder / "useradd").symlink_to("/bin/true")  # There are users enough here.
    env: dict[str, Any] = {**os.environ, "PATH": f"{bin_folder}:/usr/bin:/bin", "PYTHONPATH": ""}
    for stage in ("build", "convert"):
        for word, *rest in stages()[stage]:
            if word == "COPY" and not rest[0].startswith("--"):
                target = f"{tmp_path}{rest[-1]}"
                Path(target if len(rest) > 2 else Path(target).parent).mkdir(parents=True, exist_ok=True)
                subprocess.run(["cp", "-a", *rest[:-1], target], cwd=ROOT, check=True)
            elif word == "RUN":
                script = re.sub(r"(?<=\s)/(?=src|wheels)", f"{tmp_path}/", rest[0])
                subprocess.run(["sh", "-ec", script], cwd=tmp_path, env=env, check=True)
    done = subprocess.run(
        [bin_folder / "relayout", "--version"], cwd=tmp_path, env=env, check=True, capture_output=True
    )
    assert b"relayout" in done.stdout
