"""Rehearses a release of the last commit: all of it but what needs an account.

    tools/run release --repository https://github.com/OWNER/relayout
    tools/run release --torch     # also installs torch there, and loads
    tools/run release --fill --repository URL     # only writes this address into the files that name the repository

Builds sdist and wheel twice, in two places, which must give the same bytes. Installs by name, from an index that is a
local folder, into fresh environments, and does the everyday use there; reads the golden folders of the format with what
is installed. Writes sbom.json (CycloneDX) of an environment with the extras, and provenance.json (in-toto, SLSA 1.0;
not signed: in public, GitHub signs its own). The last lines say what was proven.

The address of the repository is `Repository` in pyproject.toml, and the files in `WITH_REPOSITORY` repeat it. The
packages contain that of `--repository`, if it is given. Until either is an address, packages are checked and not left
in `--out`. PyPI shows README without the repository around it: links to files become links into the repository. Needs
the extra `release`, and python3.11 for the lowest versions of what relayout depends on (but of torch: of old versions,
PyPI has no builds for CPUs). Nothing is uploaded.
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
from typing import Any

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
NAME = "safetensors-relayout"
EXTRAS = "cloud,hub,sign,web"
"""Those that have wheels everywhere and are small: one environment has them all, and the SBOM lists it."""
GOLDEN = "tests/format/golden"
WITH_REPOSITORY = (
    "pyproject.toml",
    "README.md",
    "docs/SECURITY.md",
    ".github/CITATION.cff",
    ".github/CODEOWNERS",
    ".github/CODE_OF_CONDUCT.md",
    ".github/ISSUE_TEMPLATE/config.yml",
)
"""Files that name the repository."""

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
    parser.add_argument("--repository", type=address, help="address of the public repository")
    parser.add_argument("--fill", action="store_true", help="write --repository into this checkout, and end")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the packages go; default is dist")
    parser.add_argument("--python", action="append", default=[], help="another Python to try them with; repeatable")
    parser.add_argument("--torch", action="store_true", help="install torch, too, and load")
    arguments = parser.parse_args()
    if arguments.fill:
        if arguments.repository is None:
            parser.error("--fill needs --repository URL")
        fill(ROOT, arguments.repository)
        return
    if arguments.repository is None and is_address(declared := repository_of(ROOT)):
        arguments.repository = declared
    with tempfile.TemporaryDirectory(prefix="relayout-release-") as name:
        scratch = Path(name)
        commit, time = git("log", "-1", "--format=%H %ct").split()
        packages = [build(scratch / place, arguments.repository, int(time)) for place in ("one", "another")]
        digests = [[digest(package) for package in (wheel, sdist)] for wheel, sdist in packages]
        if digests[0] != digests[1]:
            raise SystemExit(f"built twice, wheel and sdist have different bytes: {digests}")
        wheel, sdist = packages[0]
        check_contents(wheel, sdist)
        check_repository(wheel, arguments.repository)
        check_versions(wheel, scratch / "one" / "tree")
        index = make_index(scratch / "index", wheel, sdist)
        fresh = [(python, ()) for python in (sys.executable, *arguments.python)]
        wanted = [*fresh, (f"python{PYTHONS[0]}", lowest(scratch / "one" / "tree"))]
        for number, (python, versions) in enumerate(wanted):
            place = Fresh(scratch / f"fresh-{number}", python, index, wheel)
            use(place, with_torch=arguments.torch, versions=versions)
        complete = Fresh(scratch / "complete", sys.executable, index, wheel)
        complete.install(f"[{EXTRAS}]")
        complete("python", "-c", "import huggingface_hub, model_signing, obstore, OpenSSL, relayout, urllib3")
        sbom = write_sbom(complete, scratch / "sbom.json", int(time))
        if arguments.repository is not None:
            made = [*put(arguments.out, wheel, sdist), Path(shutil.copy(sbom, arguments.out))]
            write_provenance(arguments.out / "provenance.json", made, arguments.repository, commit)
    print(
        f"\nproven of commit {commit}:",
        f"- {wheel.name} and {sdist.name}, built twice, in other places, time zones and modes of files, are the same",
        f"- the wheel has all files of the package and no other; all dependencies have wheels for {', '.join(PYTHONS)}",
        f"- installed by name from a local index, and used, {len(wanted)} times; once with the lowest versions",
        f"- what was installed reads the golden folders, and converts their source to the same rank files ({GOLDEN})",
        f"- installed with {EXTRAS}; what that brings is in sbom.json",
        "not proven: uploads, signatures, images",
        f"{arguments.out} has the packages, sbom.json and provenance.json"
        if arguments.repository
        else "no package is left: pyproject.toml has no address of the repository; give --repository URL",
        sep="\n",
    )


def export(tree: Path, repository: str | None) -> None:
    """Write the files of the last commit, README with links into the repository."""
    tree.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive, check=True)
    if repository is not None:
        fill(tree, repository)
        readme = tree / "README.md"
        readme.write_text(with_absolute_links(readme.read_text(), repository))


def address(text: str) -> str:
    """Return an address of a repository without a slash at its end.

    Raises:
        ArgumentTypeError: it is not one.
    """
    if not is_address(text):
        raise argparse.ArgumentTypeError(f"{text!r}, expected an address such as https://github.com/OWNER/relayout")
    return text.rstrip("/")


def is_address(text: str) -> bool:
    """Return True if people can reach it: https, a domain that may exist (RFC 2606), an owner and a name."""
    found = re.fullmatch(r"https://((?:[\w-]+\.)+[a-z]+)/([\w.-]+)/([\w.-]+)/?", text)
    return found is not None and not re.search(r"(?:^|\.)(?:invalid|example(?:\.\w+)?|test)$", found[1])


def repository_of(tree: Path) -> str:
    """Return the address that pyproject.toml declares."""
    declared: str = tomllib.loads((tree / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    return declared


def fill(tree: Path, repository: str) -> None:
    """Write the address of the repository into the files that name it.

    Raises:
        SystemExit: one of them does not contain the address that pyproject.toml declares.
    """
    declared = repository_of(tree)
    owner = "@OWNER" if not is_address(declared) else f"@{declared.split('/')[3]}"
    for name in WITH_REPOSITORY:
        old = owner if name.endswith("CODEOWNERS") else declared
        new = f"@{repository.split('/')[3]}" if name.endswith("CODEOWNERS") else repository
        text = (tree / name).read_text()
        if old not in text:
            raise SystemExit(f"{name}: does not contain {old}, the repository of pyproject.toml")
        (tree / name).write_text(text.replace(old, new))


def check_repository(wheel: Path, repository: str | None) -> None:
    """Raise SystemExit unless the wheel names this repository; without one, it is not to be shipped."""
    with zipfile.ZipFile(wheel) as opened:
        [name] = [one for one in opened.namelist() if one.endswith(".dist-info/METADATA")]
        text = opened.read(name).decode()
    named = re.findall(r"^Project-URL: \w+, (\S+)$", text, re.MULTILINE)
    if not named or (repository is not None and not all(url.startswith(repository) for url in named)):
        raise SystemExit(f"{wheel.name}: names {', '.join(named) or 'no repository'}, expected {repository}")


def with_absolute_links(text: str, repository: str) -> str:
    """README with its links to files as links into the repository; pictures as raw files."""
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?://|#)([^)]+)\)", rf"\1{repository}/raw/main/\2)", text)
    return re.sub(r"((?<!!)\[[^\]]*\]\()(?!https?://|#)([^)]+)\)", rf"\1{repository}/blob/main/\2)", text)


def build(place: Path, repository: str | None, time: int) -> tuple[Path, Path]:
    """The wheel and the sdist, after the checks of those who take them.

    The wheel is made from the sdist that is published. What could differ from machine to machine does differ between
    two calls: the path, the umask of the tree, the time zone, the seed of hashes.

    Args:
        time: of the commit, in seconds: no file in a package is of another.
    """
    another = place.name == "another"
    changed = {"TZ": "Asia/Kathmandu" if another else "UTC", "PYTHONHASHSEED": "7" if another else "0"}
    env = {**os.environ, **changed, "SOURCE_DATE_EPOCH": str(time)}
    before = os.umask(0o077 if another else 0o022)
    try:
        export(place / "tree", repository)
        run(sys.executable, "-m", "build", "--sdist", "--outdir", place, place / "tree", env=env)
        [sdist] = place.glob("*.tar.gz")
        normalize(sdist, time)
        os.umask(0o022)  # setuptools makes files of the wheel with modes of the umask.
        with tarfile.open(sdist) as archive:
            archive.extractall(place, filter="data")
        run(sys.executable, "-m", "build", "--wheel", "--outdir", place, str(sdist)[: -len(".tar.gz")], env=env)
    finally:
        os.umask(before)
    [wheel] = place.glob("*.whl")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    run(sys.executable, "-m", "check_wheel_contents", "--toplevel", "relayout", wheel)
    return wheel, sdist


def normalize(sdist: Path, time: int) -> None:
    """Write an sdist anew, with nothing of the machine: setuptools keeps times, owners and modes, and zlib differs.

    Args:
        time: of each file, in seconds.
    """
    with tarfile.open(sdist) as archive:
        files = [(one, archive.extractfile(one)) for one in sorted(archive.getmembers(), key=lambda one: one.name)]
        contents = [(one, file.read() if file else b"") for one, file in files]
    with (
        gzip.GzipFile(sdist, "wb", compresslevel=9, mtime=time) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as out,
    ):
        for one, blob in contents:
            plain = tarfile.TarInfo(one.name)
            plain.type, plain.linkname, plain.size, plain.mtime = one.type, one.linkname, len(blob), time
            plain.mode = 0o755 if one.isdir() or one.mode & 0o100 else 0o644
            out.addfile(plain, io.BytesIO(blob))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make_index(folder: Path, wheel: Path, sdist: Path) -> str:
    """An index of packages as pip reads it (PEP 503), with these two; returns its address."""
    project = folder / NAME
    project.mkdir(parents=True)
    links = [f'<a href="{one.name}#sha256={digest(one)}">{one.name}</a>' for one in (wheel, sdist)]
    (project / "index.html").write_text("<!DOCTYPE html>" + "<br>".join(links))
    for one in (wheel, sdist):
        shutil.copy(one, project)
    return folder.as_uri()


def put(out: Path, *packages: Path) -> list[Path]:
    """Copy the packages to where the next step takes them from; older ones there go."""
    out.mkdir(parents=True, exist_ok=True)
    for old in (*out.glob("safetensors_relayout-*.whl"), *out.glob("safetensors_relayout-*.tar.gz")):
        old.unlink()
    return [Path(shutil.copy(package, out)) for package in packages]


def write_sbom(fresh: Fresh, path: Path, time: int) -> Path:
    """What an environment with relayout and its extras has, as CycloneDX, without what differs from call to call."""
    kept = ("-m", "cyclonedx_py", "environment", "--output-reproducible", "--output-file", path, fresh.venv)
    run(sys.executable, *kept, env={**os.environ, "SOURCE_DATE_EPOCH": str(time)})
    found = [one["name"] for one in json.loads(path.read_text())["components"]]
    if NAME not in found:
        raise SystemExit(f"{path}: lists {len(found)} components, expected {NAME} among them")
    print(f"sbom: {len(found)} components")
    return path


def write_provenance(path: Path, made: Sequence[Path], repository: str | None, commit: str) -> None:
    """From what, and by what, the files were made: an in-toto statement (v1) with a SLSA provenance (v1)."""
    [wheel] = (one for one in made if one.suffix == ".whl")
    with zipfile.ZipFile(wheel) as opened:
        [name] = (name for name in opened.namelist() if name.endswith(".dist-info/WHEEL"))
        generator = re.search(r"^Generator: (.*)$", opened.read(name).decode(), re.MULTILINE)
    assert generator is not None
    address = repository or "unpublished"
    statement: dict[str, Any] = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": one.name, "digest": {"sha256": digest(one)}} for one in made],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": f"{address}/blob/{commit}/tools/release.py",
                "externalParameters": {"repository": repository},
                "internalParameters": {"python": sys.version.split()[0], "generator": generator[1].strip()},
                "resolvedDependencies": [{"uri": f"git+{address}", "digest": {"gitCommit": commit}}],
            },
            "runDetails": {"builder": {"id": f"{address}/blob/{commit}/tools/run"}},
        },
    }
    path.write_text(json.dumps(statement, indent=1) + "\n")


def check_contents(wheel: Path, sdist: Path) -> None:
    """Everything of the package is in the wheel, nothing else is, and the sdist makes the same."""
    tracked = git("ls-files").split()
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


class Fresh:
    """An environment of its own, into which relayout is installed by name from a local index."""

    def __init__(self, folder: Path, interpreter: str, index: str, wheel: Path) -> None:
        folder.mkdir()
        self.folder, self.venv, self._index, self._wheel = folder, folder / "venv", index, wheel
        run(interpreter, "-m", "venv", self.venv)

    def __call__(self, program: str, *words: object) -> str:
        """Run one of its programs, and return what it prints; end with that if it fails."""
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        command = [str(self.venv / "bin" / program), *map(str, words)]
        done = subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)[:200]}: {done.stdout}{done.stderr}")
        return done.stdout

    def install(self, extras: str = "", *versions: str) -> None:
        """Install relayout by name, of the wheel's version, and see that it was this wheel that came."""
        version, report = self._wheel.name.split("-")[1], self.folder / "report.json"
        options = ("--quiet", "--extra-index-url", self._index, "--report", report)
        self("python", "-m", "pip", "install", *options, f"{NAME}{extras}=={version}", *versions)
        came = {one["metadata"]["name"]: one["download_info"] for one in json.loads(report.read_text())["install"]}
        if NAME in came and came[NAME]["archive_info"]["hashes"]["sha256"] != digest(self._wheel):
            raise SystemExit(f"{NAME} came from {came[NAME]['url']}, expected the wheel of {self._index}")


