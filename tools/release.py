"""Builds wheel and sdist of the last commit, checks them, and runs the everyday use in fresh environments.

    tools/run release --repository https://github.com/OWNER/relayout
    tools/run release --torch     # also installs torch there, and loads

PyPI shows README without the repository around it: links to files become links into `--repository`. Without it, the
packages are for checks only. Needs the extra `release`, and python3.11 for the lowest versions of what relayout
depends on (but of torch: of old versions, PyPI has no builds for CPUs). Nothing is uploaded.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")

EVERYDAY = """
import numpy as np, json, pathlib, relayout
from safetensors.numpy import save_file
assert "site-packages" in relayout.__file__, relayout.__file__
folder = pathlib.Path("model")
folder.mkdir()
names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj")
shapes = {f"model.layers.0.{name}.weight": (64, 64) for name in names}
rng = np.random.default_rng(0)
tensors = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
save_file(tensors, folder / "model.safetensors")
sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 1}
(folder / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
"""
LOAD = """
import relayout, torch
from safetensors.torch import load_file
whole = load_file("model/model.safetensors")["model.layers.0.self_attn.o_proj.weight"]
loaded = relayout.load("model-tp2", 1)["model.layers.0.self_attn.o_proj.weight"]
assert torch.equal(loaded, whole[:, 32:])
print("loaded")
"""
LOWEST = """
import json, os, pathlib, sys, relayout
sys.path.append(sys.argv[1])
from relayout.core.slices import BITS
from support import hub_server
header, end = {}, 0
for dtype, bits in BITS.items():
    header[dtype] = {"dtype": dtype, "shape": [64], "data_offsets": [end, end := end + 8 * bits]}
text = json.dumps(header).encode()
pathlib.Path("types").mkdir()
pathlib.Path("types/model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + os.urandom(end))
relayout.convert("types")
report = relayout.verify("types-tp1", source="types")
assert report.ok, report.differences
with hub_server.running() as hub:
    os.environ |= {"HF_ENDPOINT": hub.hub.url, "HF_HUB_CACHE": "cache", "HF_TOKEN_PATH": "token"}
    hub.repos["org/out"] = {file.name: file.read_bytes() for file in pathlib.Path("types-tp1").iterdir()}
    assert relayout.verify("org/out", source="types").ok
"""
"""Every dtype, which the reference reader must know; and the hub."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repository", help="address of the public repository")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the packages go; default is dist")
    parser.add_argument("--python", action="append", default=[], help="another Python to try them with; repeatable")
    parser.add_argument("--torch", action="store_true", help="install torch, too, and load")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="relayout-release-") as scratch:
        tree = Path(scratch) / "tree"
        export(tree, arguments.repository)
        wheel, sdist = build(tree, arguments.out)
        check_contents(wheel, sdist)
        check_versions(wheel, tree)
        for number, python in enumerate([sys.executable, *arguments.python]):
            use(wheel, Path(scratch) / f"fresh-{number}", python, with_torch=arguments.torch)
        use(wheel, Path(scratch) / "lowest", f"python{PYTHONS[0]}", with_torch=arguments.torch, versions=lowest(tree))
    print(f"\n{wheel}\n{sdist}\nare ready" + ("" if arguments.repository else ", but for checks only: no --repository"))


def export(tree: Path, repository: str | None) -> None:
    """Write the files of the last commit, README with links into the repository."""
    tree.mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive, check=True)
    if repository is not None:
        readme = tree / "README.md"
        readme.write_text(with_absolute_links(readme.read_text(), repository.rstrip("/")))
        project = tree / "pyproject.toml"
        urls = f'[project.urls]\nRepository = "{repository}"\n\n[project.scripts]'
        project.write_text(project.read_text().replace("[project.scripts]", urls, 1))


def with_absolute_links(text: str, repository: str) -> str:
    """README with its links to files as links into the repository; pictures as raw files."""
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?://|#)([^)]+)\)", rf"\1{repository}/raw/main/\2)", text)
    return re.sub(r"((?<!!)\[[^\]]*\]\()(?!https?://|#)([^)]+)\)", rf"\1{repository}/blob/main/\2)", text)


