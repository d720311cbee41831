"""The patch for vLLM in .github/upstream/vllm: applied to the installed one, whose tests of it are then run."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from engines.environments import ROOT, Environment, packages_of

UPSTREAM = ROOT / ".github" / "upstream" / "vllm"


def try_patch(environment: Environment) -> str:
    """The last line of pytest.

    Raises:
        SystemExit: the patch does not fit, or a test fails.
    """
    with TemporaryDirectory() as scratch:
        tree = Path(scratch)
        # Links to files, not to folders: those that the patch changes or adds are made anew.
        shutil.copytree(packages_of(environment.python) / "vllm", tree / "vllm", copy_function=_link)
        for file in (UPSTREAM / "vllm").rglob("*.py"):
            shutil.copy(file, tree / file.relative_to(UPSTREAM))
        for line in (UPSTREAM / "register.patch").read_text().splitlines():
            if line.startswith("+++ b/vllm/"):
                changed = tree / line.removeprefix("+++ b/")
                content = changed.read_bytes()
                changed.unlink()
                changed.write_bytes(content)
        _run(["patch", "--strip=1", "--fuzz=0", f"--input={UPSTREAM / 'register.patch'}"], tree)
        shutil.copytree(UPSTREAM / "tests", tree / "tests")
        path = f"{tree}:{environment.variables['PYTHONPATH']}"
        said = _run(
            [str(environment.python), "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "tests"],
            tree,
            environment.variables | {"PYTHONPATH": path},
        )
    return said.strip().splitlines()[-1]


def _link(source: str, target: str) -> None:
    Path(target).symlink_to(source)


def _run(command: list[str], folder: Path, variables: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stdout}{done.stderr}")
    return done.stdout