def use(fresh: Fresh, *, with_torch: bool, versions: Sequence[str] = ()) -> None:
    """Install, and do what README says.

    Args:
        versions: of what it depends on; with them, do what needs the oldest of them, too.
    """
    fresh.install("", *versions)
    fresh("python", "-c", EVERYDAY)
    for words in ("inspect model", "convert model --tp 2", "verify model-tp2 --source model"):
        print("$ relayout", words, "\n" + fresh("relayout", *words.split()).split("\n\n")[0].rstrip())
    fresh("relayout", "restore", "model-tp2", "-o", "back")
    here = fresh.folder
    if (here / "back" / "model.safetensors").read_bytes() != (here / "model" / "model.safetensors").read_bytes():
        raise SystemExit("restore wrote other bytes")
    use_golden(fresh)
    if versions:
        fresh("python", "-c", LOWEST, ROOT / "tests")
        print(f"works with {', '.join(versions)}")
    print(fresh("python", "--version").strip(), fresh("relayout", "--version").strip(), sep=", ")
    if with_torch:
        fresh.install("[torch]")
        print(fresh("python", "-c", LOAD).strip())


def use_golden(fresh: Fresh) -> None:
    """Read the folders that were written before, which each release must, and write their rank files again."""
    golden = Path(shutil.copytree(ROOT / GOLDEN, fresh.folder / "golden"))
    for layout in ("ranks", "whole"):
        fresh("relayout", "verify", golden / layout, "--source", golden / "source")
        options = ("--tp", "2", "--align", "512", "--plan", golden / "plan.toml", "--layout", layout)
        fresh("relayout", "convert", golden / "source", "-o", golden / "again", *options)
        written = sorted(path.name for path in (golden / layout).glob("*.s*") if "-part-" in path.name)
        for name in written:
            if (golden / "again" / name).read_bytes() != (golden / layout / name).read_bytes():
                raise SystemExit(f"{GOLDEN}/{layout}/{name}: converted again, its source gives other bytes")
        if not written:
            raise SystemExit(f"{GOLDEN}/{layout}: has no rank files")
        shutil.rmtree(golden / "again")
    fresh("relayout", "steps", golden / "steps", "--check")


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def run(*words: object, env: dict[str, str] | None = None) -> None:
    """Run a command; end with its name if it fails."""
    if subprocess.run([str(word) for word in words], stdin=subprocess.DEVNULL, env=env).returncode:
        raise SystemExit(f"failed: {' '.join(map(str, words))}")


if __name__ == "__main__":
    main()