def build(tree: Path, out: Path) -> tuple[Path, Path]:
    """The wheel and the sdist, after the checks of those who take them."""
    out.mkdir(parents=True, exist_ok=True)
    for old in (*out.glob("*.whl"), *out.glob("*.tar.gz")):
        old.unlink()
    run(sys.executable, "-m", "build", "--outdir", out, tree)
    [wheel], [sdist] = out.glob("*.whl"), out.glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    run(sys.executable, "-m", "check_wheel_contents", "--toplevel", "relayout", wheel)
    return wheel, sdist


def check_contents(wheel: Path, sdist: Path) -> None:
    """Everything of the package is in the wheel, nothing else is, and the sdist makes the same."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    ours = {name for name in tracked if name.startswith(("relayout/", "loader/")) and name != "relayout/loader"}
    expected = {re.sub(r"^loader/", "relayout/loader/", name) for name in ours}
    with zipfile.ZipFile(wheel) as opened:
        packed = {name for name in opened.namelist() if ".dist-info/" not in name}
        manual = {name for name in packed if name.endswith(".data/data/share/man/man1/relayout.1")}
    packed -= manual
    if packed != expected or not manual:
        raise SystemExit(f"the wheel lacks {sorted(expected - packed)}, and has beside {sorted(packed - expected)}")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    if missing := ours - names:
        raise SystemExit(f"the sdist lacks {sorted(missing)}")
    print(f"contents: {len(packed)} files in the wheel, {wheel.stat().st_size / 1e3:.0f} kB")


def check_versions(wheel: Path, tree: Path) -> None:
    """The Pythons that are named are those that are tested, and what it needs exists for each."""
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    named = [line.rpartition(" ")[2] for line in project["classifiers"] if re.search(r":: 3\.\d+$", line)]
    if named != list(PYTHONS) or project["requires-python"] != f">={PYTHONS[0]}":
        raise SystemExit(f"pyproject.toml names Python {', '.join(named)}, expected {', '.join(PYTHONS)}")
    for python in PYTHONS:
        with tempfile.TemporaryDirectory() as target:
            options = ("--dry-run", "--quiet", "--only-binary=:all:", "--python-version", python, "--target", target)
            run(sys.executable, "-m", "pip", "install", *options, wheel)
        print(f"Python {python}: all dependencies have wheels")


def lowest(tree: Path) -> list[str]:
    """The lowest versions that pyproject.toml declares, of all dependencies and of those of the hub."""
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["hub"]]
    return [requirement.replace(">=", "==") for requirement in wanted]


def use(wheel: Path, fresh: Path, interpreter: str, *, with_torch: bool, versions: Sequence[str] = ()) -> None:
    """Install into an environment of its own, and do what README says.

    Args:
        versions: of what it depends on; with them, do what needs the oldest of them, too.
    """
    fresh.mkdir()
    run(interpreter, "-m", "venv", fresh / "venv")
    python, command = fresh / "venv" / "bin" / "python", fresh / "venv" / "bin" / "relayout"
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def here(*words: object) -> str:
        done = subprocess.run([str(word) for word in words], cwd=fresh, env=clean, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(map(str, words))[:200]}: {done.stdout}{done.stderr}")
        return done.stdout

    here(python, "-m", "pip", "install", "--quiet", wheel, *versions)
    here(python, "-c", EVERYDAY)
    for words in ("inspect model", "convert model --tp 2", "verify model-tp2 --source model"):
        print("$ relayout", words, "\n" + here(command, *words.split()).split("\n\n")[0].rstrip())
    here(command, "restore", "model-tp2", "-o", "back")
    if (fresh / "back" / "model.safetensors").read_bytes() != (fresh / "model" / "model.safetensors").read_bytes():
        raise SystemExit("restore wrote other bytes")
    if versions:
        here(python, "-c", LOWEST, ROOT / "tests")
        print(f"works with {', '.join(versions)}")
    print(here(python, "--version").strip(), here(command, "--version").strip(), sep=", ")
    if with_torch:
        here(python, "-m", "pip", "install", "--quiet", f"{wheel}[torch]")
        print(here(python, "-c", LOAD).strip())


def run(*words: object) -> None:
    """Run a command; end with its name if it fails."""
    if subprocess.run([str(word) for word in words], stdin=subprocess.DEVNULL).returncode:
        raise SystemExit(f"failed: {' '.join(map(str, words))}")


if __name__ == "__main__":
    main()
