"""Builds wheel and sdist of the last commit twice, checks them, and runs the everyday use in fresh environments.

    tools/run release --repository https://github.com/OWNER/relayout
    tools/run release --torch     # also installs torch there, and loads

Beside the packages it writes what a release is proven by: sbom.json (CycloneDX, of an environment with the extras cloud
and hub), and provenance.json (in-toto, SLSA: digests of the packages, and the commit that they were built of). Fresh
environments install the package by its name, from a local index.

PyPI shows README without the repository around it: links to files become links into `--repository`. Without it, the
packages are for checks only. Needs the extra `release`, and python3.11 for the lowest versions of what relayout
depends on (but of torch: of old versions, PyPI has no builds for CPUs). Nothing is uploaded.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAME = "safetensors-relayout"
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
        check_again(tree, Path(scratch) / "again", (wheel, sdist))
        check_contents(wheel, sdist)
        check_versions(wheel, tree)
        index = write_index(wheel, Path(scratch) / "index")
        for number, python in enumerate([sys.executable, *arguments.python]):
            use(wheel, index, Path(scratch) / f"fresh-{number}", python, with_torch=arguments.torch)
        oldest = f"python{PYTHONS[0]}"
        use(wheel, index, Path(scratch) / "lowest", oldest, with_torch=arguments.torch, versions=lowest(tree))
        write_sbom(wheel, Path(scratch) / "sbom", arguments.out / "sbom.json")
        write_provenance((wheel, sdist), arguments.repository, arguments.out / "provenance.json")
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
    wheel, sdist = built(tree, out)
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    run(sys.executable, "-m", "check_wheel_contents", "--toplevel", "relayout", wheel)
    return wheel, sdist


def built(tree: Path, out: Path) -> tuple[Path, Path]:
    """The wheel and the sdist; times in them are that of the commit."""
    done = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, check=True, capture_output=True, text=True)
    time = int(done.stdout)
    os.environ["SOURCE_DATE_EPOCH"] = str(time)
    run(sys.executable, "-m", "build", "--outdir", out, tree)
    [wheel], [sdist] = out.glob("*.whl"), out.glob("*.tar.gz")
    make_reproducible(sdist, time)
    return wheel, sdist


def make_reproducible(sdist: Path, time: int) -> None:
    """Write an archive again without what differs from build to build: setuptools leaves times, owners and order in."""
    with tarfile.open(sdist) as archive:
        found = [(one, archive.extractfile(one)) for one in sorted(archive.getmembers(), key=lambda one: one.name)]
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as again:
            for one, content in found:
                one.mtime, one.uid, one.gid, one.uname, one.gname, one.pax_headers = time, 0, 0, "", "", {}
                again.addfile(one, content)
    sdist.write_bytes(gzip.compress(packed.getvalue(), 9, mtime=time))


def check_again(tree: Path, out: Path, packages: Sequence[Path]) -> None:
    """Check that the tree makes the same bytes in another place, without what the first build has left."""
    copy = tree.with_name("other") / "place"
    left = shutil.ignore_patterns("*.egg-info", "build", "dist")
    shutil.copytree(tree, copy, symlinks=True, ignore=left)
    for first, second in zip(packages, built(copy, out), strict=True):
        if first.read_bytes() != second.read_bytes():
            raise SystemExit(f"{first.name}: a second build has other bytes")
        print(f"{first.name}: two builds are equal, SHA-256 {digest_of(first)}")


def digest_of(file: Path) -> str:
    """SHA-256, in hex."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def write_index(wheel: Path, folder: Path) -> str:
    """A package index with this wheel alone: its address."""
    place = folder / NAME
    place.mkdir(parents=True)
    shutil.copy(wheel, place)
    (folder / "index.html").write_text(f'<a href="{NAME}/">{NAME}</a>\n')
    link = f"{wheel.name}#sha256={digest_of(wheel)}"
    (place / "index.html").write_text(f'<a href="{link}">{wheel.name}</a>\n')
    return folder.as_uri()


def write_sbom(wheel: Path, fresh: Path, file: Path) -> None:
    """Write what an environment with the package and its extras consists of."""
    run(sys.executable, "-m", "venv", fresh)
    run(fresh / "bin" / "python", "-m", "pip", "install", "--quiet", f"{wheel}[cloud,hub]")
    run("cyclonedx-py", "environment", "--output-reproducible", "--output-file", file, fresh)
    parts = {part["name"] for part in json.loads(file.read_text())["components"]}
    if missing := {NAME, "safetensors", "obstore"} - parts:
        raise SystemExit(f"{file} lacks {', '.join(sorted(missing))}")


def write_provenance(packages: Sequence[Path], repository: str | None, file: Path) -> None:
    """Write what the packages were built of: a statement of in-toto 1.0 with the predicate of SLSA 1.0, not signed."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True)
    source = {"uri": f"git+{repository or ROOT.as_uri()}", "digest": {"gitCommit": commit.stdout.strip()}}
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": one.name, "digest": {"sha256": digest_of(one)}} for one in packages],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": f"{repository or ROOT.as_uri()}/tools/release.py",
                "externalParameters": {"repository": repository},
                "resolvedDependencies": [source],
            },
            "runDetails": {"builder": {"id": "tools/run release"}},
        },
    }
    file.write_text(json.dumps(statement, indent=1) + "\n")


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


def use(
    wheel: Path, index: str, fresh: Path, interpreter: str, *, with_torch: bool, versions: Sequence[str] = ()
) -> None:
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

    wanted = f"{NAME}=={wheel.name.split('-')[1]}"
    here(python, "-m", "pip", "install", "--quiet", "--extra-index-url", index, wanted, *versions)
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
